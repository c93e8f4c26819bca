"""Data sets by name. A new one is a class with :func:`register_source` and a line in ``data/__init__``."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar, Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from vision_attn.data.randomness import Stream
from vision_attn.data.sets import MemorySet, StreamedSet, balanced_order
from vision_attn.errors import UserError, closest

Split = Literal["train", "val", "test"]
IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


@dataclass
class SourceOptions:
    """What every source is told.

    Attributes:
        root: the folder asked for, or None for the usual places (:func:`data_root`).
        img_size: (H, W) to bring images to, or None for the source's own size.
        val_fraction: share of the training images held out for validation; None for the source's own split, 0
            to train on all of them.
        download: whether files may be fetched.
        seed: of random resized crops in workers.
        resized_crop: as in :class:`AugmentConfig`, for streamed images.
        memory_limit: decoded bytes up to which a set is kept in memory.
        crop_pct: share of the shorter side that is kept when the middle of an image is cut out. This and the next are
            for sources of ``any_size``.
        interpolation: how images are resized, one of :data:`~vision_attn.data.images.INTERPOLATIONS`.
    """

    root: str | Path | None = None
    img_size: tuple[int, int] | None = None
    val_fraction: float | None = None
    download: bool = True
    seed: int = 0
    resized_crop: float = 0.0
    memory_limit: int = 1 << 30
    crop_pct: float = 1.0
    interpolation: str = "bilinear"


class Source(ABC):
    """A data set for classification. Making one is cheap and reads no pixels.

    Attributes:
        labels: class names; their places are the class numbers.
        size: (H, W) of the images.
        mean, std: per channel, of pixels scaled to 0...1, for normalisation.
        any_size: whether the images are files of any size, brought to ``size`` as ``options.crop_pct`` and
            ``options.interpolation`` say.
        crop_pct, interpolation: how they are brought there in truth, which a checkpoint is told.
    """

    any_size: ClassVar[bool] = False
    crop_pct: float = 1.0
    interpolation: str = "bilinear"
    labels: list[str]
    size: tuple[int, int]
    mean: tuple[float, float, float]
    std: tuple[float, float, float]

    def __init__(self, options: SourceOptions) -> None:
        self.options = options

    def prepare(self) -> None:  # noqa: B027 - most sources have nothing to fetch
        """Fetch what is missing. Called by one process per machine.

        Raises:
            UserError: when it is missing and cannot be fetched; the message says how to get it.
        """

    @abstractmethod
    def load(self, split: Split) -> MemorySet | StreamedSet | None:
        """One split; None where the set has none."""

    def verify(self, data: MemorySet | StreamedSet) -> None:  # noqa: B027 - most sources hold no files
        """Decode what :meth:`load` left to be decoded later, once.

        Args:
            data: a split of this source, or a subset of one.

        Raises:
            UserError: naming the files that cannot be read.
        """


SOURCES: dict[str, type[Source]] = {}


def register_source(name: str) -> Callable[[type[Source]], type[Source]]:
    """Make a source known as ``--data.name NAME``."""

    def decorate(cls: type[Source]) -> type[Source]:
        SOURCES[name] = cls
        return cls

    return decorate


def create_source(name: str, options: SourceOptions) -> Source:
    """The source called ``name``.

    Raises:
        UserError: for an unknown name.
    """
    if name not in SOURCES:
        raise UserError(f"Unknown data set {name!r}.{closest(name, SOURCES)} There are: {', '.join(sorted(SOURCES))}.")
    return SOURCES[name](options)


def data_root(root: str | Path | None) -> Path:
    """``root`` if given, else ``$VISION_ATTN_DATA``, else ``~/.cache/vision_attn``."""
    return Path(root or os.environ.get("VISION_ATTN_DATA") or "~/.cache/vision_attn").expanduser()


def resize(images: Tensor, size: tuple[int, int] | None) -> Tensor:
    """(N, 3, H, W) uint8 resized bilinearly, antialiased, in pieces that keep the float copies small."""
    if size is None or tuple(images.shape[-2:]) == tuple(size):
        return images
    parts = [
        F.interpolate(part.float(), size=size, mode="bilinear", antialias=True).round_().clamp_(0, 255).to(torch.uint8)
        for part in images.split(1000)
    ]
    return torch.cat(parts)


def hold_out(labels: Tensor, share: float) -> tuple[Tensor, Tensor]:
    """A fixed, class-balanced split that no seed changes.

    Args:
        labels: (N,) int64.
        share: of the samples to hold out, 0...1.

    Returns:
        Rows kept and rows held out, each ascending.
    """
    order = balanced_order(labels, torch.arange(len(labels)), seed=0, stream=Stream.SPLIT)
    count = round(share * len(labels))
    return order[count:].sort().values, order[:count].sort().values


@register_source("digits")
class Digits(Source):
    """The 1,797 scans of handwritten digits that come with scikit-learn (UCI optdigits, 43 writers' test part).

    8x8 pixels with 17 grey levels, spread over 0...255 and repeated to three channels; ``img_size`` resizes them.
    Training, validation and test hold 1,257, 270 and 270 scans, the same for every seed.
    """

    mean, std = (0.3053,) * 3, (0.3761,) * 3

    def __init__(self, options: SourceOptions) -> None:
        super().__init__(options)
        self.labels = [str(digit) for digit in range(10)]
        self.size = options.img_size or (8, 8)

    def load(self, split: Split) -> MemorySet | None:
        data = self.scans(split)
        return None if data is None else replace(data, images=resize(data.images, self.options.img_size))

    def scans(self, split: Split) -> MemorySet | None:
        """One split in the scans' own size."""
        from sklearn.datasets import load_digits  # a second to import, so not before it is needed

        scans = load_digits()
        grey = torch.from_numpy(scans.images).mul(255.0 / 16.0).round().to(torch.uint8)  # (1797, 8, 8)
        images = grey[:, None].repeat(1, 3, 1, 1)
        labels = torch.from_numpy(scans.target).to(torch.int64)
        ids = torch.arange(len(labels))
        rest, test = hold_out(labels, 270 / 1797)
        share = self.options.val_fraction
        kept, val = hold_out(labels[rest], 270 / len(rest) if share is None else share)
        rows = {"train": rest[kept], "val": rest[val], "test": test}[split]
        if len(rows) == 0:
            return None
        return MemorySet(images[rows], labels[rows], ids[rows])
