"""The tensors out of what people wrap around them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

NESTED = ("state_dict_ema", "model_ema", "ema_state_dict", "state_dict", "model_state_dict", "model", "net", "params")
"""Where others keep the tensors in a dictionary. Averaged weights first, as in timm: those were reported."""

_PREFIXES = (
    "module.",
    "_orig_mod.",
    "model.",
    "net.",
    "network.",
)  # of DataParallel, torch.compile, Lightning and friends


def unwrap(content: Any) -> tuple[dict[str, Tensor] | None, str | None]:
    """The dictionary of tensors inside, and the name of the model where the file gives one.

    Args:
        content: what ``torch.load`` returned.

    Returns:
        None for the tensors where there are none; timm's training script calls the name ``arch``.
    """
    arch = content.get("arch") if isinstance(content, dict) else None
    for key in NESTED:
        if isinstance(content, dict) and isinstance(content.get(key), dict) and content[key]:
            content = content[key]
            break
    if not isinstance(content, dict) or not content:
        return None, None
    if not all(isinstance(key, str) and isinstance(value, Tensor) for key, value in content.items()):
        return None, None
    return content, arch if isinstance(arch, str) else None


def strip(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The parameters' own names, without what wrappers of a model put before them, in any order."""
    names = [key for key in state if key != "n_averaged"]  # a counter of torch's AveragedModel, beside the module
    if len(names) < len(state) and names and all(key.startswith("module.") for key in names):
        state = {key: state[key] for key in names}
    found = dict(state)
    again = bool(found)
    while again:
        again = False
        for prefix in _PREFIXES:
            if all(key.startswith(prefix) for key in found):
                found = {key[len(prefix) :]: value for key, value in found.items()}
                again = True
    return {key.replace("_orig_mod.", ""): value for key, value in found.items()}
