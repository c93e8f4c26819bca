"""Optimizers by name, and which parameter is treated how."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, Literal

import torch
from torch import nn

from vision_attn.errors import UserError
from vision_attn.training.muon import MuonWithAdamW


class PeakRate(float):
    """In ``lr_mult``: the peak learning rate itself, where it does not depend on that of the others."""


@dataclass
class OptimizerConfig:
    """The optimizer and its learning-rate schedule.

    Attributes:
        name: ``adamw`` (Loshchilov & Hutter 2019), ``sgd`` (with Nesterov momentum) or ``muon`` (Jordan 2024: matrices
            of hidden layers by Muon, everything else by AdamW).
        lr: peak learning rate.
        weight_decay: decoupled decay (AdamW, Muon) or L2 penalty (SGD); never on norms, biases, one-dimensional
            parameters and what ``no_weight_decay()`` of the model or of a part of it names (position embeddings, class
            token).
        betas: moment decays of AdamW.
        eps: AdamW's epsilon.
        momentum: of SGD and Muon; None means 0.9 for SGD and 0.95 for Muon.
        adamw_lr: with ``muon``, the peak learning rate of the parameters left to AdamW; None means ``lr``.
        lr_mult: shell pattern of parameter names -> factor on the learning rate, first match wins,
            e.g. ``{"backbone.*": 0.1}``. Names are the model's, as in ``model.named_parameters()``. Code may give a
            :class:`PeakRate` in place of a factor.
        warmup: linear warm-up; below 1 a fraction of the run (of the budget, when there is one), otherwise a
            number of optimizer steps.
        schedule: ``cosine``, ``linear``, ``constant`` or ``step`` after the warm-up, counted in optimizer steps, or in
            the fraction of the time budget used.
        min_lr: where the schedule ends.
        drop_at: where ``step`` lowers the rate, as fractions of what follows the warm-up.
        drop_factor: what each drop multiplies the rate by.
    """

    name: Literal["adamw", "sgd", "muon"] = "adamw"
    lr: float = 1e-3
    weight_decay: float = 0.05
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    momentum: float | None = None
    adamw_lr: float | None = None
    lr_mult: dict[str, float] | None = None
    warmup: float = 0.05
    schedule: Literal["cosine", "linear", "constant", "step"] = "cosine"
    min_lr: float = 0.0
    drop_at: tuple[float, ...] = (0.8,)
    drop_factor: float = 0.1

    def __post_init__(self) -> None:
        """Refuse values that could only fail later.

        Raises:
            UserError: naming the option.
        """
        for key in ("lr", "weight_decay", "warmup", "min_lr", "adamw_lr"):
            if getattr(self, key) is not None and not getattr(self, key) >= 0:
                raise UserError(f"optimizer.{key} must not be negative, got {getattr(self, key)}")
        if self.min_lr > self.lr:
            raise UserError(f"optimizer.min_lr ({self.min_lr}) is above optimizer.lr ({self.lr})")
        self.betas = (float(self.betas[0]), float(self.betas[1]))
        self.drop_at = tuple(float(place) for place in self.drop_at)
        if not all(0 < place < 1 for place in self.drop_at):
            raise UserError(f"optimizer.drop_at are fractions of a run, between 0 and 1, got {self.drop_at}")
        if not 0 < self.drop_factor <= 1:
            raise UserError(f"optimizer.drop_factor must be above 0 and at most 1, got {self.drop_factor}")


def build_optimizer(
    model: nn.Module, config: OptimizerConfig, ndims: dict[str, int] | None = None
) -> torch.optim.Optimizer:
    """The optimizer of ``config`` over the parameters of ``model`` that want gradients.

    Every group carries ``peak_lr``, from which the schedule computes ``lr`` anew at every step. Fused kernels
    are used on CPU and GPU where PyTorch has them.

    Args:
        model: parameters are grouped by its names; it and its parts may define ``no_weight_decay() -> set[str]``.
        config: which optimizer, and its numbers.
        ndims: see :func:`parameter_groups`.

    Returns:
        An optimizer whose ``lr`` is still to be set by the schedule.
    """
    groups = parameter_groups(model, config, ndims)
    fused = all(p.device.type in ("cpu", "cuda", "mps") for group in groups for p in group["params"])
    optimizer: torch.optim.Optimizer
    if config.name == "sgd":
        momentum = 0.9 if config.momentum is None else config.momentum
        optimizer = torch.optim.SGD(groups, lr=config.lr, momentum=momentum, nesterov=momentum > 0, fused=fused)
    elif config.name == "muon":
        momentum = 0.95 if config.momentum is None else config.momentum
        optimizer = MuonWithAdamW(groups, lr=config.lr, momentum=momentum, betas=config.betas, eps=config.eps)
    else:
        optimizer = torch.optim.AdamW(groups, lr=config.lr, betas=config.betas, eps=config.eps, fused=fused)
    # fused optimizers announce that they undo the loss scaling of float16 themselves; Lightning then refuses to clip
    # gradients, even in bfloat16 where nothing is scaled. Without the mark the scaler unscales before the step.
    optimizer._step_supports_amp_scaling = False  # type: ignore[union-attr]
    return optimizer


def parameter_groups(
    model: nn.Module, config: OptimizerConfig, ndims: dict[str, int] | None = None
) -> list[dict[str, Any]]:
    """Parameters grouped by decay, learning-rate factor and, for Muon, algorithm.

    Args:
        model: see :func:`build_optimizer`.
        config: ``weight_decay``, ``lr``, ``adamw_lr``, ``lr_mult`` and ``name`` are used.
        ndims: number of dimensions by parameter name, from before a strategy flattened and sharded them (FSDP).

    Returns:
        Groups with ``params`` and plain values (they go into checkpoints): ``weight_decay``, ``peak_lr`` and
        ``algorithm`` (``muon`` or ``adamw``, only when ``config.name`` is ``muon``).

    Raises:
        UserError: a pattern of ``lr_mult`` matches no parameter.
    """
    exempt = never_decayed(model)
    muon_names = set(_muon_names(model, exempt)) if config.name == "muon" else set()
    unmatched = set(config.lr_mult or {})
    groups: dict[tuple[bool, float, str], dict[str, Any]] = {}
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        name = _plain(name)
        decay = (ndims or {}).get(name, parameter.ndim) > 1 and name not in exempt and not name.endswith(".bias")
        algorithm = "muon" if name in muon_names else "adamw"
        peak = config.lr
        if config.name == "muon" and algorithm == "adamw" and config.adamw_lr is not None:
            peak = config.adamw_lr
        pattern = next((p for p in config.lr_mult or {} if fnmatchcase(name, p)), None)
        if pattern is not None:
            unmatched.discard(pattern)
            factor = (config.lr_mult or {})[pattern]
            peak = float(factor) if isinstance(factor, PeakRate) else peak * factor
        group: dict[str, Any] = {"params": [], "weight_decay": config.weight_decay if decay else 0.0, "peak_lr": peak}
        if config.name == "muon":
            group["algorithm"] = algorithm
        groups.setdefault((decay, peak, algorithm), group)["params"].append(parameter)
    if unmatched:
        raise UserError(f"optimizer.lr_mult: no parameter is named like {', '.join(sorted(unmatched))}")
    return list(groups.values())


def never_decayed(model: nn.Module) -> set[str]:
    """Names of the parameters that decay must leave alone, whatever their shape.

    What ``no_weight_decay()`` names in the model and in all its parts: a detector knows nothing of the class token of
    its backbone. And the tables of relative positions, wherever they are.
    """
    exempt = {name for name, _ in model.named_parameters() if name.endswith(("position.table", "position.prefix"))}
    for prefix, module in model.named_modules():
        if hasattr(module, "no_weight_decay"):
            names = module.no_weight_decay()  # type: ignore[operator]
            exempt |= {f"{prefix}.{name}" if prefix else name for name in names}
    return {_plain(name) for name in exempt}


def _plain(name: str) -> str:
    """A parameter's name without what FSDP puts into it."""
    return name.replace("_fsdp_wrapped_module.", "")


