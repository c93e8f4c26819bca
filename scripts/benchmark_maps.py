"""How long attention maps take, against the forward pass that they come from.

    python scripts/benchmark_maps.py [--rounds 7] [--threads 2] [--output FILE]

For ``vit_base_patch16_224`` the maps of one layer for 8 images, for ``detr_resnet50`` those of the decoder's last
cross-attention for one image of 480 × 640. Forward pass and maps take turns, and who begins changes from round to
round; the ratio is that of the medians. Weights are random: they do not change how long anything takes.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

import vision_attn as va

CASES: dict[str, dict[str, Any]] = {
    "vit_base_patch16_224": {"shape": (8, 3, 224, 224), "layers": ("blocks.0.attn", "blocks.11.attn"), "limit": 1.5},
    "detr_resnet50": {"shape": (1, 3, 480, 640), "layers": ("decoder.layers.5.cross_attn",), "limit": 1.3},
}


def seconds(run: Callable[[], object]) -> float:
    """Of one call."""
    begin = time.perf_counter()
    run()
    return time.perf_counter() - begin


def measure(name: str, rounds: int) -> list[dict[str, Any]]:
    """Medians of the forward pass and of the maps of each layer."""
    case = CASES[name]
    torch.manual_seed(0)
    model = va.create_model(name).eval()
    images = torch.randn(case["shape"])

    def forward() -> None:
        with torch.no_grad():
            model(images)

    calls: dict[str, Callable[[], object]] = {"forward": forward}
    for layer in case["layers"]:
        calls[layer] = lambda layer=layer: va.attention_maps(model, images, layers=[layer])
    taken: dict[str, list[float]] = {call: [] for call in calls}
    for call in calls.values():
        call()
    for turn in range(rounds):
        names = list(calls)
        for call in names[turn % len(names) :] + names[: turn % len(names)]:
            taken[call].append(seconds(calls[call]))
    median = {call: statistics.median(times) for call, times in taken.items()}
    return [
        {
            "model": name,
            "images": case["shape"][0],
            "layer": layer,
            "forward": median["forward"],
            "maps": median[layer],
            "ratio": median[layer] / median["forward"],
            "limit": case["limit"],
        }
        for layer in case["layers"]
    ]


def main() -> None:
    """Measures, prints a table and writes JSON where asked to."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--output")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    rows = [row for name in CASES for row in measure(name, options.rounds)]
    for row in rows:
        print(
            f"{row['model']:<22} {row['layer']:<28} forward {row['forward']:.3f} s, maps {row['maps']:.3f} s: "
            f"{row['ratio']:.2f}× (at most {row['limit']}×)"
        )
    if options.output:
        with open(options.output, "w", encoding="utf-8") as file:
            json.dump(rows, file, indent=2)


if __name__ == "__main__":
    main()
