"""Explicit and fused attention agree, forward and backward, in every combination the core allows."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import vision_attn as va
from vision_attn.attention import Attention, Request, choose_kernel, record

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 0.05}  # on the scale of the largest entry of a tensor
# A different prime for every dimension, so that a transposed axis cannot pass.
B, N, M, D_HEAD = 3, 13, 17, 7


def run(layer: Attention, inputs: dict[str, Tensor | None], kernel: str) -> list[Tensor]:
    """The result, then the gradients of every parameter and of every float input."""
    layer.kernel = kernel
    layer.zero_grad()
    given = {name: t.detach().clone() if t is not None else None for name, t in inputs.items()}
    leaves = [t.requires_grad_() for t in given.values() if t is not None and t.is_floating_point()]
    out = layer(given.pop("x"), given.pop("context"), **given)
    weight = torch.linspace(-1, 1, out.numel()).view_as(out).to(out.dtype)
    (out * weight).sum().backward()
    return [out, *(p.grad for p in layer.parameters()), *(t.grad for t in leaves)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("bias", "mask", "empty_row", "qk_norm", "grouped", "cross"),
    [c for c in itertools.product([False, True], repeat=6) if c[1] or not c[2]],
)
def test_explicit_equals_sdpa(bias, mask, empty_row, qk_norm, grouped, cross, dtype):
    heads, kv_heads = (10, 5) if grouped else (5, 5)
    dim = heads * D_HEAD
    layer = Attention(dim, heads, num_kv_heads=kv_heads, qk_norm=qk_norm)
    for p in layer.parameters():
        torch.nn.init.normal_(p, std=0.3)
    layer.to(dtype)
    keys = M if cross else N
    allowed = torch.rand(B, heads, N, keys) > 0.3 if mask else None
    if empty_row:
        allowed[1, 2, 4] = False
        allowed[2] = False
    inputs = {
        "x": torch.randn(B, N, dim, dtype=dtype),
        "context": torch.randn(B, M, dim, dtype=dtype) if cross else None,
        "bias": torch.randn(1, heads, N, keys, dtype=dtype) if bias else None,
        "mask": allowed,
    }
    explicit, fused = run(layer, inputs, "explicit"), run(layer, inputs, "sdpa")
    exact = explicit
    if dtype == torch.bfloat16:  # two results of bfloat16 may each be off in their own direction
        wide = {name: t.float() if t is not None and t.is_floating_point() else t for name, t in inputs.items()}
        exact = run(layer.float(), wide, "explicit")
    largest = max(a.detach().abs().max().item() for a in exact)
    for a, b, c in zip(exact, explicit, fused, strict=True):
        assert torch.isfinite(a).all()
        # The gradient of the keys' bias is zero (a softmax ignores a shift), so some tensors are rounding alone.
        scale = a.abs().max().clamp_min(0.1 * largest)
        a, b, c = a / scale, b.to(a.dtype) / scale, c.to(a.dtype) / scale
        if dtype == torch.float32:
            torch.testing.assert_close(b, c, rtol=0, atol=TOLERANCE[dtype])
            continue
        # Sums that cancel lose digits in bfloat16, more or fewer by the processor, but with both kernels alike.
        off = [float((x - a).abs().max()) for x in (b, c)]
        assert max(off) <= max(TOLERANCE[dtype], 3 * min(off))
        assert max(off) < 0.25


@pytest.mark.parametrize("kernel", ["explicit", "sdpa", "auto"])
@pytest.mark.parametrize("score", ["dot", "scaled_dot"])
def test_attend_equals_a_python_loop(kernel, score):
    """MECHANISMS 2: score, normalize, weighted sum, one pair at a time."""
    q, k, v = torch.randn(2, 3, 5, 7), torch.randn(2, 3, 11, 7), torch.randn(2, 3, 11, 13)
    mask = torch.rand(2, 1, 5, 11) > 0.4
    mask[0, 0, 2] = False
    out = va.attend(q, k, v, score=score, mask=mask, kernel=kernel)
    weights = va.attention_weights(q, k, score=score, mask=mask)
    scale = 7**-0.5 if score == "scaled_dot" else 1.0
    for b, h, n in itertools.product(range(2), range(3), range(5)):
        e = [torch.exp(scale * q[b, h, n] @ k[b, h, m]) * mask[b, 0, n, m] for m in range(11)]
        total = sum(e)
        expected = [x / total if total > 0 else torch.tensor(0.0) for x in e]
        torch.testing.assert_close(weights[b, h, n], torch.stack(expected), rtol=1e-4, atol=1e-6)
        mixed = sum(w * v[b, h, m] for m, w in enumerate(expected))
        torch.testing.assert_close(out[b, h, n], mixed, rtol=1e-4, atol=1e-5)


@settings(max_examples=40, deadline=None)
@given(
    shape=st.tuples(*(st.integers(1, 6) for _ in range(4))),
    groups=st.sampled_from([1, 2, 3]),
    kernel=st.sampled_from(["explicit", "sdpa"]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    seed=st.integers(0, 1000),
    density=st.floats(0, 1),
)
def test_any_mask_gives_finite_results_and_empty_rows_give_zeros(shape, groups, kernel, dtype, seed, density):
    b, g, n, m = shape
    torch.manual_seed(seed)
    q = torch.randn(b, g * groups, n, 4, dtype=dtype).requires_grad_()
    k = torch.randn(b, g, m, 4, dtype=dtype).requires_grad_()
    v = torch.randn(b, g, m, 5, dtype=dtype).requires_grad_()
    mask = torch.rand(b, 1, n, m) < density
    out = va.attend(q, k, v, mask=mask, kernel=kernel)
    out.float().square().sum().backward()
    for t in (out, q.grad, k.grad, v.grad):
        assert torch.isfinite(t).all()
    empty = ~mask.any(-1).expand(b, g * groups, n)
    assert (out[empty] == 0).all()
    assert (q.grad[empty] == 0).all()
    rows = va.attention_weights(q, k, mask=mask).float().sum(-1)
    torch.testing.assert_close(rows, (~empty).float(), rtol=0, atol=2e-2)


def test_grouped_heads_equal_repeated_heads():
    q, k, v = torch.randn(2, 6, 5, 7), torch.randn(2, 3, 11, 7), torch.randn(2, 3, 11, 13)
    for kernel in ("explicit", "sdpa"):
        grouped = va.attend(q, k, v, kernel=kernel)
        repeated = va.attend(q, k.repeat_interleave(2, 1), v.repeat_interleave(2, 1), kernel=kernel)
        torch.testing.assert_close(grouped, repeated)


def test_dropout_drops_in_training_only_and_keeps_the_expectation():
    layer = Attention(14, 2, dropout=0.5)
    x = torch.randn(2, 5, 14)
    for kernel in ("explicit", "sdpa"):
        layer.kernel = kernel
        layer.eval()
        torch.testing.assert_close(layer(x), layer(x), rtol=0, atol=0)
        expected = layer(x)
        layer.train()
        assert (layer(x) != expected).any()
        mean = torch.stack([layer(x) for _ in range(600)]).mean(0)
        torch.testing.assert_close(mean, expected, rtol=0.2, atol=0.08)


def test_autocast_leaves_the_core_to_its_own_precision():
    layer, x = Attention(15, 3), torch.randn(2, 7, 15)
    with torch.autocast("cpu", torch.bfloat16):
        low = layer(x)
    assert low.dtype == torch.bfloat16
    torch.testing.assert_close(low.float(), layer(x), rtol=0.05, atol=0.02)


@pytest.mark.parametrize("qk_norm", [False, True])
def test_weights_come_out_of_a_fused_model(qk_norm):
    torch.manual_seed(1)
    model = va.create_model(
        "vit_tiny_patch16_224",
        img_size=20,
        patch_size=4,
        embed_dim=21,
        num_heads=3,
        depth=2,
        num_classes=7,
        attention={"kernel": "sdpa", "qk_norm": qk_norm, "num_kv_heads": 1},
    ).eval()
    for p in model.parameters():
        torch.nn.init.normal_(p, std=0.3)
    images = torch.randn(2, 3, 20, 20)
    before = model(images)
    maps = va.attention_maps(model, images)
    torch.testing.assert_close(model(images), before, rtol=0, atol=0)
    assert list(maps) == ["blocks.0.attn", "blocks.1.attn"]
    # The weights, applied by hand to the values of the first layer, give what the fused kernel gave.
    attn = model.blocks[0].attn
    x = model.blocks[0].norm1(model.embed(images))
    _, _, v = attn._project(x, None, None, None)
    mixed = (maps["blocks.0.attn"] @ v.expand(-1, 3, -1, -1)).transpose(1, 2).flatten(2)
    torch.testing.assert_close(attn.proj(mixed), attn(x), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(maps["blocks.1.attn"].sum(-1), torch.ones(2, 3, 26))
    few = va.attention_maps(model, images, layers="blocks.1*", heads=[2], queries=[0, 5])
    torch.testing.assert_close(few["blocks.1.attn"], maps["blocks.1.attn"][:, [2]][:, :, [0, 5]])


def test_recording_respects_masks_and_bias():
    layer = Attention(14, 2)
    mask, bias = torch.rand(1, 1, 5, 5) > 0.3, torch.randn(1, 2, 5, 5)
    mask[..., 3, :] = False
    with record(layer) as recorder:
        layer(torch.randn(3, 5, 14), mask=mask, bias=bias)
    weights = recorder.weights("")
    assert (weights.masked_select(~mask) == 0).all()
    torch.testing.assert_close(weights.sum(-1)[..., [0, 1, 2, 4]], torch.ones(3, 2, 4))
    assert layer.recorder is None


def test_recording_what_is_not_there_is_an_error():
    model = va.create_model("vit_tiny_patch16_224", img_size=32, depth=1)
    images = torch.randn(1, 3, 32, 32)
    with pytest.raises(ValueError, match=r"blocks\.7\.attn.*there are: blocks\.0\.attn"):
        va.attention_maps(model, images, layers=["blocks.7.attn"])
    with pytest.raises(ValueError, match="has no head 3: it has 3"):
        va.attention_maps(model, images, heads=[3])
    with pytest.raises(ValueError, match="nothing to record"):
        va.attention_maps(torch.nn.Linear(2, 2), images)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda t: va.attend(t(2, 3, 5, 7), t(2, 3, 9, 5), t(2, 3, 9, 7)),
            r"equal widths.*\(2, 3, 5, 7\).*\(2, 3, 9, 5\)",
        ),
        (lambda t: va.attend(t(2, 3, 5, 7), t(2, 2, 5, 7), t(2, 2, 5, 7)), "2 key/value heads do not divide 3"),
        (lambda t: va.attend(t(3, 5, 7), t(3, 5, 7), t(3, 5, 7)), r"must be \(B, H, N, d\)"),
        (lambda t: va.attend(t(2, 1, 5, 7), t(2, 1, 5, 7), t(2, 1, 6, 7)), "as many keys as values"),
        (lambda t: va.attend(*[t(2, 1, 5, 7)] * 3, mask=torch.ones(5, 5)), "mask must be boolean"),
        (lambda t: va.attend(*[t(2, 1, 5, 7)] * 3, mask=torch.ones(4, 5).bool()), r"\(1, 1, 4, 5\).*\(2, 1, 5, 5\)"),
        (lambda t: va.attend(*[t(2, 1, 5, 7)] * 3, bias=torch.ones(3, 1, 5, 5)), r"bias.*\(3, 1, 5, 5\)"),
        (lambda t: va.attend(*[t(2, 1, 5, 7)] * 3, score="angle"), "unknown score 'angle'"),
        (lambda t: va.attend(*[t(2, 1, 5, 7)] * 3, normalizer="max"), "unknown normalizer 'max'"),
        (lambda t: va.attend(*[t(2, 1, 5, 7)] * 3, kernel="magic"), "unknown kernel 'magic'"),
        (lambda t: Attention(10, 3), "num_heads=3 does not divide dim=10"),
        (lambda t: Attention(12, 4, num_kv_heads=3), "num_kv_heads=3 does not divide num_heads=4"),
        (lambda t: Attention(12, 4, dropout=1.5), "no probability"),
        (lambda t: Attention(12, 4, context_dim=10)(t(2, 5, 12)), "needs a context"),
    ],
)
def test_wrong_calls_name_what_is_wrong(call, message):
    with pytest.raises(ValueError, match=message):
        call(torch.randn)


def test_a_kernel_that_cannot_serve_says_why():
    request = Request("cpu", torch.float32, 1, 1, 1, 4, 4, 4, dot=False)
    assert choose_kernel("auto", request).name == "explicit"
    with pytest.raises(ValueError, match=r"kernel 'sdpa' cannot serve.*explicit"):
        choose_kernel("sdpa", request)
