"""Where the decoded images of a detection set are: in memory, in a file of their own, or still in the image files."""

from __future__ import annotations

import functools
import hashlib
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from vision_attn.atomic import atomic_write
from vision_attn.data import images as image_files
from vision_attn.data.coco_images import in_threads
from vision_attn.data.detection_augment import ViewMaker
from vision_attn.errors import UserError


class UnreadableImages(UserError):
    """Some of the images that were to be decoded cannot be read.

    Attributes:
        reasons: why, by row.
    """

    def __init__(self, paths: Sequence[str], reasons: Mapping[int, str]) -> None:
        shown = "; ".join(f"{paths[row]}: {reason}" for row, reason in list(reasons.items())[:5])
        super().__init__(f"{len(reasons)} images cannot be read ({shown}). Replace or delete them.")
        self.reasons = dict(reasons)


class DecodedImages:
    """Images that were decoded to verify them, brought to the size that memory will keep them in.

    Args:
        maker: says the size.
        training: whether they are training images.

    Attributes:
        images: (3, h, w) uint8, by path.
    """

    def __init__(self, maker: ViewMaker, training: bool) -> None:
        self.images: dict[str, Tensor] = {}

        @functools.cache
        def stored(height: int, width: int) -> list[int]:
            return maker.stored(torch.tensor([[height, width]]), training)[0].tolist()

        self._stored = stored

    @classmethod
    def of(cls, sizes: np.ndarray, maker: ViewMaker, training: bool, limit: int) -> DecodedImages | None:
        """For images of these (N, 2) sizes, or None when they will not be kept in memory or one is unknown (0)."""
        if not (sizes > 0).all() or not _fits(maker.stored(torch.from_numpy(sizes), training), limit):
            return None
        return cls(maker, training)

    def keep(self, path: str, picture: Image.Image) -> None:
        """Take one image; from any thread."""
        self.images[path] = resize_picture(picture, self._stored(picture.height, picture.width))


class Pixels(Protocol):
    """Where the images of a split are.

    Attributes:
        sizes: (N, 2) int64, heights and widths as stored, which may be smaller than the files'.
    """

    sizes: Tensor

    @property
    def same_size(self) -> bool:
        """Whether all images have one size and :meth:`stack` works."""
        ...

    def read(self, row: int) -> Tensor:
        """(3, h, w) uint8."""
        ...

    def stack(self, rows: Tensor) -> Tensor:
        """(B, 3, h, w) uint8 of images of one size."""
        ...

    def update_hash(self, digest: Any) -> None:
        """Feed what the images are to a hashlib object."""
        ...


class MemoryPixels:
    """Decoded images in one piece of memory, brought to ``sizes``.

    Args:
        paths: N files.
        sizes: (N, 2) int64 heights and widths.
        decoded: by path, images that were decoded and resized already; taken out of it.

    Raises:
        UnreadableImages: some cannot be read.
    """

    def __init__(self, paths: Sequence[str], sizes: Tensor, decoded: dict[str, Tensor] | None = None) -> None:
        self._lay_out(sizes)
        self._data = torch.empty(self._total, dtype=torch.uint8)
        ready = decoded or {}

        def decode(row: int) -> str | None:
            image, size = ready.pop(paths[row], None), sizes[row].tolist()
            try:
                if image is None or list(image.shape[1:]) != size:
                    image = load(paths[row], size)
            except UserError as error:
                return str(error.__cause__ or error)
            self.read(row).copy_(image)
            return None

        _raise_bad(paths, in_threads(decode, range(len(paths))))

    def _lay_out(self, sizes: Tensor) -> None:
        self.sizes = sizes
        ends = (3 * sizes.prod(1)).cumsum(0).tolist()
        self._starts, self._total = [0, *ends[:-1]], ends[-1]
        self._same = bool((sizes == sizes[:1]).all())

    def read(self, row: int) -> Tensor:
        height, width = self.sizes[row].tolist()
        start = self._starts[row]
        return self._data[start : start + 3 * height * width].view(3, height, width)

    def stack(self, rows: Tensor) -> Tensor:
        """(B, 3, h, w) uint8 of images of one size."""
        height, width = self.sizes[0].tolist()
        return self._data.view(-1, 3, height, width).index_select(0, rows)

    @property
    def same_size(self) -> bool:
        """Whether all images have one size."""
        return self._same

    def update_hash(self, digest: Any) -> None:
        """Feed all pixels to a hashlib object."""
        digest.update(self._data.numpy())


