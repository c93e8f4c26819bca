"""``vision-attn check padding``: do predictions depend on the batch an image is in?"""

from __future__ import annotations

import dataclasses
import sys
from typing import TYPE_CHECKING, Any

from vision_attn.cli.arguments import make_parser, parse, write_json
from vision_attn.errors import UserError

if TYPE_CHECKING:
    from vision_attn.detection.padding import Movement, Truth


def padding(argv: list[str]) -> int:
    """A detector on images alone, in batches and with padding: how far scores, boxes and average precision move.

    Returns:
        0 when they stay within 0.0001 in score and 0.001 pixels, 1 when they do not.

    Raises:
        UserError: no detector, an image that cannot be read, or annotations that do not have it.
    """
    parser = make_parser(
        "check padding",
        "Run a detector on each image alone, then in batches of mixed sizes and with padding, and report the largest "
        "change of a score and of a box.",
    )
    parser.add_argument("images", nargs="+", help="image files and folders; best of several sizes")
    parser.add_argument("--ckpt_path", required=True, help=".ckpt, .safetensors, .pth, or the folder of a run or model")
    parser.add_argument("--annotations", type=str | None, default=None, help="their COCO file, for average precision")
    parser.add_argument("--batch_size", type=int, default=4, help="largest batch")
    parser.add_argument(
        "--dtype", type=str, default="float32", help="float32, or float64, where nothing is left of rounding errors"
    )
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda, mps …")
    parser.add_argument("--json", type=str | None, default=None, help="write the result to this file, - for stdout")
    options = parse(parser, argv)
    if options.batch_size < 2:
        raise UserError(f"--batch_size {options.batch_size}: at least two images make a batch.")
    if options.dtype not in ("float32", "float64"):
        raise UserError(f"--dtype {options.dtype}: choose float32 or float64.")

    import torch

    from vision_attn.checkpoints import load_model
    from vision_attn.detection.inference import prepare
    from vision_attn.detection.padding import padding_certificate
    from vision_attn.inference import open_pictures, pick_device

    device = pick_device(options.device)
    model: Any = load_model(options.ckpt_path, device=device)
    if model.config["task"] != "detection":
        raise UserError(
            f"{options.ckpt_path} is a model for {model.config['task']}; only detectors take padded images."
        )
    pictures, sources = open_pictures(options.images)
    if len(pictures) < 2:
        raise UserError("One image makes no batch: give at least two, best of different sizes.")
    truth = None if options.annotations is None else _truth(options.annotations, sources, model)
    dtype = getattr(torch, options.dtype)
    model.to(dtype)
    images = [x.to(device, dtype) for x in prepare(pictures, model.config)]
    sizes = [(picture.height, picture.width) for picture in pictures]
    counts = sorted({2, min(options.batch_size, len(images))})
    movements = padding_certificate(model, images, sizes, batch_sizes=counts, truth=truth)
    shapes = len({tuple(x.shape) for x in images})
    _report(movements, model, f"{len(images)} images of {shapes} size{'s' * (shapes != 1)}", options)
    return int(not all(movement.holds for movement in movements))


def _truth(path: str, sources: list[str], model: Any) -> Truth:
    from pathlib import Path

    from vision_attn.cli.predict_objects import image_ids, read_ids
    from vision_attn.detection.padding import Truth

    coco, known = read_ids(path)
    if not coco.get("annotations") or not coco.get("categories"):
        raise UserError(f"--annotations {path}: it has no annotations and categories.")
    ids = image_ids([Path(source) for source in sources], known)
    return Truth(coco, ids, model.config.get("category_ids") or list(range(model.num_classes)))


def _report(movements: list[Movement], model: Any, what: str, options: Any) -> None:
    from vision_attn.detection.padding import PIXELS, SCORE

    width = max(len(movement.setting) for movement in movements)
    lines = [
        f"{model.config['name']} ({options.ckpt_path}) on {what}, {options.dtype}; "
        f"allowed: {SCORE:.0e} in score, {PIXELS:.0e} pixels"
    ]
    for movement in movements:
        verdict = "holds" if movement.holds else "FAILS"
        ap = "" if movement.ap is None else f"  AP {movement.ap:.4f}"
        lines.append(
            f"{movement.setting:<{width}}  score {movement.score:.1e}  pixels {movement.pixels:.1e}{ap}  {verdict}"
        )
    if not all(movement.holds for movement in movements) and not getattr(model, "exact_padding", True):
        lines.append(
            "The backbone reads the padding (exact_padding: false), as where these weights come from; `predict` hands "
            "each image over without any, and does not depend on the batch."
        )
    print("\n".join(lines), file=sys.stderr if options.json == "-" else sys.stdout)
    if options.json:
        rows = [{**dataclasses.asdict(movement), "holds": movement.holds} for movement in movements]
        write_json({"checkpoint": options.ckpt_path, "settings": rows}, options.json)
