"""The brightness of a picture."""

from __future__ import annotations

from torch import Tensor

LUMA = (0.299, 0.587, 0.114)
"""What red, green and blue weigh (ITU-R BT.601, as in Pillow)."""


def luma(pixels: Tensor) -> Tensor:
    """The brightness (..., 1, H, W) of RGB images (..., 3, H, W), floating point."""
    red, green, blue = LUMA
    return pixels[..., 0:1, :, :] * red + pixels[..., 1:2, :, :] * green + pixels[..., 2:3, :, :] * blue
