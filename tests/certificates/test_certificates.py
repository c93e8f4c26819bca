"""Every certificate holds, in every dtype it is stated for, and with every kernel that takes it."""

from __future__ import annotations

import pytest
import torch

from vision_attn.attention import KERNELS
from vision_attn.certificates import CERTIFICATES, ordered, run
from vision_attn.certificates.registry import dtype_name

EVERY = [(item.id, dtype) for item in ordered() for dtype in item.tolerance]
BY_KERNEL = [(item.id, kernel) for item in ordered() if item.kernel for kernel in KERNELS if kernel != "flex"]
ROWS_TO_COME = {30, 39, 40}  # DETR, and what is seen in trained models


@pytest.mark.parametrize(("id", "dtype"), EVERY, ids=[f"{id}-{dtype_name(dtype)}" for id, dtype in EVERY])
def test_holds(id, dtype):
    result = run(CERTIFICATES[id], dtype=dtype)
    assert result.passed, f"{result.name}: error {result.error}, tolerance {result.tolerance}. {result.reason}"


@pytest.mark.parametrize(("id", "kernel"), BY_KERNEL)
def test_holds_with_every_kernel_that_takes_it(id, kernel):
    result = run(CERTIFICATES[id], dtype=torch.float32, kernel=kernel)
    if result.passed is None:
        assert result.reason.startswith(f"kernel {kernel}: ")  # its own objection, nothing else is an excuse
    else:
        assert result.passed, f"{result.name}: error {result.error}, tolerance {result.tolerance}. {result.reason}"


def test_explicit_attention_takes_nearly_all_of_them():
    found = [
        run(CERTIFICATES[id], dtype=torch.float32, kernel="explicit")
        for id, kernel in BY_KERNEL
        if kernel == "explicit"
    ]
    assert [result.id for result in found if result.passed is not True] == []


def test_every_row_of_the_table_has_one():
    rows = {int("".join(c for c in id if c.isdigit())) for id in CERTIFICATES}
    assert rows == set(range(1, 41)) - ROWS_TO_COME


def test_names_fit_a_line_and_are_different():
    names = [item.name for item in ordered()]
    assert len(set(names)) == len(names)
    assert [name for name in names if len(name) > 84] == []


ON_GPU = EVERY if torch.cuda.is_available() else []


@pytest.mark.parametrize(("id", "dtype"), ON_GPU, ids=[f"{id}-{dtype_name(dtype)}" for id, dtype in ON_GPU])
def test_holds_on_a_gpu(id, dtype):
    result = run(CERTIFICATES[id], device="cuda", dtype=dtype)
    assert result.passed, f"{result.name}: error {result.error}, tolerance {result.tolerance}. {result.reason}"
