"""Patterns: which pairs of one sequence may meet.

A pattern is one rule, ``allowed(i, j)``: may query token i attend to key token j? Everything else follows from it: the
dense mask (the reference), the plan of blocks that ``kernel="gathered"`` visits, and the block mask of
``kernel="flex"``.

Class and register tokens, the prefix of a ``Layout``, are *global* in every pattern but ``causal``: they attend to
everything and everything attends to them. Otherwise a class token would see the corner of an image and nothing else,
and no model could classify from it; Longformer treats its own class token so. ``causal`` keeps to the order of the
tokens, in which a class token in front sees only itself: pool by the mean there.

Legend: N tokens, g of them global (the prefix, and ``num_global`` behind it), L = N − g others, r radius. The pairs
counted below are those among the L; those with a global token are N² − L² more.
"""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import torch
from torch import Tensor

from vision_attn.attention import plans
from vision_attn.attention.layout import Layout
from vision_attn.attention.plans import Plan, Rule

__all__ = ["PATTERNS", "Pattern", "Plan", "make_pattern", "register_pattern"]

PATTERNS: dict[str, type[Pattern]] = {}


def register_pattern(cls: type[Pattern]) -> type[Pattern]:
    """Makes a pattern available by its name, in every model."""
    PATTERNS[cls.name] = cls
    return cls


@dataclasses.dataclass(frozen=True)
class Pattern:
    """Which pairs may meet. Subclasses say ``near``: which do so apart from global tokens.

    Raises:
        ValueError: a parameter that is no whole number, or too small.
    """

    name: ClassVar[str] = ""
    least: ClassVar[dict[str, int]] = {}  # smallest value of every parameter

    def __post_init__(self) -> None:
        for key, least in self.least.items():
            value = getattr(self, key)
            if value is None:
                continue
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise ValueError(f"pattern {self.name!r}: {key}={value!r} must be a whole number, {least} or more")

    def first(self, layout: Layout) -> int:
        """How many tokens at the beginning of the sequence are global."""
        return layout.prefix

    def near(self, i: Tensor, j: Tensor, n: int, layout: Layout) -> Tensor:
        """``allowed`` for tokens that are not global."""
        raise NotImplementedError

    def rule(self, n: int, layout: Layout, device: torch.device) -> Rule:
        """``allowed`` as a function of (i, j) alone, with all it needs at hand; compilers can follow it."""
        first = self.first(layout)

        def allowed(i: Tensor, j: Tensor) -> Tensor:
            met = self.near(i, j, n, layout)
            return met | (i < first) | (j < first) if first else met

        return allowed

    def allowed(self, i: Tensor, j: Tensor, n: int, layout: Layout) -> Tensor:
        """Whether query tokens ``i`` may attend to key tokens ``j``.

        Args:
            i, j: integer tensors that broadcast.
            n: number of tokens.
            layout: how they lie.

        Returns:
            booleans, of their common shape.
        """
        return self.rule(n, layout, i.device)(i, j)

    def mask(self, n: int, layout: Layout, device: torch.device | str | None = None) -> Tensor:
        """(N, N) of all pairs: the reference."""
        i = torch.arange(n, device=device)
        return self.allowed(i[:, None], i[None], n, layout).expand(n, n)

    def plan(self, n: int, layout: Layout, device: torch.device | str = "cpu") -> Plan | None:
        """Blocks that hold all allowed pairs; None where the pairs to be skipped are too few to be worth it."""
        if n - self.first(layout) < 1:
            return None
        with torch.inference_mode(False), torch.no_grad():  # a plan is kept, and may be used in training later
            plan = self._plan(n, layout, self.rule(n, layout, torch.device("cpu")))
            plan = None if plan is None else plans.if_worth(plan, n)
            return None if plan is None else plan.to(torch.device(device))

    def _plan(self, n: int, layout: Layout, rule: Rule) -> Plan | None:
        return None

    def check(self, n: int, m: int, layout: Layout) -> None:
        """Refuses a sequence that this pattern cannot serve.

        Args:
            n, m: numbers of queries and keys.
            layout: how the tokens lie.

        Raises:
            ValueError: cross-attention; a parameter larger than the sequence; tokens that are not the layout's; no grid
                where one is needed.
        """
        if n != m:
            raise ValueError(
                f"pattern {self.name!r} says which tokens of one sequence meet, but {n} queries attend to {m} keys; "
                "in cross-attention use pattern='full', and a mask if need be"
            )
        layout.check(n)
        self._check_sizes(n, layout)

    def _check_sizes(self, n: int, layout: Layout) -> None:
        pass

    def _at_most(self, key: str, value: int, limit: int, what: str) -> None:
        if value > limit:
            raise ValueError(
                f"pattern {self.name!r}: {key}={value} is more than {what}; use at most {limit}, or pattern='full'"
            )


@register_pattern
@dataclasses.dataclass(frozen=True)
class Causal(Pattern):
    """Token i sees tokens 0 … i, none is global: N (N + 1) / 2 pairs (Vaswani et al. 2017, arXiv 1706.03762)."""

    name: ClassVar[str] = "causal"

    def first(self, layout: Layout) -> int:
        return 0

    def near(self, i: Tensor, j: Tensor, n: int, layout: Layout) -> Tensor:
        return j <= i


