"""Cells on a Ray that the test starts on this machine: two workers, one of which is killed."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from pathlib import Path

import pytest

from vision_attn.contrast.cells import plan_cells
from vision_attn.contrast.config import NoiseChoice
from vision_attn.contrast.runner import make_plan
from vision_attn.errors import UserError


def test_without_ray_the_message_says_what_to_install(tiny, plan, monkeypatch):
    from vision_attn.contrast.ray_runner import RayPool

    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(UserError, match=r"pip install 'vision_attn\[ray\]'"):
        RayPool(plan.config, plan.data, "auto")


@pytest.fixture
def cluster(tmp_path):
    """Ray with two workers on this machine."""
    ray = pytest.importorskip("ray", reason="Ray (the extra `ray`) is not installed: cells on a cluster are not tested")
    os.environ["RAY_ENABLE_UV_RUN_RUNTIME_ENV"] = "0"
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, object_store_memory=100 << 20)
    yield ray
    ray.shutdown()


def busy_workers() -> list[int]:
    """Processes below this one that run a cell for Ray."""
    parents, busy = {}, []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                parents[int(entry.name)] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
                if (entry / "cmdline").read_bytes().startswith(b"ray::_work"):
                    busy.append(int(entry.name))
            except (OSError, ValueError):  # it ended meanwhile
                continue
    return [pid for pid in busy if os.getpid() in ancestors(pid, parents)]


def ancestors(pid: int, parents: dict[int, int]) -> list[int]:
    found = []
    while pid in parents and pid not in found:
        pid = parents[pid]
        found.append(pid)
    return found


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="finds Ray's workers in /proc")
def test_a_worker_that_is_killed_costs_nothing(tiny, here, cluster):
    from vision_attn.contrast.ray_runner import RayPool

    config = tiny(arms=["none"], noise=NoiseChoice(levels=[]), sizes=[0.1], seeds=3, steps=150)
    plan = make_plan(config)
    cells = plan_cells(config, len(plan.data.train), {("vit", 0.1): 3e-3, ("cnn", 0.1): 3e-3})
    expected = {cell.id: outcome.result for cell, outcome in here(plan).run(cells, lambda cell: None)}
    killed: list[int] = []

    def kill_one() -> None:
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline:
            if len(workers := busy_workers()) == 2:
                killed.append(workers[0])
                os.kill(workers[0], signal.SIGKILL)
                return
            time.sleep(0.01)

    killer = threading.Thread(target=kill_one)
    killer.start()
    started: list[str] = []
    pool = RayPool(config, plan.data, "auto")
    found = {cell.id: outcome.result for cell, outcome in pool.run(cells, lambda cell: started.append(cell.id))}
    pool.close()
    killer.join()
    assert len(killed) == 1
    assert len(started) == len(cells) + 1  # the cell in flight began again
    for name, result in expected.items():
        assert found[name].done, found[name].reason
        assert found[name].curve == result.curve
        assert found[name].values | {"seconds": 0} == result.values | {"seconds": 0}
