"""Detections: in the image's own pixels, whatever it is handed in as and whatever is beside it in the batch."""

from __future__ import annotations

import copy
import json
import sys
import types

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

import vision_attn as va
from vision_attn.detection.boxes import cxcywh_to_xyxy
from vision_attn.detection.inference import Detections, detect, prepare, usual_batch
from vision_attn.errors import UserError

H, W = 83, 61
LABELS = ["ant", "bee", "cat [sic]", "dog", "eel"]
IDS = [3, 4, 11, 13, 90]


def tiny(name="dn_detr_tiny", **kwargs):
    torch.manual_seed(1)
    small = {"embed_dim": 32, "num_heads": 2, "enc_layers": 1, "dec_layers": 2, "num_queries": 7, "img_size": (64, 96)}
    model = va.create_model(name, **{"num_classes": 5, **small, **kwargs})
    for p in model.parameters():
        if p.ndim > 1:
            torch.nn.init.normal_(p, std=1.2 * p[0].numel() ** -0.5)
    model.config |= {"labels": LABELS, "category_ids": IDS}
    model.config["preprocess"] |= {"mean": [0.4, 0.5, 0.6], "std": [0.2, 0.3, 0.25]}
    return model.eval()


@pytest.fixture(scope="module")
def model():
    return tiny()


@pytest.fixture
def pixels():
    return np.random.default_rng(0).integers(0, 256, (H, W, 3), dtype=np.uint8)


def same(results, reference, pixel=1e-3):
    for result in results:
        assert result.labels == reference.labels
        assert result.size == reference.size
        torch.testing.assert_close(result.class_ids, reference.class_ids)
        torch.testing.assert_close(result.queries, reference.queries)
        torch.testing.assert_close(result.scores, reference.scores, rtol=0, atol=1e-5)
        torch.testing.assert_close(result.boxes, reference.boxes, rtol=0, atol=pixel)


def test_every_kind_of_input_gives_the_same_answer(model, pixels, tmp_path):
    picture = Image.fromarray(pixels)
    picture.save(tmp_path / "a.png")
    tensor = torch.from_numpy(pixels).permute(2, 0, 1)
    (reference,) = va.predict(model, pixels, threshold=0)
    assert reference.source == "image 0"
    assert reference.size == (H, W)
    assert len(reference) == 7 * 5
    kinds = [str(tmp_path / "a.png"), tmp_path, picture, pixels / 255.0, pixels.astype(np.uint16) * 257, tensor]
    kinds += [tensor.float() / 255, tensor[None], np.stack([pixels, pixels])]
    results = va.predict(model, kinds, threshold=0, batch_size=4)
    assert len(results) == len(kinds) + 1
    same(results, reference)
    assert [r.source for r in results[:3]] == [str(tmp_path / "a.png")] * 2 + ["image 2"]

    exif = Image.Exif()
    exif[0x0112] = 6  # shown after a quarter turn clockwise
    Image.fromarray(np.rot90(pixels)).save(tmp_path / "turned.png", exif=exif)
    same(va.predict(model, [tmp_path / "turned.png", Image.open(tmp_path / "turned.png")], threshold=0), reference)
    grey = pixels[..., 0]
    (reference,) = va.predict(model, np.stack([grey] * 3, -1), threshold=0)
    Image.fromarray(grey).save(tmp_path / "grey.png")
    Image.fromarray(np.stack([grey] * 3, -1)).convert("CMYK").save(tmp_path / "print.tif")
    same(
        va.predict(model, [tmp_path / "grey.png", grey, grey[..., None], tmp_path / "print.tif"], threshold=0),
        reference,
    )


