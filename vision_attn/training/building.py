"""The model of a recipe, built for the task and the data that it is to be trained on."""

from __future__ import annotations

from typing import Any

from vision_attn.errors import UserError
from vision_attn.training.tasks import TASKS

BELONGS = {
    "name": "model.name",
    "attention": "model.attention",
    "img_size": "data.img_size",
    "num_classes": "the data, whose classes they are",
}
"""Keywords of ``create_model`` that ``model.args`` must not repeat, and where their values come from."""


def build_model(
    task: str, name: str, args: dict[str, Any] | None, *, img_size: tuple[int, int] | None, **chosen: Any
) -> Any:
    """A model of the zoo with fresh weights, or a complaint that names the option to change.

    Args:
        task: what it is to be trained for.
        name: of the model.
        args: ``model.args``, its own keywords.
        img_size: (H, W) of the data.
        **chosen: further keywords of ``create_model``.

    Raises:
        UserError: an argument whose value comes from elsewhere, images that the data do not have, a model of another
            task; or from ``create_model``.
    """
    from vision_attn.models import create_model, list_models

    args = args or {}
    for key in BELONGS.keys() & args.keys():
        raise UserError(f"model.args.{key} cannot be set, it comes from {BELONGS[key]}")
    if args.get("in_chans", 3) != 3:
        raise UserError(
            f"model.args.in_chans is {args['in_chans']}, but the images of every data set have 3 channels, grey ones "
            "too: leave it out"
        )
    for other in TASKS:  # before the model is built: it may not take what its own task never gives
        if other != task and name in list_models(task=other):
            _refuse(name, other, task)
    size = None if img_size is None else (int(img_size[0]), int(img_size[1]))
    model = create_model(name, img_size=size, **chosen, **args)
    check_task(model, task)
    return model


def check_task(model: Any, task: str) -> None:
    """Refuse a model that does something else.

    Raises:
        UserError: naming those that do.
    """
    if model.config["task"] != task:
        _refuse(model.config["name"], model.config["task"], task)


def _refuse(name: str, kind: str, task: str) -> None:
    from vision_attn.models import list_models

    there = "`vision-attn models` lists those that are"  # too many to be named here
    if task != "classification":
        there = f"there are: {', '.join(list_models(task=task))}"
    raise UserError(f"{name} is a model for {kind}, not for {task}; {there}")
