"""Where an image and its boxes go: resizing, cropping, mirroring and placing as one *view* of the image.

A view is a rectangle of the source image, resized once to a rectangle of the output. The DETR recipe's chain of resize,
crop and resize is such a view too, so pixels are resampled once and boxes take one affine map. Views are computed for a
whole set at a time, from (seed, epoch, sample) alone: a loader knows the shapes of an epoch before it reads a pixel.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from vision_attn.data.policy import color_jitter
from vision_attn.data.randomness import Stream, uniforms
from vision_attn.errors import UserError

_FIRST = Stream.DETECTION
_FLIP, _FLIP_Y, _SCALE, _BRANCH, _CROP_SCALE, _CROP_H, _CROP_W, _Y, _X, _ZOOM, _ASPECT = range(_FIRST, _FIRST + 11)
_PIECE = 1 << 18  # bytes of images whose float copies stay in a processor's cache
DETR_SCALES = tuple(range(480, 801, 32))


@dataclass
class DetectionAugmentConfig:
    """Augmentation of training images with boxes; evaluation images are only resized.

    DETR's own recipe (Carion et al. 2020) is ``flip: true, multi_scale: true, crop: 0.5, min_visible: 0``; its numbers
    are the defaults of the other fields.

    Attributes:
        flip: mirror half of the images left and right.
        flip_vertical: mirror half of the images upside down, where up and down mean nothing (cells, aerial images).
        multi_scale: draw the shorter side from ``scales`` for every image. Needs ``resize: shorter``.
        scales: shorter sides, pixels; the longer side is at most the ``max_size`` of the data.
        crop: probability of cutting a random part out of the image before that, after bringing its shorter side to one
            of ``crop_scales``; the part's sides are drawn between the two of ``crop_size``.
        crop_scales: shorter sides before the crop, pixels.
        crop_size: smallest and largest side of the part, pixels.
        zoom: smallest and largest magnification (large-scale jitter, Ghiasi et al. 2021). Above 1 a random part fills
            the output, below 1 the image lies somewhere on a plain ground. (1, 1): off. Not with ``multi_scale``.
        aspect: the width is stretched against the height by up to this factor, when zooming. 1: not at all.
        min_visible: share of its area that a box must keep in a crop; boxes cut more are left out.
        color_jitter: brightness, contrast and saturation are each scaled by up to 1 +- this. 0: off.
    """

    flip: bool = False
    flip_vertical: bool = False
    multi_scale: bool = False
    scales: tuple[int, ...] = DETR_SCALES
    crop: float = 0.0
    crop_scales: tuple[int, ...] = (400, 500, 600)
    crop_size: tuple[int, int] = (384, 600)
    zoom: tuple[float, float] = (1.0, 1.0)
    aspect: float = 1.0
    min_visible: float = 0.25
    color_jitter: float = 0.0

    def __post_init__(self) -> None:
        for name in ("crop", "min_visible", "color_jitter"):
            self._check(name, 0.0 <= getattr(self, name) <= 1.0, "a number between 0 and 1")
        for name in ("scales", "crop_scales"):
            values = tuple(getattr(self, name))
            self._check(name, bool(values) and min(values) >= 1, "positive numbers of pixels")
            setattr(self, name, values)
        for name, bound in (("crop_size", 1.0), ("zoom", 0.05)):
            low, high = getattr(self, name)
            self._check(name, bound <= low <= high, f"smallest and largest, at least {bound:g}")
            setattr(self, name, (low, high))
        self._check("aspect", 1.0 <= self.aspect <= 4.0, "a factor between 1 and 4")
        self._check("zoom", self.zoom[1] <= 20.0, "at most 20")
        if self.multi_scale and self.zooms:
            raise UserError("augment.zoom and augment.multi_scale do the same: use one of them.")

    def _check(self, name: str, fine: bool, expected: str) -> None:
        if not fine:
            raise UserError(f"augment.{name} is {getattr(self, name)!r}: expected {expected}.")

    @property
    def zooms(self) -> bool:
        """Whether images are magnified or stretched at random."""
        return tuple(self.zoom) != (1.0, 1.0) or self.aspect != 1.0

    def changed(self) -> dict[str, object]:
        """The settings that differ from the defaults, for logs and captions."""
        default = {f.name: f.default for f in fields(self)}
        return {name: getattr(self, name) for name, value in default.items() if getattr(self, name) != value}


@dataclass(frozen=True)
class Resize:
    """How large images become.

    Attributes:
        mode: ``shorter``: the shorter side becomes ``size[0]``, the longer one at most ``size[1]``, as DETR does it;
            ``fit``: as large as fits into ``size`` (H, W), aspect kept, the rest padding; ``stretch``: exactly that.
        size: two numbers of pixels.
    """

    mode: Literal["shorter", "fit", "stretch"]
    size: tuple[int, int]

    def output(self, sizes: Tensor, shorter: Tensor | None = None) -> Tensor:
        """(B, 2) int64 heights and widths that images of these (B, 2) sizes are brought to.

        Args:
            sizes: heights and widths.
            shorter: (B,) other lengths of the shorter side, for ``shorter``.
        """
        target = torch.tensor(self.size, dtype=torch.int64)
        if self.mode == "stretch":
            return target.expand(len(sizes), 2).clone()
        sides = sizes.double()
        if self.mode == "fit":
            scale = (target / sides).amin(1, keepdim=True)
            return (sides * scale).round().long().clamp(min=1).minimum(target)
        return _shorter_to(sizes, shorter if shorter is not None else target[0].expand(len(sizes)), self.size[1])


def _shorter_to(sizes: Tensor, shorter: Tensor, longest: int) -> Tensor:
    """DETR's rule: the shorter side as asked for, unless the longer one would exceed ``longest``."""
    low, high = sizes.amin(1).double(), sizes.amax(1).double()
    limit = (longest * low / high).round()
    side = torch.where(high / low * shorter > longest, limit, shorter.double()).clamp(min=1.0)
    other = (side * high / low).floor().clamp(min=1.0)
    tall = sizes[:, 0] >= sizes[:, 1]
    return torch.stack([torch.where(tall, other, side), torch.where(tall, side, other)], 1).long()