def test_what_is_found_is_what_the_model_says(model, pixels):
    """Scores, names, category ids and boxes by hand from the model's outputs."""
    (x,) = prepare([Image.fromarray(pixels)], model.config)
    assert x.shape == (3, 87, 64)  # the shorter side 64, the longer below 96
    with torch.no_grad():
        outputs = model(x[None])
    scores = outputs["pred_logits"][0].sigmoid()  # (7, 5)
    corners = cxcywh_to_xyxy(outputs["pred_boxes"][0]) * torch.tensor([W, H, W, H])
    best = scores.flatten().argsort(descending=True)
    threshold = float(scores.flatten()[best[9:11]].mean())
    (found,) = va.predict(model, pixels, threshold=threshold)
    assert len(found) == 10
    assert found.queries.tolist() == (best[:10] // 5).tolist()
    assert found.labels == [LABELS[i] for i in (best[:10] % 5).tolist()]
    assert found.class_ids.tolist() == [IDS[i] for i in (best[:10] % 5).tolist()]
    torch.testing.assert_close(found.boxes, corners[best[:10] // 5], rtol=0, atol=1e-3)
    same(va.predict(model, pixels, threshold=threshold, topk=50), found)
    assert len(va.predict(model, pixels, threshold=0, topk=3)[0]) == 3
    assert len(va.predict(model, pixels, threshold=1.0)[0]) == 0
    half = va.predict(model, pixels)[0]
    assert half.scores.tolist() == [s for s in scores.flatten()[best].tolist() if s > 0.5]


def test_softmax_heads_give_one_class_per_query(pixels):
    model = tiny("detr_tiny")
    (found,) = va.predict(model, pixels, threshold=0)
    assert sorted(found.queries.tolist()) == list(range(7))
    with torch.no_grad():
        logits = model(prepare([Image.fromarray(pixels)], model.config))["pred_logits"]
    best = logits[0].softmax(-1)[:, :-1].max(-1)
    torch.testing.assert_close(found.scores, best.values[found.queries], rtol=0, atol=1e-6)
    assert found.labels == [LABELS[i] for i in best.indices[found.queries].tolist()]


@settings(max_examples=15, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 150), st.integers(1, 150)), min_size=1, max_size=5), st.integers(1, 5))
def test_neighbours_and_batch_size_change_nothing(model, sizes, batch_size):
    """Any sizes in one batch, down to a single pixel: each image as if it were alone."""
    draw = np.random.default_rng(len(sizes))
    images = [draw.integers(0, 256, (h, w, 3), dtype=np.uint8) for h, w in sizes]
    alone = [va.predict(model, image, threshold=0)[0] for image in images]
    for result, reference in zip(va.predict(model, images, threshold=0, batch_size=batch_size), alone, strict=True):
        # a near tie may come out in the other order
        torch.testing.assert_close(result.scores, reference.scores, rtol=0, atol=1e-4)
        assert result.size == reference.size
        key = [sorted(zip(r.queries.tolist(), r.class_ids.tolist(), strict=True)) for r in (result, reference)]
        assert key[0] == key[1]


@pytest.mark.parametrize(
    ("resize", "size", "expected"),
    [
        (None, [96, 64], (87, 64)),
        ("shorter", [64, 70], (69, 51)),
        ("fit", [32, 96], (32, 24)),
        ("stretch", [40, 50], (40, 50)),
        ("shorter", [166, 1333], (225, 166)),
    ],
)
def test_sizes(pixels, resize, size, expected):
    config = {"preprocess": {"size": size, "mean": [0.5] * 3, "std": [0.25] * 3, "resize": resize}}
    (x,) = prepare([Image.fromarray(pixels)], config)
    assert x.shape[1:] == expected
    assert usual_batch(config) >= 1


@pytest.mark.parametrize(
    ("resize", "size"), [("shorter", 57), ("fit", (45, 80)), ("stretch", (40, 50)), ("fit", (99, 99))]
)
def test_pictures_are_prepared_as_in_evaluation(tmp_path, resize, size):
    """The same pixels as the data module's, bit for bit but for normalisation, whichever way images are resized."""
    from vision_attn.data.detection import DetectionData

    draw, images = np.random.default_rng(3), []
    for number, (h, w) in enumerate([(83, 61), (40, 77), (61, 83)]):
        low = Image.fromarray(draw.integers(0, 256, (7, 5, 3), dtype=np.uint8))
        low.resize((w, h)).save(tmp_path / f"{number}.png")
        images.append({"id": number + 1, "file_name": f"{number}.png", "width": w, "height": h})
    boxes = [
        {"id": i, "image_id": i, "category_id": 3, "bbox": [5, 6, 20, 30], "area": 600, "iscrowd": 0} for i in (1, 2, 3)
    ]
    truth = {"images": images, "annotations": boxes, "categories": [{"id": 3, "name": "ant"}]}
    (tmp_path / "a.json").write_text(json.dumps(truth))
    same_file = {
        f"{split}_{kind}": value for split in ("train", "val") for kind, value in (("json", "a.json"), ("images", "."))
    }
    data = DetectionData("coco", tmp_path, img_size=size, resize=resize, overlap="allow", **same_file)
    data.setup("validate")
    batch = data.sample_batch(3, split="val")
    config = {"preprocess": data.preprocess}
    pictures = [Image.open(tmp_path / f"{number}.png").convert("RGB") for number in range(3)]
    for x, image, target in zip(prepare(pictures, config), batch["image"], batch["targets"], strict=True):
        h, w = target["size"].tolist()
        torch.testing.assert_close(x, image[:, :h, :w], rtol=0, atol=1e-5)


