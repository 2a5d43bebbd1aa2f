"""Being asked to stop: the first signal finishes the step and saves, the second ends at once."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

# The exit code of a run that stopped when asked and can go on: "temporary failure", on which a scheduler can requeue.
EXIT_REQUEUE = 75
_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR2)


class StopRequest:
    """Whether a signal asked this process to stop, and which.

    A launcher passes a signal on to processes that may have had it already: for `patience` seconds it counts as one.
    """

    def __init__(self) -> None:
        self.signal: str | None = None
        self.patience, self._since = 0.0, 0.0

    def __bool__(self) -> bool:
        return self.signal is not None

    def handle(self, number: int, frame: FrameType | None) -> None:
        if self.signal is None:
            self.signal, self._since = signal.Signals(number).name, time.monotonic()
        elif time.monotonic() - self._since >= self.patience:
            os._exit(128 + number)


@contextmanager
def listening() -> Iterator[StopRequest]:
    """Catch SIGTERM, SIGINT and SIGUSR2 (the one submitit sends) while the block runs. Only the main thread can."""
    request = StopRequest()
    try:
        before = {number: signal.signal(number, request.handle) for number in _SIGNALS}
    except ValueError:  # not the main thread: whoever runs us there handles signals
        yield request
        return
    try:
        yield request
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
