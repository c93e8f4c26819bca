"""How figures of a report are drawn and kept: small panels, as SVG for the page and as PNG beside it."""

from __future__ import annotations

import base64
import io
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from vision_attn.atomic import atomic_write
from vision_attn.contrast.statistics import Estimate
from vision_attn.training.pictures import STYLE

COLORS = ("#2B6CB0", "#D1495B", "#2E8B57", "#B8860B", "#7B3FA0", "#4A5568")
MARKERS = ("o", "s", "^", "D", "v", "P")
_STYLE: Any = {
    **STYLE,
    "svg.fonttype": "none",
    "font.family": "sans-serif",
    "axes.edgecolor": "#9AA5B1",
    "axes.labelcolor": "#334155",
    "xtick.color": "#475569",
    "ytick.color": "#475569",
    "legend.fontsize": 8,
    "lines.solid_capstyle": "round",
}
_SIZE = (3.9, 2.9)  # inches; small enough that the text stays readable on a phone


@dataclass(frozen=True)
class Panel:
    """One drawn figure.

    Attributes:
        name: of its PNG in ``figures/``, without the ending.
        title: above it.
        alt: what it shows, for those who cannot see it.
        source: the columns and seeds it is drawn from.
        svg: the drawing.
        png: the same as pixels.
    """

    name: str
    title: str
    alt: str
    source: str
    svg: bytes
    png: bytes

    @property
    def data_uri(self) -> str:
        """The drawing as an address that needs no file."""
        return f"data:image/svg+xml;base64,{base64.b64encode(self.svg).decode()}"


@dataclass(frozen=True)
class Sketch:
    """A panel that is still to be drawn: what :class:`Panel` says of it, and a function that fills its axes."""

    name: str
    title: str
    alt: str
    source: str
    paint: Callable[[Any], None]


def draw(sketches: Sequence[Sketch], stamp: Mapping[str, str], *, share: bool = True) -> list[Panel]:
    """Draw panels as SVG and PNG; both carry the study's hashes.

    Args:
        sketches: what to draw.
        stamp: configuration hash, data hash and version.
        share: give all of them the same vertical axis, so that they compare at a glance.
    """
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    panels = []
    with matplotlib.rc_context(_STYLE):
        figures = []
        for sketch in sketches:
            figure = Figure(figsize=_SIZE, layout="constrained")
            FigureCanvasAgg(figure)
            sketch.paint(figure.subplots())
            figures.append(figure)
        if share and len(figures) > 1:
            low, high = zip(*(figure.axes[0].get_ylim() for figure in figures), strict=True)
            for figure in figures:
                figure.axes[0].set_ylim(min(low), max(high))
        for sketch, figure in zip(sketches, figures, strict=True):
            panels.append(_keep(sketch, figure, stamp))
    return panels


def _keep(sketch: Sketch, figure: Any, stamp: Mapping[str, str]) -> Panel:
    import matplotlib

    svg, png = io.BytesIO(), io.BytesIO()
    about = f"{sketch.source}; " + "; ".join(f"{key} {value}" for key, value in stamp.items())
    with matplotlib.rc_context({"svg.hashsalt": sketch.name}):
        # no date: the same study gives the same bytes
        figure.savefig(svg, format="svg", metadata={"Date": None, "Title": sketch.title, "Description": about})
    figure.suptitle(sketch.title, fontsize=10)
    figure.savefig(png, format="png", metadata={"Title": sketch.title, "Source": sketch.source, **stamp})
    return Panel(sketch.name, sketch.title, sketch.alt, sketch.source, svg.getvalue(), png.getvalue())


def write_panels(panels: Iterable[Panel], folder: Path) -> None:
    """One PNG each."""
    for panel in panels:
        atomic_write(folder / f"{panel.name}.png", partial(Path.write_bytes, data=panel.png))


def look_of(role: int) -> tuple[str, str]:
    """Colour and marker of a model by its place in the configuration."""
    return COLORS[role % len(COLORS)], MARKERS[role % len(MARKERS)]


def series(
    axis: Any, points: Sequence[tuple[float, Sequence[float], Estimate]], label: str, role: int, line: bool = True
) -> None:
    """Seeds as small dots, means as markers, intervals as bars.

    Args:
        axis: matplotlib's.
        points: x, the seeds' values there, their estimate.
        label: the model's name.
        role: its place in the configuration.
        line: whether means are joined.
    """
    color, marker = look_of(role)
    for x, values, estimate in points:
        axis.plot([x] * len(values), values, ".", color=color, ms=3, alpha=0.45)
        if estimate.bounded:
            axis.plot([x, x], [estimate.low, estimate.high], color=color, lw=1.1, alpha=0.8)
    means = [(x, estimate.mean) for x, _, estimate in points if estimate.mean is not None]
    if means:
        style = {"ls": "-" if line else "none", "marker": marker, "ms": 4.5, "lw": 1.4, "mec": "white", "mew": 0.6}
        axis.plot(*zip(*means, strict=True), color=color, label=label, **style)


def dodge(x: float, role: int, models: int) -> float:
    """``x`` moved a little on a logarithmic axis, so that the models stand side by side."""
    return x * 1.035 ** (role - (models - 1) / 2)


def percent_axis(axis: Any) -> None:
    """Shares on the vertical axis as per cent."""
    axis.yaxis.set_major_formatter(lambda x, _: f"{100 * x:.6g} %".replace("-", "−"))


def percent_log_axis(axis: Any) -> None:
    """The same on a logarithmic axis."""
    from matplotlib.ticker import LogLocator, NullFormatter

    axis.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axis.yaxis.set_major_formatter(lambda x, _: f"{100 * x:.6g} %")
    axis.yaxis.set_minor_formatter(NullFormatter())


def depths(n: int) -> list[float]:
    """Places of ``n`` layers between 0 (first) and 1 (last)."""
    return [0.5] if n == 1 else [i / (n - 1) for i in range(n)]


def seed_words(seeds: Mapping[tuple[str, Any], Sequence[int]]) -> str:
    """``seeds 0–4 (63, 126), 0, 2 (vit at 314), 0–2 (resnet at 314)`` in the shortest honest form.

    Args:
        seeds: (model, place, e.g. the number of images) -> the seeds of the trainings that ended.
    """
    places: dict[Any, dict[str, str]] = {}
    for (model, place), found in seeds.items():
        places.setdefault(place, {})[model] = _span(found)
    groups: dict[str, list[str]] = {}
    for place, spans in places.items():
        name = f"{place:,}" if isinstance(place, int) else str(place)
        if len(set(spans.values())) == 1:
            groups.setdefault(next(iter(spans.values())), []).append(name)
            continue
        for model, span in spans.items():
            groups.setdefault(span, []).append(f"{model} at {name}" if name else model)
    if len(groups) == 1:
        return f"seeds {next(iter(groups))}"
    return "seeds " + ", ".join(f"{span} ({', '.join(places)})" for span, places in groups.items())


def _span(seeds: Sequence[int]) -> str:
    found = sorted(set(seeds))
    if not found:
        return "none"
    if len(found) > 2 and found == list(range(found[0], found[-1] + 1)):
        return f"{found[0]}–{found[-1]}"
    return ", ".join(map(str, found))
