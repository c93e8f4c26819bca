"""The rule of the verdict: every step of it, and its errors in simulation."""

from __future__ import annotations

import dataclasses
import math
import runpy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from vision_attn.contrast.results import Result
from vision_attn.contrast.verdict import BOTH_UNDERFIT, INCONCLUSIVE, LESS, MORE, Rule, judge, judge_all
from vision_attn.errors import UserError

synthetic = SimpleNamespace(**runpy.run_path(str(Path(__file__).with_name("synthetic.py"))))


def rows(levels: list[tuple[float, float]], accuracy: float | None = None) -> list[dict[str, float]]:
    """A trajectory from (training loss, validation loss)."""
    return [
        {
            "step": float(i + 1),
            "train_loss": train,
            "train_acc": math.exp(-train) if accuracy is None else accuracy,
            "val_loss": val,
            "val_acc": math.exp(-val),
        }
        for i, (train, val) in enumerate(levels)
    ]


def run(model: str, seed: int, levels: list[tuple[float, float]], accuracy: float | None = None) -> Result:
    cell = synthetic.make_cell(model, int(model != "a"), 0.1, "none", 0.0, seed)
    return synthetic.make_result(cell, rows(levels, accuracy), error=0.3)


def side(model: str, gap: float, seeds: int = 3, depth: float = 0.05, **options: Any) -> list[Result]:
    """Runs that end at the training loss ``depth`` with a gap that differs a little between seeds."""
    jitter = (0.02 if model == "a" else 0.015) * np.linspace(-1, 1, seeds)
    return [run(model, s, [(2.2, 2.5), (1.4, 2.2), (depth, depth + gap + jitter[s])], **options) for s in range(seeds)]


# -- step by step -----------------------------------------------------------------------------------


def test_the_larger_gap_at_equal_training_loss_overfits_more() -> None:
    verdict = judge(side("a", 0.9), side("b", 0.4), 10)
    assert verdict.outcome == MORE
    assert verdict.loss == pytest.approx(0.05)
    assert verdict.gap_loss.difference.mean == pytest.approx(0.5)
    back = judge(side("a", 0.4), side("b", 0.9), 10)
    assert back.outcome == LESS
    assert back.p == pytest.approx(verdict.p)


def test_gaps_are_compared_where_both_have_been() -> None:
    # b goes on to a training loss where its gap is larger; at the loss both reach, a's is
    deep = [run("b", s, [(2.2, 2.3), (0.5, 0.6 + 0.01 * s), (0.01, 1.4 + 0.02 * s)]) for s in range(3)]
    shallow = [run("a", s, [(2.2, 2.3), (0.5, 0.9 + 0.015 * s)]) for s in range(3)]
    verdict = judge(shallow, deep, 10)
    assert verdict.loss == pytest.approx(0.5)
    assert verdict.outcome == MORE
    assert verdict.naive.difference.mean is not None


def test_a_naive_gap_that_says_the_opposite_is_pointed_out() -> None:
    # a underfits: hardly any plain gap, although at the training loss both reach it generalises worse
    low = [run("a", s, [(2.2, 2.3), (1.2, 1.5 + 0.01 * s)], accuracy=0.54 + 0.001 * s) for s in range(3)]
    high = [run("b", s, [(2.2, 2.3), (1.2, 1.25 + 0.012 * s), (0.1, 1.2 + 0.01 * s)]) for s in range(3)]
    for result, error in zip(low, (0.500, 0.498, 0.502), strict=True):
        result.values["gap_acc"] = result.values["train_acc"] - (1 - error)
    for result, error in zip(high, (0.291, 0.288, 0.290), strict=True):
        result.values["gap_acc"] = 0.80 - (1 - error)
    verdict = judge(low, high, 10)
    assert verdict.outcome == MORE
    assert verdict.underfits == ("a",)
    assert verdict.misleading
    assert "underfits" in verdict.reason


def test_both_underfit() -> None:
    verdict = judge(side("a", 0.3, depth=1.0), side("b", 0.1, depth=0.9), 10)
    assert verdict.outcome == BOTH_UNDERFIT
    assert "36.8%" in verdict.reason
    assert "no model's validation loss ended, on average over seeds, more than 5% above" in verdict.reason
    assert verdict.gap_loss is not None  # measured all the same


def test_a_validation_loss_that_turned_is_no_underfitting() -> None:
    turned = [run("a", s, [(2.2, 2.3), (1.2, 1.3), (1.0, 1.9 + 0.01 * s)]) for s in range(3)]
    verdict = judge(turned, side("b", 0.1, depth=0.9), 10)
    assert verdict.underfits == ("b",)
    assert verdict.outcome == MORE


def test_a_seed_that_learned_nothing_leaves_no_common_loss() -> None:
    stuck = [*side("a", 0.9)[:2], run("a", 2, [(2.3, 2.3), (2.25, 2.3)])]
    verdict = judge(stuck, side("b", 0.4), 10)
    assert verdict.outcome == INCONCLUSIVE
    assert "a with seed 2 never went below 2.25" in verdict.reason
    assert verdict.gap_loss is None


