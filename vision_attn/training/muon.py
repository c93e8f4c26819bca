"""Muon for hidden matrices and AdamW for the rest, in one optimizer.

Muon (Keller Jordan 2024, https://kellerjordan.github.io/posts/muon) replaces the momentum of a weight matrix by the
nearest semi-orthogonal matrix, found with a few Newton-Schulz iterations. Steps are scaled so that their size is like
AdamW's (Liu et al. 2025, "Muon is scalable for LLM training"), so one learning rate and one decay serve both.
``torch.optim.Muon`` takes one matrix at a time and no convolutions; here all matrices of one shape are
orthogonalized together, which matters on a CPU, and convolutions count as (out, in * kh * kw) matrices.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from vision_attn.training.precision import multiplies_bfloat16

_QUINTIC = (3.4445, -4.7750, 2.0315)  # Jordan's coefficients: steep at zero, oscillating near one


def orthogonalize(matrices: Tensor, steps: int = 5, dtype: torch.dtype = torch.float32) -> Tensor:
    """Push the singular values of each matrix towards one (roughly into 0.7 ... 1.2).

    Args:
        matrices: (K, R, C), any scale.
        steps: Newton-Schulz iterations.
        dtype: of the arithmetic.

    Returns:
        (K, R, C) float32.
    """
    a, b, c = _QUINTIC
    x = matrices.to(dtype)
    tall = x.size(-2) > x.size(-1)
    if tall:  # the products below are of size (R, R): keep R the smaller side
        x = x.mT
    x = x / x.norm(dim=(-2, -1), keepdim=True).clamp_min(1e-7)
    for _ in range(steps):
        gram = x @ x.mT  # (K, R, R)
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return (x.mT if tall else x).float()


class MuonWithAdamW(torch.optim.Optimizer):
    """Groups with ``algorithm: muon`` are stepped by Muon, the others by (fused) AdamW.

    It is an ordinary optimizer to the outside: one list of groups, one state, one ``state_dict``.

    Args:
        params: groups; each may carry ``algorithm``, ``lr`` and ``weight_decay``.
        lr: learning rate.
        momentum: of Muon (Nesterov).
        betas: moment decays of AdamW.
        eps: of AdamW.
        weight_decay: decoupled.
        ns_steps: Newton-Schulz iterations.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        momentum: float = 0.95,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        ns_steps: int = 5,
    ) -> None:
        defaults: dict[str, Any] = {
            "lr": lr,
            "momentum": momentum,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "ns_steps": ns_steps,
            "algorithm": "muon",
        }
        super().__init__(params, defaults)
        others = [group for group in self.param_groups if group["algorithm"] == "adamw"]
        for group in self.param_groups:
            if group["algorithm"] == "muon" and any(p.ndim < 2 for p in group["params"]):
                raise ValueError("Muon takes matrices (2 or more dimensions); give vectors to an adamw group")
        self._adamw = torch.optim.AdamW(others, lr=lr, betas=betas, eps=eps, fused=True) if others else None

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One update of every group; ``closure`` (if any) computes loss and gradients first."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            if group["algorithm"] == "muon":
                self._muon_step(group)
        if self._adamw is not None:  # it works on this optimizer's own groups and state
            self._adamw.param_groups = [group for group in self.param_groups if group["algorithm"] == "adamw"]
            self._adamw.state = self.state
            self._adamw.step()
        return loss

    def _muon_step(self, group: dict[str, Any]) -> None:
        parameters = [p for p in group["params"] if p.grad is not None]
        if not parameters:
            return
        gradients = [p.grad for p in parameters]
        for parameter in parameters:
            if not self.state[parameter]:
                self.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
        buffers = [self.state[p]["momentum_buffer"] for p in parameters]
        torch._foreach_lerp_(buffers, gradients, 1 - group["momentum"])
        directions = torch._foreach_lerp(gradients, buffers, group["momentum"])  # Nesterov's look ahead
        if group["weight_decay"]:
            torch._foreach_mul_(parameters, 1 - group["lr"] * group["weight_decay"])
        by_shape: dict[tuple[int, ...], list[int]] = defaultdict(list)
        for index, parameter in enumerate(parameters):
            by_shape[tuple(parameter.shape)].append(index)
        for shape, indices in by_shape.items():
            matrices = torch.stack([directions[i].flatten(1) for i in indices])  # (K, R, C)
            steps = orthogonalize(matrices, group["ns_steps"], _fast_dtype(matrices.device))
            scale = 0.2 * max(matrices.shape[1:]) ** 0.5  # root mean square of AdamW's steps
            for i, step in zip(indices, steps, strict=True):
                parameters[i].add_(step.view(shape), alpha=-group["lr"] * scale)


def _fast_dtype(device: torch.device) -> torch.dtype:
    """bfloat16 where the hardware multiplies it, float32 elsewhere; Newton-Schulz bears the rounding."""
    fast = device.type in ("cpu", "cuda") and multiplies_bfloat16(device)
    return torch.bfloat16 if fast else torch.float32
