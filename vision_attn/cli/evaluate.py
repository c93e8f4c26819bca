"""What ``validate`` and ``test`` share: a checkpoint of any kind, the data it is for, and a few numbers.

The configuration of the run that a checkpoint lies in is taken when no ``--config`` is given; a foreign checkpoint
needs ``--data.name`` alone. Images are resized, cut and normalized as the *checkpoint* says, as in a prediction,
whatever the data set's own size and statistics are; what the user says of size and cut stands.
"""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

from vision_attn.errors import UserError

STAGES = {"validate": "val", "test": "test"}
"""The split that a verb looks at."""

OF_A_RUN = (
    *("accelerator", "devices", "num_nodes", "strategy"),
    *("limit_train_batches", "limit_val_batches", "limit_test_batches", "fast_dev_run", "overfit_batches"),
)
"""Options of the trainer that say where a model was trained, and how little of its data was looked at meanwhile."""


def evaluate(verb: str, argv: list[str]) -> int:
    """Run ``validate`` or ``test``.

    Args:
        verb: which of the two.
        argv: what follows it on the command line.

    Returns:
        0.

    Raises:
        UserError: no checkpoint, or one that does not fit the data.
    """
    from vision_attn.checkpoints import load_model
    from vision_attn.checkpoints.hub import is_hub_name
    from vision_attn.cli.parsing import Command, option_value, recipes_to_paths
    from vision_attn.training.memory import keep_freed_memory
    from vision_attn.training.run_folder import run_of_checkpoint

    path = option_value(argv, "--ckpt_path")
    argv = recipes_to_paths(argv)
    if path is None and not {"-h", "--help"} & set(argv):
        raise UserError(f"{verb} needs --ckpt_path: a .ckpt, a folder with model.safetensors, or a foreign checkpoint")
    model: Any = None
    chosen: str | None = None
    if path is not None:
        if not Path(path).exists() and not is_hub_name(path):
            raise UserError(f"--ckpt_path: no such checkpoint: {path}")
        model = load_model(path, name=option_value(argv, "--model.name"))
        run_folder = run_of_checkpoint(path)
        chosen = option_value(argv, "--config") or option_value(argv, "-c")
        if chosen is None:
            if run_folder is not None:
                refuse_classes(run_folder / "config.yaml")
            task = ["--task", model.config["task"]]  # which decides what options there are
            argv = [*(task if run_folder is None else ["--config", str(run_folder / "config.yaml")]), *argv]
    command = Command(verb, argv, evaluate=True)
    config = command.config
    if model.config["task"] != config.task:
        raise UserError(f"{path} is a model for {model.config['task']}, not for {config.task}: leave out --task")
    take_size(config.data, model.config["preprocess"], config.task)
    reset_trainer(config.trainer, argv, keep=chosen is not None)
    keep_freed_memory()
    command.build_without_model()
    data = command.datamodule
    check_fit(model, data, str(path))
    data.augmenter = augmenter_of(model, data)
    results, evaluation, seen = _run(command, verb, model, data)
    if command.trainer.is_global_zero:
        _report(verb, str(path), model, data, results, seen)
        if evaluation is not None:
            _report_detections(verb, evaluation, results)
    return 0


def _run(command: Any, verb: str, model: Any, data: Any) -> tuple[dict[str, float], Any, int | None]:
    """The numbers, a detector's whole evaluation, and where a limit left some out, how many images were looked at.

    Raises:
        UserError: there are no images to look at.
    """
    from vision_attn.cli.counting import Counter

    counter = Counter()
    trainer = command.build_trainer(callbacks=[counter], enable_checkpointing=False, enable_progress_bar=False)
    module = command.task.module_class().from_model(model, **evaluation_settings(command.config.model))
    run = trainer.validate if verb == "validate" else trainer.test
    found = run(module, datamodule=data, verbose=False)
    if not found:
        data.required(STAGES[verb])
        raise UserError(f"no image was looked at: give --trainer.limit_{STAGES[verb]}_batches at least 1")
    return dict(found[0]), getattr(module, "evaluation", None), counter.images if counter.limited else None


def evaluation_settings(options: Any) -> dict[str, Any]:
    """What a configuration says of a model beside the checkpoint: losses and a cap on detections are no part of it."""
    settings: dict[str, Any] = {"channels_last": getattr(options, "channels_last", None)}
    if "criterion" in options:
        from vision_attn.detection.criterion import CriterionConfig

        settings["criterion"] = CriterionConfig(**dict(options.criterion))
        settings["max_detections"] = options.max_detections
    return settings


def refuse_classes(path: Path) -> None:
    """Refuses a configuration that only lies beside the checkpoint and asks for classes to be imported.

    Raises:
        UserError: it names some.
    """
    from vision_attn.cli.parsing import read_recipe

    todo: list[Any] = [read_recipe(path)]
    while todo:
        part = todo.pop()
        if isinstance(part, dict) and "class_path" in part:
            raise UserError(
                f"{path} names classes to import (class_path), which could run code. Where you trust it, say so: "
                f"--config {path}"
            )
        todo += part.values() if isinstance(part, dict) else part if isinstance(part, list) else []


