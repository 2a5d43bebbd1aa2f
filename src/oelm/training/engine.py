"""Trains one run, from its config to its records: build, resume, loop, validate, save, report.

The loop is in `_train`; what one optimiser step does is in `step.py`.
"""

from __future__ import annotations

import math
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..base.files import new_folder, read_json, require_space, write_json
from ..config import RunConfig
from ..errors import ConfigError, FileError, OelmError, TrainingError
from ..method.apply import apply
from ..method.audit import audit
from ..method.schedule import advance, due, events
from ..method.seal import verify
from ..method.sites import find_sites
from ..models.load import load
from ..runs.folder import UNCOMPARABLE_TIMES, RunFolder, ending, environment
from .attention_stats import attention_figures
from .checkpoint import (
    TrainState,
    checkpoint_bytes,
    load_checkpoint,
    mark_best,
    read_state,
    restore_record,
    save_checkpoint,
    stale_best,
    tidy,
)
from .length import Pace
from .optim import build_optimizer, idle_multipliers, learning_rate, set_learning_rate
from .parallel import World, joined, reshard, wrap
from .progress import Display
from .result import final_numbers, result_of, result_there, with_gaps
from .resume import about, find_checkpoint, require_the_same, torch_for
from .signals import EXIT_REQUEUE, StopRequest, listening
from .step import Stepper, share_of
from .tasks.base import Figures, Task
from .tasks.metrics import perplexity
from .tasks.open import open_task
from .timing import StepTimer
from .trackers import Trackers
from .validation import validate, written_figures

# How long a signal that comes again is the same one, passed on by a launcher: in seconds.
_SAME_SIGNAL = 2.0


@dataclass
class Run:
    """Everything that a run in progress consists of."""

    config: RunConfig
    world: World
    folder: RunFolder
    task: Task
    pace: Pace
    model: nn.Module
    stepper: Stepper
    state: TrainState
    timer: StepTimer
    display: Display
    trackers: Trackers
    stop: StopRequest

    @property
    def sharded(self) -> bool:
        return self.config.train.parallel == "fsdp" and self.world.size > 1


class Stopped(Exception):
    """A run that was asked to stop, saved itself, and can go on. Its exit code asks a scheduler to requeue it."""

    code = EXIT_REQUEUE


def train(config: RunConfig, quiet: bool = False) -> dict[str, Any]:
    """Train a run and return its result, which is also its record. A finished run is not trained again.

    Under a launcher every process calls this, and the first one alone writes records and returns the result.
    Raises `Stopped` when a signal asked it to stop: it has saved a checkpoint, and the same call goes on from there.
    """
    with listening() as stop, joined(config.train.device) as world, torch_for(config, world):
        stop.patience = 0.0 if world.size == 1 else _SAME_SIGNAL
        folder = RunFolder(config)
        try:
            with world.failing_together():
                result = _train_in(config, world, folder, stop, quiet)
        except BaseException as error:
            refused = isinstance(error, OelmError) and not isinstance(error, TrainingError | FileError)
            if world.main and folder.claimed and not (refused and folder.withdraw()):
                _try_to_say(folder, error)
            raise
        finally:
            folder.close()
    if result is None:
        raise Stopped
    return result


def _train_in(
    config: RunConfig, world: World, folder: RunFolder, stop: StopRequest, quiet: bool
) -> dict[str, Any] | None:
    """The result, or none if the run was asked to stop. Nothing outlives this call that holds on to the group."""
    if world.main:
        folder.claim()
    if world.any(world.main and (folder / "result.json").is_file()):
        if not world.main:
            return {}
        result = result_there(folder)
        Display(folder, quiet).say(f"{folder.path}: {ending(result['val_loss'])} already; its records are there")
        return result
    run = _build(config, world, folder, stop, quiet)
    ended = "failed"
    try:
        trained = _finish(run) if _train(run) else None
        ended = "stopped" if trained is None else ending(trained.get("val_loss"))
        return trained
    finally:
        run.trackers.close(ended)
        run.display.close()


