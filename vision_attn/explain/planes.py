"""Where tokens lie on the image: what a map needs to be looked at, and distances to be in pixels."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from vision_attn.attention import Layout
from vision_attn.layers.windows import PatchMerging, WindowLayer, WindowPadding

Grid = tuple[int, int]


@dataclasses.dataclass(frozen=True)
class Plane:
    """Tokens of a layer on the plane of the image.

    Attributes:
        prefix: class and register tokens in front, which lie nowhere.
        grid: (rows, columns) of the tokens on the image.
        stride: (down, across) pixels between neighbours.
        padding: how windows filled the grid up before attention; None where they did not.
    """

    prefix: int
    grid: Grid
    stride: tuple[float, float]
    padding: WindowPadding | None = None

    @property
    def length(self) -> int:
        """Tokens that attention sees: prefix, grid and filling."""
        return self.prefix + math.prod(self.padding.sides(self.grid) if self.padding else self.grid)

    def to_image(self, values: Tensor) -> Tensor:
        """What each token has, (…, N), on the grid, (…, R, C); prefix and filling are left out."""
        if values.shape[-1] != self.length:
            raise ValueError(f"{values.shape[-1]} values are no {self.prefix} + {self.grid[0]} × {self.grid[1]} tokens")
        flat = values.reshape(-1, values.shape[-1], 1)[:, self.prefix :]
        if self.padding is not None:
            flat = self.padding.cut(flat, self.grid)
        return flat.reshape(*values.shape[:-1], *self.grid)

    def to_picture(self, values: Tensor) -> Tensor:
        """What each token has, (…, N), where it lies on the picture, (…, R', C') equal cells; sums stay the same."""
        return self.to_image(values)

    def places(self, device: torch.device | str | None = None) -> Tensor:
        """(R, C) which of the N tokens lies at each place of the grid."""
        return self.to_image(torch.arange(self.length, device=device)[None])[0]

    def centres(self, device: torch.device | str | None = None) -> Tensor:
        """(R · C, 2) the middle (y, x) of each token in pixels, row by row."""
        down, across = (
            (torch.arange(n, device=device) + 0.5) * step for n, step in zip(self.grid, self.stride, strict=True)
        )
        return torch.cartesian_prod(down, across).view(-1, 2)


def grid_for(n: int, size: tuple[int, int]) -> Grid | None:
    """The grid of n tokens whose proportions are those of an image of (H, W) pixels best; None where none is near."""
    pairs = [(r, n // r) for r in range(1, n + 1) if n % r == 0]
    best = min(pairs, key=lambda pair: abs(math.log(pair[0] / pair[1]) - math.log(size[0] / size[1])), default=None)
    if best is None or abs(math.log(best[0] / best[1]) - math.log(size[0] / size[1])) > 0.5:
        return None
    return best


def token_plane(model: nn.Module, n: int, size: tuple[int, int]) -> Plane | None:
    """The plane of the n tokens that ``forward_features`` of a model gives for an image of (H, W) pixels."""
    prefix = int(getattr(model, "num_prefix_tokens", 0))
    embed: Any = getattr(model, "patch_embed", None)
    grid = embed.grid(size) if hasattr(embed, "grid") else None
    if grid is None or math.prod(grid) != n - prefix:
        grid = grid_for(n - prefix, size)
    return None if grid is None else Plane(prefix, grid, (size[0] / grid[0], size[1] / grid[1]))


def layer_plane(model: nn.Module, name: str, layout: Layout, size: tuple[int, int]) -> Plane | None:
    """The plane of the tokens of an attention layer; None where they do not lie on the image.

    Args:
        model: that the layer belongs to.
        name: of the layer.
        layout: the one it was given.
        size: (H, W) of the image in pixels.
    """
    if layout.grid is None:
        return None
    owner = model.get_submodule(name.rpartition(".")[0])
    if not isinstance(owner, WindowLayer):
        rows, columns = layout.grid
        return Plane(layout.prefix, layout.grid, (size[0] / rows, size[1] / columns))
    parts = name.split(".")
    at = len(parts) - 1 - parts[::-1].index("layers")
    swin: Any = model.get_submodule(".".join(parts[:at]))
    grid, patch = swin._grid(size), swin.patch_embed.patch_size
    stage = int(parts[at + 1])
    for _ in range(stage):
        grid = PatchMerging.grid(grid)
    return Plane(0, grid, (float(patch[0] * 2**stage), float(patch[1] * 2**stage)), owner.padding)


@contextlib.contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """The model in evaluation mode, and every part of it in its own mode afterwards."""
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for module, mode in modes.items():
            module.training = mode
