"""Are the models of a study of one size? If not, which sizes would be?"""

from __future__ import annotations

import contextlib
import itertools
import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from vision_attn.contrast.config import ContrastConfig, ModelChoice
from vision_attn.errors import UserError
from vision_attn.models import create_model, list_models
from vision_attn.models.profile import count_macs, count_parameters
from vision_attn.models.registry import model_defaults

_MEASURED = 25  # of the sizes nearest in parameters: counting multiply-accumulates takes longest
_WIDTHS = (0.35, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0, 1.1, 1.25, 1.4, 1.6, 2.0, 2.5, 3.0)


@dataclass
class Size:
    """A model of the study and what it costs.

    Attributes:
        model: display name.
        name, args: as for ``create_model``.
        params: parameters.
        macs: multiply-accumulates for one image.
        kind: ``attention`` or ``cnn``.
    """

    model: str
    name: str
    args: dict[str, Any]
    params: int
    macs: int
    kind: str


def measure_models(config: ContrastConfig, classes: int, img_size: tuple[int, int]) -> list[Size]:
    """Build every model once, without weights.

    Raises:
        UserError: unknown model or argument, no classifier, or an image size it cannot take.
    """
    return [
        _measure(model, choice, choice.args or {}, classes, img_size, explain=True)
        for model, choice in config.models.items()
    ]


def _measure(
    model: str,
    choice: ModelChoice,
    args: dict[str, Any],
    classes: int,
    img_size: tuple[int, int],
    explain: bool = False,
) -> Size:
    from vision_attn.attention import Attention
    from vision_attn.training.reinforce import draws_keys

    if choice.name in list_models() and choice.name not in list_models(task="classification"):
        raise UserError(f"models.{model}: {choice.name} is no image classifier.")
    try:
        with torch.device("meta"):
            built = create_model(
                choice.name, num_classes=classes, img_size=img_size, attention=choice.attention, **args
            )
        macs = count_macs(built, img_size)
    except UserError as error:
        raise UserError(f"models.{model}: {error}") from error
    except (ValueError, RuntimeError) as error:
        size = " x ".join(map(str, img_size))
        what = str(error).strip().split("\n")[0]
        raise UserError(f"models.{model}: {choice.name} cannot take images of {size} pixels: {what}") from error
    if explain and draws_keys(built):
        raise UserError(f"models.{model}: {choice.name} draws what it attends to and learns by REINFORCE, not studied.")
    kind = "attention" if any(isinstance(module, Attention) for module in built.modules()) else "cnn"
    return Size(model, choice.name, args, count_parameters(built), macs, kind)


def ratios(sizes: list[Size]) -> tuple[float, float]:
    """Largest over smallest number of parameters, and of multiply-accumulates."""
    return (
        max(size.params for size in sizes) / min(size.params for size in sizes),
        max(size.macs for size in sizes) / max(1, min(size.macs for size in sizes)),
    )


def check_match(config: ContrastConfig, sizes: list[Size], classes: int, img_size: tuple[int, int]) -> dict[str, Any]:
    """Refuse models of different sizes, and say which would be equal.

    Returns:
        ``tolerance`` (False when unequal models were asked for), ``params_ratio`` and ``macs_ratio``, largest over
        smallest.

    Raises:
        UserError: they differ by more than ``config.match``; with the numbers and a proposal.
    """
    params, macs = ratios(sizes)
    tolerance = False if config.match is False else float(config.match)
    if tolerance is not False and max(params, macs) > 1 + tolerance:
        numbers = ", ".join(f"{s.model} {s.params:,} parameters and {s.macs:,} MACs" for s in sizes)
        raise UserError(
            f"the models differ by more than match={tolerance:g} allows: {numbers}.\n"
            f"{_proposal(config, sizes, classes, img_size, tolerance)} Or compare unequal models with match: false."
        )
    return {"tolerance": tolerance, "params_ratio": params, "macs_ratio": macs}


