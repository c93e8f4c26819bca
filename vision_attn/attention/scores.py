"""Scores: how much a query has to do with a key, before normalization.

A score is a small module with ``forward(q, k) -> (B, H, N, M)``. One that is a dot product of transformed
queries and keys also says so through ``as_dot``, and every fused kernel then serves it.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

SCORES: dict[str, Callable[[], Score]] = {}


class Score(nn.Module):
    """Compares ``q`` (B, H, N, d) with ``k`` (B, G, M, d), where groups of query heads share a key head."""

    def as_dot(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor, float] | None:
        """``(q', k', scale)`` with score = scale · q'·k', or None where the score is no bilinear form."""
        return None

    def forward(self, q: Tensor, k: Tensor) -> Tensor:
        form = self.as_dot(q, k)
        if form is None:
            raise NotImplementedError(f"{type(self).__name__} must define forward or as_dot")
        return dot_scores(*form)


def register_score(name: str) -> Callable[[type[Score]], type[Score]]:
    """Makes a score available by name, in every model."""

    def add(cls: type[Score]) -> type[Score]:
        SCORES[name] = cls
        return cls

    return add


def resolve_score(score: str | Score) -> Score:
    """A score by name, or the module itself.

    Raises:
        ValueError: there is no score of that name.
    """
    if isinstance(score, Score):
        return score
    if score not in SCORES:
        raise ValueError(f"unknown score {score!r}; there are: {', '.join(SCORES)}")
    return SCORES[score]()


def dot_scores(q: Tensor, k: Tensor, scale: float) -> Tensor:
    """scale · q·kᵀ, (B, H, N, d) × (B, G, M, d) → (B, H, N, M), where G divides H (grouped-query attention)."""
    b, h, n, d = q.shape
    g, m = k.shape[1], k.shape[2]
    # Query heads that share a key head are stacked along the rows, so shared keys are read once and never repeated.
    rows = q.reshape(b * g, h // g * n, d)
    columns = k.reshape(b * g, m, d).transpose(1, 2)
    # beta = 0: the first argument is ignored; baddbmm scales inside the product, where it is still float32.
    scores = torch.baddbmm(rows.new_empty(1, 1, 1), rows, columns, beta=0, alpha=scale)
    return scores.view(b, h, n, m)


@register_score("dot")
class Dot(Score):
    """q·k (Luong et al. 2015, arXiv 1508.04025)."""

    def as_dot(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor, float]:
        return q, k, 1.0


@register_score("scaled_dot")
class ScaledDot(Score):
    """q·k/√d: variance 1 for q and k of unit variance (Vaswani et al. 2017, arXiv 1706.03762)."""

    def as_dot(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor, float]:
        return q, k, q.shape[-1] ** -0.5
