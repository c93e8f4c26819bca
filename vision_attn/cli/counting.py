"""How much of a split an evaluation has looked at."""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer


class Counter(Callback):
    """Counts what is evaluated.

    Attributes:
        images: how many (or how many sequences of them), over all processes.
        limited: whether that is not the whole split.
    """

    def __init__(self) -> None:
        self.images, self.limited, self._batches = 0, False, 0

    def on_validation_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """One more batch."""
        self.images += len(batch["image"])
        self._batches += 1

    def on_validation_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Add up the shares of all processes, which have as many batches each."""
        loader: Any = trainer.val_dataloaders if trainer.validating else trainer.test_dataloaders
        self.limited = self._batches < len(loader)
        images = torch.tensor(self.images, device=pl_module.device)
        self.images = int(trainer.strategy.reduce(images, reduce_op="sum"))

    on_test_batch_end = on_validation_batch_end
    on_test_epoch_end = on_validation_epoch_end
