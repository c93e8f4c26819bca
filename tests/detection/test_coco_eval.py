"""Average precision equals pycocotools' on real and made-up annotations, and survives what training does to it."""

from __future__ import annotations

import contextlib
import io
import json
import math
import pickle
import sys

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vision_attn.detection.coco_eval import CocoMetric, evaluate
from vision_attn.errors import UserError

# in the order of pycocotools' stats
NUMBERS = "ap ap50 ap75 ap_small ap_medium ap_large ar_1 ar_10 ar_100 ar_small ar_medium ar_large"


def made_up(images=13, categories=5, crowds=True, seed=0, most=7):
    """Ground truth with crowds, an image and a category without objects, ids that are not contiguous, one area 0."""
    draw = np.random.default_rng(seed)
    truth = {
        "images": [{"id": 7 * i + 3, "width": 211, "height": 173} for i in range(images)],
        "categories": [{"id": 3 * c + 2, "name": f"kind {c}"} for c in range(categories)],
        "annotations": [],
    }
    for image in truth["images"][1:]:
        for _ in range(draw.integers(1, most)):
            x, y, w, h = draw.uniform((0, 0, 3, 3), (150, 120, 140, 130)).round(2).tolist()
            category = 3 * int(draw.integers(0, max(categories - 1, 1))) + 2
            annotation = {"id": len(truth["annotations"]) + 1, "image_id": image["id"], "category_id": category}
            annotation |= {"bbox": [x, y, w, h], "area": w * h * 0.7, "iscrowd": int(crowds and draw.random() < 0.15)}
            truth["annotations"].append(annotation)
    if truth["annotations"]:
        truth["annotations"][0] |= {"bbox": [5.0, 5.0, 0.0, 4.0], "area": 0.0}
    return truth


def jittered(truth, seed=0, noise=0.12, extra=3, drop=0.15, ties=False):
    """Detections near the objects, some twice, some of the wrong class, and some of nothing."""
    draw = np.random.default_rng(seed)
    categories = [c["id"] for c in truth["categories"]]
    found = []
    for a in truth["annotations"]:
        for _ in range(int(draw.integers(1, 3))):
            if draw.random() < drop:
                continue
            x, y, w, h = a["bbox"]
            dx, dy, dw, dh = draw.normal(0, noise, 4)
            box = [x + dx * w, y + dy * h, w * math.exp(dw), h * math.exp(dh)]
            category = a["category_id"] if draw.random() < 0.85 else int(draw.choice(categories))
            found.append({"image_id": a["image_id"], "category_id": category, "bbox": box, "score": draw.random()})
    for image in truth["images"]:
        for _ in range(int(draw.integers(0, extra + 1))):
            box = draw.uniform((0, 0, 2, 2), (150, 150, 90, 90)).tolist()
            category = int(draw.choice(categories))
            found.append({"image_id": image["id"], "category_id": category, "bbox": box, "score": draw.random()})
    for d in found:
        d["score"] = round(float(d["score"]), 1 if ties else 9)
        d["bbox"] = np.float32(d["bbox"]).astype(float).tolist()
        d["score"] = float(np.float32(d["score"]))
    return found


def reference(truth, found, images=None, max_dets=(1, 10, 100)):
    """pycocotools' evaluator with its twelve numbers."""
    coco, cocoeval = pytest.importorskip("pycocotools.coco"), pytest.importorskip("pycocotools.cocoeval")
    with contextlib.redirect_stdout(io.StringIO()):
        ours = coco.COCO()
        ours.dataset = json.loads(json.dumps(truth))
        ours.createIndex()
        evaluator = cocoeval.COCOeval(ours, ours.loadRes(json.loads(json.dumps(found))), "bbox")
        if images is not None:
            evaluator.params.imgIds = list(images)
        evaluator.params.maxDets = list(max_dets)
        evaluator.evaluate()
        evaluator.accumulate()
        if max_dets == (1, 10, 100):
            evaluator.summarize()
    return evaluator


def as_batches(truth, found, size=4):
    """The same detections as ``update`` takes them: corners, tensors."""
    images = [image["id"] for image in truth["images"]]
    for start in range(0, len(images), size):
        chunk, batch = images[start : start + size], []
        for image in chunk:
            rows = [d for d in found if d["image_id"] == image]
            boxes = torch.tensor([d["bbox"] for d in rows], dtype=torch.float64).reshape(-1, 4)
            boxes[:, 2:] += boxes[:, :2]
            scores = torch.tensor([d["score"] for d in rows])
            batch.append({"boxes": boxes, "scores": scores, "labels": torch.tensor([d["category_id"] for d in rows])})
        yield chunk, batch


