"""The model zoo: one file per family, all in one registry."""

from __future__ import annotations

from vision_attn.models import cct, cnn, detr_sizes, glimpse, pointer, swin, topologies, vit  # noqa: F401  (importing registers them)
from vision_attn.models.registry import (
    create_model,
    description,
    known_arguments,
    list_models,
    model_arguments,
    model_class,
    model_defaults,
    model_from_config,
    register_model,
)

__all__ = [
    "create_model",
    "description",
    "known_arguments",
    "list_models",
    "model_arguments",
    "model_class",
    "model_defaults",
    "model_from_config",
    "register_model",
]
