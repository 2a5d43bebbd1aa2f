"""One process or many: joining the group, wrapping the model, agreeing on numbers, failing and leaving together."""

from __future__ import annotations

import gc
import os
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import cache
from itertools import count
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import nn

from ..errors import ConfigError, OelmError, TrainingError, first_line

_PATIENCE = timedelta(minutes=30)
_REASON = "failure"
_NO_REASON = "lost contact with another process; if it gave no reason, it was killed or its machine failed ({})"
_joins = count()


@dataclass(frozen=True)
class World:
    """This process's place among all: its rank, how many there are, its device.

    What the processes agree on travels through the CPU, so nothing here waits for a GPU.
    """

    rank: int
    size: int
    device: torch.device
    board: Any = None  # where a process leaves the reason of its failure for the others

    @property
    def main(self) -> bool:
        return self.rank == 0

    def total(self, value: float) -> float:
        """The value summed over all processes, in float64."""
        return self.totals([value])[0]

    def totals(self, values: list[float]) -> list[float]:
        """Each of the values summed over all processes, in float64."""
        return [sum(column) for column in zip(*self._everyone(values), strict=True)]

    def gather(self, value: float) -> list[float]:
        """The value of every process, in float64, by rank."""
        return [values[0] for values in self._everyone([value])]

    def collect(self, items: list[str]) -> list[str]:
        """The items of all processes in one list, by rank."""
        if self.size == 1:
            return items
        everyone: list[list[str]] = [[] for _ in range(self.size)]
        dist.all_gather_object(everyone, items)
        return [item for one in everyone for item in one]

    def _everyone(self, values: list[float]) -> list[list[float]]:
        mine = torch.tensor(values, dtype=torch.float64)
        if self.size == 1:
            return [mine.tolist()]
        everyone = [torch.empty_like(mine) for _ in range(self.size)]
        dist.all_gather(everyone, mine)
        return [one.tolist() for one in everyone]

    def any(self, flag: bool) -> bool:
        """Whether the flag is set on any process."""
        return self.total(float(flag)) > 0

    def barrier(self) -> None:
        self.gather(0.0)

    @contextmanager
    def failing_together(self) -> Iterator[None]:
        """Leave the reason of a failure for the others; a process that fails for want of another gives that one's."""
        try:
            yield
        except Exception as error:
            if self.board is None:
                raise
            if not _lost_contact(error):
                said = str(error) if isinstance(error, OelmError) else repr(error)
                _post(self.board, f"process {self.rank} failed: {said}")
                raise
            raise TrainingError(_read(self.board) or _NO_REASON.format(first_line(error))) from None


@contextmanager
def joined(device: Literal["auto", "cpu", "cuda"]) -> Iterator[World]:
    """Join the group that a launcher started, or be alone; leave it in order when the block ends."""
    rank, size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    where = device_for(device, int(os.environ.get("LOCAL_RANK", 0)))
    if size == 1:
        yield World(0, 1, where)
        return
    world = World(rank, size, where, _join(rank, size, where))
    try:
        yield world
    except BaseException as error:
        # The others may never reach a barrier now. Leaving at once closes the connections that they wait on.
        _let_go(error)
        _leave(at_once=True)
        raise
    # Gloo aborts at exit when something still holds the group: let go of everything, meet once more, then leave.
    gc.collect()
    with suppress(RuntimeError):  # all is done and written: that another process has gone already does no harm
        world.barrier()
    _leave()


def _join(rank: int, size: int, device: torch.device) -> Any:
    """Make the group; the store that its processes share."""
    _import_what_would_keep_the_group()
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    try:
        # A process may join again and again, and torchrun may start it anew: each time has names of its own in the
        # store, which outlives them all.
        attempt = f"oelm/{os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}/{next(_joins)}"
        store = dist.distributed_c10d.PrefixStore(attempt, _meeting_point())
        dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=_PATIENCE)
    except RuntimeError as error:
        where = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
        raise TrainingError(
            f"process {rank} of {size} did not find the others at {where}: {first_line(error)}"
        ) from None
    return store


def _import_what_would_keep_the_group() -> None:
    """Import, while there is no group, the modules of torch whose functions have the group of that time as a default.

    Imported later, as DDP and FSDP do, they would keep its threads alive until the interpreter ends, and abort it.
    """
    import torch.distributed.fsdp
    import torch.distributed.nn
    import torch.distributed.optim  # noqa: F401


