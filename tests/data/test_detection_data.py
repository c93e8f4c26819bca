"""The data module: batches, subsets, resume, and what a user can get wrong."""

from __future__ import annotations

import json
import shutil
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from PIL import Image

from vision_attn.data import DetectionAugmentConfig, DetectionData
from vision_attn.data import digit_scenes as scenes
from vision_attn.errors import UserError

COLOURS = {0: (250, 20, 20), 1: (20, 250, 20), 2: (20, 20, 250)}  # red, green, blue: in the order of their ids
AUGMENT = DetectionAugmentConfig(
    flip=True,
    multi_scale=True,
    scales=(24, 32, 40),
    crop=0.5,
    crop_scales=(30, 40),
    crop_size=(16, 30),
    color_jitter=0.2,
)


def make(coco_set: Any, **more: Any) -> DetectionData:
    return DetectionData(**{**coco_set.options(), "img_size": 24, "max_size": 60, "batch_size": 2, **more})


def check_batch(batch: dict[str, Any], training: bool) -> None:
    """Shapes, types and ranges that every batch has."""
    images, mask = batch["image"], batch["mask"]
    size = len(batch["targets"])
    assert images.dtype == torch.float32
    assert images.shape[:2] == (size, 3)
    assert batch["index"].shape == (size,)
    assert ("epoch" in batch) == training
    if mask is not None:
        assert mask.shape == (size, *images.shape[-2:])
        assert mask.dtype == torch.bool
        assert not mask.all()
        assert (images * ~mask[:, None]).abs().max() == 0
    for place, target in enumerate(batch["targets"]):
        assert set(target) == {"labels", "boxes", "image_id", "size", "orig_size"}
        assert target["labels"].dtype == torch.int64
        assert target["boxes"].dtype == torch.float32
        assert target["boxes"].shape == (len(target["labels"]), 4)
        assert isinstance(target["image_id"], int)
        height, width = target["size"].tolist()
        if mask is None:
            assert (height, width) == images.shape[-2:]
        else:
            assert mask[place].sum() == height * width
            assert mask[place, :height, :width].all()
        if len(target["boxes"]):
            assert (target["boxes"][:, 2:] > 0).all()
            corners = torch.cat([target["boxes"][:, :2] - s * target["boxes"][:, 2:] / 2 for s in (1, -1)], 1)
            assert corners.min() > -1e-5
            assert corners.max() < 1 + 1e-5


def test_known_at_once_and_contiguous(small_set: Any) -> None:
    data = make(small_set)
    assert (data.labels, data.category_ids, data.num_classes) == (["red", "green", "blue"], [2, 3, 7], 3)
    assert data.img_size == (24, 60)
    assert data.preprocess["resize"] == "shorter"
    assert data.data_hash is None
    data.setup("fit")
    first = data.data_hash
    assert sorted(data._splits) == ["train", "val"]
    again = make(small_set)
    again.setup("fit")
    assert again.data_hash == first
    assert data.split("test") is None
    with pytest.raises(UserError, match="no test images"):
        data.test_dataloader()
    path = small_set.root / "train" / "0.png"
    Image.fromarray(255 - np.asarray(Image.open(path))).save(path)
    changed = make(small_set)
    changed.setup("fit")
    assert changed.data_hash != first


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("area", 3.5),
        ("iscrowd", 1),
        ("bbox", [1.0, 2.0, 90.0, 5.0]),
        ("bbox", [1.0, 1.0, 6.0, 5.0]),
        ("category_id", 7),
    ],
)
def test_the_hash_sees_everything_that_changes_average_precision(small_set: Any, key: str, value: Any) -> None:
    """Crowds and areas too, and boxes as written: evaluation does not cut them to the image."""
    row = small_set.content["val"]["annotations"][0]
    row.update(bbox=[1.0, 2.0, 80.0, 5.0], category_id=2)

    def hash_now() -> str | None:
        data = make(small_set)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            data.setup("fit")
        return data.data_hash

    before = hash_now()
    assert hash_now() == before
    row[key] = value
    assert hash_now() != before


