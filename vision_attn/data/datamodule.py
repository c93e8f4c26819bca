"""Images with labels as a LightningDataModule: the one object that training asks for data."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vision_attn.data.augment import Augmenter
from vision_attn.data.base import SplitData
from vision_attn.data.config import AugmentConfig
from vision_attn.data.images import INTERPOLATIONS, SMALLEST_CROP
from vision_attn.data.loader import EvalLoader, TrainLoader
from vision_attn.data.sets import MemorySet, StreamedSet, hash_sets, subset_rows
from vision_attn.data.sources import Source, SourceOptions, Split, create_source
from vision_attn.errors import UserError

_OFF = AugmentConfig()  # not an optional argument: the command line says more about a mistake in a plain one


class ImageData(SplitData):
    """Images of one class each.

    Training batches leave the loader as raw pixels and are augmented and normalised on the model's device, in
    ``on_after_batch_transfer``. All of that depends on (seed, epoch, sample) alone: not on workers, batch sizes or a
    resume. One thing does depend on batch size and number of processes: mixup and CutMix of images too many for memory
    take the second image from the process's own batch, since others would have to be decoded for it.

    Args:
        name: ``digits``, ``digits_canvas``, ``cifar10``, ``cifar100`` or ``image_folder``.
        root: folder with the data; None takes ``$VISION_ATTN_DATA``, then ``~/.cache/vision_attn``.
        batch_size: training images per step and process.
        eval_batch_size: images per evaluation batch and process.
        val_fraction: share of the training images kept for validation. None: what the data set itself says (CIFAR: the
            last tenth). 0: train on all, no validation.
        fraction: share of the training images to use; balanced over classes, and nested: a smaller share is part of a
            larger one with the same seed.
        max_images: most training images to use, chosen in the same way.
        img_size: side, or (height, width), that images are brought to; None for the data set's own.
        crop_pct: share of an image's shorter side that is kept when its middle is cut out, 0.05 to 1, in training as in
            evaluation; it travels with the checkpoint. A random resized crop of a streamed image is cut from the whole.
            None: 1, all of it; in ``validate`` and ``test`` what the checkpoint says. For ``image_folder`` only.
        interpolation: how images are resized: ``bilinear``, ``bicubic``, ``nearest``, ``lanczos``, ``box``,
            ``hamming``, or timm's ``random``, which is bilinear here. None: bilinear, or what the checkpoint says, as
            with ``crop_pct``.
        augment: what is done to training images.
        num_workers: processes that decode images too many for memory. Nothing else needs any.
        seed: of order, augmentation and subsets.
        download: fetch missing files where that is possible.
        drop_last: leave out the last training batch of an epoch when it is smaller than the others.
        channels_last: give images in the channels-last memory format.
        memory_limit_mb: image folders up to this many decoded megabytes are kept in memory.
        verify_images: decode images too many for memory once before training, so that a damaged file is found then and
            not hours later. The first start takes 6 ms of one core for a JPEG of 640 x 480, all cores at work; what was
            whole is remembered in ``$VISION_ATTN_DATA/verified`` (``~/.cache/vision_attn``), until a file changes.

    Attributes:
        num_classes, labels, in_chans, img_size, preprocess: known at once, before any pixel is read.
        data_hash: after ``setup``: 16 hexadecimal digits that change when the images or labels read so far do.

    Raises:
        UserError: for an unknown name, a value out of range, or data that is missing and cannot be fetched.
    """

    in_chans = 3
    train_loader, eval_loader = TrainLoader, EvalLoader

    def __init__(
        self,
        name: str = "digits",
        root: str | Path | None = None,
        batch_size: int = 128,
        eval_batch_size: int = 512,
        val_fraction: float | None = None,
        fraction: float = 1.0,
        max_images: int | None = None,
        img_size: int | tuple[int, int] | None = None,
        crop_pct: float | None = None,
        interpolation: str | None = None,
        augment: AugmentConfig = _OFF,
        num_workers: int = 0,
        seed: int = 0,
        download: bool = True,
        drop_last: bool = False,
        channels_last: bool = False,
        memory_limit_mb: int = 1024,
        verify_images: bool = True,
    ) -> None:
        super().__init__()
        _check("batch_size", batch_size, batch_size >= 1, "at least 1")
        _check("eval_batch_size", eval_batch_size, eval_batch_size >= 1, "at least 1")
        _check("num_workers", num_workers, num_workers >= 0, "at least 0")
        _check("fraction", fraction, 0.0 < fraction <= 1.0, "above 0 and at most 1")
        _check("max_images", max_images, max_images is None or max_images >= 1, "at least 1")
        _check("val_fraction", val_fraction, val_fraction is None or 0.0 <= val_fraction < 1.0, "0 or more, below 1")
        size = (img_size, img_size) if isinstance(img_size, int) else img_size
        _check("img_size", img_size, size is None or (len(size) == 2 and min(size) >= 1), "one or two positive numbers")
        crop_pct, interpolation = _cropping(crop_pct, interpolation)
        self.name, self.batch_size, self.eval_batch_size = name, batch_size, eval_batch_size
        self.fraction, self.max_images, self.num_workers = fraction, max_images, num_workers
        self.seed, self.drop_last, self.verify_images = seed, drop_last, verify_images
        self.augment = replace(augment)
        options = SourceOptions(
            root=root,
            img_size=None if size is None else (int(size[0]), int(size[1])),
            val_fraction=val_fraction,
            download=download,
            seed=seed,
            resized_crop=self.augment.resized_crop,
            memory_limit=memory_limit_mb << 20,
            crop_pct=crop_pct,
            interpolation=interpolation,
        )
        self.source = create_source(name, options)
        _check_heeded(name, self.source, options)
        self.labels: list[str] = list(self.source.labels)
        self.num_classes: int = len(self.labels)
        self.img_size: tuple[int, int] = self.source.size
        self.preprocess: dict[str, Any] = _preprocess(self.source)
        self.augmenter = Augmenter(
            self.augment,
            mean=self.source.mean,
            std=self.source.std,
            num_classes=self.num_classes,
            seed=seed,
            channels_last=channels_last,
        )
        self.data_hash: str | None = None
        self._splits: dict[str, MemorySet | StreamedSet | None] = {}

    # -- splits ---------------------------------------------------------------------------------

    def prepare_data(self) -> None:
        self.source.prepare()
        if self.source.any_size and self.verify_images:
            # by one process of each machine: the others find which files are whole
            state = None if self.trainer is None else self.trainer.state.fn
            self.setup("fit" if state is None else state.value)

    def setup(self, stage: str | None = None) -> None:
        """Read what a stage needs and no more: ``fit`` does not touch the test images."""
        names: dict[str | None, tuple[Split, ...]] = {"fit": ("train", "val"), "validate": ("val",), "test": ("test",)}
        for split in names.get(stage, ("train", "val", "test") if stage is None else ("test",)):
            self.split(split)

    def split(self, name: Split) -> MemorySet | StreamedSet | None:
        """``train`` (already cut down to ``fraction`` and ``max_images``), ``val`` or ``test``; read once.

        Returns:
            The images, or None where the data set has no such split.
        """
        if name not in self._splits:
            data = self.source.load(name)
            if name == "train" and data is not None:
                rows = subset_rows(data.labels, data.ids, self.fraction, self.max_images, self.seed)
                data = data if rows is None else data.take(rows)
            if data is not None and self.verify_images:
                self.source.verify(data)
            self._splits[name] = data
            self.data_hash = hash_sets([part for _, part in sorted(self._splits.items()) if part is not None])
        return self._splits[name]

    def required(self, name: Split) -> MemorySet | StreamedSet:
        """The split.

        Raises:
            UserError: it has no images.
        """
        data = self.split(name)
        if data is None or len(data) == 0:
            raise UserError(f"The data set {self.name!r} has no {name} images (val_fraction, or a missing folder?).")
        return data

    # -- loaders --------------------------------------------------------------------------------

    def _train_options(self, data: MemorySet | StreamedSet) -> dict[str, Any]:
        return {"partners": self.augment.mixes and isinstance(data, MemorySet)}

    def on_after_batch_transfer(self, batch: dict[str, Any], dataloader_idx: int = 0) -> dict[str, Any]:
        """Augment (training batches, which carry an ``epoch``) and normalise, on the device the batch is on."""
        batch = self.augmenter.train(batch) if "epoch" in batch else self.augmenter.evaluate(batch)
        # Lightning casts inputs for precisions such as bf16-true before this hook, when they are still bytes
        return self.trainer.precision_plugin.convert_input(batch) if self.trainer is not None else batch

    # -- pictures -------------------------------------------------------------------------------

    def sample_grid(self, n: int = 64, augmented: bool = True, epoch: int = 0) -> tuple[Tensor, Tensor]:
        """The first n training images of an epoch, as they look after augmentation.

        Args:
            n: how many at most.
            augmented: False shows them as they were.
            epoch: whose draws to show.

        Returns:
            (n, 3, H, W) uint8 images, mixing and erasing included, and their (n,) int64 labels (of a mixed image,
            the larger share).
        """
        data = self.required("train")
        loader = TrainLoader(
            data, batch_size=n, seed=self.seed, partners=self.augment.mixes and isinstance(data, MemorySet)
        )
        loader.set_epoch(epoch)
        batch = next(iter(loader))
        if not augmented:
            return batch["image"], batch["label"]
        batch = self.augmenter.train(batch)
        label = batch["label"]
        return self.augmenter.denormalize(batch["image"]), label.argmax(1) if label.ndim == 2 else label

    def plain_images(self, n: int) -> Tensor:
        """n training images, balanced over classes, (n, 3, H, W) float, normalised and not augmented.

        The first ones would not do: image folders come class by class.
        """
        data = self.required("train")
        rows = subset_rows(data.labels, data.ids, 1.0, n, self.seed)
        batch = data.batch(torch.arange(len(data.labels)) if rows is None else rows)
        return self.augmenter.normalize(batch["image"])

    def denormalize(self, images: Tensor) -> Tensor:
        """Normalised images (B, 3, H, W) back to raw pixels, uint8."""
        return self.augmenter.denormalize(images)


def _cropping(crop_pct: float | None, interpolation: str | None) -> tuple[float, str]:
    """What was asked for, or the usual.

    Raises:
        UserError: a value that no checkpoint may have.
    """
    crop_pct = 1.0 if crop_pct is None else float(crop_pct)
    interpolation = "bilinear" if interpolation is None else interpolation
    _check("crop_pct", crop_pct, SMALLEST_CROP <= crop_pct <= 1.0, f"a share of the image, {SMALLEST_CROP:g} to 1")
    _check("interpolation", interpolation, interpolation in INTERPOLATIONS, f"one of {', '.join(INTERPOLATIONS)}")
    return crop_pct, interpolation


def _preprocess(source: Source) -> dict[str, Any]:
    """What a checkpoint must know to make of any image what was trained on."""
    return {
        "size": list(source.size),
        "mean": list(source.mean),
        "std": list(source.std),
        "interpolation": source.interpolation,
        "crop_pct": source.crop_pct,
    }


def _check_heeded(name: str, source: Source, options: SourceOptions) -> None:
    """Refuses settings that a source would ignore.

    Raises:
        UserError: naming the setting.
    """
    for key in ("crop_pct", "interpolation"):
        if getattr(source, key) != getattr(options, key):
            raise UserError(f"data.{key} has nothing to say for {name!r}, whose images have one size: leave it out.")


def _check(name: str, value: object, fine: bool, expected: str) -> None:
    if not fine:
        raise UserError(f"data.{name} is {value!r}: expected {expected}.")
