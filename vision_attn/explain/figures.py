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
from vision_attn.explain.faithfulness import CAUSES, MOVED, RANDOM, RIVAL, Faithfulness, mean_and_half
from vision_attn.explain.views import NOT_MEASURED, Clouds, Detection, Insight, LayerView, PictureView

COLORS = ("#4477AA", "#EE6677", "#228833", "#CCBB44", "#66CCEE", "#AA3377")  # Paul Tol's bright scheme
GREY, BAD, HEAT = "#777777", "#B2182B", "inferno"
BOXES = (COLORS[2], COLORS[1], COLORS[0])  # small, large and wide, large and high
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
        m = m.float().cpu()
        m = m - (float(m.min()) if stretch else min(float(m.min()), 0.0))
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


def all_heads(insight: Insight, picture: PictureView, folder: Path, stem: str, title: str) -> None:
    """Every head of every layer: one figure for the class token or the mean over queries, one for each query asked for.

    Args:
        insight: that the picture belongs to.
        picture: with the layers to show.
        folder, stem: where the figures go, ``<stem>_heads….png``.
        title: above them.
    """
    views = picture.layers
    count = max(len(view.labels) for view in views)
    ends = f"{insight.honesty}\n{CAUSES}"
    if count <= 4:  # queries that were asked for
        for query in range(count):
            labels = {_label(view, query) for view in views}
            # one number is another place in a layer of another grid
            what = labels.pop() if len(labels) == 1 else f"query {query + 1} of those asked for (each row says which)"
            _heads(picture, folder / f"{stem}_heads_{query}.png", query, f"{title}. What {what} looks at\n{ends}")
        return
    token = all(view.labels[0] == "class token" for view in views)
    what = "What the class token looks at" if token else "What queries look at, on average"
    _heads(picture, folder / f"{stem}_heads.png", 0 if token else None, f"{title}. {what}\n{ends}")


def _label(view: LayerView, query: int) -> str:
    return view.labels[min(query, len(view.labels) - 1)]


def _heads(picture: PictureView, path: Path, query: int | None, title: str) -> None:
    """Layers are rows, first at the top; heads are columns."""
    views = picture.layers
    columns = 1 + max(len(view.heads) for view in views)
    aspect = picture.pixels.shape[-2] / picture.pixels.shape[-1]
    lines = fit(title, 22 * columns)
    size = 1.25 * columns + 0.4, (1.25 * aspect + 0.42) * len(views) + 0.4 + 0.15 * (1 + lines.count("\n"))
    differ = query is not None and len({_label(view, query) for view in views}) > 1
    with figure(path, size, len(views), columns) as (drawn, axes):
        for view, line in zip(views, axes, strict=True):
            for axis in line:
                axis.axis("off")
            weights = view.mean if query is None else view.weights[:, min(query, len(view.labels) - 1)]
            implied = " (implied)" if view.implied else ""
            who = f"\n{_label(view, query)}" if query is not None and differ else ""
            overlay(line[0], picture.pixels, weights.mean(0), f"{_short(view.name)}{implied}{who}\nmean of heads")
            for axis, head, m in zip(line[1:], view.heads, weights, strict=False):
                overlay(axis, picture.pixels, m, f"head {head}")
        drawn.suptitle(lines, fontsize=9)


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
            overlay(axis, picture.pixels, m, fit(name), BAD if poor else "black", stretch=True)
        unmeasured = f"\n{NOT_MEASURED}" if insight.worth is None else ""
        drawn.suptitle(fit(f"{title}\n{CAUSES}{unmeasured}", 37 * len(panels)), fontsize=9)


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
                color = BAD if "NO BETTER" in text else "black"
                overlay(line[1 + kinds.index(name)], picture.pixels, m, fit(text), color, stretch=True)
            if insight.field is not None:
                side = f"effective receptive field\n90 % within {insight.field.side(0.9):.0f} px"
                overlay(line[-1], picture.pixels, insight.field.strength.sqrt(), side)
        unmeasured = f"\n{NOT_MEASURED}" if all(insight.worth is None for insight in insights) else ""
        drawn.suptitle(fit(CAUSES + unmeasured, 35 * columns), fontsize=9)


