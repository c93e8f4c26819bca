"""Attention in which content and position have projections of their own.

Legend: B batch, H heads, N queries, M keys, D token width, d head width.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from vision_attn.attention.multihead import Attention


class ConditionalAttention(Attention):
    """Multi-head attention whose positions do not pass through the matrices of the content.

    Without ``concat`` a query is W x + W' p, and so is a key. With it the two stand side by side in every head, so that
    the score is the sum of how well contents and how well positions agree: the queries of a detector then look for a
    place without having to unlearn it from the content (Meng et al. 2021, arXiv 2108.06152, section 3.3).

    Args:
        dim: D, of tokens, context and positions.
        num_heads: H; a head of ``concat`` compares 2 D / H numbers, and mixes values of D / H.
        concat: side by side, for cross-attention; or added, for self-attention.
        content_pos: with ``concat``: a second position is added to the content of the queries, and the keys' to theirs,
            as in the first layer of a decoder, whose content says nothing yet.
        **options: as for ``Attention``.

    Raises:
        ValueError: an option that asks for another projection (``num_kv_heads``, ``tie_kv``, ``two_step``,
            ``key_bias``, ``context_dim``), or the errors of ``Attention``.
    """

    def __init__(
        self, dim: int, num_heads: int, *, concat: bool = False, content_pos: bool = False, **options: Any
    ) -> None:
        plain = {
            "tie_kv": False,
            "two_step": False,
            "key_bias": True,
            "num_kv_heads": num_heads,
            "context_dim": dim,
        }
        for name, value in plain.items():
            if options.pop(name, None) not in (None, value):
                raise ValueError(f"{name} is not for attention with positions of its own; leave it out")
        bias = options.get("qkv_bias", True)
        super().__init__(dim, num_heads, head_dim=(1 + concat) * dim // num_heads, **options)
        self.concat = concat
        self.q, self.q_pos = nn.Linear(dim, dim, bias=bias), nn.Linear(dim, dim, bias=bias)
        self.k, self.k_pos = nn.Linear(dim, dim, bias=bias), nn.Linear(dim, dim, bias=bias)
        self.v = nn.Linear(dim, dim, bias=bias)
        self.q_content_pos = nn.Linear(dim, dim, bias=bias) if content_pos else None
        self.proj = nn.Linear(dim, dim, bias=options.get("proj_bias", True))

    def _make_projections(self, *_args: Any, **_options: Any) -> None:
        """They are made after all else, and are others."""

    def _project(
        self, x: Tensor, context: Tensor | None, query_pos: Tensor | None, key_pos: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """(B, H, N, d or 2 d) queries, (B, H, M, d or 2 d) keys, (B, H, M, d) values.

        With ``content_pos``, ``query_pos`` is (B, N, 2 D): the position beside the content, then the one added to it.
        """
        if query_pos is None or key_pos is None:
            raise ValueError("this attention compares positions: it needs query_pos and key_pos")
        source = x if context is None else context
        q, k, v, k_pos = self.q(x), self.k(source), self.v(source), self.k_pos(key_pos)
        if self.q_content_pos is not None:
            query_pos, added = query_pos.chunk(2, dim=-1)
            q, k = q + self.q_content_pos(added), k + k_pos
        q_pos = self.q_pos(query_pos)
        if not self.concat:
            return self._cut(q + q_pos), self._cut(k + k_pos), self._cut(v)
        return self._beside(q, q_pos), self._beside(k, k_pos), self._cut(v)

    def _cut(self, x: Tensor) -> Tensor:
        """(B, N, D) → (B, H, N, D / H)."""
        return x.unflatten(-1, (self.num_heads, -1)).transpose(1, 2)

    def _beside(self, content: Tensor, position: Tensor) -> Tensor:
        """(B, H, N, 2 D / H), each head's content and then its position."""
        content = self._cut(content)
        return torch.cat([content, self._cut(position).expand_as(content)], dim=-1)
