"""The demo: its limits, its answers, and its page in a real browser."""

from __future__ import annotations

import struct
import time
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import vision_attn as va
from vision_attn.errors import UserError
from vision_attn.explain import demo, demo_page

VIT = {"img_size": 16, "patch_size": 4, "embed_dim": 12, "num_heads": 3, "depth": 2, "num_classes": 2}


def bomb(path: Path, side: int = 60_000) -> Path:
    """A PNG of some bytes whose header claims side × side pixels."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0)
    parts = chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(bytes(1000))) + chunk(b"IEND", b"")
    path.write_bytes(b"\x89PNG\r\n\x1a\n" + parts)
    return path


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """A ViT that tells dark from bright, a CNN, a detector that finds something, and a bright picture."""
    root = tmp_path_factory.mktemp("demo")
    torch.manual_seed(0)
    vit = va.create_model("vit_tiny_patch16_224", **VIT)
    vit.config["labels"] = ["dark", "bright"]
    with torch.no_grad():  # heads and queries whose maps differ to the eye
        for block in vit.blocks:
            block.attn.qkv.weight[:24] *= 40
    optimizer = torch.optim.Adam(vit.parameters(), 3e-3)
    level = torch.linspace(-1, 1, 32)
    images, classes = level[:, None, None, None] + 0.1 * torch.randn(32, 3, 16, 16), (level > 0).long()
    for _ in range(40):
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(vit(images), classes).backward()
        optimizer.step()
    va.save_model(vit, root / "vit")
    cnn = va.create_model("resnet8_cifar", img_size=16, num_classes=2)
    cnn.config["labels"] = ["dark", "bright"]
    va.save_model(cnn, root / "cnn")
    detector = va.create_model("detr_tiny", num_classes=3, img_size=48, num_queries=5, enc_layers=1, dec_layers=1)
    with torch.no_grad():
        detector.class_embed.bias.copy_(torch.tensor([4.0, 0.0, 0.0, 0.0]))
    detector.config["labels"] = ["cup", "plate", "spoon"]
    va.save_model(detector, root / "detr")
    rows = np.linspace(140, 250, 40)[:, None, None] * np.ones((1, 60, 3))
    pixels = (rows - 60 * (np.arange(60) % 20 < 10)[None, :, None] * np.array([0, 1, 1])).astype(np.uint8)
    Image.fromarray(pixels).save(root / "photo.png")
    return root


def source(files, name):
    return demo.Source(name, path=str(files / name))


def test_uploads_are_refused_before_they_are_decoded(tmp_path, monkeypatch):
    with pytest.raises(UserError, match="Drop an image first"):
        demo.read_upload(None)
    with pytest.raises(UserError, match=r"claims 3,600,000,000 pixels.*not decoded"):
        demo.read_upload(bomb(tmp_path / "bomb.png"))
    with pytest.raises(UserError, match=r"64,000,000 pixels \(8,000 × 8,000\)"):
        demo.read_upload(bomb(tmp_path / "large.png", 8000))
    (tmp_path / "text.png").write_text("no image")
    with pytest.raises(UserError, match=r"text.png is no image that can be read"):
        demo.read_upload(tmp_path / "text.png")
    with pytest.raises(UserError, match=r"Cannot read the image .*small.png"):
        demo.read_upload(bomb(tmp_path / "small.png", 100))  # its pixels are missing
    monkeypatch.setattr(demo, "MOST_BYTES", 1)
    with pytest.raises(UserError, match="at most 0 are taken"):
        demo.read_upload(tmp_path / "text.png")


def test_models_to_choose_from(files, tmp_path):
    best = tmp_path / "runs" / "digits_vit" / "0" / "checkpoints" / "best.ckpt"
    best.parent.mkdir(parents=True)
    best.write_bytes(b"")
    found = demo.sources([files / "vit"], tmp_path / "runs")
    assert [s.path for s in found[:2]] == [str(files / "vit"), str(best)]
    names = [s.name for s in found[2:]]
    assert {"vit_tiny_patch16_224", "detr_tiny", "resnet20_cifar"} <= set(names)
    assert "pointer_lstm" not in names
    assert {s.name for s in found if s.convolutional} >= {"resnet20_cifar"}
    assert not demo.Source("x", name="vit_tiny_patch16_224").convolutional
    with pytest.raises(UserError, match="no such checkpoint"):
        demo.sources([tmp_path / "missing"])


def test_a_classifier_its_maps_and_its_answer(files):
    picture = demo.read_upload(files / "photo.png")
    seen = demo.look_at(source(files, "vit"), picture, "photo.png")
    assert max(seen.scores, key=seen.scores.get) == "bright"
    assert seen.scores == pytest.approx(dict(va.predict(va.load_model(files / "vit"), picture)[0].topk))
    assert not any("Untrained" in note for note in seen.notes)
    maps = va.attention_maps(
        va.load_model(files / "vit"), demo.as_seen(picture, demo.open_model(source(files, "vit")).config)[0][None]
    )
    last = maps["blocks.1.attn"][0]
    torch.testing.assert_close(demo.map_of(seen, None, None, None), last[:, 0, 1:].mean(0).view(4, 4))
    torch.testing.assert_close(
        demo.map_of(seen, "blocks.1.attn", "2", "row 1, column 3"), last[2, 1 + 7, 1:].view(4, 4)
    )
    for wrong, words in (
        (("blocks.9.attn", None, None), "blocks.0.attn"),
        ((None, "7", None), "0, 1, 2"),
        ((None, None, "x"), "no query"),
    ):
        with pytest.raises(UserError, match=words):
            demo.map_of(seen, *wrong)
    assert demo.query_at(seen, None, 0.99, 0.3) == "row 1, column 3"
    assert {title for _, title in demo.gallery(seen)} >= {"rollout", "gradient-weighted relevance"}
    assert demo.with_boxes(seen).size == (448, 448)


def test_a_detector_and_a_cnn(files):
    picture = demo.read_upload(files / "photo.png")
    seen = demo.look_at(source(files, "detr"), picture)
    assert all(name.startswith("cup (query ") for name in seen.scores)
    assert 1 <= len(seen.scores) <= 5
    assert max(demo.with_boxes(seen).size) >= 300
    assert any("cross-attention" in title for _, title in demo.gallery(seen))
    cross = next(view.name for view in seen.view.layers if "cross" in view.name)
    assert demo.query_at(seen, cross, 0.5, 0.5) is None
    cnn = demo.look_at(source(files, "cnn"), picture)
    with pytest.raises(UserError, match="no attention layer"):
        cnn.layer(None)
    untrained = demo.look_at(demo.Source("x", name="resnet8_cifar"), picture)
    assert demo.UNTRAINED in untrained.notes


def test_maps_say_what_they_are_worth(files):
    picture = demo.read_upload(files / "photo.png")
    seen = demo.look_at(source(files, "vit"), picture, measure=True)
    assert all(":" in title for _, title in demo.gallery(seen))


def test_maps_that_were_not_measured_say_so_and_how_to(files):
    picture = demo.read_upload(files / "photo.png")
    for name in ("vit", "cnn", "detr"):
        (note,) = [n for n in demo.look_at(source(files, name), picture).notes if "nobody knows" in n]
        assert f"Tick “{demo.MEASURE}”" in note
    assert not any("nobody knows" in n for n in demo.look_at(source(files, "vit"), picture, measure=True).notes)


def test_implied_maps_are_called_so_wherever_they_are_named(tmp_path):
    va.save_model(va.create_model("vit_tiny_patch16_224", **VIT, attention={"pattern": "performer"}), tmp_path / "m")
    seen = demo.look_at(source(tmp_path, "m"), Image.new("RGB", (16, 16)), measure=True)
    assert seen.titles == ["blocks.0.attn (implied)", "blocks.1.attn (implied)"]
    assert seen.layer("blocks.0.attn (implied)").name == seen.layer("blocks.0.attn").name == "blocks.0.attn"
    titles = [title.split(":")[0] for _, title in demo.gallery(seen)]
    assert [t for t in titles if "Grad-CAM" not in t] == [
        f"{t} (implied)" for t in ("class token, last layer", "rollout", "flow", "gradient-weighted relevance")
    ]


class FakeGradio:
    """What Page needs of Gradio."""

    @staticmethod
    def skip():
        return "skip"

    @staticmethod
    def update(**options):
        return options


def test_clicks_where_there_is_nothing_to_choose(files, monkeypatch):
    page = demo_page.Page(FakeGradio, [])
    assert page.click(None, None, (1, 1)) == ("skip", demo_page.EMPTY)
    picture = demo.read_upload(files / "photo.png")
    cnn = demo.look_at(source(files, "cnn"), picture)
    for answer in (page.click(cnn, None, (1, 1)), page.change_layer(cnn, None), page.change_map(cnn, None, None, None)):
        assert "resnet8_cifar has no attention" in answer[-1]
        assert "Drop" not in answer[-1]
    vit = demo.look_at(source(files, "vit"), picture)
    assert page.click(vit, "blocks.1.attn", (447, 1)) == ("row 0, column 3", "")
    assert "no layer 'gone'" in page.click(vit, "gone", (1, 1))[-1]
    monkeypatch.setattr(demo, "with_boxes", lambda seen: 1 / 0)
    assert "Something went wrong (ZeroDivisionError)" in page.click(vit, "blocks.1.attn", (1, 1))[-1]


def test_overlay_shows_the_map_where_it_lies():
    m = torch.zeros(2, 3)
    m[1, 2] = 1.0
    shown = np.asarray(demo.overlaid(torch.zeros(3, 20, 30, dtype=torch.uint8), m)).astype(int)
    height, width = shown.shape[:2]
    assert shown[3 * height // 4, 5 * width // 6].sum() > shown[height // 4, width // 6].sum() + 200


def test_without_gradio_there_is_a_clear_message(monkeypatch, capsys):
    monkeypatch.setitem(__import__("sys").modules, "gradio", None)
    assert demo_page.main(["--runs", "nowhere"]) == 2
    assert 'pip install "vision_attn[demo,explain]"' in capsys.readouterr().err


@pytest.fixture(scope="module")
def address(files, tmp_path_factory):
    pytest.importorskip("gradio", reason="the demo needs gradio")
    pytest.importorskip("pytorch_grad_cam")
    found = [source(files, name) for name in ("vit", "cnn", "detr")]
    blocks = demo_page.build(found, str(tmp_path_factory.mktemp("uploads")))
    yield demo_page.launch(blocks, block=False)
    blocks.close()


class Driven:
    """The page as somebody uses it."""

    def __init__(self, browser, address):
        self.address = address
        self.page = browser.open(address)
        self.driver = self.page.driver
        self.until(lambda: self.find("#upload input[type=file]"))

    def find(self, selector):
        return self.driver.find_elements("css selector", selector)

    def until(self, condition, seconds=60):
        """Waits for something to be true on the page; parts that are being redrawn are looked at again."""
        from selenium.common.exceptions import WebDriverException

        end = time.monotonic() + seconds
        while time.monotonic() < end:
            try:
                found = condition()
            except (WebDriverException, IndexError, StopIteration):
                found = None
            if found:
                return found
            time.sleep(0.1)
        raise AssertionError(
            f"waited {seconds} s for {condition.__doc__ or condition}; the page says: {self.page.text()}"
        )

    def upload(self, path):
        for button in self.find("#upload button[aria-label='Clear'], #upload button[aria-label='Remove this file']"):
            button.click()
        self.until(lambda: self.find("#upload input[type=file]"))[0].send_keys(str(path))
        self.until(lambda: path.stem in self.text("#upload"))

    def click(self, selector):
        """The page moves its parts while it works: a click that missed is made again."""
        self.until(lambda: self.find(selector)[0].click() or True)

    def choose(self, where, title):
        self.click(f"{where} input")
        self.until(lambda: next(o for o in self.find("ul[role=listbox] li") if title in o.text).click() or True)

    def look(self):
        self.click("#look")

    def text(self, selector):
        return " ".join(element.text for element in self.find(selector))

    def picture(self, selector):
        """The address of a picture that is there, decoded."""
        script = "var i = document.querySelector(arguments[0]); return i && i.naturalWidth ? i.src : null"
        return self.driver.execute_script(script, f"{selector} img")


def test_page_in_a_browser(browser, address, files, tmp_path):
    use = Driven(browser, address)
    use.upload(files / "photo.png")
    use.choose("#beside", "cnn")
    use.look()
    use.until(lambda: "bright" in use.text("#answer"))
    use.until(lambda: use.picture("#picture") and use.picture("#map") and use.picture("#maps"))
    use.until(lambda: "Grad-CAM" in use.text("#other_maps"))
    assert "%" in use.text("#other")
    first = use.picture("#map")
    use.choose("#head", "1")
    use.until(lambda: use.picture("#map") not in (None, first))
    second = use.picture("#map")
    use.click("#picture img")
    use.until(lambda: use.picture("#map") not in (None, second))
    assert "row" in use.find("#query input")[0].get_attribute("value")
    # a bomb is refused in words, and the next picture is answered as if nothing had been
    use.upload(bomb(tmp_path / "bomb.png"))
    use.look()
    use.until(lambda: "claims 3,600,000,000 pixels" in use.text("#message"))
    use.choose("#model", "detr")
    use.upload(files / "photo.png")
    use.look()
    use.until(lambda: "cup" in use.text("#answer"))
    use.page.refresh_logs()
    assert use.page.errors == []
    assert [url for url in use.page.requests if not url.startswith(address)] == []


def test_too_large_a_file_does_not_end_the_demo(address, tmp_path):
    import httpx

    with httpx.Client(trust_env=False, base_url=address) as client:
        answer = client.post("gradio_api/upload", files={"files": ("x.png", bytes(demo.MOST_BYTES + 1))})
        assert answer.status_code == 413
        assert client.get("config").status_code == 200
    assert address.startswith("http://127.0.0.1:")
