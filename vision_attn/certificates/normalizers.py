"""Rows 9, 10, 12 and the graphical models of 15: how scores become weights."""

from __future__ import annotations

import itertools
import math
from functools import partial
from typing import Any

import torch
from torch import Tensor

from vision_attn.attention import attention_weights
from vision_attn.attention.checks import checking
from vision_attn.attention.normalizers import collect_log_probs, log_weights, make_normalizer, resolve_normalizer
from vision_attn.certificates.registry import (
    ALSO_BF16,
    EXACT,
    Setting,
    certificate,
    gap,
    gaps,
    gradients,
    holds,
    refuses,
)

EVERY = (*ALSO_BF16, torch.float16)


@certificate(
    "9", "sum: (1·apple + .71·orange + .5·iPhone) / 2.21 has weights .452/.321/.226", dtypes=EXACT, kernel=True
)
def shares(s: Setting) -> float:
    scores, words = s.tensor([[[[1], [0.71], [0.5]]]]), s.tensor([[[[1, 2, 1], [2, 2, 0], [0, 2, 3]]]])
    weights = attention_weights(s.tensor([[[[1]]]]), scores, score="dot", normalizer="sum")[0, 0]
    mixed = s.attend(s.tensor([[[[1]]]]), scores, words, score="dot", normalizer="sum")[0, 0]
    exact = s.tensor([[1, 0.71, 0.5]]) / 2.21
    printed = [round(float(w), 3) for w in weights[0]]
    return max(gaps((weights, exact), (mixed, exact @ words[0, 0])), holds(printed == [0.452, 0.321, 0.226]))


@certificate("9b", "scores [1, −1]: the sum is refused with a reason, the exponential takes them")
def negative_scores(s: Setting) -> float:
    scores = s.tensor([[[[1, -1]]]])
    e = math.exp(2)
    weights = resolve_normalizer("softmax")(scores)[0, 0]
    refused = refuses(lambda: resolve_normalizer("sum")(scores), "sum", "-1", "negative")
    return max(refused, gap(weights, s.tensor([[e / (1 + e), 1 / (1 + e)]])))


@certificate("10", "scores of ±10,000 stay finite, forward and backward", dtypes=EVERY, kernel=True, tolerance=0.0)
def large_scores(s: Setting) -> float:
    # q·k/√d = ±10,000, and the products before they are scaled, ±40,000, are near the end of float16
    sign = s.randn(2, 3, 11, 1).sign()
    q, k = 50 * torch.ones_like(s.randn(2, 3, 5, 16)), 50 * sign.expand(-1, -1, -1, 16)
    q, k, v = q.requires_grad_(), k.clone().requires_grad_(), s.randn(2, 3, 11, 13, grad=True)
    out = s.attend(q, k, v)
    return holds(all(bool(t.isfinite().all()) for t in (out, *gradients(out, q, k, v))))


@certificate(
    "10b",
    "scale first: products too large for float16 give the weights of their scaled size",
    dtypes=EVERY,
    kernel=True,
)
def scale_first(s: Setting) -> float:
    # q·k of up to 256·16² = 65,536 overflows float16; divided by √256 it is 4,096
    q, k, v = 16 * torch.ones_like(s.randn(1, 1, 3, 256)), s.randn(1, 1, 5, 256), s.randn(1, 1, 5, 7)
    k[:, :, 1] = 16
    return gap(s.attend(q, k, v), v[:, :, [1]].expand(-1, -1, 3, -1))


@certificate("10c", "log-space equals direct, and is finite where weights underflow")
def log_space(s: Setting) -> float:
    scores = 3 * s.randn(2, 3, 5, 11)
    shares = (scores - scores.amax(-1, keepdim=True)).exp()
    far = log_weights(s.tensor([[[[0, -2000]]]]))
    return max(
        gap(log_weights(scores).exp(), shares / shares.sum(-1, keepdim=True)), gap(far, s.tensor([[[[0, -2000]]]]))
    )


@certificate("10d", "a number added to all scores of a row changes nothing, so the maximum may go", kernel=True)
def shift(s: Setting) -> float:
    q, k, v = s.randn(2, 3, 5, 7), s.randn(2, 3, 11, 7), s.randn(2, 3, 11, 13)
    return gap(s.attend(q, k, v, bias=s.randn(2, 3, 5, 1).expand(2, 3, 5, 11)), s.attend(q, k, v))


@certificate("10e", "NaN in q, k, v or a bias is named with its place while checking, and not spread", dtypes=EVERY)
def nan_is_named(s: Setting) -> float:
    names, errors = ("q", "k", "v", "bias"), []
    for name in names:
        given = {"q": s.randn(2, 3, 5, 7), "k": s.randn(2, 3, 11, 7), "v": s.randn(2, 3, 11, 13)}
        given["bias"] = s.randn(2, 3, 5, 11)
        given[name][1, 2, 3, 4] = math.nan
        with checking():
            errors.append(refuses(partial(s.attend, **given), f"{name} (", "1 NaN", "batch 1, head 2"))
    return max(errors)


