"""FlashAttention to read: exact attention that never holds the (B, H, N, M) weights.

Attention needs, for every query, a softmax over all keys, and a softmax needs the largest score and the sum of the
exponentials before it can give the first weight. Written out, that means all N · M scores at once. But the sum can be
*corrected later* when a larger score turns up (Milakov & Gimelshein 2018, arXiv 1805.02867), and so can the weighted
sum of values beside it. Hence one may walk through the keys tile by tile, hold one tile of scores at a time, and be
exact all the same (Dao et al. 2022, arXiv 2205.14135): memory grows like N + M, not like N · M.

The backward pass needs the weights again. They are not kept but recomputed, tile by tile, from one number per query
that is: L = log Σ exp(scores), for then weight = exp(score - L).

On a GPU the point of the tiles is that they fit the fast memory on the chip; the fused kernels (``kernel="sdpa"``,
``"flex"``) do that. This one does in plain PyTorch what they do, and takes what they take: masks, biases with
gradients, grouped heads, 16-bit inputs. It also skips the tiles that a pattern closes, so causal attention costs half.

Legend: B batch, H query heads, G key/value heads, N queries, M keys, b and c queries and keys of a tile.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import torch
from torch import Tensor

from vision_attn.attention.kernels import Operands, Request, mix_values, register_kernel
from vision_attn.attention.layout import SEQUENCE, Layout
from vision_attn.attention.patterns import Pattern
from vision_attn.attention.relative import PairBias
from vision_attn.attention.scores import dot_scores

TILE = 256
"""Queries and keys of a tile, where there are not many heads.

Of 64 … 512 the fastest at N = 1,024 and 4,096, 8 heads of 64, float32: there it takes 1.6 to 1.7 times the processor
time of PyTorch's fused kernel forward, and 1.3 to 1.4 times forward and backward; with 64, 2.5 and 2.3 times (one AVX2
core, the least of 7 and 3 rounds).
"""

TILE_SCORES = 2**22
"""Scores in a tile, over batch and heads, above which tiles are smaller, to stay near the cache.

Of 2^18 … 2^24 within 5 % of the fastest for 128 images of 65 tokens, and the fastest for 257.
"""


@dataclasses.dataclass(frozen=True)
class Tile:
    """Queries ``rows`` and keys ``columns``; ``cut`` where the pattern allows some of the pairs and not others."""

    rows: slice
    columns: slice
    cut: bool

    def of(self, pair: Tensor) -> Tensor:
        """The part of a mask or bias (B or 1, H or 1, N or 1, M or 1)."""
        everything = slice(None)
        rows = self.rows if pair.shape[2] > 1 else everything
        return pair[:, :, rows, self.columns if pair.shape[3] > 1 else everything]

    def tokens(self, device: torch.device | str) -> tuple[Tensor, Tensor]:
        """(b, 1) query and (1, c) key tokens."""
        i = torch.arange(self.rows.start, self.rows.stop, device=device)[:, None]
        return i, torch.arange(self.columns.start, self.columns.stop, device=device)[None]


@functools.lru_cache(maxsize=64)
def tiles(
    pattern: Pattern | None, layout: Layout, n: int, m: int, size: tuple[int, int]
) -> tuple[tuple[slice, tuple[Tile, ...]], ...]:
    """The queries in tiles, and for each the tiles of keys that are worth a visit.

    Asked once per pattern and length, and on the CPU, so that a GPU need not wait for the answer.
    """
    result = []
    for start in range(0, n, size[0]):
        rows = slice(start, min(start + size[0], n))
        visits = []
        for begin in range(0, m, size[1]):
            tile = Tile(rows, slice(begin, min(begin + size[1], m)), cut=False)
            if pattern is not None:
                allowed = pattern.allowed(*tile.tokens("cpu"), n, layout)
                if not allowed.any():
                    continue  # nobody meets here: this is where causal attention saves its half
                tile = dataclasses.replace(tile, cut=not bool(allowed.all()))
            visits.append(tile)
        result.append((rows, tuple(visits)))
    return tuple(result)


@dataclasses.dataclass(frozen=True)
class Rules:
    """What decides about a pair besides the tensors: asked tile by tile, so that none of it is ever (N, M)."""

    scale: float
    n: int
    m: int
    size: tuple[int, int]
    pattern: Pattern | None
    layout: Layout
    position: PairBias | None

    def tiles(self) -> tuple[tuple[slice, tuple[Tile, ...]], ...]:
        return tiles(self.pattern, self.layout, self.n, self.m, self.size)

    def place_bias(self, tile: Tile, device: torch.device) -> Tensor | None:
        """(H, b, c): the position's bias."""
        if self.position is None:
            return None
        return self.position.at(*tile.tokens(device), self.n, self.m, self.layout)

    def scores(
        self, tile: Tile, q: Tensor, k: Tensor, bias: Tensor | None, mask: Tensor | None, place: Tensor | None
    ) -> Tensor:
        """(B, H, b, c) scores of the tile's queries and keys, -∞ where a pair may not attend."""
        scores = dot_scores(q, k, self.scale)
        if bias is not None:
            scores.add_(tile.of(bias))
        if place is not None:
            scores.add_(place)
        if mask is not None:
            scores.masked_fill_(~tile.of(mask), float("-inf"))
        if tile.cut and self.pattern is not None:
            allowed = self.pattern.allowed(*tile.tokens(q.device), self.n, self.layout)
            scores.masked_fill_(~allowed, float("-inf"))
        return scores