@register_pattern
@dataclasses.dataclass(frozen=True)
class Window(Pattern):
    """Tokens at most ``window`` apart, truncated or local attention: L (2r + 1) − r (r + 1) pairs, r < L.

    The distance is that in the sequence, which on a grid runs row by row.

    Attributes:
        window: radius r; N − 1 or N is full attention.
    """

    name: ClassVar[str] = "window"
    least: ClassVar[dict[str, int]] = {"window": 0}
    window: int

    def near(self, i: Tensor, j: Tensor, n: int, layout: Layout) -> Tensor:
        return (i - j).abs() <= self.window

    def _check_sizes(self, n: int, layout: Layout) -> None:
        self._at_most("window", self.window, n, f"the {n} tokens")

    def _plan(self, n: int, layout: Layout, rule: Rule) -> Plan | None:
        return plans.band(n, self.first(layout), self.window, rule)


@register_pattern
@dataclasses.dataclass(frozen=True)
class Window2d(Pattern):
    """Patches at most ``window`` rows and ``window`` columns apart.

    Each sees the square of side 2r + 1 around it, as far as the grid goes: w(rows) · w(columns) pairs, where
    w(L) = L (2r + 1) − r (r + 1). After Parmar et al. 2018 (arXiv 1802.05751); Hassani et al. 2022 (arXiv 2204.07143)
    move the square inwards at the border instead.

    Attributes:
        window: radius r in rows and columns (Chebyshev distance).
    """

    name: ClassVar[str] = "window_2d"
    least: ClassVar[dict[str, int]] = {"window": 0}
    window: int

    def near(self, i: Tensor, j: Tensor, n: int, layout: Layout) -> Tensor:
        assert layout.grid is not None
        columns, i, j = layout.grid[1], i - layout.prefix, j - layout.prefix
        # Prefix tokens, whose numbers are negative here, are global, so what this says of them does not matter.
        return ((i // columns - j // columns).abs() <= self.window) & ((i % columns - j % columns).abs() <= self.window)

    def _check_sizes(self, n: int, layout: Layout) -> None:
        if layout.grid is None:
            raise ValueError(
                f"pattern 'window_2d' needs to know the grid of the {n} tokens: "
                "pass layout=Layout(prefix=…, grid=(rows, columns)), or use pattern='window'"
            )
        self._at_most("window", self.window, max(layout.grid), f"the sides of the grid {layout.grid}")

    def _plan(self, n: int, layout: Layout, rule: Rule) -> Plan | None:
        assert layout.grid is not None
        return plans.tiles(n, layout.prefix, layout.grid, self.window, rule)


@register_pattern
@dataclasses.dataclass(frozen=True)
class Strided(Pattern):
    """Tokens less than ``stride`` apart, or a multiple of it (Child et al. 2019, arXiv 1904.10509, in both directions).

    With a stride near √N each token sees about 3 √N others, and any two tokens are joined in two steps. On a grid whose
    rows are ``stride`` long, the second part is the column.

    Attributes:
        stride: 1 or N is full attention; default √(N − P), rounded.
    """

    name: ClassVar[str] = "strided"
    least: ClassVar[dict[str, int]] = {"stride": 1}
    stride: int | None = None

    def step(self, n: int, layout: Layout) -> int:
        """The stride."""
        return max(1, round((n - layout.prefix) ** 0.5)) if self.stride is None else self.stride

    def near(self, i: Tensor, j: Tensor, n: int, layout: Layout) -> Tensor:
        step, apart = self.step(n, layout), (i - j).abs()
        return (apart < step) | (apart % step == 0)

    def _check_sizes(self, n: int, layout: Layout) -> None:
        self._at_most("stride", self.step(n, layout), n, f"the {n} tokens")

    def _plan(self, n: int, layout: Layout, rule: Rule) -> Plan | None:
        first, step = layout.prefix, self.step(n, layout)
        if step < 2 or step >= n - first:
            return None

        def local(i: Tensor, j: Tensor) -> Tensor:
            return rule(i, j) & (((i - j).abs() < step) | (j < first))

        def far(i: Tensor, j: Tensor) -> Tensor:
            apart = (i - j).abs()
            return (apart >= step) & (apart % step == 0)

        band = plans.band(n, first, step - 1, local)
        return dataclasses.replace(band, also=plans.residues(n, first, step, far))


@register_pattern
@dataclasses.dataclass(frozen=True)
class Longformer(Window):
    """A window, and global tokens (Beltagy et al. 2020, arXiv 2004.05150): pairs as for ``window``.

    The original has projections of their own for the global tokens; here they share those of all.

    Attributes:
        window: radius r.
        num_global: so many tokens behind the prefix are global, too.
    """

    name: ClassVar[str] = "longformer"
    least: ClassVar[dict[str, int]] = {"window": 0, "num_global": 0}
    num_global: int = 0

    def first(self, layout: Layout) -> int:
        return layout.prefix + self.num_global

    def _check_sizes(self, n: int, layout: Layout) -> None:
        super()._check_sizes(n, layout)
        self._at_most("num_global", self.num_global, n - layout.prefix, f"the {n} tokens without the prefix")


@register_pattern
@dataclasses.dataclass(frozen=True)
class BigBird(Pattern):
    """Neighbouring, random and global blocks (Zaheer et al. 2020, arXiv 2007.14062).

    The tokens that are not global form blocks. Each block sees itself, those at most w = ⌈window / block_size⌉ blocks
    away, and ``num_random`` others, drawn without repetition. Of c whole blocks that is
    block_size² · (c (2w + 1 + num_random) − w (w + 1)) pairs, w < c. The prefix and ``num_global`` tokens are global
    (the paper's "internal construction", which takes whole blocks). What is drawn depends on ``seed`` and the number
    of blocks alone: it is the same in every layer, process and run.

    Attributes:
        block_size: tokens of a block. The paper has 64; small images need less.
        window: radius in tokens, rounded up to whole blocks; default one block.
        num_random: random blocks per block of queries.
        num_global: so many tokens behind the prefix are global, too.
        seed: of the random blocks.
    """

    name: ClassVar[str] = "bigbird"
    least: ClassVar[dict[str, int]] = {"block_size": 1, "window": 0, "num_random": 0, "num_global": 0, "seed": 0}
    block_size: int = 8
    window: int | None = None
    num_random: int = 2
    num_global: int = 0
    seed: int = 0

    def first(self, layout: Layout) -> int:
        return layout.prefix + self.num_global

    def reach(self) -> int:
        """w: blocks on each side."""
        return 1 if self.window is None else -(-self.window // self.block_size)

    def count(self, n: int, layout: Layout) -> int:
        """Number of blocks; the last may be shorter."""
        return -(-(n - self.first(layout)) // self.block_size)

    def rule(self, n: int, layout: Layout, device: torch.device) -> Rule:
        first, size, reach = self.first(layout), self.block_size, self.reach()
        table = plans.random_blocks(max(self.count(n, layout), 1), reach, self.num_random, self.seed).to(device)

        def allowed(i: Tensor, j: Tensor) -> Tensor:
            block, other = (i - first).clamp(min=0) // size, (j - first).clamp(min=0) // size
            met = (block - other).abs() <= reach
            for drawn in range(self.num_random):
                met = met | (table[block, drawn] == other)
            return met | (i < first) | (j < first)

        return allowed

    def _check_sizes(self, n: int, layout: Layout) -> None:
        self._at_most("num_global", self.num_global, n - layout.prefix, f"the {n} tokens without the prefix")
        local, blocks = n - self.first(layout), self.count(n, layout)
        if local < 1:
            return
        self._at_most("block_size", self.block_size, local, f"the {local} tokens that are not global")
        if self.window is not None:
            self._at_most("window", self.window, n, f"the {n} tokens")
        others = max(blocks - 2 * self.reach() - 1, 0)
        if self.num_random > others:
            raise ValueError(
                f"pattern 'bigbird': num_random={self.num_random}, but of {blocks} blocks of {self.block_size} tokens "
                f"only {others} are no neighbours; use num_random={others} or a smaller block_size, or pattern='full'"
            )

    def _plan(self, n: int, layout: Layout, rule: Rule) -> Plan | None:
        blocks, reach = self.count(n, layout), self.reach()
        own = torch.arange(blocks)
        near = (
            torch.arange(min(2 * reach + 1, blocks)) + (own - reach).clamp(0, max(blocks - 2 * reach - 1, 0))[:, None]
        )
        drawn = plans.random_blocks(blocks, reach, self.num_random, self.seed)
        # Near the ends the run of neighbours is moved inwards, where it might hold a block that was drawn as well.
        real = torch.cat([(near - own[:, None]).abs() <= reach, torch.ones_like(drawn, dtype=torch.bool)], dim=1)
        return plans.listed(n, self.first(layout), self.block_size, torch.cat([near, drawn], dim=1), real, rule)


def make_pattern(name: str, **options: Any) -> Pattern | None:
    """A pattern by name; None for ``full``.

    Args:
        name: ``full`` or a name of ``PATTERNS``.
        **options: its parameters; those that are None count as not given.

    Raises:
        ValueError: an unknown name, an option that the pattern does not take, or one that it needs and lacks.
    """
    given = {key: value for key, value in options.items() if value is not None}
    if name != "full" and name not in PATTERNS:
        raise ValueError(f"unknown pattern {name!r}; there are: full, {', '.join(PATTERNS)}")
    fields = {} if name == "full" else {field.name: field for field in dataclasses.fields(PATTERNS[name])}
    takes = f"it takes: {', '.join(fields)}" if fields else "it takes no options"
    for key in given:
        if key not in fields:
            raise ValueError(f"pattern {name!r} has no option {key!r}; {takes}")
    for key, field in fields.items():
        if field.default is dataclasses.MISSING and key not in given:
            raise ValueError(f"pattern {name!r} needs {key}=…; {takes}")
    return None if name == "full" else PATTERNS[name](**given)
