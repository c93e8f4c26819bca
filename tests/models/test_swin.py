"""Swin Transformers against timm, torchvision and transformers, at sizes that fit and at sizes that do not."""

from __future__ import annotations

import json

import pytest
import torch
from timm.models.swin_transformer import SwinTransformer as TimmSwin
from timm.models.swin_transformer_v2 import SwinTransformerV2 as TimmSwinV2
from torchvision.models import swin_transformer as tv

import vision_attn as va
from vision_attn.attention import Attention, Layout
from vision_attn.attention.continuous import ContinuousBias
from vision_attn.attention.windows import _kept_fold
from vision_attn.checkpoints import swin_names
from vision_attn.errors import UserError
from vision_attn.layers.windows import PatchMerging, WindowLayer, WindowPadding
from vision_attn.models import model_from_config
from vision_attn.models.profile import count_macs
from vision_attn.models.swin import SwinTransformer

SIZES = {"patch_size": 2, "embed_dim": 12, "depths": (2, 2), "num_heads": (2, 3), "window_size": 4, "num_classes": 5}
IMAGES = [  # height, width in pixels, of patches of 2 and windows of 4: grids of the first stage
    (16, 32),  # 8 × 16: whole windows, and one window of 4 × 4 rows in the second
    (20, 22),  # 10 × 11: filled up to 12 × 12, an odd row to merge
    (12, 28),  # 6 × 14; in the second stage 3 × 7: fewer rows than a window
    (6, 4),  # 3 × 2: less than a window from the start
]


def randomised(module):
    """Every parameter random, temperatures moderate; the peers' heads, norms and biases are zero or one otherwise."""
    with torch.no_grad():
        for name, p in module.named_parameters():
            p.copy_(0.3 * torch.randn_like(p))
            if "norm" in name and name.endswith("weight"):
                p.add_(1.0)
            if "logit_scale" in name:
                p.add_(1.5)
    return module.double().eval()


def compare(ours, theirs, image, state_to_ours, call=lambda model, x: model(x)):
    """Logits, and the gradients of images and of every parameter, carried over by the names of the tensors."""
    ours.load_state_dict(state_to_ours(theirs.state_dict()))
    ours.double().eval()
    x = torch.randn(2, 3, *image, dtype=torch.double)
    a, b = x.clone().requires_grad_(), x.clone().requires_grad_()
    got, want = ours(a), call(theirs, b)
    torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-9)
    weight = torch.randn_like(got)
    (got * weight).sum().backward()
    (want * weight).sum().backward()
    torch.testing.assert_close(a.grad, b.grad, rtol=1e-8, atol=1e-9)
    buffers = {name: torch.zeros_like(value) for name, value in theirs.named_buffers()}
    gradients = {name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in theirs.named_parameters()}
    expected = state_to_ours({**buffers, **gradients})
    for name, p in ours.named_parameters():
        torch.testing.assert_close(
            p.grad, expected[name], rtol=1e-8, atol=1e-8, msg=lambda m, name=name: f"{name}: {m}"
        )


@pytest.mark.parametrize("image", IMAGES)
@pytest.mark.parametrize("version", [1, 2])
def test_timm(image, version):
    theirs = randomised((TimmSwin if version == 1 else TimmSwinV2)(img_size=image, **SIZES))
    ours = SwinTransformer(img_size=image, **SIZES, version=version, borders="timm")
    compare(ours, theirs, image, swin_names.from_timm)


@pytest.mark.parametrize("image", IMAGES)
@pytest.mark.parametrize("version", [1, 2])
def test_torchvision(image, version):
    two = {"block": tv.SwinTransformerBlockV2, "downsample_layer": tv.PatchMergingV2} if version == 2 else {}
    sizes = {**SIZES, "patch_size": [2, 2], "window_size": [4, 4]}
    theirs = randomised(tv.SwinTransformer(**sizes, stochastic_depth_prob=0.0, **two))
    ours = SwinTransformer(img_size=image, **SIZES, version=version, borders="torchvision")
    compare(ours, theirs, image, swin_names.from_torchvision)


