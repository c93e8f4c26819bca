"""A transformer encoder layer."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from vision_attn.attention import Attention, Layout
from vision_attn.layers.mlp import make_mlp


class DropPath(nn.Module):
    """In training, each sample skips the branch with a probability (Huang et al. 2016, arXiv 1603.09382).

    torchvision has the same, at the price of two seconds of imports for every command.
    """

    def __init__(self, p: float) -> None:
        super().__init__()
        self.p = p

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or self.p == 0:
            return x
        keep = 1 - self.p
        # those that stay are scaled up, so that the expectation is that of evaluation
        return x * x.new_empty(x.shape[0], *[1] * (x.ndim - 1)).bernoulli_(keep).div_(keep)


class LayerScale(nn.Module):
    """Multiplies each channel by a learned number that begins small (Touvron et al. 2021, arXiv 2103.17239)."""

    def __init__(self, dim: int, init_value: float) -> None:
        super().__init__()
        self.gamma = nn.Parameter(torch.full((dim,), init_value))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.gamma


def drop_path_rates(rate: float, depth: int) -> list[float]:
    """Stochastic depth that grows linearly from 0 at the first layer to ``rate`` at the last."""
    return [rate * i / max(depth - 1, 1) for i in range(depth)]


class EncoderLayer(nn.Module):
    """Self-attention and MLP, each with a residual connection: (B, N, D) → (B, N, D).

    Args:
        dim: token width D.
        num_heads: attention heads.
        mlp_ratio: hidden width of the MLP as a multiple of D.
        pre_norm: normalize before each half (Xiong et al. 2020, arXiv 2002.04745), or after the residual sum.
        norm_stream: with ``pre_norm``, the norm before the MLP also replaces the residual stream, as in the code of
            the compact transformers (Hassani et al. 2021, arXiv 2104.05704).
        init_values: initial layer scale; None leaves it out.
        drop_path: probability that a sample skips a half (Huang et al. 2016, arXiv 1603.09382).
        dropout: after each projection.
        mlp: ``mlp`` or ``swiglu``.
        act: activation of the MLP.
        norm_eps: ε of the layer norms.
        attention: what ``Attention`` takes beyond its width and heads.
    """

    def __init__(
        self,
        dim: int,
        num_heads: int,
        *,
        mlp_ratio: float = 4.0,
        pre_norm: bool = True,
        norm_stream: bool = False,
        init_values: float | None = None,
        drop_path: float = 0.0,
        dropout: float = 0.0,
        mlp: str = "mlp",
        act: str = "gelu",
        norm_eps: float = 1e-6,
        attention: dict[str, Any] | None = None,
    ) -> None:
        super().__init__()
        self.pre_norm, self.norm_stream = pre_norm, norm_stream
        self.norm1 = nn.LayerNorm(dim, eps=norm_eps)
        self.attn = Attention(dim, num_heads, proj_dropout=dropout, **(attention or {}))
        self.ls1 = nn.Identity() if init_values is None else LayerScale(dim, init_values)
        self.norm2 = nn.LayerNorm(dim, eps=norm_eps)
        self.mlp = make_mlp(mlp, dim, int(dim * mlp_ratio), act=act, dropout=dropout)
        self.ls2 = nn.Identity() if init_values is None else LayerScale(dim, init_values)
        self.drop_path = DropPath(drop_path) if drop_path else nn.Identity()

    def forward(
        self,
        x: Tensor,
        *,
        pos: Tensor | None = None,
        bias: Tensor | None = None,
        mask: Tensor | None = None,
        layout: Layout | None = None,
        first: int | None = None,
    ) -> Tensor:
        """(B, N, D) → (B, N, D), or (B, first, D).

        Args:
            x: tokens.
            pos: (B or 1, N, D), added to queries and keys.
            bias, mask: as for ``Attention``, with as many rows as tokens are computed.
            layout: how the tokens lie, for patterns and positions inside the attention.
            first: compute only so many tokens at the beginning. All are attended to; that spares a last layer the
                work on tokens that nobody reads. Attention that is ``whole`` computes them all the same.
        """
        rest = x if first is None else x[:, :first]
        x = rest + self.drop_path(self.ls1(self._attend(x, pos, bias, mask, layout, first)))
        if self.pre_norm:
            tokens = self.norm2(x)
            return (tokens if self.norm_stream else x) + self.drop_path(self.ls2(self.mlp(tokens)))
        x = self.norm1(x)
        return self.norm2(x + self.drop_path(self.ls2(self.mlp(x))))

    def _attend(
        self,
        x: Tensor,
        pos: Tensor | None,
        bias: Tensor | None,
        mask: Tensor | None,
        layout: Layout | None,
        first: int | None,
    ) -> Tensor:
        # Apart from ``forward``, so that the normalized tokens are freed before the MLP takes memory.
        tokens = self.norm1(x) if self.pre_norm else x
        if first is None or self.attn.whole:
            out = self.attn(tokens, query_pos=pos, key_pos=pos, bias=bias, mask=mask, layout=layout)
            return out if first is None else out[:, :first]
        query_pos = None if pos is None else pos[:, :first]
        return self.attn(tokens[:, :first], tokens, query_pos=query_pos, key_pos=pos, bias=bias, mask=mask)
