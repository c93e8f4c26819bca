"""Rows 1, 2, 11, 13, 14, 17–20 and 34: what attention is, with one head or many, on one sequence or two."""

from __future__ import annotations

import itertools
import math

import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from vision_attn.attention import Attention, attention_weights
from vision_attn.attention.normalizers import SUM_TO_ONE, resolve_normalizer
from vision_attn.certificates.registry import EXACT, Setting, certificate, gap, gaps, gradients, holds


@certificate("1", "a budget: 20/30/10/100/10 becomes .118/.176/.059/.588/.059, most for the bird", dtypes=EXACT)
def budget(s: Setting) -> float:
    shares = s.tensor([[[[20, 30, 10, 100, 10]]]])
    weights = resolve_normalizer("sum")(shares)[0, 0, 0]
    printed = [0.118, 0.176, 0.059, 0.588, 0.059]
    rounded = [round(float(w), 3) for w in weights]
    return max(gap(weights, shares[0, 0, 0] / 170), holds(rounded == printed and int(weights.argmax()) == 3))


@certificate("2", "score, normalize, weighted sum: equals a plain Python loop over pairs", kernel=True)
def loop(s: Setting) -> float:
    q, k, v = s.randn(2, 3, 5, 7), s.randn(2, 3, 11, 7), s.randn(2, 3, 11, 13)
    expected = torch.zeros(2, 3, 5, 13, dtype=torch.float64)
    for b, h, n in itertools.product(range(2), range(3), range(5)):
        scores = [sum(map(float, q[b, h, n] * k[b, h, m])) / math.sqrt(7) for m in range(11)]
        shares = [math.exp(score - max(scores)) for score in scores]
        for share, value in zip(shares, v[b, h].cpu().double(), strict=True):
            expected[b, h, n] += share / sum(shares) * value
    return gap(s.attend(q, k, v).cpu(), expected)


@certificate("2b", "normalizers that share out a budget give weights ≥ 0 that sum to 1 in each row")
def rows_sum_to_one(s: Setting) -> float:
    # absolute values: sharing out in proportion is for scores that are not negative
    scores = s.randn(2, 3, 5, 11).abs()
    errors = []
    for name in sorted(SUM_TO_ONE):
        weights = resolve_normalizer(name)(scores)
        errors += [gap(weights.sum(-1), torch.ones_like(weights[..., 0])), holds(bool((weights >= 0).all()))]
    return max(errors)


@certificate("11", "soft attention is Σ aᵢvᵢ, the values mixed by the weights", kernel=True)
def soft(s: Setting) -> float:
    q, k, v = s.randn(2, 3, 5, 7), s.randn(2, 3, 11, 7), s.randn(2, 3, 11, 13)
    mixed = torch.einsum("bhnm,bhme->bhne", attention_weights(q, k).double(), v.double())
    return gap(s.attend(q, k, v), mixed)


@certificate("13", "key = value: with tied projections the keys are the values, gradients too", kernel=True)
def tied(s: Setting) -> float:
    layer = s.module(Attention(15, 3, tie_kv=True, kernel=s.kernel))
    own = s.module(Attention(15, 3, kernel=s.kernel))
    rows = layer.qkv.weight.shape[0] // 2  # queries, then what serves as keys and values
    with torch.no_grad():
        for mine, theirs in ((own.qkv.weight, layer.qkv.weight), (own.qkv.bias, layer.qkv.bias)):
            mine.copy_(torch.cat([theirs, theirs[rows:]]))
        own.proj.load_state_dict(layer.proj.state_dict())
    x = s.randn(2, 7, 15, grad=True)
    pairs = [(layer(x), own(x))]
    one, two = gradients(pairs[0][0], x, layer.qkv.weight), gradients(pairs[0][1], x, own.qkv.weight)
    folded = torch.cat([two[1][:rows], two[1][rows : 2 * rows] + two[1][2 * rows :]])
    return gaps(*pairs, (one[0], two[0]), (one[1], folded))


@certificate("14b", "two-step heads q^{h} = W^{q,h} q equal one layer with the composed matrix", kernel=True)
def two_step(s: Setting) -> float:
    layer = s.module(Attention(15, 3, two_step=True, qkv_bias=False, kernel=s.kernel))
    one = s.module(Attention(15, 3, qkv_bias=False, kernel=s.kernel))
    first, width = layer.qkv.weight, layer.q_width
    second = [step.weight for step in (layer.second.q, layer.second.k, layer.second.v)]
    with torch.no_grad():
        one.qkv.weight.copy_(torch.cat([w @ first[i * width : (i + 1) * width] for i, w in enumerate(second)]))
        one.proj.load_state_dict(layer.proj.state_dict())
    x = s.randn(2, 7, 15, grad=True)
    out, expected = layer(x), one(x)
    return gaps((out, expected), (gradients(out, x)[0], gradients(expected, x)[0]))


def _one_head_at_a_time(layer: Attention, x: Tensor, context: Tensor) -> Tensor:
    """The layer's result, each head by matrices of its own."""
    d, heads, width = layer.head_dim, layer.num_heads, layer.q_width
    parts = [layer.qkv.weight[i * width : (i + 1) * width].view(heads, d, -1) for i in range(3)]
    biases = [layer.qkv.bias[i * width : (i + 1) * width].view(heads, d) for i in range(3)]
    found = []
    for h in range(heads):
        (q, k, v) = (t @ parts[i][h].T + biases[i][h] for i, t in enumerate((x, context, context)))
        found.append(attention_weights(q[:, None], k[:, None])[:, 0] @ v)
    return torch.cat(found, dim=-1) @ layer.proj.weight.T + layer.proj.bias


