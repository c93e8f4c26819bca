"""Positions: relative, rotary, added to the tokens. Each breaks the symmetry that attention has without it."""

from __future__ import annotations

import copy
import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from vision_attn.attention import Attention, attend, attention_weights, rotary
from vision_attn.attention.layout import Layout
from vision_attn.attention.positions import (
    LAYER_POSITIONS,
    POSITIONS,
    TOKEN_POSITIONS,
    make_layer_position,
    resample_grid,
    sinusoidal_1d,
    sinusoidal_2d,
    token_position,
)
from vision_attn.attention.relative import PairBias, RelativeBias, T5Bias, resample_offsets, t5_bucket
from vision_attn.attention.rotary import AxialRotary, Rotary, SequenceRotary, turned
from vision_attn.layers.positions import GridPositions

GRID = Layout(grid=(3, 5))
LAYOUT = Layout(prefix=2, grid=(3, 5))
BIASES = [name for name, cls in LAYER_POSITIONS.items() if issubclass(cls, PairBias)]
TABLES = [name for name in BIASES if name != "cpb"]  # the other is a network
ROTARIES = [name for name, cls in LAYER_POSITIONS.items() if issubclass(cls, Rotary)]


def made(name, heads=3, width=12, layout=LAYOUT):
    """A position inside the layer with random float64 entries."""
    position = make_layer_position(name, heads, width, layout).double()
    for parameter in position.parameters():
        nn.init.normal_(parameter)
    return position


def scores_with(position, q, k, layout):
    """(B, H, N, M) scores, written out."""
    if isinstance(position, Rotary):
        return position.rotate(q, layout) @ position.rotate(k, layout).transpose(-1, -2)
    return q @ k.transpose(-1, -2) + position.dense(q.shape[2], k.shape[2], layout)


def test_names():
    assert (*TOKEN_POSITIONS, *LAYER_POSITIONS) == POSITIONS
    assert BIASES == ["t5", "relative_bias", "cpb"]
    assert ROTARIES == ["rope", "rope_1d"]
    for name in TOKEN_POSITIONS:
        assert make_layer_position(name, 3, 12) is None
    for name in LAYER_POSITIONS:
        assert token_position(name, 2, (3, 5), 12) == (None, False)


# --- what all of them do -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", POSITIONS)
def test_every_position_breaks_permutation_equivariance(name):
    layer = Attention(36, 3, position="none" if name in TOKEN_POSITIONS else name, layout=LAYOUT).double()
    for parameter in layer.parameters():
        nn.init.normal_(parameter, std=0.3)
    added, _ = token_position(name, 2, (3, 5), 36)
    added = 0 if added is None else added.double() + 0.1 * torch.randn(17, 36).double() * (name == "learned")
    x, order = torch.randn(2, 17, 36, dtype=torch.float64), torch.randperm(17)
    moved = layer(x[:, order] + added, layout=LAYOUT) - layer(x + added, layout=LAYOUT)[:, order]
    if name == "none":
        torch.testing.assert_close(moved, torch.zeros_like(moved), rtol=0, atol=1e-12)
    else:
        assert moved.abs().max() > 1e-2


@pytest.mark.parametrize("name", ["relative_bias", "rope"])
def test_only_the_offset_in_the_grid_counts(name):
    position = made(name, layout=Layout(grid=(5, 7)))
    # the same query at every place and the same key at every place: what differs between pairs is their places
    q, k = (torch.randn(1, 3, 1, 12, dtype=torch.float64).expand(-1, -1, 35, -1) for _ in range(2))
    scores = scores_with(position, q, k, Layout(grid=(5, 7))).view(3, 5, 7, 5, 7)
    for down, right in ((1, 0), (0, 1), (2, 3)):
        there = scores[:, down:, right:, down:, right:]
        here = scores[:, : 5 - down, : 7 - right, : 5 - down, : 7 - right]
        torch.testing.assert_close(there, here, rtol=0, atol=1e-12)
    assert scores[:, 0, 0].flatten(1).std(dim=1).min() > 1e-2
    assert (scores[:, 0, 1, 1, 0] - scores[:, 1, 0, 0, 1]).abs().min() > 1e-6  # and so does its direction


