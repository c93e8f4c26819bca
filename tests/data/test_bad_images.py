"""Damaged image files: found before training starts, or replaced with a word, never a crash hours later."""

from __future__ import annotations

import json
import struct
import warnings
import zlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch.trainer.states import TrainerFn
from PIL import Image

from vision_attn.data import DetectionData, verify
from vision_attn.data.coco_images import look_at
from vision_attn.data.images import read_image
from vision_attn.errors import UserError

FORMATS: dict[str, tuple[str, dict[str, Any]]] = {
    "jpeg": ("jpg", {}),
    "progressive jpeg": ("jpg", {"progressive": True}),
    "png": ("png", {}),
    "webp": ("webp", {}),
    "lossless webp": ("webp", {"lossless": True}),
    "raw tiff": ("tif", {}),
    "lzw tiff": ("tif", {"compression": "tiff_lzw"}),
    "deflate tiff": ("tif", {"compression": "tiff_adobe_deflate"}),
    "gif": ("gif", {}),
    "bmp": ("bmp", {}),
    "ppm": ("ppm", {}),
}
RAW = {"raw tiff", "bmp", "ppm"}  # plain numbers: a wrong one is as good as a right one


def save(path: Path, kind: str, seed: int = 0, size: tuple[int, int] = (120, 90)) -> bytes:
    y, x = np.mgrid[0 : size[1], 0 : size[0]]
    smooth = np.stack([x * 0.8 % 256, y * 1.1 % 256, (x + y) % 256], -1).astype(np.uint8) // 2
    noise = np.random.default_rng(seed).integers(0, 60, smooth.shape, dtype=np.uint8)
    Image.fromarray(smooth + noise).save(path, **FORMATS[kind][1])
    return path.read_bytes()


