"""Numbers about heads: how far they look, how sharply, and how different they are.

Legend: B images, H heads, N queries, M keys, P patches. Class and register tokens lie nowhere, so distances leave them
out, as queries and as keys. Whatever the normalizer, rows are made to sum to 1; the negative entries that implied maps
of Linformer have count as 0. Some rows of a map are looked at after the other, so none is ever held whole.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

from vision_attn.errors import UserError
from vision_attn.explain.maps import Images, recording
from vision_attn.explain.planes import Plane


@dataclasses.dataclass(frozen=True)
class HeadStatistics:
    """Numbers about one attention layer, means over images and queries.

    Attributes:
        entropy: (H,) in nats, over all keys.
        uniform: the entropy of a head that looks at all keys alike that get any weight.
        distance: (H,) mean distance in pixels between a patch and what it looks at; NaN where tokens lie nowhere.
        diversity: (H, H) Jensen–Shannon divergence of two heads in bits, from 0 (the same) to 1.
        implied: whether the map is one that the result implies (Linformer, Performer); numbers about it are to be
            called implied too.
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


class Distances(dict[str, Tensor]):
    """Layer name → (H,) mean distance in pixels.

    Attributes:
        implied: layers whose maps, and so distances, are those that their results imply (Linformer, Performer).
        elsewhere: layers that were left out because their queries or keys do not lie on the image.
    """

    def __init__(self) -> None:
        super().__init__()
        self.implied: frozenset[str] = frozenset()
        self.elsewhere: tuple[str, ...] = ()


def mean_attention_distance(model: nn.Module, images: Images, *, layers: str | Sequence[str] = "all") -> Distances:
    """Mean distance in pixels between a patch and what it looks at, per head (Dosovitskiy et al. 2020, figure 7).

    Args:
        model: with attention over patches; left as it is.
        images: (B, C, H, W), normalized.
        layers: as for ``attention_maps``; layers whose tokens do not lie on the image are left out, and named in
            ``elsewhere``.

    Returns:
        Layer name → (H,) pixels, the mean over images and over patches as queries.

    Raises:
        UserError: the model has no attention over patches.
    """
    found = Distances()
    statistics = head_statistics(model, images, layers=layers, divergence=False)
    found.update((name, one.distance) for name, one in statistics.items() if not one.distance.isnan().any())
    found.implied = frozenset(name for name in found if statistics[name].implied)
    found.elsewhere = tuple(name for name in statistics if name not in found)
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

    Args:
        model, images, mask, layers: as for ``attention_maps``.
        divergence: whether heads are compared, which costs H² passes over the map.
    """
    with recording(model, images, mask=mask, layers=layers, hold="rows") as run:
        return {
            name: _statistics(run.pieces(name), run.planes(name), run.recorder.implied(name), divergence)
            for name in run.names()
        }


def _statistics(
    pieces: Iterable[tuple[int, Tensor]], planes: tuple[Plane | None, Plane | None], implied: bool, divergence: bool
) -> HeadStatistics:
    """Numbers about a map that comes some rows at a time: number of the first, (B, H, n, M)."""
    where = None if planes[0] is None or planes[1] is None else _Places(planes[0], planes[1])
    entropy, pairs, distance = torch.zeros(()), torch.zeros(()), torch.zeros(())
    uniform, rows, far, h = 0.0, 0.0, torch.zeros(()), 1
    for start, some in pieces:
        some, h = some.clamp_min(0), some.shape[1]
        if where is not None:
            sums, there = where.distances(start, some)
            distance, far = distance.to(sums) + sums, far.to(sums) + there
        total = some.sum(-1, keepdim=True)
        some = some / total.clamp_min(1e-12)
        rows += float((total > 0).sum()) / h  # a row that may attend to nothing says nothing
        entropy = entropy.to(some) + _entropy(some).sum((0, 2))
        uniform += float((some > 0).sum(-1).clamp_min(1).log().sum()) / h
        if divergence:
            pairs = pairs.to(some) + _divergences(some)
    rows = max(rows, 1.0)
    pixels = torch.full((h,), float("nan")) if where is None else (distance / far).cpu()
    diversity = (pairs / rows).cpu().expand(h, h).clone()
    return HeadStatistics((entropy / rows).cpu(), uniform / rows, pixels, diversity, implied)


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


class _Places:
    """Where the queries and keys of a layer lie, to measure how far its rows look."""

    def __init__(self, queries: Plane, keys: Plane) -> None:
        self.queries, self.keys = queries, keys
        self.place = torch.full((queries.length,), -1)  # of each query on the grid; −1 for those that lie nowhere
        self.place[queries.places().flatten()] = torch.arange(queries.places().numel())

    def distances(self, start: int, weights: Tensor) -> tuple[Tensor, Tensor]:
        """Rows from ``start`` on, (B, H, n, M) → (H,) pixels summed over images and patches, and their number."""
        device = weights.device
        place = self.place[start : start + weights.shape[2]]
        here = (place >= 0).nonzero().flatten()
        near, far = self.queries.centres(device)[place[here].to(device)], self.keys.centres(device)
        some = weights[:, :, here.to(device)][..., self.keys.places(device).flatten()]
        total = some.sum(-1)
        there = total > 0
        mean = (some * torch.cdist(near, far)).sum(-1) / total.clamp_min(1e-12)
        return (mean * there).sum((0, 2)), there.sum((0, 2))
