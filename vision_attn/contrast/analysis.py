"""All that a study says, as one tree of plain types: the content of ``contrast.json``, and what the report shows."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from itertools import combinations
from typing import Any

from vision_attn.contrast.config import describe_arms
from vision_attn.contrast.learning_curve import Fit, fit_learning_curve
from vision_attn.contrast.results import Cell, Result, Study
from vision_attn.contrast.statistics import Comparison, Estimate, compare, mean_interval
from vision_attn.contrast.verdict import INCONCLUSIVE, Rule, Verdict, judge_all, relative_rise

MEASURES = (
    "train_acc",
    "train_loss",
    "train_clean_acc",
    "train_clean_loss",
    "val_acc",
    "val_loss",
    "test_acc",
    "test_loss",
    "gap_acc",
    "gap_loss",
    "turn_step",
    "turn_rise",
    "ece",
    "memorised",
    "best_test_acc",
)
SHARES = {"train_acc", "train_clean_acc", "val_acc", "test_acc", "best_test_acc", "ece", "memorised"}
POSITIVE = {"train_loss", "train_clean_loss", "val_loss", "test_loss", "turn_rise"}
_GAPS = {"gap_acc", "gap_loss"}
"""Not measured where labels are wrong: given labels of the training images would be held against true ones."""


@dataclass(frozen=True)
class Group:
    """The seeds of one model at one size under one arm with one share of wrong labels.

    Attributes:
        model: display name.
        size: share of the training images.
        images: how many these are.
        arm: regularisation.
        noise: share of wrong labels.
        runs: finished trainings, by seed.
        planned: how many there should be.
        estimates: measure -> mean and interval, of :data:`MEASURES` that the runs have; ``turn_step`` over those runs
            whose validation loss turned.
        turned: of how many runs the validation loss ended more than ``Rule.turned`` above its lowest value.
    """

    model: str
    size: float
    images: int
    arm: str
    noise: float
    runs: tuple[Result, ...]
    planned: int
    estimates: dict[str, Estimate]
    turned: int

    @property
    def seeds(self) -> list[int]:
        """Of the finished trainings."""
        return [run.cell.seed for run in self.runs]

    def values(self, measure: str) -> list[float]:
        """By seed."""
        return [run.values[measure] for run in self.runs if measure in run.values]


@dataclass(frozen=True)
class Difference:
    """Two models compared in one measure, over the seeds that both ended."""

    a: str
    b: str
    size: float
    images: int
    arm: str
    noise: float
    measure: str
    seeds: tuple[int, ...]
    comparison: Comparison


@dataclass(frozen=True)
class CurveFit:
    """The learning curve of one model under one arm; ``reason`` says why ``fit`` is None."""

    model: str
    arm: str
    seeds: tuple[int, ...]
    fit: Fit | None
    reason: str


@dataclass(frozen=True)
class Analysis:
    """The study, and everything that follows from its numbers.

    Attributes:
        study: as read.
        rule: of the verdicts.
        groups: in the order of the grid.
        differences: of all measures, models in the order of the configuration, a − b.
        verdicts: one per pair of models, size and arm.
        fits: learning curves of the test error, without label noise.
    """

    study: Study
    rule: Rule
    groups: list[Group]
    differences: list[Difference]
    verdicts: list[Verdict]
    fits: list[CurveFit]

    def select(self, **wanted: Any) -> list[Group]:
        """Groups with these values, e.g. ``select(arm="none", noise=0)``."""
        return [group for group in self.groups if all(getattr(group, k) == v for k, v in wanted.items())]

    @property
    def arms(self) -> list[str]:
        """In the order of the grid."""
        return list(dict.fromkeys(cell.arm for cell in self.study.cells))

    @property
    def sizes(self) -> list[float]:
        """Ascending."""
        return sorted({cell.size for cell in self.study.cells})

    @property
    def failed(self) -> list[Result]:
        """Trainings that have no numbers."""
        return [result for result in self.study.results if not result.done]


def analyse(study: Study, rule: Rule | None = None) -> Analysis:
    """Estimates, comparisons, verdicts and fits of a study, finished or not.

    Args:
        study: as :func:`~vision_attn.contrast.results.load_study` reads it.
        rule: of the verdicts.
    """
    rule = rule or Rule()
    groups = _groups(study, rule)
    clean = [group for group in groups if group.noise == 0]
    pairs = list(_pairs(clean, study.models))
    full = [(a, b) for a, b in pairs if a.runs and b.runs]
    judged = iter(judge_all([(a.runs, b.runs) for a, b in full], int(study.facts["data"]["classes"]), rule))
    verdicts = [next(judged) if a.runs and b.runs else _nothing(a, b) for a, b in pairs]
    differences = [d for a, b in _pairs(groups, study.models) for d in _differences(a, b, rule)]
    return Analysis(study, rule, groups, differences, verdicts, _fits(clean))


def estimate(measure: str, values: list[float], steps: float = math.inf) -> Estimate:
    """Mean and interval of a measure; no interval leaves what is possible.

    Args:
        measure: of :data:`MEASURES`.
        values: by seed.
        steps: of the trainings.
    """
    return mean_interval(values, *_limits(measure, steps))


def _limits(measure: str, steps: float) -> tuple[float, float]:
    if measure in SHARES:
        return 0.0, 1.0
    if measure == "gap_acc":
        return -1.0, 1.0
    if measure == "turn_step":
        return 0.0, steps
    return (0.0 if measure in POSITIVE else -math.inf), math.inf


def _measured(measure: str, run: Result, rule: Rule) -> bool:
    """Whether a run says something about a measure."""
    if measure not in run.values or (run.cell.noise > 0 and measure in _GAPS):
        return False
    return measure != "turn_step" or relative_rise(run) > rule.turned


def _groups(study: Study, rule: Rule) -> list[Group]:
    ended = {result.cell.id: result for result in study.results}
    planned: dict[tuple[str, float, str, float], list[Cell]] = {}
    for cell in study.cells:
        planned.setdefault((cell.model, cell.size, cell.arm, cell.noise), []).append(cell)
    groups = []
    for (model, size, arm, noise), cells in planned.items():
        found = [ended[cell.id] for cell in sorted(cells, key=lambda c: c.seed) if cell.id in ended]
        runs = tuple(result for result in found if result.done)
        values = {key: [run.values[key] for run in runs if _measured(key, run, rule)] for key in MEASURES}
        estimates = {key: estimate(key, numbers, cells[0].steps) for key, numbers in values.items() if numbers}
        turned = sum(relative_rise(run) > rule.turned for run in runs)
        groups.append(Group(model, size, cells[0].images, arm, noise, runs, len(cells), estimates, turned))
    return groups


def _pairs(groups: Iterable[Group], models: list[str]) -> Iterator[tuple[Group, Group]]:
    places: dict[tuple[float, str, float], dict[str, Group]] = {}
    for group in groups:
        places.setdefault((group.size, group.arm, group.noise), {})[group.model] = group
    for first, second in combinations(models, 2):
        for found in places.values():
            if first in found and second in found:
                yield found[first], found[second]


def _nothing(a: Group, b: Group) -> Verdict:
    lacking = " and ".join(group.model for group in (a, b) if not group.runs)
    return Verdict(a.model, b.model, a.size, a.images, a.arm, (), INCONCLUSIVE, f"no training of {lacking} ended")


def _differences(a: Group, b: Group, rule: Rule) -> Iterator[Difference]:
    sides = [{run.cell.seed: run for run in group.runs} for group in (a, b)]
    both = sorted(set(sides[0]) & set(sides[1]))
    for measure in MEASURES:
        seeds = tuple(s for s in both if all(_measured(measure, side[s], rule) for side in sides))
        if seeds:
            low, high = _limits(measure, sides[0][seeds[0]].cell.steps)
            comparison = compare(*([side[seed].values[measure] for seed in seeds] for side in sides)).within(high - low)
            yield Difference(a.model, b.model, a.size, a.images, a.arm, a.noise, measure, seeds, comparison)


def _fits(clean: list[Group]) -> list[CurveFit]:
    lines: dict[tuple[str, str], list[Group]] = {}
    for group in clean:
        lines.setdefault((group.model, group.arm), []).append(group)
    fits = []
    for (model, arm), line in lines.items():
        found = fit_learning_curve({group.images: [1 - acc for acc in group.values("test_acc")] for group in line})
        seeds = tuple(sorted({seed for group in line for seed in group.seeds}))
        fit, reason = (None, found) if isinstance(found, str) else (found, "")
        fits.append(CurveFit(model, arm, seeds, fit, reason))
    return fits


# -- as a tree --------------------------------------------------------------------------------------


def as_tree(analysis: Analysis, summary: list[str]) -> dict[str, Any]:
    """The content of ``contrast.json``: plain types, no NaN.

    Args:
        analysis: what the study says.
        summary: its paragraphs.
    """
    study = analysis.study
    return {
        **study.stamp,
        **{key: study.facts[key] for key in ("command", "started", "machine", "data", "models", "match")},
        "config": study.config,
        "arms": describe_arms(study.config, study.facts["data"]["img_size"]),
        "code_of_trainings": study.codes,
        "summary": summary,
        "rule": asdict(analysis.rule),
        "cells": {
            "planned": len(study.cells),
            "done": len(study.results) - len(analysis.failed),
            "failed": [{"id": result.cell.id, "reason": result.reason} for result in analysis.failed],
            "missing": [cell.id for cell in study.missing],
        },
        "verdicts": [_plain_verdict(verdict) for verdict in analysis.verdicts],
        "estimates": [
            {**_place(group), "seeds": group.seeds, "turned": group.turned}
            | {key: asdict(e) for key, e in group.estimates.items()}
            for group in analysis.groups
        ],
        "differences": [
            {**_place(d), "a": d.a, "b": d.b, "measure": d.measure, "seeds": list(d.seeds), **asdict(d.comparison)}
            for d in analysis.differences
        ],
        "learning_curves": [
            {
                "model": c.model,
                "arm": c.arm,
                "seeds": list(c.seeds),
                "reason": c.reason,
                **(asdict(c.fit) if c.fit else {}),
            }
            for c in analysis.fits
        ],
        "looks": study.looks,
        "learning_rates": study.learning_rates,
    }


def _place(item: Group | Difference) -> dict[str, Any]:
    keys = ("model", "size", "images", "arm", "noise")
    return {key: getattr(item, key) for key in keys if hasattr(item, key)}


def _plain_verdict(verdict: Verdict) -> dict[str, Any]:
    tree = asdict(verdict)
    matched: Mapping[str, Mapping[int, dict[str, float]]] | None = verdict.matched
    tree["seeds"] = list(verdict.seeds)
    tree["underfits"] = list(verdict.underfits)
    tree["matched"] = matched and {m: {str(seed): at for seed, at in seeds.items()} for m, seeds in matched.items()}
    return tree
