"""``vision-attn models``: the zoo as a table, or one model in detail."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from vision_attn.cli.arguments import console, make_parser, parse, write_json
from vision_attn.errors import UserError, closest

if TYPE_CHECKING:
    from vision_attn.models.profile import Profile

NARROWEST = 100  # columns, where the output is no terminal: nothing is cut off


def run(argv: list[str]) -> int:
    """Print the models that match, or the details of the one named.

    Raises:
        UserError: nothing matches, or the arguments are wrong.
    """
    parser = make_parser("models", "List models with their parameters and multiply-accumulates (MACs) per image.")
    parser.add_argument("pattern", nargs="?", default="*", help="a name for details, or a shell pattern like 'cct*'")
    parser.add_argument("--img_size", type=int | None, default=None, help="pixels, for one named model")
    parser.add_argument(
        "--num_classes", type=int | None, default=None, help="outputs (default: 10 or 1000 by size, 91 of detectors)"
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    options = parse(parser, argv)

    from vision_attn.models import list_models
    from vision_attn.models.backbones import is_timm
    from vision_attn.models.profile import profile

    pattern, names = options.pattern, list_models(options.pattern)
    if names != [pattern] and not any(c in pattern for c in "*?["):
        names = [pattern] if is_timm(pattern) else list_models(f"*{pattern}*")
    if not names:
        raise UserError(f"no model matches {pattern!r}.{closest(pattern, list_models())}")
    if options.img_size and names != [pattern]:
        raise UserError("--img_size needs the full name of one model.")
    found = [profile(name, img_size=options.img_size, num_classes=options.num_classes) for name in names]
    if names == [pattern]:
        _show_one(found[0], options.json)
    elif options.json:
        write_json([_row(item) for item in found], "-")
    else:
        _show_table(found)
    return 0


def _row(item: Profile) -> dict[str, Any]:
    row = dataclasses.asdict(item)
    row.pop("parts")
    return row


def count(number: int) -> str:
    """Three significant digits with a unit: ``1.25 G``, ``269 k``."""
    for unit, size in (("G", 10**9), ("M", 10**6), ("k", 10**3)):
        if number >= size:
            value = number / size
            return f"{value:.{2 if value < 10 else 1 if value < 100 else 0}f} {unit}"
    return str(number)


def _show_table(found: list[Profile]) -> None:
    from rich.table import Table

    table = Table(caption="10 classes below 100 px, 1000 above; detectors 91.\nDetails of one: vision-attn models NAME")
    table.add_column("model", no_wrap=True)
    table.add_column("family")
    for title in ("parameters", "MACs", "image"):
        table.add_column(title, justify="right", no_wrap=True)
    for item in found:
        size = "x".join(map(str, item.img_size))
        table.add_row(item.name, item.family, count(item.params), count(item.macs), size)
    console(NARROWEST).print(table)


def _show_one(item: Profile, as_json: bool) -> None:
    from vision_attn.models import description, list_models, model_defaults
    from vision_attn.models.profile import citation

    ours = item.name in list_models()
    about: dict[str, Any] = {
        "description": description(item.name) if ours else "CNN of timm, taken as it is.",
        "citation": citation(item.name) if ours else "https://github.com/huggingface/pytorch-image-models",
        "arguments": model_defaults(item.name) if ours else {},
    }
    if as_json:
        write_json({**dataclasses.asdict(item), **about}, "-")
        return
    from rich.table import Table

    out = console(NARROWEST)
    out.print(f"[bold]{item.name}[/] ({item.family}): {about['description']}")
    size = " x ".join(map(str, item.img_size))
    cost = f"{item.params:,} parameters, {count(item.macs)} MACs"
    out.print(f"{cost} for one image of {size} pixels, {item.num_classes} classes")
    out.print(f"source: {about['citation']}", soft_wrap=True)
    parts = Table(title="parts", title_justify="left")
    for title in ("name", "kind", "output"):
        parts.add_column(title)
    parts.add_column("parameters", justify="right")
    parts.add_column("MACs", justify="right")
    for part in item.parts:
        shape = " x ".join(map(str, part.output)) if part.output else ""
        parts.add_row(part.name, part.kind, shape, f"{part.params:,}", count(part.macs))
    out.print(parts)
    if about["arguments"]:
        arguments = Table(title="arguments (model.args in a recipe)", title_justify="left")
        arguments.add_column("name")
        arguments.add_column("default")
        for name, value in about["arguments"].items():
            if name not in ("num_classes", "in_chans"):
                arguments.add_row(name, repr(value))
        out.print(arguments)
