"""Pretrained weights for the backbone of a detector, out of the library or out of a file."""

from __future__ import annotations

import json
import math
import pickle
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from vision_attn.attention import resample_grid
from vision_attn.attention.relative import resample_offsets
from vision_attn.errors import UserError, first_line
from vision_attn.layers.embed import pair

COUNTER = "num_batches_tracked"
CONVERT = (
    " Weights in timm's or transformers' layout are brought into this one's by `vision-attn convert FILE FOLDER`; then "
    "backbone_weights=FOLDER."
)


Weights = bool | str | Path


def load_weights(backbone: nn.Module, name: str, weights: Weights) -> None:
    """Fills a backbone; what belongs to a classifier's head stays out.

    Args:
        backbone: a ``ResNet``, or a ``ViT`` or ``Swin`` of this zoo in a ``ZooBackbone``. Positions of another image
            size are resampled.
        name: as for ``make_backbone``.
        weights: True for torchvision's weights of a ResNet (downloaded once), or a file: torchvision's or timm's of a
            ResNet, or a ``model.safetensors`` of this zoo, or its folder.

    Raises:
        UserError: there are no such weights, or they do not fit.
    """
    state = _torchvision(name) if weights is True else _from_file(Path(str(weights)))
    body: Any = getattr(backbone, "body", backbone)
    own = body.state_dict()
    if weights is not True:
        state = _at_size(state, body, own, _grid_beside(Path(str(weights))))
    # what a detector adds or leaves out: the norm behind tokens that were pooled first, counters of frozen norms
    needed = {key: key for key in own if not key.startswith(("norm.", "head")) and not key.endswith(COUNTER)}
    what = "torchvision's weights" if weights is True else str(weights)
    _demand(needed, own, state, what, name, "" if name.startswith("resnet") else CONVERT)
    fitting = {key: state[key] for key in own if key in state and state[key].shape == own[key].shape}
    body.load_state_dict(fitting, strict=False)


def load_timm_weights(body: nn.Module, name: str, path: str | Path, in_chans: int, options: Mapping[str, Any]) -> None:
    """Fills a net of timm's with a file of the whole network, as timm would, but refuses one that does not fit.

    timm itself takes whatever fits by name when it makes a backbone, and leaves the rest as drawn.

    Args:
        body: from ``timm.create_model(…, features_only=True)``.
        name: timm's.
        path: of the file.
        in_chans: channels of the images; the first convolution is adapted to them.
        options: that the body was made with.

    Raises:
        UserError: the file cannot be read, or does not fit.
    """
    import timm

    state: Any = dict(_from_file(Path(path)))
    own_words = ("out_indices", "feature_cls", "output_fmt")
    with torch.random.fork_rng(devices=[]):  # only its names and shapes are asked for
        rest = {key: value for key, value in options.items() if key not in own_words}
        whole: Any = timm.create_model(name, pretrained=False, in_chans=in_chans, num_classes=0, **rest)
    state = _in_timms_names(state, whole, name, path)
    expected = whole.state_dict()
    for conv in _first_convs(whole):
        weight = state.get(f"{conv}.weight")
        if weight is not None and weight.ndim == 4 and weight.shape[1] == 3 != in_chans:
            state[f"{conv}.weight"] = timm.models.adapt_input_conv(in_chans, weight)  # type: ignore[attr-defined]
    own = body.state_dict()
    names = {key: _whole_name(key, expected) for key in own}
    needed = {key: value for key, value in names.items() if not key.endswith(COUNTER)}
    _demand(needed, own, state, str(path), f"timm's {name}", "")
    fitting = {key: state[value] for key, value in names.items() if value in state}
    body.load_state_dict(fitting, strict=False)


def _in_timms_names(state: dict[str, Tensor], whole: Any, name: str, path: str | Path) -> dict[str, Tensor]:
    """The tensors after timm's own filter of this architecture: older names, positions of another size."""
    filter_fn = getattr(sys.modules[type(whole).__module__], "checkpoint_filter_fn", None)
    if filter_fn is None:
        return state
    try:
        return dict(filter_fn(state, whole))
    except Exception as error:  # made for files of this architecture; what else may come nobody has foreseen
        raise UserError(
            f"backbone_weights={path} does not fit the backbone timm's {name}: {type(error).__name__}: {error}"
        ) from error


def _first_convs(whole: Any) -> tuple[str, ...]:
    named = whole.pretrained_cfg.get("first_conv") or ()
    return (named,) if isinstance(named, str) else tuple(named)


