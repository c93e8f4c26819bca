"""How the error falls with the number of training images: e(n) = α + η·n^γ (Hoiem et al. 2021, arXiv 2010.11029)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from vision_attn.contrast.statistics import LEVEL, stretch

DRAWS = 500
GAMMAS = np.linspace(-2.0, -0.02, 397)
"""Exponents that are tried; for each of them α and η follow from linear least squares."""


@dataclass(frozen=True)
class Fit:
    """A learning curve through the mean errors of the sizes.

    Attributes:
        alpha: error that no number of images removes, 0 ... 1.
        eta: at least 0.
        gamma: exponent, −2 ... −0.02.
        alpha_range: 95 % range over the resampled seeds, as for the others.
        eta_range: of ``eta``.
        gamma_range: of ``gamma``.
        images: (m,) where the curve and its band are given, evenly spaced on a logarithmic axis.
        error: (m,) the curve.
        low: (m,) lower end of its 95 % band, or None.
        high: (m,) upper end, or None.
        at_edge: whether γ ended at the end of its range: the sizes do not determine it.
        misfit: root mean square of the mean errors minus the curve, weighted as the fit is, 0 ... 1.
        note: limits, in words; empty when there is nothing to say.
    """

    alpha: float
    eta: float
    gamma: float
    alpha_range: tuple[float, float] | None
    eta_range: tuple[float, float] | None
    gamma_range: tuple[float, float] | None
    images: list[float]
    error: list[float]
    low: list[float] | None
    high: list[float] | None
    at_edge: bool
    misfit: float
    note: str


def fit_learning_curve(errors: Mapping[int, Sequence[float]], points: int = 60) -> Fit | str:
    """Fit the curve to mean errors, weighted by nothing but the number of seeds, and resample the seeds for its band.

    The seeds of every size are drawn again independently; a drawn mean is moved away from the size's own by the same
    factor as in :func:`~vision_attn.contrast.statistics.mean_interval`, so that the band is as wide as such
    few seeds demand. The band is about the seeds; whether a power law is the right curve is another question.

    Args:
        errors: images -> errors (1 − accuracy) of its seeds.
        points: of the curve.

    Returns:
        The fit, or why there is none.
    """
    sizes = {n: np.asarray(e, dtype=float) for n, e in sorted(errors.items()) if len(e)}
    if len(sizes) < 3:
        return f"three sizes or more are needed, there are {len(sizes)}"
    images = np.array(list(sizes), dtype=float)
    weights = np.array([len(e) for e in sizes.values()], dtype=float)
    means = np.array([e.mean() for e in sizes.values()])
    alpha, eta, gamma = (float(values[0]) for values in solve(images, means[None], weights))
    grid = np.geomspace(images[0], images[-1], points)
    error = alpha + eta * grid**gamma
    notes = ["three sizes for three numbers: the misfit is no test of the form"] if len(sizes) == 3 else []
    at_edge = bool(gamma in (GAMMAS[0], GAMMAS[-1]))
    if at_edge:
        notes.append("the sizes do not determine γ: it ended at the end of its range")
    if alpha <= 0.0:
        notes.append("α ended at 0, the end of its range: what no number of images removes is not determined")
    misfit = float(np.sqrt(np.average((means - alpha - eta * images**gamma) ** 2, weights=weights)))
    if min(len(e) for e in sizes.values()) < 2:
        notes.append("a size has one seed: no band can be given")
        note = "; ".join(notes)
        return Fit(
            alpha, eta, gamma, None, None, None, grid.tolist(), error.tolist(), None, None, at_edge, misfit, note
        )
    drawn = solve(images, _resampled_means(sizes), weights)
    curves = drawn[0][:, None] + drawn[1][:, None] * grid ** drawn[2][:, None]
    ends = ((1 - LEVEL) / 2, (1 + LEVEL) / 2)
    low, high = np.quantile(curves, ends, axis=0)
    ranges = [(float(values[0]), float(values[1])) for values in np.quantile(np.stack(drawn), ends, axis=1).T]
    return Fit(
        alpha=alpha,
        eta=eta,
        gamma=gamma,
        alpha_range=ranges[0],
        eta_range=ranges[1],
        gamma_range=ranges[2],
        images=grid.tolist(),
        error=error.tolist(),
        low=np.minimum(low, error).tolist(),
        high=np.maximum(high, error).tolist(),
        at_edge=at_edge,
        misfit=misfit,
        note="; ".join(notes),
    )


def solve(
    images: NDArray[np.float64], errors: NDArray[np.float64], weights: NDArray[np.float64]
) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.float64]]:
    """Least squares for many curves at once, within the bounds 0 ≤ α ≤ 1, η ≥ 0.

    For a given γ the curve is linear in α and η, so only γ has to be searched for, and no start can be a bad one.

    Args:
        images: (s,).
        errors: (curves, s).
        weights: (s,).

    Returns:
        α, η and γ, each (curves,).
    """
    w = weights / weights.sum()
    # n^γ relative to the smallest size, so that numbers stay near 1
    x = (images / images[0]) ** GAMMAS[:, None]  # (g, s)
    x_mean, e_mean = x @ w, errors @ w
    covariance = (errors * w) @ x.T - e_mean[:, None] * x_mean  # (curves, g)
    slope = np.maximum(0.0, covariance / np.maximum((x * x) @ w - x_mean**2, 1e-12))
    offset = e_mean[:, None] - slope * x_mean
    bound = np.clip(offset, 0.0, 1.0)
    refit = np.maximum(0.0, ((errors * w) @ x.T - bound * x_mean) / ((x * x) @ w))
    slope = np.where(offset == bound, slope, refit)
    residual = errors[:, None] - bound[..., None] - slope[..., None] * x  # (curves, g, s)
    best = ((residual**2) @ w).argmin(1)
    rows = np.arange(len(errors))
    gamma = GAMMAS[best]
    return bound[rows, best], slope[rows, best] * images[0] ** -gamma, gamma


def _resampled_means(sizes: Mapping[int, NDArray[np.float64]]) -> NDArray[np.float64]:
    """(DRAWS, s): mean errors of seeds drawn again, stretched about the mean, within 0 ... 1."""
    generator = np.random.default_rng(0)
    columns = []
    for values in sizes.values():
        drawn = values[generator.integers(0, len(values), (DRAWS, len(values)))].mean(1)
        columns.append(values.mean() + stretch(len(values)) * (drawn - values.mean()))
    return np.clip(np.stack(columns, 1), 0.0, 1.0)
