from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torchvision.transforms.v2 import functional as transforms

from vision_attn.data import AugmentConfig, ImageData, MemorySet, StreamedSet, verify
from vision_attn.data.image_folder import hold_out_by_path
from vision_attn.data.images import INTERPOLATIONS, read_image, resize_and_crop, resized_crop
from vision_attn.errors import UserError


def picture(path: Path, color: tuple[int, int, int] = (10, 20, 30), size: tuple[int, int] = (13, 11)) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", size, color).save(path)
    return path


@pytest.fixture
def flat(tmp_path: Path) -> Path:
    for number in range(40):
        picture(tmp_path / "set" / ("cat" if number % 2 else "dog") / f"{number:02}.png", (number, 100, 200))
    return tmp_path / "set"


def test_flat_folder_is_split_and_balanced(flat: Path) -> None:
    data = ImageData("image_folder", root=flat, img_size=(5, 7), seed=1)
    assert data.labels == ["cat", "dog"]
    assert data.preprocess["size"] == [5, 7]
    data.setup()
    splits = {name: data.required(name) for name in ("train", "val", "test")}  # type: ignore[arg-type]
    assert sorted(torch.cat([part.ids for part in splits.values()]).tolist()) == list(range(40))
    for name, least, most in (("train", 20, 36), ("val", 2, 12), ("test", 2, 12)):
        assert least <= len(splits[name]) <= most
        assert splits[name].labels.bincount(minlength=2).min() >= 1
    again = ImageData("image_folder", root=flat, img_size=(5, 7), seed=2)
    assert torch.equal(again.required("test").ids, splits["test"].ids)
    assert isinstance(splits["train"], MemorySet)
    assert splits["train"].images.shape == (len(splits["train"]), 3, 5, 7)


def test_streamed_and_memory_agree(flat: Path) -> None:
    small = ImageData("image_folder", root=flat, img_size=7)
    large = ImageData("image_folder", root=flat, img_size=7, memory_limit_mb=0)
    one, other = small.required("val"), large.required("val")
    assert isinstance(other, StreamedSet)
    rows = torch.tensor([len(one) - 1, 0, 1])
    for key in ("image", "label", "index"):
        torch.testing.assert_close(one.batch(rows)[key], other.batch(rows)[key], rtol=0, atol=0)
    assert large.data_hash
    assert len(next(iter(large.train_dataloader()))["label"]) == len(large.required("train"))


def files_of(root: Path, **options: Any) -> dict[str, set[str]]:
    """The files in each split, by their names below ``root``."""
    data = ImageData("image_folder", root=root, img_size=5, memory_limit_mb=0, verify_images=False, **options)
    found = {}
    for name in ("train", "val", "test"):
        part = data.split(name)  # type: ignore[arg-type]
        found[name] = {str(Path(path).relative_to(root)) for path in part.paths} if part is not None else set()  # type: ignore[union-attr]
    return found


@pytest.mark.parametrize("where", ["", "train/"])
def test_an_added_file_moves_no_other(flat: Path, tmp_path: Path, where: str) -> None:
    """A model trained before would be tested on what it has seen."""
    if where:
        flat.rename(tmp_path / "train")
        flat.mkdir()
        (tmp_path / "train").rename(flat / "train")
    before = files_of(flat)
    assert before["train"]
    assert before["val"]
    assert bool(before["test"]) is not bool(where)
    for name in ("cat/00.png", "cat/071.png", "dog/zzz.png", "dog/below/1.png", "ant/1.png"):
        picture(flat / f"{where}{name}")
        after = files_of(flat)
        known = set().union(*before.values())
        assert {split: files & known for split, files in after.items()} == before
    for number in range(200):
        picture(flat / f"{where}cat/new {number}.png")
    after = files_of(flat)
    assert {split: files & known for split, files in after.items()} == before
    copy = flat.rename(tmp_path / "another place")
    assert files_of(copy) == after


