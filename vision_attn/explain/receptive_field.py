"""The effective receptive field: which pixels really move a feature (Luo et al. 2016, arXiv 1701.04128)."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor, nn

from vision_attn.errors import UserError, closest
from vision_attn.explain.planes import evaluating, token_plane


@dataclasses.dataclass(frozen=True)
class ReceptiveField:
    """How strongly each pixel moves the feature in the middle.

    Attributes:
        strength: (H, W), sums to 1: the root of the mean, over images, of the squared derivatives of all channels of
            the feature by all channels of the pixel.
        centre: (y, x) the middle of the feature in pixels.
    """

    strength: Tensor
    centre: tuple[float, float]

    def side(self, share: float = 0.9) -> float:
        """Side in pixels of the smallest square around the centre that holds a share of the strength."""
        height, width = self.strength.shape
        y, x = torch.arange(height) + 0.5 - self.centre[0], torch.arange(width) + 0.5 - self.centre[1]
        reach = torch.maximum(y.abs()[:, None], x.abs()[None]).flatten()  # half the side that just reaches a pixel
        order = reach.argsort()
        mass = self.strength.flatten()[order].double().cumsum(0)
        reach = reach[order].double()
        at = int((mass < share).sum().clamp_max(len(mass) - 1))
        return 2 * float(reach[at]) + 1

    def gaussian_side(self) -> float:
        """The paper's size: root of the number of pixels with more than 1 − 95.45 % of the largest strength."""
        return float((self.strength > (1 - 0.9545) * self.strength.max()).sum()) ** 0.5


def effective_receptive_field(
    model: nn.Module, images: Tensor, *, layer: str | None = None, seed: int = 0
) -> ReceptiveField:
    """The effective receptive field of the feature in the middle of a layer, over a batch of images.

    The derivatives of all channels at once cost one backward pass: for v with independent entries of mean 0 and
    variance 1, the mean of (vᵀ J)² is the sum of the squares of the Jacobian's rows.

    Args:
        model: a CNN or a transformer; left as it is.
        images: (B, C, H, W), normalized; more images give a smoother field.
        layer: name of a module whose result is (B, D, h, w) or tokens (B, N, D); ``forward_features`` by default, the
            last features before pooling.
        seed: of v.

    Raises:
        UserError: no such layer, or features that do not lie on the image.
    """
    where = next(model.parameters())
    x = images.to(where.device, where.dtype).detach().requires_grad_()
    with evaluating(model), torch.enable_grad():
        features = _features(model, x, layer)
        unit, centre = _middle(model, features, (images.shape[-2], images.shape[-1]), layer)  # (B, D)
        noise = torch.randn(unit.shape, generator=torch.Generator().manual_seed(seed)).to(unit)
        (gradient,) = torch.autograd.grad(unit, x, noise)
    strength = gradient.detach().float().square().sum(1).mean(0).sqrt().cpu()  # (H, W)
    total = strength.sum()
    if not torch.isfinite(total) or total == 0:
        raise UserError("the feature in the middle does not depend on the image (or its gradient is not finite).")
    return ReceptiveField(strength / total, centre)


def _features(model: nn.Module, x: Tensor, layer: str | None) -> Tensor:
    if layer is None:
        forward: Any = getattr(model, "forward_features", None)
        if forward is None:
            raise UserError(f"{type(model).__name__} has no forward_features: name a layer with layer=….")
        return forward(x)
    modules = dict(model.named_modules())
    if layer not in modules:
        raise UserError(f"{type(model).__name__} has no layer {layer!r}.{closest(layer, modules)}")
    seen: list[Any] = []
    handle = modules[layer].register_forward_hook(lambda module, inputs, output: seen.append(output))
    try:
        model(x)
    finally:
        handle.remove()
    if not seen:
        raise UserError(f"layer {layer!r} does not run in a forward pass: name another.")
    return seen[-1][0] if isinstance(seen[-1], tuple) else seen[-1]


def _middle(
    model: nn.Module, features: Tensor, size: tuple[int, int], layer: str | None
) -> tuple[Tensor, tuple[float, float]]:
    """(B, D) the feature in the middle of the grid, and its middle (y, x) in pixels."""
    if features.dim() == 3:
        plane = token_plane(model, features.shape[1], size)
        if plane is not None:
            row, column = plane.grid[0] // 2, plane.grid[1] // 2
            place = int(plane.places()[row, column])
            return features[:, place], ((row + 0.5) * plane.stride[0], (column + 0.5) * plane.stride[1])
    if features.dim() == 4:
        rows, columns = features.shape[-2:]
        row, column = rows // 2, columns // 2
        return features[:, :, row, column], ((row + 0.5) * size[0] / rows, (column + 0.5) * size[1] / columns)
    raise UserError(f"the features of {layer or 'forward_features'}, {tuple(features.shape)}, do not lie on the image.")
