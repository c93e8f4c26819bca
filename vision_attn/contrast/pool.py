"""Cells side by side on this machine, each job a process of its own."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess

from vision_attn.contrast.config import ContrastConfig
from vision_attn.contrast.results import Cell, Result
from vision_attn.contrast.training import Outcome
from vision_attn.errors import UserError

_ATTEMPTS = 2  # a process may be killed for the memory of another one, so a cell gets a second chance


@dataclass
class _Job:
    process: BaseProcess
    pipe: Connection
    cell: Cell | None = None
    ready: bool = False


class Pool:
    """An executor of ``jobs`` processes.

    A process that is killed costs its cell and no more: the cell is tried once again, and recorded as failed when that
    process is killed too. Every cell runs with ``config.threads`` threads however many jobs there are, so the results
    do not depend on them.

    Args:
        config: of the study.
        data_hash: what every process must find.
        jobs: how many.
    """

    def __init__(self, config: ContrastConfig, data_hash: str, jobs: int) -> None:
        self.config, self.data_hash, self.jobs = config, data_hash, jobs
        self._context = multiprocessing.get_context("spawn")
        self._idle: list[_Job] = []
        self._alive: list[_Job] = []
        self._false_starts = 0

    def run(self, cells: list[Cell], started: Callable[[Cell], None]) -> Iterator[tuple[Cell, Outcome]]:
        """See :class:`~vision_attn.contrast.runner.Executor`."""
        waiting, attempts = list(cells), dict.fromkeys((cell.id for cell in cells), 0)
        jobs = [*self._idle, *(self._start() for _ in range(min(self.jobs, len(cells)) - len(self._idle)))]
        self._idle = []
        try:
            for job in [job for job in jobs if job.ready]:
                self._give(job, waiting, started)
            while waiting or any(job.cell for job in jobs):
                for pipe in wait([job.pipe for job in jobs]):
                    job = next(job for job in jobs if job.pipe is pipe)
                    cell, message = job.cell, self._receive(job)
                    if isinstance(message, Outcome) and cell is not None:
                        yield cell, message
                    elif message is None:
                        if cell is not None:
                            attempts[cell.id] += 1
                            if attempts[cell.id] < _ATTEMPTS:
                                waiting.insert(0, cell)
                            else:
                                yield cell, Outcome(Result(cell, "failed", _death(job.process)))
                        jobs.remove(job)
                        jobs += self._replace(job, jobs) if waiting else []
                        continue
                    self._give(job, waiting, started)
            self._idle = jobs
        finally:
            if not self._idle:
                self.close()

    def close(self) -> None:
        """End the processes."""
        for job in self._alive:
            job.process.kill()
        for job in self._alive:
            job.process.join()
            job.pipe.close()
        self._idle, self._alive = [], []

    def _start(self) -> _Job:
        ours, theirs = self._context.Pipe()
        # not a daemon: those may not have the processes that decode images
        process = self._context.Process(target=_work, args=(theirs, self.config, self.data_hash), daemon=False)
        with _environment(OMP_NUM_THREADS=str(self.config.threads)):
            process.start()
        theirs.close()
        job = _Job(process, ours)
        self._alive.append(job)
        return job

    def _replace(self, dead: _Job, others: list[_Job]) -> list[_Job]:
        """A job in place of one that was killed; none for one that could not even begin while others do the work.

        Raises:
            UserError: none can begin.
        """
        if dead.ready:
            return [self._start()]
        if others:
            return []
        self._false_starts += 1
        if self._false_starts >= _ATTEMPTS:
            raise UserError(f"a job ended before its first cell: {_death(dead.process)}")
        return [self._start()]

    def _give(self, job: _Job, waiting: list[Cell], started: Callable[[Cell], None]) -> None:
        """The next cell, if there is one and the job is ready for it."""
        job.cell = waiting.pop(0) if waiting else None
        if job.cell is not None:
            started(job.cell)
            with contextlib.suppress(OSError):  # it was killed: that is seen when its answer is read
                job.pipe.send(job.cell)

    def _receive(self, job: _Job) -> Outcome | str | None:
        """What a job says; None when it was killed.

        Raises:
            UserError: it cannot do its work.
        """
        try:
            message = job.pipe.recv()
        except (EOFError, OSError):
            job.process.join(10)
            return None
        if isinstance(message, UserError):
            raise message
        job.ready = True
        return message


def _death(process: BaseProcess) -> str:
    code = process.exitcode
    if code is None or code >= 0:
        return f"the process ended by itself with code {code}"
    name = signal.Signals(-code).name
    hint = "; probably out of memory: try fewer --jobs" if name == "SIGKILL" else ""
    return f"the process was killed by {name}{hint}"


@contextlib.contextmanager
def _environment(**variables: str) -> Iterator[None]:
    """Variables that a process started inside the block finds from its first line on."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _end_with_parent() -> None:
    """A parent that was killed can stop nobody, and a training would go on for nothing."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    wait([parent.sentinel])
    os._exit(1)  # what decodes images for this process notices by itself


def _work(pipe: Connection, config: ContrastConfig, data_hash: str) -> None:
    """A job: reads the data once, then one cell after the other, until nobody listens any more."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the parent decides
    threading.Thread(target=_end_with_parent, daemon=True).start()
    # a job was spawned, and would spawn what decodes images for it: a new import of torch at every evaluation
    multiprocessing.set_start_method(multiprocessing.get_all_start_methods()[0], force=True)
    from vision_attn.cli.quiet import quiet
    from vision_attn.contrast.training import Trainings

    with quiet(), contextlib.suppress(EOFError, BrokenPipeError):
        try:
            trainings = Trainings(config, data_hash)
        except UserError as error:
            pipe.send(error)
            return
        pipe.send("ready")
        while True:
            pipe.send(trainings.run(pipe.recv()))
