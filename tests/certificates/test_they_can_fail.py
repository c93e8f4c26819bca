"""A certificate that cannot fail proves nothing: one fault at a time, put into the code, is found."""

from __future__ import annotations

import dataclasses
import sys

import pytest
import torch
import torch.nn.functional as F

from vision_attn.attention import core, masks, multihead, normalizers, patterns, relative, rotary, scores, windows
from vision_attn.attention.kernels import KERNELS, Operands
from vision_attn.certificates import CERTIFICATES, run
from vision_attn.certificates import layers as layer_certificates
from vision_attn.certificates import patterns as pattern_certificates
from vision_attn.layers.decoder import DecoderLayer
from vision_attn.layers.embed import PatchEmbed


def one_direction(a, b, temperature=0.07):
    return F.cross_entropy(F.normalize(a, dim=-1) @ F.normalize(b, dim=-1).T / temperature, torch.arange(len(a)))


def without_diagonal(n, m=None, *, device=None):
    return torch.ones(n, m or n, dtype=torch.bool, device=device).tril((m or n) - n - 1)


def cross_attention_first(self, x, context, **options):
    attended = self.norm2(x + self.cross_attn(x, context))
    attended = self.norm1(attended + self.self_attn(attended))
    return self.norm3(attended + self.mlp(attended))


FAULTS = {
    "scores over d": (scores.ScaledDot, "as_dot", lambda self, q, k: (q, k, 1 / q.shape[-1]), "2 5 18 24 29"),
    "no scale": (scores.ScaledDot, "as_dot", lambda self, q, k: (q, k, 1.0), "2 5 5b 18"),
    "cosine of what is not unit": (scores.Cosine, "as_dot", lambda self, q, k: (q, k, 1.0), "4 4b"),
    "general that forgets W": (scores.General, "as_dot", lambda self, q, k: (q, k[..., : q.shape[-1]], 1.0), "6b"),
    "additive without tanh": (
        scores,
        "tanh_scores",
        lambda q, k, w_q, w_k, v: (
            torch.einsum("bhnd,had,ha->bhn", q, w_q, v)[..., None]
            + torch.einsum("bhmd,had,ha->bhm", k.repeat_interleave(2, 1), w_k, v)[:, :, None]
        ),
        "7",
    ),
    "the worst key": (normalizers.NORMALIZERS, "hard", lambda s: normalizers.hard(-s), "12"),
    "uniform samples": (normalizers.NORMALIZERS, "sampled", lambda s: normalizers.sampled(0 * s), "12c 12d"),
    "empty rows kept": (Operands, "finish", lambda self, out: out, "23d"),
    "causal without diagonal": (pattern_certificates, "causal_mask", without_diagonal, "23"),
    "padding on the wrong side": (
        pattern_certificates,
        "padding_mask",
        lambda keep: masks.padding_mask(keep).flip(-1),
        "23c",
    ),
    "a window that is too narrow": (
        patterns.Window,
        "near",
        lambda self, i, j, n, layout: (i - j).abs() < self.window,
        "22 22b 36b 36e",
    ),
    "a window that wraps around the grid": (
        patterns.Window2d,
        "near",
        lambda self, i, j, n, layout: (
            ((i - j).abs() % layout.grid[1] <= self.window) & ((i - j).abs() // layout.grid[1] <= self.window)
        ),
        "22c",
    ),
    "windows that are not shifted": (
        windows.ShiftedWindows,
        "sides",
        lambda self, layout: ((self.window,) * 2, (0, 0)),
        "31",
    ),
    "windows that wrap around the map": (
        multihead,
        "run_in_windows",
        lambda o, folding, kernel: core.run(o, kernel),
        "31 31c 31d",
    ),
    "rotary that does not turn": (rotary.Rotary, "rotate", lambda self, x, layout: x, "21 21d"),
    "rotary that stretches": (rotary, "turned", lambda x, turn: 2 * x, "21e"),
    "buckets by distance alone": (
        relative,
        "t5_bucket",
        lambda offset, buckets=32, far=128: offset.abs().clamp(max=31),
        "21g",
    ),
    "cross-attention before self-attention": (DecoderLayer, "forward", cross_attention_first, "25"),
    "patches read backwards": (
        PatchEmbed,
        "forward",
        lambda self, x: self.proj(x.flip(-1)).flatten(2).transpose(1, 2),
        "27 29",
    ),
    "a loss of one direction": (layer_certificates, "contrastive_loss", one_direction, "32"),
}


def forget() -> None:
    """Masks, plans and rotations are kept between calls: no fault may outlive its test, nor hide behind them."""
    for name, module in list(sys.modules.items()):
        if name.startswith("vision_attn.attention"):
            for kept in vars(module).values():
                if hasattr(kept, "cache_clear"):
                    kept.cache_clear()


@pytest.fixture(autouse=True)
def nothing_kept(monkeypatch):
    forget()
    yield
    monkeypatch.undo()
    forget()


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_found(fault, monkeypatch):
    where, name, wrong, ids = FAULTS[fault]
    if isinstance(where, dict):
        monkeypatch.setitem(where, name, wrong)
    else:
        monkeypatch.setattr(where, name, wrong)
    found = {id: run(CERTIFICATES[id], dtype=torch.float64) for id in ids.split()}
    assert [id for id, result in found.items() if result.passed is not False] == []
    # by what was measured, not by a crash
    assert {id: result.reason for id, result in found.items() if result.reason} == {}


@pytest.mark.parametrize("id", ["23b", "23c", "23d", "36b", "37b"])
def test_a_kernel_that_forgets_the_mask_is_found(id, monkeypatch):
    kernel = KERNELS["sdpa"]
    whole = type(kernel).__call__
    monkeypatch.setattr(
        type(kernel), "__call__", lambda self, o: whole(self, dataclasses.replace(o, mask=None, pattern=None))
    )
    assert run(CERTIFICATES[id], dtype=torch.float64, kernel="sdpa").passed is False
