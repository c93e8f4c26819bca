"""What a study would cost: multiply-accumulates by counting, seconds by trying a few steps."""

from __future__ import annotations

import statistics
import time
from dataclasses import replace
from itertools import pairwise

from vision_attn.contrast.measures import evaluation_steps
from vision_attn.contrast.results import TRIAL_SEED, Cell
from vision_attn.contrast.runner import Plan
from vision_attn.contrast.subsets import subset_count
from vision_attn.contrast.training import Training, Trainings

_WARM_UP, _STEPS = 2, 5
_RATE = 1e-4  # any that does not diverge at once
_IMAGES = 500
_START = 5.0  # seconds until a job has imported torch and read the data


def images_seen(plan: Plan, cell: Cell) -> tuple[int, int]:
    """How many images a cell trains on, repetitions counted, and how many it evaluates."""
    config, data = plan.config, plan.data
    trained = cell.steps * min(config.batch_size, cell.images)
    each = min(config.eval_images, cell.images) + min(config.eval_images, len(data.val))
    last = cell.images + len(data.val) + (0 if cell.seed == TRIAL_SEED else 2 * len(data.test))
    return trained, each * len(evaluation_steps(cell.steps, config.evaluations)) + last


def cell_macs(plan: Plan, cell: Cell) -> float:
    """Multiply-accumulates of a cell; a training step costs three forward passes."""
    trained, evaluated = images_seen(plan, cell)
    return float((3 * trained + evaluated) * plan.models[cell.role].macs)


def measure_speed(plan: Plan) -> dict[tuple[str, str], tuple[float, float]]:
    """(model, arm) -> seconds of a training step, and seconds per evaluated image, by trying on this machine."""
    trainings = Trainings(plan.config, data=plan.data)
    found = {}
    for cell in plan.cells:
        if (cell.model, cell.arm) in found or cell.size != plan.config.sizes[-1]:
            continue
        steps = _WARM_UP + _STEPS
        training = Training(plan.config, plan.data, replace(cell, lr=_RATE, steps=steps), trainings.device)
        marks = [time.perf_counter() for _ in training.steps()]
        step = statistics.median(b - a for a, b in pairwise(marks[_WARM_UP - 1 :]))
        images = min(_IMAGES, len(plan.data.val))
        training.predict(plan.data.val, images)
        start = time.perf_counter()
        training.predict(plan.data.val, images)
        found[cell.model, cell.arm] = step, (time.perf_counter() - start) / images
    return found


def cell_seconds(plan: Plan, cell: Cell, speed: dict[tuple[str, str], tuple[float, float]]) -> float:
    """Estimated seconds of one cell."""
    trained, evaluated = images_seen(plan, cell)
    step, image = speed[cell.model, cell.arm]
    largest = subset_count(len(plan.data.train), plan.config.sizes[-1])  # there the speed was measured
    full = trained / cell.steps / min(plan.config.batch_size, largest)  # a smaller batch is cheaper
    return cell.steps * step * max(full, 0.2) + evaluated * image


def show_estimate(plan: Plan, jobs: int) -> None:
    """Print the grid and its cost."""
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False)
    console = console if console.is_terminal else Console(width=110, highlight=False)
    for model in plan.models:
        console.print(f"{model.model}: {model.name}, {model.params:,} parameters, {model.macs:,} MACs per image")
    speed = measure_speed(plan)
    table = Table(title="trainings", title_justify="left")
    for title in ("share", "images", "arm", "label noise", "steps", "trainings", "seconds"):
        table.add_column(title, justify="left" if title == "arm" else "right")
    groups: dict[tuple[float, str, float | None], list[Cell]] = {}
    for cell in plan.trials:
        groups.setdefault((cell.size, cell.arm, None), []).append(cell)
    for cell in plan.cells:
        groups.setdefault((cell.size, cell.arm, cell.noise), []).append(cell)
    total = 0.0
    for (size, arm, noise), cells in groups.items():
        seconds = sum(cell_seconds(plan, cell, speed) for cell in cells)
        total += seconds
        kind = "learning rates" if noise is None else f"{noise:g}"
        row = (f"{size:g}", str(cells[0].images), arm, kind, str(cells[0].steps), str(len(cells)), f"{seconds:.0f}")
        table.add_row(*row)
    console.print(table)
    wall = total / jobs + _START
    where = "one at a time" if jobs == 1 else f"{jobs} side by side"
    console.print(
        f"{len(plan.trials) + len(plan.cells)} trainings, {total / 60:.1f} minutes of computing; "
        f"about {wall / 60:.1f} minutes {where}, {plan.config.threads} thread(s) each. "
        f"Measured in {_STEPS} steps per model and arm."
    )
