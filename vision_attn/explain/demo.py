"""What the demo does with a picture: reads it within limits, asks a model, and makes maps to be looked at.

Nothing here needs Gradio; ``demo_page`` lays it out.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from PIL import Image, UnidentifiedImageError
from torch import Tensor, nn

from vision_attn.checkpoints import load_model
from vision_attn.errors import UserError
from vision_attn.explain.figures import HEAT
from vision_attn.explain.insight import look
from vision_attn.explain.seen import as_seen
from vision_attn.explain.views import NOT_MEASURED, Choice, Insight, LayerView, PictureView
from vision_attn.inference import open_pictures
from vision_attn.models import create_model, list_models
from vision_attn.models.registry import model_class

MOST_BYTES = 20 * 2**20  # of an uploaded file
MOST_PIXELS = 40_000_000  # of an uploaded picture
SIDE = 448  # pixels: smaller pictures are enlarged by a whole factor to be looked at
MEAN = "mean of heads"
MEASURE = "measure what the maps are worth (slow)"
IMPLIED = " (implied)"
UNTRAINED = (
    "Untrained: its weights are random, so its answer and its maps mean nothing. Give a checkpoint for real ones."
)


def read_upload(path: str | Path | None) -> Image.Image:
    """A picture that somebody uploaded, decoded only when its header promises a bearable size.

    Raises:
        UserError: no file, one that is too large or no image, or one that claims too many pixels.
    """
    if path is None:
        raise UserError("Drop an image first.")
    path = Path(path)
    size = path.stat().st_size if path.is_file() else 0
    if size > MOST_BYTES:
        raise UserError(f"{path.name} has {size / 2**20:.0f} MiB; at most {MOST_BYTES // 2**20} are taken.")
    try:
        with Image.open(path) as picture:
            pixels, sides = picture.width * picture.height, f" ({picture.width:,} × {picture.height:,})"
    except Image.DecompressionBombError as error:  # Pillow refuses the largest by their header
        found = re.search(r"\d+", str(error))
        pixels, sides = int(found[0]) if found else MOST_PIXELS + 1, ""
    except (UnidentifiedImageError, OSError, ValueError, SyntaxError) as error:
        raise UserError(f"{path.name} is no image that can be read: {type(error).__name__}.") from error
    if pixels > MOST_PIXELS:
        raise UserError(
            f"{path.name} claims {pixels:,} pixels{sides}; at most {MOST_PIXELS:,} are taken. "
            "It was not decoded: make it smaller."
        )
    return open_pictures(path)[0][0]


@dataclasses.dataclass(frozen=True)
class Source:
    """A model that can be chosen.

    Attributes:
        title: in the list.
        name: in the zoo; None for a checkpoint.
        path: of a checkpoint; None for a model of the zoo.
    """

    title: str
    name: str | None = None
    path: str | None = None

    @property
    def convolutional(self) -> bool:
        """Whether it is a CNN of the zoo."""
        return self.name is not None and model_class(self.name).__module__.rpartition(".")[2] in ("cnn", "timm_cnn")


def sources(checkpoints: Sequence[str | Path] = (), runs: str | Path | None = None) -> list[Source]:
    """What there is to choose from: checkpoints that are named, the best of every run in a folder, and the zoo.

    Raises:
        UserError: a checkpoint that is not there.
    """
    paths = [Path(path) for path in checkpoints]
    missing = next((path for path in paths if not path.exists()), None)
    if missing is not None:
        raise UserError(f"{missing}: no such checkpoint.")
    if runs is not None and Path(runs).is_dir():
        paths += sorted(Path(runs).glob("*/*/checkpoints/best.ckpt"))
    found = [Source(str(path), path=str(path)) for path in dict.fromkeys(paths)]
    names = [name for task in ("classification", "detection") for name in list_models(task=task)]
    return found + [Source(f"{name} (untrained)", name=name) for name in names]


@functools.lru_cache(maxsize=3)
def open_model(source: Source) -> nn.Module:
    """The model, in evaluation mode; the last few are kept.

    Raises:
        UserError: as for ``load_model``; or a model that does not look at one picture.
    """
    if source.path is not None:
        model = load_model(source.path)
    else:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            model = create_model(str(source.name))
    config: dict[str, Any] = getattr(model, "config", {}) or {}
    if config.get("task") == "sorting":
        raise UserError("A pointer network sorts several images; this page shows what a model sees in one.")
    return model.eval()


@dataclasses.dataclass
class Look:
    """What a model made of a picture.

    Attributes:
        insight: all that can be shown.
        scores: class → probability, or object → confidence, best first.
        notes: in sentences.
    """

    insight: Insight
    scores: dict[str, float]
    notes: list[str]

    @property
    def view(self) -> PictureView:
        """The one picture."""
        return self.insight.pictures[0]

    def layer(self, name: str | None) -> LayerView:
        """A layer by name; the last by default.

        Raises:
            UserError: the model has no such layer, or none.
        """
        layers = {layer.name: layer for layer in self.view.layers}
        if not layers:
            raise UserError(f"{self.insight.name} has no attention layer to show.")
        if name is None:
            return self.view.layers[-1]
        found = layers.get(name, layers.get(name.removesuffix(IMPLIED)))
        if found is None:
            raise UserError(f"{self.insight.name} has no layer {name!r}; there are: {', '.join(layers)}.")
        return found

    @property
    def titles(self) -> list[str]:
        """Names of the layers, those whose maps are implied ones called so."""
        return [layer.name + IMPLIED * layer.implied for layer in self.view.layers]


def look_at(source: Source, picture: Image.Image, name: str = "picture", *, measure: bool = False) -> Look:
    """Shows a picture to a model.

    Args:
        source: which model.
        picture: RGB.
        name: of the picture.
        measure: compare its maps with random ones, which takes some hundred forward passes.

    Raises:
        UserError: as for ``open_model`` and ``attention_maps``.
    """
    model = open_model(source)
    config: dict[str, Any] = model.config  # type: ignore[assignment]
    x, shown = as_seen(picture, config)
    insight = look(model, [x], [shown], [name], Choice(trials=19 if measure else 0, minutes=2))
    view = insight.pictures[0]
    if config.get("task") == "detection":
        scores = {f"{o.label} (query {o.query})": o.score for o in view.detections}
    else:
        scores = _classes(model, x, config)
    notes = [UNTRAINED] if source.path is None else []
    notes += [note for note in dict.fromkeys(insight.notes) if not note.startswith(NOT_MEASURED)]
    if insight.worth is None and (view.summaries or view.detections):
        notes.append(NOT_MEASURED + ("" if measure else f" Tick “{MEASURE}” and look again."))
    return Look(insight, scores, notes)


@torch.no_grad()
def _classes(model: nn.Module, x: Tensor, config: dict[str, Any], most: int = 5) -> dict[str, float]:
    where = next(model.parameters())
    logits = model(x[None].to(where.device, where.dtype))[0].float()
    names = config.get("labels") or [str(i) for i in range(len(logits))]
    best = (logits - logits.logsumexp(0)).exp().topk(min(most, len(logits)))
    return {str(names[i]): p for i, p in zip(best.indices.tolist(), best.values.tolist(), strict=True)}


def map_of(seen: Look, layer: str | None, head: str | None, query: str | None) -> Tensor:
    """(R, C) of one query in one head, or in their mean.

    Args:
        seen: from ``look_at``.
        layer: its name; the last by default.
        head: its number as text; ``MEAN`` by default.
        query: its label; the first by default.

    Raises:
        UserError: there is no such layer, head or query.
    """
    view = seen.layer(layer)
    numbers = [str(number) for number in view.heads]
    if head not in (None, MEAN) and head not in numbers:
        raise UserError(f"{view.name} has no head {head}; there are: {', '.join(numbers)}.")
    if query is not None and query not in view.labels:
        raise UserError(f"{view.name} has no query {query!r}.")
    at = 0 if query is None else view.labels.index(query)
    return view.weights[:, at].mean(0) if head in (None, MEAN) else view.weights[numbers.index(str(head)), at]


def query_at(seen: Look, layer: str | None, x: float, y: float) -> str | None:
    """The label of the query nearest to a point, in shares of the picture; None where queries lie nowhere."""
    view = seen.layer(layer)
    if view.query_grid is None:
        return None
    row, column = y * view.query_grid[0] - 0.5, x * view.query_grid[1] - 0.5
    distances = [
        ((cell[0] - row) ** 2 + (cell[1] - column) ** 2, label)
        for cell, label in zip(view.cells, view.labels, strict=True)
        if cell is not None
    ]
    return min(distances)[1] if distances else None


def enlarged(pixels: Tensor, side: int = SIDE) -> Image.Image:
    """(3, H, W) uint8 as a picture of about that many pixels a side, or as large as it is."""
    picture = Image.fromarray(pixels.permute(1, 2, 0).contiguous().numpy())
    factor = max(1, side // max(picture.size))
    return picture.resize((picture.width * factor, picture.height * factor), Image.Resampling.NEAREST)


def overlaid(pixels: Tensor, m: Tensor, *, stretch: bool = False) -> Image.Image:
    """A picture in grey with a map (R, C) over it; colours as in the figures of ``vision-attn maps``."""
    import matplotlib

    grey = enlarged(pixels).convert("L").convert("RGB")
    m = m.detach().float().cpu()
    m = m - (float(m.min()) if stretch else min(float(m.min()), 0.0))
    strength = m / m.max().clamp_min(1e-12)
    colors = torch.from_numpy(matplotlib.colormaps[HEAT](strength.numpy())[..., :3])
    paint = Image.fromarray((colors * 255).round().byte().numpy())
    cover = Image.fromarray(((0.35 + 0.5 * strength) * 255).round().byte().numpy())
    paint, cover = (part.resize(grey.size, Image.Resampling.NEAREST) for part in (paint, cover))
    return Image.composite(paint, grey, cover)


def with_boxes(seen: Look) -> Image.Image:
    """The picture as the model is given it, with the boxes of a detector."""
    view = seen.view
    if not view.detections:
        return enlarged(view.pixels)
    from vision_attn.detection.draw import draw_detections

    height, width = view.pixels.shape[-2:]
    scale = torch.tensor([width, height, width, height])
    boxes = torch.tensor([o.box for o in view.detections]) * scale
    names, scores = [o.label for o in view.detections], [o.score for o in view.detections]
    return draw_detections(view.pixels, boxes, names, scores, longest_side=SIDE)


def gallery(seen: Look) -> list[tuple[Image.Image, str]]:
    """Maps of the whole model (Grad-CAM, rollout, relevance …), or those of every object found, with titles."""
    view, title = seen.view, seen.insight.title
    found = [(overlaid(view.pixels, m, stretch=True), title(name)) for name, m in view.summaries.items()]
    for o in view.detections:
        found += [
            (overlaid(view.pixels, m), f"{o.label} {o.score:.0%} (query {o.query}): {title(name)}")
            for name, m in o.maps.items()
        ]
    return found
