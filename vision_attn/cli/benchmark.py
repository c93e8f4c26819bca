"""``vision-attn benchmark``: what is fast on this machine."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from vision_attn.atomic import atomic_write_text
from vision_attn.cli.arguments import console, make_parser, parse, write_json
from vision_attn.cli.benchmark_attention import attention
from vision_attn.errors import UserError, closest

NARROWEST = 100  # columns, where the output is no terminal: nothing is cut off


def run(argv: list[str]) -> int:
    """Runs the benchmark named first.

    Raises:
        UserError: an unknown benchmark, or wrong arguments.
    """
    if not argv or argv[0] in ("-h", "--help"):
        lines = [f"  {name}   {(function.__doc__ or '').splitlines()[0]}" for name, function in BENCHMARKS.items()]
        print("usage: vision-attn benchmark NAME [options]\n\n" + "\n".join(lines))
        return 0 if argv else 2
    if argv[0] not in BENCHMARKS:
        raise UserError(
            f"unknown benchmark {argv[0]!r}.{closest(argv[0], list(BENCHMARKS))} There are: {', '.join(BENCHMARKS)}."
        )
    return BENCHMARKS[argv[0]](argv[1:])


def kernels(argv: list[str]) -> int:
    """The measured table by which kernel="auto" chooses; --measure measures this machine.

    Raises:
        UserError: wrong arguments, or nothing measured for what was asked.
    """
    parser = make_parser("benchmark kernels", "Show, or measure, the table by which kernel='auto' chooses.")
    parser.add_argument("--measure", action="store_true", help="measure this machine now")
    parser.add_argument("--save", action="store_true", help="keep the measurement for this machine; implies --measure")
    parser.add_argument("--device", type=str, default="cpu", help="cpu, cuda, ...")
    parser.add_argument("--dtype", type=str | None, default=None, help="one dtype (default: float32 and bfloat16)")
    parser.add_argument("--lengths", type=list[int] | None, default=None, help="sequence lengths, e.g. '[65,197]'")
    parser.add_argument("--batch", type=int | None, default=None, help="images per call (default: 4,096 tokens)")
    parser.add_argument("--heads", type=int, default=3, help="attention heads")
    parser.add_argument("--width", type=int, default=64, help="head width")
    parser.add_argument("--rounds", type=int, default=7, help="timings of which the median counts")
    parser.add_argument("--threads", type=int | None, default=None, help="CPU threads (default: PyTorch's)")
    parser.add_argument("--json", type=str | None, default=None, help="write the table to this file, - for the screen")
    options = parse(parser, argv)

    import torch

    if options.threads:
        torch.set_num_threads(options.threads)
    from vision_attn.attention import kernel_table

    if options.measure or options.save:
        section = _measure(options)
    else:
        section = _in_use(options.device)
    if options.save:
        path = kernel_table.user_path(options.device)
        atomic_write_text(path, kernel_table.with_section(path, section))
        kernel_table.load()
        section["source"] = str(path)
    section = _filtered(section, options.dtype, options.lengths)
    if options.json:
        write_json(section, options.json)
    if options.json != "-":
        _show(section)
    return 0


BENCHMARKS: dict[str, Callable[[list[str]], int]] = {"kernels": kernels, "attention": attention}


def _in_use(device: str) -> dict[str, Any]:
    from vision_attn.attention import kernel_table

    found = kernel_table.sections_in_use((device,))
    if not found:
        raise UserError(
            f"nothing was measured for {kernel_table.device_key(device)}; the default decides there. Measure it: "
            f"vision-attn benchmark kernels --device {device} --save"
        )
    return found[0]


def _measure(options: Any) -> dict[str, Any]:
    import torch
    from rich.console import Console

    from vision_attn.benchmarking import LENGTHS, measure_kernels
    from vision_attn.training.memory import keep_freed_memory

    keep_freed_memory()  # as training does: else the first lengths pay for pages that later ones find at hand
    kind = options.device.split(":")[0]
    if kind != "cpu" and not (kind == "cuda" and torch.cuda.is_available()):
        raise UserError(f"--device {options.device}: this machine has no such device that PyTorch can use")
    names = [options.dtype] if options.dtype else ["float32", "bfloat16"]
    dtypes = [getattr(torch, name, None) for name in names]
    if not all(isinstance(dtype, torch.dtype) and dtype.is_floating_point for dtype in dtypes):
        raise UserError(f"--dtype {options.dtype}: choose float32, bfloat16 or float16")
    for name in ("batch", "heads", "width", "rounds"):
        if getattr(options, name) is not None and getattr(options, name) < 1:
            raise UserError(f"--{name} must be 1 or more, got {getattr(options, name)}")
    if options.lengths is not None and (not options.lengths or min(options.lengths) < 1):
        raise UserError(f"--lengths must be numbers of tokens, 1 or more, got {options.lengths}")
    with Console(stderr=True).status("measuring") as status:
        return measure_kernels(
            options.device,
            dtypes=[dtype for dtype in dtypes if dtype is not None],
            lengths=sorted(set(options.lengths or LENGTHS)),
            batch=options.batch,
            heads=options.heads,
            width=options.width,
            rounds=options.rounds,
            progress=lambda text: status.update(f"measuring {text}"),
        )


def _filtered(section: dict[str, Any], dtype: str | None, lengths: list[int] | None) -> dict[str, Any]:
    cells = {
        name: {n: times for n, times in cell.items() if not lengths or int(n) in lengths}
        for name, cell in section["cells"].items()
        if dtype in (None, name.split()[0])
    }
    cells = {name: cell for name, cell in cells.items() if cell}
    if not cells:
        known = sorted({int(n) for cell in section["cells"].values() for n in cell})
        raise UserError(
            f"the table has nothing for dtype {dtype or 'any'} and lengths {lengths or 'any'}; it has lengths "
            f"{', '.join(map(str, known))}. --measure measures others."
        )
    return {**section, "cells": cells}


def _show(section: dict[str, Any]) -> None:
    from rich.table import Table

    out = console(NARROWEST)
    names = sorted({k for cell in section["cells"].values() for times in cell.values() for k in times})
    about = [section["device"], section.get("hardware"), f"torch {section.get('torch')}"]
    if section.get("threads"):
        about.append(f"{section['threads']} thread{'s' if section['threads'] > 1 else ''}")
    table = Table(title=", ".join(filter(None, about)), caption="times in ms; ratio: slowest over fastest")
    for title in ("dtype", "pass", "pairs"):
        table.add_column(title)
    for title in ("tokens", *names):
        table.add_column(title, justify="right")
    table.add_column("fastest")
    table.add_column("ratio", justify="right")
    for name, cell in section["cells"].items():
        for n, times in cell.items():
            best = min(times, key=times.__getitem__)
            shown = [f"{times[k]:.3g}" if k in times else "" for k in names]
            table.add_row(*name.split(), n, *shown, best, f"{max(times.values()) / times[best]:.2f}")
        table.add_section()
    out.print(table)
    out.print(f"source: {section.get('source', 'measured now; --save keeps it')}", soft_wrap=True)
