"""Writing files so that a crash, a kill or a full disk leaves the previous file whole."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import tempfile
from collections.abc import Callable
from pathlib import Path

from vision_attn.errors import UserError

# torch and safetensors turn a failed write into exceptions of their own, which carry the reason in words only
_FULL_DISK_WORDS = ("No space left on device", "StorageFull", "failed writing", "write failed", "unexpected pos")


def atomic_write(path: str | Path, writer: Callable[[Path], object]) -> Path:
    """Write ``path`` completely or not at all.

    ``writer`` fills a temporary file in the same folder; it is flushed to the disk and takes the place of
    ``path`` in one step (``os.replace``). Whatever goes wrong before that step, the previous file stays as it was
    and the temporary one is removed.

    Args:
        path: the file to write; its folder is made when missing.
        writer: called with the temporary path; it must create or fill that file.

    Returns:
        ``path`` as a :class:`~pathlib.Path`.

    Raises:
        UserError: the disk (or the user's quota) is full.
    """
    path = Path(path)
    if path.exists() and not path.is_file() and not path.is_dir():
        writer(path)  # a pipe or a device, as /dev/stdout: nothing in it could be kept, and it must not be replaced
        return path
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".tmp")
        os.close(handle)
        temporary = Path(name)
    except OSError as error:
        raise _explain(error, path) from error
    try:
        writer(temporary)
        _flush(temporary)
        os.chmod(temporary, 0o666 & ~_umask())  # mkstemp makes private files; a checkpoint is an ordinary one
        os.replace(temporary, path)
    except BaseException as error:
        with contextlib.suppress(OSError):
            temporary.unlink()
        if isinstance(error, Exception):
            raise _explain(error, path) from error
        raise
    _flush(path.parent)
    return path


def atomic_write_text(path: str | Path, text: str) -> Path:
    """:func:`atomic_write` for a text file in UTF-8."""
    return atomic_write(path, lambda temporary: temporary.write_text(text, encoding="utf-8"))


def remove_leftovers(path: str | Path) -> list[Path]:
    """Remove what writers of ``path`` that were killed (``kill -9``, a power cut) left beside it.

    Call it where nobody is writing ``path``: the temporary file of a writer at work looks the same.

    Args:
        path: as for :func:`atomic_write`; it is not touched itself.

    Returns:
        The files removed.
    """
    path = Path(path)
    pattern = re.compile(rf"\.{re.escape(path.name)}\.[a-z0-9_]{{8}}\.tmp")  # as mkstemp names them
    found = [f for f in path.parent.iterdir() if pattern.fullmatch(f.name)] if path.parent.is_dir() else []
    for file in found:
        file.unlink(missing_ok=True)
    return found


def is_full_disk(error: BaseException) -> bool:
    """Whether ``error`` (of Python, torch or safetensors) means that no space is left."""
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return True
    return any(words in str(error) for words in _FULL_DISK_WORDS)


def _explain(error: Exception, path: Path) -> Exception:
    """The error to raise for ``error``: a message for a full disk, the error itself otherwise."""
    if not is_full_disk(error):
        return error
    kept = "the previous file is intact" if path.exists() else "nothing was written"
    return UserError(f"the disk is full: could not save {path} ({kept}). Free some space and try again.")


def _flush(path: Path) -> None:
    """fsync a file, or a folder where the system knows that (so that a rename survives a power cut)."""
    try:
        handle = os.open(path, os.O_RDONLY)
    except OSError:
        return
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EIO):
            raise
    finally:
        os.close(handle)


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
