from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

from vision_attn.data import AugmentConfig, Augmenter, ImageData
from vision_attn.data.geometry import flip_and_crop, resized_crops
from vision_attn.data.mixing import beta_quantile
from vision_attn.data.policy import OPS, color_jitter, enhance, rand_augment, resample
from vision_attn.errors import UserError

EVERYTHING: dict[str, dict[str, Any]] = {
    "flip-crop": {"flip": True, "crop_padding": 2},
    "zero-crop": {"crop_padding": 3, "crop_mode": "zero"},
    "alternating": {"flip": "alternating"},
    "erase": {"erase": 0.5},
    "noise": {"erase": 0.5, "erase_fill": "noise"},
    "mixup": {"mixup": 0.8},
    "cutmix": {"cutmix": 1.0, "mix_probability": 0.7, "flip": True},
    "both": {"cutmix": 1.0, "mixup": 0.2},
    "randaugment": {"randaugment": 2},
    "jitter": {"color_jitter": 0.4},
    "resized": {"resized_crop": 0.3},
}
B, H, W, CLASSES = 31, 13, 17, 5


def augmenter(**kwargs: Any) -> Augmenter:
    layout = kwargs.pop("channels_last", False)
    config = AugmentConfig(**kwargs)
    return Augmenter(config, mean=(0.4, 0.5, 0.6), std=(0.2, 0.25, 0.3), num_classes=CLASSES, channels_last=layout)


def batch(epoch: int = 2) -> dict[str, Any]:
    return {
        "image": torch.randint(0, 256, (B, 3, H, W), dtype=torch.uint8),
        "label": torch.randint(0, CLASSES, (B,)),
        "index": torch.randperm(1009)[:B],
        "partner_image": torch.randint(0, 256, (B, 3, H, W), dtype=torch.uint8),
        "partner_label": torch.randint(0, CLASSES, (B,)),
        "epoch": epoch,
    }


@pytest.mark.parametrize("size", [B, 2003])  # the second is taken in pieces
def test_statistics_of_one_channel_are_those_of_brightness(size: int) -> None:
    gray = Augmenter(AugmentConfig(flip=True, erase=0.25), mean=(0.4,), std=(0.2,), num_classes=CLASSES)
    pixels = torch.randint(0, 256, (size, 1, H, W), dtype=torch.uint8)
    colours = pixels.expand(-1, 3, -1, -1).contiguous()
    torch.testing.assert_close(gray.normalize(colours), (pixels / 255 - 0.4) / 0.2)
    weighed = torch.tensor([299, 587, 114])[:, None, None]
    other = torch.randint(0, 256, (size, 3, H, W), dtype=torch.uint8)
    expected = ((other * weighed).sum(1, keepdim=True) / 255000 - 0.4) / 0.2
    torch.testing.assert_close(gray.normalize(other), expected)
    sample = {"image": colours, "label": torch.zeros(size, dtype=torch.int64), "index": torch.arange(size), "epoch": 1}
    assert gray.train(sample)["image"].shape == (size, 1, H, W)


