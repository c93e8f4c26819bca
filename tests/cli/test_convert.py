"""``vision-attn convert`` and ``vision-attn check checkpoint``: what they print, write and return."""

from __future__ import annotations

import json

import pytest
import timm
import torch

import vision_attn as va
from vision_attn.checkpoints import read_state_dict
from vision_attn.checkpoints.compare import Comparison, compare, picture, randomised
from vision_attn.cli.main import main

SMALL = {"img_size": 35, "patch_size": 7, "embed_dim": 33, "num_heads": 3, "depth": 2, "num_classes": 11}


@pytest.fixture
def peer():
    model = timm.create_model("vit_tiny_patch16_224", **SMALL)
    model.load_state_dict(randomised(model.state_dict()))
    return model.eval()


@pytest.fixture
def file(peer, tmp_path):
    torch.save({"state_dict": peer.state_dict()}, tmp_path / "theirs.pth")
    return tmp_path / "theirs.pth"


def test_into_our_format(file, peer, tmp_path, capsys):
    assert main(["convert", str(file), str(tmp_path / "ours"), "--heads", "3"]) == 0
    out = capsys.readouterr().out
    assert "ViT of timm" in out
    assert f"written to {tmp_path / 'ours'}" in out
    x = torch.randn(2, 3, 35, 35)
    torch.testing.assert_close(va.load_model(tmp_path / "ours")(x), peer(x), rtol=1e-4, atol=1e-4)
    assert main(["convert", str(tmp_path / "ours"), str(tmp_path / "b"), "--num_classes", "4", "--img_size", "49"]) == 0
    assert va.load_model(tmp_path / "b")(torch.randn(1, 3, 49, 49)).shape == (1, 4)


@pytest.mark.parametrize(
    ("target", "dest"), [("timm", "a.bin"), ("transformers", "folder"), ("torchvision", "a.safetensors")]
)
def test_into_other_libraries_and_compared_there(target, dest, file, tmp_path, capsys):
    assert main(["convert", str(file), str(tmp_path / dest), "--to", target, "--heads", "3"]) == 0
    assert f"{target} loads it: largest difference of logits" in capsys.readouterr().out
    assert len(read_state_dict(tmp_path / dest)[0]) >= 32
    assert (tmp_path / dest / "preprocessor_config.json").is_file() == (target == "transformers")


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["ours", "--to", "tim"], "Did you mean timm"),
        (["ours.pth", "--heads", "3"], "our format is a folder"),
        (["theirs.pth", "--to", "timm"], "would be written over itself"),
        (["a.h5", "--to", "timm", "--heads", "3"], "what kind of file is .h5"),
        (["ours"], "33 wide, and no tensor says"),
        (["ours", "--name", "vit_teeny"], "unknown model 'vit_teeny'"),
    ],
)
def test_wrong_calls_are_told_in_a_line(arguments, says, file, tmp_path, capsys):
    assert main(["convert", str(file), str(tmp_path / arguments[0]), *arguments[1:]]) == 2
    error = capsys.readouterr().err
    assert says in error
    assert len(error.splitlines()) <= 2


def test_against_libraries_of_the_same_sizes(file, capsys):
    for library in ("timm", "transformers", "torchvision"):
        assert main(["check", "checkpoint", str(file), "--against", library, "--heads", "3"]) == 0, library
        lines = capsys.readouterr().out.splitlines()
        assert [line.split()[0] for line in lines if line.endswith("holds")] == ["float64", "float32"]


