"""``vision-attn export``: a trained classifier for ONNX or torch.export, checked against the original."""

from __future__ import annotations

import sys
from pathlib import Path

from vision_attn.cli.arguments import make_parser, parse
from vision_attn.errors import UserError, closest

SUFFIXES = {"onnx": ".onnx", "torch-export": ".pt2"}


def run(argv: list[str]) -> int:
    """Load CKPT, write it in another format, and print by how much that differs.

    Raises:
        UserError: the checkpoint cannot be loaded, or not be exported; see :mod:`vision_attn.exporting`.
    """
    parser = make_parser(
        "export",
        "Write a classifier as ONNX (needs the extra `export`) or as a program of torch.export, for batches of any "
        "size. The file is run on random images and compared with the model; one that differs is not kept.",
    )
    parser.add_argument("ckpt", help="a checkpoint as for predict: .ckpt, .safetensors, a folder, hf-hub:user/name …")
    parser.add_argument("--to", type=str, required=True, help=" or ".join(SUFFIXES))
    parser.add_argument("--output", type=str | None, default=None, help="the file; default: named like the checkpoint")
    parser.add_argument(
        "--dynamic-size", "--dynamic_size", action="store_true", help="images of any size, where the model allows that"
    )
    parser.add_argument("--img_size", type=int | None, default=None, help="another image size: positions are resampled")
    parser.add_argument("--name", type=str | None, default=None, help="the model, where the tensors cannot tell")
    options = parse(parser, argv)
    if options.to not in SUFFIXES:
        raise UserError(f"--to {options.to}:{closest(options.to, SUFFIXES)} Choose {' or '.join(SUFFIXES)}.")
    output = Path(options.output) if options.output else default_output(options.ckpt, SUFFIXES[options.to])
    if output.is_dir():
        raise UserError(f"--output {output} is a folder: give a file, {output / f'model{SUFFIXES[options.to]}'}")

    from vision_attn.checkpoints import load_model
    from vision_attn.exporting import check_packages, export_model

    if options.to == "onnx":
        check_packages()  # before a large model is loaded in vain
    model = load_model(options.ckpt, name=options.name, img_size=options.img_size)
    if output.exists() and Path(options.ckpt).exists() and output.samefile(options.ckpt):
        raise UserError(f"{output} would be written over itself: choose another --output.")
    found = export_model(model, output, to=options.to, dynamic_size=options.dynamic_size, source=options.ckpt)
    print(f"written to {found.path}" + (f" and {found.beside}" if found.beside else ""))
    shapes = ", ".join(" × ".join(map(str, shape)) for shape in found.checked)
    print(f"largest difference of logits {found.difference:.1e}, relative {found.relative:.1e}, on images {shapes}")
    if not found.tells:
        print("the logits do not depend on the image (a head of zeros?), so that proves little", file=sys.stderr)
    return 0


def default_output(ckpt: str, suffix: str) -> Path:
    """Beside a file, inside a folder, here for a name of the Hub."""
    path = Path(ckpt)
    if ckpt.startswith(("hf-hub:", "hf_hub:")):
        return Path(f"{ckpt.split('/')[-1].split('@')[0]}{suffix}")
    return path / f"model{suffix}" if path.is_dir() else path.with_suffix(suffix)
