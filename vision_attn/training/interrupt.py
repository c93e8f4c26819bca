"""Ctrl-C and SIGTERM: finish the step, save, then end."""

from __future__ import annotations

import contextlib
import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import FrameType


class Interrupted(Exception):
    """Training ended early because somebody asked for it; the state is saved in ``path``."""

    def __init__(self, path: Path) -> None:
        super().__init__(str(path))
        self.path = path


class StopSignal:
    """Remembers that the process was asked to end.

    Args:
        saves: somebody looks at ``requested``, saves and ends; otherwise the first signal ends training at once.

    Attributes:
        requested: the first SIGINT or SIGTERM sets it; a second one ends the process at once.
        exit_code: 130 after SIGINT, 143 after SIGTERM.
    """

    def __init__(self, saves: bool = True) -> None:
        self.saves = saves
        self.requested = False
        self.exit_code = 130
        self._listens = False

    @contextlib.contextmanager
    def listening(self) -> Iterator[StopSignal]:
        """Catch the signals inside the ``with`` block (only the main thread of a program can)."""
        if threading.current_thread() is not threading.main_thread():
            yield self
            return
        previous = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
        for number in previous:
            signal.signal(number, self._handle)
        self._listens = True
        try:
            yield self
        finally:
            self._listens = False
            for number, handler in previous.items():
                signal.signal(number, handler)

    def take_back(self) -> None:
        """Catch SIGTERM alone again, where it is caught at all.

        Lightning puts a handler of its own before ours, which makes it end in the middle of a validation, or between
        batches that make one step together: there the state cannot be saved.
        """
        if self._listens:
            signal.signal(signal.SIGTERM, signal.SIG_DFL if self.requested else self._handle)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self.requested = True
        self.exit_code = 128 + number
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        if not self.saves:
            raise KeyboardInterrupt
        print("\nstopping: the state is saved first (once more to stop at once)", file=sys.stderr, flush=True)
