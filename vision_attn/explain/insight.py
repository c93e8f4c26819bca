"""All that can be shown of what one model looks at in some pictures, gathered before anything is drawn.

Legend: B pictures, H heads, Q queries, R × C cells of a grid.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from vision_attn.attention import recordable
from vision_attn.errors import UserError
from vision_attn.explain.distance import HeadStatistics, head_statistics
from vision_attn.explain.faithfulness import Faithfulness, faithfulness, maps_for_each
from vision_attn.explain.gradcam import grad_cam
from vision_attn.explain.maps import implied_layers, recording, run_model
from vision_attn.explain.objects import detector_view, detector_worth
from vision_attn.explain.patience import Plan, plan, seconds_each
from vision_attn.explain.planes import evaluating
from vision_attn.explain.receptive_field import effective_receptive_field
from vision_attn.explain.relevance import relevance
from vision_attn.explain.rollout import flow, rollout
from vision_attn.explain.views import NOT_MEASURED, Choice, Clouds, Insight, PictureView, layer_views, run_one

SILENCE = 0.2  # minutes of work that need no word
FLOW_WORK = 10 * 196**3  # images × patches³: attention flow takes about a minute, beyond it minutes


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
            pictures.append(detector_view(model, image, shown, source, choice, notes))
        else:
            pictures.append(_picture(model, image, shown, source, choice, config, attends))
    if attends and pictures and choice.layers == "all":
        _name_hidden(model, pictures[0], notes)
    every = [*images, *more]
    statistics = _statistics(model, every, choice, notes) if attends else {}
    worth = None
    if detects and choice.trials:
        worth = _detector_worth(model, pictures, images, more, choice, notes)
    elif not detects:
        worth = _add_summaries(model, pictures, torch.stack(every), choice, notes)
    if worth is None:
        notes.append(NOT_MEASURED + (" (trials is 0)" if choice.trials < 1 else ""))
    field = _try(lambda: effective_receptive_field(model, torch.stack(every[:16])), notes) if not detects else None
    found = Insight(name, pictures, statistics, worth, field, notes)
    if detects and more:
        found.clouds = clouds_of(model, every, choice.threshold)
    return found


def _name_hidden(model: nn.Module, picture: PictureView, notes: list[str]) -> None:
    """A note on the layers whose keys are no places of the image, as those that pool or relate object queries."""
    shown = {layer.name.partition("[")[0] for layer in picture.layers}
    hidden = [name for name in recordable(model) if name not in shown]
    if hidden:
        more = f" and {len(hidden) - 3} more" if len(hidden) > 3 else ""
        names = ", ".join(hidden[:3])
        notes.append(f"layers that look at no places of the image are not shown: {names}{more}.")


def _try(make: Callable[[], Any], notes: list[str]) -> Any:
    """What a method finds; None, and a note, where it does not serve this model."""
    try:
        return make()
    except UserError as error:
        notes.append(str(error))
        return None


def _statistics(
    model: nn.Module, images: Sequence[Tensor], choice: Choice, notes: list[str]
) -> dict[str, HeadStatistics]:
    """Of some images at once, or of the first, where they differ in size or memory has no room for more."""
    alike = all(image.shape == images[0].shape for image in images)
    said: list[str] = []
    if alike and len(images) > 1:
        found = _try(partial(head_statistics, model, torch.stack(list(images[:8])), layers=choice.layers), said)
        if found is not None:
            return dict(found)
    return dict(_try(partial(head_statistics, model, images[0][None], layers=choice.layers), notes) or {})


def _detector_worth(
    model: nn.Module,
    pictures: Sequence[PictureView],
    images: Sequence[Tensor],
    more: Sequence[Tensor],
    choice: Choice,
    notes: list[str],
) -> Faithfulness | None:
    """Of the surest object in every image, those of the further images included."""
    others = []
    for image in more:
        seen = detector_view(model, image, image, "", dataclasses.replace(choice, layers="decoder.*cross_attn", most=1))
        seen.layers.clear()  # of these images only the object's maps are wanted, and many layers would fill the memory
        others.append(seen)
    views = [*pictures, *others]
    some = [(view, image) for view, image in zip(views, [*images, *more], strict=True) if view.detections]
    if not some:
        return None
    names = list(some[0][0].detections[0].maps)
    compared = _plan(model, [image for _, image in some], names, choice, notes)
    if not compared.names:
        return None
    each = dataclasses.replace(choice, trials=maps_for_each(choice.trials, len(some)), steps=compared.steps)
    return detector_worth(model, [view for view, _ in some], [image for _, image in some], each, compared.names)


def _rank(title: str) -> tuple[int, int]:
    """Of an object's maps: relevance first, then the decoder's layers, the last before the others, then the encoder."""
    layer = title.partition("layer ")[2].partition(" ")[0]
    kind = next((i for i, kind in enumerate(("relevance", "cross-attention")) if title.startswith(kind)), 2)
    return kind, -int(layer) if layer.isdigit() else 0


def _plan(model: nn.Module, images: Sequence[Tensor], names: Sequence[str], choice: Choice, notes: list[str]) -> Plan:
    """Which maps are compared, in the order given, with a note on what is not."""
    ranked = sorted(names, key=_rank)
    each = seconds_each(model, images[0])
    found = plan(ranked, len(images), choice.trials, choice.steps, each, choice.minutes)
    if found.note:
        notes.append(found.note)
    if found.minutes > SILENCE:
        choice.tell(f"comparing maps with random ones: about {found.minutes:.1f} minutes")
    return dataclasses.replace(found, names=[name for name in names if name in found.names])


@torch.no_grad()
def clouds_of(model: Any, images: Sequence[Tensor], threshold: float) -> Clouds:
    """The boxes that a detector's queries give in images (C, H, W), and how often each is surer than a threshold."""
    from vision_attn.detection.postprocess import postprocess

    boxes, found = [], torch.zeros(0)
    with evaluating(model):
        for image in images:
            output = run_model(model, image[None])
            boxes.append(output["pred_boxes"][0].float().cpu())
            sure = postprocess(output, [(1, 1)], model.classification, threshold=threshold)[0]["queries"].unique()
            found = found if len(found) else torch.zeros(len(boxes[0]))
            found[sure.cpu()] += 1
    return Clouds(torch.stack(boxes, 1), found.long())


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
        implied = " (implied)" if implied_layers(model) else ""
        last = _try(lambda: _last_layer(model, images, choice), notes)
        if last is not None:
            maps[last[0]] = last[1]
        makers: dict[str, Callable[[nn.Module, Tensor], Tensor]] = {"rollout": rollout}
        tokens = math.prod(last[1].shape[-2:]) if last is not None else 0
        if choice.flow == "yes" or (choice.flow == "auto" and len(images) * tokens**3 <= FLOW_WORK):
            makers["flow"] = flow
        elif choice.flow == "auto":
            where = f"{tokens:,} patches in {len(images)} image{'s' * (len(images) > 1)}"
            notes.append(f"attention flow was left out: over {where} it may take minutes (--flow yes asks for it).")
        makers["gradient-weighted relevance"] = relevance
        for title, make in makers.items():
            found = _try(partial(_in_parts, make, model, images), notes)
            if found is not None:
                maps[title + implied] = found
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
    compared = _plan(model, list(images), list(maps), choice, notes)
    if not compared.names:
        return None
    measured = {name: maps[name] for name in compared.names}
    return faithfulness(model, images, measured, cells=cells, steps=compared.steps, trials=choice.trials)


