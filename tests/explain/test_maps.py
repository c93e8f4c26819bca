"""Attention maps of every family and mechanism: the weights that were used, from models that never held them."""

from __future__ import annotations

import copy
import json

import pytest
import torch

import vision_attn as va
from vision_attn.attention import Attention, Layout, record
from vision_attn.errors import UserError
from vision_attn.explain import maps as maps_module
from vision_attn.peak_memory import in_child

VIT = {"img_size": (20, 28), "patch_size": 4, "embed_dim": 12, "num_heads": 3, "depth": 2, "num_classes": 5}
FAMILIES = {
    "vit_tiny_patch16_224": VIT,
    "cct_2_3x2_32": {"img_size": 16, "num_classes": 5},
    "swin_cifar_tiny": {"img_size": 36, "num_classes": 5},
    "swinv2_cifar_tiny": {"img_size": 32, "num_classes": 5},
}


def build(name, randomise=0.3, **more):
    model = va.create_model(name, **{**FAMILIES[name], **more}).eval()
    for p in model.parameters():
        torch.nn.init.normal_(p, std=randomise)
    return model


def images_for(model, batch=2):
    return torch.randn(batch, 3, *model.img_size)


def explicit(model):
    """The same model on the explicit kernel, with the weights that each layer used written down."""
    model = copy.deepcopy(model)
    for module in model.modules():
        if isinstance(module, Attention):
            module.kernel = "explicit"
    return model


@pytest.fixture
def used(monkeypatch):
    """What the explicit kernel mixed values with, call after call."""
    from vision_attn.attention import kernels

    seen, mix = [], kernels.mix_values

    def spy(weights, v):
        seen.append(weights.detach().clone())
        return mix(weights, v)

    monkeypatch.setattr(kernels, "mix_values", spy)
    return seen