def equal(numbers, evaluator):
    for name, expected in zip(NUMBERS.split(), evaluator.stats, strict=True):
        if expected == -1:
            assert math.isnan(numbers[name]), name
        else:
            assert numbers[name] == pytest.approx(expected, abs=1e-9), name


@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_equals_pycocotools_on_made_up_sets(seed, ties):
    truth = made_up(seed=seed)
    found = jittered(truth, seed, ties=ties)
    expected = reference(truth, found)
    got = evaluate(truth, found)
    assert sum(a["iscrowd"] for a in truth["annotations"]) > 0
    equal(got.summary(), expected)
    assert 0.02 < got.summary()["ap"] < 0.9  # neither of them says nothing
    for ours, name in ((got.precision, "precision"), (got.recall, "recall"), (got.scores, "scores")):
        np.testing.assert_allclose(ours, expected.eval[name], rtol=0, atol=1e-9)


@pytest.mark.parametrize(
    ("file", "noise"),
    [("coco-320/annotations/instances_val2017", 0.1), ("bccd/annotations/instances_test", 0.2)],
)
def test_equals_pycocotools_on_real_annotations(data_root, file, noise):
    path = data_root / f"{file}.json"
    if not path.is_file():
        pytest.skip(f"no {path}")
    truth = json.loads(path.read_text())
    truth["images"] = truth["images"][:120]
    shown = {image["id"] for image in truth["images"]}
    truth["annotations"] = [a for a in truth["annotations"] if a["image_id"] in shown]
    if "coco" in file:
        assert sum(a["iscrowd"] for a in truth["annotations"]) > 5
    found = jittered(truth, seed=4, noise=noise)
    expected = reference(truth, found)
    equal(evaluate(truth, found).summary(), expected)
    subset = sorted(shown)[::3]
    equal(evaluate(truth, found, image_ids=subset).summary(), reference(truth, found, subset))


def test_batches_give_the_same_as_a_file():
    truth = made_up()
    found = jittered(truth)
    metric = CocoMetric(truth)
    for ids, batch in as_batches(truth, found):
        metric.update(torch.tensor(ids), batch)
    numbers = metric.compute()
    # left + width − left is not width: single precision corners decide, for both
    equal(numbers, reference(truth, metric.results()[1]))
    assert numbers["ap"] == pytest.approx(evaluate(truth, found).summary()["ap"], abs=1e-4)
    rows = numbers["per_class"]
    assert [row["name"] for row in rows] == [f"kind {c}" for c in range(5)]
    assert math.isnan(rows[-1]["ap"])
    assert rows[-1]["objects"] == 0
    assert np.mean([row["ap"] for row in rows[:-1]]) == pytest.approx(numbers["ap"], abs=1e-12)
    assert sum(row["objects"] for row in rows) == sum(not a["iscrowd"] for a in truth["annotations"])
    metric.reset()
    assert metric.evaluation.images == len(truth["images"])


def test_contiguous_labels_become_category_ids():
    truth = made_up()
    ids = [c["id"] for c in truth["categories"]]
    plain, mapped = CocoMetric(truth), CocoMetric(truth, category_ids=ids)
    for images, batch in as_batches(truth, jittered(truth)):
        plain.update(images, batch)
        inside = [d | {"labels": torch.tensor([ids.index(i) for i in d["labels"].tolist()]).long()} for d in batch]
        mapped.update(images, inside)
    assert plain.results() == mapped.results()
    mapped.update([3], [{"boxes": torch.zeros(1, 4), "scores": torch.ones(1), "labels": torch.tensor([5])}])
    mapped.reset()
    mapped.update([3], [{"boxes": torch.zeros(1, 4), "scores": torch.ones(1), "labels": torch.tensor([5])}])
    with pytest.raises(UserError, match="label 5, but there are 5"):
        mapped.compute()


def test_only_images_that_were_shown_count():
    truth = made_up()
    found = jittered(truth)
    metric = CocoMetric(truth)
    shown = []
    for ids, batch in list(as_batches(truth, found))[:2]:
        metric.update(ids, batch)
        shown += ids
    numbers = metric.compute()
    rows = [d for d in metric.results()[1]]
    equal(numbers, reference(truth, rows, shown))
    assert metric.evaluation.images == 8
    for ids, batch in as_batches(truth, found, size=3):  # again, and the others: each counts once
        metric.update(ids, batch)
    twice = metric.compute()
    assert metric.evaluation.images == 13
    assert twice["ap"] == pytest.approx(evaluate(truth, metric.results()[1]).summary()["ap"], abs=1e-12)
    assert len(metric.results()[1]) == len(found)


def nothing():
    return {"boxes": torch.zeros(0, 4), "scores": torch.zeros(0), "labels": torch.zeros(0, dtype=torch.int64)}


