#!/usr/bin/env python
"""The same small ViT on CIFAR-10 with every mechanism of the core, at equal steps: what each is worth, what it costs.

    VISION_ATTN_DATA=… python scripts/study_mechanisms.py                 # all of it: under an hour on two cores
    python scripts/study_mechanisms.py --only base pattern --seeds 0 1    # some families, fewer seeds
    python scripts/study_mechanisms.py --report                           # table and plot again from what was measured

Every run differs from the base in one mechanism. Runs go on where an interrupted study stopped. Accuracy is on the
validation split; the test images are never read. The cost is the median time of one training step, of all mechanisms
in turn, measured with one thread after the training. Results: <output>/runs.jsonl, study.json, study.md, study.png.
"""

from __future__ import annotations

import argparse
import json
import logging
import multiprocessing
import os
import statistics
import sys
import time
import warnings
from pathlib import Path
from typing import Any

BASE = {"name": "vit_tiny_patch16_224", "embed_dim": 64, "depth": 3, "num_heads": 4, "mlp_ratio": 2, "patch_size": 4}
BATCH, STEPS, LR = 128, 200, 0.01

SLOW = ("additive", "concat")

VARIANTS: dict[str, dict[str, dict[str, Any]]] = {
    "base": {"scaled dot, softmax, full, learned positions": {}},
    "score": {
        "dot": {"score": "dot"},
        "cosine, learned temperature": {"score": "cosine", "temperature": "learned"},
        "general": {"score": "general"},
        "additive, 16 hidden": {"score": "additive", "hidden": 16},
        "concat, 16 hidden": {"score": "concat", "hidden": 16},
        "location": {"score": "location"},
    },
    "normalizer": {
        "hard (no gradient to the scores)": {"normalizer": "hard"},
        "straight-through": {"normalizer": "straight_through"},
        "sampled, REINFORCE": {"normalizer": "sampled"},
        "Bernoulli": {"normalizer": "bernoulli"},
        "linear chain": {"normalizer": "linear_chain"},
    },
    "pattern": {
        "causal": {"pattern": "causal"},
        "window, radius 8": {"pattern": "window", "window": 8},
        "window 2-D, radius 2": {"pattern": "window_2d", "window": 2},
        "strided, 8": {"pattern": "strided", "stride": 8},
        "Longformer, radius 4": {"pattern": "longformer", "window": 4, "num_global": 2},
        "BigBird, blocks of 8": {"pattern": "bigbird", "block_size": 8, "num_random": 1, "num_global": 1},
        "Linformer, rank 16": {"pattern": "linformer", "rank": 16},
        "Performer, 64 features": {"pattern": "performer", "features": 64},
    },
    "position": {
        "none": {"position": "none"},
        "sinusoidal 2-D": {"position": "sinusoidal"},
        "sinusoidal 1-D": {"position": "sinusoidal_1d"},
        "T5 buckets": {"position": "t5"},
        "relative bias": {"position": "relative_bias"},
        "rotary 2-D": {"position": "rope"},
        "rotary 1-D": {"position": "rope_1d"},
    },
    "heads": {
        "grouped queries, 2 key heads": {"num_kv_heads": 2},
        "multi-query, 1 key head": {"num_kv_heads": 1},
        "normalized queries and keys": {"qk_norm": True},
        "keys are values": {"tie_kv": True},
        "two-step heads": {"two_step": True},
    },
    "kernel": {
        "explicit": {"kernel": "explicit"},
        "sdpa": {"kernel": "sdpa"},
        "tiled": {"kernel": "tiled"},
        "gathered, window radius 8": {"kernel": "gathered", "pattern": "window", "window": 8},
    },
}


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("runs/study_mechanisms"), help="folder of the results")
    parser.add_argument("--data", default="cifar10", help="cifar10, cifar100 or digits")
    parser.add_argument("--only", nargs="+", choices=VARIANTS, help="families of mechanisms")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=STEPS, help=f"training steps of {BATCH} images")
    parser.add_argument("--processes", type=int, default=os.cpu_count(), help="runs side by side, of one thread each")
    parser.add_argument("--report", action="store_true", help="train nothing, write table and plot again")
    return parser.parse_args()


