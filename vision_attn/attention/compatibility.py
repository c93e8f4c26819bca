"""What goes with what, asked of the code itself: a small layer is built and run with every pair of mechanisms."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from vision_attn.attention.config import LOW_RANK
from vision_attn.attention.kernels import KERNELS, Request, normalizer_name
from vision_attn.attention.layout import Layout
from vision_attn.attention.linear import Linformer
from vision_attn.attention.masks import causal_mask
from vision_attn.attention.multihead import Attention
from vision_attn.attention.normalizers import NORMALIZERS
from vision_attn.attention.patterns import PATTERNS, Pattern
from vision_attn.attention.positions import LAYER_POSITIONS
from vision_attn.attention.relative import PairBias
from vision_attn.attention.scores import SCORES

GRID = (3, 5)

EXAMPLES: dict[str, dict[str, Any]] = {
    "window": {"window": 2},
    "window_2d": {"window": 1},
    "shifted_windows": {"window": 2, "shift": 1},
    "strided": {"stride": 3},
    "longformer": {"window": 2, "num_global": 1},
    "bigbird": {"block_size": 2, "num_random": 1, "num_global": 1},
    "linformer": {"rank": 4},
    "performer": {"features": 8},
}
"""Parameters of a pattern that fit a short sequence."""


PATTERN_OF = {"gathered": "window", "favor": "performer"}
"""Kernels that serve patterns only, and one to try them with."""


def choices() -> dict[str, tuple[str, ...]]:
    """Every word of every mechanism."""
    return {
        "score": tuple(SCORES),
        "normalizer": tuple(NORMALIZERS),
        "pattern": ("full", *(name for name in PATTERNS if name != "full"), *LOW_RANK),
        "position": ("none", *LAYER_POSITIONS),
        "kernel": tuple(KERNELS),
    }


def objection(*, mask: str | None = None, cross: bool = False, train: bool = False, **chosen: Any) -> str | None:
    """Why a layer with these mechanisms cannot be built or run; None when it can.

    Args:
        mask: ``causal`` or ``padding``, in addition.
        cross: attend to another sequence of another length.
        train: run a backward pass too.
        **chosen: ``score``, ``normalizer``, ``pattern``, ``position``, ``kernel``.
    """
    layout = Layout(1, GRID)
    n = layout.length or 0
    options = EXAMPLES.get(chosen.get("pattern", ""), {})
    context = torch.randn(2, n - 4, 16) if cross else None
    try:
        layer = Attention(16, 2, layout=layout, **chosen, **options)
        if chosen.get("kernel") == "flex":  # it would be compiled for every pair: what it says about a call must do
            return _flex_objection(layer, n, cross, train)
        x = torch.randn(2, n, 16, requires_grad=train)
        masks = {"causal": causal_mask(n), "padding": torch.arange(n).lt(n - 3).view(1, 1, 1, n)}
        if chosen.get("normalizer") == "sum":  # it takes no negative score, which is a matter of values
            layer.score.forward = lambda q, k: torch.ones(q.shape[0], q.shape[1], q.shape[2], k.shape[2])  # type: ignore[method-assign]
            layer.score.as_dot = lambda q, k: None  # type: ignore[method-assign]
        with torch.set_grad_enabled(train):
            out = layer(x, context, mask=masks.get(mask or ""), layout=layout)
            if train:
                out.sum().backward()
    except ValueError as error:
        return str(error)
    return None


def _flex_objection(layer: Attention, n: int, cross: bool, train: bool) -> str | None:
    """What flex says about a call on this machine's CPU."""
    pattern = layer.pattern
    if isinstance(pattern, Pattern) and cross:
        pattern.check(n, n - 4, Layout(1, GRID))
    request = Request(
        "cpu", torch.float32, 2, 2, 2, n, n - 4 if cross else n, 8, training=train,
        bias=isinstance(layer.position, PairBias),
        dropout=layer.dropout if train else 0.0,
        dot=layer.score.as_dot(torch.zeros(1, 2, 1, 8), torch.zeros(1, 2, 1, 8)) is not None,
        normalizer=normalizer_name(layer.normalizer),
        pattern=getattr(pattern, "name", None) if not isinstance(pattern, Linformer) else None,
    )  # fmt: skip
    return KERNELS["flex"].why_not(request)


def with_pattern(chosen: dict[str, str]) -> dict[str, Any]:
    """The same mechanisms, with a pattern for a kernel that serves nothing else."""
    kernel = chosen.get("kernel", "")
    return chosen if "pattern" in chosen or kernel not in PATTERN_OF else {**chosen, "pattern": PATTERN_OF[kernel]}


def pairs(rows: str, columns: str) -> Iterator[tuple[str, str, str | None]]:
    """(row, column, objection) for every pair of words of two mechanisms, in evaluation."""
    words = choices()
    for row in words[rows]:
        for column in words[columns]:
            yield row, column, objection(**with_pattern({rows: row, columns: column}))
