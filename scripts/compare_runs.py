#!/usr/bin/env python
"""One metric of several runs in one picture, over minutes of training and over optimizer steps.

    python scripts/compare_runs.py --metric val/ap --output curves.png \
        "denoising=runs/digit_scenes_dn_detr/0" "learned queries=runs/digit_scenes_vanilla_detr/0"

Runs of the same label are seeds of one experiment and share a colour. A RUN without ``LABEL=`` takes its recipe's name.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from vision_attn.explain.figures import COLORS, figure
from vision_attn.training.run_folder import read_metrics


def read(run: str, metric: str) -> tuple[str, list[dict[str, Any]]]:
    """Label and rows of a run that have the metric.

    Raises:
        ValueError: no run folder, or one without the metric.
    """
    label, _, place = run.rpartition("=")
    folder = Path(place)
    rows = read_metrics(folder / "metrics.csv")
    if not rows:
        raise ValueError(f"{folder}: no run folder (it has no metrics.csv)")
    found = [row for row in rows if metric in row]
    if not found:
        names = ", ".join(sorted({key for row in rows for key in row if "/" in key}))
        raise ValueError(f"{folder}: no {metric} in metrics.csv; there are {names}")
    if not label:
        summary = folder / "summary.json"
        label = json.loads(summary.read_text())["recipe"] if summary.is_file() else folder.parent.name
    return label, found


def draw(runs: list[tuple[str, list[dict[str, Any]]]], metric: str, path: Path) -> None:
    """Left over minutes, right over steps; every validation is a point."""
    labels = list(dict.fromkeys(label for label, _ in runs))
    with figure(path, (9.5, 3.4), columns=2) as (_, axes):
        for axis, key, scale, name in (
            (axes[0, 0], "seconds", 60, "minutes"),
            (axes[0, 1], "step", 1, "optimizer steps"),
        ):
            for label, rows in runs:
                color = COLORS[labels.index(label) % len(COLORS)]
                axis.plot([r[key] / scale for r in rows], [r[metric] for r in rows], "o-", color=color, ms=3, lw=1.5)
            axis.set(xlabel=name, ylabel=metric, xlim=(0, None), ylim=(0, None))
            axis.grid(color="#e5e5e5", lw=0.6)
        for label in labels:
            axes[0, 0].plot([], [], "o-", color=COLORS[labels.index(label) % len(COLORS)], ms=3, label=label)
        axes[0, 0].legend()


def main() -> int:
    """Draws, and prints the last value of each run."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("runs", nargs="+", metavar="[LABEL=]RUN", help="run folders")
    parser.add_argument("--metric", default="val/acc", help="a column of metrics.csv")
    parser.add_argument("--output", type=Path, required=True, help="the PNG to write")
    options = parser.parse_args()
    try:
        runs = [read(run, options.metric) for run in options.runs]
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    options.output.parent.mkdir(parents=True, exist_ok=True)
    draw(runs, options.metric, options.output)
    for (label, rows), run in zip(runs, options.runs, strict=True):
        last = rows[-1]
        where = f"step {last['step']:,}, {last['seconds'] / 60:.1f} min"
        print(f"{label} ({run.rpartition('=')[2]}): {options.metric} {last[options.metric]:.4f} at {where}")
    print(options.output)
    return 0


if __name__ == "__main__":
    sys.exit(main())
