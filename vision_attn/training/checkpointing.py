"""When to save, and how to save so that nothing is ever half-written."""

from __future__ import annotations

import math
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.plugins.io import TorchCheckpointIO
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Checkpoint

from vision_attn.atomic import atomic_write, remove_leftovers
from vision_attn.errors import UserError
from vision_attn.training.interrupt import Interrupted, StopSignal
from vision_attn.training.run_folder import RunFolder, last_checkpoint


class AtomicCheckpointIO(TorchCheckpointIO):
    """Lightning's file format, written next to the old file and moved into its place."""

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        """Write ``checkpoint`` completely or not at all.

        Raises:
            UserError: the disk is full; the previous checkpoint is whole.
        """
        atomic_write(path, lambda temporary: torch.save(checkpoint, temporary))


class RunCheckpoint(Checkpoint):
    """Keeps ``checkpoints/last.ckpt`` and ``checkpoints/best.ckpt`` of a run.

    ``last`` is saved after each validation (or epoch, without one), every ``every_seconds`` in mid-epoch, and when the
    user or the cluster asks the process to stop. ``best`` is the state with the highest ``monitor``; of equal ones
    the latest. Weights that are not finite are never saved.

    Args:
        run: the run folder.
        monitor: metric to maximize.
        every_seconds: longest time that a kill may cost.
        stop: tells whether somebody wants the process to end.
        clock: seconds that only go up.
    """

    def __init__(
        self,
        run: RunFolder,
        monitor: str = "val/acc",
        every_seconds: float = 180.0,
        stop: StopSignal | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.run = run
        self.monitor = monitor
        self.every_seconds = every_seconds
        self.stop = stop or StopSignal()
        self.best_score: float | None = None
        self._clock = clock
        self._saved_at = clock()
        self._saved_step = -1

    @property
    def last_path(self) -> Path:
        """``<run>/checkpoints/last.ckpt``."""
        return last_checkpoint(self.run.path)

    @property
    def best_path(self) -> Path:
        """``<run>/checkpoints/best.ckpt``."""
        return self.run.path / "checkpoints" / "best.ckpt"

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Clear away what a killed process of this run left half-written: each such file is as big as a checkpoint."""
        if stage == "fit" and self.run.resumed and trainer.is_global_zero:  # the folder is this run's alone by now
            for path in (self.last_path, self.best_path, self.run.path / "model.safetensors"):
                remove_leftovers(path)
            _link_name(self.best_path).unlink(missing_ok=True)

    def on_sanity_check_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """A signal during the trial validation is answered after the first step."""
        self.stop.take_back()

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Count the time to the first save from here; have the last epoch validated, also when it is gone on with.

        Raises:
            UserError: validations, which save, would come between batches whose gradients are added up.
        """
        refuse_broken_steps(trainer)
        self._saved_at = self._clock()
        self.stop.take_back()
        self._validate_last_epoch(trainer)

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Have the last epoch validated, whatever the rhythm of validations is."""
        self._validate_last_epoch(trainer)

    @staticmethod
    def _validate_last_epoch(trainer: Trainer) -> None:
        if trainer.max_epochs is not None and trainer.current_epoch + 1 == trainer.max_epochs:
            trainer.check_val_every_n_epoch = 1 if trainer.check_val_every_n_epoch else None

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Save in mid-epoch when it is time to, or when the process shall end."""
        due = self._clock() - self._saved_at >= self.every_seconds
        due, stop = self._agree(trainer, due, self.stop.requested)
        if not (due or stop) or (batch_idx + 1) % trainer.accumulate_grad_batches:
            return  # accumulated gradients are in no checkpoint
        if trainer.is_last_batch or trainer.should_stop or _validation_follows(trainer):
            return  # what follows saves anyway: a state between an epoch's end and its validation cannot be resumed
        self.save(trainer)
        if stop:
            raise Interrupted(self.last_path)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Save the last state, and the best when it is."""
        if trainer.sanity_checking or trainer.state.fn != "fit":
            return
        score = trainer.callback_metrics.get(self.monitor)
        is_best = score is not None and (self.best_score is None or float(score) >= self.best_score)
        if is_best:
            self.best_score = float(score)  # type: ignore[arg-type]
        self.save(trainer)
        if is_best and trainer.is_global_zero:
            link_or_copy(self.last_path, self.best_path)
        if self._agree(trainer, False, self.stop.requested)[1]:
            raise Interrupted(self.last_path)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Save what no validation saved."""
        if self._saved_step != trainer.global_step:
            self.save(trainer)
            if self._agree(trainer, False, self.stop.requested)[1]:
                raise Interrupted(self.last_path)

    def save(self, trainer: Trainer) -> None:
        """Write ``last.ckpt`` (all processes take part).

        Raises:
            UserError: the weights are not finite, so that nothing could go on from them; what was saved before is kept.
        """
        if self._agree(trainer, not _is_finite(trainer.lightning_module))[0]:
            raise UserError(self._what_is_lost(trainer))
        trainer.save_checkpoint(self.last_path)
        self._saved_at = self._clock()
        self._saved_step = trainer.global_step

    def _what_is_lost(self, trainer: Trainer) -> str:
        kept = next((path for path in (self.best_path, self.last_path) if path.exists()), None)
        return (
            f"the weights became NaN or infinite by step {trainer.global_step} (epoch {trainer.current_epoch}) and are "
            f"not saved. {f'Go on with --ckpt_path {kept} and' if kept else 'Start again with'} a smaller "
            "--model.optimizer.lr, or with --trainer.gradient_clip_val 1."
        )

    def state_dict(self) -> dict[str, Any]:
        """Plain numbers for the checkpoint."""
        return {"best_score": self.best_score, "monitor": self.monitor}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on comparing with the best so far, if this run has it: a new run may start from another's checkpoint."""
        if state_dict.get("monitor") == self.monitor and self.run.resumed and self.best_path.exists():
            self.best_score = state_dict["best_score"]

    @staticmethod
    def _agree(trainer: Trainer, *flags: bool) -> list[bool]:
        """Each flag, true everywhere when it is true anywhere."""
        if trainer.world_size == 1:
            return list(flags)
        shared = torch.tensor(flags, dtype=torch.int32, device=trainer.strategy.root_device)
        torch.distributed.all_reduce(shared, op=torch.distributed.ReduceOp.MAX)
        return [bool(flag) for flag in shared.tolist()]


def link_or_copy(source: Path, target: Path) -> None:
    """Make ``target`` the same file as ``source`` in one step: by a hard link, or a copy where links do not exist.

    Sharing is safe because checkpoints are replaced, never written into. Folders, as sharding strategies save them, are
    copied.
    """
    if source.is_dir():
        shutil.rmtree(target, ignore_errors=True)
        shutil.copytree(source, target)
        return
    temporary = _link_name(target)
    temporary.unlink(missing_ok=True)
    try:
        os.link(source, temporary)
        os.replace(temporary, target)
    except OSError:
        atomic_write(target, lambda path: shutil.copyfile(source, path))


def _is_finite(module: LightningModule) -> bool:
    """Whether all parameters are, those of this process where they are shared out. Reads off the device."""
    values = [getattr(parameter, "to_local", parameter.detach)() for parameter in module.parameters()]
    return bool(torch.stack([value.detach().isfinite().all() for value in values]).all()) if values else True


def _link_name(target: Path) -> Path:
    return target.with_name(f".{target.name}.link")


def refuse_broken_steps(trainer: Trainer) -> None:
    """Refuses validations between batches whose gradients are added up: no checkpoint holds a sum that is not whole.

    Raises:
        UserError: saying which rhythm would do.
    """
    several, length = trainer.accumulate_grad_batches, trainer.num_training_batches
    every: Any = trainer.val_check_batch  # None: by the clock
    counts_on = trainer.check_val_every_n_epoch is None  # over the ends of epochs, where a sum ends, too
    if several == 1 or (not counts_on and every in (math.inf, length)):
        return
    if every is None or every % several or (counts_on and length % several):
        raise UserError(
            f"--trainer.val_check_interval would have validations, which save, between the {several} batches whose "
            "gradients are added up (--trainer.accumulate_grad_batches): give it as a multiple of "
            f"{several} batches, or validate after epochs."
        )


def _validation_follows(trainer: Trainer) -> bool:
    loop = trainer.fit_loop.epoch_loop
    return bool(loop._should_check_val_fx(trainer.fit_loop._data_fetcher))  # type: ignore[arg-type]
