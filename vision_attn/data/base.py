"""What data modules share: the loaders of their splits."""

from __future__ import annotations

from typing import Any, ClassVar

from lightning.pytorch import LightningDataModule

from vision_attn.data.loader import rank_and_world
from vision_attn.data.sources import Split


class SplitData(LightningDataModule):
    """Loaders that every process has its share of.

    A subclass has ``split(name)`` and ``required(name)``, which give a split (the latter refuses where there is none),
    and ``batch_size``, ``eval_batch_size``, ``seed``, ``drop_last`` and ``num_workers``.
    """

    train_loader: ClassVar[Any]
    eval_loader: ClassVar[Any]
    split: Any
    required: Any
    batch_size: int
    eval_batch_size: int
    seed: int
    drop_last: bool
    num_workers: int

    def train_dataloader(self) -> Any:
        rank, world = rank_and_world()
        data = self.required("train")
        return self.train_loader(
            data,
            batch_size=self.batch_size,
            seed=self.seed,
            rank=rank,
            world=world,
            # Lightning's overfit_batches means the same few batches in every epoch
            shuffle=not getattr(self.trainer, "overfit_batches", 0),
            drop_last=self.drop_last,
            num_workers=self.num_workers,
            **self._train_options(data),
        )

    def _train_options(self, data: Any) -> dict[str, Any]:
        """What the loader of training batches takes beyond that."""
        return {}

    def val_dataloader(self) -> Any:
        """Validation batches; an empty list, which Lightning takes for "none", where there is no such split."""
        return [] if self.split("val") is None else self._eval_loader("val", *rank_and_world())

    def test_dataloader(self) -> Any:
        return self._eval_loader("test", *rank_and_world())

    def predict_dataloader(self) -> Any:
        return self._eval_loader("test", *rank_and_world())

    def whole_dataloader(self, name: Split) -> Any:
        """Evaluation batches of all of a split in this process, whatever others there are: what one does alone."""
        return self._eval_loader(name)

    def _eval_loader(self, name: Split, rank: int = 0, world: int = 1) -> Any:
        return self.eval_loader(
            self.required(name),
            batch_size=self.eval_batch_size,
            rank=rank,
            world=world,
            num_workers=self.num_workers,
        )
