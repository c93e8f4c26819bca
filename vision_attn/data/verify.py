"""Image files decoded once before anything is trained on them, and what was found remembered between runs.

A look at the head and the tail of a file does not find what is damaged between them; only decoding does. It takes 6 ms
of one core for a JPEG of 640 x 480 (measured on an AMD EPYC), so what was found whole is written to a small file, and a
later start asks the disk for lengths and dates only. Some damage no decoder notices (wrong numbers in a BMP or raw
TIFF, zeros in a JPEG): it changes pixels, but stops nothing.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import PIL
from PIL import Image

from vision_attn.atomic import atomic_write_text
from vision_attn.data.coco_images import Header, in_threads, look_at, shared_content
from vision_attn.errors import UserError

WORTH = 1.0  # seconds of decoding that are worth a stamp file
_FORMAT = f"1, Pillow {PIL.__version__}"  # other decoders give other pixels, and so other hashes
Stamp = tuple[int, int]  # bytes and date of change
Keep = Callable[[str, Image.Image], None]


class Verifier:
    """Looks at image files, each once.

    Args:
        folder: for the stamp files, one for each folder of images; None keeps none. A folder that cannot be written
            costs time, nothing else.
        decode: decode every image; otherwise only heads and tails are read.

    Attributes:
        decode: as given.
    """

    def __init__(self, folder: Path | None, decode: bool) -> None:
        self.folder, self.decode = folder, decode
        self._known: dict[str, tuple[Stamp, Header]] = {}
        self._loaded: set[Path] = set()

    def look(self, paths: Sequence[str], images: Path, keep: Keep | None = None) -> list[Header]:
        """What the files are.

        Args:
            paths: of the files.
            images: the folder that they are in.
            keep: gets path and picture (RGB, turned as shown) of every image that is decoded here, from any thread.

        Returns:
            For every path what was found, with the hash of its pixels when ``decode``.
        """
        if not self.decode:
            return in_threads(look_at, paths)
        self._load(images)
        stamps = in_threads(_stamp, paths)
        known = [self._known.get(path, (None, None)) for path in paths]
        new = [row for row, (stamp, _) in enumerate(known) if stamp is None or stamp != stamps[row]]
        start = time.perf_counter()
        found = in_threads(lambda row: look_at(paths[row], decode=True, keep=keep), new)
        headers = [header for _, header in known]
        for row, header in zip(new, found, strict=True):
            headers[row] = header
            stamp = stamps[row]
            # what is damaged is looked at again: it may be repaired
            if stamp is not None and header.error is None:
                self._known[paths[row]] = (stamp, header)
        if self.folder is not None and time.perf_counter() - start >= WORTH and new:
            self._save(paths, images)
        return headers  # type: ignore[return-value]

    def shared(self, first: tuple[Sequence[str], Path], second: tuple[Sequence[str], Path]) -> list[tuple[int, int]]:
        """Pairs of rows that show the same, whatever the files are called.

        Args:
            first, second: files, and the folder that they are in.

        Returns:
            Pairs of equal pixels, however they were saved; of equal bytes when not ``decode``.
        """
        if not self.decode:
            return shared_content(first[0], second[0])
        return shared_pictures(self.look(*first), self.look(*second))

    def _file(self, images: Path) -> Path | None:
        if self.folder is None:
            return None
        name = hashlib.sha256(os.path.abspath(images).encode()).hexdigest()[:16]
        return self.folder / f"images-{name}.json"

    def _load(self, images: Path) -> None:
        file = self._file(images)
        if file is None or images in self._loaded:
            return
        self._loaded.add(images)
        # a file that is not there, damaged or of another version is no error: everything is decoded anew
        with contextlib.suppress(OSError, ValueError, TypeError, KeyError, AttributeError):
            content = json.loads(file.read_bytes())
            if content["format"] != _FORMAT:
                return
            for name, (length, date, size, stored, orientation, pixels) in content["images"].items():
                header = Header(tuple(size), tuple(stored), orientation, pixels=bytes.fromhex(pixels))
                self._known.setdefault(os.path.join(images, name), ((length, date), header))

    def _save(self, paths: Sequence[str], images: Path) -> None:
        file = self._file(images)
        assert file is not None
        prefix = os.path.join(images, "")
        rows: dict[str, list[Any]] = {}
        for path, (stamp, header) in self._known.items():
            if path.startswith(prefix) and header.pixels is not None:
                told = [list(header.size), list(header.stored), header.orientation, header.pixels.hex()]
                rows[path.removeprefix(prefix)] = [*stamp, *told]
        text = json.dumps({"format": _FORMAT, "folder": os.path.abspath(images), "images": rows})
        with contextlib.suppress(OSError, UserError):
            atomic_write_text(file, text)


def _stamp(path: str) -> Stamp | None:
    """Length and date of a file; None when there is none."""
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_size, status.st_mtime_ns


def shared_pictures(first: Sequence[Header], second: Sequence[Header]) -> list[tuple[int, int]]:
    """Pairs of rows that show the same pixels, whatever files hold them."""
    where: dict[bytes, list[int]] = {}
    for row, header in enumerate(first):
        if header.pixels is not None:
            where.setdefault(header.pixels, []).append(row)
    return [
        (match, row)
        for row, header in enumerate(second)
        if header.pixels is not None
        for match in where.get(header.pixels, ())
    ]
