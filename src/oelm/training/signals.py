"""Handle signals to stop: after the first one the run finishes its step and saves, the second ends it at once."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

# The exit code of a run that was asked to stop and can be resumed: "temporary failure", on which a scheduler requeues.
EXIT_REQUEUE = 75
_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR2)


class StopRequest:
    """The signal that asked this process to stop; as a bool, whether there was one.

    A launcher may pass on a signal that the process already had. For `patience` seconds it counts as the same one.
    """

    def __init__(self) -> None:
        self.signal: str | None = None
        self.patience, self._since = 0.0, 0.0

    def __bool__(self) -> bool:
        return self.signal is not None

    def handle(self, number: int, frame: FrameType | None) -> None:
        """Note the first signal; end the process at a second one."""
        if self.signal is None:
            self.signal, self._since = signal.Signals(number).name, time.monotonic()
        elif time.monotonic() - self._since >= self.patience:
            os._exit(128 + number)


@contextmanager
def listening() -> Iterator[StopRequest]:
    """Catch SIGTERM, SIGINT and SIGUSR2 (which submitit sends) while the block runs. Only the main thread can."""
    request = StopRequest()
    try:
        previous = {number: signal.signal(number, request.handle) for number in _SIGNALS}
    except ValueError:  # not in the main thread: the caller handles signals
        yield request
        return
    try:
        yield request
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
