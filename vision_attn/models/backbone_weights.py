"""Pretrained weights for the backbone of a detector, out of the library or out of a file."""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from vision_attn.errors import UserError


def load_weights(backbone: nn.Module, name: str, weights: bool | str | Path) -> None:
    """Fills a backbone; what belongs to a classifier's head stays out.

    Args:
        backbone: a ``ResNet``, or a ``ViT`` or ``Swin`` of this zoo in a ``ZooBackbone``.
        name: as for ``make_backbone``.
        weights: True for torchvision's weights of a ResNet (downloaded once), or a file: torchvision's or timm's of a
            ResNet, or a ``model.safetensors`` of this zoo.

    Raises:
        UserError: there are no such weights, or they do not fit.
    """
    state = _torchvision(name) if weights is True else _from_file(Path(str(weights)))
    body: Any = getattr(backbone, "body", backbone)
    own = body.state_dict()
    # what a detector adds or leaves out: the norm behind tokens that were pooled first, counters of frozen norms
    needed = [key for key in own if not key.startswith(("norm.", "head")) and not key.endswith("num_batches_tracked")]
    missing = [key for key in needed if key not in state or state[key].shape != own[key].shape]
    if missing:
        what = "torchvision's weights" if weights is True else str(weights)
        raise UserError(
            f"{what} do not fit the backbone {name}: {len(missing)} of {len(needed)} tensors are missing or of another "
            f"shape ({', '.join(missing[:3])}, …)."
        )
    fitting = {key: state[key] for key in own if key in state and state[key].shape == own[key].shape}
    body.load_state_dict(fitting, strict=False)


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
    try:
        if path.suffix == ".safetensors":
            from safetensors.torch import load_file

            return load_file(path)
        content = torch.load(path, map_location="cpu", weights_only=True)
    except (OSError, RuntimeError, ValueError, EOFError, pickle.UnpicklingError) as error:
        first = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise UserError(f"backbone_weights={path} cannot be read: {first}") from error
    for key in ("state_dict", "model"):  # where training scripts keep them
        content = content[key] if isinstance(content, dict) and isinstance(content.get(key), dict) else content
    if not isinstance(content, dict) or not all(isinstance(value, Tensor) for value in content.values()):
        raise UserError(f"backbone_weights={path} holds no table of tensors")
    return content
