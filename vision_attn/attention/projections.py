"""Projections of queries, keys and values beyond one linear layer."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class QueryValueBias(nn.Linear):
    """A fused projection to queries, keys and values in which keys have no bias (Swin V2, BEiT).

    With a softmax of dot products a bias of the keys changes nothing; with a cosine score it would.

    Args:
        dim: D.
        queries, keys, values: widths; values may be 0, where the keys are the values.
    """

    def __init__(self, dim: int, queries: int, keys: int, values: int) -> None:
        super().__init__(dim, queries + keys + values, bias=False)
        self.keys = keys
        self.q_bias = nn.Parameter(torch.zeros(queries))
        self.v_bias = nn.Parameter(torch.zeros(values)) if values else None

    def whole_bias(self) -> Tensor:
        """(queries + keys + values,) with zeros for the keys."""
        parts = [self.q_bias, self.q_bias.new_zeros(self.keys)]
        return torch.cat(parts if self.v_bias is None else [*parts, self.v_bias])

    def forward(self, x: Tensor) -> Tensor:
        """(…, D) → (…, queries + keys + values)."""
        return nn.functional.linear(x, self.weight, self.whole_bias())


class TwoStep(nn.Module):
    """A second projection per head after the first: q^{i,h} = W^{q,h} q^i, where q^i = W^q x^i; for k and v alike.

    Two linear maps are one: the layer computes the same functions as a plain one (``merged`` gives its matrix), but
    learns them in other coordinates. Each head reads all of q^i, as in the lecture form of multi-head attention.

    Args:
        num_heads: H.
        num_kv_heads: G.
        head_dim: d.
        tie_kv: the values are the keys.
    """

    def __init__(self, num_heads: int, num_kv_heads: int, head_dim: int, tie_kv: bool = False) -> None:
        super().__init__()
        q, kv = num_heads * head_dim, num_kv_heads * head_dim
        self.q, self.k = nn.Linear(q, q, bias=False), nn.Linear(kv, kv, bias=False)
        self.v = None if tie_kv else nn.Linear(kv, kv, bias=False)

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(B, H, N, d), (B, G, M, d), (B, G, M, d) → the same shapes."""
        tied = v is k
        k = _step(self.k, k)
        return _step(self.q, q), k, k if tied else _step(self.k if self.v is None else self.v, v)

    def merged(self, weight: Tensor) -> Tensor:
        """The one matrix (q + k + v widths, D) that equals a first projection ``weight`` of that shape and this one."""
        steps = [self.q.weight, self.k.weight, *([] if self.v is None else [self.v.weight])]
        return torch.block_diag(*steps) @ weight


def _step(layer: nn.Linear, x: Tensor) -> Tensor:
    b, h, n, d = x.shape
    return layer(x.transpose(1, 2).reshape(b, n, h * d)).view(b, n, h, d).transpose(1, 2)