class FilePixels:
    """Images that are decoded when they are asked for, and brought to ``sizes``.

    Args:
        paths: N files.
        sizes: (N, 2) int64 heights and widths.
    """

    same_size = False

    def __init__(self, paths: Sequence[str], sizes: Tensor) -> None:
        self.paths, self.sizes = list(paths), sizes

    def read(self, row: int) -> Tensor:
        return load(self.paths[row], self.sizes[row].tolist())

    def stack(self, rows: Tensor) -> Tensor:
        """(B, 3, h, w) uint8 of images of one size."""
        return torch.stack([self.read(row) for row in rows.tolist()])

    def update_hash(self, digest: Any) -> None:
        """Feed name and length of every file (not its content) to a hashlib object."""
        for path in self.paths:
            digest.update(image_files.fingerprint(path, 0))


class CachedPixels(MemoryPixels):
    """Images decoded and brought to ``sizes`` once, kept in one file that later runs and all workers share.

    The file's name is a hash of the images' paths, lengths, dates and sizes: other images get another file. Reading it
    costs no decoding, and the system keeps in memory what is used.

    Args:
        paths: N files.
        sizes: (N, 2) int64 heights and widths.
        folder: for the file.

    Raises:
        UnreadableImages: some cannot be read.
        UserError: the disk is full.
    """

    def __init__(self, paths: Sequence[str], sizes: Tensor, folder: Path) -> None:
        self._lay_out(sizes)
        self.paths = list(paths)
        digest = hashlib.sha256(sizes.contiguous().numpy())
        for path in paths:
            status = os.stat(path)
            digest.update(f"{os.path.abspath(path)}:{status.st_size}:{status.st_mtime_ns}\n".encode())
        self.file = folder / f"images-{digest.hexdigest()[:16]}.uint8"
        if not self.file.is_file() or self.file.stat().st_size != self._total:
            atomic_write(self.file, self._write)
        self._data = torch.from_file(str(self.file), shared=False, size=self._total, dtype=torch.uint8)

    def _write(self, file: Path) -> None:
        """All images one after the other; written as a stream, because a full disk kills a process that maps it."""

        def decode(row: int) -> bytes | str:
            try:
                return load(self.paths[row], self.sizes[row].tolist()).numpy().tobytes()
            except UserError as error:
                return str(error.__cause__ or error)

        bad: list[str | None] = []
        with file.open("wb") as stream:
            for start in range(0, len(self.paths), 512):
                for content in in_threads(decode, range(start, min(start + 512, len(self.paths)))):
                    bad.append(content if isinstance(content, str) else None)
                    if isinstance(content, bytes):
                        stream.write(content)
        _raise_bad(self.paths, bad)

    def update_hash(self, digest: Any) -> None:
        """Feed name and length of every file (not its content) to a hashlib object."""
        for path in self.paths:
            digest.update(image_files.fingerprint(path, 0))


def where_pixels_fit(
    paths: Sequence[str], sizes: Tensor, limit: int, cache: Path | None, decoded: DecodedImages | None = None
) -> Pixels:
    """In memory up to ``limit`` bytes, beyond that in ``cache``, without one in their files.

    Raises:
        UnreadableImages: images are decoded here, and some cannot be read.
        UserError: the disk is full.
    """
    if _fits(sizes, limit):
        return MemoryPixels(paths, sizes, None if decoded is None else decoded.images)
    return FilePixels(paths, sizes) if cache is None else CachedPixels(paths, sizes, cache)


def _fits(sizes: Tensor, limit: int) -> bool:
    return 3 * int(sizes.prod(1).sum()) <= limit


def _raise_bad(paths: Sequence[str], reasons: Sequence[str | None]) -> None:
    bad = {row: reason for row, reason in enumerate(reasons) if reason is not None}
    if bad:
        raise UnreadableImages(paths, bad)


def load(path: str, size: Sequence[int]) -> Tensor:
    """(3, h, w) uint8 of a file, resized to ``size`` (height, width) with antialiasing.

    Raises:
        UserError: it cannot be read.
    """
    return resize_picture(image_files.read_image(path), size)


def resize_picture(picture: Image.Image, size: Sequence[int]) -> Tensor:
    """(3, h, w) uint8 of an RGB picture brought to ``size`` (height, width)."""
    height, width = size
    if picture.size != (width, height):
        picture = picture.resize((width, height), Image.Resampling.BILINEAR)
    return image_files.to_tensor(picture)
