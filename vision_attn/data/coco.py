"""COCO annotation files: read, checked, and turned into tables (Lin et al. 2014, arXiv 1405.0312).

Labels are contiguous inside (0 ... classes - 1, in ascending order of the file's category ids); the file's own ids of
categories, images and annotations are kept beside them. Nothing that is wrong passes silently: a repair is counted
and reported with ids, and what cannot be repaired is a UserError.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np

from vision_attn.data.coco_table import CocoTable
from vision_attn.data.findings import Findings
from vision_attn.errors import UserError

KEYS = ("images", "annotations", "categories")  # what a file holds
_LARGEST_ID = 2**63 - 1
_WORDS = {"1": True, "true": True, "yes": True, "0": False, "false": False, "no": False}  # for a crowd
_CONVERTED, _NO_CROWD = "converted", "taken for no crowd"


def read_coco(path: str | Path, findings: Findings | None = None) -> CocoTable:
    """Read and check an annotation file; the images themselves are not looked at.

    Args:
        path: of the JSON file.
        findings: collects repairs; strict by default.

    Returns:
        The table. Boxes are finite and have positive sides; they may stick out of the image.

    Raises:
        UserError: the file is missing or no JSON, lacks ``images``, ``annotations`` or ``categories``, has no image or
            no category, or contradicts itself (see the messages).
    """
    path = Path(path)
    findings = findings or Findings()
    content = _load(path)
    labels, names, category_ids, groups = _categories(content["categories"], path, findings)
    image_ids, files, sizes = _images(content["images"], path, findings)
    table = _annotations(content["annotations"], path, findings, image_ids, category_ids)
    return CocoTable(path, labels, names, category_ids, groups, image_ids, files, sizes, **table)


def _load(path: Path) -> dict[str, list[Any]]:
    try:
        with path.open("rb") as file:
            content = json.load(file)
    except FileNotFoundError:
        raise UserError(f"There is no annotation file {path}.") from None
    except OSError as error:
        raise UserError(f"Cannot read the annotation file {path}: {error.strerror or error}.") from error
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path} is not a JSON file: {error}.") from error
    if not isinstance(content, dict):
        raise UserError(f"{path}: expected a dictionary in COCO's layout, found a {type(content).__name__}.")
    for key in KEYS:
        if key not in content:
            raise UserError(f"{path} has no {key!r}: a COCO file has images, annotations and categories.")
        if not isinstance(content[key], list):
            raise UserError(f"{path}: {key!r} is a {type(content[key]).__name__}, expected a list.")
    return content


def as_id(value: Any) -> tuple[int | None, bool]:
    """An id as an int, and whether it had to be converted; None for what is no id."""
    if type(value) is int:
        return (value, False) if abs(value) <= _LARGEST_ID else (None, False)
    if isinstance(value, str):
        try:
            number = int(value.strip())
        except ValueError:
            return None, False
        return (number, True) if abs(number) <= _LARGEST_ID else (None, False)
    if isinstance(value, float) and value.is_integer() and abs(value) < 2**53:
        return int(value), True
    return None, False


def as_crowd(value: Any) -> tuple[bool, str]:
    """Whether ``iscrowd`` means a crowd, and what had to be done to it: ``""`` for a plain 0 or 1.

    pycocotools takes every number but 0 for a crowd.
    """
    if isinstance(value, (int, float)) and not math.isnan(value):
        return value != 0, "" if value in (0, 1) else _CONVERTED
    if isinstance(value, str) and value.strip().lower() in _WORDS:
        return _WORDS[value.strip().lower()], _CONVERTED
    return False, _NO_CROWD


def _ids(rows: list[Any], key: str, what: str, path: Path, findings: Findings) -> list[int | None]:
    """The ids of all rows; ids that are strings of digits are converted and counted, others are an error."""
    ids: list[int | None] = []
    converted, bad = [], []
    for place, row in enumerate(rows):
        value = row.get(key) if isinstance(row, dict) else None
        number, changed = as_id(value)
        ids.append(number)
        if number is None:
            bad.append(f"#{place} with {key} {value!r}" if isinstance(row, dict) else f"#{place}, {row!r:.40}")
        elif changed:
            converted.append(number)
    findings.fatal(f"{what} without a whole number as {key!r}", path, bad, "Give every one an integer.", of="entry")
    findings.repaired(f"{what} whose {key!r} is not written as a whole number", path, converted, "converted", of="id")
    return ids


def _categories(rows: list[Any], path: Path, findings: Findings) -> tuple[list[str], list[str], list[int], list[str]]:
    """Labels, names as written, ids and supercategories, in ascending order of the ids."""
    if not rows:
        raise UserError(f"{path} has no categories: there is nothing to detect.")
    ids = _ids(rows, "id", "categories", path, findings)
    names: dict[int, tuple[str, str]] = {}
    repeated: list[int] = []
    clashing: list[int] = []
    nameless: list[int] = []
    for number, row in zip(ids, rows, strict=True):
        if number is None:
            continue
        name = row.get("name")
        if not isinstance(name, str) or not name.strip():
            name = f"category {number}"
            nameless.append(number)
        if number in names:
            (repeated if names[number][0] == name else clashing).append(number)
            continue
        names[number] = (name, str(row.get("supercategory") or ""))
    findings.fatal("category ids with two names", path, clashing, "Give every category its own id.", of="category")
    findings.repaired("categories given twice", path, repeated, "taken once", of="category")
    findings.repaired("categories without a name", path, nameless, "called by their ids", of="category")
    if not names:
        raise UserError(f"{path} has no usable categories.")
    by_name: dict[str, list[int]] = {}
    for number, (name, _) in names.items():
        by_name.setdefault(name, []).append(number)
    twins = {number: name for name, numbers in by_name.items() if len(numbers) > 1 for number in numbers}
    findings.repaired(
        "categories that share their name with another", path, sorted(twins), "the id added to the name", of="category"
    )
    order = sorted(names)
    labels = [f"{names[number][0]} ({number})" if number in twins else names[number][0] for number in order]
    return labels, [names[number][0] for number in order], order, [names[number][1] for number in order]


def _images(rows: list[Any], path: Path, findings: Findings) -> tuple[np.ndarray, list[str], np.ndarray]:
    if not rows:
        raise UserError(f"{path} has no images.")
    ids = _ids(rows, "id", "images", path, findings)
    files: dict[int, str] = {}
    sizes: list[tuple[int, int]] = []
    repeated: list[int] = []
    clashing: list[int] = []
    nameless: list[int] = []
    sizeless: list[int] = []
    for number, row in zip(ids, rows, strict=True):
        if number is None:
            continue
        name = row.get("file_name")
        if not isinstance(name, str) or not name.strip() or "\0" in name:
            nameless.append(number)
            continue
        if number in files:
            (repeated if files[number] == name else clashing).append(number)
            continue
        files[number] = name
        size = (_side(row.get("height")), _side(row.get("width")))
        if not all(size):
            sizeless.append(number)
            size = (0, 0)
        sizes.append(size)
    advice = "Every image needs a file_name and an id of its own."
    findings.fatal("images without a 'file_name'", path, nameless, advice)
    findings.fatal("image ids given to two files", path, clashing, advice)
    findings.repaired("images listed twice", path, repeated, "taken once")
    findings.repaired("images without height and width", path, sizeless, "taken from the image file")
    by_file: dict[str, list[int]] = {}
    for number, name in files.items():
        by_file.setdefault(name, []).append(number)
    shared = [number for numbers in by_file.values() if len(numbers) > 1 for number in numbers]
    findings.fatal("image ids that share their file with another", path, shared, "Give every file one id.")
    if not files:
        raise UserError(f"{path} has no usable images.")
    return np.array(list(files), dtype=np.int64), list(files.values()), np.array(sizes, dtype=np.int64).reshape(-1, 2)


def _side(value: Any) -> int:
    """A height or width in pixels; 0 for what is none."""
    number, _ = as_id(value)
    return number if number is not None and 0 < number < 2**31 else 0


def _annotations(
    rows: list[Any], path: Path, findings: Findings, image_ids: np.ndarray, category_ids: list[int]
) -> dict[str, np.ndarray]:
    """The columns of all usable annotations, sorted by image."""
    images = _ids(rows, "image_id", "annotations", path, findings)
    categories = _ids(rows, "category_id", "annotations", path, findings)
    row_of = {number: row for row, number in enumerate(image_ids.tolist())}
    label_of = {number: label for label, number in enumerate(category_ids)}
    columns: list[tuple[int, int, list[float], bool, float, Any]] = []
    orphans, unknown, boxless, areas = [], [], [], []
    crowds: dict[str, list[int]] = {}
    for image, category, row in zip(images, categories, rows, strict=True):
        if image is None or category is None:
            continue
        if image not in row_of:
            orphans.append(image)
            continue
        if category not in label_of:
            unknown.append(category)
            continue
        box = _box(row.get("bbox"))
        if box is None:
            boxless.append(image)
            continue
        area = _number(row.get("area"))
        if not 0.0 <= area < math.inf:
            areas.append(image)
            area = box[2] * box[3]
        crowd, repair = as_crowd(row.get("iscrowd", 0))
        if repair:
            crowds.setdefault(repair, []).append(image)
        columns.append((row_of[image], label_of[category], box, crowd, area, row))
    findings.fatal(
        "annotations of categories that the file does not list",
        path,
        unknown,
        "List them or delete these.",
        of="category",
    )
    findings.repaired("annotations of images that the file does not list", path, orphans, "left out")
    findings.repaired("annotations without a box of four numbers", path, boxless, "left out")
    findings.repaired("annotations without an area", path, areas, "width × height of the box taken")
    unwritten, unclear = (crowds.get(repair, []) for repair in (_CONVERTED, _NO_CROWD))
    findings.repaired("annotations whose 'iscrowd' is not written as 0 or 1", path, unwritten, _CONVERTED)
    findings.repaired("annotations whose 'iscrowd' says neither yes nor no", path, unclear, _NO_CROWD)
    table = {
        "image": np.array([c[0] for c in columns], dtype=np.int64),
        "label": np.array([c[1] for c in columns], dtype=np.int64),
        "boxes": np.array([c[2] for c in columns], dtype=np.float64).reshape(-1, 4),
        "crowd": np.array([c[3] for c in columns], dtype=bool),
        "area": np.array([c[4] for c in columns], dtype=np.float64),
    }
    table["annotation_ids"] = _annotation_ids([c[5] for c in columns], path, findings)
    table = _without_degenerate(table, image_ids, path, findings)
    order = table["image"].argsort(kind="stable")
    return {name: column[order] for name, column in table.items()}


def _annotation_ids(rows: list[dict[str, Any]], path: Path, findings: Findings) -> np.ndarray:
    """Unique ids; where one is missing, repeated or no positive number, all are numbered anew.

    Evaluators look annotations up by id and take 0 for "no match".
    """
    ids = [as_id(row.get("id"))[0] for row in rows]
    seen: set[int] = set()
    missing, repeated = [], []
    for place, number in enumerate(ids):
        if number is None or number < 1:
            missing.append(f"#{place}" if number is None else number)
        elif number in seen:
            repeated.append(number)
        else:
            seen.add(number)
    findings.repaired("annotations without an id of at least 1", path, missing, "all numbered anew", of="annotation")
    findings.repaired("annotation ids given twice", path, repeated, "all numbered anew", of="annotation")
    if missing or repeated:
        return np.arange(1, len(ids) + 1, dtype=np.int64)
    return np.array(ids, dtype=np.int64)


def _without_degenerate(
    table: dict[str, np.ndarray], image_ids: np.ndarray, path: Path, findings: Findings
) -> dict[str, np.ndarray]:
    boxes = table["boxes"]
    finite = np.isfinite(boxes).all(1)
    positive = finite & (boxes[:, 2:] > 0).all(1)
    ids = image_ids[table["image"]]
    findings.repaired("boxes with NaN or infinite numbers", path, ids[~finite].tolist(), "left out")
    findings.repaired("boxes whose width or height is not above 0", path, ids[finite & ~positive].tolist(), "left out")
    return {name: column[positive] for name, column in table.items()}


def _number(value: Any) -> float:
    try:
        return float(value) if not isinstance(value, bool) else math.nan
    except (TypeError, ValueError, OverflowError):
        return math.nan


def _box(value: Any) -> list[float] | None:
    """Four floats, or None; numbers written as strings pass, words do not."""
    if not isinstance(value, (list, tuple)) or len(value) != 4:
        return None
    try:
        return [float(number) for number in value]
    except (TypeError, ValueError, OverflowError):
        return None