def damage(whole: bytes) -> dict[str, bytes]:
    n = len(whole)
    return {
        "half": whole[: n // 2],
        "nearly whole": whole[: n * 95 // 100],
        "ones in the middle": whole[: n // 3] + b"\xff" * (n // 4) + whole[n // 3 + n // 4 :],
        "zeros in the middle": whole[: n // 3] + bytes(n // 3) + whole[n // 3 + n // 3 :],
        "one byte": whole[: n // 2] + bytes([whole[n // 2] ^ 255]) + whole[n // 2 + 1 :],
    }


@pytest.mark.parametrize("kind", FORMATS)
def test_what_decoding_finds_is_found_at_setup(tmp_path: Path, kind: str) -> None:
    path = tmp_path / f"x.{FORMATS[kind][0]}"
    for name, content in damage(save(path, kind)).items():
        path.write_bytes(content)
        error = look_at(str(path), decode=True).error
        try:
            read_image(path)
            assert error is None, name
        except UserError:
            assert error, name
        if "middle" not in name and name != "one byte":
            assert error, name  # a file that is cut short is found whatever the format
        if name == "ones in the middle" and kind not in RAW:
            assert error, name


def add_formats(coco_set: Any, split: str) -> dict[str, Path]:
    """A split with one image of every format."""
    content = coco_set.add(split, [(90, 120)] * len(FORMATS))
    files = {}
    for seed, (row, kind) in enumerate(zip(content["images"], FORMATS, strict=True)):
        row["file_name"] = f"{kind}.{FORMATS[kind][0]}"
        files[kind] = coco_set.root / split / row["file_name"]
        save(files[kind], kind, seed + 100 * len(split))
    return files


def make(coco_set: Any, **more: Any) -> DetectionData:
    return DetectionData(**{**coco_set.options(), "img_size": 24, "max_size": 60, "batch_size": 2, **more})


def ids(data: DetectionData, split: Any = "train") -> list[int]:
    part = data.split(split)
    assert part is not None
    return part.image_ids


@pytest.mark.parametrize("where", ["memory", "files", "cache"])
def test_every_damaged_file_is_named_or_left_out(coco_set: Any, tmp_path: Path, where: str) -> None:
    files = add_formats(coco_set, "train")
    options: dict[str, Any] = {"memory_limit_mb": 64 if where == "memory" else 0}
    if where == "cache":
        options["cache"] = tmp_path / "cache"
    whole = make(coco_set, **options)
    whole.setup("fit")
    assert len(ids(whole)) == len(FORMATS)
    assert not whole.findings
    for kind in ("jpeg", "png", "gif", "bmp", "raw tiff"):
        content = damage(files[kind].read_bytes())
        files[kind].write_bytes(content["half" if kind in RAW else "ones in the middle"])
    with pytest.raises(UserError, match=r"5 images that cannot be read .*jpeg\.jpg.*skip_bad_images") as caught:
        make(coco_set, **options).setup("fit")
    assert len(str(caught.value).splitlines()) == 1
    for _ in range(2):
        data = make(coco_set, **options, skip_bad_images=True)
        with pytest.warns(UserWarning, match="5 images that cannot be read .*left out"):
            data.setup("fit")
        assert len(ids(data)) == len(FORMATS) - 5
        assert sum(finding.count for finding in data.findings) == 5
        assert sum(len(batch["image_id"]) for batch in data.train_dataloader()) == len(FORMATS) - 5


# -- what was decoded once is remembered ---------------------------------------------------------------


@pytest.fixture
def remembering(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The folder of the stamp files, which are written however little time was spent."""
    monkeypatch.setattr(verify, "WORTH", 0.0)
    monkeypatch.setenv("VISION_ATTN_DATA", str(tmp_path / "home"))
    return tmp_path / "home" / "verified"


def decoded(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the files that are decoded at setup from now on."""
    names: list[str] = []

    def count(path: str, **more: Any) -> Any:
        if more.get("decode"):
            names.append(Path(path).name)
        return look_at(path, **more)

    monkeypatch.setattr(verify, "look_at", count)
    return names


def test_a_second_start_decodes_nothing(small_set: Any, remembering: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = decoded(monkeypatch)
    first = make(small_set, memory_limit_mb=0)
    first.setup("fit")
    assert len(names) == 10  # of training and validation, each once
    assert len(list(remembering.iterdir())) == 2
    names.clear()
    second = make(small_set, memory_limit_mb=0)
    second.setup("fit")
    assert not names
    assert second.data_hash == first.data_hash
    assert ids(second) == ids(first)
    # another file under a known name is looked at; so is everything when the stamps are lost
    path = small_set.root / "train" / "2.png"
    Image.fromarray(255 - np.asarray(Image.open(path))).save(path)
    make(small_set, memory_limit_mb=0).setup("fit")
    assert names == ["2.png"]
    for file in remembering.iterdir():
        file.write_text("{")
    make(small_set, memory_limit_mb=0).setup("fit")
    assert len(names) == 11


def test_stamps_overlap_and_subsets_go_together(
    small_set: Any, remembering: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = decoded(monkeypatch)
    make(small_set, max_images=3).setup("fit")
    assert len(names) == 6
    make(small_set).setup("fit")
    assert len(names) == 10
    path = small_set.root / "train" / "0.png"
    Image.open(path).save(small_set.root / "val" / "0.png", compress_level=1)
    for _ in range(2):
        with pytest.raises(UserError, match=r"1 training images .* too, by content"):
            make(small_set).setup("fit")


def test_a_folder_that_cannot_be_written_costs_time_only(
    small_set: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(verify, "WORTH", 0.0)
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("VISION_ATTN_DATA", str(tmp_path / "file"))
    make(small_set, memory_limit_mb=0).setup("fit")


@pytest.mark.parametrize(
    ("stage", "read"),
    [(TrainerFn.FITTING, {"train", "val"}), (TrainerFn.VALIDATING, {"val"}), (None, {"train", "val"})],
)
def test_one_process_verifies_what_its_stage_needs(small_set: Any, stage: TrainerFn | None, read: set[str]) -> None:
    data = make(small_set, memory_limit_mb=0)
    if stage is not None:
        data.trainer = SimpleNamespace(state=SimpleNamespace(fn=stage))  # type: ignore[assignment]
    data.prepare_data()
    assert set(data._splits) == read


def test_images_are_decoded_once_for_memory(small_set: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from vision_attn.data import pixels

    plain = make(small_set, verify_images=False)
    batch = plain.split("train").batch(torch.arange(7))  # type: ignore[union-attr]
    monkeypatch.setattr(pixels, "load", None)
    other = make(small_set)
    assert torch.equal(batch["image"], other.split("train").batch(torch.arange(7))["image"])  # type: ignore[union-attr]
    assert other.data_hash is not None


# -- without looking -------------------------------------------------------------------------------------


def spoil(path: Path) -> None:
    """Damage that only decoding finds."""
    path.write_bytes(damage(path.read_bytes())["ones in the middle"])


def test_looking_can_be_left_out(small_set: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    names = decoded(monkeypatch)
    spoil(small_set.root / "train" / "3.png")
    data = make(small_set, memory_limit_mb=0, verify_images=False, batch_size=7)
    loader = data.train_dataloader()
    assert not names
    with pytest.raises(UserError, match=r"3\.png.*skip_bad_images"):
        list(loader)
    # where all images are decoded at setup anyway they can be left out all the same
    for options in ({}, {"memory_limit_mb": 0, "cache": tmp_path / "cache"}):
        with pytest.raises(UserError, match=r"3\.png"):
            make(small_set, verify_images=False, **options).setup("fit")
        data = make(small_set, verify_images=False, skip_bad_images=True, **options)
        with pytest.warns(UserWarning, match=r"1 images that cannot be read .*3\.png.*left out"):
            data.setup("fit")
        assert len(ids(data)) == 6
        assert sum(len(batch["image_id"]) for batch in data.train_dataloader()) == 6
    assert not names


# -- files that go bad later --------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("split", ["train", "val"])
def test_a_file_that_goes_bad_later_is_one_clear_error(small_set: Any, workers: int, split: str) -> None:
    data = make(small_set, memory_limit_mb=0, num_workers=workers, batch_size=7)
    loader: Any = data.train_dataloader() if split == "train" else data.val_dataloader()
    spoil(small_set.root / split / "1.png")
    with pytest.raises(UserError, match=r"1\.png.*data\.skip_bad_images"):
        list(loader)


def test_a_file_that_goes_bad_later_is_replaced_and_counted(small_set: Any) -> None:
    data = make(small_set, memory_limit_mb=0, batch_size=7, skip_bad_images=True)
    loader = data.train_dataloader()
    spoil(small_set.root / "train" / "1.png")
    (small_set.root / "train" / "6.png").unlink()
    with pytest.warns(UserWarning, match="another image takes its place") as caught:
        (batch,) = list(loader)
    assert len(caught) == 2
    assert sum("1.png" in str(w.message) for w in caught) == 1
    assert "2 files" in str(caught[-1].message)
    assert batch["image"].shape[0] == len(batch["image_id"]) == len(batch["counts"]) == len(batch["index"]) == 7
    assert not {14, 29} & set(batch["image_id"])
    assert batch["image"].any(dim=(1, 2, 3)).all()
    targets = data.on_after_batch_transfer(batch)["targets"]
    truth = data.ground_truth("train")["annotations"]
    for target in targets:  # boxes are those of the images that are shown
        assert len(target["boxes"]) == sum(row["image_id"] == target["image_id"] for row in truth)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        list(loader)  # each file is said once
    for path in (small_set.root / "train").iterdir():
        path.unlink()
    with (
        pytest.warns(UserWarning, match="7 files"),
        pytest.raises(UserError, match=r"no image of .*train\.json can be"),
    ):
        list(loader)


def test_an_evaluation_image_that_goes_bad_later_shows_nothing(small_set: Any) -> None:
    """It is not replaced, which would count another image twice: its objects count as missed."""
    data = make(small_set, memory_limit_mb=0, eval_batch_size=3, skip_bad_images=True)
    loader: Any = data.val_dataloader()
    (small_set.root / "val" / "1.png").unlink()
    with pytest.warns(UserWarning, match=r"1\.png.*count as missed"):
        (batch,) = list(loader)
    assert sorted(batch["image_id"]) == [11, 14, 17]
    place = batch["image_id"].index(14)
    height, width = batch["size"][place].tolist()
    shown = batch["image"][place, :, :height, :width]
    assert (shown == shown[:, :1, :1]).all()


# -- the same picture in another file --------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["bytes", "compression", "format", "turned"])
def test_shared_pictures_are_found_by_their_pixels(small_set: Any, how: str) -> None:
    source, target = small_set.root / "train" / "2.png", small_set.root / "val" / "2.png"  # 29 x 29
    picture = Image.open(source)
    if how == "bytes":
        target.write_bytes(source.read_bytes())
    elif how == "compression":
        picture.save(target, compress_level=1)
    elif how == "format":
        picture.save(target.with_suffix(".bmp"))
        small_set.content["val"]["images"][2]["file_name"] = "2.bmp"
    else:
        exif = Image.Exif()
        exif[0x0112] = 3
        picture.rotate(180).save(target, exif=exif)
    for limit in (0, 64):
        with pytest.raises(UserError, match=r"1 training images that are in instances_val\.json too.*image 17"):
            make(small_set, memory_limit_mb=limit).setup("fit")
    dropped = make(small_set, overlap="drop")
    with pytest.warns(UserWarning, match="1 training images .* left out"):
        dropped.setup("fit")
    assert 17 not in ids(dropped)
    assert len(ids(dropped)) == 6
    quick = make(small_set, verify_images=False)  # compares bytes
    if how == "bytes":
        with pytest.raises(UserError, match="1 training images"):
            quick.setup("fit")
    else:
        quick.setup("fit")


def test_an_exif_tag_behind_the_pixels_turns_the_image(coco_set: Any) -> None:
    """PNG may say the orientation at its end, where a look at its head does not find it."""
    content = coco_set.add("train", [(20, 30)], most=1)
    path = coco_set.root / "train" / "0.png"
    exif = Image.Exif()
    exif[0x0112] = 6
    body = exif.tobytes().removeprefix(b"Exif\0\0")
    chunk = struct.pack(">I", len(body)) + b"eXIf" + body + struct.pack(">I", zlib.crc32(b"eXIf" + body))
    whole = path.read_bytes()
    end = whole.rindex(b"IEND") - 4
    path.write_bytes(whole[:end] + chunk + whole[end:])
    assert read_image(path).size == (20, 30)
    data = make(coco_set)
    with pytest.warns(UserWarning, match="EXIF"):
        data.setup("fit")
    assert data.split("train").orig_sizes.tolist() == [[30, 20]]  # type: ignore[union-attr]
    assert json.dumps(content)
