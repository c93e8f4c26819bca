"""Colour jitter and a RandAugment-like policy on raw pixels: samples are grouped by what is done to them."""

from __future__ import annotations

from torch import Tensor


def rand_augment(
    images: Tensor, num_ops: int, magnitude: float, seed: int, epoch: int, index: Tensor, lane: int = 0
) -> Tensor:
    raise NotImplementedError


def color_jitter(images: Tensor, strength: float, draw: Tensor) -> Tensor:
    raise NotImplementedError
