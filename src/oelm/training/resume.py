"""Going on where a run was cut: from which checkpoint, what must be the same for that, and torch's settings."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from ..config import RunConfig
from ..errors import CheckpointError, ConfigError
from ..runs.folder import RunFolder
from .checkpoint import list_checkpoints, read_state, require_whole
from .parallel import World
from .tasks.base import Task


def about(config: RunConfig, world: World, task: Task) -> dict[str, Any]:
    """What must be the same for a run to go on exactly."""
    return {
        "id": config.id,
        "data": task.sha256,
        "deterministic": _deterministic(config, world),
        "threads": torch.get_num_threads(),
        "optimizer_kernel": "fused" if world.device.type == "cuda" else "loop",
        "gpu": torch.cuda.get_device_name(world.device) if world.device.type == "cuda" else None,
        "torch": torch.__version__,
        "world_size": world.size,
    }


def find_checkpoint(config: RunConfig, folder: RunFolder, now: dict[str, Any]) -> tuple[Path | None, str]:
    """The checkpoint to go on from, if any, and what keeps that from being exact, which must be allowed.

    Another config or other data make another run: that is never allowed.
    """
    require_whole(folder.checkpoints)
    there = list_checkpoints(folder.checkpoints)
    if not there:
        return None, ""
    if config.checkpoint.resume == "never":
        raise ConfigError(f"{folder.path}: holds a checkpoint, and checkpoint.resume is 'never'")
    _, was, _ = read_state(there[-1])
    if was["id"] != now["id"]:
        raise CheckpointError(f"{there[-1]}: is of another config ({was['id']}, this run's is {now['id']})")
    if was["data"] != now["data"]:
        changed = f"the content of data.path {config.data.path} has changed since; restore it"
        if config.task.kind != "language":
            changed = (
                f"the examples of {config.data.path or config.task.name} or the tokenizer that reads them have changed "
                "since, or an older oelm, which did not look at all of that, wrote it; restore what was"
            )
        raise CheckpointError(f"{there[-1]}: {changed}, or start again under another experiment's name")
    was = {"gpu": now["gpu"], **was}  # an older checkpoint does not say
    differs = "; ".join(f"{key} {was.get(key)} then, {now[key]} now" for key in now if was.get(key) != now[key])
    if differs and config.checkpoint.resume == "auto" and now["deterministic"]:
        raise ConfigError(
            f"{there[-1]}: this run cannot resume exactly: {differs}. Use the same, or set "
            "checkpoint.resume to 'inexact'"
        )
    return there[-1], differs


def require_the_same(world: World, **facts: object) -> None:
    """Raise on all processes unless these are the same on all of them, which other machines or disks may break."""
    for what, fact in facts.items():
        digest = int(hashlib.sha256(str(fact).encode()).hexdigest()[:12], 16)  # 48 bits: a float64 holds them all
        if len(set(world.gather(digest))) > 1:
            raise ConfigError(
                f"the processes do not have the same {what}; here it is {fact}. Do they share their file system?"
            )


@contextmanager
def torch_for(config: RunConfig, world: World) -> Iterator[None]:
    """Torch's settings for a run, and after it those of whoever called."""
    before = torch.are_deterministic_algorithms_enabled(), torch.get_float32_matmul_precision()
    if _deterministic(config, world):
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
    if world.device.type == "cuda":
        torch.set_float32_matmul_precision("high")
        torch.cuda.reset_peak_memory_stats()
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0])
        torch.set_float32_matmul_precision(before[1])


def _deterministic(config: RunConfig, world: World) -> bool:
    wanted = config.train.deterministic
    return world.device.type == "cpu" if wanted == "auto" else wanted
