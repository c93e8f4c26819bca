"""The images of a study: nested subsets of the training images, and wrong labels for some of them."""

from __future__ import annotations

import dataclasses
import itertools
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from vision_attn.contrast.config import Arm, ContrastConfig, DataChoice
from vision_attn.data.augment import Augmenter
from vision_attn.data.randomness import key
from vision_attn.data.sets import MemorySet, StreamedSet, balanced_order, hash_sets, subset_rows
from vision_attn.errors import UserError

_WRONG_LABELS = 0x1ABE1  # tells this use of a seed apart from all others
_SAMPLE = 0x5A4B1E
_SHUFFLES = 1000


@dataclass
class StudyData:
    """All images of a study, read once.

    Attributes:
        train, val, test: the splits.
        labels: class names.
        img_size: (H, W) in pixels.
        preprocess: ``mean`` and ``std`` among others, as in a checkpoint.
        hash: 16 hexadecimal digits of the three splits.
        num_workers: processes that decode images which are not in memory.
    """

    train: MemorySet | StreamedSet
    val: MemorySet | StreamedSet
    test: MemorySet | StreamedSet
    labels: list[str]
    img_size: tuple[int, int]
    preprocess: dict[str, Any]
    hash: str
    num_workers: int = 0

    def augmenter(self, arm: Arm, seed: int, channels_last: bool) -> Augmenter:
        """What turns raw pixels into what a model sees, in training and in evaluation."""
        return Augmenter(
            arm.augment,
            mean=self.preprocess["mean"],
            std=self.preprocess["std"],
            num_classes=len(self.labels),
            seed=seed,
            channels_last=channels_last,
        )

    def facts(self, name: str) -> dict[str, Any]:
        """What ``study.json`` says of the data."""
        counts = {split: len(getattr(self, split)) for split in ("train", "val", "test")}
        return {"name": name, "classes": len(self.labels), **counts, "img_size": list(self.img_size)}


def load_data(choice: DataChoice) -> StudyData:
    """Read the images of a study.

    Raises:
        UserError: an unknown data set, missing or broken files, or a split that is not there.
    """
    from vision_attn.data.datamodule import ImageData

    data = ImageData(
        choice.name,
        root=choice.root,
        val_fraction=choice.val_fraction,
        img_size=choice.img_size,
        download=choice.download,
        memory_limit_mb=choice.memory_limit_mb,
    )
    data.prepare_data()
    splits = {name: data.split(name) for name in ("train", "val", "test")}  # type: ignore[arg-type]
    for name, advice in (
        ("train", "a study needs images to train on"),
        ("val", "learning rates are chosen on it: give data.val_fraction, e.g. 0.1, or a folder of that name"),
        ("test", "the comparison is made on it: put labelled images that nothing was trained on into a folder test"),
    ):
        part = splits[name]
        if part is None or len(part) == 0:
            raise UserError(f"the data set {choice.name!r} has no {name} split; {advice}.")
    train, val, test = (splits[name] for name in ("train", "val", "test"))
    assert train is not None
    assert val is not None
    assert test is not None
    return StudyData(
        train=train,
        val=val,
        test=test,
        labels=data.labels,
        img_size=data.img_size,
        preprocess=data.preprocess,
        hash=hash_sets([train, val, test]),
        num_workers=choice.num_workers,
    )


def subset_count(total: int, size: float) -> int:
    """How many images the share ``size`` of ``total`` is."""
    return min(total, round(size * total))


