"""From a detector's outputs to detections."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from vision_attn.detection.boxes import cxcywh_to_xyxy
from vision_attn.errors import refuse_nan

Found = dict[str, Tensor]
"""``scores``, ``labels``, ``boxes`` and ``queries`` of one image, still as tensors on the model's device."""


@torch.no_grad()
def postprocess(
    outputs: dict[str, Any],
    sizes: Tensor | Sequence[tuple[int, int]],
    classification: str,
    *,
    topk: int = 100,
    threshold: float = 0.0,
    names: Sequence[str] | None = None,
) -> list[Found]:
    """The most likely objects of each image.

    With ``softmax`` every query is one object of its likeliest class (Carion et al. 2020); with ``sigmoid`` the best
    pairs of query and class are taken, so that a query may stand for several classes (Zhu et al. 2021).

    Args:
        outputs: of the model, ``pred_logits`` (B, N, K) and ``pred_boxes`` (B, N, 4).
        sizes: (B, 2) height and width to give the boxes in, in pixels.
        classification: ``softmax`` (the last class is no object) or ``sigmoid``.
        topk: most objects of an image.
        threshold: scores must be above it.
        names: of the images, for error messages.

    Returns:
        Per image ``scores`` (k,), highest first, ``labels`` (k,), ``boxes`` (k, 4) as left, top, right, bottom in
        pixels, and ``queries`` (k,), which query each comes from.

    Raises:
        UserError: predictions of an image are NaN, not all of them perhaps: its other ones mean nothing either.
    """
    logits, boxes = outputs["pred_logits"].float(), outputs["pred_boxes"].float()
    if classification == "softmax":
        scores, labels = logits.softmax(-1)[..., :-1].max(-1)
        fine = scores.isfinite().all(1)  # NaN in one logit is NaN in all of its query
        scores, queries = scores.topk(min(topk, scores.shape[1]))
        labels = labels.gather(1, queries)
    else:
        classes = logits.shape[-1]
        flat = logits.sigmoid().flatten(1)
        fine = flat.isfinite().all(1)
        scores, places = flat.topk(min(topk, flat.shape[1]))
        queries, labels = places // classes, places % classes
    sizes = torch.as_tensor(sizes, device=boxes.device)
    scale = sizes.flip(1).repeat(1, 2).to(boxes.dtype)  # (B, 4) as width, height, width, height
    corners = cxcywh_to_xyxy(boxes.gather(1, queries[..., None].expand(-1, -1, 4))) * scale[:, None]
    count = (scores > threshold).sum(1) if threshold > 0 else torch.full_like(fine, scores.shape[1], dtype=torch.int64)
    kept, all_fine = torch.stack([count, (fine & boxes.isfinite().flatten(1).all(1)).long()]).tolist()  # one transfer
    refuse_nan(all_fine, names)
    parts = {"scores": scores, "labels": labels, "boxes": corners, "queries": queries}
    return [{name: part[i, :k] for name, part in parts.items()} for i, k in enumerate(kept)]


def nms(detections: Sequence[Found], iou_threshold: float = 0.5) -> list[Found]:
    """Non-maximum suppression within classes, for comparison: a set predictor should not need it.

    Args:
        detections: from :func:`postprocess`.
        iou_threshold: boxes of a class that overlap a better one by more are dropped.

    Returns:
        What is left, highest scores first.
    """
    from torchvision.ops import batched_nms

    kept = [batched_nms(d["boxes"], d["scores"], d["labels"], iou_threshold) for d in detections]
    return [{name: part[keep] for name, part in d.items()} for d, keep in zip(detections, kept, strict=True)]