@pytest.mark.parametrize("name", ["vit_tiny_patch16_224", "cct_2_3x2_32"])
def test_maps_are_the_weights_of_the_explicit_kernel(name, used):
    model = build(name)
    images = images_for(model)
    before = model(images)
    used.clear()
    maps = va.attention_maps(model, images)
    torch.testing.assert_close(model(images), before, rtol=0, atol=0)
    used.clear()
    other = explicit(model)
    if hasattr(other, "all_tokens"):
        other.all_tokens = True
    other(images)
    layers = [m for n, m in maps.items() if n.startswith("blocks")]
    assert len(layers) == len(model.blocks)
    for found, expected in zip(layers, used, strict=False):
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)
    for m in maps.values():
        torch.testing.assert_close(m.sum(-1), torch.ones(m.shape[:-1]), rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", ["swin_cifar_tiny", "swinv2_cifar_tiny"])
def test_windows_are_put_back_on_the_plane(name, used):
    model = build(name, 0.1)
    images = images_for(model, 1)
    maps = va.attention_maps(model, images)
    used.clear()
    explicit(model)(images)
    assert list(maps) == [f"layers.{s}.blocks.{b}.attn" for s, n in enumerate((2, 4, 2)) for b in range(n)]
    for (_, found), layer in zip(maps.items(), used, strict=True):
        torch.testing.assert_close(found.sum(-1), torch.ones(found.shape[:-1]), rtol=0, atol=1e-5)
        # the multiset of weights is the same, whatever order windows put tokens in
        torch.testing.assert_close(found[found > 0].sort().values, layer[layer > 0].sort().values, rtol=0, atol=1e-6)


@pytest.mark.parametrize("name", list(FAMILIES))
def test_the_fused_kernel_agrees_when_values_are_the_identity(name, monkeypatch):
    """A fused kernel mixes values by its weights: mixing the rows of the identity gives the weights themselves."""
    from vision_attn.attention import kernels

    torch.manual_seed(0)
    layer = next(m for m in build(name, 0.1).modules() if isinstance(m, Attention))
    layer.kernel = "sdpa"
    grid, prefix = (8, 4), int(name.startswith("vit"))
    layout = Layout(prefix, grid)
    fused: list[torch.Tensor] = []
    original = kernels.SDPA.__call__

    def spy(self, o):
        n = o.k.shape[2]
        eye = torch.eye(n).expand(*o.k.shape[:2], n, n)
        fused.append(original(self, kernels.dataclasses.replace(o, v=eye)))
        return original(self, o)

    monkeypatch.setattr(kernels.SDPA, "__call__", spy)
    with record(torch.nn.ModuleDict({"attn": layer})) as recorder, torch.no_grad():
        layer(torch.randn(2, prefix + 32, layer.proj.out_features), layout=layout)
    found = recorder.weights("attn")
    if name.startswith("swin"):
        folding = layer.pattern.folding(layout, torch.device("cpu"))
        order, s, n = folding.order, folding.count, folding.size
        weights = fused[0].reshape(2, s, -1, n, n)
        expected = torch.zeros_like(found)
        for w in range(s):
            tokens = order[w * n : (w + 1) * n]
            expected[:, :, tokens[:, None], tokens[None]] = weights[:, w]
    else:
        expected = fused[0]
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


def test_maps_of_compiled_and_half_precision_models():
    model = build("vit_tiny_patch16_224", 0.1)
    images = images_for(model)
    expected = va.attention_maps(model, images)
    compiled = torch.compile(model, backend="eager")
    before = compiled(images)
    maps = va.attention_maps(compiled, images)
    assert list(maps) == list(expected)
    for name in maps:
        torch.testing.assert_close(maps[name], expected[name], rtol=0, atol=1e-6)
    torch.testing.assert_close(compiled(images), before, rtol=0, atol=0)
    half = copy.deepcopy(model).bfloat16()
    before = half(images.bfloat16())
    maps = va.attention_maps(half, images)
    assert all(m.dtype == torch.float32 for m in maps.values())
    torch.testing.assert_close(maps["blocks.1.attn"].sum(-1), torch.ones(2, 3, 36), rtol=0, atol=1e-5)
    torch.testing.assert_close(maps["blocks.0.attn"], expected["blocks.0.attn"], rtol=0, atol=0.03)
    torch.testing.assert_close(half(images.bfloat16()), before, rtol=0, atol=0)
    with torch.autocast("cpu", torch.bfloat16):
        maps = va.attention_maps(model, images)
    torch.testing.assert_close(maps["blocks.0.attn"], expected["blocks.0.attn"], rtol=0, atol=0.03)


@pytest.mark.parametrize("pattern", [{"pattern": "linformer", "rank": 7}, {"pattern": "performer"}])
def test_maps_without_weights_say_that_they_are_implied(pattern):
    model = build("vit_tiny_patch16_224", 0.1, attention=pattern)
    maps = va.attention_maps(model, images_for(model))
    assert maps.implied == {"blocks.0.attn", "blocks.1.attn"}
    plain = build("vit_tiny_patch16_224", 0.1)
    assert not va.attention_maps(plain, images_for(plain)).implied


def test_pools_pointers_and_glimpses_have_maps():
    cct = build("cct_2_3x2_32")
    images = images_for(cct)
    maps = va.attention_maps(cct, images, heads=[0], queries=[3])
    assert maps["blocks.0.attn"].shape == (2, 1, 1, 16)
    assert maps["pool"].shape == (2, 1, 1, 16)  # whole, it has one query
    torch.testing.assert_close(maps["pool"][:, 0, 0], cct.pool.weights(cct.forward_features(images)))

    pointer = va.create_model("pointer_lstm", img_size=8).eval()
    sequences = torch.randn(2, 5, 3, 8, 8)
    maps = va.attention_maps(pointer, sequences)
    torch.testing.assert_close(maps["pointer"][:, 0], pointer(sequences).exp(), rtol=1e-5, atol=1e-6)

    steps = va.create_model("pointer_transformer", img_size=8).eval()
    maps = va.attention_maps(steps, sequences, layers="decoder*")
    assert maps["decoder.layers.layers.0.cross_attn[3]"].shape == (2, 4, 4, 5)
    assert [n for n in maps if n.startswith("decoder.layers.layers.1.self_attn")] == [
        f"decoder.layers.layers.1.self_attn[{i}]" for i in range(5)
    ]

    glimpse = va.create_model("glimpse_small_32").eval()
    images = torch.randn(2, 3, 32, 32)
    torch.testing.assert_close(va.attention_maps(glimpse, images)["glimpses"][:, 0], glimpse.weights(images))

    pooled = build("vit_tiny_patch16_224", global_pool="hierarchical", class_token=False, pool_region=3)
    maps = va.attention_maps(pooled, images_for(pooled), layers="pool*")
    assert set(maps) == {"pool.patches", "pool.regions"}


def test_maps_of_a_detector():
    model = va.create_model("dn_detr_tiny").eval()
    images = [torch.randn(3, 80, 96), torch.randn(3, 96, 72)]
    before = model(images)["pred_boxes"]
    maps = va.attention_maps(model, images)
    torch.testing.assert_close(model(images)["pred_boxes"], before, rtol=0, atol=0)
    assert {n.split(".")[-1] for n in maps} == {"attn", "self_attn", "cross_attn"}
    cross = maps["decoder.layers.2.cross_attn"]
    assert cross.shape == (2, 4, 20, 144)
    for m in maps.values():
        torch.testing.assert_close(m.sum(-1), torch.ones(m.shape[:-1]), rtol=0, atol=1e-5)
    queries, keys = maps.planes["decoder.layers.2.cross_attn"]
    assert queries is None
    assert keys.grid == (12, 12)
    on_image = keys.to_image(cross)
    assert (on_image[0, ..., 10:, :] == 0).all()  # the first image ends after 80 rows
    assert (on_image[1, ..., 9:] == 0).all()
    few = va.attention_maps(model, images, layers="*cross_attn", heads=[1], queries=[4, 7])
    torch.testing.assert_close(few["decoder.layers.2.cross_attn"], cross[:, [1]][:, :, [4, 7]])


def test_rows_in_pieces_are_the_same(monkeypatch):
    from vision_attn.attention import recorder

    model = build("swin_cifar_tiny", 0.1)
    images = images_for(model)
    whole = va.attention_maps(model, images)
    monkeypatch.setattr(recorder, "ROWS", 5000)
    pieces = va.attention_maps(model, images)
    for name in whole:
        torch.testing.assert_close(pieces[name], whole[name], rtol=0, atol=1e-7)


def test_training_mode_is_kept_for_every_part():
    model = build("vit_tiny_patch16_224").train()
    model.blocks[0].eval()
    modes = [m.training for m in model.modules()]
    va.attention_maps(model, images_for(model))
    assert [m.training for m in model.modules()] == modes
    assert all(m.recorder is None for m in model.modules() if isinstance(m, Attention))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"layers": ["blocks.7.attn"]}, r"blocks\.7\.attn.*there are: blocks\.0\.attn.*Did you mean"),
        ({"layers": "encoder*"}, r"no attention layer is called 'encoder\*'; there are: blocks\.0\.attn"),
        ({"heads": [3]}, r"layer 'blocks\.0\.attn' has no head 3: it has 3, 0 to 2"),
        ({"queries": [36]}, r"layer 'blocks\.0\.attn' has no query 36: it has 36, 0 to 35"),
    ],
)
def test_what_is_not_there_is_named(options, message):
    model = build("vit_tiny_patch16_224")
    with pytest.raises(UserError, match=message):
        va.attention_maps(model, images_for(model), **options)


