"""DETR of its authors (https://github.com/facebookresearch/detr, Apache-2.0); it and Conditional DETR of transformers.

Names are those of ``detr_names``. The authors' class head has a row for every category id of COCO up to 90, used or
not, and one for no object; the category ids are kept as they are, and unused ones are called ``N/A``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Set
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vision_attn.atomic import atomic_write_text
from vision_attn.checkpoints import detr_names
from vision_attn.checkpoints.hints import IMAGENET, Found, Hints, Shapes, count, heads, in_zoo, ratio
from vision_attn.checkpoints.layouts import PLAIN, refuse_mechanisms
from vision_attn.checkpoints.transformers_vit import labels_of
from vision_attn.errors import UserError
from vision_attn.layers.resnet import ResNet
from vision_attn.models import list_models, model_defaults
from vision_attn.models.backbones import RESNETS
from vision_attn.models.detr import DETR

COCO = (
    "N/A person bicycle car motorcycle airplane bus train truck boat traffic_light fire_hydrant N/A stop_sign "
    "parking_meter bench bird cat dog horse sheep cow elephant bear zebra giraffe N/A backpack umbrella N/A N/A "
    "handbag tie suitcase frisbee skis snowboard sports_ball kite baseball_bat baseball_glove skateboard surfboard "
    "tennis_racket bottle N/A wine_glass cup fork knife spoon bowl banana apple sandwich orange broccoli carrot "
    "hot_dog pizza donut cake chair couch potted_plant bed N/A dining_table N/A N/A toilet N/A tv laptop mouse remote "
    "keyboard cell_phone microwave oven toaster sink refrigerator N/A book clock vase scissors teddy_bear hair_drier "
    "toothbrush"
)
"""Names of COCO's category ids 0 … 90, in order; a space in a name is an underscore here."""

_SIZE = [800, 1333]  # pixels that images were resized to: the shorter side to 800, the longer to 1333 at most


class Original:
    """The layout of the original repository; see ``layouts`` for what it says."""

    TITLE = "DETR of its authors"
    PEER = ""
    convert = staticmethod(detr_names.from_original)

    def recognises(self, keys: Set[str], shapes: Shapes) -> bool:
        """Whether it is one of theirs."""
        return {"query_embed.weight", "input_proj.weight", "transformer.decoder.norm.weight"} <= keys

    def infer(self, shapes: Shapes, hints: Hints) -> Found:
        """The model of this zoo that has these tensors.

        Raises:
            UserError: heads that do not divide the width, or a backbone that is no ResNet.
        """
        found = Found("", {}, preprocess={**IMAGENET, "size": _SIZE})
        ours = _our_shapes(self.convert, shapes)
        args = _sizes(ours, hints, found, no_object=True)
        if any(key.startswith("encoder_norm.") for key in ours):
            args["pre_norm"] = True
        # dilated filters have the same shapes
        if "dc5" in f"{hints.name} {hints.path.name}".lower():
            args["backbone_options"]["dilation"] = True
        names = [name.replace("_", " ") for name in COCO.split()]
        found.labels = names if args["num_classes"] == len(names) else None
        return _finished(found, args)

    def holds(self, model: Any) -> bool:
        """Whether the repository has models like this."""
        return _is_original(model)

    def revert(self, state: Mapping[str, Tensor], model: Any) -> dict[str, Tensor]:
        """Our names to theirs.

        Raises:
            UserError: the model has something that theirs has not.
        """
        _refuse(model, "the original DETR")
        return detr_names.to_original(state)


