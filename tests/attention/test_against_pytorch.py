"""Our layer beside PyTorch's own, with copied weights."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from vision_attn.attention import Attention, causal_mask, padding_mask, sinusoidal_1d, sinusoidal_2d
from vision_attn.attention.positions import resample_grid, token_position
from vision_attn.layers.encoder import EncoderLayer


def randomise(module: nn.Module) -> None:
    for p in module.parameters():
        nn.init.normal_(p, std=0.3)


def copy_attention(ours: Attention, peer: nn.MultiheadAttention) -> None:
    ours.load_state_dict(
        {
            "qkv.weight": peer.in_proj_weight,
            "qkv.bias": peer.in_proj_bias,
            "proj.weight": peer.out_proj.weight,
            "proj.bias": peer.out_proj.bias,
        }
    )


@pytest.mark.parametrize("cross", [False, True])
@pytest.mark.parametrize("masking", ["none", "padding", "causal"])
def test_equals_multihead_attention(cross, masking):
    b, n, m, heads, dim = 2, 11, 13 if cross else 11, 3, 21
    peer = nn.MultiheadAttention(dim, heads, batch_first=True).double()
    randomise(peer)
    ours = Attention(dim, heads).double()
    copy_attention(ours, peer)
    x = torch.randn(b, n, dim, dtype=torch.float64, requires_grad=True)
    context = torch.randn(b, m, dim, dtype=torch.float64) if cross else None
    source = x if context is None else context
    mask, kwargs = None, {}
    if masking == "padding":
        lengths = torch.tensor([m, 5])
        mask = padding_mask(lengths, m)
        kwargs["key_padding_mask"] = ~mask[:, 0, 0]
    elif masking == "causal":
        mask = causal_mask(n, m)
        kwargs["attn_mask"] = ~mask
    expected, weights = peer(x, source, source, average_attn_weights=False, **kwargs)
    got = ours(x, context, mask=mask)
    torch.testing.assert_close(got, expected, rtol=1e-10, atol=1e-12)
    gradients = [torch.autograd.grad(t.square().sum(), x, retain_graph=True)[0] for t in (got, expected)]
    torch.testing.assert_close(*gradients, rtol=1e-9, atol=1e-11)
    assert weights.shape == (b, heads, n, m)


def test_positions_go_to_queries_and_keys_but_not_to_values():
    """The contract of DETR's attention, against PyTorch's layer fed with the sums."""
    dim, heads = 20, 5
    peer = nn.MultiheadAttention(dim, heads, batch_first=True).double()
    randomise(peer)
    ours = Attention(dim, heads).double()
    copy_attention(ours, peer)
    x, context = (torch.randn(2, n, dim, dtype=torch.float64) for n in (7, 11))
    query_pos, key_pos = torch.randn_like(x), torch.randn_like(context)
    expected, _ = peer(x + query_pos, context + key_pos, context)
    torch.testing.assert_close(ours(x, context, query_pos=query_pos, key_pos=key_pos), expected, rtol=1e-10, atol=1e-12)
    expected, _ = peer(x + query_pos, x + query_pos, x)
    torch.testing.assert_close(ours(x, query_pos=query_pos, key_pos=query_pos), expected, rtol=1e-10, atol=1e-12)


def test_context_of_another_width():
    peer = nn.MultiheadAttention(20, 5, kdim=14, vdim=14, batch_first=True).double()
    randomise(peer)
    ours = Attention(20, 5, context_dim=14).double()
    q_bias, kv_bias = peer.in_proj_bias.split([20, 40])
    ours.load_state_dict(
        {
            "q.weight": peer.q_proj_weight,
            "q.bias": q_bias,
            "kv.weight": torch.cat([peer.k_proj_weight, peer.v_proj_weight]),
            "kv.bias": kv_bias,
            "proj.weight": peer.out_proj.weight,
            "proj.bias": peer.out_proj.bias,
        }
    )
    x, context = torch.randn(2, 7, 20, dtype=torch.float64), torch.randn(2, 11, 14, dtype=torch.float64)
    key_pos = torch.randn_like(context)
    torch.testing.assert_close(ours(x, context), peer(x, context, context)[0], rtol=1e-10, atol=1e-12)
    expected = peer(x, context + key_pos, context)[0]
    torch.testing.assert_close(ours(x, context, key_pos=key_pos), expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("pre_norm", [False, True])
def test_encoder_layer_equals_pytorch(pre_norm):
    """MECHANISMS 24."""
    dim, heads, hidden = 15, 3, 45
    peer = nn.TransformerEncoderLayer(dim, heads, hidden, 0.0, "gelu", batch_first=True, norm_first=pre_norm).double()
    randomise(peer)
    ours = EncoderLayer(dim, heads, mlp_ratio=hidden / dim, pre_norm=pre_norm, norm_eps=1e-5).double()
    copy_attention(ours.attn, peer.self_attn)
    for mine, theirs in (("norm1", "norm1"), ("norm2", "norm2"), ("mlp.fc1", "linear1"), ("mlp.fc2", "linear2")):
        ours.get_submodule(mine).load_state_dict(peer.get_submodule(theirs).state_dict())
    x = torch.randn(2, 7, dim, dtype=torch.float64)
    mask = padding_mask(torch.tensor([7, 4]))
    got, expected = ours(x, mask=mask), peer(x, src_key_padding_mask=~mask[:, 0, 0])
    keep = mask[:, 0, 0]
    torch.testing.assert_close(got[keep], expected[keep], rtol=1e-10, atol=1e-11)


def test_causal_mask_has_the_diagonal_and_hides_the_future():
    """MECHANISMS 23."""
    expected = torch.tensor([[1, 0, 0, 0], [1, 1, 0, 0], [1, 1, 1, 0], [1, 1, 1, 1]]).bool()
    assert torch.equal(causal_mask(4), expected)
    assert torch.equal(causal_mask(2, 4), expected[2:])
    with pytest.raises(ValueError, match="at least as many keys"):
        causal_mask(4, 2)
    layer = Attention(14, 2).double()
    x = torch.randn(1, 6, 14, dtype=torch.float64)
    edited = x.clone()
    edited[:, 4:] = torch.randn(1, 2, 14, dtype=torch.float64)
    before, after = layer(x, mask=causal_mask(6)), layer(edited, mask=causal_mask(6))
    torch.testing.assert_close(before[:, :4], after[:, :4], rtol=0, atol=0)
    assert (before[:, 4:] != after[:, 4:]).any()


def test_padding_does_not_change_the_real_tokens():
    layer = Attention(14, 2).double()
    x = torch.randn(1, 5, 14, dtype=torch.float64)
    padded = torch.cat([x, torch.full((1, 3, 14), 1e3, dtype=torch.float64)], dim=1)
    got = layer(padded, mask=padding_mask(torch.tensor([5]), 8))
    torch.testing.assert_close(got[:, :5], layer(x), rtol=1e-12, atol=1e-12)


def test_shuffled_tokens_give_shuffled_results_until_positions_are_added():
    """MECHANISMS 20 and 21."""
    layer = Attention(12, 3).double()
    x = torch.randn(2, 7, 12, dtype=torch.float64)
    order = torch.randperm(7)
    torch.testing.assert_close(layer(x[:, order]), layer(x)[:, order], rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(layer(x, x[:, order]), layer(x), rtol=1e-12, atol=1e-12)
    position = sinusoidal_1d(7, 12).double()
    assert (layer(x[:, order] + position) - layer(x + position)[:, order]).abs().max() > 1e-3


def test_sinusoidal_positions():
    table = sinusoidal_1d(5, 6)
    for t in range(5):
        for i in range(3):
            angle = torch.tensor(t / 10000 ** (2 * i / 6))
            torch.testing.assert_close(table[t, 2 * i : 2 * i + 2], torch.stack([angle.sin(), angle.cos()]))
    grid = sinusoidal_2d(3, 5, 8).view(3, 5, 8)
    torch.testing.assert_close(grid[2, 4], torch.cat([sinusoidal_1d(3, 4)[2], sinusoidal_1d(5, 4)[4]]))
    with pytest.raises(ValueError, match="even width"):
        sinusoidal_1d(5, 7)
    with pytest.raises(ValueError, match="unknown position 'spiral'"):
        token_position("spiral", 0, (2, 2), 8)


def test_resampled_positions_keep_the_prefix_and_interpolate_the_grid():
    position = torch.randn(1, 2 + 15, 7)
    resampled = resample_grid(position, (3, 5), (6, 11), num_prefix=2)
    assert resampled.shape == (1, 2 + 66, 7)
    torch.testing.assert_close(resampled[:, :2], position[:, :2], rtol=0, atol=0)
    image = position[:, 2:].view(1, 3, 5, 7).permute(0, 3, 1, 2)
    expected = nn.functional.interpolate(image, (6, 11), mode="bicubic", antialias=True)
    torch.testing.assert_close(resampled[:, 2:], expected.permute(0, 2, 3, 1).flatten(1, 2))
    with pytest.raises(ValueError, match="no grid"):
        resample_grid(position, (4, 5), (6, 11), num_prefix=2)
