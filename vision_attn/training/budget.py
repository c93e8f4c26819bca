"""Training for a given wall-clock time."""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer

from vision_attn.errors import UserError

_UNITS = {"": 1.0, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86400.0}

NEVER = 10**9  # epochs


def parse_budget(text: str | float) -> float:
    """Seconds in ``10m``, ``90s``, ``1.5h``, ``1h30m`` or ``600``.

    Raises:
        UserError: not a duration, or not positive.
    """
    parts = re.findall(r"(\d+(?:\.\d+)?)\s*(min|[smhd]?)", str(text).strip().lower())
    whole = "".join(number + unit for number, unit in parts)
    seconds = sum(float(number) * _UNITS[unit] for number, unit in parts)
    if not parts or whole != re.sub(r"\s", "", str(text).lower()) or seconds <= 0:
        raise UserError(f"budget: {text!r} is no duration; write it like 10m, 90s, 1.5h, 1h30m or 600 (seconds)")
    return seconds


class Budget(Callback):
    """Stops training in time, and tells the module how much of the time is used.

    The clock runs from the first training step on, validations and checkpoints included; compiling, reading data and
    the pictures afterwards are not part of it. A resumed run goes on with the time that was left: none for a finished
    one, unless the budget is larger now. Before each step ``pl_module.budget_used`` is set to the fraction used of the
    time until the last validation must begin, so a schedule that follows it ends when training does. How long a
    validation takes is measured; before the first one it is guessed from the sanity check.

    Args:
        seconds: the budget.
        clock: seconds that only go up; tests put their own here.
    """

    def __init__(self, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.seconds = seconds
        self._clock = clock
        self._before = 0.0  # seconds used by earlier processes of this run
        self._start: float | None = None
        self._used = 0.0
        self._pause_start: float | None = None
        self._validation_seconds = 0.0
        self._step_start = 0.0
        self._step_seconds = 0.0
        self._complete = False  # nothing is missing after the last step: it is validated, if there are images for it

    @property
    def elapsed(self) -> float:
        """Seconds of the budget used so far."""
        return self._before + (0.0 if self._start is None else self._clock() - self._start)

    def on_sanity_check_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Note when the trial validation began."""
        self._pause_start = self._clock()

    def on_sanity_check_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Guess the length of a validation from a few of its batches."""
        if self._validation_seconds == 0.0 and self._pause_start is not None:
            ran = max(1, sum(int(n) for n in trainer.num_sanity_val_batches))
            batches = sum(float(n) for n in trainer.num_val_batches)
            share = batches / ran if batches != float("inf") else 1.0
            self._validation_seconds = (self._clock() - self._pause_start) * share
        self._pause_start = None

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Make no step when an earlier process used all of the time and came to its end."""
        if self._complete and self._left(trainer) <= 0.0:
            trainer.should_stop = True
            if trainer.is_global_zero:
                used = f"the budget of {self.seconds:,.0f} s is used up"
                print(f"{used}, no step is made: give a larger --budget to go on", file=sys.stderr, flush=True)

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Start the clock with the first batch; tell the module the fraction used."""
        now = self._clock()
        if self._start is None:
            self._start = self._step_start = now
        if self._pause_start is not None:  # from the end of a step over a validation to this step
            self._validation_seconds = now - self._pause_start
            self._pause_start = None
        if batch_idx % trainer.accumulate_grad_batches == 0:
            self._step_start = now
        end = max(1e-9, self.seconds - self._validation_seconds)
        # never backwards, although the measured length of a validation changes
        self._used = max(self._used, min(1.0, _agree(self.elapsed / end, trainer)))
        pl_module.budget_used = self._used  # type: ignore[assignment]

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Ask Lightning to validate and stop when another step would make the last validation late."""
        self._complete = False
        whole = (batch_idx + 1) % trainer.accumulate_grad_batches == 0
        if not (whole or trainer.is_last_batch):
            return  # half of a step would be lost
        if whole or not self._step_seconds:  # the last step of an epoch may be of fewer batches
            self._step_seconds = self._clock() - self._step_start
        left = self._left(trainer)
        if left <= 0:
            trainer.should_stop = True
            trainer.check_val_every_n_epoch = 1  # the last state is validated whatever the rhythm was
        elif left <= _agree(self._validation_seconds, trainer):
            trainer.check_val_every_n_epoch = NEVER  # after a validation now, there would be no time for the last one

    def _left(self, trainer: Trainer) -> float:
        """Seconds to spare if one more step and the last validation follow."""
        return _agree(self.seconds - self.elapsed - self._validation_seconds - self._step_seconds, trainer)

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Validation and what follows it (checkpoint, pictures of progress) count as its length."""
        if not trainer.sanity_checking:
            self._pause_start = self._clock()

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Note that this state was validated: checkpoints are written after this."""
        self._complete = not trainer.sanity_checking

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Note the end where nothing is validated."""
        if trainer.should_stop:
            self._complete = True

    def state_dict(self) -> dict[str, Any]:
        """Plain numbers for the checkpoint."""
        return {
            "seconds": self.seconds,
            "elapsed": self.elapsed,
            "used": self._used,
            "validation_seconds": self._validation_seconds,
            "step_seconds": self._step_seconds,
            "complete": self._complete,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on with the time that was left, or with what a budget changed since leaves."""
        self._before = float(state_dict["elapsed"])
        self._validation_seconds = float(state_dict["validation_seconds"])
        self._step_seconds = float(state_dict.get("step_seconds", 0.0))
        self._complete = bool(state_dict.get("complete", False))
        if float(state_dict.get("seconds", self.seconds)) == self.seconds:
            self._used = float(state_dict["used"])  # of another budget it would be another fraction


def _agree(value: float, trainer: Trainer) -> float:
    """The value of process 0, in every process: clocks differ, decisions and learning rates must not."""
    if trainer.world_size == 1 or not torch.distributed.is_initialized():
        return value
    shared = torch.tensor([value], dtype=torch.float64, device=trainer.strategy.root_device)
    torch.distributed.broadcast(shared, src=0)
    return float(shared.item())
