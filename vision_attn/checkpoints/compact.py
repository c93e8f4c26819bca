"""CCT, CVT and ViT-Lite of https://github.com/SHI-Labs/Compact-Transformers (Apache-2.0).

Layout: ``tokenizer.conv_layers.{i}.0 classifier.{positional_emb,class_emb,attention_pool,norm,fc}
classifier.blocks.{i}.{pre_norm,self_attn.qkv,self_attn.proj,norm1,linear1,linear2}``. Their ``norm1`` also replaces the
residual stream, which is our ``norm_stream=True``.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Set
from typing import Any

import torch
from torch import Tensor

from vision_attn.checkpoints.hints import IMAGENET, Found, Hints, Shapes, count, heads, in_zoo, plain, ratio
from vision_attn.checkpoints.layouts import PLAIN, refuse_mechanisms
from vision_attn.errors import UserError
from vision_attn.layers.tokenizer import ConvTokenizer
from vision_attn.models import list_models, model_defaults
from vision_attn.models.cct import CompactTransformer

TITLE = "compact transformer of SHI-Labs"
PEER = ""

CIFAR = {  # the statistics that the repository's recipes normalize with, by the number of classes
    10: {"mean": [0.4914, 0.4822, 0.4465], "std": [0.2470, 0.2435, 0.2616]},
    100: {"mean": [0.5071, 0.4867, 0.4408], "std": [0.2675, 0.2565, 0.2761]},
}

_WORDS = (  # theirs, ours
    ("classifier.blocks.", "blocks."),
    (".pre_norm.", ".norm1."),
    (".self_attn.", ".attn."),
    (".linear1.", ".mlp.fc1."),
    (".linear2.", ".mlp.fc2."),
    ("classifier.norm.", "norm."),
    ("classifier.fc.", "head."),
    ("classifier.positional_emb", "pos_embed"),
    ("classifier.class_emb", "cls_token"),
)

_CONV = re.compile(r"^tokenizer\.conv_layers\.(\d+)\.0\.")


def recognises(keys: Set[str], shapes: Shapes) -> bool:
    """Whether it is one of theirs."""
    return {
        "tokenizer.conv_layers.0.0.weight",
        "classifier.blocks.0.self_attn.qkv.weight",
        "classifier.fc.weight",
    } <= keys


def infer(shapes: Shapes, hints: Hints) -> Found:
    """The model of this zoo that has these tensors.

    Raises:
        UserError: heads or an image size that nothing tells.
    """
    known = model_defaults(str(hints.name)) if hints.name in list_models("c[cv]t_*") + list_models("vit_lite*") else {}
    found = Found("", {})
    layers = count(shapes, "tokenizer.conv_layers.")
    channels, in_chans, side, _ = shapes["tokenizer.conv_layers.0.0.weight"]
    width = shapes["classifier.fc.weight"][1]
    args: dict[str, Any] = {
        "embed_dim": width,
        "depth": count(shapes, "classifier.blocks."),
        "num_heads": heads(width, hints, found, known=known.get("num_heads") or {128: 2, 256: 4, 384: 6}.get(width)),
        "mlp_ratio": ratio(shapes["classifier.blocks.0.linear1.weight"][0], width),
        "in_chans": in_chans,
        "num_classes": shapes["classifier.fc.weight"][0],
        "global_pool": "token" if "classifier.class_emb" in shapes else "seq",
        "norm_stream": True,
        "qkv_bias": "classifier.blocks.0.self_attn.qkv.bias" in shapes,
        "tokenizer": _tokenizer(shapes, layers, channels, side),
    }
    if "classifier.positional_emb" in shapes:
        prefix = int(args["global_pool"] == "token")
        args["img_size"] = plain(_size(shapes["classifier.positional_emb"][1] - prefix, args, hints))
    else:
        args["attention"] = {"position": "none"}
        args["img_size"] = plain(hints.img_size or (32, 32))
    found.name, found.args = in_zoo("c[cv]t_*" if args["global_pool"] == "seq" else "vit_lite*", args)
    found.preprocess = dict(CIFAR.get(args["num_classes"], IMAGENET))
    return found


def _tokenizer(shapes: Shapes, layers: int, channels: int, side: int) -> dict[str, Any]:
    if "tokenizer.conv_layers.0.0.bias" in shapes:  # patches: CVT and ViT-Lite
        cut = {"n_layers": layers, "kernel_size": side, "stride": side, "padding": 0}
        return {**cut, "pool": "none", "act": "none", "bias": True}
    found: dict[str, Any] = {
        "n_layers": layers,
        "kernel_size": side,
        "stride": max(1, side // 2 - 1),
        "padding": max(1, side // 2),
    }
    found |= {"pool": "max", "act": "relu", "bias": False}
    return {**found, "channels": channels} if layers > 1 else found


def _size(length: int, args: Mapping[str, Any], hints: Hints) -> tuple[int, int]:
    """The image size whose tokens are so many: a square, or what the caller says."""
    embed = ConvTokenizer(in_chans=1, embed_dim=1, **{**args["tokenizer"], "channels": 1})
    if hints.img_size and math.prod(embed.grid(hints.img_size)) == length:
        return hints.img_size
    rows = math.isqrt(length)
    factor = (embed.stride * embed.pool_stride) ** len(embed.convs)
    if rows * rows == length and embed.grid((rows * factor, rows * factor)) == (rows, rows):
        return rows * factor, rows * factor
    raise UserError(
        f"{hints.path}: {length} positions are no square grid. Say the size it was trained at: img_size=… (--img_size)."
    )


def convert(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Their names to ours. The bias of their pooling adds one number to every score, which softmax cancels."""
    ours = {}
    for key, value in state.items():
        if key == "classifier.attention_pool.bias":
            continue
        if key == "classifier.attention_pool.weight":
            ours["pool.query"] = value[0]
            continue
        name = _CONV.sub(r"patch_embed.convs.\1.", key)
        name = name.replace(".norm1.", ".norm2.")  # before pre_norm takes that name
        for old, new in _WORDS:
            name = name.replace(old, new)
        ours[name] = value
    return ours


def holds(model: Any) -> bool:
    """Whether the repository has models like this."""
    return isinstance(model, CompactTransformer)


def revert(state: Mapping[str, Tensor], model: Any) -> dict[str, Tensor]:
    """Our names to theirs.

    Raises:
        UserError: the model has something that theirs has not.
    """
    refuse_mechanisms(model, {"position": ("learned", "none"), "qk_norm": (False,), **PLAIN}, TITLE)
    args = {**model_defaults(model.config["name"]), **model.config["args"]}
    if not args["norm_stream"] or args["global_pool"] not in ("seq", "token") or args["init_values"] is not None:
        raise UserError(
            f"a {TITLE} has norm_stream=True, pools by seq or token and scales no layers; this model differs."
        )
    theirs = {}
    for key, value in state.items():
        if key == "pool.query":
            theirs["classifier.attention_pool.weight"] = value[None]
            theirs["classifier.attention_pool.bias"] = torch.zeros_like(value[:1])
            continue
        name = re.sub(r"^patch_embed\.convs\.(\d+)\.", r"tokenizer.conv_layers.\1.0.", key)
        name = re.sub(r"^norm\.", "classifier.norm.", re.sub(r"^head\.", "classifier.fc.", name))
        if name.startswith("blocks."):
            name = name.replace(".norm1.", ".pre_norm.").replace(".norm2.", ".norm1.")
        for old, new in _WORDS:
            if new not in ("norm.", "head.", ".norm1."):
                name = name.replace(new, old)
        theirs[name] = value
    return theirs
