"""timm's ViTs and CNNs, loaded without being told what they are, and written back."""

from __future__ import annotations

import json

import numpy as np
import pytest
import timm
import torch
from safetensors.torch import save_file

import vision_attn as va
from vision_attn.checkpoints import layouts
from vision_attn.checkpoints.load import open_checkpoint
from vision_attn.checkpoints.peers import same_sizes, write_for
from vision_attn.checkpoints.resample import resample_patches
from vision_attn.errors import UserError
from vision_attn.models import model_defaults

SMALL = {"img_size": 35, "patch_size": 7, "embed_dim": 33, "num_heads": 3, "depth": 2, "num_classes": 11}


def vit(name: str = "vit_tiny_patch16_224", **options):
    return timm.create_model(name, **{**SMALL, **options})


def images(height: int = 35, width: int = 35, chans: int = 3):
    return torch.randn(2, chans, height, width)


VITS = [
    ("vit_tiny_patch16_224", {}, {}),
    ("vit_tiny_patch16_224", {"reg_tokens": 2}, {"reg_tokens": 2}),
    ("vit_tiny_patch16_224", {"reg_tokens": 4, "no_embed_class": True}, {"no_embed_class": True}),
    ("vit_tiny_patch16_224", {"qkv_bias": False, "in_chans": 1}, {"qkv_bias": False, "in_chans": 1}),
    ("vit_tiny_patch16_224", {"pos_embed": "none"}, {"attention": {"position": "none"}}),
    ("vit_tiny_patch16_224", {"global_pool": "avg"}, {"global_pool": "avg"}),
    ("deit_tiny_patch16_224", {}, {}),
    ("deit_tiny_distilled_patch16_224", {}, {"distilled": True}),
    ("deit3_small_patch16_224", {}, {"no_embed_class": True}),
    ("vit_base_patch32_clip_224", {}, {"pre_norm": True, "norm_eps": 1e-5}),
    ("vit_giant_patch14_dinov2", {}, {"mlp": "swiglu"}),
    ("vit_giant_patch14_reg4_dinov2", {}, {"mlp": "swiglu", "reg_tokens": 4}),
    ("vit_medium_patch16_gap_256", {}, {"global_pool": "avg", "class_token": False}),
    ("vit_medium_patch16_reg4_gap_256", {}, {}),
    ("vit_base_patch16_224", {"mlp_ratio": 2.7}, {}),
]


@pytest.mark.parametrize(("name", "options", "shows"), VITS)
def test_vits_load_and_go_back(name, options, shows, foreign, tmp_path):
    peer = vit(name, **options)
    x = images(chans=options.get("in_chans", 3))
    size = {"img_size": 35} if "pos_embed" in options else {}  # without positions, nothing tells it
    ours = foreign.loads_like(peer, tmp_path, x, num_heads=3, **size)
    args = {**model_defaults(ours.config["name"]), **ours.config["args"]}
    assert {key: args[key] for key in shows} == shows
    # and back: into timm's model of that name, and into the one that is built from the sizes
    file, _ = write_for(ours.float(), tmp_path / "back.safetensors", "timm")
    again = vit(name, **options)
    again.load_state_dict(_read(file), strict=True)
    foreign.same(ours, again, x)
    built, _ = same_sizes(open_checkpoint(va.save_model(ours.float(), tmp_path / "ours")), ours, "timm")
    foreign.same(ours, built, x)


def _read(file):
    from vision_attn.checkpoints import read_state_dict

    return read_state_dict(file)[0]


def test_heads_come_from_the_tensors_the_width_the_name_or_the_caller(foreign, tmp_path):
    peer = foreign.shaken(vit(qk_norm=True))
    torch.save(peer.state_dict(), tmp_path / "a.pth")
    foreign.same(foreign.quietly(tmp_path / "a.pth"), peer, images())  # the norms are as wide as a head
    peer = foreign.shaken(vit(embed_dim=128, num_heads=2))
    torch.save(peer.state_dict(), tmp_path / "b.pth")
    with pytest.warns(
        UserWarning, match=r"b\.pth, a ViT of timm, .*assumed: 2 heads, as is usual for width 128.*name="
    ):
        ours = va.load_model(tmp_path / "b.pth")
    foreign.same(ours, peer, images())
    assert ours.config["extra"]["assumed"][0].startswith("2 heads")
    peer = foreign.shaken(vit())
    torch.save(peer.state_dict(), tmp_path / "c.pth")
    with pytest.raises(UserError, match=r"c\.pth: its layers are 33 wide.*num_heads=… \(--heads\)"):
        va.load_model(tmp_path / "c.pth")
    with pytest.raises(UserError, match="5 heads do not divide the width 33"):
        va.load_model(tmp_path / "c.pth", num_heads=5)
    for name in ("vit_tiny_patch16_224", "deit_tiny_patch16_224.fb_in1k"):
        foreign.same(va.load_model(tmp_path / "c.pth", name=name), peer, images())
    with pytest.raises(UserError, match=r"unknown model 'vit_tiny_patch17_224'\. Did you mean vit_tiny_patch16_224"):
        va.load_model(tmp_path / "c.pth", name="vit_tiny_patch17_224")