def test_a_batch_shows_what_the_file_says(small_set: Any) -> None:
    data = DetectionData(**small_set.options(), img_size=31, max_size=41, eval_batch_size=2)
    seen = []
    for raw in data.val_dataloader():  # type: ignore[union-attr]
        assert raw["image"].dtype == torch.uint8
        batch = data.on_after_batch_transfer(raw)
        check_batch(batch, training=False)
        pixels = data.denormalize(batch["image"])
        for image, target in zip(pixels, batch["targets"], strict=True):
            seen.append(target["image_id"])
            height, width = target["size"].tolist()
            # the last box lies on top of the others
            x, y = (target["boxes"][-1, :2] * torch.tensor([width, height])).tolist()
            middle = image[:, int(y), int(x)].tolist()
            assert middle == pytest.approx(COLOURS[int(target["labels"][-1])], abs=12)
    assert sorted(seen) == [11, 14, 17]


@pytest.mark.parametrize("memory", [0, 64])
@pytest.mark.parametrize("augment", [DetectionAugmentConfig(), AUGMENT])
def test_training_batches(small_set: Any, memory: int, augment: DetectionAugmentConfig) -> None:
    data = make(small_set, augment=augment, memory_limit_mb=memory, batch_size=3)
    batches = [data.on_after_batch_transfer(batch) for batch in data.train_dataloader()]
    for batch in batches:
        check_batch(batch, training=True)
    assert [len(batch["targets"]) for batch in batches] == [3, 3]
    assert len({i for batch in batches for i in batch["index"].tolist()}) == 6


def epochs(data: DetectionData, count: int = 2) -> list[Any]:
    """What the loader hands out, so that it can be compared."""
    loader = data.train_dataloader()
    out = []
    for epoch in range(count):
        loader.set_epoch(epoch)
        for batch in loader:
            out.append(
                (batch["epoch"], batch["index"].tolist(), batch["image"], batch["boxes"], batch["labels"].tolist())
            )
    return out


def same(one: list[Any], other: list[Any]) -> bool:
    return len(one) == len(other) and all(
        all(torch.equal(x, y) if isinstance(x, torch.Tensor) else x == y for x, y in zip(a, b, strict=True))
        for a, b in zip(one, other, strict=True)
    )


def test_the_same_for_any_number_of_workers_and_from_memory_or_files(small_set: Any) -> None:
    plain = epochs(make(small_set, augment=AUGMENT))
    assert same(plain, epochs(make(small_set, augment=AUGMENT, num_workers=2)))
    assert same(plain, epochs(make(small_set, augment=AUGMENT, memory_limit_mb=0)))
    assert not same(plain[:3], plain[3:])
    assert not same(plain, epochs(make(small_set, augment=AUGMENT, seed=1)))


def test_an_image_is_augmented_alike_in_a_subset_and_any_batch(coco_set: Any) -> None:
    coco_set.add("train", [(23, 31), (31, 23), (29, 29), (40, 22)] * 5)
    found: list[dict[int, Any]] = []
    for fraction, size in ((1.0, 3), (0.4, 2)):
        data = make(coco_set, fraction=fraction, batch_size=size, augment=AUGMENT)
        images = {}
        for raw in data.train_dataloader():
            batch = data.on_after_batch_transfer(raw)
            for index, image, target in zip(
                batch["index"].tolist(), data.denormalize(batch["image"]), batch["targets"], strict=True
            ):
                height, width = target["size"].tolist()
                images[index] = (image[:, :height, :width], target["boxes"])
        found.append(images)
    whole, part = found
    assert len(part) == 8
    for index in set(whole) & set(part):
        assert torch.equal(whole[index][1], part[index][1])
        torch.testing.assert_close(whole[index][0].int(), part[index][0].int(), atol=1, rtol=0)


def test_like_shapes_are_put_together(coco_set: Any) -> None:
    coco_set.add("train", [(20, 44), (44, 20), (30, 30), (36, 24)] * 16, most=1)
    data = make(
        coco_set, batch_size=4, augment=DetectionAugmentConfig(multi_scale=True, scales=(20, 30, 40)), max_size=99
    )
    loader = data.train_dataloader()
    plain = make(coco_set, batch_size=4, augment=data.augment, group_batches=1, max_size=99).train_dataloader()
    assert loader.padding() < 0.5 * plain.padding()
    for epoch in range(2):
        rows = torch.cat(loader.rows(epoch))
        assert sorted(rows.tolist()) == list(range(64))
    raw = next(iter(loader))
    real = 1 - raw["size"].prod(1).sum() / (raw["image"].numel() / 3)
    assert real < 0.5


