"""Kernels: who does the arithmetic.

A kernel answers ``why_not(request)``: None when it can serve the request, else the reason. ``kernel="auto"``
takes, of those without an objection, the one that the measured table calls fastest; a kernel asked for by
name that objects raises its objection.
"""

from __future__ import annotations

import dataclasses
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from vision_attn.attention import kernel_table
from vision_attn.attention.masks import additive
from vision_attn.attention.normalizers import FUSED, resolve_normalizer
from vision_attn.attention.scores import Score, dot_scores


@dataclasses.dataclass(frozen=True)
class Request:
    """What is asked of a kernel; everything the choice may depend on.

    Attributes:
        device: ``cpu``, ``cuda``, …
        dtype: of q, k and v.
        batch, heads, kv_heads, queries, keys, width: B, H, G, N, M, d.
        mask, bias: whether there is one.
        training: whether a backward pass will follow.
        dropout: probability of dropping a weight.
        dot: whether the score is a dot product of transformed q and k.
        normalizer: its name.
    """

    device: str
    dtype: torch.dtype
    batch: int
    heads: int
    kv_heads: int
    queries: int
    keys: int
    width: int
    mask: bool = False
    bias: bool = False
    training: bool = False
    dropout: float = 0.0
    dot: bool = True
    normalizer: str = "softmax"


@dataclasses.dataclass
class Operands:
    """The tensors of one call. ``scale`` belongs to the dot form; ``score`` computes scores where there is none."""

    q: Tensor  # (B, H, N, d)
    k: Tensor  # (B, G, M, d)
    v: Tensor  # (B, G, M, e)
    scale: float | None
    score: Score
    bias: Tensor | None
    mask: Tensor | None  # no empty rows
    normalizer: str
    dropout: float


class Kernel(Protocol):
    """One way to compute normalize(score(q, k) + bias) · v."""

    name: str

    def why_not(self, request: Request) -> str | None: ...

    def __call__(self, o: Operands) -> Tensor: ...


def weights_of(o: Operands) -> Tensor:
    """The (B, H, N, M) weights, written out."""
    scores = o.score(o.q, o.k) if o.scale is None else dot_scores(o.q, o.k, o.scale)
    # In place: the product's gradient does not need its result, and (B, H, N, M) is the largest tensor there is.
    if o.bias is not None:
        scores = scores.add_(o.bias)
    if o.mask is not None:
        scores = scores.masked_fill_(~o.mask, float("-inf"))
    return resolve_normalizer(o.normalizer)(scores)


def mix_values(weights: Tensor, v: Tensor) -> Tensor:
    """Weighted sums of values, (B, H, N, M) × (B, G, M, e) → (B, H, N, e)."""
    b, h, n, m = weights.shape
    g, e = v.shape[1], v.shape[-1]
    rows = weights.view(b * g, h // g * n, m)
    return torch.bmm(rows.to(v.dtype), v.reshape(b * g, m, e)).view(b, h, n, e)


class Explicit:
    """Scores, weights and sums written out: serves everything, holds (B, H, N, M) in memory."""

    name = "explicit"

    def why_not(self, request: Request) -> str | None:
        return None

    def __call__(self, o: Operands) -> Tensor:
        weights = weights_of(o)
        if o.dropout:
            weights = F.dropout(weights, o.dropout)
        return mix_values(weights, o.v)


class SDPA:
    """PyTorch's fused kernels (flash, memory-efficient, cuDNN, CPU flash), chosen by PyTorch itself."""

    name = "sdpa"

    def why_not(self, request: Request) -> str | None:
        if not request.dot:
            return "it computes dot products only, and this score is none; use kernel='explicit'"
        if request.normalizer not in FUSED:
            return f"it computes softmax only, not {request.normalizer!r}; use kernel='explicit'"
        return None

    def __call__(self, o: Operands) -> Tensor:
        return F.scaled_dot_product_attention(
            o.q,
            o.k,
            o.v,
            attn_mask=o.mask if o.bias is None else additive(o.mask, o.bias, o.q.dtype),
            dropout_p=o.dropout,
            scale=o.scale,
            enable_gqa=o.q.shape[1] != o.k.shape[1],
        )


KERNELS: dict[str, Kernel] = {kernel.name: kernel for kernel in (Explicit(), SDPA())}


def choose_kernel(name: str, request: Request) -> Kernel:
    """The kernel of that name, or for ``auto`` the fastest that can serve the request.

    Raises:
        ValueError: unknown name, or the kernel's objection to this request.
    """
    if name == "auto":
        able = [kernel.name for kernel in KERNELS.values() if kernel.why_not(request) is None]
        return KERNELS[able[0] if len(able) == 1 else kernel_table.fastest(request, able)]
    if name not in KERNELS:
        raise ValueError(f"unknown kernel {name!r}; there are: auto, {', '.join(KERNELS)}")
    objection = KERNELS[name].why_not(request)
    if objection:
        raise ValueError(f"kernel {name!r} cannot serve this request: {objection}")
    return KERNELS[name]
