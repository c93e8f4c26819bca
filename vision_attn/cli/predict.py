"""``vision-attn predict``: classes and probabilities for image files, objects in them, or their order."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vision_attn.cli.arguments import console, make_parser, parse, write_json

if TYPE_CHECKING:
    from vision_attn.inference import Classification, Pointed


def run(argv: list[str]) -> int:
    """Classify (or, with a detector, search; with a pointer network, sort) the images named on the command line.

    Raises:
        UserError: the checkpoint or an image cannot be read, or the arguments are wrong.
    """
    parser = make_parser(
        "predict",
        "Classify images, find objects in them or sort them, with a trained model; the preprocessing comes with it.",
    )
    parser.add_argument("images", nargs="+", help="image files and folders (searched through)")
    parser.add_argument("--ckpt_path", required=True, help=".ckpt, .safetensors, .th, or the folder of a run or model")
    parser.add_argument(
        "--config",
        type=str | None,
        default=None,
        help="a recipe, as the other verbs take one; the checkpoint says all that it would, so it is not read",
    )
    parser.add_argument(
        "--topk", type=int | None, default=None, help="classes to report (5), or objects of an image at most (100)"
    )
    parser.add_argument(
        "--threshold", type=float | None, default=None, help="detectors: least score of an object (0.5); 0 for all"
    )
    parser.add_argument(
        "--output", type=str | None, default=None, help="detectors: write the images with boxes drawn to this folder"
    )
    parser.add_argument(
        "--json",
        type=str | None,
        default=None,
        help="write JSON to this file, - for standard output; of detections in COCO's results format",
    )
    parser.add_argument(
        "--annotations", type=str | None, default=None, help="detectors: the COCO file with the ids of the images"
    )
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda, mps …")
    parser.add_argument(
        "--batch_size",
        type=int | None,
        default=None,
        help="images per forward pass (32; for large images less)",
    )
    options = parse(parser, argv)

    from vision_attn.checkpoints import load_model
    from vision_attn.inference import pick_device, predict
    from vision_attn.training.memory import keep_freed_memory

    keep_freed_memory()
    device = pick_device(options.device)
    model: Any = load_model(options.ckpt_path, device=device)
    task = str(model.config["task"])
    if task == "detection":
        from vision_attn.cli import predict_objects

        prepared = predict_objects.prepare(options)
    else:
        _refuse_detection_options(options, task)
    results: Any = predict(
        model,
        options.images,
        batch_size=options.batch_size,
        topk=options.topk,
        threshold=options.threshold,
        progress=sys.stderr.isatty(),
    )
    if task == "detection":
        return predict_objects.finish(results, prepared, options, model.config.get("labels"))
    if options.json is None:
        _show(results)
    else:
        write_json([result.to_dict() for result in results], options.json, f"{len(results)} predictions")
    return 0


def _refuse_detection_options(options: Any, task: str) -> None:
    from vision_attn.errors import UserError

    for name in ("threshold", "output", "annotations"):
        if getattr(options, name) is not None:
            raise UserError(f"--{name} is for detectors; {Path(options.ckpt_path)} is a model for {task}.")


def _show(results: list[Classification] | list[Pointed]) -> None:
    from rich.table import Table
    from rich.text import Text

    from vision_attn.inference import Pointed

    table = Table()
    titles = ("place", "image") if results and isinstance(results[0], Pointed) else ("image", "class")
    for title in titles:
        table.add_column(title, overflow="fold")
    table.add_column("probability", justify="right")
    if "class" in titles:
        table.add_column("next", overflow="fold", style="dim")
    for result in results:
        probability = f"{100 * result.score:.1f} %"
        # names of files and classes are text, not rich's markup
        if isinstance(result, Pointed):
            table.add_row(str(result.place + 1), Text(result.source), probability)
        else:
            others = ", ".join(f"{label} {100 * p:.1f} %" for label, p in result.topk[1:])
            table.add_row(Text(result.source), Text(result.label), probability, Text(others))
    console().print(table)
