"""Certificates: small numeric identities that show a mechanism to be what its name says.

A certificate is a function that takes a ``Setting`` and returns the error it measured; it passes where the error is at
most the tolerance of the dtype. ``vision-attn check attention`` runs them all, and the test-suite runs the same ones.
"""

from __future__ import annotations

import dataclasses
import math
import re
import zlib
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from vision_attn.attention import attend

TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.float16: 5e-3, torch.bfloat16: 4e-2}
"""Largest error, relative to the largest entry, of two ways to compute the same."""
FLOAT32_INSIDE = {**TOLERANCE, torch.float64: 1e-5}
"""The same where something is float32 whatever the dtype, as recorded maps are."""
EXACT = (torch.float64, torch.float32)
ALSO_BF16 = (*EXACT, torch.bfloat16)


class Skip(Exception):
    """Raised by a certificate that says nothing about its setting; the message is the reason."""


@dataclasses.dataclass
class Setting:
    """Where and how a certificate is to be computed.

    Attributes:
        device: ``cpu``, ``cuda``, …
        dtype: of every tensor.
        kernel: ``auto`` or a name of ``vision_attn.attention.KERNELS``.
        seed: of all random numbers; equal on every device, which draws them on the CPU.
    """

    device: str = "cpu"
    dtype: torch.dtype = torch.float64
    kernel: str = "auto"
    seed: int = 0

    def __post_init__(self) -> None:
        self.generator = torch.Generator().manual_seed(self.seed)

    def randn(self, *shape: int, grad: bool = False) -> Tensor:
        """Normal numbers of this device and dtype; the same ones in every dtype, up to rounding."""
        values = torch.randn(*shape, generator=self.generator, dtype=torch.float64)
        return values.to(self.device, self.dtype).requires_grad_(grad)

    def rand(self, *shape: int) -> Tensor:
        """Uniform numbers in [0, 1)."""
        return torch.rand(*shape, generator=self.generator, dtype=torch.float64).to(self.device, self.dtype)

    def permutation(self, n: int) -> Tensor:
        """A random order of n things that leaves none of them where it was, so that it cannot be the identity."""
        order = torch.randperm(n, generator=self.generator)
        cycle = torch.empty_like(order)
        cycle[order] = order.roll(1)
        return cycle.to(self.device)

    def tensor(self, values: Any) -> Tensor:
        """Given numbers."""
        return torch.tensor(values, device=self.device, dtype=self.dtype)

    def module(self, module: Any, *, std: float = 0.3) -> Any:
        """A module of this device and dtype in evaluation mode, with every parameter random: none is zero or one."""
        module = module.to(self.device, self.dtype).eval()
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.copy_(std * self.randn(*parameter.shape))
        return module

    def attend(self, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
        """``attend`` by this kernel."""
        return attend(q, k, v, kernel=self.kernel, **options)


@dataclasses.dataclass(frozen=True)
class Certificate:
    """One identity.

    Attributes:
        id: the row of the table of mechanisms, with a letter from the second identity of a row on: ``20``, ``20b``.
        name: the identity in words.
        measure: measures the error in a setting.
        tolerance: dtype -> largest error that passes. Other dtypes are skipped.
        kernel: whether the arithmetic is done by the setting's kernel.
        why_not: what the other dtypes lack.
    """

    id: str
    name: str
    measure: Callable[[Setting], float]
    tolerance: Mapping[torch.dtype, float]
    kernel: bool
    why_not: str


@dataclasses.dataclass(frozen=True)
class Result:
    """What a certificate said.

    Attributes:
        passed: None where it was skipped; ``reason`` then says why.
        error: None where nothing was measured, or where it is not finite.
        tolerance: None where the dtype has none.
        device, dtype, kernel: of the setting; ``any`` where the kernel plays no part.
        reason: why it was skipped, or what went wrong.
    """

    id: str
    name: str
    passed: bool | None
    error: float | None
    tolerance: float | None
    device: str
    dtype: str
    kernel: str
    reason: str = ""


CERTIFICATES: dict[str, Certificate] = {}


def certificate(
    id: str,
    name: str,
    *,
    dtypes: Iterable[torch.dtype] = ALSO_BF16,
    tolerance: float | Mapping[torch.dtype, float] | None = None,
    kernel: bool = False,
    why_not: str = "",
) -> Callable[[Callable[[Setting], float]], Callable[[Setting], float]]:
    """Makes ``function(setting) -> error`` a certificate.

    Args:
        id: row number, with a letter for further identities of the row.
        name: the identity in words.
        dtypes: those it is stated for.
        tolerance: largest error that passes, for each dtype or for all; default ``TOLERANCE``.
        kernel: whether the setting's kernel does the arithmetic.
        why_not: what is said to the user in other dtypes.

    Raises:
        ValueError: the id is taken, or is none.
    """
    if not re.fullmatch(r"\d+[a-z]?", id):
        raise ValueError(f"certificate id {id!r} is no row number with a letter")
    if id in CERTIFICATES:
        raise ValueError(f"certificate {id} exists: {CERTIFICATES[id].name}")
    if tolerance is None:
        tolerance = TOLERANCE
    allowed = {d: tolerance if isinstance(tolerance, float | int) else tolerance[d] for d in dtypes}
    names = ", ".join(map(dtype_name, allowed))

    def add(function: Callable[[Setting], float]) -> Callable[[Setting], float]:
        CERTIFICATES[id] = Certificate(id, name, function, allowed, kernel, why_not or f"it is stated for {names}")
        return function

    return add


def ordered() -> list[Certificate]:
    """All certificates by row number and letter."""
    return sorted(CERTIFICATES.values(), key=lambda c: (int(re.findall(r"\d+", c.id)[0]), c.id))


def dtype_name(dtype: torch.dtype) -> str:
    """``float32`` for ``torch.float32``."""
    return str(dtype).removeprefix("torch.")


def run(item: Certificate, *, device: str = "cpu", dtype: torch.dtype = torch.float64, kernel: str = "auto") -> Result:
    """Measures one certificate. It never raises: what goes wrong inside is a failure with a reason.

    A kernel that refuses by name makes the certificate skipped, with the kernel's own objection.
    """
    tolerance = item.tolerance.get(dtype)
    about: dict[str, Any] = {"id": item.id, "name": item.name, "tolerance": tolerance, "device": device}
    about |= {"dtype": dtype_name(dtype), "kernel": kernel if item.kernel else "any"}
    if tolerance is None:
        return Result(**about, passed=None, error=None, reason=item.why_not)
    if device.startswith("mps") and dtype == torch.float64:
        return Result(**about, passed=None, error=None, reason="this device has no float64")
    setting = Setting(device, dtype, kernel, seed=zlib.crc32(item.id.encode()))
    devices = [torch.device(device)] if device.startswith("cuda") else []
    try:
        with torch.random.fork_rng(devices=devices):
            torch.manual_seed(setting.seed)
            error = float(item.measure(setting))
    except Skip as skip:
        return Result(**about, passed=None, error=None, reason=str(skip))
    except Exception as problem:
        objection = _objection(problem, kernel) if item.kernel else None
        if objection:
            return Result(**about, passed=None, error=None, reason=objection)
        reason = f"{type(problem).__name__}: {' '.join(str(problem).split())}"
        return Result(**about, passed=False, error=None, reason=reason)
    return Result(**about, passed=error <= tolerance, error=error if math.isfinite(error) else None)


def _objection(problem: Exception, kernel: str) -> str | None:
    """What a kernel called by name said against the request, None where the problem is another."""
    start = f"kernel {kernel!r} cannot serve this request: "
    text = str(problem)
    if kernel == "auto" or not isinstance(problem, ValueError) or not text.startswith(start):
        return None
    return f"kernel {kernel}: {text.removeprefix(start)}"


def gap(actual: Tensor, expected: Tensor) -> float:
    """Largest difference of two tensors, relative to the largest entry expected; infinite where one is not finite.

    Raises:
        ValueError: they differ in shape, which broadcasting would hide.
    """
    if actual.shape != expected.shape:
        raise ValueError(f"shapes differ: {tuple(actual.shape)} and {tuple(expected.shape)}")
    a, b = actual.detach().double(), expected.detach().double()
    scale = b.abs().max().clamp_min(1e-30) if b.numel() else 1.0
    error = float(((a - b).abs() / scale).max()) if a.numel() else 0.0
    return error if math.isfinite(error) else math.inf


def gaps(*pairs: tuple[Tensor, Tensor]) -> float:
    """The largest of several gaps."""
    return max(gap(actual, expected) for actual, expected in pairs)


def gradients(out: Tensor, *leaves: Tensor) -> list[Tensor]:
    """Gradients of a fixed, uneven weighted sum of ``out``: every entry counts, and each one differently."""
    weight = torch.linspace(-1, 1, out.numel(), device=out.device, dtype=torch.float64).to(out.dtype).view_as(out)
    return list(torch.autograd.grad((out * weight).sum(), leaves))


def holds(claim: bool) -> float:
    """A claim that is true or false, as an error: 0 or 1."""
    return 0.0 if claim else 1.0


def refuses(call: Callable[[], object], *words: str) -> float:
    """0 where ``call`` raises a ``ValueError`` whose message has all these words, 1 where not."""
    try:
        call()
    except ValueError as error:
        return holds(all(word in str(error) for word in words))
    return 1.0
