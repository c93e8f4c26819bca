"""Cells on a Ray that the test starts on this machine: two workers, one of which is killed."""

from __future__ import annotations

import os
import signal
import sys
import time
from types import SimpleNamespace

import pytest

from vision_attn.contrast.cells import plan_cells
from vision_attn.contrast.config import NoiseChoice
from vision_attn.contrast.runner import make_plan
from vision_attn.errors import UserError


def test_without_ray_the_message_says_what_to_install(plan, monkeypatch):
    from vision_attn.contrast.ray_runner import RayPool

    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(UserError, match=r"pip install 'vision_attn\[ray\]'"):
        RayPool(plan.config, plan.data, "auto")


@pytest.mark.parametrize("address", ["127.0.0.1:1", "ray://127.0.0.1:1", "nonsense"])
def test_where_no_cluster_answers_the_message_says_so(plan, address, monkeypatch):
    pytest.importorskip("ray", reason="Ray (the extra `ray`) is not installed")
    from vision_attn.contrast.ray_runner import RayPool

    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    with pytest.raises(UserError, match=rf"--ray {address}: no Ray cluster answers"):
        RayPool(plan.config, plan.data, address)


class FakeRay(SimpleNamespace):
    """As much of Ray as a pool asks for, on a cluster of these resources."""

    def __init__(self, resources, begin=None):
        errors = {name: type(name, (Exception,), {}) for name in ("RayError", "WorkerCrashedError", "NodeDiedError")}
        errors |= {name: type(name, (Exception,), {}) for name in ("OutOfMemoryError", "RayTaskError")}
        super().__init__(
            resources=resources, begin=begin, options={}, ended=False, exceptions=SimpleNamespace(**errors)
        )

    def is_initialized(self):
        return False

    def init(self, **options):
        if self.begin:
            raise self.begin

    def cluster_resources(self):
        return self.resources

    def put(self, value):
        return value

    def remote(self, **options):
        self.options = options
        return lambda function: SimpleNamespace(remote=lambda *args: object())

    def wait(self, references, num_returns):
        raise ConnectionError("the head is gone\nand more")

    def cancel(self, reference, force):
        raise ConnectionError("the head is gone")

    def shutdown(self):
        self.ended = True


def pool_on(monkeypatch, fake, config, data):
    from vision_attn.contrast.ray_runner import RayPool

    monkeypatch.setitem(sys.modules, "ray", fake)
    return RayPool(config, data, "auto")


@pytest.mark.parametrize(
    ("device", "gpus", "wanted", "words"),
    [("auto", 0, 0, "CPUs"), ("auto", 2, 1, "GPUs"), ("cuda", 2, 1, "GPUs"), ("cpu", 2, 0, "CPUs")],
)
def test_cells_ask_for_a_gpu_where_there_are_some(tiny, plan, monkeypatch, device, gpus, wanted, words):
    fake = FakeRay({"CPU": 32.0, **({"GPU": float(gpus)} if gpus else {})})
    pool = pool_on(monkeypatch, fake, tiny(device=device), plan.data)
    assert fake.options["num_gpus"] == wanted
    assert pool.device == f"{words} of a Ray cluster"
    assert pool._room() == (2 * gpus if wanted else 64)  # twice as many as can run


def test_a_gpu_that_no_node_has_is_refused(tiny, plan, monkeypatch):
    fake = FakeRay({"CPU": 2.0})
    with pytest.raises(UserError, match=r"device cuda: the Ray cluster has no GPU; choose auto or cpu"):
        pool_on(monkeypatch, fake, tiny(device="cuda"), plan.data)
    assert fake.ended


class OwnError(Exception):
    """Ray's client and gRPC have errors of their own."""


@pytest.mark.parametrize(
    "error", [OwnError("version mismatch\na long\nstory"), ConnectionError(), TimeoutError("late")]
)
def test_whatever_keeps_ray_from_beginning_is_one_line(plan, monkeypatch, error):
    with pytest.raises(UserError, match=r"--ray auto: no Ray cluster answers: .") as caught:
        pool_on(monkeypatch, FakeRay({}, begin=error), plan.config, plan.data)
    assert "\n" not in str(caught.value)


def test_a_cluster_that_is_lost_is_one_line(plan, monkeypatch):
    pool = pool_on(monkeypatch, FakeRay({"CPU": 2.0}), plan.config, plan.data)
    with pytest.raises(
        UserError, match=r"the Ray cluster is lost: the head is gone\. What has ended is kept"
    ) as caught:
        list(pool.run(plan.cells[:2], lambda cell: None))
    assert "\n" not in str(caught.value)


@pytest.fixture
def cluster():
    """Ray with two workers on this machine."""
    ray = pytest.importorskip("ray", reason="Ray (the extra `ray`) is not installed: cells on a cluster are not tested")
    ray.init("local", num_cpus=2, include_dashboard=False, log_to_driver=False, object_store_memory=100 << 20)
    yield ray
    ray.shutdown()


def own_pid(seconds: float) -> int:
    """The process of a worker, kept busy for a while so that another task goes to another worker."""
    time.sleep(seconds)
    return os.getpid()


def two_workers(ray) -> list[int]:
    task = ray.remote(own_pid)
    pids: set[int] = set()
    for busy in (0.5, 1.0, 2.0, 4.0, 8.0, 16.0):  # on a loaded machine the second worker may begin late
        pids |= set(ray.get([task.remote(busy) for _ in range(2)], timeout=200))
        if len(pids) == 2:
            break
    assert len(pids) == 2
    return sorted(pids)


def test_a_worker_that_is_killed_costs_nothing(tiny, here, cluster):
    from vision_attn.contrast.ray_runner import RayPool

    plan = make_plan(tiny(arms=["none"], noise=NoiseChoice(levels=[]), sizes=[0.1], seeds=3, steps=80))
    cells = plan_cells(plan.config, len(plan.data.train), {("vit", 0.1): 3e-3, ("cnn", 0.1): 3e-3})
    expected = {cell.id: outcome.result for cell, outcome in here(plan).run(cells, lambda cell: None)}
    workers, started, found = two_workers(cluster), [], {}
    pool = RayPool(plan.config, plan.data, "auto")
    for cell, outcome in pool.run(cells, lambda cell: started.append(cell.id)):
        if not found:  # one cell has ended: the worker that ran it is at its next one, and the other still at its first
            os.kill(workers[0], signal.SIGKILL)
        found[cell.id] = outcome.result
    pool.close()
    assert cluster.is_initialized()  # who started it ends it
    assert len(started) > len(cells)  # the cell in flight began again
    assert workers[0] not in two_workers(cluster)
    for name, result in expected.items():
        assert found[name].done, found[name].reason
        assert found[name].curve == result.curve
        assert found[name].values | {"seconds": 0} == result.values | {"seconds": 0}
