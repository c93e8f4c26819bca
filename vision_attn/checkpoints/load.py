"""A model ready to use out of a checkpoint, ours or somebody else's."""

from __future__ import annotations

import copy
import dataclasses
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from vision_attn.checkpoints import layouts
from vision_attn.checkpoints.claims import check_config, check_model
from vision_attn.checkpoints.hints import read_hints
from vision_attn.checkpoints.read import read_state_dict
from vision_attn.checkpoints.resample import resample
from vision_attn.errors import UserError, closest
from vision_attn.models import list_models, model_from_config


@dataclasses.dataclass
class Opened:
    """A checkpoint that was read but not yet built.

    Attributes:
        path: the file.
        theirs: its tensors by its own names, without wrappers.
        state: the tensors by our names.
        config: what builds their model.
        layout: the foreign layout, a module; None for our own format.
    """

    path: Path
    theirs: dict[str, Tensor]
    state: dict[str, Tensor]
    config: dict[str, Any]
    layout: Any = None


def load_model(
    path: str | Path,
    *,
    name: str | None = None,
    num_classes: int | None = None,
    img_size: int | Sequence[int] | None = None,
    patch_size: int | Sequence[int] | None = None,
    num_heads: int | None = None,
    device: str | torch.device = "cpu",
) -> nn.Module:
    """Build the model that a checkpoint belongs to and fill it with the checkpoint's weights.

    Nothing in the file is executed: tensors and plain values are all that is read. Whose layout it is, sizes, depth and
    options are read off the tensors: ours, timm's, torchvision's, transformers', Google's, those of the compact
    transformers and of the CIFAR ResNets.

    Args:
        path: a Lightning ``.ckpt`` of ours, a folder or file of ``save_model``, a run folder, a foreign file
            (``.pth .bin .safetensors .npz .th``), a folder of transformers or timm, or ``hf-hub:user/name``.
        name: the model, only where the tensors cannot tell: ours, or timm's.
        num_classes: outputs wanted; when it differs from the checkpoint, the head starts afresh.
        img_size: side(s) of the images; when it differs, position embeddings are resampled.
        patch_size: pixels per patch; when it differs, the projection of the patches is resampled too.
        num_heads: heads of a ViT, only where neither its width, a name nor a ``config.json`` tells.
        device: where the model goes.

    Returns:
        The model in evaluation mode, with ``.config``.

    Raises:
        UserError: the file cannot be read, does not say what it is, or does not fit the model.

    Warns:
        UserWarning: the head was replaced, or something had to be assumed.
    """
    opened = open_checkpoint(path, name=name, num_heads=num_heads, img_size=img_size)
    return build(opened, num_classes=num_classes, img_size=img_size, patch_size=patch_size).to(device).eval()


def open_checkpoint(
    path: str | Path,
    *,
    name: str | None = None,
    num_heads: int | None = None,
    img_size: int | Sequence[int] | None = None,
) -> Opened:
    """Read a checkpoint and find out what it is; arguments, errors and warnings as for ``load_model``."""
    theirs, meta = read_state_dict(path)
    file, config = meta["path"], meta["config"]
    if config is not None:
        if name is not None and name != config["name"]:
            raise UserError(f"{file} holds a {config['name']}, not a {name}; leave out name=.")
        return Opened(file, theirs, theirs, config)
    hints = read_hints(file, name, num_heads, img_size, meta.get("arch"))
    if name is not None:
        _check_name(name)
    try:
        layout = layouts.identify(theirs)
        if layout is not None:
            state, config = layouts.describe(layout, theirs, hints)
            return Opened(file, theirs, state, check_config(config, file, inferred=True), layout)
    # what is taken for granted of a layout, somebody may have made up: tensors without axes, words for numbers
    except (TypeError, AttributeError, LookupError, ArithmeticError, RuntimeError) as error:
        raise UserError(
            f"{file}: its tensors, or the JSON files beside it, do not make sense: {type(error).__name__}: {error}"
        ) from error
    if name is None:
        raise UserError(
            f"{file} holds {len(theirs)} tensors ({_some(theirs)}) and nothing that says which model they belong to. "
            f'Name it: load_model(path, name="…").'
        )
    args: dict[str, Any] = {"num_classes": _classes(theirs, file)}
    return Opened(file, theirs, theirs, {"task": "classification", "name": name, "args": args})


def build(
    opened: Opened,
    *,
    num_classes: int | None = None,
    img_size: int | Sequence[int] | None = None,
    patch_size: int | Sequence[int] | None = None,
) -> nn.Module:
    """The model of an opened checkpoint, filled, changed as asked for; errors and warnings as for ``load_model``."""
    path, config, state = opened.path, opened.config, opened.state
    if config["args"].get("num_classes") == 0 and num_classes is None:
        raise UserError(
            f"{path} has no head: it gives features, not classes. Say how many classes you want, and train them: "
            f"num_classes=… (--num_classes)."
        )
    wanted = _adapted(config, num_classes, img_size, patch_size)
    headless = config["args"].get("num_classes") == 0
    as_saved = check_model(wanted if headless else config, state, path)  # takes no memory, whatever it claims
    if not headless:
        compare(as_saved, state, path)
    try:
        with torch.random.fork_rng(devices=[]):  # loading must not shift the caller's random numbers
            model = model_from_config(wanted)
    except ValueError as error:
        raise UserError(f"{path}: cannot build its model {wanted['name']!r}: {error}") from error
    other_classes = wanted["args"].get("num_classes") != config["args"].get("num_classes")
    fill(model, fitted(state, model, config, wanted, path, new_head=other_classes), path)
    return model