def of_transformers(version: int, size: int):
    hf = pytest.importorskip("transformers")
    sizes = {key: value for key, value in SIZES.items() if key != "num_classes"}
    kind = (hf.SwinConfig, hf.SwinForImageClassification)
    if version == 2:
        kind = (hf.Swinv2Config, hf.Swinv2ForImageClassification)
    config = kind[0](image_size=size, num_labels=5, drop_path_rate=0.0, layer_norm_eps=1e-5, **sizes)
    return randomised(kind[1](config))


@pytest.mark.parametrize("size", [16, 32, 20])
@pytest.mark.parametrize("version", [1, 2])
def test_transformers(version, size):
    ours = SwinTransformer(img_size=size, **SIZES, version=version)
    compare(ours, of_transformers(version, size), (size, size), swin_names.from_transformers, lambda m, x: m(x).logits)


def test_transformers_v2_with_a_window_larger_than_the_map():
    ours = SwinTransformer(img_size=12, **SIZES, version=2)
    compare(ours, of_transformers(2, 12), (12, 12), swin_names.from_transformers, lambda m, x: m(x).logits)


def test_windows_of_training_divide_the_offsets():
    theirs = randomised(TimmSwinV2(img_size=32, **SIZES, pretrained_window_sizes=(3, 2)))
    ours = SwinTransformer(img_size=32, **SIZES, version=2, pretrained_window_sizes=(3, 2), borders="timm")
    compare(ours, theirs, (32, 32), swin_names.from_timm)


@pytest.mark.parametrize("version", [1, 2])
def test_names_there_and_back(version):
    ours = SwinTransformer(img_size=32, **SIZES, version=version)
    state = ours.state_dict()
    for to, back in (
        (swin_names.to_timm, swin_names.from_timm),
        (swin_names.to_torchvision, swin_names.from_torchvision),
        (lambda s: swin_names.to_transformers(s, version=version), swin_names.from_transformers),
    ):
        again = back(to(state))
        assert again.keys() == state.keys()
        for key, value in state.items():
            torch.testing.assert_close(again[key], value, rtol=0, atol=0)


def test_files_of_the_authors_merge_at_the_end_of_a_stage():
    state = swin_names.to_timm(SwinTransformer(img_size=32, **SIZES).state_dict())
    theirs = {key.replace("layers.1.downsample", "layers.0.downsample"): value for key, value in state.items()}
    theirs = {key.replace("head.fc.", "head."): value for key, value in theirs.items()}
    theirs["layers.0.blocks.1.attn_mask"] = torch.zeros(4, 16, 16)
    assert swin_names.from_timm(theirs).keys() == SwinTransformer(img_size=32, **SIZES).state_dict().keys()


@pytest.mark.parametrize("version", [1, 2])
def test_another_size_needs_no_other_model(version):
    """The same model at any size, and back: nothing is left behind. Sizes that no patch divides are filled up."""
    model = randomised(SwinTransformer(img_size=32, **SIZES, version=version))
    x = torch.randn(1, 3, 32, 32, dtype=torch.double)
    with torch.no_grad():
        before = model(x)
        for height, width in ((64, 16), (20, 22), (7, 5), (2, 2), (1, 31)):
            assert model(torch.randn(2, 3, height, width, dtype=torch.double)).isfinite().all()
        torch.testing.assert_close(model(x), before, rtol=0, atol=0)
        odd = torch.randn(1, 3, 31, 29, dtype=torch.double)
        torch.testing.assert_close(model(odd), model(torch.nn.functional.pad(odd, (0, 1, 0, 1))), rtol=0, atol=0)


def test_a_smaller_map_resamples_the_table_as_a_smaller_model_would_be_loaded():
    from vision_attn.attention.relative import resample_offsets

    model = randomised(SwinTransformer(img_size=32, **SIZES))
    small = SwinTransformer(img_size=12, **SIZES).double().eval()  # 6 × 6 and 3 × 3
    state = dict(model.state_dict())
    for key, value in small.state_dict().items():
        if key.endswith("position.table") and value.shape != state[key].shape:
            state[key] = resample_offsets(state[key], (4, 4), (3, 3))
    small.load_state_dict(state)
    x = torch.randn(1, 3, 12, 12, dtype=torch.double)
    torch.testing.assert_close(small(x), model(x), rtol=1e-6, atol=1e-6)


