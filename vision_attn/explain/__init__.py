"""What a model looks at, and what its maps are worth.

Functions that share their name with the module they live in (``rollout``, ``relevance``, ``faithfulness``) are imported
here at once, so that these names always mean the functions. What needs Lightning is imported when first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vision_attn.explain.distance import HeadStatistics, head_statistics, mean_attention_distance
from vision_attn.explain.faithfulness import Faithfulness, faithfulness
from vision_attn.explain.gradcam import grad_cam
from vision_attn.explain.inside import attention_inside
from vision_attn.explain.maps import AttentionMaps, attention_maps, implied_layers
from vision_attn.explain.receptive_field import ReceptiveField, effective_receptive_field
from vision_attn.explain.relevance import detection_relevance, relevance
from vision_attn.explain.rollout import flow, rollout

__all__ = [
    "AttentionMaps",
    "AttentionWatch",
    "Faithfulness",
    "HeadStatistics",
    "ReceptiveField",
    "attention_inside",
    "attention_maps",
    "detection_relevance",
    "effective_receptive_field",
    "faithfulness",
    "flow",
    "grad_cam",
    "head_statistics",
    "implied_layers",
    "mean_attention_distance",
    "relevance",
    "rollout",
]

if TYPE_CHECKING:
    from vision_attn.explain.callback import AttentionWatch


def __getattr__(name: str) -> Any:
    if name == "AttentionWatch":
        from vision_attn.explain.callback import AttentionWatch

        return AttentionWatch
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
