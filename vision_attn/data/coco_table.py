"""Images and boxes of one annotation file as arrays: parts of them, their categories, and boxes beside image sizes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from vision_attn.data.findings import Findings
from vision_attn.errors import UserError, closest

OUTSIDE = 1.0  # pixels that a box may stick out by rounding before it is worth a word
CERTAIN = 20  # boxes that are not all of another format by chance


@dataclass
class CocoTable:
    """One annotation file as arrays, annotations sorted by image.

    Attributes:
        path: the file.
        labels: class names, one for each contiguous label, no two alike.
        names: of the same classes as written in the file, where some may be alike.
        category_ids: the file's id of each label.
        supercategories: of each label; ``""`` where the file has none.
        image_ids: (N,) int64, in the file's order.
        files: N file names as written in the file.
        sizes: (N, 2) int64, height and width that boxes are measured in; 0 where the file has none.
        image: (T,) int64, the row of each annotation's image, ascending.
        label: (T,) int64, contiguous.
        boxes: (T, 4) float64, left, top, width, height in pixels, as written in the file.
        crowd: (T,) bool.
        area: (T,) float64, of the object, not of the box, where the file knows it.
        annotation_ids: (T,) int64.
    """

    path: Path
    labels: list[str]
    names: list[str]
    category_ids: list[int]
    supercategories: list[str]
    image_ids: np.ndarray
    files: list[str]
    sizes: np.ndarray
    image: np.ndarray
    label: np.ndarray
    boxes: np.ndarray
    crowd: np.ndarray
    area: np.ndarray
    annotation_ids: np.ndarray

    def __len__(self) -> int:
        return len(self.image_ids)

    def keep(self, chosen: np.ndarray) -> CocoTable:
        """Without the annotations where ``chosen``, (T,) bool, is False."""
        if chosen.all():
            return self
        names = ("image", "label", "boxes", "crowd", "area", "annotation_ids")
        return replace(self, **{name: getattr(self, name)[chosen] for name in names})

    def take(self, rows: np.ndarray) -> CocoTable:
        """The images at ``rows`` (ascending) with their annotations."""
        place = np.full(len(self), -1)
        place[rows] = np.arange(len(rows))
        part = self.keep(place[self.image] >= 0)
        return replace(
            part,
            image_ids=self.image_ids[rows],
            files=[self.files[row] for row in rows],
            sizes=self.sizes[rows],
            image=place[part.image],
        )

    def to_coco(self) -> dict[str, Any]:
        """A COCO dictionary with the file's own ids, crowds included: the ground truth of an evaluation."""
        images = [
            {"id": int(i), "file_name": name, "height": int(h), "width": int(w)}
            for i, name, (h, w) in zip(self.image_ids, self.files, self.sizes, strict=True)
        ]
        category = np.asarray(self.category_ids, dtype=np.int64)
        columns = (
            self.annotation_ids.tolist(),
            self.image_ids[self.image].tolist(),
            category[self.label].tolist() if len(self.label) else [],
            self.boxes.tolist(),
            self.area.tolist(),
            self.crowd.astype(int).tolist(),
        )
        names = ("id", "image_id", "category_id", "bbox", "area", "iscrowd")
        annotations = [dict(zip(names, row, strict=True)) for row in zip(*columns, strict=True)]
        rows = zip(self.category_ids, self.labels, self.supercategories, strict=True)
        categories = [{"id": id, "name": name, "supercategory": group} for id, name, group in rows]
        return {"images": images, "annotations": annotations, "categories": categories}


def fit_boxes(table: CocoTable, findings: Findings) -> tuple[CocoTable, np.ndarray]:
    """Compare the boxes with the images.

    Args:
        table: with a size for every image.
        findings: collects boxes that lie outside (left out) or stick out by more than a pixel (cut for training).

    Returns:
        The table without boxes that lie outside their image, and (T, 4) float64 left, top, right, bottom cut to it.
    """
    size = table.sizes[table.image].astype(np.float64)  # (T, 2)
    corners = np.concatenate([table.boxes[:, :2], table.boxes[:, :2] + table.boxes[:, 2:]], 1)
    limit = size[:, ::-1]
    cut = np.concatenate([corners[:, :2].clip(0.0, limit), corners[:, 2:].clip(0.0, limit)], 1)
    inside = (cut[:, 2:] - cut[:, :2] > 0).all(1)
    stick_out = inside & (np.abs(cut - corners) > OUTSIDE).any(1)
    ids = table.image_ids[table.image]
    _doubt_other_formats(table, corners, size, findings)
    findings.repaired("boxes outside their image", table.path, ids[~inside].tolist(), "left out")
    findings.repaired(
        f"boxes that stick out of their image by more than {OUTSIDE:g} px",
        table.path,
        ids[stick_out].tolist(),
        "cut to the image in training, as written in evaluation",
    )
    return table.keep(inside), cut[inside]


