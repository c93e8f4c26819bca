"""What a detector is trained with: matching, and the losses of all its outputs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from itertools import accumulate
from typing import Any, Literal

import torch
from torch import Tensor, nn

from vision_attn.detection.losses import box_losses, sigmoid_loss, softmax_loss, stable_quality
from vision_attn.detection.matcher import Matching, MatchingCosts, PaddedTargets, Stack, match
from vision_attn.errors import UserError


@dataclass
class CriterionConfig:
    """Losses of a detector, and what a match costs.

    Attributes:
        loss: of the classes. ``softmax`` over classes and no object (Carion et al. 2020), ``focal`` (Lin et al. 2017),
            ``varifocal`` (Zhang et al. 2021) or ``stable`` (Liu et al. 2023), which learn the IoU; None takes
            ``softmax`` or ``focal``, whichever the model's head is made for.
        cost_class: of a match, for the class; None means 1 for ``softmax``, 2 otherwise.
        cost_bbox: of a match, for the L1 distance of boxes.
        cost_giou: of a match, for the generalized IoU.
        weight_class: of the class loss.
        weight_bbox: of the L1 loss.
        weight_giou: of the generalized-IoU loss.
        eos_coef: weight of "no object" in the ``softmax`` loss.
        focal_alpha: of the sigmoid losses; None means 0.75 for ``varifocal``, 0.25 otherwise.
        focal_gamma: of the sigmoid losses.
        aux_weight: factor on the losses of all decoder layers but the last.
        dn_weight: factor on the losses of denoising queries.
        enc_weight: factor on the losses of the encoder's proposals.
    """

    loss: Literal["softmax", "focal", "varifocal", "stable"] | None = None
    cost_class: float | None = None
    cost_bbox: float = 5.0
    cost_giou: float = 2.0
    weight_class: float = 1.0
    weight_bbox: float = 5.0
    weight_giou: float = 2.0
    eos_coef: float = 0.1
    focal_alpha: float | None = None
    focal_gamma: float = 2.0
    aux_weight: float = 1.0
    dn_weight: float = 1.0
    enc_weight: float = 1.0

    def __post_init__(self) -> None:
        """Refuse values that could only fail later.

        Raises:
            UserError: naming the option.
        """
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name != "loss" and value is not None and not value >= 0:
                raise UserError(f"criterion.{field.name} must not be negative, got {value}")
        if self.cost_class == self.cost_bbox == self.cost_giou == 0:
            raise UserError("criterion: one of cost_class, cost_bbox and cost_giou must be positive")


class Criterion(nn.Module):
    """Match queries to objects and add up the losses.

    Args:
        num_classes: of the data, without "no object".
        config: losses and costs.
        classification: ``softmax`` or ``sigmoid``: what the model's head is made for.

    Raises:
        UserError: a loss that does not belong to the head.
    """

    def __init__(
        self, num_classes: int, config: CriterionConfig | None = None, classification: str = "softmax"
    ) -> None:
        super().__init__()
        config = config or CriterionConfig()
        self.num_classes, self.config = num_classes, config
        softmax = classification == "softmax"
        self.kind = config.loss or ("softmax" if softmax else "focal")
        if (self.kind == "softmax") != softmax:
            fitting = "softmax" if softmax else "focal, varifocal or stable"
            raise UserError(f"criterion.loss {self.kind} does not fit a {classification} head: take {fitting}")
        alpha = config.focal_alpha
        self.alpha = (0.75 if self.kind == "varifocal" else 0.25) if alpha is None else alpha
        self.costs = MatchingCosts(
            kind="focal" if self.kind == "varifocal" else self.kind,
            class_weight=(1.0 if softmax else 2.0) if config.cost_class is None else config.cost_class,
            bbox_weight=config.cost_bbox,
            giou_weight=config.cost_giou,
            # RT-DETR's matching, too, keeps 0.25 beside the varifocal loss's own α
            focal_alpha=0.25 if self.kind == "varifocal" else self.alpha,
            focal_gamma=config.focal_gamma,
        )

    def forward(self, outputs: dict[str, Any], targets: Sequence[dict[str, Any]]) -> dict[str, Tensor]:
        """The losses of one batch, in float32.

        Args:
            outputs: of the model: ``pred_logits`` (B, N, K), ``pred_boxes`` (B, N, 4); where there are any,
                ``aux_outputs``, ``groups``, ``dn`` and ``enc_outputs``.
            targets: one dictionary per image with ``labels`` (n,) and ``boxes`` (n, 4).

        Returns:
            ``loss``, the weighted sum, with gradient; its unweighted parts ``loss_class``, ``loss_bbox`` and
            ``loss_giou`` of the last layer, the same with ``_aux``, ``_dn`` (summed over layers) and ``_enc``;
            ``class_error``, the share of the last layer's matched queries whose best class is wrong; ``surplus``, the
            number of objects that found no query there (or none of their group: every group has all objects).

        Raises:
            UserError: predictions that are not finite, labels that the head does not know.
        """
        with torch.autocast(outputs["pred_logits"].device.type, enabled=False):
            return self._forward(outputs, targets)

    def _forward(self, outputs: dict[str, Any], targets: Sequence[dict[str, Any]]) -> dict[str, Tensor]:
        layers = [*outputs.get("aux_outputs", ()), outputs]
        stacks = [_stack(layers, int(outputs.get("groups", 1)), "decoder layer")]
        if "enc_outputs" in outputs:
            encoder = outputs["enc_outputs"]
            stacks.append(_stack([encoder], 1, "proposals of the encoder, layer"))
        self._check_head(stacks[0].logits)
        padded = PaddedTargets.of(targets, stacks[0].logits.device)
        matchings = match(stacks, padded, self.costs)
        num_boxes = self._count(padded)
        config = self.config
        parts = self._matched(stacks[0], matchings[0], padded, num_boxes)
        losses = {name: values[-1] for name, values in parts.items()}
        total = self._weigh(losses)
        if len(layers) > 1:
            aux = {name: values[:-1].sum() for name, values in parts.items()}
            total = total + config.aux_weight * self._weigh(aux)
            losses |= {f"{name}_aux": value for name, value in aux.items()}
        if "enc_outputs" in outputs:
            enc = {k: v[0] for k, v in self._matched(stacks[1], matchings[1], padded, num_boxes).items()}
            total = total + config.enc_weight * self._weigh(enc)
            losses |= {f"{name}_enc": value for name, value in enc.items()}
        if outputs.get("dn") is not None:
            denoising = {k: v.sum() for k, v in self._denoising(outputs["dn"], padded, num_boxes).items()}
            total = total + config.dn_weight * self._weigh(denoising)
            losses |= {f"{name}_dn": value for name, value in denoising.items()}
        losses = {name: value.detach() for name, value in losses.items()}
        losses["class_error"] = self._class_error(stacks[0], matchings[0], padded)
        losses["surplus"] = total.new_full((), matchings[0].surplus, requires_grad=False)  # a fill, and no copy
        return {"loss": total, **losses}

    def _weigh(self, parts: dict[str, Tensor]) -> Tensor:
        config = self.config
        weights = {"class": config.weight_class, "bbox": config.weight_bbox, "giou": config.weight_giou}
        return sum((weights[name.removeprefix("loss_")] * value for name, value in parts.items()), torch.zeros(()))

    def _count(self, targets: PaddedTargets) -> float | Tensor:
        """Objects per process, at least one; in training the mean over all processes, which take part together."""
        count = float(sum(targets.counts))
        if self.training and torch.distributed.is_available() and torch.distributed.is_initialized():
            counts = targets.boxes.new_full((), count)
            torch.distributed.all_reduce(counts)
            return (counts / torch.distributed.get_world_size()).clamp_min(1)
        return max(1.0, count)

    def _matched(
        self, stack: Stack, matching: Matching, targets: PaddedTargets, num_boxes: float | Tensor
    ) -> dict[str, Tensor]:
        """Losses of matched queries, (L,) each."""
        count = num_boxes * stack.groups
        boxes = stack.boxes.flatten(0, 2).index_select(0, matching.query)
        bbox, giou, iou = box_losses(boxes, targets.boxes.flatten(0, 1).index_select(0, matching.target))
        classes = targets.labels.flatten().index_select(0, matching.target)
        shape = stack.logits.shape[:3]
        target = torch.full((shape.numel(),), -1, device=boxes.device).index_copy(0, matching.query, classes)
        quality = None
        if self.kind in ("varifocal", "stable"):
            groups, each = shape[0] * shape[1] * stack.groups, shape[2] // stack.groups
            q = iou if self.kind == "varifocal" else stable_quality(iou, matching.query // each, groups)
            quality = boxes.new_zeros(shape.numel()).index_copy(0, matching.query, q).view(shape)
        spans = [slice(end - n, end) for n, end in zip(matching.per_layer, accumulate(matching.per_layer), strict=True)]
        return {
            "loss_class": self._class_loss(self.kind, stack.logits, target.view(shape), quality, count, None),
            "loss_bbox": torch.stack([bbox[span].sum() for span in spans]) / count,
            "loss_giou": torch.stack([giou[span].sum() for span in spans]) / count,
        }

    def _denoising(self, dn: dict[str, Any], targets: PaddedTargets, num_boxes: float | Tensor) -> dict[str, Tensor]:
        """Losses of denoising queries, (L,) each: they know their objects."""
        logits, boxes, known = dn["pred_logits"].float(), dn["pred_boxes"].float(), dn["known"]
        positive = known.positive & known.valid  # (B, M)
        index = known.target.clamp_min(0)
        true_boxes = targets.boxes.gather(1, index[..., None].expand(-1, -1, 4))  # (B, M, 4)
        classes = targets.labels.gather(1, index).where(positive, -1)
        bbox, giou, iou = box_losses(boxes, true_boxes)  # (L, B, M)
        count = num_boxes * known.groups
        # what is made from noise has no one best query: plain focal loss there, as in Stable-DINO
        kind = "focal" if self.kind == "stable" else self.kind
        target = classes.expand(len(logits), -1, -1)
        return {
            "loss_class": self._class_loss(kind, logits, target, iou, count, known.valid),
            "loss_bbox": torch.where(positive, bbox, 0.0).sum((1, 2)) / count,
            "loss_giou": torch.where(positive, giou, 0.0).sum((1, 2)) / count,
        }

    def _class_loss(
        self,
        kind: Any,
        logits: Tensor,
        target: Tensor,
        quality: Tensor | None,
        count: float | Tensor,
        valid: Tensor | None,
    ) -> Tensor:
        if kind == "softmax":
            return softmax_loss(logits, target, self.config.eos_coef, valid)
        return sigmoid_loss(kind, logits, target, quality, self.alpha, self.config.focal_gamma, valid) / count

    @torch.no_grad()
    def _class_error(self, stack: Stack, matching: Matching, targets: PaddedTargets) -> Tensor:
        last = matching.per_layer[-1]
        if last == 0:
            return stack.logits.new_zeros(())
        start = len(matching.query) - last
        logits = stack.logits.flatten(0, 2).index_select(0, matching.query[start:])
        classes = targets.labels.flatten().index_select(0, matching.target[start:])
        return (logits[:, : self.num_classes].argmax(1) != classes).float().mean()

    def _check_head(self, logits: Tensor) -> None:
        expected = self.num_classes + (self.kind == "softmax")
        if logits.shape[-1] != expected:
            raise UserError(
                f"the model gives {logits.shape[-1]} logits per query, {self.num_classes} classes with the "
                f"{self.kind} loss need {expected}: build it with num_classes={self.num_classes}"
            )


def _stack(layers: Sequence[dict[str, Tensor]], groups: int, name: str) -> Stack:
    logits = torch.stack([layer["pred_logits"] for layer in layers]).float()
    return Stack(logits, torch.stack([layer["pred_boxes"] for layer in layers]).float(), groups, name)
