from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from vision_attn.contrast.config import DataChoice, NoiseChoice
from vision_attn.contrast.subsets import check_subsets, load_data, shuffle_labels, training_images
from vision_attn.errors import UserError


def test_subsets_are_nested_balanced_and_of_their_seed(plan):
    data = plan.data
    for seed in (0, 1):
        before: set[int] = set()
        for size in (0.02, 0.1, 0.5, 1.0):
            part, true = training_images(data, size, 0.0, seed)
            ids = set(part.ids.tolist())
            assert before <= ids
            assert len(part) == round(size * len(data.train))
            counts = true.bincount(minlength=10)
            assert counts.max() - counts.min() <= max(1, round(0.2 * len(part) / 10))
            before = ids
    ids = [training_images(data, 0.1, 0.0, seed)[0].ids.tolist() for seed in (0, 1)]
    assert ids[0] != ids[1]


def test_wrong_labels_are_the_same_for_all_and_nested(plan):
    some, true = training_images(plan.data, 0.5, 0.2, 3)
    more, _ = training_images(plan.data, 0.5, 0.4, 3)
    again, _ = training_images(plan.data, 0.5, 0.2, 3)
    plain, _ = training_images(plan.data, 0.5, 0.0, 3)
    assert torch.equal(some.labels, again.labels)
    assert torch.equal(some.ids, plain.ids)
    assert torch.equal(true, plain.labels)
    wrong, wrong_more = some.labels != true, more.labels != true
    assert int(wrong.sum()) == round(0.2 * len(true))
    assert int(wrong_more.sum()) == round(0.4 * len(true))
    assert bool((wrong_more | ~wrong).all())
    assert torch.equal(plan.data.train.labels, load_data(plan.config.data).train.labels)  # the original is untouched


@settings(deadline=None, max_examples=40)
@given(
    counts=st.lists(st.integers(4, 13), min_size=2, max_size=7),
    share=st.floats(0.3, 1.0),
    seed=st.integers(0, 2**31),
)
def test_no_shuffled_label_stays_right_and_classes_keep_their_number(counts, share, seed):
    labels = torch.cat([torch.full((n,), label) for label, n in enumerate(counts)])
    ids = torch.arange(len(labels)) * 17
    try:
        noisy = shuffle_labels(labels, ids, share, seed)
    except UserError:  # one class holds more than half of those that were chosen
        assert max(counts) > sum(counts) / 2 - 2
        return
    assert int((noisy != labels).sum()) == round(share * len(labels))
    assert torch.equal(noisy.bincount(minlength=len(counts)), labels.bincount())


def test_labels_that_cannot_be_wrong_are_refused():
    with pytest.raises(UserError, match="cannot be shuffled"):
        shuffle_labels(torch.zeros(5, dtype=torch.int64), torch.arange(5), 0.6, 0)
    with pytest.raises(UserError, match="is none"):
        shuffle_labels(torch.arange(5), torch.arange(5), 0.05, 0)


def test_a_subset_without_some_class_is_refused_with_the_smallest_that_has_all(tiny, plan):
    with pytest.raises(UserError, match=r"0\.005 of 1257 training images is 6, too few.*10 classes") as caught:
        check_subsets(tiny(sizes=[0.005, 0.1]), plan.data)
    share = float(str(caught.value).split("use ")[1].split()[0])
    check_subsets(tiny(sizes=[share + 1e-4, 0.1]), plan.data)
    lacking = dataclasses.replace(plan.data, train=plan.data.train.take((plan.data.train.labels != 3).nonzero()[:, 0]))
    with pytest.raises(UserError, match="no image of class '3'"):
        check_subsets(tiny(), lacking)
    with pytest.raises(UserError, match="none: use more images"):
        check_subsets(tiny(noise=NoiseChoice(levels=[0.01], sizes=[0.02])), plan.data)


@pytest.mark.parametrize("sizes", [[0.05, 0.0501], [0.0501, 0.05], [0.05, 0.2, 0.2 + 1e-10], [0.9999, 1.0]])
def test_two_sizes_of_the_same_images_are_refused_by_name(tiny, plan, sizes):
    config = tiny(sizes=sizes, noise=NoiseChoice(levels=[]))
    with pytest.raises(UserError, match="of 1257 training images are the same") as caught:
        check_subsets(config, plan.data)
    assert f"sizes: {sorted(sizes)[-2]!r} and {sorted(sizes)[-1]!r} of" in str(caught.value)


def test_labels_that_are_all_right_need_no_images_to_be_wrong(tiny, plan):
    check_subsets(tiny(sizes=[0.05], noise=NoiseChoice(levels=[0.0], sizes=[0.0001])), plan.data)


def test_a_data_set_without_a_split_is_refused(tmp_path):
    for split, count in (("train", 20), ("val", 4)):
        for number in range(count):
            path = tmp_path / split / "ab"[number % 2] / f"{number}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.new("RGB", (9, 9), (number, 0, 0)).save(path)
    with pytest.raises(UserError, match="no test split"):
        load_data(DataChoice("image_folder", root=str(tmp_path), img_size=8))
    with pytest.raises(UserError, match=r"no val split.*val_fraction"):
        load_data(DataChoice("digits", val_fraction=0.0))


def test_images_that_are_read_from_files_give_the_same_subsets(tmp_path):
    for number in range(60):
        path = tmp_path / "abc"[number % 3] / f"{number:02}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (9, 9), (number, 0, 0)).save(path)
    choice = DataChoice("image_folder", root=str(tmp_path), img_size=8)
    small, large = load_data(choice), load_data(dataclasses.replace(choice, memory_limit_mb=0))
    one, true = training_images(small, 0.5, 0.4, 2)
    other, _ = training_images(large, 0.5, 0.4, 2)
    assert torch.equal(one.ids, other.ids)
    assert torch.equal(one.labels, other.labels)
    rows = torch.arange(5)
    for key in ("image", "label"):
        assert torch.equal(one.batch(rows)[key], other.batch(rows)[key])
    assert bool((other.batch(torch.arange(len(other)))["label"] != true).any())
