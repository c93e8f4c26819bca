"""Numbers out of logits, labels and trajectories."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchmetrics.functional.classification import multiclass_calibration_error

from vision_attn.contrast.subsets import sample_rows
from vision_attn.data.augment import Augmenter
from vision_attn.data.loader import EvalLoader
from vision_attn.data.sets import MemorySet, StreamedSet

BINS = 15
_BATCH = 250


@torch.no_grad()
def predict(
    model: nn.Module,
    images: MemorySet | StreamedSet,
    augmenter: Augmenter,
    *,
    device: torch.device,
    autocast: bool = False,
    limit: int | None = None,
    num_workers: int = 0,
) -> tuple[Tensor, Tensor]:
    """Logits in evaluation mode, without augmentation.

    Args:
        model: on ``device``; its mode is left as it is.
        images: what to look at.
        augmenter: normalises.
        device: where the model is.
        autocast: compute in bfloat16.
        limit: only so many images, balanced over classes and always the same, in their order.
        num_workers: processes that decode images which are not in memory.

    Returns:
        (N, classes) float32 and the labels (N,), both on the CPU.
    """
    if limit is not None and limit < len(images):
        images = images.take(sample_rows(images, limit))
    was_training = model.training
    model.eval()
    logits, labels = [], []
    for batch in EvalLoader(images, batch_size=_BATCH, num_workers=num_workers):
        x = augmenter.normalize(batch["image"].to(device))
        with torch.autocast(device.type, torch.bfloat16, enabled=autocast):
            logits.append(model(x).float().cpu())
        labels.append(batch["label"])
    model.train(was_training)
    return torch.cat(logits), torch.cat(labels)


def accuracy_and_loss(logits: Tensor, labels: Tensor, prefix: str) -> dict[str, float]:
    """``<prefix>_acc`` in 0 ... 1 and ``<prefix>_loss`` in nats of (N, classes) logits."""
    return {
        f"{prefix}_acc": float((logits.argmax(1) == labels).double().mean()),
        f"{prefix}_loss": float(F.cross_entropy(logits.double(), labels)),
    }


def calibration_error(logits: Tensor, labels: Tensor) -> float:
    """Expected calibration error (Guo et al. 2017, arXiv 1706.04599) with 15 bins of equal width, in 0 ... 1."""
    probabilities = logits.double().softmax(1)
    return float(multiclass_calibration_error(probabilities, labels, logits.shape[1], n_bins=BINS, norm="l1"))


def memorised(logits: Tensor, given: Tensor, true: Tensor) -> float:
    """Share of the wrong labels that the model gives back; there must be at least one.

    Args:
        logits: (N, classes) on the training images.
        given: (N,) labels they were trained with.
        true: (N,) labels they should have.
    """
    wrong = given != true
    return float((logits.argmax(1) == given)[wrong].double().mean())


def turning_point(curve: list[dict[str, float]]) -> dict[str, float]:
    """``turn_step``, ``turn_loss`` and ``turn_rise``: where validation loss is lowest, and how far it rises after.

    The first of equal ones counts. A loss that still falls at the end turns at the last step and rises by 0.
    """
    lowest = min(curve, key=lambda row: row["val_loss"])
    return {
        "turn_step": lowest["step"],
        "turn_loss": lowest["val_loss"],
        "turn_rise": curve[-1]["val_loss"] - lowest["val_loss"],
    }


def best_row(curve: list[dict[str, float]]) -> dict[str, Any]:
    """The evaluation with the highest validation accuracy, of equal ones that with the lowest loss."""
    return max(curve, key=lambda row: (row["val_acc"], -row["val_loss"]))


def evaluation_steps(steps: int, evaluations: int) -> list[int]:
    """Optimizer steps after which to evaluate: quadratically spaced, the last one among them."""
    return sorted({max(1, round(steps * (i / evaluations) ** 2)) for i in range(1, evaluations + 1)})
