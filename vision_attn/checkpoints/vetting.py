"""Looks through a file of ``torch.save`` before ``torch.load`` may touch it.

``weights_only=True`` keeps a file from running code, but not from asking for memory: a storage of 10 GB in a file of
one kilobyte is allocated before anything is read into it. So the pickle is walked through first with stand-ins in the
place of storages and tensors: every size it claims is held against the size of the file, and every name it asks for
against the few that checkpoints need.
"""

from __future__ import annotations

import io
import math
import mmap
import pickle
import zipfile
from collections import OrderedDict
from collections.abc import Callable, Mapping
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

import torch

from vision_attn.errors import UserError

_MAGIC = 0x1950A86A20F9469CFC6C  # how a file of torch.save before 1.6 begins
# What torch.load(weights_only=True) understands. The rest of the language only helps to write larger bombs.
_KNOWN = {
    *(pickle.PROTO + pickle.STOP + pickle.MARK + pickle.GLOBAL + pickle.REDUCE + pickle.BUILD + pickle.BINPERSID),
    *(pickle.NEWOBJ + pickle.APPEND + pickle.APPENDS + pickle.SETITEM + pickle.SETITEMS),
    *(pickle.TUPLE + pickle.TUPLE1 + pickle.TUPLE2 + pickle.TUPLE3 + pickle.NONE + pickle.NEWFALSE + pickle.NEWTRUE),
    *(pickle.EMPTY_TUPLE + pickle.EMPTY_LIST + pickle.EMPTY_DICT + pickle.EMPTY_SET),
    *(pickle.BININT + pickle.BININT1 + pickle.BININT2 + pickle.BINFLOAT + pickle.LONG1),
    *(pickle.BINUNICODE + pickle.SHORT_BINSTRING),
    *(pickle.BINGET + pickle.LONG_BINGET + pickle.BINPUT + pickle.LONG_BINPUT),
}
_STORAGES = {
    **dict.fromkeys(("BoolStorage", "ByteStorage", "CharStorage", "UntypedStorage"), 1),
    **dict.fromkeys(("ShortStorage", "HalfStorage", "BFloat16Storage"), 2),
    **dict.fromkeys(("IntStorage", "FloatStorage"), 4),
    **dict.fromkeys(("LongStorage", "DoubleStorage", "ComplexFloatStorage"), 8),
    "ComplexDoubleStorage": 16,
}
"""Bytes of one number, by the names that files use."""


class _Refused(Exception):
    """What is wrong, to be put after the name of the file."""


class _Storage(NamedTuple):
    """A stand-in for the numbers of one or more tensors."""

    nbytes: int
    itemsize: int


class _Tensor(NamedTuple):
    """A stand-in for a tensor whose claims were checked."""

    shape: tuple[int, ...]


def vet(file: Path) -> None:
    """Refuses a file of ``torch.save`` that is damaged, wants something imported, or claims more than it holds.

    Raises:
        UserError: in one line, what is wrong.
    """
    try:
        with open(file, "rb") as stream:
            zipped = stream.read(2) == b"PK"
        if zipped:
            _vet_zip(file)
        else:
            _vet_pickles(file)
    except _Refused as error:
        raise UserError(f"{file} {error}") from None
    except (OSError, MemoryError) as error:
        raise UserError(f"{file} cannot be read: {error}") from error
    # the parsers of Python fail in every way there is on bytes that somebody made up
    except Exception as error:
        raise UserError(f"{file} is no checkpoint, or a truncated one: {_reason(error)}") from error


def _reason(error: Exception) -> str:
    first = str(error).splitlines()[0] if str(error) else ""
    return first if isinstance(error, zipfile.BadZipFile) and first else "its pickle is damaged or of another kind"


