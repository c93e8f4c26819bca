"""fit, validate and test from the command line, on digits."""

import json
from pathlib import Path

import pytest
import torch
import yaml

from vision_attn.cli.main import main

RECIPE = """
task: classification
data: {name: digits, batch_size: 50, max_images: 200, augment: {crop_padding: 1}}
model:
  name: vit_tiny_patch16_224
  args: {patch_size: 4, embed_dim: 12, depth: 1, num_heads: 3}
  optimizer: {name: adamw, lr: 3.0e-3}
trainer: {max_epochs: 2}
"""


@pytest.fixture(autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def recipe(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("recipes").mkdir()
    Path("recipes/small.yaml").write_text(RECIPE)
    return "recipes/small.yaml"


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A finished run, for the tests that only look at one."""
    folder = tmp_path_factory.mktemp("finished")
    (folder / "small.yaml").write_text(RECIPE)
    argv = ["fit", "--config", str(folder / "small.yaml"), "--trainer.default_root_dir", str(folder)]
    assert main([*argv, "--test", "true", "--ema.decay", "0.9", "--trainer.accelerator", "cpu"]) == 0
    return folder / "small" / "0"


def test_fit_leaves_a_run_folder(finished):
    summary = json.loads((finished / "summary.json").read_text())
    assert summary["recipe"] == "small"
    assert {"val/acc", "test/acc", "seconds", "params", "macs", "data_hash"} <= set(summary)
    assert (finished / "plots" / "learning_curves.png").stat().st_size > 10_000
    config = yaml.safe_load((finished / "config.yaml").read_text())
    assert config["model"]["args"] == {"patch_size": 4, "embed_dim": 12, "depth": 1, "num_heads": 3}
    assert config["ema"]["decay"] == 0.9
    assert "class_path" not in (finished / "config.yaml").read_text()


@pytest.mark.parametrize("what", ["checkpoints/best.ckpt", "model.safetensors", ""])
def test_test_gives_the_accuracy_of_the_run(finished, capsys, what):
    assert main(["test", "--ckpt_path", str(finished / what), "--trainer.accelerator", "cpu"]) == 0
    line = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("test/acc"))
    expected = json.loads((finished / "summary.json").read_text())["test/acc"]
    assert float(line.split()[1]) == pytest.approx(expected, abs=1e-4)


def test_validate_gives_the_accuracy_of_the_run(finished, capsys):
    assert (
        main(["validate", "--ckpt_path", str(finished / "checkpoints/best.ckpt"), "--trainer.accelerator", "cpu"]) == 0
    )
    line = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("val/acc"))
    assert float(line.split()[1]) == pytest.approx(
        json.loads((finished / "summary.json").read_text())["val/acc"], abs=1e-4
    )


def test_a_saved_configuration_repeats_the_run(finished, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["fit", "--config", str(finished / "config.yaml"), "--trainer.default_root_dir", str(tmp_path)]) == 0
    again, first = (json.loads((p / "summary.json").read_text()) for p in (tmp_path / "small" / "0", finished))
    for key in ("val/acc", "test/acc", "params", "data_hash", "config_hash"):
        assert again[key] == first[key]


def test_options_override_the_recipe_by_its_name(recipe, capsys):
    assert main(["fit", "--config", "small", "--budget", "3s", "--model.optimizer.name", "muon"]) == 0
    config = yaml.safe_load(Path("runs/small/0/config.yaml").read_text())
    assert config["model"]["optimizer"]["name"] == "muon"
    assert config["trainer"]["max_epochs"] == -1
    seconds = json.loads(Path("runs/small/0/summary.json").read_text())["seconds"]
    assert 1.0 < seconds < 4.5
    out = capsys.readouterr().out
    assert "val/acc" in out
    assert "runs/small/0" in out


def test_seed_decides(recipe):
    for seed in (1, 1, 2):
        assert main(["fit", "--config", recipe, "--seed_everything", str(seed), "--trainer.max_epochs", "1"]) == 0
    a, b, c = (Path(f"runs/small/{n}/metrics.csv").read_text().splitlines()[1].split(",") for n in range(3))
    loss = Path("runs/small/0/metrics.csv").read_text().splitlines()[0].split(",").index("train/loss")
    assert a[loss] == b[loss] != c[loss]


MISTAKES = [
    (["--model.optimizer.lrr", "1"], "unknown option --model.optimizer.lrr. Did you mean model.optimizer.lr"),
    (["--model.optimzer.lr", "1"], "unknown option --model.optimzer.lr. Did you mean model.optimizer.lr"),
    (["--model.attention.scor", "dot"], "unknown option model.attention.scor. Did you mean model.attention.score"),
    (["--trainer.max_epoch", "1"], "Did you mean trainer.max_epochs"),
    (["--trainer.max_epochs", "many"], "trainer.max_epochs: expected int, got many"),
    (["--model.optimizer.name", "adm"], "model.optimizer.name: expected one of 'adamw', 'sgd', 'muon', got adm"),
    (["--model.optimizer.lr", "-1"], "optimizer.lr must not be negative"),
    (
        ["--model.name", "vit_tinny_patch16_224"],
        "unknown model 'vit_tinny_patch16_224'. Did you mean vit_tiny_patch16_224",
    ),
    (["--model.args.depht", "3"], "depth"),
    (["--data.name", "cifr10"], "cifar10"),
    (["--budget", "soon"], "budget: 'soon' is no duration"),
    (["--save_every", "soon"], "'soon' is no duration"),
    (["--ema.decay", "2"], "ema.decay"),
    (["--task", "clasification"], "unknown task 'clasification'. Did you mean classification"),
    (["--ckpt_path", "last"], "nothing to resume"),
    (["--ckpt_path", "none.ckpt"], "no such checkpoint"),
    (["--model.args.patch_size", "3"], "3"),
]


@pytest.mark.parametrize(("argv", "message"), MISTAKES, ids=[" ".join(argv) for argv, _ in MISTAKES])
def test_mistakes_on_the_command_line(recipe, capsys, argv, message):
    assert main(["fit", "--config", recipe, *argv]) == 2
    error = capsys.readouterr().err.strip()
    assert error.startswith("error: ")
    assert message in error
    assert len(error.splitlines()) <= 2
    assert not Path("runs").exists()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "model: {name: x, optimizer: {lrr: 1}}",
            "unknown option model.optimizer.lrr. Did you mean model.optimizer.lr",
        ),
        (
            "model: {name: x}\ntrainr: {max_epochs: 1}",
            "unknown option trainr.max_epochs. Did you mean trainer.max_epochs",
        ),
        ("model: {name: x}\ndata: {augment: {flp: true}}", "data.augment.flp. Did you mean data.augment.flip"),
        ("model: {name: x", "is no valid YAML"),
        ("- a list", "is no recipe"),
        ("data: {name: digits}", "missing option --model.name"),
        ("model: {name: x, num_classes: 3}", "model.num_classes cannot be set, it comes from the data"),
        ("model: {name: x}\ndata: {seed: 3}", "data.seed cannot be set, it comes from seed_everything"),
    ],
)
def test_mistakes_in_a_recipe(recipe, capsys, text, message):
    Path(recipe).write_text(text)
    assert main(["fit", "--config", recipe]) == 2
    error = capsys.readouterr().err.strip()
    assert message in error
    assert len(error.splitlines()) <= 2


def test_unknown_recipe_offers_near_ones(recipe, capsys):
    assert main(["fit", "--config", "smal"]) == 2
    assert "no recipe file 'smal'. Did you mean small" in capsys.readouterr().err


def test_evaluation_mistakes(finished, capsys):
    assert main(["test"]) == 2
    assert "needs --ckpt_path" in capsys.readouterr().err
    assert main(["test", "--ckpt_path", "nowhere.ckpt"]) == 2
    assert "no such checkpoint" in capsys.readouterr().err


@pytest.mark.parametrize("verb", ["fit", "validate", "test"])
def test_help_lists_the_options(verb, capsys):
    with pytest.raises(SystemExit) as caught:
        main([verb, "--help"])
    assert caught.value.code == 0
    out = capsys.readouterr().out
    for option in ("--config", "--data.name", "--trainer.precision"):
        assert option in out
    assert f"vision-attn {verb}" in out
