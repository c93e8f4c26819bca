"""What a study is asked for: data, models, and the grid of trainings."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from vision_attn.attention.config import AttentionConfig
from vision_attn.contrast.results import TRIAL_SEED
from vision_attn.contrast.verdict import Rule
from vision_attn.data.config import AugmentConfig
from vision_attn.errors import UserError, closest
from vision_attn.training.optimizers import OptimizerConfig

SIZES = (0.01, 0.02, 0.05, 0.1, 0.25, 0.5, 1.0)
_QUICK_STEPS = 150


@dataclass
class DataChoice:
    """Which images. The options are those of ``fit``'s ``--data``.

    Attributes:
        name: ``digits``, ``cifar10``, ``cifar100`` or ``image_folder``.
        root: folder with the data; None takes ``$VISION_ATTN_DATA``, then ``~/.cache/vision_attn``.
        val_fraction: share of the training images kept for validation; None: the data set's own.
        img_size: side, or (height, width), that images are brought to; None: the data set's own.
        download: fetch missing files where that is possible.
        memory_limit_mb: image folders up to this many decoded megabytes are kept in memory, by each job.
        num_workers: processes per cell that decode images too many for memory.
    """

    name: str = "digits"
    root: str | None = None
    val_fraction: float | None = None
    img_size: int | tuple[int, int] | None = None
    download: bool = True
    memory_limit_mb: int = 1024
    num_workers: int = 0


@dataclass
class ModelChoice:
    """One of the models that are compared.

    Attributes:
        name: of the zoo, or a CNN of timm.
        args: further keywords of the model.
        attention: the attention mechanism, in place of the model's own.
        optimizer: in place of the study's, e.g. SGD for a CNN. Its ``lr`` and ``weight_decay`` must be left alone, as
            those of the study's.
        learning_rates: tried for this model in place of the study's; as many as for the others.
    """

    name: str
    args: dict[str, Any] | None = None
    attention: AttentionConfig | None = None
    optimizer: OptimizerConfig | None = None
    learning_rates: list[float] | None = None


@dataclass
class Arm:
    """How training is regularised.

    Attributes:
        augment: of the training images.
        label_smoothing: share of the target spread over all classes; measured losses are without.
        weight_decay: of the optimizer.
    """

    augment: AugmentConfig = field(default_factory=AugmentConfig)
    label_smoothing: float = 0.0
    weight_decay: float = 0.0


@dataclass
class NoiseChoice:
    """The label-noise arm: part of the training labels shuffled, the same ones for all models.

    Attributes:
        levels: shares of the labels, 0 ... 1; an empty list leaves the arm out. 0 is the plain study.
        sizes: at which sizes; None for the largest. This and the rest is not looked at without a level above 0.
        arms: under which regularisation.
        seeds: how many, at most 1000.
    """

    levels: list[float] = field(default_factory=lambda: [0.2, 0.4])
    sizes: list[float] | None = None
    arms: list[str] = field(default_factory=lambda: ["none"])
    seeds: int = 3


@dataclass
class ContrastConfig:
    """A study.

    Attributes:
        models: display name -> model, two or more.
        data: which images.
        sizes: shares of the training images; nested subsets, balanced over classes.
        arms: regularisation: ``none``, ``flip_crop``, ``full``, or names of ``arm_settings``.
        arm_settings: other settings for an arm, or a new arm. Built in: ``none`` is nothing at all; ``flip_crop``
            mirrors, and crops after padding by an eighth of the side; ``full`` adds RandAugment, erasing, mixup or
            CutMix, label smoothing 0.1 and weight decay 0.05.
        noise: the label-noise arm.
        seeds: trainings of each kind, at most 1000; seed s is paired: all models get the same images, labels and order.
        small_seeds: the same for subsets up to ``small_size``.
        small_size: share of the training images.
        steps: optimizer steps of every training, or one number for each of ``sizes``.
        batch_size: images per step; all of a subset that is smaller.
        optimizer: of all models that have none of their own. Its ``lr`` and ``weight_decay`` must be left alone: rates
            are ``learning_rates``, and the weight decay is the arm's.
        learning_rates: tried for every model and size, once each, with a seed of its own, under the first arm; the
            one with the highest validation accuracy after the last step is taken, for all arms and for label noise.
        evaluations: along the trajectory, closer together at the beginning.
        eval_images: most images of the training subset, and of the validation split, for each of these evaluations; the
            measures after the last step take all of the subset. The test set is always taken whole, and evaluated
            once, at the end, by the last and by the best weights.
        match: largest difference in parameters, and in multiply-accumulates, between the models: 0.25 allows a quarter
            more. False compares unequal models, and the report says so.
        threads: CPU threads of each training, whatever ``--jobs`` says: more or fewer would round differently.
        device: ``auto``, ``cpu``, ``cuda``, or one of several GPUs, e.g. ``cuda:1``.
        precision: ``32-true``, or ``bf16-mixed``; the measures are always computed from float32 logits.
        rule: thresholds by which verdicts are given.
    """

    models: dict[str, ModelChoice]
    data: DataChoice = field(default_factory=DataChoice)
    sizes: list[float] = field(default_factory=lambda: list(SIZES))
    arms: list[str] = field(default_factory=lambda: ["none", "flip_crop", "full"])
    arm_settings: dict[str, Arm] = field(default_factory=dict)
    noise: NoiseChoice = field(default_factory=NoiseChoice)
    seeds: int = 3
    small_seeds: int = 5
    small_size: float = 0.05
    steps: int | list[int] = 400
    batch_size: int = 64
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    learning_rates: list[float] = field(default_factory=lambda: [3e-4, 1e-3, 3e-3])
    evaluations: int = 16
    eval_images: int = 2000
    match: float | bool = 0.25
    threads: int = 1
    device: str = "auto"
    precision: Literal["32-true", "bf16-mixed"] = "32-true"
    rule: Rule = field(default_factory=Rule)

    def __post_init__(self) -> None:
        """Refuse what could only fail later.

        Raises:
            UserError: naming the option.
        """
        self._check_models()
        self._check_optimizers()
        self._check_grid()
        self._check_noise()
        for name in ("seeds", "small_seeds"):
            _check_seeds(name, getattr(self, name))
        for name in ("batch_size", "evaluations", "eval_images", "threads"):
            _demand(getattr(self, name) >= 1, name, getattr(self, name), "at least 1")
        _demand(0 < self.small_size <= 1, "small_size", self.small_size, "a share above 0, at most 1")
        fine = self.match is False or (not isinstance(self.match, bool) and self.match >= 0)
        _demand(fine, "match", self.match, "a share such as 0.25, or false")
        _demand(bool(re.fullmatch(r"auto|cpu|cuda(:\d+)?", self.device)), "device", self.device, "auto, cpu or cuda")
        _demand(self.precision in ("32-true", "bf16-mixed"), "precision", self.precision, "32-true or bf16-mixed")
        for name, value in _not_finite(self.tree()):  # study.json could not hold it
            _demand(False, name, value, "a finite number")

    def _check_models(self) -> None:
        if len(self.models) < 2:
            raise UserError(f"models: a study compares two or more, got {len(self.models)}.")
        trials = {len(self.rates_of(name)) for name in self.models}
        if len(trials) > 1:
            raise UserError("learning_rates: every model must be given the same number of trials to be fair.")
        for name in self.models:
            rates = self.rates_of(name)
            where = "learning_rates" if self.models[name].learning_rates is None else f"models.{name}.learning_rates"
            fine = bool(rates) and all(math.isfinite(rate) and rate > 0 for rate in rates)
            _demand(fine, where, rates, "one or more positive numbers")
            _demand(_distinct(rates), where, rates, "different numbers")

    def _check_optimizers(self) -> None:
        """What no training would use must not look as if it did."""
        default = OptimizerConfig()
        own = {f"models.{name}.optimizer": choice.optimizer for name, choice in self.models.items()}
        for where, chosen in {"optimizer": self.optimizer, **own}.items():
            if chosen is None:
                continue
            # a floor above the default rate cannot be had without a higher lr
            if chosen.lr != default.lr and chosen.min_lr <= default.lr:
                raise UserError(
                    f"{where}.lr is {chosen.lr:g}, which no training would use: give the rates to be tried as "
                    "learning_rates, or as models.NAME.learning_rates."
                )
            if chosen.weight_decay != default.weight_decay:
                raise UserError(
                    f"{where}.weight_decay is {chosen.weight_decay:g}, which no training would use: weight decay "
                    "belongs to an arm, arm_settings.NAME.weight_decay."
                )

    def _check_grid(self) -> None:
        _check_sizes("sizes", self.sizes)
        self.sizes = sorted(self.sizes)
        _demand(bool(self.arms) and _distinct(self.arms), "arms", self.arms, "different names")
        for arm in self.arms:
            if arm not in self.arm_settings and arm not in ARMS:
                known = [*ARMS, *self.arm_settings]
                raise UserError(f"arms: no arm {arm!r}.{closest(arm, known)} There are: {', '.join(known)}.")
        for name, settings in self.arm_settings.items():
            smoothing, decay = settings.label_smoothing, settings.weight_decay
            _demand(0 <= smoothing < 1, f"arm_settings.{name}.label_smoothing", smoothing, "a share below 1")
            _demand(0 <= decay < math.inf, f"arm_settings.{name}.weight_decay", decay, "0 or more")
        if isinstance(self.steps, list):
            _demand(len(self.steps) == len(self.sizes), "steps", self.steps, f"{len(self.sizes)} numbers, as sizes")
        _demand(min(self.steps_at(size) for size in self.sizes) >= 1, "steps", self.steps, "at least 1")

    def _check_noise(self) -> None:
        noise = self.noise
        fine = all(0 <= level < 1 for level in noise.levels) and _distinct(noise.levels)
        _demand(fine, "noise.levels", noise.levels, "different shares below 1")
        if not any(level > 0 for level in noise.levels):
            return  # the rest of it is not used then
        if noise.sizes is not None:
            _check_sizes("noise.sizes", noise.sizes)
        _demand(set(self.noise_sizes) <= set(self.sizes), "noise.sizes", noise.sizes, f"some of {self.sizes}")
        fine = bool(noise.arms) and set(noise.arms) <= set(self.arms) and _distinct(noise.arms)
        _demand(fine, "noise.arms", noise.arms, f"one or more of {self.arms}, each once")
        _check_seeds("noise.seeds", noise.seeds)

    # -- what follows from the fields -----------------------------------------------------------------

    def steps_at(self, size: float) -> int:
        """Optimizer steps of a training on the share ``size``."""
        return self.steps[self.sizes.index(size)] if isinstance(self.steps, list) else self.steps

    def seeds_at(self, size: float) -> int:
        """How many seeds the share ``size`` gets."""
        return max(self.seeds, self.small_seeds) if size <= self.small_size else self.seeds

    def rates_of(self, model: str) -> list[float]:
        """Learning rates tried for a model."""
        own = self.models[model].learning_rates
        return list(self.learning_rates if own is None else own)

    @property
    def noise_sizes(self) -> list[float]:
        """Sizes of the label-noise arm."""
        return self.sizes[-1:] if self.noise.sizes is None else self.noise.sizes

    def optimizer_of(self, model: str, arm: str, lr: float, img_size: tuple[int, int]) -> OptimizerConfig:
        """The optimizer of one training."""
        chosen = self.models[model].optimizer or self.optimizer
        weight_decay = self.arm(arm, img_size).weight_decay
        return dataclasses.replace(chosen, lr=lr, weight_decay=weight_decay, min_lr=min(chosen.min_lr, lr))

    def arm(self, name: str, img_size: tuple[int, int]) -> Arm:
        """The settings of an arm for images of (H, W) pixels."""
        return self.arm_settings[name] if name in self.arm_settings else ARMS[name](_padding(img_size))

    def tree(self) -> dict[str, Any]:
        """The configuration as plain types."""
        return json.loads(json.dumps(dataclasses.asdict(self)))

    def hash(self) -> str:
        """16 hexadecimal digits that change with the configuration, but not with the place of the data."""
        tree = self.tree()
        for key in ("root", "download", "num_workers", "memory_limit_mb"):
            tree["data"].pop(key)
        return hashlib.sha256(json.dumps(tree, sort_keys=True).encode()).hexdigest()[:16]

    def quick(self) -> ContrastConfig:
        """The same question in minutes: two sizes, one arm, no label noise, two trials, three seeds, few steps."""
        count = len(self.sizes)
        sizes = sorted({self.sizes[count // 3], self.sizes[2 * count // 3]})
        return dataclasses.replace(
            self,
            sizes=sizes,
            arms=self.arms[:1],
            noise=NoiseChoice(levels=[], arms=self.arms[:1]),
            seeds=min(3, self.seeds),
            small_seeds=min(3, self.small_seeds),
            steps=[min(_QUICK_STEPS, self.steps_at(size)) for size in sizes],
            models={name: self._fewer_trials(name) for name in self.models},
            evaluations=min(8, self.evaluations),
            eval_images=min(500, self.eval_images),
        )

    def _fewer_trials(self, model: str) -> ModelChoice:
        rates = sorted(self.rates_of(model))
        middle = len(rates) // 2
        return dataclasses.replace(self.models[model], learning_rates=rates[middle : middle + 2])


def describe_arms(tree: dict[str, Any], img_size: Sequence[int]) -> dict[str, dict[str, Any]]:
    """What the arms of a study are, built-in ones too, in plain types: arm -> ``augment label_smoothing weight_decay``.

    Args:
        tree: the configuration, as :meth:`ContrastConfig.tree` gives it.
        img_size: (H, W) of the images; the built-in arms pad by an eighth of the side.
    """
    own = tree.get("arm_settings") or {}
    padding = _padding(img_size)
    built_in = {name: dataclasses.asdict(ARMS[name](padding)) for name in tree.get("arms", []) if name in ARMS}
    found = {name: own.get(name) or built_in.get(name) for name in tree.get("arms", [])}
    return json.loads(json.dumps({name: arm for name, arm in found.items() if arm}))


def _padding(img_size: Sequence[int]) -> int:
    return max(1, round(min(img_size) / 8))


def _none(padding: int) -> Arm:
    return Arm()


def _flip_crop(padding: int) -> Arm:
    return Arm(AugmentConfig(flip=True, crop_padding=padding))


def _full(padding: int) -> Arm:
    augment = AugmentConfig(
        flip=True, crop_padding=padding, randaugment=2, erase=0.25, mixup=0.2, cutmix=1.0, mix_probability=0.5
    )
    return Arm(augment, label_smoothing=0.1, weight_decay=0.05)


ARMS = {"none": _none, "flip_crop": _flip_crop, "full": _full}


def _check_sizes(name: str, sizes: list[float]) -> None:
    _demand(bool(sizes) and all(0 < size <= 1 for size in sizes), name, sizes, "shares above 0, at most 1")
    _demand(_distinct(sizes), name, sizes, "different shares")


def _check_seeds(name: str, count: int) -> None:
    # they count from 0, and TRIAL_SEED is that of the trials
    _demand(1 <= count <= TRIAL_SEED, name, count, f"1 to {TRIAL_SEED}")


def _distinct(values: Sequence[object]) -> bool:
    return len(set(values)) == len(values)


def _not_finite(tree: object, name: str = "") -> Iterator[tuple[str, float]]:
    """Dotted names of numbers that are infinite or none."""
    if isinstance(tree, dict):
        for key, value in tree.items():
            yield from _not_finite(value, f"{name}.{key}" if name else str(key))
    elif isinstance(tree, list):
        for i, value in enumerate(tree):
            yield from _not_finite(value, f"{name}[{i}]")
    elif isinstance(tree, float) and not math.isfinite(tree):
        yield name, tree


def _demand(fine: bool, name: str, value: object, expected: str) -> None:
    if not fine:
        raise UserError(f"{name} is {value!r}: expected {expected}.")
