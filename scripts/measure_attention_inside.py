"""How much of a detector's cross-attention falls inside the objects it finds, layer by layer.

    python scripts/measure_attention_inside.py --ckpt_path runs/digit_scenes_dn_detr/0 [--split val] [--images 200]

Of the correct detections (surer than 0.5, right class, overlap of 0.5 or more): the share whose query has more than
half of its attention inside the ground-truth box, enlarged by half. Beside it what looking everywhere alike would give.
"""

from __future__ import annotations

import argparse

from vision_attn.checkpoints import load_model
from vision_attn.data.detection import DetectionData
from vision_attn.explain.inside import attention_inside


def main() -> None:
    """Measures and prints a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ckpt_path", required=True)
    parser.add_argument("--name", default="digit_scenes")
    parser.add_argument("--root")
    parser.add_argument("--split", default="val")
    parser.add_argument("--images", type=int, default=200)
    options = parser.parse_args()
    data = DetectionData(name=options.name, root=options.root, eval_batch_size=options.images)
    data.prepare_data()
    data.setup("test" if options.split == "test" else "fit")
    loader = data.test_dataloader() if options.split == "test" else data.val_dataloader()
    batch = data.on_after_batch_transfer(next(iter(loader)))
    targets = batch["targets"]
    sizes = [target["size"].tolist() for target in targets]
    images = [image[:, :h, :w] for image, (h, w) in zip(batch["image"], sizes, strict=True)]
    found = attention_inside(load_model(options.ckpt_path), images, targets)
    print(
        f"{len(found.uniform)} correct detections in {len(images)} images; everywhere alike: {found.uniform.mean():.2f}"
    )
    for name, mass in found.mass.items():
        print(f"{name:<30} mean {mass.mean():.2f}, more than half inside: {found.share(name):.1%}")


if __name__ == "__main__":
    main()
