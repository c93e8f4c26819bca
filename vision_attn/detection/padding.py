"""The padding certificate: how far predictions move with the batch an image is in.

Images of different sizes are padded to go through a detector together. What is found in one must not depend on that:
not on its neighbours, not on how many they are, not on how wide the padding is. Reference is each image alone, without
a pixel of padding.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from vision_attn.detection.boxes import cxcywh_to_xyxy
from vision_attn.detection.postprocess import postprocess
from vision_attn.errors import UserError
from vision_attn.layers.padding import pad_together

SCORE, PIXELS = 1e-4, 1e-3
"""How far a score and an edge of a box (in pixels of the image as the model sees it) may move, in single precision."""
MARGINS = ((1, 0), (0, 7), (32, 32), (61, 160))
"""Rows and columns of padding for an image alone: less than a token, some tokens, not a whole number of tokens."""


@dataclass(frozen=True)
class Movement:
    """How far predictions moved in one setting.

    Attributes:
        setting: in words.
        score: largest change of a class probability, over images, queries and classes.
        pixels: largest change of an edge of a box, in pixels of the images as the model sees them.
        ap: average precision in this setting; None without annotations.
    """

    setting: str
    score: float
    pixels: float
    ap: float | None = None

    @property
    def holds(self) -> bool:
        """Whether both are within ``SCORE`` and ``PIXELS``; NaN is not."""
        return self.score <= SCORE and self.pixels <= PIXELS


@dataclass(frozen=True)
class Truth:
    """What is needed for average precision.

    Attributes:
        coco: a COCO dictionary that has the images.
        image_ids: of the images given, in their order.
        category_ids: contiguous label → category id.
    """

    coco: dict[str, Any]
    image_ids: list[int]
    category_ids: list[int]


@torch.no_grad()
def padding_certificate(
    model: Any,
    images: Sequence[Tensor],
    sizes: Sequence[tuple[int, int]],
    *,
    batch_sizes: Sequence[int] = (2, 4),
    margins: Sequence[tuple[int, int]] = MARGINS,
    truth: Truth | None = None,
) -> list[Movement]:
    """Run images alone, in batches of mixed sizes and with padding, and compare.

    Args:
        model: a detector; its mode is kept.
        images: normalised (C, h, w) of any sizes, best of several.
        sizes: (height, width) of each original image, for average precision.
        batch_sizes: how many images go together.
        margins: rows and columns that are added to an image alone.
        truth: annotations for average precision.

    Returns:
        One line per setting, the first for the images alone.

    Raises:
        UserError: no images, or another number of sizes or ids.
    """
    ids = images if truth is None else truth.image_ids
    if not images or len(images) != len(sizes) or len(ids) != len(images):
        raise UserError(f"{len(images)} images came with {len(sizes)} sizes and {len(ids)} ids: one of each per image.")
    was_training = model.training
    model.eval()
    try:
        alone = [_found(model, image[None], None, [size])[0] for image, size in zip(images, sizes, strict=True)]
        movements = [Movement("each image alone, without padding", 0.0, 0.0, _precision(model, alone, sizes, truth))]
        for setting, found in _settings(model, images, sizes, batch_sizes, margins):
            moved = [_moved(model, a, b, image) for a, b, image in zip(alone, found, images, strict=True)]
            score, pixels = (float(torch.tensor(column).max()) for column in zip(*moved, strict=True))  # keeps NaN
            movements.append(Movement(setting, score, pixels, _precision(model, found, sizes, truth)))
    finally:
        model.train(was_training)
    return movements


def _settings(
    model: Any,
    images: Sequence[Tensor],
    sizes: Sequence[tuple[int, int]],
    batch_sizes: Sequence[int],
    margins: Sequence[tuple[int, int]],
) -> Iterator[tuple[str, list[dict[str, Tensor]]]]:
    """Names of settings with what is found in every image, in order."""
    for count in batch_sizes:
        if count > len(images):
            continue
        found: list[dict[str, Tensor]] = []
        for start in range(0, len(images), count):
            chunk = slice(start, start + count)
            found += _found(model, *pad_together(list(images[chunk])), sizes[chunk])
        yield f"in batches of {count}, padded to the largest", found
    found = []
    for start in range(0, len(images), max(batch_sizes, default=1)):
        chunk = slice(start, start + max(batch_sizes, default=1))
        found += _found(model, list(images[chunk]), None, sizes[chunk])
    yield "as a list of images", found
    for rows, columns in margins:
        found = []
        for image, size in zip(images, sizes, strict=True):
            padded = F.pad(image, (0, columns, 0, rows))[None]
            mask = torch.zeros(padded[:, 0].shape, dtype=torch.bool, device=image.device)
            mask[:, : image.shape[1], : image.shape[2]] = True
            found += _found(model, padded, mask, [size])
        yield f"alone, {rows} rows and {columns} columns of padding", found


def _found(
    model: Any, images: Tensor | list[Tensor], mask: Tensor | None, sizes: Sequence[tuple[int, int]]
) -> list[dict[str, Tensor]]:
    """Outputs of each image, as if it had been alone: (1, N, K) and (1, N, 4)."""
    outputs = model(images, mask=mask)
    return [{key: outputs[key][i : i + 1] for key in ("pred_logits", "pred_boxes")} for i in range(len(sizes))]


def _moved(model: Any, a: dict[str, Tensor], b: dict[str, Tensor], image: Tensor) -> tuple[float, float]:
    """Largest change of a score and of an edge in pixels of the image (C, h, w)."""
    height, width = image.shape[1:]
    scale = a["pred_boxes"].new_tensor([width, height, width, height])
    scores, boxes = [], []
    for outputs in (a, b):
        logits = outputs["pred_logits"][0]
        scores.append(logits.softmax(-1) if model.classification == "softmax" else logits.sigmoid())
        boxes.append(cxcywh_to_xyxy(outputs["pred_boxes"][0]) * scale)
    if getattr(model, "selection", None) is not None:  # the order of queries is a ranking, and near ties may swap
        from scipy.optimize import linear_sum_assignment

        cost = torch.cdist(scores[0], scores[1], p=torch.inf) + torch.cdist(boxes[0], boxes[1], p=torch.inf)
        order = torch.from_numpy(linear_sum_assignment(cost.nan_to_num(nan=1e9).cpu().numpy())[1]).to(cost.device)
        scores[1], boxes[1] = scores[1][order], boxes[1][order]
    return float((scores[0] - scores[1]).abs().max()), float((boxes[0] - boxes[1]).abs().max())


def _precision(
    model: Any, found: Sequence[dict[str, Tensor]], sizes: Sequence[tuple[int, int]], truth: Truth | None
) -> float | None:
    if truth is None:
        return None
    from vision_attn.detection.coco_eval import CocoMetric

    metric = CocoMetric(truth.coco, category_ids=truth.category_ids)
    for image_id, outputs, size in zip(truth.image_ids, found, sizes, strict=True):
        metric.update([image_id], postprocess(outputs, [size], model.classification))
    return float(metric.compute()["ap"])