def test_padding_takes_part_with_zeros():
    """Filling up by hand gives the same; and the result is not that of attention that leaves the zeros out."""
    layer = randomised(WindowLayer(6, 2, window=4, attention={"position": "relative_bias"}))
    x = torch.randn(1, 3 * 6, 6, dtype=torch.double)
    norm = layer.norm1(x).view(1, 3, 6, 6)
    filled = torch.nn.functional.pad(norm, (0, 0, 0, 2)).flatten(1, 2)
    out = layer.attn(filled, layout=Layout(0, (3, 8))).view(1, 3, 8, 6)[:, :, :6].flatten(1, 2)
    torch.testing.assert_close(layer._attend(layer.norm1(x), (3, 6)), out)
    alone = layer.attn(layer.norm1(x), layout=Layout(0, (3, 6)))
    assert (alone - out).abs().max() > 1e-3


@pytest.mark.parametrize("borders", ["original", "timm", "torchvision"])
@pytest.mark.parametrize("grid", [(8, 8), (10, 11), (3, 9), (2, 3)])
def test_padding_is_cut_off_again(borders, grid):
    padding = WindowPadding(4, 2, borders)
    x = torch.randn(2, grid[0] * grid[1], 3)
    sides = padding.sides(grid)
    padded = padding.pad(x, grid)
    assert padded.shape == (2, sides[0] * sides[1], 3)
    torch.testing.assert_close(padding.cut(padded, grid), x, rtol=0, atol=0)
    torch.testing.assert_close(padded.sum(1), x.sum(1))


def test_an_odd_row_is_merged_with_zeros():
    merging = randomised(PatchMerging(3))
    x = torch.randn(2, 5 * 3, 3, dtype=torch.double)
    filled = torch.nn.functional.pad(x.view(2, 5, 3, 3), (0, 0, 0, 1, 0, 1)).flatten(1, 2)
    torch.testing.assert_close(merging(x, (5, 3)), merging(filled, (6, 4)))
    assert merging.grid((5, 3)) == (3, 2)
    corner = torch.cat([filled.view(2, 6, 4, 3)[:, r, c] for c in (2, 3) for r in (4, 5)], dim=1)
    torch.testing.assert_close(merging(x, (5, 3))[:, -1], merging.reduction(merging.norm(corner)))


def test_masks_are_made_once_per_size():
    model = SwinTransformer(img_size=32, **SIZES).eval()
    _kept_fold.cache_clear()
    with torch.no_grad():
        for _ in range(3):
            model(torch.randn(1, 3, 32, 32))
    assert _kept_fold.cache_info().misses == 4  # with and without shift, in two stages
    with torch.no_grad():
        model(torch.randn(1, 3, 64, 32))
    assert _kept_fold.cache_info().misses == 8


def test_features_only_gives_the_maps_of_all_stages():
    args = {**SIZES, "depths": (1, 1, 1, 1), "num_heads": (2, 2, 3, 3)}
    model = va.create_model("swin_tiny_patch4_window7_224", features_only=True, img_size=(36, 64), **args)
    maps = model(torch.randn(2, 3, 36, 64))
    assert [tuple(m.shape) for m in maps] == [(2, 12, 18, 32), (2, 24, 9, 16), (2, 48, 5, 8), (2, 96, 3, 4)]
    assert model.feature_channels == [12, 24, 48, 96]
    assert model.feature_strides == [2, 4, 8, 16]
    assert not any(key.startswith(("head", "norm.")) for key in model.state_dict())
    whole = SwinTransformer(img_size=(36, 64), **args)
    whole.load_state_dict({**whole.state_dict(), **model.state_dict()})
    x = torch.randn(1, 3, 36, 64)
    for a, b in zip(model(x), whole.forward_feature_maps(x), strict=True):
        torch.testing.assert_close(a, b)
    torch.testing.assert_close(whole.head(whole.norm(model(x)[-1].flatten(2).transpose(1, 2)).mean(1)), whole(x))
    again = model_from_config(json.loads(json.dumps(model.config)))
    assert len(again(x)) == 4


