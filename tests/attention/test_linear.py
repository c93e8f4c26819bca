"""Linformer and Performer: exact where they should be, close where they promise it, and cheap."""

from __future__ import annotations

import copy
import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from vision_attn.attention import Attention, attend, causal_mask
from vision_attn.attention.layout import Layout
from vision_attn.attention.linear import Linformer, Performer, orthogonal_features

B, G, GROUP, N, M, D, E = 2, 3, 2, 13, 17, 7, 5
H = G * GROUP
PLAIN = Layout()


def inputs(sizes=(B, H, G, N, M, D, E), dtype=torch.float64) -> list[Tensor]:
    b, h, g, n, m, d, e = sizes
    return [torch.randn(s, dtype=dtype).requires_grad_() for s in ((b, h, n, d), (b, g, m, d), (b, g, m, e))]


def run(pattern, q, k, v, mask=None, layout=PLAIN, **options) -> Tensor:
    return attend(q, k, v, pattern=pattern, mask=mask, layout=layout, **options)


# Linformer


def linformer(rank: int = 11, length: int = M, **options) -> Linformer:
    return Linformer(G, length, rank, **options).double()


@pytest.mark.parametrize(("share_kv", "per_head"), list(itertools.product([False, True], repeat=2)))
def test_linformer_with_the_identity_is_exact(share_kv, per_head):
    """MECHANISMS 35."""
    model = linformer(M, share_kv=share_kv, per_head=per_head)
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.eye(M))
    leaves = inputs()
    results = []
    for pattern in (model, None):
        out = run(pattern, *leaves)
        results.append((out, *torch.autograd.grad(out.sin().sum(), leaves)))
    torch.testing.assert_close(*results)


@pytest.mark.parametrize(("share_kv", "per_head", "sliced"), list(itertools.product([False, True], repeat=3)))
def test_linformer_equals_its_formula(share_kv, per_head, sliced):
    torch.manual_seed(0)
    model = linformer(share_kv=share_kv, per_head=per_head)
    assert len(list(model.parameters())) == 2 - share_kv
    q, k, v = leaves = inputs()
    if sliced:  # heads that are slices of tokens, as a projection leaves them
        k, v = (t.transpose(1, 2).contiguous().transpose(1, 2) for t in (k, v))
    mask = torch.rand(B, 1, 1, M) > 0.3
    first = model.key_projection
    second = first if share_kv else model.value_projection
    short_k, short_v = first @ (k * mask.transpose(2, 3)), second @ (v * mask.transpose(2, 3))
    weights = (q @ short_k.repeat_interleave(GROUP, 1).transpose(2, 3) * D**-0.5).softmax(-1)
    expected = weights @ short_v.repeat_interleave(GROUP, 1)
    out = run(model, q, k, v, mask)
    torch.testing.assert_close(out, expected)
    leaves = [*leaves, *model.parameters()]
    for got, wanted in zip(
        torch.autograd.grad(out.sin().sum(), leaves), torch.autograd.grad(expected.sin().sum(), leaves), strict=True
    ):
        torch.testing.assert_close(got, wanted)
    implied = model.implied_weights(q, k, D**-0.5, mask, PLAIN)
    assert implied.shape == (B, H, N, M)
    torch.testing.assert_close(implied @ v.repeat_interleave(GROUP, 1), out)


@pytest.mark.parametrize("make", [linformer, lambda: Performer(D, 19).double()])
def test_hidden_keys_change_nothing(make):
    pattern = make()
    q, k, v = inputs()
    mask = torch.arange(M).lt(M - 4).expand(B, 1, 1, M).clone()
    mask[1] = False
    out = run(pattern, q, k, v, mask)
    changed_k, changed_v = k.detach().clone(), v.detach().clone()
    changed_k[0, :, M - 4 :], changed_v[0, :, M - 4 :] = 1e3, -1e3
    changed_k[1], changed_v[1] = 9, 9
    torch.testing.assert_close(run(pattern, q, changed_k, changed_v, mask), out, rtol=0, atol=0)
    assert not out[1].any()
    grads = torch.autograd.grad(out.sum(), (q, k, v))
    assert all(g.isfinite().all() for g in grads)
    assert not any(g[1].any() for g in grads)
    assert not any(g[0, :, M - 4 :].any() for g in grads[1:])
    assert not pattern.implied_weights(q, k, 1.0, mask, PLAIN)[:, :, :, M - 4 :].any()


