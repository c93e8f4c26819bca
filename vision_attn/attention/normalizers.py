"""Normalizers: how scores become weights."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

Normalizer = Callable[[Tensor], Tensor]

NORMALIZERS: dict[str, Normalizer] = {}

FUSED = frozenset({"softmax"})
"""Normalizers that the fused kernels compute themselves."""


def register_normalizer(name: str) -> Callable[[Normalizer], Normalizer]:
    """Makes a normalizer ``scores (B, H, N, M) -> weights (B, H, N, M)`` available by name, in every model."""

    def add(function: Normalizer) -> Normalizer:
        NORMALIZERS[name] = function
        return function

    return add


def resolve_normalizer(name: str) -> Normalizer:
    """A normalizer by name.

    Raises:
        ValueError: there is no normalizer of that name.
    """
    if name not in NORMALIZERS:
        raise ValueError(f"unknown normalizer {name!r}; there are: {', '.join(NORMALIZERS)}")
    return NORMALIZERS[name]


@register_normalizer("softmax")
def softmax(scores: Tensor) -> Tensor:
    """exp(s - max s) / Σ exp(s - max s) over the keys; the arithmetic inside is float32 for 16-bit scores."""
    return scores.softmax(dim=-1)
