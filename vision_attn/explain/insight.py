"""All that can be shown of what one model looks at in some pictures, gathered before anything is drawn.

Legend: B pictures, H heads, Q queries, R × C cells of a grid.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from vision_attn.attention import recordable
from vision_attn.errors import UserError
from vision_attn.explain.distance import HeadStatistics, head_statistics
from vision_attn.explain.faithfulness import Faithfulness, faithfulness
from vision_attn.explain.gradcam import grad_cam
from vision_attn.explain.maps import recording
from vision_attn.explain.objects import clouds, detector_view, detector_worth
from vision_attn.explain.receptive_field import effective_receptive_field
from vision_attn.explain.relevance import relevance
from vision_attn.explain.rollout import flow, rollout
from vision_attn.explain.views import Choice, Insight, PictureView, layer_views, run_one

FLOW_TOKENS = 100  # attention flow takes minutes beyond


def look(
    model: nn.Module,
    images: Sequence[Tensor],
    pixels: Sequence[Tensor],
    sources: Sequence[str],
    choice: Choice,
    more: Sequence[Tensor] = (),
) -> Insight:
    """Gathers everything about a model and some pictures.

    Args:
        model: with a ``config``.
        images: normalized, (C, H, W) each.
        pixels: the same as (3, H, W) uint8.
        sources: their names.
        choice: what to look at.
        more: further normalized images, for numbers over a set.

    Raises:
        UserError: as for ``attention_maps``.
    """
    config: dict[str, Any] = getattr(model, "config", {}) or {}
    name = str(config.get("name", type(model).__name__))
    notes: list[str] = []
    detects = config.get("task") == "detection"
    attends = bool(recordable(model))
    if not attends and (choice.layers != "all" or choice.heads or choice.queries):
        raise UserError(f"{name} has no attention, so it has no layers, heads or queries to choose: leave them out.")
    pictures = []
    for image, shown, source in zip(images, pixels, sources, strict=True):
        if detects:
            pictures.append(detector_view(model, image, shown, source, choice))
        else:
            pictures.append(_picture(model, image, shown, source, choice, config, attends))
    every = [*images, *more]
    statistics = _statistics(model, every, choice) if attends else {}
    worth = None
    if detects and choice.trials:
        worth = detector_worth(model, pictures, images, choice)
    elif not detects:
        worth = _add_summaries(model, pictures, torch.stack(every), choice, notes)
    field = _try(lambda: effective_receptive_field(model, torch.stack(every[:16])), notes) if not detects else None
    found = Insight(name, pictures, statistics, worth, field, notes)
    if detects and more:
        found.clouds = clouds(model, every)
    return found


def _try(make: Callable[[], Any], notes: list[str]) -> Any:
    """What a method finds; None, and a note, where it does not serve this model."""
    try:
        return make()
    except UserError as error:
        notes.append(str(error))
        return None


def _statistics(model: nn.Module, images: Sequence[Tensor], choice: Choice) -> dict[str, HeadStatistics]:
    alike = all(image.shape == images[0].shape for image in images)
    batch = torch.stack(list(images[:8])) if alike else [images[0]]
    return head_statistics(model, batch, layers=choice.layers)


def _picture(
    model: nn.Module,
    image: Tensor,
    shown: Tensor,
    source: str,
    choice: Choice,
    config: dict[str, Any],
    attends: bool,
) -> PictureView:
    if not attends:
        with torch.no_grad():
            output = model(image[None].to(next(model.parameters()).device))
        return PictureView(source, shown, _answer(output, config), [], {}, [])
    with torch.no_grad(), run_one(model, image, choice) as run:
        return PictureView(source, shown, _answer(run.output, config), layer_views(run, choice), {}, [])


def _answer(output: Any, config: dict[str, Any]) -> str:
    if not isinstance(output, Tensor) or output.dim() != 2:
        return ""
    logits = output[0].float()
    best = int(logits.argmax())
    names = config.get("labels") or [str(i) for i in range(len(logits))]
    return f"{names[best]} {float((logits[best] - logits.logsumexp(0)).exp()):.0%}"


def _add_summaries(
    model: nn.Module, pictures: list[PictureView], images: Tensor, choice: Choice, notes: list[str]
) -> Faithfulness | None:
    """Maps of the whole model for every picture, and what they are worth over all images."""
    maps: dict[str, Tensor] = {}
    if recordable(model):
        last = _try(lambda: _last_layer(model, images), notes)
        if last is not None:
            maps[last[0]] = last[1]
        makers: dict[str, Callable[[nn.Module, Tensor], Tensor]] = {"rollout": rollout}
        tokens = math.prod(last[1].shape[-2:]) if last is not None else 0
        if tokens <= FLOW_TOKENS:
            makers["flow"] = flow
        else:
            notes.append(f"attention flow was left out: over {tokens:,} patches it would take minutes.")
        makers["gradient-weighted relevance"] = relevance
        for title, make in makers.items():
            found = _try(partial(_in_parts, make, model, images), notes)
            if found is not None:
                maps[title] = found
    found = _try(partial(_in_parts, grad_cam, model, images), notes)
    if found is not None:
        maps["Grad-CAM"] = found
    if not maps:
        return None
    maps = {title: m.cpu() for title, m in maps.items()}
    for i, picture in enumerate(pictures):
        picture.summaries = {title: m[i] for title, m in maps.items()}
    if choice.trials < 1:
        return None
    cells = (14, 14) if min(images.shape[-2:]) >= 112 else (8, 8)
    return faithfulness(model, images, maps, cells=cells, steps=choice.steps, trials=choice.trials)


def _in_parts(make: Callable[[nn.Module, Tensor], Tensor], model: nn.Module, images: Tensor) -> Tensor:
    """Maps of a set, some images at a time."""
    return torch.cat([make(model, part) for part in images.split(8)])


@torch.no_grad()
def _last_layer(model: nn.Module, images: Tensor) -> tuple[str, Tensor] | None:
    """What the class token looks at in the last layer, or, without one, what is looked at most; mean over heads."""
    found = []
    for part in images.split(8):
        with recording(model, part) as run:
            names = [name for name in run.names() if all(run.planes(name))]
            if not names:
                return None
            plane = run.planes(names[-1])[1]
            assert plane is not None
            weights = run.weights(names[-1]).mean(1)  # (B, N, M)
        token = plane.prefix > 0 and getattr(model, "global_pool", "") == "token"
        row = weights[:, 0] if token else weights.mean(1)
        found.append(plane.to_image(row))
    title = "class token, last layer" if token else "most looked at, last layer"
    return title, torch.cat(found)
