"""From raw pixels to what the model sees: augmentation and normalisation of a whole batch, on its own device."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from vision_attn.data.config import AugmentConfig
from vision_attn.data.geometry import flip_and_crop, rectangle_mask, rectangles, resized_crops
from vision_attn.data.luma import luma
from vision_attn.data.mixing import draw_mix, mix
from vision_attn.data.policy import color_jitter, rand_augment
from vision_attn.data.randomness import Stream, hashes, uniforms

_CHUNK_PIXELS = 128 * 3 * 32 * 32  # 0.4 MB of bytes, 1.5 MB of float32


class Augmenter:
    """Augments and normalises batches. Every draw is a function of (seed, epoch, sample), see ``randomness``.

    Args:
        config: what to do to training images.
        mean, std: per channel, of pixels scaled to 0...1; of one channel where a model sees brightness alone.
        num_classes: length of soft labels.
        seed: of the run.
        channels_last: give images in this memory format.
    """

    def __init__(
        self,
        config: AugmentConfig,
        *,
        mean: Sequence[float],
        std: Sequence[float],
        num_classes: int,
        seed: int = 0,
        channels_last: bool = False,
    ) -> None:
        self.config, self.num_classes, self.seed, self.channels_last = config, num_classes, seed, channels_last
        # (pixel / 255 - mean) / std = pixel * scale + shift
        self.scale = torch.tensor([1.0 / (255.0 * s) for s in std]).view(1, -1, 1, 1)
        self.shift = torch.tensor([-m / s for m, s in zip(mean, std, strict=True)]).view(1, -1, 1, 1)

    def normalize(self, images: Tensor) -> Tensor:
        """Raw pixels to zero mean and unit variance.

        Args:
            images: (B, 3, H, W) uint8.

        Returns:
            (B, 3, H, W) float32, or (B, 1, H, W) where there are statistics of one channel.
        """
        out = images.float()
        if self.scale.shape[1] == 1:
            out = luma(out)
        if self.channels_last:  # after the cast: copying bytes into this layout takes twice as long
            out = out.contiguous(memory_format=torch.channels_last)
        return out.mul_(self.scale.to(out.device)).add_(self.shift.to(out.device))

    def denormalize(self, images: Tensor) -> Tensor:
        """The pixels that :meth:`normalize` was given.

        Args:
            images: (B, 3, H, W) float.

        Returns:
            (B, 3, H, W) uint8, contiguous; what lies outside 0...255 is clipped.
        """
        pixels = (images.float() - self.shift.to(images.device)) / self.scale.to(images.device)
        return pixels.round().clamp(0, 255).to(torch.uint8).contiguous()

    def evaluate(self, batch: dict[str, Any]) -> dict[str, Any]:
        """A batch for evaluation: normalised, otherwise as it is."""
        return {"image": self.normalize(batch["image"]), "label": batch["label"], "index": batch["index"]}

    def train(self, batch: dict[str, Any]) -> dict[str, Any]:
        """A batch for training.

        Args:
            batch: ``image`` (B, 3, H, W) uint8, ``label`` (B,), ``index`` (B,), ``epoch`` int, and for mixing
                ``partner_image`` and ``partner_label`` of the same shapes; without these a sample is mixed with its
                neighbour in the batch. ``cropped`` True says that a random resized crop was made already.

        Returns:
            ``image`` (B, 3, H, W) float32, ``label`` (B,) int64 or, when mixing, (B, classes) float32, ``index``.
        """
        config, index, epoch = self.config, batch["index"], batch["epoch"]
        cropped = batch.get("cropped", False)
        images = self._view(batch["image"], index, epoch, cropped, 0)
        labels = batch["label"]
        if config.mixes:
            if "partner_image" in batch:
                other = self._view(batch["partner_image"], index, epoch, cropped, Stream.PARTNER)
                other_labels = batch["partner_label"]
            else:
                other, other_labels = images.roll(1, 0), labels.roll(1, 0)
            size = (images.shape[-2], images.shape[-1])
            weight, box = draw_mix(config, self.seed, epoch, index, size)
            images, kept = mix(images, other, weight, box)
            soft = F.one_hot(labels, self.num_classes).float().mul_(kept[:, None])
            labels = soft.scatter_add_(1, other_labels[:, None], (1.0 - kept)[:, None])
        return {"image": images, "label": labels, "index": index}

    def pixels(self, images: Tensor, index: Tensor, epoch: int, cropped: bool = False, lane: int = 0) -> Tensor:
        """The part of the augmentation that works on raw pixels.

        Args:
            images: (B, 3, H, W) uint8.
            index: (B,) int64.
            epoch: 0, 1, ...
            cropped: a random resized crop was made already.
            lane: added to every stream, for a second, independent view of the same sample.

        Returns:
            (B, 3, H, W) uint8.
        """
        config = self.config
        if config.resized_crop and not cropped:
            streams = (Stream.RESIZED_AREA, Stream.RESIZED_ASPECT, Stream.RESIZED_Y, Stream.RESIZED_X)
            images = resized_crops(images, config.resized_crop, self._draw(epoch, index, streams, lane))
        if config.flip or config.crop_padding:
            images = self._flip_and_crop(images, index, epoch, lane)
        if config.randaugment:
            images = rand_augment(
                images, config.randaugment, config.randaugment_magnitude, self.seed, epoch, index, lane
            )
        if config.color_jitter:
            draw = self._draw(epoch, index, (Stream.BRIGHTNESS, Stream.CONTRAST, Stream.SATURATION), lane)
            images = color_jitter(images, config.color_jitter, draw)
        return images

    def _view(self, images: Tensor, index: Tensor, epoch: int, cropped: bool, lane: int) -> Tensor:
        """One augmented and normalised version of every image."""
        if images.device.type != "cpu" or images.numel() <= _CHUNK_PIXELS:
            return self._view_chunk(images, index, epoch, cropped, lane)
        # in pieces that stay in the cache: a batch of 512 costs four of 128, and not eight
        layout = torch.channels_last if self.channels_last else torch.contiguous_format
        shape = (len(images), self.scale.shape[1], *images.shape[2:])
        out = torch.empty(shape, dtype=torch.float32, memory_format=layout)
        size = max(1, _CHUNK_PIXELS // images[0].numel())
        for start in range(0, len(images), size):
            part = slice(start, start + size)
            out[part] = self._view_chunk(images[part], index[part], epoch, cropped, lane)
        return out

    def _view_chunk(self, images: Tensor, index: Tensor, epoch: int, cropped: bool, lane: int) -> Tensor:
        images = self.normalize(self.pixels(images, index, epoch, cropped, lane))
        return self._erase(images, index, epoch, lane) if self.config.erase else images

    def _draw(self, epoch: int, index: Tensor, streams: Sequence[int], lane: int) -> Tensor:
        return uniforms(self.seed, epoch, index, [stream + lane for stream in streams])

    def _flip_and_crop(self, images: Tensor, index: Tensor, epoch: int, lane: int) -> Tensor:
        config = self.config
        flip, offset = None, None
        draw = self._draw(epoch, index, (Stream.FLIP, Stream.CROP_Y, Stream.CROP_X), lane)
        if config.flip == "alternating":
            # the same half in every epoch, turned round in odd ones
            flip = (self._draw(0, index, (Stream.FLIP,), lane)[:, 0] < 0.5) ^ (epoch % 2 == 1)
        elif config.flip:
            flip = draw[:, 0] < 0.5
        if config.crop_padding:
            places = (draw[:, 1:] * (2 * config.crop_padding + 1)).long()
            offset = (places[:, 0], places[:, 1])
        return flip_and_crop(images, flip=flip, offset=offset, padding=config.crop_padding, mode=config.crop_mode)

    def _erase(self, images: Tensor, index: Tensor, epoch: int, lane: int) -> Tensor:
        config = self.config
        streams = (Stream.ERASE, Stream.ERASE_AREA, Stream.ERASE_ASPECT, Stream.ERASE_Y, Stream.ERASE_X)
        chosen, share, shape, y, x = self._draw(epoch, index, streams, lane).unbind(1)
        low, high = config.erase_area
        # an image that was not chosen gets a rectangle of no size
        area = (low + (high - low) * share) * (chosen < config.erase)
        aspect = ((2.0 * shape - 1.0) * math.log(config.erase_aspect)).exp()
        height, width = images.shape[-2:]
        mask = rectangle_mask(rectangles(area, aspect, y, x, height, width), height, width)
        images.mul_(~mask)  # zero is the mean after normalisation
        if config.erase_fill == "noise":
            rows = (area > 0).nonzero()[:, 0]
            images[rows] += self._noise(images.shape[1:], index[rows], epoch, lane) * mask[rows]
        return images

    def _noise(self, shape: torch.Size, index: Tensor, epoch: int, lane: int) -> Tensor:
        """(n, C, H, W) normal numbers: the sample's hash, hashed again with the number of each pixel."""
        per_sample = hashes(self.seed, epoch, index, [Stream.ERASE_NOISE + lane])  # (n, 1)
        pixel = torch.arange(shape.numel(), device=index.device).expand(len(index), -1)
        uniform = uniforms(self.seed, epoch, per_sample ^ pixel, [Stream.ERASE_NOISE + lane])
        # half a step away from 0 and 1, where the normal quantile is infinite
        uniform = uniform.view(len(index), *shape).add_(2.0**-25).clamp_(max=1.0 - 2.0**-24)
        return uniform.mul_(2.0).sub_(1.0).erfinv_().mul_(math.sqrt(2.0))
