"""Sequences of labelled images whose answer is the order that sorts them: the data of a pointer network."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vision_attn.data.config import AugmentConfig
from vision_attn.data.datamodule import ImageData
from vision_attn.data.loader import EvalLoader, TrainLoader, rank_and_world
from vision_attn.data.randomness import Stream, hashes
from vision_attn.data.sets import MemorySet
from vision_attn.data.sources import Split
from vision_attn.errors import UserError

LONGEST = 1024  # images in a sequence; a part of the number that randomness is keyed by
_OFF = AugmentConfig()


def sorting_order(labels: Tensor) -> Tensor:
    """The indices that sort each row ascending; of equal labels the one further left comes first.

    Args:
        labels: (..., n) int64.

    Returns:
        (..., n) int64: place 0 holds the index of the smallest label.
    """
    return labels.argsort(dim=-1, stable=True)


@dataclass
class SequenceSet(MemorySet):
    """Images in memory, and how many sequences are drawn from them in one epoch.

    Every image of a sequence is drawn anew from the whole set: labels repeat, and now and then a scan does.
    """

    sequences: int = 1

    def __len__(self) -> int:
        return self.sequences

    def draw(self, numbers: Tensor, n: int, seed: int, epoch: int) -> dict[str, Any]:
        """The sequences of the given numbers; the same whenever they are asked for.

        Args:
            numbers: (B,) int64, which sequences of the epoch.
            n: images in each.
            seed: of the draws.
            epoch: 0, 1, ...; another epoch has other sequences.

        Returns:
            ``image`` (B, n, 3, H, W) uint8, ``label`` (B, n), ``order`` (B, n) and ``index`` (B, n), a number of its
            own for each place of each sequence.
        """
        places = numbers[:, None] * LONGEST + torch.arange(n)  # (B, n)
        rows = hashes(seed, epoch, places.flatten(), [Stream.SEQUENCE])[:, 0].remainder(len(self.labels))
        labels = self.labels[rows].view(-1, n)
        images = self.images.index_select(0, rows).unflatten(0, (-1, n))
        return {"image": images, "label": labels, "order": sorting_order(labels), "index": places}


class SequenceTrainLoader(TrainLoader):
    """Batches of sequences, one length for each batch, drawn from ``lengths``; resumable in mid-epoch.

    Args:
        data: where the sequences come from.
        lengths: shortest and longest, every length between them equally likely.
        **options: of :class:`TrainLoader`.
    """

    def __init__(self, data: SequenceSet, *, lengths: tuple[int, int], **options: Any) -> None:
        super().__init__(data, **options)
        self.lengths = lengths

    def _from_memory(self, data: MemorySet, rows: list[Tensor], epoch: int) -> Iterator[dict[str, Any]]:
        assert isinstance(data, SequenceSet)
        low, high = self.lengths
        for chosen in rows:
            number = torch.tensor([self._batch])  # of this batch: all processes draw the same length
            draw = int(hashes(self.seed, epoch, number, [Stream.SEQUENCE_LENGTH])[0, 0])
            # unshuffled means the same few batches in every epoch
            yield data.draw(chosen, low + draw % (high - low + 1), self.seed, epoch if self.shuffle else 0)


class SequenceEvalLoader:
    """The same sequences every time: ``data.sequences`` of each length, one length after the other.

    Args:
        data: where the sequences come from.
        lengths: of the sequences. Batches of the first carry the ``suffix`` ``""``, of another ``n`` ``"_n<n>"``:
            what a metric's name ends with.
        batch_size: most sequences per batch and process.
        rank, world: number of this process, and of all.
    """

    def __init__(
        self, data: SequenceSet, *, lengths: Sequence[int], batch_size: int, rank: int = 0, world: int = 1
    ) -> None:
        self.data, self.lengths = data, tuple(lengths)
        self.rows = EvalLoader(data, batch_size=batch_size, rank=rank, world=world).rows

    def __len__(self) -> int:
        return len(self.lengths) * len(self.rows)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for place, n in enumerate(self.lengths):
            for rows in self.rows:
                yield {**self.data.draw(rows, n, seed=0, epoch=0), "suffix": f"_n{n}" if place else ""}


class SortingData(ImageData):
    """Sequences of images to be sorted by class number, ties by position.

    Training, validation and test sequences are drawn from the disjoint images of these splits. Training batches have
    one random length each; the evaluation sequences do not depend on the seed.

    Args:
        name: ``digits``, or another set whose classes have an order.
        root: folder with the data; None takes ``$VISION_ATTN_DATA``, then ``~/.cache/vision_attn``.
        batch_size: training sequences per step and process.
        eval_batch_size: sequences per evaluation batch and process.
        lengths: shortest and longest training sequence.
        sequences: training sequences in an epoch.
        eval_lengths: lengths of the test sequences; the first is that of ``val/acc`` and ``test/acc``, a further
            one, say 8, gives ``test/acc_n8``.
        eval_sequences: sequences of each length in an evaluation.
        val_fraction: share of the training images kept for validation; None: what the data set itself says.
        img_size: side, or (height, width), that images are brought to; None for the data set's own.
        augment: what is done to training images; nothing that mixes two of them.
        seed: of sequences and augmentation.
        download: fetch missing files where that is possible.
        memory_limit_mb: image folders must fit into this many decoded megabytes.

    Raises:
        UserError: for an unknown name, a value out of range, or data that is missing and cannot be fetched.
    """

    def __init__(
        self,
        name: str = "digits",
        root: str | Path | None = None,
        batch_size: int = 64,
        eval_batch_size: int = 250,
        lengths: tuple[int, int] = (3, 6),
        sequences: int = 6400,
        eval_lengths: tuple[int, ...] = (5, 8),
        eval_sequences: int = 1000,
        val_fraction: float | None = None,
        img_size: int | tuple[int, int] | None = None,
        augment: AugmentConfig = _OFF,
        seed: int = 0,
        download: bool = True,
        memory_limit_mb: int = 1024,
    ) -> None:
        if not 1 <= lengths[0] <= lengths[1] <= LONGEST:
            raise UserError(f"data.lengths is {lengths!r}: expected shortest and longest, 1 to {LONGEST}.")
        if not eval_lengths or not all(1 <= n <= LONGEST for n in eval_lengths):
            raise UserError(f"data.eval_lengths is {eval_lengths!r}: expected numbers from 1 to {LONGEST}.")
        if len(set(eval_lengths)) < len(eval_lengths):
            raise UserError(f"data.eval_lengths is {eval_lengths!r}: every length can be given once.")
        for key, value in (("sequences", sequences), ("eval_sequences", eval_sequences)):
            if value < 1:
                raise UserError(f"data.{key} is {value!r}: expected at least 1.")
        if augment.mixes:
            raise UserError("data.augment: a mixed image has no place in an order; set mixup and cutmix to 0.")
        super().__init__(
            name=name,
            root=root,
            batch_size=batch_size,
            eval_batch_size=eval_batch_size,
            val_fraction=val_fraction,
            img_size=img_size,
            augment=augment,
            seed=seed,
            download=download,
            memory_limit_mb=memory_limit_mb,
            verify_images=False,  # what fits in memory is decoded anyway
        )
        self.lengths, self.eval_lengths = (int(lengths[0]), int(lengths[1])), tuple(map(int, eval_lengths))
        self.sequences, self.eval_sequences = sequences, eval_sequences

    def sequences_of(self, name: Split) -> SequenceSet:
        """The images of a split, ready to draw sequences from.

        Raises:
            UserError: the data set has no such split, or it is too large for memory.
        """
        data = self.required(name)
        if not isinstance(data, MemorySet):
            raise UserError(f"Sorting needs the images of {self.name!r} in memory: raise --data.memory_limit_mb.")
        count = self.sequences if name == "train" else self.eval_sequences
        return SequenceSet(data.images, data.labels, data.ids, count)

    def train_dataloader(self) -> SequenceTrainLoader:
        rank, world = rank_and_world()
        return SequenceTrainLoader(
            self.sequences_of("train"),
            lengths=self.lengths,
            batch_size=self.batch_size,
            seed=self.seed,
            rank=rank,
            world=world,
            shuffle=not getattr(self.trainer, "overfit_batches", 0),
        )

    def _eval_loader(self, name: Split, rank: int = 0, world: int = 1) -> Any:
        return SequenceEvalLoader(
            self.sequences_of(name),
            lengths=self.eval_lengths[:1] if name == "val" else self.eval_lengths,
            batch_size=self.eval_batch_size,
            rank=rank,
            world=world,
        )

    def on_after_batch_transfer(self, batch: dict[str, Any], dataloader_idx: int = 0) -> dict[str, Any]:
        """Augment (training batches, which carry an ``epoch``) and normalise, on the device the batch is on."""
        flat = {key: batch[key].flatten(0, 1) for key in ("image", "label", "index")}
        work = self.augmenter.train({**flat, "epoch": batch["epoch"]}) if "epoch" in batch else None
        images = (work or self.augmenter.evaluate(flat))["image"].unflatten(0, batch["label"].shape)
        batch = {**batch, "image": images}
        return self.trainer.precision_plugin.convert_input(batch) if self.trainer is not None else batch

    def describe(self, stage: Split) -> str:
        """What an evaluation looks at, in words."""
        lengths = self.eval_lengths[:1] if stage == "val" else self.eval_lengths
        of = " and ".join(map(str, lengths))
        return f"{self.eval_sequences:,} sequences each of {of} out of {len(self.required(stage)):,} {stage} images"
