"""A real study of a model against itself: whatever it says is wrong, except that nothing can be said."""

from __future__ import annotations

import pytest

from vision_attn.contrast import runner
from vision_attn.contrast.analysis import analyse
from vision_attn.contrast.config import ModelChoice, NoiseChoice
from vision_attn.contrast.runner import make_plan, open_folder, run_study
from vision_attn.contrast.summary import summarise
from vision_attn.contrast.verdict import INCONCLUSIVE


@pytest.mark.slow
def test_a_model_against_itself_is_inconclusive_everywhere(tiny, here, tmp_path, monkeypatch):
    monkeypatch.setattr(runner, "report", lambda study: None)
    twin = ModelChoice("resnet8_cifar", {"width": 8, "blocks": [1, 1, 1]})
    config = tiny(
        models={"one": twin, "other": twin},
        sizes=[0.05, 0.2],
        noise=NoiseChoice(levels=[]),
        seeds=5,
        small_seeds=5,
        steps=150,
        batch_size=32,
        learning_rates=[1e-2],
        evaluations=6,
        match=0.25,
    )
    plan = make_plan(config)
    open_folder(tmp_path / "study", plan, "", "")
    analysis = analyse(run_study(plan, tmp_path / "study", here(plan)))
    assert len(analysis.verdicts) == 4
    for verdict in analysis.verdicts:
        assert verdict.outcome == INCONCLUSIVE, verdict.reason
        assert verdict.seeds == (0, 1, 2, 3, 4)
        assert verdict.p is not None  # it was asked and answered, not given up
        assert verdict.gap_loss.difference.low < 0 < verdict.gap_loss.difference.high
    assert "No difference in overfitting between one and other could be shown" in summarise(analysis)[0]
