"""Attention whose cost is linear in the number of tokens, because no query ever meets a key.

Both mechanisms put a fixed number of slots between queries and keys. Linformer learns how to shorten the keys and
values to ``rank`` of them; Performer draws ``features`` random directions in which the softmax kernel becomes a plain
product. Both mix the keys before any query sees them. So a mask may hide keys from all queries, as padding does, but
not from some, and a bias per pair has no place; ``pattern="window"`` has both.

Neither has weights of every query over every key. The maps of ``implied_weights`` are those that their results imply:
result = implied weights · values. Call them implied wherever they are shown.

Legend: B batch, H query heads, G key/value heads, N queries, M keys, d head width, e value width.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vision_attn.attention.kernels import Operands, Request, mix_values, register_kernel
from vision_attn.attention.layout import SEQUENCE, Layout
from vision_attn.attention.masks import open_rows
from vision_attn.attention.scores import dot_scores
from vision_attn.attention.tiled import tiled_attention


def _whole(owner: str, key: str, value: object, least: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ValueError(f"{owner}: {key}={value!r} must be a whole number, {least} or more")


def _check_key_mask(name: str, mask: Tensor | None, m: int) -> None:
    if mask is not None and (mask.dim() != 4 or mask.shape[1:3] != (1, 1) or mask.shape[3] not in (1, m)):
        raise ValueError(
            f"{name} mixes the keys before any query sees them, so its mask hides keys from all queries, "
            f"(B, 1, 1, {m}); got {tuple(mask.shape)}; "
            "for causal and other masks per query use pattern='window', or pattern='full'"
        )


class Linformer(nn.Module):
    """Keys and values shortened along the sequence: softmax(q (E k)ᵀ) F v (Wang et al. 2020, arXiv 2006.04768).

    What follows the shortening is ordinary attention over ``rank`` keys, by any kernel. With E = F = I it is exact.

    E and F are learned for sequences of ``length`` keys. Other lengths get them by linear interpolation: the columns of
    prefix tokens are kept, the others are stretched along the sequence, or, where both layouts have a grid, along rows
    and columns; and they are scaled by the ratio of the lengths, for a sum over twice as many tokens has to weigh each
    half as much. Shorter sequences are smoothed before they are thinned out.

    A padded key counts as zero, so what it holds changes nothing. It does take a place: the same tokens with more
    padding are another length.

    Args:
        num_kv_heads: G.
        length: M for which E and F are learned.
        rank: rows of E and F.
        share_kv: F is E.
        per_head: a matrix for every key/value head instead of one for all.
        layout: how the ``length`` tokens lie, to interpolate along rows and columns of a grid.

    Attributes:
        key_projection: E, (1 or G, rank, length).
        value_projection: F, of such a shape; None with ``share_kv``.

    Raises:
        ValueError: no rank, or one larger than the length; a layout of another length.
    """

    name = "linformer"
    value_projection: nn.Parameter | None

    def __init__(
        self,
        num_kv_heads: int,
        length: int,
        rank: int | None = None,
        *,
        share_kv: bool = False,
        per_head: bool = False,
        layout: Layout | None = None,
    ) -> None:
        super().__init__()
        if rank is None:
            raise ValueError("linformer needs rank=…: to how many the keys are shortened")
        _whole("linformer", "rank", rank, 1)
        if rank > length:
            raise ValueError(f"linformer: rank={rank} is more than the {length} tokens; use at most {length}")
        if layout is not None:
            layout.check(length)
        self.length, self.rank, self.grid = length, rank, None if layout is None else layout.grid
        shape = (num_kv_heads if per_head else 1, rank, length)
        # This variance gives sums over the tokens the variance of one token.
        self.key_projection = nn.Parameter(torch.empty(shape).normal_(std=length**-0.5))
        self.register_parameter(
            "value_projection",
            None if share_kv else nn.Parameter(torch.empty(shape).normal_(std=length**-0.5)),
        )

    def extra_repr(self) -> str:
        return f"length={self.length}, rank={self.rank}, share_kv={self.value_projection is None}"

    def check(self, n: int, m: int, layout: Layout) -> None:
        """Refuses a sequence that E and F cannot be interpolated to.

        Args:
            n, m: numbers of queries and keys.
            layout: how the tokens lie.

        Raises:
            ValueError: fewer keys than the rank, or tokens that are not the layout's.
        """
        if n == m:
            layout.check(n)
        if m < self.rank:
            raise ValueError(
                f"linformer: rank={self.rank} is more than the {m} keys; use at most {m}, or pattern='full'"
            )
        if m != self.length and min(m, self.length) <= layout.prefix:
            raise ValueError(
                f"linformer was built for {self.length} keys and cannot be stretched to {m}: "
                f"{layout.prefix} of them are prefix tokens"
            )

    def _for_values(self) -> Tensor:
        return self.key_projection if self.value_projection is None else self.value_projection

    def _stretched(self, matrix: Tensor, m: int, layout: Layout) -> Tensor:
        """E or F for ``m`` keys, (1 or G, rank, m)."""
        if layout.length not in (None, m):
            layout = SEQUENCE  # it describes the queries, and the keys are other tokens
        prefix, new = layout.prefix, layout.grid
        old = self.grid
        if old is None or new is None:
            old, new = (1, self.length - prefix), (1, m - prefix)
        if old == new:
            return matrix
        first, rest = matrix.to(torch.promote_types(matrix.dtype, torch.float32)).split(
            [prefix, self.length - prefix], dim=2
        )
        rest = F.interpolate(rest.unflatten(2, old), size=new, mode="bilinear", antialias=True).flatten(2)
        return torch.cat([first, rest * ((self.length - prefix) / (m - prefix))], dim=2)

    def _shorten(self, matrix: Tensor, x: Tensor, layout: Layout) -> Tensor:
        """(B, G, M, d) → (B, G, rank, d)."""
        matrix = self._stretched(matrix, x.shape[2], layout).to(x.dtype)
        b, g, m, d = x.shape
        if matrix.shape[0] == 1 and x.stride(1) <= x.stride(2):
            # The heads are slices of tokens (B, M, G · d), as projections leave them: one product for all, and no copy.
            return torch.matmul(matrix[0], x.transpose(1, 2).reshape(b, m, g * d)).view(b, -1, g, d).transpose(1, 2)
        return torch.bmm(matrix.expand(b, g, -1, -1).reshape(b * g, -1, m), x.reshape(b * g, m, d)).view(b, g, -1, d)

    def project(self, k: Tensor, v: Tensor, key_mask: Tensor | None, layout: Layout) -> tuple[Tensor, Tensor]:
        """Shortens keys and values.

        Args:
            k: (B, G, M, d).
            v: (B, G, M, e).
            key_mask: boolean (B, 1, 1, M), False for keys that count as zero.
            layout: how the M tokens lie.

        Returns:
            (B, G, rank, d) and (B, G, rank, e).

        Raises:
            ValueError: a mask that differs between queries or heads.
        """
        _check_key_mask(self.name, key_mask, k.shape[2])
        if key_mask is not None:
            hidden = ~key_mask.transpose(2, 3)  # (B, 1, M, 1)
            k, v = k.masked_fill(hidden, 0), v.masked_fill(hidden, 0)
        return self._shorten(self.key_projection, k, layout), self._shorten(self._for_values(), v, layout)

    def implied_weights(self, q: Tensor, k: Tensor, scale: float, key_mask: Tensor | None, layout: Layout) -> Tensor:
        """softmax(scale · q (E k)ᵀ) F: what the values are multiplied with.

        Args:
            q: (B, H, N, d).
            k: (B, G, M, d), all keys.
            scale: factor of the dot product.
            key_mask: boolean (B, 1, 1, M).
            layout: how the M tokens lie.

        Returns:
            (B, H, N, M). Entries may be negative and rows sum to anything, for F is learned.
        """
        short, _ = self.project(k, k, key_mask, layout)
        matrix = self._stretched(self._for_values(), k.shape[2], layout).to(k.dtype).expand(*k.shape[:2], -1, -1)
        if key_mask is not None:
            matrix = matrix.masked_fill(~key_mask, 0)
        return mix_values(dot_scores(q, short, scale).softmax(dim=-1), matrix)


class Performer(nn.Module):
    """softmax(scale · q·kᵀ) · v without the scores, by positive orthogonal random features (FAVOR+).

    For ω drawn from a normal distribution, exp(q·k) is the mean of exp(ω·q - ‖q‖²/2) · exp(ω·k - ‖k‖²/2). With a fixed
    number of ω, the sum over the keys can be taken first, once for all queries (Choromanski et al. 2020,
    arXiv 2009.14794). Directions that are orthogonal to each other, in blocks of d, have less variance; their lengths
    are those of normal vectors, so the mean stays right.

    The error falls with the number of features, and grows quickly with the norms of q and k: this is a good estimate of
    soft attention and a poor one of sharp attention. With normal q, k and v, 512 tokens, d = 64 and 256 features, the
    result is off by 5 % where q and k have standard deviation 1/4, by 45 % at 1/2, and by three times its own length at
    1 (means of 4 draws; the mean of the values would be off by 6, 24 and 79 %). So a model has to learn with it, and
    cannot take over the weights of another.

    **Stabilised.** Let a = ω·q and b = ω·k - ‖k‖²/2, for every feature r. The result is

        Σᵣ exp(aᵣ) Σⱼ exp(bᵣⱼ) vⱼ / Σᵣ exp(aᵣ) Σⱼ exp(bᵣⱼ)

    (‖q‖²/2 cancels). Subtracting one maximum from all keys, as is usual, leaves features in which every key underflows,
    and a small constant must then keep the denominator from 0. Here each feature has its own: with
    Lᵣ = log Σⱼ exp(bᵣⱼ) the same result is two ordinary softmaxes in a row,

        softmaxᵣ(aᵣ + Lᵣ) · softmaxⱼ(bᵣⱼ) · v,

    which are finite for scores of any size, need no constant, and give implied weights that are positive with sum 1. In
    other words: ω attends to the keys, then the queries attend to ω. Both are done tile by tile, so that not even
    (N, features) is held.

    **Redrawn.** With ``redraw``, the features are drawn anew after so many forward passes in training, for a fixed draw
    may be an unlucky one. A draw depends on ``seed`` and the count alone, and both the features and the count are
    buffers: they lie in the checkpoint, and a resumed run goes on as one that was never stopped.

    Args:
        head_dim: d.
        features: number of ω; default d · log d, after the paper's bound.
        redraw: forward passes in training between draws; 0 is never.
        seed: of the draws.

    Attributes:
        projection: ω, (features, d); not learned.
        calls: forward passes in training so far.

    Raises:
        ValueError: a parameter that is no whole number, or too small.
    """

    name = "performer"
    projection: Tensor
    calls: Tensor

    def __init__(self, head_dim: int, features: int | None = None, *, redraw: int = 0, seed: int = 0) -> None:
        super().__init__()
        features = max(1, round(head_dim * math.log(head_dim))) if features is None else features
        for key, value, least in (("features", features, 1), ("redraw", redraw, 0), ("seed", seed, 0)):
            _whole(self.name, key, value, least)
        self.head_dim, self.features, self.redraw, self.seed = head_dim, features, redraw, seed
        self.register_buffer("projection", torch.empty(features, head_dim))
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))
        if not self.projection.is_meta:
            self.projection = self._draw(0)

    def extra_repr(self) -> str:
        return f"features={self.features}, redraw={self.redraw}, seed={self.seed}"

    def _draw(self, number: int) -> Tensor:
        """The features of that draw, where and as the present ones are."""
        drawn = orthogonal_features(self.features, self.head_dim, seed=(self.seed, number))
        return drawn.to(device=self.projection.device, dtype=self.projection.dtype)

    def _count(self) -> None:
        calls = int(self.calls)
        if calls and calls % self.redraw == 0:
            # Not in place: a backward pass that is still to come may need the old ones.
            self.projection = self._draw(calls // self.redraw)
        self.calls += 1

    def check(self, n: int, m: int, layout: Layout) -> None:
        """Refuses tokens that are not the layout's.

        Args:
            n, m: numbers of queries and keys; any will do.
            layout: how the tokens lie.

        Raises:
            ValueError: naming the number of tokens and the layout.
        """
        if n == m:
            layout.check(n)

    def _check(self, q: Tensor, k: Tensor, key_mask: Tensor | None) -> None:
        _check_key_mask(self.name, key_mask, k.shape[2])
        if q.shape[-1] != self.head_dim or k.shape[-1] != self.head_dim:
            raise ValueError(
                f"performer was built for a head width of {self.head_dim}, "
                f"got q {tuple(q.shape)} and k {tuple(k.shape)}"
            )

    def _slots(self, q: Tensor, k: Tensor, scale: float) -> tuple[Tensor, Tensor, float]:
        """ω as (B, G, features, d) queries and keys, the bias -‖k‖²/2 (B, G, 1, M), and √scale, a half of it each."""
        omega = self.projection.to(q.dtype).expand(*k.shape[:2], -1, -1)
        wide = k.to(torch.promote_types(k.dtype, torch.float32))
        return omega, (-0.5 * abs(scale)) * wide.square().sum(dim=-1)[:, :, None], abs(scale) ** 0.5

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, scale: float, key_mask: Tensor | None, layout: Layout = SEQUENCE
    ) -> Tensor:
        """Approximates softmax(scale · q·kᵀ) · v.

        Args:
            q: (B, H, N, d).
            k: (B, G, M, d); G divides H.
            v: (B, G, M, e).
            scale: factor of the dot product.
            key_mask: boolean (B, 1, 1, M), False for hidden keys.
            layout: not needed.

        Returns:
            (B, H, N, e); zeros where all keys are hidden.

        Raises:
            ValueError: another head width, or a mask that differs between queries or heads.
        """
        self._check(q, k, key_mask)
        if self.redraw and self.training:
            self._count()
        omega, bias, root = self._slots(q, k, scale)
        sums, log_sum = tiled_attention(omega, k, v, root, bias=bias, mask=key_mask)
        log_sum = log_sum.transpose(2, 3).repeat_interleave(q.shape[1] // k.shape[1], dim=1)  # (B, H, 1, features)
        return tiled_attention(q, omega, sums, math.copysign(root, scale), bias=log_sum)[0]

    def implied_weights(
        self, q: Tensor, k: Tensor, scale: float, key_mask: Tensor | None, layout: Layout = SEQUENCE
    ) -> Tensor:
        """φ(q)·φ(k)ᵀ, normalised: what the values are multiplied with.

        Args:
            q: (B, H, N, d).
            k: (B, G, M, d).
            scale: factor of the dot product.
            key_mask: boolean (B, 1, 1, M).
            layout: not needed.

        Returns:
            (B, H, N, M), positive; rows sum to 1, or to 0 where all keys are hidden.
        """
        self._check(q, k, key_mask)
        omega, bias, root = self._slots(q, k, scale)
        to_keys = dot_scores(omega, k, root) + bias  # (B, G, features, M)
        some = None
        if key_mask is not None:
            key_mask, some = open_rows(key_mask)
            to_keys = to_keys.masked_fill(~key_mask, float("-inf"))
        log_sum = to_keys.logsumexp(dim=-1)[:, :, None].repeat_interleave(q.shape[1] // k.shape[1], dim=1)
        to_slots = (dot_scores(q, omega, math.copysign(root, scale)) + log_sum).softmax(dim=-1)
        weights = mix_values(to_slots, to_keys.softmax(dim=-1))
        return weights if some is None else weights * some


def orthogonal_features(features: int, dim: int, *, seed: tuple[int, int]) -> Tensor:
    """(features, dim) normal vectors, orthogonal to each other in blocks of ``dim``.

    Each of them alone is distributed as if all were independent.
    Drawn on the CPU from a generator of its own, so that every device and process has the same.

    Args:
        features: how many.
        dim: their width.
        seed: two numbers, the second counting the draws.
    """
    # Two numbers in one seed: as far apart as 64 bits allow, so that no draw of one seed is that of the next.
    mixed = (seed[0] * 0x9E3779B97F4A7C15 + seed[1] * 0xC2B2AE3D27D4EB4F) % 2**63
    generator = torch.Generator("cpu").manual_seed(mixed)
    blocks = -(-features // dim)
    normal = torch.randn(blocks, dim, dim, generator=generator, dtype=torch.float64, device="cpu")
    q, r = torch.linalg.qr(normal)
    # The signs of r's diagonal make q uniform over all rotations and reflections.
    q = q * r.diagonal(dim1=1, dim2=2).sign()[:, None]
    lengths = torch.randn(blocks, dim, dim, generator=generator, dtype=torch.float64, device="cpu").norm(dim=2)
    return (q.transpose(1, 2) * lengths[:, :, None]).reshape(-1, dim)[:features].float()


class Favor:
    """Performer's own kernel: time and memory linear in the number of tokens."""

    name = "favor"

    def why_not(self, request: Request) -> str | None:
        if request.pattern != Performer.name:
            return "it computes random features and nothing else; use pattern='performer' with it, or kernel='auto'"
        return None

    def __call__(self, o: Operands) -> Tensor:
        if not isinstance(o.low_rank, Performer) or o.scale is None:
            raise ValueError("kernel 'favor' serves pattern='performer' alone")
        return o.low_rank(o.q, o.k, o.v, o.scale, o.key_mask, o.layout)  # type: ignore[no-any-return]


register_kernel(Favor())
