"""What a name of timm (https://github.com/huggingface/pytorch-image-models) says about a ViT beyond its tensors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

ACTS = {"GELU": "gelu", "GELUTanh": "gelu_tanh", "QuickGELU": "quick_gelu", "ReLU": "relu", "SiLU": "silu"}


def spec(name: str | None) -> dict[str, Any]:
    """What timm's model of this name has: heads, activation, ε, pooling, image size and preprocessing.

    Args:
        name: a name of timm, with or without the tag of its weights; anything else gives an empty answer.

    Returns:
        ``block num_heads act norm_eps global_pool fc_norm img_size preprocess``, as far as the model has them.
    """
    if not name:
        return {}
    import timm

    if not timm.is_model(name.split(".")[0]):
        return {}
    with torch.device("meta"):
        try:
            model: Any = timm.create_model(name, pretrained=False)
        except (NotImplementedError, RuntimeError, TypeError):  # some initialisations need values
            return {}
    found = {"preprocess": preprocess(model.pretrained_cfg)}
    blocks = getattr(model, "blocks", None)
    if not isinstance(blocks, nn.Sequential) or not hasattr(blocks[0], "attn") or not hasattr(model, "global_pool"):
        return found
    norm, act = getattr(blocks[0], "norm1", None), getattr(getattr(blocks[0], "mlp", None), "act", None)
    return {
        **found,
        "block": type(blocks[0]).__name__,
        "num_heads": getattr(blocks[0].attn, "num_heads", None),
        "act": ACTS.get(type(act).__name__),
        "norm_eps": getattr(norm, "eps", None),
        "global_pool": model.global_pool,
        "fc_norm": not isinstance(getattr(model, "fc_norm", nn.Identity()), nn.Identity),
        "img_size": list(model.patch_embed.img_size),
    }


def told(config: Mapping[str, Any]) -> dict[str, Any]:
    """What timm's ``config.json`` adds to the name: nothing of it is handed to timm, it is only looked at."""
    args = config.get("model_args")
    args = args if isinstance(args, dict) else {}
    found: dict[str, Any] = {}
    if isinstance(args.get("num_heads"), int):
        found["num_heads"] = args["num_heads"]
    if isinstance(args.get("act_layer"), str):
        found["act"] = args["act_layer"]
    pool = args.get("global_pool", config.get("global_pool"))
    if isinstance(pool, str):
        found["global_pool"] = pool
    if isinstance(config.get("pretrained_cfg"), dict):
        found["preprocess"] = preprocess(config["pretrained_cfg"])
    return found


def preprocess(settings: Mapping[str, Any]) -> dict[str, Any]:
    """timm's ``pretrained_cfg`` in our words."""
    found: dict[str, Any] = {}
    size = settings.get("input_size")
    if isinstance(size, list | tuple) and len(size) == 3:
        found["size"] = [int(size[1]), int(size[2])]
    for key in ("mean", "std"):
        if isinstance(settings.get(key), list | tuple):
            found[key] = [float(v) for v in settings[key]]
    if isinstance(settings.get("interpolation"), str):
        found["interpolation"] = settings["interpolation"]
    if isinstance(settings.get("crop_pct"), int | float):
        found["crop_pct"] = float(settings["crop_pct"])
    return found
