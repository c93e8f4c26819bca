"""FlexAttention: a fused kernel that PyTorch generates for a rule of who may attend to whom.

After Dong et al. 2024, arXiv 2412.05496. The rule of a pattern is compiled into the kernel, and a block mask tells it
which tiles of pairs to skip; a bias, a position or a further mask changes the scores on their way. The first call of
its kind compiles, which takes ten to forty seconds. On a CPU it serves inference alone.
"""

from __future__ import annotations

import functools
import os
import shlex
import shutil
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from vision_attn.attention.kernels import Operands, Request, register_kernel
from vision_attn.attention.layout import Layout
from vision_attn.attention.normalizers import FUSED
from vision_attn.attention.patterns import Pattern
from vision_attn.attention.plans import Rule

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

BLOCK = 128
"""Side of the tiles that are visited or skipped."""

DTYPES = (torch.float32, torch.bfloat16, torch.float16)

LEAST_WIDTH = 16
"""Head width below which there is no kernel for a GPU."""

MOST_KERNELS = 64
"""Shapes and patterns to compile for; PyTorch's own limit of 8 is for functions that need one or two."""

NO_GRADIENTS = "on a CPU it serves inference only, and this call needs gradients"

ScoreMod = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]


def block_mask_of(pattern: Pattern, n: int, layout: Layout, device: torch.device) -> BlockMask:
    """Which tiles of pairs the pattern fills, cuts and leaves empty; the latest are kept."""
    make = _kept_block_mask.__wrapped__ if torch.compiler.is_compiling() else _kept_block_mask
    return make(pattern, n, layout, str(device))


@functools.lru_cache(maxsize=16)
def _kept_block_mask(pattern: Pattern, n: int, layout: Layout, device: str) -> BlockMask:
    from torch.nn.attention.flex_attention import BlockMask

    with torch.inference_mode(False), torch.no_grad():
        rule = pattern.rule(n, layout, torch.device(device))
        met = count_pairs(rule, n, torch.device(device))
        full, cut = met == BLOCK * BLOCK, (met > 0) & (met < BLOCK * BLOCK)

        def listed(tiles: Tensor) -> tuple[Tensor, Tensor]:
            """How many tiles each row of tiles has, and their numbers, those first."""
            order = tiles.int().argsort(dim=1, descending=True, stable=True)
            return tiles.sum(dim=1, dtype=torch.int32)[None, None], order.to(torch.int32).contiguous()[None, None]

        return BlockMask.from_kv_blocks(
            *listed(cut), *listed(full), BLOCK_SIZE=BLOCK, mask_mod=mask_mod(rule), seq_lengths=(n, n)
        )


def count_pairs(rule: Rule, n: int, device: torch.device) -> Tensor:
    """(tiles, tiles): how many pairs of each tile may meet, found with n · BLOCK numbers in memory at a time."""
    tiles = -(-n // BLOCK)
    j = torch.arange(n, device=device)
    rows = []
    for start in range(0, n, BLOCK):
        i = torch.arange(start, min(start + BLOCK, n), device=device)
        met = rule(i[:, None], j[None]).sum(dim=0)
        rows.append(F.pad(met, (0, tiles * BLOCK - n)).view(tiles, BLOCK).sum(dim=1))
    return torch.stack(rows)


def mask_mod(rule: Rule) -> Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]:
    """A rule of (i, j) as FlexAttention wants it."""

    def allowed(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return rule(i, j)

    return allowed


def score_mod(o: Operands) -> ScoreMod | None:
    """What bias, position and mask do to a score; None where there are none."""
    bias, mask, position, layout = o.bias, o.mask, o.position, o.layout
    if bias is None and mask is None and position is None:
        return None
    entries = None if position is None else position.entries(layout)

    def change(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        if bias is not None:
            score = score + one_of(bias, b, h, i, j)
        if position is not None and entries is not None:
            score = score + entries[position.index(i, j, layout, entries.shape[0]), h]
        if mask is not None:
            score = torch.where(one_of(mask, b, h, i, j), score, float("-inf"))
        return score

    return change


def one_of(pair: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    """An element of a mask or bias (B or 1, H or 1, N or 1, M or 1)."""
    index = [at if size > 1 else at * 0 for at, size in zip((b, h, i, j), pair.shape, strict=True)]
    return pair[index[0], index[1], index[2], index[3]]


@functools.cache
def compiled() -> Callable[..., Any]:
    """FlexAttention, compiled anew for every shape and rule."""
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention, dynamic=False, fullgraph=True)


def no_compiler(device: str) -> str | None:
    """Why nothing can be compiled for a device; None where it can."""
    if device == "cpu":
        if sys.platform == "darwin" or not torch.backends.cpu.get_cpu_capability().startswith("AVX"):
            return "on a CPU it needs AVX2 or AVX-512"
        compiler = shlex.split(os.environ.get("CXX") or ("cl" if sys.platform == "win32" else "g++"))[0]
        if shutil.which(compiler) is None:
            return f"on a CPU it is compiled as C++, and there is no compiler {compiler!r}; install g++, or set CXX"
    else:
        from torch.utils._triton import has_triton

        if not has_triton():
            return f"on {device} it is compiled with Triton, which is not installed or does not know this device"
    return None


class Flex:
    """PyTorch's FlexAttention, compiled on first use, with the pattern as a block mask."""

    name = "flex"

    def why_not(self, request: Request) -> str | None:
        if request.pattern == "performer":
            return "performer never forms scores; use kernel='auto'"
        if not request.dot:
            return "it computes dot products only, and this score is none; use kernel='explicit'"
        if request.normalizer not in FUSED:
            return f"it computes softmax only, not {request.normalizer!r}; use kernel='explicit'"
        instead = "use kernel='gathered'" if request.pattern not in (None, "causal") else "use kernel='sdpa'"
        if request.dropout:
            return f"it knows no dropout; {instead}"
        if request.device not in ("cpu", "cuda"):
            return f"it is not made for device {request.device!r}; {instead}"
        if request.dtype not in DTYPES:
            return f"it does not compute in {request.dtype}; {instead}"
        if request.device == "cpu" and request.training:
            return f"{NO_GRADIENTS}; {instead}, or torch.no_grad()"
        if request.device == "cuda" and request.width < LEAST_WIDTH:
            return f"on a GPU it takes heads of width {LEAST_WIDTH} or more, not {request.width}; {instead}"
        lacking = no_compiler(request.device)
        return f"{lacking}; or {instead}" if lacking else None

    def __call__(self, o: Operands) -> Tensor:
        n = o.q.shape[2]
        block_mask = None if o.pattern is None else block_mask_of(o.pattern, n, o.layout, o.q.device)
        q, k, v = o.q, o.k, o.v
        if q.device.type == "cpu":  # it refuses tensors that could have a gradient, even where none is asked for
            learned = [o.bias, *([] if o.position is None else o.position.parameters())]
            if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in learned):
                raise ValueError(f"kernel 'flex' cannot serve this request: {NO_GRADIENTS}; use torch.no_grad()")
            q, k, v = q.detach(), k.detach(), v.detach()
        with torch._dynamo.config.patch(recompile_limit=MOST_KERNELS):
            return compiled()(
                q,
                k,
                v,
                score_mod=score_mod(o),
                block_mask=block_mask,
                scale=o.scale,
                enable_gqa=q.shape[1] != k.shape[1],
            )


register_kernel(Flex())
