"""Image files into pixels: one way of reading and resizing for training, evaluation and prediction."""

from __future__ import annotations

import math
import os
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageOps
from torch import Tensor

from vision_attn.errors import UserError, closest

EXTENSIONS = (".jpg", ".jpeg", ".png", ".bmp", ".gif", ".webp", ".tif", ".tiff", ".ppm", ".pgm")

INTERPOLATIONS = {
    "bilinear": Image.Resampling.BILINEAR,
    "bicubic": Image.Resampling.BICUBIC,
    "nearest": Image.Resampling.NEAREST,
    "lanczos": Image.Resampling.LANCZOS,
    "box": Image.Resampling.BOX,
    "hamming": Image.Resampling.HAMMING,
    # timm's word for one drawn anew for each training image: what a model is asked must not depend on chance
    "random": Image.Resampling.BILINEAR,
}
"""Ways of resizing by the names that checkpoints know them by; all but ``nearest`` are antialiased."""

SMALLEST_CROP = 0.05
"""Share of an image's shorter side that must be kept at least."""


def read_image(path: str | Path) -> Image.Image:
    """Decode a file completely, turn it as its EXIF tag says, and make it RGB.

    Raises:
        UserError: when the file is missing, truncated or no image.
    """
    try:
        with Image.open(path) as picture:
            picture.load()
            return to_rgb(ImageOps.exif_transpose(picture))
    except FileNotFoundError as error:
        raise UserError(f"Cannot read the image {path}: no such file. Check its name.") from error
    except Exception as error:  # a damaged file can fail in every way there is
        reason = str(error) or type(error).__name__
        raise UserError(f"Cannot read the image {path}: {reason}. Replace it, or leave it out.") from error


def files_below(folder: Path) -> list[Path]:
    """All files in a folder and those below it, sorted, but for what systems and tools keep there for themselves.

    That is whatever is hidden, files as folders: ``.ipynb_checkpoints`` holds older copies of images, and ``._cat.jpg``
    what macOS knows of ``cat.jpg``. The folder itself may be hidden, or lie in one that is.
    """
    found = []
    for where, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if not name.startswith(".")]
        found += [Path(where, name) for name in names if not name.startswith((".", "Thumbs.db"))]
    return sorted(path for path in found if path.is_file())


def is_image(path: Path) -> bool:
    """Whether a file's name says that it is an image."""
    return path.suffix.lower() in EXTENSIONS


def image_files(path: Path) -> list[Path]:
    """The file itself, or the images of :func:`files_below` a folder.

    Raises:
        UserError: the folder holds none.
    """
    if not path.is_dir():
        return [path]
    found = [file for file in files_below(path) if is_image(file)]
    if not found:
        raise UserError(f"{path} holds no images ({' '.join(EXTENSIONS)}).")
    return found


def to_rgb(picture: Image.Image) -> Image.Image:
    """RGB with 8 bits: 16-bit greys are scaled down, transparency is laid over white.

    Pillow's own ``convert("RGB")`` clips 16-bit greys, which turns most of such an image white.
    """
    if picture.mode.startswith("I") or picture.mode == "F":
        values = np.asarray(picture).astype(np.float32)
        # 16 bits are 0..65535; wider kinds do not say what white is, so the largest value decides
        largest = values.max(initial=0.0)
        is_16_bit = picture.mode.startswith("I;16") or largest > 255.0
        top = 65535.0 if is_16_bit else (1.0 if picture.mode == "F" and largest <= 1.0 else 255.0)
        return Image.fromarray((values * (255.0 / top)).clip(0, 255).astype(np.uint8)).convert("RGB")
    if picture.mode in ("RGBA", "LA", "PA", "RGBa", "La") or "transparency" in picture.info:
        layer = picture.convert("RGBA")
        white = Image.new("RGBA", layer.size, (255, 255, 255, 255))
        return Image.alpha_composite(white, layer).convert("RGB")
    return picture.convert("RGB")


def to_tensor(picture: Image.Image) -> Tensor:
    """(3, H, W) uint8 of an RGB picture."""
    return torch.from_numpy(np.array(picture, dtype=np.uint8)).permute(2, 0, 1).contiguous()


def resampling(name: str) -> Image.Resampling:
    """Pillow's filter for one of ``INTERPOLATIONS``.

    Raises:
        UserError: for an unknown name.
    """
    if name not in INTERPOLATIONS:
        known = ", ".join(INTERPOLATIONS)
        raise UserError(f"Unknown interpolation {name!r}.{closest(str(name), INTERPOLATIONS)} There are: {known}.")
    return INTERPOLATIONS[name]


def resize_and_crop(
    picture: Image.Image, size: tuple[int, int], crop_pct: float = 1.0, interpolation: str = "bilinear"
) -> Tensor:
    """Resize so that the image just covers ``size / crop_pct`` and cut ``size`` out of its middle.

    Args:
        picture: RGB.
        size: (H, W).
        crop_pct: share of the shorter side that is kept.
        interpolation: one of ``INTERPOLATIONS``.

    Returns:
        (3, H, W) uint8.

    Raises:
        UserError: for an unknown interpolation.
    """
    height, width = size
    scale = max(height / picture.height, width / picture.width) / crop_pct
    inner_w, inner_h = width / scale, height / scale
    left, top = (picture.width - inner_w) / 2, (picture.height - inner_h) / 2
    box = (left, top, left + inner_w, top + inner_h)
    return to_tensor(_resize(picture, size, box, interpolation))


def resized_crop(
    picture: Image.Image,
    size: tuple[int, int],
    smallest: float,
    draw: list[float],
    interpolation: str = "bilinear",
) -> Tensor:
    """A random part of the image, resized (Szegedy et al. 2015).

    Args:
        picture: RGB.
        size: (H, W) of the result.
        smallest: least share of the area that is kept.
        draw: four uniform numbers: area, aspect ratio, vertical and horizontal place.
        interpolation: one of ``INTERPOLATIONS``.

    Returns:
        (3, H, W) uint8.

    Raises:
        UserError: for an unknown interpolation.
    """
    area = (smallest + (1.0 - smallest) * draw[0]) * picture.width * picture.height
    aspect = math.exp((2.0 * draw[1] - 1.0) * math.log(4 / 3)) * size[1] / size[0]
    # a box that sticks out is cut to the image: one draw always gives one box, without retrying
    width = min(math.sqrt(area * aspect), picture.width)
    height = min(math.sqrt(area / aspect), picture.height)
    left, top = draw[3] * (picture.width - width), draw[2] * (picture.height - height)
    return to_tensor(_resize(picture, size, (left, top, left + width, top + height), interpolation))


def _resize(
    picture: Image.Image, size: tuple[int, int], box: tuple[float, float, float, float], interpolation: str
) -> Image.Image:
    resample = resampling(interpolation)
    height, width = size
    left, top = max(box[0], 0.0), max(box[1], 0.0)
    right, bottom = min(box[2], float(picture.width)), min(box[3], float(picture.height))
    if (left, top, right, bottom) == (0.0, 0.0, width, height) == (0.0, 0.0, picture.width, picture.height):
        return picture
    return picture.resize((width, height), resample, box=(left, top, right, bottom))


def fingerprint(path: str, label: int) -> bytes:
    """Class, file name and size in bytes of a file."""
    return f"{label}/{os.path.basename(path)}:{os.path.getsize(path)}\n".encode()