def test_forms(model, pixels, monkeypatch):
    (found,) = va.predict(model, pixels, threshold=0, topk=4)
    plain = json.loads(json.dumps(found.to_dict()))
    assert plain["size"] == [H, W]
    assert [o["label"] for o in plain["objects"]] == found.labels
    assert plain["objects"][0]["box"] == pytest.approx(found.boxes[0].tolist())
    rows = json.loads(json.dumps(found.to_coco(285)))
    assert {row["image_id"] for row in rows} == {285}
    assert [row["category_id"] for row in rows] == found.class_ids.tolist()
    left, top, width, height = rows[1]["bbox"]
    assert [left, top, left + width, top + height] == pytest.approx(found.boxes[1].tolist(), abs=1e-4)
    monkeypatch.setitem(sys.modules, "supervision", None)
    with pytest.raises(UserError, match="pip install supervision"):
        found.to_supervision()
    fake = types.ModuleType("supervision")
    fake.Detections = lambda **kwargs: kwargs
    monkeypatch.setitem(sys.modules, "supervision", fake)
    given = found.to_supervision()
    assert given["xyxy"].shape == (4, 4)
    assert given["class_id"].tolist() == found.class_ids.tolist()
    assert given["data"]["class_name"].tolist() == found.labels
    empty = Detections(
        torch.zeros(0, 4), torch.zeros(0), [], torch.zeros(0, dtype=torch.int64), torch.zeros(0), (3, 4), "x"
    )
    assert empty.to_coco(1) == empty.to_dict()["objects"] == []
    assert empty.to_supervision()["xyxy"].shape == (0, 4)
    found.boxes.clamp_(min=0)  # ordinary tensors, for whoever gets them


def test_state_of_the_model_is_kept(model, pixels):
    model.train()
    va.predict(model, [pixels, pixels[:40]], batch_size=1)
    assert model.training
    model.eval()
    assert va.predict(model, []) == []


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["detr_tiny", "dn_detr_tiny"])
def test_weights_in_half_precision(name, dtype, pixels):
    half = tiny(name).to(dtype)
    exact = copy.deepcopy(half).float()
    ours, theirs = (va.predict(one, [pixels, pixels[:40]], threshold=0) for one in (half, exact))
    for mine, other in zip(ours, theirs, strict=True):
        assert mine.boxes.dtype == mine.scores.dtype == torch.float32
        torch.testing.assert_close(mine.scores[0], other.scores[0], rtol=0, atol=0.1)
        assert mine.boxes.isfinite().all()


def test_models_without_names(pixels):
    model = tiny(num_classes=4)
    model.config |= {"labels": None, "category_ids": None}
    (found,) = va.predict(model, pixels, threshold=0)
    assert found.labels == [str(i) for i in found.class_ids.tolist()]
    model.config["category_ids"] = [1, 5, 7, 9]
    (found,) = va.predict(model, pixels, threshold=0)
    assert set(found.labels) <= {"1", "5", "7", "9"}


def test_grey_models(pixels):
    model = tiny(in_chans=1)
    model.config["preprocess"] |= {"mean": [0.5], "std": [0.5]}
    (x,) = prepare([Image.fromarray(pixels)], model.config)
    assert x.shape[0] == 1
    assert len(va.predict(model, pixels[..., 0], threshold=0)[0]) == 35


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"threshold": 50}, "threshold is 50: scores are between 0 and 1"),
        ({"threshold": -0.1}, "threshold"),
        ({"threshold": float("nan")}, "threshold"),
        ({"threshold": "0.5"}, "threshold"),
        ({"topk": 0}, "topk is 0"),
        ({"topk": 2.5}, "topk"),
        ({"topk": True}, "topk"),
        ({"batch_size": 0}, "batch_size"),
    ],
)
def test_numbers_out_of_range(model, pixels, options, words):
    with pytest.raises(UserError, match=words):
        va.predict(model, pixels, **options)


def test_other_bad_calls(model, pixels, tmp_path):
    (tmp_path / "broken.jpg").write_bytes(b"\xff\xd8\xff\xe0 not much of a picture")
    with pytest.raises(UserError, match=r"broken\.jpg"):
        va.predict(model, tmp_path)
    with pytest.raises(UserError, match="predict normalises them itself"):
        va.predict(model, torch.randn(3, 8, 8))
    other = tiny(num_classes=3)
    with pytest.raises(UserError, match="3 classes, but its configuration names 5 category_ids"):
        va.predict(other, pixels)
    other.config["category_ids"] = None
    with pytest.raises(UserError, match="names 5 labels"):
        va.predict(other, pixels)
    other.config["preprocess"]["resize"] = "crop"
    with pytest.raises(UserError, match="shorter, fit or stretch"):
        va.predict(other, pixels)
    classifier = va.create_model("resnet8_cifar", num_classes=3, img_size=8, width=4)
    with pytest.raises(UserError, match="threshold is for detectors"):
        va.predict(classifier, pixels, threshold=0.5)
    assert detect(model, [Image.fromarray(pixels)], ["x"], threshold=0.0, topk=2)[0].source == "x"
