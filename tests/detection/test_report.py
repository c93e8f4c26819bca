"""Average precision with non-maximum suppression beside without, and the table of classes."""

from __future__ import annotations

import io
import math

import pytest
from rich.console import Console

from vision_attn.detection.coco_eval import evaluate
from vision_attn.detection.report import class_table, nms_beside, with_nms

BOXES = [[10, 10, 40, 30], [60, 15, 30, 50], [100, 90, 25, 25]]


@pytest.fixture
def truth():
    """Two images with three objects of two classes each; the third class has none."""
    images = [{"id": 4}, {"id": 9}]
    categories = [{"id": 1, "name": "ant"}, {"id": 5, "name": "bee [sic]"}, {"id": 6, "name": "cat"}]
    boxes = [
        {"image_id": image["id"], "category_id": (1, 5, 5)[i], "bbox": box}
        for image in images
        for i, box in enumerate(BOXES)
    ]
    return {"images": images, "annotations": boxes, "categories": categories}


def found(truth, shift=0.0, less=0.0):
    return [
        {**a, "bbox": [a["bbox"][0] + shift, *a["bbox"][1:]], "score": 0.9 - 0.05 * i - less}
        for i, a in enumerate(truth["annotations"])
    ]


def test_each_object_once_needs_no_suppression(truth):
    evaluation = evaluate(truth, found(truth, shift=1.0))
    for iou in (0.0, 0.3, 0.7):
        after = with_nms(evaluation, iou)
        assert after.summary() == pytest.approx(evaluation.summary(), nan_ok=True)
        assert after.detections == evaluation.detections
    assert set(nms_beside(evaluation)) == {"ap_nms50", "ap_nms70"}


def test_doubles_are_suppressed(truth):
    """Each object found twice, the second time a little beside: suppression brings the lost precision back."""
    once = evaluate(truth, found(truth))
    twice = evaluate(truth, found(truth) + found(truth, shift=4.0, less=0.01))
    assert twice.summary()["ap"] < once.summary()["ap"] - 0.1
    assert with_nms(twice, 0.5).summary() == pytest.approx(once.summary(), nan_ok=True)
    assert with_nms(twice, 0.95).summary()["ap"] == pytest.approx(twice.summary()["ap"])
    assert nms_beside(twice)["ap_nms50"] == pytest.approx(once.summary()["ap"])


def test_true_neighbours_are_lost_to_suppression(truth):
    """Two objects of one class that overlap: here suppression costs recall, and the number says so."""
    truth["annotations"] += [{**a, "bbox": [a["bbox"][0] + 4, *a["bbox"][1:]]} for a in truth["annotations"]]
    evaluation = evaluate(truth, found(truth))
    assert with_nms(evaluation, 0.5).summary()["ap"] < evaluation.summary()["ap"] - 0.3


def test_other_classes_and_images_do_not_suppress(truth):
    double = [{**d, "category_id": 6, "score": d["score"] - 0.01} for d in found(truth)]
    evaluation = evaluate(truth, found(truth) + double)
    assert len(with_nms(evaluation, 0.1).detections) == 12


def test_nothing_found(truth):
    assert with_nms(evaluate(truth, []), 0.5).summary()["ap"] == 0.0
    part = with_nms(evaluate(truth, found(truth), image_ids=[9]), 0.5)
    assert part.images == 1
    assert math.isnan(with_nms(evaluate(truth, [], image_ids=[])).summary()["ap"])


def test_table(truth):
    console = Console(width=100, record=True, file=io.StringIO())
    console.print(class_table(evaluate(truth, found(truth)[:4])))
    lines = console.export_text().splitlines()
    order = [next(i for i, line in enumerate(lines) if name in line) for name in ("ant", "bee [sic]", "cat")]
    assert order == sorted(order)
    assert "1.000" in lines[order[0]]
    assert lines[order[2]].count("–") == 4


def test_what_the_verb_prints(truth, capsys):
    from vision_attn.cli.evaluate import _report_detections

    _report_detections("test", evaluate(truth, found(truth)))
    out = capsys.readouterr().out
    assert "test/ap_nms50  1.0000  with non-maximum suppression at IoU 0.5" in out
    assert "test/ap_nms70" in out
    assert "bee [sic]" in out
