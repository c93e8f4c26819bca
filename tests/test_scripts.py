"""Scripts that no other test runs."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from PIL import Image

import vision_attn as va
from vision_attn.data.images import read_image
from vision_attn.detection.inference import prepare

ROOT = Path(__file__).resolve().parent.parent
SCRIPTS = sorted(path.stem for path in (ROOT / "scripts").glob("*.py"))


@pytest.fixture
def load(monkeypatch):
    """Imports a script without running it."""

    def load(name):
        spec = importlib.util.spec_from_file_location(name, ROOT / "scripts" / f"{name}.py")
        module = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, name, module)  # where dataclasses look for it
        spec.loader.exec_module(module)
        return module

    return load


@pytest.mark.parametrize("name", SCRIPTS)
def test_every_script_finds_what_it_imports(load, name):
    assert callable(load(name).main)


def test_the_input_pipeline_is_measured(load, tmp_path, monkeypatch, capsys):
    monkeypatch.delenv("VISION_ATTN_DATA", raising=False)  # digits: a small set, always at hand
    options = ["--models", "resnet8_cifar", "--dtype", "float32", "--batch", "4", "--rounds", "1", "--augment", "none"]
    monkeypatch.setattr(sys, "argv", ["benchmark_pipeline", *options, "--json", str(tmp_path / "out.json")])
    script = load("benchmark_pipeline")
    monkeypatch.setattr(script, "keep_freed_memory", lambda: None)  # it is for the whole process
    script.main()
    (row,) = json.loads((tmp_path / "out.json").read_text())["rows"]
    assert row["data"] == "digits"
    assert set(row["ms"]) == {"ready", "pipeline", "alone"}
    assert "resnet8_cifar" in capsys.readouterr().out


def test_attention_is_measured_on_images_as_the_model_knows_them(load, tmp_path, write_coco):
    root = write_coco(tmp_path, {"train2017": 3, "val2017": 4})
    tiny = {"embed_dim": 24, "num_heads": 3, "enc_layers": 1, "dec_layers": 1, "num_queries": 7}
    model = va.create_model("dn_detr_tiny", num_classes=3, img_size=(40, 56), **tiny)
    model.config["preprocess"] |= {"resize": "fit", "mean": [0.4, 0.5, 0.6], "std": [0.2, 0.3, 0.25]}
    images, targets = load("measure_attention_inside").first_images(model, "coco", str(root), "val", 3)
    pictures = [read_image(root / "val2017" / f"{int(target['image_id']):06}.png") for target in targets]
    torch.testing.assert_close(images, prepare(pictures, model.config))
    assert len(images) == 3
    assert all(image.shape[1] == 40 or image.shape[2] == 56 for image in images)


@pytest.fixture
def runs(tmp_path):
    for name, scale in (("dn", 1.0), ("vanilla", 0.1)):
        folder = tmp_path / "runs" / name / "0"
        folder.mkdir(parents=True)
        rows = [f"{i},{100 * i},{60.0 * i},0.1,{scale * i / 10 if i % 2 else ''}" for i in range(1, 6)]
        (folder / "metrics.csv").write_text("epoch,step,seconds,lr,val/ap\n" + "\n".join(rows) + "\n")
    return tmp_path / "runs"


def compare(*arguments):
    command = [sys.executable, str(ROOT / "scripts" / "compare_runs.py"), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


def test_runs_are_compared(runs, tmp_path):
    output = tmp_path / "docs" / "curves.png"
    done = compare("--metric", "val/ap", "--output", output, f"denoising={runs / 'dn' / '0'}", runs / "vanilla" / "0")
    assert done.returncode == 0, done.stderr
    first, second, path = done.stdout.splitlines()
    assert first.startswith("denoising (")
    assert first.endswith("val/ap 0.5000 at step 500, 5.0 min")
    assert second.startswith("vanilla (")
    assert "0.0500" in second
    assert path == str(output)
    with Image.open(output) as picture:
        assert picture.width > 1000


def test_what_cannot_be_compared_is_named(runs, tmp_path):
    output = tmp_path / "curves.png"
    missing = compare("--output", output, tmp_path / "nothing")
    other = compare("--metric", "val/acc", "--output", output, runs / "dn" / "0")
    assert (missing.returncode, other.returncode) == (2, 2)
    assert "no run folder" in missing.stderr
    assert "there are val/ap" in other.stderr
    assert not output.exists()
