"""Normalizers: values, gradients, masks, extremes, and what bad scores are told."""

from __future__ import annotations

import itertools
import math
import threading

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.testing import assert_close

from vision_attn.attention.normalizers import (
    FUSED,
    NORMALIZERS,
    SUM_TO_ONE,
    LinearChain,
    Sampled,
    bernoulli,
    collect_log_probs,
    log_weights,
    make_normalizer,
    resolve_normalizer,
)

NINF = float("-inf")


def randn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def masked(scores: torch.Tensor, seed: int = 1) -> torch.Tensor:
    """About a third of the pairs closed, never a whole row."""
    closed = torch.rand(scores.shape, generator=torch.Generator().manual_seed(seed)) < 0.35
    closed[..., 0] &= ~closed.all(-1)
    return scores.masked_fill(closed, NINF)


def built(name: str, heads: int, seed: int = 2):
    """The normalizer of a layer, its parameters random."""
    normalizer = make_normalizer(name, heads)
    if isinstance(normalizer, torch.nn.Module):
        for p in normalizer.double().parameters():
            p.data = randn(*p.shape, seed=seed)
    return normalizer


def one_hot(index: torch.Tensor, keys: int) -> torch.Tensor:
    return torch.nn.functional.one_hot(index, keys).double()


# -- all of them ------------------------------------------------------------------------------------------------------


def test_the_names():
    names = ["softmax", "sum", "hard", "straight_through", "sampled", "bernoulli", "linear_chain"]
    assert list(NORMALIZERS) == names
    assert set(names) - {"bernoulli", "linear_chain"} == SUM_TO_ONE
    assert {"softmax"} == FUSED
    for name in names:
        assert make_normalizer(name, 3).name == name


@pytest.mark.parametrize("name", NORMALIZERS)
@given(
    seed=st.integers(0, 10**6), shape=st.sampled_from([(1, 1, 1, 1), (2, 3, 5, 7), (3, 2, 1, 13)]), mask=st.booleans()
)
@settings(max_examples=15, deadline=None)
def test_weights_are_shares_or_probabilities(name, seed, shape, mask):
    scores = randn(*shape, seed=seed)
    scores = scores.abs() + 0.1 if name == "sum" else scores
    scores = masked(scores, seed) if mask else scores
    weights = built(name, shape[1])(scores)
    assert weights.shape == scores.shape
    assert weights.dtype == scores.dtype
    assert ((weights >= 0) & (weights <= 1)).all()
    assert (weights[scores == NINF] == 0).all()
    if name in SUM_TO_ONE:
        assert_close(weights.sum(-1), torch.ones(shape[:3], dtype=torch.float64))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("name", NORMALIZERS)
def test_scores_of_ten_thousand_stay_finite(name, dtype):
    scores = torch.tensor([[1e4, -1e4, 0.0, 9984.0], [-1e4, -1e4, -1e4, NINF], [NINF, 1e4, 1e4, 1e4]], dtype=dtype)
    scores = scores.abs() if name == "sum" else scores
    scores = scores.masked_fill(scores == math.inf, NINF)[None, None].requires_grad_()
    normalizer = make_normalizer(name, 1)
    if name == "linear_chain":
        torch.nn.init.constant_(normalizer.pairwise, -1.3)
    weights = normalizer(scores)
    assert weights.dtype == dtype
    assert weights.isfinite().all()
    if weights.requires_grad:
        (weights.float() * randn(4, dtype=torch.float32)).sum().backward()
        assert scores.grad.isfinite().all()
    assert log_weights(scores)[scores != NINF].isfinite().all()


@pytest.mark.parametrize("name", ["softmax", "sum", "bernoulli", "linear_chain"])
def test_sixteen_bits_are_rounded_once(name):
    scores = masked(randn(2, 3, 5, 7).abs() + 0.1).to(torch.bfloat16)
    normalizer = make_normalizer(name, 3)
    assert_close(normalizer(scores), normalizer(scores.float()).bfloat16(), rtol=0, atol=0)


@pytest.mark.parametrize("name", ["softmax", "sum", "bernoulli", "linear_chain"])
def test_gradients(name):
    scores = masked(randn(2, 3, 2, 5).abs() + 0.1)
    free = scores != NINF
    normalizer = built(name, 3)

    def weights(values: torch.Tensor) -> torch.Tensor:
        return normalizer(torch.full_like(scores, NINF).masked_scatter(free, values))

    assert torch.autograd.gradcheck(weights, scores[free].clone().requires_grad_())


@pytest.mark.parametrize("name", NORMALIZERS)
def test_shapes_are_worked_out_on_the_meta_device(name):
    normalizer = make_normalizer(name, 3)
    if isinstance(normalizer, torch.nn.Module):
        normalizer.to("meta")
    assert normalizer(torch.empty(2, 3, 5, 7, device="meta")).shape == (2, 3, 5, 7)


