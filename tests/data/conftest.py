"""A small set in COCO's layout, painted: what the tests of detection data share."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

COLOURS = {2: (250, 20, 20), 3: (20, 250, 20), 7: (20, 20, 250)}  # of the three categories


class CocoSet:
    """Images with painted rectangles and the dictionary that describes them, to be spoilt before it is written."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.content: dict[str, dict[str, Any]] = {}

    def add(self, split: str, sizes: list[tuple[int, int]], seed: int = 0, most: int = 3) -> dict[str, Any]:
        """Make a split of images of these (height, width); 0 to ``most`` rectangles on each."""
        rng = np.random.default_rng([seed, *map(ord, split)])
        (self.root / split).mkdir(parents=True)
        images, annotations = [], []
        for number, (height, width) in enumerate(sizes):
            pixels = rng.integers(90, 110, (height, width, 3), dtype=np.uint8)
            id = 11 + 3 * number
            for _ in range(rng.integers(0, most + 1) if number else most):
                box_w, box_h = rng.integers(4, width // 2 + 1), rng.integers(4, height // 2 + 1)
                left, top = rng.integers(0, width - box_w + 1), rng.integers(0, height - box_h + 1)
                category = int(rng.choice([2, 3, 7]))
                pixels[top : top + box_h, left : left + box_w] = COLOURS[category]
                annotations.append(
                    {
                        "id": len(annotations) + 5,
                        "image_id": id,
                        "category_id": category,
                        "bbox": [float(left), float(top), float(box_w), float(box_h)],
                        "area": float(box_w * box_h),
                        "iscrowd": 0,
                    }
                )
            images.append({"id": id, "file_name": f"{number}.png", "height": height, "width": width})
            Image.fromarray(pixels).save(self.root / split / f"{number}.png")
        categories = [{"id": id, "name": name} for id, name in ((7, "blue"), (2, "red"), (3, "green"))]
        self.content[split] = {"images": images, "annotations": annotations, "categories": categories}
        return self.content[split]

    def write(self) -> Path:
        """Write the annotation files."""
        (self.root / "annotations").mkdir(exist_ok=True)
        for split, content in self.content.items():
            (self.root / "annotations" / f"instances_{split}.json").write_text(json.dumps(content))
        return self.root

    def options(self, **more: Any) -> dict[str, Any]:
        """Arguments of DetectionData for the splits that there are."""
        self.write()
        files = {f"{split}_json": f"annotations/instances_{split}.json" for split in self.content}
        return {"name": "coco", "root": self.root, **files, **more}


@pytest.fixture
def coco_set(tmp_path: Path) -> CocoSet:
    """An empty set; ``add`` splits to it."""
    return CocoSet(tmp_path / "set")


@pytest.fixture
def small_set(coco_set: CocoSet) -> CocoSet:
    """Seven training and three validation images of several sizes."""
    coco_set.add("train", [(23, 31), (31, 23), (29, 29), (23, 31), (37, 19), (19, 37), (31, 31)])
    coco_set.add("val", [(23, 31), (31, 23), (29, 29)])
    return coco_set