def test_shares_are_near_those_asked_for_and_small_classes_are_not_forgotten() -> None:
    names = [f"{label}/{number:05}.png" for label in range(4) for number in range(5000)]
    labels = torch.arange(4).repeat_interleave(5000)
    for share in (0.1, 0.15, 0.5):
        held = hold_out_by_path(names, labels, share, "val")
        assert torch.equal(held, hold_out_by_path(names, labels, share, "val"))
        for label in range(4):  # five standard deviations
            deviation = 5 * (share * (1 - share) / 5000) ** 0.5
            assert float(held[labels == label].float().mean()) == pytest.approx(share, abs=deviation)
        other = hold_out_by_path(names, labels, share, "test")
        assert float((held & other).float().mean()) == pytest.approx(share**2, abs=0.02)
    assert not hold_out_by_path(names, labels, 0.0, "val").any()
    few = hold_out_by_path(names, labels, 0.1, "val")
    assert not (few & ~hold_out_by_path(names, labels, 0.2, "val")).any()  # nested
    for start in range(0, 4000, 10):
        rows = [*range(start, start + 10), *range(5000 + start, 5010 + start)]
        held = hold_out_by_path([names[row] for row in rows], labels[rows], 0.1, "val")
        assert held[:10].any()
        assert held[10:].any()
        half = hold_out_by_path([names[row] for row in rows[:2]], labels[rows[:2]], 0.5, "val")
        assert half.sum() == 1


def test_what_is_hidden_is_no_image(flat: Path) -> None:
    """Copies that tools keep would be in training and test at once."""
    before = files_of(flat)
    for name in ("cat/.ipynb_checkpoints/07-checkpoint.png", "cat/deep/.thumbs/small/1.jpg", "dog/._08.png"):
        (flat / name).parent.mkdir(parents=True, exist_ok=True)
        (flat / name).write_bytes(b"no image at all")
    assert files_of(flat) == before
    hidden = flat.rename(flat.parent / ".hidden")  # where a user keeps the set is not our business
    assert files_of(hidden) == before


@pytest.mark.parametrize("stage", ["fit", "test"])
def test_a_damaged_file_of_a_streamed_set_is_found_at_setup(flat: Path, monkeypatch: Any, stage: str) -> None:
    monkeypatch.setenv("VISION_ATTN_DATA", str(flat.parent / "home"))
    monkeypatch.setattr(verify, "WORTH", 0.0)  # remember it, however little time was spent
    split = {"fit": "train", "test": "test"}[stage]
    path = flat / sorted(files_of(flat)[split])[0]
    whole = noise(32, 32)
    whole.save(path)
    content = path.read_bytes()
    path.write_bytes(content[:900])
    for _ in range(2):
        data = ImageData("image_folder", root=flat, img_size=5, memory_limit_mb=0)
        with pytest.raises(UserError, match=r"^1 of .* images cannot be read") as raised:
            data.setup(stage)
        assert str(path) in str(raised.value)
        assert "Replace them, or delete them and start a new run" in str(raised.value)
    ImageData("image_folder", root=flat, img_size=5, memory_limit_mb=0, verify_images=False).setup(stage)
    path.write_bytes(content)
    data = ImageData("image_folder", root=flat, img_size=5, memory_limit_mb=0)
    data.prepare_data()
    data.setup(stage)
    assert list((flat.parent / "home" / "verified").iterdir())

    def again(path: str, **more: Any) -> Any:
        raise AssertionError(f"{path} was decoded before")

    monkeypatch.setattr(verify, "look_at", again)
    ImageData("image_folder", root=flat, img_size=5, memory_limit_mb=0).setup(stage)
    monkeypatch.undo()
    path.write_bytes(content[:900])  # gone bad since
    part = data.required(split)  # type: ignore[arg-type]
    row = part.paths.index(str(path))  # type: ignore[union-attr]
    with pytest.raises(UserError, match="Replace it") as raised:
        part.batch(torch.tensor([row]), epoch=0)  # type: ignore[call-arg]
    assert "resumed with as many images" in str(raised.value)


