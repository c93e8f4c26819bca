"""fit, validate and test of a detector from the command line, on a tiny set in COCO's layout."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from vision_attn.cli.main import main
from vision_attn.training import fitting

RECIPE = """
task: detection
data: {{name: coco, root: {root}, img_size: 48, max_size: 96, batch_size: 5, eval_batch_size: 2}}
model:
  name: dn_detr_tiny
  args: {{embed_dim: 24, num_heads: 3, enc_layers: 1, dec_layers: 2, num_queries: 7, mlp_ratio: 2.0}}
  lr_backbone: 5.0e-4
  criterion: {{loss: varifocal, cost_bbox: 4.0}}
  optimizer: {{name: adamw, lr: 2.0e-3}}
trainer: {{max_epochs: 2, accelerator: cpu, gradient_clip_val: 0.1, enable_progress_bar: false}}
"""


@pytest.fixture(autouse=True)
def _one_thread(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


@pytest.fixture(scope="module")
def folder(tmp_path_factory, write_coco) -> Path:
    """A folder with a recipe, its data and a finished run."""
    folder = tmp_path_factory.mktemp("detector")
    write_coco(folder / "data", {"train2017": 14, "val2017": 5})
    write_coco(folder / "others", {"train2017": 5, "val2017": 3}, {3: "red", 7: "yellow", 20: "blue"})
    write_coco(folder / "more", {"train2017": 5, "val2017": 3}, {3: "red", 90: "white"})
    (folder / "small.yaml").write_text(RECIPE.format(root=folder / "data"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fitting, "draw", lambda *args: None)  # pictures are tested elsewhere, and take the most time
        assert main(["fit", "--config", str(folder / "small.yaml"), "--trainer.default_root_dir", str(folder)]) == 0
    return folder


def summary(run: Path) -> dict:
    return json.loads((run / "summary.json").read_text())


def printed(text: str) -> dict[str, float]:
    rows = [line.split() for line in text.splitlines()]
    return {row[0]: float(row[1]) for row in rows if len(row) == 2 and row[0].startswith("val/")}


@pytest.mark.parametrize("what", ["checkpoints/best.ckpt", "model.safetensors"])
def test_validate_says_what_fit_said(folder, what, capsys):
    run = folder / "small" / "0"
    assert main(["validate", "--ckpt_path", str(run / what)]) == 0
    got, expected = printed(capsys.readouterr().out), summary(run)
    assert got.keys() >= {"val/ap", "val/ap50", "val/ap75", "val/ar_100", "val/loss"}
    for key in ("val/ap", "val/ap50", "val/ar_100"):
        assert got[key] == pytest.approx(expected[key], abs=1e-4)


def test_validate_takes_the_size_of_the_checkpoint(folder, capsys):
    """With the data's name alone: shorter side 48, longer at most 96, as in training."""
    argv = ["validate", "--ckpt_path", str(folder / "small" / "0" / "model.safetensors"), "--task", "detection"]
    (folder / "alone.yaml").write_text(f"task: detection\ndata: {{name: coco, root: {folder / 'data'}}}\n")
    assert main([*argv, "--config", str(folder / "alone.yaml"), "--trainer.accelerator", "cpu"]) == 0
    got = printed(capsys.readouterr().out)
    assert got["val/ap"] == pytest.approx(summary(folder / "small" / "0")["val/ap"], abs=1e-4)


@pytest.mark.parametrize(
    ("data", "says"),
    [
        ("others", "category 7 is 'green' in the checkpoint and 'yellow' in the data"),
        ("more", r"knows no category 90 ('white') of the data set"),
    ],
)
def test_other_classes_are_refused(folder, data, says, capsys):
    argv = ["validate", "--ckpt_path", str(folder / "small" / "0"), "--data.root", str(folder / data)]
    assert main(argv) == 2
    assert says in capsys.readouterr().err


def test_two_processes_train_and_evaluate_together(folder, tmp_path, capsys):
    """Five validation images, three and two: their average precision is what one process finds."""
    argv = [sys.executable, "-m", "vision_attn", "fit", "--config", str(folder / "small.yaml")]
    options = [
        "--trainer.devices",
        "2",
        "--trainer.strategy",
        "ddp",
        "--data.batch_size",
        "3",
        "--trainer.max_epochs",
        "1",
    ]
    command = [*argv, *options, "--trainer.default_root_dir", str(tmp_path)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=280)
    assert result.returncode == 0, result.stderr
    run = tmp_path / "small" / "0"
    assert main(["validate", "--ckpt_path", str(run), "--trainer.devices", "1", "--trainer.strategy", "auto"]) == 0
    got, expected = printed(capsys.readouterr().out), summary(run)
    for key in ("val/ap", "val/ap50", "val/ar_100"):
        assert got[key] == pytest.approx(expected[key], abs=1e-4)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--model.criterion.loss", "softmax"], "criterion.loss softmax does not fit a sigmoid head"),
        (["--model.criterion.cost_bbox", "-1"], "criterion.cost_bbox must not be negative"),
        (["--model.criterion.cost_box", "1"], "Did you mean model.criterion.cost_bbox"),
        (["--model.lr_backbone", "-1"], "lr_backbone must not be negative"),
        (["--model.name", "resnet20_cifar"], "is a model for classification and finds no boxes"),
    ],
)
def test_mistakes_are_one_message(folder, tmp_path, options, says, capsys):
    argv = ["fit", "--config", str(folder / "small.yaml"), "--trainer.default_root_dir", str(tmp_path)]
    if options[0] == "--model.name":
        (tmp_path / "r.yaml").write_text((folder / "small.yaml").read_text().replace("dn_detr_tiny", options[1]))
        text = (tmp_path / "r.yaml").read_text()
        lines = [line for line in text.splitlines() if not line.strip().startswith("args:")]
        (tmp_path / "r.yaml").write_text("\n".join(lines))
        argv[2], options = str(tmp_path / "r.yaml"), []
    assert main([*argv, *options]) == 2
    error = capsys.readouterr().err
    assert says in error
    assert "Traceback" not in error
    assert not list(tmp_path.glob("small/*"))
