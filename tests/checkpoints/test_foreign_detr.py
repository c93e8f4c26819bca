"""DETR of its authors and of transformers, Conditional DETR of transformers: with and without padding."""

from __future__ import annotations

import json

import pytest
import torch

import vision_attn as va
from vision_attn.checkpoints import detr_names
from vision_attn.checkpoints.detr import COCO
from vision_attn.checkpoints.peers import write_for
from vision_attn.cli.main import main
from vision_attn.errors import UserError

transformers = pytest.importorskip("transformers")

SIZES = {
    "d_model": 24,
    "encoder_layers": 2,
    "decoder_layers": 3,
    "encoder_ffn_dim": 40,
    "decoder_ffn_dim": 56,
    "encoder_attention_heads": 3,
    "decoder_attention_heads": 2,
    "num_queries": 7,
    "num_labels": 5,
}
RESNETS = {
    "own bottleneck": {"embedding_size": 8, "hidden_sizes": [12, 20, 28, 44], "depths": [1, 2, 1, 1]},
    "own basic": {"embedding_size": 5, "hidden_sizes": [5, 7, 11, 13], "depths": [2, 1, 1, 1], "layer_type": "basic"},
}


def peer_model(kind="own bottleneck", conditional=False, **options):
    cls = "ConditionalDetr" if conditional else "Detr"
    config, model = getattr(transformers, f"{cls}Config"), getattr(transformers, f"{cls}ForObjectDetection")
    if kind in RESNETS:
        backbone = transformers.ResNetConfig(out_features=["stage4"], **RESNETS[kind])
        return model(config(use_timm_backbone=False, backbone_config=backbone, **{**SIZES, **options}))
    return model(config(backbone=kind, use_pretrained_backbone=False, **{**SIZES, **options}))


@pytest.fixture
def batch():
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(3, 3, 101, 139, generator=generator, dtype=torch.float64)
    mask = torch.zeros(3, 101, 139, dtype=torch.bool)
    for i, (height, width) in enumerate([(101, 97), (67, 139), (71, 83)]):
        mask[i, :height, :width] = True
    return x * mask[:, None], mask


