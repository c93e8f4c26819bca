"""How far a study is, and how long it will take."""

from __future__ import annotations

import sys
import time
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.progress import Progress as Bar

from vision_attn.contrast.estimate import cell_macs
from vision_attn.contrast.results import Cell, Result
from vision_attn.contrast.runner import Plan

_WINDOW = 3600.0  # seconds over which the speed is averaged
_EVERY = 60.0  # seconds between lines, where the output is no terminal


class Progress:
    """A bar on standard error; a line now and then where that is no terminal.

    The time left counts multiply-accumulates, not cells: a training on all images costs more than one on a few.

    Args:
        plan: of the study.
    """

    def __init__(self, plan: Plan) -> None:
        self._costs = {cell.id: cell_macs(plan, cell) for cell in (*plan.trials, *plan.cells)}
        self._console = Console(file=sys.stderr, highlight=False)
        self._bar = Bar(
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.fields[done]}/{task.fields[cells]}"),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            console=self._console,
            speed_estimate_period=_WINDOW,
        )
        self._task = self._bar.add_task("trainings", total=sum(self._costs.values()), done=0, cells=len(self._costs))
        self._done = 0
        self._due = 0.0

    def __enter__(self) -> Progress:
        if self._console.is_terminal:
            self._bar.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._console.is_terminal:
            self._bar.stop()

    def say(self, text: str) -> None:
        """A line above the bar."""
        self._bar.console.print(text, soft_wrap=True)

    def note(self, cell: Cell, result: Result, fresh: bool) -> None:
        """A cell has ended, now or (not ``fresh``) in an earlier call: that one tells nothing about the speed."""
        self._done += 1
        cost = self._costs[cell.id]
        if not fresh:
            self._bar.update(self._task, total=(self._bar.tasks[0].total or cost) - cost, done=self._done)
            return
        self._bar.update(self._task, advance=cost, done=self._done)
        if not result.done:
            self.say(f"failed: {cell.id}: {result.reason}")
        elif not self._console.is_terminal and (time.monotonic() > self._due or self._done == len(self._costs)):
            self._due = time.monotonic() + _EVERY
            left = self._bar.tasks[0].time_remaining
            ahead = f", about {left / 60:.0f} minutes left" if left else ""
            self.say(f"{self._done} of {len(self._costs)} trainings{ahead}")
