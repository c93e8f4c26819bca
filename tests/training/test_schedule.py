"""Learning rates as functions of the step."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from lightning.pytorch import Callback

from vision_attn.training.schedule import anneal, lr_factor_by_budget, lr_factor_by_step

KINDS = st.sampled_from(["cosine", "linear", "constant"])


def test_cosine_with_warmup_by_hand():
    factors = [lr_factor_by_step(n, 10, 0.2, "cosine") for n in range(10)]
    expected = [0.5, 1.0] + [0.5 * (1 + math.cos(math.pi * n / 8)) for n in range(8)]
    assert factors == pytest.approx(expected)


def test_warmup_in_steps_and_floor():
    factors = [lr_factor_by_step(n, 12, 4, "linear", floor=0.1) for n in range(13)]
    assert factors[:4] == [0.25, 0.5, 0.75, 1.0]
    assert factors[4] == 1.0
    assert factors[12] == pytest.approx(0.1)


def test_endless_runs_stay_at_the_peak():
    assert lr_factor_by_step(3, math.inf, 0.1, "cosine") == 1.0
    assert lr_factor_by_step(3, math.inf, 8, "cosine") == 0.5


@given(st.integers(1, 500), st.floats(0, 0.9), KINDS, st.floats(0, 1))
def test_rises_then_falls_between_floor_and_one(total, warmup, kind, floor):
    factors = [lr_factor_by_step(n, total, warmup, kind, floor) for n in range(total)]
    warm = round(warmup * total)
    assert all(0 < f <= 1 for f in factors if floor > 0 or f > 0)
    assert factors[:warm] == sorted(factors[:warm])
    assert factors[warm:] == sorted(factors[warm:], reverse=True)
    assert all(f >= floor - 1e-12 for f in factors[warm:])


@given(st.floats(0, 1), st.floats(0, 0.9), KINDS, st.floats(0, 1))
def test_budget_factor_is_in_range(used, warmup, kind, floor):
    assert 0 <= lr_factor_by_budget(used, 0, warmup, kind, floor) <= 1


def test_budget_and_steps_agree():
    for used in (0.3, 0.5, 0.9, 1.0):
        expected = lr_factor_by_step(int(used * 1000), 1000, 0.1, "cosine")
        assert lr_factor_by_budget(used, 7, 0.1, "cosine") == pytest.approx(expected, abs=1e-9)
    assert lr_factor_by_budget(0.0, 0, 4, "cosine") == 0.25


def test_anneal_clips():
    assert anneal(1.5, "linear", 0.2) == pytest.approx(0.2)
    assert anneal(-1, "linear") == 1.0


def test_steps_drop_where_they_are_asked_to():
    """DETR's: a tenth after 400 of 500 epochs, at the step and not one later."""
    shape = {"warmup": 0, "schedule": "step", "drop_at": (0.8,)}
    assert [lr_factor_by_step(n, 5000, **shape) for n in (0, 3999, 4000, 4999)] == [1, 1, 0.1, 0.1]
    twice = {"warmup": 100, "schedule": "step", "drop_at": (0.5, 0.75), "drop_factor": 0.2}
    got = [lr_factor_by_step(n, 500, **twice) for n in (49, 299, 300, 400)]
    assert got == pytest.approx([0.5, 1, 0.2, 0.04])
    assert lr_factor_by_step(400, 500, **twice, floor=0.1) == pytest.approx(0.1)
    assert lr_factor_by_budget(0.85, 9, **shape) == pytest.approx(0.1)
    assert lr_factor_by_step(10**6, math.inf, **shape) == 1.0


@pytest.mark.parametrize(
    ("accumulate", "limits"), [(1, {}), (2, {}), (4, {}), (2, {"max_steps": 7}), (4, {"max_steps": 8})]
)
def test_a_run_follows_the_schedule_of_its_optimizer_steps(make_run, tmp_path, accumulate, limits):
    seen = []

    class Rates(Callback):
        def on_before_optimizer_step(self, trainer, module, optimizer):
            seen.append(optimizer.param_groups[0]["lr"] / optimizer.param_groups[0]["peak_lr"])

    run = make_run(tmp_path, accumulate_grad_batches=accumulate, callbacks=[Rates()], **limits).fit()
    steps = min(3 * math.ceil(11 / accumulate), limits.get("max_steps", 1000))
    assert run.module.total_steps == run.trainer.global_step == len(seen) == steps
    assert seen == pytest.approx([lr_factor_by_step(step, steps, 0.2, "cosine") for step in range(steps)])
