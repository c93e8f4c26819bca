"""Loaders that can stop anywhere and go on from there, alone or as one of several processes.

Which samples are in batch b of epoch e is a function of (seed, e, b), never of what was loaded before.

Several processes: ``batch_size`` is what one process takes, a *global* batch has ``batch_size * world`` samples,
and rank r takes rows r, r + world, r + 2 world, ... of it. So two processes see together what one process with
twice the batch size sees.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from vision_attn.data.randomness import Stream, hashes, permutation
from vision_attn.data.sets import MemorySet, StreamedSet, collate
from vision_attn.errors import UserError


def rank_and_world() -> tuple[int, int]:
    """This process' number and how many there are; (0, 1) when torch.distributed is not in use."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_rank(), torch.distributed.get_world_size()
    return 0, 1


class TrainLoader:
    """Shuffled batches for training, resumable in mid-epoch.

    Iterating gives an epoch; iterating again gives the next one. :meth:`set_epoch` chooses one. Lightning finds
    ``state_dict``/``load_state_dict`` by name, keeps the state in its checkpoints, and calls ``sampler.set_epoch``
    before the first batch of each epoch is asked for. An iterator therefore looks at the state only when its
    first batch is asked for, and the state moves on when a batch is handed out.

    The last, smaller batch of an epoch is kept when every process gets at least two samples of it (batch norm
    cannot train on one) and cut so that all processes get the same number, which makes the mean over processes
    the mean over samples. The few samples this leaves out differ from epoch to epoch. With ``drop_last`` the
    smaller batch is left out whole.

    Args:
        data: what to load.
        batch_size: samples per batch and process.
        seed: of the order.
        rank: number of this process.
        world: number of processes.
        shuffle: False keeps the order of ``data`` in every epoch.
        drop_last: leave out the smaller last batch.
        partners: give every sample another one, drawn from the whole set, to be mixed with. In-memory sets only.
        num_workers: processes that decode images of a streamed set. In-memory sets need none: taking 128 CIFAR
            images costs some 20 microseconds, less than sending them from another process.
    """

    def __init__(
        self,
        data: MemorySet | StreamedSet,
        *,
        batch_size: int,
        seed: int = 0,
        rank: int = 0,
        world: int = 1,
        shuffle: bool = True,
        drop_last: bool = False,
        partners: bool = False,
        num_workers: int = 0,
    ) -> None:
        self.data, self.batch_size, self.seed, self.rank, self.world = data, batch_size, seed, rank, world
        self.shuffle, self.partners, self.num_workers = shuffle, partners, num_workers
        self.global_batch = batch_size * world
        full, rest = divmod(len(data), self.global_batch)
        self._last = rest - rest % world
        keep_last = self._last >= 2 * world and not (drop_last and full)
        if full == 0 and not keep_last:
            keep_last = self._last >= world  # better one meagre batch than none at all
        self._length = full + keep_last
        if self._length == 0:
            raise UserError(f"{len(data)} training image(s) cannot be shared by {world} processes: use fewer devices.")
        self._epoch, self._batch, self._fresh = 0, 0, True
        self.resized_from: int | None = None  # the global batch of the run we go on with, when it was another
        self._keys = _Keys()
        self._workers: DataLoader | None = None

    # -- what Lightning looks for ---------------------------------------------------------------

    @property
    def sampler(self) -> TrainLoader:
        """Itself: Lightning calls ``loader.sampler.set_epoch(epoch)``."""
        return self

    def __len__(self) -> int:
        return self._length

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch that the next batch belongs to.

        The epoch that a restored state is in the middle of stays where it is.
        """
        if epoch != self._epoch or not self._fresh:
            self._epoch, self._batch, self._fresh = epoch, 0, True

    @property
    def place(self) -> int:
        """The number of the next batch in its epoch."""
        return self._batch

    @place.setter
    def place(self, batch: int) -> None:
        self._batch = batch

    def state_dict(self) -> dict[str, int]:
        """Where the next batch is, and what that depends on."""
        return {
            "epoch": self._epoch,
            "batch": self._batch,
            "seed": self.seed,
            "samples": len(self.data),
            "global_batch": self.global_batch,
        }

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Go on after the last batch that was handed out before ``state`` was taken.

        With another global batch size the epoch goes on at the batch that holds the first sample not seen yet; the
        loop that counts batches must follow (``TrainingModule`` makes it).

        Raises:
            UserError: when the checkpoint was made on another number of images.
        """
        if state["samples"] != len(self.data):
            raise UserError(
                f"The checkpoint stopped within {state['samples']} training images, now there are {len(self.data)}: "
                "resume with the same data, fraction and max_images."
            )
        if state["seed"] != self.seed:
            warnings.warn(
                f"The checkpoint was made with seed {state['seed']}, this run has {self.seed}: the rest of its epoch "
                "repeats some images and skips others.",
                stacklevel=2,
            )
        self._epoch = state["epoch"]
        self._batch = state["batch"] * state["global_batch"] // self.global_batch
        self._fresh = True
        self.resized_from = state["global_batch"] if state["global_batch"] != self.global_batch else None
        if self.resized_from is None and self._batch >= self._length:
            self._epoch, self._batch = self._epoch + 1, 0

    def __iter__(self) -> Iterator[dict[str, Any]]:
        if not self._fresh:  # an epoch was begun, finished or not: this is the next one
            self._epoch, self._batch, self._fresh = self._epoch + 1, 0, True
        return self._batches()  # a generator: nothing happens before its first batch is asked for

    # -- batches --------------------------------------------------------------------------------

    def rows(self, epoch: int) -> list[Tensor]:
        """The rows of ``data`` in each batch of ``epoch``, as this process sees them."""
        n = len(self.data)
        order = permutation(n, self.seed, epoch) if self.shuffle else torch.arange(n)
        parts = order.split(self.global_batch)[: self._length]
        last = len(parts[-1]) - len(parts[-1]) % self.world
        return [part[self.rank :: self.world] for part in (*parts[:-1], parts[-1][:last])]

    def _batches(self) -> Iterator[dict[str, Any]]:
        epoch = self._epoch
        rows = self.rows(epoch)[self._batch :]
        self._fresh = False
        data = self.data
        source = (
            self._from_memory(data, rows, epoch) if isinstance(data, MemorySet) else self._streamed(data, rows, epoch)
        )
        for batch in source:
            batch["epoch"] = epoch
            self._batch += 1
            yield batch

    def _from_memory(self, data: MemorySet, rows: list[Tensor], epoch: int) -> Iterator[dict[str, Any]]:
        for chosen in rows:
            batch = data.batch(chosen)
            if self.partners:
                draw = hashes(self.seed, epoch, batch["index"], [Stream.MIX_PARTNER])[:, 0]
                partner = data.batch(draw.remainder(len(data)))
                batch.update(partner_image=partner["image"], partner_label=partner["label"])
            yield batch

    def _streamed(self, data: StreamedSet, rows: list[Tensor], epoch: int) -> Iterator[dict[str, Any]]:
        keys = [[(epoch, row) for row in chosen.tolist()] for chosen in rows]
        if self._workers is None:
            self._workers = streaming_loader(data, self._keys, self.num_workers)
        self._keys.keys = keys
        for batch in checked(self._workers):
            batch["cropped"] = data.resized_crop > 0
            yield batch


