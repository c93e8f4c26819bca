"""Patterns: the rule against plain loops, its density, the plans that follow from it, and what bad input gets."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from vision_attn.attention.layout import Layout
from vision_attn.attention.patterns import PATTERNS, Pattern, make_pattern
from vision_attn.attention.plans import Plan, random_blocks

SEQUENCE, PREFIXED, GRID = Layout(), Layout(prefix=2), Layout(prefix=3, grid=(5, 7))


def pattern(name: str, **options) -> Pattern:
    made = make_pattern(name, **options)
    assert made is not None
    return made


def by_loop(meets, n: int, first: int) -> Tensor:
    """The mask of a Python predicate, with the ``first`` tokens global."""
    return torch.tensor([[i < first or j < first or meets(i, j) for j in range(n)] for i in range(n)])


def planned(plan: Plan, n: int) -> Tensor:
    """How often a plan visits each pair."""
    visits = torch.zeros(n, n, dtype=torch.long)
    for part in plan.parts():
        blocks, size = part.queries.shape
        rows = torch.zeros(blocks, size, n, dtype=torch.long)
        rows.scatter_add_(2, part.keys[:, None].expand(-1, size, -1), part.mask.long())
        visits[plan.first :] += rows.flatten(0, 1)[part.order]
        torch.testing.assert_close(part.queries.flatten()[part.order], torch.arange(plan.first, n))
    visits[: plan.first] = 1
    return visits


def near_on_grid(i: int, j: int, radius: int) -> bool:
    (y, x), (v, u) = divmod(i - 3, 7), divmod(j - 3, 7)
    return max(abs(y - v), abs(x - u)) <= radius


@pytest.mark.parametrize(
    ("made", "layout", "n", "first", "meets"),
    [
        (pattern("causal"), PREFIXED, 11, 0, lambda i, j: j <= i),
        (pattern("window", window=3), SEQUENCE, 13, 0, lambda i, j: abs(i - j) <= 3),
        (pattern("window", window=0), PREFIXED, 13, 2, lambda i, j: i == j),
        (pattern("window", window=5), GRID, 38, 3, lambda i, j: abs(i - j) <= 5),
        (pattern("window_2d", window=2), GRID, 38, 3, lambda i, j: near_on_grid(i, j, 2)),
        (pattern("strided", stride=5), PREFIXED, 29, 2, lambda i, j: abs(i - j) < 5 or (i - j) % 5 == 0),
        (pattern("strided"), SEQUENCE, 50, 0, lambda i, j: abs(i - j) < 7 or (i - j) % 7 == 0),
        (pattern("longformer", window=3, num_global=2), PREFIXED, 17, 4, lambda i, j: abs(i - j) <= 3),
        (
            pattern("bigbird", block_size=3, window=4, num_random=0, num_global=1),
            PREFIXED,
            31,
            3,
            lambda i, j: abs((i - 3) // 3 - (j - 3) // 3) <= 2,
        ),
    ],
    ids=lambda value: value.name if isinstance(value, Pattern) else None,
)
def test_the_rule_equals_a_plain_loop(made, layout, n, first, meets):
    torch.testing.assert_close(made.mask(n, layout), by_loop(meets, n, first))


def test_random_blocks_are_distinct_and_no_neighbours():
    made = pattern("bigbird", block_size=3, num_random=4, seed=5)
    table = random_blocks(13, 1, 4, 5)
    for block, drawn in enumerate(table.tolist()):
        assert len(set(drawn)) == 4
        assert all(abs(block - other) > 1 and 0 <= other < 13 for other in drawn)
    mask = made.mask(39, SEQUENCE)
    chosen = by_loop(lambda i, j: abs(i // 3 - j // 3) <= 1 or j // 3 in table[i // 3].tolist(), 39, 0)
    torch.testing.assert_close(mask, chosen)


def test_random_blocks_depend_on_the_seed_alone():
    torch.manual_seed(1)
    first = random_blocks.__wrapped__(11, 1, 2, 0)
    torch.manual_seed(2)
    torch.testing.assert_close(random_blocks.__wrapped__(11, 1, 2, 0), first)
    assert (random_blocks(11, 1, 2, 1) != first).any()
    # Written down once: another process, machine or release must draw the same, or checkpoints lose their pattern.
    assert first[:3].tolist() == [[10, 3], [8, 5], [6, 8]]


def w(tokens: int, radius: int) -> int:
    """Pairs at most ``radius`` apart."""
    return tokens * (2 * radius + 1) - radius * (radius + 1)


@pytest.mark.parametrize(
    ("made", "layout", "n", "pairs"),
    [
        (pattern("causal"), PREFIXED, 101, 101 * 102 // 2),
        (pattern("window", window=7), SEQUENCE, 101, w(101, 7)),
        (pattern("window", window=7), PREFIXED, 101, w(99, 7) + 101**2 - 99**2),
        (pattern("longformer", window=7, num_global=3), PREFIXED, 101, w(96, 7) + 101**2 - 96**2),
        (pattern("window_2d", window=2), GRID, 38, w(5, 2) * w(7, 2) + 38**2 - 35**2),
        (pattern("bigbird", block_size=5, num_random=3, num_global=1), PREFIXED, 88, 25 * (17 * 6 - 2) + 88**2 - 85**2),
    ],
    ids=lambda value: value.name if isinstance(value, Pattern) else None,
)
def test_density_is_as_documented(made, layout, n, pairs):
    assert made.mask(n, layout).sum().item() == pairs


def test_a_stride_near_the_root_joins_all_tokens_in_two_steps():
    n = 97
    mask = pattern("strided").mask(n, SEQUENCE)
    assert mask.sum().item() < 4 * n * math.sqrt(n)
    assert ((mask.long() @ mask.long()) > 0).all()


def test_prefix_tokens_are_global_in_every_pattern_but_causal():
    options = {
        "window": {"window": 1},
        "window_2d": {"window": 1},
        "longformer": {"window": 1},
        "bigbird": {"block_size": 2},
    }
    for name in ("causal", "window", "window_2d", "strided", "longformer", "bigbird"):
        assert name in PATTERNS
        mask = pattern(name, **options.get(name, {})).mask(38, GRID)
        assert bool(mask[:3].all() and mask[:, :3].all()) == (name != "causal")
        assert mask.diagonal().all()


@pytest.mark.parametrize(
    "made",
    [
        pattern("window", window=37),
        pattern("window", window=38),
        pattern("longformer", window=38),
        pattern("window_2d", window=6),
        pattern("window_2d", window=7),
        pattern("strided", stride=1),
        pattern("strided", stride=38),
        pattern("bigbird", block_size=5, window=38, num_random=0),
    ],
    ids=str,
)
def test_the_largest_parameter_is_full_attention(made):
    made.check(38, 38, GRID)
    assert made.mask(38, GRID).all()
    assert made.plan(38, GRID) is None  # nothing to skip


some_pattern = st.one_of(
    st.builds(lambda r: pattern("window", window=r), st.integers(0, 60)),
    st.builds(lambda r, g: pattern("longformer", window=r, num_global=g), st.integers(0, 60), st.integers(0, 5)),
    st.builds(lambda s: pattern("strided", stride=s), st.integers(1, 60)),
    st.builds(
        lambda b, r, d, s: pattern("bigbird", block_size=b, window=r, num_random=d, num_global=s % 3, seed=s),
        st.integers(1, 17),
        st.integers(0, 20),
        st.integers(0, 3),
        st.integers(0, 99),
    ),
)


@settings(max_examples=60, deadline=None)
@given(some_pattern, st.integers(61, 200), st.integers(0, 3))
def test_a_plan_visits_every_allowed_pair_once(made, n, prefix):
    layout = Layout(prefix=prefix)
    try:
        made.check(n, n, layout)
    except ValueError:
        return
    plan = made._plan(n, layout, made.rule(n, layout, torch.device("cpu")))
    if plan is not None:
        torch.testing.assert_close(planned(plan, n), made.mask(n, layout).long())


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 19), st.integers(1, 23), st.integers(0, 3), st.data())
def test_a_plan_of_tiles_visits_every_allowed_pair_once(rows, columns, prefix, data):
    layout = Layout(prefix, (rows, columns))
    n = prefix + rows * columns
    made = pattern("window_2d", window=data.draw(st.integers(0, max(rows, columns))))
    made.check(n, n, layout)
    plan = made._plan(n, layout, made.rule(n, layout, torch.device("cpu")))
    torch.testing.assert_close(planned(plan, n), made.mask(n, layout).long())


@pytest.mark.parametrize(
    "made",
    [
        pattern("window", window=16),
        pattern("longformer", window=16, num_global=2),
        pattern("bigbird", block_size=16, num_random=3),
        pattern("window_2d", window=3),
    ],
    ids=lambda made: made.name,
)
def test_plans_grow_like_the_number_of_tokens(made):
    small, large = (made.plan(32 * rows, Layout(0, (rows, 32))) for rows in (32, 64))
    assert small is not None
    assert large is not None
    assert large.mask.numel() <= 2.01 * small.mask.numel()
    assert large.cost() <= 2.01 * small.cost()


@pytest.mark.parametrize(
    ("made", "n", "m", "layout", "says"),
    [
        (pattern("window", window=3), 11, 13, SEQUENCE, "11 queries attend to 13 keys.*use pattern='full'"),
        (pattern("causal"), 11, 13, SEQUENCE, "use pattern='full'"),
        (pattern("window", window=12), 11, 11, SEQUENCE, "window=12 is more than the 11 tokens; use at most 11"),
        (pattern("longformer", window=12), 11, 11, SEQUENCE, "window=12 is more than the 11 tokens"),
        (pattern("longformer", window=2, num_global=10), 11, 11, PREFIXED, "num_global=10 .* use at most 9"),
        (pattern("window_2d", window=2), 11, 11, SEQUENCE, r"needs to know the grid.*pass layout=Layout\("),
        (pattern("window_2d", window=8), 38, 38, GRID, r"window=8 .* grid \(5, 7\); use at most 7"),
        (pattern("window_2d", window=2), 37, 37, GRID, "37 tokens are not 3 prefix tokens and a grid of 5 × 7 = 38"),
        (pattern("strided", stride=12), 11, 11, SEQUENCE, "stride=12 is more than the 11 tokens"),
        (pattern("bigbird", block_size=12), 11, 11, SEQUENCE, "block_size=12 .* use at most 11"),
        (pattern("bigbird", block_size=2, window=12), 11, 11, SEQUENCE, "window=12 is more than the 11 tokens"),
        (pattern("bigbird", num_global=12), 11, 11, SEQUENCE, "num_global=12 .* use at most 11"),
        (pattern("bigbird", block_size=2, num_random=4), 11, 11, SEQUENCE, "of 6 blocks .* only 3 are no neighbours"),
    ],
    ids=lambda value: value.name if isinstance(value, Pattern) else None,
)
def test_sequences_that_do_not_fit_are_refused(made, n, m, layout, says):
    with pytest.raises(ValueError, match=says):
        made.check(n, m, layout)


@pytest.mark.parametrize(
    ("name", "options", "says"),
    [
        ("windows", {}, "unknown pattern 'windows'; there are: full, causal, window"),
        ("window", {}, "pattern 'window' needs window=…; it takes: window"),
        ("window", {"window": -1}, "window=-1 must be a whole number, 0 or more"),
        ("window", {"window": 2.5}, "window=2.5 must be a whole number"),
        ("window", {"window": True}, "window=True must be a whole number"),
        ("window", {"window": 3, "stride": 2}, "pattern 'window' has no option 'stride'; it takes: window"),
        ("full", {"window": 3}, "pattern 'full' has no option 'window'; it takes no options"),
        ("strided", {"stride": 0}, "stride=0 must be a whole number, 1 or more"),
        ("longformer", {"window": 3, "num_global": -2}, "num_global=-2 must be"),
        ("bigbird", {"block_size": 0}, "block_size=0 must be a whole number, 1 or more"),
    ],
)
def test_bad_options_are_refused(name, options, says):
    with pytest.raises(ValueError, match=says):
        make_pattern(name, **options)


def test_patterns_are_values():
    assert make_pattern("full") is None
    assert make_pattern("window", window=3, stride=None) == pattern("window", window=3)
    assert pattern("longformer", window=3) != pattern("window", window=3)
    assert hash(pattern("bigbird", seed=1)) != hash(pattern("bigbird", seed=2))