def reset_trainer(trainer: Any, argv: list[str], keep: bool = False) -> None:
    """Forget the settings of a training configuration that an evaluation must not repeat.

    Args:
        trainer: the configuration; logs, the length of a run, its hardware and its limits are reset. One device does
            it, unless more are asked for.
        argv: the command line, whose hardware and limits stand.
        keep: so do those of the configuration, which the user has named.
    """
    import yaml
    from lightning.pytorch import Trainer

    from vision_attn.cli.parsing import option_value

    defaults = {name: each.default for name, each in inspect.signature(Trainer.__init__).parameters.items()}
    options = (word.split("=")[0].split(".") for word in argv if word.startswith("--trainer."))
    given = {option[1] for option in options}  # the strategy's own options mean that it stays
    whole = yaml.safe_load(option_value(argv, "--trainer") or "{}")
    given |= set(whole if isinstance(whole, dict) else OF_A_RUN)
    if keep:
        given |= set(OF_A_RUN)
    for name in set(OF_A_RUN) - given:
        trainer[name] = 1 if name == "devices" else defaults[name]
    trainer.logger, trainer.callbacks, trainer.profiler, trainer.default_root_dir = False, None, None, None
    trainer.max_epochs, trainer.max_steps, trainer.accumulate_grad_batches = 1, -1, 1


def take_size(data: Any, preprocess: dict[str, Any], task: str) -> None:
    """Bring images to the size that the checkpoint was trained at, in its way, unless the user has said another."""
    from vision_attn.data import SOURCES

    if task == "classification" and getattr(SOURCES.get(data.name), "any_size", False):
        if data.crop_pct is None:
            data.crop_pct = preprocess.get("crop_pct") or 1.0
        if data.interpolation is None:
            data.interpolation = preprocess.get("interpolation") or "bilinear"
    if data.img_size is not None:
        return
    size = tuple(preprocess["size"])
    if task != "detection":
        data.img_size = size
    elif preprocess.get("resize") == "shorter":
        data.img_size, data.max_size = size
    elif "resize" in preprocess:  # other people's detectors do not say: they take what the data set is known for
        data.img_size, data.resize = size, preprocess["resize"]


def augmenter_of(model: Any, data: Any) -> Any:
    """Normalization with the statistics that the checkpoint was trained with."""
    from vision_attn.data import AugmentConfig, Augmenter

    preprocess = model.config["preprocess"]
    statistics = {key: preprocess[key] for key in ("mean", "std")}
    return Augmenter(AugmentConfig(), num_classes=data.num_classes, seed=data.seed, **statistics)


def check_fit(model: Any, data: Any, path: str) -> None:
    """Refuse a checkpoint and data that cannot belong together.

    Raises:
        UserError: another number of classes, or other classes; images of two channels, or of more than three.
    """
    channels = len(model.config["preprocess"]["mean"])
    if channels not in (1, data.in_chans):  # one: brightness
        raise UserError(
            f"{path} takes images of {channels} channels, those of the data set {data.name!r} have {data.in_chans}."
        )
    labels, ids = model.config.get("labels"), model.config.get("category_ids")
    if ids is not None:
        check_categories(ids, labels, data, path)
        return
    classes = model.config["args"].get("num_classes", len(labels) if labels else None)
    if classes not in (None, data.num_classes):
        raise UserError(
            f"{path} knows {classes} classes, the data set {data.name!r} has {data.num_classes}: "
            "choose the data it was trained on with --data.name."
        )
    if labels and list(labels) != list(data.labels):
        differ = next((a, b) for a, b in zip(labels, data.labels, strict=True) if a != b)
        raise UserError(
            f"{path} was trained on other classes than those of {data.name!r}: {differ[0]!r} is {differ[1]!r} there."
        )


def check_categories(ids: list[int], labels: list[str] | None, data: Any, path: str) -> None:
    """Refuse a detector for other classes than those of the data; it may know more.

    Raises:
        UserError: classes that it does not know, or knows by another name.
    """
    names: dict[int, str | None] = dict(zip(ids, labels or (None,) * len(ids), strict=True))
    for category, name in zip(data.category_ids, data.labels, strict=True):
        if category not in names:
            raise UserError(
                f"{path} knows no category {category} ({name!r}) of the data set {data.name!r}: "
                "choose the data it was trained on with --data.name and --data.root."
            )
        if names[category] not in (None, name):
            raise UserError(
                f"{path} was trained on other classes than those of {data.name!r}: category {category} is "
                f"{names[category]!r} in the checkpoint and {name!r} in the data."
            )


def _report(verb: str, path: str, model: Any, data: Any, results: dict[str, float], images: int | None = None) -> None:
    stage = STAGES[verb]
    seen = data.describe(stage) if hasattr(data, "describe") else f"{len(data.split(stage)):,} {stage} images"
    seen = seen if images is None else f"{images:,} of {seen}"
    print(f"{model.config['name']} ({path}) on {seen} of {data.name}")
    names = [name for name in sorted(results) if "/ap_nms" not in name]  # they are explained below
    width = max(map(len, names))
    for name in names:
        print(f"{name:<{width}}  {results[name]:.4f}")


def _report_detections(verb: str, evaluation: Any, results: dict[str, float] | None = None) -> None:
    """The classes, and what non-maximum suppression would change (in ``results`` already, after a test)."""
    from vision_attn.cli.arguments import console
    from vision_attn.detection.report import class_table, nms_beside

    stage = STAGES[verb]
    known = {name.removeprefix(f"{stage}/"): value for name, value in (results or {}).items() if "/ap_nms" in name}
    for name, value in (known or nms_beside(evaluation)).items():
        print(f"{stage}/{name}  {value:.4f}  with non-maximum suppression at IoU 0.{name[-2]}")
    console().print(class_table(evaluation))
