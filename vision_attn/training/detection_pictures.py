"""The pictures of a detector's run: curves, training images, detections, and what it gets right class by class."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vision_attn.detection.boxes import cxcywh_to_xyxy
from vision_attn.detection.confusion import Confusion, confusion
from vision_attn.detection.postprocess import postprocess
from vision_attn.detection.report import nms_beside
from vision_attn.training.pictures import (
    GOOD,
    GREY,
    TRAIN,
    VAL,
    _Figure,
    _tiles,
    confusion_matrix,
    curve,
    learning_rate,
    mark_best,
)

PALE = "#AEC7E0"
TILE = 420  # pixels: as wide as an image of a grid is drawn
LINES = ("#4477AA", "#EE6677", "#228833", "#CCBB44", "#66CCEE", "#AA3377", "#000000", "#EE7733", "#882255", "#44AA99")
"""Paul Tol's bright scheme and three more; the tenth is the last that can be told apart."""


def draw_all(run: Any, module: Any, data: Any, device: torch.device | str = "cpu", limit: int = 1000) -> list[Path]:
    """Every picture of a finished run; ``val/ap_nms50`` and ``val/ap_nms70`` go into its summary.

    Args:
        run: the :class:`~vision_attn.training.run_folder.RunFolder`.
        module: a ``Detector`` with the weights to show.
        data: the :class:`~vision_attn.data.detection.DetectionData`.
        device: where the model computes.
        limit: most validation images that are looked at.

    Returns:
        The files written.
    """
    folder, name = run.path / "plots", f"{run.recipe}, {run.summary.get('model')}"
    denoises = bool(getattr(module.model, "denoising", {}).get("groups"))
    learning_curves(run.rows, folder / "learning_curves.png", name, denoises=denoises)
    changes = ", ".join(f"{k} {v}" for k, v in data.augment.changed().items()) or "no augmentation"
    title = f"training images as the model sees them: {changes}"
    training_images(data.sample_batch(16), data, folder / "augmented.png", title)
    written = ["learning_curves", "augmented"]
    if data.split("val") is not None:
        evaluation = look(module, data, device, limit)
        if evaluation.images == len(data.split("val")):  # what is said of the split is of all of it
            beside = {f"val/{k}": round(v, 6) for k, v in nms_beside(evaluation).items() if not math.isnan(v)}
            run.write_summary(**beside)
        confused = confusion(evaluation.truth, evaluation.detections, [i for i, _ in evaluation.categories])
        names, shown = [label for _, label in evaluation.categories], f"{evaluation.images:,} validation images"
        batch = data.sample_batch(8, split="val")
        detections(module, batch, data, folder / "detections.png", confused.threshold, f"{name}: validation images")
        average_precisions(evaluation.per_class(), folder / "average_precision.png", f"{name}: {shown}")
        curves = [(iou, evaluation.curves(iou)) for iou in (0.5, 0.75)]
        precision_recall(curves, folder / "precision_recall.png", f"{name}: {shown}")
        confusions(confused, names, folder / "confusion_matrix.png", f"{name}: {shown}")
        written += ["detections", "average_precision", "precision_recall", "confusion_matrix"]
    return [folder / f"{picture}.png" for picture in written]


@torch.no_grad()
def look(module: Any, data: Any, device: torch.device | str, limit: int) -> Any:
    """The evaluation of the first validation images, ``limit`` or a few more, by this process alone."""
    from vision_attn.detection.coco_eval import CocoMetric, evaluate

    truth = data.ground_truth("val")
    ids = module.model.config.get("category_ids") or data.category_ids
    metric = CocoMetric(truth, category_ids=ids, max_dets=module.max_detections)
    seen = 0
    for batch in data.whole_dataloader("val"):
        outputs, targets = outputs_of(module, data.on_after_batch_transfer(_to(batch, device)))
        sizes = torch.stack([target["orig_size"] for target in targets])
        found = postprocess(outputs, sizes, module.model.classification, topk=module.max_detections)
        metric.update([target["image_id"] for target in targets], found)
        seen += len(targets)
        if seen >= limit:
            break
    images, results = metric.results()
    return evaluate(truth, results, image_ids=images, max_dets=module.max_detections)


