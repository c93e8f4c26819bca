from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vision_attn.data import SOURCES, AugmentConfig, ImageData
from vision_attn.data.sets import subset_rows
from vision_attn.errors import UserError


def test_digits_splits_are_fixed_balanced_and_disjoint() -> None:
    data = ImageData("digits", seed=1)
    assert (data.num_classes, data.labels[7], data.in_chans, data.img_size) == (10, "7", 3, (8, 8))
    assert data.data_hash is None
    data.setup("fit")
    assert sorted(data._splits) == ["train", "val"]
    first = data.data_hash
    data.setup("test")
    parts = [data.required(name) for name in ("train", "val", "test")]  # type: ignore[arg-type]
    assert [len(part) for part in parts] == [1257, 270, 270]
    assert sorted(torch.cat([part.ids for part in parts]).tolist()) == list(range(1797))
    assert parts[2].labels.bincount().min() >= 25
    other = ImageData("digits", seed=2)
    other.setup("fit")
    assert other.data_hash == first != data.data_hash
    assert len(ImageData("digits", fraction=0.5).required("train")) == 628


def test_digits_resized_and_normalised() -> None:
    data = ImageData("digits", img_size=(13, 17), eval_batch_size=270)
    assert data.preprocess["size"] == [13, 17]
    batch = data.on_after_batch_transfer(next(iter(data.val_dataloader())))  # type: ignore[arg-type]
    assert batch["image"].shape == (270, 3, 13, 17)
    plain = ImageData("digits", batch_size=1257)
    image = plain.on_after_batch_transfer(next(iter(plain.train_dataloader())))["image"]
    assert abs(image.mean()) < 0.02
    assert abs(image.std() - 1) < 0.02


@given(st.integers(0, 99), st.lists(st.floats(0.05, 1.0), min_size=2, max_size=2))
@settings(max_examples=30, deadline=None)
def test_subsets_are_nested_and_balanced(seed: int, shares: list[float]) -> None:
    labels = torch.arange(700) % 7
    ids = torch.arange(700) + 13
    small, large = sorted(shares)
    rows = [subset_rows(labels, ids, share, None, seed) for share in (small, large)]
    sets = [set(range(700)) if row is None else set(row.tolist()) for row in rows]
    assert sets[0] <= sets[1]
    assert len(sets[0]) == round(small * 700)
    counts = labels[torch.tensor(sorted(sets[0]))].bincount(minlength=7)
    assert counts.max() - counts.min() <= 1
    capped = subset_rows(labels, ids, large, 20, seed)
    assert capped is not None
    assert len(capped) == 20
    assert set(capped.tolist()) <= sets[1]


def test_subset_depends_on_the_seed_and_is_never_empty() -> None:
    labels, ids = torch.arange(100) % 3, torch.arange(100)
    one, other = subset_rows(labels, ids, 0.2, None, 0), subset_rows(labels, ids, 0.2, None, 1)
    assert one is not None
    assert other is not None
    assert not torch.equal(one, other)
    with pytest.raises(UserError, match="leaves none"):
        subset_rows(labels, ids, 0.001, None, 0)


def test_an_image_is_augmented_alike_in_a_subset() -> None:
    augment = AugmentConfig(flip=True, crop_padding=1, erase=0.5)
    images: list[dict[int, torch.Tensor]] = []
    for fraction, size in ((1.0, 100), (0.3, 37)):
        data = ImageData("digits", fraction=fraction, batch_size=size, augment=augment, seed=4)
        batches = [data.on_after_batch_transfer(batch) for batch in data.train_dataloader()]
        images.append({i: x for b in batches for i, x in zip(b["index"].tolist(), b["image"], strict=True)})
    whole, part = images
    assert len(part) == 377
    assert all(torch.equal(whole[i], part[i]) for i in part if i in whole)


def test_mixing_gives_soft_labels_in_training_only() -> None:
    data = ImageData("digits", augment=AugmentConfig(cutmix=1.0))
    batch = data.on_after_batch_transfer(next(iter(data.train_dataloader())))
    assert batch["label"].shape == (128, 10)
    assert set(batch) == {"image", "label", "index"}
    batch = data.on_after_batch_transfer(next(iter(data.test_dataloader())))
    assert batch["label"].dtype == torch.int64


def test_sample_grid() -> None:
    data = ImageData("digits", augment=AugmentConfig(flip=True, mixup=0.2))
    images, labels = data.sample_grid(17)
    plain, _ = data.sample_grid(17, augmented=False)
    assert images.shape == plain.shape == (17, 3, 8, 8)
    assert images.dtype == torch.uint8
    assert labels.shape == (17,)
    assert not torch.equal(images, plain)


@pytest.mark.parametrize(
    ("kwargs", "word"),
    [
        ({"name": "cifar1O"}, "Did you mean cifar10"),
        ({"fraction": 0.0}, "data.fraction"),
        ({"max_images": 0}, "data.max_images"),
        ({"batch_size": 0}, "data.batch_size"),
        ({"val_fraction": 1.0}, "data.val_fraction"),
        ({"img_size": 0}, "data.img_size"),
        ({"crop_pct": 0.01}, "data.crop_pct is 0.01: expected a share of the image, 0.05 to 1"),
        ({"crop_pct": 1.1}, "data.crop_pct"),
        ({"crop_pct": float("nan")}, "data.crop_pct"),
        ({"interpolation": "cubic"}, "data.interpolation is 'cubic': expected one of bilinear, bicubic"),
        ({"crop_pct": 0.9}, "data.crop_pct has nothing to say for 'digits'"),
        ({"interpolation": "bicubic"}, "data.interpolation has nothing to say for 'digits'"),
    ],
)
def test_mistakes(kwargs: dict, word: str) -> None:
    with pytest.raises(UserError, match=word):
        ImageData(**kwargs)


def test_images_follow_the_precision_of_the_trainer() -> None:
    from lightning.pytorch import Trainer

    data = ImageData("digits", augment=AugmentConfig(mixup=0.2))
    data.trainer = Trainer(accelerator="cpu", precision="bf16-true", logger=False, enable_checkpointing=False)
    batch = data.on_after_batch_transfer(next(iter(data.train_dataloader())))
    assert batch["image"].dtype == torch.bfloat16


def test_sets_of_one_size_are_what_they_were() -> None:
    plain = ImageData("digits", img_size=13)
    said = ImageData("digits", img_size=13, crop_pct=1.0, interpolation="bilinear")
    assert plain.preprocess == said.preprocess
    assert (plain.preprocess["interpolation"], plain.preprocess["crop_pct"]) == ("bilinear", 1.0)


def test_plain_images_are_chosen_by_the_seed_and_balanced() -> None:
    data = ImageData("digits", seed=3)
    train = data.required("train")
    rows = subset_rows(train.labels, train.ids, 1.0, 101, 3)
    assert rows is not None
    torch.testing.assert_close(data.plain_images(101), data.augmenter.normalize(train.batch(rows)["image"]))
    counts = train.labels[rows].bincount(minlength=10)
    assert counts.max() - counts.min() <= 3
    other = ImageData("digits", seed=4).plain_images(101)
    assert (other != data.plain_images(101)).any()
    assert len(data.plain_images(5000)) == 1257


def test_sources_are_registered() -> None:
    assert {"digits", "cifar10", "cifar100", "image_folder"} <= set(SOURCES)
