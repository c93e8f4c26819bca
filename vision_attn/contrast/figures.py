"""The figures of a study's report. Each is drawn from named columns and seeds of ``runs.csv`` or ``curves.csv``."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from vision_attn.contrast.analysis import Analysis, Group, estimate
from vision_attn.contrast.drawing import (
    Panel,
    Sketch,
    depths,
    dodge,
    draw,
    look_of,
    percent_axis,
    percent_log_axis,
    seed_words,
    series,
)
from vision_attn.contrast.statistics import mean_interval
from vision_attn.contrast.verdict import Verdict

# -- against the number of training images ----------------------------------------------------------


def learning_curves(analysis: Analysis) -> list[Panel]:
    """Test error against training images, with the fitted curves, a panel per arm."""

    def paint(axis: Any, arm: str) -> None:
        _sizes(axis, analysis, arm, "test_acc", error=True)
        for curve in analysis.fits:
            if curve.arm == arm and (fit := curve.fit) is not None:
                color, _ = look_of(analysis.study.models.index(curve.model))
                axis.plot(fit.images, fit.error, color=color, lw=1.4)
                if fit.low is not None:
                    axis.fill_between(fit.images, fit.low, fit.high, color=color, alpha=0.12, lw=0)
        axis.set(ylabel="test error", yscale="log")
        percent_log_axis(axis)
        _image_axis(axis, analysis)

    return _per_arm(analysis, paint, "learning_curve", "Test error", "test_acc", "test error against training images")


def gaps(analysis: Analysis) -> list[Panel]:
    """Training and test accuracy apart, a panel per arm."""

    def paint(axis: Any, arm: str) -> None:
        _sizes(axis, analysis, arm, "gap_acc")
        axis.axhline(0, color="#9AA5B1", lw=0.8)
        axis.set(ylabel="training − test accuracy")
        percent_axis(axis)
        _image_axis(axis, analysis)

    return _per_arm(analysis, paint, "gap", "Plain gap", "train_acc, test_acc, gap_acc", "gap against training images")


def matched_gaps(analysis: Analysis) -> list[Panel]:
    """Gap in loss at the training loss that all seeds of both models reach, a panel per arm and pair of models."""
    pairs = list(dict.fromkeys((v.a, v.b) for v in analysis.verdicts))
    panels = []
    for a, b in pairs:
        sketches = []
        for arm in analysis.arms:
            verdicts = [v for v in analysis.verdicts if (v.a, v.b, v.arm) == (a, b, arm) and v.matched]
            if not verdicts:
                continue
            name = f"matched_gap-{arm}" + (f"-{a}-{b}" if len(pairs) > 1 else "")
            title = f"Gap at equal training loss, arm {arm}" + (f": {a}, {b}" if len(pairs) > 1 else "")
            seeds = seed_words({(model, v.images): list(v.seeds) for v in verdicts for model in (a, b)})
            source = f"curves.csv: train_loss, val_loss, where arm = {arm}, noise = 0; {seeds}"
            alt = f"Validation loss minus training loss where {a} and {b} have the same training loss, arm {arm}."
            sketches.append(Sketch(name, title, alt, source, partial(_matched, analysis=analysis, verdicts=verdicts)))
        panels += draw(sketches, analysis.study.stamp)
    return panels


def _matched(axis: Any, analysis: Analysis, verdicts: Sequence[Verdict]) -> None:
    for model in (verdicts[0].a, verdicts[0].b):
        role = analysis.study.models.index(model)
        found = [(v.images, [at["gap_loss"] for at in (v.matched or {})[model].values()]) for v in verdicts]
        many = len(analysis.study.models)
        series(axis, [(dodge(n, role, many), values, mean_interval(values)) for n, values in found], model, role)
    for verdict in verdicts:
        if verdict.decided:
            star = "★" if verdict.stands(analysis.rule.alpha) else "☆"
            at = {"xycoords": axis.get_xaxis_transform(), "ha": "center", "va": "bottom", "annotation_clip": False}
            axis.annotate(star, (verdict.images, 1.0), fontsize=9, color="#334155", **at)
    axis.set(ylabel="validation − training loss")
    _image_axis(axis, analysis)


def calibration(analysis: Analysis) -> list[Panel]:
    """Expected calibration error on the test set, a panel per arm."""

    def paint(axis: Any, arm: str) -> None:
        _sizes(axis, analysis, arm, "ece")
        axis.set(ylabel="calibration error", ylim=(0, None))
        percent_axis(axis)
        _image_axis(axis, analysis)

    return _per_arm(analysis, paint, "calibration", "Calibration", "ece", "expected calibration error on the test set")


# -- the other figures ------------------------------------------------------------------------------


def memorisation(analysis: Analysis) -> list[Panel]:
    """Wrong labels given back, and test accuracy, against the share of wrong labels: two panels per size and arm."""
    sketches: dict[str, list[Sketch]] = {"memorised": [], "test_acc": []}
    places = dict.fromkeys((g.size, g.images, g.arm) for g in analysis.groups if g.noise > 0 and g.runs)
    for size, images, arm in places:
        for measure, label, title in (
            ("memorised", "wrong labels given back", "Wrong labels memorised"),
            ("test_acc", "test accuracy", "Test accuracy beside wrong labels"),
        ):
            groups = [g for g in analysis.select(size=size, arm=arm) if g.values(measure)]

            def paint(axis: Any, groups: list[Group] = groups, measure: str = measure, label: str = label) -> None:
                for role, model in enumerate(analysis.study.models):
                    mine = sorted((g for g in groups if g.model == model), key=lambda g: g.noise)
                    series(axis, [(100 * g.noise, g.values(measure), g.estimates[measure]) for g in mine], model, role)
                if measure == "memorised":
                    chance = 1 / int(analysis.study.facts["data"]["classes"])
                    axis.axhline(chance, color="#64748B", lw=0.8, ls=":", label="guessing")
                axis.set(xlabel="training labels shuffled", ylabel=label)
                axis.xaxis.set_major_formatter("{x:.0f} %")
                axis.set_xticks(sorted({100 * g.noise for g in groups}))
                percent_axis(axis)
                axis.legend()

            name = f"noise_{measure}-{100 * size:g}pct-{arm}"
            seeds = seed_words({(g.model, f"{g.noise:.0%}"): g.seeds for g in groups})
            source = f"runs.csv: {measure}, noise, where images = {images}, arm = {arm}; {seeds}"
            alt = f"{title} against the share of shuffled labels, {images:,} images, arm {arm}."
            sketches[measure].append(Sketch(name, f"{title}, {images:,} images, arm {arm}", alt, source, paint))
    return [panel for group in sketches.values() for panel in draw(group, analysis.study.stamp)]


def trajectories(analysis: Analysis) -> list[Panel]:
    """Training and validation loss along training: smallest, middle and largest size of every arm."""
    sizes = analysis.sizes
    chosen = sorted({sizes[0], sizes[len(sizes) // 2], sizes[-1]})
    sketches = []
    for arm in analysis.arms:
        for size in chosen:
            groups = [g for g in analysis.select(size=size, arm=arm, noise=0) if g.runs]
            if not groups:
                continue
            images = groups[0].images
            seeds = seed_words({(g.model, ""): g.seeds for g in groups})
            source = f"curves.csv: step, train_loss, val_loss, where images = {images}, arm = {arm}, noise = 0; {seeds}"
            alt = f"Training and validation loss against the optimizer step, {images:,} images, arm {arm}."
            title = f"{images:,} images, arm {arm}"
            name = f"trajectory-{100 * size:g}pct-{arm}"
            sketches.append(Sketch(name, title, alt, source, partial(_trajectory, analysis=analysis, groups=groups)))
    return draw(sketches, analysis.study.stamp)


def _trajectory(axis: Any, analysis: Analysis, groups: Sequence[Group]) -> None:
    low = math.inf
    for group in groups:
        color, marker = look_of(analysis.study.models.index(group.model))
        for run in group.runs:
            steps = [row["step"] for row in run.curve]
            train, val = ([max(row[key], 1e-6) for row in run.curve] for key in ("train_loss", "val_loss"))
            low = min(low, *train, *val)
            axis.plot(steps, train, color=color, lw=0.9, ls=(0, (2, 1.5)), alpha=0.7)
            first = run is group.runs[0]
            axis.plot(steps, val, color=color, lw=1.3, alpha=0.85, label=group.model if first else None)
            at = int(np.argmin(val))
            if 0 < at < len(val) - 1:
                axis.plot(steps[at], val[at], marker, color=color, ms=4.5, mec="white", mew=0.7)
    place = (groups[0].size, groups[0].arm)
    for loss in {v.loss for v in analysis.verdicts if (v.size, v.arm) == place and v.loss}:
        axis.axhline(loss, color="#64748B", lw=0.8, ls=":")
    axis.plot([], [], color="#64748B", lw=1.3, label="validation")
    axis.plot([], [], color="#64748B", lw=0.9, ls=(0, (2, 1.5)), label="training")
    axis.set(xlabel="optimizer step", ylabel="cross-entropy, nats", yscale="log", ylim=(max(low / 1.5, 1e-4), None))
    axis.legend(ncols=4, columnspacing=1.0, handlelength=1.4, loc="lower center", bbox_to_anchor=(0.5, 1.0))


def reach(analysis: Analysis) -> list[Panel]:
    """Mean attention distance of every head beside the effective receptive field of the CNN's blocks."""
    looks = analysis.study.looks
    if not looks:
        return []

    def paint(axis: Any) -> None:
        for role, model in enumerate(analysis.study.models):
            look, (color, marker) = looks.get(model), look_of(role)
            if look and look.get("attention_distance"):
                layers = list(look["attention_distance"].values())
                depth = depths(len(layers))
                for x, heads in zip(depth, layers, strict=True):
                    axis.plot([x] * len(heads), heads, marker, color=color, ms=5, alpha=0.55, mew=0)
                axis.plot(
                    depth,
                    [np.mean(h) for h in layers],
                    color=color,
                    lw=1.4,
                    label=f"{model}: attention, each head",
                )
            if look and look.get("receptive_field"):
                blocks = [row["distance"] for row in look["receptive_field"]]
                style = "-" if look.get("kind") == "cnn" else (0, (2, 1.5))
                axis.plot(
                    depths(len(blocks)),
                    blocks,
                    ls=style,
                    color=color,
                    lw=1.4,
                    marker=marker,
                    ms=3.5,
                    label=f"{model}: receptive field",
                )
        axis.set(xlabel="depth, first to last layer", ylabel="mean distance, pixels", xlim=(-0.05, 1.05))
        axis.set_ylim(0, 1.4 * axis.get_ylim()[1])  # room for the legend
        axis.set_xticks([0, 0.5, 1], ["first", "middle", "last"])
        if axis.get_legend_handles_labels()[0]:
            axis.legend(loc="upper left", fontsize=7.5)

    lacking = "".join(f"; not shown: {words}" for words in not_looked_at(analysis))
    source = f"looks.json: attention_distance, receptive_field.distance; {_looked_at(analysis)}{lacking}"
    alt = "Mean attention distance per head and layer beside the effective receptive field of each block, in pixels."
    return draw([Sketch("reach", "Mean distance, layer by layer", alt, source, paint)], analysis.study.stamp)


