"""Flips, crops and rectangles for a whole batch, each sample its own, without a loop over samples."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional as F


def flip_and_crop(
    images: Tensor,
    *,
    flip: Tensor | None = None,
    offset: tuple[Tensor, Tensor] | None = None,
    padding: int = 0,
    mode: str = "reflect",
) -> Tensor:
    """Mirror and shift every image in one gather; the padded image is never made.

    Args:
        images: (B, C, H, W), any dtype.
        flip: (B,) bool, True = mirror left and right.
        offset: where the crop begins in the padded image: two (B,) int64 tensors, rows and columns, 0...2 padding.
        padding: pixels added on every side.
        mode: ``"reflect"`` (without repeating the border pixel) or ``"zero"``.

    Returns:
        (B, C, H, W) of the same dtype.
    """
    if flip is None and offset is None:
        return images
    batch, channels, height, width = images.shape
    rows = torch.arange(height, device=images.device).expand(batch, -1)  # (B, H)
    cols = torch.arange(width, device=images.device).expand(batch, -1)  # (B, W)
    if offset is not None:
        rows, cols = rows + (offset[0][:, None] - padding), cols + (offset[1][:, None] - padding)
    inside = None
    if offset is not None and mode == "zero":
        in_rows, in_cols = (rows >= 0) & (rows < height), (cols >= 0) & (cols < width)
        rows, cols = rows.clamp(0, height - 1), cols.clamp(0, width - 1)
        inside = (in_rows, in_cols)
    elif offset is not None:
        rows, cols = _reflect(rows, height), _reflect(cols, width)
    if flip is not None:
        cols = torch.where(flip[:, None], width - 1 - cols, cols)
    pixel = (rows[:, :, None] * width + cols[:, None, :]).view(batch, 1, height * width)
    out = images.reshape(batch, channels, -1).gather(2, pixel.expand(-1, channels, -1)).view_as(images)
    if inside is not None:
        out.mul_((inside[0][:, None, :, None] & inside[1][:, None, None, :]).to(out.dtype))
    return out


def _reflect(position: Tensor, size: int) -> Tensor:
    """Positions outside 0...size-1 mirrored at the borders, as often as it takes."""
    if size == 1:
        return torch.zeros_like(position)
    period = 2 * (size - 1)
    return (size - 1) - (position.remainder(period) - (size - 1)).abs()


def rectangles(
    area: Tensor, aspect: Tensor, y: Tensor, x: Tensor, height: int, width: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Whole-pixel rectangles that lie inside the image.

    Args:
        area: (B,) share of the image.
        aspect: (B,) height over width, relative to the image's own.
        y, x: (B,) uniform in [0, 1): where in the room that is left.
        height, width: of the image.

    Returns:
        Top, bottom, left and right, each (B,) int64; bottom and right are the first ones outside.
    """
    tall = (height * (area * aspect).sqrt()).round().clamp(max=height)
    wide = (width * (area / aspect).sqrt()).round().clamp(max=width)
    top, left = (y * (height - tall + 1)).floor(), (x * (width - wide + 1)).floor()
    return top.long(), (top + tall).long(), left.long(), (left + wide).long()


def rectangle_mask(box: tuple[Tensor, Tensor, Tensor, Tensor], height: int, width: int) -> Tensor:
    """(B, 1, H, W) bool, True inside the rectangles of :func:`rectangles`."""
    top, bottom, left, right = (edge[:, None] for edge in box)
    rows = torch.arange(height, device=top.device)
    cols = torch.arange(width, device=top.device)
    in_rows, in_cols = (rows >= top) & (rows < bottom), (cols >= left) & (cols < right)
    return in_rows[:, None, :, None] & in_cols[:, None, None, :]


def resized_crops(images: Tensor, smallest: float, draw: Tensor) -> Tensor:
    """A random part of every image, brought back to the full size (Szegedy et al. 2015).

    Args:
        images: (B, C, H, W) uint8.
        smallest: least share of the area that is kept.
        draw: (B, 4) uniform numbers: area, aspect ratio, vertical and horizontal place.

    Returns:
        (B, C, H, W) uint8.
    """
    area = smallest + (1.0 - smallest) * draw[:, 0]
    aspect = ((2.0 * draw[:, 1] - 1.0) * math.log(4 / 3)).exp()  # width over height
    wide, tall = (area * aspect).sqrt().clamp(max=1.0), (area / aspect).sqrt().clamp(max=1.0)
    # affine_grid measures from -1 to 1: the centre may move as far as the part leaves room
    theta = torch.zeros(len(images), 2, 3, device=images.device)
    theta[:, 0, 0], theta[:, 0, 2] = wide, (1.0 - wide) * (2.0 * draw[:, 3] - 1.0)
    theta[:, 1, 1], theta[:, 1, 2] = tall, (1.0 - tall) * (2.0 * draw[:, 2] - 1.0)
    grid = F.affine_grid(theta, list(images.shape), align_corners=False)
    out = F.grid_sample(images.float(), grid, mode="bilinear", padding_mode="border", align_corners=False)
    return out.round_().to(torch.uint8)