@dataclass
class Views:
    """B views.

    Attributes:
        source: (B, 4) int64 top, left, height, width in the stored image.
        place: (B, 4) int64 top, left, height, width in the output.
        output: (B, 2) int64 height and width of the output.
        mirror: (B, 2) bool, upside down and left to right, of the output.
    """

    source: Tensor
    place: Tensor
    output: Tensor
    mirror: Tensor

    def __len__(self) -> int:
        return len(self.output)

    def __getitem__(self, rows: Tensor) -> Views:
        return Views(self.source[rows], self.place[rows], self.output[rows], self.mirror[rows])


class ViewMaker:
    """Draws views.

    Args:
        config: what may be done in training.
        resize: how large images become.
        seed: of the run.

    Raises:
        UserError: the two do not go together.
    """

    def __init__(self, config: DetectionAugmentConfig, resize: Resize, seed: int = 0) -> None:
        if config.multi_scale and resize.mode != "shorter":
            raise UserError("augment.multi_scale gives images of many sizes: it needs data.resize=shorter.")
        if config.crop and config.zooms:
            raise UserError("augment.crop and augment.zoom both cut parts out: use one of them.")
        self.config, self.resize, self.seed = config, resize, seed

    @property
    def fixed(self) -> tuple[int, int] | None:
        """(H, W) that every batch has, or None where it depends on the images."""
        return None if self.resize.mode == "shorter" else self.resize.size

    def stored(self, sizes: Tensor, training: bool) -> Tensor:
        """The sizes that images need to be kept in, (B, 2): no larger than any view can show.

        Args:
            sizes: (B, 2) int64 of the files.
            training: whether views are drawn at random.
        """
        config = self.config
        shorter, factor = None, 1.0
        if training and self.resize.mode == "shorter":
            largest = max(config.scales) if config.multi_scale else self.resize.size[0]
            largest = max(largest, *config.crop_scales) if config.crop else largest
            shorter = torch.full((len(sizes),), largest)
        if training:
            factor = max(config.zoom[1], 1.0) * config.aspect**0.5
        shown = (self.resize.output(sizes, shorter) * factor).ceil().long()
        return torch.where((shown <= sizes).all(1, keepdim=True), shown, sizes)

    def evaluation(self, sizes: Tensor, orig_sizes: Tensor | None = None) -> Views:
        """Views of whole images of (B, 2) sizes.

        Args:
            sizes: of the stored images.
            orig_sizes: of the files, where those are others. They tell the size for the model: that of a stored image,
                which was rounded once, would give another one than prediction has.
        """
        output = self.resize.output(sizes if orig_sizes is None else orig_sizes)
        corner = torch.zeros_like(output)
        mirror = torch.zeros(len(sizes), 2, dtype=torch.bool)
        return Views(torch.cat([corner, sizes], 1), torch.cat([corner, output], 1), output, mirror)

    def training(self, sizes: Tensor, epoch: int, ids: Tensor) -> Views:
        """Views for an epoch.

        Args:
            sizes: (B, 2) int64, of the stored images.
            epoch: 0, 1, ...
            ids: (B,) int64, identities of the images.
        """
        config = self.config
        draw = uniforms(self.seed, epoch, ids, range(_FIRST, _FIRST + 11)).double()

        def of(stream: int) -> Tensor:
            return draw[:, stream - _FIRST]

        views = self._crops(sizes, of) if config.crop else self.evaluation(sizes)
        if config.multi_scale:
            shorter = torch.tensor(config.scales)[(of(_SCALE) * len(config.scales)).long()]
            views.output = self.resize.output(views.source[:, 2:], shorter)
            views.place = torch.cat([torch.zeros_like(views.output), views.output], 1)
        if config.zooms:
            views = self._zoomed(views, of)
        views.mirror = torch.stack([config.flip_vertical & (of(_FLIP_Y) < 0.5), config.flip & (of(_FLIP) < 0.5)], 1)
        return views

    def _crops(self, sizes: Tensor, of: Any) -> Views:
        """DETR's branch: shorter side to 400, 500 or 600, cut 384 to 600 pixels out of it, in source pixels."""
        config = self.config
        scales = torch.tensor(config.crop_scales)[(of(_CROP_SCALE) * len(config.crop_scales)).long()]
        inner = _shorter_to(sizes, scales, 2**31).double()
        low, high = config.crop_size
        drawn = torch.stack([of(_CROP_H), of(_CROP_W)], 1)
        top = inner.clamp(max=float(high))
        least = torch.full_like(top, float(low)).minimum(inner)
        part = (least + drawn * (top - least + 1.0)).floor().minimum(top)
        ratio = sizes / inner
        part = (part * ratio).round().clamp(min=1.0).minimum(sizes.double())
        corner = (torch.stack([of(_Y), of(_X)], 1) * (sizes - part + 1.0)).floor()
        chosen = (of(_BRANCH) < config.crop)[:, None]
        source = torch.where(
            chosen, torch.cat([corner, part], 1).long(), torch.cat([torch.zeros_like(sizes), sizes], 1)
        )
        output = self.resize.output(source[:, 2:])
        place = torch.cat([torch.zeros_like(output), output], 1)
        return Views(source, place, output, torch.zeros(len(sizes), 2, dtype=torch.bool))

    def _zoomed(self, views: Views, of: Any) -> Views:
        """Magnify: what no longer fits is cut off at random, room that is left is divided at random."""
        low, high = self.config.zoom
        zoom = low * (high / low) ** of(_ZOOM)  # as often 1/2 as 2
        stretch = self.config.aspect ** (of(_ASPECT) - 0.5)
        factor = torch.stack([zoom / stretch, zoom * stretch], 1)  # (B, 2)
        output, sizes = views.output.double(), views.source[:, 2:].double()
        drawn = torch.stack([of(_Y), of(_X)], 1)
        # along each axis either a part of the source fills the output, or all of it fills a part of the output
        part = (sizes / factor).round().clamp(min=1.0).minimum(sizes)
        corner = (drawn * (sizes - part + 1.0)).floor()
        extent = (output * factor).round().clamp(min=1.0).minimum(output)
        offset = (drawn * (output - extent + 1.0)).floor()
        source = torch.cat([views.source[:, :2] + corner, part], 1).long()
        return Views(source, torch.cat([offset, extent], 1).long(), views.output, views.mirror)


