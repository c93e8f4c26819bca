"""The decoder layer beside PyTorch's own, and what it adds to it."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from vision_attn.attention import causal_mask, padding_mask, record
from vision_attn.layers.decoder import Decoder, DecoderLayer, causal_choice
from vision_attn.layers.encoder import EncoderLayer

DIM, HEADS, HIDDEN = 15, 3, 45
B, N, M = 2, 7, 11
SUBMODULES = {"norm1": "norm1", "norm2": "norm2", "norm3": "norm3", "mlp.fc1": "linear1", "mlp.fc2": "linear2"}


def randomised(module: nn.Module) -> nn.Module:
    for p in module.parameters():
        nn.init.normal_(p, std=0.3)
    return module.double()


def tensor(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64, requires_grad=True)


def copy_layer(ours: DecoderLayer, peer: nn.TransformerDecoderLayer) -> None:
    for mine, theirs in (("self_attn", "self_attn"), ("cross_attn", "multihead_attn")):
        attention = peer.get_submodule(theirs)
        state = {"qkv.weight": attention.in_proj_weight, "qkv.bias": attention.in_proj_bias}
        projection = {"proj.weight": attention.out_proj.weight, "proj.bias": attention.out_proj.bias}
        ours.get_submodule(mine).load_state_dict({**state, **projection})
    for mine, theirs in SUBMODULES.items():
        ours.get_submodule(mine).load_state_dict(peer.get_submodule(theirs).state_dict())


def parameter_gradients(ours: DecoderLayer, peer: nn.TransformerDecoderLayer):
    """Pairs of gradients, of every parameter."""
    names = {f"{a}.{p}": f"{b}.{p}" for a, b in SUBMODULES.items() for p in ("weight", "bias")}
    for mine, theirs in (("self_attn", "self_attn"), ("cross_attn", "multihead_attn")):
        for p in ("weight", "bias"):
            names |= {f"{mine}.qkv.{p}": f"{theirs}.in_proj_{p}", f"{mine}.proj.{p}": f"{theirs}.out_proj.{p}"}
    assert names.keys() == dict(ours.named_parameters()).keys()
    for mine, theirs in names.items():
        yield mine, ours.get_parameter(mine).grad, peer.get_parameter(theirs).grad


@pytest.mark.parametrize("pre_norm", [False, True])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("kernel", ["explicit", "sdpa"])
def test_equals_pytorch(pre_norm, causal, padded, kernel):
    """MECHANISMS 25: self, cross, feed-forward, in this order; forward, and the gradient of everything."""
    peer = nn.TransformerDecoderLayer(DIM, HEADS, HIDDEN, 0.0, "gelu", batch_first=True, norm_first=pre_norm)
    randomised(peer)
    words = {"kernel": kernel}
    ours = DecoderLayer(
        DIM,
        HEADS,
        mlp_ratio=HIDDEN / DIM,
        causal=causal,
        pre_norm=pre_norm,
        norm_eps=1e-5,
        attention=words,
        cross_attention=words,
    ).double()
    copy_layer(ours, peer)
    x, context = tensor(B, N, DIM), tensor(B, M, DIM)
    mask, context_mask, options = None, None, {}
    if padded:
        mask, context_mask = padding_mask(torch.tensor([N, 4]), N), padding_mask(torch.tensor([5, M]), M)
        options = {"tgt_key_padding_mask": ~mask[:, 0, 0], "memory_key_padding_mask": ~context_mask[:, 0, 0]}
    if causal:
        options["tgt_mask"] = ~causal_mask(N)
    got = ours(x, context, mask=mask, context_mask=context_mask)
    expected = peer(x, context, **options)
    torch.testing.assert_close(got, expected, rtol=1e-10, atol=1e-11)

    seen = torch.randn_like(got)
    inputs = []
    for out in (got, expected):
        x.grad = context.grad = None
        (out * seen).sum().backward()
        inputs.append((x.grad, context.grad))
    torch.testing.assert_close(*inputs, rtol=1e-9, atol=1e-10)
    for name, mine, theirs in parameter_gradients(ours, peer):
        torch.testing.assert_close(mine, theirs, rtol=1e-9, atol=1e-10, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize("pre_norm", [False, True])
def test_positions_go_to_queries_and_keys_but_not_to_values(pre_norm):
    """DETR's contract: written out, with the positions already added for PyTorch's attention."""
    layer = randomised(DecoderLayer(DIM, HEADS, mlp_ratio=3, pre_norm=pre_norm))
    x, context, query_pos, key_pos = tensor(B, N, DIM), tensor(B, M, DIM), tensor(1, N, DIM), tensor(B, M, DIM)

    def attention(module, q, k, v):
        peer = nn.MultiheadAttention(DIM, HEADS, batch_first=True).double()
        state = {"in_proj_weight": module.qkv.weight, "in_proj_bias": module.qkv.bias}
        peer.load_state_dict({**state, "out_proj.weight": module.proj.weight, "out_proj.bias": module.proj.bias})
        return peer(q, k, v)[0]

    def own(t):
        return attention(layer.self_attn, t + query_pos, t + query_pos, t)

    def other(t):
        return attention(layer.cross_attn, t + query_pos, context + key_pos, context)

    if pre_norm:
        y = x + own(layer.norm1(x))
        y = y + other(layer.norm2(y))
        expected = y + layer.mlp(layer.norm3(y))
    else:
        y = layer.norm1(x + own(x))
        y = layer.norm2(y + other(y))
        expected = layer.norm3(y + layer.mlp(y))
    got = layer(x, context, query_pos=query_pos, key_pos=key_pos)
    torch.testing.assert_close(got, expected, rtol=1e-10, atol=1e-11)


def test_biases_and_masks_reach_their_own_attention():
    layer = randomised(DecoderLayer(DIM, HEADS))
    x, context = tensor(B, N, DIM), tensor(B, M, DIM)
    mask = torch.rand(B, HEADS, N, N) > 0.4
    context_mask = torch.rand(B, 1, N, M) > 0.4
    as_bias = [torch.zeros(t.shape, dtype=torch.float64).masked_fill(~t, -1e9) for t in (mask, context_mask)]
    rows = mask.any(-1).all(1).logical_and(context_mask.any(-1)[:, 0])  # with something to attend to everywhere
    got = layer(x, context, mask=mask, context_mask=context_mask)
    expected = layer(x, context, bias=as_bias[0], context_bias=as_bias[1])
    torch.testing.assert_close(got[rows], expected[rows], rtol=1e-9, atol=1e-10)
    assert (got - layer(x, context)).abs().max() > 1e-3


def test_context_of_another_width_and_own_choices():
    layer = randomised(
        DecoderLayer(
            DIM,
            HEADS,
            context_dim=13,
            init_values=0.5,
            attention={"num_kv_heads": 1},
            cross_attention={"qk_norm": True},
        )
    )
    assert layer.self_attn.num_kv_heads == 1
    assert layer.cross_attn.num_kv_heads == HEADS
    out = layer(tensor(B, N, DIM), tensor(B, M, 13), key_pos=tensor(1, M, 13))
    (out * torch.randn_like(out)).sum().backward()
    for name, p in layer.named_parameters():
        assert p.grad.abs().max() > 0, name
    with pytest.raises(ValueError, match="num_kv_heads=2 does not divide"):
        DecoderLayer(DIM, HEADS, cross_attention={"num_kv_heads": 2})


@pytest.mark.parametrize("pattern", [{}, {"pattern": "full"}, {"pattern": "window", "window": 3}])
def test_causal_within_any_pattern(pattern):
    """The future is hidden, and a window still ends where it ends."""
    layer = randomised(DecoderLayer(DIM, HEADS, causal=True, attention=pattern))
    x, context = tensor(B, 11, DIM), tensor(B, 5, DIM)
    out = layer(x, context)
    row = 6
    (seen,) = torch.autograd.grad(out[:, row].square().sum(), x)
    reach = seen.abs().amax(dim=(0, 2)) > 0
    first = row - pattern.get("window", row)
    torch.testing.assert_close(reach, (torch.arange(11) >= first) & (torch.arange(11) <= row))
    keys = torch.ones(B, 11, dtype=torch.bool)
    keys[:, 5] = False
    (seen,) = torch.autograd.grad(layer(x, context, mask=padding_mask(keys))[:, row].square().sum(), x)
    torch.testing.assert_close(seen[:, 5], torch.zeros_like(seen[:, 5]))


def test_causal_choice_keeps_the_other_words():
    assert causal_choice(None) == ({"pattern": "causal"}, False)
    assert causal_choice({"pattern": "causal", "score": "dot"}) == ({"pattern": "causal", "score": "dot"}, False)
    words = {"pattern": "window", "window": 3}
    assert causal_choice(words) == (words, True)
    assert causal_choice(words)[0] is not words
    with pytest.raises(ValueError, match=r"'linformer' mixes all keys .* cannot be causal; choose pattern='causal'"):
        DecoderLayer(DIM, HEADS, causal=True, attention={"pattern": "linformer", "rank": 3})


def test_a_context_that_is_masked_away_gives_no_nan():
    layer = randomised(DecoderLayer(DIM, HEADS))
    x, context = tensor(B, N, DIM), tensor(B, M, DIM)
    out = layer(x, context, context_mask=padding_mask(torch.tensor([0, M]), M))
    out.square().sum().backward()
    assert out.isfinite().all()
    assert x.grad.isfinite().all()
    torch.testing.assert_close(context.grad[0], torch.zeros_like(context.grad[0]))
    assert all(p.grad.isfinite().all() for p in layer.parameters())


@pytest.mark.parametrize("pre_norm", [False, True])
def test_without_its_cross_attention_it_is_an_encoder_layer(pre_norm):
    layer = randomised(DecoderLayer(DIM, HEADS, pre_norm=pre_norm))
    encoder = EncoderLayer(DIM, HEADS, pre_norm=pre_norm).double()
    mine = {"norm1": "norm1", "attn": "self_attn", "norm2": "norm3", "mlp": "mlp"}
    for theirs, name in mine.items():
        encoder.get_submodule(theirs).load_state_dict(layer.get_submodule(name).state_dict())
    nn.init.zeros_(layer.cross_attn.proj.weight)
    nn.init.zeros_(layer.cross_attn.proj.bias)
    nn.init.ones_(layer.norm2.weight)
    nn.init.zeros_(layer.norm2.bias)
    if not pre_norm:  # a second norm after the first: the first must leave what the second does not change
        for norm in (layer.norm1, encoder.norm1):
            nn.init.ones_(norm.weight)
            nn.init.zeros_(norm.bias)
    x = tensor(B, N, DIM)
    torch.testing.assert_close(layer(x, tensor(B, M, DIM)), encoder(x), rtol=1e-5, atol=1e-5)


def test_drop_path_skips_parts_in_training_only():
    layer = randomised(DecoderLayer(DIM, HEADS, drop_path=1 - 1e-6))
    x, context = tensor(B, N, DIM), tensor(B, M, DIM)
    torch.testing.assert_close(layer.train()(x, context), x)
    assert (layer.eval()(x, context) - x).abs().max() > 1e-3


@pytest.mark.parametrize("pre_norm", [False, True])
def test_stack_equals_pytorch(pre_norm):
    peer = nn.TransformerDecoder(
        nn.TransformerDecoderLayer(DIM, HEADS, HIDDEN, 0.0, "relu", batch_first=True, norm_first=pre_norm),
        3,
        nn.LayerNorm(DIM),
    )
    randomised(peer)
    ours = Decoder(DIM, HEADS, 3, mlp_ratio=HIDDEN / DIM, act="relu", pre_norm=pre_norm, norm_eps=1e-5).double()
    for mine, theirs in zip(ours.layers, peer.layers, strict=True):
        copy_layer(mine, theirs)
    ours.norm.load_state_dict(peer.norm.state_dict())
    x, context = tensor(B, N, DIM), tensor(B, M, DIM)
    context_mask = padding_mask(torch.tensor([5, M]), M)
    got = ours(x, context, context_mask=context_mask)
    expected = peer(x, context, memory_key_padding_mask=~context_mask[:, 0, 0])
    torch.testing.assert_close(got, expected, rtol=1e-10, atol=1e-11)

    every = ours(x, context, context_mask=context_mask, intermediate=True)
    assert every.shape == (3, B, N, DIM)
    torch.testing.assert_close(every[-1], got)
    y = x
    for out, layer in zip(every, peer.layers, strict=True):
        y = layer(y, context, memory_key_padding_mask=~context_mask[:, 0, 0])
        torch.testing.assert_close(out, peer.norm(y), rtol=1e-10, atol=1e-11)


def test_stack_has_stochastic_depth_and_may_leave_out_the_norm():
    stack = randomised(Decoder(DIM, HEADS, 3, drop_path=0.3, final_norm=False, causal=True))
    assert [getattr(layer.drop_path, "p", 0) for layer in stack.layers] == [0, 0.15, 0.3]
    x, context = tensor(B, N, DIM), tensor(B, M, DIM)
    y = x
    for layer in stack.eval().layers:
        y = layer(y, context)
    torch.testing.assert_close(stack(x, context), y, rtol=0, atol=0)


def test_weights_of_both_attentions_are_recorded():
    stack = Decoder(DIM, HEADS, 2, causal=True)
    with record(stack) as recorder, torch.no_grad():
        stack(torch.randn(B, N, DIM), torch.randn(B, M, DIM))
    maps = recorder.maps()
    shapes = {name: tuple(weights.shape) for name, weights in maps.items()}
    assert shapes == {
        f"layers.{i}.{name}": (B, HEADS, N, keys)
        for i in range(2)
        for name, keys in (("self_attn", N), ("cross_attn", M))
    }
    for weights in maps.values():
        torch.testing.assert_close(weights.sum(-1), torch.ones(B, HEADS, N))
    assert maps["layers.0.self_attn"].triu(1).abs().max() == 0
