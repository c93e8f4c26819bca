"""A model ready to use out of a checkpoint, ours or somebody else's."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from vision_attn.attention import resample_grid
from vision_attn.checkpoints import cifar_resnet
from vision_attn.checkpoints.read import read_state_dict
from vision_attn.errors import UserError
from vision_attn.models import model_from_config

# One module per foreign layout, each with matches(state) and convert(state) -> (state, config).
FOREIGN = (cifar_resnet,)


def load_model(
    path: str | Path,
    *,
    name: str | None = None,
    num_classes: int | None = None,
    img_size: int | Sequence[int] | None = None,
    device: str | torch.device = "cpu",
) -> nn.Module:
    """Build the model that a checkpoint belongs to and fill it with the checkpoint's weights.

    Nothing in the file is executed: tensors and plain values are all that is read.

    Args:
        path: a Lightning ``.ckpt`` of ours, a folder or file of ``save_model``, a run folder, or a foreign file
            (CIFAR ResNets ``.th``).
        name: the model, only for tensors that come without a description.
        num_classes: outputs wanted; when it differs from the checkpoint, the head starts afresh.
        img_size: side(s) of the images; when it differs, position embeddings are resampled.
        device: where the model goes.

    Returns:
        The model in evaluation mode, with ``.config``.

    Raises:
        UserError: the file cannot be read, does not say what it is, or does not fit the model.

    Warns:
        UserWarning: the head was replaced.
    """
    state, meta = read_state_dict(path)
    state, config = _describe(state, meta, name)
    wanted = _adapted(config, num_classes, img_size)
    try:
        with torch.random.fork_rng(devices=[]):  # loading must not shift the caller's random numbers
            model = model_from_config(wanted)
    except ValueError as error:
        raise UserError(f"{meta['path']}: cannot build its model {wanted['name']!r}: {error}") from error
    if wanted["args"].get("num_classes") != config["args"].get("num_classes"):
        state = _without_head(state, model, config, wanted, meta["path"])
    if wanted["args"].get("img_size") != config["args"].get("img_size"):
        state = _resample_positions(state, model, config)
    fill(model, state, meta["path"])
    return model.to(device).eval()


def _describe(
    state: dict[str, Tensor], meta: Mapping[str, Any], name: str | None
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The tensors under our names, and the configuration to build their model."""
    path, config = meta["path"], meta["config"]
    if config is None:
        for layout in FOREIGN:
            if layout.matches(state):
                state, config = layout.convert(state)
                break
    if config is not None:
        if name is not None and name != config["name"]:
            raise UserError(f"{path} holds a {config['name']}, not a {name}; leave out name=.")
        return state, config
    if name is None:
        raise UserError(
            f"{path} holds {len(state)} tensors ({_some(state)}) and nothing that says which model they belong to. "
            f'Name it: load_model(path, name="…").'
        )
    args: dict[str, Any] = {"num_classes": _classes(state, path)}
    return state, {"task": "classification", "name": name, "args": args}


def _classes(state: Mapping[str, Tensor], path: Path) -> int:
    """Number of outputs, from the last matrix called like a head."""
    heads = [key for key in state if key.split(".")[-2:-1] in (["head"], ["fc"], ["classifier"], ["linear"])]
    for key in reversed(heads):
        if key.endswith("weight") and state[key].ndim >= 2:
            return int(state[key].shape[0])
    raise UserError(f"{path}: no tensor looks like a head, so the number of classes is unknown ({_some(state)}).")


def _adapted(
    config: Mapping[str, Any], num_classes: int | None, img_size: int | Sequence[int] | None
) -> dict[str, Any]:
    """A copy of the configuration with the changes asked for."""
    wanted = copy.deepcopy(dict(config))
    if num_classes is not None and "num_classes" not in wanted["args"]:
        raise UserError(f"a {wanted['name']} has no classes (its task is {wanted['task']}): leave out num_classes")
    if num_classes is not None and num_classes != wanted["args"].get("num_classes"):
        wanted["args"]["num_classes"] = num_classes
        wanted["labels"] = None  # they named other classes
    if img_size is not None:
        size = [img_size, img_size] if isinstance(img_size, int) else list(img_size)
        wanted["args"]["img_size"] = img_size if isinstance(img_size, int) else size
        if wanted.get("preprocess"):
            wanted["preprocess"]["size"] = size
    return wanted


def _without_head(
    state: Mapping[str, Tensor], model: nn.Module, config: Mapping[str, Any], wanted: Mapping[str, Any], path: Path
) -> dict[str, Tensor]:
    """Replace the tensors of the head by the fresh ones of ``model``, and say so."""
    prefix = getattr(model, "head_name", "head") + "."
    fresh = {key: value for key, value in model.state_dict().items() if key.startswith(prefix)}
    if not fresh:
        raise UserError(f"{path}: {wanted['name']} has no head to replace.")
    old, new = config["args"].get("num_classes"), wanted["args"]["num_classes"]
    warnings.warn(
        f"{path} was trained for {old} classes: the head ({', '.join(fresh)}) was replaced by a fresh one for {new} "
        f"and has to be trained.",
        stacklevel=3,
    )
    return {**{key: value for key, value in state.items() if not key.startswith(prefix)}, **fresh}


def _resample_positions(state: Mapping[str, Tensor], model: Any, config: Mapping[str, Any]) -> dict[str, Tensor]:
    """Learned positions of the old grid at the grid of ``model``."""
    old, own = state.get("pos_embed"), model.state_dict().get("pos_embed")
    if old is None or own is None or not hasattr(model, "grid_size"):
        return dict(state)
    with torch.device("meta"):  # only its grid is asked for
        before: Any = model_from_config(config)
    prefix = getattr(model, "embedded_prefix", 0)
    return {**state, "pos_embed": resample_grid(old, before.grid_size, model.grid_size, prefix)}


def fill(model: nn.Module, state: Mapping[str, Tensor], path: str | Path) -> None:
    """Copy tensors into a model whose every parameter and buffer they must cover, and nothing else.

    Raises:
        UserError: names or shapes differ; the message counts them and names the first few.
    """
    own = model.state_dict()
    # a counter that torch before 0.4.1 did not keep, and that only matters for norms without momentum
    counters = {key: own[key] for key in own if key.endswith(".num_batches_tracked")}
    state = {**counters, **state}
    missing = [key for key in own if key not in state]
    unexpected = [key for key in state if key not in own]
    wrong = [
        f"{key} {list(state[key].shape)}, model {list(own[key].shape)}"
        for key in own
        if key in state and state[key].shape != own[key].shape
    ]
    problems = [
        f"{len(keys)} {what} ({_some(keys)})"
        for keys, what in ((missing, "missing"), (unexpected, "unexpected"), (wrong, "of another shape"))
        if keys
    ]
    if problems:
        known = getattr(model, "config", None)
        name = known["name"] if known else type(model).__name__
        raise UserError(f"{path} does not fit {name}: of {len(own)} tensors, {'; '.join(problems)}.")
    model.load_state_dict(state)


def _some(keys: Sequence[str] | Mapping[str, Any], n: int = 3) -> str:
    keys = list(keys)
    return ", ".join(keys[:n]) + (", …" if len(keys) > n else "")
