"""Annotation files: what is right is read as it is, what is wrong is an error or a counted repair."""

from __future__ import annotations

import copy
import json
import math
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image

from vision_attn.data.coco import read_coco
from vision_attn.data.coco_images import (
    compare_with_files,
    image_folder_of,
    look_at,
    shared_content,
    turn_boxes,
)
from vision_attn.data.coco_table import CERTAIN, choose_categories, drop_unchosen, fit_boxes, match_categories
from vision_attn.data.findings import Findings
from vision_attn.errors import UserError

CROWD, NO_CROWD = "whose 'iscrowd' is not written as 0 or 1", "whose 'iscrowd' says neither yes nor no"
CATEGORIES = [{"id": 9, "name": "cat", "supercategory": "animal"}, {"id": 4, "name": "dog"}]


def annotation(id: int, image: Any = 1, category: Any = 4, box: Any = (1.0, 2.0, 5.0, 7.0), **more: Any) -> dict:
    return {"id": id, "image_id": image, "category_id": category, "bbox": list(box), "iscrowd": 0, "area": 35.0, **more}


def image(id: Any, name: str | None = None, **more: Any) -> dict:
    return {"id": id, "file_name": name or f"{id}.png", "height": 20, "width": 30, **more}


def content(**more: Any) -> dict[str, Any]:
    return {
        "images": [image(5), image(1), image(3)],
        "annotations": [annotation(1), annotation(2, 5, 9), annotation(3, 1, 9, iscrowd=1)],
        "categories": copy.deepcopy(CATEGORIES),
        **more,
    }


def write(folder: Path, data: Any) -> Path:
    path = folder / "file.json"
    path.write_text(data if isinstance(data, str) else json.dumps(data))
    return path


def read(folder: Path, data: Any) -> tuple[Any, dict[str, Any]]:
    """The table, and the findings by kind."""
    findings = Findings()
    table = read_coco(write(folder, data), findings)
    return table, {finding.kind: finding for finding in findings.found}


def test_labels_are_contiguous_inside_and_ids_the_files_own_outside(tmp_path: Path) -> None:
    table, found = read(tmp_path, content())
    assert not found
    assert (table.labels, table.category_ids) == (["dog", "cat"], [4, 9])
    assert table.image_ids.tolist() == [5, 1, 3]
    assert table.image.tolist() == [0, 1, 1]
    assert table.label.tolist() == [1, 0, 1]
    assert table.crowd.tolist() == [False, False, True]
    assert table.annotation_ids.tolist() == [2, 1, 3]


def test_back_to_coco_with_the_files_ids(tmp_path: Path) -> None:
    data = content()
    back = read(tmp_path, data)[0].to_coco()
    assert sorted(back["annotations"], key=lambda row: row["id"]) == data["annotations"]
    assert back["images"] == data["images"]
    assert {row["id"]: row["name"] for row in back["categories"]} == {4: "dog", 9: "cat"}
    part = read(tmp_path, data)[0].take(np.array([1]))
    assert [row["id"] for row in part.to_coco()["annotations"]] == [1, 3]
    assert [row["id"] for row in part.to_coco()["images"]] == [1]


@pytest.mark.parametrize(
    ("data", "words"),
    [
        ("{", "not a JSON file"),
        ("[1, 2]", "expected a dictionary"),
        ({"images": [], "categories": []}, "has no 'annotations'"),
        (content(images={}), "'images' is a dict"),
        (content(images=[]), "has no images"),
        (content(categories=[]), "has no categories"),
        (content(images=[image("a1")]), "without a whole number as 'id'.*'a1'"),
        (content(images=[{"id": 1, "height": 3, "width": 3}]), "without a 'file_name'.*image 1"),
        (content(images=[image(1), image(1, "other.png")]), "given to two files"),
        (content(images=[image(1, "a.png"), image(2, "a.png")]), "share their file"),
        (content(annotations=[annotation(1, category=77)]), "does not list.*77"),
        (content(annotations=[annotation(1, category=None)]), "'category_id'"),
        (content(annotations=[3]), "annotations without"),
        (content(categories=[*CATEGORIES, {"id": 4, "name": "bird"}]), "two names"),
    ],
)
def test_what_cannot_be_repaired(tmp_path: Path, data: Any, words: str) -> None:
    with pytest.raises(UserError, match=words) as caught:
        read(tmp_path, data)
    assert "file.json" in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1


