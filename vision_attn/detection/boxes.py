"""Boxes: two formats, and how much two of them overlap.

Models and targets speak of centre x, centre y, width and height (``cxcywh``), overlaps and drawings of two corners
(``xyxy``). Nothing here refuses a degenerate box: a box without area overlaps nothing, and its gradients stay finite.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torchvision.ops import box_convert

SMALLEST_AREA = 1e-8
"""Areas are divided by at least this much: a ten-thousandth of an image's side, squared. No real box is smaller."""


def cxcywh_to_xyxy(boxes: Tensor) -> Tensor:
    """Centre x, centre y, width, height to left, top, right, bottom: (…, 4) to (…, 4)."""
    return box_convert(boxes, "cxcywh", "xyxy")


def xyxy_to_cxcywh(boxes: Tensor) -> Tensor:
    """Left, top, right, bottom to centre x, centre y, width, height: (…, 4) to (…, 4)."""
    return box_convert(boxes, "xyxy", "cxcywh")


def pairwise(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Views of (…, N, 4) and (…, M, 4) that broadcast to all pairs: (…, N, 1, 4) and (…, 1, M, 4)."""
    return a.unsqueeze(-2), b.unsqueeze(-3)


def iou(a: Tensor, b: Tensor) -> Tensor:
    """Intersection over union of boxes that broadcast.

    Args:
        a: (…, 4) as ``xyxy``.
        b: (…, 4) as ``xyxy``.

    Returns:
        (…) in 0 … 1.
    """
    return _iou_union_corners(a.unbind(-1), b.unbind(-1))[0]


def pairwise_iou(a: Tensor, b: Tensor) -> Tensor:
    """Intersection over union of all pairs: (…, N, 4) and (…, M, 4), both ``xyxy``, to (…, N, M)."""
    return iou(*pairwise(a, b))


def iou_and_giou(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Two overlaps of boxes that broadcast, (…, 4) and (…, 4) as ``xyxy``, for the price of one.

    Returns:
        (…) intersection over union, as of :func:`iou`; (…) the generalized one (Rezatofighi et al. 2019), −1 … 1: the
        IoU less the share of the common hull that neither box fills.
    """
    first, second = a.unbind(-1), b.unbind(-1)
    overlap, union = _iou_union_corners(first, second)
    width = torch.maximum(first[2], second[2]) - torch.minimum(first[0], second[0])
    height = torch.maximum(first[3], second[3]) - torch.minimum(first[1], second[1])
    hull = width * height
    return overlap, overlap - (hull - union) / hull.clamp_min(SMALLEST_AREA)


def _iou_union_corners(a: tuple[Tensor, ...], b: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
    width = torch.minimum(a[2], b[2]) - torch.maximum(a[0], b[0])
    height = torch.minimum(a[3], b[3]) - torch.maximum(a[1], b[1])
    intersection = width.clamp_min(0) * height.clamp_min(0)
    union = (a[2] - a[0]) * (a[3] - a[1]) + (b[2] - b[0]) * (b[3] - b[1]) - intersection
    return intersection / union.clamp_min(SMALLEST_AREA), union
