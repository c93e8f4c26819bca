"""Every score with every normalizer on every kernel: what is allowed is well-behaved, what is not says why."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from vision_attn.attention import KERNELS, NORMALIZERS, SCORES, Request, attend, attention_weights
from vision_attn.attention.gathered import plan_of
from vision_attn.attention.layout import Layout
from vision_attn.attention.linear import Performer
from vision_attn.attention.normalizers import FUSED, SUM_TO_ONE, make_normalizer
from vision_attn.attention.patterns import make_pattern
from vision_attn.attention.scores import make_score

DOTS = {"scaled_dot", "dot", "cosine", "general", "location"}  # bilinear forms, which fused kernels serve too
NEEDS = {"gathered": "window", "favor": "performer"}  # patterns without which a kernel has nothing to do
KERNELS = {name: kernel for name, kernel in KERNELS.items() if name != "flex"}  # each call of it compiles: test_flex.py
ALL = list(itertools.product(SCORES, NORMALIZERS, KERNELS))
TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 4e-2}


def objection(score: str, normalizer: str, kernel: str, **more: Any) -> str | None:
    """What the kernel, or the pattern that it needs, says to a small request."""
    if kernel == "favor" and not (score in DOTS and normalizer in FUSED):
        return "the core refuses pattern='performer' before any kernel is asked"
    sizes = {"batch": 2, "heads": 3, "kv_heads": 1, "queries": 5, "keys": 5, "width": 4, "dtype": torch.float32}
    request = {"device": "cpu", "dot": score in DOTS, "normalizer": normalizer, "pattern": NEEDS.get(kernel), **more}
    return KERNELS[kernel].why_not(Request(**{**sizes, **request}))


ALLOWED = [case for case in ALL if objection(*case) is None]
REFUSED = [case for case in ALL if case not in ALLOWED]


@dataclasses.dataclass
class Call:
    """One call of ``attend``: B samples, H = groups · G heads, N queries, M keys, widths d and e."""

    q: Tensor
    k: Tensor
    v: Tensor
    options: dict[str, Any]
    allowed: Tensor  # (B, H, N, M), by mask and pattern

    @property
    def empty(self) -> Tensor:
        """(B, H, N) rows that may attend to nothing."""
        return ~self.allowed.any(-1)

    def operands(self) -> list[Tensor]:
        """All that may get a gradient."""
        modules = (self.options["score"], self.options["normalizer"])
        own = [p for module in modules if isinstance(module, nn.Module) for p in module.parameters()]
        bias = self.options["bias"]
        return [self.q, self.k, self.v, *own, *([] if bias is None else [bias])]

    def run(self, kernel: str) -> tuple[Tensor, list[Tensor]]:
        """The result and the gradients of a function of it, zeros where there is none; [] from inference kernels."""
        if kernel in KERNELS and objection("scaled_dot", "softmax", kernel, training=True) is not None:
            with torch.no_grad():
                return attend(self.q, self.k, self.v, kernel=kernel, **self.options), []
        out = attend(self.q, self.k, self.v, kernel=kernel, **self.options)
        grads = torch.autograd.grad(out.sin().sum(), self.operands(), allow_unused=True)
        assert grads[2] is not None  # the values always learn
        pairs = zip(self.operands(), grads, strict=True)
        return out, [torch.zeros_like(operand) if grad is None else grad for operand, grad in pairs]


def random_mask(kind: str, b: int, h: int, n: int, m: int) -> Tensor:
    """Broadcasts to (B, H, N, M), in each of the forms in which masks come; rows may be empty."""
    if kind == "pairs":
        return torch.rand(b, 1, n, m) < 0.5
    if kind == "heads":
        return (torch.rand(b, h, n, 1) < 0.7) & (torch.rand(b, h, n, m) < 0.9)
    if kind == "padding":
        return torch.arange(m) < torch.randint(0, m + 1, (b, 1, 1, 1))
    return torch.ones(n, m, dtype=torch.bool).tril(m - n)  # causal; with more queries than keys the first are empty


def call_of(
    case: tuple[str, str, str], sizes: tuple[int, ...], mask: str, pattern: str, biased: bool, dtype: torch.dtype
) -> Call:
    """Random operands and modules; sizes are (B, G, H / G, N, M, d, e)."""
    score, normalizer, kernel = case
    b, g, group, n, m, d, e = sizes
    pattern = NEEDS.get(kernel, pattern)
    if kernel == "gathered":
        n = 85 + 6 * n + m  # long enough for blocks to be skipped
    if pattern in ("causal", "window"):
        m = n
    if pattern == "performer":  # it forms no pairs, so nothing may depend on them
        biased, mask = False, mask if mask == "padding" else "none"
    h = g * group
    score_module, normalizer_module = make_score(score, h, d, d), make_normalizer(normalizer, h)
    for module in (score_module, normalizer_module):
        if isinstance(module, nn.Module):
            module.to(dtype).train()
            for parameter in module.parameters():
                nn.init.normal_(parameter, std=0.5)
    bias = torch.randn(b, h, n, m) if biased else torch.zeros(1, 1, 1, m)
    if normalizer == "sum":  # it divides by the sum of scores, which must be positive
        bias, biased = bias + 60, True
    shapes = (b, h, n, d), (b, g, m, d), (b, g, m, e)
    q, k, v, bias = (t.to(dtype).requires_grad_() for t in (*(torch.randn(*shape) for shape in shapes), bias))
    keep = None if mask == "none" else random_mask(mask, b, h, n, m)
    allowed = torch.ones(b, h, n, m, dtype=torch.bool) if keep is None else keep.expand(b, h, n, m)
    if pattern == "performer":
        form = score_module.as_dot(q, k)
        rule: Any = Performer(d if form is None else form[0].shape[-1], 7).to(dtype)
    else:
        rule = make_pattern({"none": "full"}.get(pattern, pattern), **({"window": 1} if pattern == "window" else {}))
        allowed = allowed if rule is None else allowed & rule.mask(n, Layout(), torch.device("cpu"))
    options = {"score": score_module, "normalizer": normalizer_module, "bias": bias if biased else None}
    return Call(q, k, v, {**options, "mask": keep, "pattern": rule}, allowed)


calls = {
    "sizes": st.tuples(*(st.integers(1, most) for most in (2, 2, 3, 7, 7, 5, 5))),
    "mask": st.sampled_from(["none", "pairs", "heads", "padding", "causal"]),
    "pattern": st.sampled_from(["none", "none", "causal", "window"]),
    "biased": st.booleans(),
    "dtype": st.sampled_from([torch.float64, torch.float32, torch.float32, torch.float16, torch.bfloat16]),
}
PLAIN = {"sizes": (2, 1, 3, 5, 7, 4, 3), "mask": "none", "pattern": "none", "biased": False, "dtype": torch.float32}
names = "-".join


@pytest.mark.parametrize("kernel", KERNELS)
def test_what_is_allowed(kernel):
    everything = kernel == "explicit"
    for score, normalizer in itertools.product(SCORES, NORMALIZERS):
        expected = everything or (score in DOTS and normalizer in FUSED)
        assert ((score, normalizer, kernel) in ALLOWED) == expected, (score, normalizer)


@pytest.mark.parametrize("case", ALLOWED, ids=names)
@settings(max_examples=10, deadline=None)
@given(**calls)
def test_results_are_finite_forward_and_backward_and_zero_where_all_is_masked(case, **drawn):
    call = call_of(case, **drawn)
    out, grads = call.run(case[2])
    assert out.shape == (*call.q.shape[:3], call.v.shape[-1])
    assert out.dtype == call.v.dtype
    assert out.isfinite().all()
    assert not out[call.empty].any()
    for operand, grad in zip(call.operands(), grads, strict=bool(grads)):
        assert grad.shape == operand.shape
        assert grad.isfinite().all()
    assert not grads or not grads[0][call.empty].any()


@pytest.mark.parametrize("case", list(itertools.product(SCORES, NORMALIZERS)), ids=names)
@settings(max_examples=8, deadline=None)
@given(**calls)
def test_weights_are_probabilities(case, **drawn):
    call = call_of((*case, "explicit"), **drawn)
    weights = attention_weights(call.q, call.k, **call.options)
    tolerance = TOLERANCE[call.q.dtype]
    assert weights.isfinite().all()
    assert weights.min() >= 0
    assert weights.max() <= 1 + tolerance
    assert not weights[~call.allowed].any()
    if case[1] in SUM_TO_ONE:
        torch.testing.assert_close(weights.double().sum(-1), (~call.empty).double(), rtol=0, atol=tolerance)


@pytest.mark.parametrize("case", [case for case in ALLOWED if case[2] not in ("explicit", "favor")], ids=names)
@settings(max_examples=8, deadline=None)
@given(**{**calls, "dtype": st.sampled_from([torch.float64, torch.float32])})
def test_every_exact_kernel_computes_the_same(case, **drawn):
    call = call_of(case, **drawn)
    (expected, expected_grads), (got, grads) = call.run("explicit"), call.run(case[2])
    tolerance = 10 * TOLERANCE[call.q.dtype]
    torch.testing.assert_close(got, expected, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(grads, expected_grads if grads else [], rtol=tolerance, atol=tolerance)


def test_the_sequences_for_gathering_are_long_enough_to_gather():
    pattern = make_pattern("window", window=1)
    assert sum(plan_of(pattern, n, Layout(), torch.device("cpu")) is not None for n in range(92, 135)) > 20


@pytest.mark.parametrize("case", list(itertools.product(SCORES, NORMALIZERS)), ids=names)
def test_auto_serves_whatever_any_kernel_serves(case):
    call = call_of((*case, "auto"), **{**PLAIN, "mask": "pairs"})
    assert call.run("auto")[0].isfinite().all()


@pytest.mark.parametrize("case", REFUSED, ids=names)
def test_what_is_not_allowed_says_why(case):
    score, normalizer, kernel = case
    call = call_of((score, normalizer, "explicit"), **{**PLAIN, "pattern": NEEDS.get(kernel, "none")})
    with pytest.raises(ValueError, match=r"\w{3,} .*\b(use|choose|give|pass)\b"):
        attend(call.q, call.k, call.v, kernel=kernel, **call.options)


@pytest.mark.parametrize("kernel", [kernel for kernel in KERNELS if kernel in NEEDS])
def test_kernels_for_patterns_refuse_to_run_without(kernel):
    call = call_of(("scaled_dot", "softmax", "explicit"), **PLAIN)
    with pytest.raises(ValueError, match=rf"kernel '{kernel}' cannot serve this request: .*use "):
        attend(call.q, call.k, call.v, kernel=kernel, **call.options)
