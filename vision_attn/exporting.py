"""A trained classifier for other runtimes: ONNX, or a program of ``torch.export``.

Both begin with the same graph of ``torch.export``. What is written is run on random images and compared with the model
before it gets its name, so a file that computes something else never exists under it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import json
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from vision_attn import __version__
from vision_attn.atomic import atomic_write, atomic_write_text
from vision_attn.attention import Attention, Layout
from vision_attn.attention.config import PATTERN_OPTIONS, SCORE_OPTIONS
from vision_attn.errors import UserError, closest

FORMATS = {"onnx": ".onnx", "torch-export": ".pt2"}
ALLOWED = 1e-4
"""Largest difference of a logit, relative to the largest logit: float32 in another order of sums."""

_PACKAGES = ("onnx", "onnxscript", "onnxruntime")
_LARGEST_ONNX = 2**31 - 2**20  # bytes of one protobuf file
_GROUPS = {"score": SCORE_OPTIONS, "normalizer": (), "pattern": PATTERN_OPTIONS, "position": ()}

Runner = Callable[[Tensor], Tensor]


@dataclasses.dataclass
class Exported:
    """A file that was written and checked.

    Attributes:
        path: the file.
        beside: a JSON file with what an ONNX file says in its metadata; None for ONNX.
        checked: the shapes of images that it was compared on.
        step: (rows, columns) of pixels by which the size of an image may change; None where it is fixed.
        difference: largest difference of a logit.
        relative: that, relative to the largest logit.
        tells: whether the model's logits depend on the image at all; a fresh head of zeros proves nothing.
    """

    path: Path
    beside: Path | None
    checked: list[tuple[int, ...]]
    step: tuple[int, int] | None
    difference: float
    relative: float
    tells: bool


def export_model(
    model: nn.Module, path: str | Path, *, to: str = "onnx", dynamic_size: bool = False, source: str = "the model"
) -> Exported:
    """Write a classifier for another runtime, and compare the file with the model before it is kept.

    The graph takes ``images``, float32 (batch, channels, height, width) with any batch size, preprocessed as the
    metadata says, and gives ``logits`` (batch, classes).

    Args:
        model: in evaluation mode on the CPU, from ``load_model`` or ``create_model``.
        path: the file; written completely or not at all.
        to: ``onnx`` or ``torch-export``.
        dynamic_size: take images of other sizes, too; with patches, of any number of them.
        source: what to call the model in messages.

    Returns:
        What was written, and by how much it differs.

    Raises:
        UserError: no classifier; a mechanism that cannot be exported, by name; packages that are missing; a file that
            computes something else.
    """
    if to not in FORMATS:
        raise UserError(f"--to {to}:{closest(to, FORMATS)} Choose {' or '.join(FORMATS)}.")
    config = getattr(model, "config", None)
    if not isinstance(config, dict) or config.get("task") != "classification":
        task = f"does {config['task']}" if isinstance(config, dict) else "has no configuration"
        raise UserError(f"{source} {task}: only classifiers can be exported.")
    if to == "onnx":
        check_packages()
    model = model.eval()
    if to == "onnx" and _bytes(model) > _LARGEST_ONNX:
        raise UserError(f"{source} is larger than the 2 GB that an ONNX file can hold: use --to torch-export")
    found = Exported(Path(path), None, [], None, 0.0, 0.0, True)

    def write(temporary: Path) -> None:
        with torch.no_grad(), _quiet():
            program, found.step = _program(model, to, dynamic_size, source)
            _save(program, temporary, describe(model, found.step), to)
            _compare(model, _runner(temporary, to), found, to, source)

    found.path = atomic_write(path, write)
    if to == "torch-export":
        text = json.dumps(describe(model, found.step), indent=2, ensure_ascii=False)
        found.beside = atomic_write_text(found.path.with_name(f"{found.path.name}.json"), text + "\n")
    return found


def _program(model: Any, to: str, dynamic_size: bool, source: str) -> tuple[Any, tuple[int, int] | None]:
    """What is to be saved, and the step of image sizes that it takes.

    Raises:
        UserError: naming the mechanism that cannot be exported.
    """
    images = _images(model, 2, model.config["preprocess"]["size"])
    steps = _steps(model) if dynamic_size else [None]
    with portable_kernels(model):
        model(images)  # tables that are kept per size are computed here, and are constants in the graph
        for step in steps:
            try:
                graph = _graph(model, images, step)
                return (graph if to == "torch-export" else _onnx(graph, dynamic_size)), step
            except Exception as error:  # torch.export fails in as many ways as Python does
                if step == steps[-1]:
                    raise UserError(_blame(model, to, dynamic_size, source, error)) from error
    raise AssertionError("there is always a step to try")


def _bytes(model: nn.Module) -> int:
    return sum(t.numel() * t.element_size() for t in model.state_dict().values())


def check_packages() -> None:
    """Refuses where ONNX cannot be written or run.

    Raises:
        UserError: naming the packages and the extra that brings them.
    """
    missing = [name for name in _PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        raise UserError(
            f"--to onnx needs {', '.join(missing)}: pip install 'vision_attn[export]', or --to torch-export"
        )


def describe(model: Any, step: tuple[int, int] | None = None) -> dict[str, Any]:
    """What somebody needs to use the graph: input, preprocessing step by step, labels, and how to build the model.

    Args:
        model: a classifier with ``.config``.
        step: (rows, columns) of pixels by which the size of an image may change; None where it is fixed.
    """
    config = model.config
    preprocess = config["preprocess"]
    height, width = preprocess["size"]
    crop = preprocess.get("crop_pct", 1.0)
    covers = "just covers" if crop == 1 else f"covers 1/{crop:g} of"
    steps = [
        "decode to RGB, 8 bits per channel, turned upright as its EXIF tag says",
        f"resize ({preprocess.get('interpolation', 'bilinear')}) so that it {covers} {height} × {width} pixels",
        f"cut {height} × {width} pixels out of the middle",
        "divide by 255",
        f"per channel, subtract the mean {preprocess['mean']} and divide by the standard deviation {preprocess['std']}",
    ]
    sizes = [height, width] if step is None else f"any, in steps of {step[0]} × {step[1]} pixels"
    return {
        "model": config["name"],
        "task": config["task"],
        "input": {"name": "images", "type": "float32", "layout": "batch, channels, height, width", "size": sizes},
        "output": {"name": "logits", "type": "float32", "layout": "batch, classes"},
        "preprocess": preprocess,
        "preprocess_steps": steps,
        "labels": config.get("labels"),
        "config": config,
        "vision_attn": __version__,
    }


@contextlib.contextmanager
def portable_kernels(model: nn.Module) -> Iterator[None]:
    """Kernels that other runtimes have operators for; they compute the same as those they stand in for."""
    layers = [module for module in model.modules() if isinstance(module, Attention)]
    before = [layer.kernel for layer in layers]
    try:
        for layer in layers:
            for layer.kernel in ("sdpa", "explicit", "auto"):
                try:
                    layer._check_choice()
                    break
                except ValueError:  # the kernel cannot serve this layer
                    continue
        yield
    finally:
        for layer, kernel in zip(layers, before, strict=True):
            layer.kernel = kernel


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """The exporter's progress and advice are for its developers."""
    import logging
    import warnings

    level = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings(), open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(level)


