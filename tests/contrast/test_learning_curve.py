"""Learning-curve fits find the curve that made the errors, equal scipy's, and know their limits."""

from __future__ import annotations

import numpy as np
import pytest

from vision_attn.contrast.learning_curve import Fit, fit_learning_curve, solve

IMAGES = np.array([60.0, 130.0, 310.0, 630.0, 1260.0])


def draw(rng: np.random.Generator, seeds: int, spread: float) -> dict[int, list[float]]:
    """Errors of a known curve, 0.02 + 1.1 n^-0.5, with normal noise relative to its height."""
    truth = 0.02 + 1.1 * IMAGES**-0.5
    return {int(n): list(e * (1 + spread * rng.standard_normal(seeds))) for n, e in zip(IMAGES, truth, strict=True)}


def test_a_curve_without_noise_is_recovered() -> None:
    fit = fit_learning_curve({n: [e[0]] * 3 for n, e in draw(np.random.default_rng(0), 1, 0.0).items()})
    assert isinstance(fit, Fit)
    assert (fit.alpha, fit.eta, fit.gamma) == (
        pytest.approx(0.02, abs=1e-3),
        pytest.approx(1.1, rel=0.02),
        pytest.approx(-0.5, abs=0.005),
    )
    assert fit.note == ""
    assert fit.misfit == pytest.approx(0, abs=1e-4)


def test_fits_equal_scipys() -> None:
    from scipy.optimize import curve_fit

    rng = np.random.default_rng(1)
    means = np.array([np.mean(e) for e in draw(rng, 5, 0.05).values()])
    alpha, eta, gamma = (float(x[0]) for x in solve(IMAGES, means[None], np.ones(5)))
    wanted, _ = curve_fit(
        lambda n, a, b, c: a + b * n**c, IMAGES, means, (0.01, 1.0, -0.6), bounds=([0, 0, -2], [1, np.inf, -0.02])
    )

    def loss(parameters: tuple[float, ...]) -> float:
        a, b, c = parameters
        return float(((a + b * IMAGES**c - means) ** 2).sum())

    assert loss((alpha, eta, gamma)) <= loss(tuple(wanted)) * 1.001
    np.testing.assert_allclose((alpha, eta, gamma), wanted, rtol=0.05, atol=2e-3)


@pytest.mark.parametrize("means", [[0.5, 0.5, 0.5], [0.1, 0.2, 0.3], [0.9, 0.5, 0.0]])
def test_bounds_hold_whatever_the_errors(means: list[float]) -> None:
    alpha, eta, gamma = solve(np.array([10.0, 100.0, 1000.0]), np.array([means]), np.ones(3))
    assert 0 <= alpha[0] <= 1
    assert eta[0] >= 0
    assert -2 <= gamma[0] < 0


def test_the_band_covers_the_true_curve() -> None:
    rng = np.random.default_rng(2)
    truth_at = [0, 2, 4]
    covered = []
    for _ in range(60):
        fit = fit_learning_curve(draw(rng, 3, 0.05), points=5)
        assert isinstance(fit, Fit)
        truth = 0.02 + 1.1 * np.array(fit.images) ** -0.5
        covered.append([fit.low[i] <= truth[i] <= fit.high[i] for i in truth_at])
    assert np.mean(covered) > 0.93


def test_what_cannot_be_fitted_says_why() -> None:
    assert fit_learning_curve({10: [0.5], 20: [0.4], 30: []}) == "three sizes or more are needed, there are 2"
    single = fit_learning_curve({10: [0.5, 0.6], 20: [0.4, 0.3], 40: [0.2]})
    assert isinstance(single, Fit)
    assert single.low is None
    assert "no band" in single.note
    steep = fit_learning_curve({10: [0.9, 0.8], 20: [0.1, 0.1], 40: [0.1, 0.1]})
    assert isinstance(steep, Fit)
    assert steep.at_edge
    assert "do not determine" in steep.note


def test_an_offset_at_its_bound_and_the_misfit_are_told() -> None:
    bound = fit_learning_curve({10: [0.5, 0.52], 100: [0.05, 0.06], 1000: [0.004, 0.005], 10000: [0.0005, 0.0004]})
    assert isinstance(bound, Fit)
    assert bound.alpha == 0
    assert "α ended at 0" in bound.note
    errors = {int(n): [e, e] for n, e in zip(IMAGES, (0.5, 0.3, 0.35, 0.2, 0.15), strict=True)}
    bent = fit_learning_curve(errors)
    assert isinstance(bent, Fit)
    left = [e[0] - bent.alpha - bent.eta * n**bent.gamma for n, e in errors.items()]
    assert bent.misfit == pytest.approx(float(np.sqrt(np.mean(np.square(left)))))
    assert bent.misfit > 0.02