def test_linformer_at_another_length_is_interpolated():
    torch.manual_seed(0)
    prefix, old, new = 2, 8, 16
    model = Linformer(1, prefix + old, 3)
    matrix = model._stretched(model.key_projection, prefix + new, Layout(prefix))
    torch.testing.assert_close(matrix[:, :, :prefix], model.key_projection[:, :, :prefix])
    a = model.key_projection[:, :, prefix:]
    # Twice as many tokens: each has its old one's value mixed with a quarter of the neighbour's, and half the weight.
    even = torch.cat([a[..., :1], 0.75 * a[..., 1:] + 0.25 * a[..., :-1]], -1) / 2
    odd = torch.cat([0.75 * a[..., :-1] + 0.25 * a[..., 1:], a[..., -1:]], -1) / 2
    torch.testing.assert_close(matrix[:, :, prefix:], torch.stack([even, odd], -1).flatten(-2))
    # A constant sequence has the same sums at every length.
    torch.testing.assert_close(matrix[:, :, prefix:].sum(-1), a.sum(-1))
    assert model._stretched(model.key_projection, prefix + old, Layout(prefix)) is model.key_projection


def test_linformer_on_a_grid_is_interpolated_along_rows_and_columns():
    """A matrix that depends on the column alone does so at another size too."""
    old, new = Layout(1, (4, 6)), Layout(1, (8, 12))
    model = Linformer(1, 25, 2, layout=old)
    with torch.no_grad():
        model.key_projection[:, :, 1:] = torch.arange(6.0).repeat(4)
    rows = model._stretched(model.key_projection, new.length, new)[:, :, 1:].unflatten(2, new.grid)
    torch.testing.assert_close(rows, rows[:, :, :1].expand_as(rows))
    assert (rows.diff(dim=-1) >= 0).all()


def test_linformer_learns_at_every_length_and_in_cross_attention():
    model, layout = linformer(length=1 + 4 * 4, layout=Layout(1, (4, 4))), Layout(1, (5, 5))
    q, k, v = inputs((B, H, G, 26, 26, D, E))
    run(model, q, k, v, layout=layout).sum().backward()
    assert all(p.grad.isfinite().all() and p.grad.any() for p in model.parameters())
    q, k, v = inputs((B, H, G, 26, 12, D, E))
    assert run(model, q, k, v, layout=layout).isfinite().all()


def test_linformer_starts_with_the_variance_of_its_tokens():
    torch.manual_seed(0)
    k, _ = Linformer(1, 400, 50).project(torch.randn(3, 1, 400, 64), torch.randn(3, 1, 400, 64), None, PLAIN)
    torch.testing.assert_close(k.std(), torch.tensor(1.0), rtol=0.1, atol=0)


@pytest.mark.parametrize(
    ("build", "match"),
    [
        (lambda: Linformer(1, 9), "linformer needs rank="),
        (lambda: Linformer(1, 9, 10), "rank=10 is more than the 9 tokens; use at most 9"),
        (lambda: Linformer(1, 9, 0), "rank=0 must be a whole number, 1 or more"),
        (lambda: Linformer(1, 9, 2, layout=Layout(1, (3, 3))), "9 tokens are not 1 prefix tokens and a grid of 3 × 3"),
        (lambda: Performer(4, 0), "features=0 must be a whole number, 1 or more"),
        (lambda: Performer(4, redraw=-1), "redraw=-1 must be a whole number, 0 or more"),
        (lambda: Performer(4, 2.5), "features=2.5 must be a whole number"),
    ],
)
def test_bad_parameters(build, match):
    with pytest.raises(ValueError, match=match):
        build()


