"""Attention maps of every family and mechanism: the weights that were used, from models that never held them."""

from __future__ import annotations

import copy

import pytest
import torch

import vision_attn as va
from vision_attn.attention import Attention, Layout, flex, record
from vision_attn.errors import UserError
from vision_attn.explain import head_statistics, implied_layers, mean_attention_distance

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


def test_a_model_is_left_as_it_is():
    model = build("vit_tiny_patch16_224").train()
    model.blocks[0].eval()
    modes = [m.training for m in model.modules()]
    images = images_for(model)
    with torch.no_grad():
        before = model(images)
        maps = va.attention_maps(model, images)
        torch.testing.assert_close(model(images), before, rtol=0, atol=0)
    assert maps["blocks.1.attn"].shape == (2, 3, 36, 36)
    assert [m.training for m in model.modules()] == modes
    assert all(m.recorder is None and not m._forward_pre_hooks for m in model.modules() if isinstance(m, Attention))
    assert not model._forward_pre_hooks


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


@pytest.mark.parametrize(
    "backend",
    [
        "eager",
        pytest.param(  # compiling takes a minute
            "inductor",
            marks=[
                pytest.mark.slow,
                pytest.mark.skipif(flex.no_compiler("cpu") is not None, reason=f"{flex.no_compiler('cpu')}"),
            ],
        ),
    ],
)
def test_maps_of_compiled_models(backend):
    model = build("vit_tiny_patch16_224", 0.1, depth=1)
    images = images_for(model)
    expected = va.attention_maps(model, images)
    compiled = torch.compile(model, backend=backend)
    with torch.no_grad():
        before = compiled(images)
        maps = va.attention_maps(compiled, images)
        assert list(maps) == list(expected) == ["blocks.0.attn"]
        torch.testing.assert_close(maps["blocks.0.attn"], expected["blocks.0.attn"], rtol=0, atol=1e-6)
        torch.testing.assert_close(compiled(images), before, rtol=0, atol=0)


def test_maps_of_half_precision_models():
    model = build("vit_tiny_patch16_224", 0.1)
    images = images_for(model)
    expected = va.attention_maps(model, images)
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
    images = images_for(model)
    maps = va.attention_maps(model, images)
    assert maps.implied == implied_layers(model) == {"blocks.0.attn", "blocks.1.attn"}
    assert all(numbers.implied for numbers in head_statistics(model, images).values())
    assert mean_attention_distance(model, images).implied == maps.implied
    plain = build("vit_tiny_patch16_224", 0.1)
    assert not va.attention_maps(plain, images_for(plain)).implied
    assert not implied_layers(plain)
    assert not mean_attention_distance(plain, images_for(plain)).implied


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


FEW = [
    ("glimpse_small_32", (2, 3, 32, 32), {}, "glimpses", (1, 3)),
    ("pointer_lstm", (2, 4, 3, 8, 8), {"img_size": 8}, "pointer", (1, 4)),
    ("cct_2_3x2_32", (2, 3, 32, 32), {}, "pool", (1, 1)),
]


@pytest.mark.parametrize(("name", "shape", "options", "layer", "sizes"), FEW)
def test_pools_pointers_and_glimpses_alone_have_heads_and_queries_too(name, shape, options, layer, sizes):
    model, images = va.create_model(name, **options).eval(), torch.randn(*shape)
    whole = va.attention_maps(model, images, layers=[layer])[layer]
    assert whole.shape[1:3] == sizes
    last = sizes[1] - 1
    found = va.attention_maps(model, images, layers=[layer], heads=[0], queries=[last])
    torch.testing.assert_close(found[layer], whole[:, :, [last]], rtol=0, atol=0)
    assert (found.heads, found.rows) == ([0], [last])
    with pytest.raises(UserError, match=f"layer '{layer}' has no head 7: it has one, 0"):
        va.attention_maps(model, images, layers=[layer], heads=[7])
    with pytest.raises(UserError, match=f"layer '{layer}' has no query {last + 1}: it has"):
        va.attention_maps(model, images, layers=[layer], queries=[last + 1])


