"""Estimate how long a matrix takes: by finished runs of its experiments, else by FLOPs and this machine's speed."""

from __future__ import annotations

import time
from dataclasses import dataclass
from functools import cache
from statistics import median

from ..errors import FileError
from ..runs.schema import Result, read
from .dry_run import dry_run
from .plan import PlannedRun
from .preflight import training_tokens
from .status import is_done

# The share of a plain matrix product's speed that whole training steps reach, roughly, on a CPU and on a GPU.
_EFFICIENCY = {"cpu": 0.6, "cuda": 0.3}
# Seconds for which a machine's speed is timed.
_TIMED_SECONDS = 0.5
# Seconds to start a run (imports, data, the model), and to train one at the smoke scale.
_START_SECONDS = 10.0
_SMOKE_SECONDS = 10.0


@dataclass(frozen=True)
class DurationEstimate:
    """How many runs a matrix has, how many are done, and the hours that the remaining ones take.

    `measured` of the remaining runs have a duration known from a finished run of their experiment; that of the others
    is a rough estimate.
    """

    runs: int
    done: int
    hours: float
    measured: int


def estimate(runs: list[PlannedRun], slots: int) -> DurationEstimate:
    """Return how long the runs that are not done will take with `slots` of them at a time."""
    done = {run.folder for run in runs if _is_done(run)}
    remaining = [run for run in runs if run.folder not in done]
    measured = _measured_seconds([run for run in runs if run.folder in done])
    # One estimate per experiment: building the model again for every seed would take too long.
    seconds = dict(measured)
    for run in remaining:
        if run.config.experiment not in seconds:
            seconds[run.config.experiment] = _SMOKE_SECONDS if run.smoke else _seconds(run, training_tokens(run))
    total = sum(seconds[run.config.experiment] + _START_SECONDS for run in remaining)
    return DurationEstimate(
        runs=len(runs),
        done=len(runs) - len(remaining),
        hours=total / max(1, min(slots, len(remaining))) / 3600,
        measured=sum(run.config.experiment in measured for run in remaining),
    )


def _is_done(run: PlannedRun) -> bool:
    try:
        return is_done(run.folder, run.config.id)
    except FileError:  # the matrix reports what is wrong with it
        return False


def _measured_seconds(runs: list[PlannedRun]) -> dict[str, float]:
    """Return the median duration of these finished runs by experiment, over all methods and seeds."""
    durations: dict[str, list[float]] = {}
    for run in runs:
        durations.setdefault(run.config.experiment, []).append(read(run.folder / "result.json", Result).seconds)
    return {name: median(seconds) for name, seconds in durations.items()}


def seconds_per_step(run: PlannedRun) -> float:
    """Return roughly how long an optimiser step of a run takes on this machine."""
    return _seconds(run, run.config.train.batch_size * run.config.data.sequence_length)


def _seconds(run: PlannedRun, tokens: float) -> float:
    return tokens * dry_run(run).flops_per_token / training_speed()


@cache
def training_speed() -> float:
    """Return the FLOP/s that training reaches on this machine now, from timed matrix products on one core or GPU.

    The mean over a while, not the fastest product: where other programs run, they take their share of every run too.
    """
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    size, dtype = (8192, torch.bfloat16) if device == "cuda" else (512, torch.float32)
    square = torch.randn(size, size, device=device).to(dtype)

    def multiply() -> None:
        square @ square
        if device == "cuda":
            torch.cuda.synchronize()

    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        multiply()
        count, seconds, start = 0, 0.0, time.perf_counter()
        while seconds < _TIMED_SECONDS:
            multiply()
            count, seconds = count + 1, time.perf_counter() - start
    finally:
        torch.set_num_threads(threads)
    return 2 * size**3 * count / seconds * _EFFICIENCY[device]
