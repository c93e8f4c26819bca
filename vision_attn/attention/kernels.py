"""Kernels: who does the arithmetic.

A kernel answers ``why_not(request)``: None when it can serve the request, else the reason. ``kernel="auto"``
takes, of those without an objection, the one that the measured table calls fastest; a kernel asked for by
name that objects raises its objection.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import TYPE_CHECKING, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vision_attn.attention import kernel_table
from vision_attn.attention.layout import SEQUENCE, Layout
from vision_attn.attention.masks import additive, merge_masks, open_rows
from vision_attn.attention.normalizers import FUSED, resolve_normalizer
from vision_attn.attention.scores import Score, dot_scores

if TYPE_CHECKING:
    from collections.abc import Callable

    from vision_attn.attention.patterns import Pattern
    from vision_attn.attention.relative import PairBias


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
        pattern: the name of the pattern that says which pairs meet; None where all may.
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
    pattern: str | None = None


@dataclasses.dataclass
class Operands:
    """The tensors of one call. ``scale`` belongs to the dot form; ``score`` computes scores where there is none.

    A kernel that skips pairs reads ``pattern`` and ``position`` itself; one that does not asks for ``dense()``.
    """

    q: Tensor  # (B, H, N, d)
    k: Tensor  # (B, G, M, d)
    v: Tensor  # (B, G, M, e)
    scale: float | None
    score: Score
    bias: Tensor | None
    mask: Tensor | None  # rows may be empty until ``dense`` opens them
    normalizer: str | Callable[[Tensor], Tensor] = "softmax"
    dropout: float = 0.0
    pattern: Pattern | None = None
    layout: Layout = SEQUENCE
    position: PairBias | None = None
    some: Tensor | None = None  # (…, N, 1), False for rows that were empty; their result is zero
    low_rank: nn.Module | None = None  # Linformer or Performer
    key_mask: Tensor | None = None  # (B, 1, 1, M), the mask as these two take it
    whole_k: Tensor | None = None  # Linformer's keys before they were shortened

    def dense(self) -> Operands:
        """The same with pattern and position written out as mask and bias, and empty rows opened.

        A softmax over a row without any key is not finite; an opened row is, and ``finish`` sets its result to zero.
        """
        n, m = self.q.shape[2], self.k.shape[2]
        bias, mask = self.bias, self.mask
        if self.position is not None:
            position = self.position.dense(n, m, self.layout, self.q.device)
            bias = position if bias is None else bias + position
        if self.pattern is not None:
            mask = merge_masks(mask, pattern_mask(self.pattern, n, self.layout, str(self.q.device))[None, None])
        some = self.some
        if mask is not None and (some is None or mask is not self.mask):
            mask, some = open_rows(mask)
        return dataclasses.replace(self, bias=bias, mask=mask, pattern=None, position=None, some=some)

    def finish(self, out: Tensor) -> Tensor:
        """Zeros in the rows of ``out`` (B, H, N, …) that may attend to nothing."""
        return out if self.some is None else out * self.some


def pattern_mask(pattern: Pattern, n: int, layout: Layout, device: str) -> Tensor:
    """The (N, N) mask of a pattern, kept where it is small: every layer and step asks for the same one."""
    # while a graph is exported, tensors and sizes may stand for others and must not outlive that
    keep = not torch.compiler.is_exporting() and n <= 2048
    return (_kept_mask if keep else _kept_mask.__wrapped__)(pattern, n, layout, device)


@functools.lru_cache(maxsize=16)
def _kept_mask(pattern: Pattern, n: int, layout: Layout, device: str) -> Tensor:
    return pattern.mask(n, layout, torch.device(device))


def normalizer_name(normalizer: str | Callable[[Tensor], Tensor]) -> str:
    """The name of a normalizer that is a name, a function or a module."""
    if isinstance(normalizer, str):
        return normalizer
    return str(getattr(normalizer, "name", None) or getattr(normalizer, "__name__", type(normalizer).__name__))


class Kernel(Protocol):
    """One way to compute normalize(score(q, k) + bias) · v; zeros in rows that may attend to nothing."""

    name: str

    def why_not(self, request: Request) -> str | None: ...

    def __call__(self, o: Operands) -> Tensor: ...


def weights_of(o: Operands) -> Tensor:
    """The (B, H, N, M) weights of operands that are ``dense()``, written out. Rows once empty are not yet zero."""
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
        if request.pattern == "performer":
            return "performer never forms scores; use kernel='auto'"
        return None

    def __call__(self, o: Operands) -> Tensor:
        o = o.dense()
        weights = weights_of(o)
        if o.dropout:
            weights = F.dropout(weights, o.dropout)
        return o.finish(mix_values(weights, o.v))


class SDPA:
    """PyTorch's fused kernels (flash, memory-efficient, cuDNN, CPU flash), chosen by PyTorch itself."""

    name = "sdpa"

    def why_not(self, request: Request) -> str | None:
        if not request.dot:
            return "it computes dot products only, and this score is none; use kernel='explicit'"
        if request.normalizer not in FUSED:
            return f"it computes softmax only, not {request.normalizer!r}; use kernel='explicit'"
        if request.pattern == "performer":
            return "performer never forms scores; use kernel='auto'"
        return None

    def __call__(self, o: Operands) -> Tensor:
        o = o.dense()
        out = F.scaled_dot_product_attention(
            o.q,
            o.k,
            o.v,
            attn_mask=o.mask if o.bias is None else additive(o.mask, o.bias, o.q.dtype),
            dropout_p=o.dropout,
            scale=o.scale,
            enable_gqa=o.q.shape[1] != o.k.shape[1],
        )
        return o.finish(out)


KERNELS: dict[str, Kernel] = {kernel.name: kernel for kernel in (Explicit(), SDPA())}


def register_kernel(kernel: Kernel) -> Kernel:
    """Makes a kernel available by name, and to ``auto``."""
    KERNELS[kernel.name] = kernel
    return kernel


def choose_kernel(name: str, request: Request) -> Kernel:
    """The kernel of that name, or for ``auto`` the fastest that can serve the request.

    Raises:
        ValueError: unknown name, or the kernel's objection to this request.
    """
    if name == "auto":
        # flex compiles for every shape: only where it skips pairs on a GPU is it worth a thought, or the asking
        skip = "" if request.pattern and request.device != "cpu" else "flex"
        able = [name for name, kernel in KERNELS.items() if name != skip and kernel.why_not(request) is None]
        return KERNELS[able[0] if len(able) == 1 else kernel_table.fastest(request, able)]
    if name not in KERNELS:
        raise ValueError(f"unknown kernel {name!r}; there are: auto, {', '.join(KERNELS)}")
    objection = KERNELS[name].why_not(request)
    if objection:
        raise ValueError(f"kernel {name!r} cannot serve this request: {objection}")
    return KERNELS[name]
