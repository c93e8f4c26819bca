"""The image files of an annotation file: found, looked at, and compared with what the file says about them."""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from PIL import Image, ImageOps

from vision_attn.data.coco_table import CocoTable
from vision_attn.data.findings import Findings
from vision_attn.data.images import read_image, to_rgb
from vision_attn.errors import UserError

if TYPE_CHECKING:
    from vision_attn.data.verify import Keep

_ORIENTATION = 0x0112  # EXIF tag
SHOWN, STORED, EITHER = "shown", "stored", "either"  # whose pixels boxes are measured in
_END = {"JPEG": b"\xff\xd9", "PNG": b"IEND"}  # what a whole file ends with
_TAIL = 4096  # bytes that are searched for it; some cameras write on after the end
T = TypeVar("T")


@dataclass(frozen=True)
class Header:
    """What a look at an image file tells.

    Attributes:
        size: height and width as the image is shown; (0, 0) when it cannot be read.
        stored: height and width as the file stores it, before its EXIF orientation is applied.
        orientation: EXIF, 1 to 8.
        error: why it cannot be read, or None.
        pixels: a hash of the picture as shown, where it was decoded.
    """

    size: tuple[int, int] = (0, 0)
    stored: tuple[int, int] = (0, 0)
    orientation: int = 1
    error: str | None = None
    pixels: bytes | None = None


def image_folder_of(root: Path, json_path: Path) -> Path:
    """Where the images of an annotation file usually lie, when nobody says.

    ``instances_<name>.json`` or ``<name>.json`` means ``<root>/<name>`` or ``<root>/images/<name>``, where there is
    such a folder; else ``<root>/images``; else the folder of the file.
    """
    name = json_path.stem.removeprefix("instances_")
    for folder in (root / name, root / "images" / name, root / "images"):
        if folder.is_dir():
            return folder
    return json_path.parent


def image_paths(table: CocoTable, folder: Path) -> list[str]:
    """The path of every image; names that already contain the folder's own name work too."""
    prefix = f"{folder.name}/"
    return [os.path.join(folder.parent if name.startswith(prefix) else folder, name) for name in table.files]


def in_threads(work: Callable[[Any], T], items: Sequence[Any]) -> list[T]:
    """``work`` for every item, in order; Pillow decodes without Python's lock."""
    if len(items) < 32:
        return [work(item) for item in items]
    with ThreadPoolExecutor(min(16, 2 * (os.cpu_count() or 1))) as pool:
        return list(pool.map(work, items, chunksize=16))


def look_at(path: str, *, decode: bool = False, keep: Keep | None = None) -> Header:
    """Size and orientation of an image file, and whether it can be read.

    Args:
        path: of the file.
        decode: decode it completely; otherwise only a JPEG or PNG whose end is missing is, and other damage is not
            found.
        keep: gets path and picture when it was decoded.
    """
    pixels = None
    try:
        with Image.open(path) as picture:
            stored = (picture.height, picture.width)
            if decode:
                picture.load()
            # Pillow would decode a whole PNG to look for a tag behind the pixels
            known = decode or picture.format != "PNG" or "exif" in picture.info
            tag = picture.getexif().get(_ORIENTATION, 1) if known else 1
            end = _END.get(picture.format or "")
            if decode:
                shown = to_rgb(ImageOps.exif_transpose(picture))
                pixels = pixels_hash(shown)
                if keep is not None:
                    keep(path, shown)
            elif end is not None and not _ends_with(path, end):
                read_image(path)
    except FileNotFoundError:
        return Header(error="no such file")
    except Exception as error:  # a damaged file can fail in every way there is
        cause = error.__cause__ if isinstance(error, UserError) and error.__cause__ else error
        return Header(error=str(cause) or type(cause).__name__)
    orientation = tag if isinstance(tag, int) and 1 <= tag <= 8 else 1
    size = stored[::-1] if orientation >= 5 else stored
    return Header((size[0], size[1]), (stored[0], stored[1]), orientation, pixels=pixels)


def _ends_with(path: str, end: bytes) -> bool:
    with open(path, "rb") as file:
        file.seek(max(os.path.getsize(path) - _TAIL, 0))
        return end in file.read()


def pixels_hash(picture: Image.Image) -> bytes:
    """A hash of a picture's size and pixels."""
    return hashlib.blake2b(f"{picture.size}".encode() + picture.tobytes(), digest_size=16).digest()


