"""Every mechanism of the attention core, proved by small numeric identities: ``vision-attn check attention``.

Each module here is a room of certificates; ``CERTIFICATES`` holds them all by id, the row of the table of mechanisms.
"""

from __future__ import annotations

from vision_attn.certificates import basics, cost, layers, models, normalizers, patterns, positions, scores, swin
from vision_attn.certificates.registry import CERTIFICATES, Certificate, Result, Setting, certificate, ordered, run

__all__ = [
    "CERTIFICATES",
    "Certificate",
    "Result",
    "Setting",
    "basics",
    "certificate",
    "cost",
    "layers",
    "models",
    "normalizers",
    "ordered",
    "patterns",
    "positions",
    "run",
    "scores",
    "swin",
]
