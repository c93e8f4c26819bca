"""The options of fit, validate and test: LightningCLI's, with recipes by name and messages that help."""

from __future__ import annotations

import dataclasses
import difflib
import re
import sys
import typing
from pathlib import Path
from typing import Any

import yaml
from jsonargparse import ArgumentError, Namespace
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI

from vision_attn.errors import UserError, closest
from vision_attn.training.ema import EmaConfig
from vision_attn.training.precision import affordable
from vision_attn.training.tasks import Task, task_by_name

TRAINER_DEFAULTS: dict[str, Any] = {
    "max_epochs": 20,
    "logger": False,  # metrics.csv is ours; --trainer.logger adds others
    "enable_model_summary": False,
    "use_distributed_sampler": False,  # the data module shares the samples out itself
    "num_sanity_val_steps": 0,
}


class Command(LightningCLI):
    """Parses one verb's arguments and builds ``datamodule``, ``model`` and ``trainer`` on demand.

    Args:
        verb: only used in ``--help``.
        argv: arguments after the verb.
        evaluate: leave out what only training needs.
    """

    def __init__(self, verb: str, argv: list[str], evaluate: bool = False) -> None:
        self.evaluate = evaluate
        argv = recipes_to_paths(argv)
        if evaluate:  # the checkpoint knows its model; a configuration or the user may still name it
            argv = ["--model.name=", *argv]
        self.recipe_paths = config_paths(argv)
        trees = [read_recipe(path) for path in self.recipe_paths]
        self.task: Task = task_by_name(task_name(argv, trees))
        check_links(trees, self.recipe_paths, self.task)
        super().__init__(
            model_class=self.task.module_class(),
            datamodule_class=self.task.data_class(),
            save_config_callback=None,
            trainer_defaults=dict(TRAINER_DEFAULTS),
            seed_everything_default=0,
            parser_kwargs={
                "prog": f"vision-attn {verb}",
                "description": DESCRIPTIONS[verb],
                "exit_on_error": False,
                "allow_abbrev": False,
                "dump_header": [],
            },
            args=argv,
            run=False,
            auto_configure_optimizers=False,
            load_from_checkpoint_support=False,
        )

    # -- parser -------------------------------------------------------------------------------------

    def add_default_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Our own options come first in ``--help``."""
        parser.add_argument("--seed_everything", type=int, default=0, help="seed of everything random")
        parser.add_argument("--task", type=str, default="classification", help="what is learned; decides the classes")
        parser.add_argument(
            "--recipe", type=str | None, default=None, help="name of the run folder (default: the recipe's file name)"
        )
        parser.add_argument(
            "--ckpt_path",
            type=str | None,
            default=None,
            help="checkpoint, exported model or run folder"
            if self.evaluate
            else "checkpoint to go on from; `last`: the newest run of this recipe",
        )
        parser.add_argument(
            "--budget",
            type=str | int | float | None,
            default=None,
            help="train for this wall-clock time, validation included, e.g. 10m, 90s, 1.5h, whatever epochs and steps",
        )
        parser.add_argument("--test", type=bool, default=False, help="evaluate on the test split after training")
        parser.add_argument("--watch_attention", type=bool, default=True, help="maps and curves of attention in plots/")
        parser.add_argument("--save_every", type=str | int | float, default="3m", help="longest time a kill may cost")
        parser.add_class_arguments(EmaConfig, "ema", help="average of the weights")

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """What the data knows goes to the model; one seed serves both."""
        for name in self.task.links:
            parser.link_arguments(f"data.{name}", f"model.{name}", apply_on="instantiate")
        parser.link_arguments("seed_everything", "data.seed")
        parser.link_arguments("seed_everything", "model.seed")

    def parse_arguments(self, parser: LightningArgumentParser, args: Any) -> None:
        """Parse, and turn complaints into one line with near names.

        Raises:
            UserError: whatever is wrong with the arguments or the recipe.
        """
        try:
            self.config = parser.parse_args(args)
        except ArgumentError as error:
            raise UserError(explain(str(error), option_names(parser, self.task), self.recipe_paths)) from error

    def instantiate_classes(self) -> None:
        """Put off until :meth:`build`: a verb may want to change the configuration first."""

    def build(self) -> None:
        """Make ``datamodule`` and ``model``.

        Raises:
            UserError: from the data (unknown set, missing files) or the model (unknown name or argument).
        """
        self.config_init = self.parser.instantiate_classes(self.config)
        self.datamodule = self.config_init["data"]
        self.model = self.config_init["model"]

    def build_without_model(self) -> None:
        """Make ``datamodule`` alone, for evaluating a model that comes from a checkpoint.

        Raises:
            UserError: from the data.
        """
        parser = LightningArgumentParser()
        parser.add_lightning_class_args(self.trainer_class, "trainer")
        parser.add_lightning_class_args(self.task.data_class(), "data")
        chosen = Namespace(trainer=self.config.trainer, data=self.config.data)
        self.config_init = parser.instantiate_classes(parser.parse_object(chosen))
        self.datamodule = self.config_init["data"]

    def build_trainer(self, **changes: Any) -> Any:
        """Make ``trainer``; ``callbacks`` and ``plugins`` in ``changes`` are added to the user's."""
        settings = {**self.config_init["trainer"]}
        for key in ("callbacks", "plugins"):
            given = settings.get(key) or []
            settings[key] = [*(given if isinstance(given, list) else [given]), *changes.pop(key, [])]
        settings.update(changes)
        trainer = self.trainer_class(**settings)
        asked = trainer.precision  # Lightning has put bf16-mixed in place of 16-mixed on a CPU
        precision = affordable(asked, trainer.strategy.root_device)
        if precision != asked:
            if getattr(self, "trainer", None) is None:
                print(f"this processor has no bfloat16 instructions: {precision} in place of {asked}", file=sys.stderr)
            trainer = self.trainer_class(**{**settings, "precision": precision})
        self.trainer = trainer
        return self.trainer

    # -- configuration ------------------------------------------------------------------------------

    @property
    def recipe_name(self) -> str:
        """``--recipe``, the recipe's file name, or data and model."""
        if self.config.recipe:
            return str(self.config.recipe)
        if self.recipe_paths:
            return self.recipe_paths[-1].stem
        return re.sub(r"[^\w.-]+", "_", f"{self.config.data.name}_{self.config.model.name}")

    def dump(self) -> str:
        """The whole configuration as YAML that ``--config`` takes again; a resume is no part of it."""
        config = self.config.clone()
        config.recipe = self.recipe_name
        config.ckpt_path = None
        config.pop("config", None)
        tree = yaml.safe_load(self.parser.dump(config, skip_none=False, skip_validation=True))
        tree.pop("ckpt_path", None)
        return yaml.safe_dump(tree, sort_keys=False, width=120)


