"""``vision-attn predict``: classes and probabilities for image files, or their order."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING

from vision_attn.cli.arguments import make_parser, parse

if TYPE_CHECKING:
    from vision_attn.inference import Classification, Pointed


def run(argv: list[str]) -> int:
    """Classify (or, with a pointer network, sort) the images named on the command line.

    Raises:
        UserError: the checkpoint or an image cannot be read, or the arguments are wrong.
    """
    parser = make_parser("predict", "Classify (or sort) images with a trained model; the preprocessing comes with it.")
    parser.add_argument("images", nargs="+", help="image files and folders (searched through)")
    parser.add_argument("--ckpt_path", required=True, help=".ckpt, .safetensors, .th, or the folder of a run or model")
    parser.add_argument("--topk", type=int, default=5, help="how many classes to report")
    parser.add_argument("--json", type=str | None, default=None, help="write JSON to this file, - for standard output")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda, mps …")
    parser.add_argument("--batch_size", type=int, default=32, help="images per forward pass")
    options = parse(parser, argv)

    from vision_attn.checkpoints import load_model
    from vision_attn.inference import pick_device, predict

    device = pick_device(options.device)
    model = load_model(options.ckpt_path, device=device)
    results = predict(
        model, options.images, batch_size=options.batch_size, topk=options.topk, progress=sys.stderr.isatty()
    )
    if options.json is None:
        _show(results)
        return 0
    text = json.dumps([result.to_dict() for result in results], indent=2, ensure_ascii=False) + "\n"
    if options.json == "-":
        sys.stdout.write(text)
    else:
        from vision_attn.checkpoints.atomic import atomic_write_text

        atomic_write_text(options.json, text)
        print(f"{len(results)} predictions written to {options.json}", file=sys.stderr)
    return 0


def _show(results: list[Classification] | list[Pointed]) -> None:
    from rich.console import Console
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
    console = Console(highlight=False)
    (console if console.is_terminal else Console(width=120, highlight=False)).print(table)
