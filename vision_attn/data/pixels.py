"""Where the decoded images of a detection set are: in memory, in a file of their own, or still in the image files."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from PIL import Image
from torch import Tensor

from vision_attn.atomic import atomic_write
from vision_attn.data import images as image_files
from vision_attn.data.coco_images import in_threads
from vision_attn.errors import UserError


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

    Raises:
        UserError: an image cannot be read.
    """

    def __init__(self, paths: Sequence[str], sizes: Tensor) -> None:
        self._lay_out(sizes)
        self._data = torch.empty(self._total, dtype=torch.uint8)

        def decode(row: int) -> UserError | None:
            try:
                self.read(row).copy_(load(paths[row], sizes[row].tolist()))
            except UserError as error:
                return error
            return None

        for error in in_threads(decode, range(len(paths))):
            if error is not None:
                raise error

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
        UserError: an image cannot be read, or the disk is full.
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

        def decode(row: int) -> bytes | UserError:
            try:
                return load(self.paths[row], self.sizes[row].tolist()).numpy().tobytes()
            except UserError as error:
                return error

        with file.open("wb") as stream:
            for start in range(0, len(self.paths), 512):
                for content in in_threads(decode, range(start, min(start + 512, len(self.paths)))):
                    if isinstance(content, UserError):
                        raise content
                    stream.write(content)

    def update_hash(self, digest: Any) -> None:
        """Feed name and length of every file (not its content) to a hashlib object."""
        for path in self.paths:
            digest.update(image_files.fingerprint(path, 0))


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