DESCRIPTIONS = {
    "fit": "Train a model by a recipe. Every option of a recipe can be given here too, e.g. --model.optimizer.lr 1e-3.",
    "validate": "Accuracy or average precision of a checkpoint on the validation split.",
    "test": "Accuracy or average precision of a checkpoint on the test split.",
}


def recipe_folders() -> list[Path]:
    """Where recipes are looked for by name: the working folder, and the checkout this package lies in."""
    return [Path("recipes"), Path(__file__).resolve().parents[2] / "recipes"]


def recipes_to_paths(argv: list[str]) -> list[str]:
    """Replace recipe names behind ``--config`` by files.

    Raises:
        UserError: neither a file nor a recipe.
    """
    result = list(argv)
    for index, word in enumerate(result):
        if word in ("--config", "-c") and index + 1 < len(result):
            result[index + 1] = str(find_recipe(result[index + 1]))
        elif word.startswith("--config="):
            result[index] = f"--config={find_recipe(word.removeprefix('--config='))}"
    return result


def find_recipe(name: str) -> Path:
    """The file of a recipe given as a path or a bare name."""
    if Path(name).is_file():
        return Path(name)
    for folder in recipe_folders():
        for candidate in (folder / name, folder / f"{name}.yaml"):
            if candidate.is_file():
                return candidate
    known = sorted({path.stem for folder in recipe_folders() for path in folder.glob("*.yaml")})
    listing = f" Recipes: {', '.join(known)}." if known else ""
    raise UserError(f"no recipe file {name!r}.{closest(Path(name).stem, known)}{listing}")


def option_value(argv: list[str], option: str) -> str | None:
    """What an option is given on the command line, None when it is not; the last one counts."""
    value = None
    for index, word in enumerate(argv):
        if word == option and index + 1 < len(argv):
            value = argv[index + 1]
        elif word.startswith(f"{option}="):
            value = word.removeprefix(f"{option}=")
    return value


def config_paths(argv: list[str]) -> list[Path]:
    """The files behind ``--config``, in order."""
    paths = []
    for index, word in enumerate(argv):
        if word in ("--config", "-c") and index + 1 < len(argv):
            paths.append(Path(argv[index + 1]))
        elif word.startswith("--config="):
            paths.append(Path(word.removeprefix("--config=")))
    return paths


