"""``vision-attn check checkpoint``: does a file give the model it should?"""

from __future__ import annotations

import dataclasses
import sys
import tempfile
from typing import TYPE_CHECKING, Any

from vision_attn.cli.arguments import make_parser, parse, write_json
from vision_attn.errors import UserError, closest

if TYPE_CHECKING:
    from torch import nn

    from vision_attn.checkpoints.compare import Comparison
    from vision_attn.checkpoints.load import Opened

DTYPES = ("float64", "float32")


def checkpoint(argv: list[str]) -> int:
    """A checkpoint beside the library it comes from, on the same images: the largest difference of logits.

    Returns:
        0 when they agree, 1 when they do not, or the logits show nothing.

    Raises:
        UserError: the file cannot be loaded, or the peer is not there or does not take its tensors.
    """
    parser = make_parser(
        "check checkpoint",
        "Load a checkpoint, run it and its counterpart on the same images, and report the largest difference of logits "
        "and the first layer that differs. Without --against the counterpart is the model saved and loaded again.",
    )
    parser.add_argument("file", help="a checkpoint or a folder, of any layout that load_model takes")
    parser.add_argument(
        "--against",
        type=str | None,
        default=None,
        help="timm:NAME, torchvision:NAME, transformers:DIR; a library alone means its model of the same sizes",
    )
    parser.add_argument("--name", type=str | None, default=None, help="the model, where the tensors cannot tell")
    parser.add_argument("--heads", type=int | None, default=None, help="attention heads, where the tensors cannot tell")
    parser.add_argument("--num_classes", type=int | None, default=None, help="for files without a head: a fresh one")
    parser.add_argument("--dtype", type=str | None, default=None, help="float64 or float32 (default: both)")
    parser.add_argument("--batch_size", type=int, default=2, help="how many images")
    parser.add_argument("--seed", type=int, default=0, help="of the images, and of random weights")
    parser.add_argument(
        "--randomise",
        action="store_true",
        help="random numbers for every tensor first: zeros in the file hide mistakes",
    )
    parser.add_argument("--json", type=str | None, default=None, help="write the result to this file, - for stdout")
    options = parse(parser, argv)
    if options.dtype is not None and options.dtype not in DTYPES:
        raise UserError(f"--dtype {options.dtype}:{closest(options.dtype, DTYPES)} Choose float64 or float32.")
    if options.batch_size < 1:
        raise UserError(f"--batch_size {options.batch_size}: at least one image is needed.")

    import torch

    from vision_attn.checkpoints.compare import compare, picture

    opened = _opened(options)
    model = _build(opened, options)
    peer, stage, what = _peer(opened, model, options)
    results = []
    for dtype in [options.dtype] if options.dtype else DTYPES:
        images = picture(model, options.batch_size, options.seed)
        allowed = 0.0 if options.against is None else None
        results.append(compare(model, peer, images, dtype=getattr(torch, dtype), allowed=allowed, stage=stage))
    _report(opened, model, what, results, options)
    return int(not all(result.holds for result in results))


def _opened(options: Any) -> Opened:
    from vision_attn.checkpoints.compare import randomised
    from vision_attn.checkpoints.load import open_checkpoint

    opened = open_checkpoint(options.file, name=options.name, num_heads=options.heads)
    if options.randomise:
        theirs = randomised(opened.theirs, options.seed)
        state = theirs if opened.layout is None else opened.layout.convert(theirs)
        opened = dataclasses.replace(opened, theirs=theirs, state=state)
    return opened


def _build(opened: Opened, options: Any) -> nn.Module:
    from vision_attn.checkpoints.load import build

    model = build(opened, num_classes=options.num_classes)
    if options.num_classes is not None:  # a head that the file has not: the peer gets it too
        opened.state = {key: value.clone() for key, value in model.state_dict().items()}
        opened.config, opened.layout = model.config, None  # type: ignore[assignment]
    return model


def _peer(opened: Opened, model: nn.Module, options: Any) -> tuple[nn.Module, Any, str]:
    """The counterpart, its names for our modules, and what to call it."""
    from vision_attn.checkpoints import layouts, load_model, peers, save_model

    if options.against is None:
        with tempfile.TemporaryDirectory() as folder:
            return load_model(save_model(model, folder)), None, "itself, saved and loaded again"
    library, _, name = options.against.partition(":")
    if library not in layouts.PEERS:
        raise UserError(
            f"--against {options.against}:{closest(library, layouts.PEERS)} It takes timm:NAME, torchvision:NAME or "
            f"transformers:DIR."
        )
    if name:
        peer, layout = peers.named(opened, model, library, name)
    else:
        peer, layout = peers.same_sizes(opened, model, library)
    return peer, getattr(layout, "stage", None), options.against


def _report(opened: Opened, model: Any, what: str, results: list[Comparison], options: Any) -> None:
    title = opened.layout.TITLE if opened.layout is not None else "our own"
    size = "×".join(map(str, model.config["preprocess"]["size"]))
    lines = [
        f"{opened.path}: {title}, as {model.config['name']}; against {what}; {options.batch_size} images of {size}"
    ]
    lines += [f"assumed: {note}" for note in (model.config.get("extra") or {}).get("assumed", [])]
    for result in results:
        lines.append(
            f"{result.dtype}  largest difference of logits {result.difference:.1e}, relative {result.relative:.1e}, "
            f"allowed {result.allowed:.0e}  {'holds' if result.holds else 'FAILS'}"
        )
        if result.constant:
            lines.append("  all logits are equal (a head of zeros?), which proves nothing: add --randomise")
        elif not result.holds:
            lines.append(f"  first differs at: {result.first or f'none of {result.compared} layers compared'}")
    print("\n".join(lines), file=sys.stderr if options.json == "-" else sys.stdout)
    if options.json:
        rows = [{**dataclasses.asdict(result), "holds": result.holds} for result in results]
        content = {"file": str(opened.path), "layout": title, "name": model.config["name"], "against": what}
        write_json({**content, "results": rows}, options.json)
