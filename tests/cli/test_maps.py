"""``vision-attn maps``: figures and page of every family, side by side, and what bad input gets."""

from __future__ import annotations

import json
import re
import struct
import zlib

import numpy as np
import pytest
import torch
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
        "glimpse": save(root / "glimpse", "glimpse_small_32", num_classes=3),
        "performer": save(root / "performer", "vit_tiny_patch16_224", attention={"pattern": "performer"}, **VIT),
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
    assert {c["judged"] for c in first["worth"]["curves"]} == {"few"}
    poor = [c["name"] for c in first["worth"]["curves"] if not c["good"]]
    for summary in first["pictures"][0]["summaries"]:
        assert ("3 random maps are too few" in summary["title"]) == (summary["title"].split(":")[0] in poor)
    assert first["worth"]["images"] == 2


def test_a_model_that_glimpses(models, pictures, tmp_path, capsys):
    """What does not serve a model is left out with a note, by default options too."""
    assert main(["maps", "--ckpt_path", models["glimpse"], "--output", str(tmp_path / "out"), str(pictures)]) == 0
    assert "no Grad-CAM" in capsys.readouterr().err
    (model,) = data_of(tmp_path / "out")["models"]
    assert [layer["labels"] for layer in model["pictures"][0]["layers"]] == [["query 0", "query 1", "query 2"]]
    assert any("no Grad-CAM" in note for note in model["notes"])


@pytest.mark.parametrize(("flow", "there"), [("auto", True), ("yes", True), ("no", False)])
def test_flow_can_be_asked_for(flow, there, models, pictures, tmp_path):
    call = ["maps", "--ckpt_path", models["vit"], "--output", str(tmp_path / "out"), "--trials", "0", "--flow", flow]
    assert main([*call, str(pictures / "p0.png")]) == 0
    (model,) = data_of(tmp_path / "out")["models"]
    assert ("flow" in [s["title"] for s in model["pictures"][0]["summaries"]]) == there
    assert any("not compared with random ones" in note for note in model["notes"])


def test_implied_maps_are_called_so_on_the_page(models, pictures, tmp_path):
    call = ["maps", "--ckpt_path", models["performer"], "--output", str(tmp_path / "out"), "--trials", "2"]
    assert main([*call, str(pictures / "p0.png")]) == 0
    (model,) = data_of(tmp_path / "out")["models"]
    titles = [s["title"] for s in model["pictures"][0]["summaries"]]
    assert [t.split(":")[0] for t in titles if t.startswith(("rollout", "class token"))] == [
        "class token, last layer (implied)",
        "rollout (implied)",
    ]
    assert all(layer["implied"] for layer in model["depth"])
    assert all(layer["implied"] for layer in model["pictures"][0]["layers"])


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
    assert main([*call, "--trials", "3", "--data", str(pictures), str(pictures / "p0.png")]) == 0
    names = {p.name for p in (tmp_path / "out").iterdir()}
    assert {"00_p0_objects.png", "queries.png", "worth.png", "index.html"} <= names
    picture = data_of(tmp_path / "out")["models"][0]["pictures"][0]
    assert len({o["query"] for o in picture["objects"]}) == len(picture["objects"]) == 6
    clouds = data_of(tmp_path / "out")["models"][0]["clouds"]
    assert clouds["images"] == 3
    assert set(clouds["queries"]) == {str(o["query"]) for o in picture["objects"]}
    assert all(one["found"] == 3 and len(one["points"]) == 3 for one in clouds["queries"].values())
    assert data_of(tmp_path / "out")["models"][0]["worth"]["images"] == 3
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
        (["--minutes", "0"], r"--minutes 0: more than 0"),
        (["--minutes", ".inf"], r"--minutes inf: .*finite"),
        (["--output", "FILE"], r"is a file; name a folder"),
        (["--output", "FILE/below"], r"is a file; name a folder"),
        (["--heads", "2-1"], r"--heads '2-1': 2-1 holds no number; write 1-2"),
        (["--queries", "0,3-2"], r"3-2 holds no number; write 2-3"),
        (["--flow", "maybe"], r"--flow maybe: choose auto, yes, no"),
        (["--data", "EMPTY"], r"holds no images"),
        (["EMPTY"], r"holds no images"),
    ],
)
def test_a_wrong_call_writes_nothing(options, says, models, pictures, tmp_path, capsys):
    (tmp_path / "file").write_text("x")
    (tmp_path / "empty" / ".hidden").mkdir(parents=True)
    (tmp_path / "empty" / ".hidden" / "a.png").write_bytes((pictures / "p0.png").read_bytes())
    (tmp_path / "empty" / "._a.png").write_bytes(b"no image")
    options = [o.replace("FILE", str(tmp_path / "file")).replace("EMPTY", str(tmp_path / "empty")) for o in options]
    call = ["maps", "--ckpt_path", models["vit"], "--output", str(tmp_path / "out"), str(pictures / "p0.png")]
    assert main([*call, *options]) == 2
    error = capsys.readouterr().err
    assert re.search(says, error), error
    assert len(error.strip().splitlines()) <= 2
    assert not (tmp_path / "out").exists()


