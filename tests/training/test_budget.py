"""Training by the clock, with a clock that the test turns."""

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st
from lightning.pytorch import Callback

from vision_attn.errors import UserError
from vision_attn.training.budget import Budget, parse_budget
from vision_attn.training.interrupt import Interrupted
from vision_attn.training.run_folder import read_metrics


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("10m", 600),
        ("90s", 90),
        ("1.5h", 5400),
        ("600", 600),
        (600, 600),
        ("1h30m", 5400),
        ("2 min", 120),
        ("1d", 86400),
    ],
)
def test_durations(text, seconds):
    assert parse_budget(text) == seconds


@pytest.mark.parametrize("text", ["", "m", "ten minutes", "10x", "-5m", "0", "10m later", "1hq"])
def test_no_durations(text):
    with pytest.raises(UserError, match="budget"):
        parse_budget(text)


@given(st.text(max_size=8))
def test_parsing_never_fails_otherwise(text):
    with contextlib.suppress(UserError):
        assert parse_budget(text) > 0


class Clock(Callback):
    """A batch takes 2 s, a validation 7 s and what follows it (saving, opening the data) 1 s."""

    def __init__(self):
        self.now = 1000.0

    def __call__(self):
        return self.now

    def on_before_backward(self, *args):
        self.now += 2.0

    def on_validation_epoch_end(self, trainer, *args):
        self.now += 7.0

    def on_train_epoch_start(self, trainer, *args):
        self.now += 1.0


class Rates(Callback):
    def __init__(self):
        self.lr, self.used = [], []

    def on_train_batch_end(self, trainer, module, *args):
        self.lr.append(module.lr)
        self.used.append(module.budget_used)


def budgeted(make_run, root, seconds, **options):
    """A run whose Budget reads the fake clock."""
    clock, rates = Clock(), Rates()

    def change(callbacks):
        budget = next(c for c in callbacks if isinstance(c, Budget))
        budget._clock = clock
        return callbacks

    run = make_run(
        root,
        budget=seconds,
        change=change,
        callbacks=[clock, rates],
        max_epochs=-1,
        num_sanity_val_steps=1,
        **options,
    )
    return run, clock, rates


@pytest.mark.parametrize("seconds", [95, 131, 30])
def test_stops_in_time_and_validates_last(tmp_path, make_run, seconds):
    run, clock, rates = budgeted(make_run, tmp_path, seconds)
    run.fit()
    start = 1000.0 + 7.0 + 1.0  # the sanity check and opening the data come before the first step
    elapsed = clock.now - start
    assert elapsed <= seconds + 1e-9
    assert elapsed >= seconds - 2 * 2.0 - 1.0  # less than two steps are wasted
    rows = read_metrics(run.folder.path / "metrics.csv")
    assert rows[-1]["step"] == run.trainer.global_step
    assert "val/acc" in rows[-1]
    peak = run.module.optimizer_config.lr
    assert max(rates.lr) <= peak
    assert rates.lr[-1] < 0.1 * peak
    assert rates.used == sorted(rates.used)
    assert run.checkpoint()["callbacks"]["Budget"]["elapsed"] <= seconds


def test_validates_last_even_if_rarely_otherwise(tmp_path, make_run):
    run, _, _ = budgeted(make_run, tmp_path, 95, check_val_every_n_epoch=100)
    run.fit()
    rows = read_metrics(run.folder.path / "metrics.csv")
    assert [("val/acc" in row) for row in rows][-1]
    assert sum("val/acc" in row for row in rows) == 1


def test_resume_has_the_time_that_was_left(tmp_path, make_run):
    first, clock, _ = budgeted(make_run, tmp_path, 120, stop_at=17)
    with pytest.raises(Interrupted) as caught:
        first.fit()
    used = clock.now - 1008.0
    second, clock, rates = budgeted(make_run, tmp_path, 120, resume=first.folder.path)
    second.fit(caught.value.path)
    again = clock.now - 1000.0  # Lightning makes no sanity check, and the epoch that goes on is not begun again
    assert 120 - 2 * 2.0 - 1.0 <= used + again <= 120.0
    assert rates.used[0] == pytest.approx(used / (120 - 8), rel=0.1)
    assert second.trainer.global_step > 17


