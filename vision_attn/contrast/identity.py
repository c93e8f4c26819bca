"""Which code made a number: a hash of the package's sources, beside the version, which changes less often."""

from __future__ import annotations

import hashlib
from functools import cache
from pathlib import Path

import vision_attn


@cache
def code_hash() -> str:
    """The first 12 hexadecimal digits of a SHA-256 over all Python files of ``vision_attn``, when it is first asked."""
    root = Path(vision_attn.__file__).parent
    digest = hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        digest.update(path.relative_to(root).as_posix().encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:12]
