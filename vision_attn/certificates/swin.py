"""Row 31: windows, their shift, and the hierarchy of Swin Transformers."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from vision_attn.attention import Attention, Layout
from vision_attn.certificates.registry import ALSO_BF16, Setting, certificate, gaps, gradients
from vision_attn.models import create_model

GRID = (6, 9)
SMALL: dict[str, Any] = {
    "img_size": (20, 22),
    "patch_size": 2,
    "embed_dim": 12,
    "depths": [2, 2],
    "num_heads": [2, 3],
    "window_size": 4,
    "num_classes": 5,
}


TIMM = {
    "relative_position_bias_table": "position.table",
    "cpb_mlp": "position.mlp",
    "attn.logit_scale": "attn.score.logit_scale",
    "attn.q_bias": "attn.qkv.q_bias",
    "attn.v_bias": "attn.qkv.v_bias",
    "head.fc": "head",
}
"""Words of timm's names -> ours."""


def _rolled(window: int, shift: int, device: str) -> Tensor:
    """The (N, N) mask as Swin makes it: the map is rolled, cut into windows, and regions of it kept apart."""
    rows, columns = GRID
    region = torch.zeros(GRID)
    for number, (a, b) in enumerate((a, b) for a in _cuts(window, shift) for b in _cuts(window, shift)):
        region[a, b] = number
    row, column = torch.arange(rows)[:, None] // window, torch.arange(columns)[None] // window
    region = region + 100 * row + 10000 * column
    region = region.roll((shift, shift), (0, 1)).flatten().to(device)
    return region[:, None] == region


def _cuts(window: int, shift: int) -> list[slice]:
    return [slice(0, -window), slice(-window, -shift), slice(-shift, None)] if shift else [slice(None)]


@certificate(
    "31", "shifted windows equal full attention under Swin's mask, gradients too", dtypes=ALSO_BF16, kernel=True
)
def masked_full(s: Setting) -> float:
    found = []
    for shift in (0, 1):
        words: dict[str, Any] = {"pattern": "shifted_windows", "window": 3, "shift": shift, "position": "relative_bias"}
        layer = s.module(Attention(12, 3, kernel=s.kernel, **words))
        full = Attention(12, 3, kernel="explicit").to(s.device, s.dtype).eval()
        state = layer.state_dict()
        table = state.pop("position.table")
        full.load_state_dict(state)
        row, column = torch.arange(54, device=s.device) // 9, torch.arange(54, device=s.device) % 9
        down, right = row[:, None] - row + 2, column[:, None] - column + 2  # of pairs in one window 0 … 4
        bias = table[(down.clamp(0, 4) * 5 + right.clamp(0, 4))].permute(2, 0, 1)[None]
        x = s.randn(2, 54, 12, grad=True)
        out = layer(x, layout=Layout(0, GRID))
        expected = full(x, bias=bias, mask=_rolled(3, shift, s.device))
        found.append(gaps((out, expected), (gradients(out, x)[0], gradients(expected, x)[0])))
    return max(found)


@certificate("31b", "attention of stage 1, 56 × 56 of width 96: 2.00 GMAC, in windows of 7 0.145", tolerance=5e-3)
def cost(s: Setting) -> float:
    def gmac(**words: Any) -> float:
        layer = Attention(96, 3, kernel="explicit", **words).to("meta")
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            layer(torch.zeros(1, 56 * 56, 96, device="meta"), layout=Layout(0, (56, 56)))
        return counter.get_total_flops() / 2e9

    tokens, width, window = 56 * 56, 96, 49  # the paper's formulas: 4 N C² + 2 N² C, and 4 N C² + 2 M² N C
    projections = 4 * tokens * width**2
    pairs = [
        (gmac(), (projections + 2 * tokens**2 * width) / 1e9, 2.00),
        (gmac(pattern="shifted_windows", window=7, shift=3), (projections + 2 * window * tokens * width) / 1e9, 0.145),
    ]
    exact = max(abs(counted - formula) for counted, formula, _ in pairs)
    return max(1e6 * exact, *(abs(counted / said - 1) for counted, _, said in pairs))


def _equals_timm(s: Setting, version: int) -> float:
    from timm.models.swin_transformer import SwinTransformer as One
    from timm.models.swin_transformer_v2 import SwinTransformerV2 as Two

    peer = s.module((One if version == 1 else Two)(**SMALL))
    ours: Any = create_model(
        "swin_cifar_tiny", version=version, borders="timm", attention={"kernel": s.kernel}, **SMALL
    )
    state = {}
    for name, value in peer.state_dict().items():
        for theirs, mine in TIMM.items():
            name = name.replace(theirs, mine)
        state[name] = value.flatten() if name.endswith("logit_scale") else value
    ours.to(s.device, s.dtype).eval().load_state_dict(state)
    x = s.randn(2, 3, 20, 22, grad=True)
    out, expected = ours(x), peer(x)
    return gaps((out, expected), (gradients(out, x)[0], gradients(expected, x)[0]))


@certificate("31c", "Swin: logits and gradients equal timm's with copied weights, padding included", kernel=True)
def equals_timm(s: Setting) -> float:
    return _equals_timm(s, 1)


@certificate("31d", "Swin V2: logits and gradients equal timm's with copied weights", kernel=True)
def equals_timm_v2(s: Setting) -> float:
    return _equals_timm(s, 2)