@pytest.mark.parametrize("kwargs", EVERYTHING.values(), ids=EVERYTHING)
def test_every_sample_is_augmented_the_same_in_any_batch(kwargs: dict[str, Any]) -> None:
    whole = batch()
    before = whole["image"].clone()
    result = augmenter(**kwargs).train(whole)
    assert torch.equal(whole["image"], before)
    assert result["image"].dtype == torch.float32
    order = torch.randperm(B)
    for rows in (order[:7], order[7:]):
        part = {key: value[rows] if isinstance(value, torch.Tensor) else value for key, value in whole.items()}
        piece = augmenter(**kwargs, channels_last=True).train(part)
        torch.testing.assert_close(piece["image"], result["image"][rows], rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(piece["label"], result["label"][rows], rtol=0, atol=0)
        assert piece["image"].is_contiguous(memory_format=torch.channels_last)
    other = augmenter(**kwargs).train(whole | {"epoch": 3})
    assert not torch.equal(other["image"], result["image"])
    plain = augmenter().train(whole)["image"]
    assert not torch.equal(plain, result["image"])


def test_normalisation_and_back() -> None:
    image = batch()["image"]
    tool = augmenter()
    expected = (image.double() / 255 - torch.tensor([0.4, 0.5, 0.6]).view(1, 3, 1, 1)) / torch.tensor(
        [0.2, 0.25, 0.3]
    ).view(1, 3, 1, 1)
    torch.testing.assert_close(tool.normalize(image), expected.float(), rtol=1e-5, atol=1e-5)
    assert torch.equal(tool.denormalize(tool.normalize(image)), image)


@given(st.integers(0, 6), st.sampled_from(["reflect", "zero"]), st.integers(2, 9), st.integers(2, 11), st.data())
@settings(max_examples=40, deadline=None)
def test_flip_and_crop_against_padding_and_slicing(
    padding: int, mode: str, height: int, width: int, data: st.DataObject
) -> None:
    padding = min(padding, height - 1, width - 1)
    images = torch.randint(0, 256, (3, 2, height, width), dtype=torch.uint8)
    place = st.lists(st.integers(0, 2 * padding), min_size=3, max_size=3)
    tops, lefts = data.draw(place), data.draw(place)
    flips = data.draw(st.lists(st.booleans(), min_size=3, max_size=3))
    out = flip_and_crop(
        images,
        flip=torch.tensor(flips),
        offset=(torch.tensor(tops), torch.tensor(lefts)),
        padding=padding,
        mode=mode,
    )
    pad = (padding,) * 4
    padded = F.pad(images.float(), pad, mode="reflect") if mode == "reflect" else F.pad(images.float(), pad)
    for image, top, left, flip, result in zip(padded, tops, lefts, flips, out, strict=True):
        mirrored = image.flip(-1) if flip else image
        torch.testing.assert_close(result.float(), mirrored[:, top : top + height, left : left + width])


def test_flip_is_even_and_alternating_shows_both_sides() -> None:
    image = torch.arange(W, dtype=torch.uint8).expand(2003, 3, 1, W)
    index = torch.arange(2003)
    flipped = augmenter(flip=True).pixels(image, index, 0)[:, 0, 0, 0] != 0
    assert 0.45 < flipped.float().mean() < 0.55
    even, odd, next_even = (augmenter(flip="alternating").pixels(image, index, e)[:, 0, 0, 0] for e in range(3))
    assert torch.equal(even != 0, odd == 0)
    assert torch.equal(even, next_even)


def test_cutout_has_its_size_and_share() -> None:
    tool = augmenter(erase=0.25, erase_area=(0.0625, 0.0625), erase_aspect=1.0)
    data = {"image": torch.full((2003, 3, 32, 32), 255, dtype=torch.uint8), "label": torch.zeros(2003).long()}
    images = tool.train(data | {"index": torch.arange(2003), "epoch": 0})["image"]
    erased = (images == 0).flatten(1).sum(1)
    assert set(erased.tolist()) == {0, 3 * 8 * 8}
    assert 0.21 < (erased > 0).float().mean() < 0.29
    hit = (images[:, 0] == 0).float().mean(0)
    for edge in (hit[0], hit[-1], hit[:, 0], hit[:, -1]):  # as far as the border, on all sides
        assert edge.max() > 0


@pytest.mark.parametrize("kind", ["mixup", "cutmix", "both"])
def test_soft_labels_say_what_the_pixels_are(kind: str) -> None:
    data = batch()
    data["image"].zero_()
    data["partner_image"].fill_(255)
    result = augmenter(**EVERYTHING[kind]).train(
        data | {"label": torch.zeros(B).long()} | {"partner_label": torch.ones(B).long()}
    )
    tool = augmenter()
    black, white = tool.normalize(data["image"]), tool.normalize(data["partner_image"])
    share = ((result["image"] - black) / (white - black)).mean((1, 2, 3))
    torch.testing.assert_close(result["label"][:, 1], share, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(result["label"].sum(1), torch.ones(B))
    assert 0.1 < share.mean() < 0.9
    same = augmenter(**EVERYTHING[kind]).train(data | {"partner_label": data["label"]})["label"]
    torch.testing.assert_close(same, F.one_hot(data["label"], CLASSES).float())


@pytest.mark.parametrize("alpha", [0.2, 1.0, 3.0])
def test_beta_quantile(alpha: float) -> None:
    draw = beta_quantile(alpha, torch.linspace(0, 1 - 2**-24, 100_003))
    torch.testing.assert_close(draw.mean(), torch.tensor(0.5), atol=1e-3, rtol=0)
    torch.testing.assert_close(draw.var(), torch.tensor(1 / (4 * (2 * alpha + 1))), atol=2e-3, rtol=0)


def test_policy_operations_against_torchvision() -> None:
    from torchvision.transforms.v2 import functional as T

    images = torch.randint(0, 256, (4, 3, H, W), dtype=torch.uint8)

    def close(one: torch.Tensor, other: torch.Tensor) -> None:
        torch.testing.assert_close(one.float(), other.float(), atol=1.01, rtol=0)  # rounding instead of truncation

    def number(name: str) -> torch.Tensor:
        return torch.full((4,), OPS.index(name))

    factor = torch.full((4,), 1.6)
    close(enhance(images, "brightness", factor), T.adjust_brightness(images, 1.6))
    close(enhance(images, "contrast", factor), T.adjust_contrast(images, 1.6))
    close(enhance(images, "color", factor), T.adjust_saturation(images, 1.6))
    close(enhance(images, "sharpness", factor), T.adjust_sharpness(images, 1.6))
    tall = torch.randint(0, 256, (1, 3, 9, 9), dtype=torch.uint8).repeat_interleave(3, 2)  # (1, 3, 27, 9)
    one = torch.ones(1)
    rotated = resample(tall, torch.tensor([OPS.index("rotate")]), one)
    expected = T.rotate(tall.float(), -30.0, interpolation=T.InterpolationMode.BILINEAR, fill=128.0)
    assert (rotated.float() - expected).abs().mean() < 4.0 or (
        rotated.float() - T.rotate(tall.float(), 30.0, interpolation=T.InterpolationMode.BILINEAR, fill=128.0)
    ).abs().mean() < 4.0
    still = torch.zeros(4)
    for name in OPS[OPS.index("rotate") :]:
        assert torch.equal(resample(images, number(name), still), images)
    assert torch.equal(enhance(images, "sharpness", torch.ones(4)), images)
    assert torch.equal(color_jitter(images, 0.7, torch.full((4, 3), 0.5)), images)


def test_randaugment_uses_every_operation() -> None:
    # not the full range of greys, which autocontrast would leave as it is
    images = torch.randint(9, 200, (1, 3, 29, 31), dtype=torch.uint8).expand(401, -1, -1, -1)
    out = rand_augment(images, 1, 9.0, 0, 0, torch.arange(401))
    # identity, 4 tonal, and 9 with two directions each
    assert len(out.flatten(1).unique(dim=0)) == 1 + 4 + 2 * 9


def test_resized_crop_of_everything_is_the_image() -> None:
    images = torch.randint(0, 256, (B, 3, H, W), dtype=torch.uint8)
    draw = torch.rand(B, 4)
    draw[:, 1] = 0.5  # the image's own aspect ratio
    assert torch.equal(resized_crops(images, 1.0, draw), images)
    flat = torch.full_like(images, 9)
    assert torch.equal(resized_crops(flat, 0.1, torch.rand(B, 4)), flat)


@pytest.mark.parametrize(
    ("kwargs", "word"),
    [
        ({"erase": 1.5}, "augment.erase is 1.5: expected a number between 0 and 1"),
        ({"crop_padding": -1}, "augment.crop_padding"),
        ({"flip": "vertical"}, "augment.flip is 'vertical': expected one of True, False, 'alternating'"),
        ({"erase_area": (0.5, 0.2)}, "augment.erase_area"),
        ({"randaugment_magnitude": 30}, "between 0 and 10"),
    ],
)
def test_mistakes_in_the_configuration(kwargs: dict[str, Any], word: str) -> None:
    with pytest.raises(UserError, match=word.replace("(", r"\(")):
        AugmentConfig(**kwargs)


def test_changed_settings() -> None:
    assert AugmentConfig(flip=True, erase_area=(0.1, 0.2)).changed() == {"flip": True, "erase_area": (0.1, 0.2)}
    assert ImageData("digits").augment == AugmentConfig()
