"""Numbers about heads: how far they look, how sharply, and how different they are.

Legend: B images, H heads, P patches. Class and register tokens lie nowhere, so they are left out, as queries and as
keys; the weights that are left are made to sum to 1 again.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from vision_attn.errors import UserError
from vision_attn.explain.maps import Images, recording
from vision_attn.explain.planes import Plane

ROWS = 2**23  # weights that are looked at a time


@dataclasses.dataclass(frozen=True)
class HeadStatistics:
    """Numbers about one attention layer, means over images and queries.

    Attributes:
        entropy: (H,) in nats, over all keys.
        uniform: the entropy of a head that looks at all keys alike that get any weight.
        distance: (H,) mean distance in pixels between a patch and what it looks at; NaN where tokens lie nowhere.
        diversity: (H, H) Jensen–Shannon divergence of two heads in bits, from 0 (the same) to 1.
        implied: whether the map is one that the result implies.
    """

    entropy: Tensor
    uniform: float
    distance: Tensor
    diversity: Tensor
    implied: bool

    @property
    def mean_diversity(self) -> float:
        """Mean divergence of two different heads, in bits; NaN for a single head."""
        h = len(self.entropy)
        return float(self.diversity.sum()) / (h * (h - 1)) if h > 1 else float("nan")


def mean_attention_distance(
    model: nn.Module, images: Images, *, layers: str | Sequence[str] = "all"
) -> dict[str, Tensor]:
    """Mean distance in pixels between a patch and what it looks at, per head (Dosovitskiy et al. 2020, figure 7).

    Args:
        model: with attention over patches; left as it is.
        images: (B, C, H, W), normalized.
        layers: as for ``attention_maps``; layers whose tokens do not lie on the image are left out.

    Returns:
        Layer name → (H,) pixels, the mean over images and over patches as queries.

    Raises:
        UserError: the model has no attention over patches.
    """
    found = {name: s.distance for name, s in head_statistics(model, images, layers=layers, divergence=False).items()}
    found = {name: distance for name, distance in found.items() if not distance.isnan().any()}
    if not found:
        raise UserError(f"{type(model).__name__} has no attention from patches to patches, so no distance in pixels.")
    return found


@torch.no_grad()
def head_statistics(
    model: nn.Module,
    images: Images,
    *,
    mask: Tensor | None = None,
    layers: str | Sequence[str] = "all",
    divergence: bool = True,
) -> dict[str, HeadStatistics]:
    """Entropy, distance and diversity of the heads of every attention layer, in one forward pass.

    The maps of one layer and some images at a time are in memory.

    Args:
        model, images, mask, layers: as for ``attention_maps``.
        divergence: whether heads are compared, which costs H² passes over the map.
    """
    with recording(model, images, mask=mask, layers=layers) as run:
        return {
            name: _statistics(run.weights(name), run.planes(name), run.recorder.implied(name), divergence)
            for name in run.names()
        }


def _statistics(
    weights: Tensor, planes: tuple[Plane | None, Plane | None], implied: bool, divergence: bool
) -> HeadStatistics:
    b, h, n, m = weights.shape
    step = max(1, ROWS // (b * h * m))
    entropy, uniform, rows = weights.new_zeros(h), 0.0, 0.0
    pairs = weights.new_zeros(h, h)
    for start in range(0, n, step):
        some = weights[:, :, start : start + step].clamp_min(0)  # implied maps may be a little below 0
        total = some.sum(-1, keepdim=True)
        some = some / total.clamp_min(1e-12)
        rows += float((total > 0).sum()) / h  # a row that may attend to nothing says nothing
        entropy += _entropy(some).sum((0, 2))
        uniform += float((some > 0).sum(-1).clamp_min(1).log().sum()) / h
        if divergence:
            pairs += _divergences(some)
    rows = max(rows, 1.0)
    queries, keys = planes
    distance = torch.full((h,), float("nan"))
    if queries is not None and keys is not None:
        distance = _distance(weights, queries, keys).cpu()
    return HeadStatistics((entropy / rows).cpu(), uniform / rows, distance, (pairs / rows).cpu(), implied)


def _entropy(weights: Tensor) -> Tensor:
    """Of each row, in nats: (…, M) → (…)."""
    return -torch.xlogy(weights, weights).sum(-1)


def _divergences(weights: Tensor) -> Tensor:
    """(B, H, N, M) → (H, H) Jensen–Shannon divergences in bits, sums over images and queries."""
    h = weights.shape[1]
    own, found = _entropy(weights), weights.new_zeros(h, h)
    for i in range(h - 1):
        middle = _entropy((weights[:, i : i + 1] + weights[:, i + 1 :]) / 2)  # (B, H − i − 1, N)
        apart = middle - (own[:, i : i + 1] + own[:, i + 1 :]) / 2
        found[i, i + 1 :] = apart.clamp_min(0).sum((0, 2)) / math.log(2)
    return found + found.T


def _distance(weights: Tensor, queries: Plane, keys: Plane) -> Tensor:
    """(B, H, N, M) → (H,) pixels."""
    i, j = queries.places(weights.device).flatten(), keys.places(weights.device).flatten()
    apart = torch.cdist(queries.centres(weights.device), keys.centres(weights.device))  # (P, P')
    step = max(1, ROWS // (weights.shape[0] * weights.shape[1] * len(j)))
    sums, rows = weights.new_zeros(weights.shape[1]), weights.new_zeros(weights.shape[1])
    for start in range(0, len(i), step):
        some = weights[:, :, i[start : start + step]][..., j].clamp_min(0)
        total = some.sum(-1)
        there = total > 0
        mean = (some * apart[start : start + step]).sum(-1) / total.clamp_min(1e-12)
        sums += (mean * there).sum((0, 2))
        rows += there.sum((0, 2))
    return sums / rows