def not_looked_at(analysis: Analysis) -> list[str]:
    """The models that are not shown because the only training of theirs that would have been looked at failed."""
    place = (0, analysis.sizes[-1], analysis.arms[0], 0)  # see cells.shows_looks
    return [
        f"{cell.model}, whose training {cell.id} failed"
        for cell in (result.cell for result in analysis.failed)
        if (cell.seed, cell.size, cell.arm, cell.noise) == place and cell.model not in analysis.study.looks
    ]


def _looked_at(analysis: Analysis) -> str:
    """Which trainings the figure shows; studies of an earlier version cannot say."""
    looks = analysis.study.looks
    found = [f"{looks[m]['cell']}, seed {looks[m]['seed']}" for m in looks if "cell" in looks[m] and "seed" in looks[m]]
    return "trainings " + "; ".join(found) if found else "one training of each model"


# -- parts ------------------------------------------------------------------------------------------


def _per_arm(
    analysis: Analysis, paint: Callable[..., None], name: str, title: str, columns: str, alt: str
) -> list[Panel]:
    sketches = []
    for arm in analysis.arms:
        groups = analysis.select(arm=arm, noise=0)
        if any(group.runs for group in groups):
            seeds = seed_words({(group.model, group.images): group.seeds for group in groups})
            source = f"runs.csv: {columns}, images, where arm = {arm}, noise = 0; {seeds}"
            shown = f"{alt[0].upper()}{alt[1:]}, arm {arm}."
            sketches.append(Sketch(f"{name}-{arm}", f"{title}, arm {arm}", shown, source, partial(paint, arm=arm)))
    return draw(sketches, analysis.study.stamp)


def _sizes(axis: Any, analysis: Analysis, arm: str, measure: str, *, error: bool = False) -> None:
    """One measure, or 1 minus it, against the number of training images, for all models."""
    models = analysis.study.models
    for role, model in enumerate(models):
        points = []
        for group in sorted(analysis.select(model=model, arm=arm, noise=0), key=lambda g: g.size):
            values = [1 - value for value in group.values(measure)] if error else group.values(measure)
            if values:
                points.append((dodge(group.images, role, len(models)), values, estimate(measure, values)))
        series(axis, points, model, role, line=not error)


def _image_axis(axis: Any, analysis: Analysis) -> None:
    images = sorted({cell.images for cell in analysis.study.cells})
    axis.set(xscale="log", xlabel="training images")
    axis.set_xticks(images, [f"{n:,}" for n in images], rotation=30 if len(images) > 4 else 0)
    axis.minorticks_off()
    axis.legend()
