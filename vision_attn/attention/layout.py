"""How the tokens of a sequence lie: what patterns and positions need to know beyond their number."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Layout:
    """Prefix tokens, then a grid row by row.

    Attributes:
        prefix: class and register tokens in front, which have no place in the grid.
        grid: (rows, columns) of the other tokens; None where they are a plain sequence.
    """

    prefix: int = 0
    grid: tuple[int, int] | None = None

    def __post_init__(self) -> None:
        if self.prefix < 0 or (self.grid is not None and min(self.grid) < 1):
            raise ValueError(f"no tokens can lie like this: prefix={self.prefix}, grid={self.grid}")

    @property
    def length(self) -> int | None:
        """N, or None for a plain sequence, which may have any length."""
        return None if self.grid is None else self.prefix + self.grid[0] * self.grid[1]

    def check(self, n: int) -> None:
        """Refuses a sequence that cannot lie like this.

        Raises:
            ValueError: naming the number of tokens and the layout.
        """
        if self.length is not None and n != self.length:
            rows, columns = self.grid or (0, 0)
            raise ValueError(
                f"{n} tokens are not {self.prefix} prefix tokens and a grid of {rows} × {columns} = {self.length}"
            )
        if n < self.prefix:
            raise ValueError(f"{n} tokens cannot hold {self.prefix} prefix tokens")


SEQUENCE = Layout()
"""A plain sequence of any length."""
