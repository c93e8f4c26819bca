"""Swin Transformers of timm, their authors, torchvision and transformers; see ``swin_names`` for their names."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping, Set
from pathlib import Path
from typing import Any

from torch import Tensor

from vision_attn.atomic import atomic_write_text
from vision_attn.checkpoints import swin_names, timm_names
from vision_attn.checkpoints.hints import Found, Hints, Shapes, count, in_zoo, plain, ratio
from vision_attn.checkpoints.layouts import imagenet, refuse_mechanisms
from vision_attn.checkpoints.transformers_vit import labels_of, preprocess_of
from vision_attn.errors import UserError
from vision_attn.models import list_models, model_defaults
from vision_attn.models.swin import SwinTransformer

_NAMED = re.compile(r"window(?:(\d+)to)?(\d+)_(?:(\d+)to)?(\d+)")
"""``window12to16_192to256``: windows and image sizes of training and now."""

_RESIZED: dict[tuple[int, int, tuple[int, ...]], int] = {
    (1, 96, (2, 2, 6, 2)): 232,
    (1, 96, (2, 2, 18, 2)): 246,
    (1, 128, (2, 2, 18, 2)): 238,
    (2, 96, (2, 2, 6, 2)): 260,
    (2, 96, (2, 2, 18, 2)): 260,
    (2, 128, (2, 2, 18, 2)): 272,
}
"""Version, width and depths of torchvision's Swins → the shorter side that its published weights resize images to."""

ALLOWED: dict[int, dict[str, tuple[Any, ...]]] = {
    1: {"score": ("scaled_dot",), "position": ("relative_bias",)},
    2: {"score": ("cosine",), "temperature": ("learned",), "position": ("cpb",)},
}


class Layout:
    """One library's layout of one version; see ``layouts`` for what it says.

    Args:
        peer_name: ``timm``, ``torchvision`` or ``transformers``.
        version: 1 or 2.
        marks: names, of which all are there and only there.
        convert: their tensors → ours.
        revert: the inverse.
        peer: a model of ours → theirs, fresh.
    """

    def __init__(
        self,
        peer_name: str,
        version: int,
        marks: Set[str],
        convert: Callable[[Mapping[str, Tensor]], dict[str, Tensor]],
        revert: Callable[[Mapping[str, Tensor]], dict[str, Tensor]],
        peer: Callable[[Any], Any],
    ) -> None:
        self.PEER, self.version, self.marks = peer_name, version, marks
        self.TITLE = f"Swin{' V2' if version == 2 else ''} of {peer_name}"
        self.convert, self._revert, self.peer = convert, revert, peer

    def recognises(self, keys: Set[str], shapes: Shapes) -> bool:
        """Whether it is one of theirs."""
        two = any(key.endswith("logit_scale") for key in keys)
        bare = {re.sub(r"^swin(v2)?\.", "", key) for key in keys}
        return two == (self.version == 2) and self.marks <= bare

    def infer(self, shapes: Shapes, hints: Hints) -> Found:
        """The model of this zoo that has these tensors.

        Raises:
            UserError: tensors that our Swin has no place for, or windows that nothing tells.
        """
        ours = _our_shapes(self.convert, shapes)
        if "pos_embed" in ours:
            raise UserError(f"{hints.path} is a {self.TITLE} with positions added to its patches: not supported.")
        known = _known(hints)
        width, chans, *patch = ours["patch_embed.proj.weight"]
        stages = count(ours, "layers.")
        depths = [count(ours, f"layers.{i}.blocks.") for i in range(stages)]
        args: dict[str, Any] = {
            "version": self.version,
            "embed_dim": width,
            "depths": depths,
            "num_heads": [_heads(ours, i) for i in range(stages)],
            "patch_size": plain(patch),
            "in_chans": chans,
            "mlp_ratio": ratio(ours["layers.0.blocks.0.mlp.fc1.weight"][0], width),
            "qkv_bias": any(key.endswith(("qkv.bias", "qkv.q_bias")) for key in ours),
            "borders": "original" if self.PEER == "transformers" else self.PEER,
        }
        args |= _windows(ours, patch, stages, known, hints)
        found = Found("", {})
        found.headless = "head.weight" not in ours
        if not found.headless:
            args["num_classes"] = ours["head.weight"][0]
        found.name, found.args = in_zoo("swin*", args)
        size = args["img_size"]
        if self.PEER == "torchvision":
            side = int(size if isinstance(size, int) else min(size))
            resized = _RESIZED.get((self.version, width, tuple(depths)), side)
            found.preprocess = imagenet(size, min(side / resized, 1.0), "bicubic")
        elif self.PEER == "transformers":
            found.preprocess = imagenet(size, 1.0, "bicubic") | preprocess_of(hints.preprocessor)
        else:
            found.preprocess = known.get("preprocess") or imagenet(size, 0.9, "bicubic")
        found.labels = labels_of(hints.config) if self.PEER == "transformers" else hints.config.get("label_names")
        return found

    def holds(self, model: Any) -> bool:
        """Whether the library has models like this."""
        return isinstance(model, SwinTransformer) and _args(model)["version"] == self.version

    def revert(self, state: Mapping[str, Tensor], model: Any) -> dict[str, Tensor]:
        """Our names to theirs.

        Raises:
            UserError: the model has something that theirs has not.
        """
        who = f"{self.PEER}'s Swin"
        refuse_mechanisms(model, {"normalizer": ("softmax",), **ALLOWED[self.version]}, who)
        if model.features_only:
            raise UserError(f"{who} has a head, and this model gives features only; keep it in our own format.")
        found = self._revert(state)
        if self.PEER == "torchvision":  # its files hold the tables of its windows, too
            found.update(self.peer(model).named_buffers())
        return found

    def fill_peer(self, peer: Any, state: Mapping[str, Tensor]) -> None:
        """Load a state strictly under whichever names this version of theirs has in memory."""
        own = peer.state_dict()
        if self.PEER == "transformers":
            state = {key if key in own else swin_names.newer(key): value for key, value in state.items()}
        peer.load_state_dict(dict(state), strict=True)

    def write(self, model: Any, folder: Path) -> None:
        """transformers wants to be told the sizes, in ``config.json``."""
        if self.PEER == "transformers":
            sizes = {
                **_sizes_for_transformers(model),
                "architectures": [f"Swin{'v2' if self.version == 2 else ''}ForImageClassification"],
            }
            text = json.dumps({"model_type": "swinv2" if self.version == 2 else "swin", **sizes}, indent=2)
            atomic_write_text(folder / "config.json", text + "\n")


