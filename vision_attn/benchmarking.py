"""Fair measurements: everything compared runs in turn, round after round, and medians count.

A machine that slows down for a while then slows all candidates alike.
"""

from __future__ import annotations

import argparse
import math
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vision_attn.attention import KERNELS, Request, attend, kernel_table

LENGTHS = (16, 49, 65, 128, 197, 257, 512, 1024, 2048)
CANDIDATES = ("explicit", "sdpa")
"""What ``auto`` chooses from where all pairs meet. The others are slower there, or compile for each new length."""

TOKENS = 4096
"""Tokens of one measured call, batch × length, unless a batch size is given."""


def interleaved(
    functions: Mapping[str, Callable[[], object]],
    *,
    rounds: int = 7,
    warmup: int = 1,
    clock: Callable[[], float] = time.perf_counter,
    synchronize: Callable[[], object] | None = None,
) -> dict[str, float]:
    """Median seconds of each function, all run in turn.

    Args:
        functions: by name.
        rounds: how often each one is timed.
        warmup: rounds before, not timed.
        clock: ``time.process_time`` for one thread on a busy machine: it does not count other programs.
        synchronize: waits for a device that works in the background.
    """
    seconds: dict[str, list[float]] = {name: [] for name in functions}
    order = list(functions)
    for i in range(-warmup, rounds):
        order = [*order[1:], order[0]]  # what ran before leaves caches and memory behind, for everyone in turn
        for name in order:
            start = clock()
            functions[name]()
            if synchronize is not None:
                synchronize()
            if i >= 0:
                seconds[name].append(clock() - start)
    return {name: statistics.median(values) for name, values in seconds.items()}


def add_conditions(parser: argparse.ArgumentParser) -> None:
    """Options of every benchmark script: under which conditions it measures."""
    parser.add_argument("--threads", type=int, help="CPU threads; default: PyTorch's")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--cpu-time", action="store_true", help="processor time, for one thread on a busy machine")
    parser.add_argument("--json", type=Path, help="write the numbers here too")


def begin(parser: argparse.ArgumentParser) -> tuple[argparse.Namespace, str, str]:
    """Read the options, set the threads, seed, and keep freed memory as `vision-attn fit` does.

    Args:
        parser: with what :func:`add_conditions` adds.

    Returns:
        The options; the hardware and the clock, in words.
    """
    from vision_attn.training.memory import keep_freed_memory

    options = parser.parse_args()
    if options.threads:
        torch.set_num_threads(options.threads)
    threads = torch.get_num_threads()
    if options.cpu_time and (threads > 1 or options.device != "cpu"):
        parser.error("--cpu-time needs --threads 1 on a CPU: with more threads, waiting counts as work")
    keep_freed_memory()
    torch.manual_seed(0)
    name = f"{kernel_table.cpu_name()} ({kernel_table.cpu_capability()}), {threads} threads"
    clock = "processor time" if options.cpu_time else "wall-clock time"
    return options, name if options.device == "cpu" else options.device, clock


def fit_exponent(lengths: Sequence[int], values: Sequence[float]) -> float | None:
    """p of the least-squares line log value = p · log N + c; None for fewer than two lengths with a positive value."""
    points = [(math.log(n), math.log(v)) for n, v in zip(lengths, values, strict=True) if v > 0]
    if len({x for x, _ in points}) < 2:
        return None
    mean_x, mean_y = (sum(column) / len(points) for column in zip(*points, strict=True))
    covariance = sum((x - mean_x) * (y - mean_y) for x, y in points)
    return covariance / sum((x - mean_x) ** 2 for x, _ in points)


def best_clock(device: str) -> Callable[[], float]:
    """Processor time for one thread, wall-clock time otherwise."""
    return time.process_time if device == "cpu" and torch.get_num_threads() == 1 else time.perf_counter


def synchronizer(device: str) -> Callable[[], object] | None:
    """What waits for the device, None for a CPU."""
    return None if device == "cpu" else lambda: torch.accelerator.synchronize()


