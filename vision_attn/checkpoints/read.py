"""Tensors and their description out of a file, without running anything the file brings along."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vision_attn.errors import UserError, closest

CONFIG_KEY = "vision_attn_config"  # in the metadata of a safetensors file
WEIGHTS_NAME = "model.safetensors"
CONFIG_NAME = "config.json"
_LONGEST_HEADER = 100_000_000  # bytes, the limit of the format
_NESTED = ("state_dict", "model_state_dict", "model", "net")  # where others keep the tensors in a dictionary


def read_state_dict(path: str | Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Read the tensors of a checkpoint onto the CPU.

    Args:
        path: a ``.safetensors`` file, a file of ``torch.save`` (Lightning's or a plain dictionary, old or new
            format), or a folder with ``model.safetensors`` or ``checkpoints/best.ckpt``.

    Returns:
        The tensors by name, wrapper prefixes (``module.``, ``_orig_mod.``) removed, and a dictionary with
        ``path`` (the file read), ``format`` (``"safetensors"``, ``"lightning"`` or ``"torch"``) and ``config``
        (``model.config`` of the model saved, or ``None``).

    Raises:
        UserError: no such file, or it is truncated, no checkpoint, or would need code to be run.
    """
    file = _locate(Path(path).expanduser())
    with open(file, "rb") as stream:
        start = stream.read(9)
    if not start:
        raise UserError(f"{file} is empty: not a checkpoint.")
    # By content, not by suffix: people rename files. The length of a safetensors header may begin with the bytes of
    # a zip file or a pickle, so the JSON after it decides.
    is_header = start[8:] == b"{" and int.from_bytes(start[:8], "little") < _LONGEST_HEADER
    if not is_header and (start[:2] == b"PK" or start[:1] == b"\x80"):
        state, meta = _read_torch(file)
    else:
        state, meta = _read_safetensors(file)
    return _strip_wrappers(state), {"path": file, **meta}


def _locate(path: Path) -> Path:
    """The file meant by ``path``, which may be a folder."""
    if path.is_dir():
        for name in (WEIGHTS_NAME, "checkpoints/best.ckpt", "checkpoints/last.ckpt", "best.ckpt", "last.ckpt"):
            if (path / name).is_file():
                return path / name
        raise UserError(f"{path} holds no {WEIGHTS_NAME} and no checkpoints/best.ckpt: not the folder of a model.")
    if not path.exists():
        siblings = [p.name for p in path.parent.iterdir()] if path.parent.is_dir() else []
        raise UserError(f"No such checkpoint: {path}.{closest(path.name, siblings)}")
    return path


def _strip_wrappers(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """The parameters' own names, without what DistributedDataParallel and torch.compile put before them."""
    prefix = "module." if all(key.startswith("module.") for key in state) else ""
    return {key.removeprefix(prefix).replace("_orig_mod.", ""): value for key, value in state.items()}


def _read_safetensors(file: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(str(file), framework="pt", device="cpu") as handle:
            metadata = handle.metadata() or {}
            state = {key: handle.get_tensor(key) for key in handle.keys()}  # noqa: SIM118 (not a mapping)
    except SafetensorError as error:
        raise UserError(f"{file} is no checkpoint, or a truncated one: {error}") from error
    inside = json.loads(metadata[CONFIG_KEY]) if CONFIG_KEY in metadata else None
    beside = _config_beside(file)
    # The file that people edit (labels, extra) wins where it is certain to belong to these weights.
    config = beside if file.name == WEIGHTS_NAME and beside else inside or beside
    return state, {"format": "safetensors", "config": config}


def _config_beside(file: Path) -> dict[str, Any] | None:
    """Our ``config.json`` in the same folder; other libraries' files of that name do not count."""
    path = file.with_name(CONFIG_NAME)
    if not path.is_file():
        return None
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"{path} is not valid JSON: {error}") from error
    return config if isinstance(config, dict) and {"name", "args"} <= config.keys() else None


def _read_torch(file: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    content = _torch_load(file)
    config = None
    if isinstance(content, dict) and "pytorch-lightning_version" in content:
        config = (content.get("hyper_parameters") or {}).get("config")
        if config is None:
            raise UserError(
                f"{file} is a Lightning checkpoint that does not say which model it holds: not one of ours."
            )
        state = content["state_dict"]
        # the LightningModule holds the network as .model; whatever else it keeps (losses, metrics) is no part of it
        state = {key[len("model.") :]: value for key, value in state.items() if key.startswith("model.")}
        return state, {"format": "lightning", "config": config}
    for key in _NESTED:
        if isinstance(content, dict) and isinstance(content.get(key), dict):
            content = content[key]
            break
    if not isinstance(content, dict) or not content or not all(isinstance(v, Tensor) for v in content.values()):
        raise UserError(f"{file} holds no dictionary of tensors: not a checkpoint that can be loaded.")
    return content, {"format": "torch", "config": None}


def _torch_load(file: Path) -> Any:
    """``torch.load`` on the CPU, tensors and plain values only.

    Raises:
        UserError: the file is damaged, or needs classes or functions to be imported.
    """
    try:
        return torch.load(file, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        text = str(error)
        if "nsupported" in text and ("global" in text.lower() or "class" in text.lower()):
            culprit = text.split("GLOBAL ")[-1].split(" ")[0] if "GLOBAL " in text else "an object"
            raise UserError(
                f"{file} needs {culprit} to be imported, which could run code, so it was not opened. "
                f"Save its tensors again where you trust it: torch.save(model.state_dict(), …)."
            ) from None
        raise UserError(f"{file} is no checkpoint, or a damaged one.") from error
    except (RuntimeError, EOFError, ValueError, KeyError, IndexError, OSError) as error:
        if isinstance(error, PermissionError):
            raise
        first = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise UserError(f"{file} is no checkpoint, or a truncated one: {first}") from error
