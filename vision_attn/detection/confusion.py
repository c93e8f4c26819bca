"""Which class is taken for which, what is missed, and what is seen where nothing is."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from vision_attn.detection.boxes import pairwise_iou


@dataclass(frozen=True)
class Confusion:
    """Detections beside the objects they lie on.

    Attributes:
        counts: (K + 1, K + 1) objects by true class (rows; last: nothing is there) and class found (columns; last:
            nothing was found).
        threshold: detections with lower scores were left out.
        f1: harmonic mean of precision and recall of right classes at that threshold.
    """

    counts: Tensor
    threshold: float
    f1: float


def confusion(
    truth: Sequence[dict[str, Any]],
    detections: Sequence[dict[str, Any]],
    category_ids: Sequence[int],
    *,
    threshold: float | None = None,
    iou: float = 0.5,
) -> Confusion:
    """Match detections to objects whatever their classes are, the surest first.

    Args:
        truth: COCO annotations (``image_id``, ``category_id``, ``bbox`` x y w h, ``iscrowd``). What lies on a crowd
            counts neither for nor against.
        detections: COCO results (``image_id``, ``category_id``, ``bbox``, ``score``).
        category_ids: of the K classes.
        threshold: lowest score that counts; None takes the one with the highest ``f1``.
        iou: least overlap of a match.

    Returns:
        Counts, with the threshold that was used.
    """
    place = {category: k for k, category in enumerate(category_ids)}
    nothing = len(place)
    objects, found = _by_image(truth), _by_image(detections)
    total = sum(not a.get("iscrowd") for a in truth)
    rows = [pair for image, some in found.items() for pair in _match_image(objects.get(image, []), some, place, iou)]
    rows.sort(key=lambda row: -row[0])
    scores = torch.tensor([score for score, *_ in rows], dtype=torch.float64)
    pairs = torch.tensor([pair for _, *pair in rows], dtype=torch.int64).view(-1, 2)  # true class, class found
    right = (pairs[:, 0] == pairs[:, 1]).cumsum(0)
    f1 = 2 * right / (torch.arange(1, len(rows) + 1) + total)
    if threshold is None:
        threshold = float(scores[f1.argmax()]) if len(rows) else 1.0
    kept = int((scores >= threshold).sum())
    counts = torch.zeros(nothing + 1, nothing + 1, dtype=torch.int64)
    for true, guess in pairs[:kept].tolist():
        counts[true, guess] += 1
    for annotation in truth:  # objects less those that were matched
        if not annotation.get("iscrowd") and annotation["category_id"] in place:
            counts[place[annotation["category_id"]], nothing] += 1
    counts[:nothing, nothing] -= counts[:nothing, :nothing].sum(1)
    return Confusion(counts, threshold, float(f1[kept - 1]) if kept else 0.0)


def _by_image(rows: Sequence[dict[str, Any]]) -> dict[int, list[dict[str, Any]]]:
    images: dict[int, list[dict[str, Any]]] = defaultdict(list)
    for row in rows:
        images[row["image_id"]].append(row)
    return images


def _match_image(
    objects: Sequence[dict[str, Any]], found: Sequence[dict[str, Any]], place: dict[int, int], least: float
) -> list[tuple[float, int, int]]:
    """Score, true class and class found of every detection; the class after the last where nothing is there."""
    found = sorted((d for d in found if d["category_id"] in place), key=lambda d: -d["score"])
    plain = [a for a in objects if not a.get("iscrowd") and a["category_id"] in place]
    boxes = _corners(found)
    overlaps = pairwise_iou(boxes, _corners(plain))  # (detections, objects)
    on_crowd = _share_inside(boxes, _corners([a for a in objects if a.get("iscrowd")])) >= least
    rows = []
    for i, detection in enumerate(found):
        true = len(place)
        if plain:
            best = int(overlaps[i].argmax())
            if overlaps[i, best] >= least:
                true = place[plain[best]["category_id"]]
                overlaps[:, best] = -1.0  # taken
        if true < len(place) or not on_crowd[i]:
            rows.append((float(detection["score"]), true, place[detection["category_id"]]))
    return rows


def _corners(rows: Sequence[dict[str, Any]]) -> Tensor:
    boxes = torch.tensor([row["bbox"] for row in rows], dtype=torch.float64).view(-1, 4)
    return torch.cat([boxes[:, :2], boxes[:, :2] + boxes[:, 2:]], 1)


def _share_inside(boxes: Tensor, regions: Tensor) -> Tensor:
    """(n,) largest share of each box's area that lies in one of the regions."""
    if len(regions) == 0:
        return torch.zeros(len(boxes), dtype=torch.float64)
    low = torch.maximum(boxes[:, None, :2], regions[:, :2])
    high = torch.minimum(boxes[:, None, 2:], regions[:, 2:])
    inside = (high - low).clamp_min(0).prod(-1).amax(1)
    return inside / (boxes[:, 2:] - boxes[:, :2]).prod(1).clamp_min(1e-9)
