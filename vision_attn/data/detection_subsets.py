"""Parts of a detection set: nested subsets, and training images that evaluation does not show too."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from vision_attn.data.coco_table import CocoTable
from vision_attn.data.findings import Findings
from vision_attn.data.randomness import Stream, hashes
from vision_attn.errors import UserError


def subset_rows(
    table: CocoTable, *, fraction: float, most: int | None, seed: int, only_with_boxes: bool = False
) -> np.ndarray:
    """Rows of a subset, ascending; a smaller subset is part of a larger one of the same seed.

    Args:
        table: to choose from.
        fraction: share of the images.
        most: images at most.
        seed: which subset.
        only_with_boxes: choose among the images that have boxes or crowds.

    Raises:
        UserError: nothing is left.
    """
    rows = np.unique(table.image) if only_with_boxes else np.arange(len(table))
    if len(rows) == 0:
        raise UserError(f"{table.path}: no image shows any of {', '.join(table.labels)}.")
    count = min(round(fraction * len(rows)), most or len(rows))
    if count == 0:
        raise UserError(f"data.fraction={fraction:g} of {len(rows)} training images leaves none: use a larger share.")
    order = hashes(seed, 0, torch.from_numpy(rows), [Stream.SUBSET])[:, 0].argsort(stable=True)
    return np.sort(rows[order[:count].numpy()])


def without_overlap(
    table: CocoTable,
    others: Sequence[tuple[str, Sequence[tuple[int, int]]]],
    overlap: str,
    findings: Findings,
) -> np.ndarray:
    """Rows of the training images that may be trained on.

    Args:
        table: of the training images.
        others: of each evaluation split what to call its annotation file, and the pairs of rows (training, evaluation)
            that show the same.
        overlap: ``error``, ``drop`` or ``allow``, see :class:`DetectionData`.
        findings: takes note.

    Raises:
        UserError: evaluation images are in training too, and ``overlap`` is ``error``; or all of them are.
    """
    rows = np.arange(len(table))
    for name, pairs in others:
        shared = sorted({row for row, _ in pairs})
        ids = table.image_ids[shared].tolist()
        kind = f"training images that are in {name} too, by content"
        if overlap == "error":
            findings.fatal(kind, table.path, ids, "Take them out of one, or set data.overlap to drop or allow.")
        elif overlap == "allow":
            findings.repaired(kind, table.path, ids, "kept, as data.overlap says")
        else:
            findings.repaired(kind, table.path, ids, "left out of training")
            rows = np.setdiff1d(rows, shared)
    if len(rows) == 0:
        raise UserError(f"{table.path}: every training image is in validation or test too.")
    return rows
