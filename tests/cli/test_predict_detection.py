"""``vision-attn predict`` with a detector: a table, pictures, COCO results; wrong calls leave nothing behind."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import vision_attn as va
from vision_attn.cli.main import main

LABELS = ["ant", "bee", "cat [sic]"]


@pytest.fixture
def call(tmp_path, monkeypatch):
    """A folder with a detector and five images in two folders, and the command that looks at them."""
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(2)
    small = {"embed_dim": 32, "num_heads": 2, "enc_layers": 1, "dec_layers": 2, "num_queries": 6, "img_size": 64}
    model = va.create_model("dn_detr_tiny", num_classes=3, **small)
    for p in model.parameters():
        if p.ndim > 1:
            torch.nn.init.normal_(p, std=1.2 * p[0].numel() ** -0.5)
    model.config |= {"labels": LABELS, "category_ids": [4, 7, 9]}
    va.save_model(model, "model")
    draw = np.random.default_rng(0)
    for name, (h, w) in {"a.png": (50, 80), "b.jpg": (90, 40), "deep/a.png": (33, 33), "deep/c.tif": (64, 64)}.items():
        path = Path("images", name)
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(draw.integers(0, 256, (h, w, 3), dtype=np.uint8)).save(path)
    return ["predict", "--ckpt_path", "model", "images", "--device", "cpu"]


def files(folder):
    return sorted(str(p.relative_to(folder)) for p in Path(folder).rglob("*") if p.is_file())


def test_table(call, capsys):
    assert main([*call, "--threshold", "0", "--topk", "2"]) == 0
    out = capsys.readouterr().out
    expected = va.predict(va.load_model("model"), "images", threshold=0, topk=2)
    assert "8 objects in 4 images" in out
    for result in expected:
        assert result.source in out
        assert f"{100 * float(result.scores[0]):.1f} %" in out
        assert ", ".join(f"{v:.0f}" for v in result.boxes[0].tolist()) in out
    assert "[sic]" in out or all("[sic]" not in label for r in expected for label in r.labels)
    assert main([*call, "--threshold", "1"]) == 0
    out = capsys.readouterr().out
    assert out.count("nothing above 1") == 4
    assert "0 objects in 4 images" in out


def test_pictures_and_coco_results(call, capsys):
    assert main([*call, "--threshold", "0", "--topk", "3", "--output", "out/deep", "--json", "found.json"]) == 0
    err = capsys.readouterr().err
    assert "12 objects in 4 images written to found.json" in err
    assert "4 pictures written to out/deep" in err
    assert files("out") == ["deep/a.png", "deep/a_1.png", "deep/b.jpg", "deep/c.png"]
    with Image.open("out/deep/b.jpg") as drawn:
        assert drawn.format == "JPEG"
        assert drawn.size == (200, 450)  # enlarged, so that letters have room
    rows = json.loads(Path("found.json").read_text())
    assert {row["image_id"] for row in rows} == {1, 2, 3, 4}
    assert {row["category_id"] for row in rows} <= {4, 7, 9}
    assert [row["file_name"] for row in rows[::3]] == ["a.png", "b.jpg", "a.png", "c.tif"]
    assert all(set(row) == {"image_id", "category_id", "bbox", "score", "file_name"} for row in rows)


def test_results_can_be_evaluated(call, capsys):
    """Ids come from the annotations, or from the names where these are numbers; pycocotools takes the file."""
    Path("numbers").mkdir()
    for name in ("000000000285.png", "0007.png"):
        Image.open("images/a.png").save(Path("numbers", name))
    base = [*call[:3], "numbers", "--device", "cpu", "--threshold", "0", "--json", "-"]
    assert main(base) == 0
    rows = json.loads(capsys.readouterr().out)
    assert {row["image_id"] for row in rows} == {285, 7}
    images = [{"id": 31, "file_name": "0007.png"}, {"id": 32, "file_name": "val/000000000285.png"}]
    box = rows[0] | {"id": 1, "image_id": 32, "iscrowd": 0, "area": rows[0]["bbox"][2] * rows[0]["bbox"][3]}
    truth = {"images": images, "annotations": [box], "categories": [{"id": i, "name": str(i)} for i in (4, 7, 9)]}
    Path("truth.json").write_text(json.dumps(truth))
    assert main([*base, "--annotations", "truth.json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert {row["image_id"] for row in rows} == {31, 32}
    images += [{"id": 33, "file_name": "train/000000000285.png"}, {"id": 34, "file_name": "numbers/0007.png"}]
    Path("two.json").write_text(json.dumps(truth | {"images": images}))
    assert main([*base, "--annotations", "two.json"]) == 2
    assert "more than once" in capsys.readouterr().err
    images[2]["file_name"] = "numbers/000000000285.png"
    Path("two.json").write_text(json.dumps(truth | {"images": images}))
    assert main([*base, "--annotations", "two.json"]) == 0
    assert {row["image_id"] for row in json.loads(capsys.readouterr().out)} == {33, 34}
    coco = pytest.importorskip("pycocotools.coco").COCO("truth.json")
    assert len(coco.loadRes(rows).anns) == len(rows)


@pytest.mark.parametrize(
    "known", [{"a.png": 5}, {"val/a.png": 5}, {"a.png": 5, "deep/a.png": 5}, {"images/a.png": 5, "deep/a.png": 5}]
)
def test_two_images_never_get_one_id(call, capsys, known):
    """An evaluator would take the objects of both for those of one image."""
    rest = {"b.jpg": 6, "c.tif": 7}
    images = [{"id": number, "file_name": name} for name, number in {**known, **rest}.items()]
    Path("truth.json").write_text(json.dumps({"images": images}))
    assert main([*call, "--annotations", "truth.json", "--json", "found.json"]) == 2
    error = capsys.readouterr().err
    assert "images/a.png and images/deep/a.png both have the image id 5" in error
    assert len(error.splitlines()) <= 2
    assert not Path("found.json").exists()
    for image, name in zip(images, ("images/a.png", "images/deep/a.png"), strict=False):
        image["file_name"] = name
    if len(known) == 2:
        images[1]["id"] = 8
        Path("truth.json").write_text(json.dumps({"images": images}))
        assert main([*call, "--annotations", "truth.json", "--json", "found.json", "--threshold", "0"]) == 0
        assert {row["image_id"] for row in json.loads(Path("found.json").read_text())} == {5, 6, 7, 8}


@pytest.mark.parametrize("share", ["all", "one"])
def test_weights_that_became_nan_find_no_empty_images(call, capsys, share):
    """A table that says nothing is above 0.5 would be believed."""
    model = va.load_model("model")
    with torch.no_grad():
        bias = model.class_embed.bias
        (bias if share == "all" else bias[:1]).fill_(float("nan"))
    va.save_model(model, "model")
    assert main([*call, "--json", "found.json"]) == 2
    error = capsys.readouterr().err
    assert "error: images/a.png" in error
    assert "predictions are NaN" in error
    assert len(error.splitlines()) <= 2
    assert not Path("found.json").exists()


@pytest.mark.parametrize(
    ("extra", "words"),
    [
        (["--threshold", "50"], "scores are between 0 and 1"),
        (["--threshold", "-0.1"], "threshold"),
        (["--threshold", "high"], "threshold"),
        (["--topk", "0"], "topk is 0"),
        (["--batch_size", "0"], "batch_size"),
        (["--output", "images"], "would replace the image images/a.png"),
        (["--output", "model/config.json"], "is a file"),
        (["--annotations", "nowhere.json"], "nowhere.json"),
        (["--annotations", "model/config.json"], "no images with file_name"),
        (["--annotations", "other.json", "--json", "out.json"], "images/a.png is not there in --annotations"),
        (["broken.jpg", "--output", "out", "--json", "out.json"], "broken.jpg"),
        (["missing.jpg"], "missing.jpg"),
        (["empty"], "holds no images"),
    ],
)
def test_wrong_calls(call, capsys, extra, words):
    Path("broken.jpg").write_bytes(b"\xff\xd8\xff\xe0 not much of a picture")
    Path("other.json").write_text(json.dumps({"images": [{"id": 1, "file_name": "z.png"}]}))
    Path("empty").mkdir()
    before = files(".")
    assert main([*call[:4], *extra, *call[4:]]) == 2
    text = capsys.readouterr().err
    assert text.startswith("error: ")
    assert words in text
    assert len(text.splitlines()) <= 2
    assert files(".") == before


def test_options_of_detectors_mean_nothing_to_others(call, capsys):
    va.save_model(va.create_model("resnet8_cifar", num_classes=3, img_size=8, width=4), "classifier")
    for extra in (["--threshold", "0.3"], ["--output", "out"], ["--annotations", "a.json"]):
        assert main(["predict", "--ckpt_path", "classifier", "images", *extra]) == 2
        assert "is for detectors" in capsys.readouterr().err
    assert main(["predict", "--ckpt_path", "classifier", "images"]) == 0
