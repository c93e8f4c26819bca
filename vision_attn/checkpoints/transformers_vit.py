"""``ViTForImageClassification`` of transformers (https://github.com/huggingface/transformers, Apache-2.0).

Layout, old and in every file it writes: ``vit.embeddings.{cls_token,position_embeddings,patch_embeddings.projection}
vit.encoder.layer.{i}.{layernorm_before,attention.attention.{query,key,value},attention.output.dense,layernorm_after,
intermediate.dense,output.dense} vit.layernorm classifier``; new, in memory since version 5: ``vit.layers.{i}.{…,
attention.{q,k,v,o}_proj,mlp.fc1,mlp.fc2}``.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Set
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vision_attn.atomic import atomic_write_text
from vision_attn.checkpoints.hints import Found, Hints, Shapes, count, grid, heads, in_zoo, plain, ratio
from vision_attn.checkpoints.layouts import PLAIN, refuse_mechanisms
from vision_attn.checkpoints.torchvision_vit import refuse_options
from vision_attn.errors import UserError
from vision_attn.models import list_models, model_defaults
from vision_attn.models.vit import VisionTransformer

TITLE = "ViT of transformers"
PEER = "transformers"

_OLD, _NEW = "encoder.layer.", "layers."
_WORDS = (  # theirs (old), ours
    ("encoder.layer.", "blocks."),
    (".attention.output.dense.", ".attn.proj."),
    (".intermediate.dense.", ".mlp.fc1."),
    (".output.dense.", ".mlp.fc2."),
    (".layernorm_before.", ".norm1."),
    (".layernorm_after.", ".norm2."),
    ("embeddings.patch_embeddings.projection.", "patch_embed.proj."),
    ("embeddings.cls_token", "cls_token"),
    ("embeddings.position_embeddings", "pos_embed"),
)
_NEWER = (  # theirs (new), theirs (old)
    ("layers.", "encoder.layer."),
    (".attention.q_proj.", ".attention.attention.query."),
    (".attention.k_proj.", ".attention.attention.key."),
    (".attention.v_proj.", ".attention.attention.value."),
    (".attention.o_proj.", ".attention.output.dense."),
    (".mlp.fc1.", ".intermediate.dense."),
    (".mlp.fc2.", ".output.dense."),
)
_ACTS = {"gelu": "gelu", "gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh", "gelu_fast": "gelu_tanh"}
_ACTS |= {"quick_gelu": "quick_gelu", "relu": "relu", "silu": "silu", "swish": "silu"}
_UNUSED = re.compile(r"(vit\.)?(pooler\.|embeddings\.mask_token)")  # nothing of it reaches the logits
_QKV = re.compile(r"(blocks\.\d+)\.attention\.attention\.(query|key|value)\.(weight|bias)")
_RESAMPLE = {0: "nearest", 1: "lanczos", 2: "bilinear", 3: "bicubic"}  # PIL's numbers


def recognises(keys: Set[str], shapes: Shapes) -> bool:
    """Whether it is one of theirs, with the prefix of the classifier or without."""
    old = {_plain_key(key) for key in keys}
    needed = {"embeddings.cls_token", "embeddings.position_embeddings", "embeddings.patch_embeddings.projection.weight"}
    return needed <= old and "encoder.layer.0.attention.attention.query.weight" in old


def _plain_key(key: str) -> str:
    """The old name, without ``vit.``."""
    key = key.removeprefix("vit.")
    if key.startswith(_NEW):
        for new, old in _NEWER:
            key = key.replace(new, old)
    return key


def infer(shapes: Shapes, hints: Hints) -> Found:
    """The model of this zoo that has these tensors.

    Raises:
        UserError: heads or a grid that nothing tells, or an activation that ours has not.
    """
    shapes = {_plain_key(key): value for key, value in shapes.items() if not _UNUSED.match(key)}
    width, chans, *patch = shapes["embeddings.patch_embeddings.projection.weight"]
    told: Mapping[str, Any] = hints.config if hints.config.get("hidden_size") == width else {}
    if told.get("hidden_act", "gelu") not in _ACTS:
        raise UserError(
            f"{hints.path}: its config.json asks for hidden_act={told['hidden_act']!r}, which ours has not."
        )
    found = Found("", {}, preprocess=preprocess_of(hints.preprocessor), labels=labels_of(told))
    known = told.get("num_attention_heads")
    if hints.name in list_models("vit*"):
        known = model_defaults(str(hints.name))["num_heads"]
    args: dict[str, Any] = {
        "embed_dim": width,
        "depth": count(shapes, _OLD),
        "num_heads": heads(width, hints, found, known=known),
        "patch_size": plain(patch),
        "in_chans": chans,
        "mlp_ratio": ratio(shapes[f"{_OLD}0.intermediate.dense.weight"][0], width),
        "act": _ACTS[told.get("hidden_act", "gelu")],
        "norm_eps": float(told.get("layer_norm_eps", 1e-12)),  # the default there
        "qkv_bias": f"{_OLD}0.attention.attention.query.bias" in shapes,
    }
    size = told.get("image_size")
    size = [size, size] if isinstance(size, int) else size
    (rows, columns), _ = grid(shapes["embeddings.position_embeddings"][1], 1, patch, [size], hints)
    args["img_size"] = plain((rows * patch[0], columns * patch[1]))
    found.headless = "classifier.weight" not in shapes
    if not found.headless:
        args["num_classes"] = shapes["classifier.weight"][0]
    found.name, found.args = in_zoo("vit_*_patch*", args)
    return found


def labels_of(config: Mapping[str, Any]) -> list[str] | None:
    """``id2label`` in order, unless it holds placeholders."""
    names = config.get("id2label")
    if not isinstance(names, dict) or not names:
        return None
    words = [word for i in range(len(names)) if isinstance(word := names.get(str(i), names.get(i)), str)]
    if len(words) < len(names) or words == [f"LABEL_{i}" for i in range(len(words))]:
        return None
    return words


def preprocess_of(settings: Mapping[str, Any]) -> dict[str, Any]:
    """What a ``preprocessor_config.json`` says of pixels."""
    found: dict[str, Any] = {}
    if settings.get("do_normalize", True) and isinstance(settings.get("image_mean"), list):
        found = {"mean": settings["image_mean"], "std": settings["image_std"]}
    elif settings.get("do_normalize") is False:
        found = {"mean": [0.0] * 3, "std": [1.0] * 3}
    if settings.get("resample") in _RESAMPLE:
        found["interpolation"] = _RESAMPLE[settings["resample"]]
    return found


def convert(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Their names to ours; queries, keys and values become one matrix."""
    parts: dict[str, Tensor] = {}
    for key, value in state.items():
        if not _UNUSED.match(key):
            name = _plain_key(key)
            for old, new in _WORDS:
                name = name.replace(old, new)
            name = re.sub(r"^layernorm\.", "norm.", name)
            parts[re.sub(r"^classifier\.", "head.", name)] = value
    ours = {}
    for key, value in parts.items():
        found = _QKV.fullmatch(key)
        if not found:
            ours[key] = value
        elif found[2] == "query":
            words = [f"{found[1]}.attention.attention.{word}.{found[3]}" for word in ("query", "key", "value")]
            missing = [word for word in words if word not in parts]
            if missing:
                raise UserError(f"the checkpoint is not whole: it has {key} but not {missing[0]}.")
            ours[f"{found[1]}.attn.qkv.{found[3]}"] = torch.cat([parts[word] for word in words])
    return ours


