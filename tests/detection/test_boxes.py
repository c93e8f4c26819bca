"""Overlaps equal torchvision's, values and gradients."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torchvision.ops import box_iou, generalized_box_iou

from vision_attn.detection.boxes import (
    cxcywh_to_xyxy,
    iou,
    iou_and_giou,
    pairwise,
    pairwise_iou,
    xyxy_to_cxcywh,
)


def random_boxes(*shape: int) -> torch.Tensor:
    """``xyxy`` boxes with an area."""
    return cxcywh_to_xyxy(torch.cat([torch.rand(*shape, 2), torch.rand(*shape, 2) * 0.5 + 0.01], -1))


def pairwise_giou(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return iou_and_giou(*pairwise(a, b))[1]


@pytest.mark.parametrize(
    ("ours", "theirs"), [(pairwise_iou, box_iou), (pairwise_giou, generalized_box_iou)], ids=["iou", "giou"]
)
@pytest.mark.parametrize("pixels", [1, 640])
def test_pairs_equal_torchvision(ours, theirs, pixels):
    a, b = (random_boxes(n).mul(pixels).requires_grad_() for n in (7, 11))
    weights = torch.randn(7, 11)
    results = []
    for function in (ours, theirs):
        value = function(a, b)
        results.append((value, *torch.autograd.grad((value * weights).sum(), (a, b))))
    for mine, other in zip(*results, strict=True):
        torch.testing.assert_close(mine, other)


def test_elementwise_is_the_diagonal_of_pairs():
    a, b = random_boxes(3, 5), random_boxes(3, 5)
    for mine, pairs in ((iou(a, b), pairwise_iou(a, b)), (iou_and_giou(a, b)[1], pairwise_giou(a, b))):
        torch.testing.assert_close(mine, pairs.diagonal(dim1=-2, dim2=-1))


def test_formats_are_inverse():
    boxes = random_boxes(2, 13)
    torch.testing.assert_close(cxcywh_to_xyxy(xyxy_to_cxcywh(boxes)), boxes)
    torch.testing.assert_close(xyxy_to_cxcywh(torch.tensor([1.0, 2.0, 4.0, 8.0])), torch.tensor([2.5, 5.0, 3.0, 6.0]))


coordinate = st.floats(0, 1, width=32)
box = st.tuples(coordinate, coordinate, coordinate, coordinate).map(
    lambda c: [min(c[0], c[2]), min(c[1], c[3]), max(c[0], c[2]), max(c[1], c[3])]
)


@settings(max_examples=100, deadline=None)
@given(box, box)
def test_any_boxes_have_finite_overlaps_and_gradients(a, b):
    """Without area too, and both at the same place."""
    first, second = (torch.tensor(x).requires_grad_() for x in (a, b))
    overlap, generalized = iou_and_giou(first, second)
    assert 0 <= overlap <= 1 + 1e-6
    assert -1 - 1e-6 <= generalized <= overlap + 1e-6
    for gradient in torch.autograd.grad(overlap + generalized, (first, second)):
        assert gradient.isfinite().all()
    torch.testing.assert_close(iou_and_giou(second, first)[1], generalized)


def test_a_box_overlaps_itself_wholly():
    boxes = random_boxes(17)
    overlap, generalized = iou_and_giou(boxes, boxes)
    torch.testing.assert_close(overlap, torch.ones(17))
    torch.testing.assert_close(generalized, torch.ones(17))
