"""Shifted windows: what they compute by a loop, by a mask and by Swin's own roll; folded, gathered and recorded."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor

from vision_attn.attention import Attention, AttentionConfig, Layout, attend, attention_weights, record
from vision_attn.attention.continuous import ContinuousBias
from vision_attn.attention.normalizers import NORMALIZERS
from vision_attn.attention.patterns import make_pattern
from vision_attn.attention.relative import RelativeBias
from vision_attn.attention.scores import SCORES
from vision_attn.attention.windows import ShiftedWindows, reorder

CASES = [  # grid, window, shift
    ((6, 9), 3, 0),
    ((6, 9), 3, 1),
    ((6, 9), 3, 2),
    ((4, 10), 5, 2),  # fewer rows than a window has
    ((3, 2), 5, 2),  # one window
    ((7, 11), 3, 1),  # windows cut off at the border
    ((5, 5), 5, 2),
]


def randomised(module, std: float = 0.5):
    with torch.no_grad():
        for p in module.parameters():
            p.copy_(std * torch.randn_like(p))
    return module.double()


def by_loop(grid, window: int, shift: int) -> Tensor:
    """Pair by pair: two patches meet where no border of a window lies between them."""
    rows, columns = grid

    def borders(side: int) -> set[int]:
        return set(range(shift, side, window)) if side > window else set()

    def apart(a: int, b: int, side: int) -> bool:
        return any(min(a, b) < border <= max(a, b) for border in borders(side) - {0})

    places = [(y, x) for y in range(rows) for x in range(columns)]
    return torch.tensor([[not apart(y, v, rows) and not apart(x, u, columns) for v, u in places] for y, x in places])


def by_roll(side: int, window: int, shift: int) -> Tensor:
    """Swin's own way to the mask: regions of the rolled map (Liu et al. 2021, arXiv 2103.14030, figure 4)."""
    region = torch.zeros(side, side)
    cuts = (slice(0, -window), slice(-window, -shift), slice(-shift, None))
    for number, (a, b) in enumerate((a, b) for a in cuts for b in cuts):
        region[a, b] = number
    region = region + 100 * (torch.arange(side) // window)[:, None] + 1000 * (torch.arange(side) // window)
    token = torch.arange(side * side).view(side, side).roll((-shift, -shift), (0, 1)).flatten()
    region = region.flatten()[token.argsort()]
    return region[:, None] == region


@pytest.mark.parametrize(("grid", "window", "shift"), CASES)
def test_the_rule_equals_a_plain_loop(grid, window, shift):
    n = grid[0] * grid[1]
    made = ShiftedWindows(window, shift)
    torch.testing.assert_close(made.mask(n, Layout(0, grid)), by_loop(grid, window, shift))
    prefixed = made.mask(n + 2, Layout(2, grid))
    assert prefixed[:2].all()
    assert prefixed[:, :2].all()
    torch.testing.assert_close(prefixed[2:, 2:], by_loop(grid, window, shift))


@pytest.mark.parametrize(("side", "window", "shift"), [(6, 3, 1), (8, 4, 2), (14, 7, 3)])
def test_the_rule_is_that_of_the_rolled_map(side, window, shift):
    mask = ShiftedWindows(window, shift).mask(side * side, Layout(0, (side, side)))
    torch.testing.assert_close(mask, by_roll(side, window, shift))


@pytest.mark.parametrize(("grid", "window", "shift"), CASES)
def test_the_plan_visits_every_pair_once(grid, window, shift):
    for prefix in (0, 2):
        n, layout = prefix + grid[0] * grid[1], Layout(prefix, grid)
        made = ShiftedWindows(window, shift)
        plan = made._plan(n, layout, made.rule(n, layout, torch.device("cpu")))
        visits = torch.zeros(*plan.queries.shape, n, dtype=torch.long)
        visits.scatter_add_(2, plan.keys[:, None].expand(-1, plan.queries.shape[1], -1), plan.mask.long())
        visits = visits.flatten(0, 1)[plan.order]
        torch.testing.assert_close(visits, made.mask(n, layout)[prefix:].long())


@pytest.mark.parametrize(("grid", "window", "shift"), [case for case in CASES if case[0] != (7, 11)])
def test_folding_brings_windows_together_and_back(grid, window, shift):
    layout = Layout(0, grid)
    made = ShiftedWindows(window, shift)
    folding = made.folding(layout, torch.device("cpu"))
    assert folding.layout == Layout(0, (min(window, grid[0]), min(window, grid[1])))
    assert folding.count * folding.layout.length == layout.length
    tokens = torch.arange(layout.length, dtype=torch.double).view(1, -1, 1).repeat(3, 1, 5)
    folded = folding.fold(tokens)
    torch.testing.assert_close(folding.unfold(folded), tokens)
    heads = folded.unflatten(2, (5, 1)).transpose(1, 2)  # (B · S, H, n, d)
    torch.testing.assert_close(folding.unfold_heads(heads)[:, 3], tokens[:, :, 3:4])
    window_of = folded[: folding.count, :, 0].long()
    local = made.within(window_of, layout)
    torch.testing.assert_close(local, torch.arange(local.shape[1]).expand_as(local))
    mask = torch.ones(1, 1, 1, 1, dtype=torch.bool) if folding.mask is None else folding.mask
    want = made.mask(layout.length, layout)[window_of[:, :, None], window_of[:, None]][:, None]
    torch.testing.assert_close(mask.expand_as(want), want)
    assert (folding.mask is None) == bool(want.all())


def test_foldings_are_kept_and_only_made_where_whole_windows_fit():
    made, device = ShiftedWindows(3, 1), torch.device("cpu")
    assert made.folding(Layout(0, (6, 9)), device) is ShiftedWindows(3, 1).folding(Layout(0, (6, 9)), device)
    assert made.folding(Layout(0, (7, 9)), device) is None
    assert made.folding(Layout(1, (6, 9)), device) is None


def test_reorder_has_the_gradients_of_an_index():
    x = torch.randn(2, 7, 3, dtype=torch.double, requires_grad=True)
    order = torch.randperm(7)
    torch.testing.assert_close(reorder(x, order, order.argsort()), x[:, order])
    assert torch.autograd.gradcheck(lambda t: reorder(t, order, order.argsort()), (x,))
    assert torch.autograd.gradgradcheck(lambda t: reorder(t, order, order.argsort()) ** 2, (x,))


def layer_pair(kernel: str = "auto", heads: int = 3, grid=(6, 9), **options):
    """A layer in windows, and the same one that never folds."""
    if options.get("score") == "cosine":
        options["temperature"] = "learned"
    made = Attention(12, heads, pattern="shifted_windows", window=3, shift=1, layout=Layout(0, grid), **options)
    return randomised(made), copy.deepcopy(made)


def compare(layer, other, grid, *, unfolded, n: int | None = None):
    x = torch.randn(2, n or grid[0] * grid[1], 12, dtype=torch.double, requires_grad=True)
    layout = Layout(0, grid)
    out = layer(x, layout=layout)
    expected = unfolded(other, x, layout)
    torch.testing.assert_close(out, expected, rtol=1e-9, atol=1e-9)
    weight = torch.randn_like(out)
    got = torch.autograd.grad((out * weight).sum(), [x, *layer.parameters()], allow_unused=True)
    want = torch.autograd.grad((expected * weight).sum(), [x, *other.parameters()], allow_unused=True)
    for a, b, name in zip(got, want, ["x", *dict(layer.named_parameters())], strict=True):
        assert (a is None) == (b is None), name
        if a is not None:
            torch.testing.assert_close(a, b, rtol=1e-8, atol=1e-9, msg=lambda m, name=name: f"{name}: {m}")


def masked_full(layer, x, layout):
    """The same weights with a mask on all pairs: an outer mask keeps a layer from folding."""
    n = x.shape[1]
    return layer(x, layout=layout, mask=torch.ones(n, n, dtype=torch.bool))


@pytest.mark.parametrize("position", ["none", "relative_bias", "cpb", "t5", "rope", "rope_1d"])
@pytest.mark.parametrize("grid", [(6, 9), (3, 9), (2, 3)])
def test_windows_equal_masked_full_attention(position, grid):
    layer, other = layer_pair(position=position)
    if position == "rope":
        layer, other = layer_pair(position=position, heads=3, head_dim=4)
    compare(layer, other, grid, unfolded=masked_full)


@pytest.mark.parametrize("kernel", ["explicit", "sdpa", "tiled", "gathered"])
def test_every_kernel_serves_windows(kernel):
    layer, other = layer_pair(position="relative_bias", score="cosine")
    layer.kernel, other.kernel = kernel, "explicit"
    compare(layer, other, (6, 9), unfolded=masked_full)
    compare(layer, other, (12, 15), unfolded=masked_full)  # large enough for a plan of blocks


@pytest.mark.parametrize("score", [name for name in SCORES if name != "location"])
def test_every_score_serves_windows(score):
    layer, other = layer_pair(position="relative_bias", score=score)
    compare(layer, other, (6, 9), unfolded=masked_full)


@pytest.mark.parametrize(
    "normalizer", [n for n in NORMALIZERS if n not in ("sampled", "sum", "bernoulli", "linear_chain")]
)
def test_normalizers_serve_windows(normalizer):
    layer, other = layer_pair(position="relative_bias", normalizer=normalizer)
    compare(layer, other, (6, 9), unfolded=masked_full)


@pytest.mark.parametrize("options", [{"num_kv_heads": 1}, {"qk_norm": True}, {"tie_kv": True}, {"two_step": True}])
def test_options_of_the_layer_serve_windows(options):
    layer, other = layer_pair(position="relative_bias", **options)
    compare(layer, other, (6, 9), unfolded=masked_full)


def test_grids_that_are_no_whole_windows_are_not_folded():
    layer, other = layer_pair(position="relative_bias")
    compare(layer, other, (7, 11), unfolded=masked_full)


def test_class_tokens_meet_all_windows():
    layout = Layout(2, (6, 9))
    layer = randomised(
        Attention(12, 3, pattern="shifted_windows", window=3, shift=1, position="relative_bias", layout=layout)
    )
    assert layer.position.table.shape == (5 * 5 + 3, 3)
    x = torch.randn(2, 56, 12, dtype=torch.double)
    torch.testing.assert_close(layer(x, layout=layout), masked_full(layer, x, layout), rtol=1e-9, atol=1e-9)
    assert not torch.allclose(layer(x, layout=layout)[:, 0], layer(x.flip(1), layout=layout)[:, 0])


def test_all_windows_share_one_table():
    """The same tokens in every window give the same result in every window, and the table has the offsets of one."""
    layer = randomised(
        Attention(12, 3, pattern="shifted_windows", window=3, position="relative_bias", layout=Layout(0, (6, 9)))
    )
    assert isinstance(layer.position, RelativeBias)
    assert layer.position.table.shape == (25, 3)
    tile = torch.randn(1, 3, 3, 12, dtype=torch.double)
    out = layer(tile.repeat(1, 2, 3, 1).flatten(1, 2), layout=Layout(0, (6, 9))).view(2, 3, 3, 3, 12)
    out = out.transpose(1, 2).reshape(6, 9, 12)
    torch.testing.assert_close(out, out[:1].expand_as(out))
    assert Attention(12, 3, pattern="shifted_windows", window=5, position="relative_bias").position.table.shape == (
        81,
        3,
    )


def test_recorded_maps_are_those_of_all_tokens():
    layer, _ = layer_pair(position="relative_bias")
    layout = Layout(0, (6, 9))
    x = torch.randn(2, 54, 12, dtype=torch.double)
    before = layer(x, layout=layout)
    with record(layer) as recorder:
        torch.testing.assert_close(layer(x, layout=layout), before, rtol=0, atol=0)
    maps = recorder.weights("")
    assert maps.shape == (2, 3, 54, 54)
    torch.testing.assert_close(maps.sum(-1), torch.ones(2, 3, 54))
    assert not maps[:, :, ~by_loop((6, 9), 3, 1)].any()
    q, k, _ = layer._project(x, None, None, None)
    expected = attention_weights(q, k, pattern=layer.pattern, position=layer.position, layout=layout)
    torch.testing.assert_close(maps, expected.float(), rtol=1e-5, atol=1e-6)


def test_the_function_takes_the_pattern_too():
    q, k, v = (torch.randn(2, 3, 54, 7, dtype=torch.double) for _ in range(3))
    pattern = make_pattern("shifted_windows", window=3, shift=2)
    out = attend(q, k, v, pattern=pattern, layout=Layout(0, (6, 9)))
    expected = attend(q, k, v, mask=by_loop((6, 9), 3, 2), kernel="explicit")
    torch.testing.assert_close(out, expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("prefix", [0, 1])
def test_continuous_bias(prefix):
    layout = Layout(prefix, (3, 4))
    position = randomised(ContinuousBias.build(2, 8, layout))
    n = layout.length
    dense = position.dense(n, n, layout)
    assert dense.shape == (1, 2, n, n)
    i, j = prefix + 1 * 4 + 3, prefix + 2 * 4 + 1  # one row down, two columns to the left
    offset = torch.tensor([-1 * 8 / 2, 2 * 8 / 3], dtype=torch.double)
    coordinates = offset.sign() * (1 + offset.abs()).log2() / 3
    torch.testing.assert_close(dense[0, :, i, j], 16 * position.mlp(coordinates).sigmoid(), rtol=1e-6, atol=1e-6)
    position.reference = (5, 5)
    assert (position.dense(n, n, layout) != dense).any()
    if not prefix:
        with pytest.raises(ValueError, match=r"without prefix tokens.*cannot serve"):
            position.dense(n + 1, n + 1, Layout(1, (3, 4)))
    with pytest.raises(ValueError, match="needs a grid"):
        position.dense(n, n, Layout())


def test_the_words_are_known():
    chosen = AttentionConfig.of({"pattern": "shifted_windows", "window": 3, "shift": 1}).for_layer()
    assert Attention(12, 3, **chosen).pattern == ShiftedWindows(3, 1)


def test_keys_without_bias():
    layer = Attention(12, 3, key_bias=False)
    with torch.no_grad():
        layer.qkv.q_bias.fill_(2.0)
        layer.qkv.v_bias.fill_(3.0)
    bias = layer.qkv.whole_bias()
    assert bias[:12].eq(2).all()
    assert bias[12:24].eq(0).all()
    assert bias[24:].eq(3).all()
    x = torch.zeros(1, 5, 12)
    q, k, v = layer._project(x, None, None, None)
    crossed = layer._project(x, x, None, None)
    for one, other in zip((q, k, v), crossed, strict=True):
        torch.testing.assert_close(one, other)
    assert k.eq(0).all()
    assert Attention(12, 3, key_bias=False, tie_kv=True).qkv.whole_bias().shape == (24,)
    assert Attention(12, 3, key_bias=False, qkv_bias=False).qkv.bias is None
    with pytest.raises(ValueError, match=r"key_bias=False.*leave out context_dim"):
        Attention(12, 3, key_bias=False, context_dim=7)


def test_bad_input_is_refused():
    with pytest.raises(ValueError, match=r"shift=3 must be less than window=3"):
        make_pattern("shifted_windows", window=3, shift=3)
    with pytest.raises(ValueError, match=r"window=0 must be a whole number, 1 or more"):
        make_pattern("shifted_windows", window=0)
    layer = Attention(12, 3, pattern="shifted_windows", window=3)
    with pytest.raises(ValueError, match=r"needs to know the grid.*layout=Layout"):
        layer(torch.randn(1, 9, 12))
    with pytest.raises(ValueError, match=r"10 tokens are not 0 prefix tokens and a grid of 3 × 3"):
        layer(torch.randn(1, 10, 12), layout=Layout(0, (3, 3)))
    with pytest.raises(ValueError, match=r"in cross-attention use pattern='full'"):
        layer(torch.randn(1, 9, 12), torch.randn(1, 5, 12), layout=Layout(0, (3, 3)))
