from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from vision_attn.contrast.config import Arm
from vision_attn.contrast.measures import (
    accuracy_and_loss,
    best_row,
    calibration_error,
    evaluation_steps,
    memorised,
    predict,
    turning_point,
)
from vision_attn.contrast.subsets import sample_rows
from vision_attn.data.sets import MemorySet

CLASSES = 7


def test_accuracy_and_loss_by_hand():
    logits, labels = torch.randn(31, CLASSES), torch.randint(0, CLASSES, (31,))
    right, loss = 0, 0.0
    for row, label in zip(logits.tolist(), labels.tolist(), strict=True):
        right += row.index(max(row)) == label
        loss += math.log(sum(math.exp(x) for x in row)) - row[label]
    found = accuracy_and_loss(logits, labels, "x")
    assert found == {"x_acc": pytest.approx(right / 31), "x_loss": pytest.approx(loss / 31)}


def test_calibration_error_by_hand():
    logits, labels = 3 * torch.randn(501, CLASSES), torch.randint(0, CLASSES, (501,))
    bins: list[list[tuple[float, bool]]] = [[] for _ in range(15)]
    for row, label in zip(logits.double().softmax(1).tolist(), labels.tolist(), strict=True):
        confidence = max(row)
        bins[min(14, int(confidence * 15))].append((confidence, row.index(confidence) == label))
    expected = sum(abs(sum(c for c, _ in part) - sum(r for _, r in part)) for part in bins) / 501
    assert calibration_error(logits, labels) == pytest.approx(expected, abs=1e-6)
    sure = torch.nn.functional.one_hot(labels, CLASSES) * 100.0
    assert calibration_error(sure, labels) == pytest.approx(0, abs=1e-6)
    assert calibration_error(sure.roll(1, 1), labels) == pytest.approx(1, abs=1e-6)


def test_memorised_counts_wrong_labels_given_back():
    true = torch.tensor([0, 1, 2, 3, 4, 5])
    given_labels = torch.tensor([1, 1, 3, 3, 0, 5])  # three are wrong: rows 0, 2, 4
    said = torch.tensor([1, 1, 2, 3, 0, 0])  # rows 0 and 4 are given back
    logits = torch.nn.functional.one_hot(said, CLASSES).float()
    assert memorised(logits, given_labels, true) == pytest.approx(2 / 3)


def test_turning_point_and_best_row():
    curve = [
        {"step": step, "val_loss": loss, "val_acc": acc}
        for step, loss, acc in [(1, 2.0, 0.1), (3, 1.25, 0.5), (9, 1.25, 0.7), (20, 1.75, 0.7)]
    ]
    assert turning_point(curve) == {"turn_step": 3, "turn_loss": 1.25, "turn_rise": 0.5}
    assert best_row(curve)["step"] == 9
    assert turning_point(curve[:2])["turn_rise"] == 0


@given(st.integers(1, 5000), st.integers(1, 40))
def test_evaluation_steps_end_with_the_last(steps, evaluations):
    found = evaluation_steps(steps, evaluations)
    assert found[-1] == steps
    assert found[0] >= 1
    assert found == sorted(set(found))
    assert len(found) <= evaluations


def sorted_set(counts):
    """Images that come class by class, as those of a folder; every pixel of an image is its number."""
    labels = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts))
    images = torch.arange(len(labels), dtype=torch.uint8)[:, None, None, None].expand(-1, 3, 2, 2)
    return MemorySet(images, labels, torch.arange(len(labels)))


@pytest.mark.parametrize("limit", [7, 21, 30])
def test_a_limit_takes_all_classes_of_a_set_in_the_order_of_its_classes(plan, limit):
    images = sorted_set([40, 20, 10])
    augmenter = plan.data.augmenter(Arm(), 0, False)
    model = torch.nn.Flatten()
    seen = [predict(model, images, augmenter, device=torch.device("cpu"), limit=limit) for _ in range(2)]
    torch.testing.assert_close(seen[0], seen[1])  # the same ones every time
    counts = seen[0][1].bincount(minlength=3).double()
    torch.testing.assert_close(counts, limit * torch.tensor([4.0, 2.0, 1.0]).double() / 7, rtol=0, atol=1.0)


def test_a_sample_is_in_the_order_of_the_set_and_not_the_first_ones():
    images = sorted_set([40, 40])
    rows = sample_rows(images, 20)
    assert rows.tolist() == sorted(set(rows.tolist()))
    assert rows.tolist() != list(range(20))
    assert images.labels[rows].bincount().tolist() == [10, 10]
    assert sample_rows(images, 100).tolist() == list(range(80))


def test_predict_is_in_evaluation_mode_and_in_order(plan):
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Dropout(0.5), torch.nn.Linear(3 * 64, CLASSES)).train()
    augmenter = plan.data.augmenter(Arm(), 0, False)
    logits, labels = predict(model, plan.data.train, augmenter, device=torch.device("cpu"))
    assert model.training
    assert torch.equal(labels, plan.data.train.labels)
    expected = model.eval()(augmenter.normalize(plan.data.train.images))
    torch.testing.assert_close(logits, expected)
    some, _ = predict(model, plan.data.train, augmenter, device=torch.device("cpu"), limit=13)
    torch.testing.assert_close(some, expected[sample_rows(plan.data.train, 13)])
