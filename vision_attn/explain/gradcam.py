"""Grad-CAM (Selvaraju et al. 2017, arXiv 1610.02391) of CNNs and transformers, by the ``grad-cam`` package.

The package leaves it to its users to say which layer to look at and how its tokens lie on the image. That is here.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from vision_attn.errors import UserError, closest
from vision_attn.explain.planes import evaluating, token_plane
from vision_attn.explain.relevance import one_class_each
from vision_attn.models.glimpse import GlimpseNet


def grad_cam(
    model: nn.Module, images: Tensor, *, classes: Sequence[int] | None = None, layer: str | None = None
) -> Tensor:
    """Where features that speak for a class lie.

    Args:
        model: a classifier; left as it is.
        images: (B, C, H, W), normalized.
        classes: one class for each image; the likeliest by default.
        layer: name of the module to look at; by default the last with a grid of features, see ``target_layer``.

    Returns:
        (B, H, W), 0 to 1 in each image.

    Raises:
        UserError: the package is missing, there is no such layer or class, or the model is no classifier whose features
            lie on the image.
    """
    try:
        from pytorch_grad_cam import GradCAM
        from pytorch_grad_cam.utils.model_targets import ClassifierOutputTarget
    except ImportError as error:
        raise UserError('Grad-CAM needs the package grad-cam: pip install "vision_attn[explain]"') from error
    where = next(model.parameters())
    x = images.to(where.device, where.dtype)
    logits = _logits(model, x[:1]).expand(len(x), -1)
    if classes is not None:
        one_class_each(classes, logits)
    name = target_layer(model, x[:1]) if layer is None else layer
    modules = dict(model.named_modules())
    if name not in modules:
        raise UserError(f"{type(model).__name__} has no layer {name!r}.{closest(name, modules)}")
    targets = None if classes is None else [ClassifierOutputTarget(int(c)) for c in classes]
    size = (x.shape[-2], x.shape[-1])
    reshape = reshape_transform(model, size)
    # the parameters ask for no gradients, so the image must
    with evaluating(model), _frozen(model), torch.enable_grad(), GradCAM(model, [modules[name]], reshape) as cam:
        found = cam(x.detach().requires_grad_(), targets)
    return torch.from_numpy(found).float()


def reshape_transform(model: nn.Module, size: tuple[int, int]) -> Callable[[Tensor], Tensor]:
    """The function with which ``grad-cam`` brings tokens (B, N, D) onto the grid, (B, D, rows, columns).

    Class and register tokens are left out; maps (B, D, rows, columns) pass through, so it serves CNNs too.

    Args:
        model: a ViT, CCT, Swin or CNN.
        size: (H, W) of the images in pixels.
    """

    def reshape(features: Any) -> Tensor:
        features = features[0] if isinstance(features, tuple) else features
        if features.dim() == 4:
            return features
        plane = token_plane(model, features.shape[1], size) if features.dim() == 3 else None
        if plane is None:
            raise UserError(f"features {tuple(features.shape)} do not lie on a grid; name another layer")
        return plane.to_image(features.transpose(1, 2))

    return reshape


def target_layer(model: Any, images: Tensor) -> str:
    """The last module whose result still lies on the image and that the answer depends on by a gradient.

    A class token, or the last token, is all that the head reads of a transformer's last layer: the last that gradients
    reach patches through is the norm before its attention.

    Raises:
        UserError: there is none.
    """
    none = f"{type(model).__name__} has no layer of features on the image that lead to its answer, so no Grad-CAM."
    if isinstance(model, GlimpseNet):  # what it classifies are squares cut out of the image
        raise UserError(f"{none} attention_maps shows where its glimpses lie.")
    blocks = getattr(model, "blocks", None)
    if isinstance(blocks, nn.ModuleList) and len(blocks):
        last = f"blocks.{len(blocks) - 1}"
        return f"{last}.norm1" if getattr(model, "global_pool", "") in ("token", "last") else last
    if hasattr(model, "feature_channels") and hasattr(model, "layers"):  # a Swin
        return f"layers.{len(model.layers) - 1}.blocks.{len(model.layers[-1].blocks) - 1}"
    found: dict[str, Tensor] = {}

    def note(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, inputs: Any, output: Any) -> None:
            if (
                isinstance(output, Tensor)
                and output.dim() == 4
                and min(output.shape[-2:]) > 1
                and output.shape[0] == len(images)  # others are parts of images that were put into the batch
                and output.requires_grad
            ):
                found[name] = output

        return hook

    handles = [module.register_forward_hook(note(name)) for name, module in model.named_modules() if name]
    try:
        with evaluating(model), _frozen(model), torch.enable_grad():
            answer = model(images.detach().clone().requires_grad_()).sum()
    finally:
        for handle in handles:
            handle.remove()
    if not found or not answer.requires_grad:
        raise UserError(none)
    gradients = torch.autograd.grad(answer, list(found.values()), allow_unused=True)
    for name, gradient in reversed(list(zip(found, gradients, strict=True))):
        if gradient is not None:
            return name
    raise UserError(none)


def _logits(model: nn.Module, images: Tensor) -> Tensor:
    """(B, classes) of a classifier."""
    with evaluating(model), torch.no_grad():
        logits = model(images)
    if not isinstance(logits, Tensor) or logits.dim() != 2:
        raise UserError(f"{type(model).__name__} is no classifier, so there is no class for Grad-CAM to explain.")
    return logits


@contextlib.contextmanager
def _frozen(model: nn.Module) -> Iterator[None]:
    """Parameters ask for no gradients, and have those they had afterwards: the package clears them."""
    kept = [(p, p.requires_grad, p.grad) for p in model.parameters()]
    for p, _, _ in kept:
        p.requires_grad_(False)
    try:
        yield
    finally:
        for p, wanted, gradient in kept:
            p.requires_grad_(wanted)
            p.grad = gradient
