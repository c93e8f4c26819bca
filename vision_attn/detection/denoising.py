"""Denoising queries: disturbed copies of the true objects, which the decoder learns to put right.

They know which object they belong to, so they teach the decoder from the first step, without matching (DN-DETR: Li et
al. 2022, arXiv 2203.01305). Contrastive denoising adds copies that are too far off and shall say so (DINO: Zhang et al.
2022, arXiv 2203.03605).

Legend: B images, M denoising queries, N learned queries.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from vision_attn.detection.boxes import cxcywh_to_xyxy, xyxy_to_cxcywh
from vision_attn.detection.host import real_objects


@dataclasses.dataclass
class Denoising:
    """Denoising queries of a batch.

    Attributes:
        labels: (B, M) int64, disturbed.
        boxes: (B, M, 4) centre x, y, width, height in 0 … 1, disturbed.
        target: (B, M) int64, the object of its image that a query is a copy of; −1 for padding and negatives.
        positive: (B, M) bool, queries that shall find their object.
        valid: (B, M) bool, queries that are none of padding.
        groups: M is so many groups, each with every object once (contrastive: twice, positives first).
        mask: (M + N, M + N) bool, True = may attend: groups do not see each other, and learned queries no group.
    """

    labels: Tensor
    boxes: Tensor
    target: Tensor
    positive: Tensor
    valid: Tensor
    groups: int
    mask: Tensor


def make_denoising(
    targets: Sequence[Mapping[str, Tensor]],
    *,
    num_classes: int,
    num_queries: int,
    groups: int,
    label_noise: float = 0.2,
    box_noise: float = 0.4,
    contrastive: bool = False,
    most: int | None = None,
    generator: torch.Generator | None = None,
) -> Denoising | None:
    """Disturbs the objects of a batch.

    Args:
        targets: of each image, ``labels`` (n,) and ``boxes`` (n, 4).
        num_classes: C.
        num_queries: N, learned queries that stand behind the denoising ones in the decoder.
        groups: copies of every object.
        label_noise: probability that a label becomes a random one.
        box_noise: how far boxes move: centres by up to half of it times the size, sizes by up to it; of ``contrastive``
            each corner by up to half of it times the size, and for negatives by once to twice as much.
        contrastive: with negatives.
        most: largest M; where an image has many objects there are then fewer groups, at least one.
        generator: of the random numbers, on the device of the targets.

    Returns:
        None where no image has an object.
    """
    counts = [len(target["labels"]) for target in targets]
    n = max(counts, default=0)
    if n == 0 or groups < 1:
        return None
    each = 2 * n if contrastive else n
    groups = groups if most is None else max(1, min(groups, most // each))
    labels = pad_sequence([target["labels"] for target in targets], batch_first=True)  # (B, n)
    boxes = pad_sequence([target["boxes"] for target in targets], batch_first=True, padding_value=0.5)
    index = torch.arange(n, device=labels.device).expand(len(targets), n)
    valid = real_objects(counts, n, labels.device)
    negative = torch.arange(groups * each, device=labels.device) % each >= n  # (M,)

    copies = groups * each // n
    labels, index, valid = (x.repeat(1, copies) for x in (labels, index, valid))
    boxes = boxes.repeat(1, copies, 1).float()
    positive = valid & ~negative
    target = index.masked_fill(~positive, -1)
    if label_noise:
        flipped = _uniform(labels.shape, labels, generator) < label_noise
        drawn = torch.randint(num_classes, labels.shape, device=labels.device, generator=generator)
        labels = torch.where(flipped & valid, drawn, labels)
    if box_noise and contrastive:
        boxes = _move_corners(boxes, negative, box_noise, generator)
    elif box_noise:
        boxes = _move_boxes(boxes, box_noise, generator)
    mask = _mask(groups, each, num_queries, labels.device)
    return Denoising(labels, boxes, target, positive, valid, groups, mask)


def _uniform(shape: Sequence[int], like: Tensor, generator: torch.Generator | None) -> Tensor:
    return torch.rand(tuple(shape), device=like.device, generator=generator)


def _move_boxes(boxes: Tensor, noise: float, generator: torch.Generator | None) -> Tensor:
    """DN-DETR's noise: the centre stays inside the box, the size between (1 − noise) and (1 + noise) times its own."""
    reach = torch.cat([boxes[..., 2:] / 2, boxes[..., 2:]], dim=-1)
    shift = 2 * _uniform(boxes.shape, boxes, generator) - 1
    return (boxes + noise * shift * reach).clamp(0.0, 1.0)


def _move_corners(boxes: Tensor, negative: Tensor, noise: float, generator: torch.Generator | None) -> Tensor:
    """DINO's noise: a corner moves by up to half of the size times ``noise``; for negatives by that and once more."""
    share = _uniform(boxes.shape, boxes, generator) + negative[:, None].float()
    sign = torch.where(_uniform(boxes.shape, boxes, generator) < 0.5, -1.0, 1.0)
    reach = (boxes[..., 2:] / 2).repeat(1, 1, 2)
    corners = (cxcywh_to_xyxy(boxes) + noise * sign * share * reach).clamp(0.0, 1.0)
    low = torch.minimum(corners[..., :2], corners[..., 2:])  # corners that passed each other are still a box
    high = torch.maximum(corners[..., :2], corners[..., 2:])
    return xyxy_to_cxcywh(torch.cat([low, high], dim=-1))


def _mask(groups: int, each: int, num_queries: int, device: torch.device) -> Tensor:
    """(M + N, M + N): a denoising query sees its group and the learned queries, a learned query those alone."""
    group = torch.arange(groups * each + num_queries, device=device).div(each, rounding_mode="floor")
    group = group.clamp(max=groups)  # the learned queries are one more
    return (group[:, None] == group) | (group == groups)
