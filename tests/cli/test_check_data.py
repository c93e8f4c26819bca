"""``vision-attn check data``: what is wrong with a set, exit codes, JSON."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from vision_attn.cli.main import main


def check(*arguments: object) -> int:
    return main(["check", "data", *map(str, arguments)])


def paint(path: Path, number: int, size: tuple[int, int] = (30, 20)) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(number)
    Image.fromarray(rng.integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)).save(path)


def coco(root: Path, split: str, count: int, first: int) -> dict[str, Any]:
    """A clean split, not written yet."""
    images, annotations = [], []
    for id in range(1, count + 1):
        paint(root / split / f"{id}.png", first + id)
        images.append({"id": id, "file_name": f"{id}.png", "width": 30, "height": 20})
        box = [1.0 * id, 2.0, 7.0, 5.0]
        category = 3 + 2 * (id % 2)
        annotations.append({"id": id, "image_id": id, "category_id": category, "bbox": box, "area": 35, "iscrowd": 0})
    return {
        "images": images,
        "annotations": annotations,
        "categories": [{"id": 3, "name": "a"}, {"id": 5, "name": "b"}],
    }


def write(root: Path, split: str, content: Any) -> Path:
    path = root / "annotations" / f"instances_{split}.json"
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(content))
    return path


@pytest.fixture
def clean(tmp_path: Path) -> tuple[Path, dict[str, Any], dict[str, Any]]:
    root = tmp_path / "set"
    return root, coco(root, "train", 6, 0), coco(root, "val", 3, 50)


def test_a_clean_set(clean: Any, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    root, train, val = clean
    file = write(root, "train", train)
    write(root, "val", val)
    assert check(root, "--json", tmp_path / "out.json") == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].endswith("instances_train.json: 6 images, 6 boxes, 2 categories")
    assert lines[-1] == "nothing wrong"
    out = json.loads((tmp_path / "out.json").read_text())
    assert out["findings"] == 0
    assert [part["images"] for part in out["parts"]] == [6, 3]
    assert check(file) == 0
    assert check(file, "--images", root / "train") == 0


def test_everything_at_once(clean: Any, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    root, train, val = clean
    (root / "train" / "1.png").unlink()
    (root / "train" / "2.png").write_bytes(b"nothing")
    whole = (root / "train" / "3.png").read_bytes()
    (root / "train" / "3.png").write_bytes(whole[:900] + bytes(len(whole) - 960) + whole[-60:])  # its end is there
    paint(root / "train" / "4.png", 4, (33, 20))
    shutil.copy(root / "train" / "5.png", root / "val" / "2.png")
    shutil.copy(root / "train" / "5.png", root / "train" / "6.png")
    boxes = [[1, 1, 0, 4], [-9, 1, 4, 4], [25, 1, 20, 4], [1, float("nan"), 3, 3], [5.0, 2.0, 7.0, 5.0]]
    for number, box in enumerate(boxes):
        train["annotations"].append(
            {"id": 7 + number, "image_id": 5, "category_id": 5, "bbox": box, "area": 1, "iscrowd": 0}
        )
    train["annotations"][-1]["id"] = 1
    train["annotations"].append({"id": 99, "image_id": "77", "category_id": 3, "bbox": [1, 1, 2, 2], "area": 1})
    train["annotations"].append({"id": 98, "image_id": 5, "category_id": 40, "bbox": [1, 1, 2, 2], "area": 1})
    train["categories"].append({"id": 8, "name": "c"})
    write(root, "train", train)
    write(root, "val", val)
    assert check(root, "--json", tmp_path / "out.json") == 1
    printed = capsys.readouterr().out
    findings = json.loads((tmp_path / "out.json").read_text())["parts"][0]["findings"]
    kinds = {finding["kind"]: finding for finding in findings}
    expected = {
        "images missing in": 1,
        "images that cannot be read": 2,
        "images whose size is not": 1,
        "boxes whose width or height": 1,
        "boxes with NaN": 1,
        "boxes outside their image": 1,
        "boxes that stick out": 1,
        "boxes given more than once": 1,
        "annotation ids given twice": 1,
        "'image_id' is not written": 1,
        "annotations of images": 1,
        "annotations of categories": 1,
        "categories without examples": 1,
        "repeat another one": 1,
        "images that are in instances_val.json too": 1,
    }
    for words, count in expected.items():
        (match,) = [finding for kind, finding in kinds.items() if words in kind]
        assert match["count"] == count, words
        assert words in printed
    assert kinds["images that are in instances_val.json too, by content"]["ids"] == ["5 = 2"]
    assert printed.splitlines()[-1] == f"{len(findings)} kinds of mistakes"


@pytest.mark.parametrize("resaved", [False, True])
def test_what_is_called_refused_is_refused_in_training(
    clean: Any, capsys: pytest.CaptureFixture[str], resaved: bool
) -> None:
    """The words and training agree: pictures of training in validation are, those of validation in test are not."""
    from vision_attn.data import DetectionData
    from vision_attn.errors import UserError

    root, train, val = clean
    test = coco(root, "test", 3, 90)
    for name, content in (("train", train), ("val", val), ("test", test)):
        write(root, name, content)
    files = {f"{name}_json": f"annotations/instances_{name}.json" for name in ("train", "val", "test")}

    def copy(source: str, target: str) -> None:
        if resaved:
            Image.open(root / source).save(root / target, compress_level=1)
        else:
            shutil.copy(root / source, root / target)

    copy("val/1.png", "test/2.png")
    assert check(root) == 1
    assert "1 images that are in instances_test.json too, by content (image 1 = 2): all are kept" in (
        capsys.readouterr().out
    )
    DetectionData("coco", root=root, **files).setup("fit")
    copy("train/4.png", "val/3.png")
    assert check(root) == 1
    assert "in instances_val.json too, by content (image 4 = 3): training refuses them" in capsys.readouterr().out
    with pytest.raises(UserError, match=r"1 training images that are in instances_val\.json too"):
        DetectionData("coco", root=root, **files).setup("fit")


def test_equally_named_files_are_told_apart(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for number, split in enumerate(("train", "valid", "test")):
        content = coco(tmp_path, split, 3, 10 * number)
        (tmp_path / split / "_annotations.coco.json").write_text(json.dumps(content))
    assert check(tmp_path) == 0
    for split in ("valid", "test"):
        shutil.copy(tmp_path / "train" / "1.png", tmp_path / split / "2.png")
    capsys.readouterr()
    assert check(tmp_path) == 1
    printed = capsys.readouterr().out
    for split in ("valid", "test"):
        words = f"1 images that are in {split}/_annotations.coco.json too, by content (image 1 = 2): training refuses"
        assert words in printed


@pytest.mark.parametrize("start", ["elsewhere", "beside"])
@pytest.mark.parametrize(
    ("file", "images"),
    [
        ("train.json", "train"),
        ("train.json", "images"),
        ("train.json", "images/train"),
        ("instances_train.json", "train"),
        ("train.json", ""),
        ("annotations/instances_train.json", "train"),
        ("annotations/train.json", "images/train"),
        ("labels/train.json", "train"),
        ("train/_annotations.coco.json", "train"),
    ],
)
def test_images_are_where_training_finds_them(
    tmp_path: Path, file: str, images: str, start: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In every layout, also when other sets lie beside this one and when the file is named from its own folder."""
    from vision_attn.data import DetectionData

    root = tmp_path / "sets" / "this"
    for number, name in enumerate(("train", "images")):
        paint(tmp_path / "sets" / name / "other.png", number)
    content = coco(root, images, 4, 10)
    (root / file).parent.mkdir(parents=True, exist_ok=True)
    (root / file).write_text(json.dumps(content))
    DetectionData("coco", root=root, train_json=file).setup("fit")
    if start == "beside":
        monkeypatch.chdir((root / file).parent)
    assert check(Path(file).name if start == "beside" else root / file) == 0


