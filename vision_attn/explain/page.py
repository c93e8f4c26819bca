"""One HTML page that works without a network: click through layers, heads and queries over the picture."""

from __future__ import annotations

import base64
import importlib.resources
import io
import json
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vision_attn.explain.faithfulness import CAUSES, MOVED, RANDOM, RIVAL, mean_and_half
from vision_attn.explain.views import Clouds, Insight, LayerView, PictureView


def page(insights: Sequence[Insight], title: str) -> str:
    """The page of one or more models on the same pictures, data and all.

    Weights are stored as one byte each, as shares of the largest of their row.
    """
    import jinja2

    files = importlib.resources.files("vision_attn.explain")
    template = jinja2.Template((files / "page.html.j2").read_text(encoding="utf-8"), autoescape=True)
    data = {"title": title, "models": [_model(insight) for insight in insights]}
    # "</script>" inside a file's name must not end the script
    text = json.dumps(data, ensure_ascii=False, separators=(",", ":")).replace("<", "\\u003c")
    return template.render(title=title, sentence=CAUSES, data=text)


def _model(insight: Insight) -> dict[str, Any]:
    notes = list(dict.fromkeys(insight.notes))
    return {
        "name": insight.name,
        "notes": notes,
        "pictures": [_picture(insight, picture) for picture in insight.pictures],
        "depth": [_depth(name, numbers) for name, numbers in insight.statistics.items()],
        "worth": _worth(insight),
        "clouds": None if insight.clouds is None else _clouds(insight, insight.clouds),
    }


def _clouds(insight: Insight, clouds: Clouds, most: int = 40) -> dict[str, Any]:
    """Query → its boxes' middles and kinds, of those that found an object in a picture or most over the set."""
    shown = [o.query for picture in insight.pictures for o in picture.detections]
    queries = {
        query: {
            "found": int(clouds.found[query]),
            "points": [[round(x, 3), round(y, 3)] for x, y in clouds.boxes[query, :, :2].tolist()],
            "kinds": clouds.kinds(query).tolist(),
        }
        for query in dict.fromkeys([*shown, *clouds.most_used(most)])
    }
    return {"images": clouds.boxes.shape[1], "queries": queries}


def _depth(name: str, numbers: Any) -> dict[str, Any]:
    return {
        "name": name,
        "implied": numbers.implied,
        "entropy": _plain(numbers.entropy),
        "uniform": round(numbers.uniform, 4),
        "distance": None if numbers.distance.isnan().any() else _plain(numbers.distance),
        "diversity": None if math.isnan(numbers.mean_diversity) else round(numbers.mean_diversity, 4),
    }


def _worth(insight: Insight) -> dict[str, Any] | None:
    if insight.worth is None:
        return None
    worth = insight.worth
    curves = []
    for name, curve in worth.curves.items():
        leads = {over: _numbers(worth.lead(name, over)) for over in (RANDOM, MOVED, RIVAL) if over != name}
        good = worth.beats_random(name)
        judged = "good" if good else "few" if worth.too_few else "poor"
        lines = {kind: _line(getattr(curve, kind)) for kind in ("deletion", "insertion")}
        curves.append({"name": name, "rival": name == RIVAL, **lines, "leads": leads, "good": good, "judged": judged})
    random = {kind: _line(getattr(worth.random, kind)) for kind in ("deletion", "insertion")}
    count = {"images": len(worth.random.deletion), "trials": len(worth.trials)}
    return {"shares": _plain(worth.shares), "curves": curves, "random": random, **count}


def _line(values: Tensor) -> dict[str, Any]:
    """Mean over images, and half its 95 % interval; null for a single image."""
    mean, half = mean_and_half(values)
    return {"mean": _plain(mean), "half": None if half.isnan().any() else _plain(half)}


def _numbers(values: Sequence[float]) -> list[float | None]:
    return [None if math.isnan(x) else round(x, 4) for x in values]


def _picture(insight: Insight, picture: PictureView) -> dict[str, Any]:
    summaries = [
        {"title": insight.title(name), "poor": "NO BETTER" in insight.title(name), **_bytes((m - m.min())[None, None])}
        for name, m in picture.summaries.items()
    ]
    if insight.field is not None:
        strength = _coarser(insight.field.strength.sqrt())
        side = insight.field.side(0.9)
        field = {"title": f"effective receptive field, 90 % within {side:.0f} px", "poor": False}
        summaries.append({**field, **_bytes(strength[None, None])})
    for number, o in enumerate(picture.detections):
        for name, m in o.maps.items():
            text = insight.title(name)
            title = {"title": f"{o.label} {o.score:.0%}: {text}", "poor": "NO BETTER" in text, "object": number}
            summaries.append({**title, **_bytes(m[None, None])})
    return {
        "file": picture.source,
        "image": _png(picture.pixels),
        "width": picture.pixels.shape[-1],
        "height": picture.pixels.shape[-2],
        "answer": picture.answer,
        "layers": [_layer(view) for view in picture.layers],
        "summaries": summaries,
        "objects": [
            {"label": o.label, "score": round(o.score, 3), "query": o.query, "box": [round(x, 4) for x in o.box]}
            for o in picture.detections
        ],
    }


def _layer(view: LayerView) -> dict[str, Any]:
    return {
        "name": view.name,
        "implied": view.implied,
        "heads": view.heads,
        "labels": view.labels,
        "cells": view.cells,
        "queryGrid": view.query_grid,
        "elsewhere": base64.b64encode(
            (view.elsewhere.clamp(0, 1) * 255).round().byte().cpu().numpy().tobytes()
        ).decode(),
        **_bytes(view.weights),
    }


def _bytes(weights: Tensor) -> dict[str, Any]:
    """(H, Q, R, C) as bytes, shares of the largest of their row, and those."""
    weights = weights.float().cpu().clamp_min(0)
    top = weights.amax((-2, -1), keepdim=True)
    shares = (weights / top.clamp_min(1e-12) * 255).round().to(torch.uint8)
    return {
        "grid": list(weights.shape[-2:]),
        "data": base64.b64encode(shares.numpy().tobytes()).decode(),
        "top": base64.b64encode(top.flatten().numpy().astype(np.float16).tobytes()).decode(),
    }


def _coarser(m: Tensor, most: int = 64) -> Tensor:
    """(H, W) no larger than so many cells."""
    if max(m.shape) <= most:
        return m
    height, width = (max(1, round(side * most / max(m.shape))) for side in m.shape)
    return torch.nn.functional.adaptive_avg_pool2d(m[None, None], (height, width))[0, 0]


def _png(pixels: Tensor) -> str:
    from PIL import Image

    file = io.BytesIO()
    picture = Image.fromarray(pixels.permute(1, 2, 0).contiguous().numpy())
    if max(picture.size) > 128:
        picture.save(file, "JPEG", quality=88)
        kind = "jpeg"
    else:
        picture.save(file, "PNG")
        kind = "png"
    return f"data:image/{kind};base64,{base64.b64encode(file.getvalue()).decode()}"


def _plain(values: Tensor) -> list[float]:
    return [round(float(v), 4) for v in values]
