"""Time whole optimiser steps on a synchronised device, and everything else apart from them."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from ..runs.schema import StepSeconds, Timing

# Steps that are left out of the statistics, in each process and after each change of what is frozen, because they
# include compilation and allocation. Later steps are, in which code is compiled or recorded for another shape.
WARMUP_STEPS = 10


@dataclass
class Times:
    """Seconds so far: of every measured step, of every warm-up step, and of everything else by its name."""

    steps: list[float] = field(default_factory=list)
    warmup: list[float] = field(default_factory=list)
    apart: dict[str, float] = field(default_factory=dict)


class StepTimer:
    """Measures the time of every optimiser step on the device's clock, and of validation, logging and the like.

    On a GPU a step lasts from the end of the step before it to its own end. Both are marked by events in the stream, so
    nothing waits. A step after a validation or a checkpoint starts at a mark of its own.
    """

    def __init__(self, device: torch.device, earlier: Times | None = None, warmup_steps: int = WARMUP_STEPS) -> None:
        """`earlier` are the times of earlier parts of the run; this process has a warm-up of its own."""
        self._warmup = self._warmup_left = warmup_steps
        self._cuda = device.type == "cuda"
        self._open: Any = None
        self._pending: list[tuple[Any, Any, bool]] = []
        self.times = earlier or Times()

    def begin(self) -> None:
        """Mark the start of consecutive steps."""
        self._open = self._mark()

    def warm_up_again(self) -> None:
        """Treat the next steps as warm-up: what trains has changed, and the code may be compiled again."""
        self.collect()
        self._warmup_left = self._warmup

    def step(self, warming_up: bool = False) -> None:
        """Mark the end of an optimiser step; `warming_up` is one that is left out of the statistics."""
        assert self._open is not None, "call begin first"
        now = self._mark()
        self._pending.append((self._open, now, warming_up))
        self._open = now

    def collect(self) -> list[float]:
        """Wait for the device, and return the seconds of each step since the last call."""
        if self._cuda:
            torch.cuda.synchronize()
        step_seconds = [self._between(start, end) for start, end, _ in self._pending]
        for seconds, (_, _, warming_up) in zip(step_seconds, self._pending, strict=True):
            (self.times.warmup if warming_up or self._warmup_left else self.times.steps).append(seconds)
            self._warmup_left = max(0, self._warmup_left - 1)
        self._pending.clear()
        return step_seconds

    @contextmanager
    def apart_from_steps(self, what: str) -> Iterator[list[float]]:
        """Time something that is not an optimiser step; the next step starts after it.

        Yield the times of the steps that were not collected yet.
        """
        step_seconds = self.collect()
        start = time.perf_counter()
        try:
            yield step_seconds
        finally:
            if self._cuda:
                torch.cuda.synchronize()
            self.times.apart[what] = self.times.apart.get(what, 0.0) + time.perf_counter() - start
            self.begin()

    def summary(self, tokens_per_step: float, notes: Sequence[str] = ()) -> Timing:
        """Return the content of timing.json; the run must have taken at least one step."""
        self.collect()
        steps, warmup = self.times.steps, self.times.warmup
        measured = np.array(steps or warmup, dtype=np.float64)
        median, mean, std = float(np.median(measured)), float(measured.mean()), float(measured.std())
        p10, p90 = np.percentile(measured, (10, 90)).tolist()
        return Timing(
            steps=len(measured),
            warmup_steps=len(warmup),
            warmup_seconds=sum(warmup),
            only_warmup=not steps,
            step_seconds=StepSeconds(median=median, mean=mean, p10=p10, p90=p90, std=std),
            tokens_per_second=tokens_per_step / median,
            # At most 200 of them, at even distances, show the shape of their distribution.
            step_seconds_sample=[round(seconds, 7) for seconds in steps[:: max(1, -(-len(steps) // 200))]],
            train_seconds=float(measured.sum()) + (sum(warmup) if steps else 0.0),
            seconds_apart=dict(self.times.apart),
            notes=list(notes),
        )

    def _mark(self) -> Any:
        if not self._cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def _between(self, start: Any, end: Any) -> float:
        return float(start.elapsed_time(end)) / 1000 if self._cuda else float(end - start)
