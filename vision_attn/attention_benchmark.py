"""What each attention mechanism costs as the sequence grows: time, peak memory, arithmetic, and their exponents in N.

Everything is measured on ``attend`` itself, without the projections around it, which cost the same for all.
"""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode

from vision_attn.attention import attend
from vision_attn.attention.layout import Layout
from vision_attn.attention.linear import Linformer, Performer
from vision_attn.attention.patterns import Pattern, make_pattern
from vision_attn.benchmarking import best_clock, fit_exponent, interleaved, synchronizer
from vision_attn.peak_memory import in_child, peak_bytes

LENGTHS = (1024, 2048, 4096, 8192, 16384)
REFERENCE = 4096
"""Tokens at which mechanisms are compared with full attention."""

MECHANISMS: dict[str, dict[str, Any]] = {
    "explicit": {"kernel": "explicit"},
    "fused": {"kernel": "sdpa"},
    "tiled": {"kernel": "tiled"},
    "window": {"pattern": "window", "window": 64},
    "window_2d": {"pattern": "window_2d", "window": 5},
    "strided": {"pattern": "strided"},
    "longformer": {"pattern": "longformer", "window": 64, "num_global": 1},
    "bigbird": {"pattern": "bigbird", "window": 32, "num_global": 1, "num_random": 2, "block_size": 32},
    "linformer": {"pattern": "linformer", "rank": 128},
    "performer": {"pattern": "performer", "features": 128},
}
"""Name -> the words of ``Attention`` that choose it.
Neighbourhoods, ranks and features are of about 128 keys; strided has about 3 √N."""
FULL = {"explicit", "fused", "tiled"}
DENSE = {"explicit": (2, 4)}
"""Mechanisms that hold (B, H, N, N) tensors, and how many at once, forward and with backward."""


@dataclasses.dataclass
class Row:
    """One mechanism at one length. None where it was not measured; ``note`` says why.

    Attributes:
        mechanism: name.
        backward: whether the backward pass is counted in.
        tokens: N.
        seconds: median of interleaved rounds.
        peak_bytes: memory at the highest point, without the inputs.
        flops: of the products computed, see ``count_flops``.
        note: what a reader should know.
    """

    mechanism: str
    backward: bool
    tokens: int
    seconds: float | None = None
    peak_bytes: int | None = None
    flops: int | None = None
    note: str = ""


def square(n: int) -> tuple[int, int]:
    """(rows, columns) of the grid of n tokens that is nearest to a square."""
    rows = next(r for r in range(math.isqrt(n), 0, -1) if n % r == 0)
    return rows, n // rows


def make_call(
    words: Mapping[str, Any],
    tokens: int,
    *,
    heads: int = 8,
    width: int = 64,
    batch: int = 1,
    device: str = "cpu",
    dtype: str = "float32",
    backward: bool = False,
) -> Callable[[], object]:
    """What is measured: one call of ``attend``, with the gradients of q, k and v where ``backward``.

    Raises:
        ValueError: words that name no mechanism, or one that cannot work on so many tokens.
    """
    options = dict(words)
    kernel, name = options.pop("kernel", "auto"), options.pop("pattern", "full")
    layout = Layout(grid=square(tokens))
    pattern = _pattern(name, options, layout, heads, width)
    if isinstance(pattern, torch.nn.Module):
        pattern = pattern.to(device, getattr(torch, dtype)).eval()
    torch.manual_seed(0)
    shape = (batch, heads, tokens, width)
    q, k, v = (torch.randn(shape, device=device, dtype=getattr(torch, dtype), requires_grad=backward) for _ in range(3))
    gradient = torch.randn(shape, device=device, dtype=getattr(torch, dtype)) if backward else None

    def run() -> object:
        with torch.set_grad_enabled(backward):
            # Views, for PyTorch's counter of operations cannot follow a module whose inputs are leaves.
            out = attend(*(x.view_as(x) for x in (q, k, v)), kernel=kernel, pattern=pattern, layout=layout)
            return torch.autograd.grad(out, (q, k, v), gradient) if backward else out

    return run