def _train(run: Run) -> bool:
    """The loop: change what is frozen, take a step, log, validate, save, listen; until there are no steps left.

    Whether it came to its end; it did not if it was asked to stop.
    """
    config, state, pace, batch = run.config, run.state, run.pace, run.config.train.batch_size
    if state.step == 0:
        _probe(run)
    run.timer.begin()
    started, before = time.perf_counter(), state.seconds
    while state.step < pace.steps:
        _follow_schedule(run)
        rate = learning_rate(config.optimizer, pace, state.step)
        set_learning_rate(run.stepper.optimizer, rate)

        run.stepper.step(state)
        state.tokens += run.task.tokens(state.step * batch, batch)
        state.step += 1
        state.seconds = before + time.perf_counter() - started
        run.timer.step()

        last = state.step == pace.steps
        if state.step % config.log.every == 0 or last:
            with run.timer.apart_from_steps("log") as step_seconds:
                _log(run, rate, step_seconds)
        if state.step % pace.validate_every == 0 or last:
            with run.timer.apart_from_steps("validation"):
                _validate(run)
        # All agree: a signal may reach one process a step before the others, or only one.
        stopping = run.world.any(bool(run.stop))
        if state.step % pace.save_every == 0 or last or stopping:
            # Of a run that is cut here the validation is past too; its time to a target must not leave that out.
            state.seconds = before + time.perf_counter() - started
            with run.timer.apart_from_steps("checkpoint"):
                _save(run)
        if stopping and not last:
            run.display.say(f"stopped by {run.stop.signal or 'another process'} at step {state.step}: saved")
            if run.world.main:
                run.folder.status("stopped", step=state.step, signal=run.stop.signal)
            return False
    return True


def _build(config: RunConfig, world: World, folder: RunFolder, stop: StopRequest, quiet: bool) -> Run:
    """Data, model, method, optimiser, and the last checkpoint if there is one: all checked before the first step."""
    share_of(config, world)
    display = Display(folder if world.main else None, quiet)
    task = open_task(config)
    pace = Pace.of(config, task.samples_per_epoch)
    model: Any = task.build_model(config)
    apply(model, config.method, config.seed)
    if config.train.gradient_checkpointing:
        model.gradient_checkpointing_enable()
    planned = events(model, config.method)
    if planned and config.train.parallel == "fsdp":
        raise ConfigError("a method whose schedule freezes or unfreezes needs train.parallel 'ddp'")
    if planned and planned[-1].step >= pace.steps:
        raise ConfigError(f"method.schedule: step {planned[-1].step} is past the run's {pace.steps} steps")

    checkpoint, differs = find_checkpoint(config, folder, about(config, world, task))
    state, times = TrainState(), None
    if checkpoint is not None:
        state, _, times = read_state(checkpoint)
        restore_record(checkpoint, model)
        if differs:
            state.notes.append(f"step {state.step}: went on inexactly: {differs}; {UNCOMPARABLE_TIMES}")
    found = checkpoint.name if checkpoint else "none"
    require_the_same(world, config=config.id, torch=torch.__version__, data=task.sha256, checkpoint=found)
    model.to(world.device).train()  # one that was loaded comes as for evaluation: without dropout
    stepper = _stepper(config, world, task, model, state)
    if checkpoint is not None:
        load_checkpoint(checkpoint, model, stepper.optimizer)
        display.say(f"resumed from step {state.step}")
        if world.main:  # one that was killed after its last step saves no more, and would leave them for ever
            tidy(folder.checkpoints, config.checkpoint.keep)
    told = idle_multipliers(model, config.optimizer)
    if config.task.kind == "text2text" and config.train.parallel == "fsdp" and world.size > 1:
        told.append("a sharded model writes no answers during training: exact match, chrF and BLEU are missing")
    state.notes += [note for note in told if note not in state.notes]
    report = _audit_of(model, world)
    if world.main:
        require_space(folder.path, checkpoint_bytes(model))  # now, and not after the steps up to the first one
        if not folder.start_metrics(state.step):
            state.notes.append(f"step {state.step}: {folder / 'metrics.jsonl'} was gone; the lines before are lost")
        write_json(folder / "environment.json", environment(task.describe(), world.device.type, world.size))
        write_json(folder / "audit.json", report)
        folder.status("running", step=state.step, max_steps=pace.steps)
        for note in task.warnings() + pace.warnings() + state.notes:
            display.say(note)
    display.start(pace.steps)
    timer = StepTimer(world.device, times)
    trackers = Trackers(config if world.main else _untracked(config), folder.path, display.say, state.step)
    return Run(config, world, folder, task, pace, model, stepper, state, timer, display, trackers, stop)


def _stepper(config: RunConfig, world: World, task: Task, model: nn.Module, state: TrainState) -> Stepper:
    _, sites = find_sites(model)
    blocks = [model.get_submodule(path) for path in dict.fromkeys(site.block for site in sites)]
    module = wrap(task.loss(model), blocks, world, config.train.parallel)
    optimizer = build_optimizer(model, config.optimizer, world.device)
    stepper = Stepper(config, world, task, model, module, optimizer)
    stepper.fit_micro_batch(state)
    return stepper


