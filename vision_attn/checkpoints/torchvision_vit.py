"""ViTs of torchvision (https://github.com/pytorch/vision, BSD-3): ``vit_b_16 vit_b_32 vit_l_16 vit_l_32 vit_h_14``.

Layout: ``conv_proj class_token encoder.pos_embedding encoder.layers.encoder_layer_{i}.{ln_1,self_attention.in_proj_*,
self_attention.out_proj,ln_2,mlp.0,mlp.3} encoder.ln heads.head``; the MLP once was ``mlp.linear_1 mlp.linear_2``.
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from typing import Any

from torch import Tensor

from vision_attn.checkpoints.hints import Found, Hints, Shapes, count, grid, heads, in_zoo, plain, ratio
from vision_attn.checkpoints.layouts import PLAIN, imagenet, refuse_mechanisms
from vision_attn.errors import UserError
from vision_attn.models import list_models, model_defaults
from vision_attn.models.vit import VisionTransformer

TITLE = "ViT of torchvision"
PEER = "torchvision"

_LAYER = "encoder.layers.encoder_layer_"
_WORDS = (  # theirs, ours
    (_LAYER, "blocks."),
    ("encoder.ln.", "norm."),
    (".ln_1.", ".norm1."),
    (".ln_2.", ".norm2."),
    (".self_attention.in_proj_", ".attn.qkv."),
    (".self_attention.out_proj.", ".attn.proj."),
    (".mlp.0.", ".mlp.fc1."),
    (".mlp.3.", ".mlp.fc2."),
    ("heads.head.", "head."),
    ("conv_proj.", "patch_embed.proj."),
    ("class_token", "cls_token"),
    ("encoder.pos_embedding", "pos_embed"),
)
_OLD = ((".mlp.linear_1.", ".mlp.0."), (".mlp.linear_2.", ".mlp.3."))


def recognises(keys: Set[str], shapes: Shapes) -> bool:
    """Whether it is one of theirs."""
    return {"class_token", "encoder.pos_embedding", f"{_LAYER}0.ln_1.weight"} <= keys


def infer(shapes: Shapes, hints: Hints) -> Found:
    """The model of this zoo that has these tensors.

    Raises:
        UserError: a stem of several convolutions or a second layer in the head, which ours has not; or no heads known.
    """
    strange = [key for key in shapes if key.startswith(("heads.pre_logits.", "conv_proj.conv_"))]
    if strange:
        raise UserError(f"{hints.path} is a {TITLE} with {strange[0]}, for which our ViT has no place.")
    width, chans, *patch = shapes["conv_proj.weight"]
    fc1 = shapes.get(f"{_LAYER}0.mlp.0.weight") or shapes[f"{_LAYER}0.mlp.linear_1.weight"]
    found = Found("", {})
    args: dict[str, Any] = {
        "embed_dim": width,
        "depth": count(shapes, _LAYER),
        "num_heads": heads(width, hints, found, known=_known(hints, width)),
        "patch_size": plain(patch),
        "in_chans": chans,
        "mlp_ratio": ratio(fc1[0], width),
    }
    (rows, columns), _ = grid(shapes["encoder.pos_embedding"][1], 1, patch, [], hints)
    args["img_size"] = plain((rows * patch[0], columns * patch[1]))
    found.headless = "heads.head.weight" not in shapes
    if not found.headless:
        args["num_classes"] = shapes["heads.head.weight"][0]
    found.name, found.args = in_zoo("vit_*_patch*", args)
    found.preprocess = imagenet(args["img_size"])
    if rows * patch[0] > 224:  # those of SWAG, whose larger images are not cropped
        found.preprocess = imagenet(args["img_size"], 1.0, "bicubic")
    elif (width, patch[0]) == (1024, 16):
        found.preprocess = imagenet(args["img_size"], 224 / 242)
    return found


def _known(hints: Hints, width: int) -> int | None:
    """Heads of the published sizes: they are fixed by the width, so nothing is assumed."""
    if hints.name in list_models("vit*"):
        return int(model_defaults(str(hints.name))["num_heads"])
    return {768: 12, 1024: 16, 1280: 16}.get(width)


def convert(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Their names to ours; the tensors are the same."""
    return {_renamed(_renamed(key, _OLD), _WORDS): value for key, value in state.items()}


def holds(model: Any) -> bool:
    """Whether torchvision has models like this."""
    return type(model) is VisionTransformer


def revert(state: Mapping[str, Tensor], model: Any) -> dict[str, Tensor]:
    """Our names to theirs.

    Raises:
        UserError: the model has something that torchvision's ViT has not.
    """
    who = "torchvision's ViT"
    refuse_mechanisms(model, {"position": ("learned",), "qk_norm": (False,), **PLAIN}, who)
    refuse_options(model, who)
    if model.norm.eps != 1e-6:
        raise UserError(f"{who} has norm_eps=1e-06, this model {model.norm.eps}; keep it in our own format.")
    rows, columns = model.grid_size
    sides = {model.img_size[0], model.img_size[1], model.patch_embed.patch_size[0] * rows}
    if len(sides) > 1 or rows != columns:
        raise UserError(f"{who} takes squares only, and this model is for {model.img_size[0]}×{model.img_size[1]}.")
    back = tuple((ours, theirs) for theirs, ours in _WORDS if ours != "norm.")
    # "norm." is also the end of other names, so the last norm goes by itself
    return {
        f"encoder.ln.{key[5:]}" if key.startswith("norm.") else _renamed(key, back): value
        for key, value in state.items()
    }


def refuse_options(model: Any, who: str, **takes: Any) -> None:
    """Refuses a ViT with parts that only timm's has.

    Args:
        model: our ViT.
        who: the library, for the message.
        **takes: options that this library does have, with their values.

    Raises:
        UserError: naming the option.
    """
    args = {**model_defaults(model.config["name"]), **model.config["args"]}
    needed = {
        "class_token": True,
        "distilled": False,
        "reg_tokens": 0,
        "no_embed_class": False,
        "global_pool": "token",
        "fc_norm": (None, False),
        "pre_norm": False,
        "mlp": "mlp",
        "act": "gelu",
        "init_values": None,
        "qkv_bias": True,
        **takes,
    }
    for key, value in needed.items():
        if args[key] != value and not (isinstance(value, tuple) and args[key] in value):
            raise UserError(f"{who} has no {key}={args[key]!r}; write it for timm, or keep it in our own format.")


def peer(model: Any) -> Any:
    """torchvision's own model of these sizes, with fresh weights."""
    from torchvision.models import VisionTransformer as Theirs

    block = model.blocks[0]
    return Theirs(
        image_size=model.img_size[0],
        patch_size=model.patch_embed.patch_size[0],
        num_layers=len(model.blocks),
        num_heads=block.attn.num_heads,
        hidden_dim=model.norm.weight.shape[0],
        mlp_dim=block.mlp.fc1.out_features,
        num_classes=model.head.out_features,
    )


def stage(name: str) -> str | None:
    """Their name for a module of ours."""
    if name.startswith("blocks."):
        return _LAYER + name[7:]
    return {"patch_embed": "conv_proj", "norm": "encoder.ln", "head": "heads"}.get(name)


def _renamed(key: str, words: tuple[tuple[str, str], ...]) -> str:
    for old, new in words:
        key = key.replace(old, new)
    return key