def move_boxes(boxes: Tensor, sizes: Tensor, image: Tensor, views: Views, min_visible: float) -> tuple[Tensor, Tensor]:
    """Boxes as they lie in the views.

    Args:
        boxes: (T, 4) left, top, right, bottom as shares of the image's width and height.
        sizes: (B, 2) int64 of the stored images.
        image: (T,) int64, each box's row in ``views``.
        views: B views.
        min_visible: share of a box's area that must remain.

    Returns:
        (T, 4) float32 centre x, centre y, width, height as shares of the output, and (T,) bool, which boxes remain.
    """
    source, place, output = (x[image].double() for x in (views.source, views.place, views.output))
    pixels = boxes.double().view(-1, 2, 2) * sizes[image].flip(1)[:, None]  # (T, corner, x y)
    scale = (place[:, 2:] / source[:, 2:]).flip(1)[:, None]
    moved = (pixels - source[:, :2].flip(1)[:, None]) * scale
    extent = place[:, 2:].flip(1)[:, None]
    cut = moved.clamp(min=0.0).minimum(extent)
    whole, left = (moved[:, 1] - moved[:, 0]).prod(1), (cut[:, 1] - cut[:, 0]).prod(1)
    # a box that nothing was cut off stays, whatever rounding does to its area
    keep = (left > 0) & (left >= min_visible * whole * (1 - 1e-9))
    cut = (cut + place[:, :2].flip(1)[:, None]) / output.flip(1)[:, None]
    mirror = views.mirror[image].flip(1)[:, None]
    cut = torch.where(mirror, 1.0 - cut.flip(1), cut)
    centre, side = (cut[:, 0] + cut[:, 1]) / 2, cut[:, 1] - cut[:, 0]
    return torch.cat([centre, side], 1).float(), keep


