"""Names of the tensors of a DETR: ours, transformers' old and new ones, and the original repository's."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping

import torch
from torch import Tensor

from vision_attn.errors import UserError

Rules = Iterable[tuple[str, str]]

NEWER = (  # transformers' names since version 5 → those before, which are also those of its files
    (r"^model\.backbone\.model\.", "model.backbone.conv_encoder.model."),
    (r"\.o_proj\.", ".out_proj."),
    (r"\.mlp\.(fc[12])\.", r".\1."),
    (r"(decoder\.layers\.\d+)\.self_attn\.(q|k)_content_proj\.", r"\1.sa_\2content_proj."),
    (r"(decoder\.layers\.\d+)\.self_attn\.(q|k)_pos_proj\.", r"\1.sa_\2pos_proj."),
    (r"(decoder\.layers\.\d+)\.encoder_attn\.(q|k)_content_proj\.", r"\1.ca_\2content_proj."),
    (r"(decoder\.layers\.\d+)\.encoder_attn\.(q|k)_pos_proj\.", r"\1.ca_\2pos_proj."),
    (r"(decoder\.layers\.\d+)\.encoder_attn\.q_pos_sine_proj\.", r"\1.ca_qpos_sine_proj."),
)
CONDITIONAL = (  # only where there are such projections: v_proj is a name of the others, too
    (r"(decoder\.layers\.\d+)\.self_attn\.v_proj\.", r"\1.sa_v_proj."),
    (r"(decoder\.layers\.\d+)\.encoder_attn\.v_proj\.", r"\1.ca_v_proj."),
)
TRANSFORMERS = (  # transformers' old names → ours
    (r"^model\.backbone\.conv_encoder\.model\.", "backbone."),
    (r"^backbone\.embedder\.embedder\.convolution\.", "backbone.conv1."),
    (r"^backbone\.embedder\.embedder\.normalization\.", "backbone.bn1."),
    (r"^model\.input_projection\.", "input_proj."),
    (r"^model\.query_position_embeddings\.weight$", "queries.position"),
    (r"^class_labels_classifier\.", "class_embed."),
    (r"^bbox_predictor\.", "bbox_embed."),
    (r"^model\.decoder\.layernorm\.", "decoder.norm."),
    (r"^model\.decoder\.ref_point_head\.", "decoder.point_head."),
    (r"^model\.decoder\.query_scale\.", "decoder.query_scale."),
    (r"^model\.encoder\.layers\.(\d+)\.", r"encoder.\1."),
    (r"^model\.decoder\.layers\.(\d+)\.", r"decoder.layers.\1."),
    (r"^(encoder\.\d+)\.self_attn\.", r"\1.attn."),
    (r"^(encoder\.\d+)\.self_attn_layer_norm\.", r"\1.norm1."),
    (r"^(encoder\.\d+)\.final_layer_norm\.", r"\1.norm2."),
    (r"^(decoder\.layers\.\d+)\.self_attn_layer_norm\.", r"\1.norm1."),
    (r"^(decoder\.layers\.\d+)\.encoder_attn_layer_norm\.", r"\1.norm2."),
    (r"^(decoder\.layers\.\d+)\.final_layer_norm\.", r"\1.norm3."),
    (r"^(decoder\.layers\.\d+)\.encoder_attn\.", r"\1.cross_attn."),
    (r"^(decoder\.layers\.\d+)\.sa_([qk])content_proj\.", r"\1.self_attn.\2."),
    (r"^(decoder\.layers\.\d+)\.sa_([qk])pos_proj\.", r"\1.self_attn.\2_pos."),
    (r"^(decoder\.layers\.\d+)\.ca_([qk])content_proj\.", r"\1.cross_attn.\2."),
    (r"^(decoder\.layers\.\d+)\.ca_kpos_proj\.", r"\1.cross_attn.k_pos."),
    (r"^(decoder\.layers\.\d+)\.ca_qpos_sine_proj\.", r"\1.cross_attn.q_pos."),
    (r"^(decoder\.layers\.\d+)\.ca_qpos_proj\.", r"\1.cross_attn.q_content_pos."),
    (r"^(decoder\.layers\.\d+)\.sa_v_proj\.", r"\1.self_attn.v."),
    (r"^(decoder\.layers\.\d+)\.ca_v_proj\.", r"\1.cross_attn.v."),
    (r"\.out_proj\.", ".proj."),
    (r"\.(fc[12])\.", r".mlp.\1."),
)
ORIGINAL = (  # the original repository's names → ours
    (r"^backbone\.0\.body\.", "backbone."),
    (r"^query_embed\.weight$", "queries.position"),
    (r"^transformer\.encoder\.norm\.", "encoder_norm."),
    (r"^transformer\.encoder\.layers\.(\d+)\.self_attn\.", r"encoder.\1.attn."),
    (r"^transformer\.encoder\.layers\.(\d+)\.", r"encoder.\1."),
    (r"^transformer\.decoder\.norm\.", "decoder.norm."),
    (r"^transformer\.decoder\.layers\.(\d+)\.multihead_attn\.", r"decoder.layers.\1.cross_attn."),
    (r"^transformer\.decoder\.layers\.(\d+)\.", r"decoder.layers.\1."),
    (r"\.in_proj_(weight|bias)$", r".qkv.\1"),
    (r"\.out_proj\.", ".proj."),
    (r"\.linear([12])\.", r".mlp.fc\1."),
)
BACK = (  # ours → the original repository's; queries, keys and values lie in one matrix in both
    (r"^backbone\.", "backbone.0.body."),
    (r"^queries\.position$", "query_embed.weight"),
    (r"^encoder_norm\.", "transformer.encoder.norm."),
    (r"^encoder\.(\d+)\.attn\.", r"transformer.encoder.layers.\1.self_attn."),
    (r"^encoder\.(\d+)\.", r"transformer.encoder.layers.\1."),
    (r"^decoder\.norm\.", "transformer.decoder.norm."),
    (r"^decoder\.layers\.(\d+)\.cross_attn\.", r"transformer.decoder.layers.\1.multihead_attn."),
    (r"^decoder\.layers\.(\d+)\.", r"transformer.decoder.layers.\1."),
    (r"\.qkv\.(weight|bias)$", r".in_proj_\1"),
    (r"_(attn)\.proj\.", r"_\1.out_proj."),
    (r"\.mlp\.fc([12])\.", r".linear\1."),
)
BACK_TO_TRANSFORMERS = (  # ours → transformers' old names, with a backbone of timm
    (r"^backbone\.", "model.backbone.conv_encoder.model."),
    (r"^input_proj\.", "model.input_projection."),
    (r"^queries\.position$", "model.query_position_embeddings.weight"),
    (r"^class_embed\.", "class_labels_classifier."),
    (r"^bbox_embed\.", "bbox_predictor."),
    (r"^encoder\.(\d+)\.attn\.", r"model.encoder.layers.\1.self_attn."),
    (r"^encoder\.(\d+)\.norm1\.", r"model.encoder.layers.\1.self_attn_layer_norm."),
    (r"^encoder\.(\d+)\.norm2\.", r"model.encoder.layers.\1.final_layer_norm."),
    (r"^encoder\.(\d+)\.", r"model.encoder.layers.\1."),
    (r"^decoder\.norm\.", "model.decoder.layernorm."),
    (r"^decoder\.layers\.(\d+)\.cross_attn\.", r"model.decoder.layers.\1.encoder_attn."),
    (r"^decoder\.layers\.(\d+)\.norm1\.", r"model.decoder.layers.\1.self_attn_layer_norm."),
    (r"^decoder\.layers\.(\d+)\.norm2\.", r"model.decoder.layers.\1.encoder_attn_layer_norm."),
    (r"^decoder\.layers\.(\d+)\.norm3\.", r"model.decoder.layers.\1.final_layer_norm."),
    (r"^decoder\.layers\.(\d+)\.", r"model.decoder.layers.\1."),
    (r"_attn\.proj\.", "_attn.out_proj."),
    (r"\.mlp\.(fc[12])\.", r".\1."),
)
_SHORTCUT = re.compile(r"backbone\.encoder\.stages\.(\d+)\.layers\.(\d+)\.shortcut\.(convolution|normalization)\.")
_LAYER = re.compile(r"backbone\.encoder\.stages\.(\d+)\.layers\.(\d+)\.layer\.(\d+)\.(convolution|normalization)\.")
_SPLIT = re.compile(r"(.*_attn|.*\.attn)\.([qkv])_proj\.(weight|bias)")


def rename(key: str, rules: Rules) -> str:
    """A name after all rules, in order."""
    for pattern, replacement in rules:
        key = re.sub(pattern, replacement, key)
    return key


def older(keys: Iterable[str]) -> Callable[[str], str]:
    """What turns transformers' new names, of which these are all, into its old ones."""
    conditional = any("sa_qcontent_proj" in key or "q_content_proj" in key for key in keys)
    rules = (*NEWER, *CONDITIONAL) if conditional else NEWER
    return lambda key: rename(key, rules)


