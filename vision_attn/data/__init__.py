"""Data sets, augmentation and loaders. Importing this package registers every data set."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vision_attn.data import canvas as canvas
from vision_attn.data import cifar as cifar
from vision_attn.data import image_folder as image_folder
from vision_attn.data.augment import Augmenter
from vision_attn.data.config import AugmentConfig
from vision_attn.data.detection_augment import DetectionAugmentConfig
from vision_attn.data.loader import EvalLoader, TrainLoader
from vision_attn.data.sets import MemorySet, StreamedSet
from vision_attn.data.sources import SOURCES, Source, SourceOptions, register_source

if TYPE_CHECKING:
    from vision_attn.data.datamodule import ImageData
    from vision_attn.data.detection import DetectionData

__all__ = [
    "SOURCES",
    "AugmentConfig",
    "Augmenter",
    "DetectionAugmentConfig",
    "DetectionData",
    "EvalLoader",
    "ImageData",
    "MemorySet",
    "Source",
    "SourceOptions",
    "StreamedSet",
    "TrainLoader",
    "register_source",
]


def __getattr__(name: str) -> Any:
    """Lightning takes seconds to import: reading an image for a prediction must not wait for it."""
    if name == "ImageData":
        from vision_attn.data.datamodule import ImageData

        return ImageData
    if name == "DetectionData":
        from vision_attn.data.detection import DetectionData

        return DetectionData
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
