"""Plans: how the pairs that a pattern allows lie in dense blocks, so that the others are never computed.

A plan cuts the queries into blocks of equal size, and names for each block the keys that its queries need, as many for
every block. What a block gathers in vain is cut away by its mask: a plan is exact, and only its cost depends on how
well the blocks fit. Everything in it grows like N times the keys of a block, and nothing like N².
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable

import torch
from torch import Tensor

Rule = Callable[[Tensor, Tensor], Tensor]
"""Whether query tokens i may attend to key tokens j: integer tensors that broadcast, to booleans."""

GATHER_COST = 28
"""Gathering a key and its value costs as much as so many queries that visit them (measured on AVX2 cores, d = 64)."""

BLOCKS = (32, 64, 128, 256)
"""Sizes of a block of queries to choose from."""

TILES = (4, 6, 8, 12, 16, 24, 32)
"""Sides of a tile of queries to choose from, on a grid."""


@dataclasses.dataclass(frozen=True, eq=False)
class Plan:
    """Blocks of queries and the keys they visit.

    Attributes:
        queries: (S, b) tokens of each block; a token may stand in several.
        keys: (S, K) tokens that each block visits; some may be padding, or stand there twice.
        mask: (S, b, K) the pairs; False at padding, and at all but one of those that stand there twice.
        order: (N - first,) where in the S · b results that of a token stands.
        first: so many tokens at the beginning attend to everything, and stand in no block.
        also: more keys of the same queries, in blocks of another shape. No pair is in both.
    """

    queries: Tensor
    keys: Tensor
    mask: Tensor
    order: Tensor
    first: int = 0
    also: Plan | None = None

    def parts(self) -> list[Plan]:
        """This plan and those in ``also``."""
        return [self, *(self.also.parts() if self.also is not None else [])]

    def cost(self) -> int:
        """Pairs computed, and keys gathered in units of them."""
        return sum(p.keys.numel() * (p.queries.shape[1] + GATHER_COST) for p in self.parts())

    def to(self, device: torch.device) -> Plan:
        """The same on another device."""
        also = None if self.also is None else self.also.to(device)
        queries, keys, mask, order = (t.to(device) for t in (self.queries, self.keys, self.mask, self.order))
        return Plan(queries, keys, mask, order, self.first, also)


def if_worth(plan: Plan, n: int) -> Plan | None:
    """The plan, or None where all n² pairs and a mask cost less."""
    return plan if plan.cost() < 0.8 * n * n else None


def best_block(sizes: Iterable[int], keys: Callable[[int], int], queries: Callable[[int], int] = int) -> int:
    """The size at which a query costs least, when a block of that size has so many queries and visits so many keys."""
    return min(sizes, key=lambda size: keys(size) * (queries(size) + GATHER_COST) / queries(size))


def where_each_stands(queries: Tensor, n: int) -> Tensor:
    """(n,) the first place of every token in the flattened blocks."""
    flat = queries.flatten()
    return torch.full((n,), flat.numel()).scatter_reduce_(0, flat, torch.arange(flat.numel()), "amin")


def _with_first(keys: Tensor, first: int) -> Tensor:
    """(S, first + K): the ``first`` tokens, which every block visits, before its own keys."""
    return torch.cat([torch.arange(first).expand(keys.shape[0], first), keys], dim=1)


def _finish(queries: Tensor, keys: Tensor, mask: Tensor, n: int, first: int) -> Plan:
    return Plan(queries, keys, mask, where_each_stands(queries, n)[first:], first)


def band(n: int, first: int, radius: int, rule: Rule) -> Plan:
    """Blocks of consecutive queries, which visit the ``first`` tokens and those up to ``radius`` before and behind.

    At the ends the run of keys is moved inwards, so that none of it is padding.
    """
    local = n - first
    size = min(best_block(BLOCKS, lambda b: first + b + 2 * radius), local)
    width = min(size + 2 * radius, local)
    start = (first + torch.arange(0, local, size)).clamp(max=n - size)
    queries = start[:, None] + torch.arange(size)
    keys = (start - radius).clamp(first, n - width)[:, None] + torch.arange(width)
    keys = _with_first(keys, first)
    return _finish(queries, keys, rule(queries[:, :, None], keys[:, None]), n, first)


def tiles(n: int, first: int, grid: tuple[int, int], radius: int, rule: Rule) -> Plan:
    """Tiles of the grid, which visit the ``first`` tokens and the tile with a margin of ``radius``."""

    def side(tile: int, margin: int, length: int) -> int:
        return min(tile + 2 * margin, length)

    rows, columns = grid
    tile = best_block(
        TILES,
        lambda t: first + side(t, radius, rows) * side(t, radius, columns),
        lambda t: side(t, 0, rows) * side(t, 0, columns),
    )

    def runs(length: int) -> tuple[Tensor, Tensor]:
        """Along one side: the places in each tile, and with its margin, moved inwards at the ends."""
        size, width = side(tile, 0, length), side(tile, radius, length)
        start = torch.arange(0, length, size).clamp(max=length - size)
        return (
            start[:, None] + torch.arange(size),
            (start - radius).clamp(0, length - width)[:, None] + torch.arange(width),
        )

    def tokens(y: Tensor, x: Tensor) -> Tensor:
        """(tiles down · tiles across, places down · places across)."""
        return (first + y[:, None, :, None] * columns + x[None, :, None, :]).flatten(2).flatten(0, 1)

    (down, down_keys), (across, across_keys) = runs(rows), runs(columns)
    queries, keys = tokens(down, across), _with_first(tokens(down_keys, across_keys), first)
    return _finish(queries, keys, rule(queries[:, :, None], keys[:, None]), n, first)


def residues(n: int, first: int, stride: int, rule: Rule) -> Plan:
    """Tokens that are a multiple of ``stride`` apart, each class of them a block of its own."""
    count = -(-(n - first) // stride)
    tokens = first + torch.arange(stride)[:, None] + stride * torch.arange(count)
    real = tokens < n
    tokens = tokens.where(real, tokens - stride)  # only the last can be padding; the class has another before it
    mask = rule(tokens[:, :, None], tokens[:, None]) & real[:, None]
    return _finish(tokens, tokens, mask, n, first)


def listed(n: int, first: int, size: int, blocks: Tensor, real: Tensor, rule: Rule) -> Plan:
    """Blocks of ``size`` tokens, which visit the ``first`` tokens and the blocks that a list names.

    Args:
        n: number of tokens.
        first: blocks begin behind so many tokens.
        size: tokens of a block; the last may have fewer.
        blocks: (S, L) the blocks each visits.
        real: (S, L) False for entries to ignore.
        rule: which pairs may meet.
    """
    within = torch.arange(size)
    queries = (first + size * torch.arange(blocks.shape[0])[:, None] + within).clamp(max=n - 1)
    keys = (first + size * blocks[:, :, None] + within).flatten(1)  # (S, L · size)
    real = real[:, :, None].expand(-1, -1, size).flatten(1) & (keys < n)
    real = torch.cat([real.new_ones(real.shape[0], first), real], dim=1)
    keys = _with_first(keys.clamp(max=n - 1), first)
    mask = rule(queries[:, :, None], keys[:, None]) & real[:, None]
    return _finish(queries, keys, mask, n, first)


@functools.lru_cache(maxsize=64)
def random_blocks(blocks: int, reach: int, number: int, seed: int) -> Tensor:
    """(blocks, number): for each block so many others, distinct and more than ``reach`` away.

    Drawn on the CPU from a generator of its own, so that every process has the same, whatever it drew before.
    """
    with torch.inference_mode(False):
        generator = torch.Generator().manual_seed(seed)
        own = torch.arange(blocks)
        low, high = (own - reach).clamp(min=0), (own + reach).clamp(max=blocks - 1)
        others = blocks - (high - low + 1)  # how many there are to draw from
        drawn = torch.empty(blocks, 0, dtype=torch.long)
        for index in range(number):
            share = torch.rand(blocks, generator=generator, dtype=torch.float64)
            pick = (share * (others - index)).long()  # the so-many-th of those not drawn yet
            for before in drawn.sort(dim=1).values.unbind(1):
                pick += (pick >= before).long()
            drawn = torch.cat([drawn, pick[:, None]], dim=1)
        return drawn + (drawn >= low[:, None]) * (high - low + 1)[:, None]


def cells(
    n: int, first: int, grid: tuple[int, int], window: tuple[int, int], shift: tuple[int, int], rule: Rule
) -> Plan:
    """Windows that do not overlap and begin at ``shift``; they visit the ``first`` tokens and themselves.

    Those at the borders are cut off there.
    """

    def runs(length: int, side: int, offset: int) -> tuple[Tensor, Tensor]:
        """Along one side: the places in each window, and which of them are no padding."""
        start = torch.arange(offset - side if offset else 0, length, side)
        places = start[:, None] + torch.arange(side)
        return places.clamp(0, length - 1), (places >= 0) & (places < length)

    def both(down: Tensor, across: Tensor) -> tuple[Tensor, Tensor]:
        """(windows down · windows across, places down · places across) of each."""
        shape = (down.shape[0], across.shape[0], down.shape[1], across.shape[1])
        down, across = down[:, None, :, None].expand(shape), across[None, :, None, :].expand(shape)
        return down.flatten(2).flatten(0, 1), across.flatten(2).flatten(0, 1)

    (down, real_down), (across, real_across) = (
        runs(length, side, offset) for length, side, offset in zip(grid, window, shift, strict=True)
    )
    (row, column), (real_row, real_column) = both(down, across), both(real_down, real_across)
    tokens = first + row * grid[1] + column
    # Padding repeats a token of the same window, so as a query it does no harm; as a key it is hidden.
    real = torch.cat([torch.ones(tokens.shape[0], first, dtype=torch.bool), real_row & real_column], dim=1)
    keys = _with_first(tokens, first)
    mask = rule(tokens[:, :, None], keys[:, None]) & real[:, None]
    return _finish(tokens, keys, mask, n, first)
