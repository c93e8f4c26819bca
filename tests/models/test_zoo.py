"""Every model of the zoo keeps the promises of the contract, at the smallest size at which it is itself."""

from __future__ import annotations

import copy
import json

import pytest
import torch

import vision_attn as va
from vision_attn.attention.normalizers import collect_log_probs
from vision_attn.errors import UserError
from vision_attn.models import model_class, model_defaults, model_from_config
from vision_attn.models.registry import description

NAMES = va.list_models(task="classification")
CLASSES = 7


def small(name: str, **more):
    """The named model, shrunk where its arguments allow: 3 layers keep everything a deeper one has."""
    defaults = model_defaults(name)
    args = {"num_classes": CLASSES, "img_size": 16}
    if "patch_size" in defaults:
        args |= {"img_size": (2 * defaults["patch_size"], 3 * defaults["patch_size"])}
    elif defaults["img_size"] == 224:  # strides of 16: a single token would leave nothing to choose
        args |= {"img_size": 48}
    if "depth" in defaults and "embed_dim" in defaults:
        args |= {"depth": 3, "embed_dim": 16 * defaults["num_heads"]}
    if "depths" in defaults:
        p = defaults["patch_size"]
        args |= {"img_size": (6 * p, 8 * p), "depths": [2, 1], "num_heads": [2, 3], "embed_dim": 18, "window_size": 4}
    if "widths" in defaults:
        args |= {"widths": [11, 13, 17]}
    elif "width" in defaults:
        args |= {"width": 5}
    if name == "resnet110_cifar":
        args |= {"blocks": [2, 2, 2]}
    return va.create_model(name, **{**args, **more})


def images(model, batch: int = 2, chans: int = 3):
    return torch.randn(batch, chans, *model.config["preprocess"]["size"])


def shaken(model):
    """Random values everywhere: zero biases and unit norms would hide a mistake."""
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.1 * torch.randn_like(p))
        for b in model.buffers():
            if b.is_floating_point():
                b.add_(0.1 * torch.rand_like(b))
    return model


@pytest.mark.parametrize("name", NAMES)
def test_forward_and_gradients(name):
    model = shaken(small(name)).train()
    with collect_log_probs() as draws:
        logits = model(images(model, 3))
    assert logits.shape == (3, CLASSES)
    # keys that are drawn learn from the probabilities of the draws
    sum((drawn.sum() for drawn in draws), (logits * torch.randn_like(logits)).sum()).backward()
    for key, p in model.named_parameters():
        if p.requires_grad:
            assert p.grad is not None, key
            assert p.grad.isfinite().all(), key
            assert p.grad.abs().max() > 0, key


@pytest.mark.parametrize("name", NAMES)
def test_save_load_and_rebuild(name, tmp_path):
    model = shaken(small(name)).eval()
    x = images(model)
    with torch.no_grad():
        expected = model(x)
        torch.testing.assert_close(model(x), expected, rtol=0, atol=0)  # nothing random in evaluation
    config = json.loads(json.dumps(model.config))
    assert config == model.config  # plain types only
    again = model_from_config(config)
    assert again.config == model.config
    assert {k: v.shape for k, v in again.state_dict().items()} == {k: v.shape for k, v in model.state_dict().items()}
    loaded = va.load_model(va.save_model(model, tmp_path / "model"))
    assert loaded.config == model.config
    assert not loaded.training
    with torch.no_grad():
        torch.testing.assert_close(loaded(x), expected, rtol=0, atol=0)


@pytest.mark.parametrize("name", NAMES)
def test_arguments_and_words(name):
    assert description(name).endswith(".")
    assert len(description(name)) > 20
    with pytest.raises(UserError, match=r"num_clases_x.*takes"):
        small(name, num_clases_x=3)
    defaults = model_defaults(name)
    assert {"num_classes", "in_chans", "img_size"} <= defaults.keys()
    assert defaults.keys() == set(model_defaults(name))
    model = small(name, in_chans=1)
    assert isinstance(model, model_class(name))
    assert model(images(model, 2, 1)).shape == (2, CLASSES)
    decayed_never = getattr(model, "no_weight_decay", set)()
    assert {key for key in decayed_never if key in dict(model.named_parameters())} <= decayed_never
    copy.deepcopy(model)


def test_attention_means_nothing_to_a_cnn():
    with pytest.raises(UserError, match="CNN"):
        va.create_model("resnet20_cifar", attention={"kernel": "explicit"})
    va.create_model("resnet20_cifar", attention={})


def test_unknown_model_has_near_names():
    with pytest.raises(UserError, match="cct_7_3x1_32"):
        va.create_model("cct_7_3x1_23")
