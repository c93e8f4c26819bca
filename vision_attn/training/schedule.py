"""Learning-rate schedules as pure functions of how far the run has come.

Nothing is counted up and nothing is stored: the rate of step ``n`` follows from ``n`` alone, so a resumed run
cannot be one step off.
"""

from __future__ import annotations

import math
from collections.abc import Sequence


def warmup_factor(step: int, warmup_steps: float) -> float:
    """Linear rise over the first ``warmup_steps`` optimizer steps: 1/w, 2/w, ..., 1."""
    return min(1.0, (step + 1) / warmup_steps) if warmup_steps >= 1 else 1.0


def anneal(
    progress: float, schedule: str, floor: float = 0.0, drop_at: Sequence[float] = (), drop_factor: float = 0.1
) -> float:
    """The factor on the peak rate after ``progress`` (0 ... 1) of the annealing phase.

    Args:
        progress: 0 at the end of the warm-up, 1 at the end of the run; clipped.
        schedule: ``cosine`` (Loshchilov & Hutter 2017), ``linear``, ``constant`` or ``step``.
        floor: the factor at the end; of ``step``, the lowest.
        drop_at: where ``step`` drops, as progress.
        drop_factor: what each drop multiplies by.

    Returns:
        A factor in ``floor`` ... 1.
    """
    progress = min(1.0, max(0.0, progress))
    if schedule == "constant":
        return 1.0
    if schedule == "step":
        return max(floor, drop_factor ** sum(progress >= place for place in drop_at))
    left = 1.0 - progress if schedule == "linear" else 0.5 * (1.0 + math.cos(math.pi * progress))
    return floor + (1.0 - floor) * left


def lr_factor_by_step(
    step: int,
    total_steps: float,
    warmup: float,
    schedule: str,
    floor: float = 0.0,
    drop_at: Sequence[float] = (),
    drop_factor: float = 0.1,
) -> float:
    """The factor on the peak rate at optimizer step ``step`` (from 0) of ``total_steps``.

    Args:
        step: optimizer steps taken so far.
        total_steps: length of the run; infinity keeps the peak rate after the warm-up.
        warmup: below 1 a fraction of the run, otherwise optimizer steps.
        schedule: see :func:`anneal`.
        floor, drop_at, drop_factor: see :func:`anneal`.
    """
    warmup_steps = warmup if warmup >= 1 else (0.0 if math.isinf(total_steps) else round(warmup * total_steps))
    if step < warmup_steps:
        return warmup_factor(step, warmup_steps)
    if math.isinf(total_steps):
        return 1.0
    return anneal((step - warmup_steps) / max(1.0, total_steps - warmup_steps), schedule, floor, drop_at, drop_factor)


def lr_factor_by_budget(
    used: float,
    step: int,
    warmup: float,
    schedule: str,
    floor: float = 0.0,
    drop_at: Sequence[float] = (),
    drop_factor: float = 0.1,
) -> float:
    """The factor on the peak rate when the fraction ``used`` of the time budget is gone.

    Args:
        used: 0 ... 1.
        step: optimizer steps taken so far (only for a ``warmup`` given in steps).
        warmup: below 1 a fraction of the budget, otherwise optimizer steps.
        schedule: see :func:`anneal`.
        floor, drop_at, drop_factor: see :func:`anneal`.
    """
    if warmup >= 1:
        return min(warmup_factor(step, warmup), anneal(used, schedule, floor, drop_at, drop_factor))
    if used < warmup:  # the very first step has used nothing and shall move all the same
        return max(used / warmup, 1e-3)
    return anneal((used - warmup) / (1.0 - warmup), schedule, floor, drop_at, drop_factor)
