"""The attention core: the only place of this package where queries meet keys.

Outside, tensors are ``(B, N, D)``; inside they are ``(B, H, N, d)``. A ``mask`` is boolean and True means
*may attend*; a ``bias`` is added to the scores; a row that may attend to nothing gives zeros.
"""

from __future__ import annotations

from vision_attn.attention import flex, gathered, tiled, windows  # noqa: F401  (importing registers kernels and a pattern)
from vision_attn.attention.conditional import ConditionalAttention
from vision_attn.attention.config import AttentionConfig
from vision_attn.attention.core import attend, attention_weights
from vision_attn.attention.kernels import KERNELS, Kernel, Request, choose_kernel
from vision_attn.attention.layout import Layout
from vision_attn.attention.masks import causal_mask, merge_masks, padding_mask, visibility_mask
from vision_attn.attention.multihead import Attention
from vision_attn.attention.normalizers import NORMALIZERS, collect_log_probs, make_normalizer
from vision_attn.attention.patterns import PATTERNS, make_pattern
from vision_attn.attention.positions import (
    POSITIONS,
    make_layer_position,
    resample_grid,
    sinusoidal_1d,
    sinusoidal_2d,
    token_position,
)
from vision_attn.attention.recorder import Recordable, Recorder, Watch, record, recordable
from vision_attn.attention.scores import SCORES, make_score

__all__ = [
    "KERNELS",
    "NORMALIZERS",
    "PATTERNS",
    "POSITIONS",
    "SCORES",
    "Attention",
    "AttentionConfig",
    "ConditionalAttention",
    "Kernel",
    "Layout",
    "Recordable",
    "Recorder",
    "Request",
    "Watch",
    "attend",
    "attention_weights",
    "causal_mask",
    "choose_kernel",
    "collect_log_probs",
    "make_layer_position",
    "make_normalizer",
    "make_pattern",
    "make_score",
    "merge_masks",
    "padding_mask",
    "record",
    "recordable",
    "resample_grid",
    "sinusoidal_1d",
    "sinusoidal_2d",
    "token_position",
    "visibility_mask",
]
