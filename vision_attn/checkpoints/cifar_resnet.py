"""CIFAR-10 ResNets of https://github.com/akamaster/pytorch_resnet_cifar10 (BSD-2).

Layout: ``conv1 bn1 layer{1,2,3}.{i}.{conv1,bn1,conv2,bn2} linear``, option A shortcuts without parameters;
saved from a DataParallel model (``module.`` is gone by the time the tensors arrive here).
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from typing import Any

from torch import Tensor

from vision_attn.checkpoints.hints import IMAGENET, Found, Hints, Shapes
from vision_attn.models import list_models
from vision_attn.models.cnn import CifarResNet

TITLE = "CIFAR ResNet of akamaster"
PEER = ""

LABELS = ["airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"]


def recognises(keys: Set[str], shapes: Shapes) -> bool:
    """Whether the tensors are of this layout: three stages, a head called ``linear``, no projection shortcuts."""
    needed = {"conv1.weight", "bn1.weight", "layer1.0.conv1.weight", "layer3.0.conv2.weight", "linear.weight"}
    return (
        needed <= keys
        and not any(key.startswith("layer4.") or ".downsample." in key or ".shortcut." in key for key in keys)
        and shapes["conv1.weight"][-1] == 3
    )


def infer(shapes: Shapes, hints: Hints) -> Found:
    """The model of this zoo that has these tensors."""
    blocks = [len({key.split(".")[1] for key in shapes if key.startswith(f"layer{i}.")}) for i in (1, 2, 3)]
    num_classes, _ = shapes["linear.weight"]
    width, in_chans = shapes["conv1.weight"][:2]
    args: dict[str, Any] = {"num_classes": num_classes, "img_size": 32, "in_chans": in_chans}
    name = f"resnet{2 * sum(blocks) + 2}_cifar"
    if name not in list_models("resnet*_cifar") or len(set(blocks)) > 1:
        name, args["blocks"] = "resnet20_cifar", blocks
    if width != 16:
        args["width"] = width
    # they trained with ImageNet's statistics
    return Found(name, args, preprocess=dict(IMAGENET), labels=LABELS if num_classes == len(LABELS) else None)


def convert(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Their names to ours."""
    return {key.replace("linear.", "head."): value for key, value in state.items()}


def holds(model: Any) -> bool:
    """Whether the repository has models like this: with option A shortcuts."""
    return isinstance(model, CifarResNet) and len(model.stages) == 3


def revert(state: Mapping[str, Tensor], model: Any) -> dict[str, Tensor]:
    """Our names to theirs."""
    return {key.replace("head.", "linear."): value for key, value in state.items()}