@pytest.mark.parametrize("world", [2, 3])
def test_processes_share_an_epoch(coco_set: Any, world: int) -> None:
    from vision_attn.data.detection_loader import DetectionEvalLoader, DetectionTrainLoader

    coco_set.add("train", [(20, 44), (44, 20), (30, 30)] * 9)
    data = make(coco_set, augment=AUGMENT).split("train")
    assert data is not None
    parts = [DetectionTrainLoader(data, batch_size=2, rank=rank, world=world).rows(1) for rank in range(world)]
    whole = DetectionTrainLoader(data, batch_size=2 * world).rows(1)
    for number, rows in enumerate(zip(*parts, strict=True)):
        together = torch.stack(rows, 1).flatten().tolist()
        assert together == whole[number].tolist()[: len(together)]
    loaders = [DetectionEvalLoader(data, batch_size=4, rank=rank, world=world) for rank in range(world)]
    assert len({len(loader) for loader in loaders}) == 1
    assert sorted(torch.cat([rows for loader in loaders for rows in loader.rows]).tolist()) == list(range(27))


def test_evaluation_is_independent_of_batches(small_set: Any) -> None:
    found: list[dict[int, Any]] = []
    for size, workers in ((1, 0), (3, 0), (2, 2)):
        data = make(small_set, eval_batch_size=size, num_workers=workers)
        images = {}
        for raw in data.val_dataloader():  # type: ignore[union-attr]
            batch = data.on_after_batch_transfer(raw)
            for image, target in zip(batch["image"], batch["targets"], strict=True):
                height, width = target["size"].tolist()
                images[target["image_id"]] = image[:, :height, :width]
        found.append(images)
    for other in found[1:]:
        assert other.keys() == found[0].keys()
        assert all(torch.equal(other[i], found[0][i]) for i in other)


@pytest.mark.parametrize("mode", ["fit", "stretch"])
def test_fixed_sizes(small_set: Any, mode: str) -> None:
    data = make(small_set, img_size=(30, 40), resize=mode)
    batch = data.on_after_batch_transfer(next(iter(data.train_dataloader())))
    assert batch["image"].shape == (2, 3, 30, 40)
    assert (batch["mask"] is None) == (mode == "stretch")
    check_batch(batch, training=True)
    assert data.img_size == (30, 40)


