"""Maps out of a layer with any mechanism are the weights it used; for low rank, those that its result implies."""

from __future__ import annotations

import pytest
import torch

from vision_attn.attention import Attention, Layout, attend, attention_weights, record
from vision_attn.attention.compatibility import EXAMPLES
from vision_attn.attention.linear import Linformer, Performer

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