class Transformers:
    """The layout of transformers' ``DetrForObjectDetection`` or ``ConditionalDetrForObjectDetection``.

    Args:
        conditional: which of the two.
    """

    PEER = "transformers"
    convert = staticmethod(detr_names.from_transformers)

    def __init__(self, conditional: bool) -> None:
        self.conditional = conditional
        self.TITLE = f"{'Conditional ' if conditional else ''}DETR of transformers"

    def recognises(self, keys: Set[str], shapes: Shapes) -> bool:
        """Whether it is one of theirs, in old names or new ones."""
        needed = {
            f"model.{name}.weight" for name in ("query_position_embeddings", "decoder.layernorm", "input_projection")
        }
        if not needed <= keys or "bbox_predictor.layers.0.weight" not in keys:
            return False
        return self.conditional == any("ca_qcontent_proj" in detr_names.older(keys)(key) for key in keys)

    def infer(self, shapes: Shapes, hints: Hints) -> Found:
        """The model of this zoo that has these tensors.

        Raises:
            UserError: heads that do not divide the width, a backbone that is no ResNet, or an option ours has not.
        """
        ours = _our_shapes(self.convert, shapes)
        width = ours["queries.position"][1]
        told = hints.config if hints.config.get("d_model") == width else {}
        if told.get("position_embedding_type", "sine") != "sine":
            raise UserError(f"{hints.path}: its positions are learned ones of 50 × 50 tokens, which ours has not.")
        found = Found("", {}, preprocess=_preprocess(hints.preprocessor))
        args = _sizes(ours, hints, found, no_object=not self.conditional, told=told)
        if self.conditional:
            args |= {"queries": "point", "conditional": True}
        for theirs, mine in (("activation_function", "act"), ("dropout", "dropout")):
            if theirs in told:
                args[mine] = told[theirs]
        backbone = told.get("backbone_config") or {}
        stride = backbone.get("output_stride") if isinstance(backbone, dict) else None
        if told.get("dilation") or stride == 16 or "dc5" in f"{hints.name} {hints.path}".lower():
            args["backbone_options"]["dilation"] = True
        found.labels = labels_of(told)
        return _finished(found, args)

    def holds(self, model: Any) -> bool:
        """Whether transformers has models like this. Conditional ones are only read."""
        return not self.conditional and _is_original(model)

    def revert(self, state: Mapping[str, Tensor], model: Any) -> dict[str, Tensor]:
        """Our names to their old ones, which every version reads.

        Raises:
            UserError: the model has something that theirs has not.
        """
        _refuse(model, "transformers' DETR")
        return detr_names.to_transformers(state)

    def peer(self, model: Any) -> Any:
        """Theirs, of the same sizes."""
        from transformers import DetrConfig, DetrForObjectDetection

        return DetrForObjectDetection(DetrConfig(**_config(model)))

    def write(self, model: Any, folder: Path) -> None:
        """Its sizes, and how images are prepared."""
        config = {"model_type": "detr", "architectures": ["DetrForObjectDetection"], **_config(model)}
        atomic_write_text(folder / "config.json", json.dumps(config, indent=2, ensure_ascii=False) + "\n")
        preprocess = model.config["preprocess"]
        short, long = sorted(preprocess["size"])
        processor = {
            "image_processor_type": "DetrImageProcessor",
            "format": "coco_detection",
            "image_mean": list(preprocess["mean"]),
            "image_std": list(preprocess["std"]),
            "size": {"shortest_edge": short, "longest_edge": long},
        }
        atomic_write_text(folder / "preprocessor_config.json", json.dumps(processor, indent=2) + "\n")


LAYOUTS = (Original(), Transformers(conditional=False), Transformers(conditional=True))


def _our_shapes(convert: Any, shapes: Shapes) -> dict[str, tuple[int, ...]]:
    """Our names and shapes, by way of tensors that take no memory."""
    empty = {key: torch.empty(shape, device="meta") for key, shape in shapes.items()}
    return {key: tuple(value.shape) for key, value in convert(empty).items()}


