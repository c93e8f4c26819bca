"""The task ``sorting`` from the command line to the loaded model, on digits."""

from __future__ import annotations

import json
import shutil
from types import SimpleNamespace

import pytest
import torch
from PIL import Image

import vision_attn as va
from vision_attn.attention.config import AttentionConfig
from vision_attn.cli.main import main
from vision_attn.data.sorting import SortingData
from vision_attn.errors import UserError
from vision_attn.training.optimizers import OptimizerConfig, build_optimizer
from vision_attn.training.pointer import Sorter, step_loss

RECIPE = """
task: sorting
data: {name: digits, batch_size: 16, sequences: 48, eval_sequences: 30, augment: {crop_padding: 1}}
model:
  name: pointer_lstm
  args: {embed_dim: 12, num_heads: 3, depth: 1, encoder_args: {width: 4}}
  attention: {score: additive}
  optimizer: {name: adamw, lr: 3.0e-3}
trainer: {max_epochs: 2, accelerator: cpu}
test: true
"""


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    folder = tmp_path_factory.mktemp("finished")
    (folder / "small.yaml").write_text(RECIPE)
    assert main(["fit", "--config", str(folder / "small.yaml"), "--trainer.default_root_dir", str(folder)]) == 0
    return folder / "small" / "0"


def test_fit_leaves_a_run_folder(finished):
    summary = json.loads((finished / "summary.json").read_text())
    metrics = {"val/acc", "val/element_acc", "test/acc", "test/element_acc", "test/acc_n8", "test/element_acc_n8"}
    assert metrics <= set(summary)
    assert all(0 <= summary[metric] <= 1 for metric in metrics)
    assert "test/loss_n8" not in summary
    assert summary["params"] == sum(p.numel() for p in va.load_model(finished).parameters())
    assert summary["macs"] > 0
    for picture in ("learning_curves", "augmented", "sorted", "attention"):
        assert (finished / "plots" / f"{picture}.png").stat().st_size > 10_000


@pytest.mark.parametrize("what", ["checkpoints/best.ckpt", "model.safetensors", "", "elsewhere"])
def test_test_gives_the_accuracies_of_the_run(finished, capsys, tmp_path, what):
    path, options = finished / what, []
    if what == "elsewhere":  # outside its run folder a checkpoint says itself what its task is
        path = va.save_model(va.load_model(finished), tmp_path)
        options = ["--data.eval_sequences", "30"]
    assert main(["test", "--ckpt_path", str(path), "--trainer.accelerator", "cpu", *options]) == 0
    out = capsys.readouterr().out
    assert "30 sequences each of 5 and 8 out of 270 test images of digits" in out
    shown = dict(line.split() for line in out.splitlines() if line.startswith("test/"))
    summary = json.loads((finished / "summary.json").read_text())
    for key in ("test/acc", "test/acc_n8", "test/element_acc"):
        assert float(shown[key]) == pytest.approx(summary[key], abs=1e-4)


def test_validate_gives_the_accuracy_of_the_run(finished, capsys):
    assert main(["validate", "--ckpt_path", str(finished), "--trainer.accelerator", "cpu"]) == 0
    shown = dict(line.split() for line in capsys.readouterr().out.splitlines() if line.startswith("val/"))
    assert float(shown["val/acc"]) == pytest.approx(
        json.loads((finished / "summary.json").read_text())["val/acc"], abs=1e-4
    )


def test_checkpoint_and_export_are_one_model_that_knows_its_task(finished):
    one, other = va.load_model(finished / "checkpoints" / "best.ckpt"), va.load_model(finished / "model.safetensors")
    assert one.config["task"] == other.config["task"] == "sorting"
    assert one.config["labels"] == [str(digit) for digit in range(10)]
    assert one.config["args"]["attention"] == {"score": "additive"}
    images = torch.randn(2, 5, 3, 8, 8)
    with torch.no_grad():
        torch.testing.assert_close(one(images), other(images), rtol=0, atol=0)


def test_predict_prints_the_order(finished, capsys, tmp_path):
    for name in ("b", "a", "c"):
        Image.fromarray(torch.randint(0, 256, (8, 8), dtype=torch.uint8).numpy()).save(tmp_path / f"{name}.png")
    assert main(["predict", str(tmp_path), "--ckpt_path", str(finished), "--json", "-", "--device", "cpu"]) == 0
    steps = json.loads(capsys.readouterr().out)
    assert [step["place"] for step in steps] == [0, 1, 2]
    assert {step["source"] for step in steps} == {str(tmp_path / f"{name}.png") for name in "abc"}
    assert main(["predict", str(tmp_path), "--ckpt_path", str(finished), "--device", "cpu"]) == 0
    out = capsys.readouterr().out
    assert "place" in out
    assert "class" not in out


