"""Gathered attention equals dense attention under the mask of the pattern, forward and backward."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from vision_attn.attention import Attention, attend, gathered
from vision_attn.attention.kernels import KERNELS, Request, choose_kernel
from vision_attn.attention.layout import Layout
from vision_attn.attention.patterns import Pattern, make_pattern
from vision_attn.attention.relative import RelativeBias, T5Bias

# A different prime for every dimension, so that a transposed axis cannot pass.
B, H, G, D_HEAD, E_HEAD = 2, 6, 3, 5, 11
SEQUENCE, PREFIXED, GRID = Layout(), Layout(prefix=2), Layout(prefix=3, grid=(19, 23))


def pattern(name: str, **options) -> Pattern:
    made = make_pattern(name, **options)
    assert made is not None
    return made


CASES = [
    (pattern("window", window=3), 251, SEQUENCE),
    (pattern("window", window=7), 440, GRID),
    (pattern("window_2d", window=2), 440, GRID),
    (pattern("strided", stride=17), 257, PREFIXED),
    (pattern("strided"), 440, GRID),
    (pattern("longformer", window=5, num_global=3), 251, PREFIXED),
    (pattern("bigbird", block_size=7, num_random=2, num_global=1), 251, PREFIXED),
    (pattern("bigbird", block_size=5, window=0, num_random=1), 263, SEQUENCE),
]
IDS = [f"{made.name}-{n}" for made, n, _ in CASES]


def inputs(n: int, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    q = torch.randn(B, H, n, D_HEAD, dtype=dtype, requires_grad=True)
    k = torch.randn(B, G, n, D_HEAD, dtype=dtype, requires_grad=True)
    return q, k, torch.randn(B, G, n, E_HEAD, dtype=dtype, requires_grad=True)


def results(kernel: str, leaves: list[Tensor], *qkv: Tensor, **options) -> list[Tensor]:
    """The result with gradients, the gradients, and the result without gradients."""
    out = attend(*qkv, kernel=kernel, **options)
    weight = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view_as(out)
    gradients = torch.autograd.grad((out * weight).sum(), leaves)
    with torch.no_grad():
        return [out, *gradients, attend(*qkv, kernel=kernel, **options)]


def compare(made: Pattern, n: int, layout: Layout, *, bias: Tensor | None = None, position=None, **options) -> Tensor:
    qkv = inputs(n)
    leaves = [*qkv, *([] if bias is None else [bias]), *([] if position is None else position.parameters())]
    options = {"pattern": made, "layout": layout, "bias": bias, "position": position, **options}
    dense, ours = results("explicit", leaves, *qkv, **options), results("gathered", leaves, *qkv, **options)
    for a, b in zip(dense, ours, strict=True):
        torch.testing.assert_close(b, a)
    return ours[0]


@pytest.fixture(autouse=True)
def _several_chunks(monkeypatch):
    """Tests are small; without gradients they are to be cut into pieces all the same."""
    monkeypatch.setitem(gathered.CHUNK, "cpu", 2000)


@pytest.mark.parametrize(("made", "n", "layout"), CASES, ids=IDS)
def test_equals_dense_attention(made, n, layout):
    assert gathered.plan_of(made, n, layout, torch.device("cpu")) is not None  # so blocks are gathered, indeed
    compare(made, n, layout)


@pytest.mark.parametrize(("made", "n", "layout"), CASES, ids=IDS)
def test_equals_dense_attention_with_padding(made, n, layout):
    mask = torch.rand(B, 1, 1, n) > 0.3
    mask[1] = False  # a sequence that is nothing but padding
    out = compare(made, n, layout, mask=mask)
    assert (out[1] == 0).all()


@pytest.mark.parametrize(("made", "n", "layout"), CASES, ids=IDS)
def test_equals_dense_attention_with_any_mask_and_a_learned_bias(made, n, layout):
    mask = torch.rand(1, H, n, n) > 0.8  # so sparse that rows of a window may be empty
    mask[:, 1, ::7] = False
    bias = torch.randn(B, 1, n, n, dtype=torch.float64, requires_grad=True)
    out = compare(made, n, layout, mask=mask, bias=bias)
    rows = (mask & made.mask(n, layout)).any(dim=-1)
    assert not rows.all()
    assert ((out != 0).any(dim=-1) == rows.expand(B, H, n)).all()


@pytest.mark.parametrize("shape", [(1, H, 1, 440), (B, 1, 440, 1), (1, 1, 1, 1), (B, H, 440, 440)], ids=str)
def test_a_bias_may_be_broadcast_in_any_way(shape):
    bias = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    compare(pattern("window_2d", window=1), 440, GRID, bias=bias, mask=torch.rand(shape) > 0.2)


@pytest.mark.parametrize(("made", "n", "layout"), CASES, ids=IDS)
def test_equals_dense_attention_with_a_position(made, n, layout):
    position = T5Bias(H) if layout.grid is None else RelativeBias(H, layout)
    nn.init.normal_(position.double().table)
    bias = torch.randn(1, H, n, n, dtype=torch.float64, requires_grad=True)
    compare(made, n, layout, position=position, bias=bias if n < 260 else None)


def test_a_position_never_becomes_a_matrix(monkeypatch):
    layout, sizes = Layout(1, (31, 37)), []
    position, n = RelativeBias(H, layout), 1 + 31 * 37
    at = RelativeBias.at

    def watched(self, *arguments):
        bias = at(self, *arguments)
        sizes.append(bias.numel())
        return bias

    monkeypatch.setattr(RelativeBias, "at", watched)
    q, k, v = inputs(n, torch.float32)
    attend(q, k, v, pattern=pattern("window_2d", window=2), layout=layout, position=position, kernel="gathered")
    assert 0 < sum(sizes) < H * n * n / 5


sizes = st.integers(0, 12)


@settings(max_examples=30, deadline=None)
@given(
    st.one_of(
        st.builds(lambda r, g: pattern("longformer", window=r, num_global=g), sizes, st.integers(0, 3)),
        st.builds(lambda s: pattern("strided", stride=s), st.integers(2, 40)),
        st.builds(
            lambda b, r, s: pattern("bigbird", block_size=b, num_random=r, seed=s),
            st.integers(1, 9),
            st.integers(0, 3),
            sizes,
        ),
    ),
    st.integers(97, 211),
    st.integers(0, 3),
)
def test_any_size_equals_dense_attention(made, n, prefix):
    q, k, v = (torch.randn(1, 2, n, 3, dtype=torch.float64, requires_grad=True) for _ in range(3))
    options = {"pattern": made, "layout": Layout(prefix)}
    dense, ours = (results(kernel, [q, k, v], q, k, v, **options) for kernel in ("explicit", "gathered"))
    for a, b in zip(dense, ours, strict=True):
        torch.testing.assert_close(b, a)


@pytest.mark.parametrize("made", [pattern("window", window=30), pattern("strided", stride=2)], ids=str)
def test_what_is_not_worth_gathering_is_computed_densely(made):
    assert gathered.plan_of(made, 61, SEQUENCE, torch.device("cpu")) is None
    compare(made, 61, SEQUENCE)


def test_large_scores_stay_finite():
    q, k, v = (1e4 * torch.randn(1, 2, 251, 7, dtype=torch.float64) for _ in range(3))
    for made in (pattern("strided", stride=17), pattern("window", window=5)):
        dense, ours = (attend(q, k, v, pattern=made, kernel=kernel) for kernel in ("explicit", "gathered"))
        torch.testing.assert_close(ours, dense)


def test_bfloat16_keeps_its_dtype():
    q, k, v = (torch.randn(1, 1, 67, 3) for _ in range(3))
    for made in (pattern("strided", stride=7), pattern("window", window=2)):
        exact = attend(q, k, v, pattern=made, kernel="explicit")
        half = attend(q.bfloat16(), k.bfloat16(), v.bfloat16(), pattern=made, kernel="gathered")
        assert half.dtype == torch.bfloat16
        torch.testing.assert_close(half.float(), exact, atol=0.05, rtol=0.05)


@pytest.mark.parametrize(
    "made", [pattern("strided", stride=13), pattern("longformer", window=5, num_global=1)], ids=str
)
def test_dropout_keeps_the_mean(made):
    q, k, v = torch.randn(1, 2, 151, 3), torch.randn(1, 2, 151, 3), torch.rand(1, 2, 151, 3)
    options = {"pattern": made, "kernel": "gathered"}
    some = attend(q, k, v, dropout=0.5, **options)
    whole = attend(q, k, v, **options)
    assert (some - whole).abs().max() > 0.01
    mean = torch.stack([attend(q, k, v, dropout=0.5, **options) for _ in range(200)]).mean(dim=0)
    torch.testing.assert_close(mean, whole, atol=0.15, rtol=0)


def test_a_layer_runs_it_and_every_parameter_has_a_gradient():
    layout = Layout(1, (13, 17))
    options = {"pattern": "window_2d", "window": 1, "position": "relative_bias", "layout": layout, "num_kv_heads": 2}
    layer = Attention(20, 4, kernel="gathered", **options)
    x = torch.randn(B, 222, 20)
    out = layer(x, layout=layout)
    out.square().sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in layer.parameters())
    layer.kernel = "explicit"
    torch.testing.assert_close(layer(x, layout=layout), out)


def test_plans_are_kept_but_not_for_ever():
    cpu, made = torch.device("cpu"), pattern("window", window=3)
    assert gathered.plan_of(made, 251, SEQUENCE, cpu) is gathered.plan_of(made, 251, SEQUENCE, cpu)
    for n in range(251, 291):
        gathered.plan_of(made, n, SEQUENCE, cpu)
    assert gathered._kept_plan.cache_info().currsize <= 16


def test_a_plan_made_in_inference_mode_serves_training():
    made = pattern("longformer", window=2, num_global=1)
    q, k, v = inputs(239)
    with torch.inference_mode():
        attend(q, k, v, pattern=made, kernel="gathered")
    attend(q, k, v, pattern=made, kernel="gathered").sum().backward()
    assert q.grad is not None


REQUEST = Request("cpu", torch.float32, 1, 2, 2, 101, 101, 7, pattern="window")


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"pattern": None}, "here all pairs meet; use kernel='sdpa'"),
        ({"pattern": "causal"}, "use kernel='tiled'"),
        ({"pattern": "performer"}, "never forms scores"),
        ({"dot": False}, "dot products only.*use kernel='explicit'"),
        ({"normalizer": "sum"}, "softmax only, not 'sum'; use kernel='explicit'"),
    ],
)
def test_what_it_cannot_do_is_said(changes, says):
    assert KERNELS["gathered"].why_not(REQUEST) is None
    with pytest.raises(ValueError, match=says):
        choose_kernel("gathered", dataclasses.replace(REQUEST, **changes))
