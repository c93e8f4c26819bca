"""``vision-attn contrast`` as a user calls it."""

from __future__ import annotations

import csv
import dataclasses
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from PIL import Image

from vision_attn.cli import contrast as command
from vision_attn.cli.contrast import configuration, split_arguments
from vision_attn.cli.main import main
from vision_attn.contrast import estimate, runner
from vision_attn.contrast.results import TRIAL_SEED
from vision_attn.contrast.training import Trainings
from vision_attn.errors import UserError

RECIPES = sorted((Path(__file__).parents[2] / "recipes").glob("contrast_*.yaml"))
PROMISED = {"contrast_digits", "contrast_cifar10", "contrast_cifar10_small", "contrast_cifar100"}

TINY = """
models:
  vit: {name: vit_tiny_patch16_224, args: {patch_size: 4, embed_dim: 14, depth: 1, num_heads: 2}}
  cnn: {name: resnet8_cifar, args: {width: 3}}
data: {name: digits}
sizes: [0.02, 0.1]
arms: [none]
noise: {levels: []}
seeds: 2
small_seeds: 2
steps: 5
batch_size: 11
learning_rates: [1.0e-3]
evaluations: 2
match: false
device: cpu
"""


@pytest.fixture
def recipe(tmp_path):
    path = tmp_path / "tiny.yaml"
    path.write_text(TINY)
    return path


@pytest.fixture
def _no_report(monkeypatch):
    monkeypatch.setattr(runner, "report", lambda study: None)


def test_options_of_the_study_and_of_its_running_are_told_apart():
    words = "--config a.yaml --jobs 2 --quick --sizes [0.1,1] --output=x --seeds=3 --ray auto --dry_run"
    ours, study = split_arguments(words.split())
    assert ours == ["--jobs", "2", "--quick", "--output=x", "--ray", "auto", "--dry_run"]
    assert study == ["--config", "a.yaml", "--sizes", "[0.1,1]", "--seeds=3"]


