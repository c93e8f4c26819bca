from __future__ import annotations

import dataclasses
import math

import pytest
import torch
import torch.nn.functional as F

from vision_attn.contrast import training as module
from vision_attn.contrast.cells import plan_cells, plan_trials
from vision_attn.contrast.config import ModelChoice
from vision_attn.contrast.results import TRIAL_SEED
from vision_attn.contrast.training import Training, run_cell
from vision_attn.data.loader import TrainLoader
from vision_attn.training.optimizers import OptimizerConfig
from vision_attn.training.schedule import lr_factor_by_step

CPU = torch.device("cpu")


@pytest.fixture
def cells(plan):
    rates = {(model, size): 3e-3 for model in ("vit", "cnn") for size in (0.02, 0.1)}
    return plan_cells(plan.config, len(plan.data.train), rates)


def without_seconds(outcome):
    return {key: value for key, value in outcome.result.values.items() if key != "seconds"}


def test_a_second_run_gives_the_same_bits(plan, cells):
    for cell in (cells[0], cells[1], cells[-1]):
        torch.manual_seed(17)
        first = run_cell(plan.config, plan.data, cell, CPU)
        torch.manual_seed(99)
        torch.randn(5)
        second = run_cell(plan.config, plan.data, cell, CPU)
        assert first.result.done, first.result.reason
        assert without_seconds(first) == without_seconds(second)
        assert first.result.curve == second.result.curve
        assert first.looks == second.looks


def test_what_is_measured(plan, cells):
    plain, noisy = cells[0], cells[-1]
    result = run_cell(plan.config, plan.data, plain, CPU).result
    values = result.values
    assert values["gap_acc"] == values["train_acc"] - values["test_acc"]
    assert values["gap_loss"] == values["test_loss"] - values["train_loss"]
    assert values["train_acc"] == values["train_clean_acc"]
    assert "memorised" not in values
    assert [row["step"] for row in result.curve] == [1, 3, 7]
    last = result.curve[-1]
    # all of the subset and of the validation split are within eval_images, so the curve ends where the measures are
    assert (last["train_loss"], last["val_acc"]) == (values["train_loss"], values["val_acc"])
    assert values["turn_rise"] == last["val_loss"] - values["turn_loss"]
    assert values["steps"] == 7
    assert values["params"] == plan.models[0].params
    assert values["macs"] == plan.models[0].macs
    assert all(math.isfinite(value) for value in values.values())
    wrong = run_cell(plan.config, plan.data, noisy, CPU).result.values
    assert 0 <= wrong["memorised"] <= 1
    assert wrong["train_loss"] != wrong["train_clean_loss"]


def test_training_equals_a_loop_written_out(tiny, plan, cells):
    config = tiny(optimizer=OptimizerConfig(warmup=0.3, betas=(0.8, 0.95)))
    cell = cells[1]
    training = Training(config, plan.data, cell, CPU)
    start = {key: value.clone() for key, value in training.model.state_dict().items()}
    result = training.run().result

    again = Training(config, plan.data, cell, CPU)
    model = again.model
    for key, value in model.state_dict().items():
        torch.testing.assert_close(value, start[key], rtol=0, atol=0)
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.8, 0.95), weight_decay=0.0)
    images = plan.data.augmenter(config.arm("none", (8, 8)), 0, True).normalize(again.images.images)
    loader = TrainLoader(again.images, batch_size=11, seed=cell.seed, drop_last=True)
    rows = [row for epoch in range(7) for row in loader.rows(epoch)][:7]
    model.train()
    for step, row in enumerate(rows):
        optimizer.param_groups[0]["lr"] = 3e-3 * lr_factor_by_step(step, 7, 0.3, "cosine")
        optimizer.zero_grad()
        F.cross_entropy(model(images[row]), again.images.labels[row]).backward()
        optimizer.step()
    model.eval()
    with torch.no_grad():
        loss = F.cross_entropy(model(images), again.images.labels)
    assert result.values["train_loss"] == pytest.approx(float(loss), rel=1e-4)