def _follow_schedule(run: Run) -> None:
    """Freeze or unfreeze what is due; then the optimiser, the wrapper and the compiled code are made anew."""
    if not due(run.model, run.state.step):
        return
    with run.timer.apart_from_steps("schedule"):
        happened = advance(run.model, run.state.step)
        old = run.stepper.optimizer
        run.stepper.settle(run.state)
        window = run.stepper.window
        old.zero_grad(set_to_none=True)  # what was frozen just now would keep its last gradient
        # Without a new wrapper the ranks would go on exchanging the old set of gradients, and silently part ways.
        run.stepper = _stepper(run.config, run.world, run.task, run.model, run.state)
        run.stepper.window = window
        run.timer.warm_up_again()
        for group in run.stepper.optimizer.param_groups:
            for parameter in group["params"]:
                if parameter in old.state:
                    run.stepper.optimizer.state[parameter] = old.state[parameter]
        report = audit(run.model)
        for event in happened:
            run.display.say(f"{event}; {report.trainable:,} parameters train now")
            if run.world.main:
                values = {"event": "freeze" if event.freeze else "unfreeze", "matrices": list(event.paths)}
                run.folder.metric("event", run.state.step, trainable=report.trainable, **values)


def _log(run: Run, rate: float, seconds: list[float]) -> None:
    """One line of metrics, with the times of the steps since the last time that anything was kept apart from them."""
    state, config = run.state, run.config
    loss_sum, targets, norm = run.stepper.settle(state)
    total = run.world.total(loss_sum)
    loss = total / targets if targets else math.nan  # all of the steps were skipped
    state.window_losses, state.window_targets = [], 0
    run.stepper.reset_window()
    per_step = sum(seconds) / len(seconds) if seconds else 0.0
    done, batch = len(seconds), config.train.batch_size
    tokens = run.task.tokens((state.step - done) * batch, done * batch) if done else 0
    figures = {"loss": loss, "learning_rate": rate, "gradient_norm": norm}
    shown = {**figures, "skipped": state.skipped, "tokens_per_second": tokens / (per_step * done) if per_step else 0.0}
    if config.task.kind == "language":
        shown["perplexity"] = perplexity(loss)
    eta = per_step * (run.pace.steps - state.step)
    run.display.step(state.step, shown, eta)
    if run.world.main:
        memory = torch.cuda.max_memory_allocated() if run.world.device.type == "cuda" else None
        clock = {"seconds": state.seconds, "step_seconds": per_step}
        run.folder.metric("train", state.step, tokens=state.tokens, **figures, time=clock)
        live = {"loss": loss, "tokens_per_second": shown["tokens_per_second"], "eta_seconds": eta, "memory": memory}
        run.folder.status("running", step=state.step, **live)
        run.trackers.send({f"train/{key}": value for key, value in shown.items()}, state.step)


def _validate(run: Run) -> None:
    state, task = run.state, run.task
    figures = _figures(run, run.stepper.module, run.model, task, run.config.eval.sequences)
    finite = all(math.isfinite(number) for number in task.score(figures))
    better = finite and (not state.best or task.score(figures) > task.score(state.best))
    when = {"step": state.step, "epoch": run.pace.epoch(state.step)}
    state.last = {**when, **figures}
    if better:
        state.best = state.last
    for target in run.config.eval.targets:
        if task.reached(figures, target) and str(target) not in state.reached:
            state.reached[str(target)] = {"step": state.step, "tokens": state.tokens, "seconds": state.seconds}
    run.display.say(f"step {state.step}: {task.headline(figures)}{' (best)' if better else ''}")
    if run.world.main:
        numbers = {name: value for name, value in figures.items() if type(value) in (int, float)}
        clock = {"seconds": state.seconds}
        run.folder.metric("val", state.step, epoch=when["epoch"], **numbers, tokens=state.tokens, time=clock)
        run.trackers.send({f"val/{name}": value for name, value in numbers.items()}, state.step)
        run.folder.status("running", val_loss=numbers.pop("loss"), **numbers)
    _probe(run)
    if better and run.config.checkpoint.best:
        _save_model(run, run.folder / "best")


def _figures(run: Run, module: nn.Module, model: nn.Module, task: Task, sequences: int | None) -> Figures:
    """The figures of a model on a task's validation examples, and of the answers it writes where a task asks that."""
    config, batch_size = run.config, run.config.eval.batch_size or run.state.micro_batch_size
    figures = validate(module, task, run.world, batch_size, sequences, run.stepper.autocast)
    reshard(module)
    if config.eval.generations and not run.sharded:
        figures |= written_figures(model, task, run.world, batch_size, config.eval.generations)
    return figures


