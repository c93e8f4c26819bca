"""What a study would cost, and how long it still takes."""

from __future__ import annotations

import math
from functools import partial

import pytest
from rich.console import Console

from vision_attn.contrast import progress
from vision_attn.contrast.config import NoiseChoice
from vision_attn.contrast.estimate import cell_macs, cell_seconds
from vision_attn.contrast.results import Result
from vision_attn.contrast.runner import make_plan

SPEED = {(model, arm): (0.5, 0.01) for model in ("vit", "cnn") for arm in ("none", "flip_crop")}


def test_what_a_cell_costs_does_not_depend_on_the_noise_that_others_have(tiny):
    plain, noisy = (
        make_plan(tiny(batch_size=64, noise=NoiseChoice(levels=levels, sizes=[0.02], seeds=1)))
        for levels in ([], [0.4])
    )
    assert [cell_seconds(noisy, cell, SPEED) for cell in plain.cells] == [
        cell_seconds(plain, cell, SPEED) for cell in plain.cells
    ]
    small, large = plain.cells[0], plain.cells[-1]
    assert (small.images, large.images) == (25, 126)
    # 7 steps of half a second at a full batch of 64; 25 images are a smaller one. 3 evaluations of as many training
    # images and 270 others, and at the end these and twice the 270 of the test set
    assert cell_seconds(plain, large, SPEED) == pytest.approx(7 * 0.5 + 0.01 * (3 * 396 + 396 + 540))
    assert cell_seconds(plain, small, SPEED) == pytest.approx(7 * 0.5 * 25 / 64 + 0.01 * (3 * 295 + 295 + 540))


class Clock:
    def __init__(self):
        self.now = 1000.0

    def __call__(self):
        return self.now


def test_the_time_left_follows_the_work_not_the_number_of_cells(plan, monkeypatch, capsys):
    clock = Clock()
    monkeypatch.setattr(progress, "Console", partial(Console, get_time=clock, width=200))
    monkeypatch.setattr(progress.time, "monotonic", clock)
    cells = [*plan.trials, *plan.cells]
    costs = [cell_macs(plan, cell) for cell in cells]
    assert max(costs) > 2 * min(costs)
    second = sum(costs) / 36_000  # the study takes ten hours on this clock
    with progress.Progress(plan) as shown:
        for cell in cells[:3]:  # of an earlier call: they say nothing about the speed
            shown.note(cell, Result(cell, "done"), False)
        assert capsys.readouterr().err == ""
        for done, (cell, cost) in enumerate(zip(cells[3:], costs[3:], strict=True), 4):
            clock.now += cost / second
            shown.note(cell, Result(cell, "done"), True)
            said = capsys.readouterr().err
            left = math.ceil(sum(costs[done:]) / second)
            if done == 4:  # one tells no speed
                assert said == f"4 of {len(cells)} trainings\n"
            elif done < len(cells):
                assert said == f"{done} of {len(cells)} trainings, about {left / 60:.0f} minutes left\n"
            else:
                assert said == f"{done} of {len(cells)} trainings\n"


def test_failures_are_said_at_once(plan, capsys):
    with progress.Progress(plan) as shown:
        shown.note(plan.trials[0], Result(plan.trials[0], "failed", "no reason"), True)
    assert f"failed: {plan.trials[0].id}: no reason" in capsys.readouterr().err
