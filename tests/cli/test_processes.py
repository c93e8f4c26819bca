"""What only real processes show: kill -9, Ctrl-C, SIGTERM, two processes that train together."""

import csv
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from vision_attn.cli.main import main
from vision_attn.training.run_folder import RunFolder

RECIPE = """
data: {name: digits, batch_size: 25, max_images: 600, augment: {crop_padding: 1}}
model:
  name: vit_tiny_patch16_224
  args: {patch_size: 4, embed_dim: 12, depth: 2, num_heads: 3, drop_path: 0.2}
  optimizer: {name: adamw, lr: 3.0e-3}
trainer: {max_epochs: 4, accelerator: cpu, enable_progress_bar: false}
ema: {decay: 0.95}
"""


@pytest.fixture(autouse=True)
def _here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    Path("r.yaml").write_text(RECIPE)
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def start(*argv, **options):
    command = [sys.executable, "-m", "vision_attn", "fit", "--config", *argv]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, **options)


def wait_for(condition, process, seconds=180.0):
    end = time.monotonic() + seconds
    while not condition():
        assert process.poll() is None, process.stdout.read()
        assert time.monotonic() < end, "the run did not get that far"
        time.sleep(0.005)


def weights(folder, name="last"):
    return torch.load(Path(folder) / "checkpoints" / f"{name}.ckpt", weights_only=True)


def same(a, b):
    for key in ("state_dict", "current_model_state"):
        torch.testing.assert_close(a[key], b[key], rtol=0, atol=0)


def test_resume_after_kill_9_is_bit_for_bit():
    """Killed in the second epoch, behind its mid-epoch checkpoint; the other run never stopped."""
    process = start("r.yaml", "--save_every", "0.001s")
    run = Path("runs/r/0")
    try:
        wait_for((run / "metrics.csv").is_file, process)
        seen = set()  # of the saves after it, the first is that of the epoch's end
        wait_for(lambda: seen.add(os.stat(run / "checkpoints/last.ckpt").st_mtime_ns) or len(seen) > 4, process)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    killed = weights(run)
    assert killed["global_step"] % 24 != 0  # in mid-epoch
    assert killed["global_step"] < 96
    assert main(["fit", "--config", "r.yaml", "--ckpt_path", "last"]) == 0
    assert not Path("runs/r/1").exists()
    assert main(["fit", "--config", "r.yaml"]) == 0
    same(weights("runs/r/0"), weights("runs/r/1"))
    a, b = (Path(f"runs/r/{n}/metrics.csv").read_text().splitlines() for n in (0, 1))
    assert len(a) == len(b) == 5
    a, b = (json.loads(Path(f"runs/r/{n}/summary.json").read_text()) for n in (0, 1))
    assert a["val/acc"] == b["val/acc"]


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)], ids=["Ctrl-C", "SIGTERM"])
def test_a_signal_saves_and_says_how_to_resume(number, code):
    """Ctrl-C of a user, SIGTERM of a cluster whose time is up."""
    process = start("r.yaml", "--trainer.max_epochs", "2000")
    run = Path("runs/r/0")
    try:
        wait_for((run / "metrics.csv").is_file, process)
        process.send_signal(number)
        out = process.communicate(timeout=60)[0]
    finally:
        process.kill()
    assert process.returncode == code, out
    assert "the state is saved in runs/r/0/checkpoints/last.ckpt" in out
    assert "Traceback" not in out
    assert not list(run.rglob(".*.tmp"))
    step = weights(run)["global_step"]
    program, *again = shlex.split(re.search(r"to go on: (.*)", out)[1])
    assert program == "vision-attn"
    assert {"fit", "r.yaml", "2000", "--ckpt_path"} <= set(again)
    assert main([*again, "--trainer.max_steps", str(step + 3)]) == 0
    assert weights(run)["global_step"] == step + 3


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)], ids=["Ctrl-C", "SIGTERM"])
@pytest.mark.parametrize("again", [False, True], ids=["a new run", "a resumed run"])
def test_a_signal_ends_a_run_that_saves_nothing_at_once(number, code, again, monkeypatch, capsys):
    """And nothing is said to be saved that is not."""
    argv = ["fit", "--config", "r.yaml"]
    if again:
        assert main([*argv, "--trainer.max_epochs", "1"]) == 0
        argv += ["--ckpt_path", "last"]
    steps = []

    def count(self, trainer, *args):
        steps.append(trainer.global_step)
        if len(steps) == 3:
            signal.raise_signal(number)

    monkeypatch.setattr(RunFolder, "on_train_batch_start", count)
    capsys.readouterr()
    assert main([*argv, "--trainer.enable_checkpointing", "false"]) == code
    said = capsys.readouterr().err
    assert len(steps) == 3
    assert "state is saved first" not in said
    assert ("an earlier state is saved in" if again else "stopped before anything was saved") in said


