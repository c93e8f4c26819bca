"""Parts of a detector: its queries, what its attentions take, and the weights it begins with."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vision_attn.attention import AttentionConfig, padding_mask
from vision_attn.attention.config import PATTERN_OPTIONS
from vision_attn.detection.denoising import Denoising
from vision_attn.errors import UserError
from vision_attn.layers.box_decoder import Queries, at_least_float32

PRIOR = 0.01
"""Probability of every class at the start, where classes are sigmoids (Lin et al. 2017, arXiv 1708.02002)."""

ANCHOR = 0.25
"""Width and height of learned boxes at the start, as a share of the image."""


class ObjectQueries(nn.Module):
    """Learned queries: positions, or contents and boxes.

    Args:
        num: of all groups together.
        dim: D.
        kind: ``learned``, ``point`` or ``box``.
        anchors: of ``box``: whether the boxes are learned; else they come from elsewhere.
    """

    def __init__(self, num: int, dim: int, kind: str, *, anchors: bool = True) -> None:
        super().__init__()
        box = kind == "box"
        self.position = None if box else nn.Parameter(torch.randn(num, dim))
        self.content = nn.Parameter(0.02 * torch.randn(num, dim)) if box else None
        self.anchors = nn.Parameter(spread(num)) if box and anchors else None

    def forward(self, batch: int, num: int) -> Queries:
        """The first ``num`` queries for a batch."""
        # repeated and not expanded: a view of a parameter asks for gradients even where none are wanted, and PyTorch's
        # counter of operations stumbles over it
        position = None if self.position is None else self.position[:num].repeat(1, 1, 1)
        reference = None if self.anchors is None else at_least_float32(self.anchors[:num].repeat(1, 1, 1))
        if self.content is not None:
            return Queries(self.content[:num].repeat(batch, 1, 1), position, reference)
        assert position is not None
        return Queries(torch.zeros_like(position).repeat(batch, 1, 1), position, reference)


def spread(num: int) -> Tensor:
    """(num, 4) logits of boxes whose centres cover the image evenly, the first few of them too.

    They follow the additive recurrence of the plastic number, a quasi-random sequence (Roberts 2018).
    """
    plastic = 1.32471795724474602596
    steps = torch.tensor([1 / plastic, 1 / plastic**2], dtype=torch.float64)
    centre = (0.5 + torch.arange(1, num + 1, dtype=torch.float64)[:, None] * steps) % 1
    size = torch.full_like(centre, ANCHOR)
    return torch.cat([centre, size], dim=1).logit(eps=1e-2).float()


def init_transformer(model: Any) -> None:
    """Xavier's uniform weights for encoder and decoder, as in the original."""
    for part in (model.encoder, model.decoder, model.selection):
        for parameter in [] if part is None else part.parameters():
            if parameter.dim() > 1:
                nn.init.xavier_uniform_(parameter)


def init_heads(model: Any) -> None:
    """Rare classes where they are sigmoids; boxes that begin at their references."""
    heads = [model] if model.selection is None else [model, model.selection]
    for head in heads:
        if model.classification == "sigmoid":
            nn.init.constant_(head.class_embed.bias, math.log(PRIOR / (1 - PRIOR)))
        if head is not model or model.decoder.reference != "none":
            last = head.bbox_embed.layers[-1]
            nn.init.zeros_(last.weight)
            nn.init.zeros_(last.bias)


def with_denoising(queries: Queries, denoising: Denoising, content: Tensor) -> Queries:
    """Denoising queries in front of the learned ones, hidden from them; padding is hidden from all."""
    assert queries.reference is not None
    batch, m = denoising.labels.shape
    boxes = denoising.boxes.to(queries.reference.dtype).logit(eps=1e-3)
    learned = queries.reference.expand(batch, -1, -1)
    mask = denoising.mask.clone()
    if queries.mask is not None:
        mask[m:, m:] &= queries.mask
    seen = F.pad(denoising.valid, (0, learned.shape[1]), value=True)  # (B, M + N)
    return Queries(
        torch.cat([content.to(queries.content.dtype), queries.content], dim=1),
        None,
        torch.cat([boxes, learned], dim=1),
        mask[None, None] & padding_mask(seen),
    )


def mechanisms(
    config: AttentionConfig,
    own: Mapping[str, Any] | None,
    cross: Mapping[str, Any] | None,
    dropout: float,
) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """What the three kinds of attention take. Patterns and positions of a grid mean nothing to queries."""
    if config.position in ("learned", "sinusoidal_1d"):
        raise UserError(
            f"attention position={config.position!r}: positions of a detector are waves, which fit images of all sizes "
            "and their padding; leave it out, or choose one that acts inside the layers, 'none' for none"
        )
    encoder = {"dropout": dropout, **config.for_layer()}
    grid_words = {"pattern", "position", *PATTERN_OPTIONS}
    if config.pattern not in (None, "full"):
        grid_words.add("kernel")  # chosen for the pattern's sake
    shared = {key: value for key, value in encoder.items() if key not in grid_words}
    given = (AttentionConfig.of(words).for_layer() for words in (own, cross))
    decoder = [{**shared, **words} if words else shared for words in given]
    return encoder, decoder[0], decoder[1]