def _vet_zip(file: Path) -> None:
    """The format since torch 1.6: ``NAME/data.pkl``, and one record per storage in ``NAME/data/``."""
    size = file.stat().st_size
    with zipfile.ZipFile(file) as archive:
        members = {member.filename: member for member in archive.infolist()}
        if len(members) < len(archive.infolist()):
            raise _Refused("holds two records of one name: not a file of torch.save.")
        for name, member in members.items():
            if ".." in PurePosixPath(name.replace("\\", "/")).parts or name.startswith(("/", "\\")) or ":" in name:
                raise _Refused(f"holds a record called {name!r}, which points outside of it, so it was not opened.")
            if member.compress_type != zipfile.ZIP_STORED:
                raise _Refused(f"holds compressed data ({name}), which torch.save never writes, so it was not opened.")
        if sum(member.file_size for member in members.values()) > size:
            raise _Refused("claims to hold more than its own size, so it was not opened.")
        pickles = [name for name in members if PurePosixPath(name).name == "data.pkl"]
        if any(PurePosixPath(name).name == "constants.pkl" for name in members):
            raise _Refused("is a TorchScript program, which would be run: save model.state_dict() instead.")
        if len(pickles) != 1:
            raise _Refused("is a zip file, but not one of torch.save: not a checkpoint.")
        prefix = pickles[0].removesuffix("data.pkl")
        records = {name.removeprefix(f"{prefix}data/"): member.file_size for name, member in members.items()}
        content = archive.read(pickles[0])
    Inspector(io.BytesIO(content), size, records).load()


def _vet_pickles(file: Path) -> None:
    """The format before torch 1.6: five pickles after one another, then the storages."""
    size = file.stat().st_size
    with open(file, "rb") as stream, mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as view:
        try:
            magic = Inspector(view, size, {}).load()
        except KeyError:  # an instruction that torch does not write
            magic = None
        if magic != _MAGIC:
            raise _Refused(
                "is a Python pickle but not one of torch.save, and a pickle could run code, so it was not opened."
            )
        Inspector(view, size, {}).load()  # version of the format
        Inspector(view, size, {}).load()  # byte order and the like
        content = Inspector(view, size, None)
        content.load()
        Inspector(view, size, {}).load()  # keys of the storages, in their order
        needed = content.claimed + 8 * len(content.storages)
        if needed > size - view.tell():
            raise _Refused(f"is truncated: its tensors need {needed:,} bytes, and {size - view.tell():,} are there.")


