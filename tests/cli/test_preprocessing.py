"""What ``test`` feeds a model is what ``predict`` feeds it, whatever its checkpoint says of resizing and cropping."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

import vision_attn as va
from vision_attn.cli import evaluate
from vision_attn.cli.main import main
from vision_attn.data.images import read_image, resize_and_crop
from vision_attn.inference import preprocess

SETTINGS = {"mean": [0.4, 0.5, 0.6], "std": [0.2, 0.3, 0.25], "crop_pct": 0.7, "interpolation": "bicubic"}


@pytest.fixture
def pictures(tmp_path: Path) -> Path:
    """Twenty pictures, no two of one size, in two classes."""
    for number in range(20):
        pixels = np.random.default_rng(number).integers(0, 256, (29 + number, 47 - number, 3), dtype=np.uint8)
        path = tmp_path / "pictures" / ("cat" if number % 2 else "dog") / f"{number:02}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels).save(path)
    return tmp_path / "pictures"


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """A model that wants its pictures as many of timm's do."""
    model = va.create_model("resnet8_cifar", num_classes=2, img_size=(13, 17), width=5)
    model.config["preprocess"] |= SETTINGS
    model.config["labels"] = ["cat", "dog"]
    return va.save_model(model, tmp_path / "model")


def fed(monkeypatch: pytest.MonkeyPatch, verb: str, path: Path, *argv: str) -> tuple[Tensor, list[Image.Image], Any]:
    """What ``validate`` or ``test`` gives a model: images (N, C, H, W), the pictures they are of, the data module."""
    inputs: list[Tensor] = []
    used: list[Any] = []
    run = evaluate._run

    def listen(command: Any, verb: str, model: Any, data: Any) -> Any:
        handle = model.register_forward_pre_hook(lambda _, args: inputs.append(args[0].clone()))
        used.append(data)
        try:
            return run(command, verb, model, data)
        finally:
            handle.remove()

    with monkeypatch.context() as patch:
        patch.setattr(evaluate, "_run", listen)
        options = ["--trainer.accelerator", "cpu", "--data.eval_batch_size", "2"]
        assert main([verb, "--ckpt_path", str(path), *options, *argv]) == 0
    (data,) = used
    files = data.source._rows("val" if verb == "validate" else verb)
    rows = range(len(files[0])) if files[2] is None else files[2].tolist()
    return torch.cat(inputs), [read_image(files[0][row]) for row in rows], data


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("limit", ["64", "0"])  # in memory, and streamed
@pytest.mark.parametrize("verb", ["validate", "test"])
def test_predict_and_test_see_the_same_pixels(verb, limit, pictures, checkpoint, monkeypatch):
    folder = ["--data.name", "image_folder", "--data.root", str(pictures), "--data.memory_limit_mb", limit]
    images, shown, data = fed(monkeypatch, verb, checkpoint, *folder)
    config = json.loads((checkpoint / "config.json").read_text())
    torch.testing.assert_close(images, preprocess(shown, config))
    assert images.shape == (len(shown), 3, 13, 17)
    assert (data.preprocess["crop_pct"], data.preprocess["interpolation"]) == (0.7, "bicubic")


@pytest.mark.filterwarnings("ignore")
def test_a_model_of_one_channel_sees_brightness(pictures, tmp_path, monkeypatch):
    model = va.create_model("resnet8_cifar", num_classes=2, img_size=(13, 17), in_chans=1, width=5)
    model.config["preprocess"] |= {"mean": [0.4], "std": [0.2]}
    model.config["labels"] = ["cat", "dog"]
    folder = ["--data.name", "image_folder", "--data.root", str(pictures)]
    images, shown, _ = fed(monkeypatch, "test", va.save_model(model, tmp_path / "grey"), *folder)
    torch.testing.assert_close(images, preprocess(shown, model.config))
    assert images.shape == (3, 1, 13, 17)


@pytest.mark.filterwarnings("ignore")
def test_what_the_user_says_stands(pictures, checkpoint, monkeypatch):
    folder = ["--data.name", "image_folder", "--data.root", str(pictures)]
    # another size is cut in the checkpoint's way still; another way replaces that part of it alone
    for argv, size, crop_pct, interpolation in (
        (["--data.img_size", "19"], (19, 19), 0.7, "bicubic"),
        (["--data.crop_pct", "1"], (13, 17), 1.0, "bicubic"),
        (["--data.interpolation", "bilinear"], (13, 17), 0.7, "bilinear"),
    ):
        images, shown, data = fed(monkeypatch, "test", checkpoint, *folder, *argv)
        expected = torch.stack([resize_and_crop(picture, size, crop_pct, interpolation) for picture in shown])
        torch.testing.assert_close(images, data.augmenter.normalize(expected))


@pytest.mark.filterwarnings("ignore")
def test_images_of_one_size_are_not_cut(tmp_path, monkeypatch):
    """Digits, like CIFAR, are brought to the checkpoint's size as a whole."""
    model = va.create_model("resnet8_cifar", num_classes=10, img_size=(13, 17), width=5)
    model.config["preprocess"] |= SETTINGS
    seen: list[Any] = []
    monkeypatch.setattr(evaluate, "_report", lambda verb, path, model, data, *_: seen.append(data))
    path = va.save_model(model, tmp_path / "model")
    assert main(["test", "--ckpt_path", str(path), "--data.name", "digits", "--trainer.accelerator", "cpu"]) == 0
    assert seen[0].img_size == (13, 17)
    assert (seen[0].preprocess["crop_pct"], seen[0].preprocess["interpolation"]) == (1.0, "bilinear")


@pytest.mark.filterwarnings("ignore")
def test_a_run_keeps_its_way_of_cropping(pictures, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("mine.yaml").write_text(
        f"data: {{name: image_folder, root: {pictures}, img_size: [13, 17], crop_pct: 0.6, interpolation: lanczos,\n"
        "  batch_size: 7}\n"
        "model: {name: resnet8_cifar, args: {width: 5}}\n"
        "trainer: {max_epochs: 1, accelerator: cpu, enable_progress_bar: false, precision: 32-true}\n"
        "watch_attention: false\n"
    )
    assert main(["fit", "--config", "mine.yaml"]) == 0
    run = Path("runs/mine/0")
    kept = torch.load(run / "checkpoints" / "last.ckpt", weights_only=True)["hyper_parameters"]["config"]
    for config in (kept, json.loads((run / "config.json").read_text())):
        assert (config["preprocess"]["crop_pct"], config["preprocess"]["interpolation"]) == (0.6, "lanczos")
    model = va.load_model(run / "checkpoints" / "best.ckpt")
    images, shown, data = fed(monkeypatch, "test", run / "checkpoints" / "best.ckpt")
    torch.testing.assert_close(images, preprocess(shown, model.config))
    data.setup("fit")
    rows = data.source._rows("train")[2].tolist()
    trained = [read_image(data.source._files["train"][0][row]) for row in rows]
    torch.testing.assert_close(data.plain_images(99), preprocess(trained, model.config))
    # a slip is one message
    assert main(["fit", "--config", "mine.yaml", "--data.crop_pct", "1.5"]) == 2
    error = capsys.readouterr().err.strip()
    assert "data.crop_pct is 1.5: expected a share of the image, 0.05 to 1" in error
    assert len(error.splitlines()) == 1