@pytest.mark.parametrize("name", ["vit_base_patch32_clip_quickgelu_224", "vit_base_patch32_siglip_gap_256"])
def test_a_name_tells_what_no_tensor_shows(name, foreign, tmp_path):
    peer = foreign.shaken(timm.create_model(name, **{**SMALL, "embed_dim": 36, "num_heads": 12}))
    torch.save(peer.state_dict(), tmp_path / "w.pth")
    ours = va.load_model(tmp_path / "w.pth", name=name)
    foreign.same(ours, peer, images())
    assert ours.config["args"]["act"] == ("quick_gelu" if "quick" in name else "gelu_tanh")


@pytest.mark.parametrize(
    "wrap", ["state_dict", "model", "model_ema", "module.", "_orig_mod.", "module._orig_mod.", "model."]
)
@pytest.mark.parametrize("suffix", [".pth", ".bin", ".safetensors"])
def test_wrappers(wrap, suffix, foreign, tmp_path):
    peer = foreign.shaken(vit())
    state = {f"{wrap}{k}" if wrap.endswith(".") else k: v for k, v in peer.state_dict().items()}
    file = tmp_path / f"w{suffix}"
    if suffix == ".safetensors":
        save_file(state, file)
    else:
        torch.save(state if wrap.endswith(".") else {"epoch": 3, wrap: state}, file)
    foreign.same(foreign.quietly(file, num_heads=3), peer, images())


def test_averaged_weights_are_preferred_and_the_file_may_name_its_model(foreign, tmp_path):
    peer = foreign.shaken(vit(), seed=1)
    other = foreign.shaken(vit(), seed=2).state_dict()
    averaged = {f"module.{k}": v for k, v in peer.state_dict().items()} | {"n_averaged": torch.tensor(5)}
    torch.save({"model": other, "model_ema": averaged, "arch": "vit_tiny_patch16_224"}, tmp_path / "w.pth")
    foreign.same(va.load_model(tmp_path / "w.pth"), peer, images())
    lightning = {
        "pytorch-lightning_version": "2.5",
        "state_dict": {f"model.{k}": v for k, v in peer.state_dict().items()},
    }
    torch.save(lightning, tmp_path / "theirs.ckpt")  # somebody else's Lightning run
    foreign.same(foreign.quietly(tmp_path / "theirs.ckpt", num_heads=3), peer, images())


def test_timm_folder_with_its_config(foreign, tmp_path):
    peer = foreign.shaken(vit(num_classes=3))
    save_file({k: v.contiguous() for k, v in peer.state_dict().items()}, tmp_path / "model.safetensors")
    settings = {"input_size": [3, 35, 35], "mean": [0.1, 0.2, 0.3], "std": [0.4, 0.5, 0.6], "crop_pct": 0.9}
    config = {"architecture": "vit_tiny_patch16_224", "num_classes": 3, "pretrained_cfg": settings}
    (tmp_path / "config.json").write_text(json.dumps({**config, "label_names": ["a", "b", "c"]}))
    ours = va.load_model(tmp_path)  # nothing to assume: no warning
    foreign.same(ours, peer, images())
    assert ours.config["labels"] == ["a", "b", "c"]
    assert ours.config["preprocess"] == {
        "size": [35, 35],
        "mean": [0.1, 0.2, 0.3],
        "std": [0.4, 0.5, 0.6],
        "interpolation": "bilinear",
        "crop_pct": 0.9,
    }
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(UserError, match=r"config\.json is not valid JSON"):
        va.load_model(tmp_path)


