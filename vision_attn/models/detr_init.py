"""How a detector begins: its queries, and the weights that decide whether it learns at all."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from vision_attn.layers.box_decoder import Queries

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
        reference = None if self.anchors is None else self.anchors[:num].repeat(1, 1, 1)
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