def holds(model: Any) -> bool:
    """Whether transformers has models like this."""
    return type(model) is VisionTransformer


def revert(state: Mapping[str, Tensor], model: Any) -> dict[str, Tensor]:
    """Our names to their old ones, which every version reads.

    Raises:
        UserError: the model has something that their ViT has not.
    """
    who = "transformers' ViT"
    refuse_mechanisms(model, {"position": ("learned",), "qk_norm": (False,), **PLAIN}, who)
    refuse_options(model, who, act=tuple(_ACTS.values()), qkv_bias=(True, False))
    theirs: dict[str, Tensor] = {}
    for key, value in state.items():
        if ".attn.qkv." in key:
            block, kind = key.split(".attn.qkv.")
            layer = f"vit.encoder.layer.{block.removeprefix('blocks.')}.attention.attention"
            for word, part in zip(("query", "key", "value"), value.chunk(3), strict=True):
                theirs[f"{layer}.{word}.{kind}"] = part.contiguous()
            continue
        name = re.sub(r"^head\.", "classifier.", re.sub(r"^norm\.", "layernorm.", key))
        for old, new in _WORDS:
            name = name.replace(new, old)
        theirs[name if name.startswith("classifier.") else f"vit.{name}"] = value
    return theirs


def config_of(model: Any) -> dict[str, Any]:
    """Their ``config.json``."""
    args, block = {**model_defaults(model.config["name"]), **model.config["args"]}, model.blocks[0]
    labels = model.config.get("labels") or [f"LABEL_{i}" for i in range(model.head.out_features)]
    act = {"gelu_tanh": "gelu_pytorch_tanh"}.get(args["act"], args["act"])
    return {
        "architectures": ["ViTForImageClassification"],
        "model_type": "vit",
        "hidden_size": model.norm.weight.shape[0],
        "num_hidden_layers": len(model.blocks),
        "num_attention_heads": block.attn.num_heads,
        "intermediate_size": block.mlp.fc1.out_features,
        "hidden_act": act,
        "layer_norm_eps": model.norm.eps,
        "image_size": plain(model.img_size),
        "patch_size": plain(model.patch_embed.patch_size),
        "num_channels": model.patch_embed.proj.in_channels,
        "qkv_bias": args["qkv_bias"],
        "hidden_dropout_prob": 0.0,
        "attention_probs_dropout_prob": 0.0,
        "id2label": {str(i): label for i, label in enumerate(labels)},
        "label2id": {label: i for i, label in enumerate(labels)},
    }


