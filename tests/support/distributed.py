"""Shared by the distributed tests: groups of real processes, records of what each process did, and ways to break one.

A group is started as a scheduler starts it, by environment variables alone, from a process that has imported
everything. The real torchrun takes several seconds, so only what depends on it is tested with it.
"""

from __future__ import annotations

import gc
import json
import os
import random
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel
from transformers import PreTrainedModel

from oelm.base.strict import merge
from oelm.method.seal import content_hash, whole
from oelm.runs.folder import read_metrics
from oelm.training.checkpoint import list_checkpoints
from tests.support.training import (
    LIMIT,
    PRELOADED,
    SERVERS,
    Held,
    Process,
    metrics_without_times,
    read,
    start,
    tiny,
    write_yaml,
)

# Imported in the server that all processes are forked from: what a process imports when it joins a group.
SERVERS.set_forkserver_preload(
    [
        *PRELOADED,
        "torch.distributed.checkpoint.hf_storage",
        "torch.distributed.checkpoint.state_dict",
        "torch.distributed.fsdp",
        "torch.distributed.nn",
        "torch.distributed.optim",
    ]
)

Sabotage = Callable[[], None]


def fields(output: Path, parallel: str = "ddp", **changes: Any) -> dict[str, Any]:
    """Return a tiny run without dropout, so that its numbers do not depend on the number of processes."""
    plain = {
        "model": {"fields": {"dropout": 0.0}},
        "method": "oelm-freeze",
        "train": {"parallel": parallel},
        "eval": {"sequences": None},
    }
    return merge(tiny(output, **plain), changes)


def folder_of(output: Path, method: str = "oelm-freeze") -> Path:
    return output / "run" / method / "seed-0"


class Member:
    """Makes its process a member of a group and calls its sabotage there."""

    def __init__(self, rank: int, size: int, port: int, sabotage: Sabotage | None) -> None:
        self.rank, self.size, self.port, self.sabotage = rank, size, port, sabotage

    def __call__(self) -> None:
        os.environ |= {
            "RANK": str(self.rank),
            "LOCAL_RANK": str(self.rank),
            "WORLD_SIZE": str(self.size),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(self.port),
        }
        if self.sabotage is not None:
            self.sabotage()


class Group:
    """`oelm train CONFIG` on several processes, with one sabotage for all of them or one by rank."""

    def __init__(
        self, config: Path, size: int, sabotage: Sabotage | dict[int, Sabotage] | None, arguments: tuple[str, ...]
    ) -> None:
        port = free_port()
        self.processes: list[Process] = []
        for rank in range(size):
            own_sabotage = sabotage.get(rank) if isinstance(sabotage, dict) else sabotage
            member = Member(rank, size, port, own_sabotage)
            self.processes.append(start("train", config, *arguments, sabotage=member))

    def wait(self, seconds: float = LIMIT) -> list[int]:
        """Wait for all processes and return their exit codes."""
        until = time.monotonic() + seconds
        return [process.wait(max(0.1, until - time.monotonic())) for process in self.processes]

    def signal(self, number: int, *ranks: int) -> None:
        for rank in ranks or range(len(self.processes)):
            self.processes[rank].signal(number)

    @property
    def outputs(self) -> list[str]:
        return [process.output for process in self.processes]


def launch(
    config: dict[str, Any],
    *arguments: str,
    size: int = 2,
    sabotage: Sabotage | dict[int, Sabotage] | None = None,
) -> Group:
    """Start a run on `size` processes."""
    file = Path(config["output"]) / "run.yaml"
    return Group(write_yaml(file, config), size, sabotage, arguments)


def finish(config: dict[str, Any], *arguments: str, size: int = 2, sabotage: Any = None) -> Path:
    """Train a run on `size` processes, require that all succeed, and return its folder."""
    group = launch(config, *arguments, size=size, sabotage=sabotage)
    codes = group.wait()
    assert codes == [0] * size, (codes, group.outputs)
    return next(Path(config["output"]).glob("run/*/seed-0"))