@certificate("14", "h heads at once equal a loop over heads, concatenated and projected", kernel=True)
def heads(s: Setting) -> float:
    layer = s.module(Attention(15, 5, kernel=s.kernel))
    x, context = s.randn(2, 7, 15), s.randn(2, 11, 15)
    return gaps(
        (layer(x), _one_head_at_a_time(layer, x, x)), (layer(x, context), _one_head_at_a_time(layer, x, context))
    )


@certificate("14c", "arithmetic does not grow with the number of heads: the same for 1, 2, 4 and 8")
def heads_cost_nothing(s: Setting) -> float:
    flops = []
    for h in (1, 2, 4, 8):
        layer, x = s.module(Attention(16, h, kernel="explicit")), s.randn(2, 7, 16)
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            layer(x)
        flops.append(counter.get_total_flops())
    return max(flops) / min(flops) - 1


@certificate("17", "one module takes any length: the same parameters for N = 4, 64 and 1,024", kernel=True)
def any_length(s: Setting) -> float:
    layer = s.module(Attention(8, 2, kernel=s.kernel))
    count = sum(p.numel() for p in layer.parameters())
    shapes = []
    with torch.no_grad():
        for n in (4, 64, 1024):
            out = layer(s.randn(1, n, 8))
            shapes.append(out.shape == (1, n, 8) and bool(out.isfinite().all()))
    # a fully connected layer from n tokens to n tokens has (8n)² + 8n numbers: at 4 tokens already more
    fully_connected = sum(p.numel() for p in torch.nn.Linear(4 * 8, 4 * 8).parameters())
    return holds(all(shapes) and count == 4 * (8 * 8 + 8) < fully_connected)


@certificate("17b", "every key three times over is no news: only proportions count", kernel=True)
def repeated_tokens(s: Setting) -> float:
    q, k, v = s.randn(2, 3, 5, 7), s.randn(2, 3, 11, 7), s.randn(2, 3, 11, 13)
    return gap(s.attend(q, k.repeat(1, 1, 3, 1), v.repeat(1, 1, 3, 1)), s.attend(q, k, v))


@certificate("18", "column form A = KᵀQ, A′ = softmax, O = V·A′ is the row form transposed", kernel=True)
def columns(s: Setting) -> float:
    tokens = s.randn(6, 11)  # one token in each column
    wq, wk, wv = s.randn(7, 6), s.randn(7, 6), s.randn(13, 6)
    q, k, v = wq @ tokens, wk @ tokens, wv @ tokens
    scores = k.T @ q / math.sqrt(7)  # [j, i]: key j, query i
    shares = (scores - scores.amax(dim=0)).exp()
    out = v @ (shares / shares.sum(dim=0))
    return gap(s.attend(*(t.T[None, None] for t in (q, k, v)))[0, 0], out.T)


@certificate("19", "self-attention is cross-attention from a sequence to itself", kernel=True)
def context_is_self(s: Setting) -> float:
    layer, x = s.module(Attention(15, 3, kernel=s.kernel)), s.randn(2, 7, 15)
    return gap(layer(x, x), layer(x))


@certificate("19b", "cross-attention reads a context of another length and width", kernel=True)
def other_context(s: Setting) -> float:
    layer = s.module(Attention(15, 3, context_dim=11, kernel=s.kernel))
    x, context = s.randn(2, 7, 15), s.randn(2, 13, 11)
    q = layer.q(x).view(2, 7, 3, 5).transpose(1, 2)
    k, v = (t.view(2, 13, 3, 5).transpose(1, 2) for t in layer.kv(context).chunk(2, dim=-1))
    mixed = (attention_weights(q, k) @ v).transpose(1, 2).flatten(2)
    return gap(layer(x, context), layer.proj(mixed))


@certificate("20", "shuffling keys and values together changes nothing", kernel=True)
def shuffled_keys(s: Setting) -> float:
    q, k, v = s.randn(2, 3, 5, 7), s.randn(2, 3, 11, 7), s.randn(2, 3, 11, 13)
    order = s.permutation(11)
    return gap(s.attend(q, k[:, :, order], v[:, :, order]), s.attend(q, k, v))


@certificate("20b", "shuffling the input permutes the output, which is not the same output", kernel=True)
def shuffled_input(s: Setting) -> float:
    layer, x = s.module(Attention(15, 3, kernel=s.kernel)), s.randn(2, 11, 15)
    order = s.permutation(11)
    out, shuffled = layer(x), layer(x[:, order])
    return max(gap(shuffled, out[:, order]), holds(gap(shuffled, out) > 0.1))


@certificate("34", "g shared key/value heads equal the same heads repeated: g = 1, 2, 3, 6 of 6", kernel=True)
def grouped(s: Setting) -> float:
    q, errors = s.randn(2, 6, 5, 7, grad=True), []
    for g in (1, 2, 3, 6):  # one shared head is multi-query attention
        k, v = s.randn(2, g, 11, 7, grad=True), s.randn(2, g, 11, 13, grad=True)
        out = s.attend(q, k, v)
        full = s.attend(q, k.repeat_interleave(6 // g, 1), v.repeat_interleave(6 // g, 1))
        errors.append(gap(out, full))
        errors += [gap(a, b) for a, b in zip(gradients(out, q, k, v), gradients(full, q, k, v), strict=True)]
    return max(errors)


@certificate("34b", "keys and values of g heads take g / H of the bytes")
def fewer_bytes(s: Setting) -> float:
    x, errors = s.randn(2, 7, 24), []
    for g in (1, 2, 4, 8):
        layer = s.module(Attention(24, 8, num_kv_heads=g))
        _, k, v = layer._project(x, None, None, None)
        stored = k.numel() + v.numel()
        errors.append(abs(stored / (2 * 2 * 7 * 24) - g / 8))
    return max(errors)