def test_nothing_found_nothing_to_find():
    truth = made_up()
    metric = CocoMetric(truth)
    metric.update([3, 10], [nothing(), nothing()])
    numbers = metric.compute()
    assert numbers["ap"] == numbers["ar_100"] == 0.0
    metric.reset()
    metric.update([3], [nothing()])  # an image without objects
    assert math.isnan(metric.compute()["ap"])
    metric.reset()
    metric.update([3], [{"boxes": torch.ones(1, 4), "scores": torch.ones(1), "labels": torch.tensor([2])}])
    assert math.isnan(metric.compute()["ap"])
    metric.reset()
    with pytest.warns(UserWarning, match="before the ``update``"):
        assert math.isnan(metric.compute()["ap"])
    bare = {"images": truth["images"], "annotations": [], "categories": truth["categories"]}
    assert math.isnan(evaluate(bare, jittered(truth)).summary()["ap"])
    assert math.isnan(evaluate(bare | {"categories": []}, []).summary()["ap"])


def test_one_class_perfect_and_found_twice():
    truth = made_up(categories=1, crowds=False)
    del truth["annotations"][0]
    perfect = [
        {"image_id": a["image_id"], "category_id": 2, "bbox": a["bbox"], "score": 0.9} for a in truth["annotations"]
    ]
    numbers = evaluate(truth, perfect).summary()
    assert numbers["ap"] == numbers["ap50"] == numbers["ar_100"] == pytest.approx(1.0)
    assert evaluate(truth, perfect + [d | {"score": 0.8} for d in perfect]).summary()["ap"] == pytest.approx(1.0)
    apart = [d | {"score": 0.9 - i / 100} for i, d in enumerate(perfect)]  # each twin before the next object
    doubled = apart + [d | {"score": d["score"] - 0.005} for d in apart]
    assert 0.4 < evaluate(truth, doubled).summary()["ap"] < 0.7
    equal(evaluate(truth, doubled).summary(), reference(truth, doubled))
    equal(numbers, reference(truth, perfect))


