#!/usr/bin/env python
"""Our matcher and losses against transformers' on the same predictions, forward and backward, in one interleaved run.

DETR's losses (softmax, L1, GIoU, auxiliary losses of all decoder layers) against ``ForObjectDetectionLoss``. Deformable
DETR's focal loss stands beside, against ``DeformableDetrForObjectDetectionLoss``. Before anything is timed, losses and
gradients of both are compared.

    python scripts/benchmark_criterion.py                    # 100 queries, 6 layers, 20 objects, batch 2, 4, 8
    python scripts/benchmark_criterion.py --threads 1 --cpu-time --json criterion.json
    python scripts/benchmark_criterion.py --quick
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
import transformers
from rich.console import Console
from rich.table import Table
from torch import Tensor
from transformers.loss.loss_deformable_detr import DeformableDetrForObjectDetectionLoss
from transformers.loss.loss_for_object_detection import ForObjectDetectionLoss

from vision_attn.benchmarking import add_conditions, begin, interleaved, synchronizer
from vision_attn.detection.criterion import Criterion, CriterionConfig

CLASSES = 91
Step = Callable[[], tuple[Tensor, Tensor, Tensor]]


def predictions(batch: int, options: argparse.Namespace, logits: int) -> tuple[Tensor, Tensor, list[dict[str, Tensor]]]:
    """(L, B, N, K) logits and (L, B, N, 4) boxes that want gradients, and targets."""
    shape = (options.layers, batch, options.queries)
    device = options.device
    x = torch.randn(*shape, logits, device=device, requires_grad=True)
    boxes = torch.cat([torch.rand(*shape, 2), torch.rand(*shape, 2) * 0.3 + 0.02], -1).to(device).requires_grad_()
    targets = []
    for _ in range(batch):
        n = options.objects
        true = torch.cat([torch.rand(n, 2) * 0.8 + 0.1, torch.rand(n, 2) * 0.3 + 0.02], 1).to(device)
        targets.append({"labels": torch.randint(CLASSES, (n,), device=device), "boxes": true})
    return x, boxes, targets


def ours(logits: Tensor, boxes: Tensor, targets: list[dict[str, Tensor]], kind: str) -> Step:
    """A step of our criterion."""
    classification = "softmax" if kind == "softmax" else "sigmoid"
    criterion = Criterion(CLASSES, CriterionConfig(loss=kind), classification)  # type: ignore[arg-type]

    def step() -> tuple[Tensor, Tensor, Tensor]:
        layers = [{"pred_logits": a, "pred_boxes": b} for a, b in zip(logits, boxes, strict=True)]
        loss = criterion({**layers[-1], "aux_outputs": layers[:-1]}, targets)["loss"]
        return loss, *torch.autograd.grad(loss, (logits, boxes))

    return step


def theirs(logits: Tensor, boxes: Tensor, targets: list[dict[str, Tensor]], kind: str) -> Step:
    """A step of transformers' loss."""
    config = SimpleNamespace(
        class_cost=1 if kind == "softmax" else 2,
        bbox_cost=5,
        giou_cost=2,
        num_labels=CLASSES,
        eos_coefficient=0.1,
        auxiliary_loss=True,
        bbox_loss_coefficient=5,
        giou_loss_coefficient=2,
        decoder_layers=len(logits),
        focal_alpha=0.25,
        two_stage=False,
    )
    labels = [{"class_labels": target["labels"], "boxes": target["boxes"]} for target in targets]
    function = ForObjectDetectionLoss if kind == "softmax" else DeformableDetrForObjectDetectionLoss

    def step() -> tuple[Tensor, Tensor, Tensor]:
        loss = function(logits[-1], labels, logits.device, boxes[-1], config, logits, boxes)[0]
        return loss, *torch.autograd.grad(loss, (logits, boxes))

    return step


def measure(options: argparse.Namespace) -> list[dict[str, Any]]:
    """One row per loss and batch size."""
    rows = []
    for kind in ("softmax", "focal"):
        for batch in options.batch:
            data = predictions(batch, options, CLASSES + (kind == "softmax"))
            steps = {"ours": ours(*data, kind), "transformers": theirs(*data, kind)}
            for mine, other in zip(steps["ours"](), steps["transformers"](), strict=True):
                torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-6)
            seconds = interleaved(
                steps,
                warmup=3,
                rounds=3 if options.quick else options.rounds,
                clock=time.process_time if options.cpu_time else time.perf_counter,
                synchronize=synchronizer(options.device),
            )
            ms = {name: round(1e3 * s, 3) for name, s in seconds.items()}
            ratio = round(seconds["transformers"] / seconds["ours"], 2)
            rows.append({"loss": kind, "batch": batch, "ms": ms, "speed_up": ratio})
    return rows


def show(rows: list[dict[str, Any]], title: str) -> None:
    """A table of medians and ratios."""
    table = Table(title=title, caption="medians of matching, losses and their gradients")
    for column in ("loss", "batch", "ours, ms", "transformers, ms", "speed-up"):
        table.add_column(column, justify="left" if column == "loss" else "right")
    for row in rows:
        times = [f"{ms:.2f}" for ms in row["ms"].values()]
        table.add_row(row["loss"], str(row["batch"]), *times, f"{row['speed_up']:.2f}x")
    console = Console(highlight=False)
    (console if console.is_terminal else Console(width=120, highlight=False)).print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, nargs="+", default=[2, 4, 8], help="images")
    parser.add_argument("--queries", type=int, default=100)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--objects", type=int, default=20, help="per image")
    parser.add_argument("--rounds", type=int, default=51, help="timings of which the median counts")
    parser.add_argument("--quick", action="store_true", help="three rounds: a smoke test")
    add_conditions(parser)
    options, hardware, clock = begin(parser)
    rows = measure(options)
    title = (
        f"{options.queries} queries x {options.layers} layers x {options.objects} objects, {CLASSES} classes, "
        f"{hardware}, torch {torch.__version__}, transformers {transformers.__version__}, {clock}"
    )
    show(rows, title)
    if options.json:
        options.json.write_text(json.dumps({"conditions": title, "rows": rows}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
