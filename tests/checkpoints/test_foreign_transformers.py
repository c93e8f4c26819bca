"""transformers' ViTForImageClassification: old and new names, files and folders, there and back."""

from __future__ import annotations

import json

import pytest
import torch

import vision_attn as va
from vision_attn.checkpoints import read_state_dict
from vision_attn.checkpoints.peers import write_for
from vision_attn.errors import UserError

transformers = pytest.importorskip("transformers")

LABELS = ["cat", "dog", "bird", "frog", "ship"]


def peer_model(**options):
    sizes = {
        "hidden_size": 33,
        "num_hidden_layers": 2,
        "num_attention_heads": 3,
        "intermediate_size": 71,
        "image_size": 35,
        "patch_size": 7,
        "id2label": dict(enumerate(LABELS)),
        "label2id": {label: i for i, label in enumerate(LABELS)},
    }
    return transformers.ViTForImageClassification(transformers.ViTConfig(**{**sizes, **options}))


@pytest.fixture
def x():
    return torch.randn(2, 3, 35, 35)


@pytest.mark.parametrize("options", [{}, {"hidden_act": "gelu_new"}, {"qkv_bias": False}, {"layer_norm_eps": 1e-3}])
def test_folder_with_everything(options, foreign, tmp_path, x):
    peer = foreign.shaken(peer_model(**options)).float()
    peer.save_pretrained(tmp_path)
    processor = {
        "image_mean": [0.1, 0.2, 0.3],
        "image_std": [0.4, 0.5, 0.6],
        "resample": 3,
        "size": {"height": 35, "width": 35},
    }
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(processor))
    ours = va.load_model(tmp_path)  # nothing to assume: no warning
    foreign.same(ours, peer, x)
    assert ours.config["labels"] == LABELS
    preprocess = ours.config["preprocess"]
    assert (preprocess["mean"], preprocess["std"]) == ([0.1, 0.2, 0.3], [0.4, 0.5, 0.6])
    assert (preprocess["size"], preprocess["interpolation"]) == ([35, 35], "bicubic")


def test_new_names_old_names_and_the_bare_file(foreign, tmp_path, x):
    peer = foreign.shaken(peer_model(layer_norm_eps=1e-12))
    torch.save(peer.state_dict(), tmp_path / "pytorch_model.bin")  # as they are in memory
    foreign.same(foreign.quietly(tmp_path, num_heads=3), peer, x)
    peer.float().save_pretrained(tmp_path / "old")
    old = read_state_dict(tmp_path / "old")[0]
    torch.save(old, tmp_path / "alone.pth")
    foreign.same(foreign.quietly(tmp_path / "alone.pth", num_heads=3), peer, x)
    with pytest.raises(UserError, match=r"33 wide.*put its config\.json beside the file"):
        va.load_model(tmp_path / "alone.pth")
    del old[next(key for key in old if ".attention.key.weight" in key or ".k_proj.weight" in key)]
    torch.save(old, tmp_path / "alone.pth")
    with pytest.raises(UserError, match=r"the checkpoint is not whole: it has .*query.weight but not .*key.weight"):
        foreign.quietly(tmp_path / "alone.pth", num_heads=3)


def test_the_bare_encoder_has_no_head_but_a_pooler_that_is_left_out(foreign, tmp_path, x):
    peer = transformers.ViTModel(peer_model().config, use_mask_token=True)
    foreign.shaken(peer).float().save_pretrained(tmp_path)
    with pytest.raises(UserError, match="has no head"):
        foreign.quietly(tmp_path)
    with pytest.warns(UserWarning, match="has no head: a fresh one"):
        ours = va.load_model(tmp_path, num_classes=5)
    features = ours.double().forward_features(x.double())
    torch.testing.assert_close(features, peer.double()(x.double()).last_hidden_state, rtol=1e-9, atol=1e-9)


def test_there_and_back(foreign, tmp_path, x):
    sizes = {"img_size": 35, "patch_size": 7, "embed_dim": 33, "num_heads": 3, "depth": 2, "num_classes": 5}
    ours = foreign.shaken(va.create_model("vit_tiny_patch16_224", **sizes, act="quick_gelu")).float()
    ours.config["labels"] = LABELS
    ours.config["preprocess"]["mean"] = [0.1, 0.2, 0.3]
    write_for(ours, tmp_path / "theirs", "transformers")
    peer, info = transformers.ViTForImageClassification.from_pretrained(tmp_path / "theirs", output_loading_info=True)
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    foreign.same(ours, peer, x)
    assert peer.config.id2label[3] == "frog"
    again = va.load_model(tmp_path / "theirs")
    foreign.same(again, peer, x)
    assert again.config["labels"] == LABELS
    assert again.config["preprocess"]["mean"] == [0.1, 0.2, 0.3]


def test_another_size_is_resampled_as_they_do(foreign, tmp_path):
    peer = foreign.shaken(peer_model()).float()
    peer.save_pretrained(tmp_path)
    ours, x = va.load_model(tmp_path, img_size=(49, 21)), torch.randn(2, 3, 49, 21)
    theirs = peer(x, interpolate_pos_encoding=True).logits
    torch.testing.assert_close(ours(x), theirs, rtol=1e-4, atol=1e-4)


def test_what_cannot_be_taken_or_given_is_named(foreign, tmp_path):
    peer_model().save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "hidden_act": "mish"}))
    with pytest.raises(UserError, match=r"config.json asks for hidden_act='mish'"):
        va.load_model(tmp_path)
    model = va.create_model("vit_tiny_patch16_224", img_size=35, patch_size=7, embed_dim=33, depth=1, init_values=0.1)
    with pytest.raises(UserError, match=r"transformers' ViT has no init_values=0.1; write it for timm"):
        write_for(model, tmp_path / "b", "transformers")
