"""FlashAttention in plain PyTorch equals the scores written out, and never holds them."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import vision_attn.attention.tiled  # noqa: F401  registers the kernel
from vision_attn.attention import attend
from vision_attn.attention.layout import Layout
from vision_attn.attention.patterns import make_pattern
from vision_attn.attention.relative import RelativeBias, T5Bias
from vision_attn.attention.tiled import tile_size, tiled_attention, tiles

B, G, GROUP, N, M, D, E = 2, 3, 2, 13, 17, 7, 5
H = G * GROUP


def explicit(q: Tensor, k: Tensor, v: Tensor, scale: float, bias: Tensor | None, mask: Tensor | None):
    """The definition: (result, log Σ exp), zero and -∞ in rows without a key."""
    k, v = k.repeat_interleave(q.shape[1] // k.shape[1], 1), v.repeat_interleave(q.shape[1] // v.shape[1], 1)
    scores = scale * q @ k.transpose(2, 3)
    scores = scores if bias is None else scores + bias
    if mask is None:
        return scores.softmax(-1) @ v, scores.logsumexp(-1, keepdim=True)
    some = mask.any(-1, keepdim=True)
    scores = scores.masked_fill(~(mask | ~some), float("-inf"))
    log_sum = scores.logsumexp(-1, keepdim=True).masked_fill(~some, float("-inf"))
    return (scores.softmax(-1) * some) @ v, log_sum


def inputs(sizes=(B, H, G, N, M, D, E), dtype=torch.float64) -> list[Tensor]:
    b, h, g, n, m, d, e = sizes
    return [torch.randn(s, dtype=dtype).requires_grad_() for s in ((b, h, n, d), (b, g, m, d), (b, g, m, e))]


def gradients(out: Tensor, log_sum: Tensor, leaves: list[Tensor]) -> tuple[Tensor, ...]:
    finite = log_sum.masked_fill(log_sum == float("-inf"), 0)
    return torch.autograd.grad((out * out.detach().cos()).sum() + finite.sin().sum(), leaves)


BIASES = [None, (1, H, N, M), (B, 1, N, 1), (1, 1, 1, M), (B, H, 1, M), (1, 1, 1, 1)]
MASKS = [None, (1, 1, N, M), (B, H, N, M), (B, 1, 1, M), (1, H, N, 1)]


@pytest.mark.parametrize(("bias", "mask"), list(itertools.product(BIASES, MASKS)), ids=str)
def test_equals_the_definition_forward_and_backward(bias, mask):
    torch.manual_seed(0)
    leaves = inputs()
    if bias is not None:
        leaves.append(torch.randn(bias, dtype=torch.float64).requires_grad_())
    if mask is not None:
        mask = torch.rand(mask) > 0.4
        mask[:, :, 0] = False  # a row that may attend to nothing; all of them where the mask has one row
    results = []
    for function in (explicit, tiled_attention):
        pairs = {"bias": leaves[3] if bias is not None else None, "mask": mask}
        size = {} if function is explicit else {"size": (5, 4)}  # neither divides its length
        out, log_sum = function(*leaves[:3], 0.37, **pairs, **size)
        results.append([out, log_sum, *gradients(out, log_sum, leaves)])
    for expected, got in zip(*results, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-10, atol=1e-11)


def test_gradcheck():
    torch.manual_seed(0)
    q, k, v = inputs((1, 2, 1, 3, 5, 2, 3))
    bias = torch.randn(1, 2, 3, 1, dtype=torch.float64).requires_grad_()
    mask = torch.rand(1, 1, 3, 5) > 0.3

    def run(q, k, v, bias):
        return tiled_attention(q, k, v, 0.7, bias=bias, mask=mask, size=(2, 2))

    assert torch.autograd.gradcheck(run, (q, k, v, bias))


@settings(max_examples=60, deadline=None)
@given(
    sizes=st.tuples(*(st.integers(1, most) for most in (2, 3, 2, 9, 9, 4, 4))),
    size=st.tuples(st.integers(1, 10), st.integers(1, 10)),
    density=st.floats(0, 1),
    scale=st.sampled_from([0.0, -0.5, 1.0, 30.0]),
    biased=st.booleans(),
    seed=st.integers(0, 2**31),
)
def test_any_shape_mask_and_tile(sizes, size, density, scale, biased, seed):
    torch.manual_seed(seed)
    b, g, group, n, m, d, e = sizes
    leaves = inputs((b, g * group, g, n, m, d, e))
    mask = torch.rand(b, 1, n, m) < density
    bias = torch.randn(1, g * group, n, m, dtype=torch.float64).requires_grad_() if biased else None
    leaves += [bias] if biased else []
    expected, expected_sum = explicit(*leaves[:3], scale, bias, mask)
    out, log_sum = tiled_attention(*leaves[:3], scale, bias=bias, mask=mask, size=size)
    torch.testing.assert_close((out, log_sum), (expected, expected_sum), rtol=1e-9, atol=1e-9)
    for got, wanted in zip(gradients(out, log_sum, leaves), gradients(expected, expected_sum, leaves), strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-8, atol=1e-8)
    empty = ~mask.any(-1).expand(b, g * group, n)
    assert not out[empty].any()


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("causal", {}),
        ("window", {"window": 2}),
        ("window_2d", {"window": 1}),
        ("strided", {"stride": 3}),
        ("longformer", {"window": 2, "num_global": 1}),
        ("bigbird", {"block_size": 3, "num_random": 1}),
    ],
)
@pytest.mark.parametrize("position", [None, "t5", "relative_bias"])
def test_patterns_and_positions_tile_by_tile(name, options, position):
    torch.manual_seed(0)
    layout = Layout(2, (4, 7))
    n = layout.length
    q, k, v = leaves = inputs((B, H, G, n, n, D, E))
    pattern = make_pattern(name, **options)
    place = {"t5": T5Bias(H), "relative_bias": RelativeBias(H, layout)}[position].double() if position else None
    if place is not None:
        torch.nn.init.normal_(place.table)
        leaves.append(place.table)
    mask = torch.rand(B, 1, n, n) > 0.2
    both = mask & pattern.mask(n, layout)
    dense = None if place is None else place.dense(n, n, layout)
    expected, expected_sum = explicit(q, k, v, 0.6, dense, both)
    out, log_sum = tiled_attention(q, k, v, 0.6, mask=mask, pattern=pattern, layout=layout, position=place, size=(4, 5))
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(log_sum, expected_sum)
    for got, wanted in zip(gradients(out, log_sum, leaves), gradients(expected, expected_sum, leaves), strict=True):
        torch.testing.assert_close(got, wanted)


def test_closed_tiles_are_skipped():
    visited = [tile for _, row in tiles(make_pattern("causal"), Layout(), 64, 64, (8, 8)) for tile in row]
    assert len(visited) == 8 * 9 // 2
    assert sum(tile.cut for tile in visited) == 8  # the diagonal; the others need no mask
    band = [tile for _, row in tiles(make_pattern("window", window=8), Layout(), 64, 64, (8, 8)) for tile in row]
    assert len(band) == 3 * 8 - 2


def test_a_tile_of_many_heads_is_smaller():
    assert tile_size(8, 4096, 4096) == (256, 256)
    assert tile_size(8, 65, 4096) == (65, 256)
    b, c = tile_size(512, 4096, 4096)
    assert b * c < 256 * 256


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sums_of_16_bit_inputs_are_in_float32(dtype):
    """Only the result is rounded: it is the float32 result of the same inputs, to half a unit in the last place."""
    torch.manual_seed(0)
    q, k, v = inputs((1, 2, 1, 5, 300, 3, 2), dtype)
    out, log_sum = tiled_attention(q, k, v, 1.0, size=(4, 16))
    expected, expected_sum = explicit(*(t.detach().float() for t in (q, k, v)), 1.0, None, None)
    assert out.dtype == dtype
    assert log_sum.dtype == torch.float32
    torch.testing.assert_close(out, expected.to(dtype), rtol=torch.finfo(dtype).eps, atol=1e-6)
    torch.testing.assert_close(log_sum, expected_sum)
    out.float().sum().backward()
    assert {q.grad.dtype, k.grad.dtype, v.grad.dtype} == {dtype}


def test_huge_scores_stay_finite():
    q, k, v = inputs(dtype=torch.float32)
    for scale in (1e4, 1e30, -1e30):
        out, _ = tiled_attention(q, k, v, scale, size=(5, 4))
        grads = torch.autograd.grad(out.sum(), (q, k, v))
        assert all(t.isfinite().all() for t in (out, *grads[2:]))
        best = (scale * (q @ k.repeat_interleave(GROUP, 1).transpose(2, 3))).argmax(-1)
        rows = v.repeat_interleave(GROUP, 1).gather(2, best[..., None].expand(-1, -1, -1, E))
        if abs(scale) == 1e30:
            torch.testing.assert_close(out, rows)


def test_nan_is_not_hidden():
    q, k, v = inputs(dtype=torch.float32)
    with torch.no_grad():
        k[0, 0, 3, 0] = float("nan")
    out, _ = tiled_attention(q, k, v, 1.0, size=(5, 4))
    assert out[0, :GROUP].isnan().all()
    assert out[1].isfinite().all()


class Largest(TorchDispatchMode):
    """The most elements of any tensor that is made."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for t in out if isinstance(out, tuple | list) else [out]:
            if isinstance(t, Tensor):
                self.elements = max(self.elements, t.numel())
        return out


