"""Digit scenes: real scans of handwritten digits on coloured canvases, in true COCO layout, made from a seed.

What a scene is made of (numbers are drawn uniformly unless it says otherwise):

- a 96 x 96 canvas whose dark ground (each channel at most 0.4) runs linearly from one colour to another, at most 0.2
  apart in each channel, in any direction;
- 0 to 6 pieces of clutter: straight strokes, 4 to 30 pixels long and 1 to 3 wide, in a colour at most 0.2 away from the
  ground's in each channel;
- 1 to 5 digits, scans of one split only. A scan is cut to its ink, brought to a longer side of 16 to 40 pixels, turned
  by up to 12 degrees, sharpened to a stroke with soft edges, and laid on in one colour at least 0.35 lighter than the
  ground in luma;
- normal noise with a deviation of 0 to 0.06.

The box is the smallest one around the ink (opacity of one half and more). A place is drawn up to 30 times until the box
has an IoU of at most 0.1 with each earlier one and no box covers more than a fifth of another; a digit that finds no
place is left out, but never the first. The scenes of a split use the scans of the same split of ``digits``: training,
validation and test have 1,257, 270 and 270 scans, none in common.
"""

from __future__ import annotations

import contextlib
import functools
import json
import math
import os
import shutil
import tempfile
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageDraw

from vision_attn.data.luma import LUMA
from vision_attn.data.sources import Digits, SourceOptions, Split
from vision_attn.errors import UserError

SIDE = 96  # of a canvas, pixels
COUNTS: dict[Split, int] = {"train": 4000, "val": 500, "test": 500}
DIGITS = (1, 5)  # in a scene, at least and at most
SIZES = (16, 40)  # longer side of a digit's ink, pixels, before it is turned
TURN = 12.0  # degrees
MAX_IOU, MAX_COVER, TRIES = 0.1, 0.2, 30
MIN_CONTRAST = 0.35
DARK = 0.4  # the lightest a channel of the ground may be
RUN, NEAR = 0.2, 0.2  # how far a channel changes along the ground, and of clutter from the ground
CLUTTER, NOISE = 6, 0.06
VERSION = 2  # of this recipe: part of the folder's name, so that other scenes are never mistaken for these
_LUMA = np.array(LUMA)
_HUFFMAN = 2  # zlib's strategy: noise holds nothing to look for, a third of the time and no more bytes
_SPLITS: tuple[Split, ...] = ("train", "val", "test")


def scenes_folder(root: Path, seed: int = 0) -> Path:
    """Where the scenes of a seed lie under a data root."""
    return root / f"digit_scenes-v{VERSION}" / f"seed{seed}"


def prepare_scenes(root: Path, seed: int = 0, counts: dict[Split, int] | None = None) -> Path:
    """The folder with the scenes; they are made when it is missing or not whole.

    They are written beside it and moved there in one step, so a half-written set is never found, and of two processes
    that make them at once one wins and both get the same.

    Args:
        root: data root.
        seed: of the scenes.
        counts: scenes per split; :data:`COUNTS` by default. Another number makes a folder that is not whole.

    Returns:
        A folder with ``annotations/instances_<split>.json`` and ``<split>/<number>.png``.

    Raises:
        UserError: the folder cannot be written.
    """
    counts = counts or COUNTS
    folder = scenes_folder(root, seed)
    if is_whole(folder, counts):
        return folder
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(dir=folder.parent, prefix=f".{folder.name}-"))
    except OSError as error:
        raise UserError(f"Cannot make the digit scenes in {folder}: {error.strerror}. Set data.root.") from error
    try:
        for split in _SPLITS:
            write_split(temporary, split, seed, counts[split])
        _move(temporary, folder, counts)
    except OSError as error:
        raise UserError(f"Cannot make the digit scenes in {folder}: {error.strerror}. Set data.root.") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return folder


def is_whole(folder: Path, counts: dict[Split, int]) -> bool:
    """Whether all annotation files are there, and as many images as they should list."""
    for split in _SPLITS:
        if not (folder / "annotations" / f"instances_{split}.json").is_file():
            return False
        with contextlib.suppress(OSError):
            if sum(entry.name.endswith(".png") for entry in os.scandir(folder / split)) == counts[split]:
                continue
        return False
    return True