def test_where_to_write_and_how_much_is_known_before_anything_is_computed(
    models, pictures, tmp_path, capsys, monkeypatch
):
    import vision_attn.checkpoints

    monkeypatch.setattr(vision_attn.checkpoints, "load_model", lambda *args, **kwargs: 1 / 0)
    (tmp_path / "file").write_text("x")
    call = ["maps", "--ckpt_path", models["vit"], "--output", str(tmp_path / "file"), str(pictures / "p0.png")]
    assert main(call) == 2
    assert "is a file; name a folder" in capsys.readouterr().err
    call = ["maps", "--ckpt_path", models["vit"], "--output", str(tmp_path / "out"), *[str(pictures / "p0.png")] * 33]
    assert main(call) == 2
    assert "33 images: a page holds 32 at most" in capsys.readouterr().err


def test_a_query_on_a_swin_s_padding_is_refused(models, pictures, tmp_path, capsys):
    call = ["maps", "--ckpt_path", models["swin"], "--output", str(tmp_path / "out"), str(pictures / "p0.png")]
    layer = "layers.1.blocks.0.attn"
    plane = va.attention_maps(va.load_model(models["swin"]), torch.randn(1, 3, 20, 20), layers=layer).planes[layer][0]
    fill = next(i for i in range(plane.length) if i not in set(plane.places().flatten().tolist()))
    assert main([*call, "--layers", layer, "--queries", str(fill)]) == 2
    error = capsys.readouterr().err
    assert f"query {fill} of {layer} is no patch but padding" in error
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


def clean(page):
    """The page fits its window, says nothing in the console and asks for nothing."""
    page.refresh_logs()
    assert page.driver.find_element("tag name", "body").get_attribute("data-ready") == "yes"
    assert page.errors == []
    assert page.requests == []
    assert page.overflow() == 0
    assert "not causes of the answer" in page.text()
    shown = page.driver.execute_script("""
        return Array.from(document.querySelectorAll('#model0 .stage canvas, #model0 .sums canvas')).map(function (c) {
          var d = c.getContext('2d').getImageData(0, 0, c.width, c.height).data, seen = new Set();
          for (var i = 0; i < d.length; i += 4) seen.add(d[i] + ',' + d[i + 1] + ',' + d[i + 2]);
          return seen.size;
        })""")
    assert min(shown) > 1  # every map is drawn, and is not the same everywhere


def test_the_page_of_a_detector(browser, models, pictures, tmp_path):
    call = ["maps", "--ckpt_path", models["detr"], "--output", str(tmp_path), "--threshold", "0", "--trials", "2"]
    assert main([*call, "--data", str(pictures), str(pictures / "p0.png")]) == 0
    (model,) = data_of(tmp_path)["models"]
    for width in (1280, 390):
        page = browser.open(tmp_path / "index.html", width=width, height=844)
        find = page.driver.find_elements
        clean(page)
        assert len(find("css selector", "#model0 .clouds svg")) == 6
        # an object's map shows where its query finds objects
        summaries = model["pictures"][0]["summaries"]
        number = next(i for i, s in enumerate(summaries) if s["object"] == 1)
        query = model["pictures"][0]["objects"][1]["query"]
        find("css selector", "#model0 .sums button")[number].click()
        assert find("css selector", "#model0 .read")[0].text == summaries[number]["title"]
        label = find("css selector", "#model0 .cloud svg")[0].get_attribute("aria-label")
        assert label == f"query {query}: 3 of 3"
        assert len(find("css selector", "#model0 .cloud circle")) == 3
        # a decoder's layer: queries from a list, and with the keyboard
        canvas = find("css selector", "#model0 .stage canvas")[0]
        select = find("css selector", "#model0 select")[0]
        cross = next(i for i, layer in enumerate(model["pictures"][0]["layers"]) if "cross" in layer["name"])
        page.driver.execute_script(f"arguments[0].value = {cross}; arguments[0].onchange()", select)
        canvas.send_keys(".")
        read = find("css selector", "#model0 .read")[0].text
        assert "cross_attn, head 0, query" in read
        now = int(re.search(r"query (\d+)", read)[1])
        canvas.send_keys("\ue014")  # the right arrow
        assert f"query {(now + 1) % 6}:" in find("css selector", "#model0 .read")[0].text
        assert f"query {(now + 1) % 6}:" in find("css selector", "#model0 .cloud svg")[0].get_attribute("aria-label")
        clean(page)


def test_the_page_of_a_swin(browser, models, pictures, tmp_path):
    call = ["maps", "--ckpt_path", models["swin"], "--output", str(tmp_path), "--trials", "2"]
    assert main([*call, str(pictures)]) == 0
    layers = data_of(tmp_path)["models"][0]["pictures"][0]["layers"]
    page = browser.open(tmp_path / "index.html", width=1280, height=844)
    clean(page)
    find = page.driver.find_elements
    canvas = find("css selector", "#model0 .stage canvas")[0]
    # two random maps say nothing for or against a map, and are not shown as if they did
    key = find("css selector", "#model0 .key")[0]
    assert "too few random maps to tell" in key.text
    assert "no better than random" not in page.text().lower()
    assert "over the map itself, moved" in key.text
    assert not find("css selector", "#model0 .key .poor, #model0 .sums .poor")
    for _ in layers:
        canvas.send_keys("]", "\ue015", "\ue014")  # down, right
        read = find("css selector", "#model0 .read")[0].text
        layer = next(layer for layer in layers if read.startswith(layer["name"] + ","))
        row, column = (int(x) for x in re.search(r"row (\d+), column (\d+):", read).groups())
        assert [row, column] in layer["cells"]
        assert "NaN" not in page.text()
    clean(page)
