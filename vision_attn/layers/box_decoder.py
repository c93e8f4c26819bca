"""The decoder of a detector: queries ask an encoded image, layer by layer, where their objects are.

Legend: B images, L layers, N queries, M image tokens, D width.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from vision_attn.attention import Attention, ConditionalAttention
from vision_attn.attention.core import without_autocast
from vision_attn.layers.box_bias import BoxBias
from vision_attn.layers.decoder import DecoderLayer
from vision_attn.layers.sine import box_waves, places

LIMIT = 7.0
"""Logits of references stay within ±7, so that a box at the border of an image (σ(7) = 0.999) can still come back."""


def at_least_float32(x: Tensor) -> Tensor:
    """Out of half precision, before anything is computed that needs more; what was rounded before stays rounded."""
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x


def within_limit(reference: Tensor) -> Tensor:
    """Logits of boxes within ±``LIMIT``. Gradients pass as if there were no limit, so that a learned box comes back."""
    return reference + (reference.clamp(-LIMIT, LIMIT) - reference).detach()


class MLP(nn.Module):
    """Linear layers with ReLU between them: (…, in_dim) → (…, out_dim).

    Args:
        in_dim, hidden_dim, out_dim: widths.
        num_layers: of which all but the last are followed by a ReLU.
        autocast: False computes in the precision of the weights even under autocast, and gives at least float32: for
            logits of boxes, which bfloat16 rounds by half a pixel of 640.
    """

    def __init__(self, in_dim: int, hidden_dim: int, out_dim: int, num_layers: int, *, autocast: bool = True) -> None:
        super().__init__()
        self.autocast = autocast
        widths = [in_dim, *[hidden_dim] * (num_layers - 1), out_dim]
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in pairwise(widths))

    def forward(self, x: Tensor) -> Tensor:
        if self.autocast:
            return self._compute(x)
        with without_autocast(x):
            return at_least_float32(self._compute(x.to(next(self.parameters()).dtype)))

    def _compute(self, x: Tensor) -> Tensor:
        for layer in self.layers[:-1]:
            x = layer(x).relu()
        return self.layers[-1](x)


@dataclass
class Queries:
    """What the queries bring to the decoder.

    Attributes:
        content: (B, N, D).
        position: (B or 1, N, D) learned positions; None where they follow from the reference.
        reference: (B or 1, N, 2 or 4) logits of points (x, y) or boxes (x, y, w, h); None where there is none.
        mask: broadcastable to (B, 1, N, N), True = may attend to each other.
    """

    content: Tensor
    position: Tensor | None = None
    reference: Tensor | None = None
    mask: Tensor | None = None


@dataclass
class Memory:
    """An encoded image.

    Attributes:
        tokens: (B, M, D), M = h · w, row by row.
        position: (B or 1, M, D).
        keep: (B or 1, h, w), True = image.
        mask: (B, 1, 1, M), False for padding; None where there is none.
    """

    tokens: Tensor
    position: Tensor
    keep: Tensor
    mask: Tensor | None = None


class BoxDecoder(nn.Module):
    """Decoder layers of queries that have a box, a point or a learned place, and one box per query and layer.

    Carion et al. 2020 (arXiv 2005.12872) give a query a learned position. With a reference its position follows from a
    box (DAB-DETR: Liu et al. 2022, arXiv 2201.12329) or a point (Conditional DETR: Meng et al. 2021, arXiv 2108.06152).

    Args:
        dim, num_heads, depth: D, heads, L.
        reference: ``none``, ``point`` or ``box``.
        refine: each layer moves the box that the next one starts from (Zhu et al. 2020, arXiv 2010.04159).
        conditional: positions are compared apart from contents, scaled by what the query has found so far.
        modulate: and the rows and columns of a position weighted by the size of the box (DAB-DETR, section 4.4).
        box_bias: tokens are scored by their distance to the edges of the box (Plain-DETR, arXiv 2308.01904).
        temperature: of the waves that a reference becomes.
        norm_eps: ε of all layer norms.
        attention, cross_attention: mechanism words of the two attentions.
        **layer: further arguments of ``DecoderLayer``.

    Raises:
        ValueError: an option that needs a reference which is not there.
    """

    def __init__(
        self,
        dim: int,
        num_heads: int,
        depth: int,
        *,
        reference: str = "none",
        refine: bool = False,
        conditional: bool = False,
        modulate: bool = False,
        box_bias: bool = False,
        temperature: float = 10000.0,
        norm_eps: float = 1e-5,
        attention: Mapping[str, Any] | None = None,
        cross_attention: Mapping[str, Any] | None = None,
        **layer: Any,
    ) -> None:
        super().__init__()
        _check(reference, refine=refine, conditional=conditional, modulate=modulate, box_bias=box_bias)
        self.reference, self.refine, self.conditional, self.temperature = reference, refine, conditional, temperature

        def cross(i: int) -> dict[str, Any]:
            own = {"concat": True, "content_pos": i == 0} if conditional else {}
            return {**(cross_attention or {}), **own}

        kind = ConditionalAttention if conditional else Attention
        self.layers = nn.ModuleList(
            DecoderLayer(
                dim,
                num_heads,
                norm_eps=norm_eps,
                attention=attention,
                cross_attention=cross(i),
                attention_type=kind,
                **layer,
            )
            for i in range(depth)
        )
        self.norm = nn.LayerNorm(dim, eps=norm_eps)
        self.query_head = MLP(2 * dim, dim, dim, 2) if reference == "box" else None
        self.point_head = MLP(dim, dim, 2, 2, autocast=False) if reference == "point" else None
        self.query_scale = MLP(dim, dim, dim, 2) if conditional else None
        if self.query_scale is not None and depth == 1:
            self.query_scale.requires_grad_(False)  # it is for the layers after the first
        self.size_head = MLP(dim, dim, 2, 2) if modulate else None
        self.biases = nn.ModuleList(BoxBias(num_heads) for _ in range(depth)) if box_bias else None

    def forward(self, queries: Queries, memory: Memory, box_head: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor]:
        """What leaves each layer, normalized, and its boxes.

        Args:
            queries: with the reference that the decoder was built for; a point follows from the learned position.
            memory: the encoded images.
            box_head: (…, D) → (…, 4), what is added to the logits of a reference, or the logits themselves.

        Returns:
            (L, B, N, D), and (L, B, N, 4) logits of centre x, y, width and height.
        """
        x, reference = queries.content, queries.reference
        if self.point_head is not None:
            reference = self.point_head(queries.position)
        elif reference is not None:  # learned, or proposed by a token, it may lie anywhere
            reference = within_limit(at_least_float32(reference))
        axes = None if self.biases is None or reference is None else _axes(memory.keep, reference.dtype)
        outputs, boxes = [], []
        for i, layer in enumerate(self.layers):
            query_pos, context_query_pos = self._positions(i, x, queries.position, reference)
            bias = None
            if self.biases is not None and axes is not None and reference is not None:
                bias = self.biases[i](reference.detach().sigmoid(), *axes)
            x = layer(
                x,
                memory.tokens,
                query_pos=query_pos,
                key_pos=memory.position,
                mask=queries.mask,
                context_bias=bias,
                context_mask=memory.mask,
                context_query_pos=context_query_pos,
            )
            outputs.append(self.norm(x))
            if self.refine and reference is not None:
                boxes.append(reference + box_head(outputs[-1]))
                reference = boxes[-1].detach().clamp(-LIMIT, LIMIT)
        found = torch.stack(outputs)
        if boxes:
            return found, torch.stack(boxes)
        logits = box_head(found)
        if reference is None:
            return found, logits
        n = reference.shape[-1]
        return found, torch.cat([logits[..., :n] + reference, logits[..., n:]], dim=-1)

    def _positions(
        self, i: int, x: Tensor, position: Tensor | None, reference: Tensor | None
    ) -> tuple[Tensor | None, Tensor | None]:
        """Positions of the queries among themselves, and towards the image where those are others."""
        if reference is None:
            return position, None
        place = reference.sigmoid()
        sine = box_waves(place, x.shape[-1], temperature=self.temperature)  # (B, N, D or 2 D)
        sine = sine.to(self.norm.weight.dtype)  # a model in half precision takes no other
        if self.query_head is not None:
            position = self.query_head(sine)
        if self.query_scale is None or position is None:
            return position, None
        towards = sine[..., : x.shape[-1]]
        if i > 0:
            towards = towards * self.query_scale(x)
        if self.size_head is not None:
            ratio = (self.size_head(x).sigmoid() / place[..., 2:]).to(sine.dtype)  # (B, N, 2): width, height
            towards = towards.unflatten(-1, (2, -1)) * ratio.flip(-1)[..., None]  # rows go first in the waves
            towards = towards.flatten(-2)
        if i > 0:
            return position, towards
        position = position.expand_as(towards)
        return position, torch.cat([towards, position], dim=-1)


def _check(reference: str, *, refine: bool, conditional: bool, modulate: bool, box_bias: bool) -> None:
    if reference not in ("none", "point", "box"):
        raise ValueError(f"reference={reference!r}: choose none, point or box")
    for name, wanted in (("refine", refine), ("modulate", modulate), ("box_bias", box_bias)):
        if wanted and reference != "box":
            raise ValueError(f"{name}=True needs queries with a box, not reference={reference!r}")
    if conditional and reference == "none":
        raise ValueError("conditional=True needs queries with a point or a box")
    if modulate and not conditional:
        raise ValueError("modulate=True weighs the positions of conditional=True; set both")


def _axes(keep: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Where rows (B or 1, h) and columns (B or 1, w) of tokens lie in their image."""
    rows, columns = places(keep, centred=True, dtype=dtype)
    return rows[:, :, 0], columns[:, 0, :]
