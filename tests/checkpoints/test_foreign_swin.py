"""Swin and Swin V2 of timm, torchvision and transformers, loaded without being told what they are, and written back."""

from __future__ import annotations

import json

import pytest
import timm
import torch
from timm.models.swin_transformer import SwinTransformer as TimmSwin
from timm.models.swin_transformer_v2 import SwinTransformerV2 as TimmSwinV2
from torchvision.models import swin_transformer as tv

import vision_attn as va
from vision_attn.checkpoints import read_state_dict
from vision_attn.checkpoints.peers import write_for
from vision_attn.errors import UserError

SIZES = {"embed_dim": 12, "depths": (1, 2), "num_heads": (2, 3), "num_classes": 5}
V2 = "swinv2_tiny_window8_256"  # no tensor of a Swin V2 says how large its windows are; a name does


def of_timm(version: int):
    return (TimmSwin if version == 1 else TimmSwinV2)(img_size=128, patch_size=4, window_size=8, **SIZES)


def of_torchvision(version: int):
    two = {"block": tv.SwinTransformerBlockV2, "downsample_layer": tv.PatchMergingV2} if version == 2 else {}
    return tv.SwinTransformer(patch_size=[4, 4], window_size=[8, 8], stochastic_depth_prob=0.0, **SIZES, **two)


def of_transformers(version: int):
    hf = pytest.importorskip("transformers")
    sizes = {**SIZES, "num_labels": SIZES["num_classes"], "window_size": 8, "image_size": 128}
    sizes.pop("num_classes")
    config = (hf.SwinConfig if version == 1 else hf.Swinv2Config)(drop_path_rate=0.0, layer_norm_eps=1e-5, **sizes)
    return (hf.SwinForImageClassification if version == 1 else hf.Swinv2ForImageClassification)(config)


PEERS = {"timm": of_timm, "torchvision": of_torchvision, "transformers": of_transformers}


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("library", PEERS)
def test_loaded_and_written_back(library, version, foreign, tmp_path):
    peer, x = PEERS[library](version), torch.randn(2, 3, 128, 128)
    ours = foreign.loads_like(peer, tmp_path, x, img_size=128, **({"name": V2} if version == 2 else {}))
    assert ours.config["args"]["depths"] == [1, 2]
    file, layout = write_for(ours.float(), tmp_path / "back.pth", library)
    for again in (PEERS[library](version), layout.peer(ours)):
        layout.fill_peer(again, read_state_dict(file)[0])  # strictly
        foreign.same(ours, again, x)


@pytest.mark.parametrize("version", [1, 2])
def test_transformers_reads_the_folder_we_write(version, foreign, tmp_path):
    hf = pytest.importorskip("transformers")
    peer, x = foreign.shaken(of_transformers(version)), torch.randn(1, 3, 128, 128)
    torch.save(peer.state_dict(), tmp_path / "w.pth")
    ours = foreign.quietly(tmp_path / "w.pth", img_size=128, **({"name": V2} if version == 2 else {}))
    write_for(ours, tmp_path / "folder", "transformers")
    again, told = hf.AutoModelForImageClassification.from_pretrained(tmp_path / "folder", output_loading_info=True)
    assert not any(told[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    foreign.same(ours, again, x)


@pytest.mark.parametrize("version", [1, 2])
def test_a_folder_of_transformers_says_its_windows(version, foreign, tmp_path):
    peer, x = foreign.shaken(of_transformers(version)).float(), torch.randn(1, 3, 128, 128)
    peer.save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["window_size"] == 8
    foreign.same(foreign.quietly(tmp_path), peer, x)


def test_the_windows_of_version_2_are_asked_for(foreign, tmp_path):
    torch.save(foreign.shaken(of_timm(2)).state_dict(), tmp_path / "w.pth")
    with pytest.raises(UserError, match="how large its windows are"):
        foreign.quietly(tmp_path / "w.pth")


@pytest.mark.parametrize("name", ["swin_tiny_patch4_window7_224", "swin_small_patch4_window7_224"])
def test_a_published_size_gets_its_own_name(name, foreign, tmp_path):
    peer = timm.create_model(name)
    torch.save(peer.state_dict(), tmp_path / "w.pth")
    ours = foreign.quietly(tmp_path / "w.pth")
    assert ours.config["name"] == name
    assert "depths" not in ours.config["args"]


@pytest.mark.parametrize("size", [(20, 28), (64, 96)])
def test_a_local_file_at_another_image_size(size, foreign, tmp_path):
    """Maps of 5 × 7 and 2 × 3 shrink the windows; timm resamples the tables of a smaller model in the same way."""
    peer = foreign.shaken(TimmSwin(img_size=32, patch_size=2, window_size=4, **SIZES))
    torch.save(peer.state_dict(), tmp_path / "w.pth")
    ours = foreign.quietly(tmp_path / "w.pth", img_size=size)
    peer.set_input_size(img_size=size, window_size=(4, 4))
    foreign.same(ours, peer, torch.randn(2, 3, *size))


def test_another_number_of_classes(foreign, tmp_path):
    torch.save(of_timm(1).state_dict(), tmp_path / "w.pth")
    with pytest.warns(UserWarning, match="the head"):
        model = va.load_model(tmp_path / "w.pth", num_classes=3)
    assert model(torch.randn(1, 3, 128, 128)).shape == (1, 3)


def test_a_folder_of_transformers_says_its_labels_and_how_pixels_come(foreign, tmp_path):
    peer = of_transformers(1)
    names = {str(i): f"class {i}" for i in range(peer.config.num_labels)}
    torch.save(peer.state_dict(), tmp_path / "pytorch_model.bin")
    config = peer.config.to_dict() | {"id2label": names}
    (tmp_path / "config.json").write_text(json.dumps(config))
    seen = {"image_mean": [0.1, 0.2, 0.3], "image_std": [0.4, 0.5, 0.6], "resample": 2}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(seen))
    ours = va.load_model(tmp_path)
    assert ours.config["labels"] == list(names.values())
    found = ours.config["preprocess"]
    assert (found["mean"], found["std"], found["interpolation"]) == (seen["image_mean"], seen["image_std"], "bilinear")
