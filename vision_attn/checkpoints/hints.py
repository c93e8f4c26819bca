"""What stands beside the tensors of somebody else's checkpoint, and what is found out about its model."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from vision_attn.errors import UserError
from vision_attn.models import list_models, model_defaults

Shapes = Mapping[str, tuple[int, ...]]

HEADS = {1280: 16, 1408: 16, 1664: 16, 1152: 16}
"""Heads of the published ViTs by their width, where they are not 64 wide each."""

IMAGENET = {"mean": [0.485, 0.456, 0.406], "std": [0.229, 0.224, 0.225]}


@dataclasses.dataclass(frozen=True)
class Hints:
    """All that may help where the tensors do not say enough.

    Attributes:
        path: the file, for messages.
        name: the model, as the caller, the file itself or timm's ``config.json`` names it: ours or theirs.
        told: the name is the caller's own word, and must not be passed over.
        num_heads: attention heads, as the caller says.
        img_size: (height, width) the caller wants; only looked at where the positions fit no square.
        config: another library's ``config.json`` beside the file.
        preprocessor: transformers' ``preprocessor_config.json`` beside the file.
    """

    path: Path
    name: str | None = None
    told: bool = False
    num_heads: int | None = None
    img_size: tuple[int, int] | None = None
    config: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    preprocessor: Mapping[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass
class Found:
    """A model of this zoo that the tensors belong to.

    Attributes:
        name, args: what ``create_model`` takes; plain values only.
        preprocess: ``size``, ``mean``, ``std`` and so on, as far as known; the model's own otherwise.
        labels: names of the classes.
        notes: what was assumed, in a few words each; the user is told.
        headless: the file has features only, no head.
    """

    name: str
    args: dict[str, Any]
    preprocess: dict[str, Any] = dataclasses.field(default_factory=dict)
    labels: list[str] | None = None
    notes: list[str] = dataclasses.field(default_factory=list)
    headless: bool = False


def read_hints(
    path: Path,
    name: str | None = None,
    num_heads: int | None = None,
    img_size: Sequence[int] | int | None = None,
    arch: str | None = None,
) -> Hints:
    """The hints for a file: the caller's, then its own word (``arch``), then those of the JSON files in its folder.

    Raises:
        UserError: one of them is no JSON.
    """
    size = (img_size, img_size) if isinstance(img_size, int) else img_size
    config = _json(path.with_name("config.json"))
    return Hints(
        path=path,
        name=name or arch or config.get("architecture"),  # timm's
        told=name is not None,
        num_heads=num_heads,
        img_size=None if size is None else (int(size[0]), int(size[1])),
        config=config,
        preprocessor=_json(path.with_name("preprocessor_config.json")),
    )


def _json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise UserError(f"{path} is not valid JSON: {error}") from error
    return content if isinstance(content, dict) else {}


def heads(width: int, hints: Hints, found: Found, *, known: int | None = None) -> int:
    """Attention heads of a ViT of this width, which its tensors do not tell.

    Args:
        width: D.
        hints: the caller's number goes first.
        found: is given a note when the number is the custom of this width.
        known: what the name, a config.json or the width of a head said.

    Raises:
        UserError: nobody knows, or the number does not divide the width.
    """
    number = hints.num_heads or known
    if not number:
        custom = HEADS.get(width) or (width // 64 if width % 64 == 0 else None)
        if custom is None:
            raise UserError(
                f"{hints.path}: its layers are {width} wide, and no tensor says into how many heads that is cut. "
                f"Say it: num_heads=… (--heads), or name=… (--name), or put its config.json beside the file."
            )
        found.notes.append(f"{custom} heads, as is usual for width {width}")
        number = custom
    if width % number:
        raise UserError(f"{hints.path}: {number} heads do not divide the width {width} of its layers.")
    return number


def grid(
    length: int, prefix: int, patch: Sequence[int], sizes: Sequence[Sequence[int] | None], hints: Hints
) -> tuple[tuple[int, int], bool]:
    """How many positions are (rows, columns) of patches, and whether the prefix tokens have positions too.

    Args:
        length: positions in the file.
        prefix: class and register tokens.
        patch: (height, width) of a patch.
        sizes: (height, width) in pixels that it may have been trained at, the surest first.
        hints: for the size the caller wants, and the message.

    Raises:
        UserError: no square, and no size that fits.
    """
    # models with registers give positions to the patches alone, others to the class token too
    choices = [length - prefix, length] if prefix else [length]
    choices = choices[::-1] if prefix > 2 else choices
    for size in sizes:
        for n in choices:
            if size is not None and _cells(size, patch) == n:
                return (size[0] // patch[0], size[1] // patch[1]), n != length or not prefix
    for n in choices:
        side = math.isqrt(max(n, 0))
        if n > 0 and side * side == n:
            return (side, side), n != length or not prefix
        if hints.img_size is not None and _cells(hints.img_size, patch) == n:
            return (hints.img_size[0] // patch[0], hints.img_size[1] // patch[1]), n != length or not prefix
    raise UserError(
        f"{hints.path}: {length} positions are no square grid of patches of {patch[0]}×{patch[1]}, even without "
        f"{prefix} prefix tokens. Say the size it was trained at: img_size=… (--img_size)."
    )


def _cells(size: Sequence[int], patch: Sequence[int]) -> int:
    return (size[0] // patch[0]) * (size[1] // patch[1])


def ratio(hidden: int, width: int) -> float:
    """The ``mlp_ratio`` r for which int(width · r) is ``hidden``."""
    value = hidden / width
    while int(width * value) < hidden:  # rounded down by a hair
        value = math.nextafter(value, math.inf)
    return int(value) if value == int(value) else value


def count(shapes: Shapes, prefix: str) -> int:
    """How many numbers follow a prefix: layers of ``blocks.``."""
    return len({key[len(prefix) :].split(".")[0] for key in shapes if key.startswith(prefix)})


def in_zoo(pattern: str, args: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """The model of this zoo with most of these arguments by itself, and the arguments that it has not."""
    best, rest = "", dict(args)
    for name in list_models(pattern):
        defaults = model_defaults(name)
        others = {key: value for key, value in args.items() if key not in defaults or not _same(defaults[key], value)}
        if not best or len(others) < len(rest):
            best, rest = name, others
    # what every configuration says, whether it is the default or not
    always = {key: args[key] for key in ("num_classes", "img_size", "in_chans") if key in args}
    return best, {**always, **rest}


def _same(default: Any, value: Any) -> bool:
    if isinstance(default, tuple | list) and isinstance(value, int):
        return list(default) == [value] * len(default)
    if isinstance(value, tuple | list) and isinstance(default, int):
        return list(value) == [default] * len(value)
    if isinstance(default, tuple | list) and isinstance(value, tuple | list):
        return list(default) == list(value)
    return bool(default == value)


def plain(size: Sequence[int]) -> int | list[int]:
    """One number for a square, a list of two otherwise."""
    return int(size[0]) if size[0] == size[1] else [int(size[0]), int(size[1])]
