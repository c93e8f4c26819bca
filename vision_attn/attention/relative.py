"""Relative positions: a learned number per head for where a key lies as seen from a query, added to the score.

A bias is defined per pair of token numbers, so that a kernel which visits only some pairs computes only those.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vision_attn.attention.layout import Layout

if TYPE_CHECKING:
    from vision_attn.attention.windows import ShiftedWindows


class PairBias(nn.Module):
    """A bias looked up in ``table`` by the offset between key and query.

    Prefix tokens have no place, so three entries at the end of the table serve all pairs with them: prefix → other,
    other → prefix, prefix ↔ prefix, from query to key (BEiT: Bao et al. 2021, arXiv 2106.08254).

    Attributes:
        table: (E, H), learned.
        windows: where tokens meet in windows only, places are those in a window, and all windows share one bias. What
            is said of tokens of two windows then means nothing; a mask hides it.
    """

    table: nn.Parameter
    windows: ShiftedWindows | None = None

    @classmethod
    def build(cls, num_heads: int, head_dim: int, layout: Layout | None) -> PairBias:
        """As every position inside a layer is built."""
        raise NotImplementedError

    def extra_repr(self) -> str:
        return f"entries={self.table.shape[0]}, heads={self.table.shape[1]}"

    def numbers(self) -> Tensor:
        """The table in float32 at least: many pairs share an entry, and half precision cannot sum their gradients."""
        return self.table if self.table.dtype == torch.float64 else self.table.float()

    def entries(self, layout: Layout) -> Tensor:
        """(E', H), float32 at least: the numbers that ``index`` points to in this layout.

        Raises:
            ValueError: a layout that the table was not built for.
        """
        raise NotImplementedError

    def places(self, i: Tensor, layout: Layout) -> Tensor:
        """A number per token, so that the difference of two tells their offset; anything for prefix tokens."""
        raise NotImplementedError

    def offset_index(self, difference: Tensor, layout: Layout) -> Tensor:
        """Where in ``entries`` the bias of places(query) − places(key) stands."""
        raise NotImplementedError

    def index(self, i: Tensor, j: Tensor, layout: Layout, size: int) -> Tensor:
        """Where in ``entries`` the bias of query tokens ``i`` and key tokens ``j`` stands.

        Args:
            i, j: integer tensors that broadcast.
            layout: how the tokens lie.
            size: E', the number of entries.

        Returns:
            int64, of their common shape.
        """
        index = self.offset_index(self.places(i, layout) - self.places(j, layout), layout)
        if layout.prefix:
            index = torch.where(i < layout.prefix, size - 3, index)
            to_prefix = torch.where(i < layout.prefix, size - 1, size - 2)  # as small as i
            index = torch.where(j < layout.prefix, to_prefix, index)
        return index

    def at(self, i: Tensor, j: Tensor, n: int, m: int, layout: Layout) -> Tensor:
        """The bias of pairs of tokens.

        Args:
            i: query tokens, integers.
            j: key tokens, integers; ``i`` and ``j`` broadcast.
            n, m: how many queries and keys there are. The queries are the first ``n`` tokens of the sequence.
            layout: how the tokens lie.

        Returns:
            (H, *broadcast(i, j).shape), float32 at least. Gradients flow to the table.

        Raises:
            ValueError: numbers of tokens, or a layout, that do not fit.
        """
        check_one_sequence(n, m, layout)
        if self.windows is not None:
            i, j = self.windows.within(i, layout), self.windows.within(j, layout)
            layout = self.windows.of_window(layout)
        entries = self.entries(layout)  # (E', H)
        index = self.index(i, j, layout, entries.shape[0]).long()
        # gather and not indexing or an embedding: its backward pass is 4 to 10 times faster on a CPU
        heads = entries.shape[1]
        return entries.t().gather(1, index.reshape(1, -1).expand(heads, -1)).view(heads, *index.shape)

    def dense(self, n: int, m: int, layout: Layout, device: torch.device | str | None = None) -> Tensor:
        """(1, H, N, M): the bias of all pairs; arguments as for ``at``."""
        device = next(self.parameters()).device if device is None else device
        i, j = torch.arange(n, device=device), torch.arange(m, device=device)
        return self.at(i[:, None], j[None, :], n, m, layout)[None]


def check_one_sequence(n: int, m: int, layout: Layout) -> None:
    """The keys are all tokens of the layout, the queries the first of them.

    Raises:
        ValueError: naming both numbers.
    """
    layout.check(m)
    if n > m:
        raise ValueError(
            f"relative positions compare tokens of one sequence: {n} queries are more than its {m} tokens; "
            "in cross-attention add positions to the tokens instead"
        )


def t5_bucket(offset: Tensor, num_buckets: int = 32, max_distance: int = 128) -> Tensor:
    """The bucket of key place − query place, both directions (Raffel et al. 2020, arXiv 1910.10683).

    Half of the buckets are for keys behind the query. Of each half, the first half of the buckets hold one offset
    each, the others logarithmically more, and the last one everything from ``max_distance`` on.

    Args:
        offset: integers.
        num_buckets: a multiple of 4.
        max_distance: beyond it, distance no longer matters.

    Returns:
        int64 of the same shape, 0 … num_buckets − 1.
    """
    half = num_buckets // 2
    exact = half // 2
    distance = offset.abs()
    # float32 as in the original, so that offsets on the edge of a bucket fall on the same side
    growth = torch.log(distance.clamp(min=1).float() / exact) / math.log(max_distance / exact)
    far = (exact + (growth * (half - exact)).long()).clamp(max=half - 1)
    return torch.where(distance < exact, distance, far) + half * (offset > 0).long()


class T5Bias(PairBias):
    """One number per head and bucket of distances (Raffel et al. 2020, arXiv 1910.10683).

    The distance is that in the sequence, which on a grid runs row by row: the patch below is as far as a grid is
    wide. No sizes are needed, so the same table serves sequences of any length.

    Args:
        num_heads: H.
        num_buckets: a multiple of 4.
        max_distance: the last bucket begins here.

    Raises:
        ValueError: a number of buckets or a distance of which no buckets can be made.
    """

    def __init__(self, num_heads: int, *, num_buckets: int = 32, max_distance: int = 128) -> None:
        super().__init__()
        if num_buckets < 4 or num_buckets % 4:
            raise ValueError(f"num_buckets={num_buckets} must be a multiple of 4: near and far, before and behind")
        if max_distance <= num_buckets // 4:
            raise ValueError(f"max_distance={max_distance} must exceed num_buckets / 4 = {num_buckets // 4}")
        self.num_buckets, self.max_distance = num_buckets, max_distance
        self.table = nn.Parameter(nn.init.trunc_normal_(torch.empty(num_buckets + 3, num_heads), std=0.02))

    @classmethod
    def build(cls, num_heads: int, head_dim: int, layout: Layout | None) -> T5Bias:
        return cls(num_heads)

    def entries(self, layout: Layout) -> Tensor:
        # Written out per offset, −max … max: then a pair needs no logarithm.
        far = self.max_distance
        offsets = torch.arange(far, -far - 1, -1, device=self.table.device)  # key − query, for query − key = −far … far
        buckets = t5_bucket(offsets, self.num_buckets, far)
        numbers = self.numbers()
        return torch.cat([numbers[:-3][buckets], numbers[-3:]])

    def places(self, i: Tensor, layout: Layout) -> Tensor:
        return i

    def offset_index(self, difference: Tensor, layout: Layout) -> Tensor:
        return difference.clamp(-self.max_distance, self.max_distance) + self.max_distance


class RelativeBias(PairBias):
    """One number per head and offset in rows and columns (Swin: Liu et al. 2021, arXiv 2103.14030).

    At another grid size the table is resampled bicubically to the offsets of that grid: offsets are stretched with the
    image, as resampled positions of tokens are. Tokens that are no grid have one number per offset in the sequence, and
    all offsets beyond ``max_distance`` share the last one (Shaw et al. 2018, arXiv 1803.02155).

    Args:
        num_heads: H.
        layout: how the tokens lie; of a grid of R × C the table has (2R − 1)(2C − 1) entries, and 3 more where there
            are prefix tokens.
        max_distance: for tokens that are no grid.

    Raises:
        ValueError: no layout.
    """

    def __init__(self, num_heads: int, layout: Layout | None, *, max_distance: int = 128) -> None:
        super().__init__()
        if layout is None:
            raise ValueError(
                "position 'relative_bias' has one entry per offset, so it must know how the tokens lie: "
                "pass layout=Layout(prefix=…, grid=(rows, columns)), or use 't5' or 'rope', which need no sizes"
            )
        if max_distance < 1:
            raise ValueError(f"max_distance={max_distance} must be at least 1")
        self.grid = None if layout.grid is None else (layout.grid[0], layout.grid[1])
        self.with_prefix, self.max_distance = layout.prefix > 0, max_distance
        size = 2 * max_distance + 1 if self.grid is None else (2 * self.grid[0] - 1) * (2 * self.grid[1] - 1)
        size += 3 if self.with_prefix else 0
        self.table = nn.Parameter(nn.init.trunc_normal_(torch.empty(size, num_heads), std=0.02))

    @classmethod
    def build(cls, num_heads: int, head_dim: int, layout: Layout | None) -> RelativeBias:
        return cls(num_heads, layout)

    def entries(self, layout: Layout) -> Tensor:
        if (layout.grid is None) != (self.grid is None) or (layout.prefix > 0 and not self.with_prefix):
            raise ValueError(
                f"this relative bias was built for {'a sequence' if self.grid is None else f'a grid {self.grid}'} "
                f"{'with' if self.with_prefix else 'without'} prefix tokens, and cannot serve {layout}; "
                "build the layer with the layout it will meet"
            )
        if layout.grid is None or self.grid is None or tuple(layout.grid) == self.grid:
            return self.numbers()
        return resample_offsets(self.numbers(), self.grid, layout.grid)

    def places(self, i: Tensor, layout: Layout) -> Tensor:
        if layout.grid is None:
            return i
        # Rows are so far apart that the difference of two places is that of the rows · (2C − 1) + that of the columns.
        columns = layout.grid[1]
        i = i - layout.prefix
        return i + i // columns * (columns - 1)  # row · (2C − 1) + column

    def offset_index(self, difference: Tensor, layout: Layout) -> Tensor:
        if layout.grid is None:
            return difference.clamp(-self.max_distance, self.max_distance) + self.max_distance
        rows, columns = layout.grid
        return difference + (rows - 1) * (2 * columns - 1) + columns - 1


def resample_offsets(table: Tensor, old: tuple[int, int], new: tuple[int, int]) -> Tensor:
    """A table of offsets at another grid size; entries beyond the offsets are kept as they are.

    Args:
        table: ((2R − 1)(2C − 1) + k, H).
        old, new: (rows, columns) of the grids.

    Returns:
        ((2R' − 1)(2C' − 1) + k, H), by bicubic interpolation, as timm and the authors of Swin do.
    """
    before, after = (2 * old[0] - 1, 2 * old[1] - 1), (2 * new[0] - 1, 2 * new[1] - 1)
    size = before[0] * before[1]
    offsets, rest = table[:size], table[size:]
    image = offsets.t().reshape(1, -1, *before)
    image = image if table.dtype == torch.float64 else image.float()
    image = F.interpolate(image, size=after, mode="bicubic", align_corners=False)
    return torch.cat([image.flatten(2)[0].t().to(table.dtype), rest])