def test_memory_is_linear_forward_and_backward():
    def largest(n: int) -> int:
        layout = Layout(grid=(n // 32, 32))
        q, k, v = inputs((1, 2, 1, n, n, 4, 4), torch.float32)
        with Largest() as seen:
            out, _ = tiled_attention(
                q, k, v, 0.5, pattern=make_pattern("causal"), layout=layout, position=T5Bias(2), size=(32, 64)
            )
            out.sum().backward()
        return seen.elements

    assert largest(512) == 2 * 32 * 64  # a tile
    assert largest(1024) == 1024 * 2 * 4  # the queries


def test_the_kernel_by_name():
    torch.manual_seed(0)
    q, k, v = inputs()
    bias, mask = torch.randn(1, H, N, M, dtype=torch.float64), torch.rand(B, 1, N, M) > 0.5
    mask[1] = False
    expected = attend(q, k, v, bias=bias, mask=mask, kernel="explicit")
    torch.testing.assert_close(attend(q, k, v, bias=bias, mask=mask, kernel="tiled"), expected)
    layout, causal = Layout(1, (3, 4)), make_pattern("causal")
    q, k, v = inputs((B, H, G, 13, 13, D, E))
    expected = attend(q, k, v, pattern=causal, layout=layout, position=(place := T5Bias(H)), kernel="explicit")
    out = attend(q, k, v, pattern=causal, layout=layout, position=place, kernel="tiled")
    torch.testing.assert_close(out, expected)


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"dropout": 0.1}, "drops no weights; use dropout=0"),
        ({"normalizer": "hard"}, "rest on the softmax, not 'hard'"),
    ],
)
def test_what_it_cannot_do_it_says(options, match):
    q, k, v = inputs()
    with pytest.raises(ValueError, match=match):
        attend(q, k, v, kernel="tiled", **options)


def test_it_takes_dot_products_only():
    from vision_attn.attention.scores import make_score

    q, k, v = inputs(dtype=torch.float32)
    with pytest.raises(ValueError, match="computes dot products only, and this score is none"):
        attend(q, k, v, score=make_score("additive", H, D, D), kernel="tiled")