def compare_with_files(
    table: CocoTable,
    folder: Path,
    findings: Findings,
    *,
    skip_bad: bool = False,
    look: Callable[[Sequence[str]], list[Header]] | None = None,
    whole: CocoTable | None = None,
) -> tuple[CocoTable, list[str], np.ndarray, np.ndarray]:
    """Look at every image file and make boxes and files agree.

    Args:
        table: as read.
        folder: of the images.
        findings: collects what does not agree.
        skip_bad: leave out images that cannot be read, instead of refusing the set.
        look: says what files are; None looks at heads and tails.
        whole: of which ``table`` is a part, so that a box is the same in every part; None: ``table`` is all there is.

    Returns:
        The table with a size for every image (the frame that boxes are measured in), N paths, (N, 2) int64 heights and
        widths of the files as shown, and (N,) int64, the row of each image in the ``table`` that was given.

    Raises:
        UserError: missing or unreadable images, sizes that cannot be reconciled.
    """
    if not folder.is_dir():
        findings.fatal(f"there is no image folder {folder}", table.path, [], "Name it in data.train_images, …", of="")
    paths = image_paths(table, folder)
    headers = in_threads(look_at, paths) if look is None else look(paths)
    bad = np.array([header.error is not None for header in headers], dtype=bool)
    missing = [table.files[row] for row, header in enumerate(headers) if header.error == "no such file"]
    broken = [
        f"{table.files[row]}: {header.error}"
        for row, header in enumerate(headers)
        if header.error not in (None, "no such file")
    ]
    report_bad(f"images missing in {folder}", missing, table, findings, skip_bad)
    report_bad("images that cannot be read", broken, table, findings, skip_bad)
    rows = np.flatnonzero(~bad)
    if len(rows) == 0:
        raise UserError(f"{table.path}: none of its {len(table)} images in {folder} can be read.")
    if bad.any():
        table = table.take(rows)
    kept = [headers[row] for row in rows]
    frames = [_frame(size, header) for size, header in zip(table.sizes.tolist(), kept, strict=True)]
    told = frames  # a part of a file may lack the images that tell
    if EITHER in frames and whole is not None and len(whole) > len(table):
        others = in_threads(look_at, image_paths(whole, folder))
        told = [_frame(size, header) for size, header in zip(whole.sizes.tolist(), others, strict=True)]
    sure = set(told) - {EITHER, ""}
    table = _same_frame(table, kept, frames, sure.pop() if len(sure) == 1 else EITHER, findings)
    return table, [paths[row] for row in rows], np.array([header.size for header in kept], dtype=np.int64), rows


def report_bad(kind: str, files: list[str], table: CocoTable, findings: Findings, skip_bad: bool) -> None:
    """Note images that cannot be used as left out, or refuse the set because of them."""
    if skip_bad:
        findings.repaired(kind, table.path, files, "left out", of="file")
    else:
        verb = "Put them there" if "missing" in kind else "Replace them"
        findings.fatal(kind, table.path, files, f"{verb}, or leave them out with data.skip_bad_images=true.", of="file")


def _frame(said: list[int], header: Header) -> str:
    """In whose pixels the boxes of a turned image are, by the size that the annotation file says.

    A turn by 180°, a mirror, or any turn of a square leaves the size as it is: then it could be either.
    """
    size = (said[0], said[1])
    if header.orientation == 1:
        return ""
    if size == (0, 0):
        return EITHER
    if header.stored != header.size and size in (header.stored, header.size):
        return SHOWN if size == header.size else STORED
    if not _in_proportion(size, header.size):
        return ""  # the image is not the one that the file means
    return EITHER if _in_proportion(size, header.stored) else SHOWN


