"""Attention: scores, normalized to weights, mix values.

Legend: B batch, H query heads, G key/value heads (G divides H), N queries, M keys, D token width,
d head width, e value width.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from vision_attn.attention.kernels import Operands, Request, choose_kernel, weights_of
from vision_attn.attention.masks import check_pairwise, open_rows
from vision_attn.attention.normalizers import resolve_normalizer
from vision_attn.attention.recorder import Recorder
from vision_attn.attention.scores import Score, resolve_score


def _without_autocast(q: Tensor) -> AbstractContextManager[None]:
    """The kernels decide on their own precision. The meta device, where only shapes are worked out, has no autocast."""
    return nullcontext() if q.is_meta else torch.autocast(q.device.type, enabled=False)


def _check_heads(q: Tensor, k: Tensor, v: Tensor) -> None:
    if q.dim() != 4 or k.dim() != 4 or v.dim() != 4:
        raise ValueError(f"q, k, v must be (B, H, N, d), got {tuple(q.shape)}, {tuple(k.shape)}, {tuple(v.shape)}")
    if q.shape[0] != k.shape[0] or k.shape[:3] != v.shape[:3]:
        raise ValueError(
            f"q {tuple(q.shape)}, k {tuple(k.shape)} and v {tuple(v.shape)} must agree: one batch size, "
            "and as many keys as values"
        )
    if q.shape[1] % k.shape[1]:
        raise ValueError(f"{k.shape[1]} key/value heads do not divide {q.shape[1]} query heads")


def _operands(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    score: str | Score,
    bias: Tensor | None,
    mask: Tensor | None,
    normalizer: str,
    dropout: float,
) -> tuple[Operands, Tensor | None]:
    """Checks and prepares one call; also returns which rows may attend to anything, None where all may."""
    _check_heads(q, k, v)
    resolve_normalizer(normalizer)
    score = resolve_score(score)
    form = score.as_dot(q, k)
    scale = None
    if form is not None:
        if q.shape[-1] != k.shape[-1]:
            raise ValueError(f"a dot product needs equal widths, got q {tuple(q.shape)} and k {tuple(k.shape)}")
        q, k, scale = form
    pairs = (q.shape[0], q.shape[1], q.shape[2], k.shape[2])
    if bias is not None:
        bias = check_pairwise("bias", bias, pairs)
    some = None
    if mask is not None:
        mask, some = open_rows(check_pairwise("mask", mask, pairs))
    return Operands(q, k, v, scale, score, bias, mask, normalizer, dropout), some


def _run(o: Operands, some: Tensor | None, kernel: str) -> Tensor:
    needs_grad = torch.is_grad_enabled() and (o.q.requires_grad or o.k.requires_grad or o.v.requires_grad)
    request = Request(
        device=o.q.device.type,
        dtype=o.q.dtype,
        batch=o.q.shape[0],
        heads=o.q.shape[1],
        kv_heads=o.k.shape[1],
        queries=o.q.shape[2],
        keys=o.k.shape[2],
        width=o.q.shape[3],
        mask=o.mask is not None,
        bias=o.bias is not None,
        training=needs_grad,
        dropout=o.dropout,
        dot=o.scale is not None,
        normalizer=o.normalizer,
    )
    out = choose_kernel(kernel, request)(o)
    return out if some is None else out * some


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    score: str | Score = "scaled_dot",
    bias: Tensor | None = None,
    mask: Tensor | None = None,
    normalizer: str = "softmax",
    kernel: str = "auto",
    dropout: float = 0.0,
) -> Tensor:
    """normalize(score(q, k) + bias) · v.

    Args:
        q: (B, H, N, d) queries.
        k: (B, G, M, d) keys; G divides H, and H / G query heads share a key head.
        v: (B, G, M, e) values.
        score: name or module; see ``SCORES``.
        bias: broadcastable to (B, H, N, M), added to the scores.
        mask: boolean, broadcastable to (B, H, N, M), True = may attend. (N, M) and (B, N, M) are accepted too.
        normalizer: name; see ``NORMALIZERS``.
        kernel: ``auto`` or a name of ``KERNELS``.
        dropout: probability of dropping a weight; the caller passes 0 outside training.

    Returns:
        (B, H, N, e). Rows that may attend to nothing are zero.

    Raises:
        ValueError: shapes that do not fit (both are named), unknown names, or a kernel that cannot serve this.
    """
    with _without_autocast(q):
        return _run(*_operands(q, k, v, score, bias, mask, normalizer, dropout), kernel)


def attention_weights(
    q: Tensor,
    k: Tensor,
    *,
    score: str | Score = "scaled_dot",
    bias: Tensor | None = None,
    mask: Tensor | None = None,
    normalizer: str = "softmax",
) -> Tensor:
    """The (B, H, N, M) weights themselves; arguments as for ``attend``. Rows sum to 1, or 0 where all is masked."""
    with _without_autocast(q):
        o, some = _operands(q, k, k, score, bias, mask, normalizer, 0.0)
        weights = weights_of(o)
        return weights if some is None else weights * some


class Attention(nn.Module):
    """Multi-head attention: the one module behind self-attention, cross-attention, windows and object queries.

    Order, as most of the field has it: project, normalize queries and keys per head, score, normalize, mix
    values, project (Vaswani et al. 2017, arXiv 1706.03762).

    Args:
        dim: D, width of the tokens and of the result.
        num_heads: H.
        num_kv_heads: G key/value heads shared by groups of query heads; default H.
        head_dim: d; default dim / num_heads.
        context_dim: width of the context in cross-attention; default ``dim``.
        score: name or module; see ``SCORES``.
        normalizer: name; see ``NORMALIZERS``.
        qk_norm: LayerNorm of queries and keys over the head width.
        kernel: ``auto`` or a name of ``KERNELS``; decided per call.
        dropout: probability of dropping an attention weight in training.
        proj_dropout: probability of dropping an entry of the result in training.
        qkv_bias, proj_bias: whether the projections have biases.

    Raises:
        ValueError: heads that do not divide the width, or key/value heads that do not divide the heads.
    """

    def __init__(
        self,
        dim: int,
        num_heads: int,
        *,
        num_kv_heads: int | None = None,
        head_dim: int | None = None,
        context_dim: int | None = None,
        score: str | Score = "scaled_dot",
        normalizer: str = "softmax",
        qk_norm: bool = False,
        kernel: str = "auto",
        dropout: float = 0.0,
        proj_dropout: float = 0.0,
        qkv_bias: bool = True,
        proj_bias: bool = True,
    ) -> None:
        super().__init__()
        kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        if head_dim is None and dim % num_heads:
            raise ValueError(f"num_heads={num_heads} does not divide dim={dim}; choose another, or give head_dim")
        if kv_heads < 1 or num_heads % kv_heads:
            raise ValueError(f"num_kv_heads={kv_heads} does not divide num_heads={num_heads}")
        if not 0 <= dropout < 1:
            raise ValueError(f"dropout={dropout} is no probability below 1")
        self.num_heads, self.num_kv_heads = num_heads, kv_heads
        self.head_dim = d = dim // num_heads if head_dim is None else head_dim
        self.q_width, self.kv_width = num_heads * d, kv_heads * d
        self.normalizer, self.kernel, self.dropout = normalizer, kernel, dropout
        resolve_normalizer(normalizer)
        choose_kernel(kernel, Request("cpu", torch.float32, 1, num_heads, kv_heads, 1, 1, d, normalizer=normalizer))
        self.score = resolve_score(score)
        if context_dim is None or context_dim == dim:
            self.qkv = nn.Linear(dim, self.q_width + 2 * self.kv_width, bias=qkv_bias)
        else:  # keys and values come from tokens of another width
            self.q = nn.Linear(dim, self.q_width, bias=qkv_bias)
            self.kv = nn.Linear(context_dim, 2 * self.kv_width, bias=qkv_bias)
        self.q_norm = nn.LayerNorm(d, eps=1e-6) if qk_norm else nn.Identity()
        self.k_norm = nn.LayerNorm(d, eps=1e-6) if qk_norm else nn.Identity()
        self.proj = nn.Linear(self.q_width, dim, bias=proj_bias)
        self.proj_drop = nn.Dropout(proj_dropout)
        self.recorder: Recorder | None = None  # set by ``record``
        self.recorded_as = ""

    def extra_repr(self) -> str:
        return (
            f"heads={self.num_heads}, kv_heads={self.num_kv_heads}, normalizer={self.normalizer}, kernel={self.kernel}"
        )

    def _heads(self, x: Tensor, heads: int) -> Tensor:
        return x.view(x.shape[0], x.shape[1], heads, self.head_dim).transpose(1, 2)  # (B, heads, N, d)

    def _linear(self, x: Tensor, start: int, stop: int) -> Tensor:
        """The rows ``start … stop`` of the fused projection."""
        bias = self.qkv.bias
        return nn.functional.linear(x, self.qkv.weight[start:stop], None if bias is None else bias[start:stop])

    def _project(
        self, x: Tensor, context: Tensor | None, query_pos: Tensor | None, key_pos: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """(B, H, N, d) queries, (B, G, M, d) keys and values. Positions go to queries and keys only."""
        if hasattr(self, "qkv"):
            if context is None and query_pos is None and key_pos is None:
                heads = self.qkv(x).view(x.shape[0], x.shape[1], -1, self.head_dim)  # (B, N, H + 2G, d)
                # Split and not unbound: the backward pass then writes the gradient of the three in one go.
                q, k, v = heads.split([self.num_heads, self.num_kv_heads, self.num_kv_heads], dim=2)
                return q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
            source = x if context is None else context
            a, b = self.q_width, self.q_width + self.kv_width
            q = self._linear(x if query_pos is None else x + query_pos, 0, a)
            if key_pos is None:
                k, v = self._linear(source, a, b + self.kv_width).chunk(2, dim=-1)
            else:
                k = self._linear(source + key_pos, a, b)
                v = self._linear(source, b, b + self.kv_width)
        else:
            if context is None:
                raise ValueError("this layer was built with context_dim: it needs a context")
            q = self.q(x if query_pos is None else x + query_pos)
            k, v = self.kv(context).chunk(2, dim=-1)
            if key_pos is not None:
                weight, bias = self.kv.weight[: self.kv_width], self.kv.bias
                k = nn.functional.linear(context + key_pos, weight, None if bias is None else bias[: self.kv_width])
        return self._heads(q, self.num_heads), self._heads(k, self.num_kv_heads), self._heads(v, self.num_kv_heads)

    def forward(
        self,
        x: Tensor,
        context: Tensor | None = None,
        *,
        query_pos: Tensor | None = None,
        key_pos: Tensor | None = None,
        bias: Tensor | None = None,
        mask: Tensor | None = None,
    ) -> Tensor:
        """Self-attention of ``x``, or cross-attention from ``x`` to ``context``.

        Args:
            x: (B, N, D) tokens that ask.
            context: (B, M, D or context_dim) tokens that are asked; ``x`` itself by default.
            query_pos, key_pos: added to the inputs of queries and keys, not of values
                (Carion et al. 2020, arXiv 2005.12872). In self-attention give both.
            bias: broadcastable to (B, H, N, M), added to the scores.
            mask: boolean, broadcastable to (B, H, N, M), True = may attend; (N, M) and (B, N, M) too.

        Returns:
            (B, N, D).
        """
        q, k, v = self._project(x, context, query_pos, key_pos)
        q, k = self.q_norm(q).to(v.dtype), self.k_norm(k).to(v.dtype)
        with _without_autocast(q):
            dropout = self.dropout if self.training else 0.0
            o, some = _operands(q, k, v, self.score, bias, mask, self.normalizer, dropout)
            out = _run(o, some, self.kernel)
        if self.recorder is not None:
            self.recorder.keep(self.recorded_as, o, some)
        out = out.transpose(1, 2).reshape(x.shape[0], x.shape[1], self.q_width)
        return self.proj_drop(self.proj(out))

    def __getstate__(self) -> dict[str, Any]:
        # A recorder belongs to one block of code, never to a copied or saved module.
        return {**self.__dict__, "recorder": None, "recorded_as": ""}
