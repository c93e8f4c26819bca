"""Cells on a Ray cluster (https://docs.ray.io), the extra ``ray``."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator
from typing import Any

from vision_attn.contrast.config import ContrastConfig
from vision_attn.contrast.results import Cell, Result
from vision_attn.contrast.subsets import StudyData
from vision_attn.contrast.training import Outcome, Trainings
from vision_attn.errors import UserError

_ATTEMPTS = 2  # as in the pool of this machine
_PATIENCE = 10.0  # seconds
_AHEAD = 2  # cells handed over per core of the cluster; the others wait here, where their folders stay untouched


class RayPool:
    """An executor on the nodes of a Ray cluster.

    The images travel to each node once, through Ray's object store; nodes need this package, but no data, unless an
    image folder is too large for memory: its paths must then be the same everywhere. A cell whose worker is killed is
    tried once again, on another worker. Results come back through Ray and are written here, so no node writes files.

    Args:
        config: of the study.
        data: its images.
        address: of the cluster, e.g. ``auto``, ``ray://head:10001``, or ``local`` for a new one on this machine.

    Raises:
        UserError: Ray is not installed, or no cluster answers.
    """

    def __init__(self, config: ContrastConfig, data: StudyData, address: str) -> None:
        try:
            import ray
        except ModuleNotFoundError:
            raise UserError("--ray needs Ray: pip install 'vision_attn[ray]'.") from None
        self.ray: Any = ray
        self.config = config
        self._joined = ray.is_initialized()
        try:
            if not self._joined:
                _knock(address)
                ray.init(address=address, log_to_driver=False, include_dashboard=False)
        except (OSError, ValueError, RuntimeError) as error:
            raise UserError(f"--ray {address}: no Ray cluster answers: {str(error).splitlines()[0]}") from error
        self._shared = ray.put((config, data))
        gpus = 1 if config.device.startswith("cuda") else 0
        # Ray would try again by itself, but then nobody would know that a worker was lost
        self._task = ray.remote(num_cpus=config.threads, num_gpus=gpus, max_retries=0, max_calls=0)(_work)

    def run(self, cells: list[Cell], started: Callable[[Cell], None]) -> Iterator[tuple[Cell, Outcome]]:
        """See :class:`~vision_attn.contrast.runner.Executor`."""
        ray = self.ray
        waiting, attempts = list(cells), dict.fromkeys((cell.id for cell in cells), 0)
        running: dict[Any, Cell] = {}
        try:
            while waiting or running:
                while waiting and len(running) < self._room():
                    cell = waiting.pop(0)
                    started(cell)
                    running[self._task.remote(self._shared, cell)] = cell
                ended, _ = ray.wait(list(running), num_returns=1)
                for reference in ended:
                    cell = running.pop(reference)
                    outcome = self._outcome(reference, cell)
                    attempts[cell.id] += 1
                    if outcome is None and attempts[cell.id] < _ATTEMPTS:
                        waiting.insert(0, cell)
                        continue
                    yield cell, outcome or Outcome(Result(cell, "failed", "its Ray worker was killed, twice"))
        finally:
            for reference in running:
                ray.cancel(reference, force=True)

    def close(self) -> None:
        """Leave the cluster."""
        if not self._joined:
            self.ray.shutdown()

    def _room(self) -> int:
        cores = int(self.ray.cluster_resources().get("CPU", 1))
        return max(1, _AHEAD * cores // self.config.threads)

    def _outcome(self, reference: Any, cell: Cell) -> Outcome | None:
        """What a cell gave; None when its worker died."""
        ray = self.ray
        try:
            return ray.get(reference)
        except (ray.exceptions.WorkerCrashedError, ray.exceptions.NodeDiedError, ray.exceptions.OutOfMemoryError):
            return None
        except ray.exceptions.RayTaskError as error:
            cause = str(error.cause or error).splitlines()[0]
            return Outcome(Result(cell, "failed", f"on its Ray node: {cause}"), trace=str(error))


def _knock(address: str) -> None:
    """Whether anybody listens at ``host:port``; Ray itself would try for minutes.

    Raises:
        OSError: nobody does.
    """
    host, colon, port = address.removeprefix("ray://").rpartition(":")
    if colon and port.isdecimal():
        socket.create_connection((host, int(port)), timeout=_PATIENCE).close()


_KEPT: dict[str, Trainings] = {}


def _work(shared: tuple[ContrastConfig, StudyData], cell: Cell) -> Outcome:
    """Runs in a Ray worker, which keeps what it has prepared for the next cell."""
    os.environ.setdefault("OMP_NUM_THREADS", str(shared[0].threads))
    config, data = shared
    key = f"{config.hash()} {data.hash}"
    if key not in _KEPT:
        _KEPT.clear()
        _KEPT[key] = Trainings(config, data.hash, data)
    return _KEPT[key].run(cell)
