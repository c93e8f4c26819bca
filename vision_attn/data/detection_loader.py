"""Loaders of images with boxes: as resumable as those of plain images, with batches of images of like shape."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from vision_attn.data.detection_sets import DetectionSet
from vision_attn.data.loader import EvalLoader, TrainLoader, checked
from vision_attn.data.randomness import Stream, permutation
from vision_attn.errors import UserError

_BATCHES = Stream.DETECTION + 19


class DetectionTrainLoader(TrainLoader):
    """Shuffled batches whose images have like shapes after augmentation, so that little is padded.

    The order is shuffled as a whole; then, within every ``group`` batches, images are put together by the shapes that
    they will have, which are known before a pixel is read; then the full batches are shuffled. All of it is a function
    of (seed, epoch).

    Args:
        data: what to load.
        group: batches among which images may be exchanged. 1: none.
        num_workers: processes that make whole batches.
        **options: of :class:`TrainLoader`.
    """

    def __init__(self, data: DetectionSet, *, group: int = 16, num_workers: int = 0, **options: Any) -> None:
        super().__init__(data, num_workers=num_workers, **options)  # type: ignore[arg-type]
        self.group = group

    def rows(self, epoch: int) -> list[Tensor]:
        """The rows of ``data`` in each batch of ``epoch``, as this process sees them."""
        n, size = len(self.data), self.global_batch
        order = permutation(n, self.seed, epoch) if self.shuffle else torch.arange(n)
        full = n // size
        if self.shuffle and full:
            order = torch.cat([self._grouped(order[: full * size], epoch), order[full * size :]])
        parts = list(order.split(size)[: self._length])
        parts[-1] = parts[-1][: len(parts[-1]) - len(parts[-1]) % self.world]
        return [part[self.rank :: self.world] for part in parts]

    def _grouped(self, order: Tensor, epoch: int) -> Tensor:
        assert isinstance(self.data, DetectionSet)
        shapes = self.data.views(order, epoch).output
        if self.group == 1 or bool((shapes == shapes[0]).all()):
            return order
        size = self.global_batch
        window = size * self.group
        sorted_order = torch.cat(
            [
                part[_by_shape(shape, size)]
                for part, shape in zip(order.split(window), shapes.split(window), strict=True)
            ]
        )
        batches = sorted_order.view(-1, size)
        return batches[permutation(len(batches), self.seed, epoch, _BATCHES)].flatten()

    def padding(self, epoch: int = 0) -> float:
        """Share of an epoch's pixels that is padding."""
        assert isinstance(self.data, DetectionSet)
        used = total = 0
        for rows in self.rows(epoch):
            shapes = self.data.views(rows, epoch).output
            height, width = self.data.maker.fixed or shapes.amax(0).tolist()
            used += int(shapes.prod(1).sum())
            total += len(rows) * height * width
        return 1.0 - used / total

    def _streamed(self, data: Any, rows: list[Tensor], epoch: int) -> Iterator[dict[str, Any]]:
        if self.num_workers == 0:
            for chosen in rows:
                yield data.batch(chosen, epoch)
            return
        if self._workers is None:
            self._workers = _workers(data, self._keys, self.num_workers)
        self._keys.keys = [(epoch, chosen) for chosen in rows]  # type: ignore[misc]
        yield from checked(self._workers)


class DetectionEvalLoader:
    """Every image exactly once over all processes, images of like shape together.

    Args:
        data: what to load.
        batch_size: most images per batch and process.
        rank, world: number of this process, and of all.
        num_workers: processes that make whole batches.
    """

    def __init__(
        self, data: DetectionSet, *, batch_size: int, rank: int = 0, world: int = 1, num_workers: int = 0
    ) -> None:
        self.data, self.num_workers = data, num_workers
        plain = EvalLoader(data, batch_size=batch_size, rank=rank, world=world)  # type: ignore[arg-type]
        everything = torch.arange(len(data))
        shapes = data.views(everything, -1).output
        strips = _by_shape(shapes, batch_size * world)
        self.rows = [strips[rows] for rows in plain.rows]

    def __len__(self) -> int:
        return len(self.rows)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        if self.num_workers == 0:
            return map(self.data.batch, self.rows)
        return checked(_workers(self.data, [(-1, rows) for rows in self.rows], self.num_workers))


class _Batches(Dataset):
    """Whole batches by (epoch, rows): a worker sends one padded tensor, not many images."""

    def __init__(self, data: DetectionSet) -> None:
        self.data = data

    def __getitem__(self, key: tuple[int, Tensor]) -> dict[str, Any] | UserError:
        try:
            return self.data.batch(key[1], key[0])
        except UserError as error:
            return error  # raised by `checked`: an exception would drag the worker's traceback into its message


def _as_it_is(batch: Any) -> Any:
    return batch


def _workers(data: DetectionSet, keys: Any, num_workers: int) -> DataLoader:
    return DataLoader(
        _Batches(data),
        batch_size=None,
        sampler=keys,
        num_workers=num_workers,
        collate_fn=_as_it_is,
        persistent_workers=True,
        pin_memory=torch.cuda.is_available(),
    )


def _by_shape(shapes: Tensor, batch: int) -> Tensor:
    """An order in which images of like height and width are neighbours: strips of like height, sorted by width.

    Args:
        shapes: (n, 2) heights and widths.
        batch: images in a batch; strips hold whole batches.
    """
    order = shapes[:, 0].argsort(stable=True)
    if bool((shapes == shapes[0]).all()):
        return order
    strips = max(round(math.sqrt(len(order) / batch)), 1)
    length = math.ceil(len(order) / batch / strips) * batch
    return torch.cat([strip[shapes[strip, 1].argsort(stable=True)] for strip in order.split(length)])
