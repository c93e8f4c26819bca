"""Writes some images of a data set as PNG files, so that there is something to predict.

python scripts/export_images.py --name digits --split test --count 8 --output runs/held_out
"""

from __future__ import annotations

import argparse
from pathlib import Path

from PIL import Image

from vision_attn.data import ImageData


def main() -> None:
    """Saves ``count`` images as OUTPUT/<number>_is_<label>.png and prints the folder."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--name", default="digits", help="digits, cifar10, cifar100 or image_folder")
    parser.add_argument("--root", default=None, help="where the data lie, as --data.root of a recipe")
    parser.add_argument("--split", default="test", choices=["train", "val", "test"])
    parser.add_argument("--count", type=int, default=8)
    parser.add_argument("--output", type=Path, required=True)
    options = parser.parse_args()
    data = ImageData(options.name, root=options.root)
    data.prepare_data()
    split = data.split(options.split)
    if split is None:
        parser.error(f"{options.name} has no {options.split} images")
    options.output.mkdir(parents=True, exist_ok=True)
    for i in range(min(options.count, len(split))):
        sample = split.batch(split.ids.new_tensor([i]))
        label = data.labels[int(sample["label"])].replace(" ", "_")
        picture = Image.fromarray(sample["image"][0].permute(1, 2, 0).numpy())
        picture.save(options.output / f"{i:04d}_is_{label}.png")
    print(options.output)


if __name__ == "__main__":
    main()
