"""Cross-attention that can be added to a trained model without disturbing it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from vision_attn.attention import Attention
from vision_attn.layers.mlp import Mlp


class GatedCrossAttention(nn.Module):
    """x + tanh(a) · attention(x, context), then + tanh(b) · MLP: (B, N, D), (B, M, C) → (B, N, D).

    Flamingo (Alayrac et al. 2022, arXiv 2204.14198), figure 4. Both gates, a and b, are learned numbers that begin at
    zero, so that the block begins as the identity, exactly: put between the layers of a trained model it changes
    nothing until it has learned something. At the beginning only the gates have a gradient; the rest follows
    once they have moved.

    Args:
        dim: token width D.
        num_heads: attention heads.
        context_dim: width C of the context; default D.
        mlp_ratio: hidden width of the MLP as a multiple of D.
        dropout: after each projection.
        act: activation of the MLP.
        norm_eps: ε of the layer norms of the tokens; the context is taken as it is.
        attention: what ``Attention`` takes beyond its width and heads.
    """

    def __init__(
        self,
        dim: int,
        num_heads: int,
        *,
        context_dim: int | None = None,
        mlp_ratio: float = 4.0,
        dropout: float = 0.0,
        act: str = "gelu",
        norm_eps: float = 1e-6,
        attention: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(dim, eps=norm_eps)
        self.attn = Attention(dim, num_heads, context_dim=context_dim, proj_dropout=dropout, **(attention or {}))
        self.attn_gate = nn.Parameter(torch.zeros(()))
        self.norm2 = nn.LayerNorm(dim, eps=norm_eps)
        self.mlp = Mlp(dim, int(dim * mlp_ratio), act=act, dropout=dropout)
        self.mlp_gate = nn.Parameter(torch.zeros(()))

    def forward(
        self,
        x: Tensor,
        context: Tensor,
        *,
        query_pos: Tensor | None = None,
        key_pos: Tensor | None = None,
        bias: Tensor | None = None,
        mask: Tensor | None = None,
    ) -> Tensor:
        """(B, N, D) → (B, N, D).

        Args:
            x: tokens.
            context: (B, M, C) tokens that are asked.
            query_pos: (B or 1, N, D), added to the queries.
            key_pos: (B or 1, M, C), added to the keys, not to the values.
            bias, mask: broadcastable to (B, H, N, M), as for ``Attention``.
        """
        seen = self.attn(self.norm1(x), context, query_pos=query_pos, key_pos=key_pos, bias=bias, mask=mask)
        x = x + self.attn_gate.tanh() * seen
        return x + self.mlp_gate.tanh() * self.mlp(self.norm2(x))
