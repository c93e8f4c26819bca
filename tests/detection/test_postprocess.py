"""Detections equal transformers' and follow the definitions."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from transformers import ConditionalDetrImageProcessor, DetrImageProcessor

from vision_attn.detection.postprocess import nms, postprocess
from vision_attn.errors import UserError

SIZES = torch.tensor([[97, 61], [31, 43], [480, 640]])


def test_softmax_equals_transformers(make):
    """All queries, by score; transformers leaves them in their order."""
    outputs = make.outputs(3)
    theirs = SimpleNamespace(logits=outputs["pred_logits"], pred_boxes=outputs["pred_boxes"])
    expected = DetrImageProcessor().post_process_object_detection(theirs, threshold=0.0, target_sizes=SIZES)
    for mine, other in zip(postprocess(outputs, SIZES, "softmax"), expected, strict=True):
        order = other["scores"].argsort(descending=True)
        torch.testing.assert_close(mine["scores"], other["scores"][order])
        assert mine["labels"].tolist() == other["labels"][order].tolist()
        torch.testing.assert_close(mine["boxes"], other["boxes"][order])
        assert mine["queries"].tolist() == order.tolist()


def test_sigmoid_equals_transformers(make):
    outputs = make.outputs(3, "sigmoid", queries=29)
    theirs = SimpleNamespace(logits=outputs["pred_logits"], pred_boxes=outputs["pred_boxes"])
    processor = ConditionalDetrImageProcessor()
    expected = processor.post_process_object_detection(theirs, threshold=0.3, target_sizes=SIZES, top_k=37)
    got = postprocess(outputs, SIZES.tolist(), "sigmoid", topk=37, threshold=0.3)
    for image, (mine, other) in enumerate(zip(got, expected, strict=True)):
        for key in ("scores", "labels", "boxes"):
            torch.testing.assert_close(mine[key], other[key])
        logits = outputs["pred_logits"][image, mine["queries"], mine["labels"]]
        torch.testing.assert_close(mine["scores"], logits.sigmoid())
        assert 0 < len(mine["scores"]) <= 37


@pytest.mark.parametrize("classification", ["softmax", "sigmoid"])
def test_threshold_and_topk_keep_the_best(make, classification):
    outputs = make.outputs(3, classification)
    everything = postprocess(outputs, SIZES, classification, topk=10_000)
    some = postprocess(outputs, SIZES, classification, topk=7, threshold=0.5)
    for most, few in zip(everything, some, strict=True):
        k = min(7, int((most["scores"] > 0.5).sum()))
        assert len(most["scores"]) == (13 if classification == "softmax" else 13 * 5)
        for key, values in few.items():
            torch.testing.assert_close(values, most[key][:k])
        assert (most["scores"].diff() <= 0).all()


@pytest.mark.parametrize("classification", ["softmax", "sigmoid"])
@pytest.mark.parametrize("threshold", [0.0, 0.5])
@pytest.mark.parametrize("key", ["pred_logits", "pred_boxes"])
@pytest.mark.parametrize("where", ["one number", "everything"])
def test_nan_is_an_error_that_names_the_image(make, classification, threshold, key, where):
    """And not an empty image; a single number of a query that nobody would see is enough."""
    outputs = make.outputs(3, classification)
    with torch.no_grad():
        chosen = outputs[key][1, 7, 2] if where == "one number" else outputs[key][1]
        chosen.fill_(float("nan"))
    with pytest.raises(UserError, match=r"^image 1 of the batch: predictions are NaN"):
        postprocess(outputs, SIZES, classification, topk=2, threshold=threshold)
    with pytest.raises(UserError, match=r"^b\.png: predictions are NaN. The weights have probably diverged"):
        postprocess(outputs, SIZES, classification, threshold=threshold, names=["a.png", "b.png", "c.png"])


@pytest.mark.parametrize("classification", ["softmax", "sigmoid"])
def test_classes_that_are_ruled_out_are_no_nan(make, classification):
    outputs = make.outputs(3, classification)
    with torch.no_grad():
        outputs["pred_logits"][:, :, 1] = -torch.inf
    for found in postprocess(outputs, SIZES, classification, threshold=0.1):
        assert (found["labels"] != 1).all()


def test_nothing_above_the_threshold_is_an_empty_detection(make):
    for found in postprocess(make.outputs(3), SIZES, "softmax", threshold=1.0):
        assert found["scores"].shape == (0,)
        assert found["boxes"].shape == (0, 4)
        assert found["labels"].dtype == torch.int64
    empty = nms(postprocess(make.outputs(3), SIZES, "softmax", threshold=1.0))
    assert [len(found["scores"]) for found in empty] == [0, 0, 0]


def test_bfloat16_boxes_are_exact_to_float32(make):
    outputs = {key: value.bfloat16() for key, value in make.outputs(3).items() if key != "aux_outputs"}
    exact = {key: value.float() for key, value in outputs.items()}
    for mine, other in zip(postprocess(outputs, SIZES, "softmax"), postprocess(exact, SIZES, "softmax"), strict=True):
        torch.testing.assert_close(mine, other)
        assert mine["boxes"].dtype == torch.float32


def test_nms_drops_lesser_boxes_of_the_same_class():
    boxes = torch.tensor([[0.0, 0, 10, 10], [1, 0, 11, 10], [1, 0, 11, 10], [20, 20, 30, 30]])
    found = {
        "scores": torch.tensor([0.9, 0.8, 0.7, 0.6]),
        "labels": torch.tensor([1, 1, 2, 1]),
        "boxes": boxes,
        "queries": torch.arange(4),
    }
    (kept,) = nms([found])
    assert kept["queries"].tolist() == [0, 2, 3]
    torch.testing.assert_close(kept["boxes"], boxes[[0, 2, 3]])
