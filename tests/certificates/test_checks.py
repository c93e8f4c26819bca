"""NaN is named where it enters attention, inside ``checking()`` and nowhere else."""

from __future__ import annotations

import math

import pytest
import torch

from vision_attn.attention import Attention, attend
from vision_attn.attention.checks import checking, inspect


def operands() -> dict[str, torch.Tensor]:
    return {
        "q": torch.randn(2, 6, 5, 7),
        "k": torch.randn(2, 3, 11, 7),
        "v": torch.randn(2, 3, 11, 13),
        "bias": torch.randn(2, 6, 5, 11),
    }


@pytest.mark.parametrize("kernel", ["auto", "explicit", "sdpa"])
@pytest.mark.parametrize(
    ("name", "shape", "place"),
    [
        ("q", "2 × 6 × 5 × 7", "batch 1, head 2, token 3, channel 4"),
        ("k", "2 × 3 × 11 × 7", "batch 1, head 2, token 3, channel 4"),
        ("v", "2 × 3 × 11 × 13", "batch 1, head 2, token 3, channel 4"),
        ("bias", "2 × 6 × 5 × 11", "batch 1, head 2, query 3, key 4"),
    ],
)
def test_names_operand_and_place(name, shape, place, kernel):
    given = operands()
    given[name][1, 2, 3, 4] = math.nan
    assert attend(**given, kernel=kernel).isnan().any()  # without the block it spreads
    with checking(), pytest.raises(ValueError, match=rf"^{name} \({shape}\) holds 1 NaN, the first at {place}"):
        attend(**given, kernel=kernel)


def test_fine_inputs_pass_and_results_are_the_same():
    given = operands()
    with checking():
        inside = attend(**given)
    torch.testing.assert_close(inside, attend(**given), rtol=0, atol=0)


def test_a_bias_may_hide_pairs_and_nothing_else_may_be_infinite():
    given = operands()
    given["bias"][..., 3] = -math.inf
    with checking():
        assert attend(**given).isfinite().all()
        given["bias"][0, 0, 0, 0] = math.inf
        with pytest.raises(ValueError, match=r"bias .* holds 1 infinity, the first at batch 0, head 0, query 0, key 0"):
            attend(**given)
        for name in ("q", "k", "v"):
            bad = operands()
            bad[name][0, 1, 2] = -math.inf
            with pytest.raises(ValueError, match=rf"{name} .* holds {bad[name].shape[-1]} infinity"):
                attend(**bad)


def test_biases_of_fewer_dimensions():
    given = operands()
    given["bias"] = torch.zeros(5, 11)
    given["bias"][2, 7] = math.nan
    with checking(), pytest.raises(ValueError, match=r"bias .* at query 2, key 7"):
        attend(**given)


def test_a_layer_says_it_too_and_the_block_ends():
    layer, x = Attention(14, 2), torch.randn(2, 5, 14)
    x[1, 3, 0] = math.nan
    with checking():
        with checking():
            pass
        with pytest.raises(ValueError, match=r"q .* holds 14 NaN, the first at batch 1, head 0, token 3, channel 0"):
            layer(x)
    assert layer(x).isnan().any()
    try:
        with checking():
            raise KeyError
    except KeyError:
        pass
    inspect(q=x)


def test_what_has_no_numbers_is_left_alone():
    with checking():
        inspect(q=None, k=torch.tensor([True]), v=torch.empty(3, device="meta"), bias=torch.empty(0, 3))


def test_half_precision_overflow_is_told():
    given = operands()
    with checking(), pytest.raises(ValueError, match=r"k .* infinity"):
        attend(*(given[name].half() * scale for name, scale in (("q", 1), ("k", 1e6), ("v", 1))))
