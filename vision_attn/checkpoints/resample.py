"""The tensors of a model at another image size or patch size, as the libraries they come from do it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from vision_attn.attention import resample_grid
from vision_attn.attention.relative import resample_offsets


def resample(state: Mapping[str, Tensor], before: Any, after: Any, antialias: bool = True) -> dict[str, Tensor]:
    """Positions, relative biases and patches of ``before``, to fit ``after``.

    Args:
        state: the tensors of ``before``.
        before: the model they are for; its weights are not looked at, so it may be on the meta device.
        after: the model they shall fill.
        antialias: of the positions; timm filters, transformers does not.

    Returns:
        ``state`` with those tensors replaced that depend on the size.
    """
    found = dict(state)
    patches = "patch_embed.proj.weight"
    if patches in state and hasattr(after, "patch_embed") and hasattr(after.patch_embed, "proj"):
        found[patches] = resample_patches(state[patches], tuple(after.patch_embed.proj.weight.shape[-2:]))
    if not hasattr(after, "grid_size") or before.grid_size == after.grid_size:
        return found
    own = after.state_dict()
    if "pos_embed" in state and "pos_embed" in own:
        prefix = getattr(after, "embedded_prefix", 0)
        change = resample_grid if antialias else _unfiltered
        found["pos_embed"] = change(state["pos_embed"], before.grid_size, after.grid_size, prefix)
    for key, value in state.items():
        if key.endswith("position.table") and key in own and own[key].shape != value.shape:
            # of the whole grid, or of one window of it
            old, new = (model.get_submodule(key.removesuffix(".table")).grid for model in (before, after))
            found[key] = resample_offsets(value, old, new)
    return found


def resample_patches(weight: Tensor, size: tuple[int, ...]) -> Tensor:
    """The projection of patches of another size, so that a resized image gives the same tokens.

    PI-resize of FlexiViT (Beyer et al. 2022, arXiv 2212.08013): with B the matrix that resizes a patch, the new weights
    are the least-squares solution of ⟨w', B x⟩ = ⟨w, x⟩ for every patch x.

    Args:
        weight: (D, C, p, q).
        size: (p', q').

    Returns:
        (D, C, p', q').
    """
    old = tuple(weight.shape[-2:])
    if old == tuple(size):
        return weight
    basis = torch.eye(old[0] * old[1], dtype=torch.float64).view(-1, 1, *old)
    resized = F.interpolate(basis, size=tuple(size), mode="bicubic", antialias=True, align_corners=False).flatten(1)
    new = weight.double().flatten(2) @ torch.linalg.pinv(resized).t()  # resized is Bᵀ, (p q, p' q')
    return new.unflatten(2, tuple(size)).to(weight.dtype)


def _unfiltered(position: Tensor, old: tuple[int, int], new: tuple[int, int], num_prefix: int = 0) -> Tensor:
    """``resample_grid`` without antialiasing."""
    prefix, table = position[:, :num_prefix], position[:, num_prefix:]
    table = table.reshape(1, *old, -1).permute(0, 3, 1, 2)
    table = F.interpolate(table.float(), size=tuple(new), mode="bicubic", align_corners=False)
    return torch.cat([prefix, table.permute(0, 2, 3, 1).flatten(1, 2).to(position.dtype)], dim=1)
