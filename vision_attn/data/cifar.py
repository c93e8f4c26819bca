"""CIFAR-10 and CIFAR-100 (Krizhevsky 2009) from the files that everybody has."""

from __future__ import annotations

import hashlib
import io
import pickle
import warnings
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch

from vision_attn.data.sets import MemorySet
from vision_attn.data.sources import Source, SourceOptions, Split, data_root, register_source, resize
from vision_attn.errors import UserError


class _PlainUnpickler(pickle.Unpickler):
    """Opens pickles made of plain containers, strings, numbers and numeric arrays, and nothing else.

    A pickle can name any function to be called with any arguments. Here four names can be called, and three of
    them are stand-ins that check what they are given.
    """

    def find_class(self, module: str, name: str) -> Any:
        if name == "_reconstruct" and module in ("numpy.core.multiarray", "numpy._core.multiarray"):
            return _empty_array
        if module == "numpy" and name == "dtype":
            return _number_type
        if module == "numpy" and name == "ndarray":
            return np.ndarray
        if (module, name) == ("_codecs", "encode"):  # how Python 3 writes bytes for old readers
            return _latin1_bytes
        raise pickle.UnpicklingError(f"it asks for {module}.{name}, which no CIFAR file needs")


def _empty_array(kind: type, shape: tuple[int, ...], code: Any) -> np.ndarray:
    return np.ndarray.__new__(np.ndarray, (0,), "b")  # filled by the array's own state, which comes next


def _number_type(code: Any, *flags: Any) -> np.dtype:
    kind = np.dtype(code if isinstance(code, str) else "V")
    if kind.kind not in "biuf":
        raise pickle.UnpicklingError(f"it holds an array of {kind}")
    return kind


def _latin1_bytes(text: str, encoding: str = "latin1") -> bytes:
    return text.encode("latin1")


def read_pickle(data: bytes) -> Any:
    """Open a pickle without letting it run anything.

    Raises:
        pickle.UnpicklingError: and a few others, when it is damaged or asks for more.
    """
    return _PlainUnpickler(io.BytesIO(data), encoding="latin1").load()


class _Cifar(Source):
    folder: ClassVar[str]
    dataset: ClassVar[str]  # the class in torchvision.datasets that knows addresses and checksums
    label_key: ClassVar[str]
    names: ClassVar[str]
    val_images: ClassVar[int] = 5000

    def __init__(self, options: SourceOptions) -> None:
        super().__init__(options)
        self.root = data_root(options.root)
        self.size = options.img_size or (32, 32)
        self.labels = self.names.split()
        self._foreign: list[str] = []  # files that are not the official ones, until they were warned about
        self._loaded: dict[bool, tuple[torch.Tensor, torch.Tensor]] = {}
        if self._missing() and not options.download:
            raise self._how_to_get()
        meta = self._torchvision().meta
        if (self.root / self.folder / meta["filename"]).is_file():
            stored = self._read(meta["filename"], None).get(meta["key"])
            if not isinstance(stored, list) or not all(isinstance(name, str) for name in stored):
                raise self._damaged(meta["filename"], f"it lacks {meta['key']}")
            self.labels = stored

    def _torchvision(self) -> Any:
        from torchvision import datasets

        return getattr(datasets, self.dataset)

    def _missing(self) -> list[str]:
        known = self._torchvision()
        names = [*(name for name, _ in known.train_list + known.test_list), known.meta["filename"]]
        return [name for name in names if not (self.root / self.folder / name).is_file()]

    def _how_to_get(self, reason: str = "") -> UserError:
        where = self.root / self.folder
        missing = self._missing()
        what = f"lacks {', '.join(missing)}" if where.is_dir() else "does not exist"
        return UserError(
            f"{self.dataset} is not here: {where} {what}{reason}. Unpack {self._torchvision().url} into {self.root}, "
            "or name the folder that holds it by --data.root or $VISION_ATTN_DATA."
        )

    def prepare(self) -> None:
        if not self._missing():
            return
        if not self.options.download:
            raise self._how_to_get()
        from torchvision.datasets.utils import download_and_extract_archive

        known = self._torchvision()
        try:
            self.root.mkdir(parents=True, exist_ok=True)
            download_and_extract_archive(known.url, str(self.root), filename=known.filename, md5=known.tgz_md5)
        except (OSError, RuntimeError, EOFError) as error:
            raise self._how_to_get(f", and downloading it failed ({error})") from error
        if self._missing():
            raise self._how_to_get(" even after downloading")

    def _damaged(self, name: str, reason: str) -> UserError:
        path = self.root / self.folder / name
        return UserError(
            f"The {self.dataset} file {path} is damaged: {reason}. Delete it and unpack {self._torchvision().url} into "
            f"{self.root} again."
        )

    def _read(self, name: str, md5: str | None) -> dict[str, Any]:
        """The dictionary in a file. With an ``md5``, a file that is not the official one is noted."""
        path = Path(self.root / self.folder / name)
        if not path.is_file():
            raise self._how_to_get()
        data = path.read_bytes()
        try:
            content = read_pickle(data)
        except Exception as error:  # a damaged pickle can fail in every way there is
            raise self._damaged(name, f"{len(data):,} bytes, {str(error) or type(error).__name__}") from error
        if not isinstance(content, dict):
            raise self._damaged(name, f"it holds a {type(content).__name__} instead of a dictionary")
        if md5 and hashlib.md5(data, usedforsecurity=False).hexdigest() != md5:
            if len(data) == _OFFICIAL_BYTES.get((self.folder, name)):
                raise self._damaged(name, "it has the official file's length but not its MD5 checksum")
            self._foreign.append(name)
        return content

    def _split_file(self, name: str, md5: str) -> tuple[torch.Tensor, torch.Tensor]:
        """Images (n, 3, 32, 32) uint8 and labels (n,) of one file."""
        content = self._read(name, md5)
        pixels, labels = content.get("data"), content.get(self.label_key)
        if not isinstance(pixels, np.ndarray) or pixels.dtype != np.uint8 or pixels.shape[1:] != (3072,):
            raise self._damaged(name, "its 'data' is not an (n, 3072) array of bytes")
        if not isinstance(labels, list) or len(labels) != len(pixels):
            raise self._damaged(name, f"it has {len(pixels)} images but not as many {self.label_key!r}")
        if not all(isinstance(label, int) and 0 <= label < len(self.labels) for label in labels):
            raise self._damaged(name, f"a label is not one of 0...{len(self.labels) - 1}")
        return torch.from_numpy(pixels).view(-1, 3, 32, 32), torch.tensor(labels, dtype=torch.int64)

    def _files(self, test: bool) -> tuple[torch.Tensor, torch.Tensor]:
        """Images and labels of all training files or of the test file."""
        if test not in self._loaded:
            known = self._torchvision()
            parts = [self._split_file(*entry) for entry in (known.test_list if test else known.train_list)]
            if self._foreign:
                warnings.warn(
                    f"{', '.join(self._foreign)} in {self.root / self.folder}: not the official {self.dataset} files "
                    f"(another MD5 checksum; {sum(len(part[1]) for part in parts):,} images). Results are not "
                    "comparable with published ones.",
                    stacklevel=2,
                )
                self._foreign = []
            self._loaded[test] = (torch.cat([part[0] for part in parts]), torch.cat([part[1] for part in parts]))
        return self._loaded[test]

    def load(self, split: Split) -> MemorySet | None:
        images, labels = self._files(split == "test")
        ids = torch.arange(len(labels))
        if split != "test":
            share = self.options.val_fraction
            # a foreign copy may have fewer images than the official 50,000: the same tenth of it
            count = round(len(labels) * (0.1 if share is None else share))
            rows = slice(len(labels) - count, None) if split == "val" else slice(0, len(labels) - count)
            images, labels, ids = images[rows], labels[rows], ids[rows]  # views: nothing is held twice
            if len(labels) == 0:
                return None
        return MemorySet(resize(images, self.options.img_size), labels, ids)


