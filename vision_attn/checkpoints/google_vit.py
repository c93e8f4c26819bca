"""ViTs of Google's own code (https://github.com/google-research/vision_transformer, Apache-2.0), ``.npz`` files.

Layout: ``embedding/{kernel,bias} cls Transformer/posembed_input/pos_embedding Transformer/encoder_norm head
Transformer/encoderblock_{i}/{LayerNorm_0,MultiHeadDotProductAttention_1/{query,key,value,out},LayerNorm_2,
MlpBlock_3/Dense_{0,1}}``. Matrices are (in, out) there, and those of queries, keys and values (in, heads, width): here
the heads can be read off.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Set
from typing import Any

import torch
from torch import Tensor

from vision_attn.checkpoints.hints import Found, Hints, Shapes, count, grid, in_zoo, plain, ratio
from vision_attn.errors import UserError

TITLE = "ViT of Google"
PEER = ""

_BLOCK = "Transformer/encoderblock_"
_ATTENTION = "MultiHeadDotProductAttention_1"
_WORDS = {  # theirs, ours
    "LayerNorm_0/scale": "norm1.weight",
    "LayerNorm_0/bias": "norm1.bias",
    f"{_ATTENTION}/out/kernel": "attn.proj.weight",
    f"{_ATTENTION}/out/bias": "attn.proj.bias",
    "LayerNorm_2/scale": "norm2.weight",
    "LayerNorm_2/bias": "norm2.bias",
    "MlpBlock_3/Dense_0/kernel": "mlp.fc1.weight",
    "MlpBlock_3/Dense_0/bias": "mlp.fc1.bias",
    "MlpBlock_3/Dense_1/kernel": "mlp.fc2.weight",
    "MlpBlock_3/Dense_1/bias": "mlp.fc2.bias",
}
_OUTSIDE = {
    "cls": "cls_token",
    "embedding/kernel": "patch_embed.proj.weight",
    "embedding/bias": "patch_embed.proj.bias",
    "Transformer/posembed_input/pos_embedding": "pos_embed",
    "Transformer/encoder_norm/scale": "norm.weight",
    "Transformer/encoder_norm/bias": "norm.bias",
    "head/kernel": "head.weight",
    "head/bias": "head.bias",
}
_QUERY = re.compile(rf"{_BLOCK}(\d+)/{_ATTENTION}/query/(kernel|bias)")


def recognises(keys: Set[str], shapes: Shapes) -> bool:
    """Whether it is one of theirs."""
    return {"embedding/kernel", f"{_BLOCK}0/{_ATTENTION}/query/kernel"} <= keys


def infer(shapes: Shapes, hints: Hints) -> Found:
    """The model of this zoo that has these tensors.

    Raises:
        UserError: arrays that our ViT has no place for, or a grid that nothing tells.
    """
    strange = [key for key in shapes if _ours(key) is None and f"/{_ATTENTION}/" not in key]
    if strange or "cls" not in shapes:
        missing = f"no place for {strange[0]}" if strange else "no way without a class token (cls)"
        raise UserError(f"{hints.path} is a {TITLE}, but our ViT has {missing}.")
    rows, columns, chans, width = shapes["embedding/kernel"]
    down, across = grid(shapes["Transformer/posembed_input/pos_embedding"][1], 1, (rows, columns), [], hints)[0]
    args: dict[str, Any] = {
        "embed_dim": width,
        "depth": count({key.replace("/", "."): v for key, v in shapes.items()}, _BLOCK.replace("/", ".")),
        "num_heads": shapes[f"{_BLOCK}0/{_ATTENTION}/query/kernel"][1],
        "patch_size": plain((rows, columns)),
        "in_chans": chans,
        "mlp_ratio": ratio(shapes[f"{_BLOCK}0/MlpBlock_3/Dense_0/kernel"][1], width),
        "img_size": plain((down * rows, across * columns)),
    }
    headless = "head/kernel" not in shapes
    if not headless:
        args["num_classes"] = shapes["head/kernel"][1]
    name, rest = in_zoo("vit_*_patch*", args)
    return Found(name, rest, preprocess={"mean": [0.5] * chans, "std": [0.5] * chans}, headless=headless)


def _ours(key: str) -> str | None:
    if key in _OUTSIDE:
        return _OUTSIDE[key]
    if not key.startswith(_BLOCK):
        return None
    number, _, rest = key[len(_BLOCK) :].partition("/")
    return f"blocks.{number}.{_WORDS[rest]}" if rest in _WORDS else None


def convert(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Their names and orders to ours."""
    ours = {}
    for key, value in state.items():
        name = _ours(key)
        found = _QUERY.fullmatch(key)
        if found:
            parts = [state[key.replace("/query/", f"/{word}/")] for word in ("query", "key", "value")]
            kind = "weight" if found[2] == "kernel" else "bias"
            flat = [part.flatten(1).t() if kind == "weight" else part.flatten() for part in parts]
            ours[f"blocks.{found[1]}.attn.qkv.{kind}"] = torch.cat(flat)
        elif name == "patch_embed.proj.weight":
            ours[name] = value.permute(3, 2, 0, 1).contiguous()
        elif name is not None:
            value = value.flatten(0, 1) if key.endswith("/out/kernel") else value
            ours[name] = value.t().contiguous() if value.ndim == 2 else value
    return ours


def holds(model: Any) -> bool:
    """Nothing is written in this layout."""
    return False
