"""What ``test_benchmark_attention`` has a child process measure; it imports little, for the child to start soon."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable

import torch


def takes(megabytes: int, device: str = "cpu") -> Callable[[], object]:
    """A call that takes so much memory; for 0, one that the system kills."""

    def call() -> object:
        if not megabytes:
            os.kill(os.getpid(), signal.SIGKILL)
        return torch.ones(megabytes * 2**18)

    return call
