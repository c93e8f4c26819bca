"""torchvision's ViTs and ResNets, loaded without being told what they are, and written back."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torchvision
from torchvision.models import VisionTransformer, resnet18, resnet50

import vision_attn as va
from vision_attn.checkpoints import layouts, read_state_dict
from vision_attn.checkpoints.hints import Hints
from vision_attn.checkpoints.peers import write_for
from vision_attn.errors import UserError


def vit(width: int = 33, heads: int = 3, **options):
    return VisionTransformer(35, 7, 2, heads, width, 71, num_classes=11, **options)


def test_vit_and_back(foreign, tmp_path):
    peer, x = vit(), torch.randn(2, 3, 35, 35)
    ours = foreign.loads_like(peer, tmp_path, x, num_heads=3)
    assert ours.config["preprocess"]["mean"] == [0.485, 0.456, 0.406]
    file, layout = write_for(ours.float(), tmp_path / "back.pth", "torchvision")
    for again in (vit(), layout.peer(ours)):
        again.load_state_dict(read_state_dict(file)[0], strict=True)
        foreign.same(ours, again, x)


PUBLISHED = [
    weights
    for name in (
        "swin_t",
        "swin_s",
        "swin_b",
        "swin_v2_t",
        "swin_v2_s",
        "swin_v2_b",
        "vit_b_16",
        "vit_l_16",
        "vit_h_14",
    )
    for weights in torchvision.models.get_model_weights(name)
    if "LINEAR" not in weights.name  # the tensors of these look like those of the others, and are cropped otherwise
]


@pytest.mark.parametrize("weights", PUBLISHED, ids=str)
def test_images_are_prepared_as_for_the_published_weights(weights):
    theirs = weights.transforms()
    name = str(weights).partition("_Weights")[0].lower()
    with torch.device("meta"):
        peer = torchvision.models.get_model(name, image_size=theirs.crop_size[0]) if "vit" in name else None
        state = (peer or torchvision.models.get_model(name)).state_dict()
    keys, shapes = set(state), {key: tuple(value.shape) for key, value in state.items()}
    (layout,) = [m for m in layouts.modules() if m.PEER == "torchvision" and m.recognises(keys, shapes)]
    named = "swinv2_tiny_window8_256" if "v2" in name else None  # no tensor says how large its windows are
    found = layout.infer(shapes, Hints(Path("weights.pth"), named)).preprocess
    assert found["interpolation"] == theirs.interpolation.value
    side = found["size"] if isinstance(found["size"], int) else min(found["size"])
    assert side == theirs.crop_size[0]
    assert round(side / found["crop_pct"]) == theirs.resize_size[0]
    assert (found["mean"], found["std"]) == (theirs.mean, theirs.std)


def test_old_names_of_the_mlp(foreign, tmp_path):
    peer, x = foreign.shaken(vit()), torch.randn(2, 3, 35, 35)
    state = {
        k.replace(".mlp.0.", ".mlp.linear_1.").replace(".mlp.3.", ".mlp.linear_2."): v
        for k, v in peer.state_dict().items()
    }
    torch.save(state, tmp_path / "w.pth")
    foreign.same(foreign.quietly(tmp_path / "w.pth", num_heads=3), peer, x)


def test_published_widths_need_no_word(foreign, tmp_path):
    peer, x = foreign.shaken(vit(768, 12)), torch.randn(1, 3, 35, 35)
    torch.save(peer.state_dict(), tmp_path / "w.pth")
    ours = va.load_model(tmp_path / "w.pth")  # no warning: nothing is assumed
    foreign.same(ours, peer, x)
    assert "assumed" not in ours.config["extra"]


def test_what_our_vit_has_no_place_for_is_named(tmp_path):
    torch.save(vit(representation_size=5).state_dict(), tmp_path / "w.pth")
    with pytest.raises(UserError, match=r"ViT of torchvision with heads\.pre_logits\.weight, for which our ViT"):
        va.load_model(tmp_path / "w.pth", num_heads=3)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"reg_tokens": 2}, "torchvision's ViT has no reg_tokens=2"),
        ({"norm_eps": 1e-5}, "has norm_eps=1e-06, this model 1e-05"),
        ({"img_size": (35, 49)}, "takes squares only, and this model is for 35×49"),
        ({"attention": {"qk_norm": True}}, "no attention with qk_norm=True"),
        ({"pre_norm": True}, "has no pre_norm=True"),
        ({"global_pool": "avg"}, "has no global_pool='avg'"),
    ],
)
def test_what_torchvision_has_no_place_for_is_named(options, message, tmp_path):
    sizes = {"img_size": 35, "patch_size": 7, "embed_dim": 33, "num_heads": 3, "depth": 2}
    with pytest.raises(UserError, match=message):
        write_for(va.create_model("vit_tiny_patch16_224", **{**sizes, **options}), tmp_path / "w.pth", "torchvision")


@pytest.mark.parametrize("build", [resnet18, resnet50])
def test_resnets_and_back(build, foreign, tmp_path):
    peer, x = build(num_classes=7), torch.randn(2, 3, 64, 64)
    ours = foreign.loads_like(peer, tmp_path, x)
    assert ours.config["name"] == build.__name__
    file, layout = write_for(ours.float(), tmp_path / "back.safetensors", "torchvision")
    again = layout.peer(ours)
    again.load_state_dict(read_state_dict(file)[0], strict=True)
    foreign.same(ours, again, x)
