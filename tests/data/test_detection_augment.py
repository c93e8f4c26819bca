"""Boxes go where their pixels go."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from torchvision import tv_tensors
from torchvision.transforms.v2 import functional as T

from vision_attn.data.detection_augment import (
    DETR_SCALES,
    DetectionAugmentConfig,
    Resize,
    ViewMaker,
    Views,
    draw_view,
    move_boxes,
)
from vision_attn.data.detection_layouts import LAYOUTS, choose_resize
from vision_attn.errors import UserError

GROUND = torch.tensor([7, 8, 9], dtype=torch.uint8).view(3, 1, 1)


def maker(mode: str = "shorter", size: tuple[int, int] = (40, 66), seed: int = 0, **config: object) -> ViewMaker:
    return ViewMaker(DetectionAugmentConfig(**config), Resize(mode, size), seed)  # type: ignore[arg-type]


def render(image: torch.Tensor, views: Views, row: int = 0) -> torch.Tensor:
    out = torch.full((3, *views.output[row].tolist()), 99, dtype=torch.uint8)
    draw_view(image, views, row, out, GROUND)
    return out


SETTINGS = {
    "flip": dict(flip=True, flip_vertical=True),
    "scales": dict(multi_scale=True, scales=(31, 47, 60)),
    "detr": dict(flip=True, multi_scale=True, scales=(31, 47), crop=0.7, crop_scales=(40, 50), crop_size=(17, 45)),
    "zoom": dict(flip=True, zoom=(0.5, 2.0), aspect=1.5),
}


@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("size", [(53, 71), (71, 53), (40, 40)])
def test_corners_of_boxes_follow_painted_pixels(name: str, size: tuple[int, int]) -> None:
    work = maker("fit", (47, 61), **SETTINGS[name]) if name == "zoom" else maker(**SETTINGS[name])
    height, width = size
    sizes = torch.tensor([size]).expand(60, 2)
    views = work.training(sizes, 3, torch.arange(60))
    kept = 0
    for row in range(60):
        top, left = 3 + row % 11, 5 + row % 13
        box = torch.tensor([[left, top, left + 19, top + 14]]).double()
        image = torch.zeros(3, height, width, dtype=torch.uint8)
        image[:, top : top + 14, left : left + 19] = 255
        shares = box / torch.tensor([width, height, width, height])
        moved, keep = move_boxes(shares, sizes, torch.tensor([row]), views, 0.05)
        painted = (render(image, views, row)[0] > 127).nonzero()
        if not keep:
            assert len(painted) < 0.1 * views.output[row].prod()
            continue
        kept += 1
        tall, wide = views.output[row].tolist()
        x, y, w, h = (moved[0] * torch.tensor([wide, tall, wide, tall])).tolist()
        edges = [x - w / 2, y - h / 2, x + w / 2, y + h / 2]
        if min(w, h) < 2:
            continue
        low, high = painted.amin(0).tolist(), (painted.amax(0) + 1).tolist()
        assert edges == pytest.approx([low[1], low[0], high[1], high[0]], abs=1.01), (row, views.source[row])
    assert kept > 30


@pytest.mark.parametrize("mirror", [False, True])
def test_a_view_is_torchvisions_crop_resize_and_flip(mirror: bool) -> None:
    image = torch.randint(0, 256, (3, 53, 71), dtype=torch.uint8)
    boxes = torch.tensor([[11.0, 5, 37, 29], [0, 0, 71, 53], [40, 30, 60, 50]])
    views = Views(
        torch.tensor([[3, 7, 41, 59]]),
        torch.tensor([[0, 0, 29, 37]]),
        torch.tensor([[29, 37]]),
        torch.tensor([[False, mirror]]),
    )
    theirs = tv_tensors.BoundingBoxes(boxes, format="XYXY", canvas_size=(53, 71))  # type: ignore[call-arg]
    crop = dict(top=3, left=7, height=41, width=59, size=[29, 37])
    their_image = T.resized_crop(image, antialias=True, **crop)
    theirs = T.clamp_bounding_boxes(T.resized_crop(theirs, **crop))
    if mirror:
        their_image, theirs = T.horizontal_flip(their_image), T.horizontal_flip(theirs)
    torch.testing.assert_close(render(image, views), their_image)
    shares = boxes.double() / torch.tensor([71, 53, 71, 53])
    ours, keep = move_boxes(shares, torch.tensor([[53, 71]]), torch.zeros(3, dtype=torch.int64), views, 0.0)
    assert keep.all()
    theirs = T.convert_bounding_box_format(theirs, new_format="CXCYWH").as_subclass(torch.Tensor)
    torch.testing.assert_close(ours, theirs / torch.tensor([37.0, 29, 37, 29]), atol=1e-6, rtol=0)


@given(st.integers(1, 2000), st.integers(1, 2000), st.integers(1, 900), st.integers(1, 1500))
@settings(max_examples=200, deadline=None)
def test_sizes_are_detrs(height: int, width: int, shorter: int, extra: int) -> None:
    longest = shorter + extra

    def theirs() -> tuple[int, int]:  # get_size_with_aspect_ratio of the paper's repository, said in our words
        size, low, high = float(shorter), min(height, width), max(height, width)
        if high / low * size > longest:
            size = float(round(longest * low / high))
        size = max(int(size), 1)
        other = max(int(size * high / low), 1)
        return (other, size) if height >= width else (size, other)

    ours = Resize("shorter", (shorter, longest)).output(torch.tensor([[height, width]]))[0]
    assert tuple(ours.tolist()) == theirs()


def test_fit_and_stretch() -> None:
    sizes = torch.tensor([[10, 40], [40, 10], [30, 20]])
    assert Resize("fit", (60, 80)).output(sizes).tolist() == [[20, 80], [60, 15], [60, 40]]
    assert Resize("stretch", (60, 80)).output(sizes).tolist() == [[60, 80]] * 3


def test_detrs_recipe_is_the_default_of_its_parts() -> None:
    config = DetectionAugmentConfig(flip=True, multi_scale=True, crop=0.5)
    assert config.scales == DETR_SCALES == (480, 512, 544, 576, 608, 640, 672, 704, 736, 768, 800)
    work = ViewMaker(config, Resize("shorter", (800, 1333)))
    sizes = torch.tensor([[480, 640], [640, 427]]).repeat(2000, 1)
    views = work.training(sizes, 0, torch.arange(4000))
    shorter, longer = views.output.amin(1), views.output.amax(1)
    assert longer.max() <= 1333
    assert set(shorter[longer < 1333].tolist()) <= set(DETR_SCALES)
    counts = shorter[longer < 1333].bincount()[list(DETR_SCALES)]
    assert counts.min() > 0.7 * counts.max()
    assert views.mirror[:, 1].float().mean() == pytest.approx(0.5, abs=0.03)
    cropped = (views.source[:, 2:] != sizes).any(1)
    assert cropped.float().mean() == pytest.approx(0.5, abs=0.05)
    # the part is 384 to 600 pixels of an image with a shorter side of 400, 500 or 600
    share = views.source[cropped, 2:].double() / sizes[cropped]
    assert share.min() >= 384 / 800 * 0.99 * 0.75
    assert ((views.source[:, :2] >= 0) & (views.source[:, :2] + views.source[:, 2:] <= sizes)).all()


RECIPES = sorted(Path(__file__).parents[2].glob("recipes/coco_[!0-9]*.yaml"))


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_recipes_on_coco_augment_as_the_original_does(path: Path) -> None:
    """make_coco_transforms("train") in datasets/coco.py of github.com/facebookresearch/detr, and crop beside."""
    data = yaml.safe_load(path.read_text())["data"]
    config = DetectionAugmentConfig(**data["augment"])
    assert config == DetectionAugmentConfig(
        flip=True,  # RandomHorizontalFlip()
        multi_scale=True,  # RandomResize(scales, max_size=1333), in both branches
        scales=(480, 512, 544, 576, 608, 640, 672, 704, 736, 768, 800),
        crop=0.5,  # RandomSelect
        crop_scales=(400, 500, 600),  # RandomResize([400, 500, 600])
        crop_size=(384, 600),  # RandomSizeCrop(384, 600)
        min_visible=0.0,  # crop keeps every box of which an area is left
        color_jitter=0.0,
    )
    resize = choose_resize(LAYOUTS[data["name"]].resize, data.get("img_size"), data.get("max_size", 1333), None)
    assert resize == Resize("shorter", (800, 1333))  # of "val": RandomResize([800], max_size=1333)
    assert (LAYOUTS["coco"].mean, LAYOUTS["coco"].std) == ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
    assert len(RECIPES) == 5


@given(st.sampled_from(sorted(SETTINGS)), st.integers(1, 90), st.integers(1, 90), st.integers(0, 50))
@settings(max_examples=100, deadline=None)
def test_views_lie_inside(name: str, height: int, width: int, seed: int) -> None:
    work = maker("stretch", (47, 61), seed, **SETTINGS[name]) if name == "zoom" else maker(seed=seed, **SETTINGS[name])
    sizes = torch.tensor([[height, width]]).expand(20, 2)
    views = work.training(sizes, 0, torch.arange(20))
    for rectangle, whole in ((views.source, sizes), (views.place, views.output)):
        assert (rectangle[:, 2:] >= 1).all()
        assert (rectangle[:, :2] >= 0).all()
        assert (rectangle[:, :2] + rectangle[:, 2:] <= whole).all()
    boxes = torch.rand(20, 2, 2).sort(1).values.flatten(1)
    moved, keep = move_boxes(boxes, sizes, torch.arange(20), views, 0.3)
    moved = moved[keep]
    assert (moved[:, 2:] > 0).all()
    assert (moved[:, :2] - moved[:, 2:] / 2 > -1e-5).all()
    assert (moved[:, :2] + moved[:, 2:] / 2 < 1 + 1e-5).all()


def test_views_depend_on_seed_epoch_and_image_alone() -> None:
    sizes = torch.randint(30, 90, (50, 2))
    ids = torch.arange(50) + 100
    work = maker(**SETTINGS["detr"])
    whole = work.training(sizes, 4, ids)
    rows = torch.tensor([7, 31, 2])
    part = work.training(sizes[rows], 4, ids[rows])
    for name in ("source", "place", "output", "mirror"):
        assert torch.equal(getattr(whole[rows], name), getattr(part, name))
    for other in (work.training(sizes, 5, ids), maker(seed=1, **SETTINGS["detr"]).training(sizes, 4, ids)):
        assert not torch.equal(whole.source, other.source)


def test_boxes_are_kept_by_what_is_visible() -> None:
    views = Views(
        torch.tensor([[0, 0, 20, 10]]),
        torch.tensor([[0, 0, 20, 10]]),
        torch.tensor([[20, 10]]),
        torch.zeros(1, 2).bool(),
    )
    # of a width of 20, the view shows the left half
    boxes = torch.tensor([[0.4, 0.1, 0.8, 0.5], [0.0, 0.0, 0.5, 0.3], [0.6, 0.1, 0.9, 0.2], [0.45, 0, 1.0, 1.0]])
    sizes, image = torch.tensor([[20, 20]]), torch.zeros(4, dtype=torch.int64)
    assert move_boxes(boxes, sizes, image, views, 0.2)[1].tolist() == [True, True, False, False]
    assert move_boxes(boxes, sizes, image, views, 0.26)[1].tolist() == [False, True, False, False]
    assert move_boxes(boxes, sizes, image, views, 0.0)[1].tolist() == [True, True, False, True]
    assert move_boxes(boxes, sizes, image, views, 1.0)[1].tolist() == [False, True, False, False]


def test_small_images_lie_on_a_plain_ground() -> None:
    work = maker("stretch", (40, 60), zoom=(0.5, 0.5))
    views = work.training(torch.tensor([[40, 60]]), 0, torch.tensor([3]))
    out = render(torch.full((3, 40, 60), 200, dtype=torch.uint8), views)
    assert ((out == 200) | (out == GROUND)).all()
    assert (out[0] == 200).sum() == 20 * 30


@pytest.mark.parametrize(
    ("work", "sizes", "training", "expected"),
    [
        (maker(), (80, 100), False, (40, 50)),
        (maker(multi_scale=True, scales=(60,)), (80, 100), True, (60, 66 * 100 // 100)),
        (maker(multi_scale=True, scales=(60,)), (30, 40), True, (30, 40)),
        (maker("stretch", (20, 20), zoom=(1.0, 2.0)), (80, 100), True, (40, 40)),
        (maker("stretch", (20, 20), zoom=(1.0, 2.0)), (80, 100), False, (20, 20)),
        (maker("fit", (20, 20)), (80, 160), False, (10, 20)),
    ],
)
def test_images_are_kept_no_larger_than_any_view(
    work: ViewMaker, sizes: tuple[int, int], training: bool, expected: tuple[int, int]
) -> None:
    stored = work.stored(torch.tensor([sizes]), training)
    if work.resize.mode == "shorter" and training and sizes == (80, 100):
        assert (stored <= torch.tensor(sizes)).all()
        assert stored.max() == 66
    else:
        assert stored.tolist() == [list(expected)]


@pytest.mark.parametrize(
    ("config", "word"),
    [
        (dict(crop=1.5), "augment.crop"),
        (dict(scales=()), "augment.scales"),
        (dict(zoom=(2.0, 1.0)), "augment.zoom"),
        (dict(aspect=0.5), "augment.aspect"),
        (dict(multi_scale=True, zoom=(1.0, 2.0)), "one of them"),
        (dict(crop=0.5, zoom=(1.0, 2.0)), "one of them"),
        (dict(min_visible=-1), "augment.min_visible"),
    ],
)
def test_mistakes(config: dict, word: str) -> None:
    with pytest.raises(UserError, match=word):
        maker(**config)
    with pytest.raises(UserError, match="resize=shorter"):
        maker("fit", multi_scale=True)
