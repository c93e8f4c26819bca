"""A study from its configuration to its folder: plan, resume, run, report."""

from __future__ import annotations

import contextlib
import json
import os
import platform
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from vision_attn import __version__
from vision_attn.atomic import atomic_write_text
from vision_attn.contrast.cells import plan_cells, plan_trials
from vision_attn.contrast.config import ContrastConfig
from vision_attn.contrast.identity import code_hash
from vision_attn.contrast.matching import Size, check_match, measure_models
from vision_attn.contrast.results import (
    IDENTITY,
    STAMP,
    Cell,
    Result,
    Study,
    choose_rates,
    ended_at,
    load_study,
    read_result,
    read_study_json,
    write_cell,
    write_json,
    write_result,
    write_trace,
)
from vision_attn.contrast.subsets import StudyData, check_subsets, load_data
from vision_attn.contrast.training import Outcome, pick_device
from vision_attn.errors import UserError

_GPU_JOBS = 4

Note = Callable[[Cell, Result, bool], None]


class Executor(Protocol):
    """Runs cells somewhere and gives what they gave, in the order in which they end."""

    def run(self, cells: list[Cell], started: Callable[[Cell], None]) -> Iterator[tuple[Cell, Outcome]]:
        """All of ``cells``; ``started`` is told when one begins."""
        ...


@dataclass
class Plan:
    """A study before anything is trained.

    Attributes:
        config: what was asked for.
        data: the images.
        models: the models and their costs.
        match: see :func:`~vision_attn.contrast.matching.check_match`.
        trials: the trainings that choose learning rates.
        cells: the grid, without learning rates.
    """

    config: ContrastConfig
    data: StudyData
    models: list[Size]
    match: dict[str, Any]
    trials: list[Cell]
    cells: list[Cell]

    @property
    def stamp(self) -> dict[str, str]:
        """What every file of the study carries."""
        return dict(zip(STAMP, (self.config.hash(), self.data.hash, __version__, code_hash()), strict=True))


def make_plan(config: ContrastConfig) -> Plan:
    """Read the data, check the models against it and each other, and list the cells.

    Raises:
        UserError: whatever is wrong with data, models, or the sizes of subsets.
    """
    data = load_data(config.data)
    models = measure_models(config, len(data.labels), data.img_size)
    match = check_match(config, models, len(data.labels), data.img_size)
    check_subsets(config, data)
    total = len(data.train)
    return Plan(config, data, models, match, plan_trials(config, total), plan_cells(config, total, {}))


def machine_facts(config: ContrastConfig, device: str | None = None) -> dict[str, Any]:
    """What of the machine numbers and times depend on; it is not named.

    Args:
        config: of the study.
        device: words for the device of the cells, where they run elsewhere.
    """
    return {
        "system": platform.system(),
        "cpu": _cpu_name(),
        "cores": usable_cores(),
        "threads": config.threads,
        "device": device or _device_name(pick_device(config.device)),
        "torch": torch.__version__,
        "python": platform.python_version(),
    }


