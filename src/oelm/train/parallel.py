"""One process or many: joining the group, wrapping the model, agreeing on numbers, leaving in order."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import nn

from ..errors import ConfigError


@dataclass(frozen=True)
class World:
    """This process's place among all: its rank, how many there are, its device."""

    rank: int
    size: int
    device: torch.device

    @property
    def main(self) -> bool:
        return self.rank == 0

    def total(self, *values: float) -> list[float]:
        """Each value summed over all processes, in float64."""
        tensor = torch.tensor(values, dtype=torch.float64, device=self._exchange)
        if self.size > 1:
            dist.all_reduce(tensor)
        return [float(value) for value in tensor.tolist()]

    def any(self, flag: bool) -> bool:
        """Whether the flag is set on any process."""
        return self.total(float(flag))[0] > 0

    def barrier(self) -> None:
        if self.size > 1:
            dist.barrier()

    @property
    def _exchange(self) -> torch.device:
        """Where tensors to exchange live: the GPU for NCCL, the CPU for gloo."""
        return self.device if self.size > 1 and dist.get_backend() == "nccl" else torch.device("cpu")


@contextmanager
def joined(device: Literal["auto", "cpu", "cuda"]) -> Iterator[World]:
    """Join the group that torchrun started, or be alone; leave it in order when the block ends."""
    rank, size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    where = _device(device, int(os.environ.get("LOCAL_RANK", 0)))
    if size == 1:
        yield World(0, 1, where)
        return
    backend = "nccl" if where.type == "cuda" else "gloo"
    dist.init_process_group(backend, timeout=timedelta(minutes=30))
    try:
        yield World(rank, size, where)
    except BaseException:
        # The others may never reach a barrier after a failure here: leave at once, and torchrun ends them.
        dist.destroy_process_group()
        raise
    # Gloo aborts at exit when something still holds the group: let go of everything, meet once more, then leave.
    gc.collect()
    dist.barrier()
    dist.destroy_process_group()


def wrap(module: nn.Module, blocks: list[nn.Module], world: World, how: Literal["ddp", "fsdp"]) -> nn.Module:
    """The module as the group trains it: as it is, DistributedDataParallel, or sharded in place (FSDP2)."""
    if world.size == 1:
        return module
    if how == "ddp":
        from torch.nn.parallel import DistributedDataParallel

        ids = [world.device.index] if world.device.type == "cuda" else None
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


def _device(wanted: Literal["auto", "cpu", "cuda"], local_rank: int) -> torch.device:
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