def test_a_cache_of_decoded_images(small_set: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from vision_attn.data import pixels

    plain = epochs(make(small_set, augment=AUGMENT))
    options = {"augment": AUGMENT, "memory_limit_mb": 0, "cache": tmp_path / "cache"}
    data = make(small_set, **options)
    data.prepare_data()
    files = sorted((tmp_path / "cache").iterdir())
    assert len(files) == 2  # train and val
    decode = pixels.load
    monkeypatch.setattr(pixels, "load", None)  # a second run decodes nothing
    assert same(plain, epochs(make(small_set, **options)))
    assert same(plain, epochs(make(small_set, **options, num_workers=2)))
    monkeypatch.setattr(pixels, "load", decode)
    path = small_set.root / "train" / "2.png"
    Image.fromarray(255 - np.asarray(Image.open(path))).save(path)
    assert not same(plain, epochs(make(small_set, **options)))
    for file in files:
        file.write_bytes(b"cut short")
    make(small_set, **options).setup("fit")
    assert sum(file.stat().st_size > 9 for file in files) == 1  # that of val; train has a new one by now


# -- subsets and ground truth -----------------------------------------------------------------------------


def shown(data: DetectionData, split: Any = "train") -> set[int]:
    part = data.split(split)
    assert part is not None
    return set(part.image_ids)


def test_subsets_are_nested_seeded_and_known_to_evaluation(coco_set: Any) -> None:
    coco_set.add("train", [(20, 20)] * 40)
    coco_set.add("val", [(20, 20)] * 20)
    sets = [shown(make(coco_set, fraction=share)) for share in (0.2, 0.5, 1.0)]
    assert [len(part) for part in sets] == [8, 20, 40]
    assert sets[0] < sets[1] < sets[2]
    assert shown(make(coco_set, max_images=8)) == sets[0]
    assert shown(make(coco_set, fraction=0.2, seed=1)) != sets[0]
    data = make(coco_set, eval_max_images=5)
    truth = data.ground_truth("val")
    assert {row["id"] for row in truth["images"]} == shown(data, "val")
    assert len(truth["images"]) == 5
    assert {row["image_id"] for row in truth["annotations"]} <= shown(data, "val")
    assert {row["category_id"] for row in truth["annotations"]} <= {2, 3, 7}
    assert [row["id"] for row in truth["categories"]] == [2, 3, 7]
    with pytest.raises(UserError, match="leaves none"):
        make(coco_set, fraction=0.001).setup("fit")


def test_categories(coco_set: Any) -> None:
    coco_set.add("train", [(20, 20)] * 40)
    content = coco_set.add("val", [(20, 20)] * 20)
    data = make(coco_set, categories=["blue", "red"])
    assert (data.labels, data.category_ids, data.num_classes) == (["red", "blue"], [2, 7], 2)
    with_any = {row["image_id"] for row in coco_set.content["train"]["annotations"] if row["category_id"] in (2, 7)}
    assert shown(data) == with_any
    assert len(shown(data, "val")) == 20  # a false alarm on another image counts
    wanted = [row for row in content["annotations"] if row["category_id"] in (2, 7)]
    assert len(data.ground_truth("val")["annotations"]) == len(wanted)
    assert shown(make(coco_set, categories=["blue", "red"], fraction=0.3)) < with_any


@pytest.mark.parametrize(
    ("listed", "boxes"),
    [
        ({2: "red"}, [2]),
        ({3: "green"}, []),
        ({2: "red", 3: "green"}, [2]),
        ({2: "red", 90: "dog"}, [2]),
        ({7: "blue", 3: "grass"}, [7]),
        ({2: "red", 3: "green", 7: "blue"}, [2, 7]),
    ],
)
def test_chosen_categories_that_evaluation_does_not_list(coco_set: Any, listed: dict[int, str], boxes: list) -> None:
    """What is chosen is chosen from the training file; of another file it takes what is there."""
    coco_set.add("train", [(20, 20)] * 9)
    for split in ("val", "test"):
        content = coco_set.add(split, [(20, 20)] * 3)
        row = {**content["annotations"][0], "bbox": [1.0, 1.0, 4.0, 4.0]}
        content["annotations"] = [{**row, "id": n, "category_id": n} for n in listed]
        content["categories"] = [{"id": n, "name": name} for n, name in listed.items()]
    data = make(coco_set, categories=["red", "blue"])
    for split in ("val", "test"):
        truth = data.ground_truth(split)  # type: ignore[arg-type]
        assert [row["category_id"] for row in truth["annotations"]] == boxes
        assert [row["id"] for row in truth["categories"]] == [2, 7]
        assert len(truth["images"]) == 3


@pytest.mark.parametrize(
    ("listed", "words"), [({5: "red"}, "category 5 .red.*cannot find it"), ({2: "rot"}, "2 is 'rot'.*disagree")]
)
def test_chosen_categories_that_evaluation_lists_otherwise(coco_set: Any, listed: dict[int, str], words: str) -> None:
    coco_set.add("train", [(20, 20)] * 9)
    content = coco_set.add("val", [(20, 20)] * 3)
    content["annotations"] = []
    content["categories"] = [{"id": n, "name": name} for n, name in listed.items()]
    with pytest.raises(UserError, match=words):
        make(coco_set, categories=["red", "blue"]).setup("fit")


@pytest.mark.parametrize("witness", ["stored", "shown", "none"])
def test_boxes_of_turned_images_are_the_same_in_every_subset(coco_set: Any, witness: str) -> None:
    """Only one image tells whether boxes were drawn before the turn, and most subsets lack it."""
    content = coco_set.add("train", [*[(20, 20)] * 7, (20, 30)])
    for number, row in enumerate(content["images"]):
        path, exif = coco_set.root / "train" / row["file_name"], Image.Exif()
        exif[0x0112] = 3 if number < 7 or witness == "none" else 6
        Image.open(path).save(path, exif=exif)
    if witness == "shown":
        content["images"][7].update(height=30, width=20)
        content["annotations"] = [
            row for row in content["annotations"] if row["image_id"] != content["images"][7]["id"]
        ]

    def boxes(**more: Any) -> dict[int, list[Any]]:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            data = make(coco_set, **more)
            rows = data.ground_truth("train")["annotations"]
        assert any("cannot confirm" in finding.kind for finding in data.findings) == (witness == "none")
        out: dict[int, list[Any]] = {row["id"]: [] for row in data.ground_truth("train")["images"]}
        for row in rows:
            out[row["image_id"]].append(row["bbox"])
        return out

    whole = boxes()
    written = {row["id"]: [] for row in content["images"]}
    for row in content["annotations"]:
        written[row["image_id"]].append(row["bbox"])
    cannot_tell = content["images"][0]["id"]
    assert (whole[cannot_tell] == written[cannot_tell]) == (witness != "stored")
    for seed in range(3):
        part = boxes(max_images=2, seed=seed)
        assert len(part) == 2
        assert part == {number: whole[number] for number in part}


def test_crowds_and_empty_images(coco_set: Any) -> None:
    content = coco_set.add("train", [(20, 20)] * 3, most=3)
    val = coco_set.add("val", [(20, 20)] * 2, most=2)
    content["annotations"] = [dict(row, iscrowd=int(n == 0)) for n, row in enumerate(content["annotations"][:3])]
    val["annotations"] = [dict(row, iscrowd=1) for row in val["annotations"]]
    data = make(coco_set, batch_size=3)
    targets = data.on_after_batch_transfer(next(iter(data.train_dataloader())))["targets"]
    assert sorted(len(target["labels"]) for target in targets) == [0, 0, 2]
    assert sum(row["iscrowd"] for row in data.ground_truth("train")["annotations"]) == 1
    assert all(target["boxes"].shape[1] == 4 for target in targets)
    batch = data.on_after_batch_transfer(next(iter(data.val_dataloader())))  # type: ignore[arg-type]
    assert all(len(target["labels"]) == 0 for target in batch["targets"])
    assert data.ground_truth("val")["annotations"]


def test_one_image(coco_set: Any) -> None:
    coco_set.add("train", [(20, 30)])
    data = make(coco_set)
    assert [len(batch["image_id"]) for batch in data.train_dataloader()] == [1]
    assert data.val_dataloader() == []


# -- mistakes ------------------------------------------------------------------------------------------------


def test_nothing_to_train_on(coco_set: Any) -> None:
    coco_set.add("train", [(20, 30)])["annotations"].clear()
    with pytest.raises(UserError, match="no box is left to train on"):
        make(coco_set).setup("fit")


def test_images_that_are_in_training_and_validation(small_set: Any) -> None:
    for number in (0, 2):
        shutil.copy(small_set.root / "train" / f"{number}.png", small_set.root / "val" / f"{number}.png")
    with pytest.raises(
        UserError, match=r"2 training images that are in instances_val.json too.*images 11, 17.*overlap"
    ):
        make(small_set).setup("fit")
    dropped = make(small_set, overlap="drop")
    with pytest.warns(UserWarning, match="2 training images .* left out of training"):
        dropped.setup("fit")
    assert shown(dropped) == {14, 20, 23, 26, 29}
    assert shown(dropped, "val") == {11, 14, 17}
    kept = make(small_set, overlap="allow")
    with pytest.warns(UserWarning, match="kept, as"):
        kept.setup("fit")
    assert len(shown(kept)) == 7
    options = {**small_set.options(), "val_json": small_set.options()["train_json"]}
    with pytest.raises(UserError, match="every training image"):
        DetectionData(**options, overlap="drop").setup("fit")


@pytest.mark.parametrize("verify", [True, False])
@pytest.mark.parametrize("twins", [["valid"], ["test"], ["valid", "test"]])
def test_equally_named_files_of_every_split_are_compared(coco_set: Any, twins: list[str], verify: bool) -> None:
    """Roboflow's layout: all three annotation files have one name, and only their folders tell them apart."""
    for split in ("train", "valid", "test"):
        content = coco_set.add(split, [(23, 31), (31, 23)])
        (coco_set.root / split / "_annotations.coco.json").write_text(json.dumps(content))
    for split in twins:
        shutil.copy(coco_set.root / "train" / "0.png", coco_set.root / split / "1.png")
        shutil.copy(coco_set.root / "train" / "1.png", coco_set.root / split / "0.png")
        content = coco_set.content[split]
        content["images"] = [dict(row, file_name=f"{1 - n}.png") for n, row in enumerate(content["images"])]
        (coco_set.root / split / "_annotations.coco.json").write_text(json.dumps(content))
    splits = {"train": "train", "val": "valid", "test": "test"}
    files = {f"{key}_json": f"{folder}/_annotations.coco.json" for key, folder in splits.items()}
    options = {"name": "coco", "root": coco_set.root, "img_size": 24, "max_size": 60, "verify_images": verify, **files}
    with pytest.raises(UserError, match=rf"2 training images that are in {twins[0]}/_annotations\.coco\.json too"):
        DetectionData(**options).setup("fit")
    with pytest.warns(UserWarning, match="kept, as data.overlap says") as caught:
        DetectionData(**options, overlap="allow").setup("fit")
    text = " ".join(str(warning.message) for warning in caught)
    for split in ("valid", "test"):
        assert (f"in {split}/_annotations.coco.json too" in text) == (split in twins)


def test_a_bad_image_is_found_before_training(small_set: Any) -> None:
    path = small_set.root / "train" / "1.png"
    path.write_bytes(path.read_bytes()[:200])
    for memory in (0, 64):
        with pytest.raises(UserError, match=r"1 images that cannot be read .*1\.png"):
            make(small_set, memory_limit_mb=memory).setup("fit")
    data = make(small_set, skip_bad_images=True)
    with pytest.warns(UserWarning, match="left out"):
        data.setup("fit")
    assert len(shown(data)) == 6
    assert 14 not in {row["id"] for row in data.ground_truth("train")["images"]}


def test_repairs_are_warned_about_and_kept(small_set: Any) -> None:
    rows = small_set.content["train"]["annotations"]
    rows[0]["bbox"] = [1.0, 2.0, 0.0, 4.0]
    rows[1]["bbox"] = [-6.0, 2.0, 12.0, 4.0]
    with pytest.warns(UserWarning, match="not above 0"):
        data = make(small_set)
    with pytest.warns(UserWarning, match="stick out"):
        data.setup("fit")
    assert {finding.count for finding in data.findings} == {1}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        data.setup("fit")  # said once


def test_validation_with_other_categories(small_set: Any) -> None:
    small_set.content["val"]["categories"].append({"id": 90, "name": "dog"})
    with pytest.raises(UserError, match="category 90"):
        make(small_set).setup("fit")


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"name": "cocoo"}, "Did you mean coco"),
        ({"batch_size": 0}, "data.batch_size"),
        ({"fraction": 2.0}, "data.fraction"),
        ({"max_images": 0}, "data.max_images"),
        ({"overlap": "maybe"}, "data.overlap"),
        ({"img_size": (24, 24), "resize": "shorter"}, "data.img_size"),
        ({"img_size": None, "resize": "fit"}, "needs data.img_size"),
        ({"img_size": 99, "max_size": 60}, "data.max_size"),
        ({"categories": ["bleu"]}, "Did you mean blue"),
        ({"train_json": "none.json"}, "no annotation file"),
        ({"root": "/nowhere"}, "no folder /nowhere"),
        ({"train_images": "other"}, "no image folder"),
        ({"val_json": "annotations/instances_train.json", "val_images": "other"}, "no image folder"),
    ],
)
def test_user_mistakes(small_set: Any, more: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=words):
        make(small_set, **more).setup("fit")


