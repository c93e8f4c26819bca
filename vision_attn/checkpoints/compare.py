"""Two models on the same images: how far their logits are apart, and where they begin to differ.

This is the certificate of a converter. Some libraries initialise heads, biases or layer scales with zeros, and a
comparison of such models proves nothing: ``randomised`` replaces every tensor first.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4}
"""Largest difference of logits allowed, as a share of the largest logit."""


@dataclasses.dataclass(frozen=True)
class Comparison:
    """What was seen in one dtype.

    Attributes:
        dtype: of weights and images.
        difference: the largest of all logits.
        relative: that as a share of the largest logit of the peer.
        allowed: what ``relative`` may be.
        first: the first module of ours whose output differs by more than is allowed, in the order of the forward pass;
            None where none does or none can be compared.
        compared: how many modules were compared.
        constant: all logits are equal, so the comparison proves nothing.
    """

    dtype: str
    difference: float
    relative: float
    allowed: float
    first: str | None
    compared: int
    constant: bool

    @property
    def holds(self) -> bool:
        """Whether the two are the same function, as far as this shows."""
        return self.relative <= self.allowed and not self.constant


def compare(
    ours: nn.Module,
    peer: nn.Module,
    images: Tensor,
    *,
    dtype: torch.dtype = torch.float64,
    allowed: float | None = None,
    stage: Callable[[str], str | None] | None = None,
) -> Comparison:
    """Both models in evaluation mode on the same images. Both are converted to ``dtype`` and stay so.

    Args:
        ours: a model of this zoo.
        peer: another, from (B, C, H, W) to (B, classes) or to an object with ``logits``; a detector's also with boxes.
        images: (B, C, H, W).
        dtype: in which they compute.
        allowed: relative difference; ``TOLERANCE`` by default.
        stage: the peer's name for a module of ours; the same name by default.
    """
    allowed = TOLERANCE[dtype] if allowed is None else allowed
    ours, peer, images = ours.to(dtype).eval(), peer.to(dtype).eval(), images.to(dtype)
    name_of = stage or (lambda name: name)
    theirs = dict(peer.named_modules())
    pairs = {name: name_of(name) for name, _ in ours.named_modules() if name}
    pairs = {name: other for name, other in pairs.items() if other in theirs}
    with _all_tokens(ours), _all_tokens(peer):
        got, mine = _watched(ours, images, set(pairs))
        expected, other = _watched(peer, images, {str(name) for name in pairs.values()})
    first, compared = None, 0
    for name, output in mine.items():  # in the order in which they were done
        reference = other.get(str(pairs[name]))
        if reference is not None and reference.shape == output.shape:
            compared += 1
            if first is None and not _relative(output, reference) <= allowed:
                first = name
    return Comparison(
        dtype=str(dtype).removeprefix("torch."),
        difference=float((got - expected).abs().max()) if got.shape == expected.shape else float("inf"),
        relative=_relative(got, expected),
        allowed=allowed,
        first=first,
        compared=compared,
        constant=bool((expected == expected.flatten()[0]).all()),
    )


_TABLES = ("relative_coords_table",)


def randomised(state: Mapping[str, Tensor], seed: int = 0) -> dict[str, Tensor]:
    """Fresh values for every tensor, at which the signal neither dies nor explodes; variances stay positive.

    Tables that follow from the sizes alone (torchvision keeps some in its files) stay as they are.
    """
    generator = torch.Generator().manual_seed(seed)
    found = {}
    for key, value in state.items():
        if not value.is_floating_point() or key.endswith(_TABLES):
            found[key] = value
            continue
        noise = torch.randn(value.shape, generator=generator, dtype=torch.float64)
        fan = max(value[0].numel(), 1) if value.ndim > 1 else 1
        if key.endswith("running_var"):
            drawn = noise.abs() + 0.5
        elif value.ndim > 1:
            drawn = noise / fan**0.5
        else:
            drawn = 0.3 * noise + (1.0 if key.endswith("weight") or "gamma" in key or key.endswith("scale") else 0.0)
        found[key] = drawn.to(value.dtype)
    return found


def picture(model: Any, batch: int = 2, seed: int = 0) -> Tensor:
    """Random images of the size that the model was made for: (B, C, H, W), float64."""
    args = model.config["args"]
    # a detector's preprocessing says how long the sides of any image become
    size = model.img_size if model.config["task"] == "detection" else model.config["preprocess"]["size"]
    height, width = size
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(batch, args.get("in_chans", 3), height, width, generator=generator, dtype=torch.float64)


@contextlib.contextmanager
def _all_tokens(model: Any) -> Iterator[None]:
    """Ours leave out what the head does not read; other libraries compute it, and layers are compared."""
    before = getattr(model, "all_tokens", None)
    if before is not None:
        model.all_tokens = True
    try:
        yield
    finally:
        if before is not None:
            model.all_tokens = before


def _relative(output: Tensor, reference: Tensor) -> float:
    if output.shape != reference.shape:
        return float("inf")
    scale = float(reference.abs().max())
    difference = float((output - reference).abs().max())
    return difference / scale if scale > 0 else difference


def _watched(model: nn.Module, images: Tensor, names: set[str]) -> tuple[Tensor, dict[str, Tensor]]:
    """The logits, and the outputs of the modules named, in the order in which they were done first."""
    seen: dict[str, Tensor] = {}
    handles = []
    for name, module in model.named_modules():
        if name in names:
            handles.append(module.register_forward_hook(_note(seen, name)))
    try:
        with torch.no_grad():
            output = model(images)
    finally:
        for handle in handles:
            handle.remove()
    return answer(output), seen


def answer(output: Any) -> Tensor:
    """The logits in what a model gives; of a detector, ours or transformers', with the boxes behind them."""
    detector = isinstance(output, Mapping) and "pred_boxes" in output
    if not detector:
        return getattr(output, "logits", output)
    logits = output["pred_logits"] if "pred_logits" in output else output["logits"]
    return torch.cat([logits, output["pred_boxes"]], dim=-1)


def _note(seen: dict[str, Tensor], name: str) -> Callable[..., None]:
    def hook(_module: nn.Module, _inputs: Any, output: Any) -> None:
        output = output[0] if isinstance(output, tuple) and output else output
        if isinstance(output, Tensor) and name not in seen:
            # a grid of features as tokens: some keep the patches as an image, (B, D, h, w)
            seen[name] = output.flatten(2).transpose(1, 2) if output.ndim == 4 else output

    return hook
