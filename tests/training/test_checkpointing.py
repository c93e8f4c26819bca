"""What is saved when a run is told to stop, and what is never saved or believed."""

import signal

import pytest
import torch
from lightning.pytorch import Callback

from vision_attn.errors import UserError
from vision_attn.training.fitting import finish
from vision_attn.training.interrupt import Interrupted
from vision_attn.training.run_folder import read_metrics

EPOCH = 11  # optimizer steps


class Signal(Callback):
    """Sends one signal to this process, in the first batch of a stage ``when``."""

    def __init__(self, number, when):
        self.number, self.when = number, when

    def _send(self, when):
        if self.when == when:
            self.when = None
            signal.raise_signal(self.number)

    def on_train_batch_start(self, *args):
        self._send("training")

    def on_validation_batch_start(self, trainer, *args):
        self._send("sanity check" if trainer.sanity_checking else "validation")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=["SIGINT", "SIGTERM"])
@pytest.mark.parametrize(("when", "step"), [("sanity check", 1), ("training", 1), ("validation", 3)])
def test_a_signal_at_any_time_saves_the_newest_step(tmp_path, make_run, number, when, step):
    """Accumulated batches are made a step first, and a validation is brought to its end."""
    options = {"accumulate_grad_batches": 4, "num_sanity_val_steps": 2}
    run = make_run(tmp_path, callbacks=[Signal(number, when)], **options)
    run.data.eval_batch_size = 8  # several batches of a validation
    with run.stop.listening(), pytest.raises(Interrupted) as caught:
        run.fit()
    assert run.stop.exit_code == 128 + number
    assert run.checkpoint()["global_step"] == step
    assert ("val/acc" in (run.folder.rows or [{}])[-1]) == (when == "validation")
    again = make_run(tmp_path, resume=run.folder.path, max_epochs=1, **options).fit(caught.value.path)
    assert again.trainer.global_step == 3


@pytest.mark.parametrize(
    ("options", "fine"),
    [
        ({"val_check_interval": 4}, True),
        ({"val_check_interval": 3}, False),
        ({"val_check_interval": 11}, True),  # an epoch, at whose end what is left is made a step
        ({"val_check_interval": 4, "check_val_every_n_epoch": None}, False),  # an epoch has 11 batches
        ({"val_check_interval": 4, "check_val_every_n_epoch": None, "limit_train_batches": 10}, True),
        ({"val_check_interval": "00:00:01:00"}, False),
        ({"check_val_every_n_epoch": 2}, True),
    ],
)
def test_no_validation_between_batches_of_one_step(tmp_path, make_run, options, fine):
    """It saves, and gradients that wait for the next batch are in no checkpoint."""
    run = make_run(tmp_path, accumulate_grad_batches=2, max_epochs=2, **options)
    if fine:
        run.fit()
        assert run.checkpoint()["global_step"] == 2 * (5 if "limit_train_batches" in options else 6)
        return
    with pytest.raises(UserError, match="as a multiple of 2 batches"):
        run.fit()
    assert not (run.folder.path / "checkpoints" / "last.ckpt").exists()


# -- the last epoch ----------------------------------------------------------------------------------


@pytest.mark.parametrize(("rhythm", "stop_at"), [(2, 2 * EPOCH), (2, 25), (5, 2 * EPOCH), (5, 25)])
def test_a_run_resumed_for_its_last_epoch_is_validated_at_the_end(tmp_path, make_run, rhythm, stop_at):
    """Stopped in that epoch or at the end of the one before, which was validated or not."""
    options = {"check_val_every_n_epoch": rhythm}
    whole = make_run(tmp_path / "whole", **options).fit()
    first = make_run(tmp_path / "parts", stop_at=stop_at, **options)
    with pytest.raises(Interrupted) as caught:
        first.fit()
    second = make_run(tmp_path / "parts", resume=first.folder.path, **options).fit(caught.value.path)
    rows, expected = (read_metrics(run.folder.path / "metrics.csv") for run in (second, whole))
    assert "val/acc" in rows[-1]
    assert [(r["step"], r.get("val/acc")) for r in rows] == [(r["step"], r.get("val/acc")) for r in expected]
    torch.testing.assert_close(second.checkpoint("best")["state_dict"], whole.checkpoint("best")["state_dict"])


