"""Detectors: what they give, what each switch does, and that padding and targets do not move predictions."""

from __future__ import annotations

import contextlib
import copy
import json

import pytest
import torch

import vision_attn as va
from vision_attn.errors import UserError
from vision_attn.layers.box_decoder import Memory
from vision_attn.layers.query_selection import best_tokens
from vision_attn.models import model_from_config
from vision_attn.models.backbones import make_backbone
from vision_attn.models.profile import profile

CLASSES = 7
NARROW = {"depths": [1, 2, 1, 1], "widths": [8, 12, 20, 28], "stem_width": 5}
SMALL = {"embed_dim": 24, "num_heads": 3, "enc_layers": 1, "dec_layers": 3, "mlp_ratio": 2.0, "num_queries": 5}
BOX = {"queries": "box", "dn_groups": 0}
SWITCHES = {
    "learned": {},
    "softmax boxes": {"queries": "box"},
    "refined": {**BOX, "refine": True},
    "point": {"queries": "point"},
    "conditional point": {"queries": "point", "conditional": True},
    "conditional box": {**BOX, "refine": True, "conditional": True},
    "modulated": {**BOX, "refine": True, "conditional": True, "modulate": True},
    "box bias": {**BOX, "refine": True, "box_bias": True},
    "selection": {**BOX, "refine": True, "query_selection": True},
    "groups": {"query_groups": 3},
    "denoising": {**BOX, "refine": True, "dn_groups": 2},
    "contrastive": {**BOX, "refine": True, "dn_groups": 2, "dn_contrastive": True},
    "all": {
        "queries": "box",
        "refine": True,
        "conditional": True,
        "modulate": True,
        "box_bias": True,
        "query_selection": True,
        "query_groups": 2,
        "dn_groups": 3,
        "dn_contrastive": True,
        "classification": "sigmoid",
    },
    "pre-norm": {"pre_norm": True},
}


def small(name="detr_tiny", **options):
    model = va.create_model(name, num_classes=CLASSES, **{**SMALL, "dropout": 0.0, **options})
    with torch.no_grad():  # zero biases, last layers and unit norms would hide a mistake
        for p in model.parameters():
            p.add_(0.1 * torch.randn_like(p))
        for b in model.buffers():
            if b.is_floating_point():
                b.add_(0.1 * torch.rand_like(b))
    return model


def targets(*counts):
    found = []
    for n in counts:
        centre, size = 0.3 + 0.4 * torch.rand(n, 2), 0.1 + 0.3 * torch.rand(n, 2)
        found.append({"labels": torch.randint(CLASSES, (n,)), "boxes": torch.cat([centre, size], 1)})
    return found


def outputs_of(outputs):
    """Every tensor that a loss may use."""
    parts = [outputs, *outputs["aux_outputs"], outputs.get("enc_outputs"), outputs.get("dn")]
    return [part[key] for part in parts if part for key in ("pred_logits", "pred_boxes")]


@pytest.mark.parametrize("switch", SWITCHES)
def test_shapes_and_gradients(switch):
    options = SWITCHES[switch]
    model = small(**options).train()
    classes = CLASSES + (model.classification == "softmax")
    groups = options.get("query_groups", 1)
    outputs = model(torch.randn(3, 3, 40, 56), None, targets(2, 0, 4))
    assert outputs["pred_logits"].shape == (3, 5 * groups, classes)
    assert outputs["pred_boxes"].shape == (3, 5 * groups, 4)
    assert outputs.get("groups", 1) == groups
    assert len(outputs["aux_outputs"]) == 2
    copies = options.get("dn_groups", 0) * (2 if options.get("dn_contrastive") else 1)
    assert ("dn" in outputs) == (copies > 0)
    if copies:
        assert outputs["dn"]["pred_logits"].shape == (3, 3, 4 * copies, classes)
        assert outputs["dn"]["known"].valid.sum(1).tolist() == [2 * copies, 0, 4 * copies]
    assert ("enc_outputs" in outputs) == options.get("query_selection", False)
    for boxes in outputs_of(outputs)[1::2]:
        assert 0 <= boxes.min() <= boxes.max() <= 1
    sum((x * torch.randn_like(x)).sum() for x in outputs_of(outputs)).backward()
    # contents that begin as zeros, as in the original, leave nothing to the first matrices that they meet
    blind = {f"decoder.layers.0.{name}.weight" for name in ("self_attn.q", "self_attn.k", "self_attn.v", "norm1")}
    for key, p in model.named_parameters():
        assert p.grad is not None, key
        assert p.grad.isfinite().all(), key
        assert p.grad.abs().max() > 0 or (model.queries.content is None and key in blind), key