# -- digit scenes ------------------------------------------------------------------------------------------------


@pytest.fixture
def few_scenes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scenes, "COUNTS", {"train": 23, "val": 5, "test": 7})


@pytest.mark.usefixtures("few_scenes")
def test_digit_scenes(tmp_path: Path) -> None:
    data = DetectionData("digit_scenes", root=tmp_path, batch_size=5, augment=DetectionAugmentConfig(flip=True))
    assert (data.num_classes, data.labels[7], data.category_ids[7]) == (10, "7", 8)
    assert data.img_size == (96, 96)
    assert not list(tmp_path.iterdir())  # known before a scene is made
    data.setup()
    batch = data.on_after_batch_transfer(next(iter(data.train_dataloader())))
    assert batch["image"].shape == (5, 3, 96, 96)
    assert batch["mask"] is None
    check_batch(batch, training=True)
    assert [len(shown(data, split)) for split in ("train", "val", "test")] == [23, 5, 7]
    assert len(data.ground_truth("test")["images"]) == 7
    part = DetectionData("digit_scenes", root=tmp_path, categories=["3", "5"])
    assert (part.labels, part.category_ids) == (["3", "5"], [4, 6])
    assert data.sample_batch(4, split="val")["image"].shape == (4, 3, 96, 96)
    assert data.describe("val").startswith("5 val images with ")


