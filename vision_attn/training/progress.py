"""One line that lives while an epoch runs, and one that stays for each validation."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any, TextIO

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ProgressBar

from vision_attn.training.budget import Budget
from vision_attn.training.run_folder import RunFolder

LASTING, RISEN = 3, 1.25  # epochs, and times the lowest loss, after which a rise is no chance


class ProgressLine(ProgressBar):
    """Loss, accuracy, rate, speed and the time left.

    On a terminal a line is redrawn at most five times a second; elsewhere (log files) such a line is printed every half
    minute. Values are only read off the device when a line is drawn.

    Args:
        run: where the rows of metrics are.
        budget: the time budget, when there is one.
    """

    def __init__(self, run: RunFolder, budget: Budget | None = None) -> None:
        super().__init__()
        self.run, self.budget = run, budget
        self._live = sys.stderr.isatty()
        self._marks = _marks(sys.stderr if self._live else sys.stdout)
        self._every = 0.2 if self._live else 30.0
        self._drawn_at = 0.0
        self._enabled = True
        self._first_step = 0
        self._start = time.monotonic()
        self._rows = 0
        self._warned = False

    def disable(self) -> None:
        """Lightning calls this in every process but the first."""
        self._enabled = False

    def enable(self) -> None:
        """Undo :meth:`disable`."""
        self._enabled = True

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Say where the run lies."""
        self._first_step, self._start, self._rows = trainer.global_step, time.monotonic(), len(self.run.rows)
        self._drawn_at = self._start
        if self._enabled:
            size = self.run.summary
            again = f", continued at step {trainer.global_step:,}" if trainer.global_step else ""
            print(f"{size.get('model')}: {size.get('params') or 0:,} parameters -> {self.run.path}{again}", flush=True)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Redraw the line, now and then."""
        now = time.monotonic()
        if not self._enabled or now - self._drawn_at < self._every:
            return
        self._drawn_at = now
        total = trainer.num_training_batches
        done = batch_idx + 1
        bar = "" if math.isinf(total) else f" {_bar(done / total, self._marks)} {done}/{int(total)}"
        means = pl_module.means_so_far()  # type: ignore[operator]
        speed = means.pop("speed")
        values = "  ".join(
            f"{name} {means[name]:.4f}" for name in sorted(means, reverse=True) if _is_shown(name, pl_module)
        )
        left = self._left(trainer, pl_module)
        self._show(f"epoch {self._epoch(trainer)}{bar}  {values}  lr {pl_module.lr:.1e}  {speed:,.0f} img/s{left}")

    def on_validation_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """Show that a validation is going on."""
        now = time.monotonic()
        if trainer.state.fn != "fit" or trainer.sanity_checking:
            return
        if self._enabled and now - self._drawn_at >= self._every:
            self._drawn_at = now
            total = sum(float(n) for n in trainer.num_val_batches)
            done = _bar((batch_idx + 1) / max(1.0, total), self._marks)
            self._show(f"epoch {self._epoch(trainer)} validation {done}")

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """The line that stays."""
        self._print_row(trainer, pl_module)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """The line that stays, of an epoch without validation."""
        self._print_row(trainer, pl_module)

    def _print_row(self, trainer: Trainer, pl_module: LightningModule) -> None:
        rows = self.run.rows
        if not self._enabled or trainer.state.fn != "fit" or len(rows) <= self._rows:
            return
        self._rows = len(rows)
        row = rows[-1]
        parts = [f"epoch {self._epoch(trainer)}", f"step {row['step']:>6,}"]
        for stage in ("train", "val"):
            named = [(k.split("/")[1], v) for k, v in row.items() if k.startswith(f"{stage}/")]
            values = [f"{name} {value:.4f}" for name, value in named if _is_shown(name, pl_module)]
            parts += [f"{stage} {' '.join(sorted(values, reverse=True))}"] if values else []
        parts.append(f"lr {row['lr']:.1e}")
        if "images_per_second" in row:
            parts.append(f"{row['images_per_second']:>6,.0f} img/s")
        self._clear()
        print("  ".join(parts) + f"  {clock(row['seconds'])}{self._left(trainer, pl_module)}", flush=True)
        if not self._warned and (warning := rising(rows)):
            self._warned = True
            print(warning, file=sys.stderr, flush=True)

    def _epoch(self, trainer: Trainer) -> str:
        total = trainer.max_epochs
        limited = total is not None and total > 0 and trainer.max_steps < 0
        return (
            f"{trainer.current_epoch + 1:>{len(str(total))}}/{total}" if limited else f"{trainer.current_epoch + 1:>3}"
        )

    def _left(self, trainer: Trainer, pl_module: LightningModule) -> str:
        if self.budget is not None:
            return f"  {clock(max(0.0, self.budget.seconds - self.budget.elapsed))} left"
        done, total = trainer.global_step - self._first_step, pl_module.total_steps
        if done < 1 or math.isinf(total):  # type: ignore[arg-type]
            return ""
        to_do = total - trainer.global_step - pl_module.step_offset  # type: ignore[operator]
        left = (time.monotonic() - self._start) / done * to_do  # type: ignore[operator]
        return f"  {clock(max(0.0, float(left)))} left"

    def _show(self, text: str) -> None:
        if self._live:
            print(f"\r\x1b[K{text}", end="", file=sys.stderr, flush=True)
        else:
            print(text, flush=True)

    def _clear(self) -> None:
        if self._live:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)


def rising(rows: Sequence[Mapping[str, float]]) -> str:
    """A line for a user whose training comes apart slowly; empty where the loss does not keep rising.

    Args:
        rows: the metrics of all epochs so far.
    """
    losses = [row["train/loss"] for row in rows if "train/loss" in row]
    lowest = min(losses, default=0.0)
    if lowest <= 0 or len(losses) <= LASTING or min(losses[-LASTING:]) < RISEN * lowest:
        return ""
    return (
        f"the training loss has risen from {lowest:.3g} to {losses[-1]:.3g}, and stays there: "
        "if it does not fall soon, a third of --model.optimizer.lr may help."
    )


def _is_shown(name: str, pl_module: Any) -> bool:
    shown = getattr(pl_module, "shown", None)
    return shown is None or name in shown


def clock(seconds: float) -> str:
    """``1:02:03`` or ``2:03``."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def _marks(stream: TextIO) -> str:
    """What a bar is drawn with, done and to do: lines, where the stream has them."""
    lines = "━─"
    try:
        lines.encode(getattr(stream, "encoding", None) or "ascii")
    except (UnicodeEncodeError, LookupError):
        return "#-"
    return lines


def _bar(fraction: float, marks: str, width: int = 20) -> str:
    filled = round(min(1.0, fraction) * width)
    return marks[0] * filled + marks[1] * (width - filled)
