from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import nn

import vision_attn as va
from vision_attn.contrast.config import Arm
from vision_attn.contrast.looks import look, receptive_fields


class Stack(nn.Module):
    """Two 3x3 convolutions whose weights are all one: what a pixel moves is known exactly."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.Sequential(*(nn.Conv2d(1, 1, 3, padding=1, bias=False) for _ in range(2)))
        self.norm = nn.BatchNorm2d(1)
        for conv in self.blocks:
            nn.init.ones_(conv.weight)

    def forward(self, x):
        return self.norm(self.blocks(x)).mean((2, 3))


def test_the_field_of_known_convolutions():
    fields = receptive_fields(Stack(), torch.randn(3, 1, 11, 13))
    assert [row["layer"] for row in fields] == ["blocks.0", "blocks.1"]  # the norm sees no more than its input
    # 3x3 equal weights: 4 at distance 1, 4 at sqrt(2), one at 0
    assert fields[0]["distance"] == pytest.approx((4 + 4 * 2**0.5) / 9)
    assert fields[0]["radius"] == pytest.approx(2**0.5)
    weights = torch.tensor([1.0, 2, 3, 2, 1])
    mass = weights[:, None] * weights / 81
    away = torch.hypot(*torch.meshgrid(torch.arange(-2.0, 3), torch.arange(-2.0, 3), indexing="ij"))
    assert fields[1]["distance"] == pytest.approx(float((mass * away).sum()), rel=1e-5)


@pytest.mark.parametrize("name", ["cct_2_3x2_32", "swin_cifar_tiny", "resnet8_cifar"])
def test_fields_grow_and_distances_are_within_the_image(name):
    model = va.create_model(name, num_classes=3, img_size=16).train()
    before = {key: value.clone() for key, value in model.state_dict().items()}
    fields = receptive_fields(model, torch.randn(2, 3, 16, 16))
    assert fields
    assert fields[0]["distance"] <= fields[-1]["distance"] + 1e-6
    assert all(0 < row[key] < 16 * 2**0.5 for row in fields for key in ("distance", "radius"))
    assert model.training
    for key, value in model.state_dict().items():
        assert torch.equal(value, before[key]), key


def test_all_classes_are_looked_at(plan, monkeypatch):
    """Validation images of a folder come class by class."""
    order = plan.data.val.labels.argsort(stable=True)
    data = dataclasses.replace(plan.data, val=plan.data.val.take(order))
    asked = []
    original = type(data.val).batch
    monkeypatch.setattr(
        type(data.val), "batch", lambda self, rows: asked.append(self.labels[rows]) or original(self, rows)
    )
    model = va.create_model("resnet8_cifar", num_classes=10, img_size=8)
    look(model, data, data.augmenter(Arm(), 0, False), torch.device("cpu"))
    assert len(asked) == 1
    assert asked[0].unique().tolist() == list(range(10))


def test_what_is_kept_of_a_model(plan):
    args = {"patch_size": 2, "embed_dim": 12, "depth": 2, "num_heads": 3}
    vit = va.create_model("vit_tiny_patch16_224", num_classes=10, img_size=8, **args)
    for block in vit.blocks:
        nn.init.zeros_(block.attn.qkv.weight)  # all keys alike: attention is uniform
    augmenter = plan.data.augmenter(Arm(), 0, False)
    seen = look(vit, plan.data, augmenter, torch.device("cpu"))
    places = torch.cartesian_prod(torch.arange(4.0), torch.arange(4.0)) * 2
    expected = float(torch.cdist(places, places).mean())
    assert seen["kind"] == "attention"
    assert set(seen["attention_distance"]) == {"blocks.0.attn", "blocks.1.attn"}
    for heads in seen["attention_distance"].values():
        assert heads == pytest.approx([expected] * 3, rel=1e-5)
    cnn = look(va.create_model("resnet8_cifar", num_classes=10, img_size=8), plan.data, augmenter, torch.device("cpu"))
    assert (cnn["kind"], cnn["attention_distance"]) == ("cnn", None)
    assert cnn["receptive_field"]
