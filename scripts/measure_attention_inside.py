"""How much of a detector's cross-attention falls inside the objects it finds, layer by layer.

    python scripts/measure_attention_inside.py --ckpt_path runs/digit_scenes_dn_detr/0 [--split val] [--images 200]

Of the correct detections (surer than 0.5, right class, overlap of 0.5 or more): the share whose query has more than
half of its attention inside the ground-truth box, enlarged by half. Beside it what looking everywhere alike would give.
"""

from __future__ import annotations

import argparse
from types import SimpleNamespace
from typing import Any

from torch import Tensor

from vision_attn.checkpoints import load_model
from vision_attn.cli.evaluate import augmenter_of, take_size
from vision_attn.data.detection import DetectionData
from vision_attn.data.sources import Split
from vision_attn.explain.inside import attention_inside


def first_images(
    model: Any, name: str, root: str | None, split: Split, count: int
) -> tuple[list[Tensor], list[dict[str, Tensor]]]:
    """The first images of a split without padding, as the model was trained to see them, and their targets."""
    size = SimpleNamespace(img_size=None, max_size=1333, resize=None)
    take_size(size, model.config["preprocess"], "detection")
    data = DetectionData(name=name, root=root, **vars(size))
    data.augmenter = augmenter_of(model, data)
    data.prepare_data()
    batch = data.sample_batch(count, augmented=False, split=split)
    sizes = [target["size"].tolist() for target in batch["targets"]]
    return [image[:, :h, :w] for image, (h, w) in zip(batch["image"], sizes, strict=True)], batch["targets"]


def main() -> None:
    """Measures and prints a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ckpt_path", required=True)
    parser.add_argument("--name", default="digit_scenes")
    parser.add_argument("--root")
    parser.add_argument("--split", default="val", choices=["train", "val", "test"])
    parser.add_argument("--images", type=int, default=200)
    options = parser.parse_args()
    model: Any = load_model(options.ckpt_path)
    images, targets = first_images(model, options.name, options.root, options.split, options.images)
    found = attention_inside(model, images, targets)
    print(
        f"{len(found.uniform)} correct detections in {len(images)} images; everywhere alike: {found.uniform.mean():.2f}"
    )
    for name, mass in found.mass.items():
        print(f"{name:<30} mean {mass.mean():.2f}, more than half inside: {found.share(name):.1%}")


if __name__ == "__main__":
    main()