def _leave(at_once: bool = False) -> None:
    """Destroy the group. At once: without waiting for exchanges on a GPU that the others will not take part in."""
    from torch.distributed.device_mesh import DeviceMesh

    for thing in gc.get_objects():
        if type(thing) is DeviceMesh:  # torch's caches of sharded operations keep it, and it keeps the group
            getattr(thing, "_pg_registry", {}).clear()
    if at_once and "nccl" in str(dist.get_backend_config()):
        dist.distributed_c10d._abort_process_group()
    else:
        dist.destroy_process_group()


def _let_go(error: BaseException | None) -> None:
    """Empty the frames of an error that are done: they hold the model, and so the group. Its traceback stays."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        if error.__suppress_context__:  # a frame's closure is not emptied, so what nobody will see goes altogether
            error.__context__ = None
        error = error.__cause__ or error.__context__
    gc.collect()


@cache
def _meeting_point() -> Any:
    """The store through which the launcher lets the processes find each other."""
    lacking = [name for name in ("MASTER_ADDR", "MASTER_PORT", "RANK") if not os.environ.get(name)]
    if lacking:
        raise ConfigError(
            f"WORLD_SIZE is {os.environ['WORLD_SIZE']}, but {', '.join(lacking)} is not set: start with torchrun, or "
            "set MASTER_ADDR, MASTER_PORT, WORLD_SIZE, RANK and LOCAL_RANK for every process"
        )
    from torch.distributed.rendezvous import rendezvous

    store, _, _ = next(rendezvous("env://", timeout=_PATIENCE))
    return store


def _lost_contact(error: Exception) -> bool:
    """Whether an error says no more than that another process has gone."""
    return isinstance(error, dist.DistError) or (isinstance(error, RuntimeError) and "gloo" in str(error))


def _post(board: Any, reason: str) -> None:
    """Leave a reason, if none is there yet."""
    with suppress(RuntimeError):  # the store lives in another process, which may be gone
        board.compare_set(_REASON, "", reason)


def _read(board: Any) -> str | None:
    with suppress(RuntimeError):
        if board.check([_REASON]):
            return str(board.get(_REASON), "utf-8")
    return None


def wrap(module: nn.Module, blocks: list[nn.Module], world: World, how: Literal["ddp", "fsdp"]) -> nn.Module:
    """The module as the group trains it: as it is, DistributedDataParallel, or sharded in place (FSDP2)."""
    if world.size == 1:
        return module
    if how == "ddp":
        from torch.nn.parallel import DistributedDataParallel

        ids = [world.device.index] if world.device.type == "cuda" else None
        # Buffers hold constants here: exchanging them would make a forward pass wait for the other processes.
        constants = [name for name, _ in module.named_buffers()]
        ignore = DistributedDataParallel._set_params_and_buffers_to_ignore_for_model
        ignore(module, constants)  # type: ignore[no-untyped-call]
        return DistributedDataParallel(module, device_ids=ids, gradient_as_bucket_view=True)
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh(world.device.type, (world.size,))
    for block in blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(module, mesh=mesh)
    return module


@contextmanager
def without_sync(module: nn.Module, last: bool) -> Iterator[None]:
    """Exchange gradients only after the last micro-batch of a step."""
    from torch.distributed.fsdp import FSDPModule
    from torch.nn.parallel import DistributedDataParallel

    inner: Any = getattr(module, "_orig_mod", module)
    if isinstance(inner, DistributedDataParallel) and not last:
        with inner.no_sync():
            yield
        return
    if isinstance(inner, FSDPModule):
        inner.set_requires_gradient_sync(last)
    yield


def reshard(module: nn.Module) -> None:
    """Bring back the shards of a sharded module after a forward pass that no backward pass followed."""
    from torch.distributed.fsdp import FSDPModule

    inner = getattr(module, "_orig_mod", module)
    if isinstance(inner, FSDPModule):
        inner.reshard()


def device_for(wanted: Literal["auto", "cpu", "cuda"], local_rank: int = 0) -> torch.device:
    """The device that `train.device` means for a process."""
    there = torch.cuda.is_available()
    if wanted == "cuda" and not there:
        raise ConfigError("train.device is 'cuda', but torch sees no CUDA device here; use 'auto' or 'cpu'")
    if wanted == "cpu" or not there:
        return torch.device("cpu")
    if local_rank >= torch.cuda.device_count():
        raise ConfigError(
            f"local rank {local_rank} has no GPU of its own: this machine has {torch.cuda.device_count()}"
        )
    torch.cuda.set_device(local_rank)
    return torch.device("cuda", local_rank)
