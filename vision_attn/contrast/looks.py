"""Where a trained model looks: mean attention distance, and effective receptive field, in pixels."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import Tensor, nn

from vision_attn.attention import Attention
from vision_attn.contrast.subsets import StudyData, sample_rows
from vision_attn.data.augment import Augmenter
from vision_attn.errors import UserError

_IMAGES = 32
_SHARE = 0.95
_POINTWISE = (nn.BatchNorm2d, nn.LayerNorm, nn.Dropout, nn.Identity)


def look(model: nn.Module, data: StudyData, augmenter: Augmenter, device: torch.device) -> dict[str, Any]:
    """Both measures of a model, on images of the validation split, balanced over classes.

    Returns:
        ``kind`` (``attention`` or ``cnn``); ``unit``: pixels; ``images``: how many were looked at;
        ``attention_distance``: layer -> one number per head, None for a CNN; ``receptive_field``: see
        :func:`receptive_fields`.
    """
    from vision_attn.explain.distance import mean_attention_distance

    rows = sample_rows(data.val, _IMAGES)
    images = augmenter.normalize(data.val.batch(rows)["image"].to(device))
    distances: dict[str, list[float]] | None = None
    attends = any(isinstance(module, Attention) for module in model.modules())
    if attends:
        distances = {}
        with contextlib.suppress(UserError):  # tokens that lie nowhere have no distance
            distances = {name: heads.tolist() for name, heads in mean_attention_distance(model, images).items()}
    return {
        "kind": "attention" if attends else "cnn",
        "unit": "pixels",
        "images": len(rows),
        "attention_distance": distances,
        "receptive_field": receptive_fields(model, images),
    }


def receptive_fields(model: nn.Module, images: Tensor) -> list[dict[str, Any]]:
    """Effective receptive field (Luo et al. 2016, arXiv 1701.04128) after every block of a model.

    Args:
        model: a CNN or a transformer.
        images: (B, C, H, W), normalized.

    Returns:
        One row per block whose output lies on the image, from first to last: ``layer``; ``distance``: mean distance
        between the middle of a feature and the pixels that move it, weighted by how much they do, so comparable with
        the attention distance; ``radius``: of the circle that holds 95 % of that weight. Both in pixels.
    """
    from vision_attn.explain.receptive_field import effective_receptive_field

    found = []
    for name in _blocks(model):
        with contextlib.suppress(UserError):  # it does not lie on the image any more
            field = effective_receptive_field(model, images, layer=name)
            found.append({"layer": name, **_extent(field.strength.double(), field.centre)})
    return found


def _blocks(model: nn.Module) -> list[str]:
    """Blocks of the model's lists of layers, otherwise its children."""
    found = []
    for name, child in model.named_children():
        if isinstance(child, _POINTWISE):  # sees what the block before it sees
            continue
        inner = list(child.named_children()) if isinstance(child, (nn.ModuleList, nn.Sequential)) else []
        found += [f"{name}.{key}" for key, _ in inner] or [name]
    return found


def _extent(strength: Tensor, centre: tuple[float, float]) -> dict[str, float]:
    """``distance`` and ``radius`` of a map (H, W) that sums to 1, around a place."""
    y = torch.arange(strength.shape[0]) + 0.5 - centre[0]
    x = torch.arange(strength.shape[1]) + 0.5 - centre[1]
    away = torch.hypot(y[:, None], x[None]).double().flatten()
    share = strength.flatten()
    nearest = away.argsort()
    last = min(int((share[nearest].cumsum(0) < _SHARE).sum()), len(away) - 1)
    return {"distance": float((share * away).sum()), "radius": float(away[nearest[last]])}
