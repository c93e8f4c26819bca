"""What figures show: every panel's picture, map and title, and the sentences above them."""

from __future__ import annotations

import pytest
import torch

from vision_attn.explain import figures
from vision_attn.explain.distance import HeadStatistics
from vision_attn.explain.faithfulness import CAUSES, RANDOM, RIVAL, Curve, Faithfulness
from vision_attn.explain.views import NOT_MEASURED, Clouds, Detection, Insight, LayerView, PictureView


def title(axis):
    return " ".join(axis.get_title().split())


def map_of(axis):
    """The map over a picture, None where there is no map."""
    return torch.as_tensor(axis.images[1].get_array()) if len(axis.images) > 1 else None


def curves(batch=3, good=True, k=19):
    rise = torch.linspace(0, 1, 5).expand(batch, -1) ** (0.3 if good else 2.0)
    noise = 0.01 * torch.rand(k, batch, 5)
    drawn = Curve(0.5 + noise, 0.5 + noise.flip(0))
    one = Curve(1 - rise + 0.01 * torch.rand(batch, 5), rise)
    return one, drawn, drawn.score


def worth(names, batch=3, good=True, k=19):
    own, drawn, moved = curves(batch, good, k)
    every = [*names, RIVAL]
    return Faithfulness(torch.linspace(0, 1, 5), dict.fromkeys(every, own), drawn, dict.fromkeys(every, moved))


def layer(name, labels, heads=2, implied=False, grid=(2, 2)):
    weights = torch.rand(heads, len(labels), *grid)
    cells = [None] * len(labels)
    return LayerView(
        name, implied, weights, weights.mean(1), weights[..., 0, 0], labels, cells, grid, list(range(heads))
    )


def picture(layers=(), summaries=None, detections=(), size=(8, 12)):
    pixels = torch.randint(256, (3, *size), dtype=torch.uint8)
    return PictureView("p.png", pixels, "cat 90%", list(layers), summaries or {}, list(detections))


def insight(*pictures, name="model", **more):
    return Insight(
        **{
            "name": name,
            "pictures": list(pictures),
            "statistics": {},
            "worth": None,
            "field": None,
            "notes": [],
            **more,
        }
    )


def test_several_models_on_one_picture(tmp_path, drawn):
    """A row for each model, a column for each kind of map; every map stands under its own title, in its own row."""
    shared, alone = torch.rand(2, 2), torch.rand(4, 3)
    vit = insight(picture(summaries={"rollout": alone, "Grad-CAM": shared}), name="vit", worth=worth(["Grad-CAM"]))
    cnn = insight(picture(summaries={"Grad-CAM": shared.flip(0)}), name="cnn", worth=worth(["Grad-CAM"], good=False))
    figures.compare([vit, cnn], 0, tmp_path / "compare.png")
    above, axes = drawn["compare.png"]
    assert CAUSES in above
    assert axes.shape == (2, 4)
    titles = [[title(axis) for axis in line] for line in axes]
    assert [line[0] for line in titles] == ["vit cat 90%", "cnn cat 90%"]
    assert titles[0][1].startswith("Grad-CAM: better than random (+")
    assert titles[1][1] == "Grad-CAM: NO BETTER THAN RANDOM on these 3 images"
    assert axes[1][1].title.get_color() == figures.BAD != axes[0][1].title.get_color()
    assert [line[2] for line in titles] == ["rollout", ""]
    for axis, m in ((axes[0][1], shared), (axes[1][1], shared.flip(0)), (axes[0][2], alone)):
        torch.testing.assert_close(map_of(axis), (m - m.min()) / (m.max() - m.min()))
    assert map_of(axes[1][2]) is None
    assert not axes[1][2].images


def detected():
    maps = {"encoder, at its centre": torch.rand(3, 3), "cross-attention, layer 0": torch.rand(3, 3)}
    box = (0.25, 0.5, 0.75, 1.0)
    return [
        Detection("cup", 0, 0.9, 5, box, maps),
        Detection("plate", 1, 0.7, 2, box, {name: m.flip(0) for name, m in maps.items()}),
    ]


def some_clouds():
    return Clouds(torch.rand(30, 7, 4), torch.tensor([0] * 22 + [1, 4, 0, 2, 7, 0, 3, 0]))


@pytest.mark.parametrize("clouds", [None, some_clouds()])
def test_a_row_for_each_object(tmp_path, drawn, clouds):
    objects = detected()
    found = insight(picture(detections=objects), clouds=clouds, worth=worth(list(objects[0].maps), good=False))
    figures.detections(found, found.pictures[0], tmp_path / "o.png", "title")
    above, axes = drawn["o.png"]
    assert CAUSES in above
    assert axes.shape == (2, 3 + (clouds is not None))
    for o, line in zip(objects, axes, strict=True):
        assert title(line[0]) == f"{o.label} {o.score:.0%}, query {o.query}"
        for axis, (name, m) in zip(line[1:], o.maps.items(), strict=False):
            assert title(axis) == f"{name}: NO BETTER THAN RANDOM on these 3 images"
            torch.testing.assert_close(map_of(axis), m / m.max())
            assert axis.lines[0].get_xdata().tolist() == [3, 9, 9, 3, 3]  # the box in pixels of 8 × 12
            assert axis.lines[0].get_ydata().tolist() == [4, 4, 8, 8, 4]
        if clouds is not None:
            torch.testing.assert_close(
                torch.as_tensor(line[-1].collections[0].get_offsets()).float(), clouds.boxes[o.query, :, :2]
            )
            assert title(line[-1]) == f"query {o.query}: detected in {int(clouds.found[o.query])} of 7 images"
    assert ("green small" in above) == (clouds is not None)


