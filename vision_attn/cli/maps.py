"""``vision-attn maps``: what a model looks at, as figures and one page, with what that is worth."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import shutil
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vision_attn.cli.arguments import make_parser, parse
from vision_attn.errors import UserError

MOST = 32  # pictures on a page: a browser holds them all

if TYPE_CHECKING:
    from torch import Tensor

    from vision_attn.explain.views import Choice, Insight


def run(argv: list[str]) -> int:
    """Write maps of the images named on the command line.

    Raises:
        UserError: the checkpoint or an image cannot be read, there are too many images, or no such layer, head or
            query.
    """
    options = _parse(argv)
    _check_output(Path(options.output))
    from vision_attn.checkpoints import load_model
    from vision_attn.data.images import image_files
    from vision_attn.explain.views import Choice
    from vision_attn.inference import pick_device

    choice = Choice(
        layers=options.layers.split(",") if options.layers else "all",
        heads=_numbers("heads", options.heads),
        queries=_numbers("queries", options.queries),
        trials=options.trials,
        threshold=options.threshold,
        flow=options.flow,
        minutes=options.minutes,
        tell=lambda line: print(line, file=sys.stderr),
    )
    files = [file for name in options.images for file in image_files(Path(name).expanduser())]
    if len(files) > MOST:
        raise UserError(
            f"{len(files)} images: a page holds {MOST} at most. Name fewer, and give the folder with --data for "
            "numbers over the set."
        )
    more = image_files(Path(options.data).expanduser())[: options.most] if options.data else []
    device = pick_device(options.device)
    models = [load_model(path, device=device) for path in (options.ckpt_path, options.compare) if path]
    choices = [choice, dataclasses.replace(choice, layers="all", heads=None, queries=None)]
    insights = [_look(model, files, more, c) for model, c in zip(models, choices, strict=False)]
    written = _write(Path(options.output), insights)
    for insight in insights:
        for note in dict.fromkeys(insight.notes):
            print(f"{insight.name}: {note}", file=sys.stderr)
    print(f"{len(written)} files in {options.output}; open {Path(options.output) / 'index.html'}")
    return 0


def _parse(argv: list[str]) -> Any:
    parser = make_parser("maps", "Attention maps, rollout, relevance and Grad-CAM of images, and what they are worth.")
    parser.add_argument("images", nargs="+", help=f"image files and folders (searched through), {MOST} at most")
    parser.add_argument("--ckpt_path", required=True, help=".ckpt, .safetensors, .th, or the folder of a run or model")
    parser.add_argument("--compare", type=str | None, default=None, help="another checkpoint, shown beside the first")
    parser.add_argument("--output", default="maps", help="folder to write to")
    parser.add_argument("--layers", type=str | None, default=None, help="names or wildcards, with commas: blocks.1*")
    parser.add_argument("--heads", type=str | None, default=None, help="numbers of heads: 0,2 or 0-3")
    parser.add_argument(
        "--queries",
        type=str | None,
        default=None,
        help="numbers of query tokens: 0 is the class token where there is one; a Swin's count on the grid that is "
        "filled up to whole windows",
    )
    parser.add_argument("--data", type=str | None, default=None, help="folder with more images, for numbers over a set")
    parser.add_argument("--most", type=int, default=64, help="images of that folder that are looked at")
    parser.add_argument("--trials", type=int, default=19, help="random maps to compare each with; 0 for none")
    parser.add_argument(
        "--minutes", type=float, default=10.0, help="that comparing may take; coarser curves and fewer maps keep to it"
    )
    parser.add_argument("--flow", default="auto", help="attention flow: yes, no, or auto (where it takes no minutes)")
    parser.add_argument("--threshold", type=float, default=0.3, help="detections must be surer")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda, mps …")
    options = parse(parser, argv)
    from vision_attn.explain.views import FLOWS

    if options.trials < 0 or options.most < 0 or not 0 <= options.threshold < 1:
        raise UserError("--trials and --most are 0 or more, --threshold is 0 to 1.")
    if not 0 < options.minutes < float("inf"):
        raise UserError(f"--minutes {options.minutes:g}: more than 0, and finite.")
    # YAML reads yes and no as truth values
    options.flow = {"true": "yes", "false": "no"}.get(str(options.flow).lower(), str(options.flow).lower())
    if options.flow not in FLOWS:
        raise UserError(f"--flow {options.flow}: choose {', '.join(FLOWS)}.")
    return options


def _numbers(what: str, text: str | None) -> list[int] | None:
    """``0,2`` and ``0-3`` as numbers."""
    if text is None:
        return None
    found: list[int] = []
    for part in str(text).split(","):
        first, dash, last = part.strip().partition("-")
        if not first.isdigit() or (dash and not last.isdigit()):
            raise UserError(f"--{what} {text!r}: give numbers such as 0,2 or 0-3.")
        if dash and int(last) < int(first):
            raise UserError(f"--{what} {text!r}: {part.strip()} holds no number; write {last}-{first}.")
        found += range(int(first), int(last if dash else first) + 1)
    return list(dict.fromkeys(found))


def _check_output(folder: Path) -> None:
    """Before anything is computed: whether a folder can be made or written to there.

    Raises:
        UserError: it cannot.
    """
    folder = folder.absolute()
    there = next(path for path in (folder, *folder.parents) if path.exists())
    if not there.is_dir():
        raise UserError(f"--output {folder}: {there} is a file; name a folder.")
    if not os.access(there, os.W_OK | os.X_OK):
        raise UserError(f"--output {folder}: {there} cannot be written to; name another folder.")


def _look(model: Any, files: Sequence[Path], more: Sequence[Path], choice: Choice) -> Insight:
    from vision_attn.explain.insight import look

    if model.config.get("task") == "sorting":
        raise UserError(
            "a pointer network sorts images: `vision-attn predict` shows its answer, and va.attention_maps its weights."
        )
    shown = [_read(path, model.config) for path in files]
    extra = [_read(path, model.config)[0] for path in more]
    images, pixels = zip(*shown, strict=True)
    return look(model, images, pixels, [path.name for path in files], choice, extra)


def _read(path: Path, config: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """(C, H, W) normalized, and (3, H, W) uint8 as the model sees it."""
    from vision_attn.data.images import read_image
    from vision_attn.explain.seen import as_seen

    return as_seen(read_image(path), config)


def _write(folder: Path, insights: Sequence[Insight]) -> list[Path]:
    """All files, or none: they are made beside the folder and moved into it at the end."""
    from vision_attn.atomic import atomic_write_text
    from vision_attn.explain.page import page

    folder.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(dir=folder.parent, prefix=f".{folder.name}."))
    try:
        _figures(temporary, insights)
        names = " and ".join(insight.name for insight in insights)
        atomic_write_text(temporary / "index.html", page(insights, f"What {names} look{'s' * (len(insights) == 1)} at"))
        made = sorted(p.relative_to(temporary) for p in temporary.rglob("*") if p.is_file())
        for name in made:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (temporary / name).replace(folder / name)
    finally:
        with contextlib.suppress(OSError):
            shutil.rmtree(temporary)
    return [folder / name for name in made]


def _figures(folder: Path, insights: Sequence[Insight]) -> None:
    from vision_attn.explain import figures

    for number, insight in enumerate(insights):
        part = folder if len(insights) == 1 else folder / f"{number + 1}_{insight.name}"
        figures.worth(insight, part / "worth.png")
        if insight.clouds is not None:
            title = f"{insight.name}: where its queries find objects in {insight.clouds.boxes.shape[1]} images"
            figures.query_clouds(insight.clouds, part / "queries.png", title)
        for i, picture in enumerate(insight.pictures):
            stem = f"{i:02d}_{Path(picture.source).stem}"
            title = f"{insight.name}, {picture.source}: {picture.answer}"
            if picture.layers:
                figures.all_heads(insight, picture, part, stem, title)
            if picture.summaries:
                figures.summary(insight, picture, part / f"{stem}_summary.png", title)
            if picture.detections:
                figures.detections(insight, picture, part / f"{stem}_objects.png", title)
    if len(insights) > 1:
        for i, picture in enumerate(insights[0].pictures):
            figures.compare(insights, i, folder / f"{i:02d}_{Path(picture.source).stem}_compare.png")
