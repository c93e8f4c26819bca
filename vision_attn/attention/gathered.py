"""Gathered attention: only the blocks of pairs that a pattern allows are computed, in plain PyTorch.

The keys and values that a block of queries needs are gathered into a small dense problem, and all blocks, as a batch,
go through the arithmetic of the other kernels. Time and memory grow like N times the keys of a block instead of N².

Where a pattern consists of two disjoint sets of keys that lie differently (``strided``: neighbours, and every s-th
token), each set gives for every query the largest score t, the sum Σ exp(score − t) and the mixture
Σ exp(score − t) · value. From these the softmax over both follows exactly, as FlashAttention joins its tiles (Dao et
al. 2022, arXiv 2205.14135).
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from vision_attn.attention.kernels import KERNELS, Operands, Request, mix_values, register_kernel
from vision_attn.attention.layout import Layout
from vision_attn.attention.normalizers import FUSED
from vision_attn.attention.patterns import Pattern
from vision_attn.attention.plans import Plan
from vision_attn.attention.scores import dot_scores

CHUNK = {"cpu": 2**20}
"""Numbers gathered at a time without gradients: so few that they stay in the cache. Other devices take all at once."""

Arithmetic = Callable[[Operands], tuple[Tensor, ...]]
"""From operands of (blocks, heads, tokens of a block, …) to results of (blocks, heads, queries of a block, …)."""


def plan_of(pattern: Pattern, n: int, layout: Layout, device: torch.device) -> Plan | None:
    """The plan of a pattern; the latest are kept, for every layer and step asks for the same one."""
    # While a graph is traced, tensors stand for others and must not outlive the tracing.
    plan = _kept_plan.__wrapped__ if torch.compiler.is_compiling() else _kept_plan
    return plan(pattern, n, layout, str(device))


@functools.lru_cache(maxsize=16)
def _kept_plan(pattern: Pattern, n: int, layout: Layout, device: str) -> Plan | None:
    return pattern.plan(n, layout, device)


def pairs_of(pair: Tensor, batch: Tensor, queries: Tensor, keys: Tensor) -> Tensor:
    """What a mask or bias says about the pairs of some blocks.

    Args:
        pair: (B or 1, H or 1, N or 1, M or 1).
        batch: (C,) the sequence that each block belongs to.
        queries, keys: (C, b) and (C, K) tokens of each block.

    Returns:
        (C, H or 1, b or 1, K or 1).
    """
    zero = batch.new_zeros(1, 1, 1)
    b = batch[:, None, None] if pair.shape[0] > 1 else zero
    i = queries[:, :, None] if pair.shape[2] > 1 else zero
    j = keys[:, None, :] if pair.shape[3] > 1 else zero
    return pair[b, :, i, j].permute(0, 3, 1, 2)


@dataclasses.dataclass
class Blocks:
    """The operands of one call, cut into the blocks of a plan: B · S of them, those of one sequence side by side."""

    o: Operands
    plan: Plan

    def __post_init__(self) -> None:
        # (B · N, heads, d): as a projection leaves them, so a token is one run of memory and nothing is copied
        self.q, self.k, self.v = (x.transpose(1, 2).flatten(0, 1) for x in (self.o.q, self.o.k, self.o.v))
        self.count = self.o.q.shape[0] * self.plan.queries.shape[0]

    def at_once(self) -> int:
        """How many blocks to gather at a time."""
        given = [
            self.o.q,
            self.o.k,
            self.o.v,
            self.o.bias,
            *([] if self.o.position is None else self.o.position.parameters()),
        ]
        limit = CHUNK.get(self.o.q.device.type)
        # The gradient of a gathered piece is as large as the whole: with gradients, all is gathered in one piece.
        if limit is None or (torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in given)):
            return self.count
        _, g, _, d = self.o.k.shape
        numbers = self.plan.keys.shape[1] * g * (d + self.o.v.shape[-1])
        return max(1, limit // numbers)

    def cut(self, start: int, stop: int) -> Operands:
        """Blocks start … stop as operands of their own: the blocks are the batch."""
        n, size = self.o.q.shape[2], self.plan.queries.shape[0]
        number = torch.arange(start, stop, device=self.o.q.device)
        batch, block = number // size, number % size
        queries, keys = self.plan.queries[block], self.plan.keys[block]

        def take(x: Tensor, tokens: Tensor) -> Tensor:
            index = (tokens + n * batch[:, None]).flatten()
            return x.index_select(0, index).unflatten(0, tokens.shape).transpose(1, 2)  # (C, heads, tokens, d)

        mask = self.plan.mask[block][:, None]
        if self.o.mask is not None:
            mask = mask & pairs_of(self.o.mask, batch, queries, keys)
        bias = None if self.o.bias is None else pairs_of(self.o.bias, batch, queries, keys)
        if self.o.position is not None:
            added = self._position(block)
            bias = added if bias is None else bias + added
        return dataclasses.replace(
            self.o,
            q=take(self.q, queries),
            k=take(self.k, keys),
            v=take(self.v, keys),
            mask=mask,
            bias=bias,
            pattern=None,
            position=None,
        )

    def _position(self, block: Tensor) -> Tensor:
        """(C, H, b, K) bias of the pairs of some blocks, computed once where several sequences ask for the same."""
        assert self.o.position is not None
        n, plan = self.o.q.shape[2], self.plan
        repeated = block.numel() > plan.queries.shape[0]
        queries, keys = (plan.queries, plan.keys) if repeated else (plan.queries[block], plan.keys[block])
        added = self.o.position.at(queries[:, :, None], keys[:, None, :], n, n, self.o.layout).transpose(0, 1)
        return added[block] if repeated else added

    def run(self, arithmetic: Arithmetic) -> list[Tensor]:
        """Results per token: (B, N - first, H, …)."""
        step = self.at_once()
        chunks = [arithmetic(self.cut(at, min(at + step, self.count))) for at in range(0, self.count, step)]
        b, places = self.o.q.shape[0], self.plan.queries.numel()
        order = (self.plan.order + places * torch.arange(b, device=self.plan.order.device)[:, None]).flatten()
        results = []
        for pieces in zip(*chunks, strict=True):
            rows = [piece.transpose(1, 2).flatten(0, 1) for piece in pieces]  # (C · b, H, …)
            whole = rows[0] if len(rows) == 1 else torch.cat(rows)
            results.append(whole.index_select(0, order).unflatten(0, (b, -1)))
        return results


def fused(o: Operands) -> tuple[Tensor, ...]:
    """The result of blocks that hold all keys of their queries."""
    return (KERNELS["sdpa"](o),)


def partial(o: Operands) -> tuple[Tensor, ...]:
    """Of blocks that hold some of the keys: Σ exp(score − t) · value, Σ exp(score − t), and the largest score t."""
    scores = dot_scores(o.q, o.k, o.scale or 1.0)
    scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
    if o.bias is not None:
        scores = scores + o.bias
    if o.mask is not None:
        scores = scores.masked_fill(~o.mask, float("-inf"))
    # Any t gives the same softmax, so no gradient flows through it. The lowest number stands for rows without a key.
    top = scores.detach().amax(dim=-1, keepdim=True).clamp(min=torch.finfo(scores.dtype).min)
    weights = (scores - top).exp()
    mixed = mix_values(F.dropout(weights, o.dropout) if o.dropout else weights, o.v)
    return mixed.to(scores.dtype), weights.sum(dim=-1, keepdim=True), top


def join(parts: list[list[Tensor]]) -> Tensor:
    """The softmax over the keys of all parts, from what ``partial`` says of each; zero where none has a key."""
    top = functools.reduce(torch.maximum, [part[2] for part in parts])
    shares = [(part[2] - top).exp() for part in parts]
    mixed = functools.reduce(torch.add, [share * part[0] for share, part in zip(shares, parts, strict=True)])
    total = functools.reduce(torch.add, [share * part[1] for share, part in zip(shares, parts, strict=True)])
    return mixed / total.masked_fill(total == 0, 1.0)


def global_rows(o: Operands, first: int) -> Tensor:
    """(B, H, first, e): the first tokens, which attend to everything."""
    n = o.q.shape[2]
    mask, bias = (x[:, :, :first] if x is not None and x.shape[2] > 1 else x for x in (o.mask, o.bias))
    if o.position is not None:
        token = torch.arange(n, device=o.q.device)
        added = o.position.at(token[:first, None], token[None], n, n, o.layout)[None]
        bias = added if bias is None else bias + added
    rows = dataclasses.replace(o, q=o.q[:, :, :first], mask=mask, bias=bias, pattern=None, position=None)
    return KERNELS["sdpa"](rows)


class Gathered:
    """Blocks of a pattern, gathered; pairs in no block cost nothing. For patterns with blocks to skip."""

    name = "gathered"

    def why_not(self, request: Request) -> str | None:
        if request.pattern == "performer":
            return "performer never forms scores; use kernel='auto'"
        if request.pattern is None:
            return "it skips the pairs that a pattern leaves out, and here all pairs meet; use kernel='sdpa'"
        if request.pattern == "causal":
            return "causal attention is no band of blocks of one size; use kernel='tiled', which skips what lies ahead"
        if not request.dot:
            return "it computes dot products only, and this score is none; use kernel='explicit'"
        if request.normalizer not in FUSED:
            return f"it computes softmax only, not {request.normalizer!r}; use kernel='explicit'"
        return None

    def __call__(self, o: Operands) -> Tensor:
        assert o.pattern is not None
        plan = plan_of(o.pattern, o.q.shape[2], o.layout, o.q.device)
        if plan is None:  # there are so few pairs to skip that gathering the others costs more
            return KERNELS["sdpa"](o)
        parts = plan.parts()
        if len(parts) == 1:
            (out,) = Blocks(o, plan).run(fused)
        else:
            out = join([Blocks(o, part).run(partial) for part in parts]).to(o.q.dtype)
        out = out.transpose(1, 2)  # (B, H, N - first, e)
        return torch.cat([global_rows(o, plan.first), out], dim=2) if plan.first else out


register_kernel(Gathered())
