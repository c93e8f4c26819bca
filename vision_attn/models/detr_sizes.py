"""Detection transformers by name: sizes and switches of ``DETR``."""

from __future__ import annotations

from typing import Any

from vision_attn.models.detr import DETR
from vision_attn.models.registry import register_model

_DAB: dict[str, Any] = {
    "queries": "box",
    "refine": True,
    "conditional": True,
    "modulate": True,
    "num_queries": 300,
    "classification": "sigmoid",
    "temperature": 20.0,
    "dropout": 0.0,
}
_DN: dict[str, Any] = {**_DAB, "dn_groups": 5}
_TINY: dict[str, Any] = {
    "img_size": 96,
    "backbone": "light_cnn",
    "num_classes": 10,
    "embed_dim": 128,
    "num_heads": 4,
    "enc_layers": 2,
    "dec_layers": 3,
    "mlp_ratio": 4.0,
    "num_queries": 20,
    "dropout": 0.0,
}
_SMALL: dict[str, Any] = {
    **_TINY,
    "img_size": 192,
    "backbone": "light_cnn_small",
    "embed_dim": 192,
    "num_heads": 6,
    "enc_layers": 3,
    "dec_layers": 4,
    "num_queries": 60,
}
_LIGHT_DN: dict[str, Any] = {
    "queries": "box",
    "refine": True,
    "dn_groups": 4,
    "dn_most": 200,
    "classification": "sigmoid",
    "temperature": 20.0,
    "centred": True,
}


@register_model(task="detection")
def detr_resnet50(**kwargs: Any) -> DETR:
    """DETR with a ResNet-50: 6 + 6 layers of width 256, 100 learned queries (arXiv 2005.12872)."""
    return DETR(**kwargs)


@register_model(task="detection")
def detr_resnet101(**kwargs: Any) -> DETR:
    """DETR with a ResNet-101 (arXiv 2005.12872)."""
    return DETR(**{"backbone": "resnet101", **kwargs})


@register_model(task="detection")
def detr_resnet50_dc5(**kwargs: Any) -> DETR:
    """DETR with a ResNet-50 whose last stage dilates its filters: four times the tokens (arXiv 2005.12872)."""
    return DETR(**{"backbone_options": {"dilation": True}, **kwargs})


@register_model(task="detection")
def detr_resnet101_dc5(**kwargs: Any) -> DETR:
    """DETR with a ResNet-101 whose last stage dilates its filters (arXiv 2005.12872)."""
    return DETR(**{"backbone": "resnet101", "backbone_options": {"dilation": True}, **kwargs})


@register_model(task="detection")
def conditional_detr_resnet50(**kwargs: Any) -> DETR:
    """Conditional DETR with a ResNet-50: 300 queries with a point, sigmoid classes (arXiv 2108.06152)."""
    given = {"queries": "point", "conditional": True, "num_queries": 300, "classification": "sigmoid"}
    return DETR(**{**given, **kwargs})


@register_model(task="detection")
def dab_detr_resnet50(**kwargs: Any) -> DETR:
    """DAB-DETR with a ResNet-50: 300 boxes refined layer by layer, sigmoid classes (arXiv 2201.12329)."""
    return DETR(**{**_DAB, **kwargs})


@register_model(task="detection")
def dn_detr_resnet50(**kwargs: Any) -> DETR:
    """DN-DETR with a ResNet-50: DAB-DETR and five groups of denoising queries in training (arXiv 2203.01305)."""
    return DETR(**{**_DN, **kwargs})


@register_model(task="detection")
def detr_tiny(**kwargs: Any) -> DETR:
    """The original DETR for small images: light CNN, 2 + 3 layers of width 128, 20 learned queries."""
    return DETR(**{**_TINY, **kwargs})


@register_model(task="detection")
def dn_detr_tiny(**kwargs: Any) -> DETR:
    """DN-DETR for small images: light CNN, 2 + 3 layers of width 128, 20 refined boxes (arXiv 2203.01305)."""
    return DETR(**{**_TINY, **_LIGHT_DN, **kwargs})


@register_model(task="detection")
def dn_detr_small(**kwargs: Any) -> DETR:
    """DN-DETR for small images, larger: 3 + 4 layers of width 192, 60 refined boxes (arXiv 2203.01305)."""
    return DETR(**{**_SMALL, **_LIGHT_DN, **kwargs})
