"""Maps out of a layer with any mechanism are the weights it used; for low rank, those that its result implies."""

from __future__ import annotations

import pytest
import torch

from vision_attn.attention import Attention, Layout, attend, attention_weights, record
from vision_attn.attention.compatibility import EXAMPLES
from vision_attn.attention.linear import Linformer, Performer
from vision_attn.attention.recorder import NotRecorded

GRID, PREFIX, HEADS, D = (3, 5), 1, 3, 8
N = PREFIX + 15
CHOICES = [
    {"pattern": "window_2d", "position": "relative_bias"},
    {"pattern": "bigbird", "position": "t5", "num_kv_heads": 1},
    {"pattern": "strided", "position": "rope"},
    {"score": "additive", "normalizer": "linear_chain"},
    {"score": "cosine", "temperature": "learned", "pattern": "causal"},
    {"pattern": "linformer"},
    {"pattern": "performer"},
    {"tie_kv": True, "two_step": True, "qk_norm": True},
]


@pytest.mark.parametrize("chosen", CHOICES, ids=str)
@pytest.mark.parametrize("kernel", ["auto", "explicit"])
def test_maps_times_values_are_the_result(chosen, kernel):
    torch.manual_seed(0)
    if chosen.get("pattern") == "performer":
        kernel = "auto"
    chosen = {**chosen, **EXAMPLES.get(chosen.get("pattern", ""), {})}
    layout = Layout(PREFIX, GRID)
    layer = Attention(HEADS * D, HEADS, layout=layout, kernel=kernel, **chosen).eval()
    for p in layer.parameters():
        torch.nn.init.normal_(p, std=0.3)
    x = torch.randn(2, N, HEADS * D)
    values = []
    layer.proj.register_forward_pre_hook(lambda module, inputs: values.append(inputs[0]))
    with record(torch.nn.ModuleDict({"attn": layer}), layers="attn") as recorder, torch.no_grad():
        layer(x, layout=layout)
    weights = recorder.weights("attn")
    with torch.no_grad():
        q, k, v = layer._project(x, None, None, None)
        if layer.second is not None:
            q, k, v = layer.second(q, k, v)
    v = v.repeat_interleave(HEADS // v.shape[1], dim=1)
    torch.testing.assert_close((weights @ v).transpose(1, 2).flatten(2), values[0], rtol=1e-4, atol=1e-5)

    with record(torch.nn.ModuleDict({"attn": layer}), heads=[2, 0], queries=[5, 0, -1]) as recorder, torch.no_grad():
        layer(x, layout=layout)
    torch.testing.assert_close(recorder.weights("attn"), weights[:, [2, 0]][:, :, [5, 0, -1]], rtol=1e-5, atol=1e-6)
    assert recorder.implied("attn") == (chosen.get("pattern") in ("linformer", "performer"))


@pytest.mark.parametrize("low_rank", [Linformer(HEADS, N, 4), Performer(D, 16)], ids=["linformer", "performer"])
def test_weights_of_low_rank_attention_are_implied_ones(low_rank):
    q, k, v = torch.randn(3, 2, HEADS, N, D).unbind(0)
    mask = torch.arange(N).lt(N - 3).view(1, 1, 1, N)
    out = attend(q, k, v, pattern=low_rank, mask=mask)
    torch.testing.assert_close(attention_weights(q, k, pattern=low_rank, mask=mask) @ v, out, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("name", "option"), [("linformer", "window"), ("performer", "rank"), ("window", "rank")])
def test_an_option_of_another_pattern_is_refused(name, option):
    with pytest.raises(ValueError, match=f"(?s){name}.*{option}.*takes"):
        Attention(12, 2, pattern=name, layout=Layout(0, (3, 3)), **{option: 3})


def small(**options):
    layer = Attention(HEADS * D, HEADS, **options).eval()
    for p in layer.parameters():
        torch.nn.init.normal_(p, std=0.3)
    return layer


@pytest.mark.parametrize("context", [None, 7])
def test_sizes_are_told_and_choices_refused_before_a_layer_attends(context, monkeypatch):
    layer, x = small(), torch.randn(2, 5, HEADS * D)
    other = () if context is None else (torch.randn(2, context, HEADS * D),)
    m = context or 5
    told = []
    with record(layer, check=lambda *what: told.append(what)):
        layer(x, *other)
    assert told == [("", (2, HEADS, 5, m))]
    with record(layer, heads=[1], queries=[0, 4], check=lambda *what: told.append(what)) as recorder:
        layer(x, *other)
    assert told[1] == ("", (2, 1, 2, m))
    assert recorder.weights("").shape == (2, 1, 2, m)
    monkeypatch.setattr("vision_attn.attention.multihead.run", lambda *_: pytest.fail("it attended"))
    there = f"it has {HEADS}, 0 to {HEADS - 1}"
    for heads, message in (([HEADS], f"no head {HEADS}: {there}"), ([-4], "no head -4"), ([], "no head is asked for")):
        with pytest.raises(NotRecorded, match=message), record(layer, heads=heads):
            layer(x, *other)
    with pytest.raises(NotRecorded, match="no query 'a': it has 5, 0 to 4"), record(layer, queries=["a"]):
        layer(x, *other)

    def too_large(name, sizes):
        raise MemoryError(name)

    with pytest.raises(MemoryError), record(layer, check=too_large):
        layer(x, *other)
    assert layer.recorder is None
    assert not layer._forward_pre_hooks


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("chosen", [{}, {"num_kv_heads": 1}, {"pattern": "shifted_windows", "window": 2, "shift": 1}])
def test_gradients_of_results_do_not_depend_on_what_is_frozen(chosen, frozen):
    layout = Layout(0, (4, 6))
    layers = torch.nn.ModuleList([small(layout=layout, **chosen), small(layout=layout, **chosen)])
    x, weight = torch.randn(2, 24, HEADS * D), torch.randn(2, 24, HEADS * D)
    for p in layers.parameters():
        p.requires_grad_(not frozen)
    outs = []  # what mixes to the tokens, before the last projection
    handles = [layer.proj.register_forward_pre_hook(lambda m, i: outs.append(i[0])) for layer in layers]

    def answer():
        y = x
        for layer in layers:
            y = layer(y, layout=layout)
        return (y * weight).sum()

    with record(layers, gradients=True) as recorder:
        recorder.differentiate(answer())
    for p in layers.parameters():
        assert p.grad is None
        p.requires_grad_(True)
    outs.clear()
    expected = torch.autograd.grad(answer(), outs)
    for handle in handles:
        handle.remove()
    for name, gradient in zip("01", expected, strict=True):
        (call,) = recorder.calls_of(name)
        if "pattern" in chosen:  # windows are the batch there, and come back in the order of the plane
            folding = layers[0].pattern.folding(layout, torch.device("cpu"))
            gradient = folding.unfold(gradient)
        torch.testing.assert_close(call.gradient.transpose(1, 2).flatten(2), gradient, rtol=1e-4, atol=1e-5)


def test_an_answer_that_no_layer_leads_to_is_refused():
    layer, x = small(), torch.randn(2, 5, HEADS * D)
    with record(layer, gradients=True) as recorder:
        layer(x)
        with pytest.raises(NotRecorded, match="depends on no layer"):
            recorder.differentiate(torch.zeros((), requires_grad=True) * 2)
    with record(layer) as recorder, pytest.raises(NotRecorded, match="depends on no layer"):
        recorder.differentiate(layer(x).sum())