class Recorder(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
        self.seen: list[tuple[Any, ...]] = []

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> torch.Tensor:
        boxes = sum(float(target["boxes"].double().sum()) for target in batch["targets"])
        self.seen.append(
            (self.current_epoch, tuple(batch["index"].tolist()), float(batch["image"].double().sum()), boxes)
        )
        return self.layer(batch["image"].mean().view(1, 1)).sum()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.0)


def fit(data: DetectionData, folder: Path, save: bool = False, ckpt: Path | None = None) -> list[Any]:
    module = Recorder()
    saver = ModelCheckpoint(folder, "{step}", save_top_k=-1, every_n_train_steps=1, save_on_train_epoch_end=False)
    trainer = Trainer(
        max_epochs=2,
        accelerator="cpu",
        logger=False,
        callbacks=[saver] if save else [],
        enable_checkpointing=save,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
        default_root_dir=folder,
        limit_val_batches=0,
    )
    trainer.fit(module, datamodule=data, ckpt_path=ckpt, weights_only=True)
    return module.seen


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("workers", [0, 1])
def test_resume_sees_what_an_uninterrupted_run_sees(small_set: Any, tmp_path: Path, workers: int) -> None:
    def data() -> DetectionData:
        return make(small_set, augment=AUGMENT, num_workers=workers, seed=5)

    whole = fit(data(), tmp_path, save=True)
    assert len(whole) == 6
    for step in (1, 3, 4):
        assert fit(data(), tmp_path, ckpt=tmp_path / f"step={step}.ckpt") == whole[step:]


