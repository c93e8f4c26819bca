"""Figures of what models look at. Matplotlib is imported when something is drawn, and never opens a window."""

from __future__ import annotations

import contextlib
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vision_attn.atomic import atomic_write
from vision_attn.explain.distance import HeadStatistics
from vision_attn.explain.faithfulness import CAUSES, RIVAL, Faithfulness
from vision_attn.explain.views import Detection, Insight, PictureView

COLORS = ("#4477AA", "#EE6677", "#228833", "#CCBB44", "#66CCEE", "#AA3377")  # Paul Tol's bright scheme
GREY, HEAT = "#777777", "inferno"
STYLE: Any = {
    "figure.dpi": 140,
    "savefig.dpi": 140,
    "font.size": 8.5,
    "axes.titlesize": 8.5,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "legend.frameon": False,
}


@contextlib.contextmanager
def figure(path: Path, size: tuple[float, float], rows: int = 1, columns: int = 1) -> Iterator[tuple[Any, Any]]:
    """A figure and its axes (rows, columns), saved when the block ends."""
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    with matplotlib.rc_context(STYLE):
        drawn = Figure(figsize=size, layout="constrained")
        FigureCanvasAgg(drawn)
        yield drawn, drawn.subplots(rows, columns, squeeze=False)
        atomic_write(path, lambda temporary: drawn.savefig(temporary, format="png"))


def overlay(
    axis: Any, pixels: Tensor, m: Tensor | None, title: str = "", color: str = "black", *, stretch: bool = False
) -> None:
    """A picture (3, H, W) uint8 in grey with a map (R, C) over it; in colour without a map.

    Colours go from 0 to the largest value of the map, or, with ``stretch``, from its smallest.
    """
    height, width = pixels.shape[-2:]
    image = pixels.permute(1, 2, 0).numpy()
    if m is None:
        axis.imshow(image, extent=(0, width, height, 0), interpolation="nearest")
    else:
        grey = pixels.float().mean(0).numpy()
        axis.imshow(grey, cmap="gray", vmin=0, vmax=255, extent=(0, width, height, 0), interpolation="nearest")
        m = m.float() - (float(m.min()) if stretch else min(float(m.min()), 0.0))
        strength = m / m.max().clamp_min(1e-12)
        axis.imshow(
            strength,
            cmap=HEAT,
            vmin=0,
            vmax=1,
            alpha=(0.35 + 0.5 * strength).numpy(),
            extent=(0, width, height, 0),
            interpolation="nearest",
        )
    axis.set(xlim=(0, width), ylim=(height, 0))
    axis.set_title(title, color=color, fontsize=7.5)
    axis.axis("off")


def fit(text: str, width: int = 26) -> str:
    """Text in lines of so many letters."""
    return "\n".join(line for part in text.split("\n") for line in textwrap.wrap(part, width))


def all_heads(picture: PictureView, folder: Path, stem: str, title: str) -> None:
    """Every head of every layer: one figure for the class token or the mean over queries, one for each query asked for.

    Args:
        picture: with the layers to show.
        folder, stem: where the figures go, ``<stem>_heads….png``.
        title: above them.
    """
    first = picture.layers[0]
    if len(first.labels) <= 4:  # queries that were asked for
        for query, label in enumerate(first.labels):
            _heads(picture, folder / f"{stem}_heads_{query}.png", query, f"{title}. What {label} looks at")
        return
    token = first.labels[0] == "class token"
    what = "What the class token looks at" if token else "What queries look at, on average"
    _heads(picture, folder / f"{stem}_heads.png", 0 if token else None, f"{title}. {what}")


def _heads(picture: PictureView, path: Path, query: int | None, title: str) -> None:
    """Layers are rows, first at the top; heads are columns."""
    views = picture.layers
    columns = 1 + max(len(view.heads) for view in views)
    aspect = picture.pixels.shape[-2] / picture.pixels.shape[-1]
    size = 1.25 * columns + 0.4, (1.25 * aspect + 0.3) * len(views) + 0.8
    with figure(path, size, len(views), columns) as (drawn, axes):
        for view, line in zip(views, axes, strict=True):
            for axis in line:
                axis.axis("off")
            weights = view.mean if query is None else view.weights[:, min(query, view.weights.shape[1] - 1)]
            implied = " (implied)" if view.implied else ""
            overlay(line[0], picture.pixels, weights.mean(0), f"{_short(view.name)}{implied}\nmean of heads")
            for axis, head, m in zip(line[1:], view.heads, weights, strict=False):
                overlay(axis, picture.pixels, m, f"head {head}")
        drawn.suptitle(fit(f"{title}\n{CAUSES}", 22 * columns), fontsize=9)


