"""Models by name."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from fnmatch import fnmatchcase
from typing import Any, overload

from torch import nn

from vision_attn.attention import AttentionConfig
from vision_attn.errors import UserError, closest

Builder = Callable[..., nn.Module]

_MODELS: dict[str, Builder] = {}
_TASKS: dict[str, str] = {}

COMMON = ("num_classes", "img_size", "in_chans", "attention")
"""What every model takes, beside its own arguments."""

WITH_CLASSES = ("classification", "detection")
"""Tasks whose models have ``num_classes``."""


@overload
def register_model(builder: Builder) -> Builder: ...
@overload
def register_model(*, task: str) -> Callable[[Builder], Builder]: ...
def register_model(builder: Builder | None = None, *, task: str = "classification") -> Any:
    """Decorator: the function's name becomes the model's name, its docstring the description.

    The function takes keywords only and passes them on to the class it builds, over its own defaults.

    Args:
        builder: the function.
        task: what the model does, when that is not classification: ``@register_model(task="sorting")``. A model of
            another task has no ``num_classes``.
    """

    def add(function: Builder) -> Builder:
        if function.__name__ in _MODELS:
            raise ValueError(f"a model called {function.__name__} is registered already")
        _MODELS[function.__name__] = function
        _TASKS[function.__name__] = task
        return function

    return add if builder is None else add(builder)


def list_models(pattern: str = "*", *, task: str | None = None) -> list[str]:
    """Names of this zoo that match a shell wildcard, sorted.

    Args:
        pattern: ``"swin*"``.
        task: only models of this task, ``classification``, ``detection`` or ``sorting``; all by default.
    """
    return sorted(name for name in _MODELS if fnmatchcase(name, pattern) and task in (None, _TASKS[name]))


def description(name: str) -> str:
    """The first line of a model's docstring."""
    return (inspect.getdoc(_MODELS[name]) or "").split("\n")[0]


def model_arguments(model: type[nn.Module] | nn.Module) -> dict[str, Any]:
    """The keywords that a model class takes, with their defaults."""
    cls = model if isinstance(model, type) else type(model)
    parameters = list(inspect.signature(cls.__init__).parameters.values())[1:]
    return {p.name: p.default for p in parameters if p.kind in (p.KEYWORD_ONLY, p.POSITIONAL_OR_KEYWORD)}


def create_model(
    name: str,
    *,
    num_classes: int | None = None,
    img_size: int | tuple[int, int] | list[int] | None = None,
    in_chans: int = 3,
    attention: Mapping[str, Any] | AttentionConfig | None = None,
    **kwargs: Any,
) -> nn.Module:
    """Builds a model with fresh weights.

    Args:
        name: one of ``list_models()``, or any CNN of timm.
        num_classes: width of the head, 1000 by default; of a detector the kinds of objects, by default what its name is
            known for. Means nothing to a model of another task.
        img_size: pixels, one number or (height, width); the model's own default otherwise.
        in_chans: channels of the images.
        attention: mechanism choices, see ``AttentionConfig``; for models with attention only.
        **kwargs: the model's own arguments: ``patch_size``, ``embed_dim``, ``depth``, ``drop_path`` …

    Returns:
        A module from (B, in_chans, H, W) to (B, num_classes) logits (a model of another task says itself what it takes
        and gives), whose ``config`` says how to build it again.

    Raises:
        UserError: unknown model (with near names) or unknown argument (with what the model takes).
        ValueError: arguments that make no sense together.
    """
    chosen = AttentionConfig.of(attention).chosen()
    task = _TASKS.get(name, "classification")
    if num_classes is None and task == "classification":
        num_classes = 1000
    given: dict[str, Any] = {}
    if num_classes is not None and task in WITH_CLASSES:
        given["num_classes"] = num_classes
    given["in_chans"] = in_chans
    if img_size is not None:
        given["img_size"] = img_size if isinstance(img_size, int) else list(img_size)
    if num_classes is not None and num_classes < 1:
        raise UserError(f"num_classes={num_classes}: a model needs at least one class")
    if name in _MODELS:
        if chosen:
            given["attention"] = chosen
        model = _build(name, {**given, **kwargs})
    else:
        from vision_attn.models.timm_cnn import create_timm_cnn

        if chosen:
            raise UserError(f"{name!r} is no attention model of this zoo, so attention={chosen} means nothing to it")
        built = create_timm_cnn(name, num_classes=num_classes or 1000, in_chans=in_chans, **kwargs)
        if built is None:
            raise UserError(f"unknown model {name!r}.{closest(name, _MODELS)} `vision-attn models` lists them all.")
        model = built
    size = img_size or getattr(model, "img_size", None) or 32
    size = [size, size] if isinstance(size, int) else list(size)
    if task == "detection":
        given["num_classes"] = model.num_classes  # type: ignore[assignment]
    args = {key: value for key, value in {**given, **kwargs}.items() if key not in getattr(model, "not_in_config", ())}
    args |= getattr(model, "config_args", {})
    model.config = {  # type: ignore[assignment]
        "task": task,
        "name": name,
        "args": args,
        "preprocess": {
            "size": size,
            "mean": [0.5] * in_chans,
            "std": [0.5] * in_chans,
            "interpolation": "bilinear",
            "crop_pct": 1.0,
            **getattr(model, "preprocess", {}),
        },
        "labels": None,
        **({"category_ids": None} if task == "detection" else {}),
        "extra": {},
    }
    return model


def _build(name: str, arguments: dict[str, Any]) -> nn.Module:
    try:
        return _MODELS[name](**arguments)
    except TypeError as error:
        # Only Python's complaint about a keyword is the caller's; anything else is ours and stays as it is.
        if "unexpected keyword argument" not in str(error):
            raise
        bad = str(error).split("'")[1]
        if bad == "attention":
            raise UserError(f"{name} is a CNN: attention={arguments['attention']} means nothing to it") from error
        takes = known_arguments(name)
        raise UserError(
            f"{name} takes no argument {bad!r}.{closest(bad, takes)} It takes: {', '.join(takes)}."
        ) from error


def model_class(name: str) -> type[nn.Module]:
    """The class that a name of this zoo builds."""
    cls = inspect.signature(_MODELS[name]).return_annotation
    if isinstance(cls, str):  # postponed annotations
        cls = getattr(inspect.getmodule(_MODELS[name]), cls)
    return cls


def known_arguments(name: str) -> list[str]:
    """Every keyword that a model of this zoo takes."""
    return list(model_arguments(model_class(name)))


def model_defaults(name: str) -> dict[str, Any]:
    """Every keyword that a model of this zoo takes, with its value when it is not given."""
    cls = model_class(name)
    given: dict[str, Any] = {}

    class _Stop(Exception):
        pass

    def note(self: nn.Module, **kwargs: Any) -> None:
        given.update(kwargs)
        raise _Stop

    # a name is its class with some arguments filled in: what they are is seen by calling it
    original = cls.__init__
    cls.__init__ = note  # type: ignore[assignment]
    try:
        _MODELS[name]()
    except _Stop:
        pass
    finally:
        cls.__init__ = original  # type: ignore[method-assign]
    return {**model_arguments(cls), **given}


def model_from_config(config: Mapping[str, Any]) -> nn.Module:
    """The model that ``config`` describes, with fresh weights and the same ``config``."""
    model = create_model(config["name"], **config["args"])
    model.config = {**model.config, **config}  # type: ignore[arg-type, assignment, dict-item]
    return model
