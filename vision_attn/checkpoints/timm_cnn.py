"""CNNs of timm (https://github.com/huggingface/pytorch-image-models, Apache-2.0) and ResNets of torchvision (BSD-3).

The two libraries share the names of ResNets: ``conv1 bn1 layer{i}.{j}.… fc``. timm has some 700 CNNs, too many to build
one after the other, so ``timm_cnns.json`` keeps a fingerprint of each, written by ``scripts/index_timm_cnns.py``: a
hash of the names and shapes of its tensors, but for the head.
"""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Mapping, Set
from pathlib import Path
from typing import Any

from torch import Tensor

from vision_attn.checkpoints import timm_names
from vision_attn.checkpoints.hints import IMAGENET, Found, Hints, Shapes
from vision_attn.errors import UserError
from vision_attn.models import list_models

TITLE = "CNN of timm"
PEER = "timm"
INDEX = Path(__file__).with_name("timm_cnns.json")

HEAD_NAMES = ("fc", "classifier", "head.fc", "head", "last_linear", "head.l", "head_fc", "classif", "head.conv")
"""What classifiers are called, the commonest first."""

RESNETS: tuple[str, ...] = (
    "resnet18",
    "resnet34",
    "resnet50",
    "resnet101",
    "resnet152",
    "resnext50_32x4d",
    "resnext101_32x8d",
)
RESNETS += ("resnext101_64x4d", "wide_resnet50_2", "wide_resnet101_2")
"""Those that torchvision has too, under the same names."""


def fingerprint(shapes: Shapes, head: str) -> str:
    """A hash of all names, and of all shapes but those of the head."""
    rows = []
    for key in sorted(shapes):
        if not key.endswith(".num_batches_tracked"):  # old files have none
            rows.append(key if key.startswith(f"{head}.") else f"{key}:{tuple(shapes[key])}")
    return hashlib.sha256("\n".join(rows).encode()).hexdigest()[:12]


@functools.cache
def index() -> dict[str, list[str]]:
    """Fingerprint → names of timm's CNNs that have these tensors."""
    content = json.loads(INDEX.read_text(encoding="utf-8"))
    found: dict[str, list[str]] = {}
    for name, mark in content["cnns"].items():
        found.setdefault(mark, []).append(name)
    return found


def _candidates(shapes: Shapes) -> tuple[list[str], str]:
    """The CNNs that have these tensors, and what their head is called."""
    for head in HEAD_NAMES:
        if any(key.startswith(f"{head}.") for key in shapes):
            names = index().get(fingerprint(shapes, head))
            if names:
                return names, head
    return [], ""


def recognises(keys: Set[str], shapes: Shapes) -> bool:
    """Whether one of timm's CNNs has exactly these tensors."""
    return bool(_candidates(shapes)[0])


def infer(shapes: Shapes, hints: Hints) -> Found:
    """Its name. Where several have the same tensors, the caller's word, the file's name or the plain one decides.

    Raises:
        UserError: several have these tensors and nothing says which is meant, or the name given is none of them.
    """
    names, head = _candidates(shapes)
    found = Found("", {})
    found.name = _choose(names, hints, found)
    weight = next((shapes[f"{head}.{kind}"] for kind in ("weight", "bias") if f"{head}.{kind}" in shapes), None)
    if weight is None:
        weight = next(value for key, value in shapes.items() if key.startswith(f"{head}.") and value)
    found.args = {"num_classes": weight[0]}
    settings = hints.config.get("pretrained_cfg")
    if isinstance(settings, dict):
        found.preprocess = timm_names.preprocess(settings)
    else:
        found.preprocess = {**IMAGENET, **timm_names.spec(found.name).get("preprocess", {})}
    found.labels = hints.config.get("label_names")
    return found


def _choose(names: list[str], hints: Hints, found: Found) -> str:
    if hints.name:
        base = hints.name.split(".")[0]
        if base in names:
            return base
        if hints.told:
            raise UserError(
                f"{hints.path} holds a {names[0]}{' or the like' if names[1:] else ''}, not a {hints.name}."
            )
    if len(names) == 1:
        return names[0]
    in_file = [name for name in names if name in hints.path.name]
    if in_file:
        return max(in_file, key=len)
    plain = [name for name in names if name in RESNETS]
    if plain:
        others = [name for name in names if name != plain[0]]
        found.notes.append(
            f"{plain[0]}, though {', '.join(others[:4])} {'have' if others[1:] else 'has'} such tensors too"
        )
        return plain[0]
    raise UserError(
        f"{hints.path} holds the tensors of {len(names)} CNNs of timm that compute different things "
        f"({', '.join(names[:5])}{', …' if names[5:] else ''}). Say which: name=… (--name)."
    )


def convert(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The names are ours: it is timm's own model."""
    return dict(state)


def holds(model: Any) -> bool:
    """Whether this is one of timm's, which this zoo takes as they are."""
    return model.config["name"] not in list_models()


def revert(state: Mapping[str, Tensor], model: Any) -> dict[str, Tensor]:
    """The names are theirs."""
    return dict(state)


def peer(model: Any) -> Any:
    """timm's own model, with fresh weights."""
    import timm

    args = {key: value for key, value in model.config["args"].items() if key != "img_size"}
    return timm.create_model(model.config["name"], pretrained=False, **args)


class _Torchvision:
    """The ResNets that torchvision has too, to be written for it; files are recognised as timm's."""

    TITLE = "ResNet of torchvision"
    PEER = "torchvision"

    @staticmethod
    def recognises(keys: Set[str], shapes: Shapes) -> bool:
        return False

    @staticmethod
    def holds(model: Any) -> bool:
        """Whether torchvision has a model of this name."""
        return model.config["name"] in RESNETS

    @staticmethod
    def revert(state: Mapping[str, Tensor], model: Any) -> dict[str, Tensor]:
        """The names are the same."""
        return dict(state)

    @staticmethod
    def peer(model: Any) -> Any:
        """torchvision's own model, with fresh weights."""
        from torchvision.models import get_model

        return get_model(model.config["name"], weights=None, num_classes=model.config["args"].get("num_classes", 1000))


class _Timm:
    """The module as an object, beside the other."""

    TITLE, PEER = TITLE, PEER
    recognises, infer, convert = staticmethod(recognises), staticmethod(infer), staticmethod(convert)
    holds, revert, peer = staticmethod(holds), staticmethod(revert), staticmethod(peer)


LAYOUTS = (_Timm, _Torchvision)
