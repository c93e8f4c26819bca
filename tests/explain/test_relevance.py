"""Relevance is the same whichever parameters are frozen, and leaves gradients alone."""

from __future__ import annotations

import pytest
import torch

import vision_attn as va
from vision_attn.errors import UserError
from vision_attn.explain import detection_relevance, grad_cam, relevance

MODELS = {
    "vit_tiny_patch16_224": {"img_size": (12, 20), "patch_size": 4, "embed_dim": 12, "num_heads": 3, "depth": 3},
    "cct_2_3x2_32": {"img_size": 12},
    "swin_cifar_tiny": {"img_size": (36, 28)},
    "gpt_tiny_patch4_32": {"img_size": 12, "embed_dim": 12, "depth": 2},
}


def build(name, **more):
    model = va.create_model(name, num_classes=5, **more).eval()
    for p in model.parameters():
        torch.nn.init.normal_(p, std=0.15)
    return model


def freeze(model, what):
    for name, p in model.named_parameters():
        p.requires_grad_(what == "none" or (what == "all but the head" and name.startswith(("head", "class_embed"))))


@pytest.mark.parametrize("what", ["all but the head", "all"])
@pytest.mark.parametrize("name", list(MODELS))
def test_frozen_classifiers(name, what):
    model = build(name, **MODELS[name])
    images = torch.randn(2, 3, *model.img_size)
    expected = relevance(model, images, classes=[1, 3])
    assert expected.std() > 0
    freeze(model, what)
    wanted = [p.requires_grad for p in model.parameters()]
    found = relevance(model, images, classes=[1, 3])
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-6)
    assert [p.requires_grad for p in model.parameters()] == wanted
    assert all(p.grad is None for p in model.parameters())
    assert not images.requires_grad


@pytest.mark.parametrize("what", ["all but the head", "all"])
@pytest.mark.parametrize("name", ["detr_tiny", "dn_detr_tiny"])
def test_frozen_detectors(name, what):
    """Of the first layer of the decoder too, whose self-attention does not depend on the image at all."""
    model = build(name)
    image = torch.randn(1, 3, 40, 64)
    expected = detection_relevance(model, image, [3, 7], [0, 2])
    assert (expected.flatten(1).std(1) > 0).all()
    freeze(model, what)
    found = detection_relevance(model, image, [3, 7], [0, 2])
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-7)
    for options, message in ((([20], [0]), "no query 20"), (([0], [99]), "no class 99")):
        with pytest.raises(UserError, match=message):
            detection_relevance(model, image, *options)


def test_an_answer_that_depends_on_no_attention_is_refused():
    model = build("vit_tiny_patch16_224", **MODELS["vit_tiny_patch16_224"])
    images = torch.randn(2, 3, 12, 20)
    model.forward_head = lambda x, grid=None: torch.zeros(2, 5)
    with pytest.raises(UserError, match="has no relevance: the answer depends on no layer"):
        relevance(model, images)


def test_grad_cam_of_a_frozen_model_is_the_same():
    pytest.importorskip("pytorch_grad_cam")
    model = build("vit_tiny_patch16_224", **MODELS["vit_tiny_patch16_224"])
    images = torch.randn(2, 3, 12, 20)
    expected = grad_cam(model, images, classes=[1, 3])
    freeze(model, "all")
    torch.testing.assert_close(grad_cam(model, images, classes=[1, 3]), expected)
