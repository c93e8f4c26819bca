"""``vision-attn maps``: figures and page of every family, side by side, and what bad input gets."""

from __future__ import annotations

import json
import re
import struct
import zlib

import numpy as np
import pytest
from PIL import Image

import vision_attn as va
from vision_attn.cli.main import main

VIT = {"img_size": 16, "patch_size": 4, "embed_dim": 12, "num_heads": 3, "depth": 2, "num_classes": 3}


def save(folder, name, labels=("cat", "dog", "</script>"), **args):
    model = va.create_model(name, **args)
    if model.config["task"] == "classification":
        model.config["labels"] = list(labels)
    va.save_model(model, folder)
    return str(folder)


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    return {
        "vit": save(root / "vit", "vit_tiny_patch16_224", **VIT),
        "cnn": save(root / "cnn", "resnet8_cifar", img_size=16, num_classes=3),
        "swin": save(root / "swin", "swin_cifar_tiny", img_size=20, num_classes=3),
        "detr": save(root / "detr", "dn_detr_tiny", num_classes=4, img_size=48, num_queries=6, enc_layers=1),
        "pointer": save(root / "pointer", "pointer_lstm"),
    }


@pytest.fixture(scope="module")
def pictures(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pictures")
    rng = np.random.default_rng(0)
    for i, size in enumerate([(20, 16), (16, 24)]):
        Image.fromarray(rng.integers(0, 256, (*size, 3), dtype=np.uint8)).save(folder / f"p{i}.png")
    return folder


def data_of(folder):
    text = (folder / "index.html").read_text(encoding="utf-8")
    return json.loads(re.search(r'<script id="data" type="application/json">(.*?)</script>', text, re.S)[1])


def test_a_transformer_beside_a_cnn(models, pictures, tmp_path, capsys):
    pytest.importorskip("pytorch_grad_cam")
    out = tmp_path / "out"
    call = ["maps", "--ckpt_path", models["vit"], "--compare", models["cnn"], "--output", str(out), "--trials", "3"]
    assert main([*call, str(pictures)]) == 0
    assert f"open {out / 'index.html'}" in capsys.readouterr().out
    names = {p.relative_to(out).as_posix() for p in out.rglob("*.png")}
    vit, cnn = "1_vit_tiny_patch16_224", "2_resnet8_cifar"
    assert {f"{vit}/worth.png", f"{cnn}/worth.png", "00_p0_compare.png", f"{cnn}/01_p1_summary.png"} <= names
    assert f"{vit}/00_p0_heads.png" in names
    assert f"{cnn}/00_p0_heads.png" not in names
    assert not list(tmp_path.glob(".out*"))
    data = data_of(out)
    first, second = data["models"]
    titles = [s["title"].split(":")[0] for s in first["pictures"][0]["summaries"]]
    assert titles[:4] == ["class token, last layer", "rollout", "flow", "gradient-weighted relevance"]
    assert [layer["name"] for layer in first["pictures"][1]["layers"]] == ["blocks.0.attn", "blocks.1.attn"]
    assert second["pictures"][0]["layers"] == []
    assert second["depth"] == []
    poor = [c["name"] for c in first["worth"]["curves"] if not c["good"]]
    for summary in first["pictures"][0]["summaries"]:
        assert ("3 random maps are too few" in summary["title"]) == (summary["title"].split(":")[0] in poor)
    assert first["worth"]["images"] == 2


def test_layers_heads_and_queries_are_chosen(models, pictures, tmp_path):
    call = ["maps", "--ckpt_path", models["vit"], "--output", str(tmp_path / "out"), "--trials", "0"]
    call += ["--layers", "blocks.1*", "--heads", "0,2", "--queries", "0,5"]
    assert main([*call, str(pictures / "p0.png")]) == 0
    (layer,) = data_of(tmp_path / "out")["models"][0]["pictures"][0]["layers"]
    assert (layer["name"], layer["heads"]) == ("blocks.1.attn", [0, 2])
    assert layer["labels"] == ["class token", "row 1, column 0"]
    assert layer["cells"] == [None, [1, 0]]
    heads = sorted(p.name for p in (tmp_path / "out").glob("*heads*"))
    assert heads == ["00_p0_heads_0.png", "00_p0_heads_1.png"]


def test_a_swin(models, pictures, tmp_path):
    call = ["maps", "--ckpt_path", models["swin"], "--output", str(tmp_path / "out"), "--trials", "2"]
    assert main([*call, str(pictures)]) == 0
    layers = data_of(tmp_path / "out")["models"][0]["pictures"][0]["layers"]
    assert [layer["grid"] for layer in layers] == [[10, 10]] * 2 + [[5, 5]] * 4 + [[3, 3]] * 2


def test_a_detector(models, pictures, tmp_path):
    call = ["maps", "--ckpt_path", models["detr"], "--output", str(tmp_path / "out"), "--threshold", "0"]
    assert main([*call, "--data", str(pictures), str(pictures / "p0.png")]) == 0
    names = {p.name for p in (tmp_path / "out").iterdir()}
    assert {"00_p0_objects.png", "queries.png", "worth.png", "index.html"} <= names
    picture = data_of(tmp_path / "out")["models"][0]["pictures"][0]
    assert len({o["query"] for o in picture["objects"]}) == len(picture["objects"]) == 6
    titles = [s["title"].split(": ")[1] for s in picture["summaries"] if s["object"] == 0]
    assert titles == ["encoder, at its centre", *(f"cross-attention, layer {i}" for i in range(3)), "relevance"]


def bomb(path):
    """A PNG of a few bytes that claims 60,000 × 60,000 pixels."""

    def chunk(kind, data):
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", 60_000, 60_000, 8, 2, 0, 0, 0)
    data = chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(b"\0" * 1000)) + chunk(b"IEND", b"")
    path.write_bytes(b"\x89PNG\r\n\x1a\n" + data)
    return path


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--layers", "blocks.9*"], r"no attention layer is called 'blocks.9\*'; there are: blocks.0.attn"),
        (["--heads", "7"], r"has no head 7: it has 3"),
        (["--queries", "99"], r"has no query 99: it has 17"),
        (["--heads", "a"], r"--heads 'a': give numbers such as 0,2 or 0-3"),
        (["--trials", "-1"], r"0 or more"),
        (["--output", "FILE"], r"is a file; name a folder"),
        (["--data", "EMPTY"], r"holds no images"),
    ],
)
def test_a_wrong_call_writes_nothing(options, says, models, pictures, tmp_path, capsys):
    (tmp_path / "file").write_text("x")
    (tmp_path / "empty").mkdir()
    options = [{"FILE": str(tmp_path / "file"), "EMPTY": str(tmp_path / "empty")}.get(o, o) for o in options]
    call = ["maps", "--ckpt_path", models["vit"], "--output", str(tmp_path / "out"), str(pictures / "p0.png")]
    assert main([*call, *options]) == 2
    error = capsys.readouterr().err
    assert re.search(says, error), error
    assert len(error.strip().splitlines()) <= 2
    assert not (tmp_path / "out").exists()