# -- real sets ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "images", "boxes"), [("bccd", 205, 2804), ("coco_320", 1571, 14738 - 191)])
def test_real_sets(data_root: Path, name: str, images: int, boxes: int) -> None:
    folder = data_root / name.replace("_", "-")
    if not folder.is_dir():
        pytest.skip(f"{data_root} holds no {folder.name}")
    data = DetectionData(name, root=data_root, memory_limit_mb=0, eval_max_images=8, batch_size=3, augment=AUGMENT)
    assert data.num_classes == (3 if name == "bccd" else 80)
    data.setup("fit")
    part = data.split("train")
    assert part is not None
    assert (len(part), len(part.boxes.labels)) == (images, boxes)
    assert not data.findings
    check_batch(data.on_after_batch_transfer(next(iter(data.train_dataloader()))), training=True)
    for raw in data.val_dataloader():  # type: ignore[union-attr]
        check_batch(data.on_after_batch_transfer(raw), training=False)
    file = json.loads((data.root / data.annotation_file("val")).read_text())  # type: ignore[operator]
    truth = data.ground_truth("val")
    kept = {row["id"] for row in truth["images"]}
    theirs = [row["bbox"] for row in file["annotations"] if row["image_id"] in kept]
    assert sorted(row["bbox"] for row in truth["annotations"]) == sorted(theirs)


def test_stored_images_are_evaluated_at_the_size_that_prediction_gives_them(write_coco, tmp_path):
    """Images are kept smaller than their files; rounding that size again could give another one."""
    from vision_attn.detection.inference import prepare

    root = write_coco(tmp_path, {"train2017": 3, "val2017": 6}, side=61)
    data = DetectionData(name="coco", root=root, img_size=47, max_size=53, batch_size=2)
    data.setup("validate")
    sizes = [tuple(size) for batch in data.val_dataloader() for size in batch["size"].tolist()]
    files = sorted((root / "val2017").glob("*.png"))
    expected = [
        tuple(image.shape[1:]) for image in prepare([Image.open(f) for f in files], {"preprocess": data.preprocess})
    ]
    assert sorted(sizes) == sorted(expected)
    assert len(set(expected)) > 2