def test_timm_folder_with_arguments_of_the_model(foreign, tmp_path):
    options = {"num_classes": 3, "embed_dim": 36, "num_heads": 6, "act_layer": "gelu_tanh"}
    peer = foreign.shaken(vit(**options, global_pool="avg", fc_norm=False))
    save_file({k: v.contiguous() for k, v in peer.state_dict().items()}, tmp_path / "model.safetensors")
    args = {"num_heads": 6, "act_layer": "gelu_tanh", "checkpoint_path": "/etc/passwd", "depth": 10**9}
    config = {"architecture": "vit_tiny_patch16_224", "model_args": args, "global_pool": "avg"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    foreign.same(foreign.quietly(tmp_path), peer, images())  # nothing else of it is looked at


def test_other_image_sizes_are_resampled_as_timm_does(foreign, tmp_path):
    peer = foreign.shaken(vit(reg_tokens=2, dynamic_img_size=True))
    torch.save(peer.state_dict(), tmp_path / "w.pth")
    ours = foreign.quietly(tmp_path / "w.pth", num_heads=3, img_size=(49, 21))
    assert ours.config["args"]["img_size"] == [49, 21]
    assert ours.config["preprocess"]["size"] == [49, 21]
    x = images(49, 21).double()
    torch.testing.assert_close(ours.double()(x), peer(x), rtol=1e-5, atol=1e-5)  # timm resamples in float32


def test_other_patch_sizes_are_resampled_as_timm_does(foreign, tmp_path):
    from timm.layers import resample_patch_embed

    peer = foreign.shaken(vit())
    weight = peer.patch_embed.proj.weight.detach()
    for size in ((5, 5), (9, 11), (7, 7)):
        theirs = resample_patch_embed(weight.float(), list(size))
        torch.testing.assert_close(resample_patches(weight, size), theirs.double(), rtol=1e-3, atol=1e-4)
    torch.save(peer.state_dict(), tmp_path / "w.pth")
    ours = foreign.quietly(tmp_path / "w.pth", num_heads=3, patch_size=5)
    assert ours.patch_embed.proj.weight.shape[-2:] == (5, 5)
    assert ours.pos_embed.shape[1] == 50  # 7 × 7 patches of the same image, and the class token
    assert ours(images()).isfinite().all()


def test_grids_that_are_no_square(foreign, tmp_path):
    peer = foreign.shaken(vit(img_size=(35, 63)))
    torch.save(peer.state_dict(), tmp_path / "w.pth")
    with pytest.raises(
        UserError, match=r"46 positions are no square grid of patches of 7×7.*img_size=… \(--img_size\)"
    ):
        foreign.quietly(tmp_path / "w.pth", num_heads=3)
    ours = foreign.quietly(tmp_path / "w.pth", num_heads=3, img_size=(35, 63))
    foreign.same(ours, peer, images(35, 63))


def test_heads_of_classes_are_replaced_or_added(foreign, tmp_path):
    peer = foreign.shaken(vit("deit_tiny_distilled_patch16_224"))
    torch.save(peer.state_dict(), tmp_path / "w.pth")
    with pytest.warns(
        UserWarning, match=r"trained for 11 classes: the head \(head.weight, head.bias, head_dist.weight"
    ):
        ours = va.load_model(tmp_path / "w.pth", num_heads=3, num_classes=5)
    assert ours(images()).shape == (2, 5)
    torch.testing.assert_close(ours.double().forward_features(images().double()).shape, torch.Size([2, 27, 33]))
    torch.save(vit(num_classes=0).state_dict(), tmp_path / "features.pth")
    with pytest.raises(
        UserError, match=r"features\.pth has no head: it gives features.*num_classes=… \(--num_classes\)"
    ):
        foreign.quietly(tmp_path / "features.pth", num_heads=3)
    with pytest.warns(UserWarning, match=r"has no head: a fresh one \(head.weight, head.bias\) was added for 5"):
        assert va.load_model(tmp_path / "features.pth", num_heads=3, num_classes=5)(images()).shape == (2, 5)


def test_what_our_vit_has_no_place_for_is_named(foreign, tmp_path):
    torch.save(vit(class_token=False, global_pool="map").state_dict(), tmp_path / "w.pth")
    with pytest.raises(UserError, match=r"looks like a ViT of timm, but our ViT has no place for \d+ .*attn_pool"):
        va.load_model(tmp_path / "w.pth", num_heads=3)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"attention": {"score": "cosine"}}, "timm's ViT has no attention with score='cosine'"),
        ({"attention": {"position": "rope"}, "embed_dim": 24}, "no attention with position='rope'"),
        ({"attention": {"pattern": "window", "window": 2}}, "no attention with pattern='window'"),
        ({"global_pool": "attention"}, r"no place for pool\.query"),
    ],
)
def test_what_timm_has_no_place_for_is_named(options, message, tmp_path):
    model = va.create_model("vit_tiny_patch16_224", **{**SMALL, **options})
    with pytest.raises(UserError, match=message):
        write_for(model, tmp_path / "w.pth", "timm")
    assert not (tmp_path / "w.pth").exists()


def test_unknown_peers_and_files_are_refused(tmp_path):
    model = va.create_model("cct_2_3x2_32")
    with pytest.raises(UserError, match=r"timm has no model like cct_2_3x2_32.*only kept in our own format"):
        write_for(model, tmp_path / "w.pth", "timm")
    with pytest.raises(UserError, match="unknown library 'keras'; there are: timm, transformers, torchvision"):
        layouts.of_peer(model, "keras")
    with pytest.raises(UserError, match=r"what kind of file is \.h5"):
        write_for(va.create_model("vit_tiny_patch16_224", **SMALL), tmp_path / "w.h5", "timm")