def test_bad_sequences():
    with pytest.raises(ValueError, match="rank=11 is more than the 5 keys; use at most 5, or pattern='full'"):
        run(linformer(), *inputs((B, H, G, 5, 5, D, E)))
    with pytest.raises(ValueError, match="built for 17 keys and cannot be stretched to 18: 17 of them are prefix"):
        run(linformer(), *inputs((B, H, G, 18, 18, D, E)), layout=Layout(17))
    for pattern in (linformer(), Performer(D).double()):
        with pytest.raises(ValueError, match="17 tokens are not 0 prefix tokens and a grid of 3 × 5 = 15"):
            run(pattern, *inputs((B, H, G, M, M, D, E)), layout=Layout(0, (3, 5)))
    with pytest.raises(ValueError, match=r"built for a head width of 8, got q \(2, 6, 13, 7\)"):
        run(Performer(8).double(), *inputs())


@pytest.mark.parametrize("pattern", ["linformer", "performer"])
def test_masks_and_biases_of_pairs_are_refused(pattern):
    module = linformer() if pattern == "linformer" else Performer(D, 5).double()
    q, k, v = inputs()
    with pytest.raises(ValueError, match=f"{pattern} mixes the keys before any query sees them.*pattern='window'"):
        run(module, q, k, v, causal_mask(N, M))
    with pytest.raises(ValueError, match=rf"{pattern} never forms a pair.*bias has no place.*pattern='window'"):
        run(module, q, k, v, bias=torch.zeros(1, 1, N, M, dtype=torch.float64))
    mask, implied = causal_mask(N, M)[None, None], module.implied_weights
    with pytest.raises(ValueError, match=rf"{pattern} mixes the keys.*\(B, 1, 1, 17\).*pattern='window'"):
        implied(q, k, 1.0, mask, PLAIN)


# Performer


