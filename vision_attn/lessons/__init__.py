"""Short lessons on attention whose numbers are computed when they are read, in English and Chinese."""

from __future__ import annotations

from vision_attn.lessons import scores, weights, sequences  # noqa: F401  (importing registers lessons)
from vision_attn.lessons.registry import LANGUAGES, LESSONS, Lesson, find

__all__ = ["LANGUAGES", "LESSONS", "Lesson", "find"]
