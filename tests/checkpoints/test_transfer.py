"""Starting from a checkpoint: what is taken over, what stays fresh, and what does not fit."""

from __future__ import annotations

import copy
import warnings
from pathlib import Path

import pytest
import torch

import vision_attn as va
from vision_attn.checkpoints.transfer import start_from
from vision_attn.cli.main import main
from vision_attn.errors import UserError
from vision_attn.training.classifier import Classifier
from vision_attn.training.detector import Detector

LABELS = list("abcde")
VIT = {"patch_size": 4, "embed_dim": 12, "depth": 2, "num_heads": 3}


def vit(num_classes=5, img_size=(8, 12), labels=None, **more):
    model = va.create_model("vit_tiny_patch16_224", num_classes=num_classes, img_size=img_size, **{**VIT, **more})
    for p in model.parameters():
        torch.nn.init.normal_(p, std=0.3)
    model.config["labels"] = labels
    return model.eval()


def start(model, path):
    """What was filled, and the warnings."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        start_from(model, path)
    return model.state_dict(), " ".join(str(w.message) for w in caught)


def tensors(model):
    return copy.deepcopy(model.state_dict())


def test_the_same_classes_take_everything(tmp_path):
    old, new = vit(labels=LABELS), vit(labels=LABELS)
    state, said = start(new, va.save_model(old, tmp_path / "old"))
    torch.testing.assert_close(state, tensors(old))
    assert "head" not in said


@pytest.mark.parametrize(("classes", "labels"), [(7, None), (7, list("abcdefg")), (5, list("vwxyz"))])
def test_other_classes_leave_the_head_fresh(tmp_path, classes, labels):
    old, new = vit(labels=LABELS), vit(classes, labels=labels)
    fresh = tensors(new)
    state, said = start(new, va.save_model(old, tmp_path / "old"))
    expected = {k: fresh[k] if k.startswith("head.") else v for k, v in tensors(old).items()}
    torch.testing.assert_close(state, expected)
    assert "head" in said
    assert "fresh" in said


def test_features_get_a_head(tmp_path):
    timm = pytest.importorskip("timm")
    theirs = timm.create_model("vit_tiny_patch16_224", depth=2, img_size=48, num_classes=0)
    torch.save(theirs.state_dict(), tmp_path / "timm.pth")
    ours = va.create_model("vit_tiny_patch16_224", depth=2, img_size=48, num_classes=5)
    fresh = tensors(ours)
    state, said = start(ours, tmp_path / "timm.pth")
    torch.testing.assert_close({k: v for k, v in state.items() if not k.startswith("head.")}, theirs.state_dict())
    torch.testing.assert_close(state["head.weight"], fresh["head.weight"])
    assert "has no head" in said


def test_sizes_are_resampled_as_load_model_does(tmp_path):
    folder = va.save_model(vit(), tmp_path / "old")
    new = vit(7, (12, 20), patch_size=2)
    state, _ = start(new, folder)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        expected = va.load_model(folder, img_size=(12, 20), patch_size=2, num_classes=7).state_dict()
    for key in state:
        if not key.startswith("head."):
            torch.testing.assert_close(state[key], expected[key])


def test_a_foreign_file(tmp_path):
    timm = pytest.importorskip("timm")
    theirs = timm.create_model("vit_tiny_patch16_224", depth=2, img_size=48).eval()
    for p in theirs.parameters():
        torch.nn.init.normal_(p, std=0.2)
    torch.save(theirs.state_dict(), tmp_path / "timm.pth")
    ours = va.create_model("vit_tiny_patch16_224", depth=2, img_size=48, num_classes=1000)
    start(ours, tmp_path / "timm.pth")
    x = torch.randn(2, 3, 48, 48)
    torch.testing.assert_close(ours.eval()(x), theirs(x), rtol=1e-4, atol=1e-4)


def test_a_detector_keeps_its_boxes_and_learns_other_classes(tmp_path):
    tiny = {"embed_dim": 24, "num_heads": 3, "enc_layers": 1, "dec_layers": 2, "num_queries": 7, "mlp_ratio": 2.0}
    old = va.create_model("dn_detr_tiny", num_classes=5, img_size=48, **tiny)
    for p in old.parameters():
        torch.nn.init.normal_(p, std=0.1)
    folder = va.save_model(old, tmp_path / "old")
    new = Detector("dn_detr_tiny", tiny, num_classes=11, img_size=(48, 48), weights=None).model
    fresh = tensors(new)
    with pytest.warns(UserWarning, match="trained for 5 classes"):
        new = Detector("dn_detr_tiny", tiny, num_classes=11, img_size=(48, 48), weights=str(folder)).model
    mine = new.state_dict()
    heads = {k for k in fresh if k.startswith(("class_embed.", "label_embed.", "selection.class_embed."))}
    assert heads
    for key, value in old.state_dict().items():
        if key not in heads:
            torch.testing.assert_close(mine[key], value)
    assert all(mine[key].shape == fresh[key].shape for key in heads)


def refused(model, path):
    before = tensors(model)
    with pytest.raises(UserError) as error:
        start_from(model, path)
    torch.testing.assert_close(tensors(model), before)
    return str(error.value)


def test_what_does_not_fit_is_refused_and_nothing_is_changed(tmp_path):
    folder = va.save_model(vit(), tmp_path / "old")
    said = refused(vit(depth=3), folder)
    assert "12 missing (blocks.2" in said
    assert "'depth': 2" in said
    said = refused(va.create_model("resnet20_cifar", num_classes=5), folder)
    assert "holds a vit_tiny_patch16_224, and this is a resnet20_cifar" in said
    said = refused(vit(), va.save_model(va.create_model("resnet20_cifar", num_classes=5), tmp_path / "cnn"))
    assert "holds a resnet20_cifar, and this is a vit_tiny_patch16_224" in said
    said = refused(va.create_model("dn_detr_tiny", num_classes=5, img_size=64), folder)
    assert "classification" in said
    assert "detection" in said


def test_other_pixels_are_spoken_of(tmp_path):
    old, new = vit(), vit()
    old.config["preprocess"] = {**new.config["preprocess"], "mean": [0.1, 0.2, 0.3]}
    _, said = start(new, va.save_model(old, tmp_path / "old"))
    assert "mean [0.1, 0.2, 0.3] there" in said


def test_a_whitening_layer_is_not_read_off_the_data_again(tmp_path):
    class Data:
        def plain_images(self, n):
            raise AssertionError("the weights were there")

    args = {"widths": [8, 8, 8]}
    old = va.create_model("airbench_cifar", num_classes=5, **args)
    module = Classifier(
        "airbench_cifar", args, num_classes=5, img_size=(32, 32), weights=str(va.save_model(old, tmp_path / "old"))
    )
    module._trainer = type("T", (), {"ckpt_path": None, "datamodule": Data()})()
    module.on_fit_start()
    torch.testing.assert_close(tensors(module.model), tensors(old))


RECIPE = """
task: classification
data: {name: digits, batch_size: 50, max_images: 100}
model:
  name: vit_tiny_patch16_224
  args: {patch_size: 4, embed_dim: 12, depth: 2, num_heads: 3}
  optimizer: {name: sgd, lr: 1.0e-9, weight_decay: 0.0, warmup: 0.0}
trainer: {max_epochs: 1, accelerator: cpu}
watch_attention: false
"""


def test_fit_starts_from_weights_and_goes_on_without_them(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("small.yaml").write_text(RECIPE)
    old = vit(7, (8, 8))
    va.save_model(old, "old")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert main(["fit", "--config", "small.yaml", "--model.weights", "old"]) == 0
    mine = va.load_model("runs/small/0").state_dict()
    for key, value in old.state_dict().items():
        if not key.startswith("head."):
            torch.testing.assert_close(mine[key], value, rtol=0, atol=1e-5)
    assert "weights: old" in Path("runs/small/0/config.yaml").read_text()
    Path("old").rename("moved")
    again = ["fit", "--config", "small.yaml", "--model.weights", "old", "--trainer.max_epochs", "2"]
    assert main([*again, "--ckpt_path", "last"]) == 0
    capsys.readouterr()
    assert main(again) == 2
    assert "old" in capsys.readouterr().err
    assert not Path("runs/small/1").exists()