def test_explicit_splits(tmp_path: Path) -> None:
    for split, count in (("train", 20), ("val", 4)):
        for number in range(count):
            picture(tmp_path / split / "ab"[number % 2] / "below" / f"{number}.JPG")
    data = ImageData("image_folder", root=tmp_path, img_size=5)
    assert (len(data.required("train")), len(data.required("val"))) == (20, 4)
    with pytest.raises(UserError, match="no test images"):
        data.test_dataloader()
    with pytest.raises(UserError, match="val_fraction has nothing to say"):
        ImageData("image_folder", root=tmp_path, val_fraction=0.1)
    picture(tmp_path / "val" / "zebra" / "1.png")
    with pytest.raises(UserError, match="zebra is a class that no training image has"):
        ImageData("image_folder", root=tmp_path)


def test_mistakes_name_the_folder(tmp_path: Path, flat: Path) -> None:
    with pytest.raises(UserError, match=r"data\.root"):
        ImageData("image_folder")
    with pytest.raises(UserError, match=r"no folder .*nowhere"):
        ImageData("image_folder", root=tmp_path / "nowhere")
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match="no class folders"):
        ImageData("image_folder", root=tmp_path / "empty")
    (flat / "unicorn").mkdir()
    with pytest.raises(UserError, match="unicorn holds no images"):
        ImageData("image_folder", root=flat)
    (flat / "unicorn" / "notes.txt").write_text("none yet")
    with pytest.raises(UserError, match="unicorn holds no images"), pytest.warns(UserWarning, match=r"notes\.txt"):
        ImageData("image_folder", root=flat)


@pytest.mark.parametrize("damage", ["truncated", "empty", "text"])
def test_unreadable_file_is_found_when_the_set_is_opened(flat: Path, damage: str) -> None:
    path = flat / "cat" / "07.png"
    noise = torch.randint(0, 256, (32, 32, 3), dtype=torch.uint8).numpy()
    Image.fromarray(noise).save(path)
    path.write_bytes({"truncated": path.read_bytes()[:900], "empty": b"", "text": b"hello"}[damage])
    data = ImageData("image_folder", root=flat, img_size=5)
    with pytest.raises(UserError) as raised:
        data.setup()
    assert str(path) in str(raised.value)
    assert "\n" not in str(raised.value)


def test_kinds_of_images(tmp_path: Path) -> None:
    path = tmp_path / "image.png"
    Image.new("L", (4, 3), 77).save(path)
    assert read_image(path).getpixel((0, 0)) == (77, 77, 77)
    Image.fromarray(np.full((3, 4), 0x8080, dtype=np.uint16)).save(path)  # 16 bits, half way
    assert read_image(path).getpixel((0, 0)) == (128, 128, 128)
    Image.fromarray(np.full((3, 4), 200, dtype=np.uint16)).save(path)  # 16 bits, nearly black
    assert read_image(path).getpixel((0, 0)) == (0, 0, 0)
    Image.new("RGBA", (4, 3), (255, 0, 0, 0)).save(path)  # see-through red is white
    assert read_image(path).getpixel((0, 0)) == (255, 255, 255)
    Image.new("P", (4, 3)).save(path)
    assert read_image(path).mode == "RGB"
    Image.new("CMYK", (4, 3)).save(tmp_path / "cmyk.jpg")
    assert read_image(tmp_path / "cmyk.jpg").mode == "RGB"
    turned = Image.new("RGB", (4, 3))
    exif = turned.getexif()
    exif[0x0112] = 6  # the camera was held upright
    turned.save(tmp_path / "turned.jpg", exif=exif)
    assert read_image(tmp_path / "turned.jpg").size == (3, 4)


