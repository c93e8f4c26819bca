"""ViTs of timm (https://github.com/huggingface/pytorch-image-models, Apache-2.0), and ours without a description.

Layout: ``patch_embed.proj cls_token dist_token reg_token pos_embed norm_pre blocks.{i}.{norm1,attn.qkv,attn.proj,ls1,
norm2,mlp.fc1,mlp.fc2,ls2} norm fc_norm head head_dist``, which are our names too. DeiT, DeiT III, CLIP's image tower
and DINOv2 differ in which of these they have.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping, Set
from typing import Any

from torch import Tensor

from vision_attn.checkpoints import timm_names
from vision_attn.checkpoints.hints import Found, Hints, Shapes, count, grid, heads, in_zoo, plain, ratio
from vision_attn.checkpoints.layouts import PLAIN, refuse_mechanisms
from vision_attn.errors import UserError
from vision_attn.models import list_models, model_defaults
from vision_attn.models.vit import VisionTransformer

TITLE = "ViT of timm"
PEER = "timm"

_KNOWN = re.compile(
    r"(cls_token|dist_token|reg_token|pos_embed|(patch_embed\.proj|norm_pre|norm|fc_norm|head|head_dist)\.(weight|bias)"
    r"|blocks\.\d+\.(((norm1|norm2|attn\.(qkv|proj|q_norm|k_norm)|mlp\.(fc1|fc2))\.(weight|bias))|ls[12]\.gamma))"
)
_OWN = ("norm_eps", "act", "global_pool", "num_heads")  # arguments that no tensor shows


def recognises(keys: Set[str], shapes: Shapes) -> bool:
    """Whether it is a ViT: patches cut by one convolution, layers with a fused projection."""
    needed = {"patch_embed.proj.weight", "blocks.0.norm1.weight", "blocks.0.attn.qkv.weight", "blocks.0.mlp.fc1.weight"}
    return needed <= keys and ("cls_token" in keys or "pos_embed" in keys or "norm.weight" in keys)


def infer(shapes: Shapes, hints: Hints) -> Found:
    """The model of this zoo that has exactly these tensors.

    Raises:
        UserError: tensors that our ViT has no place for, or heads or a grid that nothing tells.
    """
    strange = [key for key in shapes if not _KNOWN.fullmatch(key)]
    if strange:
        raise UserError(
            f"{hints.path} looks like a ViT of timm, but our ViT has no place for {len(strange)} of its tensors "
            f"({', '.join(strange[:3])}{', …' if len(strange) > 3 else ''})."
        )
    known = named(hints)
    if known.get("block") not in (None, "Block"):
        raise UserError(f"{hints.path}: timm's {hints.name} is built of {known['block']}, of which ours has none.")
    width, chans, *patch = shapes["patch_embed.proj.weight"]
    found = Found("", {})
    args: dict[str, Any] = {
        "embed_dim": width,
        "depth": count(shapes, "blocks."),
        "patch_size": plain(patch),
        "in_chans": chans,
        "class_token": "cls_token" in shapes,
        "distilled": "dist_token" in shapes,
        "reg_tokens": shapes["reg_token"][1] if "reg_token" in shapes else 0,
        "pre_norm": "norm_pre.weight" in shapes,
        "qkv_bias": "blocks.0.attn.qkv.bias" in shapes,
        "norm_eps": known.get("norm_eps") or (1e-5 if "norm_pre.weight" in shapes else 1e-6),
        **_mlp(shapes, known),
        **_pooling(shapes, known),
    }
    if "blocks.0.ls1.gamma" in shapes:
        args["init_values"] = known.get("init_values") or 1e-5  # where it began; the file has what it became
    attention: dict[str, Any] = {}
    head_width = None
    if "blocks.0.attn.q_norm.weight" in shapes:
        attention["qk_norm"] = True
        head_width = shapes["blocks.0.attn.q_norm.weight"][0]
    if "pos_embed" not in shapes:
        attention["position"] = "none"
    args["num_heads"] = heads(width, hints, found, known=width // head_width if head_width else known.get("num_heads"))
    args |= _grid(shapes, args, patch, known, hints)
    if attention:
        args["attention"] = attention
    found.headless = "head.weight" not in shapes
    if not found.headless:
        args["num_classes"] = shapes["head.weight"][0]
    found.name, found.args = in_zoo("vit_*_patch*", args)
    found.preprocess = known.get("preprocess") or {}
    if not known.get("act"):
        found.notes += _doubts(args)
    found.labels = hints.config.get("label_names")
    return found


def named(hints: Hints) -> dict[str, Any]:
    """What the name and timm's ``config.json`` say beyond the tensors."""
    if hints.name in list_models("vit*"):
        known = {key: model_defaults(str(hints.name)).get(key) for key in _OWN}
        known["preprocess"] = timm_names.spec(hints.name).get("preprocess")
    else:
        known = timm_names.spec(hints.name)
    return known | timm_names.told(hints.config)


