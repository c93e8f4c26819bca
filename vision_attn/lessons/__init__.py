"""Short lessons on attention whose numbers are computed when they are read, in English and Chinese."""

from __future__ import annotations

import importlib

from vision_attn.lessons.registry import LANGUAGES, LESSONS, Lesson, find

# importing registers lessons, and the order is that in which they are best read
for _room in ("scores", "weights", "sequences", "images", "costs"):
    importlib.import_module(f"vision_attn.lessons.{_room}")

__all__ = ["LANGUAGES", "LESSONS", "Lesson", "find"]
