"""Whatever is computed for a GPU is computed there, also where there is none to try it on.

PyTorch's fake tensors have a shape, a type and a device, no numbers, and need no GPU: an operation that mixes devices
is refused as a GPU would refuse it.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

import vision_attn as va
from vision_attn.data import AugmentConfig, Augmenter
from vision_attn.detection import matcher
from vision_attn.detection.criterion import Criterion, CriterionConfig
from vision_attn.explain import maps as maps_of_models
from vision_attn.training.muon import MuonWithAdamW

ROOT = Path(__file__).resolve().parent.parent
CLASSES = 7
VIT = {"patch_size": 4, "embed_dim": 32, "depth": 1, "num_heads": 4, "img_size": (32, 40), "global_pool": "avg"}
DETECTORS: dict[str, dict[str, Any]] = {
    "detr_resnet50": {},
    "dab_detr_resnet50": {},
    "conditional_detr_resnet50": {},
    "dn_detr_resnet50": {"query_groups": 3},
    "dn_detr_tiny": {"query_selection": True, "box_bias": True},
    "dn_detr_small": {"backbone": "swin_cifar_small"},
}


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> FakeTensorMode:
    """While it is entered, ``device="cuda"`` makes fake tensors."""
    monkeypatch.setattr(Tensor, "pin_memory", lambda self, *args: self)  # what fake tensors cannot do
    return FakeTensorMode(allow_non_fake_inputs=True)


def move(module: nn.Module, gpu: FakeTensorMode) -> nn.Module:
    """Put fake tensors on the GPU in place of all parameters and buffers; ``Module.to`` cannot."""
    fakes: dict[int, Tensor] = {}  # what layers share stays shared

    def fake(x: Tensor) -> Tensor:
        if id(x) not in fakes:
            new = torch.empty(x.shape, dtype=x.dtype, device="cuda")
            fakes[id(x)] = nn.Parameter(new, requires_grad=x.requires_grad) if isinstance(x, nn.Parameter) else new
        return fakes[id(x)]

    with gpu:
        for one in module.modules():
            for tensors in (one._parameters, one._buffers):
                tensors.update({name: fake(x) for name, x in tensors.items() if x is not None})
    return module


def devices(result: Any) -> set[str]:
    """Of all tensors in nested containers."""
    if isinstance(result, Tensor):
        return {result.device.type}
    parts = result.values() if isinstance(result, Mapping) else result if isinstance(result, list | tuple) else ()
    return set().union(*map(devices, parts))


def variants() -> dict[str, dict[str, Any]]:
    """The options of attention that the study of all mechanisms trains with."""
    spec = importlib.util.spec_from_file_location("study_mechanisms", ROOT / "scripts" / "study_mechanisms.py")
    assert spec is not None
    assert spec.loader is not None
    study = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(study)
    return {name: options for group in study.VARIANTS.values() for name, options in group.items()}


def check(model: nn.Module, gpu: FakeTensorMode) -> None:
    size = model.config["preprocess"]["size"]  # type: ignore[union-attr,index]
    move(model, gpu)
    with gpu:
        for train in (True, False):
            assert devices(model.train(train)(torch.randn(2, 3, *size, device="cuda"))) == {"cuda"}


def test_a_tensor_that_is_left_behind_is_found(gpu):
    class Forgetful(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x + torch.ones(5)

    with gpu, pytest.raises(RuntimeError, match="at least two devices"):
        Forgetful()(torch.randn(3, 5, device="cuda"))


@pytest.mark.parametrize("options", variants().values(), ids=variants())
def test_every_mechanism(gpu, options):
    check(va.create_model("vit_tiny_patch16_224", num_classes=CLASSES, attention=options, **VIT), gpu)


@pytest.mark.parametrize("options", variants().values(), ids=variants())
def test_gradients_of_every_mechanism(options):
    """By the meta device, through which gradients can pass: for fake tensors, PyTorch asks for a real GPU."""
    model = va.create_model("vit_tiny_patch16_224", num_classes=CLASSES, attention=options, **VIT).to("meta").train()
    x = torch.randn(2, 3, 32, 40, device="meta", requires_grad=True)
    model(x).sum().backward()
    assert devices([x.grad, *(p.grad for p in model.parameters() if p.grad is not None)]) == {"meta"}


@pytest.mark.parametrize(
    "name",
    ["cct_2_3x2_32", "swin_cifar_small", "swinv2_cifar_tiny", "cvt_7_4_32", "glimpse_small_32"],
)
def test_every_kind_of_classifier(gpu, name):
    check(va.create_model(name, num_classes=CLASSES, img_size=32), gpu)


def test_maps_are_where_the_model_is(gpu, monkeypatch):
    monkeypatch.setattr(maps_of_models, "free_memory", lambda device: 1 << 40)
    model = move(va.create_model("vit_tiny_patch16_224", num_classes=CLASSES, **VIT), gpu)
    with gpu:
        maps = va.attention_maps(model, torch.randn(2, 3, 32, 40, device="cuda"), layers="blocks.0*")
    assert devices(maps) == {"cuda"}


@pytest.mark.parametrize("name", DETECTORS)
def test_detectors_and_their_losses(gpu, monkeypatch, name):
    def numbers(matrices, health):
        return [np.random.default_rng(0).random(x.shape, dtype=np.float32) for x in matrices] + [np.zeros(health.shape)]

    monkeypatch.setattr(matcher, "_to_processor", numbers)
    model = va.create_model(name, num_classes=CLASSES, **DETECTORS[name])
    head = model.config["args"].get("classification") or model.classification
    losses = ["softmax"] if head == "softmax" else ["focal", "varifocal", "stable"]
    move(model, gpu)
    with gpu:
        targets = [
            {"boxes": torch.rand(n, 4, device="cuda"), "labels": torch.zeros(n, dtype=torch.int64, device="cuda")}
            for n in (3, 0, 1)
        ]
        mask = torch.zeros(3, 64, 96, dtype=torch.bool, device="cuda")
        outputs = model.train()(torch.randn(3, 3, 64, 96, device="cuda"), mask, targets)
        assert devices({key: value for key, value in outputs.items() if key != "dn"}) == {"cuda"}
        for loss in losses:
            assert devices(Criterion(CLASSES, CriterionConfig(loss=loss), head)(outputs, targets)) == {"cuda"}
        assert devices(model.eval()(torch.randn(3, 3, 64, 96, device="cuda"))) == {"cuda"}


@pytest.mark.parametrize(
    "options",
    [
        {"flip": True, "crop_padding": 2, "erase": 0.5},
        {"flip": "alternating", "crop_padding": 3, "crop_mode": "zero", "mixup": 0.2, "cutmix": 1.0},
        {"resized_crop": 0.3, "mix_probability": 0.5, "mixup": 0.8, "color_jitter": 0.4},
    ],
)
def test_augmentation(gpu, options):
    augmenter = Augmenter(AugmentConfig(**options), mean=(0.4,) * 3, std=(0.2,) * 3, num_classes=CLASSES)

    def batch(device: str) -> dict[str, Any]:
        image = torch.randint(0, 256, (5, 3, 13, 17), dtype=torch.uint8, device=device)
        label = torch.zeros(5, dtype=torch.int64, device=device)
        return {"image": image, "label": label, "index": torch.arange(5, device=device), "epoch": 3}

    assert devices(augmenter.train(batch("cpu"))) == {"cpu"}  # tables made once are the host's
    with gpu:
        assert devices(augmenter.train(batch("cuda"))) == {"cuda"}
        assert devices(augmenter.evaluate(batch("cuda"))) == {"cuda"}


def test_optimizer(gpu):
    with gpu:
        weights = [nn.Parameter(torch.randn(*shape, device="cuda")) for shape in ((5, 7), (11, 3, 3, 3), (7, 5))]
        optimizer = MuonWithAdamW([{"params": weights}], lr=0.01)
        for weight in weights:
            weight.grad = torch.randn_like(weight)
        optimizer.step()
        assert devices([list(state.values()) for state in optimizer.state.values()]) == {"cuda"}
