"""Boxes, class names and scores drawn onto an image.

A class has one colour in every picture. Labels are dark or light text on that colour, whichever is easier to read, and
are put where they hide as little of other labels as they can. Small images are enlarged first: a 96 pixel canvas has
no room for letters.
"""

from __future__ import annotations

import colorsys
import functools
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

from vision_attn.errors import UserError

Color: TypeAlias = tuple[int, int, int]
Rectangle: TypeAlias = tuple[float, float, float, float]  # left, top, right, bottom

# Paul Tol's bright and vibrant schemes: told apart by colour-blind readers too
PALETTE: tuple[Color, ...] = (
    (68, 119, 170),
    (238, 119, 51),
    (34, 136, 51),
    (204, 51, 17),
    (170, 51, 119),
    (51, 187, 238),
    (204, 187, 68),
    (0, 153, 136),
    (238, 102, 119),
    (102, 204, 238),
)
GOLDEN = 0.6180339887498949  # of the colour circle: neighbours in a list of classes come out far apart


def draw_detections(
    image: Tensor | Image.Image,
    boxes: Tensor | np.ndarray | Sequence[Sequence[float]],
    names: Sequence[str],
    scores: Tensor | np.ndarray | Sequence[float] | None = None,
    *,
    classes: Sequence[str] | None = None,
    longest_side: int = 480,
) -> Image.Image:
    """A copy of an image with boxes, names and scores on it.

    Args:
        image: (3, H, W) uint8, or a PIL image.
        boxes: (n, 4) left, top, right, bottom in pixels of ``image``; what lies outside is cut off.
        names: n class names.
        scores: n scores, 0 to 1, shown in percent.
        classes: all class names of the model or data set, which give the colours; without them a name decides its own
            colour, and two names can come out alike.
        longest_side: images smaller than this many pixels are enlarged by a whole factor.

    Returns:
        RGB, of the image's size or a whole multiple of it.

    Raises:
        UserError: another number of names or scores than boxes, a box that is not four finite numbers, or no image.
    """
    picture = _picture(image)
    corners = _corners(boxes)
    values = None if scores is None else [float(score) for score in scores]
    if len(names) != len(corners) or (values is not None and len(values) != len(corners)):
        given = "" if values is None else f" and {len(values)} scores"
        raise UserError(f"Cannot draw {len(corners)} boxes with {len(names)} names{given}: one of each per box.")
    factor = max(1, round(longest_side / max(picture.size)))
    if factor > 1:
        kind = Image.Resampling.NEAREST if factor > 3 else Image.Resampling.BICUBIC
        picture = picture.resize((picture.width * factor, picture.height * factor), kind)
    corners = [tuple(value * factor for value in box) for box in corners]  # type: ignore[misc]
    order = sorted(range(len(corners)), key=lambda i: 0.0 if values is None else values[i])
    colors = [_color(str(name), classes) for name in names]
    draw = ImageDraw.Draw(picture)
    line = max(2, round(min(picture.size) / 200))
    for i in order:  # the surest lie on top
        _outline(draw, corners[i], colors[i], line, picture.size)
    _labels(draw, picture.size, corners, [str(name) for name in names], values, colors, order[::-1])
    return picture


def _picture(image: Tensor | Image.Image) -> Image.Image:
    if isinstance(image, Image.Image):
        return image.convert("RGB") if image.mode != "RGB" else image.copy()
    if not isinstance(image, Tensor) or image.ndim != 3 or image.shape[0] != 3 or image.dtype != torch.uint8:
        kind = f"{image.dtype} {tuple(image.shape)}" if isinstance(image, Tensor) else type(image).__name__
        raise UserError(f"Cannot draw on {kind}: give a PIL image or a uint8 tensor (3, H, W).")
    return Image.fromarray(np.ascontiguousarray(image.cpu().permute(1, 2, 0).numpy()))


def _corners(boxes: Any) -> list[Rectangle]:
    array = boxes.detach().cpu().double().numpy() if isinstance(boxes, Tensor) else np.asarray(boxes, dtype=np.float64)
    array = array.reshape(-1, 4) if array.size == 0 else array
    if array.ndim != 2 or array.shape[1] != 4:
        raise UserError(f"Boxes must be (n, 4), left, top, right, bottom; got {array.shape}.")
    if not np.isfinite(array).all():
        raise UserError(f"Box {int((~np.isfinite(array)).any(1).argmax())} holds NaN or infinity.")
    left_top, right_bottom = np.minimum(array[:, :2], array[:, 2:]), np.maximum(array[:, :2], array[:, 2:])
    return [tuple(row) for row in np.concatenate([left_top, right_bottom], 1).tolist()]


