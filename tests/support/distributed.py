"""What the distributed tests share: groups of real processes, what each of them saw, and ways to break one of them.

A group is started as a scheduler starts it, by its environment alone, from a process that has imported everything. The
real torchrun takes several seconds, so only what depends on it is tested with it.
"""

from __future__ import annotations

import gc
import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel
from transformers import PreTrainedModel

from oelm.base.strict import merge
from oelm.method.seal import content_hash
from oelm.training.checkpoint import list_checkpoints
from tests.support.training import PRELOADED, SERVERS, Process, die, read, start, tiny, written

# What a process of a group imports when it joins, in the server that all of them are forked from.
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

# Whatever happens to one process, the others must have ended by then. Far more than it takes, on a busy machine too.
BOUND = 60.0

Sabotage = Callable[[], None]


def fields(output: Path, parallel: str = "ddp", **changes: Any) -> dict[str, Any]:
    """A tiny run whose numbers do not depend on how many processes train it: no dropout. It validates on all text."""
    plain = {
        "model": {"fields": {"dropout": 0.0}},
        "method": "oelm-freeze",
        "train": {"parallel": parallel},
        "eval": {"sequences": None},
    }
    return merge(tiny(output, **plain), changes)


def folder_of(output: Path, method: str = "oelm-freeze") -> Path:
    return output / "run" / method / "seed-0"


class Place:
    """Makes its process one of a group, and its sabotage happen there: on all of them, or on one."""

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
    """`oelm train CONFIG` on several processes. A sabotage may be one for all, or by rank."""

    def __init__(
        self, config: Path, size: int, sabotage: Sabotage | dict[int, Sabotage] | None, arguments: tuple[str, ...]
    ) -> None:
        port = free_port()
        self.processes: list[Process] = []
        for rank in range(size):
            mine = sabotage.get(rank) if isinstance(sabotage, dict) else sabotage
            place = Place(rank, size, port, mine)
            self.processes.append(start("train", config, *arguments, sabotage=place))

    def wait(self, seconds: float = BOUND) -> list[int]:
        """The exit code of each process."""
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
    return Group(written(file, config), size, sabotage, arguments)


def finish(config: dict[str, Any], *arguments: str, size: int = 2, sabotage: Any = None) -> Path:
    """Train a run on `size` processes to its good end; its folder."""
    group = launch(config, *arguments, size=size, sabotage=sabotage)
    codes = group.wait()
    assert codes == [0] * size, (codes, group.outputs)
    return next(Path(config["output"]).glob("run/*/seed-0"))


class Torchrun:
    """`torchrun --standalone --nproc-per-node 2 -m oelm train CONFIG`, started as a user starts it.

    A sabotage is one of those that running this file as a program does.
    """

    def __init__(self, config: dict[str, Any], *options: str, sabotage: str | None = None) -> None:
        file = written(Path(config["output"]) / "run.yaml", config)
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", *options]
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

    def wait(self, seconds: float = 2 * BOUND) -> tuple[int, str]:
        """Its exit code, and all that it and its processes said."""
        try:
            said, _ = self._process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            self._process.kill()
            said, _ = self._process.communicate()
            raise AssertionError(f"still running after {seconds} s; it said:\n{said}") from None
        return self._process.returncode, said

    def signal(self, number: int) -> None:
        self._process.send_signal(number)

    @property
    def alive(self) -> bool:
        return self._process.poll() is None


def free_port() -> int:
    """A port below those that the system gives out: a process that knocks before the other listens gets no echo."""
    while True:
        port = random.SystemRandom().randrange(20000, 32000)
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


def wait_until(happened: Callable[[], bool], seconds: float = BOUND) -> None:
    until = time.monotonic() + seconds
    while not happened():
        assert time.monotonic() < until, f"did not happen in {seconds} s"
        time.sleep(0.01)


# What a run left behind, whichever way its checkpoint was written


def tensors(run: Path) -> dict[str, Tensor]:
    """Every tensor of the last checkpoint: of one file, or put together from shards."""
    place = list_checkpoints(run / "checkpoints")[-1]
    shards = sorted((place / "shards").glob("*.safetensors"))
    if not shards:
        return load_file(place / "tensors.safetensors")
    parts: dict[str, list[Tensor]] = {}
    for shard in shards:  # in the order of their rank, and each tensor is cut along its first dimension
        for name, value in load_file(shard).items():
            parts.setdefault(name, []).append(value)
    return {name: torch.cat(values) for name, values in parts.items()}