def _move(temporary: Path, folder: Path, counts: dict[Split, int]) -> None:
    os.chmod(temporary, 0o755)  # mkdtemp makes private folders
    for _ in range(2):
        try:
            os.replace(temporary, folder)
            return
        except OSError:
            if is_whole(folder, counts):  # another process was faster
                return
            shutil.rmtree(folder, ignore_errors=True)  # what is there is not whole
    os.replace(temporary, folder)


def write_split(folder: Path, split: Split, seed: int, count: int) -> None:
    """Write the images of a split and its annotation file."""
    scans = Digits(SourceOptions()).scans(split)
    assert scans is not None
    inks = [_ink(image) for image in scans.images[:, 0].numpy()]
    labels = scans.labels.tolist()
    (folder / split).mkdir(parents=True)
    images: list[dict[str, Any]] = []
    annotations: list[dict[str, Any]] = []
    saving: list[Future[None]] = []
    pool = ThreadPoolExecutor(2)  # zlib works without Python's lock
    for number in range(1, count + 1):
        # every scene has a generator of its own: the first 500 of 4,000 are those of a set of 500
        rng = np.random.default_rng([seed, _SPLITS.index(split), number])
        canvas, found = compose(rng, inks)
        name = f"{number:06d}.png"
        save = functools.partial(Image.fromarray(canvas).save, compress_level=1, compress_type=_HUFFMAN)
        saving.append(pool.submit(save, folder / split / name))
        images.append({"id": number, "file_name": name, "height": SIDE, "width": SIDE})
        for which, (left, top, right, bottom) in found:
            width, height = right - left, bottom - top
            annotations.append(
                {
                    "id": len(annotations) + 1,
                    "image_id": number,
                    "category_id": labels[which] + 1,  # as in COCO, 0 is no category
                    "bbox": [left, top, width, height],
                    "area": width * height,
                    "iscrowd": 0,
                    "scan": int(scans.ids[which]),
                }
            )
    pool.shutdown()
    for future in saving:
        future.result()  # raises what went wrong
    content = {
        "info": {"description": f"digit scenes, version {VERSION}, seed {seed}, {split}"},
        "images": images,
        "annotations": annotations,
        "categories": [{"id": digit + 1, "name": str(digit), "supercategory": "digit"} for digit in range(10)],
    }
    path = folder / "annotations" / f"instances_{split}.json"
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(content), encoding="utf-8")


def _ink(scan: np.ndarray) -> Image.Image:
    """A scan (8, 8) uint8, cut to what is not ground, with a rim of one pixel."""
    rows, columns = np.nonzero(scan > 48)
    return Image.fromarray(np.pad(scan[rows.min() : rows.max() + 1, columns.min() : columns.max() + 1], 1))


def compose(rng: np.random.Generator, inks: list[Image.Image]) -> tuple[np.ndarray, list[tuple[int, tuple[int, ...]]]]:
    """One scene.

    Args:
        rng: source of all draws.
        inks: scans to draw from.

    Returns:
        (96, 96, 3) uint8, and for each digit its scan's place in ``inks`` and its box: left, top, right, bottom.
    """
    ground = _ground(rng)
    canvas = _clutter(rng, ground)
    found: list[tuple[int, tuple[int, ...]]] = []
    for _ in range(rng.integers(DIGITS[0], DIGITS[1] + 1)):
        which = int(rng.integers(len(inks)))
        opacity, ink = _stroke(rng, inks[which])
        height, width = opacity.shape
        for _ in range(TRIES):
            left, top = int(rng.integers(SIDE - width + 1)), int(rng.integers(SIDE - height + 1))
            box = (left + ink[0], top + ink[1], left + ink[2], top + ink[3])
            if all(_apart(box, other) for _, other in found):
                place = (slice(top, top + height), slice(left, left + width))
                colour = _contrasting(rng, float((ground[place] @ _LUMA).mean()))
                canvas[place] += opacity[..., None] * (colour.astype(np.float32) - canvas[place])
                found.append((which, box))
                break
    canvas += rng.uniform(0.0, NOISE) * rng.standard_normal(canvas.shape, dtype=np.float32)
    canvas *= 255.0
    return canvas.round().clip(0.0, 255.0).astype(np.uint8), found


