"""What a certificate may say: that it holds, fails, or has nothing to say; and how errors are measured."""

from __future__ import annotations

import math

import pytest
import torch

from vision_attn.certificates import registry
from vision_attn.certificates.largest import largest_tensor
from vision_attn.certificates.registry import (
    CERTIFICATES,
    Setting,
    Skip,
    certificate,
    gap,
    gaps,
    gradients,
    holds,
    ordered,
    refuses,
    run,
)


@pytest.fixture(autouse=True)
def own_registry(monkeypatch):
    monkeypatch.setattr(registry, "CERTIFICATES", {})


def only(**options):
    """A certificate whose error is what the caller says; returns the function that runs it."""

    def make(measure):
        certificate("99z", "a test", **options)(measure)
        return lambda **setting: run(registry.CERTIFICATES["99z"], **setting)

    return make


def test_pass_fail_and_the_edge():
    verdict = only(tolerance=0.5)
    assert verdict(lambda s: 0.5)().passed is True
    registry.CERTIFICATES.clear()
    result = verdict(lambda s: 0.51)()
    assert (result.passed, result.error, result.tolerance) == (False, 0.51, 0.5)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_what_is_not_finite_fails(value):
    result = only(tolerance=1e9)(lambda s: value)()
    assert result.passed is False
    assert result.error is None


def test_an_exception_fails_and_is_told():
    def broken(s):
        raise IndexError("no such head")

    result = only()(broken)()
    assert result.passed is False
    assert result.reason == "IndexError: no such head"


def test_a_skip_is_no_pass():
    def silent(s):
        raise Skip("nothing to compare with")

    result = only()(silent)()
    assert (result.passed, result.reason) == (None, "nothing to compare with")


def test_another_dtype_is_skipped_with_the_reason():
    result = only(dtypes=(torch.float32,))(lambda s: 0.0)(dtype=torch.float16)
    assert (result.passed, result.tolerance) == (None, None)
    assert result.reason == "it is stated for float32"


def hard_attention(s: Setting) -> float:
    q = s.randn(1, 1, 3, 4)
    return 0.0 * float(s.attend(q, q, q, normalizer="hard").sum())


def test_the_kernel_s_own_objection_skips():
    result = only(kernel=True)(hard_attention)(kernel="sdpa")
    assert result.passed is None
    assert result.reason.startswith("kernel sdpa: ")
    assert "'hard'" in result.reason


def test_an_objection_is_a_failure_where_the_kernel_plays_no_part_or_was_not_asked_for():
    verdict = only(kernel=False)(hard_attention)
    assert verdict(kernel="sdpa").passed is False
    assert verdict(kernel="auto").passed is True

    registry.CERTIFICATES.clear()

    def other_error(s):
        raise ValueError("q and k differ")

    assert only(kernel=True)(other_error)(kernel="sdpa").passed is False


def test_the_kernel_is_reported_where_it_matters():
    assert only(kernel=True)(lambda s: 0.0)(kernel="explicit").kernel == "explicit"
    registry.CERTIFICATES.clear()
    assert only(kernel=False)(lambda s: 0.0)(kernel="explicit").kernel == "any"


def test_random_numbers_are_the_certificate_s_own():
    seen = []
    verdict = only()(lambda s: seen.append((s.randn(3), torch.rand(3))) or 0.0)
    before = torch.get_rng_state()
    verdict()
    torch.rand(5)
    verdict()
    for one, two in zip(*seen, strict=True):
        torch.testing.assert_close(one, two, rtol=0, atol=0)
    torch.set_rng_state(before)
    inside = torch.rand(3)
    torch.set_rng_state(before)
    verdict()
    torch.testing.assert_close(torch.rand(3), inside, rtol=0, atol=0)


def test_the_same_numbers_in_every_dtype():
    wide, narrow = (Setting(dtype=dtype).randn(5, 7) for dtype in (torch.float64, torch.float32))
    torch.testing.assert_close(wide.float(), narrow, rtol=0, atol=0)


@pytest.mark.parametrize("n", [2, 3, 11])
def test_a_permutation_moves_everything(n):
    setting = Setting()
    for _ in range(20):
        order = setting.permutation(n)
        assert sorted(order.tolist()) == list(range(n))
        assert (order != torch.arange(n)).all()


@pytest.mark.parametrize("id", ["b", "20bb", "20-b", ""])
def test_ids_are_row_numbers(id):
    with pytest.raises(ValueError, match="no row number"):
        certificate(id, "a test")


def test_an_id_is_taken_once():
    certificate("1", "one")(lambda s: 0.0)
    with pytest.raises(ValueError, match="certificate 1 exists: one"):
        certificate("1", "two")


def test_order_is_that_of_the_table():
    for id in ("20b", "3", "20", "100", "21"):
        certificate(id, f"row {id}")(lambda s: 0.0)
    assert [item.id for item in ordered()] == ["3", "20", "20b", "21", "100"]
    assert CERTIFICATES  # the real ones are untouched


def test_gap():
    one = torch.tensor([1.0, 2.0, 4.0])
    assert gap(one + torch.tensor([0.0, 0.4, 0.0]), one) == pytest.approx(0.1)
    assert gap(one, one) == 0
    assert gap(torch.tensor([1.0, math.nan]), torch.tensor([1.0, 1.0])) == math.inf
    assert gap(torch.tensor([1.0, 1.0]), torch.tensor([1.0, math.nan])) == math.inf
    assert gaps((one, one), (2 * one, one)) == pytest.approx(1.0)
    with pytest.raises(ValueError, match=r"\(3,\) and \(1, 3\)"):
        gap(one, one[None])


def test_gradients_tell_every_entry_apart():
    x = torch.randn(3, 5, requires_grad=True)
    (found,) = gradients(2 * x, x)
    assert found.unique().numel() == 15


def test_claims_and_refusals():
    assert (holds(True), holds(False)) == (0.0, 1.0)

    def raises(kind, text):
        def call():
            raise kind(text)

        return call

    assert refuses(raises(ValueError, "q holds 1 NaN"), "q", "NaN") == 0.0
    assert refuses(raises(ValueError, "q holds 1 NaN"), "k") == 1.0
    assert refuses(lambda: None, "q") == 1.0
    with pytest.raises(TypeError):
        refuses(raises(TypeError, "q"), "q")


def test_the_largest_tensor_is_seen_in_backward_passes_too():
    x = torch.randn(5, 7, requires_grad=True)
    assert largest_tensor(lambda: x.sum()) == 1
    assert largest_tensor(lambda: (x[:, None] * x[None]).sum()) == 5 * 5 * 7
    assert largest_tensor(lambda: x.sum(1).expand(1000, 5).sum()) == 5  # an expanded tensor takes no memory
    small = torch.randn(11, requires_grad=True)
    out = small.expand(13, 11).sum()
    assert largest_tensor(lambda: torch.autograd.grad(out, small)) == 11
