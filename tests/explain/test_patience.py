"""Comparing maps keeps to the time there is, and says what it leaves out."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from vision_attn.explain.faithfulness import faithfulness, maps_for_each, passes
from vision_attn.explain.patience import FEW_STEPS, plan, seconds_each

NAMES = ["relevance", "encoder", "layer 2", "layer 1", "layer 0"]


class Counting(torch.nn.Module):
    """Counts the images it is asked about."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(3))
        self.asked = 0

    def forward(self, images):
        self.asked += len(images)
        return images.mean((2, 3)) * self.weight


@pytest.mark.parametrize(("images", "maps", "trials", "steps"), [(1, 1, 19, 8), (1, 3, 5, 2), (3, 2, 7, 5)])
def test_passes_are_those_that_are_made(images, maps, trials, steps):
    model = Counting()
    x = torch.randn(images, 3, 16, 16)
    given = {str(i): torch.rand(images, 8, 8) for i in range(maps)}
    faithfulness(model, x, given, steps=steps, trials=trials)
    per_image = passes(maps, maps_for_each(trials, images), steps)
    # what is left is small: the answer that is watched, and gradient × input
    assert per_image * images <= model.asked <= (per_image + 2) * images


@given(
    st.integers(0, 5), st.integers(1, 9), st.integers(1, 40), st.integers(1, 12), st.floats(1e-3, 9), st.floats(0.1, 60)
)
def test_a_plan_keeps_to_its_time(count, images, trials, steps, each, minutes):
    found = plan(NAMES[:count], images, trials, steps, each, minutes)
    assert found.names == NAMES[: len(found.names)]
    assert found.steps in (steps, min(steps, FEW_STEPS))
    k = maps_for_each(trials, images)
    takes = [passes(n, k, found.steps) * images * each / 60 for n in range(count + 1)]
    if found.names:
        assert takes[len(found.names)] == pytest.approx(found.minutes)
        assert found.minutes <= minutes
    if len(found.names) < count:
        assert takes[len(found.names) + 1] > minutes  # no map is left out that had time
        assert all(name in found.note for name in NAMES[len(found.names) : count]) or not found.names
        assert "--minutes" in found.note
    assert bool(found.note) == (len(found.names) < count or found.steps < steps or takes[count] > minutes)


def test_the_time_that_a_note_names_is_enough():
    short = plan(NAMES, 1, 19, 8, 1.0, 1.0)
    assert short.names == []
    one, whole = (int(part.partition(" ")[0]) for part in short.note.split("--minutes ")[1:])
    assert len(plan(NAMES, 1, 19, 8, 1.0, one).names) >= 1
    assert plan(NAMES, 1, 19, 8, 1.0, whole).note == ""


def test_an_image_is_timed_in_evaluation_and_the_mode_stays():
    model = Counting().train()
    assert seconds_each(model, torch.randn(3, 8, 8)) > 0
    assert model.training
    assert model.asked == 4
