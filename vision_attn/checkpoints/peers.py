"""The same model in another library: built, filled with the weights of a checkpoint, or written to a file for it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from vision_attn.atomic import atomic_write
from vision_attn.checkpoints import layouts
from vision_attn.checkpoints.load import Opened
from vision_attn.checkpoints.read import WEIGHTS_NAME
from vision_attn.checkpoints.save import owned
from vision_attn.errors import UserError, closest

TORCH_FILES = (".pth", ".pt", ".bin", ".th")


def same_sizes(opened: Opened, model: Any, library: str) -> tuple[nn.Module, Any]:
    """The peer's model of the sizes of ours, with the checkpoint's weights, and the layout.

    Raises:
        UserError: the library has no such model, or is not installed.
    """
    layout = layouts.of_peer(model, library)
    return _filled(opened, model, layout, _installed(library, lambda: layout.peer(model)), library), layout


def named(opened: Opened, model: Any, library: str, name: str) -> tuple[nn.Module, Any]:
    """A peer by name (timm, torchvision) or folder (transformers), and the layout.

    Those by name are filled with the checkpoint's weights; that in a folder has its own.

    Raises:
        UserError: no such model, it does not take the weights, or the library is not installed.
    """
    layout = layouts.of_peer(model, library)
    if library == "transformers":
        return _installed(library, lambda: _from_folder(name, str(model.config["task"]))), layout
    build = _timm if library == "timm" else _torchvision
    return _filled(opened, model, layout, _installed(library, lambda: build(name, model)), f"{library}:{name}"), layout


def _installed(library: str, build: Any) -> Any:
    try:
        return build()
    except ModuleNotFoundError as error:
        raise UserError(f"{library} is not installed ({error.name} is missing): pip install {library}") from error


def _filled(opened: Opened, model: Any, layout: Any, peer: Any, what: str) -> Any:
    same = opened.layout is not None and layout.TITLE == opened.layout.TITLE
    state = opened.theirs if same else layout.revert(opened.state, model)
    try:
        getattr(layout, "fill_peer", _strictly)(peer, state)
    except RuntimeError as error:
        first = " ".join(str(error).split())[:300]
        raise UserError(f"{what} does not take the tensors of {opened.path}: {first}") from error
    return peer


def _strictly(peer: nn.Module, state: Mapping[str, Tensor]) -> None:
    peer.load_state_dict(dict(state), strict=True)


def _sizes(model: Any) -> dict[str, Any]:
    args = model.config["args"]
    return {key: args[key] for key in ("num_classes", "in_chans") if key in args}


def _timm(name: str, model: Any) -> nn.Module:
    import timm

    if not timm.is_model(name.split(".")[0]):
        raise UserError(f"timm has no model {name!r}.{closest(name, timm.list_models())}")
    try:
        size = tuple(model.config["preprocess"]["size"])
        return timm.create_model(name, pretrained=False, img_size=size, **_sizes(model))
    except TypeError:  # its CNNs take images of any size
        return timm.create_model(name, pretrained=False, **_sizes(model))


def _torchvision(name: str, model: Any) -> nn.Module:
    from torchvision.models import get_model, list_models

    if name not in list_models():
        raise UserError(f"torchvision has no model {name!r}.{closest(name, list_models())}")
    classes = _sizes(model).get("num_classes", 1000)
    if name.startswith("vit_"):
        return get_model(name, weights=None, num_classes=classes, image_size=model.config["preprocess"]["size"][0])
    return get_model(name, weights=None, num_classes=classes)


def _from_folder(name: str, task: str) -> nn.Module:
    import transformers

    detects = task == "detection"
    auto: Any = transformers.AutoModelForObjectDetection if detects else transformers.AutoModelForImageClassification
    if not (Path(name) / "config.json").is_file():
        raise UserError(f"{name} is no folder of transformers: it holds no config.json.")
    try:
        return auto.from_pretrained(name, local_files_only=True)
    except (OSError, ValueError) as error:
        raise UserError(f"transformers cannot read {name}: {str(error).splitlines()[0]}") from error


def write_for(model: Any, dest: str | Path, library: str) -> tuple[Path, Any]:
    """Write a model of ours so that a library loads it strictly.

    Args:
        model: from ``load_model`` or ``create_model``.
        dest: a file (``.safetensors .pth .pt .bin .th``), or a folder: then ``model.safetensors``, and for transformers
            ``config.json`` and ``preprocessor_config.json``.
        library: one of ``layouts.PEERS``.

    Returns:
        The file with the tensors, and the layout.

    Raises:
        UserError: the library has no such model or no place for a part of it, or an unknown kind of file.
    """
    layout = layouts.of_peer(model, library)
    state = owned(layout.revert({key: value.cpu() for key, value in model.state_dict().items()}, model))
    dest = Path(dest)
    file = dest if dest.suffix else dest / WEIGHTS_NAME
    if file.suffix == ".safetensors":
        from safetensors.torch import save_file

        atomic_write(file, lambda path: save_file(state, str(path), metadata={"format": "pt"}))
    elif file.suffix in TORCH_FILES:
        atomic_write(file, lambda path: torch.save(state, path))
    else:
        raise UserError(
            f"{dest}: what kind of file is {file.suffix}? Use .safetensors, {', '.join(TORCH_FILES)}, or a folder."
        )
    if not dest.suffix and hasattr(layout, "write"):
        layout.write(model, dest)
    return file, layout