def test_maps_equal_timms():
    theirs = randomised(TimmSwin(img_size=32, **SIZES))
    ours = SwinTransformer(img_size=32, **SIZES, borders="timm").double().eval()
    ours.load_state_dict(swin_names.from_timm(theirs.state_dict()))
    x = torch.randn(1, 3, 32, 32, dtype=torch.double)
    for a, b in zip(
        ours.forward_feature_maps(x), theirs.forward_intermediates(x, intermediates_only=True), strict=True
    ):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(
    "attention",
    [
        {"score": "cosine", "temperature": 0.2},
        {"score": "additive"},
        {"normalizer": "straight_through"},
        {"position": "rope"},
        {"position": "cpb"},
        {"position": "t5"},
        {"position": "learned"},
        {"position": "none"},
        {"kernel": "explicit"},
        {"kernel": "gathered"},
        {"qk_norm": True},
        {"num_kv_heads": 1},
        {"dropout": 0.1},
    ],
    ids=str,
)
@pytest.mark.parametrize("version", [1, 2])
def test_every_mechanism_trains(attention, version):
    args = {**SIZES, "depths": (2, 1), "num_heads": (3, 3)}
    model = SwinTransformer(img_size=(20, 16), **args, version=version, attention=attention)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.1 * torch.randn_like(p))
    model(torch.randn(2, 3, 20, 16)).square().sum().backward()
    for name, p in model.named_parameters():
        assert p.grad is not None, name
        assert p.grad.isfinite().all(), name
        assert p.grad.abs().max() > 0, name
    layer = model.layers[0].blocks[1].attn
    assert isinstance(layer, Attention)
    assert isinstance(layer.position, ContinuousBias) == (
        attention.get("position", "cpb" if version == 2 else "relative_bias") == "cpb"
    )
    assert (model.pos_embed is not None) == (attention.get("position") == "learned")


def test_version_2_begins_as_the_identity():
    model = SwinTransformer(img_size=32, **SIZES, version=2).eval()
    x = torch.randn(1, 3, 32, 32)
    tokens = model.patch_embed(x)
    torch.testing.assert_close(model.forward_feature_maps(x)[0].flatten(2).transpose(1, 2), tokens)
    assert {name for name in model.no_weight_decay() if ".position.mlp.0.weight" in name or "logit_scale" in name}


@pytest.mark.parametrize(
    ("name", "millions", "gmacs"),
    [
        # timm's own figures of the same models, without the norms and activations that it counts too
        ("swin_tiny_patch4_window7_224", 28.288, 4.49),
        ("swin_small_patch4_window7_224", 49.606, 8.74),
        ("swin_base_patch4_window7_224", 87.768, 15.44),
        ("swinv2_tiny_window8_256", 28.347, 5.96),
    ],
)
def test_sizes_are_those_of_the_papers(name, millions, gmacs):
    with torch.device("meta"):
        model = va.create_model(name)
        count = sum(p.numel() for p in model.parameters()) / 1e6
        assert count == pytest.approx(millions, abs=6e-4)
        size = model.config["preprocess"]["size"]
        assert count_macs(model, size) / 1e9 == pytest.approx(gmacs, rel=0.03)


def test_bad_arguments_are_refused():
    def make(**arguments):
        return va.create_model("swin_cifar_tiny", **arguments)

    with pytest.raises(UserError, match=r"version=3: there are Swin 1 and Swin 2"):
        make(version=3)
    with pytest.raises(UserError, match=r"depths=\[2, 2\], num_heads=\[3, 6, 12\].*one number for every stage"):
        make(depths=[2, 2])
    with pytest.raises(UserError, match=r"pretrained_window_sizes must have one number"):
        make(pretrained_window_sizes=[4])
    with pytest.raises(UserError, match=r"5 heads do not divide the 96 of stage 2"):
        make(num_heads=[3, 5, 12])
    with pytest.raises(UserError, match=r"window_size=0 must be a whole number of patches"):
        make(window_size=0)
    with pytest.raises(UserError, match=r"attention pattern='window': a Swin's pattern is its windows.*window_size"):
        make(attention={"pattern": "window", "window": 3})
    with pytest.raises(ValueError, match=r"borders='none': choose original, timm, torchvision"):
        make(borders="none")
    with pytest.raises(UserError, match=r"an image of 1×8 holds no patch of \(2, 2\)"):
        make(borders="torchvision", img_size=(1, 8))