def test_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no annotation file"):
        read_coco(tmp_path / "none.json")
    with pytest.raises(UserError, match="Cannot read"):
        read_coco(tmp_path)


@pytest.mark.parametrize(
    ("data", "kind", "count", "left"),
    [
        (content(annotations=[annotation(1, box=(1, 2, 0, 5)), annotation(2)]), "width or height is not above 0", 1, 1),
        (
            content(annotations=[annotation(1, box=(1, 2, -3, 5)), annotation(2)]),
            "width or height is not above 0",
            1,
            1,
        ),
        (content(annotations=[annotation(1, box=(1, math.nan, 3, 5))]), "NaN or infinite", 1, 0),
        (content(annotations=[annotation(1, box=(1, 2, 3, math.inf))]), "NaN or infinite", 1, 0),
        (content(annotations=[annotation(1, box=(1, 2, 3)), annotation(2, box="ab")]), "without a box", 2, 0),
        (content(annotations=[annotation(1, 99), annotation(2)]), "images that the file does not list", 1, 1),
        (content(annotations=[annotation(1, "1"), annotation(2, 1.0)]), "'image_id' is not written", 2, 2),
        (content(annotations=[annotation(1, category="4")]), "'category_id' is not written", 1, 1),
        (content(annotations=[annotation(1), annotation(1)]), "annotation ids given twice", 1, 2),
        (content(annotations=[annotation(0), annotation(1)]), "without an id of at least 1", 1, 2),
        (content(annotations=[annotation(1, area=None), annotation(2, area=-1)]), "without an area", 2, 2),
        (content(annotations=[annotation(n, iscrowd=v) for n, v in enumerate((2, "true", "1", "0"), 1)]), CROWD, 4, 4),
        (content(annotations=[annotation(n, iscrowd=v) for n, v in enumerate(("x", [], {}), 1)]), NO_CROWD, 3, 3),
        (content(annotations=[annotation(1, iscrowd=math.nan), annotation(2, iscrowd=None)]), NO_CROWD, 2, 2),
        (content(images=[image(1), image(1), image(5)]), "images listed twice", 1, 3),
        (content(images=[{"id": 1, "file_name": "x"}, image(5)]), "without height and width", 1, 3),
        (content(categories=[*CATEGORIES, CATEGORIES[0]]), "categories given twice", 1, 3),
        (content(categories=[{"id": 9}, CATEGORIES[1]]), "categories without a name", 1, 3),
        (content(categories=[{"id": 9, "name": "dog"}, CATEGORIES[1]]), "share their name", 2, 3),
    ],
)
def test_repairs_are_counted(tmp_path: Path, data: Any, kind: str, count: int, left: int) -> None:
    table, found = read(tmp_path, data)
    (match,) = [finding for name, finding in found.items() if kind in name]
    assert match.count == count
    assert match.repair
    assert len(table.boxes) == left
    assert len(set(table.annotation_ids.tolist())) == left
    assert len(set(table.labels)) == len(table.labels)


def test_crowds_are_those_that_the_evaluator_takes_for_crowds(tmp_path: Path) -> None:
    """pycocotools takes every number but 0 for yes; words are read as they are meant."""
    said = [0, 1, False, True, 1.0, 0.0, 2, -1, "1", "0", "true", "False", " yes ", "no", "x", None, [1]]
    expected = [0, 1, 0, 1, 1, 0, 1, 1, 1, 0, 1, 0, 1, 0, 0, 0, 0]
    rows = [annotation(n, iscrowd=value) for n, value in enumerate(said, 1)]
    rows.append({key: value for key, value in annotation(99).items() if key != "iscrowd"})  # as many exporters write it
    table, found = read(tmp_path, content(annotations=rows))
    assert table.crowd.astype(int).tolist() == [*expected, 0]
    assert found["annotations " + CROWD].count == 8
    assert found["annotations " + NO_CROWD].count == 3