def build(data: str, attention: dict[str, Any], seed: int) -> tuple[Any, Any]:
    """The data module and the Classifier of one run."""
    import torch

    from vision_attn.data import AugmentConfig, ImageData
    from vision_attn.training.classifier import Classifier
    from vision_attn.training.optimizers import OptimizerConfig

    torch.manual_seed(seed)
    module = ImageData(name=data, batch_size=BATCH, drop_last=True, seed=seed, augment=AugmentConfig(flip=True))
    size = {"patch_size": 1} if data == "digits" else {}
    args = {**{k: v for k, v in BASE.items() if k != "name"}, "class_token": False, "global_pool": "avg", **size}
    classifier = Classifier(
        str(BASE["name"]),
        args=args,
        attention=attention,  # type: ignore[arg-type]
        num_classes=module.num_classes,
        img_size=module.img_size,
        optimizer=OptimizerConfig(name="muon", lr=LR, weight_decay=0.02, warmup=0.1, schedule="linear"),
        label_smoothing=0.1,
        seed=seed,
    )
    return module, classifier


def train(job: tuple[str, str, str, dict[str, Any], int, int]) -> dict[str, Any]:
    """One run: (data, family, name, attention, seed, steps) → a line of runs.jsonl."""
    data, family, name, attention, seed, steps = job
    import lightning.pytorch as pl
    import torch

    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    for talker in ("lightning.pytorch", "lightning.fabric", "lightning.pytorch.utilities.rank_zero"):
        logging.getLogger(talker).setLevel(logging.ERROR)
    module, classifier = build(data, attention, seed)
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "barebones": False}
    trainer = pl.Trainer(
        max_epochs=-1, max_steps=steps, enable_checkpointing=False, num_sanity_val_steps=0, accelerator="cpu",
        use_distributed_sampler=False, check_val_every_n_epoch=10**6, gradient_clip_val=1.0, **quiet,
    )  # fmt: skip
    start = time.perf_counter()
    trainer.fit(classifier, module)
    seconds = time.perf_counter() - start
    metrics = trainer.validate(classifier, module, verbose=False)[0]
    parameters = sum(p.numel() for p in classifier.model.parameters())
    return {
        "data": data, "family": family, "name": name, "attention": attention, "seed": seed, "steps": steps,
        "acc": metrics["val/acc"], "loss": metrics["val/loss"], "seconds": round(seconds, 1), "params": parameters,
    }  # fmt: skip


def step_costs(data: str, chosen: dict[str, dict[str, Any]]) -> dict[str, float]:
    """Median milliseconds of a training step (forward, loss, backward) of every mechanism, in turn, one thread."""
    import torch

    from vision_attn.benchmarking import best_clock, interleaved, training_step

    torch.set_num_threads(1)
    steps = {}
    for name, attention in chosen.items():
        module, classifier = build(data, attention, 0)
        height, width = module.img_size
        images, labels = torch.randn(BATCH, 3, height, width), torch.randint(module.num_classes, (BATCH,))
        steps[name] = training_step(classifier.model.train(), images, labels, torch.float32)
    return {name: 1e3 * s for name, s in interleaved(steps, rounds=5, clock=best_clock("cpu")).items()}


def summarize(rows: list[dict[str, Any]], costs: dict[str, float]) -> list[dict[str, Any]]:
    """One entry per mechanism: accuracies over seeds, cost."""
    table = []
    for family, variants in VARIANTS.items():
        for name, attention in variants.items():
            accs = [row["acc"] for row in rows if row["family"] == family and row["name"] == name]
            if accs:
                some = next(row for row in rows if row["family"] == family and row["name"] == name)
                table.append(
                    {
                        "family": family,
                        "name": name,
                        "attention": attention,
                        "runs": len(accs),
                        "acc": statistics.mean(accs),
                        "sd": statistics.stdev(accs) if len(accs) > 1 else None,
                        "params": some["params"],
                        "ms": costs.get(f"{family}: {name}"),
                    }
                )
    return table


def describe(study: dict[str, Any]) -> str:
    """The study as Markdown: what was trained, and the table."""
    table = study["table"]
    base = next((row["ms"] for row in table if row["family"] == "base"), None)
    lines = ["| family | mechanism | validation accuracy, % | step, × base | parameters |", "|---|---|---|---|---|"]
    for row in table:
        spread = "" if row["sd"] is None else f" ± {100 * row['sd']:.1f}"
        cost = f"{row['ms'] / base:.2f}" if row["ms"] and base else ""
        lines.append(
            f"| {row['family']} | {row['name']} | {100 * row['acc']:.1f}{spread} ({row['runs']}) | {cost} | "
            f"{row['params']:,} |"
        )
    about = (
        f"One small ViT ({study['base']['depth']} layers of width {study['base']['embed_dim']}, "
        f"{study['base']['num_heads']} heads, patches of {study['base']['patch_size']} pixels) on {study['data']}, "
        f"{study['steps']:,} steps of {study['batch']} images, the same for all; validation accuracy, mean ± standard "
        "deviation (number of seeds). Cost: median time of a training step of one thread, all in turn."
    )
    return "\n".join([about, "", *lines]) + "\n"


