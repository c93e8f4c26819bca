"""Studies made up from curves, for tests of statistics and report: nothing is trained."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from vision_attn.contrast.config import ContrastConfig, ModelChoice
from vision_attn.contrast.results import Cell, Result, Study

CLASSES = 10


def make_curve(
    rng: np.random.Generator, *, floor: float = 0.02, speed: float = 4.0, gap: float = 0.5, noise: float = 0.03
) -> list[dict[str, float]]:
    """A trajectory whose gap in loss grows as the training loss falls, up to ``gap`` ± ``noise``."""
    rows = []
    level = gap + noise * rng.standard_normal()
    for i in range(1, 13):
        t = (i / 12) ** 2
        train = floor + (np.log(CLASSES) - floor) * np.exp(-speed * 6 * t)
        share = 1 - train / np.log(CLASSES)
        val = train + max(0.0, level) * share
        acc = float(np.clip(1.02 * np.exp(-train), 0.1, 1))
        rows.append(
            {
                "step": float(round(400 * t) or 1),
                "train_loss": float(train),
                "train_acc": acc,
                "val_loss": float(val),
                "val_acc": float(np.clip(acc - 0.4 * level * share, 0.05, 1)),
            }
        )
    return rows


def make_result(cell: Cell, curve: list[dict[str, float]], *, error: float, ece: float = 0.05) -> Result:
    """A finished training with the values that belong to a trajectory."""
    last, lowest = curve[-1], min(curve, key=lambda row: row["val_loss"])
    test_acc, test_loss = 1 - error, last["val_loss"] * 1.02
    values = {
        "train_acc": last["train_acc"],
        "train_loss": last["train_loss"],
        "val_acc": last["val_acc"],
        "val_loss": last["val_loss"],
        "test_acc": test_acc,
        "test_loss": test_loss,
        "gap_acc": last["train_acc"] - test_acc,
        "gap_loss": test_loss - last["train_loss"],
        "turn_step": lowest["step"],
        "turn_loss": lowest["val_loss"],
        "turn_rise": last["val_loss"] - lowest["val_loss"],
        "ece": ece,
        "params": 60_000.0,
        "macs": 900_000.0,
        "steps": 400.0,
        "seconds": 3.1,
    }
    if cell.noise:
        values["memorised"] = min(1.0, 0.6 + cell.noise * (0.5 if cell.role else 0.8))
    return Result(cell, "done", "", values, curve)


def make_cell(model: str, role: int, size: float, arm: str, noise: float, seed: int, images: int = 0) -> Cell:
    """A cell of the grid, of 1,257 training images."""
    name = f"{model}-{100 * size:g}pct-{arm}-n{100 * noise:g}-s{seed}"
    return Cell(name, model, role, size, images or round(1257 * size), arm, noise, seed, 3e-3, 400)


def make_study(
    folder: Path,
    *,
    sizes: tuple[float, ...] = (0.05, 0.25, 1.0),
    arms: tuple[str, ...] = ("none", "full"),
    noises: tuple[float, ...] = (0.0, 0.2, 0.4),
    seeds: int = 3,
    gaps: tuple[float, ...] = (1.2, 0.5),
    floors: tuple[float, ...] = (0.02, 0.01),
    models: tuple[str, ...] = ("vit", "resnet"),
    failed: tuple[str, ...] = (),
    noise_sd: float = 0.03,
    draw: int = 5,
) -> Study:
    """A whole study; ``failed`` names cells that did not end well, the rest of the arguments are per model."""
    rng = np.random.default_rng(draw)
    cells, results = [], []
    for size in sizes:
        for arm in arms:
            for noise in noises if arm == arms[0] and size == sizes[-1] else (0.0,):
                for role, model in enumerate(models):
                    for seed in range(seeds + 2 if size <= 0.05 and seeds > 1 else seeds):
                        cell = make_cell(model, role, size, arm, noise, seed)
                        cells.append(cell)
                        curve = make_curve(rng, gap=gaps[role] * (0.5 + noise), floor=floors[role], noise=noise_sd)
                        if cell.id in failed:
                            results.append(Result(cell, "failed", "the loss became NaN at step 37", {}, curve[:2]))
                            continue
                        error = 0.02 + (0.9 if role == 0 else 0.5) * cell.images**-0.5 + 0.2 * noise
                        error *= 1 + 0.05 * rng.standard_normal()
                        results.append(
                            make_result(cell, curve, error=error, ece=0.04 + 0.02 * role + 0.01 * rng.random())
                        )
    config = ContrastConfig(
        models={model: ModelChoice(f"{model}_zoo") for model in models}, sizes=list(sizes), arms=list(arms), seeds=seeds
    )
    return Study(folder, config.tree(), make_facts(models), cells, results, LOOKS, RATES)


def make_facts(models: tuple[str, ...]) -> dict[str, Any]:
    """What ``study.json`` says beside configuration and cells."""
    described = [
        {"model": m, "name": f"{m}_zoo", "args": {}, "params": 58_522 + 1000 * i, "macs": 943_584, "kind": kind}
        for i, (m, kind) in enumerate(zip(models, ("attention", "cnn", "cnn"), strict=False))
    ]
    return {
        "config_hash": "a0dc078c05829647",
        "data_hash": "8bf134adbab567f3",
        "version": "0.1.0",
        "command": "vision-attn contrast --config recipes/contrast_digits.yaml",
        "started": "2026-01-02T03:04:05Z",
        "machine": {"cpu": "a processor", "cores": 2, "threads": 1, "device": "cpu", "torch": "2.9", "python": "3.11"},
        "data": {"name": "digits", "classes": CLASSES, "train": 1257, "val": 270, "test": 270, "img_size": [8, 8]},
        "models": described,
        "match": {"tolerance": 0.25, "params_ratio": 1.05, "macs_ratio": 1.16},
    }


LOOKS: dict[str, Any] = {
    "vit": {
        "kind": "attention",
        "unit": "pixels",
        "images": 32,
        "attention_distance": {"blocks.0.attn": [4.1, 3.9, 3.8, 1.2], "blocks.1.attn": [4.2, 4.1, 4.0, 3.0]},
        "receptive_field": [{"layer": "blocks.0", "distance": 2.4, "radius": 5.1}],
    },
    "resnet": {
        "kind": "cnn",
        "unit": "pixels",
        "images": 32,
        "attention_distance": None,
        "receptive_field": [
            {"layer": "conv1", "distance": 1.0, "radius": 1.4},
            {"layer": "layer1", "distance": 1.9, "radius": 3.1},
            {"layer": "layer2", "distance": 2.6, "radius": 4.7},
        ],
    },
}
RATES: list[dict[str, Any]] = [
    {"model": m, "size": s, "images": round(1257 * s), "arm": "none", "seed": 1000, "lr": lr, "steps": 400}
    | {
        "val_acc": 0.7 + lr,
        "val_loss": 0.8,
        "status": "done",
        "reason": "",
        "chosen": lr == 1e-2,
        "at_edge": lr == 1e-2,
    }
    for m in ("vit", "resnet")
    for s in (0.05, 0.25, 1.0)
    for lr in (1e-3, 3e-3, 1e-2)
]
