"""Sine positions of image tokens under a padding mask, and of boxes: the same waves for both.

Legend: B images, h × w tokens, D width.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


def waves(place: Tensor, dim: int, *, temperature: float = 10000.0) -> Tensor:
    """Sines and cosines of numbers in 0 … 1, alternating: (…) → (…, dim) (Vaswani et al. 2017, arXiv 1706.03762).

    Args:
        place: any shape; 1 is a full turn of the fastest wave.
        dim: even.
        temperature: how much slower the slowest wave is.
    """
    exponent = torch.arange(0, dim, 2, device=place.device, dtype=place.dtype) / dim
    angle = place[..., None] * (2 * math.pi) / temperature**exponent  # (…, dim / 2)
    return torch.stack([angle.sin(), angle.cos()], dim=-1).flatten(-2)


def box_waves(boxes: Tensor, dim: int, *, temperature: float = 10000.0) -> Tensor:
    """Waves of boxes or points, row before column as ``grid_waves`` has it: (…, 2 or 4) → (…, dim or 2 · dim).

    Args:
        boxes: centre x, y (and width, height) in 0 … 1.
        dim: width D of a place; ``dim // 2`` columns for each number.
        temperature: as for ``waves``.
    """
    x, y, *size = boxes.split(1, dim=-1)
    y_first = torch.cat([y, x, *size], dim=-1)  # a list of indices would be copied to the device, which waits for it
    return waves(y_first, dim // 2, temperature=temperature).flatten(-2)


def places(mask: Tensor, *, centred: bool = False, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """Where tokens lie in their own image: rows and columns in 0 … 1, each (B, h, w).

    Args:
        mask: (B, h, w), True = image.
        centred: the middle of a token; or, as in DETR's code, its far end.
        dtype: of the result.
    """
    shift, least = (0.5, 1.0) if centred else (0.0, 0.0)
    rows, columns = mask.cumsum(1, dtype=dtype), mask.cumsum(2, dtype=dtype)
    eps = 0.0 if centred else 1e-6  # a column of padding has no height
    height, width = rows[:, -1:, :].clamp(min=least) + eps, columns[:, :, -1:].clamp(min=least) + eps
    return (rows - shift) / height, (columns - shift) / width


def grid_waves(
    mask: Tensor, dim: int, *, temperature: float = 10000.0, centred: bool = False, dtype: torch.dtype = torch.float32
) -> Tensor:
    """Positions of image tokens, relative to the image without its padding: (B, h, w) → (B, h · w, dim).

    Carion et al. 2020 (arXiv 2005.12872), appendix A.4: half the columns tell the row, half the column.

    Args:
        mask: True = image.
        dim: D; 4 divides it.
        temperature, centred: as for ``waves`` and ``places``.
        dtype: of the computation and the result.

    Raises:
        ValueError: a width that 4 does not divide.
    """
    if dim % 4:
        raise ValueError(f"2-D sine positions need a width that 4 divides, got {dim}")
    sines = [waves(at, dim // 2, temperature=temperature) for at in places(mask, centred=centred, dtype=dtype)]
    return torch.cat(sines, dim=-1).flatten(1, 2)
