"""Attention: scores, normalized to weights, mix values.

Legend: B batch, H query heads, G key/value heads (G divides H), N queries, M keys, D token width,
d head width, e value width.
"""

from __future__ import annotations

import dataclasses
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from vision_attn.attention import checks
from vision_attn.attention.kernels import Operands, Request, choose_kernel, normalizer_name, weights_of
from vision_attn.attention.layout import SEQUENCE, Layout
from vision_attn.attention.linear import Linformer, Performer
from vision_attn.attention.masks import check_pairwise
from vision_attn.attention.normalizers import Normalizer, resolve_normalizer
from vision_attn.attention.patterns import Pattern
from vision_attn.attention.relative import PairBias
from vision_attn.attention.scores import Score, resolve_score


def without_autocast(q: Tensor) -> AbstractContextManager[None]:
    """The kernels decide on their own precision. The meta device, where only shapes are worked out, has no autocast."""
    return nullcontext() if q.is_meta else torch.autocast(q.device.type, enabled=False)


def _check_heads(q: Tensor, k: Tensor, v: Tensor) -> None:
    if q.dim() != 4 or k.dim() != 4 or v.dim() != 4:
        raise ValueError(f"q, k, v must be (B, H, N, d), got {tuple(q.shape)}, {tuple(k.shape)}, {tuple(v.shape)}")
    if q.shape[0] != k.shape[0] or k.shape[:3] != v.shape[:3]:
        raise ValueError(
            f"q {tuple(q.shape)}, k {tuple(k.shape)} and v {tuple(v.shape)} must agree: one batch size, "
            "and as many keys as values"
        )
    if q.shape[1] % k.shape[1]:
        raise ValueError(f"{k.shape[1]} key/value heads do not divide {q.shape[1]} query heads")


def operands(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    score: str | Score,
    bias: Tensor | None,
    mask: Tensor | None,
    normalizer: str | Normalizer,
    dropout: float = 0.0,
    pattern: Pattern | Linformer | Performer | None = None,
    layout: Layout | None = None,
    position: PairBias | None = None,
) -> Operands:
    """Checks and prepares one call."""
    _check_heads(q, k, v)
    checks.inspect(q=q, k=k, v=v, bias=bias)
    layout = layout or SEQUENCE
    score = resolve_score(score)
    form = score.as_dot(q, k)
    scale = None
    if form is not None:
        if score.needs_equal_widths and q.shape[-1] != k.shape[-1]:
            raise ValueError(f"a dot product needs equal widths, got q {tuple(q.shape)} and k {tuple(k.shape)}")
        q, k, scale = form
    pairs = (q.shape[0], q.shape[1], q.shape[2], k.shape[2])
    if pattern is not None:
        pattern.check(q.shape[2], k.shape[2], layout)
    if bias is not None:
        bias = check_pairwise("bias", bias, pairs)
    if mask is not None:
        mask = check_pairwise("mask", mask, pairs)
    chosen = resolve_normalizer(normalizer)
    if isinstance(pattern, Linformer | Performer):
        o = Operands(q, k, v, scale, score, bias, mask, chosen, dropout, None, layout, position)
        return _shortened(o, pattern)
    return Operands(q, k, v, scale, score, bias, mask, chosen, dropout, pattern, layout, position)


def refuse_pairs(o: Operands, name: str) -> None:
    """Linformer and Performer never form a pair of query and key: refuses what belongs to pairs.

    Raises:
        ValueError: saying why and what to use instead.
    """
    instead = "use pattern='window', or pattern='full'"
    if o.scale is None or normalizer_name(o.normalizer) != "softmax":
        raise ValueError(f"{name} approximates the softmax of a dot product and nothing else; {instead}")
    if o.bias is not None or o.position is not None:
        raise ValueError(f"{name} never forms a pair of query and key, so a bias has no place; {instead}")
    if o.dropout and name == "performer":
        raise ValueError(f"{name} has no weights that dropout could drop; set dropout=0, or {instead}")
    if o.mask is not None and (o.mask.shape[1] > 1 or o.mask.shape[2] > 1):
        raise ValueError(
            f"{name} mixes the keys before any query sees them, so a mask may hide keys from all queries "
            f"(B, 1, 1, M) and not from some, as a causal mask does; got {tuple(o.mask.shape)}; {instead}"
        )


def _shortened(o: Operands, pattern: Linformer | Performer) -> Operands:
    """Linformer's shortened keys and values; for Performer, what its own kernel needs."""
    refuse_pairs(o, pattern.name)
    if isinstance(pattern, Performer):
        return dataclasses.replace(o, mask=None, low_rank=pattern, key_mask=o.mask)
    k, v = pattern.project(o.k, o.v, o.mask, o.layout)
    some = None if o.mask is None else o.mask.any(dim=-1, keepdim=True)
    return dataclasses.replace(o, k=k, v=v, mask=None, low_rank=pattern, key_mask=o.mask, some=some, whole_k=o.k)