def _doubt_other_formats(table: CocoTable, corners: np.ndarray, size: np.ndarray, findings: Findings) -> None:
    """Boxes in shares of the image, or as two corners, train a model of nonsense: better to say so.

    Many of them are refused; a few may be so by chance, and get a word.
    """
    if len(corners) == 0:
        return
    advice = "COCO boxes are left, top, width, height in pixels."
    doubt = "taken for left, top, width, height in pixels, as COCO has them; look at them before you train"
    ids, certain = table.image_ids[table.image], len(corners) >= CERTAIN
    if (table.boxes <= 1.0).all() and (size > 8).all():
        # a box of one pixel in the corner, 0, 0, 1, 1, is written like a whole image in shares
        if certain or (table.boxes % 1.0 != 0.0).any():
            kind = "all boxes lie between 0 and 1, as if they were shares of the image"
            findings.fatal(kind, table.path, [], advice, of="")
        else:
            findings.repaired("boxes that look like shares of the image", table.path, ids.tolist(), doubt)
    far = (corners[:, 2:] > size[:, ::-1] + OUTSIDE).any(1)
    as_corners = (table.boxes[:, 2:] > table.boxes[:, :2]).all(1) & (table.boxes[:, 2:] <= size[:, ::-1] + 1).all(1)
    if far.mean() > 0.2 and as_corners.all():
        if certain:
            kind = f"{far.mean():.0%} of the boxes stick out of their images, as if they were two corners"
            findings.fatal(kind, table.path, [], advice, of="")
        else:
            findings.repaired("boxes that look like two corners", table.path, ids[far].tolist(), doubt)


def choose_categories(table: CocoTable, names: list[str]) -> CocoTable:
    """Only these categories; all images stay.

    Args:
        table: any.
        names: of categories, or their ids; what is both is a name.

    Returns:
        A table whose labels are the chosen categories in the order of their ids.

    Raises:
        UserError: an unknown name, an id where names are numbers too, or nothing at all.
    """
    by_name = {name: label for label, name in enumerate(table.labels)}
    by_id = {str(number): label for label, number in enumerate(table.category_ids)}
    numeric = any(name.strip().isdecimal() for name in table.names)
    chosen = set()
    for entry in map(str, names):
        if entry not in by_name and entry not in by_id:
            raise UserError(f"{table.path} has no category {entry!r}.{closest(entry, table.labels)}")
        if entry not in by_name and numeric:
            raise UserError(
                f"{table.path} has no category named {entry!r}, only one with this id; where names are numbers, "
                f"data.categories takes no ids. Write its name, {table.labels[by_id[entry]]!r}, if you mean that one."
            )
        chosen.add(by_name[entry] if entry in by_name else by_id[entry])
    if not chosen:
        raise UserError("data.categories is empty: name at least one, or leave it out for all.")
    return _only(table, sorted(chosen))


def drop_unchosen(table: CocoTable, chosen: CocoTable, listed: Mapping[int, str]) -> CocoTable:
    """``table`` without the categories that nobody chose, in which it need not agree with the training file.

    Args:
        table: of validation or test; it may lack categories.
        chosen: of training, cut down to the chosen categories.
        listed: names by id of all categories of the training file.
    """

    def wanted(number: int, name: str) -> bool:
        # a chosen name under an id that training does not know by it is kept, for match_categories to refuse
        return number in chosen.category_ids or (name in chosen.names and listed.get(number) != name)

    rows = enumerate(zip(table.category_ids, table.names, strict=True))
    return _only(table, [label for label, (number, name) in rows if wanted(number, name)])


def _only(table: CocoTable, labels: list[int]) -> CocoTable:
    """Only these labels, ascending, and their annotations."""
    place = np.full(len(table.labels), -1)
    place[np.array(labels, dtype=np.int64)] = np.arange(len(labels))
    part = table.keep(place[table.label] >= 0)
    return replace(
        part,
        label=place[part.label],
        labels=[table.labels[label] for label in labels],
        names=[table.names[label] for label in labels],
        category_ids=[table.category_ids[label] for label in labels],
        supercategories=[table.supercategories[label] for label in labels],
    )


def match_categories(table: CocoTable, reference: CocoTable) -> CocoTable:
    """``table`` with the labels of ``reference``: val and test use the classes of the training file.

    Names are compared as the files have them: what is added to tell equal ones apart depends on what else a file lists.

    Raises:
        UserError: a category of ``table`` is unknown to ``reference`` or has another name there.
    """
    if (table.category_ids, table.labels) == (reference.category_ids, reference.labels):
        return table
    label_of = {number: label for label, number in enumerate(reference.category_ids)}
    for number, name in zip(table.category_ids, table.names, strict=True):
        if number not in label_of:
            raise UserError(
                f"{table.path} has category {number} ({name}), which {reference.path} has not: a model trained there "
                "cannot find it. Use the same categories in both, or name the ones to use in data.categories."
            )
        if reference.names[label_of[number]] != name:
            raise UserError(
                f"Category {number} is {name!r} in {table.path} but {reference.names[label_of[number]]!r} in "
                f"{reference.path}: the two files disagree."
            )
    place = np.array([label_of[number] for number in table.category_ids], dtype=np.int64)
    return replace(
        table,
        label=place[table.label],
        labels=reference.labels,
        names=reference.names,
        category_ids=reference.category_ids,
        supercategories=reference.supercategories,
    )
