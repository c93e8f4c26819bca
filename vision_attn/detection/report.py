"""What an evaluation says beside its one number: every class, and what suppression of doubles would change."""

from __future__ import annotations

import math
from collections import defaultdict
from typing import TYPE_CHECKING, Any

import torch

from vision_attn.detection.coco_eval import Evaluation, evaluate
from vision_attn.detection.postprocess import nms

if TYPE_CHECKING:
    from rich.table import Table

NMS_IOUS = (0.5, 0.7)
"""Thresholds in common use: Faster R-CNN's for its detections, and its for proposals (Ren et al. 2015)."""


def with_nms(evaluation: Evaluation, iou: float = 0.5) -> Evaluation:
    """The same detections after non-maximum suppression within classes, scored again.

    A set predictor should find each object once. What this loses or gains says how far that is true.

    Args:
        evaluation: of the detections as they are.
        iou: of two detections of a class that overlap by more, the less sure one is dropped.

    Returns:
        The evaluation of what is left.
    """
    images: dict[int, list[dict[str, Any]]] = defaultdict(list)
    for row in evaluation.detections:
        images[row["image_id"]].append(row)
    kept = []
    for rows in images.values():
        boxes = torch.tensor([row["bbox"] for row in rows], dtype=torch.float64)
        boxes[:, 2:] += boxes[:, :2]
        one = {
            "boxes": boxes,
            "scores": torch.tensor([row["score"] for row in rows], dtype=torch.float64),
            "labels": torch.tensor([row["category_id"] for row in rows]),
            "row": torch.arange(len(rows)),
        }
        kept += [rows[i] for i in nms([one], iou)[0]["row"].sort().values.tolist()]
    truth = {
        "images": [{"id": image} for image in evaluation.image_ids],
        "annotations": evaluation.truth,
        "categories": [{"id": category, "name": name} for category, name in evaluation.categories],
    }
    return evaluate(truth, kept, max_dets=evaluation.max_dets[-1])


def nms_beside(evaluation: Evaluation) -> dict[str, float]:
    """Average precision with non-maximum suppression at ``NMS_IOUS``: ``ap_nms50``, ``ap_nms70``."""
    return {f"ap_nms{100 * iou:.0f}": with_nms(evaluation, iou).summary()["ap"] for iou in NMS_IOUS}


def class_table(evaluation: Evaluation) -> Table:
    """Every class with its objects, average precisions and recall, the best first; those without objects last."""
    from rich.table import Table
    from rich.text import Text

    table = Table()
    table.add_column("class", overflow="fold")
    for title in ("objects", "AP", "AP50", "AP75", "AR"):
        table.add_column(title, justify="right")
    rows = evaluation.per_class()
    for row in sorted(rows, key=lambda row: (not row["objects"], -row["ap"] if row["objects"] else 0.0, row["name"])):
        numbers = ("–" if math.isnan(row[key]) else f"{row[key]:.3f}" for key in ("ap", "ap50", "ap75", "ar"))
        table.add_row(Text(row["name"]), f"{row['objects']:,}", *numbers)  # names are text, not rich's markup
    return table
