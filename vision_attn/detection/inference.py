"""From pictures of any size to detections in their own pixels."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from PIL import Image
from torch import Tensor, nn

from vision_attn.data.luma import luma
from vision_attn.detection.postprocess import postprocess
from vision_attn.errors import UserError

TOPK = 100
THRESHOLD = 0.5
PIXELS_PER_BATCH = 4_000_000  # a ResNet-50 then needs about 2 GB
LARGEST_BATCH = 32


@dataclasses.dataclass
class Detections:
    """What a detector found in one image: k objects, the surest first.

    Attributes:
        boxes: (k, 4) float32 left, top, right, bottom in pixels of the image as it is shown (turned as its EXIF tag
            says, before any resizing). They may reach a little beyond its edges.
        scores: (k,) float32 confidences, 0 to 1.
        labels: k class names; category ids as text when the model knows no names.
        class_ids: (k,) int64 category ids of the data the model was trained on.
        queries: (k,) int64, the object query behind each.
        size: (height, width) of the image.
        source: the file, or ``image 3`` for the fourth of those given.
    """

    boxes: Tensor
    scores: Tensor
    labels: list[str]
    class_ids: Tensor
    queries: Tensor
    size: tuple[int, int]
    source: str

    def __len__(self) -> int:
        return len(self.labels)

    def to_dict(self) -> dict[str, Any]:
        """Plain types, ready for JSON: ``source``, ``size`` and ``objects``."""
        numbers = (part.tolist() for part in (self.class_ids, self.scores, self.boxes, self.queries))
        names = ("label", "category_id", "score", "box", "query")
        objects = [dict(zip(names, row, strict=True)) for row in zip(self.labels, *numbers, strict=True)]
        return {"source": self.source, "size": list(self.size), "objects": objects}

    def to_coco(self, image_id: int) -> list[dict[str, Any]]:
        """COCO's results format: ``image_id``, ``category_id``, ``bbox`` (left, top, width, height), ``score``."""
        corners = self.boxes.double()
        boxes = torch.cat([corners[:, :2], corners[:, 2:] - corners[:, :2]], 1).tolist()
        rows = zip(self.class_ids.tolist(), boxes, self.scores.tolist(), strict=True)
        return [{"image_id": image_id, "category_id": c, "bbox": box, "score": score} for c, box, score in rows]

    def to_supervision(self) -> Any:
        """``supervision.Detections`` with category ids as ``class_id`` and names in ``data["class_name"]``.

        Raises:
            UserError: the package supervision is not installed.
        """
        try:
            import supervision
        except ImportError as error:
            raise UserError("to_supervision needs the package supervision: pip install supervision") from error
        import numpy as np

        return supervision.Detections(
            xyxy=self.boxes.numpy().reshape(-1, 4),
            confidence=self.scores.numpy(),
            class_id=self.class_ids.numpy(),
            data={"class_name": np.array(self.labels, dtype=str)},
        )


def check_options(threshold: float | None, topk: int | None) -> tuple[float, int]:
    """Threshold and number of objects, with the defaults for None.

    Raises:
        UserError: out of range.
    """
    threshold = THRESHOLD if threshold is None else threshold
    topk = TOPK if topk is None else topk
    if isinstance(threshold, bool) or not isinstance(threshold, (int, float)) or not 0.0 <= threshold <= 1.0:
        raise UserError(f"threshold is {threshold!r}: scores are between 0 and 1.")
    if isinstance(topk, bool) or not isinstance(topk, int) or topk < 1:
        raise UserError(f"topk is {topk!r}: expected a whole number of at least 1.")
    return float(threshold), topk