def same(ours, peer, x, mask=None):
    """Logits, boxes and the gradient of the images in float64; logits and boxes in float32."""
    ours, peer = ours.double().eval(), peer.double().eval()
    a, b = x.clone().requires_grad_(), x.clone().requires_grad_()
    got, expected = ours(a, mask), peer(b, None if mask is None else mask.long())
    assert expected.logits.std() > 1e-3
    assert expected.pred_boxes.std() > 1e-3
    torch.testing.assert_close(got["pred_logits"], expected.logits, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(got["pred_boxes"], expected.pred_boxes, rtol=1e-9, atol=1e-9)
    (got["pred_logits"].square().sum() + got["pred_boxes"].square().sum()).backward()
    (expected.logits.square().sum() + expected.pred_boxes.square().sum()).backward()
    torch.testing.assert_close(a.grad, b.grad, rtol=1e-7, atol=1e-9 * float(b.grad.abs().max()))
    with torch.no_grad():
        single = ours.float()(x.float(), mask)
    torch.testing.assert_close(single["pred_logits"].double(), expected.logits, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(single["pred_boxes"].double(), expected.pred_boxes, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", [*RESNETS, "resnet18"])
@pytest.mark.parametrize("conditional", [False, True])
def test_a_folder_of_transformers(kind, conditional, foreign, tmp_path, batch):
    labels = ["cat", "dog", "bird", "frog", "ship"]
    peer = foreign.shaken(peer_model(kind, conditional, id2label=dict(enumerate(labels)))).float()
    peer.save_pretrained(tmp_path)
    ours = va.load_model(tmp_path)  # everything is told: no warning
    assert ours.config["name"] == ("conditional_detr_resnet50" if conditional else "detr_resnet50")
    assert ours.config["task"] == "detection"
    assert ours.config["labels"] == labels
    assert ours.config["category_ids"] == [0, 1, 2, 3, 4]
    same(ours, peer, batch[0])
    same(ours, peer, *batch)


@pytest.mark.parametrize("conditional", [False, True])
def test_new_names_alone(conditional, foreign, tmp_path, batch):
    peer = foreign.shaken(peer_model(conditional=conditional, decoder_attention_heads=3))
    torch.save(peer.state_dict(), tmp_path / "theirs.pth")  # as they are in memory
    same(foreign.quietly(tmp_path / "theirs.pth", num_heads=3), peer, *batch)
    state = peer.state_dict()
    del state["model.encoder.layers.1.self_attn.k_proj.bias"]
    torch.save(state, tmp_path / "theirs.pth")
    with pytest.raises(UserError, match=r"not whole: it has encoder.1.attn.q_proj.bias but not .*k_proj.bias"):
        foreign.quietly(tmp_path / "theirs.pth", num_heads=3)


def test_dilated_filters(foreign, tmp_path, batch):
    peer = foreign.shaken(peer_model("resnet18", dilation=True)).float()
    peer.save_pretrained(tmp_path)
    ours = va.load_model(tmp_path)
    assert ours.backbone.stride == 16
    same(ours, peer, *batch)


def in_the_original_layout(peer):
    """The peer's tensors as the original repository names them, by the public renaming of transformers' converter."""
    to_old = detr_names.older(peer.state_dict())
    state = {to_old(key): value for key, value in peer.state_dict().items()}
    words = {
        "model.backbone.conv_encoder.model.": "backbone.0.body.",
        "model.query_position_embeddings.": "query_embed.",
        "model.input_projection.": "input_proj.",
        "model.decoder.layernorm.": "transformer.decoder.norm.",
        "model.": "transformer.",
        "class_labels_classifier.": "class_embed.",
        "bbox_predictor.": "bbox_embed.",
        "encoder_attn.": "multihead_attn.",
        "encoder_attn_layer_norm.": "norm2.",
        "self_attn_layer_norm.": "norm1.",
        "fc1.": "linear1.",
        "fc2.": "linear2.",
    }
    theirs = {}
    for key, value in state.items():
        name = key
        for old, new in words.items():
            name = name.replace(old, new) if old != "model." or name.startswith("model.") else name
        name = name.replace("final_layer_norm.", "norm3." if "decoder" in name else "norm2.")
        theirs[name] = value
    for name in [name for name in theirs if ".q_proj." in name]:
        parts = [theirs.pop(name.replace(".q_proj.", f".{word}_proj.")) for word in "qkv"]
        theirs[name.replace(".q_proj.", ".in_proj_")] = torch.cat(parts)
    return theirs


@pytest.mark.parametrize("dilation", [False, True])
def test_the_original_layout(dilation, foreign, tmp_path, batch):
    sizes = {"d_model": 32, "encoder_attention_heads": 8, "decoder_attention_heads": 8, "num_labels": 91}
    peer = foreign.shaken(peer_model("resnet18", dilation=dilation, **sizes))
    state = in_the_original_layout(peer)
    assert {"transformer.encoder.layers.0.self_attn.in_proj_weight", "backbone.0.body.layer1.0.conv1.weight"} <= set(
        state
    )
    file = tmp_path / ("detr-r18-dc5.pth" if dilation else "detr-r18.pth")
    torch.save({"model": state, "epoch": 500}, file)
    ours = foreign.quietly(file)
    assert ours.config["labels"][:3] == ["N/A", "person", "bicycle"]
    assert (ours.config["labels"][90], ours.config["category_ids"][90]) == ("toothbrush", 90)
    assert ours.num_classes == 91
    same(ours, peer, *batch)
    back = detr_names.to_original(ours.state_dict())
    assert back.keys() == {key for key in state if not key.endswith("num_batches_tracked")}
    torch.testing.assert_close(back, {key: state[key].to(back[key]) for key in back}, rtol=0, atol=1e-6)


def test_names_of_coco():
    names = COCO.split()
    assert len(names) == 91
    assert names.count("N/A") == 11
    assert (names[1], names[17], names[62], names[90]) == ("person", "cat", "chair", "toothbrush")


@pytest.mark.parametrize("dilation", [False, True])
def test_there_and_back(dilation, foreign, tmp_path, batch):
    sizes = {
        "backbone": "resnet18",
        "embed_dim": 24,
        "num_heads": 3,
        "enc_layers": 1,
        "dec_layers": 2,
        "num_queries": 7,
    }
    options = {"backbone_options": {"dilation": True}} if dilation else {}
    ours = va.create_model("detr_resnet50", num_classes=3, mlp_ratio=2.0, exact_padding=False, **sizes, **options)
    foreign.shaken(ours).float()
    ours.config["labels"] = ["one", "two", "three"]
    write_for(ours, tmp_path / "theirs", "transformers")
    peer, info = transformers.DetrForObjectDetection.from_pretrained(tmp_path / "theirs", output_loading_info=True)
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert peer.config.id2label == {0: "one", 1: "two", 2: "three"}
    same(ours, peer, *batch)
    same(va.load_model(tmp_path / "theirs"), peer, *batch)


def test_what_cannot_be_taken_or_given_is_named(foreign, tmp_path):
    peer_model().save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "position_embedding_type": "learned"}))
    with pytest.raises(UserError, match="its positions are learned ones"):
        va.load_model(tmp_path)
    tiny = va.create_model("detr_tiny", num_classes=3)
    with pytest.raises(UserError, match="transformers has no model like detr_tiny"):
        write_for(tiny, tmp_path / "b", "transformers")
    options = {"widths": [8, 12, 16, 20], "depths": [1, 1, 1, 1], "stem_width": 8}
    narrow = va.create_model("detr_resnet50", backbone_options=options)
    with pytest.raises(UserError, match=r"no backbone_options .*widths"):
        write_for(narrow, tmp_path / "b", "transformers")


def test_another_number_of_classes_gets_a_fresh_head(foreign, tmp_path):
    peer_model().save_pretrained(tmp_path)
    with pytest.warns(UserWarning, match=r"class_embed.*replaced by a fresh one"):
        ours = va.load_model(tmp_path, num_classes=3)
    assert ours.config["category_ids"] is None
    assert ours(torch.randn(1, 3, 64, 64))["pred_logits"].shape == (1, 7, 4)


def test_the_certificate_compares_classes_and_boxes(foreign, tmp_path, capsys):
    peer = foreign.shaken(peer_model("own basic")).float()
    peer.save_pretrained(tmp_path)
    assert main(["check", "checkpoint", str(tmp_path), "--against", f"transformers:{tmp_path}"]) == 0
    assert capsys.readouterr().out.count("holds") == 2
    with torch.no_grad():
        peer.bbox_predictor.layers[2].bias.add_(0.01)  # boxes alone
    peer.save_pretrained(tmp_path / "other")
    assert main(["check", "checkpoint", str(tmp_path), "--against", f"transformers:{tmp_path / 'other'}"]) == 1
    assert "FAILS" in capsys.readouterr().out
