from __future__ import annotations

from collections import Counter

import pytest

from vision_attn.contrast.cells import plan_cells, plan_trials, shows_looks
from vision_attn.contrast.config import Arm, ModelChoice, NoiseChoice
from vision_attn.contrast.results import TRIAL_SEED
from vision_attn.errors import UserError

TWO = {"a b": ModelChoice("resnet8_cifar"), "c": ModelChoice("resnet20_cifar")}


def test_the_grid(tiny):
    config = tiny(models=TWO, steps=[5, 6])
    cells = plan_cells(config, 1000, {("a b", 0.02): 0.5})
    assert len({cell.id for cell in cells}) == len(cells) == 2 * (2 * 2 + 2 * 1 + 1)
    kinds = Counter((cell.size, cell.images, cell.arm, cell.noise, cell.seed, cell.steps) for cell in cells)
    assert set(kinds.values()) == {2}  # every kind once for each model
    assert cells[0].id == "a_b-02pct-none-n0-s0"
    assert (cells[0].model, cells[0].role, cells[0].images, cells[0].steps, cells[0].lr) == ("a b", 0, 20, 5, 0.5)
    assert cells[1].lr == 0
    assert [cell.seed for cell in cells if cell.noise] == [0, 0]
    assert [cell.id for cell in cells if shows_looks(config, cell)] == ["a_b-10pct-none-n0-s0", "c-10pct-none-n0-s0"]


def test_every_model_and_size_gets_the_same_trials(tiny):
    config = tiny(models=TWO)
    trials = plan_trials(config, 1000)
    assert Counter((trial.model, trial.size) for trial in trials) == {
        (model, size): 2 for model in TWO for size in config.sizes
    }
    assert {trial.seed for trial in trials} == {TRIAL_SEED}
    assert {trial.arm for trial in trials} == {"none"}
    assert trials[0].id == "a_b-02pct-none-n0-s1000-lr0.001"
    assert len({trial.id for trial in trials}) == len(trials)


def test_fractions_of_a_percent_in_names(tiny):
    cells = plan_cells(tiny(sizes=[0.005, 0.1]), 10000, {})
    assert cells[0].id == "vit-0.5pct-none-n0-s0"


ONE = ModelChoice("resnet8_cifar")
CLOSE = 0.1 + 1e-10


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"models": {"vit small": ONE, "vit_small": ONE}}, "models: 'vit small' and 'vit_small'"),
        ({"models": {"vit/small": ONE, "vit:small": ONE}}, "models: 'vit/small' and 'vit:small'"),
        ({"sizes": [0.1, CLOSE]}, f"sizes: 0.1 and {CLOSE!r}"),
        ({"learning_rates": [0.1, CLOSE]}, f"learning_rates: 0.1 and {CLOSE!r}"),
        ({"arms": ["a b", "a_b"], "arm_settings": {"a b": Arm(), "a_b": Arm()}}, "arms: 'a b' and 'a_b'"),
        ({"noise": NoiseChoice(levels=[0.1, CLOSE], sizes=[0.1], seeds=1)}, f"noise.levels: 0.1 and {CLOSE!r}"),
    ],
)
def test_trainings_that_would_share_a_folder_are_refused_by_name(tiny, changes, named):
    noise = {} if "noise" in changes else {"noise": NoiseChoice(levels=[])}
    config = tiny(**{**noise, **changes})
    with pytest.raises(UserError, match="would share the folder") as caught:
        _ = [*plan_trials(config, 10**9), *plan_cells(config, 10**9, {})]
    assert str(caught.value).startswith(named)
