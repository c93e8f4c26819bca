"""Fixtures shared by the whole suite."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    """The tests' tensors are tiny, and threads that wait for each other on a busy machine cost minutes."""
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _fixed_seed() -> None:
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def data_root() -> Path:
    """The folder with the real data sets; the test is skipped, visibly, where there is none."""
    root = os.environ.get("VISION_ATTN_DATA")
    if not root or not Path(root).is_dir():
        pytest.skip("VISION_ATTN_DATA names no folder: this test needs the real data")
    return Path(root)


@pytest.fixture(scope="session")
def cifar10_root(data_root: Path) -> Path:
    """A folder that holds the official ``cifar-10-batches-py``."""
    if not (data_root / "cifar-10-batches-py" / "batches.meta").is_file():
        pytest.skip(f"{data_root} holds no cifar-10-batches-py")
    return data_root


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    """A headless Chromium (see :mod:`tests.browser`); the test is skipped, visibly, where there is none."""
    spec = importlib.util.spec_from_file_location("va_tests_browser", Path(__file__).with_name("browser.py"))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    with module.start() as started:
        yield started
