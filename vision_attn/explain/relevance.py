"""Gradient-weighted relevance (Chefer et al. 2021, arXiv 2103.15679): weights that matter to one answer.

A weight counts as far as the answer would grow with it: Ā = mean over heads of the positive part of ∂y/∂A ⊙ A. The
gradient needs no weights in the graph: with O = A V it is ∂y/∂O Vᵀ, so models stay on their fused kernels. It is taken
from each layer's result and not from parameters, so it is the same whichever of these are frozen.

A Performer's map is implied by its result, and so is the relevance that follows from it. Linformer is refused.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from vision_attn.attention.recorder import NotRecorded
from vision_attn.errors import UserError
from vision_attn.explain.chain import chain_of, refuse_signed
from vision_attn.explain.maps import Images, Recording, recording


def relevance(model: nn.Module, images: Images, *, classes: Sequence[int] | None = None) -> Tensor:
    """Relevance of each patch to one class of each image.

    Args:
        model: a ViT, CCT or Swin; left as it is.
        images: (B, C, H, W), normalized.
        classes: one class for each image; the likeliest by default.

    Returns:
        (B, rows, columns) of patches, 0 and more.

    Raises:
        UserError: a model of another kind or with Linformer, or no such class.
    """
    with torch.enable_grad(), chain_of(model, images, gradients=True) as chain:
        logits = chain.run.output
        chosen = logits.argmax(-1) if classes is None else one_class_each(classes, logits)
        _differentiate(chain.run, logits.gather(1, chosen[:, None]).sum())
        found = chain.follow(lambda name, rows: _through(chain.run, name, rows))
    return found[:, 0]


def one_class_each(classes: Sequence[int], logits: Tensor) -> Tensor:
    """(B,) classes to be explained, for logits (B, classes).

    Raises:
        UserError: not one of the classes for each image.
    """
    batch, count = logits.shape
    if len(classes) != batch or any(not 0 <= c < count for c in classes):
        raise UserError(f"classes={list(classes)}: one of 0 to {count - 1} for each of the {batch} images")
    return torch.as_tensor(list(classes), device=logits.device)


def _differentiate(run: Recording, answer: Tensor, *, again: bool = False) -> None:
    try:
        run.recorder.differentiate(answer, again=again)
    except NotRecorded as error:
        raise UserError(f"{type(run.model).__name__} has no relevance: {error}.") from error


@torch.no_grad()
def _through(run: Recording, name: str, rows: Tensor) -> Tensor:
    """rows · (1 + Ā), (B, Q, N) → (B, Q, N)."""
    found = rows.clone()
    for start, step in _weighted_pieces(run, name):
        found += rows[..., start : start + step.shape[1]] @ step
    return found


@torch.no_grad()
def _weighted(run: Recording, name: str) -> Tensor:
    """(B, N, M): Ā, the mean over heads of the positive part of gradient times weight."""
    call = run.recorder.calls_of(name)[0]
    found = torch.zeros(call.shape[0], *call.shape[2:], device=call.operands.q.device)
    for start, step in _weighted_pieces(run, name):
        found[:, start : start + step.shape[1]] = step
    return found


def _weighted_pieces(run: Recording, name: str) -> Iterator[tuple[int, Tensor]]:
    """The same some rows at a time; nothing where the answer does not depend on the layer."""
    call = run.recorder.calls_of(name)[0]
    if call.gradient is None or call.values is None:
        return
    heads, values = call.gradient.shape[1], call.values.float()
    values = values.repeat_interleave(heads // values.shape[1], 1).transpose(-1, -2)  # (B, H, e, M)
    for start, weights in run.pieces(name):
        gradient = call.gradient[:, :, start : start + weights.shape[2]].float() @ values
        yield start, gradient.mul_(weights).clamp_min_(0).mean(1)


def detection_relevance(
    model: nn.Module, images: Images, queries: Sequence[int], classes: Sequence[int], *, mask: Tensor | None = None
) -> Tensor:
    """Relevance of each image token to what some object queries of one image say; the rules for two modalities.

    Args:
        model: a detection transformer; left as it is.
        images: one image, (1, C, H, W) or a list of one.
        queries: object queries.
        classes: the class of each, whose logit is explained.
        mask: (1, H, W), True = image.

    Returns:
        (Q, rows, columns) of the encoder's grid.

    Raises:
        UserError: a model of another kind or with Linformer, or no such query or class.
    """
    with torch.enable_grad(), recording(model, images, mask=mask, gradients=True, hold="rows") as run:
        kinds = _kinds(run)
        logits = run.output["pred_logits"]
        if logits.shape[0] != 1:
            raise UserError(f"detection_relevance explains one image at a time, not {logits.shape[0]}.")
        for what, asked, count in (("query", queries, logits.shape[1]), ("class", classes, logits.shape[2])):
            bad = [i for i in asked if not 0 <= i < count]
            if bad:
                raise UserError(f"there is no {what} {bad[0]}: {type(model).__name__} has 0 to {count - 1}.")
        found = []
        for query, label in zip(queries, classes, strict=True):
            _differentiate(run, logits[0, query, label], again=True)
            found.append(_bimodal(run, *kinds)[query])
    assert run.memory is not None
    return torch.stack(found).unflatten(1, run.memory)


def _kinds(run: Recording) -> tuple[list[str], list[str], list[str]]:
    """Names of the encoder's layers, and of the decoder's self- and cross-attention."""
    names = run.names()
    encoder = [name for name in names if name.startswith("encoder.")]
    own = [name for name in names if name.startswith("decoder.") and name.endswith("self_attn")]
    cross = [name for name in names if name.startswith("decoder.") and name.endswith("cross_attn")]
    if not cross or not isinstance(run.output, dict) or run.memory is None:
        raise UserError(f"{type(run.model).__name__} is no detection transformer; use relevance(…) for a classifier.")
    refuse_signed(run, [*encoder, *own, *cross])
    return encoder, own, cross


def _bimodal(run: Recording, encoder: list[str], own: list[str], cross: list[str]) -> Tensor:
    """(N, M): relevance of image tokens to queries (equations 5 to 10 of the paper)."""
    images: Tensor | None = None
    for name in encoder:
        step = _weighted(run, name)[0]
        images = torch.eye(step.shape[-1], device=step.device) if images is None else images
        images = images + step @ images
    queries: Tensor | None = None
    found: Tensor | None = None
    for self_name, cross_name in zip(own, cross, strict=True):
        step = _weighted(run, self_name)[0]
        queries = torch.eye(step.shape[-1], device=step.device) if queries is None else queries
        queries = queries + step @ queries
        found = found + step @ found if found is not None else None
        step = _weighted(run, cross_name)[0]  # (N, M)
        seen = step if images is None else step @ _row_normalized(images)
        seen = _row_normalized(queries).T @ seen
        found = seen if found is None else found + seen
    assert found is not None
    return found


def _row_normalized(relevance: Tensor) -> Tensor:
    """What was gained beyond the token itself, made to sum to 1, and the token itself (equations 8 and 9)."""
    eye = torch.eye(relevance.shape[-1], device=relevance.device)
    gained = relevance - eye
    return gained / gained.sum(-1, keepdim=True).clamp_min(1e-12) + eye