def test_unknown_and_parametrised_names():
    with pytest.raises(ValueError, match="unknown normalizer 'softmin'; there are: softmax, sum"):
        resolve_normalizer("softmin")
    with pytest.raises(ValueError, match="unknown normalizer 'softmin'"):
        make_normalizer("softmin", 3)
    with pytest.raises(ValueError, match=r"has parameters of its own.*make_normalizer\('linear_chain', num_heads\)"):
        resolve_normalizer("linear_chain")
    module = make_normalizer("linear_chain", 3)
    assert resolve_normalizer(module) is module
    assert make_normalizer(module, 3) is module
    with pytest.raises(ValueError, match=r"built for 3 heads, but the scores are \(2, 5, 7, 11\)"):
        module(torch.zeros(2, 5, 7, 11))


# -- softmax and sum --------------------------------------------------------------------------------------------------


def test_log_weights_are_the_logarithms_and_do_not_underflow():
    scores = masked(randn(2, 3, 5, 7))
    assert_close(log_weights(scores).exp(), NORMALIZERS["softmax"](scores))
    far = torch.tensor([0.0, -1e4], dtype=torch.float16)
    assert_close(log_weights(far), torch.tensor([0.0, -1e4]))
    assert NORMALIZERS["softmax"](far)[1] == 0


def test_sum_of_the_documents_example():
    weights = NORMALIZERS["sum"](torch.tensor([1.0, 0.71, 0.5, NINF]))
    assert_close(weights, torch.tensor([0.452, 0.321, 0.226, 0.0]), rtol=0, atol=5e-4)


def test_sum_says_which_value_it_cannot_use():
    with pytest.raises(ValueError, match="not negative, but one is -1; use normalizer='softmax'"):
        NORMALIZERS["sum"](torch.tensor([[1.0, 2.0], [1.0, -1.0]]))
    with pytest.raises(ValueError, match="positive sum, but one sums to 0; use normalizer='softmax'"):
        NORMALIZERS["sum"](torch.tensor([[1.0, 2.0], [0.0, NINF]]))
    with pytest.raises(ValueError, match="positive sum, but one sums to nan"):
        NORMALIZERS["sum"](torch.tensor([1.0, math.nan]))
    assert_close(NORMALIZERS["softmax"](torch.tensor([1.0, -1.0])).sum(), torch.tensor(1.0))


# -- hard attention ---------------------------------------------------------------------------------------------------


def test_hard_takes_the_highest_score_and_gives_no_gradient():
    scores = masked(randn(2, 3, 5, 7)).requires_grad_()
    weights = NORMALIZERS["hard"](scores)
    assert_close(weights, one_hot(scores.argmax(-1), 7), rtol=0, atol=0)
    assert not weights.requires_grad
    assert_close(NORMALIZERS["hard"](torch.tensor([1.0, 3.0, 3.0])), torch.tensor([0.0, 1.0, 0.0]), rtol=0, atol=0)


def test_straight_through_is_hard_forward_and_soft_backward():
    scores, values = masked(randn(2, 3, 5, 7)).requires_grad_(), randn(2, 3, 5, 7, seed=3)
    weights = NORMALIZERS["straight_through"](scores)
    assert_close(weights, NORMALIZERS["hard"](scores), rtol=0, atol=0)
    (got,) = torch.autograd.grad((weights * values).sum(), scores)
    (soft,) = torch.autograd.grad((scores.softmax(-1) * values).sum(), scores)
    assert_close(got, soft)


def test_samples_follow_the_softmax():
    torch.manual_seed(5)
    scores = torch.tensor([0.3, -1.1, 1.7, NINF, 0.0])
    draws = 20_000
    counts = NORMALIZERS["sampled"](scores.expand(1, 1, draws, 5)).sum((0, 1, 2)).double()
    expected = scores.double().softmax(0) * draws
    assert counts[3] == 0
    open_ = scores != NINF
    chi2 = ((counts - expected)[open_] ** 2 / expected[open_]).sum()
    assert chi2 < 16.27  # 3 degrees of freedom: exceeded once in a thousand seeds


def test_a_layer_draws_in_training_and_takes_the_most_probable_key_in_evaluation():
    torch.manual_seed(0)
    scores = randn(2, 3, 5, 7)
    layer = make_normalizer("sampled", 3)
    assert isinstance(layer, Sampled)
    assert len({tuple(layer(scores).argmax(-1).flatten().tolist()) for _ in range(5)}) > 1
    layer.eval()
    assert_close(layer(scores), NORMALIZERS["hard"](scores), rtol=0, atol=0)


