"""``vision-attn check``: is it what it says it is?"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

from vision_attn.cli.arguments import make_parser, parse, write_json
from vision_attn.cli.check_checkpoint import checkpoint
from vision_attn.cli.check_data import data
from vision_attn.cli.check_padding import padding
from vision_attn.errors import UserError, closest

if TYPE_CHECKING:
    import torch

    from vision_attn.certificates import Certificate, Result

DTYPES = ("float64", "float32", "bfloat16", "float16")
NAME_WIDTH = 84  # columns of the name of a certificate


def run(argv: list[str]) -> int:
    """Runs the check named first.

    Raises:
        UserError: an unknown check, or wrong arguments.
    """
    if not argv or argv[0] in ("-h", "--help"):
        lines = [f"  {name}   {(function.__doc__ or '').splitlines()[0]}" for name, function in CHECKS.items()]
        print("usage: vision-attn check NAME [options]\n\n" + "\n".join(lines))
        return 0 if argv else 2
    if argv[0] not in CHECKS:
        raise UserError(f"unknown check {argv[0]!r}.{closest(argv[0], list(CHECKS))} There are: {', '.join(CHECKS)}.")
    return CHECKS[argv[0]](argv[1:])


def attention(argv: list[str]) -> int:
    """Every attention mechanism by its numeric identity, one line each.

    Returns:
        0 when all hold, 1 when one fails.

    Raises:
        UserError: a device, dtype, kernel or id that is not there.
    """
    parser = make_parser("check attention", "Measure the identities that prove each attention mechanism right.")
    parser.add_argument("--device", type=str, default="cpu", help="cpu, cuda, cuda:1, mps, ...")
    parser.add_argument(
        "--dtype",
        type=str | None,
        default=None,
        help="float64, float32, bfloat16 or float16 (default: all that each is for)",
    )
    parser.add_argument("--kernel", type=str, default="auto", help="who does the arithmetic: auto, explicit, sdpa, ...")
    parser.add_argument("--ids", type=str | None, default=None, help="only these, e.g. 20,20b or 21*")
    parser.add_argument("--json", type=str | None, default=None, help="write the results to this file, - for stdout")
    options = parse(parser, argv)

    from vision_attn.certificates import run as measure

    device, dtype = _device(options.device), _dtype(options.dtype)
    _check_kernel(options.kernel)
    chosen = _chosen(options.ids)
    show = sys.stderr if options.json == "-" else sys.stdout
    results: list[Result] = []
    for item in chosen:
        wanted = [dtype] if dtype else list(item.tolerance)
        found = [measure(item, device=device, dtype=each, kernel=options.kernel) for each in wanted]
        print(_line(found), file=show, flush=True)
        results += found
    print(_summary(results), file=show)
    if options.json:
        write_json([dataclasses.asdict(result) for result in results], options.json)
    return int(any(result.passed is False for result in results))


CHECKS: dict[str, Callable[[list[str]], int]] = {
    "attention": attention,
    "checkpoint": checkpoint,
    "data": data,
    "padding": padding,
}


def _device(name: str) -> str:
    import torch

    try:
        torch.ones(1, device=name).sum().item()
    except Exception as error:  # every backend has exceptions of its own for "not here"
        raise UserError(f"--device {name}: this machine has no such device that PyTorch can use") from error
    return name


def _dtype(name: str | None) -> torch.dtype | None:
    import torch

    if name is None:
        return None
    if name not in DTYPES:
        raise UserError(f"--dtype {name}:{closest(name, DTYPES)} Choose one of {', '.join(DTYPES)}.")
    found: torch.dtype = getattr(torch, name)
    return found


def _check_kernel(name: str) -> None:
    from vision_attn.attention import KERNELS

    if name != "auto" and name not in KERNELS:
        raise UserError(f"--kernel {name}:{closest(name, KERNELS)} There are: auto, {', '.join(KERNELS)}.")


def _chosen(ids: str | None) -> list[Certificate]:
    from vision_attn.certificates import ordered

    every = ordered()
    if ids is None:
        return every
    patterns = [word.strip() for word in ids.split(",") if word.strip()]
    known = [item.id for item in every]
    missing = [p for p in patterns if not any(fnmatchcase(id, p) for id in known)]
    if missing or not patterns:
        asked = missing[0] if missing else ids
        raise UserError(f"--ids {asked}: no certificate has that id.{closest(asked, known)} There are: {_short(known)}")
    return [item for item in every if any(fnmatchcase(item.id, p) for p in patterns)]


def _short(ids: list[str]) -> str:
    return ", ".join(ids)


def _closeness(result: Result) -> float:
    """How near to failing: failures first, then the error as a share of the tolerance; what was skipped last."""
    if result.passed is None:
        return -1.0
    if result.error is None or result.tolerance is None:
        return float("inf")
    return result.error / result.tolerance if result.tolerance else float(result.error > 0) * 1e300


def _line(results: list[Result]) -> str:
    """One certificate in one line; of several dtypes, the one that is nearest to failing."""
    worst = max(results, key=_closeness)
    name = worst.name if len(worst.name) <= NAME_WIDTH else worst.name[: NAME_WIDTH - 1] + "…"
    verdict = {True: "holds", False: "FAILS", None: "skipped"}[worst.passed]
    line = f"{worst.id:>4}  {name:<{NAME_WIDTH}}  {_number(worst.error)}  {_number(worst.tolerance)}  "
    line += f"{worst.dtype:<8}  {verdict}"
    return f"{line}: {worst.reason}" if worst.reason else line


def _number(value: float | None) -> str:
    return f"{'-' if value is None else f'{value:.1e}':>7}"


def _summary(results: list[Result]) -> str:
    def count(passed: bool | None) -> int:
        return sum(result.passed is passed for result in results)

    parts = [f"{len({r.id for r in results})} certificates in {len(results)} settings: {count(True)} hold"]
    if count(False):
        failed: dict[str, Any] = dict.fromkeys(r.id for r in results if r.passed is False)
        parts.append(f"{count(False)} fail ({', '.join(failed)})")
    if count(None):
        parts.append(f"{count(None)} skipped, for the reasons given")
    return ", ".join(parts)