@certificate("12", "hard attention takes the value of the best key, whole", kernel=True)
def hard(s: Setting) -> float:
    q, k, v = s.randn(2, 3, 5, 7), s.randn(2, 3, 11, 7), s.randn(2, 3, 11, 13)
    best = torch.einsum("bhnd,bhmd->bhnm", q, k).argmax(-1)
    expected = v.gather(2, best[..., None].expand(-1, -1, -1, 13))
    return gaps(*((s.attend(q, k, v, normalizer=name), expected) for name in ("hard", "straight_through")))


@certificate("12b", "straight-through: hard forward, the gradient of soft attention backward")
def straight_through(s: Setting) -> float:
    scores, weight = s.randn(2, 3, 5, 11, grad=True), s.randn(2, 3, 5, 11)
    hard_out, soft_out = resolve_normalizer("straight_through")(scores), log_weights(scores).exp()
    found = torch.autograd.grad((hard_out * weight).sum(), scores)[0]
    expected = torch.autograd.grad((soft_out * weight).sum(), scores)[0]
    return max(gap(found, expected), holds(set(hard_out.detach().unique().tolist()) <= {0.0, 1.0}))


CRITICAL = 27.88
"""χ² of 9 degrees of freedom that chance exceeds once in 1,000 times."""


@certificate(
    "12c",
    "samples follow the weights: χ² over 9 degrees of freedom below its 99.9 % point",
    dtypes=EXACT,
    tolerance=1.0,
)
def chi_square(s: Setting) -> float:
    draws = 20_000
    scores = s.randn(1, 1, 1, 10)
    rows = resolve_normalizer("sampled")(scores.expand(1, 1, draws, 10))
    expected = draws * log_weights(scores).exp()[0, 0, 0].double()
    counts = rows.double().sum((0, 1, 2))
    chi = float(((counts - expected) ** 2 / expected).sum())
    return max(chi / CRITICAL, 2 * holds(bool((rows.sum(-1) == 1).all())))


@certificate(
    "12d",
    "REINFORCE with a baseline hits the enumerated gradient within 4 standard errors",
    dtypes=EXACT,
    tolerance=4.0,
)
def reinforce(s: Setting) -> float:
    draws, keys = 20_000, 7
    scores, reward = s.randn(1, 1, 1, keys, grad=True), s.randn(keys) + 3
    # of Σ p(i) r(i), over all choices i
    exact = torch.autograd.grad((log_weights(scores).exp()[0, 0, 0] * reward).sum(), scores)[0]
    with collect_log_probs() as taken:
        chosen = resolve_normalizer("sampled")(scores.expand(1, 1, draws, keys))
    gain = (chosen.detach() @ reward)[0, 0] - reward.mean()  # a baseline leaves the mean as it is
    # one gradient per draw: d log p(i) / d scores = one-hot(i) − p, which the collected log-probabilities must give
    each = (chosen[0, 0].detach() - log_weights(scores.detach()).exp()[0, 0]) * gain[:, None]
    estimate = torch.autograd.grad((taken[0][0, 0] * gain).mean(), scores)[0][0, 0, 0]
    error = each.double().std(0) / math.sqrt(draws)
    return max(float(((estimate - exact[0, 0, 0]).abs().double() / error).max()), 1e5 * gap(estimate, each.mean(0)) / 2)


@certificate(
    "12e", "a baseline takes variance off REINFORCE, and leaves its mean", dtypes=(torch.float64,), tolerance=0.5
)
def baseline(s: Setting) -> float:
    weights, reward = log_weights(s.randn(1, 1, 1, 7)).exp()[0, 0, 0].double(), s.randn(7).double() + 3
    slope = torch.eye(7, dtype=torch.float64, device=weights.device) - weights  # row i: d log p(i) / d scores

    def moments(gain: Tensor) -> tuple[Tensor, Tensor]:
        each = slope * gain[:, None]
        mean = weights @ each
        return mean, weights @ (each - mean).square().sum(-1)

    (plain, spread), (same, less) = moments(reward), moments(reward - weights @ reward)
    return max(float(less / spread), 1e9 * gap(same, plain))


def _chain(s: Setting) -> Any:
    """Without links between neighbours, for three heads."""
    chain: Any = make_normalizer("linear_chain", 3)
    return chain.to(s.device, s.dtype)


@certificate("15b", "linear-chain marginals equal the enumeration of all 2⁷ choices, gradients too", dtypes=EXACT)
def chain(s: Setting) -> float:
    scores, layer = s.randn(2, 3, 1, 7, grad=True), _chain(s)
    with torch.no_grad():
        layer.pairwise.copy_(s.tensor([-1.1, 0.7, 2.3]))
    choices = s.tensor(list(itertools.product((0, 1), repeat=7)))  # (128, 7)
    together = (choices[:, 1:] * choices[:, :-1]).sum(-1)
    energy = (scores - math.log(7)) @ choices.T + layer.pairwise[:, None, None] * together  # (2, 3, 1, 128)
    expected = log_weights(energy).exp() @ choices
    out = layer(scores)
    leaves = (scores, layer.pairwise)
    return gaps((out, expected), *zip(gradients(out, *leaves), gradients(expected, *leaves), strict=True))


@certificate("15c", "independent choices by the odds of each score; they are a chain without links")
def bernoulli(s: Setting) -> float:
    scores = s.randn(2, 3, 5, 7)
    out = resolve_normalizer("bernoulli")(scores)
    odds = scores.exp() / 7
    return gaps((out, odds / (1 + odds)), (_chain(s)(scores), out))
