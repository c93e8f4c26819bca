"""Masks: padding, causal, visibility, and rows that may attend to nothing."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vision_attn.attention import KERNELS, attend, attention_weights, causal_mask, merge_masks, padding_mask
from vision_attn.attention.masks import visibility_mask


def qkv(n=7, m=None, batch=2, dtype=torch.float64, grad=False):
    m = n if m is None else m
    shapes = (batch, 3, n, 5), (batch, 3, m, 5), (batch, 3, m, 11)
    return [torch.randn(*shape, dtype=dtype, requires_grad=grad) for shape in shapes]


exact = pytest.mark.parametrize("kernel", ["explicit", "sdpa"])


def test_the_causal_triangle_has_its_diagonal():
    expected = torch.tensor([[1, 0, 0, 0], [1, 1, 0, 0], [1, 1, 1, 0], [1, 1, 1, 1]], dtype=torch.bool)
    torch.testing.assert_close(causal_mask(4), expected)


def test_with_more_keys_the_queries_are_the_last():
    torch.testing.assert_close(causal_mask(3, 7), causal_mask(7)[-3:])
    with pytest.raises(ValueError, match="5 queries and 3 keys"):
        causal_mask(5, 3)


@exact
def test_a_future_edit_leaves_the_past_fixed(kernel):
    q, k, v = qkv(11)
    before = attend(q, k, v, mask=causal_mask(11), kernel=kernel)
    q, k, v = (torch.cat([t[:, :, :6], torch.randn_like(t[:, :, 6:])], dim=2) for t in (q, k, v))
    after = attend(q, k, v, mask=causal_mask(11), kernel=kernel)
    torch.testing.assert_close(after[:, :, :6], before[:, :, :6], rtol=0, atol=1e-12)
    assert (after[:, :, 6:] - before[:, :, 6:]).abs().min(dim=-1).values.max() > 1e-3


@exact
def test_a_token_has_no_gradient_from_the_past(kernel):
    q, k, v = qkv(11, grad=True)
    attend(q, k, v, mask=causal_mask(11), kernel=kernel)[:, :, :6].square().sum().backward()
    for t in (k.grad, v.grad):
        torch.testing.assert_close(t[:, :, 6:], torch.zeros_like(t[:, :, 6:]), rtol=0, atol=0)
        assert t[:, :, :6].abs().max() > 1e-3


@exact
@pytest.mark.parametrize("filler", [1.0, 1e4])
def test_padding_changes_nothing(kernel, filler):
    q, k, v = qkv(7)
    padded = [torch.cat([t, filler * torch.randn(2, 3, 6, t.shape[-1], dtype=t.dtype)], dim=2) for t in (q, k, v)]
    for t in padded:
        t.requires_grad_()
    mask = padding_mask(torch.tensor([7, 7]), 13)
    out = attend(*padded, mask=mask, kernel=kernel)[:, :, :7]
    torch.testing.assert_close(out, attend(q, k, v, kernel=kernel), rtol=0, atol=1e-12)
    out.square().sum().backward()
    for t in padded:
        torch.testing.assert_close(t.grad[:, :, 7:], torch.zeros_like(t.grad[:, :, 7:]), rtol=0, atol=0)


def test_each_sample_has_its_own_padding():
    lengths = torch.tensor([3, 11, 7])
    mask = padding_mask(lengths)
    assert mask.shape == (3, 1, 1, 11)
    torch.testing.assert_close(mask.sum(-1).flatten(), lengths)
    torch.testing.assert_close(padding_mask(mask[:, 0, 0]), mask)
    q, k, v = qkv(11, batch=3)
    out = attend(q, k, v, mask=mask)
    for b, n in enumerate(lengths.tolist()):
        alone = attend(q[b : b + 1], k[b : b + 1, :, :n], v[b : b + 1, :, :n])
        torch.testing.assert_close(out[b : b + 1], alone, rtol=0, atol=1e-12)
    with pytest.raises(ValueError, match=r"keep must be boolean \(B, M\) or integer lengths"):
        padding_mask(torch.rand(2, 3))


@exact
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_a_row_that_may_attend_to_nothing_is_zero_forward_and_backward(kernel, dtype):
    q, k, v = qkv(5, 7, dtype=dtype, grad=True)
    mask = torch.rand(2, 1, 5, 7) < 0.6
    mask[:, :, 3], mask[:, :, 0, 1] = False, True
    out = attend(q, k, v, mask=mask, kernel=kernel)
    torch.testing.assert_close(out[:, :, 3], torch.zeros_like(out[:, :, 3]), rtol=0, atol=0)
    out.square().sum().backward()
    for t in (q.grad, k.grad, v.grad):
        assert t.isfinite().all()
    torch.testing.assert_close(q.grad[:, :, 3], torch.zeros_like(q.grad[:, :, 3]), rtol=0, atol=0)
    # and what it would have asked makes no difference to the others
    with torch.no_grad():
        without = attend(q[:, :, [0, 1, 2, 4]], k, v, mask=mask[:, :, [0, 1, 2, 4]], kernel=kernel)
    torch.testing.assert_close(out[:, :, [0, 1, 2, 4]], without)


def test_everything_masked():
    q, k, v = qkv(5, 7, grad=True)
    nothing = torch.zeros(5, 7, dtype=torch.bool)
    out = attend(q, k, v, mask=nothing)
    torch.testing.assert_close(out, torch.zeros_like(out), rtol=0, atol=0)
    torch.testing.assert_close(attention_weights(q, k, mask=nothing), torch.zeros(2, 3, 5, 7, dtype=torch.float64))
    out.sum().backward()
    for t in (q.grad, k.grad, v.grad):
        torch.testing.assert_close(t, torch.zeros_like(t), rtol=0, atol=0)


def test_the_tests_of_zeros_cover_the_kernels_that_are_always_there():
    assert {"explicit", "sdpa"} <= set(KERNELS)


def test_tokens_see_their_own_segment():
    segments = torch.tensor([[0, 0, 1, 1, 1], [4, 2, 4, 2, 9]])
    mask = visibility_mask(segments)
    assert mask.shape == (2, 1, 5, 5)
    torch.testing.assert_close(mask[0, 0].int(), torch.block_diag(torch.ones(2, 2), torch.ones(3, 3)).int())
    for i in range(5):
        for j in range(5):
            assert mask[1, 0, i, j] == (segments[1, i] == segments[1, j])


def test_segments_packed_in_one_sequence_are_as_good_as_alone():
    q, k, v = qkv(12, batch=1)
    out = attend(q, k, v, mask=visibility_mask(torch.tensor([[0] * 5 + [1] * 7])))
    alone = [attend(*(t[:, :, part] for t in (q, k, v))) for part in (slice(0, 5), slice(5, 12))]
    torch.testing.assert_close(out, torch.cat(alone, dim=2), rtol=0, atol=1e-12)


def test_queries_and_keys_may_have_segments_of_their_own():
    queries, keys = torch.tensor([[0, 1, 2]]), torch.tensor([[1, 1, 0, 5, 0]], dtype=torch.int32)
    mask = visibility_mask(queries, keys)
    expected = torch.tensor([[0, 0, 1, 0, 1], [1, 1, 0, 0, 0], [0, 0, 0, 0, 0]], dtype=torch.bool)
    torch.testing.assert_close(mask[0, 0], expected)
    q, k, v = qkv(3, 5, batch=1)
    out = attend(q, k, v, mask=mask)
    torch.testing.assert_close(out[:, :, 2], torch.zeros(1, 3, 11, dtype=torch.float64), rtol=0, atol=0)


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 3), st.integers(1, 11), st.integers(1, 4))
def test_visibility_is_an_equivalence(batch, n, kinds):
    mask = visibility_mask(torch.randint(0, kinds, (batch, n)))[:, 0]
    assert mask.diagonal(dim1=1, dim2=2).all()
    assert (mask == mask.transpose(1, 2)).all()
    reached = (mask.float() @ mask.float()) > 0
    assert (reached == mask).all()


def test_what_a_visibility_mask_refuses():
    with pytest.raises(ValueError, match=r"segments_q must be \(batch, tokens\), one segment per token, got \(5,\)"):
        visibility_mask(torch.zeros(5, dtype=torch.long))
    with pytest.raises(ValueError, match=r"segments_k must be \(batch, tokens\).* got \(1, 2, 3\)"):
        visibility_mask(torch.zeros(1, 5, dtype=torch.long), torch.zeros(1, 2, 3, dtype=torch.long))
    with pytest.raises(ValueError, match=r"segments_q must be integers .* got torch.float32; use segments_q.long\(\)"):
        visibility_mask(torch.zeros(2, 5))
    with pytest.raises(ValueError, match="segments_q must be integers"):
        visibility_mask(torch.zeros(2, 5, dtype=torch.bool))
    with pytest.raises(ValueError, match=r"of one batch, got \(2, 5\) and \(3, 7\)"):
        visibility_mask(torch.zeros(2, 5, dtype=torch.long), torch.zeros(3, 7, dtype=torch.long))


def test_merged_masks_allow_what_all_allow():
    merged = merge_masks(causal_mask(5), None, padding_mask(torch.tensor([3, 5])))
    assert merged.shape == (2, 1, 5, 5)
    torch.testing.assert_close(merged[0, 0], causal_mask(5) & (torch.arange(5) < 3))
    torch.testing.assert_close(merged[1, 0], causal_mask(5))
    assert merge_masks(None, None) is None