def _muon_names(model: nn.Module, exempt: set[str]) -> Iterator[str]:
    """Names of the weights Muon takes: of linear and convolution layers, but not of the first one and of heads.

    Muon is for maps between hidden layers; the first sees pixels and heads give logits or boxes, and both are better
    served by AdamW (Jordan 2024). The last layer is a head, and so is what a model calls ``output_names`` or
    ``head_names``. Depthwise kernels are no matrices either.
    """
    heads = getattr(model, "output_names", getattr(model, "head_names", ()))
    outputs = tuple(f"{name}." for name in heads)
    layers = [(n, m) for n, m in model.named_modules() if isinstance(m, nn.Linear | nn.Conv1d | nn.Conv2d)]
    for name, module in layers[1:-1]:
        if f"{name}.".startswith(outputs):
            continue
        if f"{name}.weight" not in exempt and module.weight[0].numel() > 1 and getattr(module, "groups", 1) == 1:
            yield f"{name}.weight"


# -- resuming ---------------------------------------------------------------------------------------


def kind(group: Mapping[str, Any]) -> str:
    """Which optimizer of ours a group of parameters belongs to, by the hyperparameters that only it has."""
    return "muon" if "algorithm" in group else "sgd" if "nesterov" in group else "adamw"


def hyperparameters(group: Mapping[str, Any]) -> dict[str, Any]:
    """All of a group that a configuration decides; ``lr`` is set anew before every step."""
    return {key: value for key, value in group.items() if key not in ("params", "lr")}