def _wide(x: Tensor) -> Tensor:
    """In float32, if it is of 16 bits: scores and sums are then as exact as the inputs."""
    return x.to(torch.promote_types(x.dtype, torch.float32)).contiguous()


def _onto_keys(weights: Tensor, x: Tensor, kv_heads: int) -> Tensor:
    """weightsᵀ · x, summed over the query heads that share a key head: (B, H, b, c), (B, H, b, e) → (B, G, c, e)."""
    b, h, n, m = weights.shape
    rows = h // kv_heads * n
    columns = weights.view(b * kv_heads, rows, m).transpose(1, 2)
    return torch.bmm(columns, x.reshape(b * kv_heads, rows, -1)).view(b, kv_heads, m, -1)


def _add_gradient(total: Tensor, tile: Tile, grad_scores: Tensor) -> None:
    """Adds a tile to the gradient of a bias, summed over the dimensions that the bias was broadcast over."""
    over = [dim for dim, size in enumerate(total.shape) if size == 1]
    tile.of(total).add_(grad_scores.sum(over, keepdim=True) if over else grad_scores)


def _add_place_gradient(totals: list[Tensor], learned: list[Tensor], place: Tensor | None, grad_scores: Tensor) -> None:
    """Adds what a tile gives to the gradients of the position's parameters."""
    if place is None or not place.requires_grad:
        return
    parts = torch.autograd.grad(place, learned, grad_scores.sum(0).to(place.dtype), allow_unused=True)
    for total, part in zip(totals, parts, strict=True):
        if part is not None:
            total += part