def _color(name: str, classes: Sequence[str] | None) -> Color:
    """The colour of a class."""
    if classes is not None and name in classes:
        index = list(classes).index(name)
        if len(classes) <= len(PALETTE):
            return PALETTE[index]
    else:
        index = zlib.crc32(name.encode())
    # three rings of lightness, so that neighbours in hue still differ among 80 classes
    hue, light = index * GOLDEN % 1.0, (0.45, 0.6, 0.35)[index % 3]
    r, g, b = colorsys.hls_to_rgb(hue, light, 0.85)
    return round(255 * r), round(255 * g), round(255 * b)


def _ink(color: Color) -> Color:
    """Black or white, whichever has more contrast on ``color`` (WCAG's relative luminance)."""
    linear = [(c / 255 / 12.92) if c <= 10 else ((c / 255 + 0.055) / 1.055) ** 2.4 for c in color]
    luminance = 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
    return (0, 0, 0) if luminance > 0.18 else (255, 255, 255)


def _outline(draw: ImageDraw.ImageDraw, box: Rectangle, color: Color, line: int, size: tuple[int, int]) -> None:
    """A coloured frame with a thin dark one around it, visible on any background."""
    width, height = size
    left, top = min(max(box[0], 0.0), width - 1.0), min(max(box[1], 0.0), height - 1.0)
    right, bottom = min(max(box[2] - 1, left), width - 1.0), min(max(box[3] - 1, top), height - 1.0)
    draw.rectangle((left - 1, top - 1, right + 1, bottom + 1), outline=(0, 0, 0), width=1)
    draw.rectangle((left, top, right, bottom), outline=color, width=line)


def _labels(
    draw: ImageDraw.ImageDraw,
    size: tuple[int, int],
    boxes: Sequence[Rectangle],
    names: Sequence[str],
    scores: Sequence[float] | None,
    colors: Sequence[Color],
    order: Sequence[int],
) -> None:
    """Names and scores; the first of ``order`` choose their place first and are drawn last."""
    font = _font(max(11, min(24, round(max(size) / 45))))
    taken: list[Rectangle] = []
    texts = []
    for i in order:
        text = names[i] if scores is None else f"{names[i]} {100 * scores[i]:.0f}%"
        left, top, right, bottom = draw.textbbox((0, 0), text, font=font)
        w, h = right - left + 6, bottom - top + 5
        place = min(_places(boxes[i], w, h, size), key=lambda p: sum(_overlap(p, other) for other in taken))
        taken.append(place)
        texts.append((place, text, (place[0] + 3 - left, place[1] + 2 - top), colors[i]))
    for place, text, where, color in reversed(texts):
        draw.rectangle((place[0], place[1], place[2] - 1, place[3] - 1), fill=color)
        draw.text(where, text, fill=_ink(color), font=font)


def _places(box: Rectangle, w: float, h: float, size: tuple[int, int]) -> list[Rectangle]:
    """Where a label may stand, best first: above, below, inside at the top and bottom; each left and right."""
    places = []
    for top in (box[1] - h, box[3], box[1], box[3] - h):
        for left in (box[0], box[2] - w):
            x = min(max(left, 0.0), max(size[0] - w, 0.0))
            y = min(max(top, 0.0), max(size[1] - h, 0.0))
            places.append((x, y, x + w, y + h))
    return places


def _overlap(a: Rectangle, b: Rectangle) -> float:
    """Pixels that two rectangles share."""
    return max(0.0, min(a[2], b[2]) - max(a[0], b[0])) * max(0.0, min(a[3], b[3]) - max(a[1], b[1]))


@functools.lru_cache(maxsize=16)
def _font(size: int) -> Any:
    """DejaVu Sans, which Matplotlib brings along: Latin, Greek and Cyrillic names come out as letters."""
    import matplotlib

    return ImageFont.truetype(str(Path(matplotlib.get_data_path(), "fonts", "ttf", "DejaVuSans.ttf")), size)
