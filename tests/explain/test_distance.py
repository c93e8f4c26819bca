"""How far, how sharply and how differently heads look; which pixels move a feature."""

from __future__ import annotations

import math

import pytest
import torch

import vision_attn as va
from vision_attn.errors import UserError
from vision_attn.explain.distance import _divergences, _statistics, head_statistics, mean_attention_distance
from vision_attn.explain.planes import Plane
from vision_attn.explain.receptive_field import effective_receptive_field

VIT = {"img_size": (20, 28), "patch_size": 4, "embed_dim": 12, "num_heads": 3, "depth": 2, "num_classes": 5}


def vit(**more):
    return va.create_model("vit_tiny_patch16_224", **VIT, **more)


def test_distance_equals_a_loop_over_pairs():
    model = vit()
    for p in model.parameters():
        torch.nn.init.normal_(p, std=0.4)
    images = torch.randn(2, 3, 20, 28)
    weights = va.attention_maps(model, images)["blocks.1.attn"]
    expected = torch.zeros(3)
    for q in range(35):
        row = weights[:, :, 1 + q, 1:]
        row = row / row.sum(-1, keepdim=True)
        for k in range(35):
            apart = 4 * math.hypot(q // 7 - k // 7, q % 7 - k % 7)
            expected += row[:, :, k].mean(0) * apart / 35
    found = mean_attention_distance(model, images)
    assert list(found) == ["blocks.0.attn", "blocks.1.attn"]
    torch.testing.assert_close(found["blocks.1.attn"], expected, rtol=1e-4, atol=1e-4)


def test_entropy_and_divergence_of_known_heads():
    m = 8
    looks_everywhere = torch.full((m,), 1 / m)
    looks_at_one, looks_at_another = torch.eye(m)[1], torch.eye(m)[5]
    weights = torch.stack([looks_everywhere, looks_at_one, looks_at_another])[None, :, None].expand(2, 3, 7, m)
    found = _statistics([(0, weights[:, :, :3]), (3, weights[:, :, 3:])], (None, None), False, True)
    torch.testing.assert_close(found.entropy, torch.tensor([math.log(m), 0.0, 0.0]))
    assert found.distance.isnan().all()
    torch.testing.assert_close(found.diversity[1, 2], torch.tensor(1.0))  # nothing in common: one bit
    torch.testing.assert_close(found.diversity, found.diversity.T)
    assert (found.diversity.diag() == 0).all()
    torch.testing.assert_close(_divergences(weights[:, :1].expand(-1, 2, -1, -1)), torch.zeros(2, 2))


def test_windows_look_no_farther_than_they_reach():
    model = va.create_model("swin_cifar_tiny", img_size=(24, 40), num_classes=5)  # padded: 12 × 20, windows of 4
    statistics = head_statistics(model, torch.randn(2, 3, 24, 40))
    assert len(statistics) == 8
    for name, found in statistics.items():
        stride = 2 * 2 ** int(name.split(".")[1])
        assert 0 < float(found.distance.max()) < stride * 3 * math.sqrt(2), name
        assert float(found.entropy.max()) <= math.log(16) + 1e-5


def test_padded_windows_are_cut_and_in_order():
    model = va.create_model("swin_cifar_tiny", img_size=36, num_classes=5)  # 18 × 18, filled up to 20 × 20
    maps = va.attention_maps(model, torch.randn(1, 3, 36, 36), layers="layers.0.blocks.1.attn")
    weights = maps["layers.0.blocks.1.attn"]
    plane = maps.planes["layers.0.blocks.1.attn"][1]
    assert (plane.grid, plane.stride, plane.length) == ((18, 18), (2.0, 2.0), 400)
    assert weights.shape == (1, 3, 400, 400)
    assert plane.places().flatten().tolist() == [r * 20 + c for r in range(18) for c in range(18)]


def test_plane_of_a_plain_grid():
    plane = Plane(2, (3, 5), (4.0, 8.0))
    values = torch.arange(17.0).expand(2, 17)
    assert plane.to_image(values).shape == (2, 3, 5)
    assert plane.to_image(values)[0, 1, 2] == 2 + 5 + 2
    assert plane.centres()[7].tolist() == [6.0, 20.0]
    with pytest.raises(ValueError, match="16 values"):
        plane.to_image(torch.zeros(16))


def test_a_model_without_patches_has_no_distance():
    with pytest.raises(UserError, match="no attention layer"):
        mean_attention_distance(va.create_model("resnet8_cifar"), torch.randn(1, 3, 32, 32))


def test_receptive_field_of_one_convolution_is_its_kernel():
    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = torch.nn.Conv2d(3, 64, 5, padding=2)

        def forward_features(self, x):
            return self.conv(x)

    field = effective_receptive_field(Net(), torch.randn(64, 3, 20, 22))
    y, x = torch.nonzero(field.strength).T
    assert (int(y.min()), int(y.max()), int(x.min()), int(x.max())) == (8, 12, 9, 13)
    assert field.centre == (10.5, 11.5)
    torch.testing.assert_close(field.strength.sum(), torch.tensor(1.0))
    assert field.side(0.99) == 5
    assert field.gaussian_side() == 5


@pytest.mark.parametrize("name", ["vit_tiny_patch16_224", "cct_2_3x2_32", "swin_cifar_tiny", "resnet8_cifar"])
def test_receptive_fields_of_all_families(name):
    size = {"depth": 2, "embed_dim": 24, "num_heads": 2, "patch_size": 4} if name.startswith("vit") else {}
    model = va.create_model(name, img_size=32, num_classes=5, **size).train()
    field = effective_receptive_field(model, torch.randn(3, 3, 32, 32))
    assert field.strength.shape == (32, 32)
    assert 1 <= field.side(0.5) <= field.side(0.9) <= 65
    assert model.training
    assert all(p.grad is None for p in model.parameters())


def test_receptive_field_of_a_layer_that_is_not_there():
    with pytest.raises(UserError, match=r"no layer 'layer7'.*layer"):
        effective_receptive_field(va.create_model("resnet8_cifar"), torch.randn(1, 3, 32, 32), layer="layer7")
