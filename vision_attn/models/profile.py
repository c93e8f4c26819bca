"""What a model costs: parameters and multiply-accumulates, without allocating either."""

from __future__ import annotations

import dataclasses
import inspect
import re
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from vision_attn.layers.embed import pair
from vision_attn.models.registry import create_model, description, list_models, model_class, model_defaults

SMALL = 100  # pixels: below, models are listed with 10 classes (CIFAR's), above with ImageNet's 1000, detectors with 91


@dataclasses.dataclass
class Part:
    """A direct child of a model, or one that lists layers.

    Attributes:
        name: attribute of the model.
        kind: its class, with a count where it is a list of layers.
        output: shape after it for one image, where it is called as a module.
        params: number of parameters.
        macs: multiply-accumulates for one image.
    """

    name: str
    kind: str
    output: list[int] | None
    params: int
    macs: int


@dataclasses.dataclass
class Profile:
    """Costs of a model for one image.

    Attributes:
        name: as for ``create_model``.
        family: the file of the zoo that defines it, or ``timm``.
        params: number of parameters, frozen ones included.
        macs: multiply-accumulates of matrix products and convolutions.
        img_size: [H, W] in pixels.
        num_classes: outputs.
        parts: the model's children.
    """

    name: str
    family: str
    params: int
    macs: int
    img_size: list[int]
    num_classes: int
    parts: list[Part]


def count_parameters(model: nn.Module) -> int:
    """Number of parameters, frozen ones included."""
    return sum(p.numel() for p in model.parameters())


def count_macs(model: nn.Module, img_size: tuple[int, int] | list[int], in_chans: int = 3) -> int:
    """Multiply-accumulates of one image: of matrix products, attention and convolutions, half the FLOPs.

    Args:
        model: on any device; it is run once in evaluation mode without gradients.
        img_size: (H, W) in pixels.
        in_chans: channels of the image.
    """
    return _count(model, img_size, in_chans)[0]


def profile(
    name: str,
    *,
    img_size: int | list[int] | None = None,
    num_classes: int | None = None,
    in_chans: int = 3,
    **kwargs: Any,
) -> Profile:
    """Cost of a model by name, computed on the meta device: no weights are made and nothing is multiplied.

    Args:
        name: as for ``create_model``.
        img_size: pixels; the model's own size by default (timm: its pretrained size).
        num_classes: by default 10 for models of small images, 91 for other detectors and 1000 for other models.
        in_chans: channels of the images.
        **kwargs: further arguments of the model.

    Raises:
        UserError: as ``create_model``.
    """

    known = name in list_models()
    meant_for = model_defaults(name)["img_size"] if known else 224
    most = 91 if name in list_models(task="detection") else 1000
    classes = num_classes or (10 if max(pair(meant_for)) < SMALL else most)
    with torch.device("meta"):
        model: Any = create_model(name, num_classes=classes, img_size=img_size, in_chans=in_chans, **kwargs)
    size = model.config["preprocess"]["size"]
    macs, parts = _count(model, size, in_chans)
    family = type(model).__module__.split(".")[-1] if known else "timm"
    return Profile(name, family, count_parameters(model), macs, size, classes, parts)


def _count(model: nn.Module, img_size: tuple[int, int] | list[int], in_chans: int) -> tuple[int, list[Part]]:
    """Multiply-accumulates in all and for each child."""
    device = next(model.parameters()).device
    kernels: dict[Any, str] = {m: m.kernel for m in model.modules() if isinstance(getattr(m, "kernel", None), str)}  # type: ignore[misc]
    shapes: dict[str, list[int]] = {}
    hooks = [
        child.register_forward_hook(lambda _m, _i, out, name=name: _note_shape(shapes, name, out))
        for name, child in model.named_children()
    ]
    was_training, all_tokens = model.training, getattr(model, "all_tokens", None)
    learned = [p for p in model.parameters() if p.requires_grad]
    counter = FlopCounterMode(display=False)
    try:
        if all_tokens is not None:
            model.all_tokens = True  # type: ignore[assignment]  # as papers count, though a ViT spares what its head does not read
        for p in learned:  # the counter fails at views of them that no_grad makes, where a module is given one
            p.requires_grad_(False)
        for module in kernels:
            module.kernel = "explicit"  # fused kernels are opaque to the counter on some devices
        with counter, torch.no_grad():
            model.eval()(torch.zeros(1, in_chans, *img_size, device=device))
    finally:
        if all_tokens is not None:
            model.all_tokens = all_tokens
        for p in learned:
            p.requires_grad_(True)
        for module, kernel in kernels.items():
            module.kernel = kernel
        for hook in hooks:
            hook.remove()
        model.train(was_training)
    flops = {name: sum(ops.values()) for name, ops in counter.get_flop_counts().items()}
    root = type(model).__name__
    parts = [_part(name, child, root, flops, shapes) for name, child in model.named_children()]
    return counter.get_total_flops() // 2, [part for part in parts if part.params or part.macs]


def _note_shape(shapes: dict[str, list[int]], name: str, out: Any) -> None:
    """Of parts that give one tensor; the decoder of a detector gives two."""
    if isinstance(out, Tensor):
        shapes[name] = list(out.shape[1:])


def _part(name: str, child: nn.Module, root: str, flops: dict[str, int], shapes: dict[str, list[int]]) -> Part:
    kind, macs = type(child).__name__, flops.get(f"{root}.{name}", 0)
    if isinstance(child, (nn.ModuleList, nn.Sequential)) and len(child):
        kinds = sorted({type(layer).__name__ for layer in child})
        kind = f"{len(child)} x {kinds[0]}" if len(kinds) == 1 else f"{len(child)} layers"
        # a list is no module that is called: its layers are
        macs = macs or sum(flops.get(f"{root}.{name}.{i}", 0) for i in range(len(child)))
    return Part(name, kind, shapes.get(name), count_parameters(child), macs // 2)


def citation(name: str) -> str:
    """Where the architecture comes from: the first arXiv or web address that its description, class or file names."""
    cls = model_class(name)
    for text in (
        description(name),
        (inspect.getdoc(cls) or "").split("Args:")[0],
        inspect.getdoc(inspect.getmodule(cls)) or "",
    ):
        found = re.search(r"arXiv[: ](\d{4}\.\d{4,5})|(https?://[^\s)]+)", text)
        if found:
            return f"https://arxiv.org/abs/{found[1]}" if found[1] else found[2].rstrip(".,")
    return ""