def _in_parts(make: Callable[[nn.Module, Tensor], Tensor], model: nn.Module, images: Tensor) -> Tensor:
    """Maps of a set, some images at a time; one at a time where memory has no room for more.

    Raises:
        UserError: the method does not serve this model, or gives something else than a map for each image.
    """
    found = []
    for part in images.split(8):
        try:
            maps = make(model, part)
        except UserError:
            if len(part) == 1:
                raise
            maps = torch.cat([make(model, one[None]) for one in part])
        if len(maps) != len(part):
            name = getattr(make, "__name__", "a method").replace("_", "-")
            raise UserError(f"{name} gives {len(maps)} maps for {len(part)} images of {type(model).__name__}.")
        found.append(maps)
    return torch.cat(found)


@torch.no_grad()
def _last_layer(model: nn.Module, images: Tensor, choice: Choice) -> tuple[str, Tensor] | None:
    """What the class token looks at in the last layer, or, without one, what is looked at most; mean over heads.

    Of the layers, heads and queries that were chosen; some rows are in memory at a time.
    """
    asked: dict[str, Any] = {"layers": choice.layers, "heads": choice.heads, "queries": choice.queries}
    found = []
    for part in images.split(8):
        with recording(model, part, **asked, hold="rows") as run:
            names = [name for name in run.names() if all(run.planes(name))]
            if not names:
                return None
            name = names[-1]
            plane = run.planes(name)[1]
            assert plane is not None
            token = choice.queries is None and plane.prefix > 0 and getattr(model, "global_pool", "") == "token"
            row = run.first_row(name) if token else run.mean_row(name)
            found.append(plane.to_picture(row))
            implied = " (implied)" if run.recorder.implied(name) else ""
    where = "last layer" if choice.layers == "all" else name
    what = "class token" if token else "most looked at" if choice.queries is None else "chosen queries"
    return f"{what}, {where}{implied}", torch.cat(found)