def test_repairs_are_one_warning_with_ids(tmp_path: Path) -> None:
    findings = Findings()
    read_coco(write(tmp_path, content(annotations=[annotation(n, box=(1, 2, 0, 5)) for n in range(1, 9)])), findings)
    with pytest.warns(
        UserWarning, match=r"8 boxes whose width or height is not above 0 \(image 1\): left out"
    ) as caught:
        findings.warn()
    assert len(caught) == 1


def test_boxes_and_image_borders(tmp_path: Path) -> None:
    boxes = [(-0.4, 0, 5, 5), (25, 15, 10, 10), (40, 1, 5, 5), (3, 3, 4, 4)]
    table, _ = read(tmp_path, content(annotations=[annotation(n + 1, box=box) for n, box in enumerate(boxes)]))
    findings = Findings()
    kept, cut = fit_boxes(table, findings)
    assert [(f.count, f.repair.split()[0]) for f in findings.found] == [(1, "left"), (1, "cut")]
    assert kept.boxes.tolist() == [list(map(float, boxes[n])) for n in (0, 1, 3)]  # evaluation: as written
    assert cut.tolist() == [[0, 0, 4.6, 5], [25, 15, 30, 20], [3, 3, 7, 7]]


@pytest.mark.parametrize(
    ("boxes", "words"),
    [
        ([(0.1, 0.2, 0.3, 0.4)] * 3, "between 0 and 1"),
        ([(10.0, 10.0, 25.0, 19.0)] * 30, "two corners"),
    ],
)
def test_boxes_in_other_formats(tmp_path: Path, boxes: list[tuple], words: str) -> None:
    table, _ = read(tmp_path, content(annotations=[annotation(n + 1, box=box) for n, box in enumerate(boxes)]))
    with pytest.raises(UserError, match=words):
        fit_boxes(table, Findings())


CORNERS, SHARES, CORNER_PIXEL = (10.0, 10.0, 25.0, 19.0), (0.1, 0.2, 0.3, 0.4), (0.0, 0.0, 1.0, 1.0)


@pytest.mark.parametrize("count", [1, 4, CERTAIN - 1, CERTAIN, 3 * CERTAIN])
@pytest.mark.parametrize(
    ("box", "surely", "words"),
    [(CORNERS, False, "two corners"), (SHARES, True, "shares"), (CORNER_PIXEL, False, "shares")],
)
def test_no_number_of_boxes_in_another_format_passes_silently(
    tmp_path: Path, box: tuple, surely: bool, words: str, count: int
) -> None:
    """Many are refused; a few that may be meant as they stand are counted, with the ids of their images."""
    table, _ = read(tmp_path, content(annotations=[annotation(n + 1, box=box) for n in range(count)]))
    findings = Findings()
    if surely or count >= CERTAIN:
        with pytest.raises(UserError, match=words):
            fit_boxes(table, findings)
        return
    kept, _ = fit_boxes(table, findings)
    (doubt,) = [finding for finding in findings.found if "look like" in finding.kind]
    assert words in doubt.kind
    assert (doubt.count, set(doubt.ids)) == (count, {1})
    assert len(kept.boxes) == count


def test_categories_are_chosen_and_matched(tmp_path: Path) -> None:
    table, _ = read(tmp_path, content())
    one = choose_categories(table, ["cat"])
    assert (one.labels, one.category_ids, one.label.tolist(), len(one)) == (["cat"], [9], [0, 0], 3)
    assert choose_categories(table, ["9", "dog"]).labels == ["dog", "cat"]
    with pytest.raises(UserError, match="Did you mean cat"):
        choose_categories(table, ["kat"])
    with pytest.raises(UserError, match="empty"):
        choose_categories(table, [])
    other, _ = read(tmp_path, content(categories=CATEGORIES[:1], annotations=[annotation(1, 5, 9)]))
    matched = match_categories(other, table)
    assert (matched.labels, matched.label.tolist()) == (["dog", "cat"], [1])
    with pytest.raises(UserError, match="cannot find it"):
        match_categories(table, other)
    renamed, _ = read(tmp_path, content(categories=[{"id": 9, "name": "lion"}, CATEGORIES[1]]))
    with pytest.raises(UserError, match="disagree"):
        match_categories(renamed, table)


