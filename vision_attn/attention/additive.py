"""vᵀtanh(a + b) over all pairs of queries and keys, without holding the hidden layer of all pairs.

Written out, the hidden layer is (B, H, N, M, hidden): the largest tensor of the model by far. Here it is computed
for a block of pairs at a time, in the forward pass and again in the backward pass. The peak is the result itself and
one block; and since a block stays in the cache, it is faster too.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

BLOCK = {"cpu": 2**18, "other": 2**23}
"""Elements of a block: in the cache on a CPU (measured: 2¹⁶ to 2¹⁸ are best), enough to fill an accelerator."""


def tanh_scores(q: Tensor, k: Tensor, w_q: Tensor, w_k: Tensor, v: Tensor) -> Tensor:
    """vᵀtanh(W_q q + W_k k) for every query and key (Bahdanau et al. 2014, arXiv 1409.0473).

    Args:
        q: (B, H, N, d).
        k: (B, G, M, d_k); G divides H.
        w_q: (H, a, d), a the width of the hidden layer.
        w_k: (H, a, d_k).
        v: (H, a).

    Returns:
        (B, H, N, M) in the dtype of q; hidden layer and sums are float32 at least. A second derivative
        is right, but ``create_graph`` holds the hidden layer.
    """
    (b, h, n, _), (g, m), a = q.shape, k.shape[1:3], v.shape[-1]
    wide = torch.promote_types(q.dtype, torch.float32)
    query = torch.einsum("bhnd,had->bhna", q, w_q.to(q.dtype))
    grouped = w_k.to(k.dtype).unflatten(0, (g, h // g))
    key = torch.einsum("bgmd,grad->bgrma", k, grouped)
    rows = (query.reshape(b * h, n, a), key.reshape(b * h, m, a), v.expand(b, h, a).reshape(b * h, a))
    query, key, v = (x.to(wide) for x in rows)
    if torch.compiler.is_exporting():
        return _by_unit(query, key, v).to(q.dtype).view(b, h, n, m)
    return _TanhScores.apply(query, key, v, q.dtype).view(b, h, n, m)


def _by_unit(query: Tensor, key: Tensor, v: Tensor) -> Tensor:
    """The same from PyTorch's own operations only, for exported graphs and second derivatives: unit by hidden unit."""
    units = zip(query.unbind(-1), key.unbind(-1), v.unbind(-1), strict=True)
    parts = [one[:, None, None] * (q[:, :, None] + k[:, None]).tanh() for q, k, one in units]
    return sum(parts[1:], parts[0])


def _blocks(query: Tensor, key: Tensor) -> Iterator[tuple[slice, slice]]:
    """Slices of rows and of queries, such that the hidden layer of one block has about ``BLOCK`` elements."""
    (s, n, a), m = query.shape, key.shape[1]
    budget = BLOCK.get(query.device.type, BLOCK["other"])
    queries = min(n, max(1, budget // max(1, m * a)))
    rows = min(s, max(1, budget // max(1, queries * m * a)))
    for row in range(0, s, max(1, rows)):
        for i in range(0, n, max(1, queries)):
            yield slice(row, row + rows), slice(i, i + queries)


def _forward(query: Tensor, key: Tensor, v: Tensor, dtype: torch.dtype) -> Tensor:
    """query (S, N, a), key (S, M, a), v (S, a) → (S, N, M)."""
    out = query.new_empty(query.shape[0], query.shape[1], key.shape[1], dtype=dtype)
    for row, i in _blocks(query, key):
        hidden = (query[row, i, None] + key[row, None]).tanh_()  # (s, n, M, a)
        out[row, i] = torch.bmm(hidden.flatten(1, 2), v[row, :, None]).view(hidden.shape[:3])
    return out


def _backward(grad: Tensor, query: Tensor, key: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of query, key and v, from that of the result; the hidden layer is computed again."""
    to_query, to_key, to_v = torch.empty_like(query), torch.zeros_like(key), torch.zeros_like(v)
    for row, i in _blocks(query, key):
        hidden = (query[row, i, None] + key[row, None]).tanh_()
        g = grad[row, i].to(query.dtype)  # (s, n, M)
        to_v[row] += torch.bmm(g.flatten(1)[:, None], hidden.flatten(1, 2))[:, 0]
        slope = hidden.square_().neg_().add_(1).mul_(g[..., None])  # tanh' = 1 − tanh²
        to_query[row, i] = slope.sum(2)
        to_key[row] += slope.sum(1)
    return to_query * v[:, None], to_key * v[:, None], to_v


# To torch.compile both are one operation each: it would unroll the blocks, or hold the hidden layer after all.
_forward_op = torch.library.custom_op("vision_attn::tanh_scores", _forward, mutates_args=())
_backward_op = torch.library.custom_op("vision_attn::tanh_scores_backward", _backward, mutates_args=())


@_forward_op.register_fake
def _(query: Tensor, key: Tensor, v: Tensor, dtype: torch.dtype) -> Tensor:
    return query.new_empty(query.shape[0], query.shape[1], key.shape[1], dtype=dtype)


@_backward_op.register_fake
def _(grad: Tensor, query: Tensor, key: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(query), torch.empty_like(key), torch.empty_like(v)


class _TanhScores(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, v: Tensor, dtype: torch.dtype) -> Tensor:
        ctx.save_for_backward(query, key, v)
        return (_forward_op if torch.compiler.is_compiling() else _forward)(query, key, v, dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        if torch.compiler.is_compiling():
            return *_backward_op(grad, *ctx.saved_tensors), None
        if not torch.is_grad_enabled():
            return *_backward(grad, *ctx.saved_tensors), None
        # Asked for with create_graph: the gradient is to be differentiated itself, so it must be PyTorch's own.
        wanted = [x for x in ctx.saved_tensors if x.requires_grad]
        out = _by_unit(*ctx.saved_tensors).to(grad.dtype)
        found = iter(torch.autograd.grad(out, wanted, grad, create_graph=True))
        return *(next(found) if x.requires_grad else None for x in ctx.saved_tensors), None
