"""Backbones take weights that fit, say so where they do not, and take images of any size."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import save_file

import vision_attn as va
from vision_attn.attention import resample_grid
from vision_attn.errors import UserError
from vision_attn.models import model_from_config
from vision_attn.models.backbones import make_backbone

timm = pytest.importorskip("timm")

VIT = {"patch_size": 8, "embed_dim": 24, "num_heads": 3, "depth": 1}
SWIN = {"embed_dim": 12, "depths": (1, 1, 2, 1), "num_heads": (1, 2, 3, 4), "window_size": 4}
TIMMS = {
    "resnet10t": {},  # its stem is a Sequential
    "test_convnext": {},  # its names are flattened in a backbone
    "test_efficientnet": {},  # its backbone is another class
    "test_vit": {},  # its backbone is wrapped
    "swin_tiny_patch4_window7_224": SWIN,
}


def shaken(model, seed=3):
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for value in model.state_dict().values():
            if value.is_floating_point():
                value.add_(0.05 * torch.rand(value.shape, generator=generator))
    return model.eval()


def whole(name, **options):
    return shaken(timm.create_model(name, num_classes=7, **{**TIMMS[name], **options}))


@pytest.mark.parametrize("kind", ["pth", "safetensors", "state_dict"])
@pytest.mark.parametrize("name", TIMMS)
def test_a_file_of_the_whole_network_fills_timms_backbone(name, kind, tmp_path):
    model = whole(name)
    path = tmp_path / f"weights.{'safetensors' if kind == 'safetensors' else 'pth'}"
    if kind == "safetensors":
        save_file(model.state_dict(), path)
    else:
        torch.save({"state_dict": model.state_dict()} if kind == "state_dict" else model.state_dict(), path)
    before = torch.random.get_rng_state()
    make_backbone(f"timm:{name}", options=TIMMS[name])
    expected = torch.rand(3)
    torch.random.set_rng_state(before)
    backbone = make_backbone(f"timm:{name}", options=TIMMS[name], weights=path).eval()
    torch.testing.assert_close(torch.rand(3), expected, rtol=0, atol=0)  # weights leave other draws where they were
    side = 160 if name == "test_vit" else 224
    x = torch.randn(2, 3, side, side, dtype=torch.float64)
    with torch.no_grad():
        found = backbone.double()(x)
        theirs = model.double().forward_intermediates(x, intermediates_only=True, norm=False)[-1]
    torch.testing.assert_close(found, theirs, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", TIMMS)
def test_a_file_that_does_not_fill_timms_backbone_is_refused(name, tmp_path):
    """Another network, one whose tensors have other shapes, one with a tensor too few: nothing is left as drawn."""
    state = whole(name).state_dict()
    keys = [
        key
        for key, value in state.items()
        if value.ndim > 1 and not key.startswith(("head", "fc", "class", "conv_head"))
    ]
    others = {
        "other": timm.create_model("test_resnet", num_classes=7).state_dict(),
        "fewer": {key: value for key, value in state.items() if key != keys[-1]},
        "narrow": {**state, keys[-1]: state[keys[-1]][:1]},
        "empty": {"x": torch.zeros(3)},
    }
    for kind, content in others.items():
        torch.save(content, tmp_path / f"{kind}.pth")
        with pytest.raises(UserError, match=rf"{kind}\.pth does not fit the backbone timm's {name}: ") as caught:
            make_backbone(f"timm:{name}", options=TIMMS[name], weights=tmp_path / f"{kind}.pth")
        assert len(str(caught.value).splitlines()) <= 2


@pytest.mark.parametrize("name", ["timm:resnet10t", "resnet18", "vit_tiny_patch16_224"])
@pytest.mark.parametrize("suffix", ["pth", "safetensors"])
def test_files_that_are_none_are_named(name, suffix, tmp_path):
    class Own:
        pass

    (tmp_path / f"garbage.{suffix}").write_bytes(b"\x80\x02no checkpoint\xff" * 9)
    (tmp_path / f"empty.{suffix}").write_bytes(b"")
    torch.save({"state_dict": "words"}, tmp_path / "words.pth")
    torch.save(torch.zeros(3), tmp_path / "tensor.pth")
    for path in (f"missing.{suffix}", f"garbage.{suffix}", f"empty.{suffix}", "words.pth", "tensor.pth"):
        with pytest.raises(UserError, match=rf"backbone_weights=.*{path} (cannot be read|holds no table)") as caught:
            make_backbone(name, weights=tmp_path / path)
        assert len(str(caught.value).splitlines()) <= 2


def test_grey_images_take_timms_weights_of_colour(tmp_path):
    model = whole("resnet10t")
    torch.save(model.state_dict(), tmp_path / "w.pth")
    backbone = make_backbone("timm:resnet10t", in_chans=1, weights=tmp_path / "w.pth").eval()
    grey = torch.randn(2, 1, 45, 67)
    with torch.no_grad():
        expected = model.forward_features(grey.expand(-1, 3, -1, -1))
        torch.testing.assert_close(backbone(grey), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", TIMMS)
@pytest.mark.parametrize("size", [(48, 80), (53, 77), (33, 97)])
def test_timms_backbones_take_images_of_any_size(name, size):
    backbone = shaken(make_backbone(f"timm:{name}", options=TIMMS[name]))
    with torch.no_grad():
        found, wider = backbone(torch.randn(2, 3, *size)), backbone(torch.randn(1, 3, size[0], size[1] + 64))
    rows, columns = (-(-side // backbone.stride) for side in size)
    assert found.shape[:2] == (2, backbone.channels)
    if name != "test_convnext":  # which leaves out what does not fill a token
        assert found.shape[2:] == (rows, columns)
    assert wider.shape[1:3] == found.shape[1:3]
    assert wider.shape[3] > found.shape[3]


def test_maps_with_channels_last_are_told_by_what_timm_says():
    """Not by their shape: here the map is as high as it has channels."""
    options = {**SWIN, "embed_dim": 3, "num_heads": (1, 1, 1, 1), "depths": (1, 1, 1, 1)}
    backbone = make_backbone("timm:swin_tiny_patch4_window7_224", options=options).eval()
    assert backbone.channels == 24
    with torch.no_grad():
        assert backbone(torch.randn(1, 3, 24 * 32, 64)).shape == (1, 24, 24, 2)


def test_a_net_of_one_size_says_so():
    backbone = make_backbone("timm:test_vit", options={"dynamic_img_size": False})
    with pytest.raises(UserError, match=r"timm's test_vit does not take images of 48 × 80: .*img_size") as caught:
        backbone(torch.randn(1, 3, 48, 80))
    assert len(str(caught.value).splitlines()) <= 2


def test_options_that_timm_does_not_take_are_named():
    with pytest.raises(UserError, match="wdth"):
        make_backbone("timm:resnet10t", options={"wdth": 3})


# -- of this zoo ------------------------------------------------------------------------------------


def test_positions_of_another_image_size_are_resampled(tmp_path):
    vit = shaken(va.create_model("vit_tiny_patch16_224", num_classes=3, img_size=(40, 56), **VIT))
    va.save_model(vit, tmp_path / "vit")
    for path in (tmp_path / "vit", tmp_path / "vit" / "model.safetensors"):
        body = make_backbone("vit_tiny_patch16_224", img_size=(64, 24), options=VIT, weights=path).body
        prefix = body.embedded_prefix
        expected = resample_grid(vit.pos_embed, (5, 7), (8, 3), prefix)  # not square: as its configuration says
        torch.testing.assert_close(body.pos_embed, expected)
        torch.testing.assert_close(body.blocks[0].attn.qkv.weight, vit.blocks[0].attn.qkv.weight)
    square = shaken(va.create_model("vit_tiny_patch16_224", num_classes=3, img_size=40, **VIT))
    torch.save(square.state_dict(), tmp_path / "square.pth")
    body = make_backbone("vit_tiny_patch16_224", img_size=(64, 24), options=VIT, weights=tmp_path / "square.pth").body
    torch.testing.assert_close(body.pos_embed, resample_grid(square.pos_embed, (5, 5), (8, 3), body.embedded_prefix))


def test_relative_biases_of_another_window_are_resampled(tmp_path):
    small = {"embed_dim": 12, "depths": [1, 1, 1], "num_heads": [1, 2, 3]}
    swin = shaken(va.create_model("swin_cifar_tiny", num_classes=3, **small))
    va.save_model(swin, tmp_path / "swin")
    key = next(key for key in swin.state_dict() if key.endswith("position.table"))
    window = swin.get_submodule(key.removesuffix(".table")).grid[0]
    options = {**small, "window_size": window + 1}
    body = make_backbone(
        "swin_cifar_tiny", img_size=(16 * (window + 1),) * 2, options=options, weights=tmp_path / "swin"
    ).body
    assert body.state_dict()[key].shape[0] == (2 * window + 1) ** 2
    found, given = body.state_dict()[key].view(2 * window + 1, -1), swin.state_dict()[key].view(2 * window - 1, -1)
    torch.testing.assert_close(found.mean(), given.mean(), rtol=0.05, atol=0.02)


def test_other_peoples_layouts_of_a_vit_are_told_how_to_get_in(tmp_path):
    torch.save({"vit.encoder.layer.0.attention.query.weight": torch.zeros(24, 24)}, tmp_path / "w.pth")
    with pytest.raises(UserError, match=r"vision-attn convert FILE FOLDER") as caught:
        make_backbone("vit_tiny_patch16_224", img_size=(32, 32), options=VIT, weights=tmp_path / "w.pth")
    assert len(str(caught.value).splitlines()) <= 2


@pytest.mark.parametrize("options", [{}, {"norm": "batch"}])
def test_a_rebuilt_detector_has_the_norms_of_the_first(options, tmp_path):
    """Which weights of the backbone decided, though no configuration of a saved model names them."""
    torch.save(whole("resnet10t").state_dict(), tmp_path / "w.pth")
    small = {"embed_dim": 24, "num_heads": 3, "enc_layers": 1, "dec_layers": 1, "num_queries": 5, "num_classes": 3}
    small |= {"backbone": "timm:resnet10t", "backbone_options": options}
    model = va.create_model("detr_resnet50", **small, backbone_weights=str(tmp_path / "w.pth"))
    again = va.load_model(va.save_model(model, tmp_path / "model"))
    for built in (model, again, model_from_config(model.config)):
        norms = [m for m in built.backbone.modules() if isinstance(m, torch.nn.BatchNorm2d)]
        assert bool(norms) == bool(options)
    assert again.config["args"]["backbone_options"] == {"norm": "frozen", **options}
    plain = va.create_model("detr_resnet50", **small)
    assert plain.config["args"]["backbone_options"] == options
