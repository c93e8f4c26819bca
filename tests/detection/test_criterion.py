"""Losses equal transformers', values and gradients; and what must hold of any."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torchvision.ops import box_convert, box_iou, generalized_box_iou_loss, sigmoid_focal_loss
from transformers import RTDetrConfig
from transformers.loss.loss_deformable_detr import DeformableDetrForObjectDetectionLoss
from transformers.loss.loss_for_object_detection import ForObjectDetectionLoss
from transformers.loss.loss_rt_detr import RTDetrLoss

from vision_attn.detection import losses as loss_functions
from vision_attn.detection.criterion import Criterion, CriterionConfig
from vision_attn.detection.denoising import make_denoising
from vision_attn.errors import UserError

KINDS = ["softmax", "focal", "varifocal", "stable"]
COUNTS = (7, 0, 1, 17, 3)  # 17 objects, 13 queries


def head(kind: str) -> str:
    return "softmax" if kind == "softmax" else "sigmoid"


def criterion_of(make, kind: str, **options: Any) -> Criterion:
    return Criterion(make.classes, CriterionConfig(loss=kind, **options), head(kind))


def their_labels(targets):
    return [{"class_labels": t["labels"], "boxes": t["boxes"]} for t in targets]


@pytest.mark.parametrize("counts", [COUNTS, (0, 0), (1,)])
@pytest.mark.parametrize("kind", ["softmax", "focal"])
def test_equals_transformers(make, kind, counts):
    outputs, targets = make.outputs(len(counts), head(kind), layers=4), make.targets(*counts)
    got = criterion_of(make, kind, eos_coef=0.2)(outputs, targets)
    config = SimpleNamespace(
        class_cost=1 if kind == "softmax" else 2,
        bbox_cost=5,
        giou_cost=2,
        num_labels=make.classes,
        eos_coefficient=0.2,
        auxiliary_loss=True,
        bbox_loss_coefficient=5,
        giou_loss_coefficient=2,
        decoder_layers=4,
        focal_alpha=0.25,
        two_stage=False,
    )
    layers = [*outputs["aux_outputs"], outputs]
    logits, boxes = (torch.stack([layer[key] for layer in layers]) for key in ("pred_logits", "pred_boxes"))
    function = ForObjectDetectionLoss if kind == "softmax" else DeformableDetrForObjectDetectionLoss
    loss, parts, _ = function(logits[-1], their_labels(targets), "cpu", boxes[-1], config, logits, boxes)
    torch.testing.assert_close(got["loss"], loss)
    for name, theirs in (("class", "loss_ce"), ("bbox", "loss_bbox"), ("giou", "loss_giou")):
        torch.testing.assert_close(got[f"loss_{name}"], parts[theirs].detach())
        aux = sum(parts[f"{theirs}_{i}"] for i in range(3))
        torch.testing.assert_close(got[f"loss_{name}_aux"], aux.detach())
    leaves = make.leaves(outputs)
    expected = torch.autograd.grad(loss, leaves)
    for mine, other in zip(torch.autograd.grad(got["loss"], leaves), expected, strict=True):
        torch.testing.assert_close(mine, other)
    assert got["surplus"] == sum(max(0, n - 13) for n in counts)
    assert not got["surplus"].requires_grad


def test_varifocal_equals_rt_detrs(make):
    outputs, targets = make.outputs(5, "sigmoid", layers=1), make.targets(*COUNTS)
    got = criterion_of(make, "varifocal")(outputs, targets)
    peer = RTDetrLoss(RTDetrConfig(num_labels=make.classes, matcher_alpha=0.25, matcher_gamma=2.0))
    theirs = {"logits": outputs["pred_logits"], "pred_boxes": outputs["pred_boxes"]}
    parts = peer(theirs, their_labels(targets))
    torch.testing.assert_close(got["loss_class"] + 5 * got["loss_bbox"] + 2 * got["loss_giou"], got["loss"].detach())
    loss = parts["loss_vfl"] / peer.weight_dict["loss_vfl"]
    torch.testing.assert_close(got["loss_class"], loss.detach())
    (expected,) = torch.autograd.grad(loss, outputs["pred_logits"], retain_graph=True)
    (mine,) = torch.autograd.grad(got["loss"], outputs["pred_logits"])
    torch.testing.assert_close(mine, expected)


def test_stable_loss_follows_the_paper(make):
    """Positives learn the squared IoU, scaled to at most 1 by image and layer."""
    outputs, targets = make.outputs(2, "sigmoid", layers=2), make.targets(3, 2)
    criterion = criterion_of(make, "stable", focal_alpha=0.3, focal_gamma=1.5)
    got = criterion(outputs, targets)
    expected = []
    for layer in (*outputs["aux_outputs"], outputs):
        total = 0.0
        for image, target in enumerate(targets):
            logits, boxes = layer["pred_logits"][image], layer["pred_boxes"][image]
            one = {"pred_logits": logits[None].detach(), "pred_boxes": boxes[None].detach()}
            query, index = pairs_of(criterion, one, [target])
            corners = [box_convert(b, "cxcywh", "xyxy") for b in (boxes[query], target["boxes"][index])]
            squared = box_iou(*corners).diagonal().detach() ** 2
            quality = torch.zeros_like(logits)
            quality[query, target["labels"][index]] = squared / squared.max().clamp_min(1e-8)
            positive = torch.zeros_like(logits, dtype=torch.bool)
            positive[query, target["labels"][index]] = True
            p = logits.sigmoid()
            own = 0.3 * (quality - p).abs() ** 1.5 * F.binary_cross_entropy(p, quality, reduction="none")
            other = 0.7 * p**1.5 * -(1 - p).log()
            total = total + torch.where(positive, own, other).sum()
        expected.append(total / 5)
    torch.testing.assert_close(got["loss_class"], expected[1].detach())
    torch.testing.assert_close(got["loss_class_aux"], expected[0].detach())
    (mine,) = torch.autograd.grad(got["loss"], outputs["pred_logits"])
    torch.testing.assert_close(mine, torch.autograd.grad(expected[1], outputs["pred_logits"])[0])


def pairs_of(criterion: Criterion, outputs, targets) -> tuple[Tensor, Tensor]:
    """Query and object of every pair in one layer of one image."""
    from vision_attn.detection.matcher import PaddedTargets, Stack, match

    stack = Stack(outputs["pred_logits"][None], outputs["pred_boxes"][None])
    (matching,) = match([stack], PaddedTargets.of(targets, "cpu"), criterion.costs)
    return matching.query, matching.target


@pytest.mark.parametrize("kind", KINDS)
def test_groups_are_averaged(make, kind):
    """Group DETR: the loss of three groups is the mean of the losses of each."""
    outputs, targets = make.outputs(2, head(kind), queries=3 * 7, groups=3), make.targets(2, 5)
    criterion = criterion_of(make, kind)
    # with softmax the mean over queries weighs groups by their weights, which are equal: as many objects in each
    single = []
    for group in range(3):
        part = slice(7 * group, 7 * group + 7)
        layers = [
            {"pred_logits": o["pred_logits"][:, part], "pred_boxes": o["pred_boxes"][:, part]}
            for o in (*outputs["aux_outputs"], outputs)
        ]
        single.append(criterion({**layers[-1], "aux_outputs": layers[:-1]}, targets)["loss"])
    torch.testing.assert_close(criterion(outputs, targets)["loss"], torch.stack(single).mean())


@pytest.mark.parametrize("contrastive", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_denoising_queries_know_their_objects(make, kind, contrastive):
    counts = (3, 0, 5)
    targets = make.targets(*counts)
    known = make_denoising(
        targets, num_classes=make.classes, num_queries=13, groups=2, label_noise=0.5, box_noise=0.4,
        contrastive=contrastive,
    )  # fmt: skip
    m, logits = known.labels.shape[1], make.classes + (kind == "softmax")
    dn = {
        "pred_logits": torch.randn(3, 3, m, logits).requires_grad_(),
        "pred_boxes": make.boxes(3, 3, m).requires_grad_(),
        "known": known,
    }
    criterion = criterion_of(make, kind, dn_weight=0.7)
    outputs = make.outputs(3, head(kind))
    without, got = criterion(outputs, targets), criterion({**outputs, "dn": dn}, targets)
    expected = dict.fromkeys(("class", "bbox", "giou"), 0.0)
    for layer in range(3):
        classes = torch.full((3, m), make.classes)
        quality = torch.zeros(3, m)
        for image in range(3):
            for query in range(m):
                if not (known.positive[image, query] and known.valid[image, query]):
                    continue
                index = int(known.target[image, query])
                classes[image, query] = targets[image]["labels"][index]
                box, true = dn["pred_boxes"][layer, image, query], targets[image]["boxes"][index]
                corners = [box_convert(b, "cxcywh", "xyxy")[None] for b in (box, true)]
                expected["bbox"] += (box - true).abs().sum() / 16
                expected["giou"] += generalized_box_iou_loss(*corners, reduction="sum", eps=0) / 16
                quality[image, query] = box_iou(*corners).detach()
        expected["class"] += class_loss_by_hand(kind, dn["pred_logits"][layer], classes, quality, known.valid)
    for name, value in expected.items():
        torch.testing.assert_close(got[f"loss_{name}_dn"], value.detach())
    total = expected["class"] + 5 * expected["bbox"] + 2 * expected["giou"]
    torch.testing.assert_close(got["loss"], without["loss"] + 0.7 * total)
    leaves = [dn["pred_logits"], dn["pred_boxes"]]
    mine = torch.autograd.grad(got["loss"], leaves)
    for one, other in zip(mine, torch.autograd.grad(0.7 * total, leaves), strict=True):
        torch.testing.assert_close(one, other)


def class_loss_by_hand(kind: str, logits: Tensor, classes: Tensor, quality: Tensor, valid: Tensor) -> Tensor:
    """Of one layer: (B, M, K) logits, (B, M) classes (5: none), (B, M) IoU."""
    if kind == "softmax":
        weight = torch.tensor([1.0] * 5 + [0.1])
        return F.cross_entropy(logits[valid], classes[valid], weight)
    hot = F.one_hot(classes, 6)[..., :5].float()
    if kind == "varifocal":
        score = hot * quality[..., None]
        weight = 0.75 * logits.detach().sigmoid() ** 2 * (1 - hot) + score
        return F.binary_cross_entropy_with_logits(logits, score, weight, reduction="none")[valid].sum() / 16
    return sigmoid_focal_loss(logits, hot, alpha=0.25, gamma=2)[valid].sum() / 16


def test_the_encoders_proposals_are_matched_like_a_layer(make):
    outputs, targets = make.outputs(3), make.targets(2, 0, 5)
    encoder = make.outputs(3, layers=1, queries=31)
    criterion = criterion_of(make, "softmax", enc_weight=0.3)
    alone, without = criterion(encoder, targets), criterion(outputs, targets)
    got = criterion({**outputs, "enc_outputs": encoder}, targets)
    torch.testing.assert_close(got["loss"], without["loss"] + 0.3 * alone["loss"])
    for name in ("class", "bbox", "giou"):
        torch.testing.assert_close(got[f"loss_{name}_enc"], alone[f"loss_{name}"])


@settings(max_examples=25, deadline=None)
@given(st.sampled_from(KINDS), st.lists(st.integers(0, 9), min_size=1, max_size=4), st.integers(0, 2**31))
def test_the_order_of_targets_means_nothing(make, kind, counts, seed):
    torch.manual_seed(seed)
    outputs, targets = make.outputs(len(counts), head(kind), queries=7), make.targets(*counts)
    orders = [torch.randperm(n) for n in counts]
    shuffled = [{k: v[order] for k, v in t.items()} for t, order in zip(targets, orders, strict=True)]
    criterion = criterion_of(make, kind)
    got, other = criterion(outputs, targets), criterion(outputs, shuffled)
    assert got.keys() == other.keys()
    for name, value in got.items():
        torch.testing.assert_close(value, other[name], rtol=1e-5, atol=1e-5)
    leaves = make.leaves(outputs)
    pairs = zip(*(torch.autograd.grad(loss["loss"], leaves) for loss in (got, other)), strict=True)
    for mine, same in pairs:
        torch.testing.assert_close(mine, same, rtol=1e-4, atol=1e-5)


@settings(max_examples=25, deadline=None)
@given(st.sampled_from(KINDS), st.lists(st.integers(0, 5), min_size=1, max_size=3), st.integers(0, 2**31))
def test_perfect_predictions_cost_least(make, kind, counts, seed):
    torch.manual_seed(seed)
    targets = make.targets(*counts)
    logits = torch.full((len(counts), 7, 6), -30.0)
    boxes = make.boxes(len(counts), 7)
    logits[..., 5] = 30.0
    for image, target in enumerate(targets):
        for index, (label, box) in enumerate(zip(target["labels"], target["boxes"], strict=True)):
            logits[image, index], boxes[image, index] = -30.0, box
            logits[image, index, label] = 30.0
    if kind != "softmax":
        logits = logits[..., :5]
    criterion = criterion_of(make, kind)
    perfect = criterion({"pred_logits": logits, "pred_boxes": boxes}, targets)
    assert perfect["loss"] == pytest.approx(0, abs=2e-5)
    assert perfect["class_error"] == 0
    noise = 8 * torch.randn_like(logits)
    worse = criterion({"pred_logits": logits + noise, "pred_boxes": (boxes + 0.01 * torch.rand(4)).abs()}, targets)
    assert worse["loss"] >= perfect["loss"] - 1e-6


@pytest.mark.parametrize("kind", KINDS)
def test_bfloat16_predictions_have_float32_losses(make, kind):
    outputs, targets = make.outputs(3, head(kind)), make.targets(2, 0, 5)
    criterion = criterion_of(make, kind)

    def cast(layer):
        return {k: v.detach().bfloat16().requires_grad_() for k, v in layer.items() if k != "aux_outputs"}

    half = {**cast(outputs), "aux_outputs": [cast(layer) for layer in outputs["aux_outputs"]]}
    with torch.autocast("cpu", torch.bfloat16):
        got = criterion(half, targets)
    layers = [{k: v.float() for k, v in layer.items()} for layer in (*half["aux_outputs"], cast(half))]
    expected = criterion({**layers[-1], "aux_outputs": layers[:-1]}, targets)
    assert got["loss"].dtype == torch.float32
    torch.testing.assert_close(got, expected)
    got["loss"].backward()
    assert all(leaf.grad.isfinite().all() for leaf in make.leaves(half))


@pytest.mark.parametrize("kind", KINDS)
def test_degenerate_targets_keep_gradients_finite(make, kind):
    outputs, targets = make.outputs(1, head(kind)), make.targets(4)
    targets[0]["boxes"][1, 2:] = 0  # a point
    targets[0]["boxes"][2] = targets[0]["boxes"][3]  # twice the same
    criterion_of(make, kind)(outputs, targets)["loss"].backward()
    assert all(leaf.grad.isfinite().all() for leaf in make.leaves(outputs))


@pytest.mark.parametrize("kind", KINDS)
def test_empty_images_teach_that_nothing_is_there(make, kind):
    outputs, targets = make.outputs(2, head(kind)), make.targets(0, 0)
    got = criterion_of(make, kind)(outputs, targets)
    assert got["loss_bbox"] == got["loss_giou"] == got["class_error"] == got["surplus"] == 0
    got["loss"].backward()
    for layer in (*outputs["aux_outputs"], outputs):
        gradient = layer["pred_logits"].grad
        if kind == "softmax":
            assert (gradient[..., 5] < 0).all()
            assert (gradient[..., :5] > 0).all()
        else:
            assert (gradient > 0).all()
        assert (layer["pred_boxes"].grad == 0).all()


def test_class_error_counts_matched_queries(make):
    targets = make.targets(3)
    logits, boxes = torch.zeros(1, 7, 6), make.boxes(1, 7)
    boxes[0, :3] = targets[0]["boxes"]
    for index, label in enumerate(targets[0]["labels"]):
        logits[0, index, label if index else (label + 1) % 5] = 9.0  # the first is wrong
    logits[..., 5] += 20.0  # no object does not count
    config = CriterionConfig(cost_class=0.0)
    got = Criterion(make.classes, config)({"pred_logits": logits, "pred_boxes": boxes}, targets)
    torch.testing.assert_close(got["class_error"], torch.tensor(1 / 3))


@pytest.mark.parametrize("gamma", [0.5, 1.0, 2.0])
@pytest.mark.parametrize("constant", [False, True])
def test_the_focused_loss_has_the_gradient_it_claims(gamma, constant):
    x = torch.tensor([-90.0, -7.0, -1.0, 0.0, 0.3, 5.0, 90.0], dtype=torch.float64, requires_grad=True)
    y = x.detach().clone().requires_grad_()
    got = loss_functions._Focused.apply(x, gamma, constant)
    weight = (y.detach() if constant else y).sigmoid() ** gamma
    expected = weight * -F.logsigmoid(-y)
    torch.testing.assert_close(got, expected)
    (mine,), (other,) = torch.autograd.grad(got.sum(), x), torch.autograd.grad(expected.sum(), y)
    torch.testing.assert_close(mine, other)


def test_softplus_is_pytorchs():
    x = torch.linspace(-200, 200, 4001)
    torch.testing.assert_close(loss_functions.softplus(x), F.softplus(x), rtol=1e-6, atol=2e-7)


def test_number_of_boxes_is_the_mean_over_processes(make, monkeypatch):
    """Another process with 11 objects; evaluation, where processes may have other numbers of batches, does not ask."""
    distributed = torch.distributed
    monkeypatch.setattr(distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(distributed, "get_world_size", lambda: 2)
    monkeypatch.setattr(distributed, "all_reduce", lambda counts: counts.add_(11))
    outputs, targets = make.outputs(2), make.targets(2, 3)
    criterion = criterion_of(make, "softmax")
    shared, own = criterion.train()(outputs, targets), criterion.eval()(outputs, targets)
    torch.testing.assert_close(shared["loss_bbox"], own["loss_bbox"] * 5 / 8)
    torch.testing.assert_close(shared["loss_class"], own["loss_class"])


class HostReads(TorchDispatchMode):
    """Counts what makes the host wait for a GPU, also on a CPU: values that are read, and tensors of host numbers.

    ``.cpu()`` does nothing here and is not seen; ``lift_fresh`` is what follows ``torch.tensor``, ``new_tensor``,
    ``from_numpy`` and an index that is a list.
    """

    reads = ("aten::_local_scalar_dense", "aten::nonzero", "aten::is_nonzero", "aten::equal", "aten::masked_select")

    def __init__(self) -> None:
        super().__init__()
        self.read: list[str] = []
        self.made = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function.name()
        boolean = name.startswith("aten::index") and any(
            getattr(index, "dtype", None) == torch.bool for index in (args[1] if isinstance(args[1], list) else [])
        )
        if name in self.reads or boolean:
            self.read.append(name)
        self.made += name == "aten::lift_fresh"
        return function(*args, **(kwargs or {}))


def test_what_makes_the_host_wait_is_noticed():
    x = torch.arange(7.0)
    for call in (lambda: bool(x.sum() > 0), x.sum().item, x.nonzero, lambda: x[x > 3]):
        with HostReads() as seen:
            call()
        assert seen.read
    for call in (lambda: x[[1, 0]], lambda: x.new_tensor(3.0), lambda: torch.tensor([3]), lambda: torch.as_tensor([3])):
        with HostReads() as seen:
            call()
        assert seen.made == 1


@pytest.mark.parametrize("kind", ["focal", "varifocal", "stable"])
def test_a_step_waits_for_the_device_once(make, kind, monkeypatch):
    """Model, matching, losses and gradients, with all that a detector can have; images padded, one without objects."""
    import vision_attn as va
    from vision_attn.detection import host, matcher

    sent, fetched = [], []
    cpu, from_host = Tensor.cpu, host.from_host
    monkeypatch.setattr(Tensor, "cpu", lambda self: fetched.append(1) or cpu(self))
    for module in (host, matcher):  # out of pinned memory, for which nobody waits
        monkeypatch.setattr(module, "from_host", lambda x, device: sent.append(1) or from_host(x, device))
    small = {"embed_dim": 24, "num_heads": 3, "enc_layers": 1, "dec_layers": 3, "num_queries": 5}
    switches = {"conditional": True, "modulate": True, "box_bias": True, "query_selection": True, "query_groups": 2}
    model = va.create_model(
        "dn_detr_tiny", num_classes=make.classes, dn_groups=3, dn_contrastive=True, **small, **switches
    )
    mask = torch.ones(3, 40, 56, dtype=torch.bool)
    mask[1, :, 8:] = False
    images, targets = torch.randn(3, 3, 40, 56), make.targets(2, 0, 7)
    criterion = criterion_of(make, kind)
    with HostReads() as seen:
        criterion(model.train()(images, mask, targets), targets)["loss"].backward()
    assert not seen.read
    assert len(fetched) == 1
    assert seen.made == len(sent) <= 4  # counts of objects for denoising and stable costs, pairs of two stacks


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"loss": "focal"}, "criterion.loss focal does not fit a softmax head: take softmax"),
        ({"eos_coef": -1.0}, "criterion.eos_coef must not be negative"),
        ({"focal_gamma": float("nan")}, "criterion.focal_gamma must not be negative"),
        ({"cost_class": 0.0, "cost_bbox": 0.0, "cost_giou": 0.0}, "one of cost_class, cost_bbox and cost_giou"),
    ],
)
def test_what_makes_no_sense_is_refused(options, says):
    with pytest.raises(UserError, match=says):
        Criterion(5, CriterionConfig(**options))


def test_another_number_of_classes_is_refused(make):
    with pytest.raises(UserError, match="gives 6 logits per query, 7 classes with the softmax loss need 8"):
        Criterion(7)(make.outputs(1), make.targets(1))


def test_defaults_follow_the_head():
    assert Criterion(5).kind == "softmax"
    assert Criterion(5, classification="sigmoid").kind == "focal"
    assert Criterion(5).costs.class_weight == 1
    assert Criterion(5, classification="sigmoid").costs.class_weight == 2
