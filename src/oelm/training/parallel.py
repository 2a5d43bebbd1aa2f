"""Train on one process or many: join the group, wrap the model, agree on numbers, fail and leave together."""

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

# How long a process waits for the others before it gives up.
_TIMEOUT = timedelta(minutes=30)
_REASON = "failure"
_NO_REASON = "lost contact with another process, which gave no reason; it was killed, or its machine failed ({})"
_joins = count()


@dataclass(frozen=True)
class World:
    """This process within its group: its rank, the number of processes, its device.

    Numbers are exchanged through the CPU, so nothing here waits for a GPU.
    """

    rank: int
    size: int
    device: torch.device
    board: Any = None  # the store in which a process leaves the reason of its failure for the others

    @property
    def main(self) -> bool:
        """Return True in the one process that writes records."""
        return self.rank == 0

    def total(self, value: float) -> float:
        """Return the value summed over all processes, in float64."""
        return self.totals([value])[0]

    def totals(self, values: list[float]) -> list[float]:
        """Return each of the values summed over all processes, in float64."""
        return [sum(column) for column in zip(*self._gather(values), strict=True)]

    def gather(self, value: float) -> list[float]:
        """Return the value of every process by rank, in float64."""
        return [values[0] for values in self._gather([value])]

    def collect(self, items: list[str]) -> list[str]:
        """Return the items of all processes in one list, by rank."""
        if self.size == 1:
            return items
        by_rank: list[list[str]] = [[] for _ in range(self.size)]
        dist.all_gather_object(by_rank, items)
        return [item for items_of_rank in by_rank for item in items_of_rank]

    def _gather(self, values: list[float]) -> list[list[float]]:
        """Return the values of every process by rank."""
        local = torch.tensor(values, dtype=torch.float64)
        if self.size == 1:
            return [local.tolist()]
        by_rank = [torch.empty_like(local) for _ in range(self.size)]
        dist.all_gather(by_rank, local)
        return [tensor.tolist() for tensor in by_rank]

    def any(self, flag: bool) -> bool:
        """Return whether the flag is set in any process."""
        return self.total(float(flag)) > 0

    def barrier(self) -> None:
        """Wait until every process is here."""
        self.gather(0.0)

    @contextmanager
    def failing_together(self) -> Iterator[None]:
        """Share the reason of a failure: a process that failed because a peer died reports the peer's error."""
        try:
            yield
        except Exception as error:
            if self.board is None:
                raise
            peer_gone = isinstance(error, dist.DistError) or (isinstance(error, RuntimeError) and "gloo" in str(error))
            if not peer_gone:
                reason = str(error) if isinstance(error, OelmError) else repr(error)
                with suppress(RuntimeError):  # the store lives in another process, which may be gone
                    self.board.compare_set(_REASON, "", f"process {self.rank} failed: {reason}")  # the first one stays
                raise
            reason = _NO_REASON.format(first_line(error))
            with suppress(RuntimeError):
                if self.board.check([_REASON]):
                    reason = str(self.board.get(_REASON), "utf-8")
            raise TrainingError(reason) from None


@contextmanager
def joined(device: Literal["auto", "cpu", "cuda"]) -> Iterator[World]:
    """Join the group that a launcher started, if any, and leave it in order when the block ends."""
    rank, size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    local_device = device_for(device, int(os.environ.get("LOCAL_RANK", 0)))
    if size == 1:
        yield World(0, 1, local_device)
        return
    world = World(rank, size, local_device, _join(rank, size, local_device))
    try:
        yield world
    except BaseException as error:
        # The others may never reach a barrier now. Leaving at once closes the connections that they wait on.
        _release_frames(error)
        _leave(at_once=True)
        raise
    # Gloo aborts at exit when something still holds the group: collect garbage, wait for the others, then leave.
    gc.collect()
    with suppress(RuntimeError):  # all records are written, so it does no harm when another process has left already
        world.barrier()
    _leave()