def test_a_cnn_has_no_maps():
    with pytest.raises(UserError, match="CifarResNet has no attention layer"):
        va.attention_maps(va.create_model("resnet8_cifar"), torch.randn(1, 3, 32, 32))


def test_maps_that_do_not_fit_are_refused_with_their_size(monkeypatch):
    model = build("vit_tiny_patch16_224")
    monkeypatch.setattr(maps_module, "free_memory", lambda device: 50_000)
    with pytest.raises(UserError, match=r"would take .* GiB.*2 × 3 heads × 36 queries × 36 keys.*queries="):
        va.attention_maps(model, images_for(model))
    assert va.attention_maps(model, images_for(model), queries=[0])["blocks.0.attn"].shape == (2, 3, 1, 36)


def test_memory_is_bounded_by_what_is_asked_for(tmp_path, monkeypatch):
    (tmp_path / "asked_maps.py").write_text(
        "import torch\nimport vision_attn as va\n\n\n"
        + "def ask(heads, queries, layers):\n"
        + "    torch.manual_seed(0)\n"
        + f"    size = {json.dumps({'img_size': 128, 'patch_size': 4, 'embed_dim': 32, 'num_heads': 4, 'depth': 3})}\n"
        + "    model = va.create_model('vit_tiny_patch16_224', num_classes=2, **size).eval()\n"
        + "    images = torch.randn(1, 3, 128, 128)\n"
        + "    return lambda: va.attention_maps(model, images, heads=heads, queries=queries, layers=layers)\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    one = 4 * 4 * 1025**2  # bytes of a layer's map
    calls = [
        {"heads": None, "queries": [0, 3], "layers": "all"},
        {"heads": [2], "queries": None, "layers": "blocks.1.attn"},
        {"heads": None, "queries": None, "layers": "blocks.1.attn"},
        {"heads": None, "queries": None, "layers": "all"},
    ]
    rows, head, layer, everything = in_child("asked_maps", "ask", calls, threads=1)
    assert rows < 0.6 * one  # the forward pass alone
    assert head < 0.25 * one + rows + 2**25
    assert layer < one + rows + 2**25  # no second tensor of that size
    assert everything < 3 * one + rows + 2**25
    assert everything > 2.9 * one
