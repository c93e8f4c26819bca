"""``vision-attn check data``: is a set fit to train on?"""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vision_attn.cli.arguments import make_parser, parse, write_json

if TYPE_CHECKING:
    from vision_attn.data.checking import Part


def data(argv: list[str]) -> int:
    """A set of images, with boxes or in class folders: what is wrong with it, with counts and ids.

    Returns:
        0 when nothing is wrong, 1 when something is.

    Raises:
        UserError: nothing to check there.
    """
    parser = make_parser(
        "check data",
        "Read a COCO file, a folder in COCO's layout or a folder with one folder of images per class, decode every "
        "image, and say what is wrong: missing and unreadable images, sizes that differ from the file, boxes outside "
        "or degenerate, ids given twice, categories without examples, images that are in training and validation.",
    )
    parser.add_argument("path", help="a COCO file or a folder")
    parser.add_argument("--images", type=str | None, default=None, help="where the images of a COCO file lie")
    parser.add_argument("--json", type=str | None, default=None, help="write the findings to this file, - for stdout")
    options = parse(parser, argv)

    from vision_attn.data.checking import check_path

    images = None if options.images is None else Path(options.images).expanduser()
    parts = check_path(Path(options.path).expanduser(), images)
    print("\n".join(report(parts)), file=sys.stderr if options.json == "-" else sys.stdout)
    if options.json:
        write_json(content(options.path, parts), options.json)
    return int(any(part.findings for part in parts))


def report(parts: list[Part]) -> list[str]:
    """The lines to print."""
    lines = []
    for part in parts:
        lines.append(f"{part.where}: {part.summary}" if part.summary else f"{part.where}")
        lines += [f"  note: {note}" for note in part.notes]
        for finding in part.findings:
            lines.append(f"  {finding}" + ("" if finding.repair else f". {finding.advice}".rstrip(". ")))
        if not part.findings:
            lines.append("  nothing wrong")
    total = sum(len(part.findings) for part in parts)
    lines.append(f"{total} kind{'' if total == 1 else 's'} of mistakes" if total else "nothing wrong")
    return lines


def content(path: str, parts: list[Part]) -> dict[str, Any]:
    """The findings as plain types, all ids included."""
    files = []
    for part in parts:
        rows = [{**dataclasses.asdict(finding), "count": finding.count} for finding in part.findings]
        about = {"where": part.where, "images": part.images, "summary": part.summary, "notes": part.notes}
        files.append({**about, "findings": rows})
    return {"path": str(path), "findings": sum(len(part.findings) for part in parts), "parts": files}
