"""One's own images: one folder per class."""

from __future__ import annotations

import functools
import hashlib
import os
import warnings
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import ClassVar, Literal

import torch
from torch import Tensor

from vision_attn.data.images import files_below, is_image, read_image, resize_and_crop
from vision_attn.data.sets import MemorySet, StreamedSet
from vision_attn.data.sources import (
    IMAGENET_MEAN,
    IMAGENET_STD,
    Source,
    SourceOptions,
    Split,
    data_root,
    register_source,
)
from vision_attn.data.verify import Verifier
from vision_attn.errors import UserError, closest

SPLITS = {"train": ("train", "training"), "val": ("val", "valid", "validation"), "test": ("test", "testing")}
"""Our names of the splits, and what their folders are called elsewhere."""


@register_source("image_folder")
class ImageFolder(Source):
    """``root/train/<class>/...``, ``root/val/<class>/...`` and ``root/test/<class>/...``, or ``root/<class>/...``.

    Without ``val`` a tenth of the training images, or ``val_fraction`` of them, is held out. Without ``train``, ``val``
    and ``test`` the images are split 70 / 15 / 15. Where an image goes is decided by its path below ``root``
    (:func:`hold_out_by_path`), whatever the seed: files that are added leave the others where they are. Classes are the
    folders of the training images, in alphabetical order; images may lie in folders below them. What is hidden (a name
    that begins with a dot) is not looked at.

    Every image is resized to cover ``img_size / crop_pct`` (224 x 224 and 1 by default) and ``img_size`` is cut out of
    its middle. Folders that fit in memory are decoded once, when they are opened; larger ones are decoded as they are
    needed, and once before (``verify_images``), so that files that cannot be read are found then.

    Raises:
        UserError: no root, no class folders, folders that look like splits but are not called ``train``, ``val`` and
            ``test``, a class folder with no images, a class outside training, an unreadable file.
    """

    any_size: ClassVar[bool] = True
    mean, std = IMAGENET_MEAN, IMAGENET_STD

    def __init__(self, options: SourceOptions) -> None:
        super().__init__(options)
        if options.root is None:
            raise UserError("data.name=image_folder needs data.root: the folder that holds one folder per class.")
        self.root = Path(options.root).expanduser()
        if not self.root.is_dir():
            raise UserError(f"There is no folder {self.root}: data.root names the folder with one folder per class.")
        self.size = options.img_size or (224, 224)
        self.crop_pct, self.interpolation = options.crop_pct, options.interpolation
        refuse_other_splits(self.root)
        self.flat = not (self.root / "train").is_dir()
        if (self.root / "val").is_dir() and not self.flat and options.val_fraction is not None:
            raise UserError(
                f"{self.root / 'val'} holds the validation images, so data.val_fraction has nothing to say: leave it "
                "out, or rename that folder."
            )
        training = self.root if self.flat else self.root / "train"
        self.labels = class_names(training)
        if not self.labels:
            raise UserError(f"{training} has no class folders: expected {training}/<class>/<image>.")
        self._files = {"train": self._list(training)}
        for split in ("val", "test"):
            if not self.flat and (self.root / split).is_dir():
                self._files[split] = self._list(self.root / split)

    def _list(self, folder: Path) -> tuple[list[str], Tensor]:
        """Paths and labels (N,) of all images below a folder of class folders."""
        names = class_names(folder)
        strange = sorted(set(names) - set(self.labels))
        if strange:
            raise UserError(
                f"{folder / strange[0]} is a class that no training image has.{closest(strange[0], self.labels)} "
                f"There are: {_few(self.labels)}."
            )
        paths: list[str] = []
        labels: list[int] = []
        for name in names:
            found = _images_below(folder / name)
            if not found:
                raise UserError(f"The class folder {folder / name} holds no images: add some or delete it.")
            paths += found
            labels += [self.labels.index(name)] * len(found)
        return paths, torch.tensor(labels, dtype=torch.int64)

    def _rows(self, split: Split) -> tuple[list[str], Tensor, Tensor | None]:
        """Files and labels that a split is taken from, and which rows of them; None for all."""
        share = self.options.val_fraction
        if self.flat:
            paths, labels = self._files["train"]
            rest, test = self._hold_out("test", torch.arange(len(paths)), 0.15)
            kept, val = self._hold_out("val", rest, 0.15 / 0.85 if share is None else share)
            return paths, labels, {"train": kept, "val": val, "test": test}[split]
        if split in self._files and (split != "train" or "val" in self._files):
            return *self._files[split], None
        if split == "test":
            return [], torch.empty(0, dtype=torch.int64), None
        paths, labels = self._files["train"]
        kept, val = self._hold_out("val", torch.arange(len(paths)), 0.1 if share is None else share)
        return paths, labels, kept if split == "train" else val

    @functools.cached_property
    def _names(self) -> list[str]:
        """The training images below ``root``, the same wherever that lies."""
        return [Path(path).relative_to(self.root).as_posix() for path in self._files["train"][0]]

    def _hold_out(self, split: Literal["val", "test"], rows: Tensor, share: float) -> tuple[Tensor, Tensor]:
        """Those of the ``rows`` of training images that are kept, and those that are held out."""
        names = [self._names[row] for row in rows.tolist()]
        held = hold_out_by_path(names, self._files["train"][1][rows], share, split)
        return rows[~held], rows[held]

    def load(self, split: Split) -> MemorySet | StreamedSet | None:
        paths, labels, rows = self._rows(split)
        ids = torch.arange(len(labels))
        if rows is not None:
            paths, labels, ids = [paths[row] for row in rows.tolist()], labels[rows], ids[rows]
        if not paths:
            return None
        height, width = self.size
        if len(paths) * 3 * height * width > self.options.memory_limit:
            crop = self.options.resized_crop if split == "train" else 0.0
            return StreamedSet(
                paths,
                labels,
                ids,
                size=self.size,
                seed=self.options.seed,
                resized_crop=crop,
                crop_pct=self.crop_pct,
                interpolation=self.interpolation,
            )
        images = torch.empty(len(paths), 3, height, width, dtype=torch.uint8)

        def decode(row: int) -> None:
            images[row] = resize_and_crop(read_image(paths[row]), self.size, self.crop_pct, self.interpolation)

        # Pillow lets go of the interpreter while it decodes and resizes, so threads are enough
        with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
            list(pool.map(decode, range(len(paths))))
        return MemorySet(images, labels, ids)

    def verify(self, data: MemorySet | StreamedSet) -> None:
        if not isinstance(data, StreamedSet):
            return  # decoded already
        paths = [os.path.abspath(path) for path in data.paths]
        headers = Verifier(data_root(None) / "verified", decode=True).look(paths, Path(os.path.abspath(self.root)))
        bad = [f"{path}: {h.error}" for path, h in zip(data.paths, headers, strict=True) if h.error is not None]
        if bad:
            raise UserError(
                f"{len(bad):,} of {len(data):,} images cannot be read: {_few(bad)}. Replace them, or delete "
                "them and start a new run."
            )


