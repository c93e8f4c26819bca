"""Grad-CAM looks at features that lie on the image and lead to the answer, or says that there are none."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import vision_attn as va
from vision_attn.errors import UserError
from vision_attn.explain import grad_cam
from vision_attn.explain.gradcam import target_layer

pytest.importorskip("pytorch_grad_cam")


@pytest.mark.parametrize("glimpses", [1, 3])
@pytest.mark.parametrize("batch", [1, 2, 3])
def test_a_model_that_cuts_squares_out_of_the_image_has_none(glimpses, batch):
    model = va.create_model("glimpse_small_32", num_glimpses=glimpses).eval()
    with pytest.raises(UserError, match=r"GlimpseNet has no layer .*no Grad-CAM\. attention_maps shows"):
        grad_cam(model, torch.randn(batch, 3, 32, 32))


class Parts(nn.Module):
    """A picture's halves are put into the batch, beside a layer that nobody reads."""

    def __init__(self, whole: bool) -> None:
        super().__init__()
        self.first, self.halves, self.unread = nn.Conv2d(3, 4, 3), nn.Conv2d(4, 6, 3), nn.Conv2d(3, 2, 3)
        self.whole, self.head = whole, nn.Linear(6, 5)

    def forward(self, x):
        features = self.first(x if self.whole else torch.cat(x.split(x.shape[-1] // 2, -1)))
        features = torch.cat(features.split(features.shape[-1] // 2, -1)) if self.whole else features
        y = self.halves(features).mean((2, 3))
        self.unread(x)
        return self.head(y.view(2, -1, 6).mean(0))


def test_features_of_parts_of_an_image_are_passed_over():
    images = torch.randn(3, 3, 12, 16)
    model = Parts(whole=True)
    assert target_layer(model, images) == "first"
    for p in model.parameters():
        p.requires_grad_(False)
    assert target_layer(model, images) == "first"
    assert grad_cam(model, images).shape == (3, 12, 16)
    with pytest.raises(UserError, match="Parts has no layer of features on the image that lead to its answer"):
        target_layer(Parts(whole=False), images)


def test_the_last_layer_of_a_model_that_reads_its_last_token():
    model = va.create_model("gpt_tiny_patch4_32", depth=2, global_pool="last").eval()
    images = torch.randn(2, 3, 32, 32)
    assert target_layer(model, images) == "blocks.1.norm1"
    assert grad_cam(model, images).shape == (2, 32, 32)


def test_a_model_that_is_no_classifier_and_a_class_that_is_not_there():
    with pytest.raises(UserError, match="DETR is no classifier"):
        grad_cam(va.create_model("detr_tiny"), torch.randn(1, 3, 32, 32))
    with pytest.raises(UserError, match="one of 0 to 9 for each of the 2 images"):
        grad_cam(va.create_model("resnet8_cifar", num_classes=10), torch.randn(2, 3, 32, 32), classes=[1, 10])
