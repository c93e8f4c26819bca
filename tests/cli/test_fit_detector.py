"""fit, validate and test of a detector from the command line, on a tiny set in COCO's layout."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import timm
import torch

import vision_attn as va
from vision_attn.cli.main import main
from vision_attn.layers.resnet import ResNet
from vision_attn.training import fitting
from vision_attn.training.run_folder import read_metrics

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


def test_validate_measures_the_loss_that_fit_minimized(folder, capsys):
    """This run has a varifocal loss, of which nothing is written in the checkpoint: its configuration says so."""
    run = folder / "small" / "0"
    rows = read_metrics(run / "metrics.csv")
    best = max(rows, key=lambda row: (row["val/ap"], row["step"]))
    command = ["validate", "--ckpt_path", str(run / "checkpoints" / "best.ckpt")]
    assert main(command) == 0
    assert printed(capsys.readouterr().out)["val/loss"] == pytest.approx(best["val/loss"], rel=1e-3)
    assert main([*command, "--model.criterion.loss", "focal"]) == 0
    assert printed(capsys.readouterr().out)["val/loss"] != pytest.approx(best["val/loss"], rel=1e-2)
    assert main([*command, "--model.criterion.loss", "softmax"]) == 2
    assert "criterion.loss softmax does not fit a sigmoid head" in capsys.readouterr().err


def test_validate_keeps_to_the_largest_number_of_detections(folder, capsys):
    command = ["validate", "--ckpt_path", str(folder / "small" / "0")]
    found = {}
    for cap in (1, 2, 100):
        assert main([*command, "--model.max_detections", str(cap)]) == 0
        found[cap] = printed(capsys.readouterr().out)
    assert "val/ar_100" not in found[1]
    assert found[1]["val/ap50"] < found[100]["val/ap50"]
    assert found[100]["val/ap"] == pytest.approx(summary(folder / "small" / "0")["val/ap"], abs=1e-4)
    # the configuration of a run says it too
    text = (folder / "small.yaml").read_text().replace("  lr_backbone", "  max_detections: 1\n  lr_backbone")
    (folder / "capped.yaml").write_text(text)
    assert main([*command, "--config", str(folder / "capped.yaml")]) == 0
    assert printed(capsys.readouterr().out) == found[1]


def test_test_tells_what_suppression_of_doubles_would_change(folder, capsys):
    argv = [
        "test",
        "--ckpt_path",
        str(folder / "small" / "0"),
        "--data.test_json",
        "annotations/instances_val2017.json",
    ]
    assert main([*argv, "--data.overlap", "allow", "--data.test_images", "val2017"]) == 0
    out = capsys.readouterr().out
    for iou in ("50", "70"):
        (line,) = [line for line in out.splitlines() if line.startswith(f"test/ap_nms{iou}")]
        assert f"with non-maximum suppression at IoU 0.{iou[0]}" in line


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


def test_a_budget_ends_a_run_in_time(folder, tmp_path, monkeypatch, capsys):
    """A detector that would train for a thousand epochs, with validations, stops by itself and is finished."""
    monkeypatch.setattr(fitting, "draw", lambda *args: None)
    argv = ["fit", "--config", str(folder / "small.yaml"), "--budget", "5s", "--trainer.max_epochs", "1000"]
    assert main([*argv, "--trainer.default_root_dir", str(tmp_path)]) == 0
    run = tmp_path / "small" / "0"
    rows, found = read_metrics(run / "metrics.csv"), summary(run)
    assert 1 < found["seconds"] < 20  # other processes may slow down the last step and validation
    assert 1 <= rows[-1]["step"] < 3000
    assert {"val/ap", "val/loss"} <= set(rows[-1])
    assert rows[-1]["lr"] < rows[0]["lr"] or len(rows) == 1  # the schedule ends with the budget
    assert (run / "model.safetensors").is_file()


@pytest.mark.parametrize("backbone", ["timm:test_resnet", "resnet18"])
def test_a_resumed_run_needs_no_weights_of_its_backbone(folder, tmp_path, monkeypatch, backbone):
    """They are in the checkpoint; what follows from their having been given stays as it was."""
    monkeypatch.setattr(fitting, "draw", lambda *args: None)
    options, file = {"widths": [8, 8, 8, 8]}, tmp_path / "backbone.pth"
    whole = (
        timm.create_model("test_resnet") if "timm" in backbone else ResNet((2, 2, 2, 2), bottleneck=False, **options)
    )
    torch.save(whole.state_dict(), file)
    text = (folder / "small.yaml").read_text().replace("args: {", f"args: {{backbone: '{backbone}', ")
    if "timm" not in backbone:
        text = text.replace("args: {", f"args: {{backbone_options: {options}, ")
    (tmp_path / "small.yaml").write_text(text.replace("args: {", f"args: {{backbone_weights: {file}, "))
    argv = ["fit", "--config", str(tmp_path / "small.yaml"), "--trainer.default_root_dir", str(tmp_path)]
    assert main([*argv, "--trainer.max_epochs", "1"]) == 0
    run = tmp_path / "small" / "0"

    def state():
        content = torch.load(run / "checkpoints" / "last.ckpt", weights_only=True)
        return {k: v for k, v in content["state_dict"].items() if k.startswith("model.backbone.")}

    before = state()
    file.unlink()
    assert main([*argv, "--trainer.max_epochs", "2", "--ckpt_path", "last"]) == 0
    after, norms = state(), [key for key in before if "running_" in key]
    assert norms
    assert after.keys() == before.keys()
    torch.testing.assert_close([after[key] for key in norms], [before[key] for key in norms], rtol=0, atol=0)
    assert any(not torch.equal(after[key], before[key]) for key in after)  # it did train
    assert not [m for m in va.load_model(run).modules() if isinstance(m, torch.nn.BatchNorm2d)]
    assert str(file) in (run / "config.yaml").read_text()


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
    assert main(["validate", "--ckpt_path", str(run)]) == 0  # in one process, whatever the run was trained on
    got, expected = printed(capsys.readouterr().out), summary(run)
    for key in ("val/ap", "val/ap50", "val/ar_100"):
        assert got[key] == pytest.approx(expected[key], abs=1e-4)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--model.criterion.loss", "softmax"], "criterion.loss softmax does not fit a sigmoid head"),
        (["--model.criterion.cost_bbox", "-1"], "criterion.cost_bbox must not be negative"),
        (["--model.criterion.cost_box", "1"], "Did you mean model.criterion.cost_bbox"),
        (["--model.args.num_classes", "2"], "model.args.num_classes cannot be set, it comes from the data"),
        (["--model.args.in_chans", "1"], "images of every data set have 3 channels"),
        (["--model.lr_backbone", "-1"], "lr_backbone must not be negative"),
        (["--model.name", "resnet20_cifar"], "is a model for classification, not for detection"),
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
