"""The losses of a detector, over all decoder layers at once: classification in four ways, and boxes.

Legend: L layers, B images, N queries, K logits (the classes; with ``softmax`` one more, last: no object).
"""

from __future__ import annotations

from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from vision_attn.detection.boxes import cxcywh_to_xyxy, iou_and_giou

Loss = Literal["softmax", "focal", "varifocal", "stable"]


def softmax_loss(logits: Tensor, target: Tensor, eos_coef: float, valid: Tensor | None = None) -> Tensor:
    """Cross-entropy with a class for no object, a weighted mean as in the original DETR.

    Args:
        logits: (L, B, N, classes + 1).
        target: (L, B, N) int64 class, −1 for no object.
        eos_coef: weight of queries without an object; the others weigh 1.
        valid: (B, N), False where a query does not count.

    Returns:
        (L,) means over the images and queries of a layer.
    """
    nothing = logits.shape[-1] - 1
    matched = target >= 0
    losses = F.cross_entropy(logits.flatten(0, 2), target.where(matched, nothing).flatten(), reduction="none")
    weights = losses.new_full(matched.shape, eos_coef).masked_fill_(matched, 1.0)
    if valid is not None:
        weights = weights * valid
    return (losses.view_as(weights) * weights).sum((1, 2)) / weights.sum((1, 2)).clamp_min(torch.finfo().tiny)


def sigmoid_loss(
    kind: Loss,
    logits: Tensor,
    target: Tensor,
    quality: Tensor | None,
    alpha: float,
    gamma: float,
    valid: Tensor | None = None,
) -> Tensor:
    """One binary loss per class, summed.

    With p the probability of a class and q the quality of a matched query:

    * ``focal``: α (1 − p)^γ · −log p for the object's class, (1 − α) p^γ · −log(1 − p) for the others
      (Lin et al. 2017).
    * ``varifocal``: q · BCE(p, q) for the object's class, α p^γ · −log(1 − p) for the others, where weights are no
      functions to be learned from (Zhang et al. 2021, as in RT-DETR); q is the IoU.
    * ``stable``: α |q − p|^γ · BCE(p, q) for the object's class, (1 − α) p^γ · −log(1 − p) for the others; q is the
      squared IoU, scaled so that the image's best is 1 (Liu et al. 2023).

    Args:
        kind: which of them.
        logits: (L, B, N, classes).
        target: (L, B, N) int64 class, −1 for no object.
        quality: (L, B, N) q where there is an object; not for ``focal``.
        alpha: α.
        gamma: γ.
        valid: (B, N), False where a query does not count.

    Returns:
        (L,) sums over the images, queries and classes of a layer.
    """
    index = target.clamp_min(0).unsqueeze(-1)
    x = logits.gather(-1, index).squeeze(-1)  # (L, B, N), the logit of the object's class
    others = _other_class(kind, logits, alpha, gamma)
    if kind == "focal":
        own = alpha * _Focused.apply(-x, gamma, False)
    else:
        assert quality is not None
        weight = quality if kind == "varifocal" else alpha * (quality - x.sigmoid()).abs() ** gamma
        own = weight * F.binary_cross_entropy_with_logits(x, quality, reduction="none")
    own = torch.where(target >= 0, own, _other_class(kind, x, alpha, gamma))
    losses = others.scatter(-1, index, own.unsqueeze(-1)).sum(-1)
    if valid is not None:
        losses = torch.where(valid, losses, 0.0)
    return losses.sum((1, 2))


def _other_class(kind: Loss, logits: Tensor, alpha: float, gamma: float) -> Tensor:
    """The loss of a class that is not there."""
    if kind == "varifocal":
        return alpha * _Focused.apply(logits, gamma, True)
    return (1 - alpha) * _Focused.apply(logits, gamma, False)


class _Focused(torch.autograd.Function):
    """p^γ · −log(1 − p) of logits; with a constant weight, p^γ counts as a number without gradient.

    The gradient is known in closed form, which saves half of the passes over the logits of all classes.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, gamma: float, constant_weight: bool) -> Tensor:
        p, cost = x.sigmoid(), softplus(x)
        weight = p**gamma
        if ctx.needs_input_grad[0]:
            slope = p if constant_weight else (1 - p).mul_(cost).mul_(gamma).add_(p)
            ctx.save_for_backward(slope.mul_(weight))
        return weight.mul_(cost)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        (slope,) = ctx.saved_tensors
        return gradient * slope, None, None


@torch.no_grad()
def softplus(x: Tensor) -> Tensor:
    """log(1 + e^x), exact to the last bit or two of the larger summand; many times as fast on CPU as PyTorch's."""
    return x.abs().neg_().exp_().add_(1).log_().add_(x.relu())


def stable_quality(iou: Tensor, group: Tensor, groups: int) -> Tensor:
    """Squared IoU, scaled so that the highest of a group is 1; nothing is made smaller.

    Args:
        iou: (P,) of matched pairs.
        group: (P,) int64, which queries each belongs to: those of one layer, image and query group.
        groups: how many there are.

    Returns:
        (P,) in 0 … 1.
    """
    squared = iou**2
    highest = squared.new_zeros(groups).scatter_reduce(0, group, squared, "amax")
    return squared / highest[group].clamp_min(1e-8)


def box_losses(boxes: Tensor, targets: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """L1 distance and one minus generalized IoU of pairs of boxes, both ``cxcywh``: (…, 4) and (…, 4).

    Returns:
        (…) L1, summed over coordinates; (…) 1 − GIoU; (…) IoU without gradient.
    """
    iou, giou = iou_and_giou(cxcywh_to_xyxy(boxes), cxcywh_to_xyxy(targets))
    return (boxes - targets).abs().sum(-1), 1 - giou, iou.detach()
