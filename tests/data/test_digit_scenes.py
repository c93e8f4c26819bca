"""Scenes of digits: whole, the same for a seed, and what their file says they are."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from vision_attn.data import digit_scenes
from vision_attn.data.coco import read_coco
from vision_attn.data.coco_table import fit_boxes
from vision_attn.data.digit_scenes import is_whole, prepare_scenes, scenes_folder
from vision_attn.data.findings import Findings
from vision_attn.errors import UserError

COUNTS = {"train": 40, "val": 13, "test": 11}


@pytest.fixture(scope="module")
def scenes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return prepare_scenes(tmp_path_factory.mktemp("scenes"), counts=COUNTS)


def test_true_coco_layout(scenes: Path) -> None:
    for split, count in COUNTS.items():
        findings = Findings()
        table = read_coco(scenes / "annotations" / f"instances_{split}.json", findings)
        table, cut = fit_boxes(table, findings)
        assert not findings.found
        assert len(table) == count
        assert table.labels == [str(digit) for digit in range(10)]
        assert table.category_ids == list(range(1, 11))
        assert np.array_equal(cut[:, :2], table.boxes[:, :2])
        counts = np.bincount(table.image, minlength=count)
        assert 1 <= counts.min() <= counts.max() <= 5
        longer = table.boxes[:, 2:].max(1)
        assert longer.min() >= 13  # a stroke's soft edge lies outside the box
        assert longer.max() <= 40 * 1.3
        with Image.open(scenes / split / table.files[0]) as picture:
            assert (picture.size, picture.mode) == ((96, 96), "RGB")


def test_scans_are_held_out(scenes: Path) -> None:
    used = []
    for split in COUNTS:
        content = json.loads((scenes / "annotations" / f"instances_{split}.json").read_text())
        used.append({row["scan"] for row in content["annotations"]})
    assert sum(map(len, used)) == len(set.union(*used))


def test_boxes_hold_the_ink_and_little_overlaps() -> None:
    from vision_attn.data.sources import Digits, SourceOptions

    scans = Digits(SourceOptions()).scans("val")
    assert scans is not None
    inks = [digit_scenes._ink(image) for image in scans.images[:, 0].numpy()]
    for seed in range(20):
        rng = np.random.default_rng(seed)
        opacity, (left, top, right, bottom) = digit_scenes._stroke(rng, inks[seed])
        solid = opacity >= 0.5
        assert solid[top:bottom, left:right].sum() == solid.sum()
        assert solid[top].any() or solid[:, left].any()
        assert opacity.min() == 0.0  # no faint rectangle around a digit
        _, found = digit_scenes.compose(rng, inks)
        for number, (_, box) in enumerate(found):
            assert 0 <= box[0] < box[2] <= 96
            assert 0 <= box[1] < box[3] <= 96
            for _, other in found[:number]:
                assert digit_scenes._apart(box, other)


def test_a_seed_gives_the_same_scenes_and_another_others(tmp_path: Path, scenes: Path) -> None:
    counts = {"train": 3, "val": 1, "test": 1}
    again = prepare_scenes(tmp_path, counts=counts)
    other = prepare_scenes(tmp_path, seed=1, counts=counts)
    for number in range(1, 4):  # and the first scenes of a longer set are those of a shorter one
        name = f"train/{number:06d}.png"
        pixels = [np.asarray(Image.open(folder / name)) for folder in (scenes, again, other)]
        assert np.array_equal(pixels[0], pixels[1])
        assert not np.array_equal(pixels[0], pixels[2])


def test_made_once_whole_or_not_at_all(tmp_path: Path, scenes: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    counts = {"train": 3, "val": 1, "test": 1}
    folder = prepare_scenes(tmp_path, counts=counts)
    before = (folder / "train" / "000001.png").stat().st_mtime_ns
    assert prepare_scenes(tmp_path, counts=counts) == folder
    assert (folder / "train" / "000001.png").stat().st_mtime_ns == before
    (folder / "train" / "000002.png").unlink()
    assert not is_whole(folder, counts)
    assert is_whole(prepare_scenes(tmp_path, counts=counts), counts)
    shutil.rmtree(folder)

    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(digit_scenes, "_move", fail)
    with pytest.raises(UserError, match="No space left"):
        prepare_scenes(tmp_path, counts=counts)
    assert not scenes_folder(tmp_path).exists()
    assert list(scenes_folder(tmp_path).parent.iterdir()) == []


def test_a_root_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"Set data\.root"):
        prepare_scenes(tmp_path / "file", counts=COUNTS)
