from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from vision_attn.contrast.cells import plan_cells
from vision_attn.contrast.config import NoiseChoice
from vision_attn.contrast.pool import Pool
from vision_attn.contrast.runner import make_plan
from vision_attn.errors import UserError


@pytest.fixture(scope="module")
def small(tiny):
    """Four cells, two of which are long enough to be killed in the middle."""
    return make_plan(tiny(arms=["none"], noise=NoiseChoice(levels=[]), sizes=[0.02, 0.1], small_seeds=1, steps=[7, 90]))


def cells_of(plan):
    rates = {(model, size): 3e-3 for model in plan.config.models for size in plan.config.sizes}
    return plan_cells(plan.config, len(plan.data.train), rates)


def measures(outcome):
    return {key: value for key, value in outcome.result.values.items() if key != "seconds"}, outcome.result.curve


@pytest.fixture(scope="module")
def expected(small, here):
    return {cell.id: measures(outcome) for cell, outcome in here(small).run(cells_of(small), lambda cell: None)}


def test_jobs_side_by_side_give_the_same_bits_and_a_killed_one_costs_nothing(small, expected, monkeypatch):
    pool = Pool(small.config, small.data.hash, jobs=2)
    cells, started = cells_of(small), []
    give = Pool._give

    def give_and_kill(self, job, waiting, start):
        give(self, job, waiting, start)
        if job.cell is cells[2] and started.count(cells[2].id) == 1:
            threading.Timer(0.05, job.process.kill).start()

    monkeypatch.setattr(Pool, "_give", give_and_kill)
    try:
        found = dict(pool.run(cells, lambda cell: started.append(cell.id)))
        assert {cell.id: measures(outcome) for cell, outcome in found.items()} == expected
        assert len(started) == len(cells) + 1  # one of them began twice
        again = dict(pool.run(cells[:1], lambda cell: None))  # the processes are still there
        assert measures(again[cells[0]]) == expected[cells[0].id]
    finally:
        pool.close()
    assert pids() == []


def pids():
    return [process.pid for process in multiprocessing.active_children()]


def kill_one_of(processes):
    os.kill(processes[0], signal.SIGKILL)


def test_a_cell_that_kills_its_process_every_time_is_a_failed_cell(small, expected):
    pool = Pool(small.config, small.data.hash, jobs=1)
    cells = cells_of(small)[1:]

    def start(cell):
        if cell is cells[1]:
            threading.Timer(0.05, kill_one_of, [pids()]).start()

    try:
        found = dict(pool.run(cells, start))
    finally:
        pool.close()
    failed = found[cells[1]].result
    assert failed.status == "failed"
    assert "SIGKILL; probably out of memory: try fewer --jobs" in failed.reason
    for cell in (cells[0], cells[2]):
        assert measures(found[cell]) == expected[cell.id]


def test_jobs_that_cannot_even_begin_end_the_study(small, monkeypatch):
    """Killed as soon as they are started, as by a system that has no memory left at all."""
    start = Pool._start

    def start_and_kill(self):
        job = start(self)
        job.process.kill()
        return job

    monkeypatch.setattr(Pool, "_start", start_and_kill)
    with pytest.raises(UserError, match=r"ended before its first cell.*SIGKILL"):
        list(Pool(small.config, small.data.hash, jobs=2).run(cells_of(small), lambda cell: None))
    assert pids() == []


def test_a_job_that_finds_other_images_ends_the_study(small):
    pool = Pool(small.config, "0123", jobs=1)
    with pytest.raises(UserError, match="found other images"):
        list(pool.run(cells_of(small), lambda cell: None))
    assert pids() == []


def test_jobs_end_when_their_parent_is_killed_in_the_middle_of_a_cell(tmp_path):
    """No one is left to end them then; they are no daemons, which could not have workers of their own."""
    code = f"""
from pathlib import Path
from vision_attn.contrast.cells import plan_cells
from vision_attn.contrast.config import ContrastConfig, DataChoice, ModelChoice, NoiseChoice
from vision_attn.contrast.pool import Pool
from vision_attn.contrast.runner import make_plan

if __name__ == "__main__":
    two = {{name: ModelChoice("resnet8_cifar", {{"width": 3}}) for name in "ab"}}
    config = ContrastConfig(
        two, sizes=[0.1], arms=["none"], noise=NoiseChoice(levels=[]), seeds=1, steps=10**6, match=False, device="cpu"
    )
    plan = make_plan(config)
    pool = Pool(config, plan.data.hash, jobs=1)
    cells = plan_cells(config, len(plan.data.train), {{(name, 0.1): 1e-4 for name in two}})
    def begun(cell):
        Path({str(tmp_path / "pid")!r}).write_text(str(pool._alive[0].process.pid))
    list(pool.run(cells, begun))
"""
    script = tmp_path / "parent.py"
    script.write_text(code)
    parent = subprocess.Popen([sys.executable, str(script)], stderr=subprocess.PIPE, text=True)
    try:
        deadline = time.monotonic() + 300
        while not (pid := (tmp_path / "pid").read_text() if (tmp_path / "pid").exists() else ""):
            assert parent.poll() is None, parent.stderr.read()
            assert time.monotonic() < deadline
            time.sleep(0.05)
    finally:
        parent.kill()
        parent.wait()
    job = Path("/proc") / pid
    while job.exists() and "Z" not in job.joinpath("stat").read_text().split()[2]:
        assert time.monotonic() < deadline, "the job outlived its parent"
        time.sleep(0.05)


def test_an_interruption_ends_the_processes(small):
    pool = Pool(small.config, small.data.hash, jobs=1)

    def start(cell):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        list(pool.run(cells_of(small), start))
    pool.close()
    assert pids() == []
