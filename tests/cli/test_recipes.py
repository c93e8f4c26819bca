"""Every recipe of the checkout says what it is, is understood, and trains for a step."""

from __future__ import annotations

import itertools
import pickle
import re
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml

from vision_attn.cli.parsing import Command
from vision_attn.training.fitting import make_callbacks
from vision_attn.training.optimizers import build_optimizer
from vision_attn.training.run_folder import RunFolder
from vision_attn.training.tasks import TASKS

RECIPES = [  # those for detectors, and studies, have files of tests of their own
    path
    for path in sorted((Path(__file__).parents[2] / "recipes").glob("*.yaml"))
    if not path.stem.startswith("contrast_") and "task: detection" not in path.read_text(encoding="utf-8")
]
PROMISED = """digits_vit digits_cnn cifar10_vit cifar10_cct cifar10_resnet20 cifar10_resnet18 cifar100_vit cifar100_cct
    cifar100_resnet20 cifar10_cct_10min cifar10_cct_30min cifar10_cnn_10min cifar10_cnn_30min
    digits_sort_pointer digits_hard_attention"""


@pytest.fixture(scope="module")
def root(tmp_path_factory) -> Path:
    """CIFAR-10 and CIFAR-100 in the right form, with a few random images."""
    root = tmp_path_factory.mktemp("data")
    random = np.random.default_rng(0)

    def write(name: str, labels: str, count: int, classes: int) -> None:
        pixels = random.integers(0, 256, (count, 3072), dtype=np.uint8)
        content = {"data": pixels, labels: [i % classes for i in range(count)]}
        (root / name).parent.mkdir(exist_ok=True)
        (root / name).write_bytes(pickle.dumps(content, protocol=2))

    for name in [*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"]:
        write(f"cifar-10-batches-py/{name}", "labels", 20, 10)
    for name in ("train", "test"):
        write(f"cifar-100-python/{name}", "fine_labels", 120, 100)
    names = {
        "cifar-10-batches-py/batches.meta": ("label_names", 10),
        "cifar-100-python/meta": ("fine_label_names", 100),
    }
    for path, (key, classes) in names.items():
        (root / path).write_bytes(pickle.dumps({key: [f"kind {i}" for i in range(classes)]}, protocol=2))
    return root


def test_the_promised_recipes_exist():
    assert set(PROMISED.split()) <= {path.stem for path in RECIPES}


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_a_recipe_says_its_command_and_what_to_expect(path):
    head = path.read_text().split("\ntask:")[0]
    assert f"vision-attn fit --config recipes/{path.name}" in head
    assert yaml.safe_load(path.read_text())["task"] in TASKS


def says_what_to_expect(head: str) -> bool:
    """Whether a head has a measured figure, or says plainly that nothing was measured, or what others have reached."""
    text = re.sub(r"\n#? *", " ", head)
    measured = re.search(r"\bMeasured\b[^:.]*: [^.]*?\d", text)
    return bool(measured or re.search(r"\bnot measured\b|\bexpected from the literature\b", text, re.IGNORECASE))


@pytest.mark.parametrize("path", sorted(RECIPES[0].parent.glob("*.yaml")), ids=lambda path: path.stem)
def test_every_recipe_says_what_was_measured_or_that_nothing_was(path):
    lines = path.read_text(encoding="utf-8").splitlines()
    assert says_what_to_expect("\n".join(itertools.takewhile(lambda line: line.startswith("#"), lines)))


@pytest.mark.parametrize(
    ("head", "fine"),
    [
        ("# Measured: test 98.1 %, validation\n# 99.6 %.", True),
        ("# Measured with --budget 5m: test AP 0.785 ± 0.007 (3 runs).", True),
        ("# Made for a GPU: 100 epochs. Not\n# measured yet.", True),
        ("# Expected, not measured here: 93.6 % (a repository).", True),
        ("# Expected from the literature: AP 42.0 (a repository).", True),
        ("# Measured: very good.", False),
        ("# Measured. 100 epochs: 20 minutes.", False),
        ("# To be measured: 100 epochs.", False),
        ("# It cannot be measured.", False),
        ("# 100 epochs of 45,000 images.", False),
    ],
)
def test_what_a_head_must_say(head, fine):
    assert says_what_to_expect(head) == fine


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_a_recipe_trains_for_a_step(path, root, tmp_path, monkeypatch):
    monkeypatch.setenv("VISION_ATTN_DATA", str(root))
    command = Command("fit", ["--config", str(path), "--data.batch_size", "4", "--trainer.accelerator", "cpu"])
    command.build()
    run = RunFolder(tmp_path, path.stem, command.dump(), 0, "val/acc")
    make_callbacks(run, budget=command.config.budget, ema=command.config_init.ema)
    module, data = command.model, command.datamodule
    data.setup("fit")
    module.init_from(data)
    batch = data.on_after_batch_transfer(next(iter(data.train_dataloader())))
    optimizer = build_optimizer(module.model, module.optimizer_config)
    before = [p.detach().clone() for p in module.model.parameters() if p.requires_grad]
    loss = module.training_step(batch, 0)
    loss.backward()
    for group in optimizer.param_groups:
        group["lr"] = group["peak_lr"]
    optimizer.step()
    assert torch.isfinite(loss)
    after = [p for p in module.model.parameters() if p.requires_grad]
    assert any((a != b).any() for a, b in zip(after, before, strict=True))