def worth(insight: Insight, path: Path) -> None:
    """Deletion and insertion curves and leads; entropy, distance and diversity of heads by depth."""
    curves, statistics = insight.worth, insight.statistics
    near = any(not numbers.distance.isnan().any() for numbers in statistics.values())
    kinds = [
        *(["deletion", "insertion", "lead"] if curves else []),
        *(["entropy", *(["distance"] if near else []), "diversity"] if statistics else []),
    ]
    if not kinds:
        return
    maps = len(curves.curves) if curves else 0
    with figure(path, (3.3 * len(kinds), max(3.6, 1.2 + 0.55 * maps)), 1, len(kinds)) as (drawn, axes):
        for axis, kind in zip(axes[0], kinds, strict=True):
            if kind in ("deletion", "insertion") and curves is not None:
                _curves(axis, curves, kind)
            elif kind == "lead" and curves is not None:
                _leads(axis, curves)
            else:
                by_depth(axis, statistics, kind)
        measured = "" if curves else f" {NOT_MEASURED}"
        drawn.suptitle(f"{insight.name}: what its maps are worth.{measured} {CAUSES}", fontsize=9)


def _curves(axis: Any, worth: Faithfulness, kind: str) -> None:
    """Means over images, with their 95 % intervals; for a single image that of random maps alone."""

    def draw(values: Tensor, label: str, **style: Any) -> None:
        mean, half = mean_and_half(values)
        axis.plot(worth.shares, mean, label=label, **{"lw": 1.5, **style})
        if len(values) > 1:
            axis.fill_between(worth.shares, mean - half, mean + half, color=style["color"], alpha=0.15, lw=0)

    for i, (name, curve) in enumerate(worth.curves.items()):
        style = {"color": GREY, "ls": ":"} if name == RIVAL else {"color": COLORS[i % len(COLORS)]}
        draw(getattr(curve, kind), name, **style)
    draw(getattr(worth.random, kind), RANDOM, color="black", ls="--", lw=1.2)
    images = len(worth.random.deletion)
    if images == 1:
        low, high = torch.quantile(getattr(worth.drawn, kind)[:, 0], torch.tensor([0.025, 0.975]), dim=0)
        axis.fill_between(worth.shares, low, high, color="black", alpha=0.12, lw=0)
    band = "95 % intervals over images" if images > 1 else "band: random maps"
    count = f"({images} image{'s' * (images > 1)}; {band})"
    axis.set(
        xlabel=f"share of the image, most important first\n{count}", ylabel="probability of the class", ylim=(0, 1)
    )
    axis.set_title("deletion: lower is better" if kind == "deletion" else "insertion: higher is better")
    if kind == "deletion":
        axis.legend(fontsize=7)


def _leads(axis: Any, worth: Faithfulness) -> None:
    """Each map's lead over random maps, over itself moved, and over gradient × input."""
    markers = {RANDOM: ("o", 0.22), MOVED: ("s", 0.0), RIVAL: ("^", -0.22)}
    for i, name in enumerate(worth.curves):
        for over, (marker, up) in markers.items():
            if name == over:
                continue
            mean, low, high = worth.lead(name, over)
            color = COLORS[i % len(COLORS)] if name != RIVAL else GREY
            error = None if low != low else [[max(mean - low, 0)], [max(high - mean, 0)]]
            inside = "white" if over == RIVAL else color
            axis.errorbar(mean, up - i, xerr=error, fmt=marker, color=color, capsize=2, ms=4, mfc=inside)
    axis.axvline(0, color="black", ls="--", lw=1)
    axis.set_yticks([-i for i in range(len(worth.curves))], [fit(name, 16) for name in worth.curves])
    for over, (marker, _) in markers.items():
        axis.plot([], [], marker, color=GREY, ms=4, mfc="white" if over == RIVAL else GREY, label=f"over {over}")
    axis.locator_params(axis="x", nbins=4)
    axis.legend(fontsize=6.5, loc="upper center", bbox_to_anchor=(0.5, -0.16), ncol=1)
    axis.set(xlabel="insertion − deletion area", title="lead, with 95 % interval")


LABELS = {
    "entropy": ("entropy of a row, nats", "how widely heads look"),
    "distance": ("mean attention distance, pixels", "how far heads look"),
    "diversity": ("Jensen–Shannon divergence, bits", "how different the heads of a layer are"),
}