def _own_resnet(key: str) -> str:
    """transformers' own ResNet in torchvision's names, after ``TRANSFORMERS``."""
    part = {"convolution": "conv", "normalization": "bn"}
    key = _LAYER.sub(lambda m: f"backbone.layer{int(m[1]) + 1}.{m[2]}.{part[m[4]]}{int(m[3]) + 1}.", key)
    return _SHORTCUT.sub(
        lambda m: f"backbone.layer{int(m[1]) + 1}.{m[2]}.downsample.{int(m[3] == 'normalization')}.", key
    )


def from_transformers(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Their tensors under our names; queries, keys and values become one matrix.

    Raises:
        UserError: one of the three is missing.
    """
    to_old = older(state)
    parts = {_own_resnet(rename(to_old(key), TRANSFORMERS)): value for key, value in state.items()}
    ours: dict[str, Tensor] = {}
    for key, value in parts.items():
        found = _SPLIT.fullmatch(key)
        if key.endswith("num_batches_tracked"):
            continue  # a frozen norm counts nothing
        if not found:
            ours[key] = value
        elif found[2] == "q":
            names = [f"{found[1]}.{word}_proj.{found[3]}" for word in "qkv"]
            missing = [name for name in names if name not in parts]
            if missing:
                raise UserError(f"the checkpoint is not whole: it has {key} but not {missing[0]}.")
            ours[f"{found[1]}.qkv.{found[3]}"] = torch.cat([parts[name] for name in names])
    return ours


def to_transformers(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Our tensors of an original DETR under their old names, which every version reads."""
    theirs: dict[str, Tensor] = {}
    for key, value in state.items():
        name = rename(key, BACK_TO_TRANSFORMERS)
        if ".qkv." in name:
            start, kind = name.split(".qkv.")
            for word, part in zip("qkv", value.chunk(3), strict=True):
                theirs[f"{start}.{word}_proj.{kind}"] = part.contiguous()
        else:
            theirs[name] = value
    return theirs


def from_original(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The original repository's tensors under our names."""
    return {rename(key, ORIGINAL): value for key, value in state.items() if not key.endswith("num_batches_tracked")}


def to_original(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Our tensors of an original DETR under the original repository's names."""
    return {rename(key.replace(".attn.proj.", ".attn.out_proj."), BACK): value for key, value in state.items()}
