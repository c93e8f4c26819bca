"""From what the head reads, back to the patches: the layers of an encoder as one chain of matrices.

Rollout, flow and relevance differ in the matrix that stands for a layer, and share the way through the model: which
tokens the head reads, the layers from last to first, and what lies between two stages.

Legend: B images, H heads, N tokens, P patches of the image, Q rows that are followed.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from vision_attn.attention.linear import Linformer
from vision_attn.errors import UserError
from vision_attn.explain.maps import Images, Recording, recording
from vision_attn.explain.planes import Plane
from vision_attn.layers.pooling import AttentionPool, HierarchicalPool, SequencePool


@dataclasses.dataclass(frozen=True)
class Chain:
    """The self-attention layers of an encoder, first to last.

    Attributes:
        run: with what the layers used, and the output.
        names: of the layers.
        planes: how their tokens lie.
        readout: (B, 1, N) how much the head reads of each token after the last layer; sums to 1.
    """

    run: Recording
    names: list[str]
    planes: list[Plane]
    readout: Tensor

    def follow(self, through: Callable[[str, Tensor], Tensor], start: Tensor | None = None) -> Tensor:
        """Rows of the product of all layers: (B, Q, N) after the last layer → (B, Q, rows, columns) of patches.

        Args:
            through: a layer's name and rows (B, Q, N) → rows · (B, N, N), how tokens after the layer depend on those
                before. The matrix itself need not be held.
            start: the rows to follow; what the head reads by default.
        """
        rows = self.readout if start is None else start
        after = self.planes[-1]
        for name, plane in zip(reversed(self.names), reversed(self.planes), strict=True):
            if plane.grid != after.grid:
                rows = _unmerge(rows, after, plane)
            rows = _whole(rows, plane)
            rows, after = through(name, rows), plane
            rows = _real(rows, plane)
        return rows[..., after.prefix :].unflatten(-1, after.grid)


def _whole(rows: Tensor, plane: Plane) -> Tensor:
    """(…, prefix + P) → (…, N), with nothing at the tokens that fill windows up."""
    if plane.padding is None or plane.length == rows.shape[-1]:
        return rows
    out = rows.new_zeros(*rows.shape[:-1], plane.length)
    return out.index_copy_(-1, plane.places(rows.device).flatten(), rows)


def _real(rows: Tensor, plane: Plane) -> Tensor:
    return rows if plane.padding is None else rows[..., plane.places(rows.device).flatten()]


def _unmerge(rows: Tensor, after: Plane, before: Plane) -> Tensor:
    """What a merged token has, shared equally by the two by two it was made of; fewer at a border."""
    (height, width), grid = before.grid, rows.unflatten(-1, after.grid)
    spread = grid.repeat_interleave(2, -2).repeat_interleave(2, -1)[..., :height, :width]
    down, across = (torch.ones(side, device=rows.device) for side in before.grid)
    for ones, side in ((down, height), (across, width)):
        ones[: side - side % 2] = 2
    return (spread / (down[:, None] * across)).flatten(-2)


@contextlib.contextmanager
def chain_of(model: nn.Module, images: Images, *, gradients: bool = False) -> Iterator[Chain]:
    """Runs a classifier and yields its chain.

    Raises:
        UserError: the model has no chain of self-attention over the patches of an image.
    """
    pooled: list[Tensor] = []
    pool: Any = getattr(model, "pool", None)
    handle = pool.register_forward_pre_hook(lambda module, x: pooled.append(x[0])) if pool is not None else None
    try:
        with recording(model, images, gradients=gradients, hold="rows") as run:
            names, planes = _encoder(run)
            refuse_signed(run, names)
            n = planes[-1].prefix + planes[-1].grid[0] * planes[-1].grid[1]
            tokens = pooled[-1].detach() if pooled else None
            read = _readout(model, pool, tokens, planes[-1], len(run.output), n)
            yield Chain(run, names, planes, read)
    finally:
        if handle is not None:
            handle.remove()


def _encoder(run: Recording) -> tuple[list[str], list[Plane]]:
    names, planes, others = [], [], []
    for name in run.names():
        queries, keys = run.planes(name)
        if queries is not None and keys is not None:
            names.append(name)
            planes.append(queries)
        elif name.partition(".")[0] != "pool":
            others.append(name)
    if not names or not isinstance(run.output, Tensor) or run.output.dim() != 2:
        raise UserError(
            f"{type(run.model).__name__} has no chain of self-attention from patches to classes; "
            "rollout, flow and relevance are for classifiers such as ViT, CCT and Swin."
        )
    if others:
        raise UserError(
            f"the head of {type(run.model).__name__} does not read patches but what {others[-1]} makes of them, so its "
            "layers are no chain from patches to classes; attention_maps and Grad-CAM serve it."
        )
    return names, planes


def refuse_signed(run: Recording, names: Sequence[str]) -> None:
    """Linformer's maps have negative entries, which are no shares and no capacities, and no weights to differentiate.

    Raises:
        UserError: one of the layers is a Linformer's.
    """
    for name in names:
        if isinstance(run.recorder.calls_of(name)[0].operands.low_rank, Linformer):
            raise UserError(
                f"layer {name} shortens its keys (linformer): it has no weights, and the map that is implied has "
                "negative entries, which rollout, flow and relevance cannot follow. attention_maps shows it."
            )


@torch.no_grad()
def _readout(model: Any, pool: Any, tokens: Tensor | None, plane: Plane, batch: int, n: int) -> Tensor:
    """(B, 1, N) how much of each token the head reads."""
    read = torch.zeros(batch, 1, n, device=next(model.parameters()).device)
    if pool is not None and tokens is not None:
        if isinstance(pool, HierarchicalPool):
            weights = pool.weights(tokens, plane.grid).product
        elif isinstance(pool, AttentionPool | SequencePool):
            weights = pool.weights(tokens)
        else:
            raise UserError(f"nobody knows what {type(pool).__name__} reads of the tokens")
        read[:, 0, n - weights.shape[1] :] = weights
    else:
        kind = getattr(model, "global_pool", "avg")
        if kind not in ("token", "last", "avg"):
            raise UserError(f"nobody knows what {type(model).__name__} with global_pool={kind!r} reads of the tokens")
        token = slice(1 + int(getattr(model, "distilled", False)))
        read[..., {"token": token, "last": slice(n - 1, n), "avg": slice(plane.prefix, n)}[kind]] = 1
    return read / read.sum(-1, keepdim=True)
