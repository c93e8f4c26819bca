"""What a report says about its own rule, statistics and protocol."""

from __future__ import annotations

import math
from typing import Any

from vision_attn.contrast.analysis import Analysis
from vision_attn.contrast.config import describe_arms
from vision_attn.contrast.verdict import Rule
from vision_attn.data.config import AugmentConfig


def rule_steps(rule: Rule) -> list[str]:
    """The rule of the verdicts, step by step, with its thresholds."""
    return [
        "Fewer than two pairs of seeds ended: inconclusive.",
        "Neither model fits its training images and neither validation loss turned: both underfit. A model fits when "
        f"its mean training accuracy is at least {_percent(rule.fits)}; its validation loss turned when it ends, "
        f"on average over seeds, more than {_percent(rule.turned)} above its lowest value.",
        f"There is no training loss below {_percent(rule.informative)} of guessing that every seed of both models "
        "reaches: inconclusive.",
        "The gaps in loss, validation minus training, are read off each trajectory where it first reaches the lowest "
        f"training loss that all reach. No significant difference at {_percent(rule.alpha)}: inconclusive.",
        "The rise of the validation loss up to that point differs significantly the other way: inconclusive.",
        "Otherwise the model with the larger gap overfits more.",
    ]


def limits(analysis: Analysis) -> list[str]:
    """The limits of statistics on so few seeds, all measured on the same images."""
    return [
        "Seeds are paired: seed s gives all models the same images, wrong labels and order. Intervals of means are "
        "percentile bootstraps over seeds, stretched so that they cover 95 % of normal samples of the same size; "
        "unstretched they would cover 68 % with three seeds and 84 % with five. For skewed values (exponential) "
        "the stretched interval covers 89 %. One seed gives no interval.",
        "Differences in the verdicts carry the shorter of a paired and an unpaired (Welch) t interval, each widened so "
        "that the shorter one covers 95 % when the pairs have nothing in common, whichever of the models spreads more, "
        "and more when they have; p is the smaller of the two, enlarged to match, small ones more than large ones. "
        "Verdicts rest on these t tests alone; the bootstrap interval of the paired seeds stands below theirs, "
        "stretched as above. In simulation at 5 %, with five seeds, the rule finds a difference of two standard "
        "deviations of the paired differences in at least 85 %; of two standard deviations of each model's own seeds "
        "in 74 % when pairs are uncorrelated (the best unbiased test finds 79 %) and in 82 % at a correlation of 0.3. "
        "With three seeds it finds 32 to 37 % of the latter, so an inconclusive verdict there says little.",
        f"A single verdict is wrong in at most {_percent(analysis.rule.alpha)} of cases where the models do not "
        "differ; intervals are 95 % ones whatever that level is. Over a study it adds up, so “p, all” allows for all "
        "tests at once (Holm), and filled verdicts are those that still stand.",
        _same_images(analysis),
        "A model that trains faster reaches the common training loss earlier, at a higher learning rate; part of a "
        "difference in gaps can come from that. The trajectories show where.",
    ]


def _same_images(analysis: Analysis) -> str:
    """That seeds are other trainings, but no other images to measure them on."""
    data = analysis.study.facts["data"]
    val, test = int(data["val"]), int(data["test"])
    used = min(int(analysis.study.config.get("eval_images", val)), val)
    which = f"all {val:,} validation images" if used == val else f"the same {used:,} of {val:,} validation images"
    return (
        f"Every seed is measured on the same images: the gaps that the verdicts compare on {which}, the test set whole "
        f"({test:,} images). So intervals, p and these {_percent(analysis.rule.alpha)} speak of other seeds, not of "
        "other validation images: with those a verdict may be another one, however well the seeds agree. For scale: on "
        f"{used:,} images drawn anew, an accuracy has a standard error of up to {50 / math.sqrt(used):.1f} points."
    )


