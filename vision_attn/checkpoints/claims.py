"""What a configuration claims, held against sense and against the tensors it came with, before anything is built.

A configuration is a few bytes of JSON that decide how much memory a model takes. So its values are looked at first;
then the model is built without memory, on the meta device, and must have the tensors of the file, name by name.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as registration

from vision_attn.data.images import INTERPOLATIONS, SMALLEST_CROP
from vision_attn.errors import UserError, closest
from vision_attn.models import list_models, model_from_config

KEYS = ("task", "name", "args", "preprocess", "labels", "category_ids", "extra")
LARGEST = 2**20
"""No width, depth or number of classes is larger."""

LARGEST_IMAGE = 8192
"""Pixels on a side."""

MOST_VALUES = 500_000
"""A hundred thousand classes have room, a list that holds itself has not."""

_PRIVATE = (
    "pretrained",
    "pretrained_cfg",
    "pretrained_cfg_overlay",
    "checkpoint_path",
    "cache_dir",
    "scriptable",
    "backbone_weights",
)
"""Arguments by which timm or a detector would open other files, or the network."""

_BUFFERS = 2**28  # bytes of tables that are computed and not stored, beside which a small file may look small


def check_config(config: Any, path: str | Path, *, inferred: bool = False) -> dict[str, Any]:
    """Refuses a configuration with unknown, absurd or mistyped values.

    Args:
        config: what stood in the file.
        path: the file, for the message.
        inferred: whether it was made up from somebody else's files, which may not say how to normalize.

    Returns:
        ``config``.

    Raises:
        UserError: naming the file, the key and what it may be.
    """
    if not isinstance(config, dict) or not isinstance(config.get("name"), str) or not _is_table(config.get("args")):
        raise UserError(f"{path}: the model's configuration must be a table with 'name' and 'args'.")
    _check_tree(config, path)
    for key in config:
        if key not in KEYS:
            raise UserError(
                f"{path}: the model's configuration has an unknown key {key!r}.{closest(str(key), KEYS)} It may have: "
                f"{', '.join(KEYS)}; anything of your own belongs in 'extra'."
            )
    task = config.get("task", "classification")
    if not isinstance(task, str) or not list_models(task=task):
        raise UserError(f"{path}: unknown task {_short(task)}.")
    for key in ("preprocess", "extra"):
        if config.get(key) is not None and not _is_table(config[key]):
            raise UserError(f"{path}: {key} must be a table, not {_short(config[key])}.")
    config.setdefault("task", "classification")
    _check_args(config["args"], path)
    _check_preprocess(config.get("preprocess") or {}, None if inferred else config["args"].get("in_chans", 3), path)
    _check_labels(config.get("labels"), config["args"].get("num_classes"), path)
    _check_ids(config.get("category_ids"), config["args"].get("num_classes"), path)
    return config


def _is_table(value: Any) -> bool:
    return isinstance(value, dict) and all(isinstance(key, str) for key in value)


def _short(value: Any) -> str:
    if isinstance(value, int) and value.bit_length() > 200:
        return f"a number of {value.bit_length()} bits"
    if not isinstance(value, str | int | float):
        return type(value).__name__
    text = repr(value)
    return text if len(text) < 80 else f"{text[:60]}…"


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and -1e300 < value < 1e300


def _check_tree(config: Any, path: str | Path) -> None:
    """Plain values only, not too many, not too deep; shared or circular parts count every time they are met."""
    met, todo = 0, [(config, 0)]
    while todo:
        value, depth = todo.pop()
        met += 1
        if met > MOST_VALUES or depth > 20:
            raise UserError(f"{path}: the model's configuration is too large or nested too deeply to be one.")
        if isinstance(value, dict):
            todo += [(part, depth + 1) for pair in value.items() for part in pair]
        elif isinstance(value, list | tuple):
            todo += [(part, depth + 1) for part in value]
        elif isinstance(value, float) and not math.isfinite(value):
            raise UserError(f"{path}: the model's configuration holds {value}, which is no number.")
        elif not (value is None or isinstance(value, bool | int | float | str)):
            raise UserError(f"{path}: the model's configuration holds a {type(value).__name__}, not plain values.")


def _check_args(args: Mapping[str, Any], path: str | Path, prefix: str = "") -> None:
    """Numbers that could be sizes of something."""
    for key, value in args.items():
        if key in _PRIVATE:
            raise UserError(
                f"{path}: {key!r} may not be an argument of a model in a file: it would open something else."
            )
        if key == "img_size":
            _check_size(value, path, "img_size")
        if isinstance(value, dict):
            _check_args(value, path, f"{prefix}{key}.")
        elif key != "seed":
            for number in _numbers(value):
                if abs(number) > LARGEST:
                    raise UserError(
                        f"{path}: {prefix}{key}={_short(number)} is absurd; no model has more than {LARGEST:,}."
                    )


def _numbers(value: Any) -> Iterator[int | float]:
    if isinstance(value, list | tuple):
        for part in value:
            yield from _numbers(part)
    elif isinstance(value, int | float):
        yield value


def _check_size(value: Any, path: str | Path, key: str) -> None:
    """One or two numbers of pixels."""
    sides = [value, value] if isinstance(value, int) else value
    if not isinstance(sides, list | tuple) or len(sides) != 2 or not all(type(n) is int for n in sides):
        raise UserError(f"{path}: {key} must be one or two whole numbers of pixels, not {_short(value)}.")
    if not all(1 <= n <= LARGEST_IMAGE for n in sides):
        shown = " × ".join(_short(n) for n in sides)
        raise UserError(f"{path}: {key} is {shown} pixels; it must be 1 to {LARGEST_IMAGE} on a side.")


def _check_preprocess(preprocess: Mapping[str, Any], channels: Any, path: str | Path) -> None:
    if "size" in preprocess:
        _check_size(preprocess["size"], path, "preprocess.size")
    for key in ("mean", "std"):
        values = preprocess.get(key, [0.5])
        if not isinstance(values, list | tuple) or not values or not all(_is_number(v) for v in values):
            raise UserError(f"{path}: preprocess.{key} must be a list of one number per channel.")
        if key in preprocess and channels is not None and len(values) != channels:
            raise UserError(f"{path}: preprocess.{key} has {len(values)} numbers for images of {channels} channels.")
        if key == "std" and min(values) <= 0:
            raise UserError(f"{path}: preprocess.std must be positive, not {min(values)}.")
    interpolation = preprocess.get("interpolation", "bilinear")
    if not isinstance(interpolation, str) or interpolation not in INTERPOLATIONS:
        known = ", ".join(INTERPOLATIONS)
        raise UserError(f"{path}: unknown preprocess.interpolation {_short(interpolation)}; there are: {known}.")
    crop = preprocess.get("crop_pct", 1.0)
    if not _is_number(crop) or not SMALLEST_CROP <= crop <= 1:
        raise UserError(
            f"{path}: preprocess.crop_pct must be a share of the image, {SMALLEST_CROP:g} to 1, not {_short(crop)}."
        )


def _check_labels(labels: Any, classes: Any, path: str | Path) -> None:
    if labels is None:
        return
    if not isinstance(labels, list | tuple) or not all(isinstance(label, str) for label in labels):
        raise UserError(f"{path}: labels must be a list of names.")
    if isinstance(classes, int) and len(labels) != classes:
        raise UserError(f"{path}: {len(labels)} labels for {classes} classes.")


def _check_ids(ids: Any, classes: Any, path: str | Path) -> None:
    """The category ids of a detector's data, one for each class."""
    if ids is None:
        return
    if not isinstance(ids, list | tuple) or not all(type(number) is int for number in ids):
        raise UserError(f"{path}: category_ids must be a list of whole numbers.")
    if len(set(ids)) != len(ids) or (isinstance(classes, int) and len(ids) != classes):
        raise UserError(f"{path}: {len(set(ids))} different category_ids in {len(ids)}, for {classes} classes.")


