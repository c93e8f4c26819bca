"""A trained model as two files anybody can read: safetensors and JSON."""

from __future__ import annotations

import json
from pathlib import Path

from torch import Tensor, nn

from vision_attn.atomic import atomic_write, atomic_write_text
from vision_attn.checkpoints.read import CONFIG_KEY, CONFIG_NAME, WEIGHTS_NAME
from vision_attn.errors import UserError


def save_model(model: nn.Module, folder: str | Path) -> Path:
    """Write ``model.safetensors`` and ``config.json``, each replaced in one step.

    The configuration also goes into the metadata of the safetensors file, so that the file alone can be loaded.

    Args:
        model: made by ``create_model`` or ``load_model`` (it needs ``.config``).
        folder: made when missing.

    Returns:
        The folder.

    Raises:
        UserError: the model has no configuration, or the disk is full.
    """
    from safetensors.torch import save_file

    config = getattr(model, "config", None)
    if not isinstance(config, dict):
        raise UserError(f"{type(model).__name__} has no .config: build it with create_model, so that it can be loaded.")
    try:
        inline, pretty = json.dumps(config), json.dumps(config, indent=2, ensure_ascii=False)
    except TypeError as error:
        raise UserError(f"model.config must hold plain values to be saved as JSON: {error}") from error
    tensors = owned(model.state_dict())
    folder = Path(folder)
    atomic_write(folder / WEIGHTS_NAME, lambda path: save_file(tensors, str(path), metadata={CONFIG_KEY: inline}))
    atomic_write_text(folder / CONFIG_NAME, pretty + "\n")
    return folder


def owned(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Contiguous CPU tensors that share no memory: safetensors refuses views of one storage."""
    seen: set[int] = set()
    owned = {}
    for key, value in state.items():
        tensor = value.detach().cpu().contiguous()
        whole = tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()
        if not whole or tensor.data_ptr() in seen:
            tensor = tensor.clone()
        seen.add(tensor.data_ptr())
        owned[key] = tensor
    return owned
