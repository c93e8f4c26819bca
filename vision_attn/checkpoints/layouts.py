"""Whose tensors are these? Foreign checkpoint layouts, one module each.

A layout is a module with

* ``TITLE`` for messages and ``PEER``, the library that reads it (one of ``PEERS`` or ``""``);
* ``recognises(keys, shapes) -> bool``: whether the tensors are of this layout;
* ``infer(shapes, hints) -> Found``: the model of this zoo they belong to, with everything that can be read off them;
* ``convert(state) -> state``: the tensors under our names;
* ``revert(state, model) -> state``: the inverse, or a ``UserError`` naming what the peer has no place for;
* ``holds(model) -> bool``: whether the peer has models like this one of ours;
* ``peer(model) -> nn.Module``: the peer's own model of the same sizes, fresh (it may need the library);
* optionally ``stage(name) -> str | None``: the peer's name for a module of ours, where it is not the same, and
  ``write(model, state, folder)``: files that stand beside the tensors.
"""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor

from vision_attn.checkpoints.hints import IMAGENET, Found, Hints, Shapes
from vision_attn.errors import UserError
from vision_attn.models import list_models

FOREIGN = (
    "cifar_resnet",
    "compact",
    "google_vit",
    "detr",
    "transformers_vit",
    "torchvision_vit",
    "swin",
    "timm_vit",
    "timm_cnn",
)
"""Modules of this package, in the order in which they are asked."""

PLAIN: dict[str, tuple[Any, ...]] = {
    "score": ("scaled_dot",),
    "normalizer": ("softmax",),
    "pattern": ("full",),
    "tie_kv": (False,),
    "two_step": (False,),
}
"""The attention that every library has, in the words of ``AttentionConfig``."""

PEERS = ("timm", "transformers", "torchvision")

TORCHVISION = ("vit_b_16", "vit_b_32", "vit_l_16", "vit_l_32", "vit_h_14")
"""Names of ViTs there; the other names are timm's too."""

UNFILTERED = ("ViT of transformers",)
"""Titles of layouts whose libraries resample positions without antialiasing."""


def modules() -> Iterator[Any]:
    """The layouts, each imported when it is asked."""
    for name in FOREIGN:
        try:
            yield from _of(importlib.import_module(f"vision_attn.checkpoints.{name}"))
        except ModuleNotFoundError as error:
            if error.name != f"vision_attn.checkpoints.{name}":
                raise


def _of(module: Any) -> Iterator[Any]:
    """A module is a layout, or holds several in ``LAYOUTS``."""
    yield from getattr(module, "LAYOUTS", (module,))


def shapes_of(state: Mapping[str, Tensor]) -> Shapes:
    """Name → shape."""
    return {key: tuple(value.shape) for key, value in state.items()}


def identify(state: Mapping[str, Tensor]) -> Any | None:
    """The layout of these tensors, or None."""
    shapes = shapes_of(state)
    return next((layout for layout in modules() if layout.recognises(shapes.keys(), shapes)), None)


def describe(layout: Any, state: Mapping[str, Tensor], hints: Hints) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The tensors under our names, and the configuration that builds their model.

    Raises:
        UserError: they are of this layout but fit no model of ours, or something has to be said by the caller.

    Warns:
        UserWarning: what had to be assumed.
    """
    found: Found = layout.infer(shapes_of(state), hints)
    args = dict(found.args)
    if found.headless:
        args["num_classes"] = 0
    detects = found.name in list_models(task="detection")
    config: dict[str, Any] = {
        "task": "detection" if detects else "classification",
        "name": found.name,
        "args": args,
        "preprocess": _preprocess(found),
        "labels": _labels(found.labels, args.get("num_classes")),
        "extra": {"layout": layout.TITLE},
    }
    if detects:  # theirs are the columns of the head, some of which stand for nothing
        config["category_ids"] = list(range(args["num_classes"]))
    if found.notes:
        config["extra"]["assumed"] = found.notes
        warnings.warn(
            f"{hints.path}, a {layout.TITLE}, does not say everything; assumed: {'; '.join(found.notes)}. "
            f"name=… or the config.json that came with it would say.",
            stacklevel=5,
        )
    return layout.convert(state), config


def _preprocess(found: Found) -> dict[str, Any]:
    args = found.args
    chans = args.get("in_chans", 3)
    size = found.preprocess.get("size") or args.get("img_size") or 224
    if args.get("img_size"):  # what the positions are for, whatever the name was trained at
        size = args["img_size"]
    if not found.preprocess.get("mean"):
        found.notes.append("pixels normalized to −1…1")
    told = dict(found.preprocess)
    for key in ("mean", "std"):
        if key in told and len(told[key]) != chans:  # trained on other channels than the name was
            told[key] = [sum(told[key]) / len(told[key])] * chans
    return {
        "mean": [0.5] * chans,
        "std": [0.5] * chans,
        "interpolation": "bilinear",
        "crop_pct": 1.0,
        **told,
        "size": [size, size] if isinstance(size, int) else list(size),
    }


def _labels(labels: Any, num_classes: int | None) -> list[str] | None:
    if isinstance(labels, list) and len(labels) == num_classes and all(isinstance(word, str) for word in labels):
        return labels
    return None


def of_peer(model: Any, name: str) -> Any:
    """The layout of a peer that can hold this model of ours.

    Args:
        model: of this zoo.
        name: one of ``PEERS``.

    Raises:
        UserError: no such peer, or none of its layouts is for such a model.
    """
    if name not in PEERS:
        raise UserError(f"unknown library {name!r}; there are: {', '.join(PEERS)}.")
    for layout in modules():
        if name == layout.PEER and layout.holds(model):
            return layout
    has = [layout.PEER for layout in modules() if layout.PEER and layout.holds(model)]
    where = f"it can be written for {', '.join(dict.fromkeys(has))}" if has else "it is only kept in our own format"
    raise UserError(f"{name} has no model like {model.config['name']} ({type(model).__name__}); {where}.")


def refuse_mechanisms(model: Any, allowed: Mapping[str, tuple[Any, ...]], who: str) -> None:
    """Refuses a model whose attention is not the peer's: the tensors would load there and compute something else.

    Args:
        model: of this zoo.
        allowed: options that the peer has, with the values it has.
        who: the peer's model, for the message.

    Raises:
        UserError: naming the option.
    """
    harmless = ("kernel", "dropout")
    for key, value in (model.config["args"].get("attention") or {}).items():
        if key in harmless or value in allowed.get(key, ()):
            continue
        raise UserError(f"{who} has no attention with {key}={value!r}; the model can only be kept in our own format.")


def imagenet(size: int | list[int], crop_pct: float = 0.875, interpolation: str = "bilinear") -> dict[str, Any]:
    """Preprocessing of ImageNet; by default that of most of torchvision's models."""
    return {**IMAGENET, "interpolation": interpolation, "crop_pct": crop_pct, "size": size}