@pytest.mark.parametrize("switch", SWITCHES)
def test_evaluation_looks_at_no_target_and_has_one_group(switch):
    model = small(**SWITCHES[switch]).eval()
    images = torch.randn(2, 3, 40, 56)
    with torch.no_grad():
        outputs, again = model(images, None, targets(2, 3)), model(images)
    assert outputs.keys() == {"pred_logits", "pred_boxes", "aux_outputs"}
    assert outputs["pred_logits"].shape[1] == 5
    for a, b in zip(outputs_of(outputs), outputs_of(again), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)


@pytest.mark.parametrize("switch", SWITCHES)
@pytest.mark.parametrize("backbone", ["light_cnn", "resnet18"])
def test_padding_moves_nothing(switch, backbone):
    """A list of images of many sizes, and a padded batch, equal the same images one by one."""
    options = {"backbone_options": {**NARROW, "bottleneck": False}, "num_queries": 3} if backbone == "resnet18" else {}
    model = small(**SWITCHES[switch], backbone=backbone, **options).double().eval()
    sizes = [(71, 83), (65, 97), (71, 83), (97, 65), (9, 14)]  # the last has fewer tokens than there are queries
    images = [torch.randn(3, *size, dtype=torch.float64) for size in sizes]
    batch, mask = torch.zeros(5, 3, 101, 103, dtype=torch.float64), torch.zeros(5, 101, 103, dtype=torch.bool)
    for i, (height, width) in enumerate(sizes):
        batch[i, :, :height, :width], mask[i, :height, :width] = images[i], True
    with torch.no_grad():
        together, padded = model(images), model(batch, mask)
        for i, image in enumerate(images):
            alone = model(image[None])
            for key in ("pred_logits", "pred_boxes"):
                torch.testing.assert_close(together[key][i], alone[key][0], rtol=1e-9, atol=1e-9)
                torch.testing.assert_close(padded[key][i], alone[key][0], rtol=1e-9, atol=1e-9)


def test_the_original_pads_first():
    """With ``exact_padding=False`` convolutions read the padding, and another batch gives other predictions."""
    model = small("detr_resnet50", backbone_options=NARROW, exact_padding=False).eval()
    image, mask = torch.randn(1, 3, 65, 97), torch.zeros(1, 97, 129, dtype=torch.bool)
    mask[:, :65, :97] = True
    batch = torch.nn.functional.pad(image, (0, 32, 0, 32))
    with torch.no_grad():
        alone, padded, listed = (model(*args)["pred_logits"] for args in ((image,), (batch, mask), ([image[0]],)))
    torch.testing.assert_close(listed, alone)
    assert (padded - alone).abs().max() > 1e-4


def test_a_mask_that_is_no_rectangle_is_followed_too():
    model = small().eval()
    images, mask = torch.randn(2, 3, 40, 56), torch.rand(2, 40, 56) < 0.7
    with torch.no_grad():
        assert model(images, mask)["pred_boxes"].isfinite().all()
        assert model(images, torch.zeros_like(mask))["pred_boxes"].isfinite().all()


