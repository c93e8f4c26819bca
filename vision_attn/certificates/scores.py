"""Rows 3–8: how a query is compared with a key. The words and numbers are those of the source documents."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from vision_attn.attention import attention_weights
from vision_attn.attention.normalizers import log_weights
from vision_attn.attention.scores import make_score
from vision_attn.certificates.largest import largest_tensor
from vision_attn.certificates.registry import EXACT, Setting, certificate, gap, gaps, gradients, holds

APPLE, ORANGE, IPHONE = (1, 2, 1), (2, 2, 0), (0, 2, 3)


def _words(s: Setting) -> tuple[Tensor, Tensor]:
    """Apple and orange ask; apple, orange and iPhone answer: (1, 1, 2, 3) and (1, 1, 3, 3)."""
    return s.tensor([[[APPLE, ORANGE]]]), s.tensor([[[APPLE, ORANGE, IPHONE]]])


@certificate("3", "dot: apple·apple = 6, apple·orange = 6, apple·iPhone = 7")
def dot(s: Setting) -> float:
    return gap(make_score("dot")(*_words(s))[0, 0], s.tensor([[6, 6, 7], [6, 8, 4]]))


@certificate("4", "cosine: apple–orange .866, apple–iPhone .793, orange–iPhone .392 (not .71 and .5)", dtypes=EXACT)
def cosine(s: Setting) -> float:
    found = make_score("cosine")(*_words(s))[0, 0]
    exact = [[1, 6 / math.sqrt(48), 7 / math.sqrt(78)], [6 / math.sqrt(48), 1, 4 / math.sqrt(104)]]
    printed = [round(float(x), 3) for x in (found[0, 1], found[0, 2], found[1, 2])]
    return max(gap(found, s.tensor(exact)), holds(printed == [0.866, 0.793, 0.392]))


@certificate("4b", "cosine is the dot product of unit vectors over a temperature, gradients too", kernel=True)
def cosine_is_dot(s: Setting) -> float:
    q, k, v = s.randn(2, 6, 5, 7, grad=True), s.randn(2, 3, 11, 7, grad=True), s.randn(2, 3, 11, 13)
    pairs = []
    for temperature in (1.0, 0.25):
        unit_q, unit_k = (t / t.square().sum(-1, keepdim=True).sqrt() for t in (q, k))
        out = s.attend(q, k, v, score=make_score("cosine", 6, 7, temperature=temperature))
        expected = s.attend(unit_q / temperature, unit_k, v, score="dot")
        pairs += [(out, expected), *zip(gradients(out, q, k), gradients(expected, q, k), strict=True)]
    return gaps(*pairs)


@certificate("4c", "a learned temperature, one per head, acts as that number and gets its gradient", kernel=True)
def learned_temperature(s: Setting) -> float:
    q, k, v = s.randn(2, 3, 5, 7), s.randn(2, 3, 11, 7), s.randn(2, 3, 11, 13)
    score: Any = make_score("cosine", 3, 7, temperature="learned").to(s.device, s.dtype)
    inverse = s.tensor([2.0, 5.0, 11.0]).requires_grad_()
    with torch.no_grad():
        score.logit_scale.copy_(inverse.log())
    unit_q, unit_k = (t / t.square().sum(-1, keepdim=True).sqrt() for t in (q, k))
    out = s.attend(q, k, v, score=score)
    expected = s.attend(unit_q * inverse[:, None, None], unit_k, v, score="dot")
    to_log = gradients(expected, inverse)[0] * inverse.detach()
    return gaps((out, expected), (gradients(out, score.logit_scale)[0], to_log))


@certificate("5", "q·k of unit normals has variance d, q·k/√d has variance 1: d = 16, 64, 256", tolerance=0.05)
def variance(s: Setting) -> float:
    errors = []
    for d in (16, 64, 256):
        q, k = s.randn(1, 64, 32, d), s.randn(1, 64, 32, d)
        plain, scaled = make_score("dot")(q, k).double().var(), make_score("scaled_dot")(q, k).double().var()
        errors += [abs(float(plain) / d - 1), abs(float(scaled) - 1)]
    return max(errors)


@certificate(
    "5b", "with √d the gradient of the weights survives a 64-fold d; without it vanishes", dtypes=EXACT, tolerance=0.5
)
def gradient_survives(s: Setting) -> float:
    def strength(score: str, d: int) -> float:
        """Root mean square of the derivative of a weight to its own score, w (1 − w)."""
        weights = attention_weights(s.randn(1, 16, 32, d), s.randn(1, 16, 32, d), score=score).double()
        return float((weights * (1 - weights)).square().mean().sqrt())

    kept = strength("scaled_dot", 1024) / strength("scaled_dot", 16)
    lost = strength("dot", 1024) / strength("dot", 16)
    return max(abs(math.log(kept)), lost)


@certificate("6", "general qᵀWk with W = I is the dot product, gradients too", kernel=True)
def general_identity(s: Setting) -> float:
    q, k, v = s.randn(2, 6, 5, 7, grad=True), s.randn(2, 3, 11, 7, grad=True), s.randn(2, 3, 11, 13)
    score = s.module(make_score("general", 6, 7))
    with torch.no_grad():
        score.weight.copy_(torch.eye(7))
    out, expected = s.attend(q, k, v, score=score), s.attend(q, k, v, score="dot")
    return gaps((out, expected), *zip(gradients(out, q, k), gradients(expected, q, k), strict=True))


@certificate("6b", "general: keys may be wider than queries; the score is qᵀWk of every pair", kernel=True)
def general_widths(s: Setting) -> float:
    q, k, v = s.randn(2, 6, 5, 7), s.randn(2, 3, 11, 13), s.randn(2, 3, 11, 17)
    score = s.module(make_score("general", 6, 7, 13))
    scores = torch.einsum("bhnd,hde,bhme->bhnm", q, score.weight, k.repeat_interleave(2, 1))
    weights = attention_weights(q, k, score=score)
    return gaps(
        (weights, log_weights(scores).exp()), (s.attend(q, k, v, score=score), weights @ v.repeat_interleave(2, 1))
    )


def _additive(s: Setting) -> tuple[Any, Any]:
    """An additive score, and a concat score with W = [W_q W_k]: 6 heads, queries of width 7, keys of width 13."""
    additive: Any = s.module(make_score("additive", 6, 7, 13, hidden=5))
    concat: Any = s.module(make_score("concat", 6, 7, 13, hidden=5))
    with torch.no_grad():
        concat.weight.copy_(torch.cat([additive.query, additive.key], dim=-1))
        concat.v.copy_(additive.v)
    return additive, concat


@certificate("7", "additive vᵀtanh(W_q q + W_k k) equals its formula pair by pair, gradients too")
def additive(s: Setting) -> float:
    q, k = s.randn(2, 6, 5, 7, grad=True), s.randn(2, 3, 11, 13, grad=True)
    score, _ = _additive(s)
    a = torch.einsum("bhnd,had->bhna", q, score.query)
    b = torch.einsum("bhmd,had->bhma", k.repeat_interleave(2, 1), score.key)
    expected = ((a[:, :, :, None] + b[:, :, None]).tanh() * score.v[:, None, None]).sum(-1)
    leaves = (q, k, score.query, score.key, score.v)
    out = score(q, k)
    return gaps((out, expected), *zip(gradients(out, *leaves), gradients(expected, *leaves), strict=True))


@certificate("7b", "concat vᵀtanh(W[q; k]) with W = [W_q W_k] equals additive, gradients too")
def concat_is_additive(s: Setting) -> float:
    q, k = s.randn(2, 6, 5, 7, grad=True), s.randn(2, 3, 11, 13, grad=True)
    one, two = _additive(s)
    (a, b), (x, y) = (one(q, k), two(q, k)), (gradients(score(q, k), q, k, score.v) for score in (one, two))
    return gaps((a, b), *zip(x, y, strict=True))


@certificate("7c", "additive never holds the hidden layer of all pairs, B·H·N·M·d numbers", tolerance=0.1)
def additive_memory(s: Setting) -> float:
    (b, h, n, m, d) = (1, 2, 256, 256, 64)
    q, k = s.randn(b, h, n, d), s.randn(b, h, m, d)
    score = s.module(make_score("additive", h, d))
    with torch.no_grad():
        largest = largest_tensor(lambda: score(q, k))
    if s.device.startswith("cuda"):  # a block fills an accelerator, and these pairs fit one
        return 0.0 if largest <= 2**23 else 1.0
    return largest / (b * h * n * m * d)


@certificate("8", "location: weights depend on query and place, never on what a key holds")
def location(s: Setting) -> float:
    q, errors = s.randn(2, 6, 5, 7), []
    for options in ({}, {"max_keys": 13}):
        score = s.module(make_score("location", 6, 7, **options))
        one, other = (attention_weights(q, s.randn(2, 3, 11, 7), score=score) for _ in range(2))
        moved = attention_weights(s.randn(2, 6, 5, 7), s.randn(2, 3, 11, 7), score=score)
        errors += [gap(one, other), holds(gap(moved, one) > 0.1)]
    return max(errors)


@certificate("8b", "location with a full W gives key j row j of W·q", kernel=True)
def location_rows(s: Setting) -> float:
    q, k, v = s.randn(2, 6, 5, 7), s.randn(2, 3, 11, 7), s.randn(2, 3, 11, 13)
    score = s.module(make_score("location", 6, 7, max_keys=13))
    weights = log_weights(torch.einsum("hmd,bhnd->bhnm", score.weight[:, :11], q)).exp().to(v.dtype)
    return gaps((s.attend(q, k, v, score=score), weights @ v.repeat_interleave(2, 1)))
