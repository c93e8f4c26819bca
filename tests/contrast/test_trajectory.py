"""Gaps at a given training loss are read off trajectories exactly."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vision_attn.contrast.trajectory import common_loss, deepest, match_loss


def rows(train: list[float], val: list[float]) -> list[dict[str, float]]:
    return [
        {"step": 10.0 * i, "train_loss": t, "train_acc": 1 - t / 4, "val_loss": v, "val_acc": 1 - v / 4}
        for i, (t, v) in enumerate(zip(train, val, strict=True))
    ]


def test_values_between_two_evaluations_are_interpolated() -> None:
    found = match_loss(rows([2.0, 1.0, 0.5], [2.0, 1.2, 1.4]), 0.75)
    assert found is not None
    assert found.step == pytest.approx(15)
    assert found.gap_loss == pytest.approx(1.3 - 0.75)
    assert found.gap_acc == pytest.approx((1 - 0.75 / 4) - (1 - 1.3 / 4))
    assert found.rise == pytest.approx(0.1)  # above the 1.2 of step 10


@settings(max_examples=50, deadline=None)
@given(st.floats(0.05, 1.9), st.floats(0, 2), st.integers(3, 11))
def test_a_gap_linear_in_the_training_loss_is_recovered(loss: float, slope: float, evaluations: int) -> None:
    train = list(np.geomspace(2.0, 0.05, evaluations))
    found = match_loss(rows(train, [t + slope * (2 - t) for t in train]), loss)
    assert found is not None
    assert found.gap_loss == pytest.approx(slope * (2 - loss), abs=1e-9)


def test_the_first_crossing_counts() -> None:
    found = match_loss(rows([2.0, 0.5, 1.5, 0.4], [2.0, 1.0, 9.0, 9.0]), 0.6)
    assert found is not None
    assert found.step < 10


def test_a_loss_that_is_not_reached_gives_nothing() -> None:
    curve = rows([2.0, 1.0], [2.0, 1.5])
    assert match_loss(curve, 0.9) is None
    assert match_loss(curve, 2.5) is None  # it starts below
    assert match_loss([], 1.0) is None
    exact = match_loss(curve, 2.0)
    assert exact is not None
    assert exact.step == 0


def test_common_loss_is_the_worst_of_the_best() -> None:
    assert common_loss([rows([2, 0.1], [2, 2]), rows([2, 0.4, 0.9], [2, 2, 2])]) == 0.4
    assert deepest([]) == math.inf
    assert common_loss([]) == math.inf
