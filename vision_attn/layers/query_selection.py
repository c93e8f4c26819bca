"""Queries that begin where the encoder already sees something."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from vision_attn.layers.box_decoder import MLP, Memory
from vision_attn.layers.sine import places


class QuerySelection(nn.Module):
    """Every token proposes a box; the best become the references of the queries, whose contents stay learned.

    Mixed query selection of DINO (Zhang et al. 2022, arXiv 2203.03605, section 3.4), on one map.

    Args:
        dim: D.
        num_logits: columns of the class head.
        size: width and height of the box that a token begins with, as a share of the image.
    """

    def __init__(self, dim: int, num_logits: int, *, size: float = 0.1) -> None:
        super().__init__()
        self.size = size
        self.proj, self.norm = nn.Linear(dim, dim), nn.LayerNorm(dim)
        self.class_embed = nn.Linear(dim, num_logits)
        self.bbox_embed = MLP(dim, dim, 4, 3, autocast=False)

    def forward(self, memory: Memory, num_queries: int, num_classes: int) -> tuple[Tensor, dict[str, Tensor]]:
        """The references of the queries, and what the tokens chosen for them predict.

        Args:
            memory: (B, M, D) tokens and where they lie.
            num_queries: how many tokens are chosen, by their best class. Padding never is: where an image has fewer
                tokens, its best ones are chosen once more, in their order.
            num_classes: the first so many logits are classes.

        Returns:
            (B, num_queries, 4) logits of boxes, without gradients; and ``pred_logits`` and ``pred_boxes`` of the same
            tokens.
        """
        tokens = self.norm(self.proj(memory.tokens))
        logits = self.class_embed(tokens)
        boxes = self._anchors(memory.keep) + self.bbox_embed(tokens)
        mask = None if memory.mask is None else memory.mask[:, 0, 0]
        chosen = best_tokens(logits[..., :num_classes].detach().amax(-1), mask, num_queries)[..., None]
        logits, boxes = (x.gather(1, chosen.expand(-1, -1, x.shape[-1])) for x in (logits, boxes))
        return boxes.detach(), {"pred_logits": logits, "pred_boxes": boxes.sigmoid()}

    def _anchors(self, keep: Tensor) -> Tensor:
        """(B or 1, M, 4) logits of a box around every token."""
        rows, columns = places(keep, centred=True)
        size = torch.full_like(rows, self.size)
        return torch.stack([columns, rows, size, size], dim=-1).flatten(1, 2).logit(eps=1e-3)


def best_tokens(scores: Tensor, mask: Tensor | None, num: int) -> Tensor:
    """The best tokens of each image, from the best one down; where there are too few, from the best one again.

    Args:
        scores: (B, M).
        mask: (B or 1, M), False for padding, which is not chosen; None where there is none.
        num: how many.

    Returns:
        (B, num) int64 places.
    """
    tokens = scores.shape[1]
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf"))
    chosen = scores.topk(min(num, tokens), dim=1).indices
    if mask is None and tokens >= num:
        return chosen
    rank = torch.arange(num, device=scores.device)
    real = tokens if mask is None else mask.sum(1, keepdim=True).clamp(min=1)
    return chosen.gather(1, (rank % real).expand(len(scores), -1))
