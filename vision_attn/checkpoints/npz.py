"""Arrays of a ``.npz`` file, without executing or inflating anything."""

from __future__ import annotations

import io
import math
import zipfile
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from vision_attn.errors import UserError

_HEADERS = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}


def is_npz(file: Path) -> bool:
    """Whether a zip file holds arrays and nothing else."""
    try:
        with zipfile.ZipFile(file) as archive:
            names = archive.namelist()
    except zipfile.BadZipFile:
        return False
    return bool(names) and all(name.endswith(".npy") for name in names)


def read_npz(file: Path) -> dict[str, Tensor]:
    """The arrays by name.

    Raises:
        UserError: the file is damaged, compressed, or holds objects.
    """
    state = {}
    try:
        with zipfile.ZipFile(file) as archive:
            for member in archive.infolist():
                if member.compress_type != zipfile.ZIP_STORED or member.file_size > file.stat().st_size:
                    raise UserError(f"{file} is compressed; save it again with numpy.savez, or as .safetensors.")
                name = member.filename.removesuffix(".npy")
                state[name] = _array(archive.read(member), f"{file}: {name}")
    except (zipfile.BadZipFile, EOFError, OSError) as error:
        raise UserError(f"{file} is no checkpoint, or a truncated one: {error}") from error
    return state


def _array(content: bytes, what: str) -> Tensor:
    """One ``.npy`` file; its header must agree with its size before anything is allocated."""
    stream = io.BytesIO(content)
    try:
        version = np.lib.format.read_magic(stream)
        shape, fortran, dtype = _HEADERS[version](stream)
    except (ValueError, KeyError, EOFError) as error:
        raise UserError(f"{what} is no array of numpy: {error}") from error
    rest = content[stream.tell() :]
    if dtype.kind not in "fiub" or math.prod(shape) * dtype.itemsize != len(rest):
        raise UserError(f"{what} is no array of {math.prod(shape)} numbers of type {dtype}, as its header says.")
    array = np.frombuffer(rest, dtype=dtype).reshape(shape, order="F" if fortran else "C")
    return torch.from_numpy(np.ascontiguousarray(array.astype(dtype.newbyteorder("="))))