def pattern_name(o: Operands) -> str | None:
    """The name by which a kernel knows the pattern. Linformer's operands are ordinary ones by now."""
    if isinstance(o.low_rank, Performer):
        return o.low_rank.name
    return None if o.pattern is None else o.pattern.name


def request_of(o: Operands) -> Request:
    """What these operands ask of a kernel."""
    learned = [] if o.position is None else list(o.position.parameters())
    given = [x for x in (o.q, o.k, o.v, o.bias, *learned) if x is not None]
    needs_grad = torch.is_grad_enabled() and any(x.requires_grad for x in given)
    return Request(
        device=o.q.device.type,
        dtype=o.q.dtype,
        batch=o.q.shape[0],
        heads=o.q.shape[1],
        kv_heads=o.k.shape[1],
        queries=o.q.shape[2],
        keys=o.k.shape[2],
        width=o.q.shape[3],
        mask=o.mask is not None,
        bias=o.bias is not None or o.position is not None,
        training=needs_grad,
        dropout=o.dropout,
        dot=o.scale is not None,
        normalizer=normalizer_name(o.normalizer),
        pattern=pattern_name(o),
    )


def run(o: Operands, kernel: str) -> Tensor:
    """The result by a kernel of that name, or by the fastest."""
    return choose_kernel(kernel, request_of(o))(o)


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    score: str | Score = "scaled_dot",
    bias: Tensor | None = None,
    mask: Tensor | None = None,
    normalizer: str | Normalizer = "softmax",
    kernel: str = "auto",
    dropout: float = 0.0,
    pattern: Pattern | Linformer | Performer | None = None,
    layout: Layout | None = None,
    position: PairBias | None = None,
) -> Tensor:
    """normalize(score(q, k) + bias) · v.

    Args:
        q: (B, H, N, d) queries.
        k: (B, G, M, d) keys; G divides H, and H / G query heads share a key head.
        v: (B, G, M, e) values.
        score: name or module; see ``SCORES``. One with parameters must be a module.
        bias: broadcastable to (B, H, N, M), added to the scores.
        mask: boolean, broadcastable to (B, H, N, M), True = may attend. (N, M) and (B, N, M) are accepted too.
        normalizer: name, or a function from scores to weights; see ``NORMALIZERS``.
        kernel: ``auto`` or a name of ``KERNELS``.
        dropout: probability of dropping a weight; the caller passes 0 outside training.
        pattern: which pairs may meet, ``make_pattern("window", window=5)``; kernels that can skip the others.
        layout: how the tokens lie, for patterns and positions that ask; a plain sequence by default.
        position: a bias that depends on where query and key are, ``make_layer_position("t5", …)``.

    Returns:
        (B, H, N, e). Rows that may attend to nothing are zero.

    Raises:
        ValueError: shapes that do not fit (both are named), unknown names, or a kernel that cannot serve this.
    """
    with without_autocast(q):
        o = operands(
            q,
            k,
            v,
            score=score,
            bias=bias,
            mask=mask,
            normalizer=normalizer,
            dropout=dropout,
            pattern=pattern,
            layout=layout,
            position=position,
        )
        return run(o, kernel)


def attention_weights(
    q: Tensor,
    k: Tensor,
    *,
    score: str | Score = "scaled_dot",
    bias: Tensor | None = None,
    mask: Tensor | None = None,
    normalizer: str | Normalizer = "softmax",
    pattern: Pattern | Linformer | Performer | None = None,
    layout: Layout | None = None,
    position: PairBias | None = None,
) -> Tensor:
    """The (B, H, N, M) weights themselves; arguments as for ``attend``.

    Rows sum to 1 (for normalizers that do, ``SUM_TO_ONE``), or to 0 where all is masked. For Linformer and Performer
    they are the weights that the result implies; Linformer's rows do not sum to 1.
    """
    with without_autocast(q):
        o = operands(
            q,
            k,
            k,
            score=score,
            bias=bias,
            mask=mask,
            normalizer=normalizer,
            pattern=pattern,
            layout=layout,
            position=position,
        )
        if o.low_rank is not None:
            return o.finish(implied_weights(o))
        o = o.dense()
        return o.finish(weights_of(o))


def implied_weights(o: Operands) -> Tensor:
    """The (B, H, N, M) map that a low-rank result implies; Linformer and Performer never have weights over the keys."""
    assert isinstance(o.low_rank, Linformer | Performer)
    assert o.scale is not None
    k = o.k if o.whole_k is None else o.whole_k
    return o.low_rank.implied_weights(o.q, k, o.scale, o.key_mask, o.layout)