def _steps(model: Any) -> list[tuple[int, int]]:
    """By how many pixels the size of an image may change, the smallest to be tried first.

    With patches it is known. A CNN may need sizes that its strides divide, as when it adds what was cut in two ways.
    """
    patch = getattr(getattr(model, "patch_embed", None), "patch_size", None)
    if patch is not None:
        return [(int(patch[0]), int(patch[1]))]
    height, width = model.config["preprocess"]["size"]
    return [(n, n) for n in (1, 4, 8, 32) if height % n == width % n == 0]


def _images(model: Any, batch: int, size: Any) -> Tensor:
    """Random images, from a generator of their own."""
    generator = torch.Generator().manual_seed(batch)
    channels = model.config["args"].get("in_chans", 3)
    return torch.randn(batch, channels, *size, generator=generator)


def _graph(model: nn.Module, images: Tensor, step: tuple[int, int] | None) -> torch.export.ExportedProgram:
    dims: dict[int, Any] = {0: torch.export.Dim("batch")}
    for axis, name, pixels in zip((2, 3), ("height", "width"), step or (), strict=False):
        # Half of the size the model was made for leaves something behind every convolution and pool.
        least = max(2, int(images.shape[axis]) // (2 * pixels) + 1)
        dims[axis] = torch.export.Dim(name, min=least) if pixels == 1 else pixels * torch.export.Dim(name, min=least)
    return torch.export.export(model, (images,), dynamic_shapes=(dims,))


def _onnx(graph: torch.export.ExportedProgram, dynamic_size: bool = False) -> Any:
    names = {0: "batch", **({2: "height", 3: "width"} if dynamic_size else {})}
    return torch.onnx.export(
        graph,
        dynamo=True,
        input_names=["images"],
        output_names=["logits"],
        dynamic_shapes=(names,),
        verbose=False,
        external_data=False,
    )


def _save(program: Any, path: Path, told: Mapping[str, Any], to: str) -> None:
    """Write the program with its metadata."""
    if to == "torch-export":
        with open(path, "wb") as stream:
            torch.export.save(program, stream, extra_files={"vision_attn.json": json.dumps(told, ensure_ascii=False)})
        return
    for key, value in told.items():
        program.model.metadata_props[key] = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    program.save(str(path), external_data=False)


def _runner(path: Path, to: str) -> Runner:
    """The written file as a function."""
    if to == "torch-export":
        with open(path, "rb") as stream:
            return torch.export.load(stream).module()
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    options.log_severity_level = 4  # what goes wrong is raised, and said once
    session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    return lambda images: torch.from_numpy(session.run(["logits"], {"images": images.numpy()})[0])


def _compare(model: nn.Module, run: Runner, found: Exported, to: str, source: str) -> None:
    """Run both on random images and note the differences.

    Raises:
        UserError: the file computes something else, or cannot be run.
    """
    size = model.config["preprocess"]["size"]  # type: ignore[index]
    sizes = [(1, size), (2, size), (5, size)]
    if found.step is not None:
        (rows, columns), (a, b) = found.step, size
        sizes += [(2, (a + 2 * rows, b)), (1, (a, b + 3 * columns)), (3, (a + rows, b + 2 * columns))]
    for batch, (height, width) in sizes:
        images = _images(model, batch, (height, width))
        try:
            expected = model(images)
        except ValueError as error:
            raise UserError(f"{source} takes no images of any size, so leave out --dynamic-size. ({error})") from error
        try:
            logits = run(images)
        except Exception as error:  # a runtime's own errors
            if [height, width] != list(size):  # the graph knows of one size, whatever was asked for
                raise UserError(_blame(model, to, True, source, error)) from error
            raise UserError(
                f"{source}: the exported file cannot be run on images {tuple(images.shape)}, so it was not kept: "
                f"{_first_line(error)}"
            ) from error
        difference = float((logits - expected).abs().max()) if logits.shape == expected.shape else float("inf")
        relative = difference / max(float(expected.abs().max()), 1e-6)
        found.checked.append(tuple(images.shape))
        found.difference, found.relative = max(found.difference, difference), max(found.relative, relative)
        found.tells = found.tells and (batch == 1 or float(expected.std(dim=0, correction=0).max()) > 0)
        if not relative <= ALLOWED:
            text = f"differs by {difference:.1e} (relative {relative:.1e}, allowed {ALLOWED:.0e})"
            if [height, width] != list(size):
                raise UserError(_blame(model, to, True, source, ValueError(f"the file {text}")))
            raise UserError(f"{source}: on images {tuple(images.shape)} the exported file {text}, so it was not kept.")


def _blame(model: Any, to: str, dynamic_size: bool, source: str, error: Exception) -> str:
    """One or two lines that name what cannot be exported.

    Each mechanism that was chosen is tried by itself in one small layer; the model is blamed where all of them pass.
    """
    args = model.config["args"]
    words: Mapping[str, Any] = args.get("attention") or {}
    kind = "with --dynamic-size" if dynamic_size else f"to {to}"
    reason = _first_line(error)
    for group, options in _GROUPS.items():
        if group in words and _fails_alone(
            {k: v for k, v in words.items() if k in (group, *options)}, to, dynamic_size
        ):
            return f"{source}: {group} {words[group]!r} cannot be exported {kind}. ({reason})"
    if dynamic_size:
        with contextlib.suppress(Exception):
            _graph(model, _images(model, 2, model.config["preprocess"]["size"]), None)
            return (
                f"{source}: {_name(model)} cannot be exported for images of any size; leave out --dynamic-size, or "
                f"choose the size with --img_size. ({reason})"
            )
    return f"{source}: {_name(model)} cannot be exported {kind}. ({reason})"


def _name(model: Any) -> str:
    """The model with what was chosen about it."""
    args = model.config["args"]
    chosen = {**(args.get("attention") or {}), **{k: args[k] for k in ("global_pool",) if k in args}}
    words = ", ".join(f"{key}={value}" for key, value in chosen.items())
    return f"{model.config['name']} with {words}" if words else str(model.config["name"])


class _Layer(nn.Module):
    """One attention layer on a grid of patches, to see whether a mechanism can be exported."""

    def __init__(self, words: Mapping[str, Any], size: int) -> None:
        super().__init__()
        self.attn = Attention(16, 2, layout=Layout(0, (size, size)), **words)

    def forward(self, x: Tensor) -> Tensor:
        grid = (x.shape[2], x.shape[3])
        return self.attn(x.flatten(2).transpose(1, 2), layout=Layout(0, grid))


def _fails_alone(words: Mapping[str, Any], to: str, dynamic_size: bool) -> bool:
    images = torch.randn(2, 16, 6, 6)
    try:
        layer = _Layer(words, 6).eval()
        with portable_kernels(layer):
            layer(images)
            graph = _graph(layer, images, (1, 1) if dynamic_size else None)
            graph.module()(torch.randn(3, 16, 8, 7) if dynamic_size else images)
            if to == "onnx":
                _onnx(graph, dynamic_size)
    except Exception:
        return True
    return False


def _first_line(error: BaseException) -> str:
    """The first line that says something, shortened: the exporters write pages."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip(" #-=")]
    return f"{type(error).__name__}: {lines[0][:200]}" if lines else type(error).__name__
