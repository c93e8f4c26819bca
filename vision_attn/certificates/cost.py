"""Rows 28, 35 and 37: what attention costs, and how exact what costs less is. Nothing here is timed."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode

from vision_attn.attention import Attention, Layout, attend, causal_mask, record
from vision_attn.attention.linear import Linformer, Performer
from vision_attn.benchmarking import fit_exponent
from vision_attn.certificates.largest import largest_tensor
from vision_attn.certificates.registry import EXACT, FLOAT32_INSIDE, Setting, certificate, gap, gaps, gradients, holds

LENGTHS = (64, 128, 256, 512)


@certificate("28", "full attention computes N² pairs: its products grow 4-fold with 2 N", tolerance=1e-9)
def quadratic_time(s: Setting) -> float:
    flops = []
    for n in LENGTHS:
        q = s.randn(1, 2, n, 8)
        with FlopCounterMode(display=False) as counter:
            attend(q, q, q, kernel="explicit")
        flops.append(counter.get_total_flops())
    formula = [2 * 2 * 2 * n * n * 8 for n in LENGTHS]
    return max(abs((fit_exponent(LENGTHS, flops) or 0.0) - 2), holds(flops == formula))


@certificate(
    "28b",
    "unfused, it holds H·N² numbers; tiled, never a tensor that grows faster than N",
    dtypes=EXACT,
    tolerance=1e-9,
)
def quadratic_memory(s: Setting) -> float:
    def numbers(kernel: str, n: int) -> int:
        q = s.randn(1, 2, n, 8, grad=True)
        return largest_tensor(lambda: gradients(attend(q, q, q, kernel=kernel), q))

    lengths = (512, 1024, 2048)  # several tiles
    unfused = [numbers("explicit", n) for n in lengths[:2]]
    tiled = [numbers("tiled", n) for n in lengths]
    return max(abs(unfused[1] / unfused[0] - 4), holds(tiled[-1] <= max(2 * 8 * lengths[-1], tiled[0])))


def _with_everything(s: Setting) -> dict[str, Any]:
    """Grouped heads, a bias that is learned and a mask with an empty row; more tokens than a tile has."""
    b, h, g, n, m = 1, 4, 2, 67, 301
    mask = torch.rand(b, 1, n, m, generator=s.generator) > 0.3
    mask[:, :, 5] = False
    return {
        "q": s.randn(b, h, n, 8, grad=True),
        "k": s.randn(b, g, m, 8, grad=True),
        "v": s.randn(b, g, m, 5, grad=True),
        "bias": s.randn(1, h, n, m, grad=True),
        "mask": mask.to(s.device),
    }


@certificate("37", "tiled online softmax equals the explicit form with mask, bias, groups; gradients too")
def tiled(s: Setting) -> float:
    given = _with_everything(s)
    leaves = [tensor for tensor in given.values() if tensor.requires_grad]
    out, expected = attend(**given, kernel="tiled"), attend(**given, kernel="explicit")
    return gaps((out, expected), *zip(gradients(out, *leaves), gradients(expected, *leaves), strict=True))


@certificate(
    "37b",
    "the kernel asked for equals explicit attention, plain and causal, gradients too",
    kernel=True,
)
def kernel_is_explicit(s: Setting) -> float:
    pairs = []
    for mask in (None, causal_mask(67, device=s.device)):
        q, k, v = (s.randn(1, heads, 67, 16, grad=True) for heads in (4, 2, 2))
        out, expected = s.attend(q, k, v, mask=mask), attend(q, k, v, mask=mask, kernel="explicit")
        pairs += [(out, expected), *zip(gradients(out, q, k, v), gradients(expected, q, k, v), strict=True)]
    return gaps(*pairs)


def _linformer(s: Setting, length: int, rank: int, heads: int = 3) -> Linformer:
    return s.module(Linformer(heads, length, rank))


@certificate("35", "Linformer with rank N and E = F = I is full attention, gradients too", kernel=True)
def linformer_identity(s: Setting) -> float:
    q, k, v = (s.randn(2, heads, 23, 7, grad=True) for heads in (6, 3, 3))
    pattern = _linformer(s, 23, 23)
    with torch.no_grad():
        for matrix in pattern.parameters():
            matrix.copy_(torch.eye(23).expand_as(matrix))
    out, expected = s.attend(q, k, v, pattern=pattern), s.attend(q, k, v)
    return gaps((out, expected), *zip(gradients(out, q, k, v), gradients(expected, q, k, v), strict=True))


@certificate(
    "35b",
    "Performer on soft attention: 16 times the features leave a quarter of the error",
    dtypes=EXACT,
    tolerance=0.4,
)
def performer_converges(s: Setting) -> float:
    # q and k of unit normals times 0.3: where attention is sharp, the error falls far more slowly
    q, k, v = 0.3 * s.randn(1, 2, 31, 16), 0.3 * s.randn(1, 2, 31, 16), s.randn(1, 2, 31, 7)
    exact = attend(q, k, v, kernel="explicit")

    def error(features: int) -> float:
        """Root mean square over ten draws."""
        draws = [Performer(16, features, seed=seed).to(s.device).eval() for seed in range(10)]
        squares = [(attend(q, k, v, pattern=draw) - exact).square().mean() for draw in draws]
        return float(torch.stack(squares).mean().sqrt())

    few, more, many = error(16), error(256), error(4096)
    return max(more / few, many / more)


@certificate("35c", "Performer's features come from the seed alone, orthogonal in blocks of d, and repeat")
def performer_seed(s: Setting) -> float:
    one, same, other = (Performer(16, 32, seed=seed).projection.to(s.device) for seed in (3, 3, 4))
    block = one[:16] / one[:16].norm(dim=1, keepdim=True)
    orthogonal = 1e-6 * gap(block @ block.T, torch.eye(16, device=block.device))  # features are float32
    return max(orthogonal, holds(torch.equal(one, same) and gap(one, other) > 0.1))


@certificate("35d", "neither has N × M weights: maps are implied by results, and labelled so", tolerance=FLOAT32_INSIDE)
def implied_maps(s: Setting) -> float:
    x, layout, errors = s.randn(2, 31, 24), Layout(), []
    choices: list[dict[str, Any]] = [{"pattern": "linformer", "rank": 5}, {"pattern": "performer", "features": 32}]
    for words in choices:
        layer = s.module(Attention(24, 3, layout=Layout(grid=(1, 31)), **words))
        with record(layer) as recorder:
            out = layer(x, layout=layout)
        _, _, v = layer._project(x, None, None, None)
        maps = recorder.weights("")  # float32, whatever the layer is
        mixed = layer.proj((maps.to(v.dtype) @ v).transpose(1, 2).flatten(2))
        errors += [gap(mixed, out), holds(recorder.implied(""))]
        if words["pattern"] == "performer":
            errors.append(gap(maps.sum(-1), torch.ones_like(maps[..., 0])))
    plain = s.module(Attention(24, 3))
    with record(plain) as recorder:
        plain(x)
    return max(*errors, holds(not recorder.implied("")))


@certificate("35e", "products of Linformer and Performer grow like N, exactly", tolerance=1e-9)
def linear_time(s: Setting) -> float:
    errors = []
    for name in ("linformer", "performer"):
        flops = []
        for n in LENGTHS:
            q = s.randn(1, 2, n, 8)
            pattern = _linformer(s, n, 16, 2) if name == "linformer" else Performer(8, 16).to(s.device)
            kernel = "explicit" if name == "linformer" else "favor"  # fused kernels hide their products
            with FlopCounterMode(display=False) as counter, torch.no_grad():
                attend(q, q, q, pattern=pattern, kernel=kernel)
            flops.append(counter.get_total_flops())
        errors.append(abs((fit_exponent(LENGTHS, flops) or 0.0) - 1))
    return max(errors)