def _same_frame(
    table: CocoTable, headers: list[Header], frames: list[str], usual: str, findings: Findings
) -> CocoTable:
    """Sizes and boxes of the table in the frame of the image as it is shown, or one in proportion to it.

    Args:
        table: of these images.
        headers: of their files.
        frames: see :func:`_frame`.
        usual: what all images that can tell agree on, for those that cannot; or ``EITHER``.
        findings: takes note.
    """
    sizes, boxes = table.sizes.copy(), table.boxes.copy()
    turned: list[int] = []
    followed: list[int] = []
    unsure, scaled, strange = [], [], []
    with_boxes = set(table.image.tolist())
    for row, (header, frame) in enumerate(zip(headers, frames, strict=True)):
        said, shown, number = tuple(sizes[row].tolist()), header.size, int(table.image_ids[row])
        if frame == STORED or (frame == EITHER and usual == STORED):
            said = header.stored if said == (0, 0) else said
            chosen = table.image == row
            boxes[chosen] = turn_boxes(boxes[chosen], said, header.orientation)
            said = said[::-1] if header.orientation >= 5 else said
            sizes[row] = said
            (turned if frame == STORED else followed).append(number)
        elif frame == EITHER and usual == EITHER and row in with_boxes:
            unsure.append(number)
        if said == shown:
            continue
        if said == (0, 0):
            sizes[row] = shown
        elif _in_proportion(said, shown):
            scaled.append(number)
        else:
            strange.append(f"{number}: {said[1]}×{said[0]} said, {shown[1]}×{shown[0]} found")
            if not findings.strict:
                sizes[row] = shown
    findings.fatal(
        "images whose size is not what the file says, nor in proportion to it",
        table.path,
        strange,
        "Their boxes cannot be trusted: correct the file.",
    )
    before = "boxes given before the EXIF rotation of their image"
    findings.repaired(before, table.path, turned, "turned with it")
    findings.repaired(f"{before}, as the sizes of others show", table.path, followed, "turned with it")
    findings.repaired(
        "images whose EXIF turn their size cannot confirm",
        table.path,
        unsure,
        "boxes taken as shown; look at them, or save these images without an EXIF turn",
    )
    findings.repaired(
        "images of another size than the file says, in proportion to it",
        table.path,
        scaled,
        "boxes scaled with them; results are in the file's pixels",
    )
    return replace(table, sizes=sizes, boxes=boxes)


def _in_proportion(said: tuple[int, int], shown: tuple[int, int]) -> bool:
    """Whether one is the other resized, up to rounding to whole pixels."""
    small, large = sorted((said, shown))
    height, width = (large[axis] / small[axis] for axis in range(2))
    return abs(height - width) * min(small) <= max(height, width, 1.0)


def turn_boxes(boxes: np.ndarray, stored: tuple[int, int], orientation: int) -> np.ndarray:
    """Boxes measured in the pixels as stored, measured in the image as shown.

    Args:
        boxes: (n, 4) left, top, width, height.
        stored: height and width of the stored pixels.
        orientation: EXIF, 1 to 8; from 5 on the sides are swapped.
    """
    height, width = stored
    left, top, wide, tall = boxes.T
    right, bottom = width - left - wide, height - top - tall  # distances from the other edges
    if orientation < 5:
        x = right if orientation in (2, 3) else left
        y = bottom if orientation in (3, 4) else top
        return np.stack([x, y, wide, tall], 1)
    x = bottom if orientation in (6, 7) else top
    y = right if orientation in (7, 8) else left
    return np.stack([x, y, tall, wide], 1)


def content_hashes(paths: Sequence[str]) -> list[bytes]:
    """A hash of every file's bytes."""

    def one(path: str) -> bytes:
        with open(path, "rb") as file:
            return hashlib.blake2b(file.read(), digest_size=16).digest()

    return in_threads(one, paths)


def shared_content(first: Sequence[str], second: Sequence[str]) -> list[tuple[int, int]]:
    """Pairs of rows whose files hold the same bytes; only files of equal length are read."""

    def lengths(paths: Sequence[str]) -> list[int]:
        found = []
        for path in paths:
            with contextlib.suppress(OSError):
                found.append(os.path.getsize(path))
                continue
            found.append(-1)
        return found

    one, other = lengths(first), lengths(second)
    common = (set(one) & set(other)) - {-1}
    rows = [[row for row, length in enumerate(part) if length in common] for part in (one, other)]
    hashes = [content_hashes([paths[row] for row in part]) for paths, part in zip((first, second), rows, strict=True)]
    where: dict[bytes, list[int]] = {}
    for row, digest in zip(rows[0], hashes[0], strict=True):
        where.setdefault(digest, []).append(row)
    return [(match, row) for row, digest in zip(rows[1], hashes[1], strict=True) for match in where.get(digest, ())]
