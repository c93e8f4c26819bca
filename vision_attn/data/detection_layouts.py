"""Where known detection sets lie, and how large their images become."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from vision_attn.data.detection_augment import Resize
from vision_attn.data.sources import IMAGENET_MEAN, IMAGENET_STD, Split
from vision_attn.errors import UserError

_SPLITS: tuple[Split, ...] = ("train", "val", "test")


@dataclass(frozen=True)
class Layout:
    """Where a known set lies and how large its images become.

    Attributes:
        folder: under the data root; ``""`` for the root itself.
        files: annotation file of each split, under the folder.
        images: folder of each split's images; a split that is missing here is looked for.
        resize: what its images are brought to when nothing else is asked for.
        mean, std: for normalisation.
    """

    folder: str
    files: dict[Split, str]
    images: dict[Split, str]
    resize: Resize
    mean: tuple[float, float, float] = IMAGENET_MEAN
    std: tuple[float, float, float] = IMAGENET_STD


def _layout(folder: str, names: tuple[str, ...], resize: Resize, **more: Any) -> Layout:
    pairs = list(zip(_SPLITS, names, strict=False))
    files: dict[Split, str] = {split: f"annotations/instances_{name}.json" for split, name in pairs}
    return Layout(folder, files, dict(pairs), resize, **more)


LAYOUTS = {
    "coco": _layout("", ("train2017", "val2017"), Resize("shorter", (800, 1333))),
    "coco_320": _layout("coco-320", ("train2017", "val2017"), Resize("shorter", (320, 320))),
    "bccd": _layout("bccd", ("train", "val", "test"), Resize("shorter", (480, 640))),
    "digit_scenes": _layout(
        "", ("train", "val", "test"), Resize("stretch", (96, 96)), mean=(0.244,) * 3, std=(0.18,) * 3
    ),
}


def choose_resize(default: Resize, img_size: int | tuple[int, int] | None, max_size: int, mode: str | None) -> Resize:
    """What ``data.img_size``, ``data.max_size`` and ``data.resize`` mean together.

    Raises:
        UserError: they do not go together.
    """
    if img_size is None:
        if mode in (None, default.mode):
            return default
        raise UserError(
            f"data.resize={mode} needs data.img_size: {'one number' if mode == 'shorter' else 'two numbers'}."
        )
    sizes = (img_size,) if isinstance(img_size, int) else tuple(img_size)
    check_value("img_size", img_size, len(sizes) in (1, 2) and min(sizes) >= 1, "one or two positive numbers")
    if mode is None:
        mode = "shorter" if len(sizes) == 1 and default.mode == "shorter" else "fit"
    if mode == "shorter":
        check_value("img_size", img_size, len(sizes) == 1, "one number, the shorter side, for data.resize=shorter")
        check_value("max_size", max_size, max_size >= sizes[0], f"at least data.img_size, {sizes[0]}")
        return Resize("shorter", (sizes[0], max_size))
    return Resize("fit" if mode == "fit" else "stretch", (sizes[0], sizes[-1]))


def check_value(name: str, value: object, fine: bool, expected: str) -> None:
    """Raise a UserError unless ``fine``."""
    if not fine:
        raise UserError(f"data.{name} is {value!r}: expected {expected}.")
