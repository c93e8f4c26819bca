"""``vision-attn fit``: train by a recipe."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Any

from vision_attn.errors import UserError

SHARDED = (".metadata", "meta.pt")  # what lies in the folder of a checkpoint that several processes wrote


def run(argv: list[str]) -> int:
    """Train, and leave a finished run folder.

    Args:
        argv: what follows ``fit`` on the command line.

    Returns:
        0, or 130 / 143 after Ctrl-C / SIGTERM.
    """
    from vision_attn.cli.parsing import Command
    from vision_attn.training.budget import parse_budget
    from vision_attn.training.fitting import finish, make_callbacks, make_plugins
    from vision_attn.training.interrupt import Interrupted, StopSignal
    from vision_attn.training.memory import keep_freed_memory
    from vision_attn.training.run_folder import RunFolder

    command = Command("fit", argv)
    config = command.config
    root = Path(config.trainer.default_root_dir or "runs")
    ckpt_path, folder = resume_from(config.ckpt_path, root, command.recipe_name)
    if config.budget is not None:
        parse_budget(config.budget)
        config.trainer.max_epochs, config.trainer.max_steps = -1, -1
        config.trainer.num_sanity_val_steps = (
            config.trainer.num_sanity_val_steps or 1
        )  # to know what a validation costs
    keep_freed_memory()
    dumped = command.dump()
    if ckpt_path is not None:
        leave_out_weights(config.model)
    command.build()
    if ckpt_path is not None:
        check_resumable(Path(ckpt_path), command.model.model)
    checkpoints = config.trainer.enable_checkpointing is not False
    stop = StopSignal(saves=checkpoints)
    run_folder = RunFolder(
        root, command.recipe_name, dumped, config.seed_everything, command.task.monitor, resume=folder
    )
    callbacks = make_callbacks(
        run_folder,
        budget=config.budget,
        ema=command.config_init.ema,
        save_every=config.save_every,
        stop=stop,
        checkpoints=checkpoints,
        progress=config.trainer.enable_progress_bar is not False,
        watch=config.watch_attention,
    )
    trainer = command.build_trainer(callbacks=callbacks, plugins=make_plugins(config.trainer.strategy))
    try:
        with stop.listening():
            trainer.fit(command.model, command.datamodule, ckpt_path=ckpt_path, weights_only=True)
    except Interrupted as interruption:
        return _say_how_to_resume(argv, trainer, interruption.path, stop.exit_code)
    except (SystemExit, KeyboardInterrupt):  # Lightning's answer to a second Ctrl-C, or to a first that saves nothing
        if not stop.requested:
            raise
        what = "stopped at once; an earlier state is saved"
        return _say_how_to_resume(argv, trainer, run_folder.last_checkpoint, stop.exit_code, what)

    def plain_trainer() -> Any:
        return command.build_trainer(enable_checkpointing=False, enable_progress_bar=False, max_epochs=1)

    try:
        summary = finish(
            run_folder, trainer, command.model, command.datamodule, test=config.test, make_trainer=plain_trainer
        )
    except KeyboardInterrupt:
        what = "training is over and saved; what comes after was interrupted"
        return _say_how_to_resume(argv, trainer, run_folder.last_checkpoint, 130, what)
    if trainer.is_global_zero:
        _report(run_folder.path, summary)
    return 0


def resume_from(ckpt_path: str | None, root: Path, recipe: str) -> tuple[str | None, Path | None]:
    """The checkpoint to go on from, and the run folder to go on in (None: a new one).

    ``last`` and the ``last.ckpt`` of a run go on in that run's folder; any other checkpoint starts a new run.

    Raises:
        UserError: no such checkpoint.
    """
    from vision_attn.training.run_folder import last_checkpoint, latest_run, run_of_checkpoint

    if ckpt_path is None:
        return None, None
    if ckpt_path == "last":
        folder = latest_run(root, recipe)
        return str(last_checkpoint(folder)), folder
    path = Path(ckpt_path)
    if path.is_dir() and last_checkpoint(path).exists():
        path = last_checkpoint(path)
    if not path.exists():
        raise UserError(f"--ckpt_path: no such checkpoint: {path}")
    return str(path), run_of_checkpoint(path) if path.name == "last.ckpt" else None


def leave_out_weights(model: Any) -> None:
    """Weights to begin with are in the run by now, and need not be there any more.

    Args:
        model: the configuration of the model, which is changed.
    """
    from vision_attn.models.backbones import with_norm
    from vision_attn.models.registry import list_models, model_defaults

    if "weights" in model:
        model.weights = None
    args = dict(model.get("args") or {})
    if args.get("backbone_weights") and model.name in list_models(task="detection"):
        backbone = args.get("backbone") or model_defaults(model.name)["backbone"]
        args["backbone_options"] = with_norm(backbone, args.pop("backbone_weights"), args.get("backbone_options"))
        model.args = args


def check_resumable(path: Path, model: Any) -> None:
    """Refuses a checkpoint that training cannot go on from, before anything is written.

    Args:
        path: a file, or the folder that a sharding strategy saves.
        model: that is going to be trained.

    Raises:
        UserError: it is damaged, holds weights alone, or another model.
    """
    from vision_attn.checkpoints import read_state_dict
    from vision_attn.checkpoints.load import compare

    if path.is_dir() and any((path / name).exists() for name in SHARDED):
        return  # Lightning's own reader checks these
    if path.is_dir():
        raise UserError(f"--ckpt_path {path} is no run: name a folder with checkpoints/last.ckpt, or a .ckpt.")
    state, meta = read_state_dict(path)
    if not meta.get("trains"):
        raise UserError(
            f"--ckpt_path {path} holds weights and no state of an optimizer, so training cannot go on from it: "
            "name the .ckpt of a run, such as <run>/checkpoints/last.ckpt."
        )
    there, here = meta["config"]["name"], getattr(model, "config", {}).get("name", type(model).__name__)
    if there != here:
        raise UserError(f"--ckpt_path {path} is of a run of {there}, and this recipe trains {here}.")
    compare(model, state, path)


def _say_how_to_resume(
    argv: list[str], trainer: Any, path: Path | None, exit_code: int, what: str = "stopped; the state is saved"
) -> int:
    if trainer.is_global_zero:
        if path is None:
            print("stopped before anything was saved", file=sys.stderr)
            return exit_code
        again = [w for n, w in enumerate(argv) if "--ckpt_path" not in (w.split("=")[0], argv[n - 1] if n else "")]
        # by its path: "last" is the newest run of the recipe, which need not be this one
        how = shlex.join(["vision-attn", "fit", *again, "--ckpt_path", str(path)])
        print(f"{what} in {path}\nto go on: {how}", file=sys.stderr)
    return exit_code


def _report(path: Path, summary: dict[str, Any]) -> None:
    for key, value in summary.items():
        if key.startswith(("val/acc", "test/acc", "val/ap", "test/ap")) and value is not None:
            print(f"{key} {value:.4f}")
    print(f"weights, metrics and pictures: {path}")
