"""Pretrained weights for the backbone of a detector, out of the library or out of a file."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from vision_attn.errors import UserError


def load_weights(backbone: nn.Module, name: str, weights: bool | str | Path) -> None:
    """Fills a backbone; what belongs to a classifier's head stays out.

    Args:
        backbone: a ``ResNet``, or a ``ViT`` or ``Swin`` of this zoo in a ``ZooBackbone``.
        name: as for ``make_backbone``.
        weights: True for torchvision's weights of a ResNet (downloaded once), or a checkpoint file of any layout
            that ``load_model`` reads.

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
    # imported here: checkpoints know all models, and only this function of the models needs to read one
    from vision_attn.checkpoints.read import read_state_dict

    state = read_state_dict(path)[0]
    if "conv1.weight" in state:
        return state
    from vision_attn.checkpoints.load import open_checkpoint

    return open_checkpoint(path).state
