"""Predictions: the same picture gives the same answer however it is handed in; bad input is named."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import numpy as np
import pytest
import torch
from PIL import Image

import vision_attn as va
from vision_attn.cli.main import main
from vision_attn.errors import UserError
from vision_attn.inference import preprocess

H, W = 19, 23
LABELS = ["ant", "bee", "cat [sic]", "dog", "eel", "fox", "gnu"]


@pytest.fixture
def model():
    model = va.create_model("resnet8_cifar", num_classes=7, img_size=(16, 20), width=6)
    for p in model.parameters():
        torch.nn.init.normal_(p, std=0.3)
    model.config["labels"] = LABELS
    model.config["preprocess"] |= {"mean": [0.4, 0.5, 0.6], "std": [0.2, 0.3, 0.25], "crop_pct": 0.9}
    return model.eval()


@pytest.fixture
def pixels():
    return np.random.default_rng(0).integers(0, 256, (H, W, 3), dtype=np.uint8)


def same(results, reference):
    for result in results:
        assert result.label == reference.label
        assert [label for label, _ in result.topk] == [label for label, _ in reference.topk]
        assert [p for _, p in result.topk] == pytest.approx([p for _, p in reference.topk], abs=1e-6)


def test_every_kind_of_input_gives_the_same_answer(model, pixels, tmp_path):
    picture = Image.fromarray(pixels)
    picture.save(tmp_path / "a.png")
    tensor = torch.from_numpy(pixels).permute(2, 0, 1)
    (reference,) = va.predict(model, pixels)
    assert reference.source == "image 0"
    assert reference.label == LABELS[reference.index]
    assert reference.score == reference.topk[0][1] == max(p for _, p in reference.topk)
    kinds = [
        str(tmp_path / "a.png"),
        tmp_path / "a.png",
        tmp_path,
        picture,
        pixels / 255.0,
        (pixels / 255.0).astype(np.float32),
        pixels.astype(np.uint16) * 257,
        pixels.astype(np.int64),
        tensor,
        tensor.float() / 255,
        tensor.double() / 255,
        tensor[None],
        tensor.expand(3, -1, -1, -1),
        np.stack([pixels, pixels]),
        tensor.permute(0, 2, 1).contiguous().permute(0, 2, 1),
    ]
    for kind in kinds:
        same(va.predict(model, kind), reference)
    results = va.predict(model, kinds, batch_size=4)
    same(results, reference)
    assert len(results) == len(kinds) + 3
    assert [r.source for r in results[:5]] == [str(tmp_path / "a.png")] * 3 + ["image 3", "image 4"]


def test_probabilities_are_those_of_the_model(model, pixels):
    x = preprocess([Image.fromarray(pixels)], model.config)
    assert x.shape == (1, 3, 16, 20)
    with torch.no_grad():
        expected = model(x).softmax(-1)[0]
    (result,) = va.predict(model, pixels, topk=99)
    assert len(result.topk) == 7
    assert dict(result.topk) == pytest.approx(dict(zip(LABELS, expected.tolist(), strict=True)), abs=1e-6)
    assert result.index == int(expected.argmax())
    assert json.loads(json.dumps(result.to_dict()))["topk"][0]["label"] == result.label


def test_an_image_of_the_right_size_is_only_normalised(model):
    model.config["preprocess"]["crop_pct"] = 1.0
    pixels = np.random.default_rng(1).integers(0, 256, (16, 20, 3), dtype=np.uint8)
    x = preprocess([Image.fromarray(pixels)], model.config)[0]
    for c, (mean, std) in enumerate(zip([0.4, 0.5, 0.6], [0.2, 0.3, 0.25], strict=True)):
        torch.testing.assert_close(x[c], (torch.from_numpy(pixels[..., c]) / 255 - mean) / std)


def test_grey_16_bit_transparent_and_turned_files(model, pixels, tmp_path):
    grey = pixels[..., 0]
    (reference,) = va.predict(model, np.stack([grey] * 3, -1))
    Image.fromarray(grey).save(tmp_path / "grey.png")
    Image.fromarray(grey.astype(np.uint16) * 257).save(tmp_path / "deep.png")
    same(va.predict(model, [tmp_path / "grey.png", tmp_path / "deep.png"]), reference)
    same(va.predict(model, [grey, grey[..., None], torch.from_numpy(grey), torch.from_numpy(grey)[None]]), reference)
    same(va.predict(model, [Image.fromarray(grey), grey / 255.0]), reference)

    (reference,) = va.predict(model, pixels)
    opaque = np.dstack([pixels, np.full((H, W), 255, np.uint8)])
    Image.fromarray(opaque, "RGBA").save(tmp_path / "opaque.png")
    same(va.predict(model, [tmp_path / "opaque.png", opaque]), reference)
    (white,) = va.predict(model, np.full((H, W, 3), 255, np.uint8))
    same(va.predict(model, np.dstack([pixels, np.zeros((H, W), np.uint8)])), white)

    exif = Image.Exif()
    exif[0x0112] = 6  # shown after a quarter turn clockwise
    Image.fromarray(np.rot90(pixels)).save(tmp_path / "turned.png", exif=exif)
    same(va.predict(model, [tmp_path / "turned.png", Image.open(tmp_path / "turned.png")]), reference)


def test_one_channel_models():
    model = va.create_model("resnet8_cifar", num_classes=7, img_size=8, in_chans=1, width=5)
    grey = np.random.default_rng(2).integers(0, 256, (8, 8), dtype=np.uint8)
    x = preprocess([Image.fromarray(grey).convert("RGB")], model.config)
    torch.testing.assert_close(x[0, 0], (torch.from_numpy(grey) / 255 - 0.5) / 0.5)
    (result,) = va.predict(model, grey)
    assert result.label == str(result.index)  # nobody named the classes


def test_state_of_the_model_is_kept(model, pixels):
    model.train()
    before = {k: v.clone() for k, v in model.state_dict().items()}
    first, second = va.predict(model, [pixels, pixels], batch_size=1)
    same([first], second)
    assert model.training
    for key, value in model.state_dict().items():
        torch.testing.assert_close(value, before[key], rtol=0, atol=0)
    assert va.predict(model, []) == []


@pytest.mark.parametrize(
    ("image", "words"),
    [
        (torch.randn(3, 8, 8), "predict normalises them itself"),
        (np.full((8, 8, 3), np.nan), "values from nan"),
        (np.full((8, 8, 3), 300), r"0…255 for int64"),
        (np.zeros((8, 8, 5), np.uint8), r"shape \(8, 8, 5\) is no image; arrays are \(H, W\)"),
        (torch.zeros(8, 8, 3), r"tensors are \(C, H, W\)"),
        (np.zeros((0, 8, 3), np.uint8), "no image"),
        (torch.zeros(5), "no image"),
        ("nowhere.png", r"nowhere\.png: no such file\. Check its name\.$"),
    ],
)
def test_bad_images_are_named(model, image, words):
    with pytest.raises(UserError, match=words):
        va.predict(model, [np.zeros((8, 8), np.uint8), image])


def test_other_bad_calls(model, pixels, tmp_path):
    with pytest.raises(UserError, match="holds no images"):
        va.predict(model, tmp_path)
    (tmp_path / "broken.jpg").write_bytes(b"\xff\xd8\xff\xe0 not much of a picture")
    with pytest.raises(UserError, match=r"broken\.jpg"):
        va.predict(model, tmp_path)
    with pytest.raises(UserError, match="image 1: cannot make an image of NoneType"):
        va.predict(model, [pixels, None])
    with pytest.raises(UserError, match="topk"):
        va.predict(model, pixels, topk=0)
    with pytest.raises(UserError, match="create_model"):
        va.predict(torch.nn.Linear(2, 2), pixels)
    model.config["labels"] = ["one"]
    with pytest.raises(UserError, match=r"7 outputs.*1 labels"):
        va.predict(model, pixels)


def test_predict_verb(model, pixels, tmp_path, capsys):
    folder = va.save_model(model, tmp_path / "model")
    images = tmp_path / "images"
    (images / "deeper").mkdir(parents=True)
    for name in ("b.png", "a.png", "deeper/c.png"):
        Image.fromarray(pixels).save(images / name)
    (images / "notes.txt").write_text("no image")
    (reference,) = va.predict(model, pixels)
    call = ["predict", "--ckpt_path", str(folder), str(images), "--device", "cpu"]
    assert main([*call, "--topk", "7"]) == 0
    table = capsys.readouterr().out
    assert table.count(f"{100 * reference.score:.1f} %") == 3
    assert "[sic]" in table  # not taken for markup
    assert main([*call, "--json", "-", "--topk", "2"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [os.path.relpath(row["source"], images) for row in rows] == [
        "a.png",
        "b.png",
        os.path.join("deeper", "c.png"),
    ]
    assert [len(row["topk"]) for row in rows] == [2, 2, 2]
    assert rows[0]["label"] == reference.label
    # as the other verbs are called: the checkpoint knows all that a recipe would say
    assert main([*call, "--config", "digits_vit", "--json", str(tmp_path / "out.json")]) == 0
    assert len(json.loads((tmp_path / "out.json").read_text())) == 3
    assert "3 predictions written" in capsys.readouterr().err
    for bad, words in [
        (["predict", "--ckpt_path", str(tmp_path / "no.ckpt"), str(images)], "No such checkpoint"),
        (["predict", "--ckpt_path", str(folder), str(images / "notes.txt")], "notes.txt"),
        (["predict", "--ckpt_path", str(folder), str(images), "--device", "gpu"], "'gpu'"),
        (["predict", "--ckpt_path", str(folder), str(images), "--topk", "many"], "topk"),
        (["predict", str(images)], "ckpt_path"),
    ]:
        assert main(bad) == 2
        text = capsys.readouterr().err
        assert text.startswith("error: ")
        assert words in text
        assert len(text.splitlines()) <= 2


@pytest.mark.parametrize("name", ["resnet8_cifar", "pointer_lstm"])
@pytest.mark.parametrize("share", ["all", "one"])
def test_weights_that_became_nan_are_no_answer(pixels, tmp_path, capsys, name, share):
    """A probability of NaN is no JSON, and a script would take it for an answer."""
    model = va.create_model(name, **({"num_classes": 7, "img_size": 16} if name == "resnet8_cifar" else {}))
    with torch.no_grad():
        last = list(model.parameters())[-1].flatten()
        (last if share == "all" else last[:1]).fill_(float("nan"))
    folder = va.save_model(model, tmp_path / "model")
    for letter in "ab":
        Image.fromarray(pixels).save(tmp_path / f"{letter}.png")
    out = tmp_path / "out.json"
    call = ["predict", "--ckpt_path", str(folder), str(tmp_path / "a.png"), str(tmp_path / "b.png"), "--device", "cpu"]
    assert main([*call, "--json", str(out)]) == 2
    error = capsys.readouterr().err
    assert "predictions are NaN" in error
    assert "a.png" in error or name == "pointer_lstm"
    assert len(error.splitlines()) <= 2
    assert not out.exists()


def test_hidden_files_of_a_folder_are_no_images(model, pixels, tmp_path):
    """macOS puts a ``._cat.png`` beside a ``cat.png`` on a disk of another system."""
    images = tmp_path / ".set" / "images"
    for name in ("._cat.png", ".thumbnails/deep/cat.png", "cat.png", "deep/._dog.png", "deep/dog.png"):
        path = images / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if "/." in f"/{name}":
            path.write_bytes(b"\0\5\x16\7 no image")
        else:
            Image.fromarray(pixels).save(path)
    found = va.predict(model, images)
    assert [result.source for result in found] == [str(images / "cat.png"), str(images / "deep" / "dog.png")]
    (images / "deep" / "dog.png").unlink()
    with pytest.raises(UserError, match="holds no images"):
        va.predict(model, images / "deep")


@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
def test_labels_that_standard_output_has_no_codes_for(model, pixels, tmp_path, encoding):
    model.config["labels"] = ["猫", "köter", *LABELS[2:]]
    folder = va.save_model(model, tmp_path / "model")
    Image.fromarray(pixels).save(tmp_path / "a.png")
    call = [sys.executable, "-m", "vision_attn", "predict", "--ckpt_path", str(folder), str(tmp_path / "a.png")]
    call += ["--device", "cpu", "--topk", "7", "--json", "-"]
    environment = {**os.environ, "PYTHONIOENCODING": encoding, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(call, capture_output=True, env=environment, check=True)
    (row,) = json.loads(done.stdout.decode(encoding))
    assert sorted(one["label"] for one in row["topk"]) == sorted(model.config["labels"])
