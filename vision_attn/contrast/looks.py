"""Where a trained model looks: mean attention distance, and effective receptive field, in pixels."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from vision_attn.attention import Attention
from vision_attn.contrast.subsets import StudyData
from vision_attn.data.augment import Augmenter
from vision_attn.explain import attention_maps

_IMAGES = 32
_ENERGY = 0.95


def look(model: nn.Module, data: StudyData, augmenter: Augmenter, device: torch.device) -> dict[str, Any]:
    """Both measures of a model, on the first images of the validation split.

    Returns:
        ``kind`` (``attention`` or ``cnn``); ``attention_distance``: layer -> one number per head, None for a CNN;
        ``receptive_field``: see :func:`receptive_fields`; ``images``: how many were looked at; ``unit``: pixels.
    """
    rows = torch.arange(min(_IMAGES, len(data.val)))
    images = augmenter.normalize(data.val.batch(rows)["image"].to(device))
    was_training = model.training
    model.eval()
    attends = any(isinstance(module, Attention) for module in model.modules())
    seen = {
        "kind": "attention" if attends else "cnn",
        "unit": "pixels",
        "images": len(rows),
        "attention_distance": attention_distances(model, images) if attends else None,
        "receptive_field": receptive_fields(model, images),
    }
    model.train(was_training)
    return seen


def attention_distances(model: nn.Module, images: Tensor) -> dict[str, list[float]]:
    """Mean distance between a query and what it attends to (Raghu et al. 2021, arXiv 2108.08810).

    For every head the distances between the centres of two patches are weighted by the attention between them and
    averaged over queries and images. Class and register tokens, which have no place, are left out, and the remaining
    weights of a query divided by their sum. For scale: attention to all of an image of S x S pixels alike is 0.52 S.

    Args:
        model: with attention layers of the core, in evaluation mode.
        images: (B, C, H, W), normalized.

    Returns:
        Layer -> one distance in pixels per head. Layers whose tokens form no grid over the image are left out.
    """
    height, width = images.shape[-2:]
    found = {}
    for name, weights in attention_maps(model, images).items():
        prefix = int(getattr(model, "num_prefix_tokens", 0))
        grid = _grid(weights.shape[-1] - prefix, height, width)
        if grid is None or weights.shape[-2] != weights.shape[-1]:
            continue
        among = weights[..., prefix:, prefix:].double()  # (B, H, N, N)
        rows, columns = grid
        y = (torch.arange(rows, dtype=torch.float64, device=among.device) + 0.5) * height / rows
        x = (torch.arange(columns, dtype=torch.float64, device=among.device) + 0.5) * width / columns
        places = torch.cartesian_prod(y, x)  # (N, 2)
        away = torch.cdist(places, places)  # (N, N)
        mean = (among * away).sum(-1) / among.sum(-1).clamp_min(1e-12)  # (B, H, N)
        found[name] = mean.mean((0, 2)).tolist()
    return found


def _grid(tokens: int, height: int, width: int) -> tuple[int, int] | None:
    """(rows, columns) with so many places in the proportions of the image."""
    rows = round(math.sqrt(tokens * height / width))
    return (rows, tokens // rows) if rows and tokens % rows == 0 else None


def receptive_fields(model: nn.Module, images: Tensor) -> list[dict[str, Any]]:
    """Effective receptive field (Luo et al. 2016, arXiv 1701.04128) after every stage or layer of a model.

    The gradient of the middle place of a layer's output (its channels summed with random signs) with respect to the
    pixels, in absolute value, summed over channels and averaged over images, is a map of what that place sees.

    Args:
        model: in evaluation mode.
        images: (B, C, H, W), normalized.

    Returns:
        One row per layer, from first to last: ``layer``; ``distance``: mean distance of the map's mass from its middle,
        comparable with the attention distance; ``radius``: of the circle around the middle that holds 95 % of the mass.
        Both in pixels.
    """
    outputs: dict[str, Tensor] = {}
    hooks = [
        module.register_forward_hook(lambda _m, _i, out, name=name: outputs.__setitem__(name, out))
        for name, module in _layers(model)
    ]
    pixels = images.detach().clone().requires_grad_()
    try:
        with torch.enable_grad():
            model(pixels)
    finally:
        for hook in hooks:
            hook.remove()
    found = []
    for name, out in outputs.items():
        middle = (
            _middle(out, int(getattr(model, "num_prefix_tokens", 0)), images.shape[-2:]) if out is not None else None
        )
        if middle is None:
            continue
        unit, place = middle
        generator = torch.Generator().manual_seed(0)
        signs = torch.randint(0, 2, unit.shape, generator=generator).to(unit) * 2 - 1
        (gradient,) = torch.autograd.grad((unit * signs).sum(), pixels, retain_graph=True)
        found.append({"layer": name, **_extent(gradient.detach().double().abs().sum(1).mean(0), place)})
    return found


def _layers(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """The parts after which to look: blocks of lists of layers, otherwise the model's children."""
    found = []
    for name, child in model.named_children():
        inner = list(child.named_children()) if isinstance(child, (nn.ModuleList, nn.Sequential)) else []
        found += [(f"{name}.{key}", module) for key, module in inner] or [(name, child)]
    return found


def _middle(out: Any, prefix: int, size: torch.Size) -> tuple[Tensor, tuple[float, float]] | None:
    """The vectors (B, D) at the middle of an output, and the place of that middle in pixels; None without a grid."""
    if not isinstance(out, Tensor) or not out.requires_grad:
        return None
    if out.ndim == 4:
        rows, columns = out.shape[-2:]
        unit = out[:, :, rows // 2, columns // 2]
    elif out.ndim == 3 and (grid := _grid(out.shape[1] - prefix, *size)) is not None:
        rows, columns = grid
        unit = out[:, prefix + rows // 2 * columns + columns // 2]
    else:
        return None
    if rows < 2 or columns < 2:
        return None
    return unit, ((rows // 2 + 0.5) * size[0] / rows, (columns // 2 + 0.5) * size[1] / columns)


def _extent(mass: Tensor, middle: tuple[float, float]) -> dict[str, float]:
    """``distance`` and ``radius`` of a map (H, W) around a place."""
    y = torch.arange(mass.shape[0], dtype=torch.float64, device=mass.device) + 0.5 - middle[0]
    x = torch.arange(mass.shape[1], dtype=torch.float64, device=mass.device) + 0.5 - middle[1]
    away = torch.hypot(y[:, None], x[None]).flatten()
    share = mass.flatten() / mass.sum().clamp_min(1e-30)
    nearest = away.argsort()
    within = share[nearest].cumsum(0)
    last = min(int((within < _ENERGY).sum()), len(within) - 1)
    return {"distance": float((share * away).sum()), "radius": float(away[nearest[last]])}