def _whole_name(key: str, expected: Mapping[str, Tensor]) -> str:
    """The name in the whole network of a tensor of its backbone, which may be wrapped or flattened one level."""
    first, dot, rest = key.partition(".")
    candidates = (key, key.removeprefix("model."), re.sub(r"_(\d+)$", r".\1", first) + dot + rest)
    return next((name for name in candidates if name in expected), key)


def _demand(
    needed: Mapping[str, str], own: Mapping[str, Tensor], state: Mapping[str, Tensor], what: str, name: str, advice: str
) -> None:
    """Refuses tensors (by their names in ``state``) that do not fill all that is needed."""
    wrong = [theirs for key, theirs in needed.items() if theirs not in state or state[theirs].shape != own[key].shape]
    if wrong:
        raise UserError(
            f"{what} do{'es' * (not what.endswith('weights'))} not fit the backbone {name}: {len(wrong)} of "
            f"{len(needed)} tensors are missing or of another shape ({', '.join(wrong[:3])}{', …' * (len(wrong) > 3)})."
            f"{advice}"
        )


def _at_size(
    state: Mapping[str, Tensor], body: Any, own: Mapping[str, Tensor], beside: tuple[int, int] | None
) -> dict[str, Tensor]:
    """Learned positions and relative biases of another grid, to fit the body's."""
    found = dict(state)
    for key, value in state.items():
        if key not in own or own[key].shape == value.shape or own[key].ndim != value.ndim:
            continue
        if key == "pos_embed" and own[key].shape[-1] == value.shape[-1]:
            prefix = getattr(body, "embedded_prefix", 0)
            old = _grid(value.shape[1] - prefix, beside)
            if old is not None:
                found[key] = resample_grid(value, old, body.grid_size, prefix)
        elif key.endswith("position.table"):
            new = body.get_submodule(key.removesuffix(".table")).grid
            rest = own[key].shape[0] - (2 * new[0] - 1) * (2 * new[1] - 1) if new else 0  # of tokens before the grid
            side = math.isqrt(max(0, value.shape[0] - rest))  # (2 R − 1)² offsets of a square window
            if new and side * side == value.shape[0] - rest and side % 2:
                found[key] = resample_offsets(value, ((side + 1) // 2,) * 2, new)
    return found


def _grid(tokens: int, beside: tuple[int, int] | None) -> tuple[int, int] | None:
    """Rows and columns of a table of positions: as the configuration beside it says, or a square."""
    if beside is not None and beside[0] * beside[1] == tokens:
        return beside
    side = math.isqrt(max(0, tokens))
    return (side, side) if side and side * side == tokens else None


def _grid_beside(path: Path) -> tuple[int, int] | None:
    """The grid of patches that the configuration of a saved model tells, where there is one."""
    try:
        folder = path if path.is_dir() else path.parent
        args = json.loads((folder / "config.json").read_text(encoding="utf-8"))["args"]
        (height, width), (rows, columns) = pair(args["img_size"]), pair(args["patch_size"])
        return height // rows, width // columns
    except (OSError, ValueError, LookupError, TypeError, ArithmeticError):
        return None


def _torchvision(name: str) -> Mapping[str, Tensor]:
    from torchvision.models import get_model_weights, list_models

    if name not in list_models() or not name.startswith("resnet"):
        raise UserError(f"there are no pretrained weights for the backbone {name}; give a file: backbone_weights=PATH")
    try:
        # of the first training recipe, as the original DETR; the second one's norms are not made to be frozen
        return get_model_weights(name)["IMAGENET1K_V1"].get_state_dict(progress=False)
    except OSError as error:
        raise UserError(
            f"torchvision's weights of {name} cannot be downloaded ({error}); give a file: backbone_weights=PATH"
        ) from error


def _from_file(path: Path) -> Mapping[str, Tensor]:
    """Tensors by name; no code in the file is run."""
    from safetensors import SafetensorError

    path = path / "model.safetensors" if path.is_dir() else path
    try:
        if path.suffix == ".safetensors":
            from safetensors.torch import load_file

            return load_file(path)
        content = torch.load(path, map_location="cpu", weights_only=True)
    except (OSError, RuntimeError, ValueError, EOFError, LookupError, SafetensorError, pickle.UnpicklingError) as error:
        raise UserError(f"backbone_weights={path} cannot be read: {first_line(error)}") from error
    for key in ("state_dict", "model"):  # where training scripts keep them
        content = content[key] if isinstance(content, dict) and isinstance(content.get(key), dict) else content
    if not isinstance(content, dict) or not all(isinstance(value, Tensor) for value in content.values()):
        raise UserError(f"backbone_weights={path} holds no table of tensors")
    return content
