"""Which kernel is fastest where: a small measured table, because intuition fails.

``kernel_table.json`` beside this file was measured on the machines it names. A user's own measurement
(``vision-attn benchmark kernels --measure --save``) takes precedence over it. The table has one section per device
(``cpu/avx512_bf16``, ``cuda``, …), one cell per dtype, pass and kind of pairwise input, and in a cell the
milliseconds of every kernel by sequence length::

    {"format": 1, "sections": [{"device": "cpu/avx2", …, "cells": {"float32 training mask": {"65": {"sdpa": 5.1, …}}}}]}

Batch, heads and head width move all kernels alike; they are no part of the table. In cross-attention the length is
√(N · M). Between two measured lengths times are interpolated, log against log; beyond the ends the nearest counts.
Where nothing was measured, ``default`` decides.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import platform
import re
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from vision_attn.attention.kernels import Request

FORMAT = 1
SHIPPED = Path(__file__).with_name("kernel_table.json")
VARIABLE = "VISION_ATTN_KERNEL_TABLE"
KINDS = ("plain", "mask", "bias")
"""Pairwise inputs: none, a mask, a bias (learned, with or without a mask)."""

SHORT = 512
"""Tokens below which a pattern is a mask on all pairs, not a gathering of some."""

MOST_WEIGHTS = 2**28
"""B · H · N · M above which no kernel is taken that holds them: half a gigabyte in 16 bits, per layer in training."""

Cell = Mapping[str, Mapping[str, float]]  # length → kernel → milliseconds
Key = tuple[str, torch.dtype, bool, str]  # device type, dtype, training, kind
Ranking = tuple[tuple[float, tuple[str, ...]], ...]  # up to so large an N · M: kernels, the fastest first


def fastest(request: Request, able: list[str]) -> str:
    """The name, out of ``able``, of the kernel that serves the request fastest."""
    if request.pattern:
        skipping = for_pattern(request)
        if skipping in able:
            return skipping
    if _measured(request):
        kind = "bias" if request.bias else "mask" if request.mask else "plain"
        pairs = request.queries * request.keys
        for limit, names in _rankings.get((request.device, request.dtype, request.training, kind), ()):
            if pairs <= limit:
                for name in names:
                    if name in able:
                        return name
                break
    name = default(request)
    return name if name in able else able[0]


def _measured(request: Request) -> bool:
    """Whether the table speaks about such a request.

    An exported graph runs on other machines; PyTorch's fused kernels know no dropout on a CPU and fall back to other
    code; and speed is no argument for weights that fill the memory.
    """
    return not (torch.compiler.is_exporting() or (request.dropout and request.device == "cpu") or _is_large(request))


def _is_large(request: Request) -> bool:
    return request.batch * request.heads * request.queries * request.keys > MOST_WEIGHTS


def for_pattern(request: Request) -> str:
    """The kernel that skips the pairs a pattern leaves out, or one that masks them where there are few tokens.

    Gathering has a price of its own: below ``SHORT`` tokens all pairs and a mask are faster.
    """
    if request.pattern == "performer":
        return "favor"
    if request.queries < SHORT:
        return ""
    return "gathered" if request.device == "cpu" else "flex"


def default(request: Request) -> str:
    """Where nothing was measured: the fused kernel, with two exceptions on a CPU.

    Those are dropout, and bfloat16 below 1,000 tokens where the processor multiplies bfloat16 itself.
    """
    if torch.compiler.is_exporting() or request.device != "cpu" or _is_large(request):
        return "sdpa"
    short = _multiplies_bfloat16 and request.dtype == torch.bfloat16 and request.queries * request.keys < 1_000_000
    return "explicit" if short or request.dropout else "sdpa"


def cell_name(dtype: str, training: bool, kind: str) -> str:
    """``bfloat16 training mask``: the key of a cell."""
    return f"{dtype} {'training' if training else 'forward'} {kind}"


def cpu_capability() -> str:
    """The vector instructions, on which 16-bit products depend: ``avx512_bf16``, ``amx``, ``avx2``, ``neon`` …"""
    level = torch.backends.cpu.get_cpu_capability().lower()
    if level != "avx512":
        return level
    found = _capabilities()
    if found.get("amx_bf16") or found.get("amx_tile"):
        return "amx"
    bf16 = getattr(torch.cpu, "_is_avx512_bf16_supported", bool)  # PyTorch before it had get_capabilities
    return "avx512_bf16" if found.get("avx512_bf16", bf16()) else "avx512"


def cpu_name() -> str:
    """The processor's name as far as it is known."""
    return str(_capabilities().get("cpu_name") or platform.machine())


def _capabilities() -> dict[str, Any]:
    """What PyTorch knows about the processor; older versions do not tell."""
    ask = getattr(torch.cpu, "get_capabilities", None)
    return {} if ask is None else dict(ask())


def device_key(device: str) -> str:
    """The name of a device's section: ``cpu/<capability>``, or the device type."""
    return f"cpu/{cpu_capability()}" if device == "cpu" else device


