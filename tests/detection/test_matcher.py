"""Matching is minimal, as brute force and transformers' matchers have it, and tells what is wrong."""

from __future__ import annotations

from itertools import permutations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torchvision.ops import box_convert, generalized_box_iou
from transformers.loss.loss_deformable_detr import DeformableDetrHungarianMatcher
from transformers.loss.loss_for_object_detection import HungarianMatcher

from vision_attn.detection.matcher import MatchingCosts, PaddedTargets, Stack, cost_matrix, match
from vision_attn.errors import UserError


def stack_of(outputs, groups=1) -> Stack:
    layers = [*outputs["aux_outputs"], outputs]
    return Stack(*(torch.stack([layer[key] for layer in layers]) for key in ("pred_logits", "pred_boxes")), groups)


def pairs(matching, stack: Stack, most: int) -> list[list[set[tuple[int, int]]]]:
    """[layer][image] → pairs of query and object."""
    layers, images, queries = stack.logits.shape[:3]
    found = [[set() for _ in range(images)] for _ in range(layers)]
    for query, target in zip(matching.query.tolist(), matching.target.tolist(), strict=True):
        image = query // queries % images
        assert target // most == image
        found[query // (queries * images)][image].add((query % queries, target % most))
    return found


def cost_by_hand(logits: Tensor, boxes: Tensor, target, costs: MatchingCosts) -> Tensor:
    """(N, n) of one image and layer, by the formulas and with torchvision's boxes."""
    corners = [box_convert(b, "cxcywh", "xyxy") for b in (boxes, target["boxes"])]
    giou = generalized_box_iou(*corners)
    if costs.kind == "softmax":
        kind = -logits.softmax(-1)[:, target["labels"]]
    else:
        p = logits.sigmoid()[:, target["labels"]]
        if costs.kind == "stable":
            overlap = (giou + 1) / 2
            p = p * (overlap / overlap.max()).sqrt()
        alpha, gamma = costs.focal_alpha, costs.focal_gamma
        kind = alpha * (1 - p) ** gamma * -p.log() - (1 - alpha) * p**gamma * -(1 - p).log()
    distance = torch.cdist(boxes, target["boxes"], p=1)
    return costs.class_weight * kind + costs.bbox_weight * distance - costs.giou_weight * giou


@pytest.mark.parametrize("kind", ["softmax", "focal", "stable"])
def test_costs_follow_the_formulas(make, kind):
    stack = stack_of(make.outputs(3, "softmax" if kind == "softmax" else "sigmoid"))
    targets = make.targets(2, 7, 0)
    costs = MatchingCosts(kind, class_weight=1.7, focal_alpha=0.3, focal_gamma=1.5)
    with torch.no_grad():
        cost = cost_matrix(stack.logits, stack.boxes, PaddedTargets.of(targets, "cpu"), costs)
        assert cost.shape == (3, 3, 13, 7)
        for layer in range(3):
            for image, target in enumerate(targets[:2]):
                n = len(target["labels"])
                expected = cost_by_hand(stack.logits[layer, image], stack.boxes[layer, image], target, costs)
                torch.testing.assert_close(cost[layer, image, :, :n], expected)


def test_padding_does_not_change_stable_costs(make):
    stack = stack_of(make.outputs(2, "sigmoid"))
    first, second = make.targets(2, 7)
    costs = MatchingCosts("stable")
    with torch.no_grad():
        together = cost_matrix(stack.logits, stack.boxes, PaddedTargets.of([first, second], "cpu"), costs)
        alone = cost_matrix(stack.logits[:, :1], stack.boxes[:, :1], PaddedTargets.of([first], "cpu"), costs)
    torch.testing.assert_close(together[:, :1, :, :2], alone)


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 4), st.integers(1, 6), st.sampled_from(["softmax", "focal", "stable"]), st.integers(0, 2**31))
def test_matching_is_the_minimum_of_all_permutations(make, objects, queries, kind, seed):
    """With more objects than queries, too."""
    torch.manual_seed(seed)
    stack = stack_of(make.outputs(2, "softmax" if kind == "softmax" else "sigmoid", layers=2, queries=queries))
    padded = PaddedTargets.of(make.targets(objects, 3), "cpu")
    costs = MatchingCosts(kind)
    (matching,) = match([stack], padded, costs)
    found = pairs(matching, stack, padded.labels.shape[1])
    with torch.no_grad():
        cost = cost_matrix(stack.logits, stack.boxes, padded, costs)
    assert matching.surplus == max(0, objects - queries) + max(0, 3 - queries)
    for layer in range(2):
        for image, n in enumerate(padded.counts):
            size = min(n, queries)
            mine = found[layer][image]
            assert len(mine) == len({q for q, _ in mine}) == len({t for _, t in mine}) == size
            all_pairs = (
                [zip(chosen, range(n), strict=True) for chosen in permutations(range(queries), n)]
                if n <= queries
                else [zip(range(queries), chosen, strict=True) for chosen in permutations(range(n), queries)]
            )
            best = min(sum(float(cost[layer, image, q, t]) for q, t in pairing) for pairing in all_pairs)
            assert sum(float(cost[layer, image, q, t]) for q, t in mine) == pytest.approx(best, abs=1e-5)


