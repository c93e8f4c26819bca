"""Rows 22, 23 and 36: who may attend to whom."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from vision_attn.attention import Layout, attend, causal_mask, padding_mask
from vision_attn.attention.masks import visibility_mask
from vision_attn.attention.patterns import Pattern, make_pattern
from vision_attn.benchmarking import fit_exponent
from vision_attn.certificates.registry import Setting, certificate, gap, gaps, gradients, holds

GRID, PREFIX = (11, 23), 1  # large enough for blocks to be worth skipping
N = PREFIX + GRID[0] * GRID[1]
LAYOUT = Layout(prefix=PREFIX, grid=GRID)


def _table(n: int, first: int, near: Callable[[int, int], bool], device: str) -> Tensor:
    """(n, n) mask, pair by pair; the first tokens are global."""
    rows = [[i < first or j < first or near(i, j) for j in range(n)] for i in range(n)]
    return torch.tensor(rows, device=device)


def _band(radius: int) -> Callable[[int, int], bool]:
    return lambda i, j: abs(i - j) <= radius


def _near_on_grid(radius: int) -> Callable[[int, int], bool]:
    def near(i: int, j: int) -> bool:
        (a, b), (c, d) = divmod(i - PREFIX, GRID[1]), divmod(j - PREFIX, GRID[1])
        return abs(a - c) <= radius and abs(b - d) <= radius

    return near


def _compared(s: Setting, pattern: Pattern, mask: Tensor, layout: Layout = LAYOUT) -> float:
    """Attention under a pattern and under a mask: results and gradients."""
    n = mask.shape[0]
    q, k, v = (s.randn(1, heads, n, 8, grad=True) for heads in (4, 2, 2))
    out = s.attend(q, k, v, pattern=pattern, layout=layout)
    expected = attend(q, k, v, mask=mask, kernel="explicit")
    return gaps((out, expected), *zip(gradients(out, q, k, v), gradients(expected, q, k, v), strict=True))


def _made(name: str, **options: Any) -> Pattern:
    pattern = make_pattern(name, **options)
    assert pattern is not None
    return pattern


@certificate("22", "window of radius r equals full attention under a band mask", kernel=True)
def window(s: Setting) -> float:
    sizes = ((47, 5), (131, 1), (254, 7))
    return max(_compared(s, _made("window", window=r), _table(n, 0, _band(r), s.device), Layout()) for n, r in sizes)


@certificate("22b", "window as wide as the sequence is full attention, and of radius 0 each value itself", kernel=True)
def window_ends(s: Setting) -> float:
    q, k, v = s.randn(2, 3, 47, 7), s.randn(2, 3, 47, 7), s.randn(2, 3, 47, 13)
    full = s.attend(q, k, v)
    return gaps(
        (s.attend(q, k, v, pattern=_made("window", window=46)), full),
        (s.attend(q, k, v, pattern=_made("window", window=47)), full),
        (s.attend(q, k, v, pattern=_made("window", window=0)), v),
    )


@certificate("22c", "2-D neighbourhood of radius r on a grid equals a mask made pair by pair", kernel=True)
def window_2d(s: Setting) -> float:
    return max(
        _compared(s, _made("window_2d", window=r), _table(N, PREFIX, _near_on_grid(r), s.device)) for r in (1, 2)
    )


@certificate("23", "causal mask of 4: the exact lower triangle with its diagonal, as mask and as pattern")
def triangle(s: Setting) -> float:
    exact = [[1, 0, 0, 0], [1, 1, 0, 0], [1, 1, 1, 0], [1, 1, 1, 1]]
    masks = (causal_mask(4, device=s.device), _made("causal").mask(4, Layout(), s.device))
    return holds(all(mask.int().tolist() == exact for mask in masks))


@certificate("23b", "causal: an edit of the future leaves the past as it was, exactly", kernel=True, tolerance=0.0)
def past_is_fixed(s: Setting) -> float:
    q, k, v = s.randn(2, 3, 13, 7), s.randn(2, 3, 13, 7), s.randn(2, 3, 13, 11)
    edited = [t.clone() for t in (q, k, v)]
    for t in edited:
        t[:, :, 8:] += 1
    errors = []
    for who in ({"mask": causal_mask(13, device=s.device)}, {"pattern": _made("causal")}):
        before, after = s.attend(q, k, v, **who), s.attend(*edited, **who)
        errors += [gap(after[:, :, :8], before[:, :, :8]), holds(gap(after[:, :, 8:], before[:, :, 8:]) > 0.01)]
    return max(errors)


@certificate("23c", "padding is invisible: results equal those of the sequences without it", kernel=True)
def padding(s: Setting) -> float:
    q, k, v = s.randn(2, 3, 5, 7), s.randn(2, 3, 11, 7), s.randn(2, 3, 11, 13)
    lengths = torch.tensor([7, 11], device=s.device)
    k[0, :, 7:], v[0, :, 7:] = 100, 1000
    out = s.attend(q, k, v, mask=padding_mask(lengths))
    return gaps((out[:1], s.attend(q[:1], k[:1, :, :7], v[:1, :, :7])), (out[1:], s.attend(q[1:], k[1:], v[1:])))


@certificate(
    "23d",
    "a row that may attend to nothing gives zeros, not NaN, backward too",
    kernel=True,
    tolerance=0.0,
)
def empty_rows(s: Setting) -> float:
    q, k, v = s.randn(2, 3, 5, 7, grad=True), s.randn(2, 3, 11, 7, grad=True), s.randn(2, 3, 11, 13, grad=True)
    mask = torch.ones(2, 1, 5, 11, dtype=torch.bool, device=s.device)
    mask[0, 0, 2], mask[1] = False, False
    out = s.attend(q, k, v, mask=mask)
    grads = gradients(out, q, k, v)
    empty = ~mask.any(-1).expand(2, 3, 5)
    silent = [out.detach()[empty], grads[0][empty], grads[1][1], grads[2][1]]
    heard = all(bool(t.isfinite().all()) for t in (out, *grads)) and bool((out[~empty] != 0).all())
    return max(*(float(t.abs().max().nan_to_num(1.0)) for t in silent), holds(heard))


@certificate("23e", "visibility: two sequences in one row see nothing of each other", kernel=True)
def visibility(s: Setting) -> float:
    q, k, v = s.randn(1, 3, 12, 7), s.randn(1, 3, 12, 7), s.randn(1, 3, 12, 13)
    segments = torch.tensor([[0] * 5 + [1] * 7], device=s.device)
    out = s.attend(q, k, v, mask=visibility_mask(segments))
    apart = [s.attend(*(t[:, :, part] for t in (q, k, v))) for part in (slice(0, 5), slice(5, 12))]
    return gap(out, torch.cat(apart, dim=2))


@certificate("36", "strided (Sparse Transformer) equals attention under a mask made pair by pair", kernel=True)
def strided(s: Setting) -> float:
    mask = _table(N, PREFIX, lambda i, j: abs(i - j) < 23 or abs(i - j) % 23 == 0, s.device)
    return _compared(s, _made("strided", stride=23), mask)


@certificate("36b", "Longformer, window and global tokens, equals such a mask", kernel=True)
def longformer(s: Setting) -> float:
    mask = _table(N, PREFIX + 2, _band(4), s.device)
    return _compared(s, _made("longformer", window=4, num_global=2), mask)


@certificate("36c", "BigBird, window, global and random blocks, equals its own mask", kernel=True)
def bigbird(s: Setting) -> float:
    pattern = _made("bigbird", block_size=8, num_random=2, num_global=1)
    return _compared(s, pattern, pattern.mask(N, LAYOUT, s.device))


@certificate("36d", "BigBird's random blocks come from the seed alone, the same in every call")
def bigbird_seed(s: Setting) -> float:
    one, same, other = (
        _made("bigbird", block_size=8, num_random=2, seed=seed).mask(N, LAYOUT, s.device) for seed in (3, 3, 4)
    )
    return holds(bool((one == same).all()) and bool((one != other).any()))


@certificate("36e", "density: window L(2r+1) − r(r+1) pairs, globals N² − L², BigBird 2w+1+random blocks")
def density(s: Setting) -> float:
    n, r = 200, 7
    band = _made("window", window=r).mask(n, Layout(), s.device).sum()
    local = n - 3
    both = _made("longformer", window=r, num_global=3).mask(n, Layout(), s.device).sum()
    blocks = _made("bigbird", block_size=10, num_random=2, window=10).mask(n, Layout(), s.device).sum(1)
    want = [n * (2 * r + 1) - r * (r + 1), n * n - local * local + local * (2 * r + 1) - r * (r + 1)]
    return holds([int(band), int(both)] == want and blocks[10:-10].unique().tolist() == [(3 + 2) * 10])


@certificate(
    "36f", "cost falls: pairs computed by window, Longformer, BigBird grow like N^1.15 at most", tolerance=1.15
)
def cost_falls(s: Setting) -> float:
    words: dict[str, dict[str, int]] = {
        "window": {"window": 16},
        "longformer": {"window": 16, "num_global": 1},
        "bigbird": {"block_size": 16, "num_random": 2, "num_global": 1},
    }
    found, lengths = [], (512, 1024, 2048, 4096)
    for name, options in words.items():
        plans = [_made(name, **options).plan(n, Layout(), s.device) for n in lengths]
        assert all(plan is not None for plan in plans)
        # of blocks of queries and the keys each visits, padding included, and of tokens that attend to all
        pairs = [
            sum(part.queries.shape[1] * part.keys.numel() for part in plan.parts()) + plan.first * n
            for plan, n in zip(plans, lengths, strict=True)
            if plan is not None
        ]
        found.append(fit_exponent(lengths, pairs) or 0.0)
    return max(found)
