#!/usr/bin/env python
"""Our ViT against timm's on the same weights: forward pass and training step, in one interleaved run.

timm is measured with its default, fused attention, and with fused attention off. A training step is forward, loss and
backward, without an optimizer. Beside the medians stands the share of processor time that our step spends in matrix
products: what is left is all that an implementation can be better at.

    python scripts/benchmark_throughput.py                     # both models, float32 and bfloat16
    python scripts/benchmark_throughput.py --quick             # two rounds, small batches
    python scripts/benchmark_throughput.py --threads 1 --json throughput.json
"""

from __future__ import annotations

import argparse
import json
import os
import time
from typing import Any

os.environ.setdefault("KINETO_LOG_LEVEL", "5")  # the profiler's own messages

import timm
import torch
from rich.console import Console
from rich.table import Table
from timm.layers import set_fused_attn

import vision_attn as va
from vision_attn.benchmarking import (
    add_conditions,
    begin,
    forward_pass,
    interleaved,
    matrix_share,
    synchronizer,
    training_step,
)

CASES: dict[str, tuple[str, dict[str, Any], int]] = {
    "vit_tiny": ("vit_tiny_patch16_224", {"img_size": 32, "patch_size": 4, "num_classes": 10}, 128),
    "vit_small": ("vit_small_patch16_224", {"img_size": 224, "patch_size": 16, "num_classes": 1000}, 8),
}
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def build(case: str, device: str) -> tuple[dict[str, torch.nn.Module], tuple[int, int, int, int], int]:
    """Three models with the same weights, the shape of a batch and the number of classes."""
    name, arguments, batch = CASES[case]
    models: dict[str, torch.nn.Module] = {"ours": va.create_model(name, **arguments)}
    for label, fused in (("timm", True), ("timm unfused", False)):
        set_fused_attn(fused)  # read at construction
        models[label] = timm.create_model(name, **arguments)
        models[label].load_state_dict(models["ours"].state_dict())
    size = arguments["img_size"]
    return {k: m.to(device) for k, m in models.items()}, (batch, 3, size, size), arguments["num_classes"]


def check_equal(models: dict[str, torch.nn.Module], images: torch.Tensor) -> None:
    """Refuses to time models that compute different things."""
    with torch.no_grad():
        expected = models["timm"].eval()(images[:2])
        torch.testing.assert_close(models["ours"].eval()(images[:2]), expected, rtol=1e-3, atol=1e-4)


def measure(case: str, options: argparse.Namespace) -> list[dict[str, Any]]:
    """One row per dtype and pass."""
    models, shape, classes = build(case, options.device)
    images = torch.randn(shape[0] // 8 if options.quick else shape[0], *shape[1:], device=options.device)
    labels = torch.randint(classes, (len(images),), device=options.device)
    check_equal(models, images)
    rows = []
    for dtype in options.dtype or DTYPES:
        for stage in ("forward", "training"):
            for model in models.values():
                model.train(stage == "training")
            steps = {
                label: training_step(model, images, labels, DTYPES[dtype])
                if stage == "training"
                else forward_pass(model, images, DTYPES[dtype])
                for label, model in models.items()
            }
            seconds = interleaved(
                steps,
                warmup=2,
                rounds=2 if options.quick else options.rounds,
                clock=time.process_time if options.cpu_time else time.perf_counter,
                synchronize=synchronizer(options.device),
            )
            better = min(seconds["timm"], seconds["timm unfused"])
            rows.append(
                {
                    "model": case,
                    "batch": len(images),
                    "dtype": dtype,
                    "pass": stage,
                    "ms": {label: round(1e3 * s, 1) for label, s in seconds.items()},
                    "images_per_second": round(len(images) / seconds["ours"]),
                    "speed_up": round(seconds["timm"] / seconds["ours"], 3),
                    "speed_up_over_better": round(better / seconds["ours"], 3),
                    "matrix_share": round(matrix_share(steps["ours"]), 3) if options.device == "cpu" else None,
                }
            )
            print(".", end="", flush=True)
    return rows


def show(rows: list[dict[str, Any]], title: str) -> None:
    """A table of medians and ratios."""
    table = Table(title=title, caption="ms: medians. Ratios: timm's time over ours, its default and its better setting")
    for column in ("model", "dtype", "pass"):
        table.add_column(column)
    for column in ("ours ms", "timm ms", "timm unfused ms", "vs default", "vs better", "matrix share", "images/s"):
        table.add_column(column, justify="right")
    for row in rows:
        share = "" if row["matrix_share"] is None else f"{row['matrix_share']:.0%}"
        times = [f"{ms:.0f}" for ms in row["ms"].values()]
        ratios = [f"{row['speed_up']:.2f}x", f"{row['speed_up_over_better']:.2f}x"]
        table.add_row(
            f"{row['model']} (B {row['batch']})", row["dtype"], row["pass"], *times, *ratios, share,
            f"{row['images_per_second']:,}",
        )  # fmt: skip
    console = Console(highlight=False)
    (console if console.is_terminal else Console(width=140, highlight=False)).print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=list(CASES), default=list(CASES))
    parser.add_argument("--dtype", nargs="+", choices=list(DTYPES), help="default: both")
    parser.add_argument("--rounds", type=int, default=9, help="timings of which the median counts")
    parser.add_argument("--quick", action="store_true", help="two rounds of an eighth of the batch: a smoke test")
    add_conditions(parser)
    options, hardware, clock = begin(parser)
    rows = [row for case in options.models for row in measure(case, options)]
    print()
    title = f"{hardware}, torch {torch.__version__}, timm {timm.__version__}, {clock}"
    show(rows, title)
    if options.json:
        options.json.write_text(json.dumps({"conditions": title, "rows": rows}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
