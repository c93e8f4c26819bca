"""Tensors and their description out of a file, without running anything the file brings along."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vision_attn.checkpoints.claims import check_config
from vision_attn.checkpoints.npz import is_npz, read_npz
from vision_attn.checkpoints.vetting import vet
from vision_attn.checkpoints.wrappers import strip, unwrap
from vision_attn.errors import UserError, closest, first_line

CONFIG_KEY = "vision_attn_config"  # in the metadata of a safetensors file
WEIGHTS_NAME = "model.safetensors"
CONFIG_NAME = "config.json"
HUB = ("hf-hub:", "hf_hub:")  # how a repository of the Hub is named
_CHECKPOINTS = ("checkpoints/best.ckpt", "checkpoints/last.ckpt", "best.ckpt", "last.ckpt")
_LONGEST_HEADER = 100_000_000  # bytes, the limit of the format


def read_state_dict(path: str | Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Read the tensors of a checkpoint onto the CPU.

    Args:
        path: a ``.safetensors`` file, a file of ``torch.save`` (Lightning's or a plain dictionary, old or new
            format), a folder with ``model.safetensors`` or ``checkpoints/best.ckpt``, or ``hf-hub:user/name``.

    Returns:
        The tensors by name, wrapper prefixes (``module.``, ``_orig_mod.``) removed, and a dictionary with
        ``path`` (the file read), ``format`` (``safetensors``, ``lightning``, ``torch`` or ``npz``) and ``config``
        (``model.config`` of the model saved, or ``None``); of Lightning's also ``trains``: whether an optimizer's
        state is in it, without which training cannot go on.

    Raises:
        UserError: no such file, or it is truncated, no checkpoint, or would need code to be run.
    """
    if str(path).startswith(HUB):
        from vision_attn.checkpoints.hub import download

        path = download(str(path))
    file = _locate(Path(path).expanduser())
    with open(file, "rb") as stream:
        start = stream.read(9)
    if not start:
        raise UserError(f"{file} is empty: not a checkpoint.")
    # By content, not by suffix: people rename files. The length of a safetensors header may begin with the bytes of
    # a zip file or a pickle, so the JSON after it decides.
    is_header = start[8:] == b"{" and int.from_bytes(start[:8], "little") < _LONGEST_HEADER
    if not is_header and start[:2] == b"PK" and is_npz(file):
        state, meta = read_npz(file), {"format": "npz", "config": None}
    elif not is_header and (start[:2] == b"PK" or start[:1] == b"\x80"):
        state, meta = _read_torch(file)
    else:
        state, meta = _read_safetensors(file)
    if meta["config"] is not None:
        check_config(meta["config"], file)
    return strip(state), {"path": file, **meta}


def _locate(path: Path) -> Path:
    """The file meant by ``path``, which may be a folder."""
    if path.is_dir():
        for name in (WEIGHTS_NAME, "pytorch_model.bin", *_CHECKPOINTS):
            if (path / name).is_file():
                return path / name
        raise UserError(f"{path} holds no {WEIGHTS_NAME} and no checkpoints/best.ckpt: not the folder of a model.")
    if path.exists() and not path.is_file():
        raise UserError(f"{path} is neither a file nor a folder: not a checkpoint.")
    if not path.exists():
        siblings = [p.name for p in path.parent.iterdir()] if path.parent.is_dir() else []
        raise UserError(f"No such checkpoint: {path}.{closest(path.name, siblings)}")
    return path


def _read_safetensors(file: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(str(file), framework="pt", device="cpu") as handle:
            metadata = handle.metadata() or {}
            state = {key: handle.get_tensor(key) for key in handle.keys()}  # noqa: SIM118 (not a mapping)
    except (SafetensorError, OSError, ValueError, TypeError, AttributeError, KeyError, RuntimeError) as error:
        raise UserError(f"{file} is no checkpoint, or a truncated one: {first_line(error, 300)}") from error
    inside = parse_json(metadata[CONFIG_KEY], f"{file}: its {CONFIG_KEY}") if CONFIG_KEY in metadata else None
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
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not valid JSON: {error}") from error
    config = parse_json(text, str(path))
    return config if isinstance(config, dict) and {"name", "args"} <= config.keys() else None


def parse_json(text: str, what: str) -> Any:
    """``json.loads`` with one kind of error.

    Raises:
        UserError: no JSON, or one nested so deeply that it is meant to do harm.
    """
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{what} is not valid JSON: {first_line(error, 300)}") from error


def _read_torch(file: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    content = _torch_load(file)
    config = None
    if isinstance(content, dict) and "pytorch-lightning_version" in content:
        settings = content.get("hyper_parameters")
        config = settings.get("config") if isinstance(settings, dict) else None
        if config is not None or not content.get("state_dict"):
            return _ours(content, config, file)
    state, arch = unwrap(content)
    if state is None:
        raise UserError(f"{file} holds no dictionary of tensors: not a checkpoint that can be loaded.")
    return state, {"format": "torch", "config": None, "arch": arch}


def _ours(content: dict[str, Any], config: Any, file: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """A Lightning checkpoint with ``hyper_parameters.config``."""
    if config is None:
        raise UserError(f"{file} is a Lightning checkpoint that does not say which model it holds: not one of ours.")
    state = content.get("state_dict")
    if not isinstance(state, dict) or not all(isinstance(k, str) and isinstance(v, Tensor) for k, v in state.items()):
        raise UserError(f"{file} holds no dictionary of tensors: not a checkpoint that can be loaded.")
    # the LightningModule holds the network as .model; whatever else it keeps (losses, metrics) is no part of it
    state = {key[len("model.") :]: value for key, value in state.items() if key.startswith("model.")}
    return state, {"format": "lightning", "config": config, "trains": bool(content.get("optimizer_states"))}


def _torch_load(file: Path) -> Any:
    """``torch.load`` on the CPU, tensors and plain values only.

    Raises:
        UserError: the file is damaged, needs classes or functions to be imported, or claims more than it holds.
    """
    vet(file)
    try:
        return torch.load(file, map_location="cpu", weights_only=True)
    except PermissionError:
        raise
    except (pickle.UnpicklingError, RuntimeError, EOFError, ValueError, TypeError, LookupError, OSError) as error:
        raise UserError(f"{file} is no checkpoint, or a damaged one: {first_line(error, 300)}") from error