def test_models_of_a_pair_see_the_same_batches(plan, cells):
    pair = [cell for cell in cells if (cell.arm, cell.noise, cell.seed, cell.size) == ("flip_crop", 0, 1, 0.02)]
    assert [cell.model for cell in pair] == ["vit", "cnn"]
    seen = []
    for cell in pair:
        batches = Training(plan.config, plan.data, cell, CPU)._batches()
        seen.append([next(batches)[2] for _ in range(5)])
    for one, other in zip(*seen, strict=True):
        assert torch.equal(one["image"], other["image"])
        assert torch.equal(one["label"], other["label"])
    assert not torch.equal(seen[0][0]["image"], seen[0][2]["image"])


class Forbidden:
    """A test split that may not be looked at."""

    def __len__(self):
        return 5

    def __getattr__(self, name):
        raise AssertionError(f"the test split was asked for {name}")


def test_a_trial_never_touches_the_test_set(plan):
    trial = plan_trials(plan.config, len(plan.data.train))[0]
    assert trial.seed == TRIAL_SEED
    blind = dataclasses.replace(plan.data, test=Forbidden())
    result = run_cell(plan.config, blind, trial, CPU).result
    assert result.done, result.reason
    assert not any("test" in key for key in result.values)
    assert "val_acc" in result.values


def test_the_test_set_is_read_after_training_with_last_and_best_weights(plan, cells, monkeypatch):
    asked: list[int] = []
    original = module.predict

    def noting(model, images, *args, **kwargs):
        asked.append(len(images) if images is plan.data.test else 0)
        return original(model, images, *args, **kwargs)

    monkeypatch.setattr(module, "predict", noting)
    cell = dataclasses.replace(cells[0], lr=0.3)  # far too high: an earlier evaluation is the best
    result = run_cell(plan.config, plan.data, cell, CPU).result
    assert [i for i, count in enumerate(asked) if count] in ([len(asked) - 1], [len(asked) - 2, len(asked) - 1])
    values = result.values
    row = max(result.curve, key=lambda row: (row["val_acc"], -row["val_loss"]))
    assert (values["best_step"], values["best_val_acc"]) == (row["step"], row["val_acc"])
    if row is result.curve[-1]:
        assert values["best_test_acc"] == values["test_acc"]


def test_a_loss_that_is_no_number_is_a_failed_cell(plan, cells):
    result = run_cell(plan.config, plan.data, dataclasses.replace(cells[0], lr=1e30), CPU).result
    assert result.status == "failed"
    assert "loss became" in result.reason
    assert "1e+30" in result.reason
    assert result.values == {}


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried"), "out of memory: CUDA out of memory"),
        (MemoryError(), "out of memory: MemoryError"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried"), "out of memory"),
        (RuntimeError("something else\nmore"), "RuntimeError: something else"),
    ],
)
def test_an_error_is_a_failed_cell_with_its_reason(plan, cells, monkeypatch, error, reason):
    def fail(self, batch):
        raise error

    monkeypatch.setattr(Training, "_loss", fail)
    outcome = run_cell(plan.config, plan.data, cells[0], CPU)
    assert outcome.result.status == "failed"
    assert outcome.result.reason.startswith(reason)
    assert "\n" not in outcome.result.reason


def test_a_model_with_whitening_sees_its_own_subset(tiny, plan, cells):
    models = {"cnn": ModelChoice("airbench_cifar", {"widths": [5, 7, 9]}), "vit": plan.config.models["vit"]}
    config = tiny(models=models)
    whitened = Training(config, plan.data, dataclasses.replace(cells[0], model="cnn"), CPU).model
    other = Training(config, plan.data, dataclasses.replace(cells[0], model="cnn", seed=1), CPU).model
    assert not torch.equal(whitened.whiten.weight, other.whiten.weight)


def test_bfloat16_gives_float32_measures(tiny, plan, cells):
    result = run_cell(tiny(precision="bf16-mixed"), plan.data, cells[1], CPU).result
    assert result.done, result.reason
    assert result.values["train_loss"] != run_cell(plan.config, plan.data, cells[1], CPU).result.values["train_loss"]
