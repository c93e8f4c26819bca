"""The part of ``vision-attn predict`` that is for detectors: table, pictures with boxes, COCO results."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vision_attn.cli.arguments import console, write_json
from vision_attn.detection.inference import THRESHOLD, Detections, check_options
from vision_attn.errors import UserError


@dataclass
class Prepared:
    """What was checked before the model ran.

    Attributes:
        ids: file name → image id, from ``--annotations``; None without.
        output: the folder for pictures; None for none.
    """

    ids: dict[str, int] | None
    output: Path | None


def prepare(options: Any) -> Prepared:
    """Refuse what cannot work, before minutes are spent on predictions.

    Raises:
        UserError: numbers out of range, an annotation file that is none, a folder that is a file.
    """
    check_options(options.threshold, options.topk)
    output = None if options.output is None else Path(options.output).expanduser()
    if output is not None and output.exists() and not output.is_dir():
        raise UserError(f"--output {output} is a file; pictures go to a folder.")
    if options.annotations is None:
        return Prepared(None, output)
    return Prepared(read_ids(options.annotations)[1], output)


def read_ids(annotations: str) -> tuple[dict[str, Any], dict[str, int]]:
    """A COCO file, and its image ids by file name.

    Raises:
        UserError: it cannot be read, or is none.
    """
    path = Path(annotations).expanduser()
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        return content, {str(image["file_name"]): int(image["id"]) for image in content["images"]}
    except (OSError, ValueError, KeyError, TypeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it has no images with file_name and id"
        raise UserError(f"--annotations {path}: {reason}.") from error


def finish(results: list[Detections], prepared: Prepared, options: Any, classes: Sequence[str] | None) -> int:
    """Write what was asked for, or print the table.

    Raises:
        UserError: an image without an id in ``--annotations``, or a picture that would replace its original.
    """
    sources = [Path(result.source) for result in results]
    # everything that can be refused comes first
    ids = image_ids(sources, prepared.ids) if options.json is not None else []
    targets = picture_names(sources, prepared.output) if prepared.output is not None else []
    if options.json is not None:
        rows = []
        for result, number in zip(results, ids, strict=True):
            name = Path(result.source).name
            rows += [{**row, "file_name": name} for row in result.to_coco(number)]
        write_json(rows, options.json, f"{len(rows)} objects in {len(results)} images")
    for result, target in zip(results, targets, strict=False):
        draw(result, target, classes)
    if targets:
        print(f"{len(targets)} pictures written to {prepared.output}", file=sys.stderr)
    if options.json != "-":
        show(results, THRESHOLD if options.threshold is None else options.threshold)
    return 0


def image_ids(sources: Sequence[Path], known: dict[str, int] | None) -> list[int]:
    """The COCO id of each image: by its file name in the annotations; without those the number that all names are, as
    in COCO itself (``000000000285.jpg``), or else 1, 2, 3 …

    Raises:
        UserError: the annotations do not know an image, know several of its name, or have one id for two images.
    """
    if known is not None:
        taken: dict[int, Path] = {}
        for source in sources:
            number = _known_id(source, known)
            if number in taken:
                raise UserError(
                    f"{taken[number]} and {source} both have the image id {number} by --annotations: an evaluator "
                    "would take them for one image. Give one of them, or let its file_name and id tell them apart."
                )
            taken[number] = source
        return list(taken)
    stems = [source.stem for source in sources]
    if all(stem.isascii() and stem.isdigit() for stem in stems) and len({int(stem) for stem in stems}) == len(stems):
        return [int(stem) for stem in stems]
    return list(range(1, len(stems) + 1))


def _known_id(source: Path, known: dict[str, int]) -> int:
    """The id of a file by as much of its path as the annotations have; they may have more of it, too."""
    for start in range(len(source.parts)):
        name = "/".join(source.parts[start:])
        if name in known:
            return known[name]
    ends = [number for name, number in known.items() if name.endswith(f"/{source.name}")]
    if len(ends) == 1:
        return ends[0]
    reason = "is there more than once by this name" if ends else "is not there"
    raise UserError(f"{source} {reason} in --annotations, so it has no image id.")


def picture_names(sources: Sequence[Path], folder: Path) -> list[Path]:
    """A file in ``folder`` for each image; the name of the image, with a number where that is taken.

    Raises:
        UserError: one of them is an original.
    """
    originals = {source.resolve() for source in sources}
    taken: set[str] = set()
    names = []
    for source in sources:
        suffix = source.suffix if source.suffix.lower() in (".jpg", ".jpeg", ".png") else ".png"
        name, number = f"{source.stem}{suffix}", 1
        while name.lower() in taken:
            name, number = f"{source.stem}_{number}{suffix}", number + 1
        taken.add(name.lower())
        if (folder / name).resolve() in originals:
            raise UserError(f"--output {folder} would replace the image {source}: choose another folder.")
        names.append(folder / name)
    return names


def draw(result: Detections, target: Path, classes: Sequence[str] | None) -> None:
    """One picture with boxes."""
    from vision_attn.atomic import atomic_write
    from vision_attn.data.images import read_image
    from vision_attn.detection.draw import draw_detections

    picture = draw_detections(read_image(result.source), result.boxes, result.labels, result.scores, classes=classes)
    kind = "PNG" if target.suffix.lower() == ".png" else "JPEG"
    atomic_write(target, lambda path: picture.save(path, format=kind, quality=92))


def show(results: Sequence[Detections], threshold: float) -> None:
    """A table with a line for each object."""
    from rich.table import Table
    from rich.text import Text

    table = Table()
    table.add_column("image", overflow="fold")
    table.add_column("class", overflow="fold")
    table.add_column("score", justify="right")
    table.add_column("left, top, right, bottom", justify="right")
    for result in results:
        for i, (label, score) in enumerate(zip(result.labels, result.scores.tolist(), strict=True)):
            box = ", ".join(f"{value:.0f}" for value in result.boxes[i].tolist())
            # names of files and classes are text, not rich's markup
            table.add_row(Text(result.source if i == 0 else ""), Text(label), f"{100 * score:.1f} %", box)
        if not len(result):
            table.add_row(Text(result.source), Text(f"nothing above {threshold:g}", style="dim"), "", "")
    count = sum(map(len, results))
    out = console()
    out.print(table)
    out.print(f"{count} object{'s' * (count != 1)} in {len(results)} image{'s' * (len(results) != 1)}")