# only where known: a file of this length that has another checksum was damaged, one of another length is foreign
_OFFICIAL_BYTES = {
    ("cifar-10-batches-py", "data_batch_1"): 31035704,
    ("cifar-10-batches-py", "data_batch_2"): 31035320,
    ("cifar-10-batches-py", "data_batch_3"): 31035999,
    ("cifar-10-batches-py", "data_batch_4"): 31035696,
    ("cifar-10-batches-py", "data_batch_5"): 31035623,
    ("cifar-10-batches-py", "test_batch"): 31035526,
}


@register_source("cifar10")
class Cifar10(_Cifar):
    """60,000 photographs of 32x32 pixels in 10 classes.

    Test is the official test set. Validation is the last tenth of the training images (5,000 of the official
    50,000), unless ``val_fraction`` says otherwise.
    """

    folder, dataset, label_key = "cifar-10-batches-py", "CIFAR10", "labels"
    mean, std = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)
    names = "airplane automobile bird cat deer dog frog horse ship truck"


@register_source("cifar100")
class Cifar100(_Cifar):
    """60,000 photographs of 32x32 pixels in 100 classes; split as :class:`Cifar10`."""

    folder, dataset, label_key = "cifar-100-python", "CIFAR100", "fine_labels"
    mean, std = (0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762)
    names = (
        "apple aquarium_fish baby bear beaver bed bee beetle bicycle bottle bowl boy bridge bus butterfly camel can "
        "castle caterpillar cattle chair chimpanzee clock cloud cockroach couch crab crocodile cup dinosaur dolphin "
        "elephant flatfish forest fox girl hamster house kangaroo keyboard lamp lawn_mower leopard lion lizard lobster "
        "man maple_tree motorcycle mountain mouse mushroom oak_tree orange orchid otter palm_tree pear pickup_truck "
        "pine_tree plain plate poppy porcupine possum rabbit raccoon ray road rocket rose sea seal shark shrew skunk "
        "skyscraper snail snake spider squirrel streetcar sunflower sweet_pepper table tank telephone television tiger "
        "tractor train trout tulip turtle wardrobe whale willow_tree wolf woman worm"
    )
