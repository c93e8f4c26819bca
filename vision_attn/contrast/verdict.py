"""Which of two models overfits more? A rule for each size and arm, written down before there are results.

The gap between training and test accuracy alone misleads: a model that cannot fit its training images has hardly any
gap. A ViT with 53.5 % training and 49.6 % test accuracy on 5,000 CIFAR-10 images has a smaller gap than a CNN with
80.2 % and 70.8 % (figures from https://soveshmohapatra.com/projects/vits-benchmark), and is worse at both. So the
rule asks in this order:

1. Fewer than two pairs of seeds: **inconclusive**.
2. Neither model fits its training images, and neither validation loss turned: **both underfit**. A model *fits* when
   its mean training accuracy (clean, evaluation mode) is at least ``Rule.fits``; its validation loss *turned* when it
   ends, on average over seeds, more than ``Rule.turned`` above its lowest value, as a share of that value.
3. No training loss that is clearly below chance is reached by every seed of both models: **inconclusive**.
4. The gaps in loss (validation − training) are taken where the trajectories first reach the lowest training loss
   that all seeds of both models reach. If :func:`~vision_attn.contrast.statistics.compare` finds no difference at
   ``Rule.alpha`` (5 %): **inconclusive**.
5. If the rise of the validation loss up to the same point differs significantly the other way: **inconclusive**,
   the evidence contradicts itself.
6. Otherwise the first model **overfits more** or **less**.

One verdict errs in at most ``Rule.alpha`` of cases where the models do not differ; over a whole study that adds up. So
every verdict also carries ``p_study``, adjusted for all verdicts of the study (Holm), and the summary rests on those.
Both speak of other seeds: all of them are measured on the same validation images, and what other images would give is
not in p.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from vision_attn.contrast.results import Result
from vision_attn.contrast.statistics import NO_SPREAD, Comparison, compare, holm
from vision_attn.contrast.trajectory import common_loss, deepest, match_loss
from vision_attn.errors import UserError

MORE, LESS, BOTH_UNDERFIT, INCONCLUSIVE = "more", "less", "both underfit", "inconclusive"


@dataclass(frozen=True)
class Rule:
    """The thresholds of the rule.

    Attributes:
        alpha: of each test, between 0 and 1. The intervals are 95 % ones whatever it is.
        fits: mean training accuracy from which a model fits its training images; above 0, at most 1.
        turned: rise of the validation loss after its lowest value, as a share of it, from which it has turned.
        informative: largest training loss at which gaps are compared, as a share of the loss of guessing, ln(classes);
            above 0, at most 1.
    """

    alpha: float = 0.05
    fits: float = 0.75
    turned: float = 0.05
    informative: float = 0.9

    def __post_init__(self) -> None:
        """Refuse thresholds that mean nothing.

        Raises:
            UserError: naming the option.
        """
        for name, fine, expected in (
            ("alpha", 0 < self.alpha < 1, "a share between 0 and 1"),
            ("fits", 0 < self.fits <= 1, "a share above 0, at most 1"),
            ("turned", 0 <= self.turned < math.inf, "0 or more"),
            ("informative", 0 < self.informative <= 1, "a share above 0, at most 1"),
        ):
            if not fine:
                raise UserError(f"rule.{name} is {getattr(self, name)!r}: expected {expected}.")


@dataclass(frozen=True)
class Verdict:
    """What the rule says about two models at one size under one arm.

    Attributes:
        a: the first model; the verdict is about it.
        b: the second model.
        size: share of the training images.
        images: how many these are.
        arm: regularisation.
        seeds: the seeds that both models ended.
        outcome: ``more`` or ``less`` (the first model overfits more, or less, than the second), ``both underfit`` or
            ``inconclusive``.
        reason: in words.
        underfits: the models that do not fit their training images and whose validation loss did not turn.
        loss: training loss at which gaps were compared; None where that could not be done.
        gap_loss: difference a − b of the gaps in loss there: what the rule tests.
        gap_acc: the same in accuracy.
        rise: the same for the rise of the validation loss up to there.
        naive: difference a − b of the plain gaps, training − test accuracy after the last step.
        contradicts: step 5 of the rule applied.
        misleading: the plain gap says significantly the opposite of the verdict.
        p: of the test of ``gap_loss``.
        p_study: ``p``, adjusted for all verdicts of the study.
        matched: model -> seed -> the gaps and the rise at ``loss``: ``gap_loss gap_acc rise step``.
    """

    a: str
    b: str
    size: float
    images: int
    arm: str
    seeds: tuple[int, ...]
    outcome: str
    reason: str
    underfits: tuple[str, ...] = ()
    loss: float | None = None
    gap_loss: Comparison | None = None
    gap_acc: Comparison | None = None
    rise: Comparison | None = None
    naive: Comparison | None = None
    contradicts: bool = False
    misleading: bool = False
    p: float | None = None
    p_study: float | None = None
    matched: dict[str, dict[int, dict[str, float]]] | None = None

    @property
    def decided(self) -> bool:
        """Whether one model overfits more."""
        return self.outcome in (MORE, LESS)

    def stands(self, alpha: float) -> bool:
        """Whether one model overfits more even when all tests of the study are counted."""
        return self.decided and self.p_study is not None and self.p_study <= alpha


def judge(a: Sequence[Result], b: Sequence[Result], classes: int, rule: Rule | None = None) -> Verdict:
    """The verdict about two models at one size under one arm.

    Args:
        a: finished trainings of the first model, one per seed, without label noise.
        b: of the second.
        classes: of the data set.
        rule: thresholds.

    Returns:
        The verdict; ``p_study`` is filled by :func:`judge_all`, which sees the other verdicts.
    """
    rule = rule or Rule()
    first, second = a[0].cell, b[0].cell
    seeds = tuple(sorted({r.cell.seed for r in a} & {r.cell.seed for r in b}))
    place = (first.model, second.model, first.size, first.images, first.arm, seeds)
    pairs = [[next(r for r in side if r.cell.seed == seed) for seed in seeds] for side in (a, b)]
    if len(seeds) < 2:
        many = "no pair of seeds ended" if not seeds else "only one pair of seeds ended: no interval can be given"
        return Verdict(*place, INCONCLUSIVE, many)
    low = tuple(side[0].cell.model for side in pairs if _underfits(side, rule))
    naive = compare(*([r.values["gap_acc"] for r in side] for side in pairs)).within(2.0)
    verdict = Verdict(*place, INCONCLUSIVE, "", underfits=low, naive=naive)
    if len(low) == 2:
        said = " and ".join(f"{s[0].cell.model} {_mean(s, 'train_acc'):.1%}" for s in pairs)
        reason = (
            f"training accuracy stayed below {rule.fits:.0%} ({said}) and no model's validation loss ended, on average "
            f"over seeds, more than {rule.turned:.0%} above its lowest"
        )
        verdict = replace(verdict, outcome=BOTH_UNDERFIT, reason=reason)
    return _judge_gaps(_measure(verdict, pairs, rule, classes), rule)


def judge_all(groups: Sequence[tuple[Sequence[Result], Sequence[Result]]], classes: int, rule: Rule) -> list[Verdict]:
    """Verdicts for all sizes, arms and pairs of models of a study, with ``p_study``."""
    verdicts = [judge(a, b, classes, rule) for a, b in groups]
    tested = [None if verdict.outcome == BOTH_UNDERFIT else verdict.p for verdict in verdicts]
    return [replace(v, p_study=p) for v, p in zip(verdicts, holm(tested), strict=True)]


def _measure(verdict: Verdict, pairs: Sequence[Sequence[Result]], rule: Rule, classes: int) -> Verdict:
    """Compare the gaps at the common training loss, or say why that cannot be done."""
    runs = [run for side in pairs for run in side]
    loss = common_loss(run.curve for run in runs)
    limit = rule.informative * math.log(classes)
    if not loss <= limit:
        worst = max(runs, key=lambda run: deepest(run.curve)).cell
        reason = (
            f"no common training loss: {worst.model} with seed {worst.seed} never went below {loss:.2f}, "
            f"where guessing gives {math.log(classes):.2f}"
        )
        return verdict if verdict.outcome == BOTH_UNDERFIT else replace(verdict, reason=reason)
    points = [[match_loss(run.curve, loss) for run in side] for side in pairs]
    if any(point is None for side in points for point in side):
        reason = f"no common training loss: a trajectory starts below {loss:.2f}"
        return verdict if verdict.outcome == BOTH_UNDERFIT else replace(verdict, reason=reason)
    keys = ("gap_loss", "gap_acc", "rise", "step")
    matched = {
        side[0].cell.model: {
            run.cell.seed: {key: float(getattr(point, key)) for key in keys}
            for run, point in zip(side, at, strict=True)
        }
        for side, at in zip(pairs, points, strict=True)
    }
    gap_loss, gap_acc, rise = (
        compare(*([getattr(point, key) for point in side] for side in points)) for key in keys[:3]
    )
    gap_acc = gap_acc.within(2.0)  # gaps in accuracy lie between -1 and 1
    return replace(verdict, loss=loss, matched=matched, gap_loss=gap_loss, gap_acc=gap_acc, rise=rise, p=gap_loss.p)


def _judge_gaps(verdict: Verdict, rule: Rule) -> Verdict:
    if verdict.outcome == BOTH_UNDERFIT or verdict.gap_loss is None:
        return verdict
    gap, rise = verdict.gap_loss.difference, verdict.rise
    assert gap.mean is not None
    assert verdict.loss is not None
    where = f"at a training loss of {verdict.loss:.3g}"
    if verdict.p is None:
        return replace(verdict, reason=f"{where}: {gap.note or NO_SPREAD}")
    if verdict.p > rule.alpha:
        return replace(verdict, reason=f"{where} the gaps do not differ significantly")
    if _opposes(rise, gap.mean, rule):
        reason = f"{where} the gap says one thing, the rise of the validation loss the other"
        return replace(verdict, reason=reason, contradicts=True)
    outcome = MORE if gap.mean > 0 else LESS
    misleading = _opposes(verdict.naive, gap.mean, rule)
    amount = "larger" if gap.mean > 0 else "smaller"
    reason = f"{where} the gap of {verdict.a} is {amount} by {abs(gap.mean):.3g} nats"
    if verdict.underfits:
        reason += f"; {verdict.underfits[0]} underfits, so its plain gap is small for that reason"
    return replace(verdict, outcome=outcome, reason=reason, misleading=misleading)


def relative_rise(run: Result) -> float:
    """How far the validation loss ended above its lowest value, as a share of that value."""
    return float(run.values["turn_rise"] / max(run.values["turn_loss"], 1e-12))


def _underfits(runs: Sequence[Result], rule: Rule) -> bool:
    rise = np.mean([relative_rise(run) for run in runs])
    return _mean(runs, "train_acc") < rule.fits and bool(rise <= rule.turned)


def _opposes(comparison: Comparison | None, difference: float, rule: Rule) -> bool:
    """Whether a comparison is significant and has the other sign than ``difference``."""
    if comparison is None or comparison.p is None or comparison.difference.mean is None:
        return False
    return comparison.p <= rule.alpha and comparison.difference.mean * difference < 0


def _mean(runs: Sequence[Result], key: str) -> float:
    return float(np.mean([run.values[key] for run in runs]))
