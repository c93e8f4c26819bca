"""Row 21: positions, which break what row 20 says."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from vision_attn.attention import Attention, Layout, resample_grid, sinusoidal_1d, sinusoidal_2d, token_position
from vision_attn.attention.positions import LAYER_POSITIONS, make_layer_position
from vision_attn.attention.relative import PairBias
from vision_attn.attention.rotary import Rotary
from vision_attn.certificates.registry import EXACT, Setting, certificate, gap, gaps, holds

GRID = (3, 5)
TOKENS = 1 + GRID[0] * GRID[1]
LAYOUT = Layout(prefix=1, grid=GRID)


def _breaks_permutation(s: Setting, kind: str) -> bool:
    """Whether shuffled tokens, the class token staying in front, do not simply come out shuffled."""
    inside = kind in LAYER_POSITIONS
    layer = s.module(Attention(24, 3, position=kind if inside else "none", layout=LAYOUT, kernel=s.kernel), std=0.5)
    added = None if inside else token_position(kind, 1, GRID, 24)[0]
    if kind == "learned":
        added = s.randn(1, TOKENS, 24)
    x = s.randn(2, TOKENS, 24)
    place = torch.zeros_like(x) if added is None else added.to(x)
    order = torch.cat([torch.zeros(1, dtype=torch.long, device=x.device), 1 + s.permutation(TOKENS - 1)])
    out, shuffled = (layer(tokens + place, layout=LAYOUT) for tokens in (x, x[:, order]))
    return gap(shuffled, out[:, order]) > 1e-3


@certificate("21", "every position breaks row 20: shuffled patches are no longer the same image", kernel=True)
def breaks(s: Setting) -> float:
    kinds = ("learned", "sinusoidal", "sinusoidal_1d", *LAYER_POSITIONS)
    return holds(all(_breaks_permutation(s, kind) for kind in kinds) and not _breaks_permutation(s, "none"))


@certificate("21b", "sinusoidal: sin, cos of pos / 10000^(2i/d); products depend on the offset only")
def sinusoidal(s: Setting) -> float:
    table = sinusoidal_1d(23, 12).to(s.device, s.dtype)
    place, channel = torch.arange(23.0, dtype=torch.float64)[:, None], torch.arange(6, dtype=torch.float64)
    angle = place / 10000 ** (2 * channel / 12)
    formula = torch.stack([angle.sin(), angle.cos()], dim=-1).flatten(1).to(s.device)
    product = formula @ formula.T
    return gaps((product[1:, 1:], product[:-1, :-1]), (table, formula.float().to(s.dtype)))


@certificate("21c", "sinusoidal in 2-D: half the channels tell the row alone, half the column alone")
def sinusoidal_grid(s: Setting) -> float:
    table = sinusoidal_2d(*GRID, 24).to(s.device, s.dtype).view(*GRID, 24)
    rows, columns = (sinusoidal_1d(n, 12).to(table) for n in GRID)
    return gaps(
        (table[..., :12], rows[:, None].expand(-1, GRID[1], -1)), (table[..., 12:], columns.expand(GRID[0], -1, -1))
    )


def _rotary_scores(s: Setting, kind: str, layout: Layout, n: int) -> Tensor:
    """Scores when one and the same query and key stand at every place: (N, N)."""
    rotary = make_layer_position(kind, 1, 8, layout)
    assert isinstance(rotary, Rotary)
    q, k = (s.randn(1, 1, 1, 8).expand(1, 1, n, 8) for _ in range(2))
    return (rotary.rotate(q, layout) @ rotary.rotate(k, layout).mT)[0, 0]


@certificate("21d", "rotary: scores depend on the offset only, along the sequence, rows and columns")
def rotary_offset(s: Setting) -> float:
    line = _rotary_scores(s, "rope_1d", Layout(), 23)
    plane = _rotary_scores(s, "rope", Layout(grid=(5, 7)), 35).view(5, 7, 5, 7)
    differs = gap(line[0], line[0, :1].expand(23)) > 0.01 and gap(plane[0, 0], plane[0, 0, :1, :1].expand(5, 7)) > 0.01
    return max(
        gaps(
            (line[4:, 4:], line[:-4, :-4]),
            (plane[2:, :, 2:], plane[:-2, :, :-2]),
            (plane[:, 3:, :, 3:], plane[:, :-3, :, :-3]),
        ),
        holds(differs),
    )


@certificate("21e", "rotary turns and never stretches, and leaves class tokens as they are")
def rotary_norm(s: Setting) -> float:
    x, errors = s.randn(2, 3, TOKENS, 8), []
    for kind in ("rope", "rope_1d"):
        rotary = make_layer_position(kind, 3, 8, LAYOUT)
        assert isinstance(rotary, Rotary)
        turned = rotary.rotate(x, LAYOUT)
        errors += [gaps((turned.square().sum(-1), x.square().sum(-1)), (turned[:, :, :1], x[:, :, :1]))]
    return max(errors)


def _bias(s: Setting, kind: str, layout: Layout, n: int) -> Tensor:
    """(H, N, N) of random entries."""
    position = make_layer_position(kind, 3, 8, layout)
    assert isinstance(position, PairBias)
    return s.module(position).dense(n, n, layout)[0]


@certificate("21f", "relative biases (T5, Swin) depend on the offset only, a number for each head", dtypes=EXACT)
def relative_offset(s: Setting) -> float:
    line = _bias(s, "t5", Layout(), 23)
    plane = _bias(s, "relative_bias", Layout(grid=(5, 7)), 35).view(3, 5, 7, 5, 7)
    # offsets as large as the grid are all told apart: (2·5 − 1)(2·7 − 1) numbers per head
    told_apart = plane[0].unique().numel() == 9 * 13
    return max(
        gaps(
            (line[:, 4:, 4:], line[:, :-4, :-4]),
            (plane[:, 2:, :, 2:], plane[:, :-2, :, :-2]),
            (plane[:, :, 3:, :, 3:], plane[:, :, :-3, :, :-3]),
        ),
        holds(told_apart),
    )


@certificate("21g", "T5: 8 near distances have buckets of their own, all from 128 on share one")
def buckets(s: Setting) -> float:
    line = _bias(s, "t5", Layout(), 300)[0]
    after, before = line[0], line[:, 0]  # keys 0 … 299 places after the query, and before it
    shared = [side[128:].unique().numel() == 1 for side in (after, before)]
    # 0 … 7 alone, then 8 buckets up to 128: 16 after (one of them, for 0, cannot occur) and 16 before
    apart = [side[:8].unique().numel() == 8 and side.unique().numel() == 16 for side in (after, before)]
    return holds(all(shared) and all(apart))


@certificate("21h", "a relative bias inside the layer is that bias added to the scores", kernel=True)
def bias_is_added(s: Setting) -> float:
    x, pairs = s.randn(2, TOKENS, 24), []
    for kind in ("t5", "relative_bias"):
        layer = s.module(Attention(24, 3, position=kind, layout=LAYOUT, kernel=s.kernel))
        plain = Attention(24, 3, kernel=s.kernel).to(s.device, s.dtype)
        plain.load_state_dict({k: v for k, v in layer.state_dict().items() if not k.startswith("position.")})
        bias = layer.position.dense(TOKENS, TOKENS, LAYOUT)
        pairs.append((layer(x, layout=LAYOUT), plain(x, bias=bias)))
    return gaps(*pairs)


@certificate("21i", "learned positions at another grid size are interpolated, those of class tokens kept")
def resampled(s: Setting) -> float:
    position = s.randn(1, TOKENS, 8)
    image = position[0, 1:].T.reshape(1, 8, *GRID)
    expected = F.interpolate(image.float(), size=(7, 11), mode="bicubic", antialias=True).flatten(2).mT.to(position)
    found = resample_grid(position, GRID, (7, 11), 1)
    return gaps(
        (found[:, 1:], expected), (found[:, :1], position[:, :1]), (resample_grid(position, GRID, GRID, 1), position)
    )
