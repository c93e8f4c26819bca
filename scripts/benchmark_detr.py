#!/usr/bin/env python
"""A training step of our DETR against transformers' on the same weights: forward, loss and backward, no optimizer.

Both run in turn on the same images and objects, with transformers' default settings (ResNet-50 of timm, PyTorch's fused
attention), but with the auxiliary losses that DETR is trained with. Medians count. ``--profile`` shows where the time
goes.

    python scripts/benchmark_detr.py                 # batch 2, 480 x 640, 20 objects each
    python scripts/benchmark_detr.py --quick         # two rounds of small images
    python scripts/benchmark_detr.py --padded --json detr.json
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable
from typing import Any

os.environ.setdefault("KINETO_LOG_LEVEL", "5")  # the profiler's own messages

import torch
import transformers
from torch import Tensor, nn

import vision_attn as va
from vision_attn.benchmarking import add_conditions, begin, interleaved, matrix_share, synchronizer
from vision_attn.checkpoints import detr_names
from vision_attn.detection.criterion import Criterion

CLASSES = 91


def build(device: str) -> tuple[nn.Module, nn.Module]:
    """Ours and theirs with the same random weights. Ours drops what theirs drops by default."""
    theirs = transformers.DetrForObjectDetection(transformers.DetrConfig(num_labels=CLASSES))
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.add_(0.02 * parameter.std().nan_to_num(1.0) * torch.randn_like(parameter))
    ours = va.create_model("detr_resnet50", num_classes=CLASSES, exact_padding=False, attention={"dropout": 0.0})
    ours.load_state_dict(detr_names.from_transformers(theirs.state_dict()))
    ours.backbone.to(memory_format=torch.channels_last)  # as `vision-attn fit` does
    return ours.to(device), theirs.to(device)


def batch(options: argparse.Namespace) -> tuple[Tensor, Tensor | None, list[dict[str, Tensor]]]:
    """Images, a mask where they are padded, and objects."""
    height, width = (128, 160) if options.quick else (480, 640)
    images = torch.randn(options.batch, 3, height, width, device=options.device)
    mask = None
    if options.padded:
        mask = torch.ones(options.batch, height, width, dtype=torch.bool, device=options.device)
        mask[1::2, :, width * 3 // 4 :] = False
        images *= mask[:, None]
    targets = []
    for _ in range(options.batch):
        centre = 0.3 + 0.4 * torch.rand(options.objects, 2, device=options.device)
        boxes = torch.cat([centre, 0.05 + 0.4 * torch.rand(options.objects, 2, device=options.device)], 1)
        labels = torch.randint(CLASSES, (options.objects,), device=options.device)
        targets.append({"labels": labels, "boxes": boxes})
    return images, mask, targets


def check_equal(ours: nn.Module, theirs: nn.Module, images: Tensor, mask: Tensor | None) -> None:
    """Refuses to time models that compute different things."""
    with torch.no_grad():
        got, expected = ours.eval()(images, mask), theirs.eval()(images, mask)
    torch.testing.assert_close(got["pred_logits"], expected.logits, rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(got["pred_boxes"], expected.pred_boxes, rtol=1e-3, atol=1e-3)


def steps(options: argparse.Namespace) -> dict[str, Callable[[], object]]:
    """A training step of each, by name."""
    ours, theirs = build(options.device)
    images, mask, targets = batch(options)
    check_equal(ours, theirs, images, mask)
    # only now: with it, transformers normalizes the stream between the layers of its decoder, and is another model
    theirs.config.auxiliary_loss = True
    criterion = Criterion(CLASSES)
    labels = [{"class_labels": target["labels"], "boxes": target["boxes"]} for target in targets]

    channels_last = images.contiguous(memory_format=torch.channels_last)

    def step_of_ours() -> None:
        ours.zero_grad(set_to_none=True)
        criterion(ours(channels_last, mask, targets), targets)["loss"].backward()

    def step_of_theirs() -> None:
        theirs.zero_grad(set_to_none=True)
        theirs(images, None if mask is None else mask.long(), labels=labels).loss.backward()

    ours.train()
    theirs.train()
    return {"ours": step_of_ours, "transformers": step_of_theirs}


def where_time_goes(label: str, step: Callable[[], object]) -> None:
    """Prints the operators that cost most."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        step()
    print(f"\n{label}")
    print(profiler.key_averages().table(sort_by="self_cpu_time_total", row_limit=15, max_name_column_width=50))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, default=2, help="images")
    parser.add_argument("--objects", type=int, default=20, help="objects in each image")
    parser.add_argument("--padded", action="store_true", help="every second image ends at three quarters of the width")
    parser.add_argument("--rounds", type=int, default=5, help="timings of which the median counts")
    parser.add_argument("--quick", action="store_true", help="two rounds of small images: a smoke test")
    parser.add_argument("--profile", action="store_true", help="show where the time of each model goes")
    add_conditions(parser)
    options, hardware, clock = begin(parser)
    functions = steps(options)
    seconds = interleaved(
        functions,
        rounds=2 if options.quick else options.rounds,
        clock=time.process_time if options.cpu_time else time.perf_counter,
        synchronize=synchronizer(options.device),
    )
    found: dict[str, Any] = {
        "hardware": hardware if options.device == "cpu" else torch.cuda.get_device_name(),
        "versions": f"torch {torch.__version__}, transformers {transformers.__version__}",
        "clock": clock,
        "batch": options.batch,
        "size": "128 x 160" if options.quick else "480 x 640",
        "padded": options.padded,
        "ms": {label: round(1e3 * s, 1) for label, s in seconds.items()},
        "speed_up": round(seconds["transformers"] / seconds["ours"], 3),
    }
    if options.device == "cpu":
        found["matrix_share"] = round(matrix_share(functions["ours"]), 3)
    if options.profile:
        for label, step in functions.items():
            where_time_goes(label, step)
    print(json.dumps(found, indent=1))
    if options.json:
        options.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