def test_resize_covers_and_crops_the_middle() -> None:
    array = np.zeros((10, 30, 3), dtype=np.uint8)
    array[:, 10:20] = 200  # the middle third
    out = resize_and_crop(Image.fromarray(array), (5, 5))
    assert out.shape == (3, 5, 5)
    assert (out == 200).float().mean() > 0.5
    same = torch.randint(0, 256, (7, 11, 3), dtype=torch.uint8)
    assert torch.equal(resize_and_crop(Image.fromarray(same.numpy()), (7, 11)), same.permute(2, 0, 1))
    assert resize_and_crop(Image.fromarray(array), (40, 3), crop_pct=0.9).shape == (3, 40, 3)


def noise(height: int, width: int, seed: int = 0) -> Image.Image:
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8))


@pytest.mark.parametrize("name", INTERPOLATIONS)
@pytest.mark.parametrize(
    ("whole", "resized", "size"),
    # sizes that others reach without rounding: the scale is whole, and so are the margins that are cut off
    [((51, 69), (17, 23), (13, 11)), ((17, 23), (51, 69), (41, 37)), ((51, 69), (17, 23), (17, 13))],
)
def test_pixels_are_those_of_others(
    name: str, whole: tuple[int, int], resized: tuple[int, int], size: tuple[int, int]
) -> None:
    picture = noise(*whole)
    crop_pct = max(size[0] / resized[0], size[1] / resized[1])
    ours = resize_and_crop(picture, size, crop_pct, name)
    # timm draws one of two where a checkpoint says "random", which an evaluation cannot
    mode = transforms.InterpolationMode("bilinear" if name == "random" else name)
    theirs = transforms.center_crop(transforms.resize(picture, list(resized), mode), list(size))
    torch.testing.assert_close(ours, transforms.pil_to_tensor(theirs), rtol=0, atol=1)


def test_every_interpolation_is_its_own_and_others_are_refused() -> None:
    picture = noise(31, 37)
    cut = {name: resize_and_crop(picture, (13, 17), 0.9, name) for name in INTERPOLATIONS if name != "random"}
    drawn = {name: resized_crop(picture, (13, 17), 0.3, [0.5, 0.4, 0.3, 0.2], name) for name in cut}
    for pixels in (cut, drawn):
        assert len({tuple(image.flatten().tolist()) for image in pixels.values()}) == len(cut) == 6
    torch.testing.assert_close(resize_and_crop(picture, (13, 17), 0.9), cut["bilinear"], rtol=0, atol=0)
    with pytest.raises(UserError, match=r"Unknown interpolation 'cubic'\. Did you mean bicubic.* lanczos"):
        resize_and_crop(picture, (13, 17), 1.0, "cubic")


def test_both_sets_are_cut_and_resized_as_asked(tmp_path: Path) -> None:
    for number in range(20):
        path = tmp_path / "ab"[number % 2] / f"{number:02}.png"
        path.parent.mkdir(exist_ok=True)
        noise(31, 37, number).save(path)
    options = {"root": tmp_path, "img_size": (11, 13), "crop_pct": 0.7, "interpolation": "bicubic", "max_images": 7}
    small = ImageData("image_folder", **options)  # type: ignore[arg-type]
    large = ImageData("image_folder", memory_limit_mb=0, **options)  # type: ignore[arg-type]
    for data in (small, large):
        assert (data.preprocess["crop_pct"], data.preprocess["interpolation"]) == (0.7, "bicubic")
    for split in ("train", "val", "test"):  # the training set is a subset, so it went through ``take``
        one, other = small.required(split), large.required(split)  # type: ignore[arg-type]
        assert isinstance(one, MemorySet)
        assert isinstance(other, StreamedSet)
        rows = torch.arange(len(one))
        torch.testing.assert_close(other.batch(rows)["image"], one.batch(rows)["image"], rtol=0, atol=0)
        for row, path in enumerate(other.paths):
            expected = resize_and_crop(read_image(path), (11, 13), 0.7, "bicubic")
            torch.testing.assert_close(one.images[row], expected, rtol=0, atol=0)
    augment = AugmentConfig(resized_crop=0.3)
    drawn = [
        ImageData("image_folder", memory_limit_mb=0, augment=augment, **{**options, "interpolation": name})  # type: ignore[arg-type]
        .required("train")
        .batch(torch.arange(7), epoch=0)["image"]  # type: ignore[call-arg]
        for name in ("bicubic", "nearest")
    ]
    assert (drawn[0] != drawn[1]).any()