def draw(table: list[dict[str, Any]], path: Path, title: str) -> None:
    """Accuracy beside cost: one row per mechanism."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    families = list(dict.fromkeys(row["family"] for row in table))
    colors = dict(zip(families, plt.get_cmap("tab10").colors, strict=False))  # type: ignore[attr-defined]
    places = list(range(len(table)))[::-1]
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 0.27 * len(table) + 1.6), sharey=True, width_ratios=[3, 2])
    for place, row in zip(places, table, strict=True):
        left.errorbar(
            100 * row["acc"], place, xerr=100 * (row["sd"] or 0), fmt="o", color=colors[row["family"]], capsize=3
        )
        if row["ms"]:
            right.barh(place, row["ms"], color=colors[row["family"]], height=0.7)
    base = next((row for row in table if row["family"] == "base"), None)
    if base is not None:
        left.axvline(100 * base["acc"], color="0.7", linewidth=1, zorder=0)
    left.set_yticks(places, [f"{row['family']}: {row['name']}" for row in table], fontsize=8)
    left.set_xlabel("validation accuracy, % (mean ± sd over seeds)")
    right.set_xlabel("training step, ms (one thread)")
    left.margins(y=0.01)
    for axis in (left, right):
        axis.grid(axis="x", color="0.9")
        axis.set_axisbelow(True)
    figure.suptitle(title, fontsize=10)
    figure.tight_layout()
    figure.savefig(path, dpi=130)


def main() -> int:
    """Trains what is missing, measures, reports."""
    options = arguments()
    options.output.mkdir(parents=True, exist_ok=True)
    log = options.output / "runs.jsonl"
    done = [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []
    done = [row for row in done if row["steps"] == options.steps and row["data"] == options.data]
    known = {(row["family"], row["name"], row["seed"]) for row in done}
    families = options.only or list(VARIANTS)
    jobs = [
        (options.data, family, name, attention, seed, options.steps)
        for seed in options.seeds  # one seed of everything first: an interrupted study is a smaller study
        for family in families
        for name, attention in VARIANTS[family].items()
        if (family, name, seed) not in known
    ]
    jobs.sort(key=lambda job: job[3].get("score") in SLOW)  # and what takes eight times as long comes last
    if options.report:
        jobs = []
    if jobs:
        os.environ.setdefault("OMP_NUM_THREADS", "1")
        with multiprocessing.get_context("spawn").Pool(options.processes) as pool, log.open("a") as out:
            for number, row in enumerate(pool.imap_unordered(train, jobs), start=1):
                done.append(row)
                out.write(json.dumps(row) + "\n")
                out.flush()
                print(
                    f"{number}/{len(jobs)} {row['family']}: {row['name']}, seed {row['seed']}: "
                    f"{100 * row['acc']:.1f} % in {row['seconds']:.0f} s",
                    flush=True,
                )
    result = options.output / "study.json"
    costs = json.loads(result.read_text())["costs"] if result.exists() else {}
    chosen = {f"{f}: {n}": a for f in families for n, a in VARIANTS[f].items()}
    if not options.report and set(chosen) - set(costs):
        costs |= step_costs(options.data, chosen)
    table = summarize(done, costs)
    if not table:
        print("error: nothing was measured yet; run it without --report", file=sys.stderr)
        return 2
    about = {"base": BASE, "batch": BATCH, "steps": options.steps, "lr": LR, "data": options.data}
    study = {**about, "costs": costs, "table": table}
    result.write_text(json.dumps(study, indent=1) + "\n", encoding="utf-8")
    (options.output / "study.md").write_text(describe(study), encoding="utf-8")
    runs = f"{min(r['runs'] for r in table)} to {max(r['runs'] for r in table)} seeds"
    draw(
        table,
        options.output / "study.png",
        f"One small ViT on {options.data}, {options.steps} steps of {BATCH} images, {runs}",
    )
    print((options.output / "study.md").read_text(), end="")
    print(f"table, plot and runs: {options.output}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