def check_model(config: Mapping[str, Any], state: Mapping[str, Tensor], path: str | Path) -> nn.Module:
    """Builds the model of a configuration without memory, and refuses one that has nothing to do with the tensors.

    Args:
        config: of the model as it was saved.
        state: the tensors it came with, by our names.
        path: the file, for the message.

    Returns:
        The model on the meta device, for its names and shapes to be compared.

    Raises:
        UserError: it cannot be built, or would be far larger than the file.
    """
    name = config["name"]
    try:
        with torch.random.fork_rng(devices=[]), torch.device("meta"), at_most(len(state), f"{path}: {_short(name)}"):
            model = model_from_config(config)
    except ValueError as error:
        raise UserError(f"{path}: cannot build its model {_short(name)}: {error}") from error
    except (TypeError, AttributeError, KeyError, IndexError, ArithmeticError, RuntimeError, MemoryError) as error:
        first = (str(error).splitlines() or [""])[0]
        raise UserError(
            f"{path}: cannot build its model {_short(name)}, its arguments make no sense: "
            f"{type(error).__name__}: {first[:200]}"
        ) from error
    stored = set(model.state_dict())
    computed = sum(b.numel() * b.element_size() for key, b in model.named_buffers() if key not in stored)
    held = sum(t.numel() * t.element_size() for t in state.values())
    if computed > max(held, _BUFFERS):
        raise UserError(f"{path}: {name} with these arguments needs {computed:,} bytes of tables, which is absurd.")
    return model


@contextmanager
def at_most(tensors: int, what: str) -> Iterator[None]:
    """Stops the building of a model that has many more parts than a file has tensors.

    Args:
        tensors: in the file.
        what: file and model, for the message.

    Raises:
        UserError: as soon as there are too many, so that a depth of a million costs no more than a moment.
    """
    thread, left = threading.get_ident(), {"parameters": 4 * tensors + 1000, "parts": 40 * tensors + 10_000}

    def count(kind: str) -> None:
        if threading.get_ident() == thread:
            left[kind] -= 1
            if left[kind] < 0:
                raise UserError(f"{what} with these arguments is far larger than the {tensors} tensors that are there.")

    hooks = [
        registration.register_module_parameter_registration_hook(lambda *_: count("parameters")),
        registration.register_module_module_registration_hook(lambda *_: count("parts")),
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
