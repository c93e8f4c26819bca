"""Looking for NaN where it enters: one NaN in a key spoils every row of the result, and the row no longer tells whence.

Looking costs a pass over the inputs and a wait for the device, so it is done only inside ``checking()``.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor

_checking = 0  # how many ``checking()`` blocks are open, in any thread; a plain number, which torch.compile can read

AXES = ("batch", "head", "token", "channel")
PAIR_AXES = ("batch", "head", "query", "key")


@contextmanager
def checking() -> Iterator[None]:
    """Inside this block, attention refuses inputs that are not finite and says which one and where.

    Example::

        with checking():
            model(images)  # ValueError: k holds 1 NaN, the first at batch 0, head 2, token 5, channel 1
    """
    global _checking
    _checking += 1
    try:
        yield
    finally:
        _checking -= 1


def inspect(**operands: Tensor | None) -> None:
    """Called by the core with what it was given. Outside ``checking()`` it does nothing.

    Args:
        **operands: q, k, v: (B, H, N, d) and bias, broadcastable to (B, H, N, M), by name. A bias may hold −∞, which
            hides a pair; the others may hold nothing but finite numbers.

    Raises:
        ValueError: naming the operand, what it holds, how often, and the first place.
    """
    if not _checking:
        return
    for name, value in operands.items():
        if value is None or value.is_meta or not value.is_floating_point():
            continue
        hides = name == "bias"
        bad = value.isnan() | value.isposinf() if hides else ~value.isfinite()
        if bool(bad.any()):
            raise ValueError(_complaint(name, value.detach(), bad, PAIR_AXES if hides else AXES))


def _complaint(name: str, value: Tensor, bad: Tensor, axes: tuple[str, ...]) -> str:
    first = bad.nonzero()[0].tolist()
    what = "NaN" if value[tuple(first)].isnan() else "infinity"
    count = int((value.isnan() if what == "NaN" else value.isinf() & bad).sum())
    names = axes[-len(first) :] if len(first) <= len(axes) else [f"axis {i}" for i in range(len(first))]
    place = ", ".join(f"{axis} {index}" for axis, index in zip(names, first, strict=True))
    shape = " × ".join(map(str, value.shape))
    return (
        f"{name} ({shape}) holds {count} {what}, the first at {place}: look at what computed {name}, not at attention"
    )
