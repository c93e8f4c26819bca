"""Additive scores: the hidden layer of all pairs is never held, and the result is the same in whatever blocks."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.testing import assert_close
from torch.utils._python_dispatch import TorchDispatchMode

from vision_attn.attention import additive, attend
from vision_attn.attention.scores import Score, make_score

B, H, N, M, D, K, HIDDEN = 2, 3, 5, 7, 11, 13, 17


def build() -> tuple[Score, Tensor, Tensor]:
    score = make_score("additive", H, D, K, hidden=HIDDEN).double()
    for p in score.parameters():
        nn.init.normal_(p, std=0.7)
    q, k = (torch.randn(B, H, n, d, dtype=torch.float64, requires_grad=True) for n, d in ((N, D), (M, K)))
    return score, q, k


class Largest(TorchDispatchMode):
    """Watches every operation for the largest tensor it makes."""

    def __init__(self) -> None:
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        made = out if isinstance(out, tuple | list) else (out,)
        self.numel = max(
            [self.numel, *(t.untyped_storage().nbytes() // t.itemsize for t in made if torch.is_tensor(t))]
        )
        return out


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("name", ["additive", "concat"])
def test_the_hidden_layer_is_never_held(name, training):
    h, n, m, d = 3, 211, 223, 31
    score = make_score(name, h, d)
    q, k = torch.randn(1, h, n, d, requires_grad=training), torch.randn(1, h, m, d, requires_grad=training)
    hidden, result = h * n * m * d, h * n * m
    assert hidden > 10 * additive.BLOCK["cpu"]
    with Largest() as forward, torch.set_grad_enabled(training):
        scores = score(q, k)
    with Largest() as backward:
        if training:
            scores.sum().backward()
    assert result <= forward.numel <= max(result, additive.BLOCK["cpu"])
    assert backward.numel <= max(result, additive.BLOCK["cpu"])
    # the watch itself works
    with Largest() as naive:
        (q[..., None, :] + k[:, :, None]).tanh()
    assert naive.numel == hidden


@settings(max_examples=30, deadline=None)
@given(
    block=st.integers(1, 3000),
    heads=st.sampled_from([(1, 1), (2, 1), (4, 2)]),
    n=st.integers(1, 9),
    m=st.integers(1, 9),
    hidden=st.integers(1, 7),
)
def test_any_blocks_give_the_same(block, heads, n, m, hidden):
    score = make_score("additive", heads[0], 3, 5, hidden=hidden).double()
    q = torch.randn(2, heads[0], n, 3, dtype=torch.float64, requires_grad=True)
    k = torch.randn(2, heads[1], m, 5, dtype=torch.float64, requires_grad=True)
    whole = k.repeat_interleave(heads[0] // heads[1], dim=1)
    projected = (q @ score.query.mT)[:, :, :, None] + (whole @ score.key.mT)[:, :, None]
    want = (projected.tanh() * score.v[:, None, None]).sum(-1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(additive.BLOCK, "cpu", block)
        got = score(q, k)
        leaves = (q, k, score.query, score.key, score.v)
        gradients = [torch.autograd.grad(s.square().sum(), leaves) for s in (got, want)]
    assert_close(got, want, rtol=1e-10, atol=1e-10)
    assert_close(*gradients, rtol=1e-9, atol=1e-9)


def test_the_scores_may_be_changed_in_place():
    """As the explicit kernel does with a bias and a mask."""
    score, q, k = build()
    bias = torch.randn(N, M, dtype=torch.float64)
    mask = torch.ones(N, M, dtype=torch.bool).tril()
    got = attend(q, k, k, score=score, bias=bias, mask=mask)
    want = (score(q, k) + bias).masked_fill(~mask, -math.inf).softmax(-1) @ k
    assert_close(got, want, rtol=1e-10, atol=1e-10)
    gradients = [torch.autograd.grad(out.square().sum(), [q, k, *score.parameters()]) for out in (got, want)]
    assert_close(*gradients, rtol=1e-9, atol=1e-9)


def test_frozen_parameters_get_no_gradient():
    score, q, k = build()
    score.requires_grad_(False)
    (first,) = torch.autograd.grad(score(q, k).square().sum(), q, create_graph=True)
    (want,) = torch.autograd.grad(score(q, k).square().sum(), q)
    assert_close(first, want, rtol=1e-12, atol=1e-12)
    first.sum().backward()
    assert k.grad is not None
    assert all(p.grad is None for p in score.parameters())


def test_the_compiled_operations_are_described_rightly():
    query, key, v = torch.randn(2, N, D), torch.randn(2, M, D), torch.randn(2, D)
    checks = ("test_schema", "test_faketensor")
    torch.library.opcheck(additive._forward_op, (query, key, v, torch.float32), test_utils=checks)
    torch.library.opcheck(additive._backward_op, (torch.randn(2, N, M), query, key, v), test_utils=checks)
