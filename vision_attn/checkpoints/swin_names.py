"""Swin Transformers of timm, torchvision, transformers and their authors: names to ours and back.

timm (https://github.com/huggingface/pytorch-image-models, Apache-2.0): ``patch_embed.{proj,norm}
layers.{i}.downsample.{norm,reduction} layers.{i}.blocks.{j}.{norm1,attn.{qkv,proj,relative_position_bias_table},norm2,
mlp.{fc1,fc2}} norm head.fc``, and for Swin V2 ``attn.{q_bias,v_bias,logit_scale,cpb_mlp}``. The authors'
(https://github.com/microsoft/Swin-Transformer, MIT) merge patches at the end of a stage, and call the head ``head``.

torchvision (https://github.com/pytorch/vision, BSD-3): ``features.{0 | 2i + 1 | 2i + 2}`` are patches, stages and
merging.

transformers (https://github.com/huggingface/transformers, Apache-2.0): ``swin.encoder.layers.{i}.blocks.{j}``, with
queries, keys and values apart.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

import torch
from torch import Tensor

State = Mapping[str, Tensor]

_BUFFERS = re.compile(
    r"relative_position_index|relative_coords_table|attn_mask|mask_token|\.k_bias$|num_batches_tracked"
)

_TIMM = (  # theirs, ours
    (".attn.relative_position_bias_table", ".attn.position.table"),
    (".attn.cpb_mlp.", ".attn.position.mlp."),
    (".attn.logit_scale", ".attn.score.logit_scale"),
    (".attn.q_bias", ".attn.qkv.q_bias"),
    (".attn.v_bias", ".attn.qkv.v_bias"),
    ("head.fc.", "head."),
)
_TORCHVISION = (
    (".attn.relative_position_bias_table", ".attn.position.table"),
    (".attn.cpb_mlp.", ".attn.position.mlp."),
    (".attn.logit_scale", ".attn.score.logit_scale"),
    (".mlp.0.", ".mlp.fc1."),
    (".mlp.3.", ".mlp.fc2."),
)
_TRANSFORMERS = (  # old names, as in all files
    ("embeddings.patch_embeddings.projection.", "patch_embed.proj."),
    ("embeddings.norm.", "patch_embed.norm."),
    ("embeddings.position_embeddings", "pos_embed"),
    (".layernorm_before.", ".norm1."),
    (".layernorm_after.", ".norm2."),
    (".attention.self.relative_position_bias_table", ".attn.position.table"),
    (".attention.self.continuous_position_bias_mlp.", ".attn.position.mlp."),
    (".attention.self.logit_scale", ".attn.score.logit_scale"),
    (".attention.output.dense.", ".attn.proj."),
    (".attention.self.", ".attn."),
    (".intermediate.dense.", ".mlp.fc1."),
    (".output.dense.", ".mlp.fc2."),
    ("layernorm.", "norm."),
    ("classifier.", "head."),
)
_NEWER = (  # old, new (since version 5, in memory)
    (".attention.self.query.", ".attention.q_proj."),
    (".attention.self.key.", ".attention.k_proj."),
    (".attention.self.value.", ".attention.v_proj."),
    (".attention.output.dense.", ".attention.o_proj."),
    (".attention.self.relative_position_bias_table", ".attention.relative_position_bias.relative_position_bias_table"),
    (".intermediate.dense.", ".mlp.fc1."),
    (".output.dense.", ".mlp.fc2."),
)
_APART = re.compile(r"\.(query|key|value)\.(weight|bias)$")


def _renamed(key: str, words: tuple[tuple[str, str], ...], back: bool = False) -> str:
    """A name in other words: those with a dot in front stand inside of a name, the others begin it."""
    for pair in words:
        old, new = pair[::-1] if back else pair
        if key.startswith(old) and not old.startswith("."):
            return new + key[len(old) :]
        if old.startswith(".") and old in key:
            return key.replace(old, new)
    return key


def from_timm(state: State) -> dict[str, Tensor]:
    """Tensors of timm, or of the authors, under our names."""
    late = merges_at_the_end(state)
    found = {}
    for key, value in state.items():
        if _BUFFERS.search(key):
            continue
        if late:
            key = re.sub(r"^layers\.(\d+)\.downsample", lambda m: f"layers.{int(m[1]) + 1}.downsample", key)
        found[_renamed(key, _TIMM)] = value.flatten() if key.endswith("logit_scale") else value
    return found


def to_timm(state: State) -> dict[str, Tensor]:
    """Our tensors under timm's names."""
    return {
        _renamed(key, _TIMM, back=True): value.view(-1, 1, 1) if key.endswith("logit_scale") else value
        for key, value in state.items()
    }


def merges_at_the_end(state: State) -> bool:
    """Whether the patches are merged by the stage before, as in the authors' files."""
    return "layers.0.downsample.reduction.weight" in state


