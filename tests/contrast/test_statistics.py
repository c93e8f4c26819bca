"""Intervals hold their coverage, tests hold their level and find what they must, all by simulation."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vision_attn.contrast.statistics import (
    NO_SEED,
    NO_SPREAD,
    ONE_SEED,
    compare,
    holm,
    joint_level,
    joint_p,
    mean_interval,
    resamples,
    student_quantile,
    student_tail,
)

VALUES = st.lists(st.floats(-10, 10).map(lambda x: round(x, 3)), min_size=2, max_size=7)


def pairs(rng: np.random.Generator, draws: int, n: int, shift: float, correlation: float) -> np.ndarray:
    """(draws, 2, n) standard normal values of two models, the first shifted, with correlated seeds."""
    shared = math.sqrt(correlation) * rng.standard_normal((draws, 1, n))
    values = shared + math.sqrt(1 - correlation) * rng.standard_normal((draws, 2, n))
    values[:, 0] += shift
    return values


def found(values: np.ndarray) -> float:
    """Share of draws in which the models differ significantly."""
    p = [compare(a, b).p for a, b in values]
    return float(np.mean([x is not None and x <= 0.05 for x in p]))


# -- intervals --------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [2, 3, 4, 5, 7, 12])
def test_intervals_cover_the_mean_of_normal_values(n: int) -> None:
    draws = 2000
    values = np.random.default_rng(n).standard_normal((draws, n))
    estimates = [mean_interval(x) for x in values]
    covered = np.mean([e.low <= 0 <= e.high for e in estimates])
    assert 0.935 <= covered <= 0.967  # 0.95 ± 3 standard errors


def test_the_unstretched_interval_would_not_hold() -> None:
    values = np.random.default_rng(0).standard_normal((2000, 3))
    ends = np.quantile(values @ resamples(3).T, (0.025, 0.975), axis=1)
    assert np.mean((ends[0] <= 0) & (ends[1] >= 0)) < 0.72


@pytest.mark.parametrize(("draw", "at_least"), [("uniform", 0.90), ("exponential", 0.86), ("laplace", 0.94)])
def test_coverage_of_other_shapes_is_what_the_documentation_says(draw: str, at_least: float) -> None:
    rng = np.random.default_rng(1)
    shapes = {
        "uniform": rng.uniform(-1, 1, (2000, 5)),
        "exponential": rng.exponential(1, (2000, 5)) - 1,
        "laplace": rng.laplace(0, 1, (2000, 5)),
    }
    estimates = [mean_interval(x) for x in shapes[draw]]
    assert np.mean([e.low <= 0 <= e.high for e in estimates]) > at_least


@settings(max_examples=30, deadline=None)
@given(VALUES, st.floats(-5, 5), st.floats(0.1, 4))
def test_intervals_move_and_scale_with_the_values(values: list[float], shift: float, scale: float) -> None:
    one, other = mean_interval(values), mean_interval([shift + scale * x for x in values])
    if not one.bounded or np.std(values) < 1e-6:
        return
    for key in ("mean", "low", "high"):
        assert getattr(other, key) == pytest.approx(shift + scale * getattr(one, key), abs=1e-6)
    assert one.low <= one.mean <= one.high


def test_every_resample_of_few_seeds_is_listed() -> None:
    for n in (2, 3, 5):
        shares = resamples(n)
        assert shares.shape == (n**n, n)
        np.testing.assert_allclose(shares.sum(1), 1)
        np.testing.assert_allclose(shares.mean(0), 1 / n)
    np.testing.assert_array_equal(resamples(7), resamples.__wrapped__(7))  # drawn, but always the same


def test_no_interval_without_two_different_values() -> None:
    assert mean_interval([]).note == NO_SEED
    one = mean_interval([0.7])
    assert (one.mean, one.low, one.high, one.note) == (0.7, None, None, ONE_SEED)
    assert mean_interval([0.5, 0.5, 0.5]).note == NO_SPREAD


# -- tests ------------------------------------------------------------------------------------------


def significant(values: np.ndarray, level: float) -> np.ndarray:
    """(draws,) whether ``compare`` finds a difference; it is asked only where one of the two tests comes near that."""
    n = values.shape[-1]
    a, b = values[:, 0], values[:, 1]
    errors = np.minimum((a - b).std(1, ddof=1), np.sqrt(a.var(1, ddof=1) + b.var(1, ddof=1))) / math.sqrt(n)
    near = np.abs((a - b).mean(1)) / errors >= student_quantile(level / 2, 2 * (n - 1))
    result = np.zeros(len(values), dtype=bool)
    for i in near.nonzero()[0]:
        p = compare(a[i], b[i]).p
        result[i] = p is not None and p <= level
    return result


def at_most(level: float, draws: int) -> float:
    """A share of ``draws`` simulations that a true ``level`` exceeds in one of 700 (three standard errors)."""
    return level + 3 * math.sqrt(level * (1 - level) / draws)


@pytest.mark.parametrize("correlation", [0.0, 0.3, 0.8])
@pytest.mark.parametrize("n", [2, 3, 5])
def test_equal_models_differ_in_at_most_5_percent(n: int, correlation: float) -> None:
    draws = 20_000
    share = significant(pairs(np.random.default_rng(n), draws, n, 0.0, correlation), 0.05).mean()
    assert share <= at_most(0.05, draws)
    if correlation == 0:
        assert share > 0.035  # the level is used up, not thrown away


@pytest.mark.parametrize("spread", [2.0, 5.0])
@pytest.mark.parametrize("n", [3, 5])
def test_the_level_holds_for_models_that_spread_differently(n: int, spread: float) -> None:
    draws = 20_000
    values = pairs(np.random.default_rng(4), draws, n, 0.0, 0.0) * np.array([1.0, spread])[:, None]
    assert significant(values, 0.05).mean() <= at_most(0.05, draws)


@pytest.mark.parametrize("spread", [1.0, 3.0, 8.0])
@pytest.mark.parametrize("n", [3, 5])
def test_studies_of_21_comparisons_have_a_false_verdict_in_at_most_5_percent(n: int, spread: float) -> None:
    """Holm tests the smallest p at 5 % / 21, where the two tests together err far more often than either."""
    studies, tests = 10_000, 21
    values = pairs(np.random.default_rng(n), studies * tests, n, 0.0, 0.0) * np.array([1.0, spread])[:, None]
    wrong = significant(values, 0.05 / tests).reshape(studies, tests).any(1).mean()
    assert wrong <= at_most(0.05, studies)


@given(st.floats(1e-12, 1), st.floats(1e-12, 1), st.integers(2, 15))
def test_enlarged_p_values_keep_their_order_and_are_never_smaller(p: float, other: float, n: int) -> None:
    assert p <= joint_p(p, n) <= 1
    assert (joint_p(p, n) <= joint_p(other, n)) or p > other
    assert joint_p(joint_level(n), n) == pytest.approx(0.05)


@pytest.mark.parametrize("correlation", [0.0, 0.3, 0.6, 0.9])
def test_two_deviations_of_the_paired_differences_are_found(correlation: float) -> None:
    shift = 2 * math.sqrt(2 * (1 - correlation))
    assert found(pairs(np.random.default_rng(5), 2000, 5, shift, correlation)) >= 0.80


@pytest.mark.parametrize(("correlation", "at_least"), [(0.0, 0.70), (0.3, 0.80), (0.6, 0.90)])
def test_two_deviations_of_each_models_values_are_found(correlation: float, at_least: float) -> None:
    assert found(pairs(np.random.default_rng(6), 2000, 5, 2.0, correlation)) >= at_least


def test_interval_and_p_agree() -> None:
    for a, b in pairs(np.random.default_rng(7), 300, 4, 1.0, 0.4):
        result = compare(a, b)
        excludes = result.difference.low > 0 or result.difference.high < 0
        assert excludes == (result.p <= 0.05)
        back = compare(b, a)
        assert back.p == pytest.approx(result.p)
        assert back.difference.mean == pytest.approx(-result.difference.mean)


def test_nothing_is_tested_without_spread() -> None:
    same = compare([0.3, 0.4, 0.5], [0.3, 0.4, 0.5])
    assert same.p is None
    assert same.difference.mean == 0
    assert compare([1.0], [2.0]).p is None
    assert compare([], []).difference.note == NO_SEED


def test_student_is_scipys() -> None:
    from scipy import stats

    for df in (1, 2, 4, 8):
        assert student_tail(1.7, df) == pytest.approx(stats.t.sf(1.7, df))
        assert student_quantile(0.0167, df) == pytest.approx(stats.t.isf(0.0167, df))


# -- many tests at once -----------------------------------------------------------------------------


def test_holm_by_hand() -> None:
    assert holm([0.04, None, 0.01, 0.03]) == [pytest.approx(0.06), None, pytest.approx(0.03), pytest.approx(0.06)]
    assert holm([]) == []
    assert holm([None]) == [None]
    assert holm([0.9, 0.8]) == [1.0, 1.0]


def test_holm_keeps_the_error_of_a_whole_study() -> None:
    p = np.random.default_rng(8).uniform(size=(3000, 7))
    assert np.mean([min(holm(list(row))) <= 0.05 for row in p]) <= 0.05 + 2 * math.sqrt(0.05 * 0.95 / 3000)
