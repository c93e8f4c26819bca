"""What a model looks at."""

from __future__ import annotations

from vision_attn.explain.maps import attention_maps

__all__ = ["attention_maps"]
