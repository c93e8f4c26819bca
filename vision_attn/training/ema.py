"""Exponential moving average of the weights: what is validated, kept as best and exported."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import WeightAveraging
from torch import Tensor

from vision_attn.errors import UserError


@dataclass
class EmaConfig:
    """Averaging of the weights over the run.

    Attributes:
        decay: what one step keeps of the average; 0 switches averaging off. 0.999 looks back over about 1,000 steps.
        warmup: let the decay grow as (1 + n) / (10 + n) up to ``decay``, so that early averages forget the start.
        start_step: first optimizer step that enters the average.
        every: update the average every so many optimizer steps (``decay`` counts updates).
    """

    decay: float = 0.0
    warmup: bool = True
    start_step: int = 0
    every: int = 1

    def __post_init__(self) -> None:
        """Refuse a decay that is no average.

        Raises:
            UserError: ``decay`` outside 0 ... 1, or ``every`` below 1.
        """
        if not 0.0 <= self.decay < 1.0:
            raise UserError(f"ema.decay must lie in 0 ... 1 (1 excluded), got {self.decay}")
        if self.every < 1:
            raise UserError(f"ema.every must be 1 or more, got {self.every}")


class EMA(WeightAveraging):
    """Lightning's weight averaging with a decay that warms up, updated for all tensors at once.

    Validation runs on the averaged weights; checkpoints hold them as ``state_dict`` and the weights in
    training as ``current_model_state``, so a resume restores both.

    Args:
        config: decay, warm-up, start.
    """

    def __init__(self, config: EmaConfig) -> None:
        super().__init__(multi_avg_fn=self._average)
        self.config = config
        self._swapped = False

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Make the average.

        Raises:
            UserError: the strategy shards the weights, or they are not kept in float32.
        """
        if "FSDP" in type(trainer.strategy).__name__:
            raise UserError("averaging does not work with weights sharded by FSDP: set --ema.decay 0")
        if "true" in trainer.precision and trainer.precision != "32-true":  # half precision would round its steps off
            raise UserError(
                f"averaging needs weights in float32, not --trainer.precision {trainer.precision}: take bf16-mixed, or "
                "set --ema.decay 0"
            )
        self._device = trainer.strategy.root_device  # where the module will be only later
        super().setup(trainer, pl_module, stage)

    def should_update(self, step_idx: int | None = None, epoch_idx: int | None = None) -> bool:
        """After optimizer steps only, from ``start_step`` on."""
        return step_idx is not None and step_idx >= self.config.start_step and step_idx % self.config.every == 0

    def _average(self, averages: Sequence[Tensor], currents: Sequence[Tensor], num_averaged: Tensor | int) -> None:
        count = int(num_averaged)
        decay = min(self.config.decay, (1 + count) / (10 + count)) if self.config.warmup else self.config.decay
        if averages[0].is_floating_point():
            torch._foreach_lerp_(list(averages), list(currents), 1.0 - decay)
        else:  # counters of batch norm
            torch._foreach_copy_(list(averages), list(currents))

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Update; until ``start_step`` the average simply follows."""
        if trainer.global_step > self._latest_update_step and trainer.global_step - 1 < self.config.start_step:
            self._copy(pl_module)
            self._latest_update_step = trainer.global_step
            return
        super().on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)

    def _copy(self, pl_module: LightningModule) -> None:
        assert self._average_model is not None
        averages = [*self._average_model.module.parameters(), *self._average_model.module.buffers()]
        with torch.no_grad():
            torch._foreach_copy_(averages, [*pl_module.parameters(), *pl_module.buffers()])

    def _swap_models(self, pl_module: LightningModule) -> None:
        super()._swap_models(pl_module)
        self._swapped = not self._swapped

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Put the training weights back when a validation is broken off, so that what is saved is not mixed up."""
        if self._swapped:
            self._swap_models(pl_module)