def _ground(rng: np.random.Generator) -> np.ndarray:
    """(96, 96, 3) float32 in 0...1, a linear run between two colours."""
    one = rng.uniform(0.0, DARK, 3).astype(np.float32)
    other = (one + rng.uniform(-RUN, RUN, 3)).clip(0.0, DARK).astype(np.float32)
    angle = rng.uniform(0.0, 2.0 * math.pi)
    steps = np.arange(SIDE, dtype=np.float32) / (SIDE - 1) - 0.5
    run = (steps * math.cos(angle) + steps[:, None] * math.sin(angle)) / math.sqrt(2.0) + 0.5
    return one + run[..., None] * (other - one)


def _clutter(rng: np.random.Generator, ground: np.ndarray) -> np.ndarray:
    picture = Image.fromarray((ground * 255.0).round().astype(np.uint8))
    draw = ImageDraw.Draw(picture)
    for _ in range(rng.integers(0, CLUTTER + 1)):
        x, y = rng.uniform(0.0, SIDE, 2)
        length, angle = rng.uniform(4.0, 30.0), rng.uniform(0.0, 2.0 * math.pi)
        end = (x + length * math.cos(angle), y + length * math.sin(angle))
        near = ground[min(int(y), SIDE - 1), min(int(x), SIDE - 1)]
        colour = (near + rng.uniform(-NEAR, NEAR, 3)).clip(0.0, 1.0)
        ink = tuple(int(v) for v in (colour * 255.0).round())
        draw.line([(x, y), end], fill=ink, width=int(rng.integers(1, 4)))
    return np.asarray(picture).astype(np.float32) / 255.0


def _stroke(rng: np.random.Generator, ink: Image.Image) -> tuple[np.ndarray, tuple[int, int, int, int]]:
    """A digit's opacity, (h, w) in 0...1, and the box of its ink therein: left, top, right, bottom."""
    longer = int(rng.integers(SIZES[0], SIZES[1] + 1))
    scale = longer / (max(ink.size) - 2)  # the rim does not count
    size = (max(round(ink.width * scale), 3), max(round(ink.height * scale), 3))
    large = ink.resize(size, Image.Resampling.BICUBIC)
    large = large.rotate(rng.uniform(-TURN, TURN), Image.Resampling.BICUBIC, expand=True)
    grey = np.asarray(large).astype(np.float32) / 255.0
    # an edge about two pixels wide, whatever the magnification; steep enough that the ground shows through unchanged
    opacity = ((grey - 0.4) * max(scale / 3.0, 1.25) + 0.5).clip(0.0, 1.0)
    left, top, right, bottom = _extent(opacity > 0.0)
    opacity = opacity[top:bottom, left:right]
    return opacity, _extent(opacity >= 0.5)


def _extent(chosen: np.ndarray) -> tuple[int, int, int, int]:
    """Left, top, right, bottom of the smallest box around what is True."""
    rows, columns = np.flatnonzero(chosen.any(1)), np.flatnonzero(chosen.any(0))
    return int(columns[0]), int(rows[0]), int(columns[-1]) + 1, int(rows[-1]) + 1


def _contrasting(rng: np.random.Generator, luma: float) -> np.ndarray:
    """A colour (3,) that is enough lighter than ``luma``."""
    while True:
        colour = rng.uniform(0.0, 1.0, 3)
        if float(colour @ _LUMA) - luma >= MIN_CONTRAST:
            return colour


def _apart(box: tuple[int, ...], other: tuple[int, ...]) -> bool:
    width = min(box[2], other[2]) - max(box[0], other[0])
    height = min(box[3], other[3]) - max(box[1], other[1])
    if width <= 0 or height <= 0:
        return True
    shared = width * height
    areas = [(b[2] - b[0]) * (b[3] - b[1]) for b in (box, other)]
    return shared / (sum(areas) - shared) <= MAX_IOU and shared / min(areas) <= MAX_COVER
