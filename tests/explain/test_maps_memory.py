"""Maps that memory could not hold are refused before they are made; what needs only some rows does without them."""

from __future__ import annotations

import json

import pytest
import torch

import vision_attn as va
from vision_attn.attention import recorded
from vision_attn.errors import UserError
from vision_attn.explain import flow, head_statistics, mean_attention_distance, relevance, rollout
from vision_attn.explain import maps as maps_module
from vision_attn.explain.maps import recording
from vision_attn.peak_memory import in_child

VIT = {"img_size": (20, 28), "patch_size": 4, "embed_dim": 12, "num_heads": 3, "depth": 2, "num_classes": 5}


def build(name):
    model = va.create_model(name, **(VIT if name.startswith("vit") else {"img_size": 36, "num_classes": 5})).eval()
    for p in model.parameters():
        torch.nn.init.normal_(p, std=0.1)
    return model, torch.randn(2, 3, *model.img_size)


@pytest.fixture
def attended(monkeypatch):
    """How often a kernel was chosen."""
    from vision_attn.attention import core, windows

    calls = []
    for module in (core, windows):
        choose = module.choose_kernel
        monkeypatch.setattr(module, "choose_kernel", lambda *a, choose=choose: calls.append(a) or choose(*a))
    return calls


SIZES = {
    "vit_tiny_patch16_224": ("2 × 3 heads × 36 queries × 36 keys", 4 * 2 * 3 * 36**2),
    "swin_cifar_tiny": ("2 × 3 heads × 400 queries × 400 keys", 4 * 2 * 3 * 400**2),  # of the plane, not of windows
}


@pytest.mark.parametrize("name", list(SIZES))
def test_maps_that_do_not_fit_are_refused_before_the_layer_attends(name, attended, monkeypatch):
    model, images = build(name)
    sizes, one = SIZES[name]
    monkeypatch.setattr(maps_module, "free_memory", lambda device: one)
    with pytest.raises(UserError, match=rf"would take .* GiB.*are free.*{sizes}\. Ask for .*queries=.*smaller images"):
        va.attention_maps(model, images)
    assert not attended
    found = va.attention_maps(model, images, queries=[0, 5], layers=next(iter(va.attention.recordable(model))))
    assert next(iter(found.values())).shape[2] == 2


def test_the_sum_of_all_layers_counts(attended, monkeypatch):
    model, images = build("vit_tiny_patch16_224")
    monkeypatch.setattr(maps_module, "free_memory", lambda device: int(3 * SIZES["vit_tiny_patch16_224"][1]))
    with pytest.raises(UserError, match=r"blocks\.1\.attn alone"):
        va.attention_maps(model, images)
    assert len(attended) == 1  # the second layer never did
    assert len(va.attention_maps(model, images, layers="blocks.1*")) == 1


@pytest.mark.parametrize("name", list(SIZES))
def test_no_way_around_the_guard(name, monkeypatch):
    model, images = build(name)
    with recording(model, images) as run:
        monkeypatch.setattr(maps_module, "free_memory", lambda device: 1000)
        with pytest.raises(UserError, match="would take"):
            run.weights(run.names()[0])
        assert run.weights(run.names()[0], rows=torch.tensor([3])).shape[2] == 1
    with pytest.raises(UserError, match="would take"), recording(model, images):
        pass