def test_clouds_of_the_queries_that_detect_most(tmp_path, drawn):
    """Not of the first, most of which may never find anything."""
    clouds = some_clouds()
    figures.query_clouds(clouds, tmp_path / "q.png", "title")
    above, axes = drawn["q.png"]
    assert CAUSES in above
    assert "5 of the 5 queries that detected something, of 30" in above
    order = [26, 23, 28, 25, 22]
    assert [title(axis).split(":")[0] for axis in axes.flatten()] == [f"query {q}" for q in order]
    for query, axis in zip(order, axes.flatten(), strict=True):
        points = axis.collections[0]
        torch.testing.assert_close(torch.as_tensor(points.get_offsets()).float(), clouds.boxes[query, :, :2])
        assert len(points.get_facecolors()) == 7
    figures.query_clouds(Clouds(clouds.boxes, torch.zeros(30, dtype=torch.long)), tmp_path / "none.png", "title")
    assert not (tmp_path / "none.png").exists()


def test_each_row_says_which_query_where_layers_differ(tmp_path, drawn):
    """Query 12 lies elsewhere on another grid."""
    same = picture([layer("a", ["row 1, column 0"]), layer("b", ["row 1, column 0"], implied=True)])
    figures.all_heads(insight(same), same, tmp_path, "same", "title")
    above, axes = drawn["same_heads_0.png"]
    assert "What row 1, column 0 looks at" in above
    assert CAUSES in above
    assert NOT_MEASURED in above
    assert [title(line[0]) for line in axes] == ["a mean of heads", "b (implied) mean of heads"]
    other = picture([layer("a", ["row 1, column 2"]), layer("b", ["row 0, column 7"], heads=3)])
    measured = insight(other, worth=worth(["rollout"], good=False))
    figures.all_heads(measured, other, tmp_path, "other", "title")
    above, axes = drawn["other_heads_0.png"]
    assert "row 1, column 2" not in above
    assert "each row says which" in above
    assert [title(line[0]) for line in axes] == [
        "a row 1, column 2 mean of heads",
        "b row 0, column 7 mean of heads",
    ]
    assert "rollout: NO BETTER THAN RANDOM on these 3 images. Single layers and heads were not compared" in above
    assert axes.shape == (2, 4)
    m = other.layers[1].weights[2, 0]
    torch.testing.assert_close(map_of(axes[1][3]), m / m.max())


def test_curves_and_leads_have_intervals(tmp_path, drawn):
    numbers = HeadStatistics(torch.rand(2), 1.0, torch.rand(2), torch.rand(2, 2), implied=True)
    found = insight(worth=worth(["rollout", "flow"]), statistics={"a": numbers})
    figures.worth(found, tmp_path / "many.png")
    above, axes = drawn["many.png"]
    assert CAUSES in above
    deletion, insertion, lead, entropy = axes[0][:4]
    for axis in (deletion, insertion):
        assert [line.get_label() for line in axis.lines] == ["rollout", "flow", RIVAL, RANDOM]
        assert len(axis.collections) == 4  # a band for each
    marks = [
        len(line.get_xdata()) for line in lead.lines if line.get_marker() in ("o", "s", "^") and len(line.get_xdata())
    ]
    assert len(marks) == 3 + 3 + 2  # over random maps, over itself moved, over the rival, which has no lead over itself
    assert "(implied)" in entropy.get_xticklabels()[0].get_text()
    figures.worth(insight(worth=worth(["rollout"], batch=1)), tmp_path / "one.png")
    axes = drawn["one.png"][1]
    assert len(axes[0][0].collections) == 1  # that of the random maps alone
    figures.worth(insight(statistics={"a": numbers}), tmp_path / "none.png")
    assert NOT_MEASURED in drawn["none.png"][0]


def test_summary_shows_what_it_says(tmp_path, drawn):
    m = torch.rand(4, 4)
    found = insight(picture(summaries={"rollout (implied)": m}), worth=worth(["rollout (implied)"], k=3, batch=1))
    figures.summary(found, found.pictures[0], tmp_path / "s.png", "title")
    above, axes = drawn["s.png"]
    assert CAUSES in above
    assert [title(axis) for axis in axes[0]] == [
        "as the model sees it cat 90%",
        "rollout (implied): 3 random maps are too few to tell on this image",
    ]
    assert axes[0][1].title.get_color() == "black"  # not a verdict against the map
    torch.testing.assert_close(map_of(axes[0][1]), (m - m.min()) / (m.max() - m.min()))
