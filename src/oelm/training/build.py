"""Build a run: data, model, method, optimiser and the last checkpoint, all checked before the first step."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from ..base.files import require_space
from ..base.manifest import FileMark
from ..base.text import short_count
from ..config import RunConfig
from ..errors import ConfigError
from ..method.apply import apply
from ..method.audit import audit
from ..method.events import Event, events
from ..method.freeze_report import FreezeReport
from ..method.sites import find_sites
from ..models.flops import find_reach, train_flops_per_token
from ..models.hf_config import is_fresh
from ..runs.environment import environment, plan_of, require_plugin
from ..runs.folder import UNCOMPARABLE_TIMES, RunFolder
from ..runs.schema import Audit, DataRecord
from .checkpoint import TrainState, checkpoint_bytes, remove_old_checkpoints, seeded_tensors
from .length import RunLength
from .optim import build_optimizer, muon_notes, parameter_groups, unused_multipliers
from .parallel import World, is_sharded, wrap
from .progress import Display
from .resume import find_checkpoint, require_agreement, run_identity
from .signals import StopRequest
from .step import Stepper, batch_share, uses_compile
from .tasks.base import Task
from .tasks.open import open_task
from .timing import StepTimer
from .trackers import Trackers


@dataclass(kw_only=True)
class ActiveRun:
    """Everything that belongs to a run while it trains."""

    config: RunConfig
    world: World
    folder: RunFolder
    task: Task
    length: RunLength
    model: nn.Module
    stepper: Stepper
    state: TrainState
    identity: dict[str, Any]
    timer: StepTimer
    display: Display
    stop: StopRequest
    flops_per_token: float
    trackers: Trackers = field(init=False)  # started last, when nothing can be refused any more


def build_run(folder: RunFolder, world: World, stop: StopRequest, quiet: bool) -> ActiveRun:
    """Build what the loop needs. Raise here, before the first step, for everything that cannot work."""
    config = folder.config
    require_plugin(folder.path)
    batch_share(config, world)
    display = Display(folder if world.main else None, quiet)

    # The data comes first: it decides how long an epoch is, and how many tokens or classes the model needs.
    task = open_task(config)
    length = RunLength.of(config, task.samples_per_epoch)

    # The method sets and freezes matrices of the bare model, before the model is moved, wrapped or compiled.
    model: Any = task.build_model(config)
    method = config.method.resolve(length.steps)
    report = apply(model, method, config.seed)
    _check_schedule(config, events(model, method), length)
    if config.checkpoint.frozen == "seeded":
        seeded_tensors(model)  # raises where the seed alone does not give a frozen matrix back
    parameter_groups(model, config.optimizer)  # raises where the optimiser has nothing to train
    display.say(_opening_line(report, world, task, length))
    if config.train.gradient_checkpointing:
        model.gradient_checkpointing_enable()

    # A checkpoint brings back the counters, and what a schedule had frozen or unfrozen by then.
    identity = run_identity(config, world, task)
    checkpoint, differences = find_checkpoint(config, folder, identity)
    state = TrainState() if checkpoint is None else checkpoint.state
    if checkpoint is not None:
        checkpoint.restore_frozen(model)
    if differences:
        state.notes.append(f"step {state.step}: resumed inexactly: {differences}; {UNCOMPARABLE_TIMES}")
    name = checkpoint.path.name if checkpoint else "none"
    require_agreement(world, config=config.id, torch=torch.__version__, data=task.sha256, checkpoint=name)

    # Now the model goes to its device and gets its wrapper and its optimiser, and then the checkpoint's tensors.
    model.to(world.device).train()  # a pretrained model comes in evaluation mode, without dropout
    flops_per_token = count_flops(config, world, task, model)
    stepper = build_stepper(config, world, task, model, state)
    if checkpoint is not None:
        checkpoint.load(model, stepper.optimizer)
        display.say(f"resumed from step {state.step}")
        if world.main or is_sharded(model):  # the tensors of a sharded model are gathered from all processes
            report = audit(model)
    _add_notes(config, task, model, state, world.device)

    run = ActiveRun(
        config=config,
        world=world,
        folder=folder,
        task=task,
        length=length,
        model=model,
        stepper=stepper,
        state=state,
        identity=identity,
        timer=StepTimer(world.device, checkpoint.times if checkpoint else None),
        display=display,
        stop=stop,
        flops_per_token=flops_per_token,
    )
    if world.main:
        saved = None if checkpoint is None else checkpoint.metrics
        _write_first_records(run, Audit.model_validate(report.to_dict()), saved)
    display.start(length.steps)
    run.trackers = Trackers(config.log.trackers if world.main else (), config, folder.path, display.say, state.step)
    return run


def _opening_line(report: FreezeReport, world: World, task: Task, length: RunLength) -> str:
    """Return in one line what the run is: its parameters, where it runs, and how long it is."""
    # Not rounded: a few steps are a small share of an epoch.
    epochs = length.steps / length.steps_per_epoch
    tokens = task.token_count(0, task.samples_per_epoch) * epochs
    in_words = f"{epochs:.3g}"
    device = world.device.type + (f" x {world.size}" if world.size > 1 else "")
    return (
        f"{short_count(report.total)} parameters, {short_count(report.trainable)} trainable; {device}; "
        f"{length.steps:,} steps, {short_count(tokens)} tokens, {in_words} {'epoch' if in_words == '1' else 'epochs'}"
    )


def _check_schedule(config: RunConfig, planned: list[Event], length: RunLength) -> None:
    """Raise for a freezing schedule that this run cannot complete."""
    if planned and config.train.parallel == "fsdp":
        raise ConfigError("a method whose schedule freezes or unfreezes needs train.parallel 'ddp', not 'fsdp'")
    if planned and planned[-1].step >= length.steps:
        raise ConfigError(
            f"method.schedule: step {planned[-1].step} is past the run's {length.steps} steps; use earlier steps"
        )


def _add_notes(config: RunConfig, task: Task, model: nn.Module, state: TrainState, device: torch.device) -> None:
    """Add notes on what a reader of the result would not expect; a resumed run does not repeat them."""
    optimizer = config.optimizer
    notes = unused_multipliers(model, optimizer) + muon_notes(model, optimizer, device) + _nothing_was_loaded(config)
    if task.writes_answers and is_sharded(model):
        notes.append("a sharded model writes no answers during training: exact match, chrF and BLEU are missing")
    state.notes += [note for note in notes if note not in state.notes]


def _nothing_was_loaded(config: RunConfig) -> list[str]:
    """Return a note when a method keeps what was loaded, and the model starts with random weights."""
    method = config.method
    as_loaded = [name for name, matrix in method.matrices.items() if matrix.init == "pretrained"]
    if not is_fresh(config.model) or (method.rest == "trained" and not as_loaded):
        return []
    kept = ", ".join(as_loaded) if method.rest == "trained" else "the body"
    what = f"method {method.name!r} keeps {kept} as loaded, but model.name {config.model.name}"
    return [
        f"{what} starts with random weights: this is a control on random features; if that is not what you want, name "
        "a pretrained model"
    ]


def _write_first_records(run: ActiveRun, audited: Audit, metrics: FileMark | None) -> None:
    """Write the environment and the audit, open the metrics after the steps that are done, and show all notes."""
    folder, state, task = run.folder, run.state, run.task
    # A run that was killed after its last step saves no further checkpoint, and so would never remove its old ones.
    remove_old_checkpoints(folder.checkpoints, run.config.checkpoint.keep)
    # A run without room for a checkpoint is refused now, and not after the steps up to the first one.
    require_space(folder.path, checkpoint_bytes(run.model, run.stepper.optimizer))
    problem = folder.start_metrics(state.step, metrics)
    if problem:
        state.notes.append(f"step {state.step}: {problem}")
    data = DataRecord.model_validate(task.describe())
    plan = plan_of(run.config, resumed=state.step > 0)
    environment(data, run.world.device.type, run.world.size, plan).write(folder / "environment.json")
    audited.write(folder / "audit.json")
    folder.status("running", step=state.step, max_steps=run.length.steps)
    for note in task.warnings() + run.length.warnings() + state.notes:
        run.display.say(note)


def count_flops(config: RunConfig, world: World, task: Task, model: nn.Module) -> float:
    """Return the FLOPs of a training step per token, with the parameters that are frozen now.

    Sharding replaces the parameters, so the model must not be wrapped yet.
    """
    share = batch_share(config, world)
    batch = {name: rows.to(world.device) for name, rows in task.batch(0, 1).items()}
    sequences = min(share, config.train.micro_batch_size or share)
    reach = find_reach(task.loss(model), batch)
    return train_flops_per_token(model, config.data.sequence_length, sequences, reach, task.head_share)


def build_stepper(config: RunConfig, world: World, task: Task, model: nn.Module, state: TrainState) -> Stepper:
    """Wrap the model with its loss, and build an optimiser over what is trainable now."""
    _, sites = find_sites(model)
    blocks = [model.get_submodule(path) for path in dict.fromkeys(site.block for site in sites)]
    module = wrap(task.loss(model), blocks, world, config.train.parallel)
    optimizer = build_optimizer(model, config.optimizer, world.device)
    if uses_compile(config, world.device, task):
        torch._dynamo.reset()  # a process that trains several variants would otherwise fall back to eager code
    stepper = Stepper(config, world, task, model, module, optimizer)
    stepper.prepare(state)
    return stepper