def test_against_itself_and_as_json(file, capsys, tmp_path):
    assert main(["check", "checkpoint", str(file), "--heads", "3", "--json", "-"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["layout"] == "ViT of timm"
    assert [(row["dtype"], row["difference"], row["holds"]) for row in found["results"]] == [
        ("float64", 0.0, True),
        ("float32", 0.0, True),
    ]
    assert main(["check", "checkpoint", str(file), "--heads", "3", "--json", str(tmp_path / "r.json")]) == 0
    assert json.loads((tmp_path / "r.json").read_text()) == found


def test_by_name_and_where_it_differs(capsys, tmp_path, monkeypatch):
    sizes = {"num_classes": 5, "depth": 12, "img_size": 32}
    peer = timm.create_model("vit_tiny_patch16_224", **sizes)
    torch.save(peer.state_dict(), tmp_path / "w.pth")
    arguments = [
        "check",
        "checkpoint",
        str(tmp_path / "w.pth"),
        "--against",
        "timm:vit_tiny_patch16_224",
        "--dtype",
        "float64",
    ]
    assert main([*arguments, "--randomise"]) == 0
    capsys.readouterr()
    from vision_attn.checkpoints import timm_vit

    def wrong(state, model):
        return {**state, "blocks.1.mlp.fc2.bias": state["blocks.1.mlp.fc2.bias"] + 1}

    monkeypatch.setattr(timm_vit, "convert", lambda state: wrong(state, None))
    assert main([*arguments, "--randomise"]) == 1
    assert "first differs at: blocks.1.mlp.fc2" in capsys.readouterr().out


def test_a_folder_of_transformers(capsys, tmp_path):
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 33, "num_hidden_layers": 2, "num_attention_heads": 3, "intermediate_size": 71}
    peer = transformers.ViTForImageClassification(transformers.ViTConfig(**sizes, image_size=35, patch_size=7))
    peer.load_state_dict(randomised(peer.state_dict()))
    peer.save_pretrained(tmp_path)
    assert main(["check", "checkpoint", str(tmp_path), "--against", f"transformers:{tmp_path}"]) == 0
    assert capsys.readouterr().out.count("holds") == 2
    assert main(["check", "checkpoint", str(tmp_path), "--against", f"transformers:{tmp_path / 'x'}"]) == 2
    assert "is no folder of transformers" in capsys.readouterr().err


def test_logits_that_are_all_equal_prove_nothing(capsys, tmp_path):
    from torchvision.models import VisionTransformer

    torch.save(
        VisionTransformer(32, 16, 1, 3, 192, 200, num_classes=5).state_dict(), tmp_path / "w.pth"
    )  # its head is 0
    arguments = ["check", "checkpoint", str(tmp_path / "w.pth"), "--against", "torchvision"]
    assert main(arguments) == 1
    assert "all logits are equal (a head of zeros?)" in capsys.readouterr().out
    assert main([*arguments, "--randomise"]) == 0


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--against", "tim:x", "--heads", "3"], "Did you mean timm"),
        (["--against", "timm:vit_tinny_patch16_224", "--heads", "3"], "timm has no model 'vit_tinny_patch16_224'"),
        (["--against", "timm:vit_small_patch16_224", "--heads", "3"], "does not take the tensors of"),
        (["--against", "torchvision:vit_b_61", "--heads", "3"], "torchvision has no model 'vit_b_61'"),
        (["--dtype", "float16", "--heads", "3"], "Choose float64 or float32"),
        (["--batch_size", "0", "--heads", "3"], "at least one image"),
        (["--heads", "5"], "5 heads do not divide"),
        (["--agianst", "timm"], "Did you mean --against"),
    ],
)
def test_wrong_checks_are_told_in_a_line(arguments, says, file, capsys):
    assert main(["check", "checkpoint", str(file), *arguments]) == 2
    error = capsys.readouterr().err
    assert says in error
    assert len(error.splitlines()) <= 2


def test_comparisons_see_shapes_and_leave_the_model_as_it_was():
    a = va.create_model("vit_tiny_patch16_224", **SMALL)
    b = va.create_model("vit_tiny_patch16_224", **{**SMALL, "num_classes": 5})
    found = compare(a, b, picture(a))
    assert isinstance(found, Comparison)
    assert found.difference == float("inf")
    assert not found.holds
    assert a.all_tokens is False
    assert not any(module._forward_hooks for module in a.modules())