def by_depth(axis: Any, statistics: Mapping[str, HeadStatistics], kind: str) -> None:
    """One point per head against the depth of its layer, and their mean."""
    names = [name for name in statistics if kind != "distance" or not statistics[name].distance.isnan().any()]
    labels = [_short(name) + (" (implied)" if statistics[name].implied else "") for name in names]
    for depth, name in enumerate(names):
        numbers = statistics[name]
        values = torch.tensor([numbers.mean_diversity]) if kind == "diversity" else getattr(numbers, kind)
        axis.plot([depth] * len(values), values, "o", color=COLORS[0], ms=3, alpha=0.55, mew=0)
        axis.plot(depth, float(values.mean()), "_", color=COLORS[1], ms=12, mew=2)
        if kind == "entropy":
            axis.plot(depth, numbers.uniform, "_", color=GREY, ms=12, mew=1)
    axis.set_xticks(range(len(names)), labels, rotation=90, fontsize=6)
    axis.set(ylim=(0, None))
    axis.set_ylabel(LABELS[kind][0])
    more = "\ngrey: looking everywhere alike" if kind == "entropy" else ""
    axis.set_title(LABELS[kind][1] + more)


def detections(insight: Insight, picture: PictureView, path: Path, title: str) -> None:
    """A row for every detected object: its box, what was looked at for it, and where its query finds objects."""
    clouds = insight.clouds
    rows = len(picture.detections)
    columns = 1 + max(len(o.maps) for o in picture.detections) + (clouds is not None)
    aspect = picture.pixels.shape[-2] / picture.pixels.shape[-1]
    with figure(path, (1.9 * columns, (1.9 * aspect + 0.6) * rows + 0.6), rows, columns) as (drawn, axes):
        for o, line in zip(picture.detections, axes, strict=True):
            for axis in line:
                axis.axis("off")
            for axis, (name, m) in zip(line, {"": None, **o.maps}.items(), strict=False):
                text = insight.title(name) if name else f"{o.label} {o.score:.0%}, query {o.query}"
                overlay(axis, picture.pixels, m, fit(text), BAD if "NO BETTER" in text else "black")
                _box(axis, o, picture.pixels)
            if clouds is not None:
                _cloud(line[-1], clouds, o.query, aspect)
        colours = f"\n{CLOUDS}" if clouds is not None else ""
        unmeasured = f"\n{NOT_MEASURED}" if insight.worth is None else ""
        drawn.suptitle(fit(f"{title}\n{CAUSES}{unmeasured}{colours}", 33 * columns), fontsize=9)


def _box(axis: Any, o: Detection, pixels: Tensor) -> None:
    height, width = pixels.shape[-2:]
    left, top, right, bottom = o.box[0] * width, o.box[1] * height, o.box[2] * width, o.box[3] * height
    axis.plot([left, right, right, left, left], [top, top, bottom, bottom, top], color="#00E5FF", lw=1.3)


CLOUDS = "Centres of a query's boxes: green small, red large and wide, blue large and high."


def _cloud(axis: Any, clouds: Clouds, query: int, aspect: float = 1.0) -> None:
    """The middles of the boxes that one query gives over a set."""
    boxes = clouds.boxes[query]
    axis.scatter(boxes[:, 0], boxes[:, 1], s=3, c=[BOXES[k] for k in clouds.kinds(query)], alpha=0.7, linewidths=0)
    axis.set(xlim=(0, 1), ylim=(1, 0), aspect=aspect, xticks=[], yticks=[])
    axis.set_title(f"query {query}: detected in\n{int(clouds.found[query])} of {len(boxes)} images", fontsize=7)
    axis.axis("on")
    axis.spines[:].set_visible(True)


def query_clouds(clouds: Clouds, path: Path, title: str, most: int = 20) -> None:
    """Centres of the boxes of the queries that detect most over a set of images (Carion et al. 2020, figure 7).

    Args:
        clouds: of a detector.
        path: the PNG to write; none where no query detected anything.
        title: above the panels.
        most: queries shown.
    """
    shown = clouds.most_used(most)
    if not shown:
        return
    columns = min(10, len(shown))
    rows = -(-len(shown) // columns)
    used = int((clouds.found > 0).sum())
    which = f"{len(shown)} of the {used} queries that detected something, of {len(clouds.found)}"
    with figure(path, (max(1.25 * columns, 4), 1.5 * rows + 1.1), rows, columns) as (drawn, axes):
        for axis in axes.flatten():
            axis.axis("off")
        for query, axis in zip(shown, axes.flatten(), strict=False):
            _cloud(axis, clouds, query)
        drawn.suptitle(fit(f"{title}\n{which}. {CLOUDS}\n{CAUSES}", max(22 * columns, 70)), fontsize=9)