def test_bad_images_and_models(models, pictures, tmp_path, capsys):
    broken = tmp_path / "broken.png"
    broken.write_bytes((pictures / "p0.png").read_bytes()[:60])
    huge = bomb(tmp_path / "bomb.png")
    for model, image, says in [
        (models["vit"], huge, "bomb.png"),
        (models["vit"], broken, "Cannot read the image"),
        (models["vit"], tmp_path / "none.png", "no such file"),
        (models["pointer"], pictures / "p0.png", "a pointer network sorts images"),
        (str(tmp_path / "none.ckpt"), pictures / "p0.png", "none.ckpt"),
    ]:
        assert main(["maps", "--ckpt_path", model, "--output", str(tmp_path / "out"), str(image)]) == 2
        assert says in capsys.readouterr().err
    assert main(["maps", "--ckpt_path", models["cnn"], "--layers", "x", "--output", "o", str(pictures / "p0.png")]) == 2
    assert "has no attention" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_the_page_can_be_clicked_through(browser, models, pictures, tmp_path):
    call = [
        "maps",
        "--ckpt_path",
        models["vit"],
        "--compare",
        models["cnn"],
        "--output",
        str(tmp_path),
        "--trials",
        "3",
    ]
    assert main([*call, str(pictures)]) == 0
    for width in (1280, 390):
        page = browser.open(tmp_path / "index.html", width=width, height=844)
        driver = page.driver
        assert driver.find_element("tag name", "body").get_attribute("data-ready") == "yes"
        assert page.overflow() == 0
        assert "not causes of the answer" in page.text()

        def read(driver=driver):
            return driver.find_element("css selector", "#model0 .read").text

        assert "blocks.1.attn, mean of heads, class token" in read()
        canvas = driver.find_element("css selector", "#model0 .stage canvas")
        from selenium.webdriver import ActionChains
        from selenium.webdriver.common.keys import Keys

        box = canvas.rect
        ActionChains(driver).move_to_element_with_offset(
            canvas, int(-0.4 * box["width"]), int(-0.4 * box["height"])
        ).perform()
        assert "row 0, column 0" in read().split(":")[0]
        canvas.send_keys(Keys.ARROW_RIGHT, Keys.ARROW_DOWN)
        assert "row 1, column 1" in read().split(":")[0]
        canvas.send_keys("[", ".")
        assert "blocks.0.attn, head 0, row 1, column 1" in read()
        driver.find_elements("css selector", "#model0 .heads button")[3].click()
        assert "head 2" in read()
        driver.find_elements("css selector", "#model0 .sums button")[1].click()
        assert read().startswith("rollout")
        canvas.send_keys("c")
        assert "class token" in read()
        driver.find_elements("css selector", "#pictures button")[1].click()
        assert "p1.png" in driver.find_element("css selector", "#model1 .answer").text
        page.refresh_logs()
        assert page.errors == []
        assert page.requests == []
        assert all(p["width"] > 0 for p in page.pictures())
