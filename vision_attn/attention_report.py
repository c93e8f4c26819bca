"""The attention benchmark as a table and a picture."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vision_attn.atomic import atomic_write

GREYS = ("#222222", "#777777", "#AAAAAA")  # full attention, whoever computes it
COLORS = ("#4477AA", "#EE6677", "#228833", "#CCBB44", "#66CCEE", "#AA3377", "#EE7733", "#009988")  # Paul Tol's bright
MARKS = "osD^vP<>X*"
MEASURES = {"seconds": "time of one call (s)", "peak_bytes": "peak memory (MiB)", "flops": "arithmetic (GFLOP)"}
UNIT = {"seconds": 1.0, "peak_bytes": 2.0**20, "flops": 1e9}


ABOUT = (
    "Peak memory is what one call adds at its highest point: results included, arguments and what is kept between",
    "calls (the plans of patterns) not. FLOPs are those of the products that were computed, the padding of blocks",
    "included.",
)


def quantity(what: str, value: float | None) -> str:
    """A measured number in few characters."""
    if value is None:
        return "–"
    number = value / UNIT[what] * (1e3 if what == "seconds" else 1)
    return f"{number:,.0f}" if number >= 100 else f"{number:.3g}"


def title(setting: Mapping[str, Any]) -> str:
    """What was measured, in a line."""
    threads = f", {setting['threads']} thread{'s' if setting['threads'] != 1 else ''}"
    where = f"{setting['device']}{threads if setting['device'] == 'cpu' else ''}, {setting['dtype']}"
    shape = f"batch {setting['batch']}, {setting['heads']} heads of {setting['width']}"
    return f"{shape}; {where}; torch {setting['torch']}; median of {setting['rounds']} interleaved rounds"


def tables(result: Mapping[str, Any]) -> list[tuple[str, list[str], list[list[str]]]]:
    """Tables as (title, head, rows of text): one for each pass and measure, and one of exponents and speed-ups."""
    found = []
    for backward in dict.fromkeys(row["backward"] for row in result["rows"]):
        rows = [row for row in result["rows"] if row["backward"] == backward]
        lengths = sorted({row["tokens"] for row in rows})
        names = list(dict.fromkeys(row["mechanism"] for row in rows))
        which = "forward and backward" if backward else "forward"
        cell = {(row["mechanism"], row["tokens"]): row for row in rows}
        for what, text in (("seconds", "time, ms"), ("peak_bytes", "peak memory, MiB"), ("flops", "GFLOP")):
            body = [[name, *(quantity(what, cell[name, n][what]) for n in lengths)] for name in names]
            found.append((f"{text}, {which}", ["mechanism", *(f"{n:,}" for n in lengths)], body))
        found.append(_summary(result, backward, which))
    return found


def _summary(result: Mapping[str, Any], backward: bool, which: str) -> tuple[str, list[str], list[list[str]]]:
    faster = {row["mechanism"]: row for row in result["speedups"] if row["backward"] == backward}
    at = next((f"{row['tokens']:,} tokens" for row in faster.values()), "")
    body = []
    for row in result["exponents"]:
        if row["backward"] == backward:
            exponents = ["–" if row[what] is None else f"{row[what]:.2f}" for what in MEASURES]
            ratios = [faster.get(row["mechanism"], {}).get(base) for base in ("explicit", "fused")]
            body.append([row["mechanism"], *exponents, *("–" if r is None else f"{r:.2f}×" for r in ratios)])
    head = ["mechanism", "time ~ N^", "memory ~ N^", "FLOP ~ N^", f"vs explicit, {at}", f"vs fused, {at}"]
    return f"exponents in N, and how many times faster, {which}", head, body


def notes(result: Mapping[str, Any]) -> list[str]:
    """What was not measured, and why."""
    found = [(row["mechanism"], row["note"], row["tokens"], row["backward"]) for row in result["rows"] if row["note"]]
    return [
        f"{name} at {n:,} tokens{', forward and backward' if backward else ''}: {note}"
        for name, note, n, backward in found
    ]


def markdown(result: Mapping[str, Any]) -> str:
    """The tables as a Markdown page."""
    lines = ["# Cost of attention mechanisms against the number of tokens", "", title(result["setting"]), ""]
    for caption, head, body in tables(result):
        lines += [f"## {caption[0].upper()}{caption[1:]}", "", f"| {' | '.join(head)} |"]
        lines += [f"|---{'|---:' * (len(head) - 1)}|", *(f"| {' | '.join(row)} |" for row in body), ""]
    lines += ["## Mechanisms", ""]
    lines += [f"- {name}: {_words(words)}" for name, words in result["mechanisms"].items()]
    lines += ["", *ABOUT]
    if notes(result):
        lines += ["", "Not measured:", "", *(f"- {note}" for note in notes(result))]
    return "\n".join(lines) + "\n"


def _words(words: Mapping[str, Any]) -> str:
    return ", ".join(f"{key} = {value}" for key, value in {"kernel": "auto", **words}.items())


def draw(result: Mapping[str, Any], path: Path) -> None:
    """Time, memory and arithmetic against N on logarithmic axes, a row of panels for each pass."""
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    from vision_attn.training.pictures import STYLE

    passes = list(dict.fromkeys(row["backward"] for row in result["rows"]))
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(12.5, 0.8 + 5.0 * len(passes)), layout="constrained")
        FigureCanvasAgg(figure)
        axes = figure.subplots(len(passes), len(MEASURES), squeeze=False)
        for line, backward in zip(axes, passes, strict=True):
            for axis, what in zip(line, MEASURES, strict=True):
                _panel(axis, result, what, backward)
        figure.suptitle(f"Cost of attention mechanisms\n{title(result['setting'])}", fontsize=11)
        atomic_write(path, lambda temporary: figure.savefig(temporary, format="png"))


def _panel(axis: Any, result: Mapping[str, Any], what: str, backward: bool) -> None:
    from vision_attn.attention_benchmark import FULL

    names = list(dict.fromkeys(row["mechanism"] for row in result["rows"]))
    exponents = {row["mechanism"]: row[what] for row in result["exponents"] if row["backward"] == backward}
    greys, colors = iter(GREYS), iter(COLORS * 3)
    lengths: set[int] = set()
    for name, mark in zip(names, MARKS * 3, strict=False):
        full = name in FULL
        color = next(greys) if full else next(colors)
        mine = [row for row in result["rows"] if row["mechanism"] == name and row["backward"] == backward]
        points = [(row["tokens"], row[what] / UNIT[what]) for row in mine if row[what]]
        if points:
            lengths |= {n for n, _ in points}
            power = f"  $N^{{{exponents[name]:.2f}}}$" if exponents[name] is not None else ""
            style = {"ls": "--" if full else "-", "lw": 1.6, "marker": mark, "ms": 4.5, "color": color}
            axis.plot(*zip(*points, strict=True), label=f"{name}{power}", **style)
    axis.set(xscale="log", yscale="log", xlabel="tokens N", ylabel=MEASURES[what])
    axis.set_xticks(sorted(lengths), [f"{n:,}" for n in sorted(lengths)], rotation=30 if len(lengths) > 4 else 0)
    axis.minorticks_off()
    axis.set_title("forward and backward" if backward else "forward")
    if lengths:
        # below, where no line is
        axis.legend(fontsize=8, ncols=2, loc="upper center", bbox_to_anchor=(0.5, -0.2), labelspacing=0.3)
