#!/usr/bin/env python
"""What the input pipeline costs: a training step fed by ``ImageData`` against the same step on ready tensors.

Both run in turn, and medians are compared. A step is forward, loss, backward and AdamW. Ready tensors are batches of
the same data, augmented beforehand. CIFAR-10 is taken where $VISION_ATTN_DATA has it, digits at 32 pixels otherwise.

    python scripts/benchmark_pipeline.py
    python scripts/benchmark_pipeline.py --models resnet20_cifar --augment strong --threads 1 --cpu-time
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import Tensor

import vision_attn as va
from vision_attn.attention.kernel_table import cpu_capability, cpu_name
from vision_attn.benchmarking import interleaved
from vision_attn.data import AugmentConfig, ImageData
from vision_attn.training.classifier import prefers_channels_last
from vision_attn.training.memory import keep_freed_memory

Batch = dict[str, Tensor]

AUGMENT = {
    "none": AugmentConfig(),
    "light": AugmentConfig(flip=True, crop_padding=4),
    "strong": AugmentConfig(flip=True, crop_padding=4, randaugment=2, erase=0.25, mixup=0.2, cutmix=1.0),
}


def make_data(augment: str, batch_size: int, channels_last: bool) -> ImageData:
    """CIFAR-10 where it is at hand, digits otherwise."""
    root = os.environ.get("VISION_ATTN_DATA")
    cifar = root is not None and (Path(root) / "cifar-10-batches-py").is_dir()
    name: dict[str, Any] = {"name": "cifar10", "root": root} if cifar else {"name": "digits", "img_size": 32}
    data = ImageData(
        **name, batch_size=batch_size, augment=AUGMENT[augment], drop_last=True, channels_last=channels_last
    )
    data.setup("fit")
    return data


def batches(data: ImageData) -> Iterator[Batch]:
    """Epoch after epoch, as the trainer gets them."""
    loader = data.train_dataloader()
    for epoch in itertools.count():
        loader.set_epoch(epoch)
        for batch in loader:
            yield data.on_after_batch_transfer(batch)


def make_step(model: torch.nn.Module, source: Iterator[Batch], dtype: torch.dtype) -> Callable[[], None]:
    """Takes a batch and trains on it."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)

    def step() -> None:
        batch = next(source)
        with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
            loss = F.cross_entropy(model(batch["image"]), batch["label"])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def measure(name: str, options: argparse.Namespace) -> dict[str, Any]:
    """One model: seconds per step on ready tensors, with the pipeline, and of the pipeline alone."""
    model = va.create_model(name, num_classes=10, img_size=32).train()
    channels_last = prefers_channels_last(model)
    if channels_last:
        model.to(memory_format=torch.channels_last)
    data = make_data(options.augment, options.batch, channels_last)
    ready = itertools.cycle(list(itertools.islice(batches(data), 8)))
    source = batches(data)
    dtype = getattr(torch, options.dtype)
    functions = {
        "ready": make_step(model, ready, dtype),
        "pipeline": make_step(model, source, dtype),
        "alone": lambda: next(source),
    }
    seconds = interleaved(
        functions,
        rounds=options.rounds,
        warmup=3,
        clock=time.process_time if options.cpu_time else time.perf_counter,
    )
    return {
        "model": name,
        "data": data.name,
        "augment": options.augment,
        "dtype": options.dtype,
        "batch": options.batch,
        "ms": {label: round(1e3 * s, 2) for label, s in seconds.items()},
        "ratio": round(seconds["pipeline"] / seconds["ready"], 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["cct_2_3x2_32", "resnet20_cifar"])
    parser.add_argument("--augment", choices=list(AUGMENT), default="light")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="bfloat16")
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=25, help="timings of which the median counts")
    parser.add_argument("--threads", type=int, help="CPU threads; default: PyTorch's")
    parser.add_argument("--cpu-time", action="store_true", help="processor time, for one thread on a busy machine")
    parser.add_argument("--json", type=Path, help="write the numbers here too")
    options = parser.parse_args()
    if options.threads:
        torch.set_num_threads(options.threads)
    threads = torch.get_num_threads()
    if options.cpu_time and threads > 1:
        parser.error("--cpu-time needs --threads 1: with more threads, waiting counts as work")
    keep_freed_memory()  # as `vision-attn fit` does
    torch.manual_seed(0)
    rows = [measure(name, options) for name in options.models]
    clock = "processor time" if options.cpu_time else "wall-clock time"
    title = f"{cpu_name()} ({cpu_capability()}), {threads} threads, torch {torch.__version__}, {clock}"
    table = Table(title=title, caption="ratio: step with the pipeline over step on ready tensors; 1.1 is the limit")
    for column in (
        "model",
        "data",
        "augment",
        "dtype",
        "batch",
        "ready ms",
        "pipeline ms",
        "pipeline alone ms",
        "ratio",
    ):
        table.add_column(column)
    for row in rows:
        times = [f"{ms:.1f}" for ms in row["ms"].values()]
        about = [str(row[key]) for key in ("model", "data", "augment", "dtype", "batch")]
        table.add_row(*about, *times, f"{row['ratio']:.3f}")
    console = Console(highlight=False)
    (console if console.is_terminal else Console(width=140, highlight=False)).print(table)
    if options.json:
        options.json.write_text(json.dumps({"conditions": title, "rows": rows}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
