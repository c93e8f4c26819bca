"""What ``test`` and ``validate`` refuse: a checkpoint and data that do not belong together."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
from jsonargparse import Namespace
from lightning.pytorch import Trainer
from PIL import Image

import vision_attn as va
from vision_attn.cli.evaluate import OF_A_RUN, reset_trainer
from vision_attn.cli.main import main

VIT = {"patch_size": 8, "embed_dim": 12, "depth": 1, "num_heads": 3}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Pictures of three classes, and models that know three, four and three others."""
    folder = tmp_path_factory.mktemp("evaluate")
    random = np.random.default_rng(0)
    for split in ("train", "val", "test"):
        for label in ("ant", "bee", "cow"):
            (folder / "data" / split / label).mkdir(parents=True)
            for n in range(2):
                pixels = random.integers(0, 255, (16, 16, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(folder / "data" / split / label / f"{n}.png")
    for name, labels in {
        "right": ["ant", "bee", "cow"],
        "four": ["ant", "bee", "cow", "dog"],
        "others": ["ant", "bee", "cat"],
    }.items():
        model = va.create_model("vit_tiny_patch16_224", num_classes=len(labels), img_size=16, **VIT)
        model.config["labels"] = labels
        va.save_model(model, folder / name)
    return folder


def call(verb: str, checkpoint: Path, root: Path, *more: str) -> int:
    data = ["--data.name", "image_folder", "--data.root", str(root), "--data.eval_batch_size", "3"]
    return main([verb, "--ckpt_path", str(checkpoint), *data, "--trainer.accelerator", "cpu", *more])


@pytest.mark.parametrize("verb", ["validate", "test"])
def test_another_number_of_classes_is_refused(folder, capsys, verb):
    assert call(verb, folder / "four", folder / "data") == 2
    error = capsys.readouterr().err.strip()
    assert f"{folder / 'four'} knows 4 classes, the data set 'image_folder' has 3" in error
    assert "--data.name" in error
    assert error.startswith("error: ")
    assert len(error.splitlines()) <= 2


@pytest.mark.parametrize("verb", ["validate", "test"])
def test_a_checkpoint_of_a_run_is_refused_for_other_data(folder, capsys, verb, tmp_path):
    """The run's own configuration is taken, and ``--data.name`` in place of its data."""
    recipe = tmp_path / "small.yaml"
    recipe.write_text(
        "data: {name: digits, batch_size: 50, max_images: 100}\n"
        "model: {name: vit_tiny_patch16_224, args: {patch_size: 4, embed_dim: 12, depth: 1, num_heads: 3}}\n"
        "trainer: {max_steps: 1, accelerator: cpu, enable_progress_bar: false}\n"
        "watch_attention: false\n"
    )
    assert main(["fit", "--config", str(recipe), "--trainer.default_root_dir", str(tmp_path)]) == 0
    path = tmp_path / "small" / "0" / "checkpoints" / "last.ckpt"
    capsys.readouterr()
    assert call(verb, path, folder / "data") == 2
    error = capsys.readouterr().err.strip()
    assert f"{path} knows 10 classes, the data set 'image_folder' has 3" in error
    assert len(error.splitlines()) <= 2


@pytest.mark.parametrize("verb", ["validate", "test"])
def test_as_many_other_classes_are_refused(folder, capsys, verb):
    assert call(verb, folder / "others", folder / "data") == 2
    error = capsys.readouterr().err.strip()
    assert "was trained on other classes than those of 'image_folder': 'cat' is 'cow' there" in error
    assert len(error.splitlines()) <= 2


@pytest.mark.parametrize(("verb", "stage"), [("validate", "val"), ("test", "test")])
def test_the_right_classes_are_evaluated(folder, capsys, verb, stage):
    assert call(verb, folder / "right", folder / "data") == 0
    assert f"{stage}/acc" in capsys.readouterr().out


@pytest.mark.parametrize(
    "given",
    [(), ("--trainer.accelerator", "cuda"), ("--trainer.devices", "2"), ("--trainer.strategy.class_path=DDPStrategy",)],
)
def test_where_a_run_was_trained_and_its_limits_are_forgotten(given):
    run = {
        "accelerator": "cuda",
        "devices": 8,
        "num_nodes": 2,
        "strategy": Namespace(class_path="DDPStrategy"),
        "fast_dev_run": 3,
        "overfit_batches": 4,
        **dict.fromkeys(("limit_train_batches", "limit_val_batches", "limit_test_batches"), 0.2),
    }
    trainer = Namespace(**run)
    reset_trainer(trainer, ["--ckpt_path", "x", *given])
    kept = {name for name in run if trainer[name] == run[name]}
    assert kept == {word.split(".")[1] for word in given if word.startswith("--trainer.")}
    assert set(run) == set(OF_A_RUN)
    again = Trainer(
        **{name: trainer[name] for name in OF_A_RUN if name not in {*kept, "accelerator"}},
        **{"accelerator": "cpu", "logger": False, "enable_checkpointing": False, "enable_progress_bar": False},
    )
    assert (again.num_devices, again.limit_val_batches, again.fast_dev_run, again.overfit_batches) == (1, 1.0, False, 0)


def test_settings_that_the_user_has_named_stand():
    """A whole section on the command line, or a configuration by ``--config``: only a run's own is forgotten."""
    run = dict.fromkeys(OF_A_RUN, 0.5) | {"devices": 8, "limit_test_batches": 0.2, "accelerator": "cpu"}
    trainer = Namespace(**run)
    reset_trainer(trainer, [], keep=True)
    assert {name: trainer[name] for name in run} == run
    trainer = Namespace(**run)
    reset_trainer(trainer, ["--trainer", "{limit_test_batches: 0.2}"])
    assert (trainer.devices, trainer.accelerator, trainer.limit_test_batches) == (1, "auto", 0.2)
    trainer = Namespace(**run)
    reset_trainer(trainer, ["--trainer=trainer.yaml"])
    assert {name: trainer[name] for name in run} == run


@pytest.mark.parametrize(("verb", "split"), [("validate", "val"), ("test", "test")])
def test_no_image_to_look_at(folder, capsys, verb, split, tmp_path):
    assert call(verb, folder / "right", folder / "data", f"--trainer.limit_{split}_batches", "0") == 2
    assert f"--trainer.limit_{split}_batches" in capsys.readouterr().err
    shutil.copytree(folder / "data" / "train", tmp_path / "data" / "train")
    assert call(verb, folder / "right", tmp_path / "data", "--data.val_fraction", "0") == 2
    error = capsys.readouterr().err.strip()
    assert f"has no {split} images" in error
    assert len(error.splitlines()) <= 2


@pytest.mark.parametrize("verb", ["validate", "test"])
def test_images_of_other_channels_are_refused(folder, capsys, verb, tmp_path):
    model = va.create_model("vit_tiny_patch16_224", num_classes=3, img_size=16, in_chans=4, **VIT)
    assert call(verb, va.save_model(model, tmp_path / "four"), folder / "data") == 2
    assert "takes images of 4 channels, those of the data set 'image_folder' have 3" in capsys.readouterr().err
