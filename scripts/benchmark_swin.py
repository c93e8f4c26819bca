#!/usr/bin/env python
"""Our Swin against timm's, torchvision's and transformers' on the same weights: forward pass and training step.

All in one interleaved run. timm is measured with fused attention and without, transformers with its default (PyTorch's
fused attention). A training step is forward, loss and backward, without an optimizer. Beside the medians stands the
share of processor time that our step spends in matrix products. ``--profile`` shows where the time of each goes.

    python scripts/benchmark_swin.py                       # swin_tiny_patch4_window7_224, batch 8, float32 and bfloat16
    python scripts/benchmark_swin.py --quick               # two rounds of one image
    python scripts/benchmark_swin.py --threads 1 --cpu-time --profile --json swin.json
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable
from typing import Any

os.environ.setdefault("KINETO_LOG_LEVEL", "5")  # the profiler's own messages

import timm
import torch
import torchvision
import transformers
from rich.console import Console
from rich.table import Table
from timm.layers import set_fused_attn
from torch import nn

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
from vision_attn.checkpoints import swin_names

NAME = "swin_tiny_patch4_window7_224"
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class Logits(nn.Module):
    """transformers' model, as a function from images to logits."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.model(images).logits


def build(device: str) -> dict[str, nn.Module]:
    """Five models with the same random weights, none of which drops anything."""
    config = transformers.SwinConfig(num_labels=1000, drop_path_rate=0.0, layer_norm_eps=1e-5)
    theirs = transformers.SwinForImageClassification(config)
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.add_(0.02 * torch.randn_like(parameter))
    ours = va.create_model(NAME)
    ours.load_state_dict(swin_names.from_transformers(theirs.state_dict()))
    models: dict[str, nn.Module] = {"ours": ours}
    for label, fused in (("timm", True), ("timm unfused", False)):
        set_fused_attn(fused, experimental=fused)  # read at construction; Swin's fused attention is experimental there
        models[label] = timm.create_model(NAME, drop_path_rate=0.0)
        models[label].load_state_dict(swin_names.to_timm(ours.state_dict()))
    models["torchvision"] = torchvision.models.get_model("swin_t", weights=None)
    state = swin_names.to_torchvision(ours.state_dict())
    wrong = models["torchvision"].load_state_dict(state, strict=False)
    if wrong.unexpected_keys or not all(key.endswith("relative_position_index") for key in wrong.missing_keys):
        raise SystemExit(f"torchvision has other tensors by now: {wrong}")
    for module in models["torchvision"].modules():
        if isinstance(module, torchvision.ops.StochasticDepth):
            module.p = 0.0
    models["transformers"] = Logits(theirs)
    return {label: model.to(device) for label, model in models.items()}


def check_equal(models: dict[str, nn.Module], images: torch.Tensor) -> None:
    """Refuses to time models that compute different things."""
    with torch.no_grad():
        expected = models["timm"].eval()(images[:1])
        for model in models.values():
            torch.testing.assert_close(model.eval()(images[:1]), expected, rtol=1e-3, atol=1e-4)


def measure(models: dict[str, nn.Module], options: argparse.Namespace) -> list[dict[str, Any]]:
    """One row per dtype and pass."""
    images = torch.randn(1 if options.quick else options.batch, 3, 224, 224, device=options.device)
    labels = torch.randint(1000, (len(images),), device=options.device)
    check_equal(models, images)
    rows = []
    for dtype in options.dtype or DTYPES:
        for stage in ("forward", "training"):
            steps = _steps(models, images, labels, DTYPES[dtype], stage)
            seconds = interleaved(
                steps,
                warmup=1,
                rounds=2 if options.quick else options.rounds,
                clock=time.process_time if options.cpu_time else time.perf_counter,
                synchronize=synchronizer(options.device),
            )
            others = {label: s for label, s in seconds.items() if label != "ours"}
            best = min(others, key=others.__getitem__)
            rows.append(
                {
                    "batch": len(images),
                    "dtype": dtype,
                    "pass": stage,
                    "ms": {label: round(1e3 * s, 1) for label, s in seconds.items()},
                    "speed_up": round(seconds["timm"] / seconds["ours"], 3),
                    "best_other": best,
                    "speed_up_over_best": round(others[best] / seconds["ours"], 3),
                    "matrix_share": round(matrix_share(steps["ours"]), 3) if options.device == "cpu" else None,
                }
            )
            if options.profile:
                for label, step in steps.items():
                    where_time_goes(label, f"{dtype}, {stage}", step)
            print(".", end="", flush=True)
    return rows


def _steps(
    models: dict[str, nn.Module], images: torch.Tensor, labels: torch.Tensor, dtype: torch.dtype, stage: str
) -> dict[str, Callable[[], object]]:
    steps: dict[str, Callable[[], object]] = {}
    for label, model in models.items():
        model.train(stage == "training")
        training = stage == "training"
        steps[label] = training_step(model, images, labels, dtype) if training else forward_pass(model, images, dtype)
    return steps


def where_time_goes(label: str, what: str, step: Callable[[], object]) -> None:
    """Prints the operators that cost most."""
    from torch.profiler import ProfilerActivity, profile

    step()
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        step()
    print(f"\n{label}, {what}")
    print(profiler.key_averages().table(sort_by="self_cpu_time_total", row_limit=12, max_name_column_width=50))


def show(rows: list[dict[str, Any]], title: str) -> None:
    """A table of medians and ratios."""
    table = Table(title=title, caption="ms: medians. Ratios: their time over ours, timm's fused setting and the best")
    table.add_column("dtype")
    table.add_column("pass")
    for column in (*rows[0]["ms"], "vs timm", "vs best", "matrix share"):
        table.add_column(column, justify="right")
    for row in rows:
        share = "" if row["matrix_share"] is None else f"{row['matrix_share']:.0%}"
        times = [f"{ms:.0f}" for ms in row["ms"].values()]
        ratios = [f"{row['speed_up']:.2f}x", f"{row['speed_up_over_best']:.2f}x"]
        table.add_row(row["dtype"], row["pass"], *times, *ratios, share)
    console = Console(highlight=False)
    (console if console.is_terminal else Console(width=140, highlight=False)).print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtype", nargs="+", choices=list(DTYPES), help="default: both")
    parser.add_argument("--batch", type=int, default=8, help="images")
    parser.add_argument("--rounds", type=int, default=9, help="timings of which the median counts")
    parser.add_argument("--quick", action="store_true", help="two rounds of one image: a smoke test")
    parser.add_argument("--profile", action="store_true", help="show where the time of each model goes")
    add_conditions(parser)
    options, hardware, clock = begin(parser)
    rows = measure(build(options.device), options)
    print()
    versions = ", ".join(f"{m.__name__} {m.__version__}" for m in (torch, timm, torchvision, transformers))
    title = f"{NAME}, {hardware}, {versions}, {clock}"
    show(rows, title)
    if options.json:
        options.json.write_text(json.dumps({"conditions": title, "rows": rows}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
