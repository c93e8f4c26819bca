"""Which query shall find which object: bipartite matching of minimal cost (Carion et al. 2020).

All decoder layers are matched together. Their costs are computed in one pass over tensors padded to the largest image
of the batch, and travel to the processor in one transfer, with the numbers that tell whether anything became NaN. Only
scipy's solver goes through layers and images one by one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from vision_attn.detection.boxes import cxcywh_to_xyxy, iou_and_giou, pairwise
from vision_attn.detection.host import from_host, real_objects
from vision_attn.detection.losses import softplus
from vision_attn.errors import UserError

ADVICE = (
    "Try a smaller --model.optimizer.lr, a longer --model.optimizer.warmup, --trainer.gradient_clip_val 0.1 or "
    "--trainer.precision 32-true."
)
SMALLEST_OVERLAP = 1e-8


@dataclass(frozen=True)
class Stack:
    """Predictions of several layers for one batch.

    Attributes:
        logits: (L, B, N, K).
        boxes: (L, B, N, 4) as ``cxcywh``.
        groups: the N queries are so many groups, one after the other, each matched on its own (Group DETR).
        name: of one layer, for error messages.
    """

    logits: Tensor
    boxes: Tensor
    groups: int = 1
    name: str = "decoder layer"


@dataclass(frozen=True)
class PaddedTargets:
    """The objects of a batch, padded to those of its fullest image.

    Attributes:
        labels: (B, n) int64, 0 where there is no object.
        boxes: (B, n, 4) as ``cxcywh``, 0 where there is no object.
        counts: objects of each image.
    """

    labels: Tensor
    boxes: Tensor
    counts: list[int]

    @cached_property
    def real(self) -> Tensor:
        """(B, n), False for padding."""
        return real_objects(self.counts, self.labels.shape[1], self.labels.device)

    @classmethod
    def of(cls, targets: Sequence[dict[str, Any]], device: torch.device | str) -> PaddedTargets:
        """Pad ``labels`` (n,) and ``boxes`` (n, 4) of every image."""
        labels = pad_sequence([target["labels"] for target in targets], batch_first=True)
        boxes = pad_sequence([target["boxes"] for target in targets], batch_first=True)
        return cls(labels.to(device), boxes.to(device).float(), [len(target["labels"]) for target in targets])


@dataclass(frozen=True)
class MatchingCosts:
    """What a pair of query and object costs.

    Attributes:
        kind: ``softmax``: −p of the object's class; ``focal``: what the focal loss would gain by it; ``stable``: that
            of a probability lowered where boxes do not overlap (Liu et al. 2023).
        class_weight: of the class.
        bbox_weight: of the L1 distance of boxes.
        giou_weight: of the negated generalized IoU.
        focal_alpha: of the focal loss (Lin et al. 2017).
        focal_gamma: likewise.
    """

    kind: Literal["softmax", "focal", "stable"] = "softmax"
    class_weight: float = 1.0
    bbox_weight: float = 5.0
    giou_weight: float = 2.0
    focal_alpha: float = 0.25
    focal_gamma: float = 2.0


@dataclass(frozen=True)
class Matching:
    """Pairs of queries and objects, in the order of layers, images, groups and queries.

    Attributes:
        query: (P,) int64, places in the (L, B, N) queries, flattened.
        target: (P,) int64, places in the (B, n) padded targets, flattened.
        per_layer: how many of the pairs each layer has.
        surplus: objects that find no query in a layer, since their image has more of them than a group has queries.
    """

    query: Tensor
    target: Tensor
    per_layer: list[int]
    surplus: int


@torch.no_grad()
def match(stacks: Sequence[Stack], targets: PaddedTargets, costs: MatchingCosts) -> list[Matching]:
    """Match every layer of every stack to the objects, with one wait for the device.

    Args:
        stacks: predictions; they may differ in their number of queries.
        targets: of the same batch.
        costs: see :func:`cost_matrix`.

    Returns:
        One matching per stack, on the device of its predictions.

    Raises:
        UserError: predictions that are NaN or infinite, labels that the logits do not know.
    """
    matrices = [cost_matrix(stack.logits, stack.boxes, targets, costs, stack.groups) for stack in stacks]
    values = _to_processor(matrices, _health(stacks, targets))
    health = values.pop()
    _check_health(health, stacks, costs)
    return [_solve(cost, stack, targets.counts) for cost, stack in zip(values, stacks, strict=True)]


def cost_matrix(logits: Tensor, boxes: Tensor, targets: PaddedTargets, costs: MatchingCosts, groups: int = 1) -> Tensor:
    """What every query and object cost as a pair.

    Args:
        logits: (L, B, N, K).
        boxes: (L, B, N, 4) as ``cxcywh``.
        targets: padded to n objects.
        costs: kind and weights.
        groups: of queries, each matched on its own: what is best is found within each.

    Returns:
        (L, B, N, n), meaningless beyond an image's own objects.
    """

    def gap(i: int) -> Tensor:
        return (boxes[..., i, None] - targets.boxes[:, None, :, i]).abs_()

    distance = gap(0)
    for i in (1, 2, 3):  # one after the other: the differences of all four at once would take four times the memory
        distance.add_(gap(i))
    giou = iou_and_giou(*pairwise(cxcywh_to_xyxy(boxes), cxcywh_to_xyxy(targets.boxes)))[1]
    return (
        distance.mul_(costs.bbox_weight)
        .sub_(giou, alpha=costs.giou_weight)
        .add_(class_cost(logits, targets, giou, costs, groups), alpha=costs.class_weight)
    )


def class_cost(logits: Tensor, targets: PaddedTargets, giou: Tensor, costs: MatchingCosts, groups: int = 1) -> Tensor:
    """The class part of :func:`cost_matrix`, unweighted.

    Args:
        logits: (L, B, N, K).
        targets: padded to n objects.
        giou: (L, B, N, n) generalized IoU, for ``stable``.
        costs: kind and the numbers of the focal loss.
        groups: of queries.

    Returns:
        (L, B, N, n).
    """
    # a label beyond the head is reported after the transfer; until then it must not be read out of bounds
    index = targets.labels.clamp(0, logits.shape[-1] - 1)[None, :, None].expand_as(giou)
    if costs.kind == "softmax":
        return -logits.softmax(-1).gather(-1, index)
    alpha, gamma = costs.focal_alpha, costs.focal_gamma
    x = logits.gather(-1, index)
    if costs.kind == "stable" and giou.shape[-1]:
        overlap = ((giou + 1) / 2).mul_(targets.real[:, None])  # 0 … 1
        grouped = overlap.unflatten(2, (groups, -1))
        highest = grouped.amax((-2, -1), keepdim=True).clamp_min_(SMALLEST_OVERLAP)
        lowered = (grouped / highest).sqrt_().flatten(2, 3)
        x = torch.logit(x.sigmoid() * lowered, eps=1e-7)  # the best pair of an image (and group) stays as it is
    p, absent = x.sigmoid(), softplus(x)  # −log(1 − p); −log p is less by x
    present = (absent - x).mul_((1 - p) ** gamma)
    return present.mul_(alpha).sub_(absent.mul_(p**gamma), alpha=1 - alpha)


def _health(stacks: Sequence[Stack], targets: PaddedTargets) -> Tensor:
    """Sums that are finite as long as everything is: per stack (2, L, B), then three of the targets, flattened."""
    sums = [part.sum((-2, -1)).flatten() for stack in stacks for part in (stack.logits, stack.boxes)]
    if targets.labels.numel():
        lowest, highest = targets.labels.aminmax()
        sums.append(torch.stack([lowest.float(), highest.float(), targets.boxes.sum()]))
    else:
        sums.append(sums[0].new_zeros(3))
    return torch.cat(sums)


def _to_processor(matrices: Sequence[Tensor], health: Tensor) -> list[np.ndarray]:
    """Several tensors in one transfer."""
    parts = [*matrices, health]
    flat = torch.cat([part.flatten() for part in parts]).cpu().numpy()
    ends = np.cumsum([part.numel() for part in parts])
    return [flat[end - part.numel() : end].reshape(part.shape) for part, end in zip(parts, ends, strict=True)]


def _solve(cost: np.ndarray, stack: Stack, counts: Sequence[int]) -> Matching:
    from scipy.optimize import linear_sum_assignment

    layers, images, queries, most = cost.shape
    per_group = queries // stack.groups
    rows, columns, per_layer = [], [], []
    for layer in range(layers):
        pairs = 0
        for image, count in enumerate(counts):
            if count == 0:
                continue
            start = (layer * images + image) * queries
            for first in range(0, queries, per_group):
                row, column = linear_sum_assignment(cost[layer, image, first : first + per_group, :count])
                rows.append(row + (start + first))
                columns.append(column + image * most)
                pairs += len(row)
        per_layer.append(pairs)
    flat = np.stack([np.concatenate(rows), np.concatenate(columns)]) if rows else np.zeros((2, 0), np.int64)
    query, target = from_host(torch.from_numpy(flat), stack.logits.device)
    surplus = sum(max(0, count - per_group) for count in counts)
    return Matching(query, target, per_layer, surplus)


def _check_health(health: np.ndarray, stacks: Sequence[Stack], costs: MatchingCosts) -> None:
    """Refuse what cannot be learned from.

    Raises:
        UserError: saying what is wrong, and in which layer and image.
    """
    lowest, highest, boxes = health[-3:]
    classes = stacks[0].logits.shape[-1] - (costs.kind == "softmax")
    if lowest < 0 or highest >= classes:
        raise UserError(
            f"a target has the label {int(lowest if lowest < 0 else highest)}, but the model's head knows "
            f"the {classes} classes 0 … {classes - 1}: build the model with the data's num_classes."
        )
    if not np.isfinite(boxes):
        raise UserError("a target box is not a finite number: vision-attn check data says which")
    start = 0
    for stack in stacks:
        layers, images = stack.logits.shape[:2]
        values = health[start : start + 2 * layers * images].reshape(2, layers, images)
        start += values.size
        fine = np.isfinite(values)
        if not fine.all():
            layer = int(np.argmin(fine.all((0, 2))))  # the first: later ones follow from it
            what = " and ".join(
                n for n, ok in zip(("class logits", "boxes"), fine[:, layer], strict=True) if not ok.all()
            )
            became = "NaN" if np.isnan(values[:, layer]).any() else "infinite"
            bad = np.flatnonzero(~fine[:, layer].all(0)).tolist()
            raise UserError(
                f"the predicted {what} became {became} in {stack.name} {layer + 1} of {layers} (images "
                f"{', '.join(map(str, bad))} of the batch). {ADVICE}"
            )
