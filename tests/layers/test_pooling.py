"""Pooling by attention (MECHANISMS 15 and 26): weights are a distribution, and the result is the mean under it."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from vision_attn.attention import Layout
from vision_attn.errors import UserError
from vision_attn.layers.pooling import AttentionPool, HierarchicalPool, SequencePool

B, DIM, HIDDEN = 2, 13, 7


def randomised(module: nn.Module) -> nn.Module:
    for p in module.parameters():
        nn.init.normal_(p, std=0.7)
    return module.double()


def tensor(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64, requires_grad=True)


def by_hand(pool: AttentionPool, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(N, D) → its weights and their mean, one token at a time."""
    scores = torch.stack([torch.tanh(pool.key.weight @ h + pool.key.bias) @ pool.query for h in tokens])
    shares = (scores - scores.max()).exp()
    weights = shares / shares.sum()
    return weights, sum(w * h for w, h in zip(weights, tokens, strict=True))


@pytest.mark.parametrize("hidden", [None, HIDDEN])
@pytest.mark.parametrize("kernel", ["explicit", "sdpa", "auto"])
def test_attention_pool_equals_a_loop(hidden, kernel):
    pool = randomised(AttentionPool(DIM, hidden=hidden, kernel=kernel))
    x = tensor(B, 11, DIM)
    got = pool(x)
    pairs = [by_hand(pool, tokens) for tokens in x]
    weights, expected = (torch.stack(part) for part in zip(*pairs, strict=True))
    torch.testing.assert_close(got, expected, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(pool.weights(x), weights, rtol=1e-10, atol=1e-12)
    inputs = (x, *pool.parameters())
    gradients = [torch.autograd.grad(t.square().sum(), inputs, retain_graph=True) for t in (got, expected)]
    torch.testing.assert_close(*gradients, rtol=1e-9, atol=1e-11)


def test_attention_pool_leaves_out_what_is_masked():
    pool = randomised(AttentionPool(DIM))
    x = tensor(B, 5, 11, DIM)  # five sets at once
    mask = torch.rand(B, 5, 11) > 0.4
    mask[0, 3] = False
    got = pool(x, mask=mask)
    assert got.shape == (B, 5, DIM)
    for b in range(B):
        for s in range(5):
            if (b, s) != (0, 3):
                torch.testing.assert_close(got[b, s], by_hand(pool, x[b, s][mask[b, s]])[1], rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(got[0, 3], torch.zeros(DIM, dtype=torch.float64))
    torch.testing.assert_close(pool(x[:, 0], mask=mask[:, 0]), got[:, 0])
    weights = pool.weights(x, mask=mask)
    torch.testing.assert_close(weights.sum(-1), mask.any(-1).double())
    torch.testing.assert_close(weights[~mask], torch.zeros_like(weights[~mask]))
    got.square().sum().backward()
    assert x.grad.isfinite().all()


def test_context_vectors_are_weighted_sums():
    """MECHANISMS 26: class token, mean and attention differ in their weights alone."""
    x = tensor(B, 11, DIM)
    pool = randomised(AttentionPool(DIM))
    first = torch.zeros(B, 11, dtype=torch.float64)
    first[:, 0] = 1
    mean = torch.full((B, 11), 1 / 11, dtype=torch.float64)
    for weights, pooled in ((first, x[:, 0]), (mean, x.mean(1)), (pool.weights(x), pool(x))):
        torch.testing.assert_close(weights.sum(1), torch.ones(B, dtype=torch.float64))
        torch.testing.assert_close(torch.einsum("bn,bnd->bd", weights, x), pooled, rtol=1e-10, atol=1e-12)
    nn.init.zeros_(pool.query)  # a query that asks nothing
    torch.testing.assert_close(pool(x), x.mean(1))
    sequence = randomised(SequencePool(DIM))
    nn.init.zeros_(sequence.query)
    torch.testing.assert_close(sequence(x), x.mean(1))


def hierarchy_by_hand(pool, x, grid, region):
    """The formula, region by region, with whatever lies at the edges."""
    image = x.view(x.shape[0], *grid, -1)
    found, product = [], torch.zeros(x.shape[0], *grid, dtype=x.dtype)
    for b, picture in enumerate(image):
        means, places, inner = [], [], []
        for top in range(0, grid[0], region[0]):
            for left in range(0, grid[1], region[1]):
                place = (slice(top, top + region[0]), slice(left, left + region[1]))
                weights, mean = by_hand(pool.patches, picture[place].reshape(-1, x.shape[-1]))
                means.append(mean), places.append(place), inner.append(weights)
        outer, mean = by_hand(pool.regions, torch.stack(means))
        found.append(mean)
        for weight, place, weights in zip(outer, places, inner, strict=True):
            product[b][place] = (weight * weights).view(product[b][place].shape)
    return torch.stack(found), product.flatten(1)


@pytest.mark.parametrize(
    ("grid", "region"),
    [((6, 4), 2), ((6, 4), (3, 2)), ((5, 7), (2, 3)), ((5, 7), 4), ((3, 2), 5), ((1, 11), (1, 3)), ((5, 3), 1)],
)
def test_hierarchy_equals_a_loop(grid, region):
    """MECHANISMS 15, with edges that are cut off and regions larger than the grid."""
    pool = randomised(HierarchicalPool(DIM, region, hidden=HIDDEN))
    x = tensor(B, grid[0] * grid[1], DIM)
    got = pool(x, grid)
    expected, product = hierarchy_by_hand(pool, x, grid, pool.region)
    torch.testing.assert_close(got, expected, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(pool.weights(x, grid).product, product, rtol=1e-10, atol=1e-12)
    inputs = (x, *pool.parameters())
    gradients = [torch.autograd.grad(t.square().sum(), inputs, retain_graph=True) for t in (got, expected)]
    torch.testing.assert_close(*gradients, rtol=1e-9, atol=1e-11)


@settings(max_examples=25, deadline=None)
@given(st.integers(1, 9), st.integers(1, 9), st.integers(1, 10), st.integers(1, 10), st.integers(0, 3))
def test_level_weights_multiply_to_a_distribution(rows, columns, down, across, prefix):
    torch.manual_seed(rows + 11 * columns)
    pool = randomised(HierarchicalPool(5, (down, across)))
    tokens = torch.randn(B, prefix + rows * columns, 5, dtype=torch.float64)
    layout = Layout(prefix, (rows, columns))
    weights = pool.weights(tokens, layout)
    regions = -(-rows // down) * -(-columns // across)
    assert weights.patches.shape == weights.product.shape == (B, rows * columns)
    assert weights.regions.shape == (B, regions)
    ones = torch.ones(B, dtype=torch.float64)
    torch.testing.assert_close(weights.regions.sum(1), ones)
    torch.testing.assert_close(weights.product.sum(1), ones)
    torch.testing.assert_close(weights.patches.sum(1), ones * regions)  # one for each region
    assert (weights.product >= 0).all()
    patches = tokens[:, prefix:]
    torch.testing.assert_close(pool(tokens, layout), torch.einsum("bn,bnd->bd", weights.product, patches))
    torch.testing.assert_close(pool(patches, (rows, columns)), pool(tokens, layout), rtol=0, atol=0)


def test_padding_at_the_edge_is_never_seen():
    """Zeros fill the regions at the edge: they must not count, not even where a zero token would score high."""
    pool = randomised(HierarchicalPool(3, 2))
    with torch.no_grad():
        pool.patches.key.bias.fill_(5)
        pool.patches.query.fill_(5)
    x = -torch.ones(1, 9, 3, dtype=torch.float64)
    torch.testing.assert_close(pool(x, (3, 3)), x[:, 0])


def test_tokens_that_are_no_grid():
    pool = HierarchicalPool(DIM)
    x = torch.randn(B, 35, DIM)
    with pytest.raises(ValueError, match=r"35 tokens are not 0 prefix tokens and a grid of 5 × 6"):
        pool(x, (5, 6))
    with pytest.raises(ValueError, match="lie on a grid; give its"):
        pool.weights(x, Layout())
    with pytest.raises(UserError, match="region=0: a region needs at least one patch"):
        HierarchicalPool(DIM, 0)
    assert pool.region == (4, 4)
    assert "region=4×4" in repr(pool)
