"""What is shown of a model and some pictures: data for figures and page.

Legend: H heads, Q queries, R × C cells of a grid.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager

import torch
from torch import Tensor, nn

from vision_attn.errors import UserError
from vision_attn.explain.distance import HeadStatistics
from vision_attn.explain.faithfulness import RIVAL, Faithfulness
from vision_attn.explain.maps import Recording, recording
from vision_attn.explain.planes import Plane
from vision_attn.explain.receptive_field import ReceptiveField

QUERY_SIDE, KEY_SIDE = 16, 32  # larger grids are thinned out and pooled
FLOWS = ("auto", "yes", "no")
NOT_MEASURED = "These maps were not compared with random ones, so nobody knows what they are worth."


@dataclasses.dataclass
class LayerView:
    """The map of one attention layer for one picture, ready to be shown.

    Attributes:
        name: of the layer.
        implied: whether the map is one that the result implies.
        weights: (H, Q, R, C) over the image.
        mean: (H, R, C), the mean over all queries, also those that are not shown.
        elsewhere: (H, Q) weight on tokens that do not lie on the image.
        labels: of the queries.
        cells: (row, column) of each query; None for those that lie nowhere.
        query_grid: (rows, columns) of the queries' grid; None where they lie nowhere.
        heads: their numbers.
    """

    name: str
    implied: bool
    weights: Tensor
    mean: Tensor
    elsewhere: Tensor
    labels: list[str]
    cells: list[tuple[int, int] | None]
    query_grid: tuple[int, int] | None
    heads: list[int]


@dataclasses.dataclass
class Detection:
    """One detected object and what was looked at for it.

    Attributes:
        label, index, score, query: class, its number, confidence, object query.
        box: left, top, right, bottom in shares of the picture.
        maps: title → (R, C).
    """

    label: str
    index: int
    score: float
    query: int
    box: tuple[float, float, float, float]
    maps: dict[str, Tensor]


@dataclasses.dataclass
class PictureView:
    """One picture through one model's eyes.

    Attributes:
        source: file.
        pixels: (3, H, W) uint8 as the model sees it.
        answer: in words.
        layers: maps of attention layers.
        summaries: title → (R, C), maps of the whole model.
        detections: of a detector.
    """

    source: str
    pixels: Tensor
    answer: str
    layers: list[LayerView]
    summaries: dict[str, Tensor]
    detections: list[Detection]


@dataclasses.dataclass
class Clouds:
    """Where a detector's queries look for objects: the boxes that they give over a set of images.

    Attributes:
        boxes: (N, n, 4) of each query in each image, centre x, y, width, height as shares.
        found: (N,) in how many of the images the query detected something.
    """

    boxes: Tensor
    found: Tensor

    def most_used(self, most: int) -> list[int]:
        """Queries that detected something, those that did so in most images first."""
        order = self.found.argsort(descending=True, stable=True)[:most].tolist()
        return [query for query in order if self.found[query] > 0]

    def kinds(self, query: int) -> Tensor:
        """(n,) of each box: 0 small, 1 large and wide, 2 large and high (Carion et al. 2020, figure 7)."""
        boxes = self.boxes[query]
        wide = torch.where(boxes[:, 2] > boxes[:, 3], 1, 2)
        return torch.where(boxes[:, 2] * boxes[:, 3] < 0.1, 0, wide)


@dataclasses.dataclass
class Insight:
    """One model.

    Attributes:
        name: of the model.
        pictures: what is shown.
        statistics: layer name → numbers about its heads.
        worth: deletion and insertion curves; None where there is no map of the whole model.
        field: effective receptive field; None where features do not lie on the image.
        notes: what could not be shown, and why.
        clouds: of a detector, over a set.
    """

    name: str
    pictures: list[PictureView]
    statistics: dict[str, HeadStatistics]
    worth: Faithfulness | None
    field: ReceptiveField | None
    notes: list[str]
    clouds: Clouds | None = None

    def title(self, summary: str) -> str:
        """The name of a map of the whole model, and what it is worth."""
        if self.worth is None or summary not in self.worth.curves:
            return summary
        return f"{summary}: {self.worth.verdict(summary)}"

    @property
    def honesty(self) -> str:
        """What is known of the worth of single layers and heads, for the titles of figures that show these."""
        measured = [name for name in self.worth.curves if name != RIVAL] if self.worth is not None else []
        if not measured:
            return NOT_MEASURED
        return f"{self.title(measured[0])}. Single layers and heads were not compared with random maps."


def _nothing(line: str) -> None:
    """Says nothing."""


@dataclasses.dataclass(frozen=True)
class Choice:
    """What to look at.

    Attributes:
        layers, heads, queries: as for ``attention_maps``.
        trials: random maps that every map is compared with; 0 for no comparison.
        steps: of deletion and insertion.
        threshold: detections must be surer.
        most: detections shown of a picture.
        flow: attention flow, which may take minutes: ``auto`` (where it is quick), ``yes`` or ``no``.
        minutes: that comparing maps may take; where it would take longer, curves get coarser and maps are left out.
        tell: is given a line before something takes long.
    """

    layers: str | Sequence[str] = "all"
    heads: Sequence[int] | None = None
    queries: Sequence[int] | None = None
    trials: int = 19
    steps: int = 8
    threshold: float = 0.3
    most: int = 8
    flow: str = "auto"
    minutes: float = 10.0
    tell: Callable[[str], None] = _nothing


def run_one(model: nn.Module, image: Tensor, choice: Choice) -> AbstractContextManager[Recording]:
    """A recorded forward pass of one image (C, H, W)."""
    return recording(model, image[None], layers=choice.layers, heads=choice.heads, queries=choice.queries)


def layer_views(run: Recording, choice: Choice) -> list[LayerView]:
    """Every layer whose keys lie on the image; one map at a time is held whole."""
    return [view for name in run.names() if (view := _layer(run, name, choice)) is not None]


def _layer(run: Recording, name: str, choice: Choice) -> LayerView | None:
    """One layer for the page; None where its keys do not lie on the image."""
    queries, keys = run.planes(name)
    if keys is None:
        return None
    call = run.recorder.calls_of(name)[0]
    weights = run.weights(name)[0]  # (H, N, M)
    asked = None if call.rows is None else call.rows.tolist()
    alone = all(one.whole for calls in run.recorder.calls.values() for one in calls)  # else they keep all
    if call.whole and alone and choice.queries is not None:
        there = sum(one.tokens[0] for one in run.recorder.calls_of(name))
        asked = [query % there for query in choice.queries]
    picked, labels, cells = _queries(name, list(range(weights.shape[1])) if asked is None else asked, queries)
    mean = _pooled(keys.to_picture(weights.mean(1)))
    weights = weights[:, picked]
    shown = _pooled(keys.to_picture(weights))  # (H, Q, R, C)
    elsewhere = weights[..., : keys.prefix].sum(-1)
    heads = list(range(weights.shape[0]))
    if choice.heads is not None and (alone or not call.whole):
        heads = list(choice.heads)
    grid = None if queries is None else queries.grid
    return LayerView(name, run.recorder.implied(name), shown, mean, elsewhere, labels, cells, grid, heads)


def _queries(
    name: str, rows: list[int], plane: Plane | None
) -> tuple[list[int], list[str], list[tuple[int, int] | None]]:
    """Which of the rows are shown, what they are called and where they lie.

    Raises:
        UserError: a row that was asked for fills a window up, and is no patch.
    """
    if plane is None:
        return list(range(len(rows))), [f"query {row}" for row in rows], [None] * len(rows)
    where = {int(token): place for place, token in enumerate(plane.places().flatten().tolist())}
    whole = len(rows) == plane.length
    keep = set(_thinned(plane.grid)) if whole else None
    picked: list[int] = []
    labels: list[str] = []
    cells: list[tuple[int, int] | None] = []
    for index, row in enumerate(rows):
        place = where.get(row)
        if place is None and row < plane.prefix:
            picked.append(index)
            labels.append("class token" if row == 0 else f"token {row}")
            cells.append(None)
        elif place is None and not whole:
            sides = plane.padding.sides(plane.grid) if plane.padding is not None else plane.grid
            raise UserError(
                f"query {row} of {name} is no patch but padding: its {plane.grid[0]} × {plane.grid[1]} patches are "
                f"filled up to {sides[0]} × {sides[1]}, on which queries are counted.\nChoose others, or name layers."
            )
        elif place is not None and (keep is None or place in keep):
            cell = place // plane.grid[1], place % plane.grid[1]
            picked.append(index)
            labels.append(f"row {cell[0]}, column {cell[1]}")
            cells.append(cell)
    return picked, labels, cells


def _thinned(grid: tuple[int, int]) -> list[int]:
    """Places of a large grid, evenly spread."""
    chosen = [sorted({round(x) for x in torch.linspace(0, side - 1, min(side, QUERY_SIDE)).tolist()}) for side in grid]
    return [row * grid[1] + column for row in chosen[0] for column in chosen[1]]


def _pooled(weights: Tensor) -> Tensor:
    """Neighbouring keys of a large grid summed up, shared where they lie between two; sums stay as they are."""
    for dim in (-2, -1):
        if weights.shape[dim] > KEY_SIDE:
            weights = (weights.movedim(dim, -1) @ _parts(weights.shape[dim], KEY_SIDE).to(weights)).movedim(-1, dim)
    return weights


def _parts(many: int, few: int) -> Tensor:
    """(many, few): which share of each of many equal parts of a line lies in each of few; rows sum to 1."""
    fine, coarse = torch.arange(many + 1).double() / many, torch.arange(few + 1).double() / few
    low = torch.maximum(fine[:-1, None], coarse[None, :-1])
    high = torch.minimum(fine[1:, None], coarse[None, 1:])
    return (high - low).clamp_min(0) * many