def usual_batch(config: dict[str, Any]) -> int:
    """How many images of a model's size go together when nobody says."""
    height, width = _resize(config).size
    return max(1, min(LARGEST_BATCH, PIXELS_PER_BATCH // (height * width)))


def detect(
    model: nn.Module, pictures: Sequence[Image.Image], sources: Sequence[str], *, threshold: float, topk: int
) -> list[Detections]:
    """One forward pass of a detector over pictures of any sizes.

    Args:
        model: in evaluation mode, with a ``config``.
        pictures: RGB.
        sources: what to call them.
        threshold: scores must be above it; 0 keeps all.
        topk: most objects of an image.

    Raises:
        UserError: the configuration names another number of labels or categories than the model has classes; or the
            predictions of an image are NaN.
    """
    config: dict[str, Any] = model.config  # type: ignore[assignment]
    where = next(model.parameters())
    images = [x.to(where.device, where.dtype) for x in prepare(pictures, config)]
    sizes = [(picture.height, picture.width) for picture in pictures]
    with torch.no_grad():  # tensors of inference_mode could not be changed by who gets them
        outputs = model(images)  # as a list: what one image is does not depend on its neighbours
        classification = str(model.classification)
        found = postprocess(outputs, sizes, classification, topk=topk, threshold=threshold, names=sources)
    names, ids = _classes(config, outputs["pred_logits"].shape[-1] - (classification == "softmax"))
    results = []
    for one, size, source in zip(found, sizes, sources, strict=True):
        one = {name: part.cpu() for name, part in one.items()}
        labels = [names[i] for i in one["labels"].tolist()]
        results.append(
            Detections(one["boxes"], one["scores"], labels, ids[one["labels"]], one["queries"], size, source)
        )
    return results


def prepare(pictures: Sequence[Image.Image], config: dict[str, Any]) -> list[Tensor]:
    """Resize and normalise RGB pictures as in an evaluation on the data that a model was trained on.

    ``config["preprocess"]`` has ``mean``, ``std``, and ``size`` with ``resize``: ``shorter`` (the shorter side becomes
    the first number, the longer one at most the second, as DETR does it; also where ``resize`` is missing), ``fit``
    (as large as fits into height and width) or ``stretch``.

    Returns:
        One float (C, h, w) per picture.
    """
    # heavy with tables of annotations; a detector alone does without
    from vision_attn.data.detection_augment import DetectionAugmentConfig, ViewMaker, draw_view
    from vision_attn.data.pixels import resize_picture

    settings = config["preprocess"]
    maker = ViewMaker(DetectionAugmentConfig(), _resize(config))
    sizes = torch.tensor([(picture.height, picture.width) for picture in pictures], dtype=torch.int64).reshape(-1, 2)
    stored = maker.stored(sizes, training=False)
    views = dataclasses.replace(maker.evaluation(sizes), source=torch.cat([torch.zeros_like(stored), stored], 1))
    mean, std = (torch.tensor(settings[key], dtype=torch.float32)[:, None, None] for key in ("mean", "std"))
    ground = torch.zeros(3, 1, 1, dtype=torch.uint8)
    images = []
    for row, picture in enumerate(pictures):
        pixels = torch.empty(3, *views.output[row].tolist(), dtype=torch.uint8)
        draw_view(resize_picture(picture, stored[row].tolist()), views, row, pixels, ground)
        x = pixels.float() / 255.0
        if len(mean) == 1:
            x = luma(x)
        images.append((x - mean) / std)
    return images


def _resize(config: dict[str, Any]) -> Any:
    from vision_attn.data.detection_augment import Resize

    settings = config["preprocess"]
    height, width = (int(side) for side in settings["size"])
    mode = settings.get("resize")
    if mode is None:
        return Resize("shorter", (min(height, width), max(height, width)))
    if mode not in ("shorter", "fit", "stretch"):
        raise UserError(f"The model's preprocess.resize is {mode!r}: choose shorter, fit or stretch.")
    return Resize(mode, (height, width))


def _classes(config: dict[str, Any], classes: int) -> tuple[list[str], Tensor]:
    """Names and category ids of the contiguous labels."""
    ids = config.get("category_ids") or list(range(classes))
    names = config.get("labels") or [str(i) for i in ids]
    for what, given in (("category_ids", ids), ("labels", names)):
        if len(given) != classes:
            raise UserError(f"The model has {classes} classes, but its configuration names {len(given)} {what}.")
    return [str(name) for name in names], torch.tensor(ids, dtype=torch.int64)
