"""Positions: how tokens learn where they are.

Attention does not see order: shuffle the tokens and the result is shuffled alike. A position breaks that, by an
addition to the tokens, before the first layer, or inside every layer: by an addition to the scores (``relative.py``)
or by turning queries and keys (``rotary.py``).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from vision_attn.attention.continuous import ContinuousBias
from vision_attn.attention.layout import Layout
from vision_attn.attention.relative import PairBias, RelativeBias, T5Bias
from vision_attn.attention.rotary import AxialRotary, Rotary, SequenceRotary

TOKEN_POSITIONS = ("learned", "sinusoidal", "sinusoidal_1d", "none")
LAYER_POSITIONS: dict[str, type[PairBias] | type[Rotary]] = {
    "t5": T5Bias,
    "relative_bias": RelativeBias,
    "cpb": ContinuousBias,
    "rope": AxialRotary,
    "rope_1d": SequenceRotary,
}
POSITIONS = (*TOKEN_POSITIONS, *LAYER_POSITIONS)


def check_position(name: str) -> None:
    """Refuses a name that is none of ``POSITIONS``.

    Raises:
        ValueError: listing them.
    """
    if name not in POSITIONS:
        raise ValueError(f"unknown position {name!r}; there are: {', '.join(POSITIONS)}")


def make_layer_position(
    name: str, num_heads: int, head_dim: int, layout: Layout | None = None
) -> PairBias | Rotary | None:
    """A position that acts inside an attention layer.

    Args:
        name: one of ``LAYER_POSITIONS``; for a position that is added to the tokens the layer does nothing.
        num_heads: H.
        head_dim: d.
        layout: how the tokens lie at the size the layer is built for; only ``relative_bias`` needs it.

    Returns:
        a bias per pair of tokens, a rotation of queries and keys, or None.

    Raises:
        ValueError: unknown name, a head width that rotary positions cannot have, or a layout that is missing.
    """
    check_position(name)
    return LAYER_POSITIONS[name].build(num_heads, head_dim, layout) if name in LAYER_POSITIONS else None


def sinusoidal_1d(length: int, dim: int, *, temperature: float = 10000.0) -> Tensor:
    """(length, dim) table: sin in the even columns, cos in the odd ones (Vaswani et al. 2017, section 3.5).

    Raises:
        ValueError: an odd width.
    """
    if dim % 2:
        raise ValueError(f"sinusoidal positions need an even width, got {dim}")
    frequency = torch.exp(torch.arange(0, dim, 2, dtype=torch.float64) * (-math.log(temperature) / dim))
    angle = torch.arange(length, dtype=torch.float64)[:, None] * frequency  # (length, dim / 2)
    return torch.stack([angle.sin(), angle.cos()], dim=-1).flatten(1).float()


def sinusoidal_2d(height: int, width: int, dim: int, *, temperature: float = 10000.0) -> Tensor:
    """(height · width, dim) table, row by row: half the columns tell the row, half the column of the grid.

    Raises:
        ValueError: a width that 4 does not divide.
    """
    if dim % 4:
        raise ValueError(f"2-D sinusoidal positions need a width that 4 divides, got {dim}")
    rows = sinusoidal_1d(height, dim // 2, temperature=temperature)[:, None].expand(-1, width, -1)
    columns = sinusoidal_1d(width, dim // 2, temperature=temperature)[None].expand(height, -1, -1)
    return torch.cat([rows, columns], dim=-1).reshape(height * width, dim)


def token_position(kind: str, num_prefix: int, grid: tuple[int, int], dim: int) -> tuple[Tensor | None, bool]:
    """An addition to the tokens.

    Args:
        kind: ``learned``; ``sinusoidal``, by row and column; ``sinusoidal_1d``, by the place in the sequence of grid
            tokens, row by row; ``none``, or one of ``LAYER_POSITIONS``, which add nothing to the tokens.
        num_prefix: class and register tokens before the grid; a fixed position is zero there.
        grid: (rows, columns) of patches.
        dim: width of the tokens.

    Returns:
        (1, num_prefix + rows · columns, dim) initial values, or None; and whether they are to be learned.

    Raises:
        ValueError: unknown kind, or a width that a formula cannot have.
    """
    check_position(kind)
    if kind == "learned":
        return torch.nn.init.trunc_normal_(torch.empty(1, num_prefix + grid[0] * grid[1], dim), std=0.02), True
    if kind == "sinusoidal":
        table = sinusoidal_2d(*grid, dim)
    elif kind == "sinusoidal_1d":
        table = sinusoidal_1d(grid[0] * grid[1], dim)
    else:
        return None, False
    return torch.cat([table.new_zeros(num_prefix, dim), table])[None], False


def same_grid(old: Sequence[int], new: Sequence[int]) -> bool:
    """Whether two grids are equal for sure.

    A side that is a symbol, while a graph for images of any size is exported, must not be compared: that would fix it.
    """
    return all(isinstance(side, int) for side in (*old, *new)) and tuple(old) == tuple(new)


def resample_grid(position: Tensor, old: tuple[int, int], new: tuple[int, int], num_prefix: int = 0) -> Tensor:
    """Positions of a grid of patches at another grid size; those of prefix tokens are kept as they are.

    Args:
        position: (1, num_prefix + old rows · old columns, D).
        old, new: (rows, columns).
        num_prefix: class and register tokens before the grid.

    Returns:
        (1, num_prefix + new rows · new columns, D), by bicubic interpolation with antialiasing.
    """
    if same_grid(old, new):
        return position
    prefix, grid = position[:, :num_prefix], position[:, num_prefix:]
    if grid.shape[1] != old[0] * old[1]:
        raise ValueError(f"{grid.shape[1]} positions are no grid of {old[0]} × {old[1]}")
    grid = grid.reshape(1, *old, -1).permute(0, 3, 1, 2)
    grid = F.interpolate(grid.float(), size=tuple(new), mode="bicubic", antialias=True, align_corners=False)
    grid = grid.permute(0, 2, 3, 1).flatten(1, 2).to(position.dtype)
    return torch.cat([prefix, grid], dim=1)
