"""Averaged weights: the right numbers, validated, exported, and restored together with the training weights."""

import pytest
import torch
from lightning.pytorch import Callback

from vision_attn.errors import UserError
from vision_attn.training.ema import EMA, EmaConfig
from vision_attn.training.interrupt import Interrupted


class Trace(Callback):
    """Parameters after every step, and those that validations see."""

    def __init__(self):
        self.steps, self.validated = [], []

    @staticmethod
    def flat(module):
        return torch.cat([p.detach().flatten() for p in module.model.parameters()]).clone()

    def on_train_batch_end(self, trainer, module, *args):
        self.steps.append(self.flat(module))

    def on_validation_batch_start(self, trainer, module, *args):
        self.validated.append(self.flat(module))


@pytest.mark.parametrize("config", [{"decay": 0.9, "warmup": False}, {"decay": 0.9}, {"decay": 0.8, "start_step": 13}])
def test_average_by_hand(tmp_path, make_run, config):
    trace = Trace()
    run = make_run(tmp_path, ema=config, callbacks=[trace], max_epochs=2)
    run.fit()
    average, count = None, 0
    for index, weights in enumerate(trace.steps):
        if average is None or index < config.get("start_step", 0):
            average = weights.clone()
            count = 1 if index >= config.get("start_step", 0) else 0
            continue
        if count == 0:
            average, count = weights.clone(), 1
            continue
        decay = min(config["decay"], (1 + count) / (10 + count)) if config.get("warmup", True) else config["decay"]
        average, count = decay * average + (1 - decay) * weights, count + 1
    torch.testing.assert_close(trace.validated[-1], average, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(Trace.flat(run.module), average, rtol=1e-4, atol=1e-6)
    checkpoint = run.checkpoint()
    names = [f"model.{name}" for name, _ in run.module.model.named_parameters()]
    saved = torch.cat([checkpoint["state_dict"][name].flatten() for name in names])
    torch.testing.assert_close(saved, average, rtol=1e-4, atol=1e-6)
    current = torch.cat([checkpoint["current_model_state"][name].flatten() for name in names])
    torch.testing.assert_close(current, trace.steps[-1], rtol=0, atol=0)


@pytest.mark.parametrize("precision", ["bf16-true", "64-true"])
def test_averages_of_other_weights_than_float32_are_refused(tmp_path, make_run, precision):
    run = make_run(tmp_path, ema={"decay": 0.9}, precision=precision, max_epochs=1)
    with pytest.raises(UserError, match=rf"float32, not --trainer.precision {precision}.*--ema.decay 0"):
        run.fit()
    assert not (tmp_path / "tiny").exists()


def test_the_average_lies_where_the_run_takes_place(tmp_path, make_run):
    """Lightning makes it before it moves the module there."""
    run = make_run(tmp_path, ema={"decay": 0.9}, max_epochs=1)
    run.trainer.strategy._root_device = torch.device("meta")
    (average,) = [callback for callback in run.trainer.callbacks if isinstance(callback, EMA)]
    average.setup(run.trainer, run.module, "fit")
    assert {p.device.type for p in average._average_model.parameters()} == {"meta"}


def test_broken_off_validation_puts_the_training_weights_back(tmp_path, make_run):
    trace = Trace()

    class Break(Callback):
        def on_validation_batch_end(self, *args):
            raise RuntimeError("boom")

    run = make_run(tmp_path, ema={"decay": 0.9}, callbacks=[trace, Break()])
    with pytest.raises(RuntimeError, match="boom"):
        run.fit()
    torch.testing.assert_close(Trace.flat(run.module), trace.steps[-1], rtol=0, atol=0)


def test_batch_norm_statistics_are_averaged_too(tmp_path, make_run):
    run = make_run(tmp_path, model=("resnet20_cifar", {}), ema={"decay": 0.5}, max_epochs=1).fit()
    ema = next(c for c in run.trainer.callbacks if isinstance(c, EMA))
    assert ema._latest_update_step == run.trainer.global_step
    checkpoint = run.checkpoint()
    name = next(n for n in checkpoint["state_dict"] if n.endswith("running_mean"))
    assert not torch.equal(checkpoint["state_dict"][name], checkpoint["current_model_state"][name])
    counter = next(n for n in checkpoint["state_dict"] if n.endswith("num_batches_tracked"))
    assert torch.equal(checkpoint["state_dict"][counter], checkpoint["current_model_state"][counter])


@pytest.mark.parametrize("model", ["vit_tiny_patch16_224", "resnet20_cifar"])
def test_without_averages_a_run_goes_on_from_its_own_weights(tmp_path, make_run, model):
    """And not from the averages, to which the state of the optimizer does not belong."""
    options = {"max_epochs": 1} | ({"model": (model, {})} if "resnet" in model else {})
    whole, second = Trace(), Trace()
    make_run(tmp_path / "whole", ema={"decay": 0.9}, callbacks=[whole], **options).fit()
    first = make_run(tmp_path / "stopped", ema={"decay": 0.9}, stop_at=5, **options)
    with pytest.raises(Interrupted) as caught:
        first.fit()
    run = make_run(tmp_path / "stopped", resume=first.folder.path, callbacks=[second], **options)
    run.fit(caught.value.path)
    torch.testing.assert_close(second.steps, whole.steps[5:], rtol=0, atol=0)
    torch.testing.assert_close(Trace.flat(run.module), whole.steps[-1], rtol=0, atol=0)
    assert "current_model_state" not in run.checkpoint()


@pytest.mark.parametrize("config", [{"decay": 1.0}, {"decay": -0.1}, {"decay": 0.9, "every": 0}])
def test_what_is_no_average(config):
    with pytest.raises(UserError, match="ema"):
        EmaConfig(**config)