def test_evidence_that_contradicts_itself_decides_nothing() -> None:
    # at the end the gap of a is larger, but the loss of b rose more on the way there
    flat = [run("a", s, [(2.2, 2.3), (0.3, 1.35), (0.05, 1.30 + 0.01 * s)]) for s in range(3)]
    rising = [run("b", s, [(2.2, 2.3), (0.3, 0.50), (0.05, 0.90 + 0.012 * s)]) for s in range(3)]
    verdict = judge(flat, rising, 10)
    assert verdict.outcome == INCONCLUSIVE
    assert verdict.contradicts


@pytest.mark.parametrize(("seeds", "words"), [((0,), "only one pair"), ((), "no pair")])
def test_fewer_than_two_pairs_decide_nothing(seeds: tuple[int, ...], words: str) -> None:
    ours = side("a", 0.9, 3)
    theirs = [r for r in side("b", 0.1, 3) if r.cell.seed in seeds] or [run("b", 9, [(2.0, 2.1), (0.05, 0.1)])]
    verdict = judge(ours, theirs, 10)
    assert verdict.outcome == INCONCLUSIVE
    assert words in verdict.reason


def test_only_shared_seeds_count() -> None:
    verdict = judge(side("a", 0.9, 5), side("b", 0.4, 5)[1:], 10)
    assert verdict.seeds == (1, 2, 3, 4)
    assert set(verdict.matched["a"]) == {1, 2, 3, 4}


def test_a_model_against_itself_with_the_same_seeds_is_inconclusive() -> None:
    verdict = judge(side("a", 0.9), side("a", 0.9), 10)
    assert verdict.outcome == INCONCLUSIVE
    assert verdict.p is None


def test_thresholds_can_be_changed() -> None:
    ours, theirs = side("a", 0.3, depth=1.0), side("b", 0.1, depth=0.9)
    assert judge(ours, theirs, 10, Rule(fits=0.3)).outcome == MORE
    assert judge(ours, theirs, 10, Rule(fits=0.3, informative=0.2)).outcome == INCONCLUSIVE


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, -0.1, 0.0, 1.0, 1.1])
@pytest.mark.parametrize("name", ["alpha", "fits", "turned", "informative"])
def test_thresholds_that_mean_nothing_are_refused(name: str, bad: float) -> None:
    allowed = {"alpha": (), "fits": (1.0,), "turned": (0.0, 1.0, 1.1), "informative": (1.0,)}
    if bad in allowed[name]:
        assert getattr(Rule(**{name: bad}), name) == bad
        return
    with pytest.raises(UserError, match=rf"^rule\.{name} is {bad}: expected"):
        Rule(**{name: bad})


def test_both_underfit_is_decided_by_the_mean_over_seeds_and_says_so() -> None:
    ours, theirs = side("a", 0.3, depth=1.0), side("b", 0.1, depth=0.9)
    ours[0].values |= {"turn_rise": 0.12, "turn_loss": 1.0}  # 12 % in one of three: 4 % on average
    verdict = judge(ours, theirs, 10)
    assert verdict.outcome == BOTH_UNDERFIT
    assert "on average over seeds" in verdict.reason


def test_p_of_the_study_allows_for_all_tests() -> None:
    groups = [(side("a", 0.9), side("b", gap)) for gap in (0.4, 0.88, 0.9)]
    verdicts = judge_all([*groups, (side("a", 0.3, depth=1.0), side("b", 0.1, depth=0.9))], 10, Rule())
    assert verdicts[0].p_study == pytest.approx(3 * verdicts[0].p)
    assert all(v.p_study >= v.p for v in verdicts[:3])
    assert verdicts[3].p is not None
    assert verdicts[3].p_study is None  # both underfit: nothing was claimed that could be wrong


# -- in simulation ----------------------------------------------------------------------------------


