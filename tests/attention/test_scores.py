"""Every score against its formula in a plain loop, against the others where they meet, and against its promises."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.testing import assert_close

from vision_attn.attention import additive, attend
from vision_attn.attention.scores import (
    SCORES,
    Concat,
    Cosine,
    Dot,
    Location,
    ScaledDot,
    Score,
    dot_scores,
    make_score,
    register_score,
    resolve_score,
)

B, H, N, M, D, K, HIDDEN = 2, 3, 5, 7, 11, 13, 17
VARIANTS = {  # name: (score, options, width of the keys)
    "dot": ("dot", {}, D),
    "scaled_dot": ("scaled_dot", {}, D),
    "cosine": ("cosine", {"temperature": 0.3}, D),
    "cosine learned": ("cosine", {"temperature": "learned"}, D),
    "general": ("general", {}, K),
    "general square": ("general", {}, D),
    "additive": ("additive", {"hidden": HIDDEN}, K),
    "concat": ("concat", {"hidden": HIDDEN}, K),
    "location": ("location", {}, K),
    "location max_keys": ("location", {"max_keys": 19}, K),
}
IS_DOT = [name for name in VARIANTS if not name.startswith(("additive", "concat"))]


def build(variant: str, heads: int = H, dtype: torch.dtype = torch.float64) -> Score:
    name, options, k_dim = VARIANTS[variant]
    score = make_score(name, heads, D, k_dim, **options).to(dtype)
    for p in score.parameters():
        nn.init.normal_(p, std=0.7)
    return score


def inputs(variant: str, heads: int = H, kv_heads: int | None = None, dtype: torch.dtype = torch.float64):
    q = torch.randn(B, heads, N, D, dtype=dtype, requires_grad=True)
    k = torch.randn(B, kv_heads or heads, M, VARIANTS[variant][2], dtype=dtype, requires_grad=True)
    return q, k


def of_pair(score: Score, variant: str, h: int, q: list[float], k: list[float], j: int) -> float:
    """The formula, number by number."""
    p = {name: value.tolist()[h] for name, value in score.named_parameters()}
    dot = sum(a * b for a, b in zip(q, k, strict=False))
    lengths = math.sqrt(sum(a * a for a in q)) * math.sqrt(sum(b * b for b in k))
    if variant == "dot":
        return dot
    if variant == "scaled_dot":
        return dot / math.sqrt(len(q))
    if variant == "cosine":
        return dot / lengths / 0.3
    if variant == "cosine learned":
        return dot / lengths * min(math.exp(p["logit_scale"]), 100)
    if variant.startswith("general"):
        return sum(a * p["weight"][x][y] * b for x, a in enumerate(q) for y, b in enumerate(k))
    if variant == "location":
        c = len(p["weight"])
        # Vaswani et al. 2017, section 3.5
        codes = [(math.cos if x % 2 else math.sin)(j / 10000 ** (2 * (x // 2) / c)) for x in range(c)]
        return sum(codes[x] * p["weight"][x][y] * b for x in range(c) for y, b in enumerate(q))
    if variant == "location max_keys":
        return sum(w * a for w, a in zip(p["weight"][j], q, strict=True))
    rows = p["weight"] if variant == "concat" else [a + b for a, b in zip(p["query"], p["key"], strict=True)]
    hidden = [math.tanh(sum(w * x for w, x in zip(row, [*q, *k], strict=True))) for row in rows]
    return sum(v * x for v, x in zip(p["v"], hidden, strict=True))


@pytest.mark.parametrize("variant", VARIANTS)
def test_equals_its_formula_in_a_plain_loop(variant):
    score, (q, k) = build(variant), inputs(variant)
    a, b = q.tolist(), k.tolist()
    want = [
        [
            [[of_pair(score, variant, h, a[i][h][n], b[i][h][m], m) for m in range(M)] for n in range(N)]
            for h in range(H)
        ]
        for i in range(B)
    ]
    # the codes of the positions are float32 numbers
    tolerance = 1e-5 if variant == "location" else 1e-12
    assert_close(score(q, k), torch.tensor(want, dtype=torch.float64), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("variant", VARIANTS)
def test_float32_is_float64_rounded(variant):
    score, (q, k) = build(variant), inputs(variant)
    got = copy.deepcopy(score).float()(q.float(), k.float())
    assert got.dtype == torch.float32
    assert_close(got.double(), score(q, k), rtol=1e-4, atol=1e-4)
    # under autocast the queries come in 16 bits and the parameters in 32
    half = copy.deepcopy(score).float()(q[:1, :, :2].bfloat16(), k[:1, :, :2].bfloat16())
    assert half.dtype == torch.bfloat16
    assert_close(half.double(), score(q, k)[:1, :, :2, :2], rtol=0.05, atol=0.3)


@pytest.mark.parametrize("kv_heads", [1, 2, 6])
@pytest.mark.parametrize("variant", VARIANTS)
def test_grouped_heads_equal_repeated_key_heads(variant, kv_heads):
    score, (q, k) = build(variant, 6), inputs(variant, 6, kv_heads)
    whole = k.repeat_interleave(6 // kv_heads, dim=1)
    got, want = score(q, k), score(q, whole)
    assert_close(got, want, rtol=1e-12, atol=1e-12)
    leaves = [q, k, *score.parameters()]
    weight = torch.randn_like(got)
    gradients = [torch.autograd.grad((s * weight).sum(), leaves, allow_unused=True) for s in (got, want)]
    assert_close(*gradients, rtol=1e-10, atol=1e-10)
    form = score.as_dot(q, k)
    assert (form is not None) == (variant in IS_DOT)
    if form is not None:
        a, b, scale = form
        assert a.shape[:3] == (B, 6, N)
        assert b.shape == (B, kv_heads, M, a.shape[-1])
        assert_close(dot_scores(a, b, scale), got, rtol=0, atol=0)


@pytest.mark.parametrize("kv_heads", [1, 6])
@pytest.mark.parametrize("variant", IS_DOT)
def test_fused_kernels_serve_what_is_a_dot_product(variant, kv_heads):
    score, (q, k) = build(variant, 6), inputs(variant, 6, kv_heads)
    v = torch.randn(B, kv_heads, M, 29, dtype=torch.float64)
    results = []
    for kernel in ("explicit", "sdpa"):
        out = attend(q, k, v, score=score, kernel=kernel)
        leaves = [q, k, *score.parameters()]
        results.append([out, *torch.autograd.grad(out.square().sum(), leaves, allow_unused=True)])
    assert_close(*results, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("variant", ["additive", "concat"])
def test_fused_kernels_refuse_what_is_none(variant):
    q, k = inputs(variant)
    with pytest.raises(ValueError, match=r"dot products only.*explicit"):
        attend(q, k, k, score=build(variant), kernel="sdpa")
    assert attend(q, k, k, score=build(variant)).shape == (B, H, N, K)


@pytest.mark.parametrize("variant", VARIANTS)
def test_gradients(variant, monkeypatch):
    monkeypatch.setitem(additive.BLOCK, "cpu", 3 * 5 * 7)  # two blocks, the last one ragged
    name, options, k_dim = VARIANTS[variant]
    options = {**options, "hidden": 7} if "hidden" in options else options
    score = make_score(name, 2, 3, 3 if k_dim == D else 2, **options).double()
    for p in score.parameters():
        nn.init.normal_(p, std=0.7)
    q = torch.randn(1, 2, N, 3, dtype=torch.float64, requires_grad=True)
    k = torch.randn(1, 1, 5, score.k_dim, dtype=torch.float64, requires_grad=True)
    operands = (q, k, *score.parameters())
    assert torch.autograd.gradcheck(lambda q, k, *_: score(q, k), operands)
    assert torch.autograd.gradgradcheck(lambda q, k, *_: score(q, k), operands, fast_mode=True)


# What the scores have to do with one another


APPLE, ORANGE, PHONE = [1.0, 2.0, 1.0], [2.0, 2.0, 0.0], [0.0, 2.0, 3.0]


def test_the_numbers_of_the_example():
    things = torch.tensor([APPLE, ORANGE, PHONE], dtype=torch.float64)[None, None]
    dots = Dot()(things, things)[0, 0]
    assert dots[0].tolist() == [6, 6, 7]  # apple with itself, with the orange, with the phone
    cosines = Cosine()(things, things)[0, 0]
    want = torch.tensor([[1, 0.866, 0.793], [0.866, 1, 0.392], [0.793, 0.392, 1]], dtype=torch.float64)
    assert_close(cosines, want, rtol=0, atol=5e-4)
    assert_close(ScaledDot()(things, things)[0, 0], dots / math.sqrt(3))


def test_general_with_the_unit_matrix_is_dot_and_starts_as_scaled_dot():
    q, k = inputs("general square")
    score = make_score("general", H, D).double()
    assert_close(score(q, k), ScaledDot()(q, k), rtol=1e-6, atol=1e-6)  # W was rounded to float32
    nn.init.zeros_(score.weight).diagonal(dim1=-2, dim2=-1).data.fill_(1)
    assert_close(score(q, k), Dot()(q, k), rtol=1e-12, atol=1e-12)


def test_concat_with_both_matrices_side_by_side_is_additive():
    one, (q, k) = build("additive"), inputs("additive")
    other = Concat(H, D, K, hidden=HIDDEN).double()
    other.load_state_dict({"weight": torch.cat([one.query, one.key], dim=-1), "v": one.v})
    assert_close(other(q, k), one(q, k), rtol=1e-12, atol=1e-12)


def test_cosine_is_dot_after_normalization():
    q, k = inputs("cosine")
    a, b = nn.functional.normalize(q, dim=-1), nn.functional.normalize(k, dim=-1)
    assert_close(Cosine()(q, k), Dot()(a, b), rtol=1e-12, atol=1e-12)
    assert_close(Cosine(temperature=0.25)(q, k), 4 * Dot()(a, b), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("options", [{}, {"max_keys": M}])
def test_location_ignores_what_the_keys_hold(options):
    score = Location(H, D, K, **options).double()
    q, k = inputs("location")
    other = torch.randn_like(k)
    assert_close(score(q, k), score(q, other), rtol=0, atol=0)
    assert (score(q, k).std(dim=-1) > 1e-3).all()
    assert (score(q, k).std(dim=-2) > 1e-3).all()
    assert torch.autograd.grad(score(q, k).sum(), k, allow_unused=True) == (None,)


@pytest.mark.parametrize("width", [16, 64, 256])
def test_the_root_of_the_width_keeps_the_variance_at_one(width):
    q, k = torch.randn(2, 1, 2, 401, width, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    assert_close(Dot()(q, k).var().item(), float(width), rtol=0.05, atol=0)
    assert_close(ScaledDot()(q, k).var().item(), 1.0, rtol=0.05, atol=0)


def test_scores_with_parameters_start_with_a_variance_of_about_one():
    """So that training starts from an open softmax, whatever the width."""
    torch.manual_seed(0)
    q, k = torch.randn(1, 47, 31, 64), torch.randn(1, 47, 37, 64)
    for name in ("general", "additive", "concat", "location"):
        assert 0.2 < make_score(name, 47, 64)(q, k).var().item() < 1.3, name
    assert 0.7 < make_score("general", 47, 64, 32)(q, k[..., :32]).var().item() < 1.3
    assert 0.7 < make_score("location", 47, 64, max_keys=37)(q, k).var().item() < 1.3


# Zero vectors, temperatures, positions


@pytest.mark.parametrize("temperature", [1.0, "learned"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16])
def test_cosine_of_zero_vectors_is_zero_and_so_is_their_gradient(dtype, temperature):
    score = Cosine(H, D, temperature=temperature)
    q, k = (x.to(dtype).detach() for x in inputs("cosine"))
    q[0, 1, 2], k[1, 2, 3] = 0, 0
    q.requires_grad_(), k.requires_grad_()
    scores = score(q, k)
    assert (scores[0, 1, 2] == 0).all()
    assert (scores[1, 2, :, 3] == 0).all()
    to_q, to_k = torch.autograd.grad(scores.sum(), (q, k))
    assert torch.cat([to_q.flatten(), to_k.flatten()]).isfinite().all()
    assert (to_q[0, 1, 2] == 0).all()
    assert (to_k[1, 2, 3] == 0).all()


@settings(max_examples=30, deadline=None)
@given(exponent=st.integers(-9, 9), other=st.integers(-9, 9), seed=st.integers(0, 2**20))
def test_cosine_does_not_see_lengths(exponent, other, seed):
    generator = torch.Generator().manual_seed(seed)
    q, k = torch.randn(2, 1, 1, 5, 7, dtype=torch.float64, generator=generator)
    got = Cosine()(q * 10.0**exponent, k * 10.0**other)
    assert_close(got, Cosine()(q, k), rtol=1e-9, atol=1e-9)
    assert got.abs().max() <= 1 + 1e-12


def test_a_learned_temperature_stays_above_a_hundredth():
    score = Cosine(2, D, temperature="learned")
    assert_close(score.logit_scale.exp(), torch.full((2,), 10.0))
    score.logit_scale.data = torch.tensor([math.log(70.0), 50.0])
    x = torch.randn(1, 2, N, D)
    scores = score(x, x).diagonal(dim1=-2, dim2=-1)[0]
    assert_close(scores, torch.tensor([[70.0], [100.0]]).expand(2, N), rtol=1e-4, atol=0)


def test_location_serves_any_length_and_a_table_made_in_inference_serves_training():
    score = Location(H, D)
    with torch.inference_mode():
        short = score(torch.ones(1, H, N, D), torch.zeros(1, H, 3, D))
        long = score(torch.ones(1, H, N, D), torch.zeros(1, H, 101, D))
    assert_close(long[..., :3], short)
    score(torch.ones(1, H, N, D, requires_grad=True), torch.zeros(1, H, 89, D)).sum().backward()
    assert score.weight.grad is not None
    assert list(score.state_dict()) == ["weight"]
    assert score(torch.ones(1, H, N, D, device="meta"), torch.ones(1, H, M, D, device="meta")).shape[-1] == M


def test_location_uses_the_first_rows():
    score = Location(H, D, max_keys=M)
    q = torch.randn(B, H, N, D)
    whole, part = (score(q, torch.zeros(B, H, m, D)) for m in (M, 3))
    assert_close(whole[..., :3], part)
    with pytest.raises(ValueError, match=r"max_keys=7 keys, got 11.*without max_keys"):
        score(q, torch.zeros(B, H, 11, D))


@pytest.mark.parametrize("variant", ["additive", "cosine learned", "location"])
def test_compiled_and_exported(variant):
    """To a compiler the blocks are one operation; an exported graph holds PyTorch's own operations only."""
    score, (q, k) = build(variant), inputs(variant)
    want = score(q, k)
    got = torch.compile(score, backend="aot_eager", fullgraph=True)(q, k)
    assert_close(got, want, rtol=1e-12, atol=1e-12)
    leaves = [q, *score.parameters()]
    gradients = [torch.autograd.grad(s.square().sum(), leaves) for s in (got, want)]
    assert_close(*gradients, rtol=1e-12, atol=1e-12)
    exported = torch.export.export(score, (q.detach(), k.detach()))
    assert "vision_attn::" not in str(exported.graph)
    assert_close(exported.module()(q.detach(), k.detach()), want, rtol=1e-12, atol=1e-12)


