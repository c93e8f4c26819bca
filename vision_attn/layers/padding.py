"""Images of different sizes in one batch, with and without a network seeing the padding."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn


def unpadded(images: Tensor, mask: Tensor) -> list[Tensor] | None:
    """The images of a padded batch, each without its padding; None where a mask is no rectangle at the top left.

    Args:
        images: (B, C, H, W).
        mask: (B, H, W), True = image.
    """
    heights, widths = mask[:, :, 0].sum(1), mask[:, 0, :].sum(1)
    rows = torch.arange(mask.shape[1], device=mask.device) < heights[:, None]
    columns = torch.arange(mask.shape[2], device=mask.device) < widths[:, None]
    if not bool(((rows[:, :, None] & columns[:, None, :]) == mask).all() & (heights * widths > 0).all()):
        return None
    sizes = torch.stack([heights, widths], dim=1).tolist()
    return [image[:, :h, :w] for image, (h, w) in zip(images, sizes, strict=True)]


def pad_together(images: Sequence[Tensor]) -> tuple[Tensor, Tensor | None]:
    """Images or maps (C, h, w) of any sizes in one batch (B, C, H, W) of zeros, and where they lie in it.

    Returns:
        The batch, and a mask (B, H, W), True = image; None where nothing is padded.
    """
    height, width = (max(image.shape[side] for image in images) for side in (-2, -1))
    if all(image.shape[-2:] == (height, width) for image in images):
        return torch.stack(list(images)), None
    batch = images[0].new_zeros(len(images), images[0].shape[0], height, width)
    mask = torch.zeros(len(images), height, width, dtype=torch.bool, device=batch.device)
    for i, image in enumerate(images):
        batch[i, :, : image.shape[1], : image.shape[2]] = image
        mask[i, : image.shape[1], : image.shape[2]] = True
    return batch, mask


def apart(backbone: nn.Module, images: Sequence[Tensor]) -> tuple[Tensor, Tensor | None]:
    """Maps of images of any sizes that have not seen any padding: those of one size go through the backbone together.

    Returns:
        (B, channels, h, w) and a mask (B, h, w), as ``pad_together``.
    """
    groups: dict[tuple[int, ...], list[int]] = {}
    for i, image in enumerate(images):
        groups.setdefault(tuple(image.shape), []).append(i)
    maps: dict[int, Tensor] = {}
    for indices in groups.values():
        found = backbone(torch.stack([images[i] for i in indices]))
        maps.update(zip(indices, found, strict=True))
    return pad_together([maps[i] for i in range(len(images))])
