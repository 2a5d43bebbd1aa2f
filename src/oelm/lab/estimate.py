"""How long a matrix will take: from runs of the same experiments that are done, else from FLOPs and this machine."""

from __future__ import annotations

import time
from dataclasses import dataclass
from functools import cache
from statistics import median

from ..base.files import read_record
from ..errors import FileError
from .dry_run import dry_run
from .plan import Planned
from .preflight import tokens_of
from .status import is_done, so_many

# The share of a plain matrix product's speed that whole training steps reach, roughly, on a CPU and on a GPU.
_EFFICIENCY = {"cpu": 0.6, "cuda": 0.3}
# Starting a run: imports, data, the model. And training one at the smoke scale.
_START = 10.0
_SMOKE = 10.0


@dataclass(frozen=True)
class Estimate:
    """How many runs there are and are done, the hours that the rest takes, and how many of those a record tells."""

    runs: int
    done: int
    hours: float
    measured: int

    def __str__(self) -> str:
        left = self.runs - self.done
        basis = "from runs that are done" if self.measured >= left else "a rough estimate from their FLOPs"
        if not left:
            return f"{so_many(self.runs)}, all done"
        done = f", {self.done} of them done" if self.done else ""
        return f"{so_many(self.runs)}{done}; about {spell(self.hours * 3600)} ({basis})"


def estimate(runs: list[Planned], slots: int) -> Estimate:
    """The time that the runs which are not done will take on so many slots."""
    done = {run.folder for run in runs if _is_done(run)}
    left = [run for run in runs if run.folder not in done]
    known = _measured([run for run in runs if run.folder in done])
    # One model per experiment and size: building it anew for every seed would take longer than it is worth.
    rough: dict[str, float] = {}
    total = 0.0
    for run in left:
        name = run.config.experiment
        if name in known:
            total += known[name] + _START
            continue
        if name not in rough:
            rough[name] = _SMOKE if run.small else tokens_of(run) * dry_run(run).flops_per_token / speed()
        total += rough[name] + _START
    measured = sum(run.config.experiment in known for run in left)
    return Estimate(len(runs), len(runs) - len(left), total / max(1, min(slots, len(left))) / 3600, measured)


def spell(seconds: float) -> str:
    """A duration in the unit that suits it."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    if seconds < 90 * 60:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h" if seconds < 48 * 3600 else f"{seconds / 86400:.1f} days"


def _is_done(run: Planned) -> bool:
    try:
        return is_done(run.folder, run.config.id)
    except FileError:  # the matrix says what is wrong with it
        return False


def _measured(runs: list[Planned]) -> dict[str, float]:
    """The usual seconds of these finished runs by experiment, whatever their method and seed."""
    found: dict[str, list[float]] = {}
    for run in runs:
        seconds = read_record(run.folder / "result.json").get("seconds")
        if seconds is not None:
            found.setdefault(run.config.experiment, []).append(float(seconds))
    return {name: median(seconds) for name, seconds in found.items()}


def seconds_per_step(run: Planned) -> float:
    """What an optimiser step of a run takes on this machine, roughly."""
    tokens = run.config.train.batch_size * run.config.data.sequence_length
    return tokens * dry_run(run).flops_per_token / speed()


@cache
def speed() -> float:
    """The FLOP/s that training reaches on this machine's device, from a plain matrix product on one core or GPU."""
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    size, dtype = (8192, torch.bfloat16) if device == "cuda" else (512, torch.float32)
    square = torch.randn(size, size, device=device).to(dtype)
    threads = torch.get_num_threads()
    taken = []
    try:
        torch.set_num_threads(1)
        for _ in range(6):
            start = time.perf_counter()
            square @ square
            if device == "cuda":
                torch.cuda.synchronize()
            taken.append(time.perf_counter() - start)
    finally:
        torch.set_num_threads(threads)
    return 2 * size**3 / min(taken) * _EFFICIENCY[device]
