"""The CNN baselines against independent ones, and against the papers' numbers."""

from __future__ import annotations

import pytest
import timm
import torch
import torch.nn.functional as F

import vision_attn as va
from vision_attn.errors import UserError
from vision_attn.models.timm_cnn import create_timm_cnn

CNNS = [name for name in va.list_models("*_cifar") if name != "resnet110_cifar"]


def randomise(model):
    for name, value in model.state_dict().items():
        if value.is_floating_point():
            value.copy_(torch.rand_like(value) + 0.5 if "running_var" in name else 0.2 * torch.randn_like(value))
    return model


def reference_resnet(s, x, blocks):
    """He et al. 2016, section 4.2, option A, in plain functions."""

    def bn(x, key):
        return F.batch_norm(x, *(s[f"{key}.{n}"] for n in ("running_mean", "running_var", "weight", "bias")))

    x = bn(F.conv2d(x, s["conv1.weight"], padding=1), "bn1").relu()
    for stage in range(1, 4):
        for i in range(blocks):
            stride = 2 if stage > 1 and i == 0 else 1
            key = f"layer{stage}.{i}"
            y = bn(F.conv2d(x, s[f"{key}.conv1.weight"], stride=stride, padding=1), f"{key}.bn1").relu()
            y = bn(F.conv2d(y, s[f"{key}.conv2.weight"], padding=1), f"{key}.bn2")
            if stride == 2:
                zeros = torch.zeros_like(x[:, : x.shape[1] // 2, ::2, ::2])
                x = torch.cat([zeros, x[:, :, ::2, ::2], zeros], dim=1)
            x = (y + x).relu()
    return F.linear(F.adaptive_avg_pool2d(x, 1).flatten(1), s["head.weight"], s["head.bias"])


@pytest.mark.parametrize(("name", "blocks"), [("resnet20_cifar", 3), ("resnet32_cifar", 5)])
def test_resnet_equals_the_paper(name, blocks):
    model = randomise(va.create_model(name, num_classes=7)).double().eval()
    x = torch.randn(2, 3, 19, 23, dtype=torch.float64)
    torch.testing.assert_close(model(x), reference_resnet(model.state_dict(), x, blocks))


def test_resnet18_equals_timms_with_a_small_stem():
    peer = timm.create_model("resnet18", num_classes=7)
    peer.conv1 = torch.nn.Conv2d(3, 64, 3, padding=1, bias=False)
    peer.maxpool = torch.nn.Identity()
    peer = randomise(peer).double().eval()
    model = va.create_model("resnet18_cifar", num_classes=7).double().eval()
    model.load_state_dict({key.replace("fc.", "head."): value for key, value in peer.state_dict().items()})
    x = torch.randn(2, 3, 17, 21, dtype=torch.float64)
    torch.testing.assert_close(model(x), peer(x))


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("resnet20_cifar", 269_722),
        ("resnet56_cifar", 853_018),
        ("resnet18_cifar", 11_173_962),
        ("airbench_cifar", 1_972_792),
    ],
)
def test_parameters_of_the_papers(name, parameters):
    assert sum(p.numel() for p in va.create_model(name, num_classes=10).parameters()) == parameters


@pytest.mark.parametrize("name", CNNS)
@pytest.mark.parametrize("size", [(8, 8), (9, 31)])
def test_small_and_odd_images(name, size):
    width = {"widths": [5, 6, 7]} if name == "airbench_cifar" else {"width": 6}
    model = va.create_model(name, num_classes=7, img_size=size, in_chans=2, **width)
    assert model.forward_features(torch.randn(2, 2, *size)).numel() > 0
    assert model(torch.randn(2, 2, *size)).shape == (2, 7)
    with pytest.raises(UserError, match="too small"):
        va.create_model(name, img_size=7)


def test_whitening_decorrelates_patches():
    model = va.create_model("airbench_cifar", num_classes=10)
    bare = model.whiten.weight[:12].reshape(12, -1)
    torch.testing.assert_close(bare @ bare.T, torch.eye(12))
    images = torch.randn(40, 3, 12, 12).cumsum(2).cumsum(3)  # neighbours are alike, as in photographs
    images[:, 1] += images[:, 0]
    images = images / images.std()
    model.init_whitening(images, eps=0.0)
    with torch.no_grad():
        out = model.whiten(images)  # (N, 24, 11, 11)
    torch.testing.assert_close(out[:, 12:], -out[:, :12], rtol=1e-4, atol=1e-4)
    flat = out[:, :12].transpose(0, 1).reshape(12, -1)
    torch.testing.assert_close(flat @ flat.T / flat.shape[1], torch.eye(12), rtol=0, atol=2e-2)
    assert not model.whiten.weight.requires_grad
    assert model.whiten.bias.requires_grad


def test_shortcut_is_checked():
    with pytest.raises(UserError, match="option A"):
        va.create_model("resnet20_cifar", shortcut="zero")


def test_timm_cnn_by_name(tmp_path):
    model = va.create_model("test_efficientnet", num_classes=7, img_size=32).eval()
    x = torch.randn(2, 3, 32, 32)
    assert model(x).shape == (2, 7)
    again = va.load_model(va.save_model(model, tmp_path))
    torch.testing.assert_close(again(x), model(x))
    with pytest.warns(UserWarning, match="7 classes.*fresh one for 5"):
        assert va.load_model(tmp_path, num_classes=5)(x).shape == (2, 5)
    assert va.create_model("resnet10t").config["preprocess"]["size"] == [176, 176]


@pytest.mark.parametrize(
    "name", ["test_vit", "deit_tiny_patch16_224", "swin_tiny_patch4_window7_224", "cait_xxs24_224"]
)
def test_timm_attention_is_refused_with_ours(name):
    with pytest.raises(UserError, match="attention model of timm"):
        create_timm_cnn(name, num_classes=7)


def test_timm_errors():
    assert create_timm_cnn("resnet51", num_classes=7) is None
    with pytest.raises(UserError, match="block_sizes"):
        va.create_model("resnet10t", block_sizes=3)
    with pytest.raises(UserError, match="attention"):
        va.create_model("resnet10t", attention={"kernel": "sdpa"})
