"""Which maps can be compared with those that know nothing within a time, told by one forward pass.

Every map is compared with K random maps, with itself moved K times and with gradient × input, and each of these curves
asks the model 2 (S − 1) times: hundreds of passes for each image, which a large detector takes most of an hour for.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from vision_attn.explain.faithfulness import maps_for_each, passes
from vision_attn.explain.planes import evaluating

COPIES = 4  # of the image that is timed: what follows runs in batches too
FEW_STEPS = 4  # coarser curves, where the finer ones take too long


@dataclasses.dataclass(frozen=True)
class Plan:
    """What is compared.

    Attributes:
        names: of the maps, in the order given; none where not even one fits.
        steps: S.
        minutes: that it is going to take.
        note: what was left out and what to do, or empty.
    """

    names: list[str]
    steps: int
    minutes: float
    note: str = ""


@torch.no_grad()
def seconds_each(model: nn.Module, image: Tensor) -> float:
    """How long an image (C, H, W) takes among others."""
    some = image.to(next(model.parameters()).device).expand(COPIES, *image.shape)
    with evaluating(model):
        start = time.perf_counter()
        _wait(model(some))
        return (time.perf_counter() - start) / COPIES


def _wait(output: Any) -> None:
    """Until an accelerator has computed it."""
    first = output["pred_logits"] if isinstance(output, dict) else output
    if isinstance(first, Tensor):
        first.flatten()[:1].tolist()


def plan(names: Sequence[str], images: int, trials: int, steps: int, each: float, minutes: float) -> Plan:
    """Chooses maps and steps.

    Fewer steps come before fewer maps: all maps then stay, and the test of a map is as exact on coarser curves.

    Args:
        names: of the maps, what matters most first.
        images: B.
        trials: as of ``faithfulness``.
        steps: S that is wanted.
        each: seconds that an image takes.
        minutes: the time there is.
    """
    k = maps_for_each(trials, images)

    def takes(maps: int, s: int) -> float:
        return passes(maps, k, s) * images * each / 60

    few = min(steps, FEW_STEPS)
    whole = takes(len(names), steps)
    if whole <= minutes:
        return Plan(list(names), steps, whole)
    asks = f"--minutes {math.ceil(1.2 * whole)} for all of them, finely"
    room = next((n for n in range(len(names), 0, -1) if takes(n, few) <= minutes), 0)
    if not room:
        least = math.ceil(1.2 * takes(1, few))
        return Plan([], few, 0.0, f"comparing maps with random ones takes minutes: --minutes {least} for one, {asks}.")
    out = names[room:]
    left = f" {', '.join(out)} {'were' if len(out) > 1 else 'was'} left out;" if out else ""
    note = f"to take {minutes:g} minutes at most, maps were compared in {few} steps in place of {steps};{left} {asks}."
    return Plan(list(names[:room]), few, takes(room, few), note)