def protocol(analysis: Analysis) -> list[str]:
    """What was done, with every default."""
    study, config = analysis.study, analysis.study.config
    match: dict[str, Any] = study.facts["match"]
    within = "not demanded" if match.get("tolerance") is False else f"within {_percent(float(match['tolerance']))}"
    models = ", ".join(f"{m['model']} {m['params']:,} and {m['macs']:,}" for m in study.facts["models"])
    images = ", ".join(f"{100 * s:g} % ({n:,})" for s, n in sorted({(c.size, c.images) for c in study.cells}))
    steps = sorted({c.steps for c in study.cells})
    lines = [
        f"Models matched in parameters and multiply-accumulates, {within}: {models}.",
        f"Nested, class-balanced subsets of the training images: {images}.",
        f"The same number of optimizer steps for all models: {', '.join(f'{n:,}' for n in steps)}; batches of "
        f"{config.get('batch_size', '–')}.",
        "The same images, order of images, augmentation and wrong labels for all models, from the seed.",
        "Learning rates chosen per model and size on the validation split, by the same number of trials each, with a "
        f"seed of their own: {_rates(config)}. They were tried under the arm {analysis.arms[0]}, without wrong labels, "
        "only; the rate chosen there is used for all other arms and for wrong labels too, where another may be better.",
        *_arm_lines(analysis),
        f"Seeds: {_seeds(analysis)}.",
        f"Wrong labels: {_noise(analysis)}.",
        f"Trajectories: {config.get('evaluations', '–')} evaluations each, on at most {config.get('eval_images', '–')} "
        "training and as many validation images. In the first steps the running statistics of models with batch "
        "normalisation lag behind their weights, so their first evaluations look worse than the models are.",
        "The test set was evaluated once per training, at the end: by the last weights, and by those of the evaluation "
        "with the highest validation accuracy. Nothing was chosen by it.",
    ]
    return lines


def _arm_lines(analysis: Analysis) -> list[str]:
    """An arm each, with what it does."""
    settings = describe_arms(analysis.study.config, analysis.study.facts["data"]["img_size"])
    return [
        f"Regularisation {arm}: {_arm_words(settings[arm])}." if arm in settings else f"Regularisation {arm}."
        for arm in analysis.arms
    ]


def _arm_words(arm: dict[str, Any]) -> str:
    augment = AugmentConfig(**(arm.get("augment") or {})).changed()
    words = [f"{name} {value}" for name, value in augment.items()]
    words += [f"{key.replace('_', ' ')} {arm[key]:g}" for key in ("label_smoothing", "weight_decay") if arm.get(key)]
    return ", ".join(words) or "no augmentation, no label smoothing, no weight decay"


def _rates(config: dict[str, Any]) -> str:
    shared = config.get("learning_rates") or []
    own = {name: m["learning_rates"] for name, m in config.get("models", {}).items() if m and m.get("learning_rates")}
    words = [", ".join(f"{rate:g}" for rate in shared)] if shared and len(own) < len(config.get("models", {})) else []
    words += [f"{name}: {', '.join(f'{rate:g}' for rate in rates)}" for name, rates in own.items()]
    return "; ".join(words) or "–"


def _seeds(analysis: Analysis) -> str:
    counts: dict[int, list[str]] = {}
    for size in analysis.sizes:
        planned = max(g.planned for g in analysis.select(size=size, noise=0))
        counts.setdefault(planned, []).append(f"{100 * size:g} %")
    if len(counts) == 1:
        return str(next(iter(counts)))
    return "; ".join(f"{n} at {', '.join(sizes)}" for n, sizes in counts.items())


def _noise(analysis: Analysis) -> str:
    noisy = [g for g in analysis.groups if g.noise > 0]
    if not noisy:
        return "none"
    levels = ", ".join(f"{_percent(level)}" for level in sorted({g.noise for g in noisy}))
    sizes = ", ".join(f"{n:,}" for n in sorted({g.images for g in noisy}))
    return f"{levels} of the labels at {sizes} images, arm {', '.join(sorted({g.arm for g in noisy}))}"


def _percent(share: float) -> str:
    return f"{100 * share:g}\u00a0%"