def hold_out_by_path(paths: Sequence[str], labels: Tensor, share: float, purpose: str) -> Tensor:
    """Which images to hold out, each by a hash of its own path, so that no image moves when others are added.

    The numbers held out are those of independent draws: near ``share``, not exactly it. Two rules mend what chance does
    to a handful of images: a class of which an image at least is due, or the whole set, is not left without any, and
    training keeps an image of each class. Only where they apply can an added image move another one.

    Args:
        paths: of N images, relative to the set's folder, with forward slashes.
        labels: (N,) int64.
        share: of the images to hold out, 0...1.
        purpose: makes draws of different splits independent.

    Returns:
        (N,) bool.
    """
    bits = [hashlib.blake2b(f"{purpose}:{path}".encode(errors="surrogateescape"), digest_size=6) for path in paths]
    draw = torch.tensor([int.from_bytes(one.digest(), "big") / (1 << 48) for one in bits], dtype=torch.float64)
    held = draw < share
    classes = [(labels == label).nonzero()[:, 0] for label in labels.unique()]
    for rows in (*classes, torch.arange(len(paths))):
        if share * len(rows) >= 1 and not held[rows].any():
            held[rows[draw[rows].argmin()]] = True
    for rows in classes:
        if share < 1 and held[rows].all():
            held[rows[draw[rows].argmax()]] = False
    return held


def class_names(folder: Path) -> list[str]:
    """The names of the folders in a folder, sorted, but for hidden ones."""
    return sorted(entry.name for entry in folder.iterdir() if entry.is_dir() and not entry.name.startswith("."))


def _few(names: list[str], most: int = 5) -> str:
    """The first names, and how many more there are."""
    more = f" and {len(names) - most:,} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def refuse_other_splits(root: Path) -> None:
    """Refuses folders that are splits by another name: they would be trained on as classes, or not be seen at all.

    A class may be called ``test`` too: only folders that hold folders themselves are taken for splits.

    Raises:
        UserError: saying what was found and what it should be called.
    """
    folders = class_names(root)
    known = {alias: split for split, aliases in SPLITS.items() for alias in aliases}
    found = {name: known[name.casefold()] for name in folders if name.casefold() in known}
    holding = [name for name in found if class_names(root / name)]
    if (root / "train").is_dir():  # what is missing beside it may be there by another name
        strange = [name for name in holding if not (root / found[name]).is_dir()]
        wrong = f"{root} holds train and {_few(strange)}: images there would not be looked at"
    else:
        strange = list(found) if holding and len(found) == len(folders) else []
        wrong = f"{root} holds {_few(strange)} and no train: these would be taken for classes"
    if not strange:
        return
    renamed = [f"{name} to {found[name]}" for name in strange if name != found[name]]
    advice = f"Rename {' and '.join(renamed)}." if renamed else f"Put training images into {root / 'train'}."
    raise UserError(f"{wrong}. Expected {root}/train/<class>/<image>, and val and test like train. {advice}")


def _images_below(folder: Path) -> list[str]:
    """Image files below ``folder``, sorted; others are counted and named in a warning."""
    files = files_below(folder)
    images = [str(file) for file in files if is_image(file)]
    others = [file for file in files if not is_image(file)]
    if others:
        warnings.warn(f"{folder}: {len(others)} file(s) are not images, such as {others[0].name}.", stacklevel=4)
    return images
