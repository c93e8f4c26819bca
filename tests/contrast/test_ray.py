"""Cells on a Ray that the test starts on this machine: two workers, one of which is killed."""

from __future__ import annotations

import os
import signal
import sys
import time

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
    while len(pids) < 2:  # the second worker may start late
        pids |= set(ray.get([task.remote(0.5) for _ in range(2)]))
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
