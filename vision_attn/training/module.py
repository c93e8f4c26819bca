"""What every LightningModule of this package shares: optimizer, schedule, random state, running means, NaN check."""

from __future__ import annotations

import math
import time
import warnings
from pathlib import Path
from typing import Any, cast

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import WeightAveraging
from torch import Tensor

from vision_attn.errors import UserError
from vision_attn.training.optimizers import (
    OptimizerConfig,
    adapt_state,
    build_optimizer,
    changes,
    hyperparameters,
    parameter_names,
)
from vision_attn.training.precision import widest
from vision_attn.training.schedule import lr_factor_by_budget, lr_factor_by_step


class TrainingModule(pl.LightningModule):
    """Base of :class:`~vision_attn.training.classifier.Classifier` and of the modules of other tasks.

    A subclass sets ``self.model`` (with ``model.config``), and calls :meth:`record` in ``training_step``.
    Checkpoints carry ``model.config`` as ``hyper_parameters["config"]``, in plain types.

    Args:
        optimizer: optimizer and schedule; None for evaluation only.
        seed: of the random state of every training step.
    """

    model: Any  # a module with .config
    shown: frozenset[str] | None = None  # the metrics that a line of progress has room for; None: all

    def __init__(self, optimizer: OptimizerConfig | None = None, seed: int = 0) -> None:
        super().__init__()
        self.optimizer_config = optimizer or OptimizerConfig()
        self.seed = seed
        self.started = False  # from weights, rather than from scratch
        self.budget_used: float | None = None  # set by the Budget callback before each step
        self._ndims: dict[str, int] = {}
        self.total_steps = math.inf
        self.step_offset = 0  # what the schedule is ahead of the steps taken; see _schedule_step
        self._epoch_steps = 0  # of an epoch, where epochs are what ends the run
        self.lr = 0.0
        self._sums: dict[str, Tensor] = {}
        self._images = 0
        self._seconds = 0.0
        self._mark = 0.0  # when the time of the next step began to count

    # -- what a task may do otherwise ---------------------------------------------------------------

    def on_fit_start(self) -> None:
        """A model that reads its first layer off the data does so now; one with weights has it already."""
        if not self.trainer.ckpt_path and not self.started:
            self.init_from(getattr(self.trainer, "datamodule", None))

    def start_from(self, weights: str | None) -> None:
        """Fill ``self.model`` from a checkpoint before training; errors and warnings as of ``transfer.start_from``."""
        if weights is not None:
            from vision_attn.checkpoints.transfer import start_from

            start_from(self.model, weights)
            self.started = True

    def init_from(self, data: Any) -> None:
        """Let a model with a whitening layer see training images, where the data can show some."""
        if hasattr(self.model, "init_whitening") and hasattr(data, "plain_images"):
            self.model.init_whitening(data.plain_images(5000))

    def draw(self, run: Any, data: Any, device: torch.device | str = "cpu") -> list[Path]:
        """The pictures of a finished run; returns the files written."""
        from vision_attn.training import pictures

        return pictures.draw_all(run, self, data, device)

    # -- optimizer and schedule ---------------------------------------------------------------------

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """The optimizer alone: rates are set before every step, no scheduler object counts along."""
        if self.optimizer_config.name == "muon" and "FSDP" in type(self.trainer.strategy).__name__:
            raise UserError("muon needs whole matrices, FSDP shards them: choose --model.optimizer.name adamw")
        return build_optimizer(self.model, self.optimizer_config, self._ndims)

    def setup(self, stage: str) -> None:
        """Note the shapes of the parameters before a strategy may shard them."""
        if not self._ndims:
            self._ndims = {name: p.ndim for name, p in self.model.named_parameters()}

    def on_train_start(self) -> None:
        """Read the length of the run off the trainer; a resumed one goes on by the numbers it was given now."""
        trainer = self.trainer
        self.total_steps = trainer.max_steps if trainer.max_steps >= 0 else math.inf
        self._epoch_steps = 0
        if trainer.max_epochs is not None and trainer.max_epochs >= 0 and not math.isinf(trainer.num_training_batches):
            steps = math.ceil(trainer.num_training_batches / trainer.accumulate_grad_batches)
            if steps * trainer.max_epochs < self.total_steps:
                self.total_steps, self._epoch_steps = steps * trainer.max_epochs, steps
        if trainer.ckpt_path:
            self._find_place()
            # FSDP restores optimizers past on_load_checkpoint: the old run's numbers, which end here
            own = self.configure_optimizers().param_groups
            for group, given in zip(trainer.optimizers[0].param_groups, own, strict=True):
                group.update(hyperparameters(given))
        self._sums = {name: value.to(self.device) for name, value in self._sums.items()}
        self._mark = time.perf_counter()

    def _find_place(self) -> None:
        """Count the batches of the epoch that a resumed run is in as they are now.

        With another global batch an epoch has more or fewer of them, and Lightning goes on counting the old ones: it
        would end the epoch too early, or find no batch where it expects one and leave out the validation.
        """
        trainer = self.trainer
        progress, loader = trainer.fit_loop.epoch_loop.batch_progress, cast(Any, trainer.train_dataloader)
        current, length = progress.current, trainer.num_training_batches
        before: int | None = getattr(loader, "resized_from", None)
        if math.isinf(length):
            return
        if progress.is_last_batch:  # the epoch is over
            place = int(length)
        elif before is not None:
            place = min(loader.place, int(length) - 1)  # one is left, so that this epoch ends as others do
            place -= place % trainer.accumulate_grad_batches
            loader.place = place
            if trainer.is_global_zero:
                warnings.warn(
                    f"The checkpoint stopped within an epoch of batches of {before} images, now they have "
                    f"{loader.global_batch}: the rest of its epoch may repeat some images, and skip others where "
                    "batches are grouped by shape.",
                    stacklevel=2,
                )
        else:
            return
        moved = place - current.ready
        for key in ("ready", "started", "processed", "completed"):
            setattr(current, key, getattr(current, key) + moved)

    def _schedule_step(self, batch_idx: int) -> int:
        """The optimizer step, from 0, that the schedule has come to.

        In a run of epochs it follows from the place in them. That is the number of steps taken, unless a resumed run
        took earlier ones with another global batch: the schedule then still ends with the run.
        """
        if not self._epoch_steps:
            return self.global_step
        return self.current_epoch * self._epoch_steps + batch_idx // self.trainer.accumulate_grad_batches

    def on_train_epoch_start(self) -> None:
        """Start the watch: an epoch's first step includes opening the data."""
        self._mark = time.perf_counter()

    def on_validation_end(self) -> None:
        """Restart the watch: validations do not count as training time."""
        self._mark = time.perf_counter()

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Make the random state and the learning rate of this step functions of its number.

        A run resumed in mid-epoch then draws the same dropout masks and takes the same rates as one that was
        never interrupted.
        """
        seed_generators(step_seed(self.seed, self.current_epoch, batch_idx, self.global_rank), self.device)
        config = self.optimizer_config
        floor = config.min_lr / config.lr if config.lr else 0.0
        shape = (config.warmup, config.schedule, floor, config.drop_at, config.drop_factor)
        if self.budget_used is not None:
            factor = lr_factor_by_budget(self.budget_used, self.global_step, *shape)
        else:
            step = self._schedule_step(batch_idx)
            self.step_offset = step - self.global_step
            factor = lr_factor_by_step(step, self.total_steps, *shape)
        self.lr = config.lr * factor
        for group in self.trainer.optimizers[0].param_groups:
            group["lr"] = group["peak_lr"] * factor

    # -- running means ------------------------------------------------------------------------------

    def record(self, count: int, **sums: Tensor) -> None:
        """Add this batch's sums over ``count`` samples; no value is read off the device here."""
        for name, value in sums.items():
            value = value.detach()
            self._sums[name] = self._sums[name] + value if name in self._sums else value
        self._images += count

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Watch the loss: at every step where reading it is free (CPU), otherwise now and then."""
        now = time.perf_counter()
        self._seconds, self._mark = self._seconds + now - self._mark, now
        if 0 <= self.trainer.max_steps <= self.global_step:  # otherwise a run that ends in mid-epoch is not validated
            self.trainer.should_stop = True
            self.trainer.check_val_every_n_epoch = 1
        every = 1 if self.device.type == "cpu" else self.trainer.log_every_n_steps  # type: ignore[attr-defined]
        if self.global_step % every == 0:
            loss = float(outputs["loss"])
            if not math.isfinite(loss):
                raise UserError(
                    f"the loss became {loss} at step {self.global_step} (epoch {self.current_epoch}, "
                    f"lr {self.lr:.2g}). Try a smaller --model.optimizer.lr, a longer --model.optimizer.warmup, "
                    "--trainer.gradient_clip_val 1 or --trainer.precision 32-true."
                )

    def take_means(self) -> dict[str, float]:
        """Means of what :meth:`record` saw since the last call, over all processes, and the speed.

        Returns:
            ``train/<name>`` for every recorded sum, ``images`` (how many) and ``seconds`` (training alone, loading
            included, validation not); empty when nothing was seen.
        """
        if not self._sums:
            return {}
        *sums, images = self._over_processes().tolist()
        means = {f"train/{name}": total / images for name, total in zip(sorted(self._sums), sums, strict=True)}
        means |= {"images": images, "seconds": self._seconds}
        self._sums, self._images, self._seconds = {}, 0, 0.0
        return means

    def _over_processes(self) -> Tensor:
        """The sums in the order of their names, and the number of images, over all processes: all of them must ask."""
        dtype = widest(self.device)
        images = torch.tensor(float(self._images), dtype=dtype, device=self.device)
        values = torch.stack([self._sums[name].to(dtype) for name in sorted(self._sums)] + [images])
        if self.trainer.world_size > 1:
            torch.distributed.all_reduce(values)
        return values

    def means_so_far(self) -> dict[str, float]:
        """What :meth:`take_means` would say of this process alone, without forgetting it; reads off the device."""
        count = max(1, self._images)
        seconds = self._seconds + time.perf_counter() - self._mark
        return {name: float(value) / count for name, value in self._sums.items()} | {"speed": count / seconds}

    # -- checkpoints --------------------------------------------------------------------------------

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Tell how the model is built again, and what a resumed run must know of this one: in plain types and tensors.

        Lightning saves with all processes, so they may add up their sums here.
        """
        checkpoint["hyper_parameters"] = {"config": self.model.config}
        if checkpoint.get("optimizer_states"):
            checkpoint["optimizer_names"] = parameter_names(self, self.trainer.optimizers[0])
        if self._sums:  # in mid-epoch
            sums, images = self._sums, self._images  # in their own precision, to go on exactly
            if self.trainer.world_size > 1:
                *totals, count = self._over_processes().cpu()
                sums, images = dict(zip(sorted(sums), totals, strict=True)), int(count)
            sums = {name: value.detach().clone().cpu() for name, value in sums.items()}
            seconds = self._seconds + time.perf_counter() - self._mark
            checkpoint["running_means"] = {"sums": sums, "images": images, "seconds": seconds}

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Go on where the run was, but with the optimizer's numbers that were given now.

        Where averaging has been switched off, with the weights that were in training: the optimizer's state is theirs.

        Raises:
            UserError: another optimizer, to which the state that was saved says nothing.
        """
        if self._trainer is None or self.trainer.state.fn != "fit":
            return
        averages = any(isinstance(callback, WeightAveraging) for callback in self.trainer.callbacks)  # type: ignore[attr-defined]
        if "current_model_state" in checkpoint and not averages:
            checkpoint["state_dict"] = checkpoint["current_model_state"]
        if checkpoint.get("optimizer_states"):
            optimizer, saved = self.configure_optimizers(), checkpoint["optimizer_states"][0]
            names = parameter_names(self, optimizer)
            checkpoint["optimizer_states"] = [adapt_state(saved, checkpoint.get("optimizer_names"), optimizer, names)]
            changed = changes(saved["param_groups"], optimizer.param_groups)
            if changed and self.trainer.is_global_zero:
                print(f"goes on with other settings of the optimizer: {changed}", flush=True)
        if "running_means" in checkpoint:
            means = checkpoint["running_means"]
            mine = self.trainer.is_global_zero  # they are over all processes, whose sums will be added up again
            self._sums = {k: v if mine else torch.zeros_like(v) for k, v in means["sums"].items()}
            self._images, self._seconds = means["images"] if mine else 0, means["seconds"]


def seed_generators(seed: int, device: torch.device) -> None:
    """Seed the generators that a step may use.

    Not ``torch.manual_seed``: without a GPU that notes down a call, with its stack, for each kind of GPU that may
    still come, which takes two milliseconds.
    """
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        torch.cuda.manual_seed(seed)
    elif device.type == "mps":
        torch.mps.manual_seed(seed)


def step_seed(seed: int, epoch: int, batch: int, rank: int) -> int:
    """One 63-bit seed out of four small numbers (the finalizer of splitmix64 over their mixture)."""
    mask = (1 << 64) - 1
    value = 0
    for part in (seed, epoch, batch, rank):
        value = (value ^ (part & mask)) * 0x9E3779B97F4A7C15 & mask
        value = (value ^ value >> 30) * 0xBF58476D1CE4E5B9 & mask
        value = (value ^ value >> 27) * 0x94D049BB133111EB & mask
        value ^= value >> 31
    return value >> 1