def parameter_names(module: nn.Module, optimizer: torch.optim.Optimizer) -> list[list[str]]:
    """The names of the parameters in the groups of an optimizer, in their order."""
    names = {id(parameter): _plain(name) for name, parameter in module.named_parameters()}
    return [[names.get(id(p), "") for p in group["params"]] for group in optimizer.param_groups]


def adapt_state(
    saved: Mapping[str, Any],
    saved_names: Sequence[Sequence[str]] | None,
    optimizer: torch.optim.Optimizer,
    names: Sequence[Sequence[str]],
) -> dict[str, Any]:
    """The state of a saved optimizer for one with other hyperparameters, and so perhaps other groups.

    Args:
        saved: its ``state_dict()``.
        saved_names: from :func:`parameter_names` when it was saved; None in checkpoints that do not hold them.
        optimizer: the new one.
        names: of the new one's parameters.

    Returns:
        For ``optimizer.load_state_dict``: what was known of each parameter by its name, under the hyperparameters of
        ``optimizer``. A parameter that was not trained before, or not by the same algorithm, begins without a state.

    Raises:
        UserError: the state is that of another kind of optimizer, or of groups that nothing tells apart.
    """
    fresh = optimizer.state_dict()
    was, now = kind(saved["param_groups"][0]), kind(fresh["param_groups"][0])
    if was != now:
        raise UserError(
            f"the checkpoint holds the state of {was}, from which {now} cannot go on. "
            f"Resume with --model.optimizer.name {was}, or leave --ckpt_path out to start anew."
        )
    if saved_names is None:
        if [len(g["params"]) for g in saved["param_groups"]] != [len(g["params"]) for g in fresh["param_groups"]]:
            raise UserError(
                "the checkpoint holds an optimizer with other groups of parameters, and is too old to say which is "
                "which. Resume with the lr_mult and lr_backbone that the run had, or start anew without --ckpt_path."
            )
        saved_names = names
    places = {
        name: place
        for group, group_names in zip(saved["param_groups"], saved_names, strict=True)
        for place, name in zip(group["params"], group_names, strict=True)
    }
    algorithms = {place: group.get("algorithm") for group in saved["param_groups"] for place in group["params"]}
    state = {
        place: saved["state"][places[name]]
        for group, group_names in zip(fresh["param_groups"], names, strict=True)
        for place, name in zip(group["params"], group_names, strict=True)
        if places.get(name) in saved["state"] and algorithms[places[name]] == group.get("algorithm")
    }
    return {"state": state, "param_groups": fresh["param_groups"]}


def changes(before: Sequence[Mapping[str, Any]], after: Sequence[Mapping[str, Any]]) -> str:
    """What differs between the hyperparameters of two lists of groups: ``peak_lr 0.003 -> 0.001``, or nothing."""
    found = []
    for key in sorted({key for group in after for key in hyperparameters(group)}):
        was, now = ({repr(group[key]) for group in groups if key in group} for groups in (before, after))
        if was and was != now:
            if was - now and now - was:  # what stays, as the decay of norms and biases, needs no mention
                was, now = was - now, now - was
            found.append(f"{key} {' and '.join(sorted(was))} -> {' and '.join(sorted(now))}")
    return ", ".join(found)
