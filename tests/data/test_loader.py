from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from vision_attn.data import EvalLoader, MemorySet, StreamedSet, TrainLoader
from vision_attn.errors import UserError


def memory(n: int) -> MemorySet:
    images = torch.arange(n).view(n, 1, 1, 1).expand(n, 3, 2, 5).to(torch.uint8)
    return MemorySet(images, torch.arange(n) % 3, torch.arange(n) + 1000)


@pytest.fixture
def streamed(tmp_path: Path) -> StreamedSet:
    paths = []
    for number in range(23):
        paths.append(str(tmp_path / f"{number}.png"))
        noise = torch.randint(0, 256, (13, 17, 3), dtype=torch.uint8)
        Image.fromarray(noise.numpy()).save(paths[-1])
    return StreamedSet(paths, torch.arange(23) % 5, torch.arange(23), size=(7, 11), seed=3, resized_crop=0.3)


def epoch_ids(loader: TrainLoader) -> list[list[int]]:
    return [batch["index"].tolist() for batch in loader]


def test_epochs_follow_each_other_and_differ() -> None:
    loader = TrainLoader(memory(23), batch_size=5, seed=1)
    epochs = [epoch_ids(loader) for _ in range(3)]
    assert all(sorted(itertools.chain(*epoch)) == list(range(1000, 1023)) for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2]
    loader.set_epoch(1)
    assert epoch_ids(loader) == epochs[1]
    loader.set_epoch(1)
    assert epoch_ids(loader) == epochs[1]
    assert epoch_ids(loader) == epochs[2]


@given(st.integers(2, 90), st.integers(1, 9), st.integers(0, 25))
@settings(max_examples=40)
def test_resume_continues_with_the_next_batch(n: int, size: int, stop: int) -> None:
    def take(loader: TrainLoader, count: int) -> list[tuple[int, list[int]]]:
        out: list[tuple[int, list[int]]] = []
        while len(out) < count:
            out += [(b["epoch"], b["index"].tolist()) for b in itertools.islice(loader, count - len(out))]
        return out

    expected = take(TrainLoader(memory(n), batch_size=size, seed=7), stop + 11)
    loader = TrainLoader(memory(n), batch_size=size, seed=7)
    take(loader, stop)
    state = loader.state_dict()
    resumed = TrainLoader(memory(n), batch_size=size, seed=7)
    resumed.load_state_dict(state)
    iter(resumed)  # asking for an iterator, as Lightning's check does, must not move anything
    assert take(resumed, 11) == expected[stop:]


def test_unfinished_epoch_is_left_by_the_next_iterator() -> None:
    loader = TrainLoader(memory(23), batch_size=5)
    next(iter(loader))
    assert next(iter(loader))["epoch"] == 1


@given(st.integers(1, 120), st.integers(1, 9), st.integers(1, 4))
@settings(max_examples=60)
def test_processes_share_global_batches(n: int, size: int, world: int) -> None:
    if n < world:
        with pytest.raises(UserError, match="fewer devices"):
            TrainLoader(memory(n), batch_size=size, world=world)
        return
    ranks = [TrainLoader(memory(n), batch_size=size, rank=r, world=world).rows(4) for r in range(world)]
    alone = TrainLoader(memory(n), batch_size=size * world).rows(4)
    assert len({len(rows) for rows in ranks}) == 1
    for number, parts in enumerate(zip(*ranks, strict=True)):
        assert len({len(part) for part in parts}) == 1
        joined = torch.stack(parts, 1).flatten()
        assert torch.equal(joined, alone[number][: len(joined)])
        assert len(alone[number]) - len(joined) < world


@given(st.integers(1, 200), st.integers(1, 50), st.integers(1, 5))
@settings(max_examples=60)
def test_evaluation_sees_every_sample_once(n: int, size: int, world: int) -> None:
    if n < world:
        return
    loaders = [EvalLoader(memory(n), batch_size=size, rank=r, world=world) for r in range(world)]
    assert len({len(loader) for loader in loaders}) == 1
    batches = [[batch["index"] for batch in loader] for loader in loaders]
    assert sorted(torch.cat([torch.cat(b) for b in batches]).tolist()) == list(range(1000, 1000 + n))
    assert all(len(batch) >= 1 for rank in batches for batch in rank)
    most = max(len(batch) for rank in batches for batch in rank)
    assert most <= size or (size == 1 and n % world and most == 2)


@pytest.mark.parametrize(("n", "batches", "last"), [(20, 4, 5), (22, 5, 2), (21, 4, 5), (3, 1, 3), (1, 1, 1)])
def test_last_batch(n: int, batches: int, last: int) -> None:
    """Kept from two samples on, because batch norm cannot train on one; never left with no batch at all."""
    rows = TrainLoader(memory(n), batch_size=5).rows(0)
    assert (len(rows), len(rows[-1])) == (batches, last)
    assert len(TrainLoader(memory(n), batch_size=5, drop_last=True)) == max(1, n // 5)


@pytest.mark.parametrize("workers", [0, 2])
def test_workers_change_nothing(streamed: StreamedSet, workers: int) -> None:
    alone = TrainLoader(streamed, batch_size=4, seed=5)
    loader = TrainLoader(streamed, batch_size=4, seed=5, num_workers=workers)
    loader.load_state_dict(alone.state_dict() | {"batch": 2})
    seen = list(loader)
    expected = list(alone)
    for one, other in zip(seen, expected[2:], strict=True):
        torch.testing.assert_close(one["image"], other["image"], rtol=0, atol=0)
        assert torch.equal(one["index"], other["index"])
    first = {i: image for b in expected for i, image in zip(b["index"].tolist(), b["image"], strict=True)}
    second = {i: image for b in loader for i, image in zip(b["index"].tolist(), b["image"], strict=True)}
    assert sum(torch.equal(first[i], second[i]) for i in second) <= 1  # another epoch, other crops
    assert first[0].shape == (3, 7, 11)


@pytest.mark.parametrize("workers", [0, 1])
def test_unreadable_file_is_one_error(streamed: StreamedSet, workers: int) -> None:
    Path(streamed.paths[11]).write_bytes(Path(streamed.paths[11]).read_bytes()[:100])
    with pytest.raises(UserError) as raised:
        list(TrainLoader(streamed, batch_size=4, num_workers=workers))
    assert "11.png" in str(raised.value)
    assert "Traceback" not in str(raised.value)
    with pytest.raises(UserError, match=r"11\.png"):
        list(EvalLoader(streamed, batch_size=4))


def test_state_of_other_data_is_refused_and_other_batch_size_converted() -> None:
    loader = TrainLoader(memory(40), batch_size=4)
    list(itertools.islice(loader, 6))
    with pytest.raises(UserError, match="40 training images, now there are 41"):
        TrainLoader(memory(41), batch_size=4).load_state_dict(loader.state_dict())
    other = TrainLoader(memory(40), batch_size=8)
    other.load_state_dict(loader.state_dict())
    assert other.state_dict()["batch"] == 3
    with pytest.warns(UserWarning, match="seed"):
        TrainLoader(memory(40), batch_size=4, seed=9).load_state_dict(loader.state_dict())


def test_partner_is_drawn_from_the_whole_set_whatever_the_batch() -> None:
    def partners(size: int) -> dict[int, int]:
        loader = TrainLoader(memory(97), batch_size=size, partners=True)
        return {
            i: int(p) for b in loader for i, p in zip(b["index"].tolist(), b["partner_image"][:, 0, 0, 0], strict=True)
        }

    assert partners(5) == partners(31)
    assert len(set(partners(97).values())) > 40
