"""What a detector looked at for each object it found, and where its queries look for objects."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from vision_attn.explain.faithfulness import Faithfulness, faithfulness, joined
from vision_attn.explain.maps import recording, run_model
from vision_attn.explain.planes import evaluating
from vision_attn.explain.relevance import detection_relevance
from vision_attn.explain.views import Choice, Detection, PictureView, layer_views, run_one


def detector_view(model: Any, image: Tensor, shown: Tensor, source: str, choice: Choice) -> PictureView:
    """One image (C, H, W) through a detector's eyes, with a ``Detection`` for each object found."""
    from vision_attn.detection.postprocess import postprocess

    with torch.no_grad(), run_one(model, image, choice) as run:
        layers = layer_views(run, choice)
        found = postprocess(run.output, [(1, 1)], model.classification, threshold=choice.threshold)[0]
    names = model.config.get("labels") or [str(i) for i in range(model.num_classes)]
    objects: dict[int, Detection] = {}  # a query may stand for several classes: its likeliest is shown
    for label, score, query, box in zip(
        *(found[key].tolist() for key in ("labels", "scores", "queries", "boxes")), strict=True
    ):
        if query not in objects and len(objects) < choice.most:
            objects[query] = Detection(str(names[label]), label, score, query, tuple(box), {})  # boxes as shares
    shown_objects = list(objects.values())
    if shown_objects:
        _object_maps(model, image, shown_objects)
    answer = ", ".join(f"{o.label} {o.score:.0%}" for o in shown_objects) or "nothing found"
    return PictureView(source, shown, answer, layers, {}, shown_objects)


def _object_maps(model: Any, image: Tensor, objects: list[Detection]) -> None:
    """Encoder self-attention at the middle of each box, decoder cross-attention of its query, and relevance."""
    with torch.no_grad(), recording(model, image[None]) as run:
        for name in run.names():
            queries, keys = run.planes(name)
            if keys is None or not name.startswith(("encoder.", "decoder.")):
                continue
            weights = keys.to_image(run.weights(name)[0].mean(0)).cpu()  # (N, R, C)
            for o in objects:
                if queries is None:
                    o.maps[f"cross-attention, layer {_number(name)}"] = weights[o.query]
                    continue
                x, y = (o.box[0] + o.box[2]) / 2, (o.box[1] + o.box[3]) / 2
                row, column = (min(max(int(v * n), 0), n - 1) for v, n in zip((y, x), queries.grid, strict=True))
                o.maps["encoder, at its centre"] = weights[row * queries.grid[1] + column]  # the last layer's stays
    explained = detection_relevance(model, image[None], [o.query for o in objects], [o.index for o in objects]).cpu()
    for o, m in zip(objects, explained, strict=True):
        o.maps["relevance"] = m


def _number(name: str) -> str:
    return next((part for part in name.split(".") if part.isdigit()), name)


def detector_worth(
    model: Any, pictures: Sequence[PictureView], images: Sequence[Tensor], choice: Choice
) -> Faithfulness | None:
    """Deletion and insertion curves of the maps of the surest object of each picture; None where nothing was found.

    Watched is the highest probability of its class among boxes that overlap its box by half or more.
    """
    found = []
    for picture, image in zip(pictures, images, strict=True):
        if picture.detections:
            surest = picture.detections[0]
            maps = {name: m[None] for name, m in surest.maps.items()}
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


@torch.no_grad()
def clouds(model: Any, images: Sequence[Tensor]) -> Tensor:
    """The boxes that every query gives in a set of images: (N, n, 4) centre x, y, width, height as shares."""
    with evaluating(model):
        boxes = [run_model(model, image[None])["pred_boxes"][0].float().cpu() for image in images]
    return torch.stack(boxes, 1)
