"""A split of a data set: either decoded in memory, or paths that workers read. And subsets of it."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset, default_collate

from vision_attn.data import images as image_files
from vision_attn.data.randomness import Stream, hashes, uniforms
from vision_attn.errors import UserError


@dataclass
class MemorySet:
    """Images small enough to be kept decoded.

    Attributes:
        images: (N, 3, H, W) uint8.
        labels: (N,) int64.
        ids: (N,) int64, the place of each image in its source's own order. Randomness is keyed by it, so a subset
            sees the augmentations that the whole set would.
    """

    images: Tensor
    labels: Tensor
    ids: Tensor

    def __len__(self) -> int:
        return len(self.labels)

    def take(self, rows: Tensor) -> MemorySet:
        """The images at ``rows`` (int64), in that order."""
        return MemorySet(self.images[rows], self.labels[rows], self.ids[rows])

    def batch(self, rows: Tensor) -> dict[str, Any]:
        """``image`` (B, 3, H, W) uint8, ``label`` (B,) and ``index`` (B,) of the images at ``rows``."""
        # index_select, because images[rows] takes ten times as long on a CPU
        return {
            "image": self.images.index_select(0, rows),
            "label": self.labels.index_select(0, rows),
            "index": self.ids.index_select(0, rows),
        }

    def update_hash(self, digest: Any) -> None:
        """Feed everything that makes this set what it is to a hashlib object."""
        digest.update(str(tuple(self.images.shape)).encode())
        for tensor in (self.images, self.labels, self.ids):
            digest.update(tensor.contiguous().numpy())


class StreamedSet(Dataset):
    """Images too many for memory: decoded and resized when they are asked for, usually by worker processes.

    Asked for ``(epoch, row)``; an epoch of -1 means evaluation. A file that cannot be read comes back as a
    :class:`UserError` object in place of the image, because an exception crossing from a worker would drag its
    traceback into the message; :func:`collate` hands it on and the loader raises it.

    Args:
        paths: N files.
        labels: (N,) int64.
        ids: (N,) int64.
        size: (H, W) that every image is brought to.
        seed: of the random resized crop.
        resized_crop: smallest share of the area kept by it in training; 0 for a plain centre crop.
        crop_pct: share of the shorter side that the centre crop keeps.
        interpolation: how images are resized, one of :data:`~vision_attn.data.images.INTERPOLATIONS`.
    """

    def __init__(
        self,
        paths: Sequence[str],
        labels: Tensor,
        ids: Tensor,
        *,
        size: tuple[int, int],
        seed: int = 0,
        resized_crop: float = 0.0,
        crop_pct: float = 1.0,
        interpolation: str = "bilinear",
    ) -> None:
        self.paths, self.labels, self.ids = list(paths), labels, ids
        self.size, self.seed, self.resized_crop = size, seed, resized_crop
        self.crop_pct, self.interpolation = crop_pct, interpolation

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, key: tuple[int, int]) -> dict[str, Any] | UserError:
        epoch, row = key
        try:
            picture = image_files.read_image(self.paths[row])
        except UserError as error:
            begun = " A run that has begun can only be resumed with as many images." if epoch >= 0 else ""
            return UserError(f"{error}{begun}")
        if epoch >= 0 and self.resized_crop:
            streams = (Stream.RESIZED_AREA, Stream.RESIZED_ASPECT, Stream.RESIZED_Y, Stream.RESIZED_X)
            draw = uniforms(self.seed, epoch, self.ids[row : row + 1], streams)[0].tolist()
            image = image_files.resized_crop(picture, self.size, self.resized_crop, draw, self.interpolation)
        else:
            image = image_files.resize_and_crop(picture, self.size, self.crop_pct, self.interpolation)
        return {"image": image, "label": self.labels[row], "index": self.ids[row]}

    def take(self, rows: Tensor) -> StreamedSet:
        """The images at ``rows`` (int64), in that order."""
        paths = [self.paths[row] for row in rows.tolist()]
        return StreamedSet(
            paths,
            self.labels[rows],
            self.ids[rows],
            size=self.size,
            seed=self.seed,
            resized_crop=self.resized_crop,
            crop_pct=self.crop_pct,
            interpolation=self.interpolation,
        )

    def batch(self, rows: Tensor, epoch: int = -1) -> dict[str, Any]:
        """As :meth:`MemorySet.batch`, decoded in this process.

        Raises:
            UserError: when a file cannot be read.
        """
        batch = collate([self[(epoch, row)] for row in rows.tolist()])
        if isinstance(batch, UserError):
            raise batch
        return batch

    def update_hash(self, digest: Any) -> None:
        """Feed class, name and size in bytes of every file (not their contents) to a hashlib object."""
        for path, label in zip(self.paths, self.labels.tolist(), strict=True):
            digest.update(image_files.fingerprint(path, label))


def collate(items: list[Any]) -> dict[str, Any] | UserError:
    """Samples into a batch, or the first error among them."""
    for item in items:
        if isinstance(item, UserError):
            return item
    return default_collate(items)


def hash_sets(sets: Sequence[MemorySet | StreamedSet]) -> str:
    """The first 16 hexadecimal digits of a SHA-256 over the sets."""
    digest = hashlib.sha256()
    for part in sets:
        part.update_hash(digest)
    return digest.hexdigest()[:16]


def balanced_order(labels: Tensor, ids: Tensor, seed: int, stream: int = Stream.SUBSET) -> Tensor:
    """An order of the samples of which every beginning has the classes in the whole set's proportions.

    Taking the first n gives nested subsets: a smaller one is part of a larger one.

    Args:
        labels: (N,) int64.
        ids: (N,) int64.
        seed: which order.
        stream: tells apart orders for different purposes.

    Returns:
        (N,) int64, rows.
    """
    shuffled = hashes(seed, 0, ids, [stream])[:, 0].argsort(stable=True)
    place = torch.empty(len(labels), dtype=torch.float64)
    for label in labels.unique():
        rows = shuffled[labels[shuffled] == label]
        place[rows] = (torch.arange(len(rows), dtype=torch.float64) + 0.5) / len(rows)
    # ties (the first of every class, the second...) are broken by the shuffle, not by the order of the classes
    return shuffled[place[shuffled].argsort(stable=True)]


def subset_rows(labels: Tensor, ids: Tensor, fraction: float, max_images: int | None, seed: int) -> Tensor | None:
    """Rows of a nested, class-balanced, seeded subset in the set's own order; None for the whole set."""
    count = round(fraction * len(labels))
    if max_images is not None:
        count = min(count, max_images)
    if count >= len(labels):
        return None
    if count < 1:
        raise UserError(f"data.fraction={fraction:g} of {len(labels)} training images leaves none: use a larger share.")
    return balanced_order(labels, ids, seed)[:count].sort().values
