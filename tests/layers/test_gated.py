"""Gated cross-attention (MECHANISMS 32)."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from vision_attn.attention import padding_mask
from vision_attn.layers.gated import GatedCrossAttention

B, N, M, DIM, HEADS, CONTEXT = 2, 7, 11, 15, 3, 13


def randomised(block: GatedCrossAttention) -> GatedCrossAttention:
    """Random everywhere, but for the gates."""
    for name, p in block.named_parameters():
        if not name.endswith("gate"):
            nn.init.normal_(p, std=0.3)
    return block.double()


def tensor(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64, requires_grad=True)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("context_dim", [None, CONTEXT])
def test_zero_gate_is_the_identity_exactly(dtype, context_dim):
    block = randomised(GatedCrossAttention(DIM, HEADS, context_dim=context_dim)).to(dtype)
    x = (100 * torch.randn(B, N, DIM)).to(dtype)
    context = torch.randn(B, M, context_dim or DIM).to(dtype)
    torch.testing.assert_close(block(x, context), x, rtol=0, atol=0)


def test_equals_the_formula():
    block = randomised(GatedCrossAttention(DIM, HEADS, context_dim=CONTEXT))
    nn.init.constant_(block.attn_gate, 0.7)
    nn.init.constant_(block.mlp_gate, -0.4)
    x, context, key_pos = tensor(B, N, DIM), tensor(B, M, CONTEXT), tensor(1, M, CONTEXT)
    mask = padding_mask(torch.tensor([5, M]), M)
    seen = block.attn(block.norm1(x), context, key_pos=key_pos, mask=mask)
    y = x + torch.tanh(torch.tensor(0.7, dtype=torch.float64)) * seen
    expected = y + torch.tanh(torch.tensor(-0.4, dtype=torch.float64)) * block.mlp(block.norm2(y))
    torch.testing.assert_close(block(x, context, key_pos=key_pos, mask=mask), expected, rtol=1e-6, atol=1e-6)


def test_at_the_beginning_only_the_gates_learn():
    block = randomised(GatedCrossAttention(DIM, HEADS))
    x, context = tensor(B, N, DIM), tensor(B, M, DIM)
    out = block(x, context)
    weight = torch.randn_like(out)
    (out * weight).sum().backward()
    torch.testing.assert_close(x.grad, weight, rtol=0, atol=0)  # the rest of the model trains as if it were not there
    for name, p in block.named_parameters():
        assert (p.grad.abs().max() > 0) == name.endswith("gate"), name
    with torch.no_grad():
        block.attn_gate += 0.1
        block.mlp_gate += 0.1
    block.zero_grad()
    (block(x, context) * weight).sum().backward()
    for name, p in block.named_parameters():
        assert p.grad.abs().max() > 0, name


def test_nothing_to_see_gives_no_nan():
    block = randomised(GatedCrossAttention(DIM, HEADS))
    nn.init.ones_(block.attn_gate)
    x, context = tensor(B, N, DIM), tensor(B, M, DIM)
    out = block(x, context, mask=padding_mask(torch.tensor([0, M]), M))
    out.sum().backward()
    assert out.isfinite().all()
    assert all(p.grad.isfinite().all() for p in block.parameters())
    torch.testing.assert_close(context.grad[0], torch.zeros_like(context.grad[0]))


def test_takes_every_mechanism_by_name():
    block = GatedCrossAttention(DIM, HEADS, attention={"num_kv_heads": 1, "score": "dot"})
    assert block.attn.num_kv_heads == 1
    with pytest.raises(ValueError, match="unknown score"):
        GatedCrossAttention(DIM, HEADS, attention={"score": "taste"})