def rows(folder):
    with (Path(folder) / "metrics.csv").open() as file:
        return [{k: float(v) for k, v in row.items() if v} for row in csv.DictReader(file)]


def test_two_processes_equal_one():
    """The same global batch gives the same losses; validation and test images count once each."""
    plain = ["--model.args.drop_path", "0", "--trainer.max_epochs", "2", "--test", "true"]
    together = "--trainer.devices 2 --trainer.strategy ddp --data.batch_size 25 --data.eval_batch_size 37"
    process = start("r.yaml", *plain, *together.split())
    out = process.communicate(timeout=150)[0]
    assert process.returncode == 0, out
    assert main(["fit", "--config", "r.yaml", *plain, "--data.batch_size", "50"]) == 0
    assert sorted(p.name for p in Path("runs/r").iterdir()) == ["0", "1"]  # one folder per run, not per process
    two, one = rows("runs/r/0"), rows("runs/r/1")
    for a, b in zip(two, one, strict=True):
        for key in ("step", "lr", "train/acc", "val/acc"):
            assert a[key] == b[key]
        for key in ("train/loss", "val/loss"):
            assert a[key] == pytest.approx(b[key], rel=1e-4)
    a, b = (json.loads(Path(f"runs/r/{n}/summary.json").read_text()) for n in (0, 1))
    assert a["test/acc"] == b["test/acc"]
    torch.testing.assert_close(
        weights("runs/r/0")["state_dict"], weights("runs/r/1")["state_dict"], rtol=1e-3, atol=1e-4
    )


@pytest.mark.slow  # three starts of two processes
def test_two_processes_go_on_with_their_sums():
    """Killed in mid-epoch; the row of that epoch is about all of it, and counts no image of either process twice."""
    plain = ["--model.args.drop_path", "0", "--trainer.max_epochs", "2"]
    together = ["r.yaml", *plain, "--trainer.devices", "2", "--trainer.strategy", "ddp"]
    process = start(*together, "--save_every", "0.001s", start_new_session=True)
    run = Path("runs/r/0")
    try:
        wait_for((run / "metrics.csv").is_file, process)
        seen = set()
        wait_for(lambda: seen.add(os.stat(run / "checkpoints/last.ckpt").st_mtime_ns) or len(seen) > 4, process)
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    killed = weights(run)
    done = killed["global_step"] % 12
    assert done != 0
    assert killed["running_means"]["images"] == 50 * done
    process = start(*together, "--ckpt_path", "last")
    out = process.communicate(timeout=150)[0]
    assert process.returncode == 0, out
    assert main(["fit", "--config", "r.yaml", *plain, "--data.batch_size", "50"]) == 0
    for a, b in zip(rows("runs/r/0"), rows("runs/r/1"), strict=True):
        for key in ("step", "lr", "train/acc", "val/acc"):
            assert a[key] == b[key]
        assert a["train/loss"] == pytest.approx(b["train/loss"], rel=1e-4)
