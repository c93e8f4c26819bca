"""CCT, CVT and ViT-Lite as their authors' code has them."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import vision_attn as va
from vision_attn.checkpoints import compact
from vision_attn.errors import UserError


class Layer(nn.Module):
    """Two halves, between which the residual stream itself is normalized."""

    def __init__(self, dim, heads, hidden):
        super().__init__()
        self.heads = heads
        self.pre_norm, self.norm1 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.self_attn = nn.ModuleDict({"qkv": nn.Linear(dim, 3 * dim, bias=False), "proj": nn.Linear(dim, dim)})
        self.linear1, self.linear2 = nn.Linear(dim, hidden), nn.Linear(hidden, dim)

    def forward(self, x):
        parts = self.self_attn["qkv"](self.pre_norm(x)).unflatten(2, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        q, k, v = parts
        weights = (q @ k.mT / q.shape[-1] ** 0.5).softmax(-1)
        x = self.norm1(x + self.self_attn["proj"]((weights @ v).transpose(1, 2).flatten(2)))
        return x + self.linear2(F.gelu(self.linear1(x)))


class Peer(nn.Module):
    """The tokenizer, the layers and the pooling of https://github.com/SHI-Labs/Compact-Transformers, by its names."""

    def __init__(
        self, *, dim=24, heads=2, depth=2, hidden=40, convs=2, side=3, cut=False, token=False, size=32, pos=True
    ):
        super().__init__()
        stages, widths = [], [3, *[11] * (convs - 1), dim]
        stride, padding = (side, 0) if cut else (max(1, side // 2 - 1), max(1, side // 2))
        for a, b in pairwise(widths):
            conv = nn.Conv2d(a, b, side, stride=stride, padding=padding, bias=cut)
            rest = (nn.Identity(), nn.Identity()) if cut else (nn.ReLU(), nn.MaxPool2d(3, 2, 1))
            stages.append(nn.Sequential(conv, *rest))
        self.tokenizer = nn.ModuleDict({"conv_layers": nn.Sequential(*stages)})
        tokens = self.tokenizer["conv_layers"](torch.zeros(1, 3, size, size)).shape[-2:].numel()
        c = self.classifier = nn.Module()
        if token:
            c.class_emb = nn.Parameter(torch.zeros(1, 1, dim))
        else:
            c.attention_pool = nn.Linear(dim, 1)
        if pos:
            c.positional_emb = nn.Parameter(torch.zeros(1, tokens + token, dim))
        c.blocks = nn.ModuleList(Layer(dim, heads, hidden) for _ in range(depth))
        c.norm, c.fc = nn.LayerNorm(dim), nn.Linear(dim, 10)
        self.token, self.pos = token, pos

    def forward(self, x):
        c, x = self.classifier, self.tokenizer["conv_layers"](x).flatten(2).mT
        if self.token:
            x = torch.cat([c.class_emb.expand(len(x), -1, -1), x], dim=1)
        if self.pos:
            x = x + c.positional_emb
        for block in c.blocks:
            x = block(x)
        x = c.norm(x)
        pooled = x[:, 0] if self.token else (c.attention_pool(x).softmax(1).mT @ x)[:, 0]
        return c.fc(pooled)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"convs": 1},
        {"convs": 2, "side": 7, "size": 64},
        {"convs": 1, "side": 4, "cut": True},
        {"convs": 1, "side": 4, "cut": True, "token": True},
        {"pos": False},
    ],
)
def test_loads_and_goes_back(options, foreign, tmp_path):
    peer, size = Peer(**options), options.get("size", 32)
    x = torch.randn(2, 3, size, size)
    ours = foreign.loads_like(peer, tmp_path, x, num_heads=2)
    assert ours.config["preprocess"]["size"] == [size, size]
    assert ours.config["args"]["norm_stream"] is True
    back = compact.revert(ours.state_dict(), ours)
    again = Peer(**options)
    again.load_state_dict(back, strict=True)
    foreign.same(ours, again, x)
    kept = va.load_model(va.save_model(ours.float(), tmp_path / "ours"))
    foreign.same(kept, peer, x)


def test_published_sizes_by_their_name(foreign, tmp_path):
    peer, x = Peer(dim=256, heads=4, depth=2, hidden=512, convs=1), torch.randn(1, 3, 32, 32)
    ours = foreign.loads_like(peer, tmp_path, x)
    assert ours.config["name"] == "cct_6_3x1_32" or ours.config["name"] == "cct_7_3x1_32"
    assert "assumed" not in ours.config["extra"]
    assert ours.config["preprocess"]["mean"] == [0.4914, 0.4822, 0.4465]


def test_what_cannot_be_told_is_asked_for(foreign, tmp_path):
    peer = Peer()
    torch.save(peer.state_dict(), tmp_path / "w.pth")
    with pytest.raises(UserError, match="24 wide"):
        va.load_model(tmp_path / "w.pth")
    state = peer.state_dict()
    state["classifier.positional_emb"] = torch.zeros(1, 48, 24)  # 6 × 8
    torch.save(state, tmp_path / "w.pth")
    with pytest.raises(UserError, match="48 positions are no square grid"):
        va.load_model(tmp_path / "w.pth", num_heads=2)
    assert foreign.quietly(tmp_path / "w.pth", num_heads=2, img_size=(24, 32))(torch.zeros(1, 3, 24, 32)).shape == (
        1,
        10,
    )
    plain = va.create_model("cct_2_3x2_32")
    with pytest.raises(UserError, match="norm_stream=True, pools by seq or token"):
        compact.revert(plain.state_dict(), plain)