def _proposal(
    config: ContrastConfig, sizes: list[Size], classes: int, img_size: tuple[int, int], tolerance: float
) -> str:
    """For every model that differs from the first: which of the two to change, and how; of three or more the other."""
    words = []
    first = sizes[0]
    for size in sizes[1:]:
        if max(ratios([first, size])) <= 1 + tolerance:
            continue
        found = [
            (changed.model, target.model, best, max(ratios([target, best])))
            for changed, target in ((size, first), (first, size))[: 2 if len(sizes) == 2 else 1]
            if (best := propose(config.models[changed.model], target, classes, img_size)) is not None
        ]
        if not found:
            words.append(f"Neither {first.name} nor {size.name} has a width or depth to change.")
            continue
        changed, target, best, ratio = min(found, key=lambda item: item[3])
        words.append(
            f"{'Nearest' if ratio > 1 + tolerance else 'Equal enough'} to {target}: models.{changed}.args "
            f"{json.dumps(best.args)} ({best.params:,} parameters, {best.macs:,} MACs)."
        )
    return " ".join(words or ["Take the one in the middle as the first model."])


def propose(choice: ModelChoice, target: Size, classes: int, img_size: tuple[int, int]) -> Size | None:
    """The width and depth at which a model comes nearest to a target in parameters and multiply-accumulates.

    Args:
        choice: the model.
        target: what to be equal to.
        classes: of the data.
        img_size: of the data, (H, W).

    Returns:
        The best of some hundred sizes, None when the model has nothing to change.
    """
    near = []
    for args in _candidates(choice):
        try:
            with torch.device("meta"):
                model = create_model(
                    choice.name, num_classes=classes, img_size=img_size, attention=choice.attention, **args
                )
        except ValueError:  # a width that this model cannot have
            continue
        near.append((abs(math.log(count_parameters(model) / target.params)), args))
    near.sort(key=lambda pair: pair[0])
    measured = []
    for _, args in near[:_MEASURED]:
        with contextlib.suppress(UserError):
            measured.append(_measure(target.model, choice, args, classes, img_size))
    return min(measured, key=lambda size: max(ratios([target, size])), default=None)


def _candidates(choice: ModelChoice) -> Iterator[dict[str, Any]]:
    """Arguments of a model in other widths and depths, the asked for ones otherwise kept."""
    args = dict(choice.args or {})
    if choice.name not in list_models():
        return
    now = {**model_defaults(choice.name), **args}
    if isinstance(now.get("embed_dim"), int) and isinstance(now.get("depth"), int):
        heads = now["num_heads"]
        widths = sorted({max(1, round(now["embed_dim"] * f / heads)) * heads for f in _WIDTHS})
        ratios_ = sorted({float(now["mlp_ratio"]), 1.0, 2.0, 4.0})
        for depth, width, ratio in itertools.product(_around(now["depth"]), widths, ratios_):
            yield {**args, "embed_dim": width, "depth": depth, "mlp_ratio": ratio}
    elif isinstance(now.get("embed_dim"), int) and "depths" in now:
        step = max(now["num_heads"])
        for f in _WIDTHS:
            for more in (-1, 0, 1, 2):
                depths = [max(1, depth + more) for depth in now["depths"]]
                yield {**args, "embed_dim": max(1, round(now["embed_dim"] * f / step)) * step, "depths": depths}
    elif isinstance(now.get("width"), int):
        widths = sorted({max(2, round(now["width"] * f)) for f in _WIDTHS})
        depths = [None] if now.get("blocks") is None else _stages(list(now["blocks"]))
        for width, depth in itertools.product(widths, depths):
            yield {**args, "width": width, **({} if depth is None else {"blocks": depth})}


def _around(depth: int, by: int = 4) -> list[int]:
    return sorted({max(1, depth + more) for more in range(-by, by + 1)})


def _stages(blocks: list[int]) -> list[list[int]]:
    """Numbers of blocks near the given ones: the same in all stages, or one more in one of them."""
    even = [[n] * len(blocks) for n in _around(round(sum(blocks) / len(blocks)), 2)]
    more = [[n + (i == at) for i, n in enumerate(row)] for row in even for at in range(len(row))]
    return [blocks, *(row for row in [*even, *more] if row != blocks)]