def _sizes(
    ours: Shapes, hints: Hints, found: Found, *, no_object: bool, told: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """What the tensors say, under our names, and what ``config.json`` adds."""
    told = told or {}
    num_queries, width = ours["queries.position"]
    known = told.get("encoder_attention_heads") or _named_heads(hints)
    if not known and not hints.num_heads and width % 8 == 0:
        known = 8
        if width != 256:
            found.notes.append(f"8 heads, as every DETR published has, for width {width}")
    args: dict[str, Any] = {
        "num_classes": ours["class_embed.weight"][0] - no_object,
        "in_chans": ours["backbone.conv1.weight"][1] if "backbone.conv1.weight" in ours else 3,
        "embed_dim": width,
        "num_heads": heads(width, hints, found, known=known),
        "enc_layers": count(ours, "encoder."),
        "dec_layers": count(ours, "decoder.layers."),
        "mlp_ratio": ratio(ours["encoder.0.mlp.fc1.weight"][0], width),
        "num_queries": num_queries,
        "queries": "learned",
        "conditional": False,
        "classification": "softmax" if no_object else "sigmoid",
    }
    other = told.get("decoder_attention_heads", args["num_heads"])
    if other != args["num_heads"]:
        args["dec_heads"] = other
    hidden = ours["decoder.layers.0.mlp.fc1.weight"][0]
    if hidden != ours["encoder.0.mlp.fc1.weight"][0]:
        args["dec_mlp_ratio"] = ratio(hidden, width)
    args["backbone"], args["backbone_options"] = _backbone(ours, hints)
    return args


def _named_heads(hints: Hints) -> int | None:
    return model_defaults(str(hints.name))["num_heads"] if hints.name in list_models("*detr*") else None


def _backbone(ours: Shapes, hints: Hints) -> tuple[str, dict[str, Any]]:
    """The ResNet that has these tensors, and in what it differs from the one of that name."""
    if "backbone.conv1.weight" not in ours or "backbone.layer1.0.conv1.weight" not in ours:
        raise UserError(f"{hints.path}: its backbone is no ResNet; only those are read.")
    bottleneck = "backbone.layer1.0.conv3.weight" in ours
    last = "conv3" if bottleneck else "conv2"
    stages = range(1, max(int(key.split(".")[1][5:]) for key in ours if key.startswith("backbone.layer")) + 1)
    size: dict[str, Any] = {
        "depths": [count(ours, f"backbone.layer{i}.") for i in stages],
        "widths": [ours[f"backbone.layer{i}.0.{last}.weight"][0] for i in stages],
        "bottleneck": bottleneck,
        "stem_width": ours["backbone.conv1.weight"][0],
    }
    usual = {"bottleneck": True, "stem_width": 64}
    for name, known in RESNETS.items():
        full = {key: list(value) if isinstance(value, tuple) else value for key, value in {**usual, **known}.items()}
        if full == size:
            return name, {}
    return "resnet50", {key: value for key, value in size.items() if value != usual.get(key)}


def _finished(found: Found, args: dict[str, Any]) -> Found:
    """With the name of the zoo that needs the fewest further arguments."""
    if not args["backbone_options"]:
        del args["backbone_options"]
    size = "101" if args["backbone"] == "resnet101" else "50"
    found.name, found.args = in_zoo(f"*detr_resnet{size}*", args)
    found.args["exact_padding"] = False  # convolutions read the padding, as where these weights come from
    return found


def _preprocess(settings: Mapping[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {**IMAGENET, "size": _SIZE}
    if isinstance(settings.get("image_mean"), list) and isinstance(settings.get("image_std"), list):
        found |= {"mean": settings["image_mean"], "std": settings["image_std"]}
    size = settings.get("size")
    if isinstance(size, dict) and {"shortest_edge", "longest_edge"} <= size.keys():
        found["size"] = [int(size["shortest_edge"]), int(size["longest_edge"])]
    return found


def _is_original(model: Any) -> bool:
    return (
        isinstance(model, DETR)
        and isinstance(model.backbone, ResNet)
        and model.decoder.reference == "none"
        and model.classification == "softmax"
    )


def _refuse(model: Any, who: str) -> None:
    refuse_mechanisms(model, PLAIN, who)
    for key in ("decoder_attention", "cross_attention"):
        if model.config["args"].get(key):
            raise UserError(f"{who} has no {key}={model.config['args'][key]!r}; keep the model in our own format.")


def _config(model: Any) -> dict[str, Any]:
    """transformers' ``config.json`` of a model of ours, with a backbone of timm."""
    args = {**model_defaults(model.config["name"]), **model.config["args"]}
    known = [name for name in RESNETS if args["backbone"] == name]
    options = set(args["backbone_options"] or {}) - {"dilation", "norm"}
    if not known or options or args["pre_norm"]:
        what = f"backbone_options {', '.join(sorted(options))}" if options else "pre_norm"
        raise UserError(f"transformers' DETR has no {what}; the model can only be kept in our own format.")
    labels = model.config["labels"] or [f"LABEL_{i}" for i in range(args["num_classes"])]
    width = args["embed_dim"]
    dilation = bool((args["backbone_options"] or {}).get("dilation"))
    return {
        "backbone": args["backbone"],
        "use_timm_backbone": True,
        "use_pretrained_backbone": False,
        "dilation": dilation,
        "d_model": width,
        "encoder_layers": args["enc_layers"],
        "decoder_layers": args["dec_layers"],
        "encoder_attention_heads": args["num_heads"],
        "decoder_attention_heads": args["dec_heads"] or args["num_heads"],
        "encoder_ffn_dim": int(width * args["mlp_ratio"]),
        "decoder_ffn_dim": int(width * (args["dec_mlp_ratio"] or args["mlp_ratio"])),
        "num_queries": args["num_queries"],
        "num_channels": args["in_chans"],
        "dropout": args["dropout"],
        "attention_dropout": args["dropout"],
        "activation_function": args["act"],
        "id2label": {str(i): label for i, label in enumerate(labels)},
        "label2id": {label: i for i, label in enumerate(labels)},
    }
