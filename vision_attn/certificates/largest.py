"""How large the tensors are that a computation makes: what a cost claim can be held to without a stopwatch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class _Watch(TorchDispatchMode):
    """Sees what every operation returns, those of backward passes and custom functions included."""

    largest = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = function(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, Tensor):
                # memory, not shape: an expanded tensor holds fewer numbers than it shows
                self.largest = max(self.largest, leaf.untyped_storage().nbytes() // leaf.element_size())
        return out


def largest_tensor(call: Callable[[], object]) -> int:
    """Numbers in the largest tensor that any operation of ``call`` returns."""
    with _Watch() as watch:
        call()
    return watch.largest
