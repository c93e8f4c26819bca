"""A picture as a model is given it, and as it can be shown."""

from __future__ import annotations

from typing import Any

import torch
from PIL import Image
from torch import Tensor

from vision_attn.inference import preprocess


def as_seen(picture: Image.Image, config: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """An RGB picture as a model is given it: (C, H, W) normalized, and (3, H, W) uint8 to be shown."""
    settings = config["preprocess"]
    if config.get("task") == "detection":
        from vision_attn.detection.inference import prepare

        x = prepare([picture], config)[0]
    else:
        x = preprocess([picture], config)[0]
    mean, std = (torch.tensor(settings[key], dtype=torch.float32)[:, None, None] for key in ("mean", "std"))
    return x, (x * std + mean).mul(255).round().clamp(0, 255).byte().expand(3, -1, -1).contiguous()