def draw_view(image: Tensor, views: Views, row: int, out: Tensor, ground: Tensor) -> None:
    """Put one view of an image into ``out``.

    Args:
        image: (3, h, w) uint8.
        views: where it goes.
        row: which view.
        out: (3, H, W) uint8, its first output height and width are filled.
        ground: (3, 1, 1) uint8, the colour where the image does not reach.
    """
    top, left, height, width = views.source[row].tolist()
    y, x, tall, wide = views.place[row].tolist()
    rows, columns = views.output[row].tolist()
    part = image[:, top : top + height, left : left + width]
    if (height, width) != (tall, wide):
        part = F.interpolate(part[None], size=(tall, wide), mode="bilinear", antialias=True)[0]
    out = out[:, :rows, :columns]
    if (tall, wide) != (rows, columns):
        out.copy_(ground.expand_as(out))
    mirror = views.mirror[row].tolist()
    if any(mirror):
        part = part.flip([axis + 1 for axis in range(2) if mirror[axis]])
        y, x = (rows - y - tall if mirror[0] else y), (columns - x - wide if mirror[1] else x)
    out[:, y : y + tall, x : x + wide] = part


def jitter_in_pieces(images: Tensor, strength: float, draw: Tensor, mask: Tensor | None) -> Tensor:
    """:func:`color_jitter`, on a CPU a few images at a time: less than half the time for 32 images of 96 x 96."""
    size = len(images) if images.device.type != "cpu" else max(1, _PIECE // images[0].numel())
    pieces = zip(images.split(size), draw.split(size), strict=True)
    masks = mask.split(size) if mask is not None else [None] * len(images)
    return torch.cat([color_jitter(x, strength, u, inside) for (x, u), inside in zip(pieces, masks, strict=False)])