def exact(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    return attend(q * scale, k, v, score="dot", kernel="explicit")


def test_performer_equals_its_formula():
    torch.manual_seed(0)
    model = Performer(D, 19).double()
    q, k, v = leaves = inputs()
    mask = torch.rand(B, 1, 1, M) > 0.3
    scale, omega = 0.6, model.projection
    phi_q = (scale**0.5 * q @ omega.T - scale * q.square().sum(-1, keepdim=True) / 2).exp()
    phi_k = (scale**0.5 * k @ omega.T - scale * k.square().sum(-1, keepdim=True) / 2).exp() * mask.transpose(2, 3)
    products = phi_q @ phi_k.repeat_interleave(GROUP, 1).transpose(2, 3)
    weights = products / products.sum(-1, keepdim=True)
    expected = weights @ v.repeat_interleave(GROUP, 1)
    out = model(q, k, v, scale, mask)
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(model.implied_weights(q, k, scale, mask), weights)
    for got, wanted in zip(
        torch.autograd.grad(out.sin().sum(), leaves), torch.autograd.grad(expected.sin().sum(), leaves), strict=True
    ):
        torch.testing.assert_close(got, wanted)


def test_performer_takes_negative_and_zero_scales():
    torch.manual_seed(0)
    q, k, v = inputs((1, 1, 1, N, M, D, E))
    model = Performer(D, 7).double()
    torch.testing.assert_close(model(q, k, v, -0.5, None), model(-q, k, v, 0.5, None))
    torch.testing.assert_close(model(q, k, v, 0.0, None), v.mean(2, keepdim=True).expand(1, 1, N, E))


@pytest.mark.parametrize(("norm", "rate"), [(0.5, 0.35), (1.0, 0.8)])
def test_performers_error_falls_with_the_features(norm, rate):
    """MECHANISMS 35: sixteen times the features, about a quarter of the error. Less gain for sharper attention."""
    torch.manual_seed(0)
    q, k, v = inputs((2, 4, 4, 31, 37, 16, 11))
    q, k = q * norm, k * norm
    expected = exact(q, k, v, 0.25)

    def error(features: int) -> float:
        draws = [Performer(16, features, seed=seed).double()(q, k, v, 0.25, None) for seed in range(6)]
        return sum((out - expected).square().mean().item() for out in draws) ** 0.5

    errors = [error(features) for features in (16, 64, 256, 1024)]
    assert errors == sorted(errors, reverse=True)
    assert errors[3] < rate * errors[1]


def test_features_are_orthogonal_and_of_normal_length():
    features = orthogonal_features(40, 16, seed=(3, 0)).double()
    for block in features.split(16):
        gram = block @ block.T
        torch.testing.assert_close(gram, gram.diagonal().diag(), rtol=0, atol=1e-5)
    squares = orthogonal_features(4096, 16, seed=(3, 0)).double().square().sum(-1)
    torch.testing.assert_close(squares.mean().item(), 16.0, rtol=0.02, atol=0)
    torch.testing.assert_close(squares.var().item(), 32.0, rtol=0.1, atol=0)


def test_orthogonal_features_err_less_than_independent_ones():
    torch.manual_seed(0)
    q, k, v = inputs((2, 4, 4, 31, 37, 16, 11))
    expected = exact(q, k, v, 0.25)

    def error(draw) -> float:
        total = 0.0
        for seed in range(40):
            model = Performer(16, 16, seed=seed).double()
            model.projection = draw(seed).double()
            total += (model(q, k, v, 0.25, None) - expected).square().mean().item()
        return total

    assert error(lambda seed: orthogonal_features(16, 16, seed=(seed, 0))) < 0.95 * error(
        lambda seed: torch.randn(16, 16, generator=torch.Generator().manual_seed(seed))
    )


@pytest.mark.parametrize("size", [1e-3, 1.0, 1e3, 1e5])
def test_performer_is_finite_at_scores_of_any_size(size):
    """Scores up to ± ``size``, and keys of very different lengths, in float32."""
    torch.manual_seed(0)
    q, k, v = (t.detach() for t in inputs((1, 2, 2, 29, 31, 8, 3), torch.float32))
    k = k * torch.linspace(0.01, 1, 31)[:, None]
    k = k * (size / (q @ k.transpose(2, 3)).abs().max())
    leaves = [t.requires_grad_() for t in (q, k, v)]
    model = Performer(8, 32)
    out = model(*leaves, 1.0, None)
    weights = model.implied_weights(q, k, 1.0, None)
    torch.testing.assert_close(weights.sum(-1), torch.ones(1, 2, 29))
    assert weights.min() >= 0
    torch.testing.assert_close(weights @ v, out, rtol=1e-3, atol=1e-3 * max(1.0, size / 1e3))
    for t in (out, *torch.autograd.grad(out.square().sum(), leaves)):
        assert t.isfinite().all()


@settings(max_examples=40, deadline=None)
@given(
    sizes=st.tuples(*(st.integers(1, most) for most in (2, 3, 2, 7, 7, 5, 4))),
    features=st.integers(1, 9),
    dtype=st.sampled_from([torch.float64, torch.float32, torch.bfloat16, torch.float16]),
    density=st.floats(0, 1),
    seed=st.integers(0, 2**31),
)
def test_any_shape_and_padding(sizes, features, dtype, density, seed):
    torch.manual_seed(seed)
    b, g, group, n, m, d, e = sizes
    leaves = inputs((b, g * group, g, n, m, d, e), dtype)
    mask = torch.rand(b, 1, 1, m) < density
    for pattern in (Performer(d, features, seed=seed).to(dtype), Linformer(g, m, min(features, m)).to(dtype)):
        out = run(pattern, *leaves, mask)
        assert out.shape == (b, g * group, n, e)
        assert out.dtype == dtype
        for t in (out, *torch.autograd.grad(out.float().square().sum(), leaves)):
            assert t.isfinite().all()
        assert not out[~mask.any(-1)[:, 0, 0]].any()


def test_seeds():
    first, again, other = Performer(8, 20, seed=1), Performer(8, 20, seed=1), Performer(8, 20, seed=2)
    torch.testing.assert_close(first.projection, again.projection, rtol=0, atol=0)
    assert not torch.isclose(first.projection, other.projection).any()
    state = torch.get_rng_state()
    Performer(8, 20)
    torch.testing.assert_close(torch.get_rng_state(), state, rtol=0, atol=0)  # the global generator is left alone
    assert Performer(64).features == round(64 * 4.1589)


def test_redraws_after_so_many_training_calls_and_resumes():
    q, k, v = inputs((1, 1, 1, 3, 3, 4, 2), torch.float32)

    def drawn(model: Performer, calls: int) -> list[Tensor]:
        seen = []
        for _ in range(calls):
            model(q, k, v, 1.0, None)
            seen.append(model.projection)
        return seen

    whole = drawn(Performer(4, 6, redraw=3, seed=5), 9)
    assert all(whole[i].equal(whole[i - i % 3]) for i in range(9))
    assert len({t.sum().item() for t in whole}) == 3
    begun = Performer(4, 6, redraw=3, seed=5)
    drawn(begun, 4)
    drawn(begun.eval(), 5)  # evaluation does not count
    resumed = Performer(4, 6, redraw=3, seed=11)
    resumed.seed = 5
    resumed.load_state_dict(begun.state_dict())
    for got, wanted in zip(drawn(resumed, 5), whole[4:], strict=True):
        torch.testing.assert_close(got, wanted, rtol=0, atol=0)
    fixed = Performer(4, 6)
    assert all(t is fixed.projection for t in drawn(fixed, 5))
    assert fixed.calls == 0


def test_a_redraw_between_forward_and_backward_does_no_harm():
    model = Performer(4, 6, redraw=1)
    q, k, v = inputs((1, 1, 1, 3, 3, 4, 2), torch.float32)
    out = model(q, k, v, 1.0, None)
    twin = copy.deepcopy(model).eval()
    expected = torch.autograd.grad(twin(q, k, v, 1.0, None).sum(), q)
    model(q, k, v, 1.0, None)
    torch.testing.assert_close(torch.autograd.grad(out.sum(), q), expected)


def test_favor_serves_performer_alone():
    q, k, v = inputs()
    model = Performer(D, 5).double()
    torch.testing.assert_close(run(model, q, k, v, kernel="favor"), run(model, q, k, v))
    with pytest.raises(ValueError, match="random features and nothing else; use pattern='performer'"):
        attend(q, k, v, kernel="favor")
    for kernel in ("explicit", "sdpa", "tiled"):
        with pytest.raises(ValueError, match="performer never forms scores; use kernel='auto'"):
            run(model, q, k, v, kernel=kernel)


@pytest.mark.parametrize("options", [{"pattern": "linformer", "rank": 5}, {"pattern": "performer", "features": 9}])
def test_by_name_in_a_layer(options):
    layout = Layout(1, (3, 4))
    layer = Attention(12, 3, layout=layout, **options)
    x = torch.randn(2, 13, 12)
    layer(x, layout=layout).sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in layer.parameters())
    meta = copy.deepcopy(layer).to("meta")
    assert meta(x.to("meta"), layout=layout).shape == x.shape
    with torch.device("meta"):
        assert all(t.is_meta for t in Attention(12, 3, layout=layout, **options).state_dict().values())


class Largest(TorchDispatchMode):
    """The most elements of any tensor that is made."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for t in out if isinstance(out, tuple | list) else [out]:
            if isinstance(t, Tensor):
                self.elements = max(self.elements, t.numel())
        return out


@pytest.mark.parametrize("name", ["linformer", "performer"])
def test_memory_is_linear(name):
    def largest(n: int) -> int:
        pattern = Linformer(2, n, 16) if name == "linformer" else Performer(8, 16)
        q, k, v = inputs((1, 2, 2, n, n, 8, 8), torch.float32)
        with Largest() as seen:
            run(pattern, q, k, v, kernel="tiled" if name == "linformer" else "favor").sum().backward()
        return seen.elements

    assert largest(4096) <= 2 * largest(2048) <= 4 * 2048 * 2 * 16
