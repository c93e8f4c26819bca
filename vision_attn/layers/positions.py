"""Positions of a model whose tokens are a grid, at any grid size."""

from __future__ import annotations

from torch import Tensor, nn

from vision_attn.attention import resample_grid, token_position
from vision_attn.attention.positions import same_grid


class GridPositions(nn.Module):
    """A model that adds positions to a grid of tokens (and to prefix tokens before it) at every image size.

    Attributes:
        pos_embed: (1, embedded_prefix + rows · columns, D): a parameter when learned, a buffer that no checkpoint
            holds when a formula gives it, None where nothing is added to the tokens.
        grid_size: (rows, columns) that ``pos_embed`` is laid out for.
        embedded_prefix: class and register tokens that have a position.
    """

    pos_embed: Tensor | None

    def init_positions(self, kind: str, embedded_prefix: int, grid: tuple[int, int], dim: int) -> None:
        """Makes ``pos_embed``.

        Args:
            kind: one of ``POSITIONS``; those that act inside the attention layers add nothing here.
            embedded_prefix: prefix tokens that have a position.
            grid: (rows, columns).
            dim: D.

        Raises:
            ValueError: unknown kind, or a width it cannot have.
        """
        self.grid_size, self.embedded_prefix = grid, embedded_prefix
        position, learn = token_position(kind, embedded_prefix, grid, dim)
        self.formula = kind if position is not None and not learn else None
        if position is not None and learn:
            self.pos_embed = nn.Parameter(position)
        else:
            self.register_buffer("pos_embed", position, persistent=False)  # computed again at every build

    def position_at(self, grid: tuple[int, int]) -> Tensor | None:
        """The positions for a grid of another size: a formula is evaluated there, learned ones are resampled."""
        if self.pos_embed is None or same_grid(grid, self.grid_size):
            return self.pos_embed
        if self.formula is not None:
            table, _ = token_position(self.formula, self.embedded_prefix, grid, self.pos_embed.shape[-1])
            return None if table is None else table.to(self.pos_embed)
        return resample_grid(self.pos_embed, self.grid_size, grid, self.embedded_prefix)
