"""A model that starts its training from the weights of a checkpoint: fine-tuning."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

from vision_attn.checkpoints.claims import check_model
from vision_attn.checkpoints.load import compare, fitted, open_checkpoint
from vision_attn.errors import UserError


def start_from(model: Any, path: str | Path) -> None:
    """Fill a fresh model with a checkpoint's weights, as far as they mean the same.

    The head stays fresh where the checkpoint has none, another number of classes, or classes by other names. Positions,
    relative biases and patches are resampled to the sizes of ``model``. All other tensors have to fit.

    Args:
        model: of the zoo, with its ``config``; changed in place.
        path: any checkpoint that :func:`~vision_attn.checkpoints.load.load_model` takes.

    Raises:
        UserError: the checkpoint cannot be read, or belongs to a model with other tensors; ``model`` is unchanged.

    Warns:
        UserWarning: the head stays fresh, or images were normalized differently.
    """
    opened = open_checkpoint(path)
    theirs, ours = opened.config, model.config
    if theirs["task"] != ours["task"]:
        raise UserError(f"{path} is a model for {theirs['task']}, this one is for {ours['task']}.")
    state = opened.state
    headless = theirs["args"].get("num_classes") == 0
    claimed = {**theirs, "args": {**theirs["args"], "num_classes": ours["args"]["num_classes"]}} if headless else theirs
    there = check_model(claimed, state, opened.path)  # takes no memory, whatever the file claims
    if type(there) is not type(model):
        raise UserError(f"{path} holds a {theirs['name']}, and this is a {ours['name']}: take one of the same kind.")
    found = fitted(state, model, theirs, ours, opened.path, new_head=_other_classes(theirs, ours))
    try:
        found = compare(model, found, opened.path)
    except UserError as error:
        what = f" It holds a {theirs['name']}" if theirs["name"] != ours["name"] else " Its options are other ones"
        raise UserError(f"{error}{what} with {theirs['args']}.") from error
    model.load_state_dict(found)
    _compare_pixels(theirs, ours, opened.path)


def _other_classes(theirs: dict[str, Any], ours: dict[str, Any]) -> bool:
    """Whether outputs of the same number may stand for other things, too: only names can tell."""
    if theirs["args"].get("num_classes") != ours["args"].get("num_classes"):
        return True
    there, here = theirs.get("labels"), ours.get("labels")
    return bool(there and here and list(there) != list(here))


def _compare_pixels(theirs: dict[str, Any], ours: dict[str, Any], path: Path) -> None:
    """Tell when the numbers that the weights were trained on are not those that they will see."""
    there, here = theirs.get("preprocess") or {}, ours.get("preprocess") or {}
    differ = [
        f"{key} {there[key]} there, {here[key]} here"
        for key in ("mean", "std")
        if key in there and key in here and any(abs(a - b) > 0.01 for a, b in zip(there[key], here[key], strict=False))
    ]
    if differ:
        warnings.warn(
            f"{path}: images were normalized with another {'; '.join(differ)}. Training goes on with the numbers of "
            "the data; the first layers have to get used to them.",
            stacklevel=3,
        )
