"""Rollout, flow, relevance and Grad-CAM against their definitions written out."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

import vision_attn as va
from vision_attn.errors import UserError
from vision_attn.explain.gradcam import grad_cam, target_layer
from vision_attn.explain.relevance import detection_relevance, relevance
from vision_attn.explain.rollout import _flow, flow, rollout

SIZES = {
    "vit_tiny_patch16_224": {"img_size": (12, 20), "patch_size": 4, "embed_dim": 12, "num_heads": 3, "depth": 3},
    "cct_2_3x2_32": {"img_size": 12},
    "swin_cifar_tiny": {"img_size": 36},
}


def build(name, std=0.2, **more):
    model = va.create_model(name, **{**SIZES[name], "num_classes": 5, **more}).eval()
    for p in model.parameters():
        torch.nn.init.normal_(p, std=std)
    return model, torch.randn(2, 3, *model.img_size)


@pytest.fixture
def weights_with_gradients(monkeypatch):
    """Weights of the explicit kernel, which keep their gradients."""
    from vision_attn.attention import kernels

    seen, mix = [], kernels.mix_values

    def spy(weights, v):
        weights.requires_grad_() if weights.is_leaf else weights.retain_grad()
        seen.append(weights)
        return mix(weights, v)

    monkeypatch.setattr(kernels, "mix_values", spy)
    return seen


def test_rollout_is_the_product_of_half_attention_half_identity():
    model, images = build("vit_tiny_patch16_224")
    maps = va.attention_maps(model, images)
    product = torch.eye(16).expand(2, -1, -1)
    for m in maps.values():
        product = (0.5 * m.mean(1) + 0.5 * torch.eye(16)) @ product
    torch.testing.assert_close(rollout(model, images), product[:, 0, 1:].unflatten(1, (3, 5)))
    found = rollout(model, images, queries=[4, 9])
    torch.testing.assert_close(found, product[:, [4, 9], 1:].unflatten(2, (3, 5)))
    with pytest.raises(UserError, match=r"no token 16.*it has 16"):
        rollout(model, images, queries=[16])


def test_rollout_reads_the_pool():
    model, images = build("cct_2_3x2_32")
    product = torch.eye(9).expand(2, -1, -1)
    for name, m in va.attention_maps(model, images, layers="blocks*").items():
        assert name.startswith("blocks")
        product = (0.5 * m.mean(1) + 0.5 * torch.eye(9)) @ product
    pool = va.attention_maps(model, images)["pool"][:, 0]  # (B, 1, N)
    torch.testing.assert_close(rollout(model, images), (pool @ product)[:, 0].unflatten(1, (3, 3)))


def test_nothing_is_lost_between_the_stages_of_a_swin():
    model, images = build("swin_cifar_tiny", img_size=32)  # whole windows: no filling that could take a share
    found = rollout(model, images)
    assert found.shape == (2, 16, 16)
    torch.testing.assert_close(found.sum((1, 2)), torch.ones(2))
    odd, images = build("swin_cifar_tiny", img_size=28)  # grids of 14, 7 and 4: merging at a border
    assert rollout(odd, images).shape == (2, 14, 14)
    assert relevance(odd, images).shape == (2, 14, 14)


def test_flow_is_the_largest_by_a_linear_program():
    from scipy.optimize import linprog

    rng = np.random.default_rng(0)
    layers, n = 3, 4
    steps = rng.random((layers, n, n)) ** 3
    steps /= steps.sum(-1, keepdims=True)
    read = np.array([0.0, 0.5, 0.0, 0.5])
    found = _flow(steps, read, 0)
    # variables: head to last tokens, then each layer's pipes
    pipes = [(("head", 0), (layers, j), read[j]) for j in range(n)]
    for layer, i, j in itertools.product(range(layers, 0, -1), range(n), range(n)):
        pipes.append(((layer, i), (layer - 1, j), steps[layer - 1, i, j]))
    nodes = [(layer, i) for layer in range(layers + 1) for i in range(n)]
    for sink in range(n):
        inner = [node for node in nodes if node != (0, sink)]
        balance = np.array([[(b == node) - (a == node) for a, b, _ in pipes] for node in inner], float)
        gain = -np.array([float(b == (0, sink)) for _, b, _ in pipes])
        answer = linprog(gain, A_eq=balance, b_eq=np.zeros(len(inner)), bounds=[(0, c) for *_, c in pipes])
        assert abs(found[sink] + answer.fun) < 1e-4


def test_flow_of_models():
    model, images = build("vit_tiny_patch16_224")
    found = flow(model, images)
    assert found.shape == (2, 3, 5)
    assert ((found > 0) & (found <= 1)).all()
    swin, images = build("swin_cifar_tiny")
    with pytest.raises(UserError, match="one grid"):
        flow(swin, images)


@pytest.mark.parametrize("kernel", ["explicit", "sdpa"])
def test_relevance_is_gradient_times_weight(kernel, weights_with_gradients):
    model, images = build("vit_tiny_patch16_224", attention={"kernel": "explicit", "num_kv_heads": 1})
    model.all_tokens = True
    logits = model(images)
    logits[:, 3].sum().backward()
    expected = torch.eye(16).expand(2, -1, -1)
    for weights in weights_with_gradients:
        step = (weights.grad * weights).clamp_min(0).mean(1)
        expected = expected + step @ expected
    for block in model.blocks:
        block.attn.kernel = kernel
    model.zero_grad()
    found = relevance(model, images, classes=[3, 3])
    torch.testing.assert_close(found, expected[:, 0, 1:].unflatten(1, (3, 5)), rtol=1e-4, atol=1e-7)
    assert all(p.grad is None for p in model.parameters())
    with pytest.raises(UserError, match="0 to 4 for each of the 2 images"):
        relevance(model, images, classes=[5, 0])


def test_relevance_of_windows_is_gradient_times_weight():
    """The gradient of windows folded into the batch comes back in the order of the plane."""
    model, images = build("swin_cifar_tiny", 0.1)
    for name in ("sdpa", "explicit"):
        for module in model.modules():
            if isinstance(module, va.Attention):
                module.kernel = name
        if name == "sdpa":
            expected = relevance(model, images)
    torch.testing.assert_close(relevance(model, images), expected, rtol=1e-3, atol=1e-6)


def test_relevance_of_a_detector_follows_both_modalities(weights_with_gradients):
    torch.manual_seed(1)
    model = va.create_model("detr_tiny", attention={"kernel": "explicit"}).eval()
    image = torch.randn(1, 3, 64, 96)
    model(image)["pred_logits"][0, 7, 2].backward()
    steps = [(w.grad * w).clamp_min(0).mean((0, 1)) for w in weights_with_gradients]
    encoder, decoder = steps[:2], steps[2:]
    images = torch.eye(96)
    for step in encoder:
        images = images + step @ images
    queries, cross = torch.eye(20), torch.zeros(20, 96)

    def normalized(r):  # equations 8 and 9 of the paper: R = R̂ + 1, where the rows of R̂ are made to sum to 1
        gained = r - torch.eye(len(r))
        return torch.stack([row / row.sum() if row.sum() > 0 else row for row in gained]) + torch.eye(len(r))

    for own, seen in zip(decoder[0::2], decoder[1::2], strict=True):
        queries, cross = queries + own @ queries, cross + own @ cross
        cross = cross + normalized(queries).T @ seen @ normalized(images)
    found = detection_relevance(model, image, [3, 7], [0, 2])
    assert found.shape == (2, 8, 12)
    torch.testing.assert_close(found[1].flatten(), cross[7], rtol=1e-3, atol=1e-8)
    with pytest.raises(UserError, match="no detection transformer"):
        detection_relevance(build("vit_tiny_patch16_224")[0], torch.randn(1, 3, 12, 20), [0], [0])
    with pytest.raises(UserError, match="for classifiers"):
        relevance(model, image)


@pytest.mark.parametrize("name", ["vit_tiny_patch16_224", "cct_2_3x2_32", "swin_cifar_tiny", "resnet8_cifar"])
def test_grad_cam_is_the_weighted_sum_of_features(name):
    pytest.importorskip("pytorch_grad_cam")
    if name.startswith("resnet"):
        model, images = va.create_model(name, num_classes=5).eval(), torch.randn(2, 3, 32, 32)
    else:
        model, images = build(name)
    kept = []
    layer = model.get_submodule(target_layer(model, images))
    handle = layer.register_forward_hook(lambda m, i, o: (o.retain_grad(), kept.append(o))[0])
    model(images)[:, 1].sum().backward()
    handle.remove()
    features, gradient = kept[0].detach(), kept[0].grad
    if features.dim() == 3:
        prefix = getattr(model, "num_prefix_tokens", 0)
        grid = {"vit_tiny_patch16_224": (3, 5), "cct_2_3x2_32": (3, 3), "swin_cifar_tiny": (5, 5)}[name]
        features, gradient = (x[:, prefix:].transpose(1, 2).unflatten(2, grid) for x in (features, gradient))
    cam = (features * gradient.mean((2, 3), keepdim=True)).sum(1).clamp_min(0)
    model.zero_grad()
    model.head.weight.grad = mark = torch.ones_like(model.head.weight)
    found = grad_cam(model, images, classes=[1, 1])
    assert found.shape == (2, *images.shape[-2:])
    assert model.head.weight.grad is mark
    assert all(p.requires_grad for p in model.parameters())
    small = torch.nn.functional.adaptive_avg_pool2d(found[:, None], cam.shape[-2:])[:, 0]
    for a, b in zip(small, cam, strict=True):
        if b.max() > 0:
            correlation = torch.corrcoef(torch.stack([a.flatten(), b.flatten()]))[0, 1]
            assert correlation > 0.9


def test_grad_cam_of_a_layer_that_is_not_there():
    pytest.importorskip("pytorch_grad_cam")
    with pytest.raises(UserError, match=r"no layer 'layer9'.*Did you mean layer"):
        grad_cam(va.create_model("resnet8_cifar"), torch.randn(1, 3, 32, 32), layer="layer9")
