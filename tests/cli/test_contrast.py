"""``vision-attn contrast`` as a user calls it."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from vision_attn.cli.contrast import configuration, split_arguments
from vision_attn.cli.main import main
from vision_attn.contrast import runner
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
    assert main([*words, "--seeds", "3"]) == 2
    assert "seeds (2 there, 3 here)" in capsys.readouterr().err


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
