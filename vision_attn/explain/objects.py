"""What a detector looked at for each object it found, and where its queries look for objects."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from vision_attn.errors import UserError
from vision_attn.explain.faithfulness import Faithfulness, faithfulness, joined
from vision_attn.explain.maps import Recording, recording
from vision_attn.explain.planes import Plane
from vision_attn.explain.relevance import detection_relevance
from vision_attn.explain.views import Choice, Detection, PictureView, layer_views, run_one


def detector_view(
    model: Any, image: Tensor, shown: Tensor, source: str, choice: Choice, notes: list[str] | None = None
) -> PictureView:
    """One image (C, H, W) through a detector's eyes, with a ``Detection`` for each object found.

    ``notes`` is told what could not be shown, and why.
    """
    from vision_attn.detection.postprocess import postprocess

    with torch.no_grad(), run_one(model, image, choice) as run:
        layers = layer_views(run, choice)
        found = postprocess(run.output, [(1, 1)], model.classification, threshold=choice.threshold)[0]
    # as ``predict`` calls them: by name, or by the number that the category has in its file
    ids = model.config.get("category_ids") or range(model.num_classes)
    names = model.config.get("labels") or [str(i) for i in ids]
    objects: dict[int, Detection] = {}  # a query may stand for several classes: its likeliest is shown
    for label, score, query, box in zip(
        *(found[key].tolist() for key in ("labels", "scores", "queries", "boxes")), strict=True
    ):
        if query not in objects and len(objects) < choice.most:
            objects[query] = Detection(str(names[label]), label, score, query, tuple(box), {})  # boxes as shares
    shown_objects = list(objects.values())
    if shown_objects:
        _object_maps(model, image, shown_objects, [] if notes is None else notes)
    answer = ", ".join(f"{o.label} {o.score:.0%}" for o in shown_objects) or "nothing found"
    return PictureView(source, shown, answer, layers, {}, shown_objects)


def _object_maps(model: Any, image: Tensor, objects: list[Detection], notes: list[str]) -> None:
    """Encoder self-attention at the middle of each box, decoder cross-attention of its query, and relevance."""
    with torch.no_grad(), recording(model, image[None], hold="rows") as run:
        for name in run.names():
            queries, keys = run.planes(name)
            implied = " (implied)" if run.recorder.implied(name) else ""
            if name.startswith("decoder.") and name.endswith("cross_attn") and keys is not None:
                title = f"cross-attention, layer {_number(name)}{implied}"
                tokens = [o.query for o in objects]
            elif name.startswith("encoder.") and queries is not None and keys is not None:
                title = f"encoder, at its centre{implied}"  # the last layer's stays
                tokens = [_token_at(queries, o.box) for o in objects]
            else:
                continue
            for o, m in zip(objects, _rows(run, name, tokens, keys), strict=True):
                o.maps[title] = m
    found, classes = [o.query for o in objects], [o.index for o in objects]
    try:
        explained = detection_relevance(model, image[None], found, classes).cpu()
    except UserError as error:  # a mechanism that relevance is not defined for
        notes.append(str(error))
        return
    for o, m in zip(objects, explained, strict=True):
        o.maps["relevance"] = m


def _rows(run: Recording, name: str, tokens: list[int], keys: Plane) -> Tensor:
    """(n, R, C) what some tokens look at, mean over heads."""
    rows = torch.tensor(tokens, device=run.recorder.calls_of(name)[0].operands.q.device)
    return keys.to_image(run.weights(name, rows=rows)[0].mean(0)).cpu()


def _token_at(plane: Plane, box: tuple[float, float, float, float]) -> int:
    """The token in the middle of a box."""
    x, y = (box[0] + box[2]) / 2, (box[1] + box[3]) / 2
    row, column = (min(max(int(v * n), 0), n - 1) for v, n in zip((y, x), plane.grid, strict=True))
    return int(plane.places()[row, column])


def _number(name: str) -> str:
    return next((part for part in name.split(".") if part.isdigit()), name)


def detector_worth(
    model: Any, pictures: Sequence[PictureView], images: Sequence[Tensor], choice: Choice, names: Sequence[str]
) -> Faithfulness | None:
    """Deletion and insertion curves of some maps of the surest object of each picture; None where nothing was found.

    Watched is the highest probability of its class among boxes that overlap its box by half or more.
    """
    found = []
    for picture, image in zip(pictures, images, strict=True):
        if picture.detections:
            surest = picture.detections[0]
            maps = {name: surest.maps[name][None] for name in names if name in surest.maps}
            answer = _answer_of(model, surest)
            how: dict[str, Any] = {"steps": choice.steps, "trials": choice.trials, "batch_size": 16}
            found.append(faithfulness(model, image[None], maps, answer=answer, **how))
    return joined(found) if found else None


def _answer_of(model: Any, o: Detection) -> Callable[[Tensor], Tensor]:
    from vision_attn.detection.boxes import cxcywh_to_xyxy, iou

    def answer(images: Tensor) -> Tensor:
        output = model(images)
        logits = output["pred_logits"].float()[..., o.index]  # (B, N)
        if model.classification == "softmax":
            chances = (logits - output["pred_logits"].float().logsumexp(-1)).exp()
        else:
            chances = logits.sigmoid()
        boxes = cxcywh_to_xyxy(output["pred_boxes"].float())
        near = iou(boxes, boxes.new_tensor(o.box)) >= 0.5
        return (chances * near).amax(1)

    return answer