def test_more_than_100_objects_need_a_larger_cap():
    boxes = [[13 * (i % 15), 13 * (i // 15), 11, 11] for i in range(150)]
    truth = {"images": [{"id": 1}], "categories": [{"id": 1, "name": "cell"}]}
    common = {"image_id": 1, "category_id": 1, "area": 121, "iscrowd": 0}
    truth["annotations"] = [{"id": i + 1, "bbox": b} | common for i, b in enumerate(boxes)]
    found = [{"image_id": 1, "category_id": 1, "bbox": b, "score": 1 - i / 200} for i, b in enumerate(boxes)]
    assert evaluate(truth, found).summary()["ap"] < 0.7
    many = evaluate(truth, found, max_dets=300)
    numbers = many.summary()
    assert numbers["ap"] == numbers["ar_300"] == pytest.approx(1.0)
    assert numbers["ar_100"] == pytest.approx(100 / 150)
    expected = reference(truth, found, max_dets=(1, 10, 100, 300))
    np.testing.assert_allclose(many.precision, expected.eval["precision"], rtol=0, atol=1e-9)
    assert set(evaluate(truth, found, max_dets=5).summary()) >= {"ap", "ar_1", "ar_5"}


def test_curves():
    truth = made_up()
    found = evaluate(truth, jittered(truth))
    curves = found.curves(0.75)
    assert list(curves) == [f"kind {c}" for c in range(4)]  # the fifth has no object
    for k, curve in enumerate(curves.values()):
        assert curve["precision"].mean() == pytest.approx(found.per_class()[k]["ap75"], abs=1e-12)
        assert (np.diff(curve["precision"]) <= 1e-12).all()
        reached = curve["precision"] > 0
        assert (np.diff(curve["score"][reached]) <= 0).all()
    for iou, area in ((0.6, "tiny"), (0.42, "all"), (float("nan"), "all")):
        with pytest.raises(UserError, match="No curve"):
            found.curves(iou, area)


def test_annotation_ids_of_others():
    """Ids of 0, ids given twice, no area, no iscrowd: what such a file means, not what COCO's code makes of it."""
    truth = made_up(crowds=False)
    found = jittered(truth)
    expected = evaluate(truth, found).summary()
    for a in truth["annotations"]:
        del a["iscrowd"]
        a["id"] = 0
    assert evaluate(truth, found).summary() == pytest.approx(expected, nan_ok=True)
    for a in truth["annotations"]:
        del a["area"]
    assert evaluate(truth, found).summary()["ap"] == pytest.approx(expected["ap"])


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 6), st.integers(1, 4), st.integers(1, 12))
def test_any_set_equals_pycocotools(seed, images, categories, most):
    truth = made_up(images=images, categories=categories, seed=seed, most=most + 1)
    found = jittered(truth, seed, ties=seed % 2 == 0)
    if not found:  # pycocotools cannot load an empty list
        return
    equal(evaluate(truth, found).summary(), reference(truth, found))


@settings(max_examples=15, deadline=None)
@given(st.integers(0, 10**6), st.randoms())
def test_order_of_images_does_not_matter(seed, random):
    truth = made_up(images=6, seed=seed)
    batches = list(as_batches(truth, jittered(truth, seed), size=1))
    first, second = CocoMetric(truth), CocoMetric(truth)
    for ids, batch in batches:
        first.update(ids, batch)
    random.shuffle(batches)
    for ids, batch in batches:
        second.update(ids, batch)
    for name, value in first.compute().items():
        if name != "per_class":
            assert second.compute()[name] == pytest.approx(value, abs=1e-12, nan_ok=True)


def test_wrong_calls_are_named(monkeypatch):
    truth = made_up()
    metric = CocoMetric(truth)
    with pytest.raises(UserError, match="Image 4 is not among the 13"):
        metric.update([3, 4], [nothing(), nothing()])
    with pytest.raises(UserError, match="1 image ids came with detections of 2"):
        metric.update([3], [nothing(), nothing()])
    one = {"boxes": torch.ones(1, 4), "scores": torch.ones(1), "labels": torch.tensor([2])}
    with pytest.raises(UserError, match="Image 10 came with 1 boxes, 2 scores, 1 labels"):
        metric.update([3, 10], [nothing(), one | {"scores": torch.ones(2)}])
    assert metric.results() == ([], [])
    for bad in ({"scores": torch.tensor([math.nan])}, {"boxes": torch.full((1, 4), math.inf)}):
        metric.reset()
        metric.update([10], [one | bad])
        with pytest.raises(UserError, match="Image 10: a detection holds NaN"):
            metric.compute()
    for bad in (0, -3, 1.5, True, "all"):
        with pytest.raises(UserError, match="max_dets"):
            CocoMetric(truth, max_dets=bad)
    with pytest.raises(UserError, match="of image 99"):
        evaluate(truth, [{"image_id": 99, "category_id": 2, "bbox": [0, 0, 1, 1], "score": 1.0}])
    with pytest.raises(UserError, match="Image 99"):
        evaluate(truth, [], image_ids=[3, 99])
    monkeypatch.setitem(sys.modules, "faster_coco_eval", None)
    with pytest.raises(UserError, match="pip install faster-coco-eval"):
        CocoMetric(truth)


def test_travels_to_another_process():
    metric = CocoMetric(made_up(), category_ids=[2, 5, 8, 11, 14])
    metric.update([3], [nothing()])
    copy = pickle.loads(pickle.dumps(metric))
    assert copy.results() == metric.results()
    assert not metric.state_dict()  # checkpoints do not carry detections


def _process(rank, folder, truth, found, shares):
    """One of two processes: takes its share of the batches and computes."""
    import torch.distributed as dist

    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    metric = CocoMetric(truth)
    batches = list(as_batches(truth, found, size=1))
    for number in shares[rank]:
        metric.update(*batches[number])
    numbers = metric.compute()
    (folder / f"{rank}.json").write_text(json.dumps([numbers, metric.evaluation.images, len(metric.results()[1])]))
    dist.destroy_process_group()


@pytest.mark.parametrize(
    "shares", [(range(11), range(11, 13)), (range(13), range(0)), (range(0), range(13)), (range(9), range(13))]
)
def test_two_processes_with_uneven_shares_equal_one(tmp_path, shares):
    """One process has most of the images, one has none, one repeats images of the other; none deadlocks."""
    truth = made_up()
    found = jittered(truth)
    batches = list(as_batches(truth, found, size=1))
    metric = CocoMetric(truth)
    for ids, batch in batches:
        metric.update(ids, batch)
    expected = json.loads(json.dumps(metric.compute()))
    arguments = (tmp_path, truth, found, [list(share) for share in shares])
    torch.multiprocessing.start_processes(_process, arguments, nprocs=2, start_method="fork")
    for rank in range(2):
        numbers, images, local = json.loads((tmp_path / f"{rank}.json").read_text())
        assert images == 13
        assert local == sum(len(batches[i][1][0]["scores"]) for i in shares[rank])  # each has its own states back
        rows, theirs = numbers.pop("per_class"), expected["per_class"]
        assert [row["objects"] for row in rows] == [row["objects"] for row in theirs]
        for name, value in numbers.items():
            assert value == pytest.approx(expected[name], abs=1e-12, nan_ok=True)
