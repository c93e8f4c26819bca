"""Small peers with random weights, and what every test of a foreign layout asks of them: the fixture ``foreign``."""

from __future__ import annotations

import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import vision_attn as va
from vision_attn.checkpoints.compare import randomised


def shaken(peer: nn.Module, seed: int = 0) -> nn.Module:
    """Random numbers everywhere, float64: some libraries begin with zeros, which would hide mistakes."""
    peer.load_state_dict(randomised(peer.state_dict(), seed))
    return peer.double().eval()


def quietly(path: Any, **options: Any) -> nn.Module:
    """``load_model`` without the notes on what was assumed."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return va.load_model(path, **options)


def logits(model: nn.Module, x: Tensor) -> Tensor:
    out = model(x)
    return getattr(out, "logits", out)


def same(ours: nn.Module, peer: nn.Module, x: Tensor) -> None:
    """Logits and gradients in float64, and logits in float32."""
    ours, peer = ours.double().eval(), peer.double().eval()
    a, b = x.double().requires_grad_(), x.double().requires_grad_()
    got, expected = logits(ours, a), logits(peer, b)
    assert expected.std() > 1e-3  # a comparison of constants proves nothing
    torch.testing.assert_close(got, expected, rtol=1e-9, atol=1e-9 * float(expected.detach().abs().max()))
    got.square().sum().backward()
    expected.square().sum().backward()
    torch.testing.assert_close(a.grad, b.grad, rtol=1e-8, atol=1e-9 * float(b.grad.abs().max()))
    single = logits(ours.float(), x.float())
    scale = float(expected.detach().abs().max())
    torch.testing.assert_close(single.double(), expected, rtol=1e-4, atol=1e-4 * scale)


def loads_like(peer: nn.Module, folder: Path, x: Tensor, **options: Any) -> nn.Module:
    """Saves a shaken peer as a file, loads it without being told what it is, and compares; gives our model."""
    torch.save(shaken(peer).state_dict(), folder / "theirs.pth")
    ours = quietly(folder / "theirs.pth", **options)
    same(ours, peer, x)
    return ours


@pytest.fixture
def foreign() -> SimpleNamespace:
    """``shaken quietly logits same loads_like``, as above."""
    return SimpleNamespace(shaken=shaken, quietly=quietly, logits=logits, same=same, loads_like=loads_like)