def fitted(
    state: Mapping[str, Tensor],
    model: nn.Module,
    config: Mapping[str, Any],
    wanted: Mapping[str, Any],
    path: Path,
    *,
    new_head: bool,
) -> Mapping[str, Tensor]:
    """The tensors of ``config`` for a model of ``wanted``: its own head where asked for, and another image size.

    Warns:
        UserWarning: the head was replaced.
    """
    if new_head:
        state = _without_head(state, model, config, wanted, path)
    if any(wanted["args"].get(key) != config["args"].get(key) for key in ("img_size", "patch_size")):
        state = _resampled(state, model, config, wanted)
    return state


def _check_name(name: str) -> None:
    """Refuses a name that nobody has.

    Raises:
        UserError: with near names.
    """
    if name not in list_models() and name not in layouts.TORCHVISION:
        from vision_attn.models.timm_cnn import timm_names

        if name.split(".")[0] not in timm_names(name.split(".")[0]):
            raise UserError(
                f"unknown model {name!r}.{closest(name, list_models())} `vision-attn models` lists them all."
            )


def _classes(state: Mapping[str, Tensor], path: Path) -> int:
    """Number of outputs, from the last matrix called like a head."""
    heads = [key for key in state if key.split(".")[-2:-1] in (["head"], ["fc"], ["classifier"], ["linear"])]
    for key in reversed(heads):
        if key.endswith("weight") and state[key].ndim >= 2:
            return int(state[key].shape[0])
    raise UserError(f"{path}: no tensor looks like a head, so the number of classes is unknown ({_some(state)}).")


def _adapted(
    config: Mapping[str, Any],
    num_classes: int | None,
    img_size: int | Sequence[int] | None,
    patch_size: int | Sequence[int] | None = None,
) -> dict[str, Any]:
    """A copy of the configuration with the changes asked for."""
    wanted = copy.deepcopy(dict(config))
    if num_classes is not None and "num_classes" not in wanted["args"]:
        raise UserError(f"a {wanted['name']} has no classes (its task is {wanted['task']}): leave out num_classes")
    if num_classes is not None and num_classes != wanted["args"].get("num_classes"):
        wanted["args"]["num_classes"] = num_classes
        wanted["labels"] = None  # they named other classes
        if "category_ids" in wanted:
            wanted["category_ids"] = None
    if img_size is not None:
        size = [img_size, img_size] if isinstance(img_size, int) else list(img_size)
        wanted["args"]["img_size"] = img_size if isinstance(img_size, int) else size
        if wanted.get("preprocess"):
            wanted["preprocess"]["size"] = size
    if patch_size is not None:
        wanted["args"]["patch_size"] = patch_size if isinstance(patch_size, int) else list(patch_size)
    return wanted


def _without_head(
    state: Mapping[str, Tensor], model: nn.Module, config: Mapping[str, Any], wanted: Mapping[str, Any], path: Path
) -> dict[str, Tensor]:
    """Replace the tensors of the head by the fresh ones of ``model``, and say so."""
    names = getattr(model, "head_names", None) or (getattr(model, "head_name", "head"),)
    prefixes = tuple(f"{name}." for name in names)
    fresh = {key: value for key, value in model.state_dict().items() if key.startswith(prefixes)}
    if not fresh:
        raise UserError(f"{path}: {wanted['name']} has no head to replace.")
    old, new = config["args"].get("num_classes"), wanted["args"]["num_classes"]
    before = f"{old} classes" if old != new else "other classes"
    what = f"was trained for {before}: the head ({', '.join(fresh)}) was replaced by a fresh one"
    if old == 0:
        what = f"has no head: a fresh one ({', '.join(fresh)}) was added"
    warnings.warn(f"{path} {what} for {new} and has to be trained.", stacklevel=5)
    return {**{key: value for key, value in state.items() if not key.startswith(prefixes)}, **fresh}


def _resampled(
    state: Mapping[str, Tensor], model: Any, config: Mapping[str, Any], wanted: Mapping[str, Any]
) -> dict[str, Tensor]:
    """The tensors at another image or patch size."""
    before = copy.deepcopy(dict(config))
    if "num_classes" in wanted["args"]:
        before["args"]["num_classes"] = wanted["args"]["num_classes"]
    with torch.device("meta"):  # only its grid is asked for
        old: Any = model_from_config(before)
    title = (config.get("extra") or {}).get("layout")
    return resample(state, old, model, antialias=title not in layouts.UNFILTERED)


def fill(model: nn.Module, state: Mapping[str, Tensor], path: str | Path) -> None:
    """Copy tensors into a model whose every parameter and buffer they must cover, and nothing else.

    Raises:
        UserError: names or shapes differ; the message counts them and names the first few.
    """
    model.load_state_dict(compare(model, state, path))


def compare(model: nn.Module, state: Mapping[str, Tensor], path: str | Path) -> dict[str, Tensor]:
    """The tensors that ``fill`` copies, if they are those of the model; errors as for ``fill``."""
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
    return dict(state)


def _some(keys: Sequence[str] | Mapping[str, Any], n: int = 3) -> str:
    keys = list(keys)
    return ", ".join(keys[:n]) + (", …" if len(keys) > n else "")