def named(folder: Path, names: dict[int, str]) -> Any:
    """A table with one box of each of these categories."""
    rows = [annotation(number, category=number) for number in names]
    data = content(annotations=rows, categories=[{"id": number, "name": name} for number, name in names.items()])
    return read(folder, data)[0]


@pytest.mark.parametrize("names", [{n + 1: str(n) for n in range(10)}, {1: "2", 2: "cat", 10: "1"}, {5: "7", 6: "7"}])
def test_a_number_never_means_a_name_or_an_id_by_chance(tmp_path: Path, names: dict[int, str]) -> None:
    """Where names are numbers a name is a name, whatever ids there are, and an id is refused with what to write."""
    table = named(tmp_path, names)
    for number, label in zip(table.category_ids, table.labels, strict=True):
        assert choose_categories(table, [label]).category_ids == [number]
        if str(number) not in table.labels:
            with pytest.raises(UserError, match="takes no ids") as caught:
                choose_categories(table, [table.labels[0], str(number)])
            assert repr(label) in str(caught.value)


@pytest.mark.parametrize("listed", [[1], [2], [4], [1, 2], [2, 4], [1, 2, 4]])
def test_equal_names_agree_whatever_else_a_file_lists(tmp_path: Path, listed: list[int]) -> None:
    names = {1: "a", 2: "a", 4: "b"}
    train, val = named(tmp_path, names), named(tmp_path, {number: names[number] for number in listed})
    matched = match_categories(val, train)
    assert matched.labels == train.labels == ["a (1)", "a (2)", "b"]
    assert [row["category_id"] for row in matched.to_coco()["annotations"]] == listed
    with pytest.raises(UserError, match=r"Category 2 is 'b' in .* but 'a' in .*disagree"):
        match_categories(named(tmp_path, {1: "a", 2: "b"}), train)
    with pytest.raises(UserError, match=r"category 2 \(a\).*cannot find it"):
        match_categories(train, named(tmp_path, {1: "a", 4: "b"}))
    chosen = choose_categories(train, ["a (1)"])
    part = drop_unchosen(val, chosen, dict(names))
    assert match_categories(part, chosen).labels == ["a (1)"]
    assert len(part.boxes) == (1 in listed)


# -- the image files ----------------------------------------------------------------------------------


def picture(mode: str = "RGB", size: tuple[int, int] = (30, 20)) -> Image.Image:
    values = np.random.default_rng(0).integers(0, 255, (size[1], size[0], 3), dtype=np.uint8)
    if mode == "I;16":
        return Image.fromarray(values[..., 0].astype(np.uint16) * 257)
    return Image.fromarray(values).convert(mode)


def compare(folder: Path, data: Any, **options: Any) -> tuple[Any, Findings]:
    findings = Findings()
    table = read_coco(write(folder, data), findings)
    return compare_with_files(table, folder, findings, **options), findings


@pytest.mark.parametrize(
    ("mode", "suffix"), [("L", "png"), ("RGBA", "png"), ("I;16", "png"), ("CMYK", "jpg"), ("P", "gif"), ("1", "png")]
)
def test_every_kind_of_image(tmp_path: Path, mode: str, suffix: str) -> None:
    picture(mode).save(tmp_path / f"1.{suffix}")
    (_, paths, sizes, rows), _ = compare(tmp_path, content(images=[image(1, f"1.{suffix}")]))
    assert sizes.tolist() == [[20, 30]]
    assert rows.tolist() == [0]
    from vision_attn.data.pixels import load

    assert load(paths[0], (10, 15)).shape == (3, 10, 15)