def read_recipe(path: Path) -> dict[str, Any]:
    """A recipe as a tree.

    Raises:
        UserError: it is no YAML mapping.
    """
    try:
        tree = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        mark = getattr(error, "problem_mark", None)
        reason = getattr(error, "problem", None) or "not a text file"
        raise UserError(f"{path} is no valid YAML: {reason}{f', line {mark.line + 1}' if mark else ''}") from error
    if not isinstance(tree, dict):
        raise UserError(f"{path} is no recipe: it should be a YAML mapping with keys like data, model, trainer")
    return tree


def task_name(argv: list[str], trees: list[dict[str, Any]]) -> str:
    """The task, looked up before parsing because it decides which options exist."""
    named = [tree["task"] for tree in trees if "task" in tree]
    return option_value(argv, "--task") or (named[-1] if named else "classification")


def check_links(trees: list[dict[str, Any]], paths: list[Path], task: Task) -> None:
    """Refuse in a recipe what is taken from elsewhere: it would be ignored silently.

    Raises:
        UserError: naming the key and where its value comes from.
    """
    linked = {f"model.{name}": f"the data (data.{name})" for name in task.links}
    linked |= {"model.seed": "seed_everything", "data.seed": "seed_everything"}
    for tree, path in zip(trees, paths, strict=True):
        for option, source in linked.items():
            section, key = option.split(".")
            if isinstance(tree.get(section), dict) and key in tree[section]:
                raise UserError(f"{path}: {option} cannot be set, it comes from {source}")


def option_names(parser: LightningArgumentParser, task: Task) -> list[str]:
    """Every option in dotted form, without dashes; fields of optional dataclasses included."""
    names = set()
    for action in parser._actions:
        names |= {option.lstrip("-") for option in action.option_strings if option.startswith("--")}
    for section, cls in (("model", task.module_class()), ("data", task.data_class())):
        for key, hint in typing.get_type_hints(cls.__init__).items():
            for part in (hint, *typing.get_args(hint)):
                if dataclasses.is_dataclass(part):
                    names |= {f"{section}.{key}.{field.name}" for field in dataclasses.fields(part)}
    return sorted(name for name in names if not name.endswith(("+", ".help")) and "print_" not in name)


def explain(text: str, known: list[str], paths: list[Path]) -> str:
    """jsonargparse's complaint in one or two lines, with near names for a misspelt option.

    Args:
        text: its message, often a tree over many lines.
        known: all options.
        paths: the recipes that were read.
    """
    text = re.sub(r"\s*\n\s*", " ", text).strip()
    keys = re.findall(r"Parser key \"([^\"]+)\"", text)
    key = ".".join(k for k in keys if k != "config")
    where = f" (recipe {', '.join(map(str, paths))})" if paths else ""
    if match := re.search(r"unrecognized arguments: -*([\w.+]+)", text, re.IGNORECASE):
        return f"unknown option --{match[1]}.{near_options(match[1], known)}"
    if match := re.search(r"Group '([\w.]+)' does not accept option '([\w.]+)'", text):
        return f"unknown option {match[1]}.{match[2]}.{near_options(f'{match[1]}.{match[2]}', known)}{where}"
    if match := re.search(r"Option '([\w.]+)' is not accepted", text):
        name = f"{key}.{match[1]}" if key else match[1]
        return f"unknown option {name}.{near_options(name, known)}{where}"
    if match := re.search(r"arguments are required: (.+)", text):
        return f"missing option --{match[1]}: give it, or a recipe with --config"
    expected = [
        re.sub(r"<class '([\w.]+)'>", r"\1", e) for e in re.findall(r"Expected an? (.+?)(?=\.? Got| - | Given|$)", text)
    ]
    expected = [re.sub(r"typing.Literal\[(.+)\]", r"one of \1", e) for e in dict.fromkeys(expected) if e != "NoneType"]
    given = re.search(r"(?:Got value|Given value): (?:NestedArg\(key='\w+', val=)?(.+?)\)?(?: - |$)", text)
    if key and expected and given:
        return f"{key}: expected {' or '.join(expected)}, got {given[1]}{where}"
    return text


def near_options(name: str, known: list[str]) -> str:
    """Near names: of the same section first, then of the same last word, then any."""
    section, _, last = name.rpartition(".")
    siblings = {option.rpartition(".")[2]: option for option in known if option.rpartition(".")[0] == section}
    near = difflib.get_close_matches(last, siblings, n=3, cutoff=0.5) if section else []
    if near:
        return f" Did you mean {', '.join(siblings[word] for word in near)}?"
    return closest(name, sorted(known, key=lambda option: option.rpartition(".")[2] != last))
