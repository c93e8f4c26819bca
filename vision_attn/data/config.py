"""What may be done to training images, with everything off by default."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Literal

from vision_attn.errors import UserError


@dataclass
class AugmentConfig:
    """Augmentation of training images; evaluation images are never touched.

    The order of work is fixed: geometry on raw pixels (resized crop, flip, crop), RandAugment, colour, then
    normalisation, then erasing and mixing.

    Attributes:
        flip: mirror left and right. True: half of the images at random; ``"alternating"``: a random half in even
            epochs and the other half in odd ones, so two epochs show both sides of each image (Jordan 2024,
            "94% on CIFAR-10 in 3.29 seconds on a single GPU").
        crop_padding: pad by this many pixels and cut the original size out at random. 0: off.
        crop_mode: what the padding holds: the mirrored image, or black.
        resized_crop: smallest share of the image's area that a random resized crop may keep; the aspect ratio varies
            between 3/4 and 4/3 (Szegedy et al. 2015). Cut from the file's own pixels when images are streamed, from the
            resized ones when they are in memory. 0: off.
        erase: probability of erasing one rectangle (Zhong et al. 2020; DeVries and Taylor 2017 for a fixed square).
        erase_area: smallest and largest share of the image that is erased. Both 0.0625 with ``erase_aspect`` 1 is
            Cutout with 8 of 32 pixels.
        erase_aspect: the rectangle's height / width lies between 1/x and x.
        erase_fill: ``"mean"`` (zero after normalisation) or ``"noise"`` (normal, mean 0, deviation 1).
        mixup: alpha of the Beta distribution of mixup's weights (Zhang et al. 2018). 0: off.
        cutmix: alpha of the Beta distribution of CutMix's areas (Yun et al. 2019). 0: off. When mixup is on too, each
            sample takes one of the two with equal chance.
        mix_probability: share of samples that are mixed.
        randaugment: operations per image, each drawn from the policy's 14 (Cubuk et al. 2020). 0: off.
        randaugment_magnitude: 0 (weakest) to 10 (strongest).
        color_jitter: brightness, contrast and saturation are each scaled by up to 1 +- this. 0: off.
    """

    flip: bool | Literal["alternating"] = False
    crop_padding: int = 0
    crop_mode: Literal["reflect", "zero"] = "reflect"
    resized_crop: float = 0.0
    erase: float = 0.0
    erase_area: tuple[float, float] = (0.02, 0.2)
    erase_aspect: float = 2.0
    erase_fill: Literal["mean", "noise"] = "mean"
    mixup: float = 0.0
    cutmix: float = 0.0
    mix_probability: float = 1.0
    randaugment: int = 0
    randaugment_magnitude: float = 6.0
    color_jitter: float = 0.0

    def __post_init__(self) -> None:
        self.erase_area = (float(self.erase_area[0]), float(self.erase_area[1]))
        for name in ("resized_crop", "erase", "mix_probability", "color_jitter"):
            self._between(name, 0.0, 1.0)
        for name in ("crop_padding", "mixup", "cutmix", "randaugment"):
            self._between(name, 0.0, float("inf"))
        self._between("randaugment_magnitude", 0.0, 10.0)
        self._between("erase_aspect", 1.0, 20.0)
        self._one_of("flip", (True, False, "alternating"))
        self._one_of("crop_mode", ("reflect", "zero"))
        self._one_of("erase_fill", ("mean", "noise"))
        low, high = self.erase_area
        if not 0.0 < low <= high <= 1.0:
            raise UserError(f"augment.erase_area is {low, high}: expected 0 < smallest <= largest <= 1.")

    def _between(self, name: str, low: float, high: float) -> None:
        value = getattr(self, name)
        if not isinstance(value, (int, float)) or not low <= value <= high:
            bound = f"between {low:g} and {high:g}" if high != float("inf") else f"at least {low:g}"
            raise UserError(f"augment.{name} is {value!r}: expected a number {bound}.")

    def _one_of(self, name: str, allowed: tuple[object, ...]) -> None:
        value = getattr(self, name)
        if value not in allowed:
            raise UserError(f"augment.{name} is {value!r}: expected one of {', '.join(map(repr, allowed))}.")

    @property
    def mixes(self) -> bool:
        """Whether labels become soft."""
        return (self.mixup > 0 or self.cutmix > 0) and self.mix_probability > 0

    def changed(self) -> dict[str, object]:
        """The settings that differ from the defaults, for logs and figure captions."""
        default = {f.name: f.default for f in fields(self)}
        return {name: getattr(self, name) for name, value in default.items() if getattr(self, name) != value}