class Inspector(pickle._Unpickler):  # type: ignore[misc]  # the one in Python: its instructions can be chosen
    """An unpickler that makes no object but plain containers and stand-ins.

    Args:
        stream: with ``read`` that returns no more than there is.
        size: of the whole file in bytes.
        records: bytes per storage where they are known; None where storages follow the pickle.
    """

    dispatch = {code: load for code, load in pickle._Unpickler.dispatch.items() if code in _KNOWN}  # type: ignore[attr-defined]  # noqa: RUF012

    def __init__(self, stream: Any, size: int, records: Mapping[str, int] | None) -> None:
        super().__init__(stream, encoding="latin1")
        self.size, self.records = size, records
        self.left = size
        self.storages: dict[Any, int] = {}
        self.claimed = 0

    def find_class(self, module: str, name: str) -> Any:
        """A stand-in for one of the names that checkpoints need.

        Raises:
            _Refused: any other name.
        """
        module = {"__builtin__": "builtins"}.get(module, module)
        if module in ("torch", "torch.storage") and name in _STORAGES:
            return _STORAGES[name]
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        stand_in = self._stand_ins().get(f"{module}.{name}")
        if stand_in is None:
            full = f"{module}.{name}".removeprefix("builtins.")
            raise _Refused(
                f"needs {full} to be imported, which could run code, so it was not opened. "
                f"Save its tensors again where you trust it: torch.save(model.state_dict(), …)."
            )
        return stand_in

    def _stand_ins(self) -> dict[str, Callable[..., Any]]:
        return {
            "torch._utils._rebuild_tensor": self._tensor,
            "torch._utils._rebuild_tensor_v2": self._tensor,
            "torch._utils._rebuild_tensor_v3": self._tensor_of_type,
            "torch._utils._rebuild_parameter": lambda data, *rest: data,
            "torch._utils._rebuild_parameter_with_state": lambda data, *rest: data,
            "torch._tensor._rebuild_from_type_v2": lambda rebuild, kind, args, state: rebuild(*args),
            "torch.Tensor": lambda *args: self._never("torch.Tensor"),  # named as a type, never called
            "torch.nn.parameter.Parameter": lambda *args: self._never("Parameter"),
            "torch.Size": lambda items=(): tuple(self._spend(items)),
            "torch.device": lambda *args: "device",
            "torch.serialization._get_layout": lambda name: name,
            "collections.OrderedDict": lambda items=(): OrderedDict(self._spend(items)),
            "collections.Counter": lambda items=(): dict(self._spend(items)),
            "builtins.set": lambda items=(): set(self._spend(items)),
            "builtins.complex": lambda *args: 0j,
            "builtins.bytearray": lambda text="", *codec: self._text(text),
            "_codecs.encode": lambda text, *codec: self._text(text),
        }

    def _spend(self, items: Any) -> Any:
        """``items``, if all that was made so far fits into the size of the file: one list can be used many times."""
        self.left -= 2 * len(items)
        if self.left < 0:
            raise _Refused("unfolds to more than its own size, so it was not opened.")
        return items

    def _text(self, text: Any) -> bytes:
        if not isinstance(text, str | bytes):  # bytearray(10**10)
            raise _Refused(f"asks for an array of {text!r} bytes that it does not hold, so it was not opened.")
        self._spend(text)
        return b""

    @staticmethod
    def _never(name: str) -> None:
        raise _Refused(f"makes a {name} without saying what is in it: not a checkpoint that can be loaded.")

    def persistent_load(self, pid: Any) -> _Storage:
        """A stand-in for a storage, held against what the file has for it.

        Raises:
            _Refused: it claims more.
        """
        kind, itemsize, key, _, numel, *view = pid
        if kind not in ("storage", b"storage") or type(itemsize) is not int or not _whole(numel):
            raise _Refused("refers to something that is no storage of numbers: not a checkpoint.")
        nbytes = numel * itemsize
        if self.records is not None:
            held = self.records.get(str(key))
            if held is None:
                raise _Refused(f"is truncated: the numbers {key!r} are missing.")
            if nbytes > held:
                raise _Refused(f"claims {nbytes:,} bytes for the numbers {key!r}, and holds {held:,}: not opened.")
        else:
            self.claimed += max(0, nbytes - self.storages.get(key, 0))
            self.storages[key] = max(nbytes, self.storages.get(key, 0))
            if self.claimed > self.size:
                raise _Refused(f"claims {nbytes:,} bytes for the numbers {key!r}, more than its own size: not opened.")
        if view and view[0] is not None:
            _, offset, count = view[0]
            if not (_whole(offset) and _whole(count)) or offset + count > numel:
                raise _Refused(f"has a view that reaches beyond the numbers {key!r}: not opened.")
            nbytes = count * itemsize
        return _Storage(nbytes, itemsize)

    def _tensor(self, storage: Any, offset: Any, shape: Any, stride: Any, *rest: Any) -> _Tensor:
        if not isinstance(storage, _Storage):
            raise _Refused("has a tensor without numbers: not a checkpoint that can be loaded.")
        return self._checked(storage, storage.itemsize, offset, shape, stride)

    def _tensor_of_type(
        self, storage: Any, offset: Any, shape: Any, stride: Any, grad: Any, hooks: Any, dtype: Any, *rest: Any
    ) -> _Tensor:
        if not isinstance(storage, _Storage) or not isinstance(dtype, torch.dtype):
            raise _Refused("has a tensor without numbers: not a checkpoint that can be loaded.")
        return self._checked(storage, dtype.itemsize, offset, shape, stride)

    def _checked(self, storage: _Storage, itemsize: int, offset: Any, shape: Any, stride: Any) -> _Tensor:
        """A stand-in for a tensor that lies within its storage."""
        if len(shape) != len(stride) or not all(map(_whole, (offset, *shape, *stride))):
            raise _Refused(f"has a tensor of the impossible shape {_short(shape)}: not opened.")
        numel = math.prod(shape)
        last = offset + sum((n - 1) * step for n, step in zip(shape, stride, strict=True)) + 1 if numel else 0
        # One number repeated along an axis is legitimate while it is small, and a bomb once somebody copies it.
        if numel * itemsize > max(storage.nbytes, self.size):
            raise _Refused(
                f"has a tensor of shape {_short(shape)} that claims {numel * itemsize:,} bytes, "
                f"and holds {storage.nbytes:,} for it: not opened."
            )
        if last * itemsize > storage.nbytes:
            raise _Refused(f"has a tensor of shape {_short(shape)} that reaches beyond its {storage.nbytes:,} bytes.")
        return _Tensor(tuple(shape))


def _whole(number: Any) -> bool:
    return type(number) is int and 0 <= number < 2**63


def _short(shape: Any) -> str:
    text = str(list(shape[:8]))
    return text if len(text) < 100 else f"{text[:100]}…"
