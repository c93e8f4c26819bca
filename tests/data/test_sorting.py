"""Sequences to be sorted: who is in them, in which order they belong, and that they can be had again."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from vision_attn.data import AugmentConfig, MemorySet
from vision_attn.data.sorting import SequenceEvalLoader, SequenceSet, SequenceTrainLoader, SortingData, sorting_order
from vision_attn.errors import UserError


def memory(n: int = 31, sequences: int = 23) -> SequenceSet:
    images = torch.arange(n).view(n, 1, 1, 1).expand(n, 3, 2, 5).to(torch.uint8)
    return SequenceSet(images, torch.arange(n) % 7, torch.arange(n) + 1000, sequences)


@pytest.fixture(scope="module")
def digits() -> SortingData:
    data = SortingData(batch_size=13, sequences=37, eval_sequences=11, lengths=(3, 6), eval_lengths=(5, 8))
    data.setup(None)
    return data


@given(st.lists(st.integers(0, 4), min_size=1, max_size=12))
def test_the_order_is_ascending_and_ties_stay_in_place(labels):
    order = sorting_order(torch.tensor(labels)).tolist()
    assert order == sorted(range(len(labels)), key=lambda i: (labels[i], i))


def test_a_sequence_is_what_it_says(digits):
    data = digits.sequences_of("train")
    batch = data.draw(torch.tensor([4, 9]), 6, seed=0, epoch=0)
    assert batch["image"].shape == (2, 6, 3, 8, 8)
    ordered = batch["label"].gather(1, batch["order"])
    assert (ordered.diff(dim=1) >= 0).all()
    for row in range(2):
        for image, label in zip(batch["image"][row], batch["label"][row], strict=True):
            assert label in data.labels[(data.images == image).flatten(1).all(1)]
    assert len(batch["index"].unique()) == 12
    again = data.draw(torch.tensor([9]), 6, seed=0, epoch=0)
    torch.testing.assert_close(again["image"][0], batch["image"][1], rtol=0, atol=0)
    assert (data.draw(torch.tensor([9]), 6, seed=0, epoch=1)["image"] != again["image"]).any()


def test_splits_share_no_scan(digits):
    sets = [set(digits.sequences_of(split).ids.tolist()) for split in ("train", "val", "test")]
    assert sum(map(len, sets)) == len(set.union(*sets)) == 1797


def test_training_batches_have_one_length_each(digits):
    loader = digits.train_dataloader()
    lengths = set()
    for _ in range(12):
        batches = list(loader)
        assert [len(batch["label"]) for batch in batches] == [13, 13, 11]
        lengths |= {batch["label"].shape[1] for batch in batches}
    assert lengths == {3, 4, 5, 6}


@given(st.integers(0, 9), st.sampled_from([1, 2]))
def test_a_resumed_loader_goes_on_with_the_next_batch(stop, world):
    def make() -> SequenceTrainLoader:
        return SequenceTrainLoader(memory(), lengths=(2, 5), batch_size=5, seed=3, world=world)

    def take(loader: SequenceTrainLoader, count: int) -> list[torch.Tensor]:
        out: list[torch.Tensor] = []
        while len(out) < count:
            out += [batch["image"] for batch in itertools.islice(loader, count - len(out))]
        return out

    expected = take(make(), stop + 7)[stop:]
    loader = make()
    take(loader, stop)
    resumed = make()
    resumed.load_state_dict(loader.state_dict())
    for one, other in zip(take(resumed, 7), expected, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)


def test_two_processes_share_lengths_and_no_sequence():
    loaders = [SequenceTrainLoader(memory(), lengths=(2, 5), batch_size=5, rank=rank, world=2) for rank in (0, 1)]
    for one, other in zip(*loaders, strict=True):
        assert one["label"].shape == other["label"].shape
        assert not set(one["index"].flatten().tolist()) & set(other["index"].flatten().tolist())


@pytest.mark.parametrize("world", [1, 3])
def test_evaluations_see_every_sequence_of_every_length_once(world):
    seen: list[tuple[str, int]] = []
    for rank in range(world):
        for batch in SequenceEvalLoader(memory(), lengths=(5, 8), batch_size=4, rank=rank, world=world):
            seen += [(batch["suffix"], batch["label"].shape[1], int(i)) for i in batch["index"][:, 0]]
    numbers = [number * 1024 for number in range(23)]
    assert sorted(seen) == [("", 5, number) for number in numbers] + [("_n8", 8, number) for number in numbers]


def test_evaluations_do_not_depend_on_the_seed(digits):
    other = SortingData(seed=5, eval_sequences=11)
    for split in ("val", "test"):
        for one, two in zip(digits._eval_loader(split), other._eval_loader(split), strict=True):
            torch.testing.assert_close(one["image"], two["image"], rtol=0, atol=0)


def test_images_are_normalised_and_each_is_augmented_by_itself():
    data = SortingData(batch_size=13, sequences=13, augment=AugmentConfig(crop_padding=2, crop_mode="zero"))
    plain = SortingData(batch_size=13, sequences=13)
    raw = next(iter(data.train_dataloader()))
    batch, reference = data.on_after_batch_transfer(raw), plain.on_after_batch_transfer(raw)
    assert batch["image"].shape == raw["image"].shape
    torch.testing.assert_close(plain.denormalize(reference["image"][:, 0]), raw["image"][:, 0], rtol=0, atol=0)
    changed = (batch["image"] != reference["image"]).flatten(2).any(-1)  # (B, n)
    assert changed.any(0).all()
    assert changed.any(1).all()
    evaluated = data.on_after_batch_transfer(next(iter(data.val_dataloader())))
    assert evaluated["suffix"] == ""
    assert evaluated["image"].dtype == torch.float32


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"lengths": (6, 3)}, r"data.lengths is \(6, 3\)"),
        ({"lengths": (0, 3)}, "data.lengths"),
        ({"eval_lengths": ()}, "data.eval_lengths"),
        ({"eval_lengths": (5, 5)}, "given once"),
        ({"sequences": 0}, "data.sequences is 0"),
        ({"eval_sequences": -1}, "data.eval_sequences is -1"),
        ({"augment": AugmentConfig(mixup=0.2)}, "mixed image has no place"),
        ({"name": "digit"}, "digits"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_choices_that_make_no_sense(options, words):
    with pytest.raises(UserError, match=words):
        SortingData(**options)


def test_a_set_that_is_streamed_cannot_be_sorted(monkeypatch):
    data = SortingData()
    monkeypatch.setattr(data, "required", lambda split: object())
    with pytest.raises(UserError, match="memory_limit_mb"):
        data.sequences_of("train")


def test_a_plain_set_becomes_sequences():
    assert isinstance(memory(), MemorySet)
    assert len(memory(31, 5)) == 5
