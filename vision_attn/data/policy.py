"""Colour jitter and a RandAugment-like policy on raw pixels.

Samples are grouped by what is done to them, and each group is one call: an enhancement is a blend with a factor per
sample, and the five geometric operations together are one resampling with a matrix per sample.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional as F

from vision_attn.data.luma import luma
from vision_attn.data.randomness import Stream, uniforms

# in the order of the numbers that are drawn
OPS = (
    "identity",
    "autocontrast",
    "equalize",
    "posterize",
    "solarize",
    "brightness",
    "contrast",
    "color",
    "sharpness",
    "rotate",
    "shear_x",
    "shear_y",
    "translate_x",
    "translate_y",
)
_FIRST_ENHANCEMENT, _FIRST_GEOMETRIC = OPS.index("brightness"), OPS.index("rotate")


def rand_augment(
    images: Tensor, num_ops: int, magnitude: float, seed: int, epoch: int, index: Tensor, lane: int = 0
) -> Tensor:
    """Apply ``num_ops`` operations to every image, each drawn from :data:`OPS` (Cubuk et al. 2020).

    At magnitude 10 enhancements change by a factor of 1 +- 0.9, rotation is 30 degrees, shear 0.3, translation 0.45 of
    the side, posterize keeps 4 bits and solarize inverts everything; smaller magnitudes scale linearly. Where there
    are two directions each sample draws one.

    Args:
        images: (B, 3, H, W) uint8; not changed.
        num_ops: operations in a row.
        magnitude: 0...10, the same for all.
        seed: of the run.
        epoch: 0, 1, ...
        index: (B,) int64.
        lane: added to every stream.

    Returns:
        (B, 3, H, W) uint8.
    """
    streams = [Stream.RANDAUGMENT + lane + step for step in range(2 * num_ops)]
    draw = uniforms(seed, epoch, index, streams)  # (B, 2 num_ops)
    strength = magnitude / 10.0
    images = images.clone()
    for step in range(num_ops):
        op = (draw[:, 2 * step] * len(OPS)).long()
        signed = torch.where(draw[:, 2 * step + 1] < 0.5, -strength, strength)
        # one transfer for all groups, so that a GPU is waited for once
        numbers = op.cpu()
        for number in range(1, _FIRST_ENHANCEMENT):
            _apply(images, numbers == number, lambda x, _, n=number: tonal(x, OPS[n], strength))
        for number in range(_FIRST_ENHANCEMENT, _FIRST_GEOMETRIC):
            _apply(
                images,
                numbers == number,
                lambda x, rows, n=number, signed=signed: enhance(x, OPS[n], 1.0 + 0.9 * signed[rows]),
            )
        _apply(
            images,
            numbers >= _FIRST_GEOMETRIC,
            lambda x, rows, op=op, signed=signed: resample(x, op[rows], signed[rows]),
        )
    return images


def _apply(images: Tensor, chosen: Tensor, function) -> None:  # type: ignore[no-untyped-def]
    """Replace the chosen images, (B,) bool on the CPU, by what ``function(images, rows)`` makes of them."""
    rows = chosen.nonzero()[:, 0].to(images.device)
    if len(rows):
        images[rows] = function(images[rows], rows)


def tonal(images: Tensor, op: str, strength: float) -> Tensor:
    """Operations that map grey values to grey values.

    Args:
        images: (n, 3, H, W) uint8.
        op: ``autocontrast``, ``equalize``, ``posterize`` or ``solarize``.
        strength: 0...1; the first two have none.

    Returns:
        (n, 3, H, W) uint8.
    """
    from torchvision.transforms.v2 import functional as T

    if op == "autocontrast":
        return T.autocontrast(images)
    if op == "equalize":
        return T.equalize(images)
    if op == "posterize":
        return T.posterize(images, 8 - round(4 * strength))
    return T.solarize(images, 256.0 * (1.0 - strength))


def enhance(images: Tensor, op: str, factor: Tensor) -> Tensor:
    """Blend every image with a version that lacks brightness, contrast, colour or sharpness.

    Args:
        images: (n, 3, H, W) uint8.
        op: ``brightness``, ``contrast``, ``color`` or ``sharpness``.
        factor: (n,): 0 gives the version that lacks it, 1 the image, more exaggerates.

    Returns:
        (n, 3, H, W) uint8.
    """
    pixels, factor = images.float(), factor[:, None, None, None]
    if op == "brightness":
        out = pixels.mul_(factor)
    elif op == "contrast":
        out = torch.lerp(luma(pixels).mean((1, 2, 3), keepdim=True), pixels, factor)
    elif op == "color":
        out = torch.lerp(luma(pixels), pixels, factor)
    else:
        out = torch.lerp(_smooth(pixels), pixels, factor)
    return out.clamp_(0, 255).round_().to(torch.uint8)


def resample(images: Tensor, op: Tensor, amount: Tensor) -> Tensor:
    """Rotate, shear or translate every image; what comes in from outside is grey.

    Args:
        images: (n, 3, H, W) uint8.
        op: (n,) int64, numbers of ``rotate`` ... ``translate_y`` in :data:`OPS`.
        amount: (n,) in -1...1, share of the strongest.

    Returns:
        (n, 3, H, W) uint8.
    """
    height, width = images.shape[-2:]
    which = F.one_hot(op - _FIRST_GEOMETRIC, 5).float() * amount[:, None]  # (n, 5)
    angle, shear_x, shear_y, move_x, move_y = which.unbind(1)
    angle = angle * math.radians(30.0)
    # affine_grid measures both sides from -1 to 1: on oblong images a rotation needs the ratio of the sides
    theta = torch.stack(
        [
            torch.stack([angle.cos(), (0.3 * shear_x - angle.sin()) * height / width, 0.9 * move_x], 1),
            torch.stack([(0.3 * shear_y + angle.sin()) * width / height, angle.cos(), 0.9 * move_y], 1),
        ],
        1,
    )
    grid = F.affine_grid(theta, list(images.shape), align_corners=False)
    grey = 128.0  # zeros outside become grey when grey is taken for zero
    out = F.grid_sample(images.float().sub_(grey), grid, mode="bilinear", align_corners=False)
    return out.add_(grey).round_().to(torch.uint8)


def color_jitter(images: Tensor, strength: float, draw: Tensor, mask: Tensor | None = None) -> Tensor:
    """Scale brightness, contrast and saturation, in this order, by a factor of their own in 1 +- strength.

    Args:
        images: (B, 3, H, W) uint8.
        strength: 0...1.
        draw: (B, 3) uniform numbers.
        mask: (B, H, W) bool, False where an image is padded: what lies there has no part in its mean.

    Returns:
        (B, 3, H, W) uint8.
    """
    brightness, contrast, saturation = (1.0 + strength * (2.0 * draw - 1.0))[:, :, None, None, None].unbind(1)
    pixels = images.float().mul_(brightness).clamp_(0, 255)
    grey = luma(pixels)
    if mask is None:
        mean = grey.mean((1, 2, 3), keepdim=True)
    else:
        inside = mask[:, None]
        mean = (grey * inside).sum((1, 2, 3), keepdim=True) / inside.sum((1, 2, 3), keepdim=True).clamp(min=1)
    pixels = torch.lerp(mean, pixels, contrast).clamp_(0, 255)
    pixels = torch.lerp(luma(pixels), pixels, saturation).clamp_(0, 255)
    return pixels.round_().to(torch.uint8)


def _smooth(pixels: Tensor) -> Tensor:
    """3x3 smoothing with 5 in the middle and 1 around, as Pillow's SMOOTH; the border stays as it is."""
    if min(pixels.shape[-2:]) < 3:
        return pixels
    rows = pixels[..., :-2, :] + pixels[..., 1:-1, :] + pixels[..., 2:, :]
    total = rows[..., :-2] + rows[..., 1:-1] + rows[..., 2:]
    out = pixels.clone()
    out[..., 1:-1, 1:-1].mul_(4.0).add_(total).div_(13.0)
    return out