@pytest.mark.parametrize("name", list(SIZES))
def test_numbers_and_summaries_need_no_whole_map(name, monkeypatch):
    """With little memory they work all the same, some rows at a time, and give what they gave before."""
    model, images = build(name)
    makers = [rollout, relevance, *([flow] if name.startswith("vit") else [])]
    expected = [make(model, images) for make in makers]
    numbers, distance = head_statistics(model, images), mean_attention_distance(model, images)
    monkeypatch.setattr(maps_module, "free_memory", lambda device: 1000)
    monkeypatch.setattr(recorded, "ROWS", 1000 if name.startswith("vit") else 100_000)
    for make, before in zip(makers, expected, strict=True):
        torch.testing.assert_close(make(model, images), before, rtol=1e-4, atol=1e-6)
    for layer, found in head_statistics(model, images).items():
        for what in ("entropy", "distance", "diversity"):
            torch.testing.assert_close(getattr(found, what), getattr(numbers[layer], what), rtol=1e-4, atol=1e-5)
        assert found.uniform == pytest.approx(numbers[layer].uniform)
    for layer, found in mean_attention_distance(model, images).items():
        torch.testing.assert_close(found, distance[layer], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("pattern", [{}, {"pattern": "linformer", "rank": 7}, {"pattern": "performer"}])
@pytest.mark.parametrize("name", list(SIZES))
def test_rows_in_pieces_are_the_same(name, pattern, monkeypatch):
    model, images = build(name)
    if pattern and name.startswith("vit"):
        model = va.create_model(name, **VIT, attention=pattern).eval()
    whole = va.attention_maps(model, images)
    monkeypatch.setattr(recorded, "ROWS", 5000)
    pieces = va.attention_maps(model, images)
    for layer in whole:
        torch.testing.assert_close(pieces[layer], whole[layer], rtol=0, atol=1e-6)
    with recording(model, images) as run:
        for layer in run.names():
            starts, parts = zip(*run.pieces(layer), strict=True)
            assert len(starts) > 1 or whole[layer].numel() <= 5000
            torch.testing.assert_close(torch.cat(parts, 2), whole[layer], rtol=0, atol=1e-6)
            rows = torch.tensor([3, 0])
            torch.testing.assert_close(run.weights(layer, rows=rows), whole[layer][:, :, rows], rtol=0, atol=1e-6)


def test_a_container_s_limit_counts(tmp_path, monkeypatch):
    (tmp_path / "memory.max").write_text("5000\n")
    (tmp_path / "memory.current").write_text("3000\n")
    (tmp_path / "memory.stat").write_text("anon 1\ninactive_file 500\n")
    monkeypatch.setattr(maps_module, "LIMITS", [(str(tmp_path / "memory.max"), str(tmp_path / "memory.current"))])
    assert maps_module.free_memory("cpu") == 2500
    (tmp_path / "memory.max").write_text("max\n")
    assert maps_module.free_memory("cpu") > 5000


def test_peak_memory_is_bounded_by_what_is_asked_for(tmp_path, monkeypatch):
    (tmp_path / "asked_maps.py").write_text(
        "import torch\nimport vision_attn as va\nfrom vision_attn.attention import recorded\n"
        + "from vision_attn.explain import head_statistics\n\n\n"
        + "def ask(heads, queries, layers, statistics):\n"
        + "    torch.manual_seed(0)\n"
        + f"    size = {json.dumps({'img_size': 128, 'patch_size': 4, 'embed_dim': 32, 'num_heads': 4, 'depth': 3})}\n"
        + "    model = va.create_model('vit_tiny_patch16_224', num_classes=2, **size).eval()\n"
        + "    images = torch.randn(1, 3, 128, 128)\n"
        + "    if statistics:\n"
        + "        recorded.ROWS = 2**18\n"
        + "        return lambda: head_statistics(model, images, divergence=False)\n"
        + "    return lambda: va.attention_maps(model, images, heads=heads, queries=queries, layers=layers)\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    one = 4 * 4 * 1025**2  # bytes of a layer's map
    calls = [
        {"heads": None, "queries": [0, 3], "layers": "all", "statistics": False},
        {"heads": [2], "queries": None, "layers": "blocks.1.attn", "statistics": False},
        {"heads": None, "queries": None, "layers": "blocks.1.attn", "statistics": False},
        {"heads": None, "queries": None, "layers": "all", "statistics": False},
        {"heads": None, "queries": None, "layers": "all", "statistics": True},
    ]
    rows, head, layer, everything, statistics = in_child("asked_maps", "ask", calls, threads=1)
    assert rows < 0.6 * one  # the forward pass alone
    assert head < 0.25 * one + rows + 2**25
    assert layer < one + rows + 2**25  # no second tensor of that size
    assert 2.9 * one < everything < 3 * one + rows + 2**25
    assert statistics < 0.6 * one