def _probe(run: Run) -> None:
    """Record how the attention of every layer spreads, on the first validation examples."""
    rows = min(run.config.eval.probe, run.task.held_out_count)
    if not rows:
        return
    module = getattr(run.stepper.module, "_orig_mod", run.stepper.module)  # compiled code does not look where we look
    layers = attention_figures(run.model, module, run.task.validation(0, rows, rows))
    reshard(module)
    if layers and run.world.main:
        run.folder.metric("attention", run.state.step, layers=layers)


def _save(run: Run) -> None:
    loss_sum, targets, _ = run.stepper.settle(run.state)
    run.state.window_losses, run.state.window_targets = run.world.gather(loss_sum), targets
    run.trackers.flush()
    save_checkpoint(
        run.folder.checkpoints,
        run.config.checkpoint.keep,
        run.model,
        run.stepper.optimizer,
        run.state,
        about(run.config, run.world, run.task),
        run.timer.times,
        run.world,
        run.sharded,
    )


def _save_model(run: Run, path: Path) -> None:
    """The model alone, in transformers' format with its tokenizer: what `oelm generate` and `oelm export` read."""
    state_dict = None
    if run.sharded:
        from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

        options = StateDictOptions(full_state_dict=True, cpu_offload=True)
        state_dict = get_model_state_dict(run.model, options=options)
    if run.world.main:
        require_space(run.folder.path, sum(p.numel() * p.element_size() for p in run.model.parameters()))
        model: Any = run.model
        with new_folder(path) as folder:
            model.save_pretrained(folder, state_dict=state_dict)
            run.task.save_tokenizer(folder)
            mark_best(folder, run.state.step)
    run.world.barrier()


def _finish(run: Run) -> dict[str, Any]:
    """The figures of a finished run, written last: a run with a result.json is done."""
    state, config = run.state, run.config
    if config.method.schedule.kind == "static":
        verify(run.model)
    timing = run.timer.summary(state.tokens / max(1, state.step))
    report = _audit_of(run.model, run.world)
    memory = torch.cuda.max_memory_allocated() if run.world.device.type == "cuda" else None
    evaluations = _other_splits(run)
    if not run.world.main:
        return {}
    result = result_of(config, run.task, run.pace, state, report, timing, evaluations, memory, run.world.size)
    run.trackers.send(final_numbers(result), state.step)
    write_json(run.folder / "timing.json", {**timing, "notes": state.notes})
    write_json(run.folder / "audit.json", report)
    write_json(run.folder / "result.json", result)
    run.folder.status("finished", step=state.step)
    for warning in result["warnings"]:
        run.display.say(f"warning: {warning}")
    best = f"; best at step {state.best['step']}: {run.task.headline(state.best)}" if state.best else ""
    run.display.say(
        f"{ending(result['val_loss'])}: {run.task.headline(with_gaps(state.last))}{best}; records in {run.folder.path}"
    )
    return dict(read_json(run.folder / "result.json"))


def _other_splits(run: Run) -> dict[str, Figures]:
    """The figures of the best model, or the last where none was kept, on splits that played no part in choosing it."""
    others = run.task.others()
    if not others:
        return {}
    model, module, step = run.model, run.stepper.module, run.state.step
    stale = stale_best(run.folder.path, run.state.best, step) if run.world.main else ""
    if stale:  # kept by a part of this run that had checkpoint.best, which this one has not
        run.state.notes.append(f"{stale}: other splits were evaluated with the last model")
    if run.state.best and run.world.any(run.world.main and not stale and (run.folder / "best").is_dir()):
        model, step = load(run.folder / "best").to(run.world.device), run.state.best["step"]
        module = run.task.loss(model)
    found = {}
    for name, other in others.items():
        found[name] = {"step": step, **_figures(run, module, model, other, None)}
        run.state.notes += [note for note in other.warnings() if note not in run.task.warnings()]
    return found


def _audit_of(model: nn.Module, world: World) -> dict[str, Any]:
    """The audit as data. A sharded model's tensors are gathered, so every process must ask."""
    return audit(model).to_dict() if world.main or _is_sharded(model) else {}


def _is_sharded(model: nn.Module) -> bool:
    return any(hasattr(parameter, "full_tensor") for parameter in model.parameters())


def _untracked(config: RunConfig) -> RunConfig:
    return config.model_copy(update={"log": config.log.model_copy(update={"trackers": ()})})


def _try_to_say(folder: RunFolder, error: BaseException) -> None:
    """Record why a run failed; on a full or read-only disk that may not be possible, and the error itself says why."""
    message = f"{type(error).__name__}: {error}" if isinstance(error, OelmError) else repr(error)
    with suppress(FileError):
        folder.log(f"failed: {error}")
    with suppress(FileError):
        folder.status("failed", message=message)