def _join(rank: int, size: int, device: torch.device) -> Any:
    """Create the process group and return the store that its processes share."""
    # Functions of these modules have the current group as a default argument, so they are imported while there is none.
    # Imported later, by DDP or FSDP, they would keep the group's threads alive until the interpreter ends: it aborts.
    import torch.distributed.fsdp
    import torch.distributed.nn
    import torch.distributed.optim  # noqa: F401

    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    try:
        # A process may join several times, and torchrun may restart it. The store outlives all of them, so each attempt
        # uses keys of its own.
        attempt = f"oelm/{os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}/{next(_joins)}"
        store = dist.distributed_c10d.PrefixStore(attempt, _launcher_store())
        dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=_TIMEOUT)
    except RuntimeError as error:
        address = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
        raise TrainingError(
            f"process {rank} of {size} did not find the others at {address}: {first_line(error)}. Check MASTER_ADDR "
            "and MASTER_PORT, and that all processes were started"
        ) from None
    return store


def _leave(at_once: bool = False) -> None:
    """Destroy the group; with `at_once`, without waiting for exchanges on a GPU that the others will not join."""
    from torch.distributed.device_mesh import DeviceMesh

    for candidate in gc.get_objects():
        if type(candidate) is DeviceMesh:  # torch's caches of sharded operations hold meshes, which hold the group
            getattr(candidate, "_pg_registry", {}).clear()
    if at_once and "nccl" in str(dist.get_backend_config()):
        dist.distributed_c10d._abort_process_group()
    else:
        dist.destroy_process_group()


def _release_frames(error: BaseException | None) -> None:
    """Clear the finished frames of an error, which hold the model and so the group. Its traceback stays."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        if error.__suppress_context__:  # closures are not cleared, so a hidden cause is dropped altogether
            error.__context__ = None
        error = error.__cause__ or error.__context__
    gc.collect()


@cache
def _launcher_store() -> Any:
    """Return the store through which the launcher lets the processes find each other."""
    missing = [name for name in ("MASTER_ADDR", "MASTER_PORT", "RANK") if not os.environ.get(name)]
    if missing:
        raise ConfigError(
            f"WORLD_SIZE is {os.environ['WORLD_SIZE']}, but {', '.join(missing)} is not set: start with torchrun, or "
            "set MASTER_ADDR, MASTER_PORT, WORLD_SIZE, RANK and LOCAL_RANK for every process"
        )
    from torch.distributed.rendezvous import rendezvous

    store, _, _ = next(rendezvous("env://", timeout=_TIMEOUT))
    return store


def wrap(module: nn.Module, blocks: list[nn.Module], world: World, how: Literal["ddp", "fsdp"]) -> nn.Module:
    """Return the module as the group trains it: unchanged, in DistributedDataParallel, or sharded in place (FSDP2)."""
    if world.size == 1:
        return module
    if how == "ddp":
        from torch.nn.parallel import DistributedDataParallel

        ids = [world.device.index] if world.device.type == "cuda" else None
        # Buffers hold constants here. Exchanging them would make every forward pass wait for the other processes.
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


def is_sharded(model: nn.Module) -> bool:
    """Return whether the model's parameters are spread over the processes (FSDP)."""
    return any(hasattr(parameter, "full_tensor") for parameter in model.parameters())


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
    """Free the gathered weights of a sharded module after a forward pass without a backward pass."""
    from torch.distributed.fsdp import FSDPModule

    inner = getattr(module, "_orig_mod", module)
    if isinstance(inner, FSDPModule):
        inner.reshard()


def device_for(setting: Literal["auto", "cpu", "cuda"], local_rank: int = 0) -> torch.device:
    """Return the device that `train.device` means for a process."""
    available = torch.cuda.is_available()
    if setting == "cuda" and not available:
        raise ConfigError("train.device is 'cuda', but torch sees no CUDA device here; use 'auto' or 'cpu'")
    if setting == "cpu" or not available:
        return torch.device("cpu")
    if local_rank >= torch.cuda.device_count():
        raise ConfigError(
            f"local rank {local_rank} has no GPU of its own: this machine has {torch.cuda.device_count()}; start fewer "
            "processes on it"
        )
    torch.cuda.set_device(local_rank)
    return torch.device("cuda", local_rank)