@pytest.mark.parametrize("contrastive", [False, True])
@pytest.mark.parametrize("groups", [1, 2])
def test_denoising_queries_leave_the_learned_ones_alone(contrastive, groups):
    options = {"refine": True, "dn_groups": 3, "dn_contrastive": contrastive, "query_groups": groups}
    model = small(queries="box", **options).double().train()
    model.backbone.eval()  # batch statistics are none of the matter
    images = torch.randn(2, 3, 40, 56, dtype=torch.float64)
    with_them, without = model(images, None, targets(3, 5)), model(images)
    assert "dn" in with_them
    assert "dn" not in without
    for key in ("pred_logits", "pred_boxes"):
        torch.testing.assert_close(with_them[key], without[key], rtol=1e-9, atol=1e-9)


def test_an_image_without_objects_does_not_move_the_denoising_of_another():
    model = small(queries="box", refine=True, dn_groups=2, dn_label_noise=0.0, dn_box_noise=0.0).double().train()
    model.backbone.eval()
    images = torch.randn(2, 3, 40, 56, dtype=torch.float64)
    few, many = targets(2, 4)
    both, alone = model(images, None, [few, many])["dn"], model(images[:1], None, [few])["dn"]
    for copy_ in range(2):  # two objects and two of padding in each group, and two objects
        got = both["pred_logits"][:, :1, 4 * copy_ : 4 * copy_ + 2]
        torch.testing.assert_close(got, alone["pred_logits"][:, :, 2 * copy_ : 2 * copy_ + 2], rtol=1e-9, atol=1e-9)