@pytest.mark.parametrize("kind", ["softmax", "focal"])
def test_matching_equals_transformers(make, kind):
    stack = stack_of(make.outputs(5, "softmax" if kind == "softmax" else "sigmoid", queries=29))
    targets = make.targets(7, 1, 0, 31, 11)  # 31 objects are more than there are queries
    peer = (HungarianMatcher if kind == "softmax" else DeformableDetrHungarianMatcher)(2.0, 5.0, 2.0)
    padded = PaddedTargets.of(targets, "cpu")
    (matching,) = match([stack], padded, MatchingCosts(kind, class_weight=2.0))
    found = pairs(matching, stack, 31)
    labels = [{"class_labels": t["labels"], "boxes": t["boxes"]} for t in targets]
    for layer in range(3):
        expected = peer({"logits": stack.logits[layer], "pred_boxes": stack.boxes[layer]}, labels)
        assert found[layer] == [set(zip(q.tolist(), t.tolist(), strict=True)) for q, t in expected]
    assert matching.per_layer == [7 + 1 + 29 + 11] * 3
    assert matching.surplus == 2


def test_every_group_is_matched_on_its_own(make):
    outputs = make.outputs(3, queries=3 * 7)
    padded = PaddedTargets.of(make.targets(2, 0, 5), "cpu")
    costs = MatchingCosts()
    stack = stack_of(outputs, groups=3)
    (together,) = match([stack], padded, costs)
    found = pairs(together, stack, 5)
    for group in range(3):
        part = slice(7 * group, 7 * group + 7)
        alone = Stack(stack.logits[:, :, part], stack.boxes[:, :, part])
        expected = pairs(match([alone], padded, costs)[0], alone, 5)
        for layer in range(3):
            for image in range(3):
                mine = {(q - 7 * group, t) for q, t in found[layer][image] if q // 7 == group}
                assert mine == expected[layer][image]


def test_stacks_with_other_numbers_of_queries_are_matched_in_one_go(make):
    first, second = stack_of(make.outputs(2)), stack_of(make.outputs(2, layers=1, queries=41))
    padded = PaddedTargets.of(make.targets(3, 5), "cpu")
    both = match([first, second], padded, MatchingCosts())
    for stack, matching in zip((first, second), both, strict=True):
        assert pairs(matching, stack, 5) == pairs(match([stack], padded, MatchingCosts())[0], stack, 5)


def test_duplicate_boxes_get_a_query_each(make):
    target = make.targets(1)[0]
    twice = [{key: value.repeat(4, *[1] * (value.ndim - 1)) for key, value in target.items()}]
    stack = stack_of(make.outputs(1))
    (matching,) = match([stack], PaddedTargets.of(twice, "cpu"), MatchingCosts())
    assert [len(layer[0]) for layer in pairs(matching, stack, 4)] == [4, 4, 4]


@pytest.mark.parametrize("classification", ["softmax", "focal"])
@pytest.mark.parametrize(
    ("key", "value", "says"),
    [
        ("pred_boxes", float("nan"), r"predicted boxes became NaN in decoder layer 2 of 3 \(images 1 of the batch\)"),
        ("pred_logits", float("nan"), r"class logits became NaN in decoder layer 2 of 3 \(images 1 of"),
        ("pred_logits", float("inf"), r"class logits became infinite in decoder layer 2 of 3"),
    ],
)
@pytest.mark.parametrize("counts", [(2, 3), (0, 0)])
def test_predictions_that_are_not_finite_are_named(make, classification, key, value, says, counts):
    outputs = make.outputs(2, "softmax" if classification == "softmax" else "sigmoid")
    with torch.no_grad():
        outputs["aux_outputs"][1][key][1, 4, 2] = value
    with pytest.raises(UserError, match=says + ".*gradient_clip_val"):
        match([stack_of(outputs)], PaddedTargets.of(make.targets(*counts), "cpu"), MatchingCosts(classification))


@pytest.mark.parametrize("label", [5, -1, 90])
@pytest.mark.parametrize("classification", ["softmax", "focal"])
def test_labels_beyond_the_head_are_named(make, label, classification):
    targets = make.targets(3, 1)
    targets[1]["labels"][0] = label
    stack = stack_of(make.outputs(2, "softmax" if classification == "softmax" else "sigmoid"))
    with pytest.raises(UserError, match=rf"the label {label}, but the model's head knows the 5 classes 0 … 4"):
        match([stack], PaddedTargets.of(targets, "cpu"), MatchingCosts(classification))


def test_target_boxes_that_are_not_finite_are_not_blamed_on_the_model(make):
    targets = make.targets(3, 1)
    targets[0]["boxes"][2, 1] = float("nan")
    with pytest.raises(UserError, match="a target box is not a finite number"):
        match([stack_of(make.outputs(2))], PaddedTargets.of(targets, "cpu"), MatchingCosts())


@pytest.mark.parametrize("groups", [1, 3])
def test_surplus_counts_objects_and_not_groups(make, groups):
    """Every group has all objects, so an object beyond its queries is one object."""
    stack = stack_of(make.outputs(3, queries=7 * groups), groups)
    (matching,) = match([stack], PaddedTargets.of(make.targets(11, 2, 0), "cpu"), MatchingCosts())
    assert matching.surplus == 4
    assert matching.per_layer == [groups * (7 + 2)] * 3


def test_one_transfer_per_step(make, monkeypatch):
    """However many layers, images and stacks there are."""
    calls = []
    cpu = Tensor.cpu
    monkeypatch.setattr(Tensor, "cpu", lambda self: calls.append(1) or cpu(self))
    stacks = [stack_of(make.outputs(3)), stack_of(make.outputs(3, layers=1, queries=31))]
    match(stacks, PaddedTargets.of(make.targets(2, 0, 7), "cpu"), MatchingCosts())
    assert len(calls) == 1