def _pattern(
    name: str, options: Mapping[str, Any], layout: Layout, heads: int, width: int
) -> Pattern | Linformer | Performer | None:
    if name == "linformer":
        return Linformer(heads, layout.length or 0, layout=layout, **options)
    return Performer(width, **options) if name == "performer" else make_pattern(name, **options)


def _fused_flops(q: Any, k: Any, v: Any, *rest: Any, **more: Any) -> int:
    """Two products for every pair of query and key; the arguments are shapes."""
    return int(2 * math.prod(q[:3]) * k[2] * (q[3] + v[3]))


def _fused_backward_flops(grad: Any, q: Any, k: Any, v: Any, *rest: Any, **more: Any) -> int:
    """The scores again, and the gradients of weights, values, queries and keys."""
    return int(2 * math.prod(q[:3]) * k[2] * (3 * q[3] + 2 * v[3]))


UNKNOWN_TO_PYTORCH = {
    "_scaled_dot_product_flash_attention_for_cpu": _fused_flops,
    "_scaled_dot_product_flash_attention_for_cpu_backward": _fused_backward_flops,
}
"""Operations that PyTorch's counter passes over."""


def count_flops(call: Callable[[], object]) -> int | None:
    """FLOPs of the products that a call computes, two per multiply-accumulate; None for compiled kernels, which hide
    theirs."""
    known = {getattr(torch.ops.aten, name, None): count for name, count in UNKNOWN_TO_PYTORCH.items()}
    with FlopCounterMode(display=False, custom_mapping={op: f for op, f in known.items() if op is not None}) as counter:
        call()
    return counter.get_total_flops() or None


def memory_limit(gigabytes: float | None) -> int:
    """Bytes that one call may take: what was asked for, or two thirds of what is free now."""
    if gigabytes is not None:
        return int(gigabytes * 2**30)
    try:
        with open("/proc/meminfo", encoding="ascii") as lines:
            free = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))
    except (OSError, StopIteration):
        free = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return free * 2 // 3


def measure(
    mechanisms: Sequence[str] = tuple(MECHANISMS),
    lengths: Sequence[int] = LENGTHS,
    *,
    backward: bool = False,
    rounds: int = 3,
    device: str = "cpu",
    dtype: str = "float32",
    batch: int = 1,
    heads: int = 8,
    width: int = 64,
    memory: float | None = None,
    changes: Mapping[str, Any] | None = None,
    progress: Callable[[str], object] = lambda text: None,
) -> dict[str, Any]:
    """Measures every mechanism at every length.

    Args:
        mechanisms: names of ``MECHANISMS``.
        lengths: numbers of tokens N.
        backward: measure forward and backward too.
        rounds: timings of each, interleaved, of which the median counts.
        device, dtype: where, and of what.
        batch, heads, width: B, H and d.
        memory: GiB that one call may take; default two thirds of what is free.
        changes: other values for words of the mechanisms, such as ``window``.
        progress: called with what is measured next.

    Returns:
        ``setting``, ``rows`` (as ``Row``), ``exponents`` and ``speedups``, as plain types.
    """
    words = {name: _changed(MECHANISMS[name], changes or {}) for name in mechanisms}
    shape = {"batch": batch, "heads": heads, "width": width, "device": device, "dtype": dtype}
    lengths, limit = sorted(set(lengths)), memory_limit(memory)
    rows = [
        Row(name, both, n) for both in ((False, True) if backward else (False,)) for name in mechanisms for n in lengths
    ]
    progress("memory")
    _measure_memory(rows, words, shape, limit)
    for both, n in dict.fromkeys((row.backward, row.tokens) for row in rows):
        progress(f"time at {n:,} tokens{', forward and backward' if both else ''}")
        _measure_time([row for row in rows if (row.backward, row.tokens) == (both, n)], words, shape, rounds)
    return {
        "setting": {**shape, "threads": torch.get_num_threads(), "rounds": rounds, "torch": torch.__version__},
        "mechanisms": words,
        "rows": [dataclasses.asdict(row) for row in rows],
        "exponents": exponents(rows),
        "speedups": speedups(rows),
    }


