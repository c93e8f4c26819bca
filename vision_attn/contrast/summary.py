"""What a study found, in one paragraph of plain English that says no more than its numbers."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations
from typing import Any

from vision_attn.contrast.analysis import Analysis, Group
from vision_attn.contrast.verdict import BOTH_UNDERFIT, INCONCLUSIVE, LESS, MORE, Verdict

PUBLISHED = (
    "Published evidence points both ways. Dosovitskiy et al. (2021, section 4.3) report that vision transformers "
    "overfit more than ResNets of comparable cost on smaller datasets. On 5,000 CIFAR-10 images, a comparison "
    "(soveshmohapatra.com/projects/vits-benchmark) has a ViT at 53.5 % training and 49.6 % test accuracy and a CNN at "
    "80.2 % and 70.8 %: there the plain gap calls the CNN the one that overfits, but the ViT got only half of its "
    "training images right."
)


def summarise(analysis: Analysis) -> list[str]:
    """The summary: one paragraph, and one that holds it against published numbers where a CNN is compared.

    Args:
        analysis: of a study, finished or not.
    """
    study = analysis.study
    data = study.facts["data"]
    lines = [_setting(analysis, data)]
    for a, b in combinations(study.models, 2):
        lines += _pair(analysis, [v for v in analysis.verdicts if (v.a, v.b) == (a, b)], a, b)
    lines += _wrong_labels(analysis)
    lines.append(_limits(analysis))
    paragraphs = [" ".join(line for line in lines if line)]
    context = _context(analysis)
    return [*paragraphs, context] if context else paragraphs


def _setting(analysis: Analysis, data: dict[str, Any]) -> str:
    arms, sizes = len(analysis.arms), len(analysis.sizes)
    models = analysis.study.facts["models"]
    names = _join([f"{m['model']} ({_short(m['params'])} parameters, {_short(m['macs'])} MACs)" for m in models])
    counts = sorted({group.planned for group in analysis.select(noise=0)})
    seeds = f"{counts[0]}" if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"
    return (
        f"On {data['name']} ({data['train']:,} training images, {data['classes']} classes), {names} were trained on "
        f"subsets of {_count(sizes, 'size')} under {_count(arms, 'kind')} of regularisation, with {seeds} "
        f"seed{'' if seeds == '1' else 's'} each."
    )


def _pair(analysis: Analysis, verdicts: Sequence[Verdict], a: str, b: str) -> list[str]:
    """What the verdicts about two models say; those that stand only by themselves are called so."""
    n = len(verdicts)
    tests = sum(v.p_study is not None for v in analysis.verdicts)
    firm = [v for v in verdicts if v.stands(analysis.rule.alpha)]
    weak = [v for v in verdicts if v.decided and v not in firm]
    lines = []
    for outcome, word, amount in ((MORE, "more", "larger"), (LESS, "less", "smaller")):
        if found := [v for v in firm if v.outcome == outcome]:
            lines.append(
                f"At equal training loss, {a} overfits {word} than {b} {_where(found, analysis, n)}: "
                f"its gap is {amount} by {_amounts(found)} nats."
            )
    if firm and tests > 1:
        lines.append(
            f"{'This stands' if len(firm) == 1 else 'These stand'} when all {tests} tests of the study are counted."
        )
    if not firm:
        counted = f" when all {tests} tests are counted" if weak else ""
        where = f"in any of the {n} comparisons" if n > 1 else "in the one comparison"
        lines.append(f"No difference in overfitting between {a} and {b} could be shown {where}{counted}.")
    for outcome, word in ((MORE, "more"), (LESS, "less")):
        if found := [v for v in weak if v.outcome == outcome]:
            lines.append(
                f"Significant by {'itself' if len(found) == 1 else 'themselves'} only: {a} overfits {word} "
                f"{_where(found, analysis, n)}."
            )
    for outcome, words in ((BOTH_UNDERFIT, "both underfit"), (INCONCLUSIVE, "the study is inconclusive")):
        found = [v for v in verdicts if v.outcome == outcome and v.seeds]
        if found and (firm or weak or outcome == BOTH_UNDERFIT):
            where = _where(found, analysis, n)
            lines.append(f"{where[0].upper()}{where[1:]} {words}.")
    for model in (a, b):
        if found := [v for v in verdicts if model in v.underfits and v.outcome != BOTH_UNDERFIT]:
            lines.append(
                f"{model} underfits {_where(found, analysis, n)}: fewer than {analysis.rule.fits:.0%} of its training "
                "images are right there, and its validation loss does not end, on average over seeds, more than "
                f"{analysis.rule.turned:.0%} above its lowest value."
            )
    if empty := [v for v in verdicts if not v.seeds]:
        lines.append(f"{_count(len(empty), 'comparison')} of {n} {'has' if len(empty) == 1 else 'have'} no results.")
    if misleading := [v for v in firm + weak if v.misleading]:
        lines.append(
            f"The plain gap between training and test accuracy says the opposite {_where(misleading, analysis, n)}."
        )
    lines.append(_largest(analysis, a, b))
    return lines


def _largest(analysis: Analysis, a: str, b: str) -> str:
    """Accuracies where there is most data, under the arm with the best validation accuracy of each model."""
    size = analysis.sizes[-1]
    best = []
    for model in (a, b):
        groups = [g for g in analysis.select(model=model, size=size, noise=0) if "test_acc" in g.estimates]
        if not groups:
            return ""
        best.append(max(groups, key=lambda g: _mean(g, "val_acc")))
    images = best[0].images
    texts = [
        f"{g.model} reached {_percent(g, 'test_acc')} test accuracy (training {_percent(g, 'train_acc')}, arm {g.arm})"
        for g in best
    ]
    return f"With {images:,} images, {texts[0]} and {texts[1]}."


def _wrong_labels(analysis: Analysis) -> list[str]:
    """Which share of the wrong labels each model gives back, where there are most images with some."""
    groups = [g for g in analysis.groups if g.noise > 0 and "memorised" in g.estimates]
    if not groups:
        return []
    lines: list[str] = []
    most = max(g.size for g in groups)
    for arm, noise in dict.fromkeys((g.arm, g.noise) for g in groups if g.size == most):
        found = [g for g in groups if (g.size, g.arm, g.noise) == (most, arm, noise)]
        shares = _join([f"{g.model} gives back {_percent(g, 'memorised')} of them" for g in found])
        where = f"at {found[0].images:,} images (arm {arm})" if not lines else f"(arm {arm})"
        lines.append(f"With {100 * noise:g}\u00a0% wrong labels {where} {shares}{_told_apart(analysis, found)}.")
    chance = 1 / int(analysis.study.facts["data"]["classes"])
    return [*lines, f"Guessing alone would give back {100 * chance:.3g}\u00a0%."]


def _told_apart(analysis: Analysis, groups: Sequence[Group]) -> str:
    """Whether two models differ in the wrong labels they give back; nothing where there are more."""
    place = {(g.size, g.arm, g.noise) for g in groups}
    tests = [d for d in analysis.differences if (d.size, d.arm, d.noise) in place and d.measure == "memorised"]
    if len(groups) != 2 or len(tests) != 1:
        return ""
    p = tests[0].comparison.p
    if p is None:
        return " (no interval can be given)"
    return "" if p <= analysis.rule.alpha else " (no significant difference)"


def _limits(analysis: Analysis) -> str:
    lines = []
    failed, missing = len(analysis.failed), len(analysis.study.missing)
    if failed:
        lines.append(f"{_count(failed, 'training')} failed and {'is' if failed == 1 else 'are'} not in these numbers.")
    if missing:
        lines.append(f"{_count(missing, 'training')} {'has' if missing == 1 else 'have'} not ended yet.")
    lines.append("All this holds for these models, images and numbers of steps, and for no others without a test.")
    return " ".join(lines)


def _context(analysis: Analysis) -> str:
    """The study beside published numbers, where it compares an attention model with a CNN."""
    kinds = {model["model"]: model.get("kind") for model in analysis.study.facts["models"]}
    if {"attention", "cnn"} - set(kinds.values()):
        return ""
    name = analysis.study.facts["data"]["name"]
    arm = analysis.arms[0]
    sizes = {g.size: g.images for g in analysis.select(arm=arm, noise=0)}
    size = min(sizes, key=lambda s: abs(sizes[s] - 5000)) if name == "cifar10" else max(sizes)
    parts, low = [], []
    for model, kind in kinds.items():
        for group in analysis.select(model=model, size=size, arm=arm, noise=0):
            if "test_acc" in group.estimates:
                parts.append(f"{model} {_percent(group, 'train_acc')} and {_percent(group, 'test_acc')}")
                if kind == "attention" and _mean(group, "train_acc") < analysis.rule.fits:
                    low.append(model)
    if not parts:
        return ""
    what = "" if name == "cifar10" else f"{name} "
    here = f"Here, with {sizes[size]:,} {what}images and arm {arm}, training and test accuracy are: {'; '.join(parts)}."
    right = f"{analysis.rule.fits:.0%} of its training images right"
    fitted = (
        f"{_join(low)}, too, got fewer than {right}."
        if low
        else f"Under that arm every attention model got at least {right}."
    )
    other = "" if name == "cifar10" else " These are other images, so the figures themselves do not compare."
    return f"{PUBLISHED} {here} {fitted}{other}"


# -- words ------------------------------------------------------------------------------------------


def _where(verdicts: Sequence[Verdict], analysis: Analysis, n: int) -> str:
    """``in 3 of 6 comparisons (63 and 314 images, arm none; all sizes, arm full)``."""
    if len(verdicts) == n:
        return f"in all {n} comparisons" if n > 1 else "in the one comparison"
    arms: dict[str, list[int]] = {}
    for verdict in verdicts:
        arms.setdefault(verdict.arm, []).append(verdict.images)
    whole = len(analysis.sizes)
    places = [f"{_sizes(images, whole)}, arm {arm}" for arm, images in arms.items()]
    return f"in {len(verdicts)} of {_count(n, 'comparison')} ({'; '.join(places)})"


def _amounts(verdicts: Sequence[Verdict]) -> str:
    found = sorted(abs(v.gap_loss.difference.mean or 0.0) for v in verdicts if v.gap_loss)
    low, high = f"{found[0]:.2g}", f"{found[-1]:.2g}"
    return low if low == high else f"{low} to {high}"


def _sizes(images: list[int], whole: int) -> str:
    return "all sizes" if len(images) == whole > 1 else _join([f"{n:,}" for n in sorted(images)]) + " images"


def _mean(group: Group, measure: str) -> float:
    mean = group.estimates[measure].mean
    assert mean is not None
    return mean


def _percent(group: Group, measure: str) -> str:
    return f"{100 * _mean(group, measure):.1f}\u00a0%"


def _count(n: int, noun: str) -> str:
    return f"{n} {noun}{'' if n == 1 else 's'}"


def _join(words: Sequence[str]) -> str:
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"


def _short(number: float) -> str:
    for unit, name in ((1e9, " G"), (1e6, " M"), (1e3, " k")):
        if number >= unit:
            return f"{number / unit:.3g}{name}"
    return f"{number:.0f}"