def _doubts(args: Mapping[str, Any]) -> list[str]:
    """Families that differ in their activation alone."""
    if args["pre_norm"]:
        return ["activation gelu (OpenAI's own CLIP has quick_gelu)"]
    if not args["class_token"] and not args["reg_tokens"] and args["fc_norm"] is False:
        return ["activation gelu (some of SigLIP have gelu_tanh)"]
    return []


def _mlp(shapes: Shapes, known: Mapping[str, Any]) -> dict[str, Any]:
    rows, width = shapes["blocks.0.mlp.fc1.weight"]
    packed = shapes["blocks.0.mlp.fc2.weight"][1] * 2 == rows
    act = "gelu" if packed else known.get("act") or "gelu"
    return {"mlp_ratio": ratio(rows, width), "mlp": "swiglu" if packed else "mlp", "act": act}


def _pooling(shapes: Shapes, known: Mapping[str, Any]) -> dict[str, Any]:
    """Which tokens the head reads: a norm after the pool means the mean, unless the name says otherwise."""
    after = "fc_norm.weight" in shapes
    pool = known.get("global_pool")
    if pool not in ("token", "avg") or (pool == "token" and "cls_token" not in shapes):
        pool = "avg" if after or "cls_token" not in shapes else "token"
    return {"global_pool": pool, "fc_norm": None if after == (pool == "avg") else after}


def _grid(
    shapes: Shapes, args: Mapping[str, Any], patch: list[int], known: Mapping[str, Any], hints: Hints
) -> dict[str, Any]:
    prefix = int(args["class_token"]) + int(args["distilled"]) + args["reg_tokens"]
    sizes = [(known.get("preprocess") or {}).get("size"), known.get("img_size")]
    if "pos_embed" not in shapes:
        size = next((s for s in (*sizes, hints.img_size) if s), (14 * patch[0], 14 * patch[1]))
        return {"img_size": plain(size), "no_embed_class": False}
    (rows, columns), embedded = grid(shapes["pos_embed"][1], prefix, patch, sizes, hints)
    return {"img_size": plain((rows * patch[0], columns * patch[1])), "no_embed_class": prefix > 0 and not embedded}


def convert(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The names are ours."""
    return dict(state)


def holds(model: Any) -> bool:
    """Whether timm has models like this."""
    return type(model) is VisionTransformer


def revert(state: Mapping[str, Tensor], model: Any) -> dict[str, Tensor]:
    """The names are theirs, as long as the model has nothing that timm's ViT has not.

    Raises:
        UserError: it has.
    """
    refuse_mechanisms(model, {"qk_norm": (True, False), "position": ("learned", "none"), **PLAIN}, "timm's ViT")
    strange = [key for key in state if not _KNOWN.fullmatch(key)]
    if strange:
        raise UserError(f"timm's ViT has no place for {', '.join(strange[:3])}; it can only be kept in our own format.")
    return dict(state)


_SHARED = (
    "in_chans",
    "num_classes",
    "global_pool",
    "embed_dim",
    "depth",
    "num_heads",
    "mlp_ratio",
    "qkv_bias",
    "init_values",
    "class_token",
    "no_embed_class",
    "reg_tokens",
    "pre_norm",
    "fc_norm",
)


def peer(model: Any) -> Any:
    """timm's own model of these sizes, with fresh weights."""
    from timm.layers import LayerNorm, SwiGLUPacked
    from timm.models.deit import VisionTransformerDistilled
    from timm.models.vision_transformer import VisionTransformer as Theirs

    args = {**model_defaults(model.config["name"]), **model.config["args"]}
    attention = args.get("attention") or {}
    swiglu = {"mlp_layer": SwiGLUPacked, "act_layer": "silu"} if args["mlp"] == "swiglu" else {}
    return (VisionTransformerDistilled if args["distilled"] else Theirs)(
        **{key: args[key] for key in _SHARED},
        img_size=model.img_size,
        patch_size=model.patch_embed.patch_size,
        pos_embed="none" if attention.get("position") == "none" else "learn",
        qk_norm=bool(attention.get("qk_norm")),
        norm_layer=functools.partial(LayerNorm, eps=args["norm_eps"]),
        **{"act_layer": args["act"], **swiglu},
    )
