"""Fixtures shared by the whole suite."""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import settings
from PIL import Image

# a deadline would test how busy the machine is
settings.register_profile("any machine", deadline=None)
settings.load_profile("any machine")


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


@pytest.fixture(scope="session")
def write_coco():
    """Writes a set in COCO's official layout: ``write_coco(folder, {"train2017": 7, "val2017": 5})``."""

    def write(
        folder: Path, counts: dict[str, int], categories: dict[int, str] | None = None, side: int = 48, seed: int = 0
    ) -> Path:
        """Grey noise with one to four bright blocks, a colour per class; every fifth image shows nothing."""
        categories = categories or {3: "red", 7: "green", 20: "blue"}
        random, ids = np.random.default_rng(seed), sorted(categories)
        (folder / "annotations").mkdir(parents=True, exist_ok=True)
        first = 100
        for name, count in counts.items():
            (folder / name).mkdir(exist_ok=True)
            images, annotations = [], []
            for number in range(first, first + count):
                height, width = side + 8 * (number % 3), side + 16 * (number % 2)
                pixels = random.integers(60, 90, (height, width, 3), dtype=np.uint8)
                for _ in range(0 if number % 5 == 4 else random.integers(1, 5)):
                    w, h = random.integers(side // 6, side // 2, 2).tolist()
                    x, y = int(random.integers(0, width - w)), int(random.integers(0, height - h))
                    kind = int(random.integers(len(ids)))
                    pixels[y : y + h, x : x + w] = 40
                    pixels[y : y + h, x : x + w, kind % 3] = 250 - 60 * (kind // 3 % 4)
                    box = {"bbox": [x, y, w, h], "area": w * h, "category_id": ids[kind], "iscrowd": 0}
                    annotations.append({"id": len(annotations) + 1, "image_id": number, **box})
                Image.fromarray(pixels).save(folder / name / f"{number:06}.png")
                images.append({"id": number, "file_name": f"{number:06}.png", "height": height, "width": width})
            first += count
            listed = [{"id": i, "name": categories[i]} for i in ids]
            tree = {"images": images, "annotations": annotations, "categories": listed}
            (folder / "annotations" / f"instances_{name}.json").write_text(json.dumps(tree))
        return folder

    return write
