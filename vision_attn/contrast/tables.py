"""The tables of a report: columns, and cells with the number they are sorted by."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from vision_attn.contrast.analysis import Analysis, Group
from vision_attn.contrast.statistics import Comparison, Estimate
from vision_attn.contrast.verdict import INCONCLUSIVE, Verdict


@dataclass(frozen=True)
class Column:
    """The title of a column, and whether it holds numbers."""

    name: str
    number: bool = True


@dataclass(frozen=True)
class Entry:
    """A cell: its text, the interval after it, what it is sorted by (its text by default), and a line below."""

    text: str
    range: str = ""
    sort: float | None = None
    below: str = ""


@dataclass(frozen=True)
class Table:
    """A table of a report."""

    columns: list[Column]
    rows: list[list[Entry]] = field(default_factory=list)
    caption: str = ""


def verdicts(analysis: Analysis) -> Table:
    """Every verdict with the numbers it rests on."""
    pairs = list(dict.fromkeys((v.a, v.b) for v in analysis.verdicts))
    several = len(pairs) > 1
    columns = [
        *(_columns("models", number=False) if several else []),
        *_columns("verdict", "arm", number=False),
        *_columns("images", "at loss"),
        *_columns("at steps", number=False),
        *_columns("Δ gap, loss", "Δ gap, accuracy", "Δ rise", "Δ plain gap", "p", "p, all", "pairs"),
        *_columns("remark", number=False),
    ]
    rows = [
        [
            *([Entry(f"{v.a}, {v.b}")] if several else []),
            Entry(verdict_words(v)),
            Entry(v.arm),
            _count(v.images),
            _number(v.loss, ".3g"),
            Entry(_steps(v)),
            _difference(v.gap_loss, "+.3f"),
            _difference(v.gap_acc, "+points"),
            _difference(v.rise, "+.3f"),
            _difference(v.naive, "+points"),
            _p(v.p),
            _p(v.p_study),
            _count(len(v.seeds)),
            Entry(_remark(v)),
        ]
        for v in sorted(analysis.verdicts, key=lambda v: (v.a, v.b, analysis.arms.index(v.arm), v.size))
    ]
    which = "first minus second model" if several or not pairs else f"{pairs[0][0]} minus {pairs[0][1]}"
    return Table(
        columns,
        rows,
        f"Differences, {which}, with 95 % intervals over seeds: that of the t tests, on which the verdicts rest, and "
        "below it the bootstrap of the paired seeds; losses in nats, accuracies in points. At steps: where the first "
        "and the second model reach that loss, mean over seeds",
    )


def _steps(verdict: Verdict) -> str:
    """Mean steps at which the two models reach the loss where they are compared, ``310, 95``."""
    if not verdict.matched:
        return "–"
    steps = [[at["step"] for at in verdict.matched[model].values()] for model in (verdict.a, verdict.b)]
    return " / ".join(f"{sum(side) / len(side):,.0f}" for side in steps)


def verdict_words(verdict: Verdict) -> str:
    """``vit overfits more`` and the like."""
    return f"{verdict.a} overfits {verdict.outcome}" if verdict.decided else verdict.outcome


def _remark(verdict: Verdict) -> str:
    """What the other columns do not say."""
    if not verdict.decided:
        return (
            ""
            if verdict.p is not None and verdict.outcome == INCONCLUSIVE and not verdict.contradicts
            else verdict.reason
        )
    words = [f"{model} underfits" for model in verdict.underfits]
    return "; ".join([*words, *(["the plain gap says the opposite"] if verdict.misleading else [])])


def results(analysis: Analysis) -> Table:
    """Means and intervals of every measure."""
    columns = [
        *_columns("model", "arm", number=False),
        *_columns("images", "wrong labels", "training", "training, true labels", "validation", "test", "gap"),
        *_columns("training loss", "test loss", "turned", "turn at step", "rise", "calibration", "memorised", "seeds"),
    ]
    before = {
        "train_acc": "percent",
        "train_clean_acc": "percent",
        "val_acc": "percent",
        "test_acc": "percent",
        "gap_acc": "points",
        "train_loss": ".3g",
        "test_loss": ".3g",
    }
    after = {
        "turn_step": ".0f",
        "turn_rise": ".3g",
        "ece": "percent",
        "memorised": "percent",
    }
    rows = [
        [
            Entry(g.model),
            Entry(g.arm),
            _count(g.images),
            _number(g.noise, "share"),
            *(_estimate(_shown(g, key), style) for key, style in before.items()),
            Entry(f"{g.turned} of {len(g.runs)}", sort=g.turned / len(g.runs)) if g.runs else Entry("–"),
            *(_estimate(_shown(g, key), style) for key, style in after.items()),
            Entry(f"{len(g.runs)} of {g.planned}" if len(g.runs) < g.planned else str(g.planned), sort=len(g.runs)),
        ]
        for g in sorted(analysis.groups, key=lambda g: (g.noise > 0, analysis.arms.index(g.arm), g.size, g.noise))
    ]
    return Table(columns, rows)


def _shown(group: Group, key: str) -> Estimate | None:
    """An estimate, where it says something of its own."""
    return None if key == "train_clean_acc" and group.noise == 0 else group.estimates.get(key)


def runs(analysis: Analysis) -> Table:
    """Every training, a row each."""
    columns = [
        *_columns("training", "status", number=False),
        *_columns("images", "wrong labels", "seed", "lr", "steps", "training", "validation", "test", "test loss", "s"),
    ]
    rows = []
    for result in analysis.study.results:
        cell, values = result.cell, result.values
        rows.append(
            [
                Entry(cell.id),
                Entry(result.status),
                _count(cell.images),
                _number(cell.noise, "share"),
                _count(cell.seed),
                _number(cell.lr, ".3g"),
                _count(cell.steps),
                *(_number(values.get(key), "percent") for key in ("train_acc", "val_acc", "test_acc")),
                _number(values.get("test_loss"), ".3g"),
                _number(values.get("seconds"), ".1f"),
            ]
        )
    return Table(columns, rows)


def rates(analysis: Analysis) -> Table:
    """The trials that chose the learning rates."""
    columns = [
        *_columns("model", "arm", number=False),
        *_columns("images", "lr", "validation", "validation loss"),
        *_columns("chosen", "status", number=False),
    ]
    rows = []
    for row in analysis.study.learning_rates:
        chosen = ("at the edge of those tried" if row.get("at_edge") else "yes") if row.get("chosen") else ""
        accuracy, loss = (row.get(key) if row.get(key) != "" else None for key in ("val_acc", "val_loss"))
        rows.append(
            [
                Entry(str(row["model"])),
                Entry(str(row.get("arm", "–"))),
                _count(int(row["images"])),
                _number(row["lr"], ".3g"),
                _number(accuracy, "percent"),
                _number(loss, ".3g"),
                Entry(chosen),
                Entry(f"{row.get('status', '')} {row.get('reason', '')}".strip()),
            ]
        )
    return Table(columns, rows)


def fits(analysis: Analysis) -> Table:
    """Parameters of the learning curves."""
    columns = [*_columns("model", "arm", number=False), *_columns("α", "η", "γ", "misfit")]
    columns += _columns("limits", number=False)
    rows = []
    for curve in analysis.fits:
        if (fit := curve.fit) is None:
            rows.append(
                [Entry(curve.model), Entry(curve.arm), *[_number(None, "")] * 4, Entry(f"no fit: {curve.reason}")]
            )
            continue
        found = ((fit.alpha, fit.alpha_range), (fit.eta, fit.eta_range), (fit.gamma, fit.gamma_range))
        entries = [Entry(show(value, ".3g"), _range(ends, ".3g"), value) for value, ends in found]
        misfit = _number(fit.misfit, "points")
        rows.append([Entry(curve.model), Entry(curve.arm), *entries, misfit, Entry(fit.note)])
    return Table(
        columns,
        rows,
        "Learning curves e(n) = α + η·n^γ, with 95 % ranges over resampled seeds; misfit: root mean square of mean "
        "errors minus the curve, in points",
    )


def arms(settings: dict[str, dict[str, Any]]) -> Table:
    """Every setting of every arm, side by side."""
    leaves = {arm: dict(_leaves(tree)) for arm, tree in settings.items()}
    names = dict.fromkeys(name for tree in leaves.values() for name in tree)
    rows = [[Entry(name), *(Entry(tree.get(name, "–")) for tree in leaves.values())] for name in names]
    return Table(_columns("setting", *leaves, number=False), rows, "Settings of the regularisation arms")


def failed(analysis: Analysis) -> Table:
    """Trainings that failed, and those that have not been run."""
    rows = [[Entry(result.cell.id), Entry("failed"), Entry(result.reason)] for result in analysis.failed]
    rows += [[Entry(cell.id), Entry("not run"), Entry("")] for cell in analysis.study.missing]
    return Table(_columns("training", "status", "reason", number=False), rows)


def config(tree: dict[str, Any]) -> Table:
    """Every option of the study but those that nothing used."""
    models = [model or {} for model in tree.get("models", {}).values()]
    unused = [r"(models\..+\.)?optimizer\.(lr|weight_decay)"]
    unused += [f"{key}\\b.*" for key in ("optimizer", "learning_rates") if models and all(m.get(key) for m in models)]
    rows = [
        [Entry(name), Entry(value)]
        for name, value in _leaves(tree)
        if not any(re.fullmatch(pattern, name) for pattern in unused)
    ]
    caption = (
        "Rates are those of learning_rates and weight decay is the arm's, so lr and weight_decay of optimizers were "
        "not used and are left out"
    )
    return Table(_columns("option", "value", number=False), rows, caption)


def _leaves(tree: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    for key, value in tree.items():
        if isinstance(value, dict) and value:
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", "–" if value is None else str(value)


# -- cells ------------------------------------------------------------------------------------------


def _columns(*names: str, number: bool = True) -> list[Column]:
    return [Column(name, number) for name in names]


def _count(value: int) -> Entry:
    return Entry(f"{value:,}", sort=value)


def _number(value: float | None, style: str) -> Entry:
    return Entry("–") if value is None else Entry(show(value, style), sort=value)


def _p(value: float | None) -> Entry:
    if value is None:
        return Entry("–")
    return Entry("< 0.001" if value < 0.001 else f"{value:.3f}", sort=value)


def _estimate(estimate: Estimate | None, style: str) -> Entry:
    if estimate is None or estimate.mean is None:
        return Entry("–")
    ends = None if estimate.low is None or estimate.high is None else (estimate.low, estimate.high)
    return Entry(show(estimate.mean, style), _range(ends, style), estimate.mean)


def _range(ends: tuple[float, float] | None, style: str) -> str:
    return f"[{show(ends[0], style, unit=False)}, {show(ends[1], style, unit=False)}]" if ends else ""


def _difference(comparison: Comparison | None, style: str) -> Entry:
    """The mean with the interval of the test, and below it the one of the bootstrap."""
    if comparison is None:
        return Entry("–")
    entry, bootstrap = _estimate(comparison.difference, style), _estimate(comparison.paired, style).range
    return replace(entry, below=f"bootstrap {bootstrap}") if entry.range and bootstrap else entry


def show(value: float, style: str, unit: bool = True) -> str:
    """A number as text.

    Args:
        value: what.
        style: ``percent`` (of a share), ``points`` (per cent points), ``share`` (per cent, no digits), or a format;
            a leading ``+`` shows the sign.
        unit: whether to add the unit.
    """
    sign, kind = ("+", style[1:]) if style.startswith("+") else ("", style)
    if not math.isfinite(value):
        return "–"
    if kind in ("percent", "points", "share"):
        digits = 0 if kind == "share" else 1
        text = f"{100 * value:{sign}.{digits}f}"
        return _minus(text + (" %" if unit and kind != "points" else ""))
    return _minus(f"{value:{sign}{kind}}")


def _minus(text: str) -> str:
    return text.replace("-", "−")