@pytest.mark.parametrize("name", ["t5", "rope_1d", "relative_bias"])
def test_only_the_offset_in_the_sequence_counts(name):
    position = made(name, layout=Layout())
    q, k = (torch.randn(1, 3, 1, 12, dtype=torch.float64).expand(-1, -1, 41, -1) for _ in range(2))
    scores = scores_with(position, q, k, Layout())
    for step in (1, 7):
        torch.testing.assert_close(scores[..., step:, step:], scores[..., :-step, :-step], rtol=0, atol=1e-12)
    assert (scores[0, :, 0, 1] - scores[0, :, 1, 0]).abs().min() > 1e-6


@pytest.mark.parametrize("name", ["t5", "rope_1d"])
def test_a_grid_is_a_sequence_row_by_row_to_one_dimensional_positions(name):
    position = made(name)
    q, k = torch.randn(1, 3, 17, 12, dtype=torch.float64), torch.randn(1, 3, 17, 12, dtype=torch.float64)
    torch.testing.assert_close(scores_with(position, q, k, LAYOUT), scores_with(position, q, k, Layout(prefix=2)))


@pytest.mark.parametrize("name", LAYER_POSITIONS)
@pytest.mark.parametrize("first", [1, 2, 5])
def test_the_first_queries_alone_have_the_places_they_have_among_all(name, first):
    position = made(name)
    q, k = torch.randn(2, 3, 17, 12, dtype=torch.float64), torch.randn(2, 3, 17, 12, dtype=torch.float64)
    whole = scores_with(position, q, k, LAYOUT)[:, :, :first]
    torch.testing.assert_close(scores_with(position, q[:, :, :first], k, LAYOUT), whole, rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", ["t5", "rope_1d"])
def test_the_first_queries_alone_in_a_sequence(name):
    position, layout = made(name), Layout(prefix=2)
    q, k = torch.randn(2, 3, 11, 12, dtype=torch.float64), torch.randn(2, 3, 11, 12, dtype=torch.float64)
    whole = scores_with(position, q, k, layout)[:, :, :1]  # fewer queries than prefix tokens
    torch.testing.assert_close(scores_with(position, q[:, :, :1], k, layout), whole, rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", LAYER_POSITIONS)
def test_positions_inside_the_layer_equal_the_formula(name):
    layer = Attention(36, 3, position=name, layout=LAYOUT).double()
    for parameter in layer.parameters():
        nn.init.normal_(parameter, std=0.3)
    x = torch.randn(2, 17, 36, dtype=torch.float64)
    q, k, v = layer.qkv(x).view(2, 17, 9, 12).transpose(1, 2).split(3, dim=1)
    position = layer.position
    if isinstance(position, Rotary):
        out = attend(position.rotate(q, LAYOUT), position.rotate(k, LAYOUT), v, kernel="explicit")
    else:
        out = attend(q, k, v, bias=position.dense(17, 17, LAYOUT), kernel="explicit")
    expected = layer.proj(out.transpose(1, 2).reshape(2, 17, 36))
    torch.testing.assert_close(layer(x, layout=LAYOUT), expected, rtol=0, atol=1e-12)


def test_unknown_names():
    with pytest.raises(ValueError, match=r"unknown position 'spiral'; there are: learned, .*rope_1d"):
        make_layer_position("spiral", 3, 12)
    with pytest.raises(ValueError, match=r"unknown position 'spiral'; there are: learned, .*rope_1d"):
        token_position("spiral", 0, (2, 2), 8)


# --- rotary --------------------------------------------------------------------------------------------------------


def turned_by_loop(x, places, frequencies):
    """Each pair of channels as a complex number, times e^{i · place · frequency}; places (N, d / 2)."""
    out = torch.empty_like(x)
    for token in range(x.shape[-2]):
        for pair in range(x.shape[-1] // 2):
            z = torch.complex(x[..., token, 2 * pair], x[..., token, 2 * pair + 1])
            angle = places[token][pair] * frequencies[pair]
            z = z * complex(math.cos(angle), math.sin(angle))
            out[..., token, 2 * pair], out[..., token, 2 * pair + 1] = z.real, z.imag
    return out


def test_rope_is_complex_multiplication_and_leaves_prefix_tokens_alone():
    x = torch.randn(2, 3, 17, 12, dtype=torch.float64)
    frequencies = [100 ** (-2 * i / 6) for i in range(3)]
    grid = [[row] * 3 + [column] * 3 for row in range(3) for column in range(5)]
    expected = turned_by_loop(x, [[0] * 6] * 2 + grid, frequencies * 2)
    out = AxialRotary(12).rotate(x, LAYOUT)
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(out[:, :, :2], x[:, :, :2], rtol=0, atol=0)
    torch.testing.assert_close(out.norm(dim=-1), x.norm(dim=-1))


def test_rope_1d_is_complex_multiplication():
    x = torch.randn(2, 3, 11, 14, dtype=torch.float64)
    frequencies = [10000 ** (-2 * i / 14) for i in range(7)]
    expected = turned_by_loop(x, [[0] * 7] * 2 + [[n] * 7 for n in range(9)], frequencies)
    torch.testing.assert_close(SequenceRotary(14).rotate(x, Layout(prefix=2)), expected)


def test_rope_1d_equals_transformers():
    gptj = pytest.importorskip("transformers.models.gptj.modeling_gptj")
    x = torch.randn(2, 3, 19, 14)
    sin, cos = gptj.create_sinusoidal_positions(19, 14)[None].chunk(2, dim=-1)
    theirs = gptj.apply_rotary_pos_emb(x.transpose(1, 2), sin, cos).transpose(1, 2)
    torch.testing.assert_close(SequenceRotary(14).rotate(x, Layout()), theirs)


@pytest.mark.parametrize("theta", [100.0, 10000.0])
def test_rope_equals_timm(theta):
    layers = pytest.importorskip("timm.layers")
    x = torch.randn(2, 3, 35, 12)
    embedding = layers.RotaryEmbeddingCat(12, temperature=theta, in_pixels=False, feat_shape=[5, 7]).get_embed()
    theirs = layers.apply_rot_embed_cat(x, embedding)
    torch.testing.assert_close(AxialRotary(12, theta).rotate(x, Layout(grid=(5, 7))), theirs)


@pytest.mark.parametrize(("name", "width"), [("rope", 12), ("rope_1d", 14)])
def test_rotary_gradients(name, width):
    position = make_layer_position(name, 3, width)
    x = torch.randn(1, 2, 17, width, dtype=torch.float64, requires_grad=True)
    g = torch.randn_like(x)
    position.rotate(x, LAYOUT).backward(g)
    # a rotation is orthogonal: its gradient is the rotation back
    torch.testing.assert_close(position.rotate(x.grad, LAYOUT), g)
    assert torch.autograd.gradcheck(lambda t: position.rotate(t, LAYOUT), x[:, :1, :5])


@pytest.mark.parametrize("name", ROTARIES)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_rotary_in_other_precisions_is_the_rounded_rotation(name, dtype):
    position = make_layer_position(name, 3, 12)
    x = torch.randn(1, 3, 17, 12, dtype=dtype)
    out = position.rotate(x, LAYOUT)
    assert out.dtype == dtype
    torch.testing.assert_close(out, position.rotate(x.double(), LAYOUT).to(dtype))


def test_far_places_are_as_exact_as_near_ones():
    x = torch.randn(1, 1, 20011, 4)
    out = SequenceRotary(4).rotate(x, Layout())
    torch.testing.assert_close(out, SequenceRotary(4).rotate(x.double(), Layout()).float())


def test_rotary_takes_any_memory_layout():
    position = AxialRotary(12)
    plain = torch.randn(2, 3, 17, 12, dtype=torch.float64)
    expected = position.rotate(plain, LAYOUT)
    odd = torch.empty(2 * 3 * 17 * 12 + 1, dtype=torch.float64)[1:].view_as(plain).copy_(plain)
    wide = torch.empty(2, 3, 17, 13, dtype=torch.float64)[..., :12].copy_(plain)
    across = plain.transpose(2, 3).contiguous().transpose(2, 3)
    for x in (odd, wide, across, plain.transpose(1, 2).contiguous().transpose(1, 2)):
        torch.testing.assert_close(position.rotate(x, LAYOUT), expected, rtol=0, atol=1e-14)


def test_the_form_for_compilers_is_the_same():
    position = AxialRotary(12)
    compiled = torch.compile(lambda t: position.rotate(t, LAYOUT), backend="eager", fullgraph=True)
    x = torch.randn(2, 3, 17, 12, dtype=torch.float64, requires_grad=True)
    torch.testing.assert_close(compiled(x), position.rotate(x, LAYOUT))
    grads = [torch.autograd.grad(f(x).square().sum() + f(x)[..., 3].sum(), x)[0] for f in (compiled, turned_here)]
    torch.testing.assert_close(*grads)


def turned_here(x):
    return AxialRotary(12).rotate(x, LAYOUT)


def test_rotary_tables_are_kept_boundedly_and_outside_the_state():
    rotary._kept_turns.cache_clear()
    first, second = AxialRotary(12), AxialRotary(12)
    for layout in (LAYOUT, GRID, LAYOUT):
        for module in (first, second, copy.deepcopy(first)):
            module.rotate(torch.randn(1, 1, layout.length, 12), layout)
    assert rotary._kept_turns.cache_info().misses == 2  # one per layout, whatever the number of layers
    for n in range(1, 50):
        SequenceRotary(12).rotate(torch.randn(1, 1, n, 12), Layout())
    assert rotary._kept_turns.cache_info().currsize <= 32
    assert not first.state_dict()
    assert not list(first.parameters())


def test_a_table_first_made_in_inference_mode_serves_training():
    rotary._kept_turns.cache_clear()
    position = AxialRotary(12)
    with torch.inference_mode():
        position.rotate(torch.randn(1, 1, 17, 12), LAYOUT)
    x = torch.randn(1, 1, 17, 12, requires_grad=True)
    position.rotate(x, LAYOUT).square().sum().backward()
    torch.testing.assert_close(x.grad, 2 * x.detach())


def test_shapes_can_be_traced_before_and_after_a_table_is_kept():
    from torch._subclasses.fake_tensor import FakeTensorMode

    rotary._kept_turns.cache_clear()
    position, x = AxialRotary(12), torch.randn(1, 3, 17, 12)
    for _ in range(2):
        with FakeTensorMode():
            assert position.rotate(torch.randn(1, 3, 17, 12), LAYOUT).shape == x.shape
        assert position.rotate(x.to("meta"), LAYOUT).shape == x.shape
        torch.testing.assert_close(position.rotate(x, LAYOUT).norm(dim=-1), x.norm(dim=-1))


@pytest.mark.parametrize("width", [6, 13])
def test_rope_needs_a_width_that_four_divides(width):
    with pytest.raises(ValueError, match=rf"4 must divide the head width, got {width}; choose another number of heads"):
        make_layer_position("rope", 3, width, LAYOUT)


def test_rope_1d_needs_an_even_width():
    with pytest.raises(ValueError, match="2 must divide the head width, got 13"):
        make_layer_position("rope_1d", 3, 13)
    assert make_layer_position("rope_1d", 3, 14) is not None


def test_what_rotary_positions_refuse():
    with pytest.raises(ValueError, match="no grid; use 'rope_1d'"):
        AxialRotary(12).rotate(torch.randn(1, 1, 7, 12), Layout(prefix=2))
    with pytest.raises(ValueError, match=r"head width of 12, got \(1, 1, 17, 16\)"):
        AxialRotary(12).rotate(torch.randn(1, 1, 17, 16), LAYOUT)
    with pytest.raises(ValueError, match="19 tokens are not 2 prefix tokens and a grid of 3 × 5"):
        AxialRotary(12).rotate(torch.randn(1, 1, 19, 12), LAYOUT)
    with pytest.raises(ValueError, match="theta=0"):
        SequenceRotary(12, theta=0)


def test_the_two_forms_of_turning():
    x, turn = torch.randn(2, 3, 5, 14), torch.polar(torch.ones(5, 7), torch.randn(5, 7))
    expected = torch.view_as_real(torch.view_as_complex(x.view(2, 3, 5, 7, 2)) * turn).flatten(-2)
    torch.testing.assert_close(turned(x, turn), expected)


# --- relative ------------------------------------------------------------------------------------------------------


def test_t5_buckets_equal_transformers():
    t5 = pytest.importorskip("transformers.models.t5.modeling_t5")
    offsets = torch.arange(-1500, 1501)
    for buckets, far in ((32, 128), (32, 20), (8, 17), (64, 1000)):
        theirs = t5.T5Attention._relative_position_bucket(offsets, True, buckets, far)
        torch.testing.assert_close(t5_bucket(offsets, buckets, far), theirs)


def test_t5_bias_equals_transformers():
    transformers = pytest.importorskip("transformers")
    from transformers.models.t5.modeling_t5 import T5Attention

    config = transformers.T5Config(d_model=12, d_kv=4, num_heads=3, relative_attention_num_buckets=32)
    theirs, ours = T5Attention(config, has_relative_attention_bias=True), T5Bias(3)
    nn.init.normal_(theirs.relative_attention_bias.weight)
    with torch.no_grad():
        ours.table[:-3] = theirs.relative_attention_bias.weight
    torch.testing.assert_close(ours.dense(211, 211, Layout()), theirs.compute_bias(211, 211), rtol=0, atol=0)


@pytest.mark.parametrize("prefix", [0, 1])
@pytest.mark.parametrize("grid", [(3, 5), (7, 2), (1, 1)])
def test_relative_index_equals_timm(prefix, grid):
    layers = pytest.importorskip("timm.layers.pos_embed_rel")
    layout, n = Layout(prefix, grid), prefix + grid[0] * grid[1]
    position = RelativeBias(3, layout)
    size = (2 * grid[0] - 1) * (2 * grid[1] - 1) + 3 * prefix
    assert position.table.shape == (size, 3)
    i = torch.arange(n)
    index = position.index(i[:, None], i[None], layout, size)
    torch.testing.assert_close(index, layers.gen_relative_position_index(grid, class_token=prefix > 0))


def test_relative_bias_equals_timm():
    layers = pytest.importorskip("timm.layers.pos_embed_rel")
    theirs, ours = layers.RelPosBias((5, 7), 3, prefix_tokens=1), RelativeBias(3, Layout(1, (5, 7)))
    nn.init.normal_(theirs.relative_position_bias_table)
    ours.table.data.copy_(theirs.relative_position_bias_table)
    torch.testing.assert_close(ours.dense(36, 36, Layout(1, (5, 7))), theirs.get_bias(), rtol=0, atol=0)


def expected_relative(table, layout, i, j):
    """The entry of one pair, from the definition."""
    rows, columns = layout.grid
    if i < layout.prefix:
        return table[-1] if j < layout.prefix else table[-3]
    if j < layout.prefix:
        return table[-2]
    (ri, ci), (rj, cj) = divmod(i - layout.prefix, columns), divmod(j - layout.prefix, columns)
    return table[(ri - rj + rows - 1) * (2 * columns - 1) + ci - cj + columns - 1]


def test_relative_bias_equals_a_loop_forward_and_backward():
    position = made("relative_bias")
    dense = position.dense(17, 17, LAYOUT)
    loop = torch.stack(
        [torch.stack([expected_relative(position.table, LAYOUT, i, j) for j in range(17)]) for i in range(17)]
    )
    loop = loop.permute(2, 0, 1)[None]
    torch.testing.assert_close(dense, loop, rtol=0, atol=0)
    g = torch.randn_like(dense)
    torch.testing.assert_close(
        torch.autograd.grad(dense, position.table, g)[0], torch.autograd.grad(loop, position.table, g)[0]
    )


def test_relative_bias_of_a_sequence_stops_growing_at_its_distance():
    position = RelativeBias(3, Layout(prefix=1), max_distance=5)
    assert position.table.shape == (11 + 3, 3)
    bias = position.dense(1 + 17, 1 + 17, Layout(prefix=1))[0, :, 1:, 1:]
    for offset in range(-16, 17):
        entry = position.table[min(max(-offset, -5), 5) + 5]
        diagonal = bias.diagonal(offset, dim1=1, dim2=2)
        torch.testing.assert_close(diagonal, entry[:, None].expand_as(diagonal), rtol=0, atol=0)


def test_t5_has_entries_of_its_own_for_prefix_tokens():
    position, layout = made("t5"), Layout(prefix=2)
    bias = position.dense(13, 13, layout)[0]
    torch.testing.assert_close(bias[:, 2:, 2:], position.dense(11, 11, Layout())[0], rtol=0, atol=0)
    for block, entry in ((bias[:, :2, 2:], -3), (bias[:, 2:, :2], -2), (bias[:, :2, :2], -1)):
        torch.testing.assert_close(block, position.table[entry][:, None, None].expand_as(block), rtol=0, atol=0)


@settings(max_examples=40, deadline=None)
@given(
    name=st.sampled_from(TABLES),
    prefix=st.integers(0, 3),
    grid=st.none() | st.tuples(st.integers(1, 7), st.integers(1, 7)),
    data=st.data(),
)
def test_at_equals_dense_at_any_pairs(name, prefix, grid, data):
    layout = Layout(prefix, grid)
    n = layout.length or prefix + data.draw(st.integers(1, 150))
    position = made(name, heads=2, layout=layout)
    shape = data.draw(st.sampled_from([(5,), (2, 3), (2, 3, 1)]))
    i = torch.randint(0, n, shape)
    j = torch.randint(0, n, (7,) if shape[-1] == 1 else shape)
    at, dense = position.at(i, j, n, n, layout), position.dense(n, n, layout)[0]
    i, j = torch.broadcast_tensors(i, j)
    torch.testing.assert_close(at, dense[:, i, j], rtol=0, atol=0)
    g = torch.randn_like(at)
    torch.testing.assert_close(
        torch.autograd.grad(at, position.table, g)[0], torch.autograd.grad(dense[:, i, j], position.table, g)[0]
    )


@pytest.mark.parametrize("name", TABLES)
def test_relative_gradients(name):
    position = made(name, heads=2, layout=GRID)
    i, j = torch.randint(0, 15, (7, 1)), torch.randint(0, 15, (11,))

    def bias(table):
        return torch.func.functional_call(_At(position), {"position.table": table}, (i, j))

    assert torch.autograd.gradcheck(bias, position.table)


class _At(nn.Module):
    def __init__(self, position):
        super().__init__()
        self.position = position

    def forward(self, i, j):
        return self.position.at(i, j, 15, 15, GRID)


@pytest.mark.parametrize("name", TABLES)
def test_gradients_of_many_pairs_are_summed_in_float32(name):
    layout = Layout(grid=(23, 29))
    position = make_layer_position(name, 2, 12, layout).bfloat16()
    bias = position.dense(667, 667, layout)
    assert bias.dtype == torch.float32
    bias.sum().backward()
    assert position.table.grad.float().sum() == pytest.approx(2 * 667**2, rel=1e-2)  # bfloat16 would stop at 256


@pytest.mark.parametrize("prefix", [0, 2])
def test_another_grid_resamples_the_relative_table(prefix):
    old, new = (3, 5), (7, 6)
    position = made("relative_bias", layout=Layout(prefix, old))
    image = position.table[: 5 * 9].T.reshape(1, 3, 5, 9)
    image = F.interpolate(image, size=(13, 11), mode="bicubic", align_corners=False)
    fresh = RelativeBias(3, Layout(prefix, new)).double()
    fresh.table.data.copy_(torch.cat([image.flatten(2)[0].T, position.table[5 * 9 :]]))
    n = prefix + 42
    torch.testing.assert_close(position.dense(n, n, Layout(prefix, new)), fresh.dense(n, n, Layout(prefix, new)))
    position.dense(n, n, Layout(prefix, new)).sum().backward()
    torch.testing.assert_close(position.table.grad.sum(), torch.tensor(3.0 * n * n, dtype=torch.float64))


def test_resampled_offsets_equal_timm():
    layers = pytest.importorskip("timm.layers.pos_embed_rel")
    table = torch.randn(9 * 9 + 3, 2)
    theirs = layers.resize_rel_pos_bias_table_simple(table, (7, 7), (13 * 13 + 3, 2))
    torch.testing.assert_close(resample_offsets(table, (5, 5), (7, 7)), theirs)


def test_what_relative_positions_refuse():
    with pytest.raises(ValueError, match=r"pass layout=Layout\(prefix=…, grid=\(rows, columns\)\)"):
        make_layer_position("relative_bias", 3, 12)
    with pytest.raises(ValueError, match=r"built for a grid \(3, 5\) without prefix tokens, and cannot serve"):
        RelativeBias(3, GRID).dense(17, 17, LAYOUT)
    with pytest.raises(ValueError, match="build the layer with the layout it will meet"):
        RelativeBias(3, GRID).dense(15, 15, Layout())
    with pytest.raises(ValueError, match="built for a sequence"):
        RelativeBias(3, Layout()).dense(15, 15, GRID)
    with pytest.raises(ValueError, match="13 tokens are not 2 prefix tokens and a grid of 3 × 5"):
        RelativeBias(3, LAYOUT).dense(13, 13, LAYOUT)
    with pytest.raises(ValueError, match="19 queries are more than its 17 tokens"):
        T5Bias(3).dense(19, 17, LAYOUT)
    with pytest.raises(ValueError, match="num_buckets=10 must be a multiple of 4"):
        T5Bias(3, num_buckets=10)
    with pytest.raises(ValueError, match="max_distance=8 must exceed"):
        T5Bias(3, max_distance=8)
    with pytest.raises(ValueError, match="max_distance=0"):
        RelativeBias(3, Layout(), max_distance=0)


@pytest.mark.parametrize("name", BIASES)
def test_relative_weights_sum_to_one_and_follow_the_table(name):
    position = made(name)
    q = torch.randn(2, 3, 17, 12, dtype=torch.float64)
    weights = attention_weights(q, q, bias=position.dense(17, 17, LAYOUT))
    torch.testing.assert_close(weights.sum(-1), torch.ones(2, 3, 17, dtype=torch.float64))
    nobody = attention_weights(torch.zeros_like(q), q, bias=position.dense(17, 17, LAYOUT))
    torch.testing.assert_close(nobody, position.dense(17, 17, LAYOUT).softmax(-1).expand(2, -1, -1, -1))


# --- added to the tokens -------------------------------------------------------------------------------------------


def test_token_positions():
    table, learn = token_position("sinusoidal_1d", 2, (3, 5), 14)
    assert not learn
    torch.testing.assert_close(table[0, :2], torch.zeros(2, 14))
    torch.testing.assert_close(table[0, 2:], sinusoidal_1d(15, 14), rtol=0, atol=0)
    table, learn = token_position("sinusoidal", 2, (3, 5), 12)
    assert not learn
    torch.testing.assert_close(table[0, 2:], sinusoidal_2d(3, 5, 12), rtol=0, atol=0)
    table, learn = token_position("learned", 2, (3, 5), 14)
    assert learn
    assert table.shape == (1, 17, 14)


@pytest.mark.parametrize("kind", POSITIONS)
def test_positions_of_a_model_at_another_grid(kind):
    model = GridPositions()
    model.init_positions(kind, 2, (3, 5), 12)
    there = model.position_at((7, 4))
    if kind == "learned":
        image = model.pos_embed[:, 2:].view(1, 3, 5, 12).permute(0, 3, 1, 2)
        image = F.interpolate(image, size=(7, 4), mode="bicubic", antialias=True).permute(0, 2, 3, 1).flatten(1, 2)
        torch.testing.assert_close(there, torch.cat([model.pos_embed[:, :2], image], dim=1))
        torch.testing.assert_close(there, resample_grid(model.pos_embed, (3, 5), (7, 4), 2))
        assert list(model.state_dict()) == ["pos_embed"]
        return
    assert not model.state_dict()
    expected, _ = token_position(kind, 2, (7, 4), 12)
    assert (there is None) == (expected is None)
    if there is not None:
        torch.testing.assert_close(there, expected, rtol=0, atol=0)