def _our_shapes(convert: Any, shapes: Shapes) -> dict[str, tuple[int, ...]]:
    """Our names and shapes, by way of tensors that take no memory."""
    import torch

    empty = {key: torch.empty(shape, device="meta") for key, shape in shapes.items()}
    return {key: tuple(value.shape) for key, value in convert(empty).items()}


def _args(model: Any) -> dict[str, Any]:
    return {**model_defaults(model.config["name"]), **model.config["args"]}


def _heads(ours: Shapes, stage: int) -> int:
    start = f"layers.{stage}.blocks.0.attn."
    table = ours.get(f"{start}position.table")
    return table[1] if table else ours[f"{start}score.logit_scale"][0]


def _known(hints: Hints) -> dict[str, Any]:
    """Windows and sizes as a name or a ``config.json`` says them."""
    known: dict[str, Any] = {}
    if hints.name in list_models("swin*"):
        own = model_defaults(str(hints.name))
        known = {key: own[key] for key in ("window_size", "img_size", "pretrained_window_sizes")}
    elif match := _NAMED.search(str(hints.name or "")):
        before, window, _, size = (int(number) if number else 0 for number in match.groups())
        known = {"window_size": window, "img_size": size}
        if before:  # the last stage of training had but half a window
            known["pretrained_window_sizes"] = [before, before, before, before // 2]
    preprocess = timm_names.spec(hints.name).get("preprocess")
    if preprocess:
        known["preprocess"] = preprocess
    config = hints.config
    if "window_size" in config:  # transformers'
        known |= {"window_size": config["window_size"], "img_size": config.get("image_size", 224)}
        known["pretrained_window_sizes"] = config.get("pretrained_window_sizes")
    return {key: value for key, value in known.items() if value}


def _windows(ours: Shapes, patch: list[int], stages: int, known: Mapping[str, Any], hints: Hints) -> dict[str, Any]:
    """Side of the windows and size of the images, from the tables of relative positions or from a name."""
    tables = [ours.get(f"layers.{i}.blocks.0.attn.position.table") for i in range(stages)]
    sides = [(math.isqrt(table[0]) + 1) // 2 for table in tables if table]
    if any(table and math.isqrt(table[0]) ** 2 != table[0] for table in tables):
        raise UserError(f"{hints.path}: its windows are no squares, and ours are.")
    if not sides and "window_size" not in known:
        raise UserError(
            f"{hints.path}: no tensor of a Swin V2 says how large its windows are. "
            f"Say it: name=… (--name), swinv2_tiny_window8_256 say, or put its config.json beside the file."
        )
    window = max(sides) if sides else int(known["window_size"])
    # tables are smaller where the map is, so the last one tells its size
    grid = sides[-1] if sides else window
    size = known.get("img_size") or patch[0] * grid * 2 ** (stages - 1)
    more = {}
    if known.get("pretrained_window_sizes") and not sides and any(known["pretrained_window_sizes"]):
        more["pretrained_window_sizes"] = list(known["pretrained_window_sizes"])
    return {"window_size": window, "img_size": size if isinstance(size, int) else plain(size), **more}


def _timm_peer(model: Any) -> Any:
    from timm.models.swin_transformer import SwinTransformer as One
    from timm.models.swin_transformer_v2 import SwinTransformerV2 as Two

    args = _args(model)
    keys = ("in_chans", "num_classes", "embed_dim", "mlp_ratio", "window_size", "patch_size", "qkv_bias")
    shared = {key: args[key] for key in keys}
    shared |= {"img_size": model.img_size, "depths": tuple(args["depths"]), "num_heads": tuple(args["num_heads"])}
    if args["version"] == 1:
        return One(**shared)
    references = args["pretrained_window_sizes"] or (0,) * len(args["depths"])
    return Two(**shared, pretrained_window_sizes=tuple(references))


def _torchvision_peer(model: Any) -> Any:
    from torchvision.models import swin_transformer as tv

    args = _args(model)
    two = {"block": tv.SwinTransformerBlockV2, "downsample_layer": tv.PatchMergingV2} if args["version"] == 2 else {}
    return tv.SwinTransformer(
        patch_size=list(model.patch_embed.patch_size),
        embed_dim=args["embed_dim"],
        depths=list(args["depths"]),
        num_heads=list(args["num_heads"]),
        window_size=[args["window_size"]] * 2,
        mlp_ratio=args["mlp_ratio"],
        num_classes=args["num_classes"],
        **two,
    )


def _sizes_for_transformers(model: Any) -> dict[str, Any]:
    args = _args(model)
    sizes = {
        "image_size": model.img_size[0],
        "patch_size": model.patch_embed.patch_size[0],
        "num_channels": args["in_chans"],
        "embed_dim": args["embed_dim"],
        "depths": list(args["depths"]),
        "num_heads": list(args["num_heads"]),
        "window_size": args["window_size"],
        "mlp_ratio": args["mlp_ratio"],
        "qkv_bias": args["qkv_bias"],
        "layer_norm_eps": args["norm_eps"],
        "num_labels": args["num_classes"],
    }
    if args["pretrained_window_sizes"]:
        sizes["pretrained_window_sizes"] = list(args["pretrained_window_sizes"])
    return sizes


def _transformers_peer(model: Any) -> Any:
    import transformers

    hf: Any = transformers
    two = _args(model)["version"] == 2
    config = (hf.Swinv2Config if two else hf.SwinConfig)(**_sizes_for_transformers(model))
    return (hf.Swinv2ForImageClassification if two else hf.SwinForImageClassification)(config)


def _make() -> tuple[Layout, ...]:
    made = []
    for version in (1, 2):

        def to_transformers(state: Mapping[str, Tensor], version: int = version) -> dict[str, Tensor]:
            return swin_names.to_transformers(state, version=version)

        timm = {"layers.0.blocks.0.attn.qkv.weight", "patch_embed.norm.weight"}
        torchvision = {"features.0.0.weight", "features.1.0.attn.qkv.weight"}
        hf = {"embeddings.patch_embeddings.projection.weight", "embeddings.norm.weight"}
        made += [
            Layout("timm", version, timm, swin_names.from_timm, swin_names.to_timm, _timm_peer),
            Layout(
                "torchvision",
                version,
                torchvision,
                swin_names.from_torchvision,
                swin_names.to_torchvision,
                _torchvision_peer,
            ),
            Layout("transformers", version, hf, swin_names.from_transformers, to_transformers, _transformers_peer),
        ]
    return tuple(made)


LAYOUTS = _make()