def _changed(words: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    return {key: changes.get(key, value) for key, value in words.items()}


def _measure_memory(rows: list[Row], words: dict[str, dict[str, Any]], shape: dict[str, Any], limit: int) -> None:
    """Fills in the peaks, and notes where a mechanism is not to be run at all."""
    calls = []
    for row in sorted(rows, key=lambda row: (row.tokens, row.backward)):
        tensors = DENSE.get(row.mechanism, (0, 0))[row.backward]
        need = tensors * shape["batch"] * shape["heads"] * row.tokens**2 * getattr(torch, shape["dtype"]).itemsize
        if need > limit:
            row.note = f"needs about {need / 2**30:.1f} GiB, the limit is {limit / 2**30:.1f} GiB"
            continue
        calls.append((row, {"words": words[row.mechanism], "tokens": row.tokens, "backward": row.backward, **shape}))
    if shape["device"] == "cpu":
        keywords = [call for _, call in calls]
        peaks = in_child(__name__, "make_call", keywords, threads=torch.get_num_threads()) if calls else []
    else:
        peaks = [peak_bytes(make_call(**call), shape["device"]) for _, call in calls]
    for (row, _), peak in zip(calls, peaks, strict=True):
        row.peak_bytes = peak
        if peak is None:
            row.note = "ran out of memory"


def _measure_time(rows: list[Row], words: dict[str, dict[str, Any]], shape: dict[str, Any], rounds: int) -> None:
    """Fills in times and FLOPs of all mechanisms at one length."""
    rows = [row for row in rows if not row.note]
    if not rows:
        return
    device = shape["device"]
    calls = {row.mechanism: make_call(words[row.mechanism], row.tokens, backward=row.backward, **shape) for row in rows}
    times = interleaved(calls, rounds=rounds, clock=best_clock(device), synchronize=synchronizer(device))
    for row in rows:
        row.seconds, row.flops = times[row.mechanism], count_flops(calls[row.mechanism])


def exponents(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """The exponents in N of time, memory and FLOPs for each mechanism and pass, over the lengths that were measured."""
    found = []
    for name, backward in dict.fromkeys((row.mechanism, row.backward) for row in rows):
        mine = [row for row in rows if (row.mechanism, row.backward) == (name, backward)]
        entry: dict[str, Any] = {"mechanism": name, "backward": backward}
        for what in ("seconds", "peak_bytes", "flops"):
            known = [(row.tokens, getattr(row, what)) for row in mine if getattr(row, what)]
            entry[what] = fit_exponent([n for n, _ in known], [value for _, value in known])
        found.append({**entry, "lengths": [row.tokens for row in mine if row.seconds]})
    return found


def speedups(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """How many times faster than explicit and than fused full attention, at ``REFERENCE`` tokens or the next shorter
    length that was measured (the shortest, where all are longer)."""
    found = []
    for backward in dict.fromkeys(row.backward for row in rows):
        full = {row.tokens for row in rows if row.backward == backward and row.mechanism in FULL and row.seconds}
        if not full:
            continue
        at = max((n for n in full if n <= REFERENCE), default=min(full))
        here = {row.mechanism: row.seconds for row in rows if row.backward == backward and row.tokens == at}
        for name, seconds in here.items():
            if seconds:
                entry: dict[str, Any] = {"mechanism": name, "backward": backward, "tokens": at}
                for base in ("explicit", "fused"):
                    entry[base] = time / seconds if (time := here.get(base)) else None
                found.append(entry)
    return found
