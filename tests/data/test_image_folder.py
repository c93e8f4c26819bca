from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from vision_attn.data import ImageData, MemorySet, StreamedSet
from vision_attn.data.images import read_image, resize_and_crop
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
    splits = {name: data._required(name) for name in ("train", "val", "test")}  # type: ignore[arg-type]
    assert {name: len(part) for name, part in splits.items()} == {"train": 28, "val": 6, "test": 6}
    assert sorted(torch.cat([part.ids for part in splits.values()]).tolist()) == list(range(40))
    assert splits["val"].labels.bincount().tolist() == [3, 3]
    again = ImageData("image_folder", root=flat, img_size=(5, 7), seed=2)
    assert torch.equal(again._required("test").ids, splits["test"].ids)
    assert isinstance(splits["train"], MemorySet)
    assert splits["train"].images.shape == (28, 3, 5, 7)


def test_streamed_and_memory_agree(flat: Path) -> None:
    small = ImageData("image_folder", root=flat, img_size=7)
    large = ImageData("image_folder", root=flat, img_size=7, memory_limit_mb=0)
    one, other = small._required("val"), large._required("val")
    assert isinstance(other, StreamedSet)
    rows = torch.tensor([4, 0, 1])
    for key in ("image", "label", "index"):
        torch.testing.assert_close(one.batch(rows)[key], other.batch(rows)[key], rtol=0, atol=0)
    assert large.data_hash
    assert len(next(iter(large.train_dataloader()))["label"]) == 28


def test_explicit_splits(tmp_path: Path) -> None:
    for split, count in (("train", 20), ("val", 4)):
        for number in range(count):
            picture(tmp_path / split / "ab"[number % 2] / "below" / f"{number}.JPG")
    data = ImageData("image_folder", root=tmp_path, img_size=5)
    assert (len(data._required("train")), len(data._required("val"))) == (20, 4)
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