def test_a_resumed_run_goes_on(finished, capsys, tmp_path):
    shutil.copytree(finished, tmp_path / "small" / "0")
    argv = ["fit", "--config", str(finished / "config.yaml"), "--trainer.default_root_dir", str(tmp_path)]
    assert main([*argv, "--ckpt_path", "last", "--trainer.max_epochs", "3", "--test", "false"]) == 0
    assert "continued at step 6" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--task", "classification"], "is a model for sorting, not for classification"),
        (["--data.eval_lengths", "[5,5]"], "given once"),
        (["--data.lenghts", "[2,3]"], "data.lengths"),
    ],
)
def test_wrong_calls_of_test_are_explained(finished, capsys, tmp_path, argv, words):
    path = va.save_model(va.load_model(finished), tmp_path)
    assert main(["test", "--ckpt_path", str(path), "--trainer.accelerator", "cpu", *argv]) == 2
    assert words in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"name": "resnet8_cifar"}, "resnet8_cifar is a model for classification, not for sorting.*pointer_lstm"),
        ({"name": "dn_detr_tiny"}, "dn_detr_tiny is a model for detection, not for sorting.*pointer_lstm"),
        ({"args": {"img_size": 9}}, "model.args.img_size cannot be set, it comes from data.img_size"),
        ({"args": {"depht": 3}}, "no argument 'depht'.*depth"),
        ({"attention": AttentionConfig(normalizer="sampled")}, "straight_through"),
    ],
)
def test_models_that_cannot_sort_are_refused(options, words):
    with pytest.raises(UserError, match=words):
        Sorter(img_size=(8, 8), **options)


def test_loss_is_the_mean_over_real_steps():
    weights = torch.rand(2, 3, 3).div(3)
    order = torch.tensor([[2, 0, 1], [1, 0, -1]])
    picked = [weights[0, 0, 2], weights[0, 1, 0], weights[0, 2, 1], weights[1, 0, 1], weights[1, 1, 0]]
    torch.testing.assert_close(step_loss(weights.log(), order), -torch.stack(picked).log().mean())


def test_metrics_count_every_sequence_once():
    module = Sorter(img_size=(8, 8), args={"embed_dim": 8, "depth": 1, "encoder_args": {"width": 3}})
    orders = {"": torch.tensor([[0, 1, 2], [2, 0, 1]]), "_n2": torch.tensor([[1, 0], [0, 1]])}
    shown = {"": torch.tensor([[0, 1, 2], [2, 1, 0]]), "_n2": torch.tensor([[0, 1], [0, 1]])}
    logged: dict[str, float] = {}
    module.log_dict = lambda values, **_: logged.update(values)  # type: ignore[method-assign]
    module._trainer = SimpleNamespace(world_size=1)
    module.eval()
    for suffix, order in orders.items():
        module.model.order = lambda images, mask, suffix=suffix: shown[suffix]  # type: ignore[method-assign]
        for row in range(2):
            guess = shown[suffix]
            shown[suffix] = guess[row : row + 1]
            batch = {"image": torch.randn(1, order.shape[1], 3, 8, 8), "order": order[row : row + 1], "suffix": suffix}
            with torch.no_grad():
                module.test_step(batch, 0)
            shown[suffix] = guess
    module.on_test_epoch_end()
    assert logged["test/acc"] == 0.5
    assert logged["test/element_acc"] == pytest.approx(4 / 6)
    assert logged["test/acc_n2"] == 0.5
    assert logged["test/element_acc_n2"] == 0.5
    assert not module._totals


def test_it_learns_to_sort():
    torch.manual_seed(0)
    data = SortingData(batch_size=32, sequences=32 * 50, lengths=(2, 3))
    config = OptimizerConfig(name="muon", lr=0.01, adamw_lr=3e-3)
    args = {"embed_dim": 16, "depth": 1, "num_heads": 2, "encoder_args": {"width": 6}}
    module = Sorter(args=args, img_size=(8, 8), optimizer=config).train()
    optimizer = build_optimizer(module.model, config)
    losses = []
    for batch in map(data.on_after_batch_transfer, data.train_dataloader()):
        loss = module.training_step(batch, 0)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert sum(losses[-10:]) < 0.7 * sum(losses[:10])
