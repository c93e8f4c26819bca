"""Mixup and CutMix for a whole batch, with a weight of its own for every sample."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from vision_attn.data.config import AugmentConfig
from vision_attn.data.geometry import rectangle_mask, rectangles
from vision_attn.data.randomness import Stream, uniforms

_CELLS = 4096


@lru_cache(maxsize=16)
def _beta_table(alpha: float) -> Tensor:
    """The quantiles of Beta(alpha, alpha) at ``_CELLS + 1`` equidistant places, float32."""
    from scipy.special import betaincinv

    places = torch.linspace(0, 1, _CELLS + 1, dtype=torch.float64).numpy()
    return torch.from_numpy(betaincinv(alpha, alpha, places)).float()


def beta_quantile(alpha: float, uniform: Tensor) -> Tensor:
    """Uniform numbers turned into Beta(alpha, alpha) ones.

    A generator for the Beta distribution rejects some of its draws; a quantile needs exactly one uniform number,
    so it can be a function of the sample. Interpolated in a table.

    Args:
        alpha: > 0.
        uniform: (B,) in [0, 1).

    Returns:
        (B,) float32 in [0, 1].
    """
    table = _beta_table(alpha).to(uniform.device)
    place = uniform * _CELLS
    cell = place.long().clamp(max=_CELLS - 1)
    return torch.lerp(table[cell], table[cell + 1], place - cell)


def draw_mix(
    config: AugmentConfig, seed: int, epoch: int, index: Tensor, size: tuple[int, int]
) -> tuple[Tensor, Tensor | None]:
    """How each sample is mixed.

    Args:
        config: with mixup or cutmix on.
        seed: of the run.
        epoch: 0, 1, ...
        index: (B,) int64.
        size: (H, W).

    Returns:
        The weight of the sample itself in mixup, (B,), 1 where it is cut or left alone; and the mask of pixels taken
        from the partner, (B, 1, H, W) bool, or None without CutMix.
    """
    streams = (Stream.MIX, Stream.MIX_KIND, Stream.MIX_LAMBDA, Stream.MIX_Y, Stream.MIX_X)
    chosen, kind, share, y, x = uniforms(seed, epoch, index, streams).unbind(1)
    mixed = chosen < config.mix_probability
    cut_share = 1.0 if config.mixup == 0 else (0.0 if config.cutmix == 0 else 0.5)
    cut = mixed & (kind < cut_share)
    weight = torch.ones_like(share)
    if config.mixup > 0:
        weight = torch.where(mixed & ~cut, beta_quantile(config.mixup, share), weight)
    if config.cutmix == 0:
        return weight, None
    area = (1.0 - beta_quantile(config.cutmix, share)) * cut
    box = rectangles(area, torch.ones_like(area), y, x, *size)
    return weight, rectangle_mask(box, *size)


def mix(images: Tensor, other: Tensor, weight: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """Mix every image with its partner.

    Args:
        images: (B, C, H, W) float.
        other: (B, C, H, W), the partners.
        weight: (B,) of the image itself.
        mask: (B, 1, H, W) bool, True where the partner's pixels replace the image's; or None.

    Returns:
        The mixed images, and the share of each that is its own, (B,): the weight times the area left.
    """
    kept = weight
    if mask is not None:
        kept = weight * (1.0 - mask.flatten(1).float().mean(1))
    mixed = torch.lerp(other, images, weight[:, None, None, None])
    if mask is not None:
        mixed = torch.where(mask, other, mixed)
    return mixed, kept
