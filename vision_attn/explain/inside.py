"""Does a detector look at what it finds? How much of the decoder's cross-attention falls inside the object's box."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from vision_attn.errors import UserError
from vision_attn.explain.maps import recording


@dataclasses.dataclass(frozen=True)
class Inside:
    """Mass of cross-attention inside ground-truth boxes, over correct detections.

    Attributes:
        mass: layer name → (n,) share of the attention of each correct detection's query, mean over heads, that falls
            inside the box.
        uniform: (n,) share that attention to everything alike would have there.
    """

    mass: dict[str, Tensor]
    uniform: Tensor

    def share(self, name: str, least: float = 0.5) -> float:
        """Share of correct detections that have more than so much of a layer's attention inside the box."""
        return float((self.mass[name] > least).double().mean())


@torch.no_grad()
def attention_inside(
    model: Any,
    images: Sequence[Tensor],
    targets: Sequence[Mapping[str, Tensor]],
    *,
    enlarge: float = 1.5,
    overlap: float = 0.5,
    threshold: float = 0.5,
) -> Inside:
    """Measures images one after the other.

    A detection is correct when it is surer than ``threshold`` and has the class of an object that it overlaps by
    ``overlap`` or more; of several for one object, the surest.

    Args:
        model: a detection transformer.
        images: normalized, (C, h, w).
        targets: of each image ``labels`` (n,) and ``boxes`` (n, 4), centre x, y, width, height as shares of the image.
        enlarge: factor on width and height of the box: features are blurred over neighbouring cells.
        overlap: least intersection over union.
        threshold: least score, exclusive.

    Raises:
        UserError: no detection is correct.
    """
    from vision_attn.detection.boxes import cxcywh_to_xyxy, pairwise_iou
    from vision_attn.detection.postprocess import postprocess

    mass: dict[str, list[Tensor]] = {}
    uniform: list[Tensor] = []
    for image, target in zip(images, targets, strict=True):
        with recording(model, image[None], layers="decoder.*cross_attn", hold="rows") as run:
            found = postprocess(run.output, [(1, 1)], model.classification, threshold=threshold)[0]
            boxes, labels = target["boxes"].to(found["boxes"]), target["labels"].to(found["labels"])
            if not len(boxes) or not len(found["labels"]):
                continue
            fits = pairwise_iou(found["boxes"], cxcywh_to_xyxy(boxes)) >= overlap
            fits &= found["labels"][:, None] == labels[None]
            first = fits.cumsum(0) == 1  # sorted by score: the surest for each object
            which, objects = torch.nonzero(fits & first, as_tuple=True)
            for name in run.names():
                plane = run.planes(name)[1]
                assert plane is not None
                cells = _cover(_enlarged(boxes[objects], enlarge), plane.grid)  # (n, R, C)
                weights = run.weights(name, rows=found["queries"][which])[0].mean(0)  # (n, M)
                mass.setdefault(name, []).append((plane.to_image(weights) * cells).sum((-2, -1)).cpu())
            uniform.append(cells.mean((-2, -1)).cpu())
    if not uniform or not len(torch.cat(uniform)):
        raise UserError(f"not one detection surer than {threshold} is correct: train longer, or lower the threshold.")
    return Inside({name: torch.cat(parts) for name, parts in mass.items()}, torch.cat(uniform))


def _enlarged(boxes: Tensor, factor: float) -> Tensor:
    """(n, 4) corners of larger boxes, cut at the image's borders."""
    from vision_attn.detection.boxes import cxcywh_to_xyxy

    return cxcywh_to_xyxy(torch.cat([boxes[:, :2], boxes[:, 2:] * factor], 1)).clamp(0, 1)


def _cover(corners: Tensor, grid: tuple[int, int]) -> Tensor:
    """(n, 4) corners as shares → (n, R, C) how much of each cell lies in the box, 0 to 1."""
    sides = []
    for low, high, count in ((corners[:, 1], corners[:, 3], grid[0]), (corners[:, 0], corners[:, 2], grid[1])):
        edge = torch.arange(count, device=corners.device) / count
        left, right = torch.maximum(edge, low[:, None]), torch.minimum(edge + 1 / count, high[:, None])
        sides.append((right - left).clamp_min(0) * count)
    return sides[0][:, :, None] * sides[1][:, None, :]
