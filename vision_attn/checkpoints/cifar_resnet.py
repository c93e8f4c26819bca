"""CIFAR-10 ResNets of https://github.com/akamaster/pytorch_resnet_cifar10 (BSD-2).

Layout: ``conv1 bn1 layer{1,2,3}.{i}.{conv1,bn1,conv2,bn2} linear``, option A shortcuts without parameters;
saved from a DataParallel model (``module.`` is gone by the time the tensors arrive here).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from vision_attn.models import list_models

LABELS = ["airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"]
MEAN = [0.485, 0.456, 0.406]  # they trained with ImageNet's statistics
STD = [0.229, 0.224, 0.225]


def matches(state: Mapping[str, Tensor]) -> bool:
    """Whether the tensors are of this layout: three stages, a head called ``linear``, no projection shortcuts."""
    needed = {"conv1.weight", "bn1.weight", "layer1.0.conv1.weight", "layer3.0.conv2.weight", "linear.weight"}
    return (
        needed <= state.keys()
        and not any(key.startswith("layer4.") or ".downsample." in key or ".shortcut." in key for key in state)
        and state["conv1.weight"].shape[-1] == 3
    )


def convert(state: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Our names for the tensors, and the configuration of the model they belong to."""
    blocks = [len({key.split(".")[1] for key in state if key.startswith(f"layer{i}.")}) for i in (1, 2, 3)]
    num_classes, _ = state["linear.weight"].shape
    width, in_chans = state["conv1.weight"].shape[:2]
    args: dict[str, Any] = {"num_classes": num_classes, "img_size": 32, "in_chans": in_chans}
    name = f"resnet{2 * sum(blocks) + 2}_cifar"
    if name not in list_models("resnet*_cifar") or len(set(blocks)) > 1:
        name, args["blocks"] = "resnet20_cifar", blocks
    if width != 16:
        args["width"] = width
    config = {
        "task": "classification",
        "name": name,
        "args": args,
        "preprocess": {"size": [32, 32], "mean": MEAN, "std": STD, "interpolation": "bilinear", "crop_pct": 1.0},
        "labels": LABELS if num_classes == len(LABELS) else None,
        "extra": {"source": "https://github.com/akamaster/pytorch_resnet_cifar10"},
    }
    return {key.replace("linear.", "head."): value for key, value in state.items()}, config