class EvalLoader:
    """Every sample exactly once, in order, over all processes together.

    Rank r takes samples r, r + world, ... and cuts its share into batches of nearly equal size, at most
    ``batch_size``. Every process gets the same number of batches, though their sizes may differ by one. So where
    ``batch_size`` is 1 and shares differ, one batch of the larger ones holds two: no process can have a batch of none.

    Args:
        data: what to load.
        batch_size: most samples per batch and process, but for that case.
        rank: number of this process.
        world: number of processes.
        num_workers: processes that decode images of a streamed set.
    """

    def __init__(
        self,
        data: MemorySet | StreamedSet,
        *,
        batch_size: int,
        rank: int = 0,
        world: int = 1,
        num_workers: int = 0,
    ) -> None:
        if len(data) < world:
            raise UserError(f"{len(data)} image(s) cannot be shared by {world} processes: use fewer devices.")
        self.data, self.num_workers = data, num_workers
        count = math.ceil(math.ceil(len(data) / world) / batch_size)
        # a share one smaller than the others may be too small for that many batches of at least one sample
        count = min(count, len(data) // world)
        self.rows = list(torch.arange(rank, len(data), world).tensor_split(count))

    def __len__(self) -> int:
        return len(self.rows)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        if isinstance(self.data, MemorySet):
            return map(self.data.batch, self.rows)
        keys = _Keys()
        keys.keys = [[(-1, row) for row in rows.tolist()] for rows in self.rows]
        return checked(streaming_loader(self.data, keys, self.num_workers))


class _Keys:
    """A batch sampler whose batches can be set between epochs, so that workers live on."""

    def __init__(self) -> None:
        self.keys: list[list[tuple[int, int]]] = []

    def __iter__(self) -> Iterator[list[tuple[int, int]]]:
        return iter(self.keys)

    def __len__(self) -> int:
        return len(self.keys)


def streaming_loader(data: StreamedSet, keys: _Keys, num_workers: int) -> DataLoader:
    """A torch DataLoader over the batches in ``keys``."""
    return DataLoader(
        data,
        batch_sampler=keys,  # type: ignore[arg-type]
        num_workers=num_workers,
        collate_fn=collate,
        persistent_workers=num_workers > 0,
        pin_memory=torch.cuda.is_available(),
    )


def checked(batches: DataLoader) -> Iterator[dict[str, Any]]:
    """The batches, until one of them is an error, which is raised."""
    for batch in batches:
        if isinstance(batch, UserError):
            raise batch
        yield batch
