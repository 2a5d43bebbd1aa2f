"""Checkpoints: everything a run needs to go on exactly, as named tensors in safetensors files, written atomically.

There is no random state to save: batches and dropout are functions of the seed, the step and the rank.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from ..base.files import put_in_place, read_json, require_space, write_json
from ..errors import CheckpointError, FileError, first_line
from ..method.seal import record_of, refreeze, verify
from .parallel import World
from .timing import Times

FORMAT = 2
_NAME = re.compile(r"step-(\d{8,})")
_BEST_STEP = "step.json"
_TENSORS = "tensors.safetensors"
_OPTIMIZER_STATE = ("step", "exp_avg", "exp_avg_sq")


@dataclass
class TrainState:
    """The counters of a run. `step` optimiser steps are done; `window_*` belong to the next line of metrics.

    `window_losses` has one for each process: adding them up here would cost the sum its last bits on resumption.
    `best` and `last` are the figures of validations, with their step and epoch.
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
    reached: dict[str, dict[str, float]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


def list_checkpoints(folder: Path) -> list[Path]:
    """The whole checkpoints in a folder, oldest first."""
    found = [path for path in folder.glob("step-*") if _NAME.fullmatch(path.name) and (path / "state.json").is_file()]
    return sorted(found, key=lambda path: int(path.name.removeprefix("step-")))


def require_whole(folder: Path) -> None:
    """Raise if a checkpoint has lost its state.json: they are put in place whole, so it was removed since."""
    for path in sorted(folder.glob("step-*")):
        if _NAME.fullmatch(path.name) and path.is_dir() and not (path / "state.json").is_file():
            before = [one for one in list_checkpoints(folder) if one.name < path.name]
            raise _damaged(path, f"{path / 'state.json'}: missing", before)


def mark_best(folder: Path, step: int) -> None:
    """Write into the folder of a best model of which step it is."""
    write_json(folder / _BEST_STEP, {"step": step})


def step_of(folder: Path) -> int | None:
    """The step that a checkpoint, or a best model, is of; an older best model does not say."""
    if _NAME.fullmatch(folder.name):
        return int(folder.name.removeprefix("step-"))
    place = folder / _BEST_STEP
    return int(read_json(place)["step"]) if place.is_file() else None


def stale_best(run: Path, best: dict[str, Any], done: int) -> str:
    """Why a run's best/ is not its best model after `done` steps, whose figures are `best`; nothing if it is.

    A model of a later step is newer than these figures: it is saved at once, and they with the next checkpoint. One
    that an older version saved does not say its step, and is taken as it is.
    """
    step = step_of(run / "best")
    if step is None or step > done or step == best.get("step"):
        return ""
    return f"best/ is of step {step}, and the best validation was at step {best.get('step')}"


def checkpoint_bytes(model: nn.Module) -> int:
    """How large a checkpoint will be: the weights, and two more numbers of the optimiser for each that trains."""
    return sum(p.numel() * p.element_size() * (3 if p.requires_grad else 1) for p in model.parameters())


def save_checkpoint(
    folder: Path,
    keep: int,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    state: TrainState,
    about: dict[str, Any],
    times: Times,
    world: World,
    sharded: bool,
) -> Path:
    """Verify the model and write a checkpoint; older ones go once it is whole. Every process calls this."""
    if record_of(model) is not None:
        verify(model)
    tensors = named_tensors(model, optimizer)
    path = folder / f"step-{state.step:08d}"
    temporary = folder / f".step-{state.step:08d}.tmp"
    if world.main:
        _sweep(folder)
        require_space(folder, sum(tensor.numel() * tensor.element_size() for tensor in tensors.values()))
        _guard(lambda: temporary.mkdir(parents=True), path)
    world.barrier()
    if sharded:
        _write_shards(tensors, temporary)
    elif world.main:
        data = {name: tensor.detach().to("cpu").contiguous() for name, tensor in tensors.items()}
        _guard(lambda: save_file(data, temporary / _TENSORS), path)
    world.barrier()
    if world.main:
        content = {
            "format": FORMAT,
            "shards": _sizes(temporary / "shards") if sharded else None,
            "sha256": None if sharded else _sha256(temporary / _TENSORS),
            "about": about,
            "state": asdict(state),
            "oelm": record_of(model),
            "without_state": _without_state(model, optimizer),
            "step_seconds": [round(value, 7) for value in times.steps],
            "warmup_seconds": [round(value, 7) for value in times.warmup],
            "seconds_apart": times.apart,
        }
        _guard(lambda: write_json(temporary / "state.json", content), path)
        _guard(lambda: put_in_place(temporary, path), path)
        tidy(folder, keep)
    world.barrier()
    return path


def tidy(folder: Path, keep: int) -> None:
    """Remove all but the last `keep` checkpoints, and what a process that was killed left half written or removed."""
    for old in list_checkpoints(folder)[:-keep]:
        _remove(old)
    _sweep(folder)


def read_state(path: Path) -> tuple[TrainState, dict[str, Any], Times]:
    """(counters, what the run was, its times) of a checkpoint. Older ones have no times but those of steps."""
    content = _content(path)
    if content.get("format") != FORMAT:
        raise CheckpointError(f"{path}: its format is {content.get('format')!r}; this oelm reads {FORMAT}")
    times = Times(content["step_seconds"], content.get("warmup_seconds", []), content.get("seconds_apart", {}))
    return TrainState(**content["state"]), content["about"], times


def restore_record(path: Path, model: nn.Module) -> None:
    """Bring back what was frozen when the checkpoint was written: a schedule may have changed it since step 0."""
    record = _content(path)["oelm"]
    config: Any = model.config
    if record is None:
        return
    config.oelm = record
    for parameter in model.parameters():
        parameter.requires_grad_(True)
    refreeze(model)


def load_checkpoint(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Read weights and optimiser state back and verify the model. Every process calls this."""
    stateless = _content(path).get("without_state", [])
    _start_optimizer(optimizer, {id(p) for name, p in model.named_parameters() if name in stateless})
    _read(path, named_tensors(model, optimizer), whole=True)
    if record_of(model) is not None:
        verify(model)


def load_model(path: Path, model: nn.Module) -> None:
    """Read the weights alone back, and verify the model."""
    _read(path, named_tensors(model, None), whole=False)
    if record_of(model) is not None:
        verify(model)


def _content(path: Path) -> dict[str, Any]:
    """A checkpoint's state.json."""
    try:
        return dict(read_json(path / "state.json"))
    except FileError as error:
        raise _damaged(path, str(error)) from None


def _damaged(path: Path, why: str, before: Sequence[Path] | None = None) -> CheckpointError:
    """The error for a checkpoint with a file that cannot be used, with the way on from there."""
    if before is None:
        there = list_checkpoints(path.parent)
        before = there[: there.index(path)] if path in there else []
    then = f"resumes from {before[-1].name}" if before else "starts from the beginning"
    return CheckpointError(f"{why}. Delete the folder {path}, and the run {then}")


def _read(path: Path, tensors: dict[str, Tensor], whole: bool) -> None:
    """Fill tensors from a checkpoint. With `whole`, it must hold just these; without, it may hold more."""
    content = _content(path)
    if content["shards"] is not None:
        _read_shards(path, content["shards"], tensors, whole)
        return
    try:
        stored = load_file(path / _TENSORS)
        found = _sha256(path / _TENSORS)
    except (OSError, SafetensorError) as error:
        raise _damaged(path, f"{path / _TENSORS}: cannot be read ({error})") from None
    if found != content.get("sha256", found):  # an older checkpoint does not say
        raise _damaged(path, f"{path / _TENSORS}: has changed since it was written")
    _require_names(path, set(stored), set(tensors), whole)
    with torch.no_grad():
        for name, tensor in tensors.items():
            _assign(tensor, stored[name], f"{path}: {name}")


def _sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _require_names(path: Path, stored: set[str], wanted: set[str], whole: bool) -> None:
    odd = sorted(wanted - stored) + (sorted(stored - wanted) if whole else [])
    if odd:
        raise CheckpointError(f"{path}: does not fit this run: {len(odd)} tensors differ, such as {odd[0]}")


def named_tensors(model: nn.Module, optimizer: torch.optim.Optimizer | None) -> dict[str, Tensor]:
    """Every tensor of the model and of its optimiser by a name that depends on no group, order or rank."""
    tensors: dict[str, Tensor] = {}
    kept = set(model.state_dict())
    for name, parameter in model.named_parameters():
        tensors[f"model/{name}"] = parameter
        kept_state = {} if optimizer is None else optimizer.state.get(parameter, {})
        for key in _OPTIMIZER_STATE if kept_state else ():
            value = cast(Tensor, kept_state[key])
            tensors[f"{key}/{name}"] = value.view(1) if value.ndim == 0 else value
    for name, buffer in model.named_buffers():
        if name in kept:
            tensors[f"model/{name}"] = buffer
    return tensors


def _without_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[str]:
    """The parameters that train and never had a gradient so far: nothing that was learnt depends on them."""
    return [name for name, p in model.named_parameters() if p.requires_grad and not optimizer.state.get(p)]


def _start_optimizer(optimizer: torch.optim.Optimizer, stateless: set[int]) -> None:
    """Give every parameter the optimiser state that its first step would have made, for values to be read into.

    Those in `stateless`, by their ids, had none when the checkpoint was written.
    """
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter in optimizer.state or id(parameter) in stateless:
                continue
            place = parameter.device if group.get("fused") else torch.device("cpu")
            optimizer.state[parameter] = {
                "step": torch.zeros((), dtype=torch.float32, device=place),
                "exp_avg": torch.zeros_like(parameter, memory_format=torch.preserve_format),
                "exp_avg_sq": torch.zeros_like(parameter, memory_format=torch.preserve_format),
            }


def _assign(tensor: Tensor, value: Tensor, what: str) -> None:
    if tensor.shape != value.shape:
        raise CheckpointError(f"{what} has shape {tuple(value.shape)}, this run's has {tuple(tensor.shape)}")
    mesh = getattr(tensor, "device_mesh", None)
    if mesh is not None:
        from torch.distributed.tensor import distribute_tensor

        value = distribute_tensor(value.to(tensor.device), mesh, tensor.placements)  # type: ignore[attr-defined]
    tensor.copy_(value)


def _write_shards(tensors: dict[str, Tensor], path: Path) -> None:
    """Every process writes what it holds into files of its own."""
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
    from torch.distributed.checkpoint.state_dict_saver import save

    writer = HuggingFaceStorageWriter(str(path / "shards"), save_distributed=True)
    try:
        save({name: tensor.detach() for name, tensor in tensors.items()}, storage_writer=writer)
    except CheckpointException as error:
        raise _unwritten(path, _reasons(error)) from None


def _read_shards(path: Path, shards: dict[str, int], tensors: dict[str, Tensor], whole: bool) -> None:
    """Every process reads what it needs, from the files of however many wrote them, into the tensors themselves."""
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
    from torch.distributed.checkpoint.state_dict_loader import load

    there = _sizes(path / "shards")
    odd = sorted(name for name in shards | there if shards.get(name) != there.get(name))
    if odd:  # a missing file would not be noticed below: its part of each tensor would stay as it is
        raise _damaged(path, f"{path / 'shards' / odd[0]}: missing, cut or not of this checkpoint")
    reader = HuggingFaceStorageReader(str(path / "shards"))
    try:
        _require_names(path, set(reader.read_metadata().state_dict_metadata), set(tensors), whole)
        wanted = {name: tensor.detach() for name, tensor in tensors.items()}
        with warnings.catch_warnings():  # that one process alone reads them is meant so
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            load(wanted, storage_reader=reader, no_dist=not torch.distributed.is_initialized())
    except CheckpointException as error:
        raise _damaged(path, f"{path}: cannot be read ({_reasons(error)})") from None
    except (OSError, SafetensorError) as error:
        raise _damaged(path, f"{path}: cannot be read ({error})") from None


def _sizes(folder: Path) -> dict[str, int]:
    """The files of a folder and how long they are."""
    return {file.name: file.stat().st_size for file in sorted(folder.glob("*.safetensors"))}


def _reasons(error: Any) -> str:
    """What torch's checkpointing says went wrong, by process."""
    return "; ".join(f"process {rank}: {first_line(reason)}" for rank, (reason, _) in sorted(error.failures.items()))


def _guard(action: Callable[[], object], path: Path) -> None:
    """Do something to the disk; a failure names the checkpoint and leaves the earlier ones alone."""
    try:
        action()
    except (OSError, SafetensorError, FileError) as error:
        shutil.rmtree(path.with_name(f".{path.name}.tmp"), ignore_errors=True)  # a full disk needs the room
        raise _unwritten(path, str(error)) from None


def _unwritten(path: Path, why: str) -> CheckpointError:
    """The error for a checkpoint that could not be written, with what there is to go on from."""
    there = list_checkpoints(path.parent)
    kept = f"{there[-1].name} is intact" if there else "there is none before it"
    return CheckpointError(f"{path}: cannot be written ({why}); {kept}")


def _sweep(folder: Path) -> None:
    for stale in folder.glob(".step-*.tmp"):
        shutil.rmtree(stale, ignore_errors=True)


def _remove(path: Path) -> None:
    """Remove a checkpoint: renamed first, so that a cut removal leaves nothing that looks whole."""
    aside = path.with_name(f".{path.name}.tmp")
    os.replace(path, aside)
    shutil.rmtree(aside, ignore_errors=True)
