"""Maps of every model and mechanism are, number for number, the weights that an explicit kernel mixes values with."""

from __future__ import annotations

import copy
import dataclasses

import pytest
import torch

import vision_attn as va
from vision_attn.attention import POSITIONS, Attention, flex, kernels
from vision_attn.attention.compatibility import EXAMPLES, PATTERN_OF, choices
from vision_attn.attention.config import LOW_RANK
from vision_attn.attention.normalizers import NORMALIZERS, SUM_TO_ONE
from vision_attn.attention.windows import ShiftedWindows

VIT = {"img_size": (12, 20), "patch_size": 4, "embed_dim": 24, "num_heads": 3, "depth": 2, "num_classes": 5}
NOT_ONE = {"bernoulli", "linear_chain"}  # as the docstring of attention_maps says
WORDS = [
    (kind, word) for kind, words in {**choices(), "position": POSITIONS}.items() for word in words if word != "full"
]


def randomised(model, std=0.3):
    for p in model.parameters():
        torch.nn.init.normal_(p, std=std)
    return model.eval()


@pytest.fixture
def weights_used(monkeypatch):
    """Name of a layer → what the explicit kernel mixed values with in its calls, windows written out as masks."""

    def run(model, *inputs):
        model = copy.deepcopy(model)
        used, running = {}, []
        for name, module in model.named_modules():
            if isinstance(module, Attention):
                module.kernel = "explicit"
                module.register_forward_pre_hook(lambda m, i, name=name: running.append(name))
            if hasattr(module, "all_tokens"):
                module.all_tokens = True
        mix = kernels.mix_values

        def spy(weights, v):
            used.setdefault(running[-1], []).append(weights.detach().clone())
            return mix(weights, v)

        with monkeypatch.context() as patch, torch.no_grad():
            patch.setattr(kernels, "mix_values", spy)
            patch.setattr(ShiftedWindows, "folding", lambda *_: None)
            model(*inputs)
        return used

    return run


def assert_same(maps, used, names=None):
    """Every layer's map is what was used; layers that ran several times have one map for each."""
    names = list(used) if names is None else names
    assert names
    for name in names:
        found = [maps[name]] if name in maps else [maps[f"{name}[{i}]"] for i in range(len(used[name]))]
        expected = used[name] if len(found) == len(used[name]) else [torch.cat(used[name], 2)]
        for a, b in zip(found, expected, strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=1e-6, msg=lambda text, name=name: f"{name}: {text}")


def attention_of(kind, word):
    chosen = {kind: word}
    if kind == "kernel" and word in PATTERN_OF:
        chosen["pattern"] = PATTERN_OF[word]
    return {**chosen, **EXAMPLES.get(chosen.get("pattern", ""), {})}


@pytest.mark.parametrize("class_token", [True, False])
@pytest.mark.parametrize(("kind", "word"), WORDS)
def test_maps_of_every_mechanism(kind, word, class_token, weights_used):
    if word == "flex" and (flex.no_compiler("cpu") is not None or class_token):
        pytest.skip(flex.no_compiler("cpu") or "compiled once, without a class token")
    attention = attention_of(kind, word)
    if word == "causal" and class_token:
        pytest.skip("a class token that comes first would see nothing, so models refuse it")
    pool = "token" if class_token else "avg"
    model = randomised(
        va.create_model("vit_tiny_patch16_224", **VIT, attention=attention, class_token=class_token, global_pool=pool)
    )
    if word == "sum":  # it takes no negative score: queries and keys are made positive
        for block in model.blocks:
            block.attn.qkv.weight.data.mul_(0.02)
            block.attn.qkv.bias.data.uniform_(0.5, 1)
    images = torch.randn(2, 3, 12, 20)
    with torch.no_grad():
        before = model(images)
        maps = va.attention_maps(model, images)
        torch.testing.assert_close(model(images), before, rtol=0, atol=0)
    n = 15 + class_token
    assert {name: m.shape for name, m in maps.items()} == {f"blocks.{i}.attn": (2, 3, n, n) for i in range(2)}
    pattern = attention.get("pattern")
    if pattern in LOW_RANK:
        assert maps.implied == set(maps)
    else:
        assert not maps.implied
        assert_same(maps, weights_used(model, images))
    for m in maps.values():
        sums = m.sum(-1)
        if word in NOT_ONE or pattern == "linformer":
            assert (sums - 1).abs().max() > 0.01
        else:
            torch.testing.assert_close(sums, torch.ones_like(sums), rtol=0, atol=1e-5)


def test_the_normalizers_whose_rows_do_not_sum_to_one_are_those_of_the_docstring():
    assert set(NORMALIZERS) - SUM_TO_ONE == NOT_ONE
    assert all(f"``{name}``" in va.attention_maps.__doc__ for name in NOT_ONE)