def test_log_probabilities_are_those_of_the_draws():
    scores = [masked(randn(2, 3, 5, 7, seed=i)).requires_grad_() for i in range(2)]
    with collect_log_probs() as draws:
        drawn = [NORMALIZERS["sampled"](s) for s in scores]
    assert [d.shape for d in draws] == [(2, 3, 5)] * 2
    for s, d, w in zip(scores, draws, drawn, strict=True):
        assert not w.requires_grad
        assert_close(d, (s.log_softmax(-1).masked_fill(w == 0, 0)).sum(-1))
        (grad,) = torch.autograd.grad(d.sum(), s)
        assert_close(grad, w - s.softmax(-1))
    NORMALIZERS["sampled"](scores[0])
    assert len(draws) == 2  # nothing outside the block


def test_blocks_nest_and_threads_do_not_mix():
    scores, elsewhere = randn(2, 3, 5, 7), []

    def other() -> None:
        NORMALIZERS["sampled"](scores)  # no block of its own
        with collect_log_probs() as own:
            NORMALIZERS["sampled"](scores)
        elsewhere.append(len(own))

    with collect_log_probs() as outer:
        with collect_log_probs() as inner:
            NORMALIZERS["sampled"](scores)
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
        with pytest.raises(ZeroDivisionError), collect_log_probs():
            raise ZeroDivisionError
        NORMALIZERS["sampled"](scores)
    assert (len(outer), len(inner), elsewhere) == (1, 1, [1])


# -- structured attention ---------------------------------------------------------------------------------------------


def test_bernoulli_is_the_logistic_function_with_a_prior():
    scores = masked(randn(2, 3, 5, 7))
    count = (scores != NINF).sum(-1, keepdim=True)
    assert_close(bernoulli(scores), torch.sigmoid(scores - count.double().log()))
    for keys in (1, 17, 4001):
        mass = bernoulli(torch.zeros(1, 1, 1, keys, dtype=torch.float64)).sum()
        assert_close(mass, torch.tensor(keys / (keys + 1), dtype=torch.float64))


def enumerated(scores: torch.Tensor, pairwise: torch.Tensor) -> torch.Tensor:
    """Marginals by going through all 2^M choices of keys."""
    keys = scores.shape[-1]
    free = scores != NINF
    unary = scores.masked_fill(~free, 0) - free.sum(-1, keepdim=True).double().log()
    energies, choices = [], []
    for choice in itertools.product([0.0, 1.0], repeat=keys):
        z = torch.tensor(choice, dtype=torch.float64)
        energy = (unary * z).sum(-1) + pairwise[:, None] * (z[1:] * z[:-1]).sum()
        energies.append(energy.masked_fill((~free & (z == 1)).any(-1), NINF))
        choices.append(z)
    return torch.stack(energies, -1).softmax(-1) @ torch.stack(choices)


@pytest.mark.parametrize("mask", [False, True])
@pytest.mark.parametrize("keys", [1, 2, 7])
def test_chain_marginals_equal_enumeration_forward_and_backward(keys, mask):
    scores = 2 * randn(2, 3, 5, keys)
    scores = (masked(scores) if mask else scores).requires_grad_()
    chain = built("linear_chain", 3)
    weights, expected = chain(scores), enumerated(scores, chain.pairwise)
    assert_close(weights, expected, rtol=1e-11, atol=1e-12)
    values = randn(2, 3, 5, keys, seed=4)
    wanted = [scores, chain.pairwise]
    ours = torch.autograd.grad((weights * values).sum(), wanted)
    theirs = torch.autograd.grad((expected * values).sum(), wanted)
    assert_close(ours, theirs, rtol=1e-9, atol=1e-11)


def test_chain_starts_as_bernoulli():
    scores = masked(randn(2, 3, 5, 67))
    assert_close(LinearChain(3)(scores), bernoulli(scores))


def test_chain_at_length_and_with_strong_potentials():
    """Float32 follows float64 through 997 keys, scores of some hundreds and potentials up to 20."""
    scores = masked(100 * randn(2, 3, 2, 997))
    chain = LinearChain(3).double()
    chain.pairwise.data = torch.tensor([20.0, -20.0, 3.0], dtype=torch.float64)
    expected = chain(scores)
    assert expected.isfinite().all()
    assert_close(chain.float()(scores.float()).double(), expected, rtol=1e-3, atol=1e-4)


def test_padding_does_not_reach_the_chain():
    scores = randn(2, 3, 5, 7)
    chain = built("linear_chain", 3)
    padded = torch.nn.functional.pad(scores, (2, 4), value=NINF)
    assert_close(chain(padded)[..., 2:9], chain(scores))
