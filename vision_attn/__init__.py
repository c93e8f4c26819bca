"""vision_attn: ViT, Swin and DETR on one attention core.

The names below are the public API. They are imported when first used, so ``import vision_attn`` itself
costs almost nothing.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_EXPORTS = {
    "Attention": "vision_attn.attention",
    "attend": "vision_attn.attention",
    "attention_weights": "vision_attn.attention",
    "create_model": "vision_attn.models",
    "list_models": "vision_attn.models",
    "load_model": "vision_attn.checkpoints",
    "save_model": "vision_attn.checkpoints",
    "push_to_hub": "vision_attn.checkpoints.hub",
    "predict": "vision_attn.inference",
    "attention_maps": "vision_attn.explain",
}

__all__ = [
    "Attention",
    "__version__",
    "attend",
    "attention_maps",
    "attention_weights",
    "create_model",
    "list_models",
    "load_model",
    "predict",
    "push_to_hub",
    "save_model",
]

if TYPE_CHECKING:
    from vision_attn.attention import Attention, attend, attention_weights
    from vision_attn.checkpoints import load_model, save_model
    from vision_attn.checkpoints.hub import push_to_hub
    from vision_attn.explain import attention_maps
    from vision_attn.inference import predict
    from vision_attn.models import create_model, list_models


def __getattr__(name: str) -> Any:
    if name in _EXPORTS:
        return getattr(importlib.import_module(_EXPORTS[name]), name)
    raise AttributeError(f"module 'vision_attn' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *_EXPORTS])
