"""``vision-attn contrast``: which model overfits more on these images? A whole study in one folder."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vision_attn.cli.arguments import make_parser, parse
from vision_attn.errors import UserError

if TYPE_CHECKING:
    from vision_attn.contrast.config import ContrastConfig
    from vision_attn.contrast.results import Study
    from vision_attn.contrast.runner import Plan

RUN_OPTIONS = ("output", "jobs", "ray")
SWITCHES = ("quick", "dry_run", "retry_failed")
EPILOG = """Every key of a recipe can be given as an option too, e.g. --seeds 5, --data.root DIR, --arms "[none, full]",
--models.vit.args.depth 3. They are: models, data, sizes, arms, arm_settings, noise, seeds, small_seeds, small_size,
steps, batch_size, optimizer, learning_rates, evaluations, eval_images, match, threads, device, precision, rule."""


def run(argv: list[str]) -> int:
    """Run, resume or estimate a study.

    Returns:
        0, or 130 after Ctrl-C, which leaves a report of what has ended.

    Raises:
        UserError: wrong arguments, data or models that cannot be compared, or a folder with something else in it.
    """
    run_argv, study_argv = split_arguments(argv)
    parser = _parser()
    options = parse(parser, run_argv)
    if options.jobs is not None and options.jobs < 1:
        raise UserError(f"--jobs must be 1 or more, got {options.jobs}")
    config, paths = configuration(study_argv)
    if options.quick:
        config = config.quick()
    from vision_attn.contrast.runner import default_jobs, make_plan

    if options.ray is None or options.dry_run:  # elsewhere other processors and devices count
        config = _affordable(config)
    jobs = options.jobs or (default_jobs(config) if options.ray is None or options.dry_run else 1)
    if options.dry_run:
        from vision_attn.contrast.estimate import show_estimate

        show_estimate(make_plan(config), jobs)
        return 0
    name = (paths[-1].stem if paths else "contrast") + ("_quick" if options.quick else "")
    folder = Path(options.output or Path("runs") / name)
    return _run(config, folder, shlex.join(["vision-attn", "contrast", *argv]), jobs, options)


def _parser() -> Any:
    parser = make_parser(
        "contrast",
        "Train two or more models on growing subsets of the same images, under the same regularisation and with the "
        "same seeds, and report which one overfits more. Called again with the same --output it goes on where it "
        f"stopped. {EPILOG}",
    )
    parser.add_argument("--config", type=str | None, default=None, help="a recipe: a file, or its name")
    parser.add_argument("--output", type=str | None, default=None, help="folder of the study (default: runs/RECIPE)")
    parser.add_argument(
        "--jobs", type=int | None, default=None, help="cells side by side (default: one per core, 4 on a GPU)"
    )
    parser.add_argument("--ray", type=str | None, default=None, help="run cells on the Ray cluster at this address")
    parser.add_argument("--quick", action="store_true", help="a smaller study that answers in minutes")
    parser.add_argument("--dry_run", action="store_true", help="show the grid and what it would cost; train nothing")
    parser.add_argument("--retry_failed", action="store_true", help="run cells again that failed")
    return parser


def split_arguments(argv: list[str]) -> tuple[list[str], list[str]]:
    """Arguments about running a study, and arguments about the study itself."""
    ours: list[str] = []
    study: list[str] = []
    words = iter(argv)
    for word in words:
        name = word.lstrip("-").split("=")[0]
        if word in ("-h", "--help") or name in SWITCHES or not word.startswith("--"):
            ours.append(word)
            continue
        target = ours if name in RUN_OPTIONS else study
        target.append(word)
        if "=" not in word and (value := next(words, None)) is not None:
            target.append(value)
    return ours, study


def configuration(argv: list[str]) -> tuple[ContrastConfig, list[Path]]:
    """The study that recipes and options describe.

    Args:
        argv: ``--config FILE`` any number of times, and ``--key.of.a.recipe VALUE``; later ones win.

    Returns:
        The configuration, and the recipes it was read from.

    Raises:
        UserError: naming the option that is wrong, or missing.
    """
    import yaml
    from jsonargparse import ArgumentError

    from vision_attn.cli.parsing import explain, find_recipe, read_recipe
    from vision_attn.contrast.config import ContrastConfig

    tree: dict[str, Any] = {}
    paths: list[Path] = []
    for option, text in _pairs(argv):
        if option in ("config", "c"):
            paths.append(find_recipe(text))
            tree = _merge(tree, read_recipe(paths[-1]))
            continue
        try:
            value = yaml.safe_load(text)
        except yaml.YAMLError as error:
            raise UserError(f"--{option} {text}: cannot be read as YAML") from error
        for key in reversed(option.split(".")):
            value = {key: value}
        tree = _merge(tree, value)
    if "models" not in tree:
        raise UserError("which models? Give a recipe, e.g. --config recipes/contrast_digits.yaml, or --models.")
    parser = make_parser("contrast", "")
    parser.add_class_arguments(ContrastConfig)
    try:
        chosen = parser.instantiate_classes(parser.parse_object(tree))
    except ArgumentError as error:
        raise UserError(explain(str(error), _option_names(), paths)) from error
    return ContrastConfig(**dict(chosen)), paths


def _pairs(argv: list[str]) -> list[tuple[str, str]]:
    pairs = []
    words = iter(argv)
    for word in words:
        name, equals, value = word.removeprefix("--").partition("=")
        if not equals:
            following = next(words, None)
            if following is None or (following.startswith("--")):
                raise UserError(f"--{name} needs a value.")
            value = following
        pairs.append((name, value))
    return pairs


def _merge(tree: dict[str, Any], more: dict[str, Any]) -> dict[str, Any]:
    """``more`` over ``tree``, level by level; what is no mapping is replaced."""
    result = dict(tree)
    for key, value in more.items():
        old = result.get(key)
        result[key] = _merge(old, value) if isinstance(old, dict) and isinstance(value, dict) else value
    return result


def _option_names() -> list[str]:
    """Every key of a recipe in dotted form, for near names."""
    import dataclasses

    from vision_attn.contrast import config

    sections = {"": config.ContrastConfig, "data.": config.DataChoice, "noise.": config.NoiseChoice}
    sections |= {"models.": config.ModelChoice, "arm_settings.": config.Arm}
    return [f"{prefix}{field.name}" for prefix, cls in sections.items() for field in dataclasses.fields(cls)]


def _run(config: ContrastConfig, folder: Path, command: str, jobs: int, options: Any) -> int:
    from vision_attn.contrast.progress import Progress
    from vision_attn.contrast.runner import claimed, make_plan, open_folder, other_code, run_study

    plan = make_plan(config)
    executor = _executor(plan, jobs, options.ray)
    try:
        resumed = open_folder(folder, plan, command, _settings(plan), getattr(executor, "device", None))
        with claimed(folder), Progress(plan) as progress:
            if resumed:
                progress.say(f"going on with the study in {folder}")
                if warning := other_code(folder):
                    progress.say(warning)
            study = run_study(plan, folder, executor, note=progress.note, retry_failed=options.retry_failed)
    except KeyboardInterrupt:
        executor.close()
        _stopped(folder, command)
        return 130
    finally:
        executor.close()
    _tell(study, folder)
    return 0


def _stopped(folder: Path, command: str) -> None:
    """Say how to go on, and report what has ended, unless the user has no patience for that either."""
    import contextlib

    from vision_attn.contrast.results import load_study
    from vision_attn.contrast.runner import report_study

    print(f"\nstopped; what has ended is kept. Go on with:\n  {command}", file=sys.stderr)
    with contextlib.suppress(KeyboardInterrupt, UserError):
        if any(result.done for result in load_study(folder).results):
            report_study(folder)
            print(f"{folder / 'report.html'} shows what has ended; it is marked as not finished", file=sys.stderr)


def _affordable(config: ContrastConfig) -> ContrastConfig:
    """float32 in place of bfloat16 that this processor would have to imitate, with a word about it."""
    import dataclasses

    from vision_attn.contrast.training import pick_device
    from vision_attn.training.precision import affordable

    if affordable(config.precision, pick_device(config.device)) == config.precision:
        return config
    print("this processor has no bfloat16 instructions: 32-true in place of bf16-mixed", file=sys.stderr)
    return dataclasses.replace(config, precision="32-true")


def _settings(plan: Plan) -> str:
    """The configuration as YAML that ``--config`` takes again."""
    import yaml

    head = "".join(f"# {key}: {value}\n" for key, value in plan.stamp.items())
    return head + yaml.safe_dump(plan.config.tree(), sort_keys=False, width=120)


def _executor(plan: Plan, jobs: int, ray: str | None) -> Any:
    if ray is not None:
        from vision_attn.contrast.ray_runner import RayPool

        return RayPool(plan.config, plan.data, ray)
    from vision_attn.contrast.pool import Pool

    return Pool(plan.config, plan.data.hash, jobs)


def _tell(study: Study, folder: Path) -> None:
    failed = [result for result in study.results if not result.done]
    for result in failed[:10]:
        print(f"failed: {result.cell.id}: {result.reason}", file=sys.stderr)
    if len(failed) > 10:
        print(f"... and {len(failed) - 10} more; --retry_failed runs them again", file=sys.stderr)
    print(f"{len(study.results) - len(failed)} of {len(study.cells)} trainings done, {len(failed)} failed")
    for name in ("report.html", "contrast.json", "runs.csv"):
        if (folder / name).exists():
            print(folder / name)