class Simulation:
    """Studies of two models whose gaps are drawn from normal distributions.

    Args:
        n: seeds.
        alike: all trajectories have one shape. Otherwise each falls at a speed and to a training loss of its own, so
            the loss at which gaps are compared follows from the draw.
    """

    def __init__(self, n: int, alike: bool = True) -> None:
        self.n, self.alike = n, alike
        self.rng = np.random.default_rng(0)
        self.shapes = [self.shape() for _ in range(1 if alike else 40)]

    def shape(self) -> list[dict[str, float]]:
        """A trajectory with a final gap of 1."""
        own = {"floor": 0.03 * math.exp(0.7 * self.rng.standard_normal()), "speed": self.rng.uniform(2.0, 6.0)}
        return synthetic.make_curve(np.random.default_rng(0), gap=1.0, noise=0.0, **({} if self.alike else own))

    def runs(self, model: str, gaps: np.ndarray, first_seed: int = 0) -> list[Result]:
        found = []
        for seed, gap in enumerate(gaps, first_seed):
            cell = synthetic.make_cell(model, 0, 0.1, "none", 0.0, seed)
            shape = self.shapes[self.rng.integers(len(self.shapes))]
            curve = [
                {**row, "val_loss": row["train_loss"] + gap * (row["val_loss"] - row["train_loss"])} for row in shape
            ]
            found.append(synthetic.make_result(cell, curve, error=0.3 + 0.01 * gap))
        return found

    def outcomes(self, draws: int, shift: float, correlation: float, seed: int) -> list[str]:
        """Verdicts; the spread of the gaps is 0.05 nats, ``shift`` counts in it."""
        rng = np.random.default_rng(seed)
        shared = math.sqrt(correlation) * rng.standard_normal((draws, 1, self.n))
        gaps = shared + math.sqrt(1 - correlation) * rng.standard_normal((draws, 2, self.n))
        gaps[:, 0] += shift
        gaps = 0.6 + 0.05 * gaps
        return [judge(self.runs("a", a), self.runs("b", b), 10).outcome for a, b in gaps]


def at_most(level: float, draws: int) -> float:
    """A share of ``draws`` simulations that a true ``level`` exceeds in one of 44 (two standard errors)."""
    return level + 2 * math.sqrt(level * (1 - level) / draws)


@pytest.mark.parametrize("alike", [True, False])
@pytest.mark.parametrize(("n", "correlation"), [(3, 0.0), (5, 0.0), (5, 0.5)])
def test_false_verdicts_are_at_most_5_percent(n: int, correlation: float, alike: bool) -> None:
    draws = 1500 if alike else 1000
    outcomes = Simulation(n, alike).outcomes(draws, 0.0, correlation, seed=n)
    assert np.mean([outcome in (MORE, LESS) for outcome in outcomes]) <= at_most(0.05, draws)


def test_trajectories_of_their_own_are_compared_at_losses_of_their_own() -> None:
    simulation = Simulation(5, alike=False)
    gaps = np.full(5, 0.6)
    losses = [judge(simulation.runs("a", gaps), simulation.runs("b", gaps), 10).loss for _ in range(20)]
    assert max(losses) > 2 * min(losses)


@pytest.mark.parametrize("correlation", [0.0, 0.5, 0.8])
def test_two_standard_deviations_are_found_where_trajectories_differ(correlation: float) -> None:
    shift = 2 * math.sqrt(2 * (1 - correlation))
    outcomes = Simulation(5, alike=False).outcomes(500, shift, correlation, seed=15)
    assert np.mean([outcome == MORE for outcome in outcomes]) >= 0.80


@pytest.mark.parametrize("correlation", [0.0, 0.5, 0.8])
def test_two_standard_deviations_of_the_pairs_are_found_with_5_seeds(correlation: float) -> None:
    shift = 2 * math.sqrt(2 * (1 - correlation))
    outcomes = Simulation(5).outcomes(500, shift, correlation, seed=11)
    assert np.mean([outcome == MORE for outcome in outcomes]) >= 0.80


@pytest.mark.parametrize(("correlation", "at_least"), [(0.0, 0.70), (0.3, 0.80), (0.6, 0.90)])
def test_two_standard_deviations_of_the_models_are_found_with_5_seeds(correlation: float, at_least: float) -> None:
    outcomes = Simulation(5).outcomes(500, -2.0, correlation, seed=12)
    assert np.mean([outcome == LESS for outcome in outcomes]) >= at_least


def test_a_model_against_itself_with_other_seeds_is_inconclusive() -> None:
    simulation = Simulation(5)
    rng = np.random.default_rng(13)
    outcomes = []
    for _ in range(400):
        gaps = 0.6 + 0.05 * rng.standard_normal(10)
        other = [
            dataclasses.replace(r, cell=dataclasses.replace(r.cell, model="again"))
            for r in simulation.runs("a", gaps[5:])
        ]
        outcomes.append(judge(simulation.runs("a", gaps[:5]), other, 10).outcome)
    assert set(outcomes) <= {INCONCLUSIVE, MORE, LESS}
    assert np.mean([outcome == INCONCLUSIVE for outcome in outcomes]) >= 0.93


@pytest.mark.parametrize("n", [3, 5])
@pytest.mark.parametrize("alike", [True, False])
def test_most_studies_of_equal_models_stand_by_no_verdict(n: int, alike: bool) -> None:
    """Seven sizes under three arms: p_study keeps the whole study at 5 %."""
    studies = 100
    simulation = Simulation(n, alike)
    rng = np.random.default_rng(14)
    wrong = 0
    for _ in range(studies):
        groups = [tuple(simulation.runs(m, 0.6 + 0.05 * rng.standard_normal(n)) for m in ("a", "b")) for _ in range(21)]
        wrong += any(v.stands(0.05) for v in judge_all(groups, 10, Rule()))
    assert wrong / studies <= at_most(0.05, studies)