def user_path(device: str) -> Path:
    """Where the user's own measurement lies: ``$VISION_ATTN_KERNEL_TABLE``, or a file of the cache folder.

    The file is named after what a measurement depends on: processor, threads and PyTorch's version.
    """
    if os.environ.get(VARIABLE):
        return Path(os.environ[VARIABLE])
    root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    parts = [device_key(device), f"torch-{torch.__version__}"]
    if device == "cpu":
        parts[1:1] = [cpu_name(), f"{torch.get_num_threads()}-threads"]
    return root / "vision_attn" / "kernels" / (re.sub(r"[^a-z0-9.]+", "-", "_".join(parts).lower()) + ".json")


def read_sections(path: Path) -> list[dict[str, Any]]:
    """The sections of a table file.

    Raises:
        ValueError: the file is no table; the message names it.
        OSError: it cannot be read.
    """
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
        if document["format"] != FORMAT:
            raise ValueError(f"format {document['format']}, expected {FORMAT}")
        for section in document["sections"]:
            str(section["device"])
            for name, cell in section["cells"].items():
                _key(section["device"], name)
                _ranking(cell)
        return list(document["sections"])
    except (ValueError, TypeError, KeyError, AttributeError, IndexError) as error:
        raise ValueError(f"{path} is no kernel table: {type(error).__name__}: {error}") from error


def with_section(path: Path, section: dict[str, Any]) -> str:
    """The text of a table file with a section added; cells measured anew replace those of the same device.

    Args:
        path: of the file, which may be missing; it is only read.
        section: for example from ``vision_attn.benchmarking.measure_kernels``.
    """
    sections = read_sections(path) if path.exists() else []
    old = next((s for s in sections if s["device"] == section["device"]), None)
    if old is None:
        sections.append(section)
    else:
        sections[sections.index(old)] = {**section, "cells": {**old["cells"], **section["cells"]}}
    text = json.dumps({"format": FORMAT, "sections": sections}, indent=1)
    # the kernels of one length on one line
    return re.sub(r"\{\s+([^{}]*?)\s+\}", lambda found: "{" + " ".join(found[1].split()) + "}", text) + "\n"


def sections_in_use(devices: tuple[str, ...] = ("cpu", "cuda")) -> list[dict[str, Any]]:
    """What ``fastest`` goes by on this machine: one section per device, with ``"source"``, the file it comes from.

    A damaged file of the user's is ignored with a warning that names it.
    """
    shipped = read_sections(SHIPPED)
    used = []
    for device in devices:
        layers = [(SHIPPED, s) for s in shipped if s["device"] == device_key(device)]
        path = user_path(device)
        if path.exists():
            try:
                layers += [(path, s) for s in read_sections(path) if s["device"] == device_key(device)]
            except (ValueError, OSError) as error:
                warnings.warn(f"{error}. It is ignored; remove it, or measure again.", stacklevel=2)
        if layers:
            cells = {name: cell for _, section in layers for name, cell in section["cells"].items()}
            used.append({**layers[-1][1], "cells": cells, "source": str(layers[-1][0])})
    return used


def _interpolate(low: tuple[float, float], high: tuple[float, float], at: float) -> float:
    """Log of the time at a length whose log is ``at``, from (log length, log time) on both sides."""
    share = (at - low[0]) / (high[0] - low[0])
    return low[1] + share * (high[1] - low[1])


def _ranking(cell: Cell, steps: int = 8) -> Ranking:
    """Orders the kernels by speed in ``steps`` steps between one measured length and the next."""
    points = {math.log(int(n)): {k: math.log(ms) for k, ms in times.items()} for n, times in cell.items()}
    lengths = sorted(points)
    order: list[tuple[float, tuple[str, ...]]] = []
    for low, high in itertools.pairwise(lengths):
        both = [k for k in points[low] if k in points[high]]
        for step in range(steps):
            middle, end = (low + (high - low) * (step + part) / steps for part in (0.5, 1.0))
            at = {k: _interpolate((low, points[low][k]), (high, points[high][k]), middle) for k in both}
            order.append((math.exp(2 * end), tuple(sorted(both, key=at.__getitem__))))
    last = tuple(sorted(points[lengths[-1]], key=points[lengths[-1]].__getitem__))
    order.append((math.inf, last))
    return tuple(
        item for item, after in zip(order, [*order[1:], None], strict=True) if not after or item[1] != after[1]
    )


def load() -> None:
    """Reads the tables, once at import so that a choice is a look-up; and again after a measurement."""
    _rankings.clear()
    for section in sections_in_use():
        for name, cell in section["cells"].items():
            _rankings[_key(section["device"], name)] = _ranking(cell)


def _key(device: str, cell: str) -> Key:
    dtype, stage, kind = cell.split()
    if stage not in ("forward", "training") or kind not in KINDS:
        raise ValueError(f"{cell!r} is no cell")
    return device.split("/")[0], getattr(torch, dtype), stage == "training", kind


_rankings: dict[Key, Ranking] = {}
_multiplies_bfloat16 = cpu_capability() in ("amx", "avx512_bf16")
load()
