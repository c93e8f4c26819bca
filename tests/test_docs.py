"""The documentation says what the code says."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from vision_attn.attention.flex import no_compiler

ROOT = Path(__file__).resolve().parent.parent


@pytest.mark.skipif(no_compiler("cpu") is not None, reason="the tables speak of a machine with a C++ compiler")
def test_the_tables_of_mechanisms_are_what_the_code_says():
    spec = importlib.util.spec_from_file_location("write_docs", ROOT / "scripts" / "write_docs.py")
    write_docs = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(write_docs)
    text = (ROOT / "docs" / "mechanisms.md").read_text(encoding="utf-8")
    assert write_docs.written(text) == text, "run scripts/write_docs.py"
