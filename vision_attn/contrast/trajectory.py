"""What a model had done when its training loss reached a given value.

A model that still fits its training images badly has a small gap between training and test, however badly it
generalises; the plain gap then says the opposite of what is meant. At the *same* training loss the gaps compare.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

Row = Mapping[str, float]
KEYS = ("step", "train_loss", "train_acc", "val_loss", "val_acc")


@dataclass(frozen=True)
class Matched:
    """A trajectory where its training loss first reached ``train_loss``, between two evaluations.

    Attributes:
        step: optimizer step, interpolated as everything else here.
        train_loss: the loss that was asked for.
        gap_loss: validation loss − training loss.
        gap_acc: training accuracy − validation accuracy.
        rise: how far the validation loss lies above its lowest value up to here.
    """

    step: float
    train_loss: float
    gap_loss: float
    gap_acc: float
    rise: float


def match_loss(curve: Sequence[Row], loss: float) -> Matched | None:
    """The first point of a trajectory with the training loss ``loss``.

    Between the last evaluation above ``loss`` and the first one at or below it all values are interpolated
    linearly in the training loss.

    Args:
        curve: rows ``step train_loss train_acc val_loss val_acc``, by step.
        loss: training loss, nats.

    Returns:
        None when the trajectory never gets so low, or starts below.
    """
    reached = next((i for i, row in enumerate(curve) if row["train_loss"] <= loss), None)
    if reached is None or (reached == 0 and curve[0]["train_loss"] < loss):
        return None
    after = curve[reached]
    before = curve[reached - 1] if reached else after
    fall = before["train_loss"] - after["train_loss"]
    share = (before["train_loss"] - loss) / fall if fall > 0 else 1.0
    at = {key: before[key] + share * (after[key] - before[key]) for key in KEYS}
    lowest = min([at["val_loss"], *(row["val_loss"] for row in curve[:reached])])
    gap = at["val_loss"] - loss, at["train_acc"] - at["val_acc"]
    return Matched(at["step"], loss, gap[0], gap[1], at["val_loss"] - lowest)


def deepest(curve: Sequence[Row]) -> float:
    """The lowest training loss of a trajectory; infinite without evaluations."""
    return min((row["train_loss"] for row in curve), default=math.inf)


def common_loss(curves: Iterable[Sequence[Row]]) -> float:
    """The lowest training loss that all trajectories reach."""
    return max((deepest(curve) for curve in curves), default=math.inf)
