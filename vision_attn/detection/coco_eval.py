"""Average precision as COCO defines it, by faster-coco-eval, equal to pycocotools.

:class:`CocoMetric` collects detections during an evaluation, over any number of processes; :func:`evaluate` scores
them. What is scored is what was shown: images that never reached ``update`` (a limit on batches, a subset) count
neither for nor against, and an image that came twice (a distributed sampler pads) counts once.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torchmetrics import Metric
from torchmetrics.utilities.data import dim_zero_cat

from vision_attn.errors import UserError

AREAS = {"all": (0.0, 1e10), "small": (0.0, 1024.0), "medium": (1024.0, 9216.0), "large": (9216.0, 1e10)}
"""Ranges of area in square pixels; their bounds belong to both neighbours, as in pycocotools."""
IOUS = np.linspace(0.5, 0.95, 10)


@dataclass
class Evaluation:
    """What COCO's protocol says about a set of detections.

    T are the ten IoU thresholds 0.5 … 0.95, R the recalls 0, 0.01 … 1, K the categories, A the ranges of area
    (``AREAS``), M the caps on detections per image and category. −1 stands where a category has no object.

    Attributes:
        precision: (T, R, K, A, M), interpolated.
        recall: (T, K, A, M), the largest reached.
        scores: (T, R, K, A, M), of the detection at which a recall was reached.
        categories: ids, names in the order of K.
        max_dets: the caps, ascending.
        objects: (K,) objects without crowds, in the images shown.
        image_ids: of the images shown.
        detections: per image shown, COCO results (``image_id``, ``category_id``, ``bbox`` x y w h, ``score``).
        truth: annotations of the images shown.
    """

    precision: np.ndarray
    recall: np.ndarray
    scores: np.ndarray
    categories: list[tuple[int, str]]
    max_dets: list[int]
    objects: np.ndarray
    image_ids: list[int]
    detections: list[dict[str, Any]] = field(repr=False)
    truth: list[dict[str, Any]] = field(repr=False)

    @property
    def images(self) -> int:
        """How many were shown."""
        return len(self.image_ids)

    def summary(self) -> dict[str, float]:
        """COCO's twelve numbers and two more, 0 to 1; NaN where pycocotools says −1 (nothing of that kind to find).

        Returns:
            ``ap ap50 ap75 ap_small ap_medium ap_large``, at the largest cap on detections; ``ar_1 ar_10 ar_100`` (and
            the largest cap, if another), ``ar_small ar_medium ar_large``.
        """
        areas = list(AREAS)
        numbers = {
            "ap": _mean(self.precision[:, :, :, 0, -1]),
            "ap50": _mean(self.precision[0, :, :, 0, -1]),
            "ap75": _mean(self.precision[5, :, :, 0, -1]),
        }
        numbers |= {f"ap_{name}": _mean(self.precision[:, :, :, i, -1]) for i, name in enumerate(areas) if i}
        numbers |= {f"ar_{cap}": _mean(self.recall[:, :, 0, m]) for m, cap in enumerate(self.max_dets)}
        numbers |= {f"ar_{name}": _mean(self.recall[:, :, i, -1]) for i, name in enumerate(areas) if i}
        return numbers

    def per_class(self) -> list[dict[str, Any]]:
        """One row per category: ``category_id name objects ap ap50 ap75 ar``; NaN where it has no object."""
        return [
            {
                "category_id": category,
                "name": name,
                "objects": int(self.objects[k]),
                "ap": _mean(self.precision[:, :, k, 0, -1]),
                "ap50": _mean(self.precision[0, :, k, 0, -1]),
                "ap75": _mean(self.precision[5, :, k, 0, -1]),
                "ar": _mean(self.recall[:, k, 0, -1]),
            }
            for k, (category, name) in enumerate(self.categories)
        ]

    def curves(self, iou: float = 0.5, area: str = "all") -> dict[str, dict[str, np.ndarray]]:
        """Precision over recall of every category that has objects.

        Args:
            iou: one of COCO's thresholds, 0.5, 0.55 … 0.95.
            area: ``all``, ``small``, ``medium`` or ``large``.

        Returns:
            Category name (with its id where two share a name) to ``recall`` (101,), ``precision`` (101,) and ``score``
            (101,): the threshold on scores that reaches this recall, 0 where none does.

        Raises:
            UserError: another threshold or range.
        """
        near = int(np.abs(IOUS - iou).argmin())
        if not abs(IOUS[near] - iou) <= 1e-6 or area not in AREAS:  # written so that NaN fails too
            raise UserError(
                f"No curve for IoU {iou} and area {area!r}: IoU is 0.5, 0.55 … 0.95, area {', '.join(AREAS)}."
            )
        a, recalls = list(AREAS).index(area), np.linspace(0.0, 1.0, 101)
        names = [name for _, name in self.categories]
        found = {}
        for k, (category, name) in enumerate(self.categories):
            precision = self.precision[near, :, k, a, -1]
            if (precision >= 0).all():
                key = name if names.count(name) == 1 else f"{name} ({category})"
                found[key] = {"recall": recalls, "precision": precision, "score": self.scores[near, :, k, a, -1]}
        return found


def evaluate(
    truth: dict[str, Any],
    detections: Sequence[dict[str, Any]],
    *,
    image_ids: Sequence[int] | None = None,
    max_dets: int = 100,
) -> Evaluation:
    """Score detections against ground truth by COCO's protocol.

    Args:
        truth: a COCO dictionary (``images``, ``annotations``, ``categories``); ids need not be unique among
            annotations, ``area`` and ``iscrowd`` may be missing (width × height, 0).
        detections: in COCO's results format; those of categories that ``truth`` does not know are left out.
        image_ids: the images to score; all when None.
        max_dets: how many detections per image and category count, best first.

    Returns:
        The evaluation.

    Raises:
        UserError: a detection of an unknown image, numbers that are not finite, max_dets below 1, or the package
            is missing.
    """
    coco, run = coco_package()
    shown = {int(image["id"]) for image in truth["images"]} if image_ids is None else {int(i) for i in image_ids}
    sizes = _check(truth, detections, shown, max_dets)
    annotations = _numbered(truth, shown)
    categories = sorted((int(c["id"]), str(c.get("name", c["id"]))) for c in truth["categories"])
    known = {category for category, _ in categories}
    results = [dict(d, segmentation=[]) for d in detections if d["category_id"] in known and d["image_id"] in shown]
    counts = np.zeros(len(categories), dtype=np.int64)
    place = {category: k for k, (category, _) in enumerate(categories)}
    for annotation in annotations:
        counts[place[annotation["category_id"]]] += not annotation["iscrowd"]
    if not categories or not shown:
        t, r, a, m = len(IOUS), 101, len(AREAS), len(sizes)
        empty = np.full((t, r, len(categories), a, m), -1.0)
        arrays: dict[str, Any] = {"precision": empty, "recall": empty[:, 0], "scores": empty}
    else:
        ours = coco()
        ours.dataset = {
            "images": [{"id": i} for i in sorted(shown)],
            "annotations": annotations,
            "categories": [{"id": category, "name": name} for category, name in categories],
        }
        ours.createIndex()
        evaluator = run(ours, ours.loadRes(results), "bbox")
        evaluator.params.maxDets = sizes
        evaluator.evaluate()
        evaluator.accumulate()
        arrays = evaluator.eval
    shape = (len(IOUS), 101, len(categories), len(AREAS), len(sizes))
    return Evaluation(
        precision=np.asarray(arrays["precision"]).reshape(shape),
        recall=np.asarray(arrays["recall"]).reshape(shape[:1] + shape[2:]),
        scores=np.asarray(arrays["scores"]).reshape(shape),
        categories=categories,
        max_dets=sizes,
        objects=counts,
        image_ids=sorted(shown),
        detections=results,
        truth=annotations,
    )


class CocoMetric(Metric):
    """COCO average precision of a detector, collected batch by batch.

    States are gathered over processes with any number of images each, also none. ``compute`` gives the numbers; the
    whole :class:`Evaluation` (precision–recall curves, the matches' scores) stays in ``evaluation`` until the next
    ``compute``, ``reset`` or not.

    Args:
        ground_truth: a COCO dictionary of the images that may be shown, with the file's own ids; crowds included.
        category_ids: contiguous label → category id; None when detections carry category ids.
        max_dets: detections per image and category that count. Raise it where images hold more than 100 objects.

    Raises:
        UserError: the package faster-coco-eval is missing, or max_dets is below 1.

    Example:
        >>> metric = CocoMetric(data.ground_truth("val"), category_ids=model.config["category_ids"])
        >>> metric.update(image_ids, postprocess(outputs, orig_sizes, model.classification))
        >>> metric.compute()["ap50"]
    """

    is_differentiable = False
    higher_is_better = True
    full_state_update = False
    seen: list[Tensor]  # (b, 2) int64: image id, number of detections
    boxes: list[Tensor]  # (k, 4) float32: left, top, right, bottom in pixels
    scores: list[Tensor]  # (k,) float32
    labels: list[Tensor]  # (k,) int64

    def __init__(
        self, ground_truth: dict[str, Any], *, category_ids: Sequence[int] | None = None, max_dets: int = 100
    ) -> None:
        super().__init__()
        coco_package()  # now, not when the first evaluation ends
        _caps(max_dets)
        self.ground_truth, self.max_dets = ground_truth, int(max_dets)
        self.category_ids = None if category_ids is None else [int(i) for i in category_ids]
        self.evaluation: Evaluation | None = None
        self._known = {int(image["id"]) for image in ground_truth["images"]}
        for name in ("seen", "boxes", "scores", "labels"):
            self.add_state(name, [], dist_reduce_fx="cat")

    def update(self, image_ids: Tensor | Sequence[int], detections: Sequence[dict[str, Tensor]]) -> None:
        """Take in a batch.

        Args:
            image_ids: (b,) the file's ids.
            detections: b dictionaries with ``boxes`` (k, 4) as left, top, right, bottom in pixels of the original
                image, ``scores`` (k,) and ``labels`` (k,); k may be 0.

        Raises:
            UserError: an image the ground truth does not know, or another number of ids than detections.
        """
        ids = [int(i) for i in image_ids]
        if len(ids) != len(detections):
            raise UserError(f"{len(ids)} image ids came with detections of {len(detections)} images.")
        unknown = next((i for i in ids if i not in self._known), None)
        if unknown is not None:
            raise UserError(
                f"Image {unknown} is not among the {len(self._known)} of the ground truth: "
                "evaluate on the split it is of."
            )
        for i, d in zip(ids, detections, strict=True):
            if not len(d["boxes"]) == len(d["scores"]) == len(d["labels"]):
                lengths = ", ".join(f"{len(d[name])} {name}" for name in ("boxes", "scores", "labels"))
                raise UserError(f"Image {i} came with {lengths}: one of each per detection.")
        counts = [[i, len(d["scores"])] for i, d in zip(ids, detections, strict=True)]
        self.seen.append(torch.tensor(counts, dtype=torch.int64, device=self.device).reshape(-1, 2))
        for d in detections:
            self.boxes.append(d["boxes"].detach().to(self.device, torch.float32).reshape(-1, 4))
            self.scores.append(d["scores"].detach().to(self.device, torch.float32))
            self.labels.append(d["labels"].detach().to(self.device, torch.int64))

    def sync(self, *args: Any, **kwargs: Any) -> None:
        """Gather the states of all processes; one that saw no image sends tensors without rows, not nothing."""
        if not self._is_synced and not self.seen:
            self.seen.append(torch.zeros(0, 2, dtype=torch.int64, device=self.device))
        if not self._is_synced and not self.scores:
            self.boxes.append(torch.zeros(0, 4, device=self.device))
            self.scores.append(torch.zeros(0, device=self.device))
            self.labels.append(torch.zeros(0, dtype=torch.int64, device=self.device))
        super().sync(*args, **kwargs)

    def results(self) -> tuple[list[int], list[dict[str, Any]]]:
        """The images seen (here, or everywhere while synced) and their detections in COCO's results format.

        Raises:
            UserError: a label beyond ``category_ids``.
        """
        if not len(self.seen):
            return [], []
        seen = dim_zero_cat(self.seen).cpu().tolist()
        parts = (self.boxes, self.scores, self.labels)
        boxes, scores, labels = (dim_zero_cat(p).cpu().numpy() if len(p) else np.zeros((0, 4)) for p in parts)
        order: list[int] = []
        taken: set[int] = set()
        found: list[dict[str, Any]] = []
        start = 0
        for image, count in seen:
            if image not in taken:
                taken.add(image)
                order.append(image)
                rows = slice(start, start + count)
                found += _to_results(image, boxes[rows], scores[rows], self._categories(labels[rows]))
            start += count
        return order, found

    def compute(self) -> dict[str, Any]:
        """The numbers of :meth:`Evaluation.summary`, and ``per_class``, its table.

        Raises:
            UserError: a score or box that is not finite, or a label beyond ``category_ids``.
        """
        images, found = self.results()
        self.evaluation = evaluate(self.ground_truth, found, image_ids=images, max_dets=self.max_dets)
        return {**self.evaluation.summary(), "per_class": self.evaluation.per_class()}

    def _categories(self, labels: np.ndarray) -> list[int]:
        if self.category_ids is None:
            return [int(label) for label in labels]
        if len(labels) and not 0 <= labels.min() <= labels.max() < len(self.category_ids):
            raise UserError(
                f"A detection has label {int(labels.max())}, but there are {len(self.category_ids)} categories: "
                "the model belongs to other data."
            )
        return [self.category_ids[int(label)] for label in labels]


def _to_results(image: int, boxes: np.ndarray, scores: np.ndarray, categories: Sequence[int]) -> list[dict[str, Any]]:
    corners = boxes.astype(np.float64)
    with np.errstate(invalid="ignore"):  # what is not finite is refused later, with its image
        corners[:, 2:] -= corners[:, :2]
    rows = zip(corners.tolist(), scores.astype(np.float64).tolist(), categories, strict=True)
    return [{"image_id": image, "category_id": category, "bbox": box, "score": score} for box, score, category in rows]


def _check(truth: dict[str, Any], detections: Sequence[dict[str, Any]], shown: set[int], max_dets: int) -> list[int]:
    known = {int(image["id"]) for image in truth["images"]}
    if not shown <= known:
        raise UserError(f"Image {min(shown - known)} is not among the {len(known)} images of the ground truth.")
    for d in detections:
        if d["image_id"] not in known:
            raise UserError(f"A detection is of image {d['image_id']}, which the ground truth does not know.")
        if not math.isfinite(d["score"]) or not all(map(math.isfinite, d["bbox"])):
            raise UserError(
                f"Image {d['image_id']}: a detection holds NaN or infinity (score {d['score']}, box {d['bbox']}); "
                "the weights have probably diverged."
            )
    return _caps(max_dets)


def _caps(max_dets: int) -> list[int]:
    if isinstance(max_dets, bool) or not isinstance(max_dets, int) or max_dets < 1:
        raise UserError(f"max_dets is {max_dets!r}: expected a whole number of at least 1.")
    return sorted({cap for cap in (1, 10, 100) if cap <= max_dets} | {max_dets})


def _numbered(truth: dict[str, Any], shown: set[int]) -> list[dict[str, Any]]:
    """Own copies of the annotations, numbered from 1: an id of 0 means "no match" to COCO's code."""
    known = {int(category["id"]) for category in truth["categories"]}
    rows = [a for a in truth["annotations"] if a["image_id"] in shown and a["category_id"] in known]
    return [
        {
            "id": number,
            "image_id": int(a["image_id"]),
            "category_id": int(a["category_id"]),
            "bbox": [float(value) for value in a["bbox"]],
            "area": float(a["area"] if a.get("area") is not None else a["bbox"][2] * a["bbox"][3]),
            "iscrowd": int(a.get("iscrowd") or 0),
        }
        for number, a in enumerate(rows, 1)
    ]


def _mean(values: np.ndarray) -> float:
    there = values[values > -1]
    return float(there.mean()) if there.size else float("nan")


def coco_package() -> tuple[Any, Any]:
    """The classes ``COCO`` and ``COCOeval_faster`` of faster-coco-eval.

    Raises:
        UserError: it is missing.
    """
    try:
        from faster_coco_eval import COCO, COCOeval_faster
    except ImportError as error:
        raise UserError("Average precision needs the package faster-coco-eval: pip install faster-coco-eval") from error
    return COCO, COCOeval_faster
