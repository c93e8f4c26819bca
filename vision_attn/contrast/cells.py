"""The grid of a study as a list of cells."""

from __future__ import annotations

import dataclasses
import re

from vision_attn.contrast.config import ContrastConfig
from vision_attn.contrast.results import TRIAL_SEED, Cell
from vision_attn.contrast.subsets import subset_count
from vision_attn.errors import UserError

_OPTIONS = {"model": "models", "size": "sizes", "arm": "arms", "noise": "noise.levels", "lr": "learning_rates"}


def plan_trials(config: ContrastConfig, total: int) -> list[Cell]:
    """The trainings that choose learning rates: every model, size and rate once, under the first arm.

    Args:
        config: of the study.
        total: training images.

    Raises:
        UserError: two of them would be kept in one folder.
    """
    trials = []
    for size in config.sizes:
        for role, model in enumerate(config.models):
            for lr in config.rates_of(model):
                cell = _cell(config, total, role, size, config.arms[0], 0.0, TRIAL_SEED, lr)
                trials.append(dataclasses.replace(cell, id=f"{cell.id}-lr{lr:g}"))
    return _apart(trials)


def plan_cells(config: ContrastConfig, total: int, rates: dict[tuple[str, float], float]) -> list[Cell]:
    """Every training that is measured, small subsets first, the models of a pair next to each other.

    Args:
        config: of the study.
        total: training images.
        rates: (model, size) -> learning rate; an empty dictionary while none is chosen.

    Raises:
        UserError: two of them would be kept in one folder.
    """
    kinds = [
        (size, arm, 0.0, seed) for size in config.sizes for arm in config.arms for seed in range(config.seeds_at(size))
    ]
    kinds += [
        (size, arm, noise, seed)
        for size in config.noise_sizes
        for arm in config.noise.arms
        for noise in config.noise.levels
        if noise > 0
        for seed in range(config.noise.seeds)
    ]
    return _apart(
        [
            _cell(config, total, role, size, arm, noise, seed, rates.get((model, size), 0.0))
            for size, arm, noise, seed in kinds
            for role, model in enumerate(config.models)
        ]
    )


def shows_looks(config: ContrastConfig, cell: Cell) -> bool:
    """Whether a cell's attention or receptive field is looked at: seed 0, largest size, first arm, no label noise."""
    return (cell.seed, cell.size, cell.arm, cell.noise) == (0, config.sizes[-1], config.arms[0], 0.0)


def _cell(
    config: ContrastConfig, total: int, role: int, size: float, arm: str, noise: float, seed: int, lr: float
) -> Cell:
    model = list(config.models)[role]
    percent = f"{100 * size:.6g}"
    share = percent.zfill(2) if percent.isdecimal() else percent
    return Cell(
        id=f"{_slug(model)}-{share}pct-{_slug(arm)}-n{100 * noise:.6g}-s{seed}",
        model=model,
        role=role,
        size=size,
        images=subset_count(total, size),
        arm=arm,
        noise=noise,
        seed=seed,
        lr=lr,
        steps=config.steps_at(size),
    )


def _apart(cells: list[Cell]) -> list[Cell]:
    """Refuse cells of one id: names and numbers are shortened in it, so different ones may look the same."""
    first: dict[str, Cell] = {}
    for cell in cells:
        other = first.setdefault(cell.id, cell)
        if other is not cell:
            pairs = {option: (getattr(other, key), getattr(cell, key)) for key, option in _OPTIONS.items()}
            words = [f"{option}: {a!r} and {b!r}" for option, (a, b) in pairs.items() if a != b]
            raise UserError(f"{'; '.join(words)} would share the folder {cell.id}: change or leave out one of them.")
    return cells


def _slug(name: str) -> str:
    """A name as part of a file name."""
    return re.sub(r"[^\w.+]+", "_", name)
