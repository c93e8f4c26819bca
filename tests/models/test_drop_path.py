"""Stochastic depth drops whole samples, keeps the mean, and is torchvision's."""

from __future__ import annotations

import torch
from torchvision.ops import StochasticDepth

import vision_attn as va
from vision_attn.layers.encoder import DropPath


def test_equals_torchvisions():
    ours, peer, x = DropPath(0.3), StochasticDepth(0.3, mode="row"), torch.randn(53, 5, 7)
    torch.manual_seed(1)
    got = ours(x)
    torch.manual_seed(1)
    torch.testing.assert_close(got, peer(x))
    assert 0 < sum(bool(sample.any()) for sample in got) < 53
    assert ours.eval()(x) is x


def test_models_take_it():
    model = va.create_model("cct_2_3x2_32", num_classes=7, img_size=8, drop_path=0.9).train()
    x = torch.randn(2, 3, 8, 8)
    assert not torch.equal(model(x), model(x))
    torch.testing.assert_close(model.eval()(x), model(x))
