"""The report of a study: ``report.html``, one page that needs no network, ``contrast.json`` and ``figures/*.png``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from vision_attn.atomic import atomic_write_text
from vision_attn.contrast import figures, tables
from vision_attn.contrast.analysis import Analysis, analyse, as_tree
from vision_attn.contrast.config import describe_arms
from vision_attn.contrast.drawing import look_of, write_panels
from vision_attn.contrast.results import Study, write_json
from vision_attn.contrast.summary import summarise
from vision_attn.contrast.verdict import BOTH_UNDERFIT, MORE, Rule, Verdict
from vision_attn.contrast.wording import limits, protocol, rule_steps

_FIGURES = (
    (
        "error",
        "Error against training images",
        "Markers are means over seeds, bars 95 % intervals, dots single seeds. Lines are fits of e(n) = α + η·n^γ, "
        "with the 95 % band of the fit over resampled seeds.",
        figures.learning_curves,
    ),
    (
        "matched",
        "Gap at equal training loss",
        "Validation minus training loss where the trajectories first reach the lowest training loss that every seed of "
        "both models reaches. ★ marks sizes where one model overfits more when all tests of the study are counted, ☆ "
        "those where the difference is significant by itself only.",
        figures.matched_gaps,
    ),
    (
        "gap",
        "Plain gap",
        "Training minus test accuracy after the last step. It is small for a model that does not fit its training "
        "images, so it says nothing without the training accuracy in the table of results.",
        figures.gaps,
    ),
    (
        "trajectories",
        "Along training",
        "Validation loss (solid) and training loss (broken), a line per seed. A marker shows the lowest validation "
        "loss where that is not the last one, the dotted line the training loss at which gaps are compared. Smallest, "
        "middle and largest size of every arm; all others are in curves.csv.",
        figures.trajectories,
    ),
    (
        "noise",
        "Wrong labels",
        "Part of the training labels was shuffled so that none of them stayed right. Shown is the share of these wrong "
        "labels that a model gives back. Memorising them is one reason, chance another: the dotted line is what "
        "guessing gives back, 1 / classes; it is not subtracted.",
        figures.memorisation,
    ),
    (
        "calibration",
        "Calibration",
        "Expected calibration error on the test set: how far confidence and accuracy are apart, 15 bins.",
        figures.calibration,
    ),
    (
        "reach",
        "How far the models look",
        "Mean distance between a query and the keys it attends to, a dot per head, beside the mean distance of the "
        "pixels that move a feature in the middle of the image (effective receptive field), block by block.",
        figures.reach,
    ),
)


def write_report(study: Study, folder: str | Path) -> Path:
    """Write ``contrast.json``, ``figures/*.png`` and ``report.html``.

    Args:
        study: finished or not; what is missing or failed is listed.
        folder: where to; made when missing.

    Returns:
        The path of ``report.html``.
    """
    folder = Path(folder)
    settings = study.config.get("rule")
    analysis = analyse(study, Rule(**settings) if settings else None)
    summary = summarise(analysis)
    groups: list[dict[str, Any]] = [
        {"id": name, "title": title, "text": text, "panels": draw(analysis), "table": None}
        for name, title, text, draw in _FIGURES
    ]
    groups[0]["table"] = tables.fits(analysis)
    write_panels((panel for group in groups for panel in group["panels"]), folder / "figures")
    write_json(folder / "contrast.json", as_tree(analysis, summary))
    return atomic_write_text(folder / "report.html", render(analysis, summary, groups))


def render(analysis: Analysis, summary: list[str], groups: list[dict[str, Any]]) -> str:
    """The page.

    Args:
        analysis: of the study.
        summary: its paragraphs.
        groups: of figures: ``id title text panels table``.
    """
    from jinja2 import Environment, PackageLoader, StrictUndefined

    # CSS and JavaScript are included as they are; everything that is printed into them or the page is escaped
    environment = Environment(
        loader=PackageLoader("vision_attn.contrast"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=False,
    )
    study = analysis.study
    return environment.get_template("report.html.j2").render(
        title=_title(study),
        stamp=study.stamp,
        facts=_facts(study),
        summary=summary,
        warnings=_warnings(analysis),
        matrices=_matrices(analysis),
        verdicts=tables.verdicts(analysis),
        figures=groups,
        results=tables.results(analysis),
        runs=tables.runs(analysis),
        rates=tables.rates(analysis),
        failed=tables.failed(analysis),
        rule=rule_steps(analysis.rule),
        limits=limits(analysis),
        protocol=protocol(analysis),
        arms=tables.arms(describe_arms(study.config, study.facts["data"]["img_size"])),
        config=tables.config(study.config),
        command=study.facts["command"],
        identity=_identity(study),
    )


def _title(study: Study) -> str:
    names = study.models
    if len(names) == 2:
        return f"Does {names[0]} overfit more than {names[1]}?"
    return f"Which overfits most: {', '.join(names[:-1])} or {names[-1]}?"


def _facts(study: Study) -> list[str]:
    data = study.facts["data"]
    done = sum(result.done for result in study.results)
    return [
        f"{data['name']}: {data['train']:,} training, {data['val']:,} validation, {data['test']:,} test images",
        f"{done} of {len(study.cells)} trainings",
        f"started {str(study.facts['started'])[:10]}",
        f"vision_attn {study.facts['version']}",
    ]


def _warnings(analysis: Analysis) -> list[str]:
    study = analysis.study
    warnings = []
    if study.missing:
        warnings.append(f"Not finished: {len(study.missing)} of {len(study.cells)} trainings are still to be run.")
    if analysis.failed:
        warnings.append(f"Trainings that failed and are left out: {len(analysis.failed)}. Their reasons are below.")
    if unseen := figures.not_looked_at(analysis):
        warnings.append(f"“How far the models look” could not be measured for {'; nor for '.join(unseen)}.")
    if any(len(group.runs) == 1 for group in analysis.groups):
        warnings.append("Where only one seed ended, no interval can be given, and no verdict.")
    if len(study.codes) > 1:
        made = "; ".join(f"{count} by {code or 'code that left no hash'}" for code, count in study.codes.items())
        warnings.append(f"Not all trainings were made by the same code, so they may not compare: {made}.")
    match = study.facts["match"]
    tolerance = match.get("tolerance")
    if tolerance is False or any(match.get(k, 1) > 1 + float(tolerance or 0) for k in ("params_ratio", "macs_ratio")):
        warnings.append(
            f"The models are not matched: parameters differ by a factor of {match['params_ratio']:.2f}, "
            f"multiply-accumulates by {match['macs_ratio']:.2f}."
        )
    edge = sorted({str(row["model"]) for row in study.learning_rates if row.get("at_edge") is True})
    if edge:
        warnings.append(
            f"For {' and '.join(edge)} the best learning rate of some size is the lowest or highest that was tried; "
            "a better one may lie beyond."
        )
    return warnings


def _matrices(analysis: Analysis) -> list[dict[str, Any]]:
    """The verdicts of each pair of models at a glance: arms down, sizes across."""
    matrices = []
    for a, b in dict.fromkeys((v.a, v.b) for v in analysis.verdicts):
        mine = {(v.arm, v.size): v for v in analysis.verdicts if (v.a, v.b) == (a, b)}
        sizes = {size: verdict.images for (_, size), verdict in sorted(mine.items(), key=lambda item: item[0][1])}
        rows = [
            {"arm": arm, "cells": [_cell(analysis, mine[arm, size]) for size in sizes if (arm, size) in mine]}
            for arm in analysis.arms
        ]
        caption = f"The model that overfits more, {a} or {b}, by number of training images"
        matrices.append({"caption": caption, "sizes": [f"{images:,}" for images in sizes.values()], "rows": rows})
    return matrices


def _cell(analysis: Analysis, verdict: Verdict) -> dict[str, str]:
    if verdict.decided:
        name = verdict.a if verdict.outcome == MORE else verdict.b
        firm = verdict.stands(analysis.rule.alpha)
        tint, _ = look_of(analysis.study.models.index(name))
        return {"text": name, "kind": "firm" if firm else "own", "tint": tint, "reason": verdict.reason}
    if verdict.outcome == BOTH_UNDERFIT:
        return {"text": "both underfit", "kind": "underfit", "tint": "", "reason": verdict.reason}
    return {"text": "–" if verdict.seeds else "no result", "kind": "open", "tint": "", "reason": verdict.reason}


def _identity(study: Study) -> list[tuple[str, str]]:
    machine = study.facts["machine"]
    return [
        ("version", f"vision_attn {study.facts['version']}"),
        ("configuration hash", str(study.facts["config_hash"])),
        ("data hash", str(study.facts["data_hash"])),
        ("code of the trainings", ", ".join(code or "not recorded" for code in study.codes) or "–"),
        ("code of this page", study.stamp["code"]),
        ("started", str(study.facts["started"])),
        *((str(key), str(value)) for key, value in machine.items()),
    ]