def from_torchvision(state: State) -> dict[str, Tensor]:
    """Tensors of torchvision under our names."""
    found = {}
    for key, value in state.items():
        if _BUFFERS.search(key):
            continue
        if key.startswith("features.0."):
            key = key.replace("features.0.0.", "patch_embed.proj.").replace("features.0.2.", "patch_embed.norm.")
        elif match := re.match(r"features\.(\d+)\.", key):
            number, rest = int(match[1]), key[match.end() :]
            key = f"layers.{number // 2}.blocks.{rest}" if number % 2 else f"layers.{number // 2}.downsample.{rest}"
        key = _renamed(key, _TORCHVISION)
        found[key] = value.flatten() if key.endswith("logit_scale") else value
    return _biases_apart(found)


def to_torchvision(state: State) -> dict[str, Tensor]:
    """Our tensors under torchvision's names; its buffers, which say nothing, are left out."""
    found = {}
    for key, value in _biases_together(state).items():
        if match := re.match(r"layers\.(\d+)\.(blocks|downsample)\.", key):
            number = 2 * int(match[1]) + (match[2] == "blocks")
            key = f"features.{number}.{key[match.end() :]}"
        key = key.replace("patch_embed.proj.", "features.0.0.").replace("patch_embed.norm.", "features.0.2.")
        key = _renamed(key, _TORCHVISION, back=True)
        found[key] = value.view(-1, 1, 1) if key.endswith("logit_scale") else value
    return found


def _biases_apart(state: State) -> dict[str, Tensor]:
    """Where scores are cosines, the bias of queries and of values; that of keys is not used there."""
    found = dict(state)
    for key, value in state.items():
        attn = key.removesuffix("qkv.bias")
        if attn != key and f"{attn}score.logit_scale" in state:
            del found[key]
            found[f"{attn}qkv.q_bias"], _, found[f"{attn}qkv.v_bias"] = value.chunk(3)
    return found


def _biases_together(state: State) -> dict[str, Tensor]:
    """The inverse: zeros for the keys."""
    found = {key: value for key, value in state.items() if not key.endswith((".q_bias", ".v_bias"))}
    for key, value in state.items():
        if key.endswith(".q_bias"):
            layer = key.removesuffix("q_bias")
            found[f"{layer}bias"] = torch.cat([value, torch.zeros_like(value), state[f"{layer}v_bias"]])
    return found


def from_transformers(state: State) -> dict[str, Tensor]:
    """Tensors of transformers, by its new names or its old ones, under ours."""
    found: dict[str, Tensor] = {}
    for key, value in state.items():
        if _BUFFERS.search(key):
            continue
        key = _renamed(re.sub(r"^swin(v2)?\.", "", key), _NEWER, back=True)
        key = re.sub(r"^(encoder\.)?layers\.", "layers.", key)
        if ".downsample." in key:  # theirs merge at the end of a stage
            key = re.sub(r"^layers\.(\d+)", lambda m: f"layers.{int(m[1]) + 1}", key)
        key = _renamed(key, _TRANSFORMERS)
        found[key] = value.flatten() if key.endswith("logit_scale") else value
    return _fused(found)


def newer(key: str) -> str:
    """A name of transformers' files as it has it in memory since version 5."""
    return _renamed(key, _NEWER)


def _fused(state: State) -> dict[str, Tensor]:
    """``query key value`` as one ``qkv``."""
    found = {key: value for key, value in state.items() if not _APART.search(key)}
    for key in state:
        match = _APART.search(key)
        if match is None or match[1] != "query":
            continue
        start, part = key[: match.start()], match[2]
        parts = [state.get(f"{start}.{name}.{part}") for name in ("query", "key", "value")]
        if part == "bias" and parts[1] is None:
            found[f"{start}.qkv.q_bias"], found[f"{start}.qkv.v_bias"] = parts[0], parts[2]  # type: ignore[assignment]
        else:
            found[f"{start}.qkv.{part}"] = torch.cat(parts)  # type: ignore[arg-type]
    return found


def to_transformers(state: State, *, version: int = 1) -> dict[str, Tensor]:
    """Our tensors under the names that transformers writes to files, those of its classifier."""
    found: dict[str, Tensor] = {}
    for key, value in state.items():
        name = key
        if ".downsample." in key:
            name = re.sub(r"^layers\.(\d+)", lambda m: f"layers.{int(m[1]) - 1}", key)
        name = _renamed(name, _TRANSFORMERS, back=True)
        if name.startswith("layers."):
            name = f"encoder.{name}"
        if not name.startswith("classifier."):
            name = f"{'swinv2' if version == 2 else 'swin'}.{name}"
        value = value.view(-1, 1, 1) if key.endswith("logit_scale") else value
        if ".attention.self.qkv." in name:
            start, part = name.split(".qkv.")
            if part in ("q_bias", "v_bias"):
                found[f"{start}.{'query' if part[0] == 'q' else 'value'}.bias"] = value
            else:
                names = zip(("query", "key", "value"), value.chunk(3), strict=True)
                found.update({f"{start}.{which}.{part}": piece.clone() for which, piece in names})
        else:
            found[name] = value
    return found
