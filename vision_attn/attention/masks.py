"""Masks: who may attend to whom. Boolean, True = may attend, broadcastable to (B, H, N, M)."""

from __future__ import annotations

import torch
from torch import Tensor


def causal_mask(n: int, m: int | None = None, *, device: torch.device | str | None = None) -> Tensor:
    """(n, m) lower triangle with the diagonal: token i sees tokens 0 … i.

    With more keys than queries the queries are the last n positions, as in decoding with a cache.
    """
    m = n if m is None else m
    if m < n:
        raise ValueError(f"a causal mask needs at least as many keys as queries, got {n} queries and {m} keys")
    return torch.ones(n, m, dtype=torch.bool, device=device).tril(m - n)


def padding_mask(keep: Tensor, max_length: int | None = None) -> Tensor:
    """(B, 1, 1, M) mask that hides padded keys.

    Args:
        keep: (B, M) boolean, True = real token; or (B,) integer lengths, with ``max_length`` = M
            (default: the longest).
    """
    if keep.dim() == 1 and keep.dtype != torch.bool:
        m = int(keep.max()) if max_length is None else max_length
        keep = torch.arange(m, device=keep.device) < keep[:, None]
    if keep.dim() != 2 or keep.dtype != torch.bool:
        raise ValueError(f"keep must be boolean (B, M) or integer lengths (B,), got {keep.dtype} {tuple(keep.shape)}")
    return keep[:, None, None, :]


def visibility_mask(segments_q: Tensor, segments_k: Tensor | None = None) -> Tensor:
    """(B, 1, N, M) mask under which tokens see their own segment only.

    So one sequence holds several images or sentences that do not see each other, or knowledge that only the token it
    belongs to may see (UniLM: Dong et al. 2019, arXiv 1905.03197; K-BERT: Liu et al. 2020, arXiv 1909.07606).

    Args:
        segments_q: (B, N) integers, the segment of each query token.
        segments_k: (B, M) integers, the segment of each key token; default: the queries' own.

    Raises:
        ValueError: naming the shapes or the dtype.
    """
    segments_k = segments_q if segments_k is None else segments_k
    for name, value in (("segments_q", segments_q), ("segments_k", segments_k)):
        if value.dim() != 2:
            raise ValueError(f"{name} must be (batch, tokens), one segment per token, got {tuple(value.shape)}")
        if value.dtype == torch.bool or value.is_floating_point() or value.is_complex():
            raise ValueError(f"{name} must be integers that name segments, got {value.dtype}; use {name}.long()")
    if segments_q.shape[0] != segments_k.shape[0]:
        raise ValueError(
            "segments of queries and keys must be of one batch, "
            f"got {tuple(segments_q.shape)} and {tuple(segments_k.shape)}"
        )
    return (segments_q[:, :, None] == segments_k[:, None, :])[:, None]


def merge_masks(*masks: Tensor | None) -> Tensor | None:
    """A pair may attend where every mask given allows it; None where no mask is given."""
    merged: Tensor | None = None
    for mask in masks:
        if mask is not None:
            merged = mask if merged is None else merged & mask
    return merged


def check_pairwise(name: str, value: Tensor, shape: tuple[int, int, int, int]) -> Tensor:
    """Brings a mask or bias to four dimensions that broadcast to ``shape`` = (B, H, N, M).

    (N, M) and (B, N, M) are accepted too.

    Raises:
        ValueError: naming both shapes, when they do not broadcast; or the dtype, when a mask is not boolean.
    """
    if name == "mask" and value.dtype != torch.bool:
        raise ValueError(f"mask must be boolean (True = may attend), got {value.dtype}; use mask=mask.bool(), or bias=")
    if value.dim() == 3:
        value = value[:, None]
    elif value.dim() == 2:
        value = value[None, None]
    if value.dim() != 4 or any(have not in (1, want) for have, want in zip(value.shape, shape, strict=True)):
        raise ValueError(f"{name} of shape {tuple(value.shape)} does not broadcast to (B, H, N, M) = {shape}")
    return value


def open_rows(mask: Tensor) -> tuple[Tensor, Tensor]:
    """Opens rows that may attend to nothing, so that a softmax over them is finite.

    Returns:
        the mask without empty rows, and (…, N, 1) True where the row was not empty: multiply the result by it.
        In this way neither the result nor any gradient is ever NaN.
    """
    some = mask.any(dim=-1, keepdim=True)
    return mask | ~some, some


def additive(mask: Tensor | None, bias: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """Mask and bias as one tensor to be added to the scores: −inf where a pair may not attend."""
    if mask is None:
        return None if bias is None else bias.to(dtype)
    if bias is None:
        return torch.zeros_like(mask, dtype=dtype).masked_fill_(~mask, float("-inf"))
    return bias.to(dtype).masked_fill(~mask, float("-inf"))
