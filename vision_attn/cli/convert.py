"""``vision-attn convert``: any checkpoint into our format, or into that of another library."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vision_attn.cli.arguments import make_parser, parse
from vision_attn.errors import UserError, closest

if TYPE_CHECKING:
    from torch import nn

TARGETS = ("ours", "timm", "transformers", "torchvision")


def run(argv: list[str]) -> int:
    """Load SOURCE, whatever its layout, and write DEST.

    Returns:
        0, or 1 when the library it was written for computes something else.

    Raises:
        UserError: the source cannot be loaded, or the target has no such model.
    """
    parser = make_parser(
        "convert",
        "Load a checkpoint of any known layout and write it in our format (a folder), or so that timm, transformers or "
        "torchvision loads it strictly; the result is then loaded there and compared.",
    )
    parser.add_argument("source", help="a checkpoint or a folder: ours, timm's, torchvision's, transformers', …")
    parser.add_argument("dest", help="a folder; with --to also a .safetensors, .pth, .pt, .bin or .th file")
    parser.add_argument("--to", type=str, default="ours", help=f"{', '.join(TARGETS)}")
    parser.add_argument("--name", type=str | None, default=None, help="the model, where the tensors cannot tell")
    parser.add_argument("--heads", type=int | None, default=None, help="attention heads, where the tensors cannot tell")
    parser.add_argument("--num_classes", type=int | None, default=None, help="another number: a fresh head")
    parser.add_argument("--img_size", type=int | None, default=None, help="another image size: positions are resampled")
    parser.add_argument("--patch_size", type=int | None, default=None, help="another patch size: patches are resampled")
    options = parse(parser, argv)
    if options.to not in TARGETS:
        raise UserError(f"--to {options.to}:{closest(options.to, TARGETS)} Choose one of {', '.join(TARGETS)}.")
    source, dest = Path(options.source), Path(options.dest)
    if dest.exists() and dest.resolve() == source.resolve():
        raise UserError(f"{dest} would be written over itself: choose another destination.")
    if options.to == "ours" and dest.suffix in (".safetensors", ".pth", ".pt", ".bin", ".th", ".ckpt"):
        raise UserError(f"{dest}: our format is a folder (model.safetensors and config.json); leave out {dest.suffix}.")

    from vision_attn.checkpoints import load_model

    model = load_model(
        source,
        name=options.name,
        num_heads=options.heads,
        num_classes=options.num_classes,
        img_size=options.img_size,
        patch_size=options.patch_size,
    )
    _describe(source, model)
    return _write(model, dest, options.to)


def _describe(source: Path, model: Any) -> None:
    extra = model.config.get("extra") or {}
    count = sum(p.numel() for p in model.parameters())
    args = {key: value for key, value in model.config["args"].items() if key != "attention"}
    given = ", ".join(f"{key}={value}" for key, value in args.items())
    print(
        f"{source}: {extra.get('layout', 'our own format')}, {count:,} parameters, is {model.config['name']}({given})"
    )
    for note in extra.get("assumed", []):
        print(f"assumed: {note}", file=sys.stderr)


def _write(model: nn.Module, dest: Path, target: str) -> int:
    from vision_attn.checkpoints import save_model

    if target == "ours":
        print(f"written to {save_model(model, dest)}")
        return 0
    from vision_attn.checkpoints.compare import compare, picture
    from vision_attn.checkpoints.peers import write_for
    from vision_attn.checkpoints.read import read_state_dict

    file, layout = write_for(model, dest, target)
    print(f"written to {dest if not dest.suffix else file}")
    try:
        peer = layout.peer(model)
    except ModuleNotFoundError:
        print(f"{target} is not installed here, so nothing was compared", file=sys.stderr)
        return 0
    state, _ = read_state_dict(file)
    fill = getattr(layout, "fill_peer", None)
    try:
        if fill is None:
            peer.load_state_dict(state, strict=True)
        else:
            fill(peer, state)
    except RuntimeError as error:
        print(f"{target} does not load it: {' '.join(str(error).split())[:300]}", file=sys.stderr)
        return 1
    import torch

    found = compare(model, peer, picture(model), dtype=torch.float64, stage=getattr(layout, "stage", None))
    print(f"{target} loads it: largest difference of logits {found.difference:.1e}, relative {found.relative:.1e}")
    if not found.relative <= found.allowed:
        print(f"that is more than {found.allowed:.0e}; first differs at: {found.first}", file=sys.stderr)
        return 1
    return 0