# Names, options, bad input


def test_every_score_is_there_by_name():
    names = ["dot", "scaled_dot", "cosine", "general", "additive", "concat", "location"]
    assert list(SCORES)[: len(names)] == names
    for name in names:
        score = make_score(name, H, D)
        assert score.name == name
        assert make_score(score, H, D) is score
        assert resolve_score(score) is score
        for p in score.parameters():
            assert p.shape[0] == H


@pytest.mark.parametrize("name", ["dot", "scaled_dot", "cosine"])
def test_a_call_may_name_what_has_no_parameters(name):
    q, k = inputs("dot")
    assert_close(attend(q, k, k, score=name), attend(q, k, k, score=make_score(name, H, D)))


@pytest.mark.parametrize("name", ["general", "additive", "concat", "location"])
def test_a_call_must_be_given_what_has_parameters(name):
    q, k = inputs("dot")
    with pytest.raises(ValueError, match=rf"has parameters.*make_score\('{name}', num_heads, q_dim, k_dim\)"):
        attend(q, k, k, score=name)


def test_a_new_score_is_a_dozen_lines():
    @register_score("test_distance")
    class Distance(Score):
        def build(self, power: float = 2.0) -> None:
            self.power = power

        def forward(self, q, k):
            return -torch.cdist(q, k).pow(self.power)

    try:
        q, k = inputs("dot")
        assert_close(make_score("test_distance", power=1.0)(q, k), -torch.cdist(q, k))
        assert attend(q, k, k, score="test_distance").shape == q.shape
        with pytest.raises(ValueError, match="'test_distance' has no option 'hidden'; it takes: power"):
            make_score("test_distance", hidden=3)
    finally:
        del SCORES["test_distance"]