@pytest.mark.parametrize("borders", ["original", "timm", "torchvision"])
@pytest.mark.parametrize("name", ["swin_cifar_tiny", "swinv2_cifar_tiny"])
def test_windows_are_put_back_on_the_plane(name, borders, weights_used):
    model = randomised(va.create_model(name, img_size=(36, 28), num_classes=5, borders=borders), 0.1)
    images = torch.randn(2, 3, 36, 28)
    maps = va.attention_maps(model, images)
    assert list(maps) == [f"layers.{s}.blocks.{b}.attn" for s, n in enumerate((2, 4, 2)) for b in range(n)]
    assert_same(maps, weights_used(model, images))
    for m in maps.values():
        torch.testing.assert_close(m.sum(-1), torch.ones(m.shape[:-1]), rtol=0, atol=1e-5)


def test_a_patch_of_a_swin_looks_at_its_own_window():
    model = randomised(va.create_model("swin_cifar_tiny", img_size=(36, 28), num_classes=5), 0.1)
    maps = va.attention_maps(model, torch.randn(1, 3, 36, 28))
    # patches of 2 give 18 × 14, filled up to 20 × 16; windows of 4 begin at row and column 0, or 2 where shifted
    windows = {"layers.0.blocks.0.attn": ((4, 8), (4, 8)), "layers.0.blocks.1.attn": ((2, 6), (6, 10))}
    for name, ((top, bottom), (left, right)) in windows.items():
        queries, keys = maps.planes[name]
        seen = keys.to_image(maps[name])[0, 1, int(queries.places()[5, 7])]
        expected = torch.zeros(18, 14, dtype=torch.bool)
        expected[top:bottom, left:right] = True
        assert torch.equal(seen > 0, expected)


PADDED = [torch.randn(3, 80, 96), torch.randn(3, 96, 72)]


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("name", ["detr_tiny", "dn_detr_tiny"])
def test_encoder_and_decoder_of_a_detector(name, padded, weights_used):
    model = randomised(va.create_model(name), 0.05)
    images = PADDED if padded else torch.randn(2, 3, 64, 40)
    used = weights_used(model, images)
    assert {part.rpartition(".")[2] for part in used} == {"attn", "self_attn", "cross_attn"}
    maps = va.attention_maps(model, images)
    assert list(maps) == list(used)
    assert_same(maps, used)


def test_every_attention_of_a_pointer_network(weights_used):
    model = randomised(va.create_model("pointer_transformer", img_size=8), 0.2)
    sequences, mask = torch.randn(2, 5, 3, 8, 8), torch.tensor([5, 3])
    keep = torch.arange(5) < mask[:, None]
    maps = va.attention_maps(model, sequences, mask=keep)
    used = weights_used(model, sequences, keep)
    assert {name.partition(".")[0] for name in used} == {"image_encoder", "blocks", "decoder"}
    for name, calls in used.items():
        if len(calls) > 1 and name.endswith("self_attn"):
            assert [maps[f"{name}[{i}]"].shape[2] for i in range(5)] == [1, 2, 3, 4, 5]
    assert_same(maps, used)
    torch.testing.assert_close(maps["pointer"][:, 0], model(sequences, keep).exp(), rtol=0, atol=1e-6)


@pytest.fixture
def fused(monkeypatch):
    """What a fused kernel gives for the identity as values, call after call: the weights it used itself."""
    seen, original = [], kernels.SDPA.__call__

    def spy(self, o):
        m = o.k.shape[2]
        seen.append(original(self, dataclasses.replace(o, v=torch.eye(m).expand(*o.k.shape[:2], m, m))))
        return original(self, o)

    monkeypatch.setattr(kernels.SDPA, "__call__", spy)
    return seen


@pytest.mark.parametrize("name", ["vit_tiny_patch16_224", "detr_tiny", "dn_detr_tiny", "padded"])
def test_the_fused_kernel_agrees_when_values_are_the_identity(name, fused):
    mask = None
    if name.startswith("vit"):
        model, images = va.create_model(name, **VIT), torch.randn(2, 3, 12, 20)
    else:
        model = va.create_model("dn_detr_tiny" if name == "padded" else name)
        images = torch.randn(2, 3, 48, 40)
        if name == "padded":
            mask = torch.ones(2, 48, 40, dtype=torch.bool)
            mask[0, 32:], mask[1, :, 16:] = False, False
    randomised(model, 0.1)
    for module in model.modules():
        if isinstance(module, Attention):
            module.kernel = "sdpa"
    with va.attention.record(model, layers=["*attn"]) as recorder, torch.no_grad():
        model(images) if mask is None else model(images, mask)
        found = [recorder.weights(layer) for layer in recorder.names()]
    calls = [call for calls in recorder.calls.values() for call in calls]
    assert len(calls) == len(fused)
    for m, expected in zip(found, fused, strict=True):
        torch.testing.assert_close(m, expected, rtol=1e-5, atol=1e-6)