def test_googles_npz(foreign, tmp_path):
    """timm reads Google's files too: the same arrays must give the same model."""
    rng = np.random.default_rng(0)
    width, heads, hidden = 24, 3, 40
    arrays = {
        "cls": (1, 1, width),
        "embedding/kernel": (5, 5, 3, width),
        "embedding/bias": (width,),
        "Transformer/posembed_input/pos_embedding": (1, 10, width),
        "Transformer/encoder_norm/scale": (width,),
        "Transformer/encoder_norm/bias": (width,),
        "head/kernel": (width, 7),
        "head/bias": (7,),
    }
    for i in range(2):
        block = f"Transformer/encoderblock_{i}"
        for word in ("query", "key", "value"):
            arrays[f"{block}/MultiHeadDotProductAttention_1/{word}/kernel"] = (width, heads, width // heads)
            arrays[f"{block}/MultiHeadDotProductAttention_1/{word}/bias"] = (heads, width // heads)
        arrays[f"{block}/MultiHeadDotProductAttention_1/out/kernel"] = (heads, width // heads, width)
        arrays[f"{block}/MultiHeadDotProductAttention_1/out/bias"] = (width,)
        for norm in ("LayerNorm_0", "LayerNorm_2"):
            arrays |= {f"{block}/{norm}/scale": (width,), f"{block}/{norm}/bias": (width,)}
        arrays |= {f"{block}/MlpBlock_3/Dense_0/kernel": (width, hidden), f"{block}/MlpBlock_3/Dense_0/bias": (hidden,)}
        arrays |= {f"{block}/MlpBlock_3/Dense_1/kernel": (hidden, width), f"{block}/MlpBlock_3/Dense_1/bias": (width,)}
    arrays = {key: rng.normal(0, 0.3, shape).astype(np.float32) for key, shape in arrays.items()}
    np.savez(tmp_path / "w.npz", **arrays)
    sizes = {"img_size": 15, "patch_size": 5, "embed_dim": width, "num_heads": heads, "depth": 2, "num_classes": 7}
    peer = timm.create_model("vit_tiny_patch16_224", **sizes, mlp_ratio=hidden / width)
    peer.load_pretrained(str(tmp_path / "w.npz"))
    ours = va.load_model(tmp_path / "w.npz")
    foreign.same(ours, peer, images(15, 15))
    np.savez_compressed(tmp_path / "z.npz", **arrays)
    with pytest.raises(UserError, match=r"z\.npz is compressed; save it again with numpy\.savez"):
        va.load_model(tmp_path / "z.npz")
    np.savez(tmp_path / "o.npz", **{"embedding/kernel": np.array([{"a": 1}], dtype=object)})
    with pytest.raises(UserError, match=r"o\.npz: embedding/kernel is no array of 1 numbers"):
        va.load_model(tmp_path / "o.npz")


@pytest.mark.parametrize("name", ["resnet18", "mobilenetv3_small_050", "regnetx_002", "convnext_atto"])
def test_cnns_are_recognised_by_their_tensors(name, foreign, tmp_path):
    peer = timm.create_model(name, num_classes=7)
    ours = foreign.loads_like(peer, tmp_path, images(64, 64))
    assert ours.config["name"] == name
    file, _ = write_for(ours.float(), tmp_path / "back.pth", "timm")
    peer.load_state_dict(_read(file), strict=True)
    with pytest.warns(UserWarning, match="trained for 7 classes"):
        assert va.load_model(tmp_path / "theirs.pth", num_classes=3, name=name)(images(64, 64)).shape == (2, 3)


def test_cnns_with_the_same_tensors_are_told_apart_by_name(foreign, tmp_path):
    peer = foreign.shaken(timm.create_model("tf_efficientnet_b0", num_classes=7))
    torch.save(peer.state_dict(), tmp_path / "w.pth")
    with pytest.raises(UserError, match=r"CNNs of timm that compute different things \(.*name=… \(--name\)"):
        foreign.quietly(tmp_path / "w.pth")
    ours = va.load_model(tmp_path / "w.pth", name="tf_efficientnet_b0")
    foreign.same(ours, peer, images(64, 64))
    torch.save(peer.state_dict(), tmp_path / "tf_efficientnet_b0_ns-c0e6a31c.pth")
    assert foreign.quietly(tmp_path / "tf_efficientnet_b0_ns-c0e6a31c.pth").config["name"] == "tf_efficientnet_b0"
    with pytest.raises(UserError, match=r"holds a .*efficientnet_b0 or the like, not a resnet18"):
        va.load_model(tmp_path / "w.pth", name="resnet18")