def test_every_key_of_a_recipe_is_an_option(recipe, tmp_path):
    (tmp_path / "more.yaml").write_text("data: {val_fraction: 0.2}\nseeds: 4\n")
    words = (
        f"--config {recipe} --config {tmp_path / 'more.yaml'} --models.vit.args.depth 3 --noise.levels=[0.3] --seeds 5"
    )
    config, paths = configuration(words.split())
    assert [path.name for path in paths] == ["tiny.yaml", "more.yaml"]
    assert config.models["vit"].args == {"patch_size": 4, "embed_dim": 14, "depth": 3, "num_heads": 2}
    assert (config.data.name, config.data.val_fraction) == ("digits", 0.2)
    assert (config.seeds, config.noise.levels) == (5, [0.3])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--seed 3", "unknown option seed.*Did you mean seeds"),
        ("--data.nme digits", r"unknown option data\.nme.*data\.name"),
        ("--noise.levels 0.2", r"noise\.levels: expected"),
        ("--seeds three", "seeds: expected int, got three"),
        ("--models.cnn.nam x", "unknown option.*nam"),
        ("--seeds", "--seeds needs a value"),
        ("--sizes [0.1", "cannot be read as YAML"),
        ("--jobs 0", "--jobs must be 1 or more"),
        ("--quik", "--quik needs a value"),
        ("--models.cnn null", "models"),
        ("--sizes [0.02,0.1,0.1000000001]", r"sizes: 0\.1 and 0\.1000000001 of 1257 training images are the same 126"),
        ("--learning_rates [0.1,0.1000000001]", r"learning_rates: 0\.1 and 0\.1000000001 would share the folder"),
        ("--optimizer.lr 0.1", r"optimizer\.lr is 0\.1, which no training would use"),
        ("--rule.alpha .nan", r"rule\.alpha is nan: expected"),
    ],
)
def test_a_wrong_argument_is_one_message(recipe, tmp_path, capsys, words, message):
    assert main(["contrast", "--config", str(recipe), "--output", str(tmp_path / "out"), *words.split()]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert "Traceback" not in error
    assert re.search(message, error), error
    assert not (tmp_path / "out").exists()


def test_no_recipe_at_all(capsys):
    assert main(["contrast"]) == 2
    assert "--config recipes/contrast_digits.yaml" in capsys.readouterr().err
    with pytest.raises(UserError, match="no recipe file"):
        configuration(["--config", "contrast_digit"])


def test_help_is_light():
    code = """
import sys
from vision_attn.cli.main import main
try:
    main(["contrast", "--help"])
finally:
    print("torch" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert "--dry_run" in done.stdout
    assert "learning_rates" in done.stdout
    assert done.stdout.rstrip().endswith("False")


def test_a_dry_run_shows_the_grid_and_its_cost(recipe, tmp_path, capsys):
    output = tmp_path / "out"
    assert main(["contrast", "--config", str(recipe), "--output", str(output), "--dry_run", "--jobs", "3"]) == 0
    shown = capsys.readouterr().out
    assert "12 trainings" in shown  # two models at two sizes: one trial and two seeds each
    assert "3 side by side" in shown
    assert "learning rates" in shown
    assert not output.exists()


def test_the_cost_of_a_dry_run_is_the_sum_of_its_cells(recipe, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(estimate, "measure_speed", lambda plan: {(m, "none"): (0.5, 0.01) for m in ("vit", "cnn")})
    assert (
        main(["contrast", "--config", str(recipe), "--output", str(tmp_path / "out"), "--dry_run", "--jobs", "3"]) == 0
    )
    shown = capsys.readouterr().out
    # 5 steps of half a second; two evaluations of 25 or 126 training and 270 validation images, the same once more at
    # the end, and for what is no trial twice the 270 test images, at a hundredth of a second each
    trial = [2.5 + 0.01 * 3 * (n + 270) for n in (25, 126)]
    cell = [seconds + 0.01 * 2 * 270 for seconds in trial]
    total = 2 * sum(trial) + 4 * sum(cell)
    assert total == pytest.approx(197.58)
    assert "12 trainings, 3.3 minutes of computing; about 1.2 minutes 3 side by side" in shown  # 197.58 / 3 + 5 s
    rows = [line.split("│")[1:-1] for line in shown.splitlines() if line.startswith("│")]
    assert [int(row[-1]) for row in rows] == [round(2 * s) for s in trial] + [round(4 * s) for s in cell]


@pytest.mark.parametrize("capable", [True, False])
def test_bfloat16_only_where_the_processor_has_it(recipe, tmp_path, capsys, monkeypatch, capable):
    from vision_attn.training import precision

    monkeypatch.setattr(precision, "multiplies_bfloat16", lambda device: capable)
    monkeypatch.setattr(runner, "make_plan", lambda config: (_ for _ in ()).throw(UserError(config.precision)))
    words = ["contrast", "--config", str(recipe), "--precision", "bf16-mixed", "--dry_run"]
    assert main(words) == 2
    error = capsys.readouterr().err
    assert ("no bfloat16 instructions" in error) != capable
    assert error.endswith(f"error: {'bf16-mixed' if capable else '32-true'}\n")


@pytest.mark.usefixtures("_no_report")
def test_a_study_from_recipe_to_tables_and_again(recipe, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = ["contrast", "--config", str(recipe), "--jobs", "1", "--output", "out"]
    assert main(words) == 0
    captured = capsys.readouterr()
    assert "8 of 8 trainings done, 0 failed" in captured.out
    facts = json.loads(Path("out/study.json").read_text())
    assert facts["command"] == " ".join(["vision-attn", *words])
    runs = Path("out/runs.csv").read_text()
    before = {path: path.stat().st_mtime_ns for path in Path("out/cells").rglob("*")}
    assert main(words) == 0  # nothing is left to do, so no job is started
    assert "going on" in capsys.readouterr().err
    assert {path: path.stat().st_mtime_ns for path in Path("out/cells").rglob("*")} == before
    assert Path("out/runs.csv").read_text() == runs
    config, _ = configuration(["--config", "out/config.yaml"])
    assert config.hash() == facts["config_hash"]
    head = Path("out/config.yaml").read_text()
    assert all(f"# {key}: {facts[key]}\n" in head for key in ("config_hash", "data_hash", "version", "code"))
    assert main([*words, "--seeds", "3"]) == 2
    assert "seeds (2 there, 3 here)" in capsys.readouterr().err
    monkeypatch.setattr(runner, "code_hash", lambda: "0ther")
    assert main(words) == 0
    assert f"begun by other code ({facts['code']}, now 0ther)" in capsys.readouterr().err


def test_quick_is_a_whole_study_with_its_report(recipe, tmp_path, capsys):
    words = ["contrast", "--config", str(recipe), "--quick", "--jobs", "1", "--arms", "[none, full]"]
    assert (
        main([*words, "--noise.levels", "[0.4]", "--sizes", "[0.02, 0.05, 0.1]", "--output", str(tmp_path / "out")])
        == 0
    )
    assert "8 of 8 trainings done, 0 failed" in capsys.readouterr().out  # two sizes, one arm, no wrong labels
    tree = json.loads((tmp_path / "out" / "contrast.json").read_text())
    assert {(e["size"], e["arm"], e["noise"]) for e in tree["estimates"]} == {(0.05, "none", 0), (0.1, "none", 0)}
    assert "--quick" in (tmp_path / "out" / "report.html").read_text()


def test_quick_takes_any_first_arm(recipe, capsys):
    words = ["contrast", "--config", str(recipe), "--arms", "[flip_crop, none]", "--noise.levels", "[0.4]"]
    assert main([*words, "--quick", "--dry_run"]) == 0
    assert "flip_crop" in capsys.readouterr().out


def folder_of_images(root):
    """Three classes of plain colours with noise, in train, val and test."""
    rng = np.random.default_rng(0)
    for split, count in (("train", 12), ("val", 4), ("test", 4)):
        for at, name in enumerate(("blue", "green", "red")):
            for number in range(count):
                pixels = rng.integers(0, 80, (8, 8, 3), dtype=np.uint8)
                pixels[..., 2 - at] += 120
                path = root / split / name / f"{number:02}.png"
                path.parent.mkdir(parents=True, exist_ok=True)
                Image.fromarray(pixels).save(path)


def test_a_folder_of_images_that_workers_decode(recipe, tmp_path, capsys):
    folder_of_images(tmp_path / "pictures")
    data = {"name": "image_folder", "root": str(tmp_path / "pictures"), "img_size": 8, "memory_limit_mb": 0}
    changes = {"data": {**data, "num_workers": 1}, "sizes": [1.0], "steps": 4, "eval_images": 6}
    (tmp_path / "folder.yaml").write_text(yaml.safe_dump(changes))
    output = tmp_path / "out"
    words = ["contrast", "--config", str(recipe), "--config", str(tmp_path / "folder.yaml"), "--jobs", "1"]
    assert main([*words, "--output", str(output)]) == 0
    captured = capsys.readouterr()
    assert "4 of 4 trainings done, 0 failed" in captured.out
    assert "failed" not in captured.err
    page = (output / "report.html").read_text()
    assert "image_folder: 36 training, 12 validation, 12 test images" in page
    with (output / "curves.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 4 * 2
    for row in rows:  # six images, two of each class
        assert float(row["val_acc"]) * 6 == pytest.approx(round(float(row["val_acc"]) * 6))
    memory = ["--data.num_workers", "0", "--data.memory_limit_mb", "9", "--output", str(tmp_path / "memory")]
    assert main([*words, *memory]) == 0
    with (tmp_path / "memory" / "curves.csv").open() as file:
        kept = list(csv.DictReader(file))
    numbers = ("id", "step", "train_loss", "train_acc", "val_loss", "val_acc")
    for row, other in zip(rows, kept, strict=True):  # where the images lie does not change a number
        assert [row[key] for key in numbers] == [other[key] for key in numbers]


def heed_interrupts():
    """What a shell starts in the background, as these tests may be, ignores SIGINT, and so does all that it starts."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def test_ctrl_c_keeps_what_has_ended_and_says_how_to_go_on(recipe, tmp_path):
    output = tmp_path / "out"
    words = ["contrast", "--config", str(recipe), "--steps", "[5, 100000]", "--jobs", "1", "--output", str(output)]
    process = subprocess.Popen(
        [sys.executable, "-m", "vision_attn", *words],
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,  # a group of its own, to which the signal goes as from a keyboard
        preexec_fn=heed_interrupts,
    )
    deadline = time.monotonic() + 300
    while not list(output.glob("trials/vit-10pct*/cell.json")) and time.monotonic() < deadline:
        time.sleep(0.05)
        assert process.poll() is None, process.stderr.read()
    os.killpg(process.pid, signal.SIGINT)
    _, error = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "Go on with" in error
    assert f"--output {output}" in error
    assert "Traceback" not in error
    assert len(list(output.glob("trials/*/result.json"))) == 2  # the small subsets
    assert not (output / "report.html").exists()  # nothing to report yet


def test_ctrl_c_leaves_a_report_of_what_has_ended(recipe, tmp_path, capsys, monkeypatch):
    run = Trainings.run

    def run_three(self, cell):
        if cell.seed != TRIAL_SEED and len(list((tmp_path / "out").glob("cells/*/result.json"))) == 3:
            raise KeyboardInterrupt
        return run(self, cell)

    class Here:
        def __init__(self, plan):
            self.trainings, self.closed = Trainings(plan.config, data=plan.data), False

        def run(self, cells, started):
            for cell in cells:
                started(cell)
                yield cell, self.trainings.run(cell)

        def close(self):
            self.closed = True

    monkeypatch.setattr(Trainings, "run", run_three)
    monkeypatch.setattr(command, "_executor", lambda plan, jobs, ray: Here(plan))
    words = ["contrast", "--config", str(recipe), "--output", str(tmp_path / "out")]
    assert main(words) == 130
    error = capsys.readouterr().err
    assert f"Go on with:\n  vision-attn {' '.join(words)}" in error
    assert "it is marked as not finished" in error
    assert "Not finished: 5 of 8 trainings are still to be run." in (tmp_path / "out" / "report.html").read_text()
    monkeypatch.setattr(Trainings, "run", run)
    assert main(words) == 0
    assert "Not finished" not in (tmp_path / "out" / "report.html").read_text()


class Cluster:
    """A Ray pool that computes here, for a driver without the devices of the cluster."""

    device = "GPUs of a Ray cluster"

    def __init__(self, config, data, address):
        assert (config.device, address) == ("cuda", "head:6379")
        self.trainings = Trainings(dataclasses.replace(config, device="cpu"), data=data)

    def run(self, cells, started):
        for cell in cells:
            started(cell)
            yield cell, self.trainings.run(cell)

    def close(self):
        pass


@pytest.mark.usefixtures("_no_report")
@pytest.mark.skipif(torch.cuda.is_available(), reason="a machine without a GPU is wanted")
def test_ray_with_gpus_needs_none_here(recipe, tmp_path, capsys, monkeypatch):
    from vision_attn.contrast import ray_runner

    monkeypatch.setattr(ray_runner, "RayPool", Cluster)
    words = ["contrast", "--config", str(recipe), "--output", str(tmp_path / "out"), "--device", "cuda"]
    assert main([*words, "--ray", "head:6379"]) == 0
    assert "8 of 8 trainings done" in capsys.readouterr().out
    assert json.loads((tmp_path / "out" / "study.json").read_text())["machine"]["device"] == "GPUs of a Ray cluster"
    assert main(words) == 2
    assert "no such device" in capsys.readouterr().err


@pytest.mark.slow  # the command line's option; that a killed worker costs nothing, tests/contrast/test_ray.py says
@pytest.mark.usefixtures("_no_report")
def test_a_study_on_a_ray_of_this_machine(recipe, tmp_path, capsys, monkeypatch):
    pytest.importorskip("ray", reason="Ray (the extra `ray`) is not installed: cells on a cluster are not tested")
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    words = ["contrast", "--config", str(recipe), "--output", str(tmp_path / "out"), "--sizes", "[0.1]"]
    assert main([*words, "--ray", "local"]) == 0
    assert "4 of 4 trainings done, 0 failed" in capsys.readouterr().out
    assert "--ray local" in json.loads((tmp_path / "out" / "study.json").read_text())["command"]


def test_no_ray_at_an_address_is_one_message(recipe, tmp_path, capsys, monkeypatch):
    pytest.importorskip("ray", reason="Ray (the extra `ray`) is not installed")
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    output = tmp_path / "out"
    assert main(["contrast", "--config", str(recipe), "--output", str(output), "--ray", "127.0.0.1:1"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: --ray 127.0.0.1:1: no Ray cluster answers")
    assert len(error.splitlines()) <= 2
    assert not output.exists()


def test_the_promised_recipes_exist():
    assert {path.stem for path in RECIPES} >= PROMISED


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_a_recipe_says_its_command_and_is_a_valid_study(path):
    head = path.read_text().split("\nmodels:")[0]
    assert f"vision-attn contrast --config recipes/{path.name}" in head
    assert "easured" in head  # a figure, or that there is none
    config, _ = configuration(["--config", str(path)])
    assert config.hash() == configuration(["--config", str(path)])[0].hash()
    assert config.seeds >= 3
    assert all(config.seeds_at(size) >= 5 for size in config.sizes if size <= 0.05)
    assert yaml.safe_load(path.read_text())["models"].keys() == config.models.keys()


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_the_models_of_a_recipe_are_of_one_size(path):
    from vision_attn.contrast.matching import check_match, measure_models

    config, _ = configuration(["--config", str(path)])
    classes, side = {"digits": (10, 8), "cifar10": (10, 32), "cifar100": (100, 32)}[config.data.name]
    check_match(config, measure_models(config, classes, (side, side)), classes, (side, side))