# -- which state is the best -------------------------------------------------------------------------


@pytest.mark.parametrize("kept", ["nothing", "a folder without its best"])
def test_a_score_counts_with_its_weights_alone(tmp_path, make_run, kept):
    """A checkpoint tells of a better state that this run does not have: what is exported is the best that it has."""
    first = make_run(tmp_path, max_epochs=1).fit()
    path = first.folder.path / "checkpoints" / "last.ckpt"
    checkpoint = torch.load(path, weights_only=True)
    checkpoint["callbacks"]["RunCheckpoint"]["best_score"] = 1.0
    torch.save(checkpoint, path)
    (path.parent / "best.ckpt").unlink()
    resume = None if kept == "nothing" else first.folder.path
    run = make_run(tmp_path, max_epochs=3, resume=resume).fit(path)
    assert (run.folder.path / "checkpoints" / "best.ckpt").is_file()
    summary = finish(run.folder, run.trainer, run.module, run.data)
    accuracy = run.trainer.validate(run.module, datamodule=run.data, verbose=False)[0]["val/acc"]
    best = max(row["val/acc"] for row in run.folder.rows if row["step"] > EPOCH)
    assert summary["val/acc"] == pytest.approx(accuracy, abs=1e-6)
    assert summary["val/acc"] == pytest.approx(best, abs=1e-6)


def test_a_resumed_run_keeps_its_best(tmp_path, make_run):
    first = make_run(tmp_path, max_epochs=1).fit()
    path = first.folder.path / "checkpoints" / "last.ckpt"
    checkpoint = torch.load(path, weights_only=True)
    checkpoint["callbacks"]["RunCheckpoint"]["best_score"] = 1.0
    torch.save(checkpoint, path.with_name("new.ckpt"))
    path.with_name("new.ckpt").replace(path)
    run = make_run(tmp_path, max_epochs=2, resume=first.folder.path).fit(path)
    assert run.checkpoint("best")["global_step"] == EPOCH


# -- weights that are lost ---------------------------------------------------------------------------


class Break(Callback):
    """Makes a weight NaN after a step whose loss was finite, as an infinite gradient does."""

    def __init__(self, step):
        self.step = step

    def on_train_batch_end(self, trainer, module, *args):
        if trainer.global_step == self.step:
            next(module.parameters()).data.view(-1)[0] = float("nan")


CASES = {
    "validated": ({}, 2 * EPOCH, "best.ckpt"),
    "not validated": ({"val_fraction": 0.0}, 2 * EPOCH, "last.ckpt"),
    "in mid-epoch, averaged": ({"save_every": "0.0001s", "ema": {"decay": 0.9}}, EPOCH + 4, "best.ckpt"),
    "when told to stop": ({"stop_at": EPOCH + 4}, EPOCH + 4, "best.ckpt"),
}


@pytest.mark.parametrize("case", CASES)
def test_weights_that_are_not_finite_are_never_saved(tmp_path, make_run, case):
    options, step, named = CASES[case]
    run = make_run(tmp_path, callbacks=[Break(step)], **options)
    with pytest.raises(UserError, match=f"by step {step} .*not saved.*{named}"):
        run.fit()
    kept = run.checkpoint()
    assert kept["global_step"] == (step - 1 if "save_every" in options else EPOCH)
    assert all(value.isfinite().all() for value in kept["state_dict"].values())
    path = run.folder.path / "checkpoints" / "last.ckpt"
    options = {key: value for key, value in options.items() if key != "stop_at"}
    again = make_run(tmp_path, resume=run.folder.path, max_epochs=2, **options).fit(path)
    assert again.trainer.global_step == 2 * EPOCH


def test_weights_lost_before_the_first_save(tmp_path, make_run):
    with pytest.raises(UserError, match=r"not saved\. Start again with a smaller"):
        make_run(tmp_path, stop_at=2, callbacks=[Break(2)]).fit()
    assert not list(tmp_path.rglob("*.ckpt"))
