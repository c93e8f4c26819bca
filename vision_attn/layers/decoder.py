"""A transformer decoder layer, and a stack of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from vision_attn.attention import Attention, Layout, causal_mask, merge_masks
from vision_attn.attention.config import LOW_RANK
from vision_attn.layers.encoder import DropPath, LayerScale, drop_path_rates
from vision_attn.layers.mlp import Mlp


def causal_choice(attention: Mapping[str, Any] | None) -> tuple[dict[str, Any], bool]:
    """How an attention layer is made causal, whatever its pattern.

    Args:
        attention: words for ``Attention``.

    Returns:
        The words, with the causal pattern (which kernels know, and can skip work by) where none was chosen; and
        whether each call must bring a causal mask, since the layer has another pattern. A pair then meets where both
        allow it.

    Raises:
        ValueError: the pattern is none of pairs, so that no future can be hidden from it.
    """
    words = dict(attention or {})
    pattern = words.get("pattern")
    if pattern in (None, "full", "causal"):
        return {**words, "pattern": "causal"}, False
    if pattern in LOW_RANK:
        raise ValueError(
            f"pattern={pattern!r} mixes all keys before any query meets them, so it cannot be causal; "
            "choose pattern='causal', or 'window', which is causal here"
        )
    return words, True


class DecoderLayer(nn.Module):
    """Self-attention, cross-attention to a context, MLP: (B, N, D), (B, M, C) → (B, N, D).

    Vaswani et al. 2017 (arXiv 1706.03762), section 3.1: in this order, each part with a residual connection.

    Args:
        dim: token width D.
        num_heads: attention heads.
        context_dim: width C of the context; default D.
        mlp_ratio: hidden width of the MLP as a multiple of D.
        causal: a token attends to itself and the tokens before it, within any pattern that ``attention`` names.
        pre_norm: normalize before each part (Xiong et al. 2020, arXiv 2002.04745), or after the residual sum.
        init_values: initial layer scale; None leaves it out.
        drop_path: probability that a sample skips a part (Huang et al. 2016, arXiv 1603.09382).
        dropout: after each projection.
        act: activation of the MLP.
        norm_eps: ε of the layer norms.
        attention: what the self-attention takes beyond its width and heads.
        cross_attention: the same for the cross-attention, which has its own choices: patterns and positions of one
            sequence mean nothing between two.
        attention_type: class of both attention layers.
    """

    def __init__(
        self,
        dim: int,
        num_heads: int,
        *,
        context_dim: int | None = None,
        mlp_ratio: float = 4.0,
        causal: bool = False,
        pre_norm: bool = True,
        init_values: float | None = None,
        drop_path: float = 0.0,
        dropout: float = 0.0,
        act: str = "gelu",
        norm_eps: float = 1e-6,
        attention: Mapping[str, Any] | None = None,
        cross_attention: Mapping[str, Any] | None = None,
        attention_type: type[Attention] = Attention,
    ) -> None:
        super().__init__()

        def scale() -> nn.Module:
            return nn.Identity() if init_values is None else LayerScale(dim, init_values)

        self.pre_norm = pre_norm
        words, self.masks_future = causal_choice(attention) if causal else (dict(attention or {}), False)
        self.norm1 = nn.LayerNorm(dim, eps=norm_eps)
        self.self_attn = attention_type(dim, num_heads, proj_dropout=dropout, **words)
        self.ls1 = scale()
        self.norm2 = nn.LayerNorm(dim, eps=norm_eps)
        self.cross_attn = attention_type(
            dim, num_heads, context_dim=context_dim, proj_dropout=dropout, **(cross_attention or {})
        )
        self.ls2 = scale()
        self.norm3 = nn.LayerNorm(dim, eps=norm_eps)
        self.mlp = Mlp(dim, int(dim * mlp_ratio), act=act, dropout=dropout)
        self.ls3 = scale()
        self.drop_path = DropPath(drop_path) if drop_path else nn.Identity()

    def forward(
        self,
        x: Tensor,
        context: Tensor,
        *,
        query_pos: Tensor | None = None,
        key_pos: Tensor | None = None,
        bias: Tensor | None = None,
        mask: Tensor | None = None,
        context_bias: Tensor | None = None,
        context_mask: Tensor | None = None,
        context_query_pos: Tensor | None = None,
        layout: Layout | None = None,
    ) -> Tensor:
        """(B, N, D) → (B, N, D).

        Args:
            x: tokens.
            context: (B, M, C) tokens that are asked.
            query_pos: (B or 1, N, D), added to the queries of both attentions and to the keys of the first.
            key_pos: (B or 1, M, C), added to the keys that come from the context, not to its values.
            bias, mask: of the self-attention, broadcastable to (B, H, N, N).
            context_bias, context_mask: of the cross-attention, broadcastable to (B, H, N, M).
            context_query_pos: positions of the queries in the cross-attention, where they are others: (B, N, …).
            layout: how the tokens of ``x`` lie, for self-attention with a pattern or position that asks.
        """
        asked_from = query_pos if context_query_pos is None else context_query_pos
        if self.masks_future:
            mask = merge_masks(mask, causal_mask(x.shape[1], device=x.device))

        def attend_self(x: Tensor) -> Tensor:
            return self.self_attn(x, query_pos=query_pos, key_pos=query_pos, bias=bias, mask=mask, layout=layout)

        def attend_context(x: Tensor) -> Tensor:
            return self.cross_attn(
                x, context, query_pos=asked_from, key_pos=key_pos, bias=context_bias, mask=context_mask
            )

        drop = self.drop_path
        if self.pre_norm:
            x = x + drop(self.ls1(attend_self(self.norm1(x))))
            x = x + drop(self.ls2(attend_context(self.norm2(x))))
            return x + drop(self.ls3(self.mlp(self.norm3(x))))
        x = self.norm1(x + drop(self.ls1(attend_self(x))))
        x = self.norm2(x + drop(self.ls2(attend_context(x))))
        return self.norm3(x + drop(self.ls3(self.mlp(x))))


class Decoder(nn.Module):
    """Decoder layers one after the other, and a last normalization.

    Args:
        dim, num_heads: of every layer.
        depth: number of layers L.
        final_norm: normalize what leaves: needed after pre-norm layers, and DETR (Carion et al. 2020,
            arXiv 2005.12872) has it after post-norm layers too.
        drop_path: stochastic depth of the last layer, growing linearly from 0.
        norm_eps: ε of all layer norms.
        **layer: further arguments of ``DecoderLayer``.
    """

    def __init__(
        self,
        dim: int,
        num_heads: int,
        depth: int,
        *,
        final_norm: bool = True,
        drop_path: float = 0.0,
        norm_eps: float = 1e-6,
        **layer: Any,
    ) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            DecoderLayer(dim, num_heads, drop_path=rate, norm_eps=norm_eps, **layer)
            for rate in drop_path_rates(drop_path, depth)
        )
        self.norm = nn.LayerNorm(dim, eps=norm_eps) if final_norm else nn.Identity()

    def forward(self, x: Tensor, context: Tensor, *, intermediate: bool = False, **options: Any) -> Tensor:
        """(B, N, D) and (B, M, C) → (B, N, D), or (L, B, N, D) with what leaves each layer.

        Args:
            x: tokens.
            context: tokens that are asked, by every layer.
            intermediate: return the output of every layer, each normalized like the last.
            **options: positions, biases, masks and layout, as for ``DecoderLayer.forward``.
        """
        outputs = []
        for layer in self.layers:
            x = layer(x, context, **options)
            if intermediate:
                outputs.append(self.norm(x))
        return torch.stack(outputs) if intermediate else self.norm(x)