def _call(request: Request, kernel: str) -> Callable[[], object]:
    """Self-attention as ``Attention`` runs it: heads lie interleaved in one projection, and are merged at the end."""
    b, h, n, d = request.batch, request.heads, request.queries, request.width
    options: dict[str, Any] = {"device": request.device, "dtype": request.dtype}
    qkv = torch.randn(b, n, 3 * h, d, requires_grad=request.training, **options)
    bias = torch.randn(1, h, n, n, requires_grad=request.training, **options) if request.bias else None
    mask = None
    if request.mask:
        mask = torch.ones(b, 1, 1, n, dtype=torch.bool, device=request.device)
        mask[..., -max(1, n // 8) :] = False
    leaves = [leaf for leaf in (qkv, bias) if leaf is not None]
    gradient = torch.randn(b, n, h * d, **options)

    def run() -> object:
        q, k, v = (part.transpose(1, 2) for part in qkv.split(h, dim=2))
        out = attend(q, k, v, bias=bias, mask=mask, kernel=kernel).transpose(1, 2).reshape(b, n, h * d)
        return torch.autograd.grad(out, leaves, gradient) if request.training else out

    return run


def measure_kernels(
    device: str = "cpu",
    *,
    dtypes: Iterable[torch.dtype] = (torch.float32, torch.bfloat16),
    lengths: Sequence[int] = LENGTHS,
    batch: int | None = None,
    heads: int = 3,
    width: int = 64,
    rounds: int = 7,
    progress: Callable[[str], object] = lambda text: None,
) -> dict[str, Any]:
    """Times every kernel at every length, forward and training, plain, with a mask and with a learned bias.

    Args:
        device: ``cpu``, ``cuda``, ….
        dtypes: of queries, keys and values.
        lengths: numbers of tokens.
        batch: images per call; by default as many as make 4,096 tokens.
        heads, width: H and d. They matter little for the choice.
        rounds: timings of which the median counts.
        progress: called with the name of each cell and length before it is measured.

    Returns:
        A section for ``vision_attn.attention.kernel_table``, times in milliseconds.
    """
    cells: dict[str, dict[str, dict[str, float]]] = {}
    for dtype in dtypes:
        for training in (False, True):
            for kind in kernel_table.KINDS:
                name = kernel_table.cell_name(str(dtype).removeprefix("torch."), training, kind)
                for n in lengths:
                    progress(f"{name}, {n} tokens")
                    b = batch or max(1, TOKENS // n)
                    request = Request(
                        device, dtype, b, heads, heads, n, n, width, kind == "mask", kind == "bias", training
                    )
                    able = [k for k in CANDIDATES if KERNELS[k].why_not(request) is None]
                    times = interleaved(
                        {k: _call(request, k) for k in able},
                        rounds=rounds,
                        clock=best_clock(device),
                        synchronize=synchronizer(device),
                    )
                    cells.setdefault(name, {})[str(n)] = {k: float(f"{1e3 * s:.4g}") for k, s in times.items()}
    return {
        "device": kernel_table.device_key(device),
        "hardware": kernel_table.cpu_name() if device == "cpu" else torch.cuda.get_device_name(),
        "threads": torch.get_num_threads() if device == "cpu" else None,
        "torch": torch.__version__,
        "heads": heads,
        "width": width,
        "batch": batch or f"{TOKENS} tokens",
        "cells": cells,
    }


def matrix_share(function: Callable[[], object]) -> float:
    """The share of its processor time that a function spends in matrix products and convolutions: its floor."""
    names = {"aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm", "aten::addbmm"}
    fused = ("attention", "convolution")
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        function()
    events = profiler.key_averages()
    total = sum(event.self_cpu_time_total for event in events)
    products = [e for e in events if e.key in names or (e.key.startswith("aten::") and any(f in e.key for f in fused))]
    return sum(event.self_cpu_time_total for event in products) / max(total, 1e-9)


def training_step(model: torch.nn.Module, images: Tensor, labels: Tensor, dtype: torch.dtype) -> Callable[[], object]:
    """Forward, loss and backward, without an optimizer; gradients are dropped afterwards."""
    device = images.device.type

    def step() -> None:
        with torch.autocast(device, dtype, enabled=dtype != torch.float32):
            loss = torch.nn.functional.cross_entropy(model(images), labels)
        loss.backward()
        model.zero_grad(set_to_none=True)

    return step


def forward_pass(model: torch.nn.Module, images: Tensor, dtype: torch.dtype) -> Callable[[], object]:
    """Inference without gradients; the caller puts the model into evaluation mode."""
    device = images.device.type

    def forward() -> Tensor:
        with torch.no_grad(), torch.autocast(device, dtype, enabled=dtype != torch.float32):
            return model(images)

    return forward