def check_subsets(config: ContrastConfig, data: StudyData) -> None:
    """Refuse a subset that lacks a class, is another one too, or whose labels cannot be shuffled, before training.

    Raises:
        UserError: naming the size, and the smallest share that would do.
    """
    labels, total = data.train.labels, len(data.train)
    classes = len(data.labels)
    absent = sorted(set(range(classes)) - set(labels.unique().tolist()))
    if absent:
        raise UserError(f"the training split has no image of class {data.labels[absent[0]]!r}.")
    counts: dict[int, float] = {}
    for size in config.sizes:
        count = subset_count(total, size)
        if (other := counts.setdefault(count, size)) != size:
            raise UserError(
                f"sizes: {other!r} and {size!r} of {total} training images are the same {count}; leave one of them out."
            )
        needed = max(_needed(labels, data.train.ids, seed, classes) for seed in range(config.seeds_at(size)))
        if count < needed:
            raise UserError(
                f"sizes: {size:g} of {total} training images is {count}, too few to hold each of the {classes} "
                f"classes; use {needed / total:.3g} ({needed} images) or more."
            )
    levels = [level for level in config.noise.levels if level > 0]
    for size, level in itertools.product(config.noise_sizes, levels):
        for seed in range(config.noise.seeds):
            training_images(data, size, level, seed)


def _needed(labels: Tensor, ids: Tensor, seed: int, classes: int) -> int:
    """The shortest beginning of a seed's order in which every class occurs."""
    ordered = labels[balanced_order(labels, ids, seed)]
    return 1 + max(int((ordered == label).nonzero()[0]) for label in range(classes))


def training_images(data: StudyData, size: float, noise: float, seed: int) -> tuple[MemorySet | StreamedSet, Tensor]:
    """The subset of a training, with the labels it is trained on.

    For one seed a smaller subset is part of a larger one. All models get the same images and the same wrong labels.

    Returns:
        The images, and their true labels (N,).
    """
    rows = subset_rows(data.train.labels, data.train.ids, size, None, seed)
    part = data.train if rows is None else data.train.take(rows)
    true = part.labels
    if noise == 0:
        return part, true
    return _with_labels(part, shuffle_labels(true, part.ids, noise, seed)), true


def sample_rows(images: MemorySet | StreamedSet, count: int) -> Tensor:
    """Rows of ``count`` images balanced over classes, the same ones every time, in the set's own order.

    The first ones would not do: image folders come class by class.
    """
    if count >= len(images):
        return torch.arange(len(images))
    return balanced_order(images.labels, images.ids, _SAMPLE)[:count].sort().values


def shuffle_labels(labels: Tensor, ids: Tensor, share: float, seed: int) -> Tensor:
    """Labels of which a share is shuffled among its images so that none of these keeps its own.

    The images are chosen balanced over classes, a smaller share among those of a larger one, and every class keeps its
    number of images.

    Args:
        labels: (N,) int64.
        ids: (N,) int64.
        share: 0 ... 1.
        seed: which images, and which labels they get.

    Raises:
        UserError: the share is no image, or no order leaves every label wrong (nearly all are of one class).
    """
    generator = torch.Generator().manual_seed(key(seed, _WRONG_LABELS) >> 1)
    chosen = balanced_order(labels, ids, key(seed, _WRONG_LABELS) >> 1)[: round(share * len(labels))]
    if share > 0 and len(chosen) == 0:
        raise UserError(f"noise: {share:g} of {len(labels)} labels is none: use more images, or noise.sizes.")
    true = labels[chosen]
    wrong = true[torch.randperm(len(chosen), generator=generator)]
    for _ in range(_SHUFFLES):
        same = (wrong == true).nonzero()[:, 0]
        if len(same) == 0:
            break
        # those that got their own label change places with others drawn from all
        partner = torch.randperm(len(chosen), generator=generator)[: len(same)]
        for i, j in zip(same.tolist(), partner.tolist(), strict=True):
            wrong[[i, j]] = wrong[[j, i]]
    else:
        raise UserError(f"noise: {len(chosen)} labels of {len(labels)} cannot be shuffled so that none stays right.")
    noisy = labels.clone()
    noisy[chosen] = wrong
    return noisy


def _with_labels(part: MemorySet | StreamedSet, labels: Tensor) -> MemorySet | StreamedSet:
    if isinstance(part, MemorySet):
        return dataclasses.replace(part, labels=labels)
    copy = part.take(torch.arange(len(part)))
    copy.labels = labels
    return copy
