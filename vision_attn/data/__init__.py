"""Data sets, augmentation and loaders. Importing this package registers every data set."""

from vision_attn.data import cifar as cifar
from vision_attn.data import image_folder as image_folder
from vision_attn.data.augment import Augmenter
from vision_attn.data.config import AugmentConfig
from vision_attn.data.datamodule import ImageData
from vision_attn.data.loader import EvalLoader, TrainLoader
from vision_attn.data.sets import MemorySet, StreamedSet
from vision_attn.data.sources import SOURCES, Source, SourceOptions, register_source

__all__ = [
    "SOURCES",
    "AugmentConfig",
    "Augmenter",
    "EvalLoader",
    "ImageData",
    "MemorySet",
    "Source",
    "SourceOptions",
    "StreamedSet",
    "TrainLoader",
    "register_source",
]