def test_a_score_without_a_formula_says_so():
    with pytest.raises(NotImplementedError, match="Score must define forward or as_dot"):
        Score()(*inputs("dot"))


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        (("cosin", H, D), {}, "unknown score 'cosin'; there are: dot, .*Did you mean cosine"),
        (("dot", H, D), {"temperature": 0.1}, "'dot' has no option 'temperature'; it takes: none"),
        (("additive", H, D), {"max_keys": 3}, "'additive' has no option 'max_keys'; it takes: hidden"),
        (("additive", H, D), {"hidden": 0}, "hidden=0 must be a positive width"),
        (("location", H, D), {"max_keys": 0}, "max_keys=0 of the location score must be positive"),
        (("cosine", H, D), {"temperature": 0.0}, "temperature=0.0 of the cosine score must be a positive number"),
        (("cosine", H, D), {"temperature": "warm"}, "temperature='warm' .* or 'learned'"),
        (("cosine", H, D), {"temperature": math.nan}, "temperature=nan"),
        (("scaled_dot", H, D, K), {}, r"'scaled_dot' .* equal widths .*'general'.* q_dim=11 and k_dim=13"),
        (("general", 0, D), {}, "positive sizes, got num_heads=0"),
        ((Concat(H, D), H, D), {"hidden": 3}, "'hidden' is an option of a score's name"),
        ((Concat(H, D), H, K), {}, r"this Concat was made for .* = \(3, 11, 11\), but \(3, 13, 13\) is needed"),
    ],
)
def test_bad_options(arguments, options, message):
    with pytest.raises(ValueError, match=message):
        make_score(*arguments, **options)


def test_none_stands_for_the_default():
    assert make_score("additive", H, D, hidden=None, temperature=None).v.shape == (H, D)


@pytest.mark.parametrize("variant", VARIANTS)
def test_shapes_that_do_not_fit(variant):
    score, (q, k) = build(variant), inputs(variant)
    with pytest.raises(ValueError, match=r"2 key heads do not divide 3 query heads: got q \(2, 3, 5, 11\)"):
        score(q, k[:, :2])
    if score.needs_equal_widths:
        with pytest.raises(ValueError, match=r"equal widths .*got q \(2, 3, 5, 11\) and k \(2, 3, 7, 10\)"):
            score(q, k[..., :10])
    if score.has_parameters:
        with pytest.raises(ValueError, match=r"was made for 3 heads.*got q \(2, 1, 5, 11\).*make_score\("):
            score(q[:, :1], k[:, :1])