def usable_cores() -> int:
    """CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def default_jobs(config: ContrastConfig) -> int:
    """As many cells side by side as there are cores for; on a GPU, where each takes memory for itself, at most 4."""
    jobs = max(1, usable_cores() // config.threads)
    return jobs if pick_device(config.device).type == "cpu" else min(jobs, _GPU_JOBS)


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def _cpu_name() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


# -- the folder -------------------------------------------------------------------------------------


def open_folder(folder: Path, plan: Plan, command: str, settings: str, device: str | None = None) -> bool:
    """Make the study's folder, or find the same study in it.

    Args:
        folder: of the study.
        plan: of the study.
        command: that runs it, kept in ``study.json``.
        settings: the configuration as YAML that ``--config`` takes, kept in ``config.yaml``.
        device: words for the device of the cells, where they run elsewhere.

    Returns:
        Whether the study was there already.

    Raises:
        UserError: something else is there; nothing was changed.
    """
    if folder.exists() and not folder.is_dir():
        raise UserError(f"--output {folder} is a file: name a folder.")
    if (folder / "study.json").exists():
        _check_same(folder, plan)
        return True
    if folder.exists() and any(folder.iterdir()):
        raise UserError(f"--output {folder} holds other files and no study: name an empty or a new folder.")
    tree: dict[str, Any] = {
        **plan.stamp,
        "command": command,
        "started": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "machine": machine_facts(plan.config, device),
        "data": plan.data.facts(plan.config.data.name),
        "models": [asdict(size) for size in plan.models],
        "match": plan.match,
        "config": plan.config.tree(),
        "trials": [asdict(cell) for cell in plan.trials],
        "cells": [asdict(cell) for cell in plan.cells],
    }
    write_json(folder / "study.json", tree)
    atomic_write_text(folder / "config.yaml", settings)
    return False


def other_code(folder: Path) -> str:
    """A warning when the study in ``folder`` was begun by other sources than these; empty otherwise."""
    begun = str(read_study_json(folder).get("code", ""))
    if begun == code_hash():
        return ""
    return (
        f"warning: the study in {folder} was begun by other code ({begun or 'not recorded'}, now {code_hash()}): cells "
        "that are still to be trained may not compare with those that are done. The report will say so."
    )


@contextlib.contextmanager
def claimed(folder: Path) -> Iterator[None]:
    """Keeps other processes from running the study in ``folder`` while the block runs.

    Raises:
        UserError: one does already.
    """
    try:
        import fcntl
    except ModuleNotFoundError:  # not on this system: two processes would only do the same work twice
        yield
        return
    with (folder / ".lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(f"{folder}: another process is running this study.") from None
        yield


def _check_same(folder: Path, plan: Plan) -> None:
    there = read_study_json(folder)
    stamp = plan.stamp
    changed = [key for key in IDENTITY if there[key] != stamp[key]]
    if not changed:
        return
    advice = "Nothing was changed there; give this study a folder of its own with --output."
    if changed == ["version"]:
        raise UserError(f"{folder} was made by version {there['version']}, this is {__version__}. {advice}")
    if "config_hash" not in changed:
        raise UserError(f"{folder} holds this study on other images (data hash {there['data_hash']}). {advice}")
    names = list(_differences(there["config"], plan.config.tree()))
    shown = ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
    raise UserError(f"{folder} holds another study; different there: {shown}. {advice}")


def _differences(a: Any, b: Any, prefix: str = "") -> Iterator[str]:
    """Dotted names at which two trees differ, with both values."""
    if isinstance(a, dict) and isinstance(b, dict):
        for key in [*a, *(key for key in b if key not in a)]:
            yield from _differences(a.get(key), b.get(key), f"{prefix}{key}.")
    elif a != b:
        yield f"{prefix.rstrip('.')} ({json.dumps(a)} there, {json.dumps(b)} here)"


# -- running ----------------------------------------------------------------------------------------


def run_study(
    plan: Plan,
    folder: Path,
    executor: Executor,
    *,
    note: Note = lambda cell, result, fresh: None,
    retry_failed: bool = False,
) -> Study:
    """Run what is missing of a study whose folder is open, and write its tables and its report.

    Args:
        plan: of the study.
        folder: opened by :func:`open_folder`.
        executor: where cells run.
        note: told of every cell that has ended, and whether it did so now or in an earlier call.
        retry_failed: run cells that failed once more; trials only where no rate of a model and size worked and none of
            its cells is done, because a rate that is chosen otherwise now would not be the one of those.

    Raises:
        UserError: a cell's folder is broken; the message names it.
    """
    stamp = plan.stamp
    before = {cell.id: how for cell in plan.cells if (how := ended_at(folder / "cells", cell, stamp)) is not None}
    tried = _read_ended(folder / "trials", plan.trials, stamp)
    if retry_failed:
        worked = [result.cell for result in tried.values() if result.done]
        worked += [cell for cell in plan.cells if before.get(cell.id, ("",))[0] == "done"]
        fixed = {(cell.model, cell.size) for cell in worked}
        tried = {name: result for name, result in tried.items() if (result.cell.model, result.cell.size) in fixed}
    trials = _run_missing(folder / "trials", plan.trials, tried, executor, stamp, note)
    cells = plan_cells(plan.config, len(plan.data.train), choose_rates(trials))
    # a failure at a rate that is not chosen any more says nothing: such a cell is run again whether asked or not
    dropped = {
        cell.id
        for cell in cells
        if (how := before.get(cell.id)) is not None and how[0] == "failed" and (retry_failed or how[1] != cell.lr)
    }
    ended = _read_ended(folder / "cells", [cell for cell in cells if cell.id not in dropped], stamp)
    for name in dropped:  # before study.json tells their new rates, so that it never contradicts what lies there
        shutil.rmtree(folder / "cells" / name, ignore_errors=True)
    tree = read_study_json(folder)
    if tree["cells"] != [asdict(cell) for cell in cells]:
        write_json(folder / "study.json", {**tree, "cells": [asdict(cell) for cell in cells]})
    _run_missing(folder / "cells", cells, ended, executor, stamp, note)
    return report_study(folder)


def report_study(folder: Path) -> Study:
    """Write tables and report of a study, finished or not."""
    study = load_study(folder)
    study.write_tables()
    report(study)
    return study


def _read_ended(place: Path, cells: list[Cell], stamp: dict[str, str]) -> dict[str, Result]:
    """What has ended, by id. All are looked at before the first one runs: a broken one is found at once."""
    ended = [result for cell in cells if (result := read_result(place, cell, stamp)) is not None]
    return {result.cell.id: result for result in ended}


def _run_missing(
    place: Path,
    cells: list[Cell],
    ended: dict[str, Result],
    executor: Executor,
    stamp: dict[str, str],
    note: Note,
) -> list[Result]:
    results = dict(ended)
    for result in results.values():
        note(result.cell, result, False)
    missing = [cell for cell in cells if cell.id not in results]
    for cell, outcome in executor.run(missing, lambda cell: _start(place, cell, stamp)):
        made = {**stamp, "code": outcome.code or stamp["code"]}  # a process elsewhere may have other sources
        outcome.result.code = made["code"]
        if outcome.trace:
            write_trace(place, cell, outcome.trace, made)
        write_result(place, outcome.result, made, outcome.looks)
        results[cell.id] = outcome.result
        note(cell, outcome.result, True)
    return [results[cell.id] for cell in cells]


def _start(place: Path, cell: Cell, stamp: dict[str, str]) -> None:
    """Empty the folder of a cell that an interruption left unfinished, or that failed and is run again."""
    shutil.rmtree(place / cell.id, ignore_errors=True)
    write_cell(place, cell, stamp)


def report(study: Study) -> None:
    """Statistics, figures and ``report.html``."""
    from vision_attn.contrast.report import write_report

    write_report(study, study.folder)