def write(model: Any, folder: Path) -> None:
    """``config.json`` and ``preprocessor_config.json``, which their ``from_pretrained`` reads."""
    seen = model.config["preprocess"]
    numbers = {word: number for number, word in _RESAMPLE.items()}
    processor = {
        "image_processor_type": "ViTImageProcessor",
        "do_resize": True,
        "size": {"height": seen["size"][0], "width": seen["size"][1]},
        "resample": numbers.get(seen.get("interpolation"), 2),
        "do_rescale": True,
        "rescale_factor": 1 / 255,
        "do_normalize": True,
        "image_mean": seen["mean"],
        "image_std": seen["std"],
    }
    for name, content in (("config.json", config_of(model)), ("preprocessor_config.json", processor)):
        atomic_write_text(folder / name, json.dumps(content, indent=2, ensure_ascii=False) + "\n")


def peer(model: Any) -> Any:
    """Their own model of these sizes, with fresh weights; it returns logits alone."""
    from transformers import ViTConfig, ViTForImageClassification

    config = {key: value for key, value in config_of(model).items() if key not in ("architectures", "model_type")}
    config["id2label"] = {int(key): value for key, value in config["id2label"].items()}
    return ViTForImageClassification(ViTConfig(**config))


def fill_peer(peer: Any, state: Mapping[str, Tensor]) -> None:
    """Load a state strictly under whichever names this version of theirs has in memory."""
    own = peer.state_dict()
    renamed = {}
    for key, value in state.items():
        name = f"vit.{_plain_key(key)}" if key.startswith("vit.") else key
        if name not in own:
            for new, old in _NEWER:
                name = name.replace(old, new)
        if name in own or not _UNUSED.match(key):
            renamed[name] = value
    peer.load_state_dict(renamed, strict=True)


def stage(name: str) -> str | None:
    """Their name for a module of ours."""
    if name.startswith("blocks."):
        return f"vit.layers.{name[7:]}"
    return {"patch_embed": "vit.embeddings.patch_embeddings", "norm": "vit.layernorm", "head": "classifier"}.get(name)
