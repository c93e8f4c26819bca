"""Everything that is wrong with a set on disk, found before anyone trains on it."""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from vision_attn.data.coco import KEYS, read_coco
from vision_attn.data.coco_images import compare_with_files, image_folder_of, in_threads, look_at
from vision_attn.data.coco_table import CocoTable, fit_boxes, match_categories
from vision_attn.data.findings import Finding, Findings, short_names
from vision_attn.data.image_folder import class_names, refuse_other_splits
from vision_attn.data.images import files_below, is_image
from vision_attn.data.verify import Verifier
from vision_attn.errors import UserError

_KEPT = "all are kept"


@dataclass
class Part:
    """What was found in one annotation file, or in one folder of class folders.

    Attributes:
        where: the file or folder.
        images: how many it lists.
        summary: what it holds, in words.
        findings: what is wrong.
        contents: name and hash of the decoded pixels of every image that could be read.
        notes: what is worth a word, but no mistake.
    """

    where: str
    images: int = 0
    summary: str = ""
    findings: list[Finding] = field(default_factory=list)
    contents: list[tuple[Any, bytes]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def check_path(path: Path, images: Path | None = None) -> list[Part]:
    """Check a COCO file, a folder that holds some, or a folder with one folder of images per class.

    Args:
        path: of the file or folder.
        images: where the images of a COCO file lie; looked for when None.

    Raises:
        UserError: there is no such file or folder, or nothing in it that can be checked.
    """
    if path.is_file():
        return _compared([check_coco(path, images or _image_folder(path))[0]])
    if not path.is_dir():
        raise UserError(f"There is no file or folder {path}.")
    files, strays = annotation_files(path)
    left_out = [f"{file} is left out: it has none of {', '.join(KEYS)}" for file in strays]
    if files:
        if images is not None and len(files) > 1:
            raise UserError(
                f"{path} holds {len(files)} annotation files: name one of them to say where its images are."
            )
        parts = _check_all(files, path, images)
    elif folders := split_folders(path):
        refuse_other_splits(path)
        parts = [check_class_folder(folder, folders[0]) for folder in folders]
    else:
        raise UserError(
            f"{path} holds neither COCO files (annotations/*.json) nor images in folders of their classes "
            f"(train/<class>/<image> or <class>/<image>).{_none_of_cocos(strays)}"
        )
    parts[0].notes += left_out
    return _compared(parts)


# -- COCO ---------------------------------------------------------------------------------------------


def annotation_files(folder: Path) -> tuple[list[Path], list[Path]]:
    """COCO files in ``annotations/``, in the folder itself or one level below; training files first.

    Those in ``annotations/`` count only if they are called ``instances_*``, where any is.

    Returns:
        The files, and other JSON files that lay there and are none.
    """
    inside = sorted((folder / "annotations").glob("*.json"))
    named = [file for file in inside if file.name.startswith("instances_")]
    strays: list[Path] = []
    for level in (named or inside, sorted(folder.glob("*.json")), sorted(folder.glob("*/*.coco.json"))):
        found = [file for file in level if _is_meant_as_coco(file)]
        strays += [file for file in level if file not in found]
        if found:
            return sorted(found, key=lambda file: (not _is_training(file), "test" in file.stem, file)), strays
    return [], strays


def _is_meant_as_coco(file: Path) -> bool:
    """Whether it is a COCO file, whole or broken; others that lie beside one are somebody else's."""
    if file.name.startswith("instances_") or file.name.endswith(".coco.json"):
        return True
    try:
        content = json.loads(file.read_bytes())
    except (OSError, ValueError, RecursionError):
        return True  # damaged: reading it will say how
    return isinstance(content, dict) and any(key in content for key in KEYS)


def _none_of_cocos(strays: list[Path]) -> str:
    if not strays:
        return ""
    names = f"{strays[0].name}{f' and {len(strays) - 1} more' if len(strays) > 1 else ''}"
    return f" COCO files have {', '.join(KEYS)}: {names} there {'have' if len(strays) > 1 else 'has'} none of these."


def _image_folder(file: Path) -> Path:
    """Where the images of a file lie, when nobody names the set's folder: it may be the file's own or the one above."""
    own = file.absolute().parent
    roots = [own.parent, own] if own.name == "annotations" else [own, own.parent]
    for root in roots:
        folder = image_folder_of(root, file.absolute())
        if folder != own or any(is_image(entry) for entry in own.iterdir()):
            return folder
    return own


def _is_training(file: Path) -> bool:
    return "train" in file.stem or file.parent.name == "train"


def _check_all(files: list[Path], folder: Path, images: Path | None) -> list[Part]:
    parts, first = [], None
    for file in files:
        part, table = check_coco(file, images or image_folder_of(folder, file))
        if table is not None and first is None:
            first = table
        elif table is not None and first is not None:
            try:
                match_categories(table, first)
            except UserError as error:
                text = str(error).removeprefix(f"{file} ").removeprefix(f"{file}: ")
                part.findings.append(Finding(text, str(file), [], of=""))
        parts.append(part)
    return parts


def check_coco(path: Path, folder: Path) -> tuple[Part, CocoTable | None]:
    """One annotation file and its images, all of them decoded.

    Args:
        path: of the file.
        folder: of the images.

    Returns:
        What was found, and the table; None when the file cannot be used at all.
    """
    findings = Findings(strict=False)
    table: CocoTable | None = findings.attempt(path, lambda: read_coco(path, findings))
    part = Part(str(path), findings=findings.found)
    if table is None:
        return part, None
    part.images = len(table)
    crowds = f", {int(table.crowd.sum()):,} of them crowds" if table.crowd.any() else ""
    part.summary = f"{len(table):,} images, {len(table.boxes):,} boxes{crowds}, {len(table.labels)} categories"
    _check_boxes(table, findings)
    sized = table
    if not folder.is_dir():
        findings.fatal(f"there is no image folder {folder}", path, [], "Name it with --images.", of="")
        sized = table.take(np.flatnonzero(table.sizes.all(1)))
    else:
        verifier = Verifier(None, decode=True)
        look = functools.partial(verifier.look, images=folder)
        compared = findings.attempt(path, lambda: compare_with_files(table, folder, findings, look=look))
        if compared is None:
            return part, table
        sized, paths = compared[0], compared[1]
        rows = zip(sized.image_ids.tolist(), verifier.look(paths, folder), strict=True)
        part.contents = [(number, header.pixels) for number, header in rows if header.pixels is not None]
    if len(sized.boxes):
        fit_boxes(sized, findings)
    return part, table


def _check_boxes(table: CocoTable, findings: Findings) -> None:
    """What only a person can judge: categories that never occur, boxes that are there twice."""
    counts = np.bincount(table.label, minlength=len(table.labels))
    names = [f"{table.category_ids[label]} {table.labels[label]}" for label in np.flatnonzero(counts == 0)]
    findings.repaired("categories without examples", table.path, names, "nothing to learn or measure", of="category")
    rows = np.concatenate([table.image[:, None], table.label[:, None], table.boxes], 1)
    _, first, count = np.unique(rows, axis=0, return_index=True, return_counts=True)
    twice = table.image_ids[table.image[first[count > 1]]].tolist() if len(rows) else []
    findings.repaired("boxes given more than once, in the same place and category", table.path, twice, "all are kept")


# -- folders of classes -------------------------------------------------------------------------------


def split_folders(folder: Path) -> list[Path]:
    """The folders that hold class folders: ``train``, ``val`` and ``test`` where there are, else the folder itself."""
    splits = [folder / name for name in ("train", "val", "test") if (folder / name).is_dir()]
    found = [split for split in splits if _classes(split)]
    if found:
        return found
    return [folder] if _classes(folder) and not splits else []


def check_class_folder(folder: Path, reference: Path) -> Part:
    """One folder with a folder of images for every class.

    Args:
        folder: to check.
        reference: the training folder, whose classes count.
    """
    names = _classes(folder)
    part = Part(str(folder))
    findings = Findings(strict=False)
    strange = sorted(set(names) - set(_classes(reference)))
    findings.fatal("classes that no training image has", folder, strange, "Rename or delete them.", of="category")
    others: list[str] = []
    empty: list[str] = []
    broken: list[str] = []
    for name in names:
        files = files_below(folder / name)
        images = [file for file in files if is_image(file)]
        others += [os.path.relpath(file, folder) for file in files if not is_image(file)]
        if not images:
            empty.append(name)
        decode = functools.partial(look_at, decode=True)
        for file, header in zip(images, in_threads(decode, [str(file) for file in images]), strict=True):
            shown = os.path.relpath(file, folder)
            if header.pixels is not None:
                part.contents.append((shown, header.pixels))
            else:
                broken.append(f"{shown}: {header.error}")
        part.images += len(images)
    findings.fatal("class folders without images", folder, empty, "Add some or delete them.", of="category")
    findings.fatal("images that cannot be read", folder, broken, "Replace or delete them.", of="file")
    findings.repaired("files that are no images", folder, others, "left out", of="file")
    _same_image_two_classes(part, findings)
    part.summary = f"{part.images:,} images, {len(names)} classes"
    part.findings = findings.found
    return part


def _classes(folder: Path) -> list[str]:
    """Folders that are named like classes; only those of a folder that holds images somewhere below them count."""
    names = class_names(folder)
    return names if any(is_image(file) for name in names for file in files_below(folder / name)) else []


def _same_image_two_classes(part: Part, findings: Findings) -> None:
    classes: dict[bytes, set[str]] = {}
    for name, content in part.contents:
        classes.setdefault(content, set()).add(Path(name).parts[0])
    shared = [name for name, content in part.contents if len(classes[content]) > 1]
    findings.repaired("images that are in several classes, by content", part.where, shared, "all are kept", of="file")


# -- content ------------------------------------------------------------------------------------------


def _compared(parts: list[Part]) -> list[Part]:
    """The parts, with a word on images that are there twice, within a part or in two of them."""
    names = short_names([part.where for part in parts])
    for number, part in enumerate(parts):
        seen: dict[bytes, Any] = {}
        twice = []
        for name, content in part.contents:
            if content in seen:
                twice.append(f"{name} = {seen[content]}")
            seen.setdefault(content, name)
        _add(part, "images that repeat another one of the same file, by content", twice, _KEPT)
        for name_of_other, other in zip(names[number + 1 :], parts[number + 1 :], strict=True):
            shared = [f"{seen[content]} = {name}" for name, content in other.contents if content in seen]
            kind = f"images that are in {name_of_other} too, by content"
            # only detection compares, and only its training images with those of evaluation
            refused = number == 0 and os.path.isfile(part.where) and not _is_training(Path(other.where))
            _add(part, kind, shared, "training refuses them unless data.overlap says otherwise" if refused else _KEPT)
    return parts


def _add(part: Part, kind: str, ids: Iterable[str], repair: str) -> None:
    ids = list(ids)
    if ids:
        part.findings.append(Finding(kind, part.where, ids, "image", repair))
