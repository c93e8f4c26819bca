"""fit, validate and test from the command line, on digits."""

import json
import os
import pickle
import re
import shlex
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from PIL import Image

import vision_attn as va
from vision_attn.cli.main import main
from vision_attn.data import ImageData

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


def test_an_evaluation_is_of_the_whole_split_however_little_the_run_looked_at(recipe, capsys):
    limits = ["--trainer.limit_val_batches", "0.5", "--trainer.limit_test_batches=1"]
    argv = ["fit", "--config", recipe, "--trainer.max_epochs", "1", "--trainer.accelerator", "cpu"]
    assert main([*argv, "--data.eval_batch_size", "40", "--watch_attention", "false", *limits]) == 0
    run = "runs/small/0"
    said = {}
    for verb, options in (
        ("validate", []),
        ("test", []),
        ("test", ["--trainer.limit_test_batches", "2"]),
        ("validate", ["--trainer.limit_val_batches=0.5"]),
        ("validate", ["--trainer.fast_dev_run", "true"]),
    ):
        capsys.readouterr()
        assert main([verb, "--ckpt_path", run, *options]) == 0
        first, *lines = capsys.readouterr().out.splitlines()
        accuracy = next(line.split()[1] for line in lines if "/acc" in line)
        said[" ".join([verb, *options])] = (re.search(r"on (.+) images of digits", first)[1], float(accuracy))
    seen = [images for images, _ in said.values()]
    assert seen == ["270 val", "270 test", "78 of 270 test", "117 of 270 val", "39 of 270 val"]
    model = va.load_model(run)
    data = ImageData("digits")
    data.prepare_data()
    scans = data.split("val")
    batch = data.on_after_batch_transfer({**scans.batch(torch.arange(270))})
    with torch.no_grad():
        right = (model.eval()(batch["image"]).argmax(1) == batch["label"]).float()
    assert said["validate"][1] == pytest.approx(float(right.mean()), abs=1e-4)
    of_half = json.loads(Path(run, "summary.json").read_text())["val/acc"]
    assert said["validate --trainer.limit_val_batches=0.5"][1] == pytest.approx(of_half, abs=1e-4)


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
    (["--model.args.patch_size", "3"], "patch_size"),
    (["--model.args.img_size", "64"], "model.args.img_size cannot be set, it comes from data.img_size"),
    (["--model.args.num_classes", "3"], "model.args.num_classes cannot be set, it comes from the data"),
    (["--model.args.attention", "{score: dot}"], "model.args.attention cannot be set, it comes from model.attention"),
    (["--model.args.name", "vit"], "model.args.name cannot be set, it comes from model.name"),
    (["--model.args.in_chans", "1"], "model.args.in_chans is 1, but the images of every data set have 3 channels"),
    (["--model.name", "dn_detr_tiny"], "dn_detr_tiny is a model for detection, not for classification"),
    (["--model.name", "dn_detr_tiny", "--model.args", "{}"], "dn_detr_tiny is a model for detection, not for class"),
    (["--model.name", "pointer_lstm"], "pointer_lstm is a model for sorting, not for classification"),
]


@pytest.mark.parametrize(("argv", "message"), MISTAKES, ids=[" ".join(argv) for argv, _ in MISTAKES])
def test_mistakes_on_the_command_line(recipe, capsys, argv, message):
    assert main(["fit", "--config", recipe, *argv]) == 2
    error = capsys.readouterr().err.strip()
    assert error.startswith("error: ")
    assert message in error
    assert len(error.splitlines()) <= 2
    assert not Path("runs").exists()


def spoiled(kind, finished, folder):
    """A file or folder that training cannot go on from, and what else to say on the command line."""
    last = finished / "checkpoints" / "last.ckpt"
    path = folder / f"{kind}.ckpt"
    if kind == "weights":
        return finished / "model.safetensors"
    if kind == "folder":
        path.mkdir()
        (path / "model.safetensors").write_bytes((finished / "model.safetensors").read_bytes())
    elif kind == "truncated":
        path.write_bytes(last.read_bytes()[:-1000])
    elif kind == "text":
        path.write_text("hello, world")
    elif kind == "empty":
        path.touch()
    elif kind == "pickle":
        path.write_bytes(pickle.dumps(os.system))
    elif kind == "no optimizer":
        content = torch.load(last, weights_only=True)
        del content["optimizer_states"]
        torch.save(content, path)
    else:
        return last
    return path


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        ("weights", [], "no state of an optimizer.*name the .ckpt of a run"),
        ("folder", [], "no run: name a folder with checkpoints/last.ckpt"),
        ("truncated", [], "no checkpoint, or a truncated one"),
        ("text", [], "no checkpoint"),
        ("empty", [], "is empty"),
        ("pickle", [], "could run code, so it was not opened"),
        ("no optimizer", [], "no state of an optimizer"),
        ("other size", ["--model.args.embed_dim", "15"], "does not fit vit_tiny_patch16_224.*of another shape"),
        ("other depth", ["--model.args.depth", "2"], "does not fit vit_tiny_patch16_224.*missing"),
        (
            "other model",
            ["--model.name", "resnet8_cifar", "--model.args", "{width: 3}"],
            "run of vit_tiny_patch16_224, and this recipe trains resnet8_cifar",
        ),
    ],
)
def test_what_training_cannot_go_on_from_is_refused_before_anything_is_written(
    recipe, finished, tmp_path, capsys, kind, options, message
):
    path = spoiled(kind, finished, tmp_path)
    call = ["fit", "--config", recipe, "--ckpt_path", str(path), "--trainer.default_root_dir", "new"]
    assert main([*call, *options]) == 2
    error = capsys.readouterr().err.strip()
    assert re.search(message, error), error
    assert len(error.splitlines()) <= 2
    assert not Path("new").exists()


def test_the_hint_names_the_run_that_was_stopped(recipe, capsys, monkeypatch):
    """And not the newest one of the recipe."""
    for _ in range(2):
        assert main(["fit", "--config", recipe, "--trainer.max_epochs", "1"]) == 0
    capsys.readouterr()
    with monkeypatch.context() as patch:
        patch.setattr("vision_attn.training.fitting.draw", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        assert main(["fit", "--config", recipe, "--ckpt_path", "runs/small/0", "--trainer.max_epochs", "2"]) == 130
    error = capsys.readouterr().err
    assert "training is over and saved" in error
    again = shlex.split(error.strip().splitlines()[-1].partition("to go on: vision-attn ")[2])
    assert again[again.index("--ckpt_path") + 1] == "runs/small/0/checkpoints/last.ckpt"
    assert main(again) == 0
    assert Path("runs/small/0/model.safetensors").is_file()


def test_a_test_that_no_images_are_for_is_left_out(recipe, capsys, tmp_path):
    """The layout of the README, train and val, with a recipe that tests at its end."""
    draw = np.random.default_rng(0)
    for split, count in (("train", 7), ("val", 3)):
        for name in ("cat", "dog"):
            (tmp_path / "mine" / split / name).mkdir(parents=True)
            for i in range(count):
                pixels = draw.integers(0, 255, (8, 8, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(tmp_path / "mine" / split / name / f"{i}.png")
    mine = ["--data.name", "image_folder", "--data.root", str(tmp_path / "mine"), "--data.img_size", "8"]
    few = ["--data.batch_size", "5", "--data.max_images", "null"]
    assert main(["fit", "--config", recipe, "--test", "true", "--trainer.max_epochs", "1", *mine, *few]) == 0
    assert "no test images: the test is left out" in capsys.readouterr().err
    assert "test/acc" not in json.loads(Path("runs/small/0/summary.json").read_text())


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