def hashes(run: Path) -> dict[str, str]:
    return {name: content_hash(value) for name, value in tensors(run).items()}


# What every process of a run saw


class Watch:
    """Notes what its process does, in `folder/rank-N.json`: samples by step, final weights, what outlived the run."""

    def __init__(self, folder: Path, then: Sabotage | None = None) -> None:
        self.folder, self.then = folder, then

    def __call__(self) -> None:
        import torch.distributed as dist

        from oelm.training import checkpoint as state
        from oelm.training import engine
        from oelm.training.step import Stepper

        self.folder.mkdir(parents=True, exist_ok=True)
        self.now: list[int] = []
        self.seen: dict[str, Any] = {"samples": {}, "without_sync": 0, "weights": {}, "left": None, "verified": 0}
        step, batch, train = Stepper._step, Stepper._batch, engine._train
        no_sync, leave = DistributedDataParallel.no_sync, dist.destroy_process_group
        verify = state.verify

        def watched_step(stepper: Stepper, state: Any) -> None:
            self.now = self.seen["samples"].setdefault(str(state.step), [])
            step(stepper, state)

        def watched_batch(stepper: Stepper, first: int, count: int) -> Any:
            self.now += range(first, first + count)
            return batch(stepper, first, count)

        def watched_train(run: Any) -> bool:
            ended = train(run)
            self.seen["weights"] = {name: content_hash(value) for name, value in run.model.state_dict().items()}
            self._write()
            return ended

        def watched_no_sync(module: DistributedDataParallel) -> Any:
            self.seen["without_sync"] += 1
            return no_sync(module)

        def watched_leave(*arguments: Any) -> None:
            self.seen["left"] = [type(thing).__name__ for thing in gc.get_objects() if holds_the_group(thing)]
            leave(*arguments)
            self.seen["left"] += [name for name in thread_names() if "gloo" in name]
            self._write()

        def watched_verify(model: Any) -> Any:
            self.seen["verified"] += 1
            return verify(model)

        Stepper._step, Stepper._batch = watched_step, watched_batch  # type: ignore[method-assign]
        engine._train, dist.destroy_process_group = watched_train, watched_leave
        DistributedDataParallel.no_sync = watched_no_sync  # type: ignore[method-assign]
        state.verify = watched_verify
        if self.then is not None:
            self.then()

    def _write(self) -> None:
        (self.folder / f"rank-{os.environ['RANK']}.json").write_text(json.dumps(self.seen))


def holds_the_group(thing: Any) -> bool:
    """A model, a wrapper or an optimiser: with any of them alive, gloo may abort when the process ends."""
    return isinstance(thing, PreTrainedModel | DistributedDataParallel | FSDPModule | torch.optim.Optimizer)


def thread_names() -> list[str]:
    """The native threads of this process, where the system tells them."""
    return [file.read_text().strip() for file in Path("/proc/self/task").glob("*/comm")]


def seen(folder: Path, size: int = 2) -> list[dict[str, Any]]:
    """What the processes noted, by rank."""
    return [read(folder / f"rank-{rank}.json") for rank in range(size)]


# Sabotage


class At:
    """Does something at the start of a step, in the process that it is given to."""

    def __init__(self, step: int, what: Callable[[], None], slowly: float = 0.0) -> None:
        self.step, self.what, self.slowly = step, what, slowly

    def __call__(self) -> None:
        from oelm.training.step import Stepper

        take = Stepper.step

        def sabotaged(stepper: Stepper, state: Any) -> None:
            if state.step == self.step:
                self.what()
            time.sleep(self.slowly)
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


def terminate() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


def poison() -> None:
    """From now on the loss of this process is not a number."""
    from oelm.training.tasks.language import SummedLoss

    forward = SummedLoss.forward
    SummedLoss.forward = lambda module, **batch: forward(module, **batch) * float("nan")  # type: ignore[method-assign]


def never_wrap_anew() -> None:
    """Go on with the first wrapper when the schedule changes what trains."""
    from oelm.training import engine

    wrap, made = engine.wrap, []

    def once(*arguments: Any) -> Any:
        made.append(made[0] if made else wrap(*arguments))
        return made[0]

    engine.wrap = once


def blind() -> None:
    """See no checkpoint."""
    from oelm.training import resume

    resume.list_checkpoints = lambda folder: []


if __name__ == "__main__":
    what = sys.argv.pop(1)
    if what == "slow":
        At(99, die, slowly=0.1)()
    elif what == "fail" and os.environ["RANK"] == "1":
        At(7, fail)()
    from oelm.cli.app import main

    main()