def _short(name: str) -> str:
    return name if len(name) <= 22 else "…" + name[-21:]


def summary(insight: Insight, picture: PictureView, path: Path, title: str) -> None:
    """The picture, the maps of the whole model with what they are worth, and the effective receptive field."""
    panels: list[tuple[str, Tensor | None]] = [(f"as the model sees it\n{picture.answer}", None)]
    panels += [(insight.title(name), m) for name, m in picture.summaries.items()]
    if insight.field is not None:
        panels.append(("effective receptive field\nof the feature in the middle", insight.field.strength.sqrt()))
    aspect = picture.pixels.shape[-2] / picture.pixels.shape[-1]
    with figure(path, (2.1 * len(panels), 2.1 * aspect + 1.3), 1, len(panels)) as (drawn, axes):
        for axis, (name, m) in zip(axes[0], panels, strict=True):
            poor = "NO BETTER" in name
            overlay(axis, picture.pixels, m, fit(name), "#B2182B" if poor else "black", stretch=True)
        drawn.suptitle(f"{title}\n{CAUSES}", fontsize=9)


def compare(insights: Sequence[Insight], index: int, path: Path) -> None:
    """One picture through several models, a row each; maps of one kind stand in one column."""
    shown = [(insight, insight.pictures[index]) for insight in insights]
    kinds = list(dict.fromkeys(name for _, picture in reversed(shown) for name in picture.summaries))
    columns = 2 + len(kinds)
    aspect = shown[0][1].pixels.shape[-2] / shown[0][1].pixels.shape[-1]
    with figure(path, (2.0 * columns, (2.0 * aspect + 0.75) * len(shown) + 0.5), len(shown), columns) as (drawn, axes):
        for (insight, picture), line in zip(shown, axes, strict=True):
            for axis in line:
                axis.axis("off")
            overlay(line[0], picture.pixels, None, f"{insight.name}\n{picture.answer}")
            for name, m in picture.summaries.items():
                text = insight.title(name)
                color = "#B2182B" if "NO BETTER" in text else "black"
                overlay(line[1 + kinds.index(name)], picture.pixels, m, fit(text), color, stretch=True)
            if insight.field is not None:
                side = f"effective receptive field\n90 % within {insight.field.side(0.9):.0f} px"
                overlay(line[-1], picture.pixels, insight.field.strength.sqrt(), side)
        drawn.suptitle(CAUSES, fontsize=9)


def worth(insight: Insight, path: Path) -> None:
    """Deletion and insertion curves; entropy, distance and diversity of heads by depth."""
    curves, statistics = insight.worth, insight.statistics
    kinds = [
        *(["deletion", "insertion", "lead"] if curves else []),
        *(["entropy", "distance", "diversity"] if statistics else []),
    ]
    if not kinds:
        return
    with figure(path, (3.3 * len(kinds), 3.6), 1, len(kinds)) as (drawn, axes):
        for axis, kind in zip(axes[0], kinds, strict=True):
            if kind in ("deletion", "insertion") and curves is not None:
                _curves(axis, curves, kind)
            elif kind == "lead" and curves is not None:
                _leads(axis, curves)
            else:
                by_depth(axis, statistics, kind)
        drawn.suptitle(f"{insight.name}: what its maps are worth. {CAUSES}", fontsize=9)


def _curves(axis: Any, worth: Faithfulness, kind: str) -> None:
    for i, (name, curve) in enumerate(worth.curves.items()):
        style = {"color": GREY, "ls": ":"} if name == RIVAL else {"color": COLORS[i % len(COLORS)]}
        axis.plot(worth.shares, getattr(curve, kind).mean(0), lw=1.5, label=name, **style)
    axis.plot(worth.shares, getattr(worth.random, kind).mean(0), color="black", ls="--", lw=1.2, label="random maps")
    images = len(worth.random.deletion)
    axis.set(xlabel=f"share of the image, most important first\n({images} image{'s' * (images > 1)})", ylim=(0, 1))
    axis.set(ylabel="probability of the class")
    axis.set_title("deletion: lower is better" if kind == "deletion" else "insertion: higher is better")
    if kind == "deletion":
        axis.legend(fontsize=7)


