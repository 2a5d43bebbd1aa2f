"""Resume an interrupted run: find its checkpoint, check what must be the same, and set torch up in the same way."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch

from ..base.plugin import loaded_plugin
from ..config import RunConfig
from ..errors import CheckpointError, ConfigError
from ..runs.folder import RunFolder
from .checkpoint import Checkpoint, list_checkpoints, read_checkpoint, require_complete
from .parallel import World
from .tasks.base import Task

# Far more than a run's widths, in training and validation, and after micro-batches were halved.
_COMPILED_SHAPES = 64


def run_identity(config: RunConfig, world: World, task: Task) -> dict[str, Any]:
    """Return the settings, data, hardware and own code that must be the same for a run to resume exactly."""
    plugin = loaded_plugin()
    return {
        "id": config.id,
        "data": task.sha256,
        "deterministic": _deterministic(config, world),
        "threads": torch.get_num_threads(),
        "optimizer_kernel": "fused" if world.device.type == "cuda" else "loop",
        "gpu": torch.cuda.get_device_name(world.device) if world.device.type == "cuda" else None,
        "torch": torch.__version__,
        "world_size": world.size,
        "plugin": None if plugin is None else str(plugin),
    }


def find_checkpoint(config: RunConfig, folder: RunFolder, identity: dict[str, Any]) -> tuple[Checkpoint | None, str]:
    """Return the checkpoint to resume from, or None, and what keeps the resume from being exact, or an empty string.

    `identity` is this run's `run_identity`. Raise when the checkpoint belongs to another config or to other data, and
    when an inexact resume is not allowed.
    """
    require_complete(folder.checkpoints)
    paths = list_checkpoints(folder.checkpoints)
    if not paths:
        return None, ""
    path = paths[-1]
    if config.checkpoint.resume == "never":
        raise ConfigError(
            f"{folder.path}: has a checkpoint ({path.name}), and checkpoint.resume is 'never'; set it to 'auto', or "
            "give the run another experiment name"
        )
    checkpoint = read_checkpoint(path)
    saved = checkpoint.identity
    if saved["id"] != identity["id"]:
        raise CheckpointError(
            f"{path}: belongs to another config (id {saved['id']}, this run has {identity['id']}); delete it, or "
            "give the run another experiment name"
        )
    if saved["data"] != identity["data"]:
        what = f"the content of data.path {config.data.path} has"
        if config.task.kind not in ("language", "masked-language"):
            what = f"the examples of {config.data.path or config.task.name} or the model's tokenizer have"
        raise CheckpointError(
            f"{path}: {what} changed since it was written; restore them, or start again under another experiment name"
        )
    differences = "; ".join(
        f"{key} {saved.get(key)} then, {identity[key]} now" for key in identity if saved.get(key) != identity[key]
    )
    if differences and config.checkpoint.resume == "auto" and identity["deterministic"]:
        raise ConfigError(
            f"{path}: this run cannot resume exactly: {differences}. Restore these, or set checkpoint.resume to "
            "'inexact'"
        )
    return checkpoint, differences


def require_agreement(world: World, **facts: object) -> None:
    """Raise in all processes unless these facts are the same in all; on separate machines or disks they may differ."""
    for name, fact in facts.items():
        digest = int(hashlib.sha256(str(fact).encode()).hexdigest()[:12], 16)  # 48 bits, which a float64 holds exactly
        if len(set(world.gather(digest))) > 1:
            raise ConfigError(
                f"the processes do not have the same {name}; process {world.rank} has {fact}. Do they share their file "
                "system?"
            )


@contextmanager
def torch_settings(config: RunConfig, world: World) -> Iterator[None]:
    """Set torch's determinism, precision and limit of compiled shapes for a run; restore the caller's afterwards."""
    previous = torch.are_deterministic_algorithms_enabled(), torch.get_float32_matmul_precision()
    if _deterministic(config, world):
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
    if world.device.type == "cuda":
        torch.set_float32_matmul_precision("high")
        torch.cuda.reset_peak_memory_stats()
    try:
        with _compiled_shapes(config):
            yield
    finally:
        torch.use_deterministic_algorithms(previous[0])
        torch.set_float32_matmul_precision(previous[1])


def _compiled_shapes(config: RunConfig) -> AbstractContextManager[Any]:
    """Return a context in which code is compiled for each width of labelled batches, in training and in validation.

    After torch's 8 shapes the others would run eagerly. It is not loaded for runs that compile one shape or nothing.
    """
    if config.train.compile is not True:
        return nullcontext()
    limit: AbstractContextManager[Any] = torch._dynamo.config.patch(recompile_limit=_COMPILED_SHAPES)
    return limit


def _deterministic(config: RunConfig, world: World) -> bool:
    """Return whether the run must give the same bits every time: as configured, by default on a CPU."""
    setting = config.train.deterministic
    return world.device.type == "cpu" if setting == "auto" else setting
