"""Attention whose positions have projections of their own."""

from __future__ import annotations

import pytest
import torch

from vision_attn.attention import ConditionalAttention, record

B, N, M, D, H = 2, 5, 7, 33, 3


def tensors(*lengths):
    return [torch.randn(B, n, D, dtype=torch.float64) for n in lengths]


@pytest.mark.parametrize("content_pos", [False, True])
def test_concatenated_positions_by_hand(content_pos):
    layer = ConditionalAttention(D, H, concat=True, content_pos=content_pos).double()
    x, context, query_pos, added, key_pos = tensors(N, M, N, N, M)
    given = torch.cat([query_pos, added], -1) if content_pos else query_pos
    got = layer(x, context, query_pos=given, key_pos=key_pos)
    q, k, q_pos, k_pos = layer.q(x), layer.k(context), layer.q_pos(query_pos), layer.k_pos(key_pos)
    if content_pos:
        q, k = q + layer.q_content_pos(added), k + k_pos
    d = D // H
    heads = []
    for h in range(H):
        part = slice(h * d, (h + 1) * d)
        content = q[..., part] @ k[..., part].transpose(1, 2)
        position = q_pos[..., part] @ k_pos[..., part].transpose(1, 2)
        heads.append(((content + position) / (2 * d) ** 0.5).softmax(-1) @ layer.v(context)[..., part])
    torch.testing.assert_close(got, layer.proj(torch.cat(heads, -1)), rtol=1e-9, atol=1e-9)


def test_added_positions_by_hand():
    layer = ConditionalAttention(D, H).double()
    x, position = tensors(N, N)
    got = layer(x, query_pos=position, key_pos=position)
    q, k = layer.q(x) + layer.q_pos(position), layer.k(x) + layer.k_pos(position)
    expected = torch.nn.functional.scaled_dot_product_attention(
        *(part.unflatten(-1, (H, -1)).transpose(1, 2) for part in (q, k, layer.v(x)))
    )
    torch.testing.assert_close(got, layer.proj(expected.transpose(1, 2).flatten(2)), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("kernel", ["explicit", "sdpa", "tiled", "auto"])
def test_every_kernel_mask_and_recorder(kernel):
    layer = ConditionalAttention(D, H, concat=True, kernel=kernel).double()
    x, context, query_pos, key_pos = tensors(N, M, N, M)
    mask = torch.rand(B, 1, 1, M) < 0.6
    mask[..., 0] = True
    with record(layer) as recorder:
        got = layer(x, context, query_pos=query_pos, key_pos=key_pos, mask=mask)
    layer.kernel = "explicit"
    torch.testing.assert_close(got, layer(x, context, query_pos=query_pos, key_pos=key_pos, mask=mask))
    (weights,) = recorder.maps().values()
    assert weights.shape == (B, H, N, M)
    torch.testing.assert_close(weights.sum(-1), torch.ones_like(weights[..., 0]))


@pytest.mark.parametrize("option", [{"tie_kv": True}, {"num_kv_heads": 1}, {"two_step": True}, {"context_dim": 7}])
def test_other_projections_are_refused(option):
    with pytest.raises(ValueError, match=f"{next(iter(option))} is not for attention with positions of its own"):
        ConditionalAttention(D, H, **option)
    ConditionalAttention(D, H, num_kv_heads=H, context_dim=D)


def test_positions_are_needed():
    x, context = tensors(N, M)
    with pytest.raises(ValueError, match="needs query_pos and key_pos"):
        ConditionalAttention(D, H, concat=True).double()(x, context)