class Torchrun:
    """`torchrun --standalone --nproc-per-node 2 -m oelm train CONFIG`, started as a user starts it.

    Other `options` than the two replace them. A sabotage is one of those at the end of this file.
    """

    def __init__(self, config: dict[str, Any], *options: str, sabotage: str | None = None) -> None:
        file = write_yaml(Path(config["output"]) / "run.yaml", config)
        where = [] if "--nnodes" in options else ["--standalone", "--nproc-per-node", "2"]
        command = [sys.executable, "-m", "torch.distributed.run", *where, *options]
        command += ["-m", "oelm"] if sabotage is None else ["-m", __name__, sabotage]
        environment = {**os.environ, "HF_HUB_OFFLINE": "1", "NO_COLOR": "1", "TERM": "dumb", "OMP_NUM_THREADS": "1"}
        self._process = subprocess.Popen(
            [*command, "train", str(file)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=environment,
            cwd=Path(__file__).parents[2],
        )

    def wait(self, seconds: float = LIMIT) -> tuple[int, str]:
        """Wait for the end and return the exit code and everything that it and its processes printed."""
        try:
            output, _ = self._process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            self._process.kill()
            output, _ = self._process.communicate()
            raise AssertionError(f"still running after {seconds} s; its output:\n{output}") from None
        return self._process.returncode, output

    def signal(self, number: int) -> None:
        self._process.send_signal(number)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def alive(self) -> bool:
        return self._process.poll() is None


def free_port() -> int:
    """Return a free port below the range from which the system gives out ports to connecting processes."""
    while True:
        port = random.SystemRandom().randrange(20000, 32000)
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


def wait_until(condition: Callable[[], bool], seconds: float = LIMIT) -> None:
    """Wait until a condition holds."""
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until, f"did not happen in {seconds} s"
        time.sleep(0.01)


# The tensors of a run, whether its checkpoint is sharded or not


def tensors(run: Path) -> dict[str, Tensor]:
    """Return every tensor of the last checkpoint: from one file, or put together from shards."""
    checkpoint = list_checkpoints(run / "checkpoints")[-1]
    shards = sorted((checkpoint / "shards").glob("*.safetensors"))
    if not shards:
        return load_file(checkpoint / "tensors.safetensors")
    parts: dict[str, list[Tensor]] = {}
    for shard in shards:  # in the order of their rank; each tensor is sharded along its first dimension
        for name, value in load_file(shard).items():
            parts.setdefault(name, []).append(value)
    return {name: torch.cat(values) for name, values in parts.items()}


def hashes(run: Path) -> dict[str, str]:
    return {name: content_hash(value) for name, value in tensors(run).items()}


def assert_close(run: Path, other: Path) -> None:
    """Require the same losses at every step and the same weights, up to the order in which floats are added."""
    assert [(line.kind, line.step) for line in read_metrics(run)] == [
        (line.kind, line.step) for line in read_metrics(other)
    ]
    for line, expected in zip(metrics_without_times(run), metrics_without_times(other), strict=True):
        for layer, expected_layer in zip(line.pop("layers", ()), expected.pop("layers", ()), strict=True):
            assert layer.pop("label") == expected_layer.pop("label")
            assert layer == pytest.approx(expected_layer, rel=1e-4)
        for key, value in expected.items():
            assert line[key] == (pytest.approx(value, rel=1e-5) if isinstance(value, float) else value)
    left, right = tensors(run), tensors(other)
    assert left.keys() == right.keys()
    for name, tensor in left.items():
        if name.startswith("model/"):
            torch.testing.assert_close(tensor, right[name], rtol=1e-3, atol=2e-5)


# Notes of what every process of a run did


class Watch:
    """Notes in `folder/rank-N.json` the samples of each step, the final weights, and objects that outlived the run.

    Calls `then`, a sabotage, after that.
    """

    def __init__(self, folder: Path, then: Sabotage | None = None) -> None:
        self.folder, self.then = folder, then

    def __call__(self) -> None:
        import torch.distributed as dist

        from oelm.training import checkpoint as state
        from oelm.training import engine
        from oelm.training.step import Stepper

        self.folder.mkdir(parents=True, exist_ok=True)
        self.now: list[int] = []
        self.notes: dict[str, Any] = {"samples": {}, "without_sync": 0, "weights": {}, "leftovers": None, "verified": 0}
        step, batch, loop = Stepper._step, Stepper._batch, engine._loop
        no_sync, leave = DistributedDataParallel.no_sync, dist.destroy_process_group
        verify = state.verify

        def watched_step(stepper: Stepper, state: Any) -> None:
            self.now = self.notes["samples"].setdefault(str(state.step), [])
            step(stepper, state)

        def watched_batch(stepper: Stepper, first: int, count: int) -> Any:
            self.now += range(first, first + count)
            return batch(stepper, first, count)

        def watched_loop(run: Any) -> bool:
            ended = loop(run)
            self.notes["weights"] = {name: content_hash(value) for name, value in run.model.state_dict().items()}
            self._write()
            return ended

        def watched_no_sync(module: DistributedDataParallel) -> Any:
            self.notes["without_sync"] += 1
            return no_sync(module)

        def watched_leave(*arguments: Any) -> None:
            self.notes["leftovers"] = [type(obj).__name__ for obj in gc.get_objects() if holds_the_group(obj)]
            leave(*arguments)
            self.notes["leftovers"] += [name for name in thread_names() if "gloo" in name]
            self._write()

        def watched_verify(model: Any) -> Any:
            self.notes["verified"] += 1
            return verify(model)

        Stepper._step, Stepper._batch = watched_step, watched_batch  # type: ignore[method-assign]
        engine._loop, dist.destroy_process_group = watched_loop, watched_leave
        DistributedDataParallel.no_sync = watched_no_sync  # type: ignore[method-assign]
        state.verify = watched_verify
        if self.then is not None:
            self.then()

    def _write(self) -> None:
        (self.folder / f"rank-{os.environ['RANK']}.json").write_text(json.dumps(self.notes))


class NoteGradients:
    """Saves the whole gradients that the optimiser of every process gets, as `folder/rank-N-step-S.safetensors`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __call__(self) -> None:
        from oelm.training.step import Stepper

        self.folder.mkdir(parents=True, exist_ok=True)
        update, steps = Stepper._update, count()

        def noted(stepper: Stepper, norm: Tensor, non_finite: Tensor) -> None:
            parameters = stepper.model.named_parameters()
            gradients = {name: whole(p.grad).clone() for name, p in parameters if p.grad is not None}
            save_file(gradients, self.folder / f"rank-{stepper.world.rank}-step-{next(steps)}.safetensors")
            update(stepper, norm, non_finite)

        Stepper._update = noted  # type: ignore[method-assign]


def holds_the_group(obj: Any) -> bool:
    """Return True for a model, a wrapper or an optimiser: while one of these is alive, gloo may abort at exit."""
    return isinstance(obj, PreTrainedModel | DistributedDataParallel | FSDPModule | torch.optim.Optimizer)


def thread_names() -> list[str]:
    """Return the names of this process's native threads, where /proc lists them."""
    return [file.read_text().strip() for file in Path("/proc/self/task").glob("*/comm")]


def process_notes(folder: Path, size: int = 2) -> list[dict[str, Any]]:
    """Return the notes that `Watch` wrote for each rank."""
    return [read(folder / f"rank-{rank}.json") for rank in range(size)]


# Sabotage


class At:
    """Does something at the start of a step."""

    def __init__(self, step: int, action: Callable[[], None]) -> None:
        self.step, self.action = step, action

    def __call__(self) -> None:
        from oelm.training.step import Stepper

        take = Stepper.step

        def sabotaged(stepper: Stepper, state: Any) -> None:
            if state.step == self.step:
                self.action()
            take(stepper, state)

        Stepper.step = sabotaged  # type: ignore[method-assign]


class Before:
    """Trains another run first, in the same process."""

    def __init__(self, config: dict[str, Any]) -> None:
        self.config = config

    def __call__(self) -> None:
        from oelm.config import RunConfig
        from oelm.training.engine import train

        train(RunConfig.load(self.config), quiet=True)


def fail() -> None:
    raise ValueError("this window cannot be read")


def poison() -> None:
    """Make the loss of this process NaN from now on."""
    from oelm.training.tasks.language import SummedLoss

    forward = SummedLoss.forward
    SummedLoss.forward = lambda module, **batch: forward(module, **batch) * float("nan")  # type: ignore[method-assign]


def keep_first_wrapper() -> None:
    """Keep using the first wrapper when the schedule changes which tensors train."""
    from oelm.training import build

    wrap, wrappers = build.wrap, []

    def once(*arguments: Any) -> Any:
        wrappers.append(wrappers[0] if wrappers else wrap(*arguments))
        return wrappers[0]

    build.wrap = once


def same_signal_for_long() -> None:
    """Treat every further signal as the first one passed on again, however late it comes."""
    from oelm.training import engine

    engine._SAME_SIGNAL = 10 * LIMIT


class HeldInGroup(Held):
    """Holds its process until a signal arrives, and treats further signals as the same one."""

    def __call__(self) -> None:
        same_signal_for_long()
        super().__call__()


def hide_checkpoints() -> None:
    """Let this process see no checkpoint."""
    from oelm.training import resume

    resume.list_checkpoints = lambda folder: []


if __name__ == "__main__":
    sabotage = sys.argv.pop(1)
    if sabotage == "hold":
        HeldInGroup(3)()
    elif sabotage == "fail" and os.environ["RANK"] == "1":
        At(7, fail)()
    from oelm.cli.app import main

    main()
