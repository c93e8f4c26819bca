"""Confusions, counted by hand and compared with what must hold of any."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vision_attn.detection.confusion import confusion


def truth(image: int, category: int, x: float, crowd: int = 0, side: float = 10.0) -> dict:
    return {"image_id": image, "category_id": category, "bbox": [x, 0.0, side, side], "iscrowd": crowd}


def found(image: int, category: int, x: float, score: float, side: float = 10.0) -> dict:
    return {"image_id": image, "category_id": category, "bbox": [x, 0.0, side, side], "score": score}


def test_every_kind_of_mistake_is_counted():
    objects = [truth(1, 3, 0), truth(1, 7, 20), truth(2, 7, 0), truth(2, 3, 50, crowd=1, side=40)]
    detections = [
        found(1, 3, 1, 0.9),  # right
        found(1, 3, 2, 0.8),  # the same object again
        found(1, 3, 21, 0.7),  # a 7 taken for a 3
        found(2, 7, 60, 0.6),  # on a crowd: neither for nor against
        found(2, 3, 200, 0.5),  # nothing there
        found(2, 7, 0, 0.1),  # right, but below the threshold
    ]
    result = confusion(objects, detections, [3, 7], threshold=0.3)
    assert result.counts.tolist() == [[1, 0, 0], [1, 0, 1], [2, 0, 0]]
    assert result.threshold == 0.3
    assert result.f1 == pytest.approx(2 * 1 / (4 + 3))


def test_the_best_threshold_is_found():
    objects = [truth(1, 3, 0), truth(2, 3, 0)]
    detections = [found(1, 3, 0, 0.9), found(2, 3, 0, 0.6), found(2, 3, 30, 0.4), found(1, 3, 30, 0.2)]
    result = confusion(objects, detections, [3])
    assert (result.threshold, result.f1) == (0.6, 1.0)
    assert result.counts.tolist() == [[2, 0], [0, 0]]


def test_nothing_found_and_nothing_there():
    assert confusion([], [], [3, 7]).counts.sum() == 0
    result = confusion([truth(1, 7, 0)], [], [3, 7])
    assert result.counts.tolist() == [[0, 0, 0], [0, 0, 1], [0, 0, 0]]
    assert result.f1 == 0
    result = confusion([], [found(1, 7, 0, 0.5)], [3, 7], threshold=0.0)
    assert result.counts.tolist() == [[0, 0, 0], [0, 0, 0], [0, 1, 0]]


boxes = st.tuples(st.integers(1, 3), st.sampled_from([3, 7, 20]), st.integers(0, 40), st.floats(0.01, 1))


@settings(max_examples=60, deadline=None)
@given(st.lists(boxes, max_size=6), st.lists(boxes, max_size=8), st.floats(0, 1))
def test_objects_and_detections_are_counted_once(objects, detections, threshold):
    plain = [truth(i, c, x) for i, c, x, _ in objects]
    some = [found(i, c, x, score) for i, c, x, score in detections]
    counts = confusion(plain, some, [3, 7, 20], threshold=threshold).counts
    per_class = torch.tensor([sum(a["category_id"] == c for a in plain) for c in (3, 7, 20)])
    assert (counts >= 0).all()
    assert counts[:3].sum(1).tolist() == per_class.tolist()
    kept = [d for d in some if d["score"] >= threshold]
    assert counts[:, :3].sum() == len(kept)
    best = confusion(plain, some, [3, 7, 20])
    assert best.f1 >= confusion(plain, some, [3, 7, 20], threshold=threshold).f1 - 1e-9