def _leads(axis: Any, worth: Faithfulness) -> None:
    for i, name in enumerate(worth.curves):
        mean, low, high = worth.lead(name)
        color = COLORS[i % len(COLORS)] if name != RIVAL else GREY
        axis.errorbar(
            mean, -i, xerr=[[max(mean - low, 0)], [max(high - mean, 0)]], fmt="o", color=color, capsize=3, ms=4
        )
    axis.axvline(0, color="black", ls="--", lw=1)
    axis.set_yticks([-i for i in range(len(worth.curves))], [fit(name, 16) for name in worth.curves])
    axis.set(xlabel="insertion − deletion area,\nlead over random maps, 95 % interval", title="lead over random maps")


LABELS = {
    "entropy": ("entropy of a row, nats", "how widely heads look"),
    "distance": ("mean attention distance, pixels", "how far heads look"),
    "diversity": ("Jensen–Shannon divergence, bits", "how different the heads of a layer are"),
}


def by_depth(axis: Any, statistics: Mapping[str, HeadStatistics], kind: str) -> None:
    """One point per head against the depth of its layer, and their mean."""
    names = [name for name in statistics if kind != "distance" or not statistics[name].distance.isnan().any()]
    for depth, name in enumerate(names):
        numbers = statistics[name]
        values = torch.tensor([numbers.mean_diversity]) if kind == "diversity" else getattr(numbers, kind)
        axis.plot([depth] * len(values), values, "o", color=COLORS[0], ms=3, alpha=0.55, mew=0)
        axis.plot(depth, float(values.mean()), "_", color=COLORS[1], ms=12, mew=2)
        if kind == "entropy":
            axis.plot(depth, numbers.uniform, "_", color=GREY, ms=12, mew=1)
    axis.set_xticks(range(len(names)), [_short(name) for name in names], rotation=90, fontsize=6)
    axis.set(ylim=(0, None))
    axis.set_ylabel(LABELS[kind][0])
    more = "\ngrey: looking everywhere alike" if kind == "entropy" else ""
    axis.set_title(LABELS[kind][1] + more)


def detections(insight: Insight, picture: PictureView, path: Path, title: str) -> None:
    """A row for every detected object: its box, and what was looked at for it."""
    rows = len(picture.detections)
    columns = 1 + max(len(o.maps) for o in picture.detections)
    aspect = picture.pixels.shape[-2] / picture.pixels.shape[-1]
    with figure(path, (1.9 * columns, (1.9 * aspect + 0.6) * rows + 0.6), rows, columns) as (drawn, axes):
        for o, line in zip(picture.detections, axes, strict=True):
            for axis, (name, m) in zip(line, {"": None, **o.maps}.items(), strict=False):
                text = insight.title(name) if name else f"{o.label} {o.score:.0%}, query {o.query}"
                overlay(axis, picture.pixels, m, fit(text), "#B2182B" if "NO BETTER" in text else "black")
                _box(axis, o, picture.pixels)
        drawn.suptitle(f"{title}\n{CAUSES}", fontsize=9)


def _box(axis: Any, o: Detection, pixels: Tensor) -> None:
    height, width = pixels.shape[-2:]
    left, top, right, bottom = o.box[0] * width, o.box[1] * height, o.box[2] * width, o.box[3] * height
    axis.plot([left, right, right, left, left], [top, top, bottom, bottom, top], color="#00E5FF", lw=1.3)


def query_clouds(boxes: Tensor, path: Path, title: str, most: int = 20) -> None:
    """Centres of the boxes that each query gives over a set of images (Carion et al. 2020, figure 7).

    Args:
        boxes: (N, n, 4) centre x, y, width, height as shares of the image.
        path: the PNG to write.
        title: above the panels.
        most: queries shown.
    """
    shown = boxes[:most]
    columns = min(10, len(shown))
    rows = -(-len(shown) // columns)
    with figure(path, (1.25 * columns, 1.35 * rows + 0.8), rows, columns) as (drawn, axes):
        for axis in axes.flatten():
            axis.axis("off")
        for query, (axis, one) in enumerate(zip(axes.flatten(), shown, strict=False)):
            area, wide = one[:, 2] * one[:, 3], one[:, 2] > one[:, 3]
            color = torch.where(area < 0.1, 0, torch.where(wide, 1, 2)).tolist()
            palette = [(COLORS[2], COLORS[1], COLORS[0])[c] for c in color]
            axis.scatter(one[:, 0], one[:, 1], s=3, c=palette, alpha=0.7, linewidths=0)
            axis.set(xlim=(0, 1), ylim=(1, 0), aspect="equal", xticks=[], yticks=[])
            axis.set_title(f"query {query}", fontsize=7)
            axis.axis("on")
            axis.spines[:].set_visible(True)
        drawn.suptitle(f"{title}\ngreen: small boxes, red: large and wide, blue: large and high", fontsize=9)