@pytest.mark.parametrize(
    ("folders", "words"),
    [
        ("val test", ["holds test, val and no train", "Put training images into"]),
        ("test", ["holds test and no train", "Put training images into"]),
        ("training validation", ["no train", "Rename training to train and validation to val"]),
        ("Train Valid TESTING", ["no train", "Rename TESTING to test and Train to train and Valid to val"]),
        ("train_val", []),
        ("train validation", ["holds train and validation:", "not be looked at", "Rename validation to val"]),
        ("train valid test", ["holds train and valid:", "Rename valid to val"]),
        ("train val testing", ["holds train and testing:", "Rename testing to test"]),
        ("train val valid", []),  # something of the user's own beside the three
        ("cat test", []),  # a class of this name among others
    ],
)
@pytest.mark.filterwarnings("ignore")
def test_splits_by_another_name_are_not_taken_for_classes(tmp_path: Path, folders: str, words: list[str]) -> None:
    for split in folders.split():
        for number in range(4):
            picture(tmp_path / split / "ab"[number % 2] / f"{number}.png")
    if not words:
        ImageData("image_folder", root=tmp_path, img_size=5)
        return
    with pytest.raises(UserError) as raised:
        ImageData("image_folder", root=tmp_path, img_size=5)
    message = str(raised.value)
    assert f"Expected {tmp_path}/train/<class>/<image>" in message
    assert "\n" not in message
    for word in words:
        assert word in message


def test_classes_may_be_called_like_splits(tmp_path: Path) -> None:
    for number in range(8):
        picture(tmp_path / ("test", "val")[number % 2] / f"{number}.png")
    assert ImageData("image_folder", root=tmp_path, img_size=5).labels == ["test", "val"]


def test_a_strange_class_is_told_in_one_line(tmp_path: Path) -> None:
    for number in range(997):
        (tmp_path / "train" / f"kind_{number:03}").mkdir(parents=True)
        (tmp_path / "train" / f"kind_{number:03}" / "1.png").touch()  # not opened before pixels are asked for
    picture(tmp_path / "val" / "kind_12" / "1.png")
    with pytest.raises(UserError, match=r"kind_12 is a class that no training image has\. Did you mean") as raised:
        ImageData("image_folder", root=tmp_path)
    assert "There are: kind_000, kind_001, kind_002, kind_003, kind_004 and 992 more." in str(raised.value)


@pytest.mark.parametrize("limit", [0, 64])
def test_a_first_layer_sees_every_class(tmp_path: Path, limit: int) -> None:
    """Whitening is read off some training images, and a folder's come class by class."""
    for label in range(5):
        for number in range(23):
            picture(tmp_path / f"class_{label}" / f"{number}.png", (50 * label, 0, 0), (5, 5))
    seen = []
    for seed in (1, 1, 2):
        data = ImageData("image_folder", root=tmp_path, img_size=5, memory_limit_mb=limit, seed=seed)
        images = data.denormalize(data.plain_images(17))
        assert images.shape == (17, 3, 5, 5)
        counts = images[:, 0, 0, 0].div(50, rounding_mode="floor").long().bincount(minlength=5)
        assert counts.min() >= 3
        seen.append(images)
    torch.testing.assert_close(seen[0], seen[1], rtol=0, atol=0)
    train = data.required("train")
    everything = data.augmenter.normalize(train.batch(torch.arange(len(train)))["image"])
    torch.testing.assert_close(data.plain_images(1000), everything)