def finished(make_run, root, seconds, **options):
    """A run that used all of its budget: run, its last checkpoint, its steps and the seconds that it took."""
    run, clock, _ = budgeted(make_run, root, seconds, **options)
    run.fit()
    return run, run.folder.path / "checkpoints" / "last.ckpt", run.trainer.global_step, clock.now - 1008.0


@pytest.mark.parametrize(
    ("seconds", "options"),
    [
        (95, {}),
        (131, {}),
        (95, {"val_fraction": 0.0}),
        (131, {"val_fraction": 0.0}),
        (95, {"check_val_every_n_epoch": 9}),
    ],
)
def test_a_finished_run_resumed_makes_no_step_and_says_why(tmp_path, make_run, capsys, seconds, options):
    first, path, steps, _ = finished(make_run, tmp_path, seconds, **options)
    assert "larger --budget" not in capsys.readouterr().err
    second, _, rates = budgeted(make_run, tmp_path, seconds, resume=first.folder.path, **options)
    second.fit(path)
    assert second.trainer.global_step == steps
    assert rates.lr == []
    assert f"the budget of {seconds} s is used up" in capsys.readouterr().err


@pytest.mark.parametrize("seconds", [95, 99, 133])
def test_the_time_ends_with_a_whole_step_of_accumulated_batches(tmp_path, make_run, seconds):
    """And a resumed run has the rest, as one of single batches."""
    accumulate = {"accumulate_grad_batches": 4}
    first, path, steps, used = finished(make_run, tmp_path, seconds, **accumulate)
    assert seconds - 2 * 8.0 - 1.0 <= used <= seconds
    batches = first.checkpoint()["loops"]["fit_loop"]["epoch_loop.batch_progress"]["current"]["ready"]
    assert batches % 4 == 0 or batches == 11
    second, _, rates = budgeted(make_run, tmp_path, seconds, resume=first.folder.path, **accumulate)
    second.fit(path)
    assert (second.trainer.global_step, rates.lr) == (steps, [])
    longer, clock, _ = budgeted(make_run, tmp_path, 2 * seconds, resume=first.folder.path, **accumulate)
    longer.fit(path)
    assert longer.trainer.global_step > steps
    assert 2 * seconds - 2 * 8.0 - 1.0 <= used + clock.now - 1000.0 <= 2 * seconds


def test_a_run_interrupted_before_its_last_validation_makes_it_when_resumed(tmp_path, make_run):
    _, _, steps, _ = finished(make_run, tmp_path / "whole", 95)
    first, _, _ = budgeted(make_run, tmp_path / "parts", 95, stop_at=steps)
    with pytest.raises(Interrupted) as caught:
        first.fit()
    second, _, _ = budgeted(make_run, tmp_path / "parts", 95, resume=first.folder.path)
    second.fit(caught.value.path)
    rows = read_metrics(second.folder.path / "metrics.csv")
    assert "val/acc" in rows[-1]
    assert rows[-1]["step"] == second.trainer.global_step


@pytest.mark.parametrize("more", [150, 400])
def test_a_finished_run_resumed_with_more_time_learns_in_it(tmp_path, make_run, more):
    first, path, steps, used = finished(make_run, tmp_path, 95)
    second, clock, rates = budgeted(make_run, tmp_path, more, resume=first.folder.path)
    second.fit(path)
    assert second.trainer.global_step > steps
    assert rates.used[0] == pytest.approx(
        used / (more - 8), rel=0.1
    )  # where it stands in the new schedule, not its end
    assert rates.used == sorted(rates.used)
    assert rates.lr[0] > 5 * rates.lr[-1]
    assert used + clock.now - 1000.0 <= more + 1e-9


def test_a_budget_shorter_than_a_validation_still_makes_a_step(tmp_path, make_run):
    run, _, _ = budgeted(make_run, tmp_path, 1)
    run.fit()
    assert run.trainer.global_step == 1
    assert (run.folder.path / "checkpoints" / "best.ckpt").is_file()