class FlashAttention(torch.autograd.Function):
    """softmax(scale · q·kᵀ + bias) · v with one tile of scores in memory at a time, forward and backward."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        bias: Tensor | None,
        mask: Tensor | None,
        rules: Rules,
        *parameters: Tensor,
    ) -> tuple[Tensor, Tensor]:
        wide_q, wide_k, wide_v = _wide(q), _wide(k), _wide(v)
        out = v.new_empty(*q.shape[:3], v.shape[-1])  # (B, H, N, e)
        log_sum = wide_q.new_empty(*q.shape[:3], 1)  # (B, H, N, 1)
        lowest = torch.finfo(wide_q.dtype).min
        for rows, visits in rules.tiles():
            q_tile = wide_q[:, :, rows]
            # The lowest number instead of -∞: -∞ - lowest is -∞, but -∞ - -∞ would be NaN.
            top = torch.full_like(log_sum[:, :, rows], lowest)  # (B, H, b, 1) largest score so far
            total = torch.zeros_like(top)  # Σ exp(score - top) so far
            mixed = wide_q.new_zeros(*q_tile.shape[:3], v.shape[-1])  # Σ exp(score - top) · value so far
            for tile in visits:
                place = rules.place_bias(tile, q.device)
                scores = rules.scores(tile, q_tile, wide_k[:, :, tile.columns], bias, mask, place)
                new_top = torch.maximum(top, scores.amax(dim=-1, keepdim=True))
                # The online softmax. No exponent is ever positive, so nothing overflows, however large the scores:
                weights = scores.sub_(new_top).exp_()
                # what was summed so far is in units of exp(top); this brings it to units of exp(new top),
                shrink = (top - new_top).exp_()
                # and then old and new may be added: as if new top had been known from the beginning.
                total = total.mul_(shrink).add_(weights.sum(dim=-1, keepdim=True))
                mixed = mixed.mul_(shrink).add_(mix_values(weights, wide_v[:, :, tile.columns]))
                top = new_top
            # Each row's largest score gave exp(0) = 1, so the sum is at least 1; it is 0 only where nothing may be
            # attended. There the result is 0/1, and log_sum = lowest + log 0 = -∞.
            out[:, :, rows] = mixed / total.masked_fill(total == 0, 1)
            log_sum[:, :, rows] = top + total.log()
        ctx.save_for_backward(q, k, v, bias, mask, out, log_sum, *parameters)
        ctx.rules = rules
        return out, log_sum

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_out: Tensor, grad_log_sum: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        q, k, v, bias, mask, out, log_sum, *parameters = ctx.saved_tensors
        rules: Rules = ctx.rules
        wide_q, wide_k, wide_v, wide_grad = _wide(q), _wide(k), _wide(v), _wide(grad_out)
        needs_q, needs_k, needs_v, needs_bias, _, _, *needs = ctx.needs_input_grad
        grad_q, grad_k, grad_v = torch.zeros_like(wide_q), torch.zeros_like(wide_k), torch.zeros_like(wide_v)
        grad_bias = torch.zeros_like(bias, dtype=wide_q.dtype) if needs_bias else None
        learned = [p for p, needed in zip(parameters, needs, strict=True) if needed]
        grad_learned = [torch.zeros_like(p) for p in learned]
        # The softmax's backward is weight · (grad - Σ weight · grad). The sum goes over all keys, yet it needs no
        # second walk: Σⱼ weightⱼ (grad_out · vⱼ) = grad_out · out. And log_sum has the weights as its derivatives.
        delta = (wide_grad * out).sum(dim=-1, keepdim=True) - grad_log_sum  # (B, H, N, 1)
        # Where nothing may be attended, the weights become exp(-∞ - ∞) = 0.
        log_sum = log_sum.masked_fill(log_sum == float("-inf"), float("inf"))
        for rows, visits in rules.tiles():
            q_tile, grad_tile = wide_q[:, :, rows], wide_grad[:, :, rows]
            for tile in visits:
                k_tile, v_tile = wide_k[:, :, tile.columns], wide_v[:, :, tile.columns]
                with torch.set_grad_enabled(bool(learned)):
                    place = rules.place_bias(tile, q.device)
                scores = rules.scores(tile, q_tile, k_tile, bias, mask, None if place is None else place.detach())
                weights = scores.sub_(log_sum[:, :, rows]).exp_()  # as in the forward pass, now in one step
                grad_scores = dot_scores(grad_tile, v_tile, 1.0).sub_(delta[:, :, rows]).mul_(weights)
                if needs_v:
                    grad_v[:, :, tile.columns] += _onto_keys(weights, grad_tile, k.shape[1])
                if needs_q:
                    grad_q[:, :, rows] += mix_values(grad_scores, k_tile)
                if needs_k:
                    grad_k[:, :, tile.columns] += _onto_keys(grad_scores, q_tile, k.shape[1])
                if grad_bias is not None:
                    _add_gradient(grad_bias, tile, grad_scores)
                _add_place_gradient(grad_learned, learned, place, grad_scores)
        grad_q, grad_k = grad_q.mul_(rules.scale), grad_k.mul_(rules.scale)
        pairs = ((grad_q, q, needs_q), (grad_k, k, needs_k), (grad_v, v, needs_v))
        inputs = [grad.to(x.dtype) if needed else None for grad, x, needed in pairs]
        bias_grad = None if grad_bias is None else grad_bias.to(bias.dtype)
        waiting = iter(grad_learned)
        return *inputs, bias_grad, None, None, *(next(waiting) if needed else None for needed in needs)


def tile_size(batch_heads: int, n: int, m: int) -> tuple[int, int]:
    """Queries and keys of a tile, so that it stays near the processor with many heads too."""
    b, c = min(TILE, n), min(TILE, m)
    if torch.compiler.is_exporting():  # the batch may be a symbol, and to compare it would limit it
        return b, c
    while batch_heads * b * c > TILE_SCORES and max(b, c) > 64:
        b, c = (-(-b // 2), c) if b >= c else (b, -(-c // 2))
    return b, c


def tiled_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    *,
    bias: Tensor | None = None,
    mask: Tensor | None = None,
    pattern: Pattern | None = None,
    layout: Layout = SEQUENCE,
    position: PairBias | None = None,
    size: tuple[int, int] | None = None,
) -> tuple[Tensor, Tensor]:
    """softmax(scale · q·kᵀ + bias + position) · v over the pairs that mask and pattern allow.

    Args:
        q: (B, H, N, d) queries.
        k: (B, G, M, d) keys; G divides H.
        v: (B, G, M, e) values.
        scale: factor of the dot product.
        bias: (B or 1, H or 1, N or 1, M or 1), added to the scores; gets its gradient.
        mask: boolean, of such a shape, True = may attend.
        pattern: which pairs meet; tiles in which none do are skipped.
        layout: how the tokens lie, for pattern and position.
        position: a bias computed from the places of tokens, tile by tile; its parameters get their gradient.
        size: queries and keys of a tile; default ``tile_size``.

    Returns:
        (B, H, N, e), zero in rows that may attend to nothing; and (B, H, N, 1) log Σ exp(scores), float32 at least, -∞
        in such rows. Both have gradients, once.
    """
    n, m = q.shape[2], k.shape[2]
    size = tile_size(q.shape[0] * q.shape[1], n, m) if size is None else size
    rules = Rules(scale, n, m, size, pattern, layout, position)
    parameters = () if position is None else tuple(position.parameters())
    return FlashAttention.apply(q, k, v, bias, mask, rules, *parameters)  # type: ignore[no-any-return,no-untyped-call]


class Tiled:
    """FlashAttention in plain PyTorch: exact, memory linear in the lengths, slower than the fused kernels."""

    name = "tiled"

    def why_not(self, request: Request) -> str | None:
        if not request.dot:
            return "it computes dot products only, and this score is none; use kernel='explicit'"
        if request.normalizer != "softmax":
            return f"its tiles rest on the softmax, not {request.normalizer!r}; use kernel='explicit'"
        if request.dropout:
            return "it drops no weights; use dropout=0, or kernel='explicit' or 'sdpa'"
        if request.pattern == "performer":
            return "performer never forms scores; use kernel='auto'"
        return None

    def __call__(self, o: Operands) -> Tensor:
        if o.scale is None:
            raise ValueError("kernel 'tiled' computes dot products only; use kernel='explicit'")
        out, _ = tiled_attention(
            o.q, o.k, o.v, o.scale, bias=o.bias, mask=o.mask, pattern=o.pattern, layout=o.layout, position=o.position
        )
        return o.finish(out)


register_kernel(Tiled())