@pytest.mark.parametrize(("name", "shape", "options", "layer", "sizes"), FEW)
def test_heads_and_queries_that_no_layer_has_are_refused(name, shape, options, layer, sizes):
    model, images = va.create_model(name, **options).eval(), torch.randn(*shape)
    with pytest.raises(UserError, match="has no head 70: it has"):
        va.attention_maps(model, images, heads=[70])
    with pytest.raises(UserError, match="has no query 700: it has"):
        va.attention_maps(model, images, queries=[700])


def test_what_is_not_there_is_refused_before_anything_attends(monkeypatch):
    from vision_attn.attention import kernels

    model = build("vit_tiny_patch16_224")
    monkeypatch.setattr(kernels, "choose_kernel", lambda *_: pytest.fail("it attended"))
    monkeypatch.setattr("vision_attn.attention.core.choose_kernel", lambda *_: pytest.fail("it attended"))
    for options in ({"heads": [3]}, {"queries": [36]}, {"heads": []}, {"heads": ["0"]}):
        with pytest.raises(UserError, match=r"layer 'blocks\.0\.attn'.*it has 36?, 0 to"):
            va.attention_maps(model, images_for(model), **options)


def test_where_glimpses_lie():
    model = va.create_model("glimpse_small_32").eval()
    maps = va.attention_maps(model, torch.randn(1, 3, 32, 40))
    plane = maps.planes["glimpses"][1]
    assert (plane.grid, plane.stride) == ((7, 9), (4, 4))
    corners = model.corners((32, 40))
    torch.testing.assert_close(plane.centres(), corners + 4.0)
    assert plane.to_image(maps["glimpses"]).shape == (1, 1, 3, 7, 9)


@pytest.mark.parametrize(
    ("size", "side", "stride", "cell"), [((32, 40), 8, 4, 4), ((31, 37), 7, 3, 1), ((30, 42), 12, 6, 6)]
)
def test_a_glimpse_is_shown_where_its_pixels_are(size, side, stride, cell):
    torch.manual_seed(0)
    model = va.create_model("glimpse_small_32", img_size=size, glimpse_size=side, stride=stride, coarse=1).eval()
    plane = va.attention_maps(model, torch.randn(1, 3, *size)).planes["glimpses"][1]
    weights = torch.rand(5, plane.length)
    expected = torch.zeros(5, *size)
    for place, (top, left) in enumerate(model.corners(size).tolist()):
        expected[:, top : top + side, left : left + side] += weights[:, place, None, None] / side**2
    shown = plane.to_picture(weights)
    assert shown.shape == (5, size[0] // cell, size[1] // cell)
    spread = shown.repeat_interleave(cell, 1).repeat_interleave(cell, 2) / cell**2
    torch.testing.assert_close(spread, expected)


@pytest.mark.parametrize("name", ["dn_detr_tiny", "detr_tiny"])
def test_as_many_object_queries_as_image_tokens_are_no_image_tokens(name):
    model = va.create_model(name, num_queries=15).eval()
    maps = va.attention_maps(model, torch.randn(1, 3, 24, 40))  # a grid of 3 × 5
    for layer, m in maps.items():
        assert m.shape[2:] == (15, 15)
        lie = [None if plane is None else plane.grid for plane in maps.planes[layer]]
        kind = layer.rpartition(".")[2]
        assert lie == {"attn": [(3, 5), (3, 5)], "self_attn": [None, None], "cross_attn": [None, (3, 5)]}[kind], layer


def test_a_cnn_has_no_maps():
    with pytest.raises(UserError, match="CifarResNet has no attention layer"):
        va.attention_maps(va.create_model("resnet8_cifar"), torch.randn(1, 3, 32, 32))


def test_public_names_are_functions_and_classes_whatever_was_imported_first():
    import importlib

    from vision_attn import explain

    for module in ("rollout", "relevance", "faithfulness", "insight"):
        importlib.import_module(f"vision_attn.explain.{module}")
    for name in explain.__all__:
        assert callable(getattr(explain, name)), name
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = explain.nothing