STRAYS = {
    "package.json": {"name": "app", "version": "1"},
    "results.json": [{"image_id": 1, "score": 0.5}],
    "e.json": {},
}


@pytest.mark.parametrize("folder", ["annotations", ""])
def test_json_files_of_others_are_left_out_with_a_note(
    clean: Any, folder: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    root, train, val = clean
    (root / folder).mkdir(exist_ok=True)
    for name, content in {"train.json": train, "val.json": val, **STRAYS}.items():
        (root / folder / name).write_text(json.dumps(content))
    assert check(root, "--json", tmp_path / "out.json") == 0
    printed = capsys.readouterr().out
    out = json.loads((tmp_path / "out.json").read_text())
    assert [part["images"] for part in out["parts"]] == [6, 3]
    for name in STRAYS:
        assert f"note: {root / folder / name} is left out" in printed
        assert any(name in note for note in out["parts"][0]["notes"])


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("train.json", '{"images": [', "not a JSON file"),
        ("train.json", "", "not a JSON file"),
        ("train.json", '{"images": []}', "has no 'annotations'"),
        ("annotations/instances_train.json", "{}", "has no 'images'"),
        ("train/_annotations.coco.json", "[]", "expected a dictionary"),
    ],
)
def test_broken_coco_files_are_not_left_out(
    clean: Any, name: str, text: str, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    root, _, val = clean
    for file, content in ((name, text), (name.replace("train", "val"), json.dumps(val))):
        (root / file).parent.mkdir(exist_ok=True)
        (root / file).write_text(content)
    assert check(root) == 1
    assert words in capsys.readouterr().out


def test_nothing_but_json_files_of_others(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """They are no set, and do not hide one of class folders."""
    (tmp_path / "package.json").write_text(json.dumps(STRAYS["package.json"]))
    assert check(tmp_path) == 2
    error = capsys.readouterr().err
    assert "holds neither COCO files" in error
    assert "package.json" in error
    assert len(error.strip().splitlines()) <= 2
    for number, name in enumerate(("train/a/1", "train/b/1")):
        paint(tmp_path / f"{name}.png", number)
    assert check(tmp_path) == 0
    assert "package.json is left out" in capsys.readouterr().out


def test_a_file_that_cannot_be_used(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "x.json").write_text("{}")
    assert check(tmp_path / "x.json") == 1
    assert "has no 'images'" in capsys.readouterr().out


def test_categories_of_two_files_disagree(clean: Any, capsys: pytest.CaptureFixture[str]) -> None:
    root, train, val = clean
    val["categories"][0]["name"] = "other"
    write(root, "train", train)
    write(root, "val", val)
    assert check(root) == 1
    assert "disagree" in capsys.readouterr().out


def test_no_images_at_all(clean: Any, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    root, train, _ = clean
    assert check(write(root, "train", train), "--images", tmp_path / "none") == 1
    assert "no image folder" in capsys.readouterr().out


@pytest.fixture
def classes(tmp_path: Path) -> Path:
    root = tmp_path / "classes"
    for number, name in enumerate(("train/a/1", "train/a/2", "train/b/1", "val/a/1", "val/b/1")):
        paint(root / f"{name}.png", number)
    return root


def test_class_folders(classes: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (classes / "train" / "a" / ".ipynb_checkpoints").mkdir()  # training does not look there either
    shutil.copy(classes / "train" / "a" / "1.png", classes / "train" / "a" / ".ipynb_checkpoints" / "1-checkpoint.png")
    assert check(classes) == 0
    assert check(classes / "train") == 0
    (classes / "train" / "c").mkdir()
    (classes / "train" / "a" / "notes.txt").write_text("")
    (classes / "train" / "b" / "2.png").write_text("no image")
    shutil.copy(classes / "train" / "a" / "1.png", classes / "train" / "b" / "3.png")
    shutil.copy(classes / "train" / "a" / "2.png", classes / "val" / "a" / "9.png")
    paint(classes / "val" / "z" / "1.png", 70)
    capsys.readouterr()
    assert check(classes, "--json", "-") == 1
    captured = capsys.readouterr()
    found = {f["kind"].split(",")[0]: f for part in json.loads(captured.out)["parts"] for f in part["findings"]}
    assert set(found) == {
        "class folders without images",
        "images that cannot be read",
        "files that are no images",
        "images that are in several classes",
        "images that repeat another one of the same file",
        "images that are in val too",
        "classes that no training image has",
    }
    assert found["classes that no training image has"]["ids"] == ["z"]
    assert found["images that are in val too"]["repair"] == "all are kept"  # training does not compare class folders
    assert "kinds of mistakes" in captured.err


def test_a_folder_of_hidden_images_alone_is_none(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    paint(tmp_path / "a" / ".ipynb_checkpoints" / "1-checkpoint.png", 1)
    paint(tmp_path / "b" / "._1.png", 2)
    assert check(tmp_path) == 2
    assert "holds neither COCO files" in capsys.readouterr().err


def test_wrong_calls(tmp_path: Path, clean: Any, capsys: pytest.CaptureFixture[str]) -> None:
    root, train, val = clean
    write(root, "train", train)
    write(root, "val", val)
    assert check(tmp_path / "none") == 2
    (tmp_path / "empty").mkdir()
    assert check(tmp_path / "empty") == 2
    assert check(root, "--images", root / "train") == 2
    assert check() == 2
    assert len(capsys.readouterr().err.splitlines()) <= 8


def test_real_sets(data_root: Path) -> None:
    if not (data_root / "bccd").is_dir():
        pytest.skip(f"{data_root} holds no bccd")
    assert check(data_root / "bccd") == 0


@pytest.mark.parametrize("names", [("training", "validation"), ("val", "test"), ("train", "validation")])
def test_splits_by_another_name_are_no_classes(
    names: tuple[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for number, name in enumerate(names):
        paint(tmp_path / name / "cat" / "a.png", number)
    assert check(tmp_path) == 2
    error = capsys.readouterr().err
    assert f"{tmp_path}/train/<class>/<image>" in error
    assert len(error.strip().splitlines()) <= 2