@torch.no_grad()
def outputs_of(module: Any, batch: dict[str, Any]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Outputs and targets of a prepared batch; the module's mode stays what it was."""
    was_training = module.training
    module.eval().to(batch["image"].device)
    outputs = module(batch["image"], batch["mask"])
    module.train(was_training)
    return outputs, batch["targets"]


def _to(batch: dict[str, Any], device: torch.device | str) -> dict[str, Any]:
    return {key: value.to(device) if isinstance(value, Tensor) else value for key, value in batch.items()}


def learning_curves(rows: Sequence[dict[str, Any]], path: Path, title: str = "", *, denoises: bool = False) -> None:
    """Loss, average precision and the learning rate over optimizer steps.

    Args:
        rows: of ``metrics.csv``, see :func:`~vision_attn.training.run_folder.read_metrics`.
        path: the PNG to write.
        title: above the panels.
        denoises: the training loss has parts that the validation loss has not.
    """
    lines = (
        (0, "train/loss", "train, with denoising" if denoises else "train", TRAIN),
        (0, "val/loss", "val", VAL),
        (1, "val/ap", "AP", VAL),
        (1, "val/ap50", "AP at IoU 0.5", TRAIN),
        (1, "val/ap75", "AP at IoU 0.75", GREY),
    )
    with _Figure(path, figsize=(10.5, 3.3), columns=3) as (figure, axes):
        for place, key, label, color in lines:
            curve(axes[place], rows, key, label, color)
        axes[0].set(xlabel="optimizer step", ylabel="loss of all layers")
        axes[1].set(xlabel="optimizer step", ylabel="average precision, validation", ylim=(0, None))
        for axis in axes[:2]:
            if axis.lines:
                axis.legend()
        mark_best(axes[1], rows, "val/ap", "{:.3f}")
        learning_rate(axes[2], rows)
        figure.suptitle(title, fontsize=11)


def training_images(batch: dict[str, Any], data: Any, path: Path, title: str = "") -> None:
    """A grid of training images with their boxes, after augmentation.

    Args:
        batch: from ``data.sample_batch``.
        data: gives pixels and class names.
        path: the PNG to write.
        title: above the grid.
    """
    pixels = _pixels(batch, data)
    drawn = [_draw(image, t["labels"], t["boxes"], data) for image, t in zip(pixels, batch["targets"], strict=True)]
    _grid([(image, "", "#444444") for image in drawn], 4, path, title)


@torch.no_grad()
def detections(module: Any, batch: dict[str, Any], data: Any, path: Path, threshold: float, title: str = "") -> None:
    """Pairs of the truth and what was found.

    Args:
        module: a ``Detector``.
        batch: from ``data.sample_batch``.
        data: gives pixels and class names.
        path: the PNG to write.
        threshold: lowest score that is shown.
        title: above the images.
    """
    device = next(module.parameters()).device
    outputs, targets = outputs_of(module, {**_to(batch, device), "targets": batch["targets"]})
    sizes = torch.stack([target["size"] for target in targets])
    found = postprocess(outputs, sizes, module.model.classification, topk=module.max_detections)
    tiles = []
    for image, target, result in zip(_pixels(batch, data), targets, found, strict=True):
        kept = result["scores"] >= threshold
        size = target["size"].flip(0).repeat(2).cpu()  # width, height, width, height
        boxes = result["boxes"][kept].cpu() / size
        tiles.append((_draw(image, target["labels"], target["boxes"], data), "truth", "#444444"))
        scores = result["scores"][kept].cpu()
        tiles.append((_draw(image, result["labels"][kept].cpu(), boxes, data, scores), "found", GOOD))
    _grid(tiles, 4, path, f"{title}; scores of {threshold:.2f} and more")


def _pixels(batch: dict[str, Any], data: Any) -> list[Tensor]:
    """Images without their padding, (3, h, w) uint8."""
    images = data.denormalize(batch["image"]).cpu()
    sizes = [target["size"].tolist() for target in batch["targets"]]
    return [image[:, :height, :width] for image, (height, width) in zip(images, sizes, strict=True)]


def _draw(image: Tensor, labels: Tensor, boxes: Tensor, data: Any, scores: Tensor | None = None) -> Tensor:
    """(3, H, W) uint8 with boxes on it; boxes are ``cxcywh`` of targets, or, with scores, ``xyxy``, as shares."""
    from vision_attn.detection.draw import draw_detections

    corners = cxcywh_to_xyxy(boxes.cpu()) if scores is None else boxes
    if max(image.shape) > TILE:  # here, and not when the grid is drawn, so that names stay readable
        size = [max(1, round(side * TILE / max(image.shape))) for side in image.shape[1:]]
        image = torch.nn.functional.interpolate(image[None], size, mode="bilinear", antialias=True)[0]
    height, width = image.shape[1:]
    names = [data.labels[int(label)] for label in labels]
    picture = draw_detections(
        image, corners * torch.tensor([width, height, width, height]), names, scores, classes=data.labels
    )
    return torch.from_numpy(np.array(picture)).permute(2, 0, 1)


def _grid(tiles: Sequence[tuple[Tensor, str, str]], columns: int, path: Path, title: str) -> None:
    """Images of any sizes, each in the middle of a white tile as large as the largest."""
    height, width = (max(image.shape[axis] for image, *_ in tiles) for axis in (1, 2))
    placed = []
    for place, (image, caption, color) in enumerate(tiles):
        tile = torch.full((3, height, width), 255, dtype=torch.uint8)
        top, left = (height - image.shape[1]) // 2, (width - image.shape[2]) // 2
        tile[:, top : top + image.shape[1], left : left + image.shape[2]] = image
        placed.append((place, tile, caption, color))
    rows, gap = -(-len(tiles) // columns), 0.08 if any(caption for _, caption, _ in tiles) else 0.03
    with _Figure(path, figsize=(11.5, 11.5 / columns * rows * (height / width + gap) + 0.5)) as (figure, axis):
        figure.suptitle("\n".join(textwrap.wrap(title, 120)), fontsize=11)
        _tiles(axis, placed, columns, gap, fontsize=8.5)


def average_precisions(table: Sequence[dict[str, Any]], path: Path, title: str = "") -> None:
    """Bars of average precision by class, best first; classes without an object are left out.

    Args:
        table: rows with ``name``, ``objects``, ``ap`` and ``ap50``.
        path: the PNG to write.
        title: above the bars.
    """
    table = sorted((row for row in table if row["objects"]), key=lambda row: row["ap"])
    places = range(len(table))
    with _Figure(path, figsize=(7.5, 1.4 + 0.24 * max(3, len(table)))) as (figure, axis):
        axis.barh(places, [row["ap50"] for row in table], color=PALE, height=0.78, label="AP at IoU 0.5")
        axis.barh(places, [row["ap"] for row in table], color=TRAIN, height=0.46, label="AP")
        names = [f"{textwrap.shorten(row['name'], 22, placeholder='…')} ({row['objects']:,})" for row in table]
        axis.set_yticks(places, names)
        axis.set(xlim=(0, 1), ylim=(-0.7, max(3, len(table)) - 0.3), xlabel="average precision; objects in brackets")
        axis.grid(axis="y", visible=False)
        mean = sum(row["ap"] for row in table) / max(1, len(table))
        axis.axvline(mean, color=VAL, lw=1.2, ls="--", label=f"mean AP {mean:.3f}")
        axis.legend(loc="upper center", bbox_to_anchor=(0.5, -0.55 / figure.get_figheight()), ncols=3)
        figure.suptitle(title, fontsize=11)


def precision_recall(curves: Sequence[tuple[float, dict[str, Any]]], path: Path, title: str = "") -> None:
    """Precision over recall, a panel for each IoU; up to ten classes in colours, more of them grey behind their mean.

    Args:
        curves: IoU, and by class name ``recall`` (R,) and ``precision`` (R,).
        path: the PNG to write.
        title: above the panels.
    """
    with _Figure(path, figsize=(5.2 * len(curves) + 1.2, 4.4), columns=len(curves)) as (figure, axes):
        for axis, (iou, classes) in zip(np.atleast_1d(axes), curves, strict=True):
            few = len(classes) <= len(LINES)
            for color, (name, curve) in zip(LINES if few else [GREY] * len(classes), classes.items(), strict=False):
                style = {"lw": 1.3, "label": f"{name}: {curve['precision'].mean():.2f}"} if few else {"lw": 0.5}
                axis.plot(curve["recall"], curve["precision"], color=color, alpha=1 if few else 0.35, **style)
            if classes:
                mean = np.mean([curve["precision"] for curve in classes.values()], 0)
                recall = next(iter(classes.values()))["recall"]
                axis.plot(recall, mean, color="#222222", lw=2.2, ls=":", label=f"mean: {mean.mean():.3f}")
                axis.legend(title="average precision", loc="center left", bbox_to_anchor=(1, 0.5), fontsize=8)
            axis.set(xlabel="recall", ylabel="precision", xlim=(0, 1), ylim=(0, 1.02), title=f"IoU {iou:g}")
        figure.suptitle(title, fontsize=11)


def confusions(confused: Confusion, labels: Sequence[str], path: Path, title: str = "") -> None:
    """Objects by true class and class found, with what is missed and what is not there.

    Args:
        confused: counts (K + 1, K + 1).
        labels: K class names.
        path: the PNG to write.
        title: above the matrix.
    """
    title = f"{title}\nIoU 0.5, scores of {confused.threshold:.2f} and more (highest F1: {confused.f1:.3f})"
    rows, columns = [*labels, "nothing there"], [*labels, "missed"]
    confusion_matrix(confused.counts, rows, path, title, predicted=columns, unit="objects")