def test_missing_broken_and_foreign_files(tmp_path: Path) -> None:
    names = ["1.png", "cut.jpg", "cut.png", "word.jpg", "none.png"]
    picture().save(tmp_path / names[0])
    for name in names[1:3]:
        picture(size=(300, 200)).save(tmp_path / name)
        whole = (tmp_path / name).read_bytes()
        (tmp_path / name).write_bytes(whole[: len(whole) // 2])
    (tmp_path / names[3]).write_text("no image")
    data = content(images=[image(n + 1, name) for n, name in enumerate(names)])
    with pytest.raises(UserError, match=r"1 images missing in .*none\.png"):
        compare(tmp_path, data)
    with pytest.raises(UserError, match=r"3 images that cannot be read.*skip_bad_images"):
        compare(tmp_path, {**data, "images": data["images"][:4]})
    (table, paths, _, rows), findings = compare(tmp_path, data, skip_bad=True)
    assert rows.tolist() == [0]
    assert sum(finding.count for finding in findings.found if finding.of == "file") == 4
    assert len(paths) == len(table) == 1
    with pytest.raises(UserError, match="none of its 1 images"):
        compare(tmp_path, {**data, "images": data["images"][4:], "annotations": []}, skip_bad=True)


def test_a_jpeg_with_bytes_behind_its_end_is_whole(tmp_path: Path) -> None:
    picture().save(tmp_path / "1.jpg")
    path = tmp_path / "1.jpg"
    path.write_bytes(path.read_bytes() + b"\0" * 9000)
    assert look_at(str(path)).error is None


INK = (8.0, 2.0, 10.0, 6.0)  # left, top, width, height of a white rectangle in the pixels as stored


def paint_turned(path: Path, orientation: int, size: tuple[int, int] = (20, 30)) -> None:
    """An image of this stored height and width with INK, turned by its EXIF tag."""
    left, top, width, height = map(int, INK)
    pixels = np.zeros((*size, 3), dtype=np.uint8)
    pixels[top : top + height, left : left + width] = 255
    exif = Image.Exif()
    exif[0x0112] = orientation
    Image.fromarray(pixels).save(path, exif=exif)


def ink(path: str, size: list[int]) -> list[int]:
    """Left, top, width, height of what is white in the image as models see it."""
    from vision_attn.data.pixels import load

    rows, columns = np.nonzero(load(path, size)[0].numpy() > 127)
    return [columns.min(), rows.min(), np.ptp(columns) + 1, np.ptp(rows) + 1]


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("suffix", ["jpg", "png"])
def test_exif_turns_images_and_boxes(tmp_path: Path, orientation: int, suffix: str) -> None:
    paint_turned(tmp_path / f"1.{suffix}", orientation)
    # the file says the size before the turn: so its boxes are those of the stored pixels
    data = content(images=[image(1, f"1.{suffix}")], annotations=[annotation(1, box=INK)])
    (table, paths, sizes, _), findings = compare(tmp_path, data)
    assert tuple(sizes[0]) == tuple(table.sizes[0]) == ((30, 20) if orientation >= 5 else (20, 30))
    if orientation >= 5:
        assert "EXIF" in findings.found[0].kind
        np.testing.assert_array_equal(table.boxes[0], ink(paths[0], sizes[0].tolist()))
        # the size after the turn: boxes are those of the image as shown, and stay
        data["images"][0].update(height=30, width=20)
        (table, *_), findings = compare(tmp_path, data)
        assert not findings.found
        assert table.boxes[0].tolist() == list(INK)
    elif orientation == 1:
        assert not findings.found
    else:  # the same size before and after
        assert [(f.kind, f.ids) for f in findings.found] == [(UNSURE, [1])]
        assert table.boxes[0].tolist() == list(INK)


UNSURE = "images whose EXIF turn their size cannot confirm"
SAME_SIZE = [(n, (20, 20)) for n in range(2, 9)] + [(n, (20, 30)) for n in (2, 3, 4)]


@pytest.mark.parametrize("others", [(), ("stored",), ("shown",), ("stored", "shown"), ("stored", "stored", "upright")])
@pytest.mark.parametrize("said", ["whole", "half", "nothing"])
@pytest.mark.parametrize(("orientation", "size"), [*SAME_SIZE, (6, (20, 30)), (7, (20, 30))])
def test_a_turn_that_the_size_does_not_show_is_that_of_the_other_images(
    tmp_path: Path, orientation: int, size: tuple[int, int], said: str, others: tuple[str, ...]
) -> None:
    """A box lies on the ink, or is as written and reported; where others say that it is as shown, there is no word."""
    if (orientation, size) not in SAME_SIZE and said != "nothing":
        return  # the size tells
    paint_turned(tmp_path / "1.png", orientation, size)
    share = 0.5 if said == "half" else 1.0
    about = {"height": int(size[0] * share), "width": int(size[1] * share)}
    images = [{"id": 1, "file_name": "1.png", **(about if said != "nothing" else {})}]
    for number, kind in enumerate(others, 2):
        paint_turned(tmp_path / f"{number}.png", 1 if kind == "upright" else 6)
        height, width = (30, 20) if kind == "shown" else (20, 30)
        images.append(image(number, f"{number}.png", height=height, width=width))
    box = [value * share for value in INK]
    data = content(images=images, annotations=[annotation(1, box=box)])
    (table, paths, sizes, _), findings = compare(tmp_path, data)
    found = {finding.kind: finding for finding in findings.found if "EXIF" in finding.kind}
    seen = set(others) - {"upright"}
    if seen == {"stored"}:
        np.testing.assert_array_equal(table.boxes[0] / share, ink(paths[0], sizes[0].tolist()))
        assert [finding.ids for kind, finding in found.items() if "others show" in kind] == [[1]]
    else:
        assert table.boxes[0].tolist() == box
        assert [finding.ids for finding in found.values() if finding.kind == UNSURE] == (
            [] if seen == {"shown"} else [[1]]
        )
    scale = 1 if said == "nothing" else share
    assert table.sizes[0].tolist() == (sizes[0] * scale).tolist()
    if seen == {"shown"}:
        assert not found


def test_a_turn_without_boxes_needs_no_word(tmp_path: Path) -> None:
    paint_turned(tmp_path / "1.png", 3)
    _, findings = compare(tmp_path, content(images=[image(1)], annotations=[]))
    assert not findings.found


@given(st.integers(1, 8), st.integers(0, 20), st.integers(0, 10))
def test_boxes_turn_inside_the_image(orientation: int, x: int, y: int) -> None:
    turned = turn_boxes(np.array([[x, y, 7.0, 9.0]]), (19, 27), orientation)[0]
    swapped = orientation >= 5
    assert turned[2:].tolist() == ([9, 7] if swapped else [7, 9])
    assert 0 <= turned[0] <= (10 if swapped else 20)
    assert 0 <= turned[1] <= (20 if swapped else 10)


@pytest.mark.parametrize(("size", "fine"), [((60, 40), True), ((15, 10), True), ((33, 20), False), ((20, 20), False)])
def test_sizes_that_differ_from_the_file(tmp_path: Path, size: tuple[int, int], fine: bool) -> None:
    picture(size=size).save(tmp_path / "1.png")
    data = content(images=[image(1)], annotations=[annotation(1)])
    if not fine:
        with pytest.raises(UserError, match=rf"1: 30×20 said, {size[0]}×{size[1]} found"):
            compare(tmp_path, data)
        return
    (table, _, sizes, _), findings = compare(tmp_path, data)
    assert "in proportion" in findings.found[0].kind
    assert table.sizes.tolist() == [[20, 30]]  # boxes, and so results, stay in the file's pixels
    assert sizes.tolist() == [[size[1], size[0]]]


def test_a_size_that_the_file_lacks_is_the_images(tmp_path: Path) -> None:
    picture().save(tmp_path / "1.png")
    (table, *_), _ = compare(tmp_path, content(images=[{"id": 1, "file_name": "1.png"}]))
    assert table.sizes.tolist() == [[20, 30]]


def test_folders_are_found(tmp_path: Path) -> None:
    assert image_folder_of(tmp_path, tmp_path / "a" / "x.json") == tmp_path / "a"
    (tmp_path / "images" / "val").mkdir(parents=True)
    assert image_folder_of(tmp_path, tmp_path / "a" / "instances_val.json") == tmp_path / "images" / "val"
    assert image_folder_of(tmp_path, tmp_path / "a" / "x.json") == tmp_path / "images"
    (tmp_path / "val").mkdir()
    assert image_folder_of(tmp_path, tmp_path / "a" / "instances_val.json") == tmp_path / "val"


def test_names_may_repeat_the_folder(tmp_path: Path) -> None:
    (tmp_path / "val").mkdir()
    picture().save(tmp_path / "val" / "1.png")
    findings = Findings()
    table = read_coco(write(tmp_path, content(images=[image(1, "val/1.png")])), findings)
    assert len(compare_with_files(table, tmp_path / "val", findings)[0]) == 1


def test_shared_content_whatever_the_names(tmp_path: Path) -> None:
    for name, text in {"a": "one", "b": "two", "c": "two", "d": "six", "e": "seven"}.items():
        (tmp_path / name).write_text(text)
    paths = {name: str(tmp_path / name) for name in "abcde"}
    assert shared_content([paths["a"], paths["b"]], [paths["e"], paths["c"], paths["d"], "none"]) == [(1, 1)]


# -- any file at all ----------------------------------------------------------------------------------

NUMBERS = st.one_of(
    st.integers(-3, 40), st.floats(allow_nan=True, allow_infinity=True), st.none(), st.text(max_size=3), st.just("7")
)
VALUES = st.one_of(NUMBERS, st.lists(NUMBERS, max_size=5), st.just({}), st.booleans(), st.just(10**400))


@st.composite
def spoilt(draw: st.DrawFn) -> Any:
    """A valid file with up to four entries removed, replaced or repeated."""
    data = content(
        images=[image(n) for n in range(1, draw(st.integers(1, 4)) + 1)],
        annotations=[annotation(n, draw(st.integers(1, 4)), draw(st.sampled_from([4, 9]))) for n in range(1, 6)],
    )
    for _ in range(draw(st.integers(0, 4))):
        rows = data[draw(st.sampled_from(["images", "annotations", "categories"]))]
        if not isinstance(rows, list) or not rows:
            continue
        row = draw(st.integers(0, len(rows) - 1))
        action = draw(st.sampled_from(["drop key", "set key", "set row", "repeat", "drop list"]))
        if action == "repeat":
            rows.append(copy.deepcopy(rows[row]))
        elif action == "set row":
            rows[row] = draw(VALUES)
        elif action == "drop list":
            rows.clear()
        elif isinstance(rows[row], dict) and rows[row]:
            name = draw(st.sampled_from(sorted(rows[row])))
            rows[row].pop(name)
            if action == "set key":
                rows[row][name] = draw(VALUES)
    return data


@given(spoilt())
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_file_gives_an_error_or_a_consistent_table(tmp_path: Path, data: Any) -> None:
    def left_out(findings: Findings) -> int:
        return sum(finding.count for finding in findings.found if finding.repair == "left out")

    first, second = Findings(), Findings()
    try:
        table = read_coco(write(tmp_path, data), first)
        sized = table.take(np.flatnonzero(table.sizes.all(1)))
        fitted, cut = fit_boxes(sized, second)
    except UserError:
        return
    # nothing vanishes without a word
    assert len(table.boxes) + left_out(first) == len(data["annotations"])
    assert len(fitted.boxes) + left_out(second) == len(sized.boxes)
    assert np.isfinite(fitted.boxes).all()
    assert (cut[:, 2:] > cut[:, :2]).all()
    assert (fitted.boxes[:, 2:] > 0).all()
    assert len(set(table.image_ids.tolist())) == len(table) > 0
    assert len(set(table.annotation_ids.tolist())) == len(table.annotation_ids)
    if len(table.label):
        assert 0 <= table.label.min() <= table.label.max() < len(table.labels)
        assert table.image.max() < len(table)
    json.dumps(table.to_coco())


@given(spoilt())
@settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_collecting_never_raises_more_than_reading(tmp_path: Path, data: Any) -> None:
    findings = Findings(strict=False)
    path = write(tmp_path, data)
    table = findings.attempt(path, lambda: read_coco(path, findings))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        if table is None:
            assert findings.found
        else:
            table.to_coco()