def test_query_groups_do_not_see_each_other():
    model = small(query_groups=3).double().train()
    model.backbone.eval()
    images = torch.randn(1, 3, 40, 56, dtype=torch.float64)
    before = model(images)["pred_logits"]
    with torch.no_grad():
        model.queries.position[5:10] += 1.0
    moved = (model(images)["pred_logits"] - before).abs().amax((0, 2)) > 1e-9
    assert moved.tolist() == [False] * 5 + [True] * 5 + [False] * 5
    torch.testing.assert_close(model.eval()(images)["pred_logits"], before[:, :5], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("switch", SWITCHES)
def test_bfloat16_weights(switch):
    """Forward and backward where all weights are bfloat16; boxes are float32, near those of float32 weights."""
    torch.manual_seed(0)
    model = small(**SWITCHES[switch]).train()
    half = copy.deepcopy(model).bfloat16()
    model.load_state_dict(half.state_dict())  # the same weights, rounded
    images, known, results = torch.randn(2, 3, 40, 56).bfloat16(), targets(2, 3), []
    for one, x in ((model, images.float()), (half, images)):
        torch.manual_seed(1)  # of denoising
        outputs = one(x, None, known)
        sum((part.float() ** 2).mean() for part in outputs_of(outputs)).backward()
        results.append(outputs)
    for key, p in half.named_parameters():
        assert p.grad is not None, key
        assert p.grad.isfinite().all(), key
    exact, found = results
    parts = [(exact, found), *zip(exact["aux_outputs"], found["aux_outputs"], strict=True)]
    parts += [(exact["dn"], found["dn"])] if "dn" in exact else []
    for ours, theirs in parts:
        assert theirs["pred_boxes"].dtype == torch.float32
        if "query_selection" not in SWITCHES[switch]:  # which tokens are chosen may turn on a rounding
            torch.testing.assert_close(theirs["pred_boxes"], ours["pred_boxes"], rtol=0.1, atol=0.04)
            torch.testing.assert_close(theirs["pred_logits"], ours["pred_logits"], rtol=0.1, atol=0.2)
    with torch.no_grad():
        assert half.eval()([images[0, :, :33, :41], images[1]])["pred_boxes"].isfinite().all()


def test_selected_boxes_of_no_size_are_finite_and_can_be_learned():
    """Proposals that nothing is matched to have no box loss, and may drift: here to sizes of σ(−12)."""
    torch.manual_seed(0)
    model = small(**SWITCHES["all"]).train()
    with torch.no_grad():
        model.selection.bbox_embed.layers[-1].bias[2:] = -12.0
    for context in (contextlib.nullcontext(), torch.autocast("cpu", torch.float16)):
        with context:
            outputs = model(torch.randn(2, 3, 40, 56), None, targets(2, 3))
        model.zero_grad()
        first = outputs["aux_outputs"][0]
        sum(part[key].float().sum() for part in (first, outputs) for key in ("pred_logits", "pred_boxes")).backward()
        assert all(part.isfinite().all() for part in outputs_of(outputs))
        assert all(p.grad is None or p.grad.isfinite().all() for p in model.parameters())
        assert first["pred_boxes"][..., 2:].min() > 1e-4


def test_proposed_boxes_are_not_rounded_under_autocast():
    torch.manual_seed(0)
    model = small(**SWITCHES["selection"])
    selection = model.selection
    keep = torch.ones(1, 5, 7, dtype=torch.bool)
    memory = Memory(torch.randn(2, 35, 24).bfloat16(), torch.zeros(1, 35, 24), keep)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        tokens = selection.norm(selection.proj(memory.tokens))
        chosen = best_tokens(selection.class_embed(tokens)[..., :CLASSES].amax(-1), None, 5)
        reference, _ = selection(memory, 5, CLASSES)
    with torch.no_grad():
        boxes = selection._anchors(keep) + selection.bbox_embed(tokens.float())
    torch.testing.assert_close(reference, boxes.take_along_dim(chosen[..., None], 1), rtol=0, atol=0)


def test_refined_boxes_begin_at_their_anchors():
    model = va.create_model("dn_detr_tiny", num_classes=CLASSES).eval()
    with torch.no_grad():
        outputs = model(torch.randn(2, 3, 96, 96))
    anchors = model.queries.anchors.sigmoid()
    for layer in (outputs, *outputs["aux_outputs"]):
        torch.testing.assert_close(layer["pred_boxes"], anchors.expand(2, -1, -1))
    centres = anchors[:, :2]
    assert torch.pdist(centres).min() > 0.1  # spread over the image
    assert centres.min() < 0.2
    assert centres.max() > 0.8
    assert outputs["pred_logits"].sigmoid().mean() == pytest.approx(0.01, abs=0.01)


def test_selected_queries_begin_at_the_best_tokens():
    model = small(queries="box", refine=True, query_selection=True, classification="sigmoid").train()
    outputs = model(torch.randn(2, 3, 40, 56))
    best = outputs["enc_outputs"]["pred_logits"].amax(-1)
    assert outputs["enc_outputs"]["pred_logits"].shape == (2, 5, CLASSES)
    torch.testing.assert_close(best, best.sort(dim=1, descending=True).values)


def test_small_images_choose_their_tokens_more_than_once():
    """Padding is never chosen, however few tokens an image has, and however many its neighbours."""
    scores = torch.tensor([[0.1, 0.7, 0.4, 0.9, 0.2], [0.3, 0.1, 5.0, 6.0, 7.0]])
    mask = torch.tensor([[True] * 5, [True, True, False, False, False]])
    assert best_tokens(scores, mask, 7).tolist() == [[3, 1, 2, 4, 0, 3, 1], [0, 1, 0, 1, 0, 1, 0]]
    assert best_tokens(scores, mask, 3).tolist() == [[3, 1, 2], [0, 1, 0]]
    assert best_tokens(scores[:1], None, 11).tolist() == [[3, 1, 2, 4, 0] * 2 + [3]]
    assert best_tokens(scores[:1], None, 2).tolist() == [[3, 1]]
    model = small(queries="box", refine=True, query_selection=True, classification="sigmoid", dn_groups=2)
    for size in ((8, 16), (1, 1), (3, 90)):
        outputs = model.train()(torch.randn(2, 3, *size), None, targets(1, 2))
        assert outputs["enc_outputs"]["pred_logits"].shape == (2, 5, CLASSES)
        assert all(x.isfinite().all() for x in outputs_of(outputs))


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("light_cnn", {}),
        ("resnet18", {"norm": "batch", "bottleneck": False, **NARROW}),
        ("vit_tiny_patch16_224", {"patch_size": 8, "embed_dim": 24, "num_heads": 3, "depth": 1}),
        ("vit_wee_patch16_reg1_gap_256", {"patch_size": 8, "embed_dim": 24, "num_heads": 3, "depth": 1}),
        ("swin_cifar_tiny", {"embed_dim": 12, "depths": [1, 1, 1], "num_heads": [1, 2, 3]}),
        ("timm:resnet10t", {}),
        ("test_efficientnet", {}),
    ],
)
def test_backbones(name, options):
    backbone = make_backbone(name, img_size=(40, 56), options=options).train()
    found = backbone(torch.randn(2, 3, 40, 56))
    rows, columns = -(-40 // backbone.stride), -(-56 // backbone.stride)
    assert found.shape == (2, backbone.channels, rows, columns)
    found.square().mean().backward()
    lost = [key for key, p in backbone.named_parameters() if p.requires_grad and p.grad is None]
    assert not lost
    model = small(backbone=name, backbone_options=options, img_size=(40, 56)).eval()
    with torch.no_grad():
        outputs = model([torch.randn(3, 40, 56), torch.randn(3, 43, 61)])
    assert outputs["pred_boxes"].shape == (2, 5, 4)


def test_frozen_norms_freeze_the_stem_and_are_folded_into_convolutions():
    options = {"backbone_options": NARROW}
    model = small("detr_resnet50", **options).train()
    frozen = {key.split(".")[1] for key, p in model.named_parameters() if not p.requires_grad}
    assert frozen == {"conv1", "layer1"}
    model(torch.randn(2, 3, 64, 96))["pred_logits"].sum().backward()
    assert all(p.grad is not None for p in model.backbone.parameters() if p.requires_grad)
    from torchvision.ops import FrozenBatchNorm2d

    block, x = model.backbone.layer2[0].double(), torch.randn(2, 8, 11, 13, dtype=torch.float64)
    norm = FrozenBatchNorm2d(3).double()
    norm.load_state_dict(block.bn1.state_dict())
    torch.testing.assert_close(block.bn1.after(block.conv1, x), norm(block.conv1(x)))


def test_weights_of_a_backbone_come_from_a_file(tmp_path):
    import torchvision

    theirs = torchvision.models.resnet18()
    torch.save(theirs.state_dict(), tmp_path / "resnet18.pth")
    options = {"backbone": "resnet18", "backbone_weights": str(tmp_path / "resnet18.pth")}
    model = va.create_model("detr_resnet50", num_classes=CLASSES, **{**SMALL, **options})
    torch.testing.assert_close(model.backbone.layer3[0].conv1.weight, theirs.layer3[0].conv1.weight)
    assert "backbone_weights" not in model.config["args"]
    assert model.config["preprocess"]["mean"] == [0.485, 0.456, 0.406]
    with pytest.raises(UserError, match=r"does not fit the backbone resnet34: \d+ of \d+ tensors"):
        va.create_model("detr_resnet50", **{**options, "backbone": "resnet34"})
    (tmp_path / "text.pth").write_text("no checkpoint")
    with pytest.raises(UserError, match=r"text\.pth cannot be read"):
        va.create_model("detr_resnet50", backbone_weights=str(tmp_path / "text.pth"))
    vit = va.create_model("vit_tiny_patch16_224", num_classes=3, img_size=32, patch_size=8, embed_dim=24, depth=1)
    va.save_model(vit, tmp_path / "vit")
    sizes = {"patch_size": 8, "embed_dim": 24, "depth": 1}
    body = make_backbone(
        "vit_tiny_patch16_224", img_size=(32, 32), options=sizes, weights=tmp_path / "vit" / "model.safetensors"
    ).body
    torch.testing.assert_close(body.blocks[0].attn.qkv.weight, vit.blocks[0].attn.qkv.weight)


@pytest.mark.parametrize("name", va.list_models(task="detection"))
def test_every_preset(name, tmp_path):
    options = {"embed_dim": 32, "num_heads": 4, "enc_layers": 1, "dec_layers": 2, "num_queries": 5}
    if "resnet" in name:
        defaults = {"dilation": True} if "dc5" in name else {}
        options |= {"backbone_options": {**NARROW, **defaults}}
    model = small(name, **options).train()
    outputs = model(torch.randn(2, 3, 64, 96), None, targets(2, 3))
    assert ("dn" in outputs) == name.startswith("dn_")
    model.eval()
    x = torch.randn(2, 3, 64, 96)
    with torch.no_grad():
        expected = model(x)["pred_boxes"]
    assert json.loads(json.dumps(model.config)) == model.config
    assert model_from_config(model.config).state_dict().keys() == model.state_dict().keys()
    loaded = va.load_model(va.save_model(model, tmp_path / "model"))
    with torch.no_grad():
        torch.testing.assert_close(loaded(x)["pred_boxes"], expected, rtol=0, atol=0)
    assert model.config["task"] == "detection"
    assert model.config["args"]["num_classes"] == CLASSES
    copy.deepcopy(model)


def test_published_sizes():
    assert va.create_model("dn_detr_tiny").num_classes == 10
    found = profile("detr_resnet50")
    assert found.params == pytest.approx(41.5e6, rel=0.01)  # 41 M in the paper
    assert found.num_classes == 91
    assert profile("dn_detr_tiny").params == pytest.approx(1.6e6, rel=0.02)
    assert profile("detr_resnet50_dc5").macs > 1.8 * found.macs


@pytest.mark.parametrize(
    "attention",
    [
        {"score": "cosine"},
        {"normalizer": "straight_through"},
        {"pattern": "window_2d", "window": 2},
        {"position": "rope"},
        {"position": "none"},
        {"num_kv_heads": 1},
        {"pattern": "linformer", "rank": 4},
    ],
)
def test_mechanisms_of_the_core(attention):
    model = small(attention=attention, embed_dim=24, img_size=(40, 56)).train()
    outputs = model(torch.randn(2, 3, 40, 56))
    sum(x.sum() for x in outputs_of(outputs)).backward()
    if "score" in attention:
        assert type(model.decoder.layers[0].cross_attn.score) is type(model.encoder[0].attn.score)
    assert model.decoder.layers[0].self_attn.pattern is None
    other = small(attention=attention, cross_attention={"score": "dot"}, embed_dim=24, img_size=(40, 56))
    assert type(other.decoder.layers[0].cross_attn.score).__name__ != type(other.encoder[0].attn.score).__name__


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"queries": "none"}, "choose learned, point or box"),
        ({"classification": "focal"}, "choose softmax or sigmoid"),
        ({"dn_groups": 2}, "set queries='box'"),
        ({"refine": True}, "needs queries with a box"),
        ({"conditional": True}, "needs queries with a point or a box"),
        ({"queries": "box", "modulate": True}, "set both"),
        ({"num_queries": 0}, "1 or more"),
        ({"backbone": "resnet51"}, "unknown backbone 'resnet51'"),
        ({"backbone_options": {"width": 3}}, "backbone light_cnn does not take these options"),
        ({"attention": {"position": "learned"}}, "which fit images of all sizes"),
        ({"num_clases": 3}, "num_classes"),
        ({"queries": "box", "conditional": True, "attention": {"tie_kv": True}}, "tie_kv is not for"),
    ],
)
def test_what_makes_no_sense_is_said(options, message):
    with pytest.raises((UserError, ValueError), match=message):
        small(**options)


def test_bad_input_is_said():
    model = small()
    with pytest.raises(UserError, match="is not empty"):
        model([])
    with pytest.raises(UserError, match="has no mask"):
        model([torch.randn(3, 8, 8)], torch.ones(1, 8, 8, dtype=torch.bool))
    with pytest.raises(UserError, match=r"mask \(2, 5, 9\) is not"):
        model(torch.randn(2, 3, 8, 9), torch.ones(2, 5, 9, dtype=torch.bool))
