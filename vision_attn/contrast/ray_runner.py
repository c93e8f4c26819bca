"""Cells on a Ray cluster (https://docs.ray.io), the extra ``ray``."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from vision_attn.contrast.config import ContrastConfig
from vision_attn.contrast.results import Cell, Result
from vision_attn.contrast.subsets import StudyData
from vision_attn.contrast.training import Outcome, Trainings
from vision_attn.errors import UserError, first_line

_ATTEMPTS = 2  # as in the pool of this machine
_PATIENCE = 10.0  # seconds
_AHEAD = 2  # cells handed over per core or GPU of the cluster; the others wait here, where their folders stay untouched


class RayPool:
    """An executor on the nodes of a Ray cluster.

    The images travel to each node once, through Ray's object store; nodes need this package, but no data, unless an
    image folder is too large for memory: its paths must then be the same everywhere. A cell whose worker is killed is
    tried once again, on another worker. Results come back through Ray and are written here, so no node writes files.
    With ``device: cuda``, or ``auto`` on a cluster that has GPUs, every cell gets a GPU of its own; this machine needs
    none.

    Args:
        config: of the study.
        data: its images.
        address: of the cluster, e.g. ``auto``, ``ray://head:10001``, or ``local`` for a new one on this machine.

    Raises:
        UserError: Ray is not installed, no cluster answers, or it has no GPU although one was asked for.
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
            resources = ray.cluster_resources()
            self._gpus = gpus_per_cell(config.device, resources)
            self._shared = ray.put((config, data))
        except UserError:
            self.close()
            raise
        except Exception as error:  # Ray's own errors, its client's and gRPC's have no base in common
            raise UserError(f"--ray {address}: no Ray cluster answers: {first_line(error)}") from error
        # Ray would try again by itself, but then nobody would know that a worker was lost
        self._task = ray.remote(num_cpus=config.threads, num_gpus=self._gpus, max_retries=0, max_calls=0)(_work)

    @property
    def device(self) -> str:
        """Words for what cells run on."""
        return f"{'GPUs' if self._gpus else 'CPUs'} of a Ray cluster"

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
        except (ray.exceptions.RayError, ConnectionError) as error:
            raise UserError(
                f"the Ray cluster is lost: {first_line(error)}. What has ended is kept; the same command goes on."
            ) from error
        finally:
            with contextlib.suppress(Exception):  # nothing is left to cancel where the cluster is lost
                for reference in running:
                    ray.cancel(reference, force=True)

    def close(self) -> None:
        """Leave the cluster."""
        if not self._joined:
            self.ray.shutdown()

    def _room(self) -> int:
        resources = self.ray.cluster_resources()
        slots = int(resources.get("CPU", 1)) // self.config.threads
        slots = min(slots, int(resources.get("GPU", 0))) if self._gpus else slots
        return max(1, _AHEAD * slots)

    def _outcome(self, reference: Any, cell: Cell) -> Outcome | None:
        """What a cell gave; None when its worker died."""
        ray = self.ray
        try:
            return ray.get(reference)
        except (ray.exceptions.WorkerCrashedError, ray.exceptions.NodeDiedError, ray.exceptions.OutOfMemoryError):
            return None
        except ray.exceptions.RayTaskError as error:
            cause = first_line(error.cause or error)
            return Outcome(Result(cell, "failed", f"on its Ray node: {cause}"), trace=str(error))


def gpus_per_cell(device: str, resources: Mapping[str, float]) -> int:
    """0 or 1: what a cell asks Ray for.

    Args:
        device: of the configuration.
        resources: of the cluster, as ``ray.cluster_resources()`` tells them.

    Raises:
        UserError: a GPU is asked for and there is none: cells would wait for ever.
    """
    there = resources.get("GPU", 0) >= 1
    if device.startswith("cuda") and not there:
        raise UserError(f"device {device}: the Ray cluster has no GPU; choose auto or cpu, or start a node with one.")
    return int(there and device != "cpu")


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
