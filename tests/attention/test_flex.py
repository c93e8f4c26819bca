"""FlexAttention equals dense attention; its block masks equal PyTorch's own.

Each compilation takes ten to forty seconds, so all but one of the tests that compile are marked slow.
"""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import nn
from torch.nn.attention.flex_attention import create_block_mask

from vision_attn.attention import attend, flex
from vision_attn.attention.kernels import KERNELS, Request, choose_kernel
from vision_attn.attention.layout import Layout
from vision_attn.attention.patterns import Pattern, make_pattern
from vision_attn.attention.relative import RelativeBias, T5Bias

# A different prime for every dimension, so that a transposed axis cannot pass.
B, H, G, D_HEAD = 2, 6, 3, 7
SEQUENCE, PREFIXED, GRID = Layout(), Layout(prefix=2), Layout(prefix=3, grid=(13, 17))
N = 224  # of the grid, and of the others

needs_compiler = pytest.mark.skipif(
    flex.no_compiler("cpu") is not None, reason=f"FlexAttention cannot compile here: {flex.no_compiler('cpu')}"
)


def pattern(name: str, **options) -> Pattern:
    made = make_pattern(name, **options)
    assert made is not None
    return made


CASES = [
    (pattern("causal"), PREFIXED),
    (pattern("window", window=5), SEQUENCE),
    (pattern("window_2d", window=2), GRID),
    (pattern("strided", stride=11), PREFIXED),
    (pattern("longformer", window=5, num_global=3), PREFIXED),
    (pattern("bigbird", block_size=7, num_random=2, num_global=1), GRID),
]
IDS = [made.name for made, _ in CASES]


def compare(made: Pattern | None, layout: Layout, **options) -> torch.Tensor:
    q, k, v = torch.randn(B, H, N, D_HEAD), torch.randn(B, G, N, D_HEAD), torch.randn(B, G, N, D_HEAD)
    options = {"pattern": made, "layout": layout, **options}
    with torch.no_grad():
        dense, ours = (attend(q, k, v, kernel=kernel, **options) for kernel in ("explicit", "flex"))
    torch.testing.assert_close(ours, dense, atol=1e-5, rtol=1e-5)
    return ours


@needs_compiler
def test_equals_dense_attention_with_a_pattern_a_position_and_padding():
    position = RelativeBias(H, GRID)
    nn.init.normal_(position.table)
    mask = torch.rand(B, 1, 1, N) > 0.3
    mask[1] = False  # a sequence that is nothing but padding
    out = compare(pattern("window_2d", window=2), GRID, position=position, mask=mask)
    assert (out[1] == 0).all()


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize(("made", "layout"), [*CASES, (None, SEQUENCE)], ids=[*IDS, "full"])
def test_every_pattern_equals_dense_attention(made, layout):
    compare(made, layout)


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize("shape", [(B, 1, N, 1), (1, H, 1, N), (B, H, N, N)], ids=str)
def test_a_bias_and_a_mask_may_be_broadcast_in_any_way(shape):
    position = T5Bias(H)
    nn.init.normal_(position.table)
    made = pattern("bigbird", block_size=7, num_random=2)
    compare(made, SEQUENCE, bias=torch.randn(shape), mask=torch.rand(shape) > 0.2, position=position)


@needs_compiler
@pytest.mark.slow
@pytest.mark.skipif(not torch.cuda.is_available(), reason="FlexAttention trains on a GPU only")
@pytest.mark.parametrize(("made", "layout"), CASES, ids=IDS)
def test_gradients_on_a_gpu_equal_dense_attention(made, layout):
    position = T5Bias(H).cuda()
    nn.init.normal_(position.table)
    q, k, v = (torch.randn(B, H, N, 32, device="cuda", requires_grad=True) for _ in range(3))
    leaves, gradients = [q, k, v, position.table], []
    for kernel in ("explicit", "flex"):
        out = attend(q, k, v, pattern=made, layout=layout, position=position, kernel=kernel)
        gradients.append(torch.autograd.grad(out.square().sum(), leaves))
    for a, b in zip(*gradients, strict=True):
        torch.testing.assert_close(b, a, atol=1e-2, rtol=1e-2)


@pytest.mark.parametrize("size", [N, 384, 401])
@pytest.mark.parametrize(("made", "layout"), CASES, ids=IDS)
def test_block_masks_equal_those_of_pytorch(made, layout, size):
    if layout is GRID and size != N:
        layout = Layout(layout.prefix)
        made = made if made.name != "window_2d" else pattern("window", window=2)
    ours = flex.block_mask_of(made, size, layout, torch.device("cpu"))
    rule = flex.mask_mod(made.rule(size, layout, torch.device("cpu")))
    theirs = create_block_mask(rule, None, None, size, size, device="cpu")
    assert ours.shape == theirs.shape
    for name in ("kv_num_blocks", "full_kv_num_blocks", "q_num_blocks", "full_q_num_blocks"):
        torch.testing.assert_close(getattr(ours, name), getattr(theirs, name))
    torch.testing.assert_close(ours.to_dense(), theirs.to_dense())


def test_block_masks_skip_tiles_and_are_kept():
    made = pattern("window", window=128)
    mask = flex.block_mask_of(made, 2048, SEQUENCE, torch.device("cpu"))
    assert mask is flex.block_mask_of(made, 2048, SEQUENCE, torch.device("cpu"))
    assert mask.to_dense().sum().item() == 3 * 16 - 2  # a tile, and those beside it


REQUEST = Request("cpu", torch.float32, 1, 2, 2, 101, 101, 7, pattern="window")


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"training": True}, "inference only.*use kernel='gathered', or torch.no_grad"),
        ({"training": True, "pattern": "causal"}, "inference only.*use kernel='sdpa'"),
        ({"dropout": 0.1}, "no dropout; use kernel='gathered'"),
        ({"dtype": torch.float64}, "does not compute in torch.float64"),
        ({"device": "meta"}, "not made for device 'meta'"),
        ({"device": "cuda"}, "heads of width 16 or more, not 7; use kernel='gathered'"),
        ({"dot": False}, "dot products only.*use kernel='explicit'"),
        ({"normalizer": "sum"}, "softmax only, not 'sum'"),
        ({"pattern": "performer"}, "never forms scores"),
    ],
)
def test_what_it_cannot_do_is_said(changes, says):
    with pytest.raises(ValueError, match=says):
        choose_kernel("flex", dataclasses.replace(REQUEST, **changes))


@needs_compiler
def test_it_serves_inference():
    assert KERNELS["flex"].why_not(REQUEST) is None


def test_a_missing_compiler_is_named(monkeypatch):
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX2")
    monkeypatch.setattr("sys.platform", "linux")
    monkeypatch.setenv("CXX", "no-such-compiler -O2")
    with pytest.raises(
        ValueError, match=r"no compiler 'no-such-compiler'; install g.., or set CXX; or use kernel='gathered'"
    ):
        choose_kernel("flex", REQUEST)


@needs_compiler
def test_a_learned_bias_gets_no_wrong_gradient():
    q = torch.randn(1, 2, 131, 5)
    bias = torch.randn(1, 1, 1, 131, requires_grad=True)
    with pytest.raises(ValueError, match="this call needs gradients"):
        attend(q, q, q, bias=bias, pattern=pattern("window", window=3), kernel="flex")


def test_an_old_processor_is_named(monkeypatch):
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "DEFAULT")
    with pytest.raises(ValueError, match="needs AVX2"):
        choose_kernel("flex", REQUEST)
