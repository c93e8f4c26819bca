"""What Swin Transformers are made of: blocks that attend in windows, and the merging of patches between stages.

Legend: B batch, N = R · C tokens of a grid row by row, D width.
"""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from vision_attn.attention import Attention, Layout
from vision_attn.attention.continuous import ContinuousBias
from vision_attn.layers.embed import PatchEmbed
from vision_attn.layers.encoder import DropPath
from vision_attn.layers.mlp import Mlp

Grid = tuple[int, int]

BORDERS = ("original", "timm", "torchvision")


class NormedPatchEmbed(PatchEmbed):
    """Patches, projected and normalized: (B, C, H, W) → (B, N, D)."""

    def __init__(self, patch_size: int | tuple[int, int], in_chans: int, embed_dim: int, norm_eps: float) -> None:
        super().__init__(patch_size, in_chans, embed_dim)
        self.norm = nn.LayerNorm(embed_dim, eps=norm_eps)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(super().forward(x))


class WindowPadding:
    """Makes a grid whole windows with zeros, and cuts them off again; they take part as any other patch does.

    Args:
        window: side of a window.
        shift: patches by which windows are moved.
        borders: who is followed where the grid is no whole windows. ``original``, as Swin's authors and transformers:
            zeros at the right and at the bottom, then the shift; a window larger than the grid shrinks to it, and the
            shift is 0. ``timm``: first the shift, so that zeros lie behind what was moved around. ``torchvision``:
            windows never shrink, the grid grows to at least one window.

    Raises:
        ValueError: ``borders`` is none of these.
    """

    def __init__(self, window: int, shift: int, borders: str) -> None:
        if borders not in BORDERS:
            raise ValueError(f"borders={borders!r}: choose {', '.join(BORDERS)}")
        self.window, self.shift, self.borders = window, shift, borders

    def sides(self, grid: Grid) -> Grid:
        """The grid with the zeros."""

        def padded(side: int) -> int:
            window = self.window if self.borders == "torchvision" else min(self.window, side)
            return -(-side // window) * window

        return padded(grid[0]), padded(grid[1])

    def _moved(self, grid: Grid) -> Grid:
        """How far timm rolls before it pads."""
        if self.borders != "timm":
            return 0, 0
        return self.shift if grid[0] > self.window else 0, self.shift if grid[1] > self.window else 0

    def pad(self, x: Tensor, grid: Grid) -> Tensor:
        """(B, R · C, D) → (B, N', D) of the padded grid."""
        (rows, columns), (down, right) = self.sides(grid), self._moved(grid)
        if (rows, columns) == tuple(grid):
            return x
        x = x.unflatten(1, grid)
        if down or right:
            x = x.roll((-down, -right), (1, 2))
        x = F.pad(x, (0, 0, 0, columns - grid[1], 0, rows - grid[0]))
        # the pattern moves everything again, and must find what it expects
        return (x.roll((down, right), (1, 2)) if down or right else x).flatten(1, 2)

    def cut(self, x: Tensor, grid: Grid) -> Tensor:
        """(B, N', D) of the padded grid → (B, R · C, D)."""
        (rows, columns), (down, right) = self.sides(grid), self._moved(grid)
        if (rows, columns) == tuple(grid):
            return x
        x = x.unflatten(1, (rows, columns))
        if down or right:
            x = x.roll((-down, -right), (1, 2))
        x = x[:, : grid[0], : grid[1]]
        return (x.roll((down, right), (1, 2)) if down or right else x).flatten(1, 2)


class WindowLayer(nn.Module):
    """Attention in windows and MLP, each with a residual connection: (B, N, D) → (B, N, D), for any grid.

    Args:
        dim: D.
        num_heads: attention heads.
        window: side of a window.
        shift: patches by which the windows are moved.
        borders: see ``WindowPadding``.
        res_post_norm: normalize what each half adds (Swin V2: Liu et al. 2021, arXiv 2111.09883) instead of what it
            is given (Swin: Liu et al. 2021, arXiv 2103.14030).
        mlp_ratio: hidden width of the MLP as a multiple of D.
        drop_path: probability that a sample skips a half.
        dropout: after each projection.
        norm_eps: ε of the layer norms.
        attention: what ``Attention`` takes beyond its width, heads and pattern.
    """

    def __init__(
        self,
        dim: int,
        num_heads: int,
        *,
        window: int,
        shift: int = 0,
        borders: str = "original",
        res_post_norm: bool = False,
        mlp_ratio: float = 4.0,
        drop_path: float = 0.0,
        dropout: float = 0.0,
        norm_eps: float = 1e-5,
        attention: dict[str, Any] | None = None,
    ) -> None:
        super().__init__()
        self.res_post_norm = res_post_norm
        self.padding = WindowPadding(window, shift, borders)
        self.norm1 = nn.LayerNorm(dim, eps=norm_eps)
        windows: dict[str, Any] = {"pattern": "shifted_windows", "window": window, "shift": shift}
        self.attn = Attention(dim, num_heads, proj_dropout=dropout, **windows, **(attention or {}))
        self.norm2 = nn.LayerNorm(dim, eps=norm_eps)
        self.mlp = Mlp(dim, int(dim * mlp_ratio), dropout=dropout)
        self.drop_path = DropPath(drop_path) if drop_path else nn.Identity()

    def forward(self, x: Tensor, grid: Grid) -> Tensor:
        """(B, R · C, D) → the same.

        Args:
            x: tokens.
            grid: (R, C).
        """
        if self.res_post_norm:
            x = x + self.drop_path(self.norm1(self._attend(x, grid)))
            return x + self.drop_path(self.norm2(self.mlp(x)))
        x = x + self.drop_path(self._attend(self.norm1(x), grid))
        return x + self.drop_path(self.mlp(self.norm2(x)))

    def _attend(self, x: Tensor, grid: Grid) -> Tensor:
        layout = Layout(0, self.padding.sides(grid))
        return self.padding.cut(self.attn(self.padding.pad(x, grid), layout=layout), grid)


class PatchMerging(nn.Module):
    """Two by two neighbours become one token of twice the width: (B, R · C, D) → (B, ⌈R/2⌉ · ⌈C/2⌉, 2D).

    Args:
        dim: D.
        norm_last: normalize the result (Swin V2) instead of the four (Swin).
        norm_eps: ε of the layer norm.
    """

    def __init__(self, dim: int, *, norm_last: bool = False, norm_eps: float = 1e-5) -> None:
        super().__init__()
        self.norm_last = norm_last
        self.norm = nn.LayerNorm(2 * dim if norm_last else 4 * dim, eps=norm_eps)
        self.reduction = nn.Linear(4 * dim, 2 * dim, bias=False)

    @staticmethod
    def grid(grid: Grid) -> Grid:
        """(rows, columns) after merging."""
        return -(-grid[0] // 2), -(-grid[1] // 2)

    def forward(self, x: Tensor, grid: Grid) -> Tensor:
        (rows, columns), width = self.grid(grid), x.shape[2]
        x = x.unflatten(1, grid)
        if grid[0] % 2 or grid[1] % 2:  # a last row or column without a neighbour gets zeros
            x = F.pad(x, (0, 0, 0, grid[1] % 2, 0, grid[0] % 2))
        # The order of the four is that of every checkpoint: down the first column, then the second.
        x = x.view(-1, rows, 2, columns, 2, width).permute(0, 1, 3, 4, 2, 5).reshape(-1, rows * columns, 4 * width)
        return self.norm(self.reduction(x)) if self.norm_last else self.reduction(self.norm(x))


class WindowStage(nn.Module):
    """Merging of patches, but in the first stage, and layers whose windows are shifted in turn.

    Args:
        dim: D, of the result.
        merge: whether the tokens come with half the width and are merged first.
        layers: keywords of each ``WindowLayer``.
        merging: keywords of ``PatchMerging``.
    """

    def __init__(self, dim: int, *, merge: bool, layers: list[dict[str, Any]], merging: dict[str, Any]) -> None:
        super().__init__()
        self.downsample = PatchMerging(dim // 2, **merging) if merge else None
        self.blocks = nn.ModuleList(WindowLayer(dim, **keywords) for keywords in layers)

    def set_reference(self, window: int) -> None:
        """Continuous relative positions, if there are any, divide offsets by windows of this side; 0 for their own."""
        for block in self.blocks:
            position = block.attn.position  # type: ignore[union-attr]
            if isinstance(position, ContinuousBias) and window:
                position.reference = (window, window)

    def forward(self, x: Tensor, grid: Grid) -> tuple[Tensor, Grid]:
        """(B, R · C, D) and (R, C) → the same after the stage."""
        if self.downsample is not None:
            x, grid = self.downsample(x, grid), self.downsample.grid(grid)
        for block in self.blocks:
            x = block(x, grid)
        return x, grid


def to_map(x: Tensor, grid: Grid) -> Tensor:
    """(B, R · C, D) → (B, D, R, C)."""
    return x.transpose(1, 2).unflatten(2, grid)


def pad_to_patches(x: Tensor, patch: tuple[int, int], borders: str) -> Tensor:
    """Images (B, C, H, W) as whole patches: with zeros at the right and at the bottom; torchvision cuts off instead."""
    over = x.shape[-2] % patch[0], x.shape[-1] % patch[1]
    if not any(over):
        return x
    if borders == "torchvision":
        return x[..., : x.shape[-2] - over[0], : x.shape[-1] - over[1]]
    return F.pad(x, (0, -x.shape[-1] % patch[1], 0, -x.shape[-2] % patch[0]))


def start_as_identity(module: nn.Module) -> None:
    """Each half of Swin V2's layers begins as nothing, for the norms of what they add begin with zeros."""
    for layer in module.modules():
        if isinstance(layer, WindowLayer) and layer.res_post_norm:
            for norm in (layer.norm1, layer.norm2):
                nn.init.zeros_(norm.weight)
