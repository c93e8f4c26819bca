"""How much memory a computation takes at its highest point.

On a CPU it is asked of the operating system, in a process of its own: resident memory at its peak, less that just
before. This counts everything, also what a library takes behind PyTorch's back, and a computation that the system kills
for want of memory takes the measuring process down and not the caller's. On a GPU the allocator knows.

    python -m vision_attn.peak_memory   reads {"module", "function", "calls"} as JSON and writes one line per call
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

STATUS, RESET = Path("/proc/self/status"), Path("/proc/self/clear_refs")


def peak_bytes(function: Callable[[], object], device: str = "cpu") -> int:
    """Bytes that one call holds at its highest point, beyond what is held before: results included, arguments not.

    The call is made once before, so that libraries are loaded and kernels compiled. On a CPU the process should have
    been started by ``in_child``, which makes the system return freed memory at once.
    """
    function()
    gc.collect()
    if device != "cpu":
        import torch

        torch.accelerator.synchronize()
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        result = function()
        torch.accelerator.synchronize()
        peak = torch.cuda.max_memory_allocated(device) - before
        del result
        return max(peak, 0)
    reset = _reset_peak()
    before = _resident() if reset else _highest()
    result = function()
    peak = (_highest() if reset else _lifetime_highest()) - before
    del result
    return max(peak, 0)


def _reset_peak() -> bool:
    """Forgets the highest point so far; False where the system has no such thing (only Linux does)."""
    if hasattr(ctypes.CDLL(None), "malloc_trim"):
        ctypes.CDLL(None).malloc_trim(0)
    try:
        RESET.write_text("5")
    except OSError:
        return False
    return True


def _field(name: str) -> int:
    for line in STATUS.read_text().splitlines():
        if line.startswith(name):
            return int(line.split()[1]) * 1024
    raise OSError(f"{STATUS} has no {name}")


def _resident() -> int:
    return _field("VmRSS")


def _highest() -> int:
    return _field("VmHWM") if STATUS.exists() else _lifetime_highest()


def _lifetime_highest() -> int:
    # Never falls: right for calls in growing order, each of which goes beyond all before.
    import resource

    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else most * 1024


def in_child(
    module: str, function: str, calls: Sequence[Mapping[str, Any]], *, threads: int, timeout: float = 3600
) -> list[int | None]:
    """Peak bytes of several calls, one after the other in a new process; in another new one after each that dies.

    Args:
        module, function: where to find what takes the keywords of a call and returns a function without arguments, the
            one to be measured.
        calls: keywords as plain JSON, the smaller ones first: only Linux can forget a peak.
        threads: CPU threads of the child.
        timeout: seconds for all calls of one process.

    Returns:
        Bytes of each call; None for those that took all memory, or more time than there was.

    Raises:
        RuntimeError: a call failed for another reason.
    """
    found: list[int | None] = []
    while len(found) < len(calls):
        rest = list(calls[len(found) :])
        out, code, errors = _child(
            json.dumps({"module": module, "function": function, "calls": rest, "threads": threads}), threads, timeout
        )
        found += [json.loads(line)["peak"] for line in out.splitlines() if line.startswith('{"peak"')]
        if code > 0:
            raise RuntimeError(f"measuring {dict(calls[len(found)])} failed: {errors.strip().splitlines()[-1:]}")
        if code < 0:  # killed, by the system or by us: the call it was at has no peak
            found.append(None)
    return found


def _child(request: str, threads: int, timeout: float) -> tuple[str, int, str]:
    """(stdout, exit code, stderr) of a measuring process."""
    # Every tensor beyond 64 KiB is taken from the system and given back on its own, so that the peak is its sum.
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536", "OMP_NUM_THREADS": str(threads)}
    package = str(Path(__file__).resolve().parent.parent)
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [package, environment.get("PYTHONPATH", "")]))
    command = [sys.executable, "-m", "vision_attn.peak_memory"]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    ) as child:
        try:
            out, errors = child.communicate(request, timeout=timeout)
        except subprocess.TimeoutExpired:
            child.kill()
            out, errors = child.communicate()
        except BaseException:
            child.kill()
            raise
    return out, child.returncode, errors


def _serve() -> None:
    request = json.load(sys.stdin)
    import torch

    torch.set_num_threads(request["threads"])
    make = getattr(importlib.import_module(request["module"]), request["function"])
    for call in request["calls"]:
        try:
            peak: int | None = peak_bytes(make(**call), call.get("device", "cpu"))
        except (MemoryError, RuntimeError) as error:  # torch.OutOfMemoryError is a RuntimeError; a CPU's has no name
            if not isinstance(error, MemoryError) and "memory" not in str(error):
                raise
            peak = None
        print(json.dumps({"peak": peak}), flush=True)


if __name__ == "__main__":
    _serve()
