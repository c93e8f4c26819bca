"""One training run from a parsed configuration to a finished run folder."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningDataModule, Trainer

from vision_attn.explain.callback import AttentionWatch, is_sharded
from vision_attn.training.budget import Budget, parse_budget
from vision_attn.training.checkpointing import AtomicCheckpointIO, RunCheckpoint
from vision_attn.training.ema import EMA, EmaConfig
from vision_attn.training.interrupt import StopSignal
from vision_attn.training.module import TrainingModule
from vision_attn.training.progress import ProgressLine
from vision_attn.training.run_folder import RunFolder


def make_callbacks(
    run: RunFolder,
    *,
    budget: str | float | None = None,
    ema: EmaConfig | None = None,
    save_every: str | float = "3m",
    stop: StopSignal | None = None,
    checkpoints: bool = True,
    progress: bool = True,
    watch: bool = True,
) -> list[Callback]:
    """The callbacks of a run, in the order in which they must act.

    Args:
        run: the run folder.
        budget: a duration, see :func:`parse_budget`; None trains for epochs or steps.
        ema: averaging of the weights; a decay of 0 means none.
        save_every: a duration: the longest time a kill may cost.
        stop: tells whether somebody wants the process to end.
        checkpoints: save ``last`` and ``best``.
        progress: show a line of progress.
        watch: maps of attention and curves of it in ``plots/``, for models that have any.

    Raises:
        UserError: a duration that is none.
    """
    clock = Budget(parse_budget(budget)) if budget is not None else None
    callbacks: list[Callback] = [clock] if clock else []
    if ema is not None and ema.decay > 0:
        callbacks.append(EMA(ema))  # before whatever reads weights or saves them
    callbacks.append(run)
    if progress:
        callbacks.append(ProgressLine(run, clock))
    if watch:
        callbacks.append(AttentionWatch(lambda: run.path / "plots", draw=False))
    if checkpoints:
        callbacks.append(RunCheckpoint(run, run.monitor, parse_budget(save_every), stop))
    return callbacks


def make_plugins(strategy: Any) -> list[Any]:
    """Atomic checkpoint files, where the strategy writes files of its own making none."""
    sharded = any(word in str(strategy).lower() for word in ("fsdp", "deepspeed", "parallel", "xla"))
    return [] if sharded else [AtomicCheckpointIO()]


def finish(
    run: RunFolder,
    trainer: Trainer,
    module: TrainingModule,
    data: LightningDataModule,
    *,
    test: bool = False,
    make_trainer: Callable[[], Trainer] | None = None,
) -> dict[str, Any]:
    """Export the best weights, draw the pictures and, when asked for, evaluate on the test split.

    Every process must call it; only process 0 writes.

    Args:
        run: the finished run.
        trainer: that trained it.
        module: takes the best weights (the averaged ones, with EMA).
        data: for pictures and test.
        test: evaluate on the test split.
        make_trainer: a trainer for the test; ``trainer`` itself when None.

    Returns:
        The summary, as in ``summary.json``.
    """
    run.stop_clock()
    folder = run.path / "checkpoints"
    chosen = folder / "best.ckpt"
    if not chosen.is_file():
        chosen = folder / "last.ckpt"
    if is_sharded(trainer):
        return _finish_sharded(run, trainer, chosen, test)
    if chosen.is_file():
        load_weights(module, chosen)
    if trainer.is_global_zero:
        export(run, module.model)
        draw(run, trainer, module, data)
        for callback in trainer.callbacks:  # type: ignore[attr-defined]
            if isinstance(callback, AttentionWatch):
                callback.draw(trainer)
    if test and has_no(data, "test"):
        if trainer.is_global_zero:
            print("the data has no test images: the test is left out", file=sys.stderr)
    elif test:
        results = (make_trainer() if make_trainer else trainer).test(module, datamodule=data, verbose=False)
        tested = {k: round(float(v), 6) for k, v in results[0].items() if not k.startswith("test/loss")}
        if trainer.is_global_zero:
            run.write_summary(**tested)
    return run.summary


def _finish_sharded(run: RunFolder, trainer: Trainer, chosen: Path, test: bool) -> dict[str, Any]:
    """Export what the checkpoint holds: the module cannot take whole weights any more, nor be evaluated by one."""
    from vision_attn.checkpoints import load_model

    if not trainer.is_global_zero:
        return run.summary
    what = f"pictures{' and the test' if test else ''} are left out"
    if chosen.is_file():
        export(run, load_model(chosen))
        also = "vision-attn test" if test else "vision-attn validate"
        print(f"the weights were shared out, so {what}: {also} --ckpt_path {run.path}", file=sys.stderr)
    else:
        run.write_summary()
        print(
            f"the weights were shared out and saved so, so {what}. One file of them: "
            f"python -m lightning.pytorch.utilities.consolidate_checkpoint {chosen}",
            file=sys.stderr,
        )
    return run.summary


def has_no(data: Any, split: str) -> bool:
    """Whether a data module of this package has no images for a split."""
    if not hasattr(data, "split"):
        return False
    images = data.split(split)
    return images is None or len(images) == 0


def load_weights(module: TrainingModule, path: Path) -> None:
    """Take the weights of one of our checkpoints."""
    state = torch.load(path, map_location="cpu", weights_only=True)["state_dict"]
    module.load_state_dict(state)


def export(run: RunFolder, model: Any) -> None:
    """``model.safetensors`` and ``config.json``; the summary."""
    from vision_attn.checkpoints import save_model

    config = model.config
    run.write_summary()
    config["extra"] |= {k: v for k, v in run.summary.items() if k.startswith("val/")}
    save_model(model, run.path)


def draw(run: RunFolder, trainer: Trainer, module: TrainingModule, data: LightningDataModule) -> None:
    """All pictures of a run. A picture that cannot be drawn is a warning: the weights are what counts."""
    try:
        module.draw(run, data, trainer.strategy.root_device)
    except Exception as error:
        warnings.warn(f"the pictures could not be drawn: {type(error).__name__}: {error}", stacklevel=2)
