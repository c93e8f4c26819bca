"""Shifted windows: a grid cut into squares, and tokens that meet within theirs (Liu et al. 2021, arXiv 2103.14030).

Cutting a grid into windows moves tokens and computes nothing. Where whole windows cover the grid, an ``Attention``
layer brings the tokens of each window together by one gather, attends within the windows as if they were a batch, and
brings them back by another; so every score, normalizer and kernel serves windows, and all windows share one bias.
Elsewhere (beside class tokens, say) the pattern is a mask and a plan of blocks, as any other.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from vision_attn.attention import plans
from vision_attn.attention.core import request_of, run
from vision_attn.attention.kernels import Operands, choose_kernel
from vision_attn.attention.layout import Layout
from vision_attn.attention.patterns import Pattern, register_pattern
from vision_attn.attention.plans import Plan, Rule

Sides = tuple[int, int]


@register_pattern
@dataclasses.dataclass(frozen=True)
class ShiftedWindows(Pattern):
    """Patches in the same square of ``window`` × ``window``; squares begin at row and column ``shift`` (Swin).

    With a shift, the squares at the borders are cut off there: that is what Swin's cyclic shift and its mask compute.
    Where the grid has no more than ``window`` rows there is one window of that height, and no shift along them; the
    same for columns (Liu et al. 2021, arXiv 2103.14030).

    Attributes:
        window: side in patches.
        shift: patches by which the windows are moved down and to the right; less than ``window``.
    """

    name: ClassVar[str] = "shifted_windows"
    least: ClassVar[dict[str, int]] = {"window": 1, "shift": 0}
    window: int
    shift: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.shift >= self.window:
            raise ValueError(
                f"pattern 'shifted_windows': shift={self.shift} must be less than window={self.window}; "
                "a shift by a whole window is none"
            )

    def sides(self, layout: Layout) -> tuple[Sides, Sides]:
        """(rows, columns) of a window on such a grid, and its shift along both."""
        assert layout.grid is not None
        rows, columns = layout.grid
        window = min(self.window, rows), min(self.window, columns)
        return window, (self.shift if rows > self.window else 0, self.shift if columns > self.window else 0)

    def near(self, i: Tensor, j: Tensor, n: int, layout: Layout) -> Tensor:
        (height, width), (down, right) = self.sides(layout)
        assert layout.grid is not None
        columns, i, j = layout.grid[1], i - layout.prefix, j - layout.prefix
        # Counting from the shift: the window before the first has the number −1.
        same_rows = (i // columns - down) // height == (j // columns - down) // height
        return same_rows & ((i % columns - right) // width == (j % columns - right) // width)

    def within(self, i: Tensor, layout: Layout) -> Tensor:
        """The place of tokens ``i`` in their window, row by row; prefix tokens stay in front."""
        (height, width), (down, right) = self.sides(layout)
        assert layout.grid is not None
        place = i - layout.prefix
        row, column = place // layout.grid[1], place % layout.grid[1]
        place = (row - down) % height * width + (column - right) % width + layout.prefix
        return torch.where(i < layout.prefix, i, place) if layout.prefix else place

    def of_window(self, layout: Layout) -> Layout:
        """How the tokens of one window lie; where nothing is known of the grid, of a whole one."""
        if layout.grid is None:
            return Layout(layout.prefix, (self.window, self.window))
        return Layout(layout.prefix, self.sides(layout)[0])

    def _check_sizes(self, n: int, layout: Layout) -> None:
        if layout.grid is None:
            raise ValueError(
                f"pattern 'shifted_windows' needs to know the grid of the {n} tokens: "
                "pass layout=Layout(prefix=…, grid=(rows, columns)), or use pattern='window'"
            )

    def _plan(self, n: int, layout: Layout, rule: Rule) -> Plan | None:
        assert layout.grid is not None
        window, shift = self.sides(layout)
        return plans.cells(n, layout.prefix, layout.grid, window, shift, rule)

    def folding(self, layout: Layout, device: torch.device) -> Folding | None:
        """How to bring the tokens of each window together; None where whole windows do not cover the tokens."""
        if layout.grid is None or layout.prefix:
            return None
        (height, width), _ = self.sides(layout)
        if layout.grid[0] % height or layout.grid[1] % width:
            return None
        # While a graph is traced, tensors stand for others and must not outlive the tracing.
        make = _fold if torch.compiler.is_compiling() else _kept_fold
        return make(self, layout, str(device))


@dataclasses.dataclass(frozen=True, eq=False)
class Folding:
    """N tokens of a grid as S windows of n tokens.

    Attributes:
        order: (N,) the tokens, window after window; the windows lie on the grid after the cyclic shift.
        inverse: (N,) where each token stands in ``order``.
        count: S.
        mask: (S, 1, n, n) which pairs were neighbours before the shift; None where all were.
        layout: how the tokens of one window lie.
    """

    order: Tensor
    inverse: Tensor
    count: int
    mask: Tensor | None
    layout: Layout

    @property
    def size(self) -> int:
        """n."""
        return self.order.shape[0] // self.count

    def fold(self, x: Tensor) -> Tensor:
        """(B, N, D) → (B · S, n, D)."""
        if self.count == 1:  # one window is the whole grid
            return x
        return reorder(x, self.order, self.inverse).view(x.shape[0] * self.count, -1, x.shape[2])

    def unfold(self, x: Tensor) -> Tensor:
        """(B · S, n, D) → (B, N, D)."""
        if self.count == 1:
            return x
        return reorder(x.reshape(-1, self.order.shape[0], x.shape[2]), self.inverse, self.order)

    def unfold_heads(self, x: Tensor) -> Tensor:
        """(B · S, H, n, d) → (B, H, N, d)."""
        return self.unfold(x.transpose(1, 2).flatten(2)).unflatten(2, (x.shape[1], -1)).transpose(1, 2)


def _fold(pattern: ShiftedWindows, layout: Layout, device: str) -> Folding:
    assert layout.grid is not None
    (rows, columns), ((height, width), (down, right)) = layout.grid, pattern.sides(layout)
    tokens = torch.arange(rows * columns).view(rows, columns).roll((-down, -right), (0, 1))
    tokens = tokens.view(rows // height, height, columns // width, width).transpose(1, 2).flatten(2).flatten(0, 1)
    order = tokens.flatten()
    mask = pattern.allowed(tokens[:, :, None], tokens[:, None], order.numel(), layout)[:, None]
    return Folding(
        order.to(device),
        order.argsort().to(device),
        tokens.shape[0],
        mask.to(device) if down or right else None,
        pattern.of_window(layout),
    )


@functools.lru_cache(maxsize=64)
def _kept_fold(pattern: ShiftedWindows, layout: Layout, device: str) -> Folding:
    with torch.inference_mode(False), torch.no_grad():  # kept, and may be used in training later
        return _fold(pattern, layout, device)


def run_in_windows(o: Operands, folding: Folding, kernel: str) -> Tensor:
    """The result (B · S, H, n, d) of windows that are the batch, with the mask of their shift."""
    if folding.mask is None:
        return run(o, kernel)
    chosen = choose_kernel(kernel, dataclasses.replace(request_of(o), mask=True))
    # Fused kernels read queries as the projection left them; written out, products want whole heads in memory anyway.
    place = _as_heads if chosen.name == "explicit" else _as_sequences
    return chosen(place(o, folding, folding.mask)).reshape(*o.q.shape[:3], -1)


def _as_sequences(o: Operands, folding: Folding, mask: Tensor) -> Operands:
    """With bias and mask of every window in the batch."""
    batch = o.q.shape[0] // folding.count
    if o.position is None:
        return dataclasses.replace(o, mask=mask.repeat(batch, 1, 1, 1))
    return dataclasses.replace(o, bias=_masked_bias(o, folding, mask).repeat(batch, 1, 1, 1), position=None)


def _as_heads(o: Operands, folding: Folding, mask: Tensor) -> Operands:
    """With the windows in the place of heads, (B, S · H, n, d): one bias and mask then serve the whole batch."""
    heads, n = o.q.shape[1], folding.size
    if o.scale is None or isinstance(o.normalizer, nn.Module) or o.k.shape[1] != heads:
        return _as_sequences(o, folding, mask)  # heads have parameters of their own, or share keys
    q, k, v = (t.reshape(-1, folding.count * heads, n, t.shape[3]) for t in (o.q, o.k, o.v))
    if o.position is None:
        mask = mask.expand(-1, heads, -1, -1).reshape(1, -1, n, n)
        return dataclasses.replace(o, q=q, k=k, v=v, mask=mask)
    return dataclasses.replace(o, q=q, k=k, v=v, bias=_masked_bias(o, folding, mask).view(1, -1, n, n), position=None)


def _masked_bias(o: Operands, folding: Folding, mask: Tensor) -> Tensor:
    """(S, H, n, n). No row of a window is empty, so −inf does as well as a mask, and nobody need look for such rows."""
    assert o.position is not None
    n = folding.size
    return o.position.dense(n, n, folding.layout, o.q.device).masked_fill(~mask, float("-inf"))


class _Reorder(torch.autograd.Function):
    """``index_select`` whose gradient is another one, where PyTorch, which cannot know that no index repeats, adds up.

    Measured on AVX2 cores, 8 × 3136 tokens of width 96: half the time forward and backward.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
        return x.index_select(1, order)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor], output: Tensor) -> None:
        ctx.save_for_backward(inputs[1], inputs[2])

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        order, inverse = ctx.saved_tensors
        return reorder(gradient, inverse, order), None, None


def reorder(x: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
    """``x[:, order]`` for a permutation and its inverse."""
    if torch.is_grad_enabled() and x.requires_grad:
        return _Reorder.apply(x, order, inverse)  # type: ignore[no-untyped-call]
    return x.index_select(1, order)
