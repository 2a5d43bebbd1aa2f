"""Checkpoints: everything a run needs to resume exactly, as named tensors in safetensors files, written atomically.

A checkpoint's manifest is written last and has a hash of every file, which is checked before the file is used.

No random state is saved: batches and dropout are functions of the seed, the step and the rank.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from ..base.files import put_in_place, read_record, require_space, write_json
from ..base.manifest import FileMark, check_files, files_in, read_manifest, write_manifest
from ..base.strict import explain
from ..errors import CheckpointError, ConfigError, FileError, first_line
from ..method.seal import adopt, record_of, verify
from ..method.spec import FRESH
from ..runs.schema import RecordPart
from .optim import new_state
from .parallel import World, is_sharded
from .timing import Times

FORMAT = 4
_NAME = re.compile(r"step-(\d{8,})")
_STATE = "state.json"
_TENSORS = "tensors.safetensors"
_SHARDS = "shards"


@dataclass
class TrainState:
    """The counters of a run after `step` optimiser steps.

    `window_losses` and `window_targets` belong to the next line of metrics. There is one loss per process, because
    adding them up here would change the sum's last bits after a resume. `best` and `last` are the metrics of the best
    and the last validation, with their step and epoch.
    """

    step: int = 0
    tokens: int = 0
    seconds: float = 0.0
    window_losses: list[float] = field(default_factory=list)
    window_targets: int = 0
    best: dict[str, Any] = field(default_factory=dict)
    last: dict[str, Any] = field(default_factory=dict)
    skipped: int = 0
    micro_batch_size: int = 0
    reached: dict[str, dict[str, int | float]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


class _StateFile(RecordPart):
    """The content of state.json."""

    state: TrainState
    identity: dict[str, Any]
    oelm: dict[str, Any] | None
    without_gradient: list[str]
    left_out: list[str]
    metrics: FileMark
    step_seconds: list[float]
    warmup_seconds: list[float]
    seconds_apart: dict[str, float]


@dataclass(frozen=True)
class Snapshot:
    """What a checkpoint saves of a run in progress. `identity` is what must be the same for an exact resume.

    `metrics` is the run's metrics.jsonl, and `left_out` names tensors that are not saved, because building the run
    makes them again.
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer
    state: TrainState
    times: Times
    identity: dict[str, Any]
    metrics: FileMark
    left_out: frozenset[str] = frozenset()


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """A checkpoint on disk, with its state.json read and its tensors still to be loaded.

    `freeze_record` is the record that `oelm.apply` sealed into the model's config. `without_gradient` names trainable
    parameters that never had a gradient, and so have no optimiser state. `metrics` is what the run's metrics.jsonl was
    when the checkpoint was written. `left_out` names frozen matrices that are not
    in it: whoever loads it has applied the method with the run's seed, which makes them, and `load` verifies them.
    """

    path: Path
    state: TrainState
    times: Times
    identity: dict[str, Any]
    freeze_record: dict[str, Any] | None
    without_gradient: list[str]
    left_out: frozenset[str]
    metrics: FileMark

    def restore_frozen(self, model: nn.Module) -> None:
        """Freeze what was frozen when the checkpoint was written: a schedule may have changed it since step 0."""
        if self.freeze_record is None:
            return
        adopt(model, self.freeze_record)

    def load(self, model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> None:
        """Load the weights and, with an optimiser, its state, and verify the model. Every process calls this."""
        if optimizer is not None:
            skipped = {id(p) for name, p in model.named_parameters() if name in self.without_gradient}
            _create_optimizer_state(optimizer, skipped)
        tensors = named_tensors(model, optimizer)
        saved = {name: tensor for name, tensor in tensors.items() if name not in self.left_out}
        _load_tensors(self, saved, exactly=optimizer is not None)
        _verify_frozen(model)


def list_checkpoints(folder: Path) -> list[Path]:
    """Return the complete checkpoints in a folder, oldest first."""
    complete = [path for path in folder.glob("step-*") if _NAME.fullmatch(path.name) and (path / _STATE).is_file()]
    return sorted(complete, key=_step)


def _step(path: Path) -> int:
    return int(path.name.removeprefix("step-"))


def require_complete(folder: Path) -> None:
    """Raise when a checkpoint has no state.json: checkpoints get their name when complete, so someone removed it."""
    for path in sorted(folder.glob("step-*")):
        if _NAME.fullmatch(path.name) and path.is_dir() and not (path / _STATE).is_file():
            raise _damaged(path, f"{path / _STATE}: missing")


def checkpoint_bytes(model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Return the size of a checkpoint: all weights, and one (Muon) or two (AdamW) numbers for each that is trained."""
    weights = sum(p.numel() * p.element_size() for p in model.parameters())
    state = 0
    for group in optimizer.param_groups:
        state += (1 if group["muon"] else 2) * sum(p.numel() * p.element_size() for p in group["params"])
    return weights + state


def read_checkpoint(path: Path) -> Checkpoint:
    """Read a checkpoint's state.json. Raise when it is damaged, has another format or belongs to another step."""
    try:
        content = read_record(path / _STATE)
    except FileError as error:
        raise _damaged(path, str(error)) from None
    if content.get("format") != FORMAT:
        raise CheckpointError(
            f"{path}: its checkpoint format is {content.get('format')!r}, this oelm reads {FORMAT}. Resume with the "
            f"version of oelm that wrote it, or delete {path.parent} to train the run again from step 0"
        )
    try:
        check_files(path, [_STATE])
        saved = _StateFile.model_validate_json(json.dumps(content))
    except FileError as error:
        raise _damaged(path, str(error)) from None
    except ValidationError as error:
        raise _damaged(path, f"{path / _STATE}: {explain(error, _StateFile)}") from None
    if saved.state.step != _step(path):
        raise _damaged(path, f"{path / _STATE}: is of step {saved.state.step}")
    return Checkpoint(
        path=path,
        state=saved.state,
        times=Times(saved.step_seconds, saved.warmup_seconds, saved.seconds_apart),
        identity=saved.identity,
        freeze_record=saved.oelm,
        without_gradient=saved.without_gradient,
        left_out=frozenset(saved.left_out),
        metrics=saved.metrics,
    )


def save_checkpoint(folder: Path, keep: int, snapshot: Snapshot, world: World) -> None:
    """Verify the model and write a checkpoint, then remove all but the last `keep`. Every process calls this."""
    model, optimizer, state = snapshot.model, snapshot.optimizer, snapshot.state
    _verify_frozen(model)
    named, sharded = named_tensors(model, optimizer), is_sharded(model)
    tensors = {name: tensor for name, tensor in named.items() if name not in snapshot.left_out}
    path = folder / f"step-{state.step:08d}"
    temporary = folder / f".step-{state.step:08d}.tmp"
    if world.main:
        _remove_temporary(folder)
        require_space(folder, sum(tensor.numel() * tensor.element_size() for tensor in tensors.values()))
        with _writing(path):
            temporary.mkdir(parents=True)
    world.barrier()  # the folder is there before anyone writes into it
    if sharded:
        _write_shards(tensors, temporary)
    elif world.main:
        with _writing(path):
            data = {name: tensor.detach().to("cpu").contiguous() for name, tensor in tensors.items()}
            save_file(data, temporary / _TENSORS)
    world.barrier()  # every shard is there before it is hashed
    marks = _marks(temporary, world) if sharded else {}
    if world.main:
        times = snapshot.times
        content = {
            "format": FORMAT,
            "metrics": asdict(snapshot.metrics),
            "identity": snapshot.identity,
            "state": asdict(state),
            "oelm": record_of(model),
            # GPT-2's unused cross-attention, for example, never has a gradient.
            "without_gradient": [
                name for name, p in model.named_parameters() if p.requires_grad and not optimizer.state.get(p)
            ],
            "left_out": sorted(snapshot.left_out),
            "step_seconds": [round(value, 7) for value in times.steps],
            "warmup_seconds": [round(value, 7) for value in times.warmup],
            "seconds_apart": times.apart,
        }
        with _writing(path):
            write_json(temporary / _STATE, content)
            own = [_STATE] if sharded else [_STATE, _TENSORS]
            write_manifest(temporary, {**marks, **{name: FileMark.of(temporary / name) for name in own}})
            put_in_place(temporary, path)
        remove_old_checkpoints(folder, keep)
    world.barrier()


def remove_old_checkpoints(folder: Path, keep: int) -> None:
    """Remove all but the last `keep` checkpoints, and those that a killed process left half written or half removed."""
    for path in list_checkpoints(folder)[:-keep]:
        # Rename first, so that an interrupted removal leaves nothing that looks like a complete checkpoint.
        temporary = path.with_name(f".{path.name}.tmp")
        os.replace(path, temporary)
        shutil.rmtree(temporary, ignore_errors=True)
    _remove_temporary(folder)


def named_tensors(model: nn.Module, optimizer: torch.optim.Optimizer | None) -> dict[str, Tensor]:
    """Return every tensor of the model and its optimiser, under names that depend on no group, order or rank."""
    tensors: dict[str, Tensor] = {}
    for name, parameter in model.named_parameters():
        tensors[f"model/{name}"] = parameter
        state = {} if optimizer is None else optimizer.state.get(parameter, {})
        for key, value in state.items():
            tensors[f"{key}/{name}"] = value.view(1) if value.ndim == 0 else value
    persistent = set(model.state_dict())
    for name, buffer in model.named_buffers():
        if name in persistent:
            tensors[f"model/{name}"] = buffer
    return tensors


def seeded_tensors(model: nn.Module) -> frozenset[str]:
    """Return the names of the frozen matrices that follow from the seed alone: random, and never trained.

    Raise for a frozen matrix that depends on the weights that the model had before the method was applied.
    """
    record = record_of(model)
    if record is None:
        return frozenset()
    if record["method"]["schedule"]["kind"] == "freeze":
        raise ConfigError("checkpoint.frozen 'seeded': the method's schedule freezes matrices that have trained")
    names: list[str] = []
    for path, matrix in record["matrices"].items():
        if matrix["frozen"] and matrix["init"] not in FRESH | {"identity"}:
            raise ConfigError(
                f"checkpoint.frozen 'seeded': {path} has init {matrix['init']!r}, so it does not follow from the seed"
            )
        names += (f"model/{name}" for name in matrix["tensors"] if matrix["frozen"] and name.endswith("weight"))
    return frozenset(names)


def _verify_frozen(model: nn.Module) -> None:
    if record_of(model) is not None:
        verify(model)


def _create_optimizer_state(optimizer: torch.optim.Optimizer, skipped: set[int]) -> None:
    """Give every parameter an empty state to load values into, except those whose ids are in `skipped`."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter not in optimizer.state and id(parameter) not in skipped:
                optimizer.state[parameter] = new_state(parameter, group)


def _load_tensors(checkpoint: Checkpoint, tensors: dict[str, Tensor], exactly: bool) -> None:
    """Fill tensors from a checkpoint. With `exactly` it must hold these and no others; else it may hold more."""
    path = checkpoint.path
    if (path / _SHARDS).is_dir():
        _load_shards(path, tensors, exactly)
        return
    try:
        check_files(path, [_TENSORS])
        stored = load_file(path / _TENSORS)
    except (OSError, SafetensorError) as error:
        raise _damaged(path, f"{path / _TENSORS}: cannot be read ({error})") from None
    except FileError as error:
        raise _damaged(path, str(error)) from None
    _require_names(path, set(stored), set(tensors), exactly)
    with torch.no_grad():
        for name, tensor in tensors.items():
            value = stored[name]
            if tensor.shape != value.shape:
                shapes = f"{tuple(value.shape)}, but this run's has {tuple(tensor.shape)}"
                raise CheckpointError(f"{path}: {name} has shape {shapes}")
            if hasattr(tensor, "device_mesh"):
                from torch.distributed.tensor import distribute_tensor

                sharding = tensor.device_mesh, tensor.placements  # type: ignore[attr-defined]
                value = distribute_tensor(value.to(tensor.device), *sharding)
            tensor.copy_(value)


def _require_names(path: Path, stored: set[str], expected: set[str], exactly: bool) -> None:
    different = sorted(expected - stored) + (sorted(stored - expected) if exactly else [])
    if different:
        raise CheckpointError(f"{path}: does not fit this run: {len(different)} tensors differ, such as {different[0]}")


def _write_shards(tensors: dict[str, Tensor], path: Path) -> None:
    """Write, in every process, the shards that it holds into files of its own."""
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
    from torch.distributed.checkpoint.state_dict_saver import save

    writer = HuggingFaceStorageWriter(str(path / _SHARDS), save_distributed=True)
    try:
        save({name: tensor.detach() for name, tensor in tensors.items()}, storage_writer=writer)
    except CheckpointException as error:
        raise _not_written(path, _reasons(error)) from None


def _load_shards(path: Path, tensors: dict[str, Tensor], exactly: bool) -> None:
    """Load, in every process, what it needs into the tensors, from the files of however many processes wrote them."""
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
    from torch.distributed.checkpoint.state_dict_loader import load

    _check_shards(path)
    reader = HuggingFaceStorageReader(str(path / _SHARDS))
    try:
        _require_names(path, set(reader.read_metadata().state_dict_metadata), set(tensors), exactly)
        targets = {name: tensor.detach() for name, tensor in tensors.items()}
        with warnings.catch_warnings():  # a single process may read shards, and torch would warn about that
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            load(targets, storage_reader=reader, no_dist=not torch.distributed.is_initialized())
    except CheckpointException as error:
        raise _damaged(path, f"{path}: cannot be read ({_reasons(error)})") from None
    except (OSError, SafetensorError) as error:
        raise _damaged(path, f"{path}: cannot be read ({error})") from None


def _marks(folder: Path, world: World) -> dict[str, FileMark]:
    """Return the marks of all shards in a folder, of which every process hashes its share."""
    own = {name: asdict(FileMark.of(folder / name)) for name in files_in(folder)[world.rank :: world.size]}
    marks: dict[str, FileMark] = {}
    for part in world.collect([json.dumps(own)]):
        marks |= {name: FileMark(**mark) for name, mark in json.loads(part).items()}
    return marks


def _check_shards(path: Path) -> None:
    """Raise in every process unless all shards, and no others, are as they were written; each checks its share.

    torch would not notice a missing file, whose part of each tensor would stay as it is, or one of another step.
    """
    import torch.distributed as dist

    rank, size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    problem = ""
    try:
        names = sorted({*read_manifest(path), *files_in(path)})
        check_files(path, names[rank::size])
    except FileError as error:
        problem = str(error)
    problems = [problem]
    if size > 1:
        problems = [""] * size
        dist.all_gather_object(problems, problem)
    for found in filter(None, problems):
        raise _damaged(path, found)


def _reasons(error: Any) -> str:
    """Return the failures in an error of torch's distributed checkpointing, by process."""
    return "; ".join(f"process {rank}: {first_line(reason)}" for rank, (reason, _) in sorted(error.failures.items()))


@contextmanager
def _writing(path: Path) -> Iterator[None]:
    """Turn a failure to write into an error that names the checkpoint, and leave earlier ones alone."""
    try:
        yield
    except (OSError, SafetensorError, FileError) as error:
        shutil.rmtree(path.with_name(f".{path.name}.tmp"), ignore_errors=True)  # a full disk needs the room
        raise _not_written(path, str(error)) from None


def _not_written(path: Path, reason: str) -> CheckpointError:
    """Return the error for a checkpoint that could not be written; it names the one to resume from."""
    checkpoints = list_checkpoints(path.parent)
    earlier = f"{checkpoints[-1].name} is intact" if checkpoints else "there is no earlier checkpoint"
    return CheckpointError(f"{path}: cannot be written ({reason}); {earlier}")


def _damaged(path: Path, reason: str) -> CheckpointError:
    """Return the error for a checkpoint with an unusable file; it says how to continue without that checkpoint."""
    earlier = [checkpoint for checkpoint in list_checkpoints(path.parent) if _step(checkpoint) < _step(path)]
    effect = f"resumes from {earlier[-1].name}" if earlier else "starts from the beginning"
    return CheckpointError(f"{reason}. Delete the folder {path}, and the run {effect}")


def _remove_temporary(folder: Path) -> None:
    """Remove the checkpoints that a killed process left half written."""
    for path in folder.glob(".step-*.tmp"):
        shutil.rmtree(path, ignore_errors=True)
