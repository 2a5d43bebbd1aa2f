"""Train one run from its config to its records.

Read from top to bottom, this is the algorithm:

    train       join the processes, claim the run's folder, and record how the run ends
    build_run   data, model, method, optimiser, and the last checkpoint if there is one: in `build.py`
    _loop       freeze or unfreeze what is due, take a step, log, validate, save; until no steps are left
    _finish     the last metrics, and the result that marks the run as done

What one optimiser step does is in `step.py`; what a checkpoint holds is in `checkpoint.py`.
"""

from __future__ import annotations

import math
import os
import time
from contextlib import suppress
from typing import Any, Literal

import torch
from torch import nn

from ..config import RunConfig
from ..errors import ConfigError, FileError, OelmError, TrainingError
from ..method.audit import audit
from ..method.schedule import advance, due
from ..method.seal import verify
from ..runs.folder import RunFolder, ending
from ..runs.schema import AttentionLine, Audit, Clock, EventLine, LayerAttention, Result, TrainLine, ValLine
from .attention_stats import attention_statistics
from .best import load_best_model, save_best_model, stale_best_model
from .build import ActiveRun, build_run, build_stepper, count_flops
from .checkpoint import Snapshot, save_checkpoint, seeded_tensors
from .optim import learning_rate, set_learning_rate
from .parallel import World, is_sharded, joined, reshard
from .progress import Display
from .result import final_numbers, read_result, result_of
from .resume import torch_settings
from .signals import EXIT_REQUEUE, StopRequest, listening
from .tasks.base import MetricDict, Task
from .validation import answer_metrics, validate

# A launcher may pass on a signal that a process already had, and Slurm sends SIGTERM to a job and to its step. Within
# this many seconds it counts as the same signal.
_SAME_SIGNAL = 2.0


class Stopped(Exception):
    """A run was asked to stop and saved a checkpoint. Its exit code asks a scheduler to requeue it."""

    code = EXIT_REQUEUE


def train(config: RunConfig, quiet: bool = False) -> dict[str, Any]:
    """Train a run and return its result, which is also its record. A finished run is not trained again.

    Under a launcher every process calls this, and only the first one writes records and returns the result. Raise
    `Stopped` when a signal asked the run to stop: it has saved a checkpoint, and the same call resumes from there.
    """
    if not isinstance(config, RunConfig):
        raise ConfigError(f"oelm.train takes a RunConfig, as RunConfig.load makes it, not {type(config).__name__}")
    with listening() as stop, joined(config.train.device) as world, torch_settings(config, world):
        stop.patience = _SAME_SIGNAL if world.size > 1 or "SLURM_JOB_ID" in os.environ else 0.0
        folder = RunFolder(config)
        try:
            with world.failing_together():
                result = _train_in(folder, world, stop, quiet)
        except BaseException as error:
            # A config that was refused before the first step leaves no folder behind. Any other failure is recorded.
            refused = isinstance(error, OelmError) and not isinstance(error, TrainingError | FileError)
            if world.main and folder.claimed and not (refused and folder.withdraw()):
                _record_failure(folder, error)
            raise
        finally:
            folder.close()
    if result is None:
        raise Stopped
    return result


def _train_in(folder: RunFolder, world: World, stop: StopRequest, quiet: bool) -> dict[str, Any] | None:
    """Return the run's result, or None when it was asked to stop.

    The model and all else that holds the process group live in this call alone, so that the group can be left after it.
    """
    if world.main:
        folder.claim()
    if world.any(world.main and (folder / "result.json").is_file()):
        if not world.main:
            return {}
        result = read_result(folder)
        Display(folder, quiet).say(f"{folder.path}: {ending(result['val_loss'])} already; its records are there")
        return result
    run = build_run(folder, world, stop, quiet)
    ended = "failed"
    try:
        trained = _finish(run) if _loop(run) else None
        ended = "stopped" if trained is None else ending(trained.get("val_loss"))
        return trained
    finally:
        run.trackers.close(ended)
        run.display.close()


def _loop(run: ActiveRun) -> bool:
    """Train the remaining steps. Return True when all are done, False when the run was asked to stop."""
    config, state, length, batch = run.config, run.state, run.length, run.config.train.batch_size
    if state.step == 0:
        _measure_attention(run)
    run.timer.begin()
    started, seconds_before = time.perf_counter(), state.seconds
    while state.step < length.steps:
        # One optimiser step, with what the schedule freezes at its start and with its own learning rate.
        _follow_schedule(run)
        rate = learning_rate(config.optimizer, length, state.step)
        set_learning_rate(run.stepper.optimizer, rate)
        run.stepper.step(state)
        state.tokens += run.task.token_count(state.step * batch, batch)
        state.step += 1
        state.seconds = seconds_before + time.perf_counter() - started
        run.timer.step(run.stepper.warming_up)

        # Everything from here to the next step is timed apart from the steps.
        last = state.step == length.steps
        if state.step % config.log.every == 0 or last:
            with run.timer.apart_from_steps("log") as step_seconds:
                _log(run, rate, step_seconds)
        if state.step % length.validate_every == 0 or last:
            with run.timer.apart_from_steps("validation"):
                _validate(run)
        # All processes must stop at the same step, but a signal may reach one of them earlier, or only one.
        stopping = run.world.any(bool(run.stop))
        if state.step % length.save_every == 0 or last or stopping:
            # The seconds of the validation are saved too, so that a resumed run's time to a target includes them.
            state.seconds = seconds_before + time.perf_counter() - started
            with run.timer.apart_from_steps("checkpoint"):
                _save(run)
        if stopping and not last:
            run.display.say(f"stopped by {run.stop.signal or 'another process'} at step {state.step}: saved")
            if run.world.main:
                run.folder.status("stopped", step=state.step, signal=run.stop.signal)
            return False
    return True


def _follow_schedule(run: ActiveRun) -> None:
    """Freeze or unfreeze what is due, and build a new optimiser, wrapper and compiled code for what trains now."""
    if not due(run.model, run.state.step):
        return
    with run.timer.apart_from_steps("schedule"):
        applied = advance(run.model, run.state.step)
        old_optimizer = run.stepper.optimizer
        run.stepper.settle(run.state)
        window = run.stepper.window
        old_optimizer.zero_grad(set_to_none=True)  # a newly frozen parameter would keep its last gradient
        run.flops_per_token = count_flops(run.config, run.world, run.task, run.model)
        # With the old wrapper, the processes would keep exchanging the old set of gradients and silently diverge.
        run.stepper = build_stepper(run.config, run.world, run.task, run.model, run.state)
        run.stepper.window = window
        run.timer.warm_up_again()
        for group in run.stepper.optimizer.param_groups:
            for parameter in group["params"]:
                if parameter in old_optimizer.state:  # a parameter that trained before keeps its moments
                    run.stepper.optimizer.state[parameter] = old_optimizer.state[parameter]
        trainable = sum(p.numel() for p in run.model.parameters() if p.requires_grad)
        for event in applied:
            run.display.say(f"{event}; {trainable:,} parameters train now")
            if run.world.main:
                kind: Literal["freeze", "unfreeze"] = "freeze" if event.freeze else "unfreeze"
                line = EventLine(step=run.state.step, event=kind, matrices=list(event.paths), trainable=trainable)
                run.folder.metric(line)


def _log(run: ActiveRun, rate: float, seconds: list[float]) -> None:
    """Write a line of metrics. `seconds` are the times of the steps since the last log, validation or checkpoint."""
    state, config = run.state, run.config
    loss_sum, targets, norm = run.stepper.settle(state)
    total = run.world.total(loss_sum)
    loss = total / targets if targets else math.nan  # NaN when all steps of the window were skipped
    state.window_losses, state.window_targets = [], 0
    run.stepper.reset_window()

    steps, batch = len(seconds), config.train.batch_size
    per_step = sum(seconds) / steps if seconds else 0.0
    tokens = run.task.token_count((state.step - steps) * batch, steps * batch) if steps else 0
    metrics: dict[str, Any] = {"loss": loss, "learning_rate": rate, "gradient_norm": norm}
    shown = {**metrics, "skipped": state.skipped, "tokens_per_second": tokens / sum(seconds) if per_step else 0.0}
    shown |= run.task.training_metrics(loss)
    eta = per_step * (run.length.steps - state.step)
    run.display.step(state.step, shown, eta)
    if run.world.main:
        memory = torch.cuda.max_memory_allocated() if run.world.device.type == "cuda" else None
        clock = Clock(seconds=state.seconds, step_seconds=per_step)
        run.folder.metric(TrainLine(step=state.step, tokens=state.tokens, **metrics, time=clock))
        progress = {"loss": loss, "tokens_per_second": shown["tokens_per_second"], "eta_seconds": eta, "memory": memory}
        run.folder.status("running", step=state.step, **progress)
        run.trackers.send({f"train/{key}": value for key, value in shown.items()}, state.step)


def _validate(run: ActiveRun) -> None:
    """Validate, record the targets that were reached for the first time, and save the model if it is the best yet."""
    state, task = run.state, run.task
    metrics = _metrics(run, run.stepper.module, run.model, task, run.config.eval.sequences)
    finite = all(math.isfinite(number) for number in task.score(metrics))
    better = finite and (not state.best or task.score(metrics) > task.score(state.best))
    epoch = run.length.epoch(state.step)
    state.last = {"step": state.step, "epoch": epoch, **metrics}
    if better:
        state.best = state.last
    for target in run.config.eval.targets:
        if task.reached(metrics, target) and str(target) not in state.reached:
            state.reached[str(target)] = {"step": state.step, "tokens": state.tokens, "seconds": state.seconds}
    run.display.say(f"step {state.step}: {task.headline(metrics)}{' (best)' if better else ''}")
    if run.world.main:
        numbers = {name: value for name, value in metrics.items() if type(value) in (int, float)}
        clock = Clock(seconds=state.seconds)
        run.folder.metric(ValLine(step=state.step, epoch=epoch, **numbers, tokens=state.tokens, time=clock))
        run.trackers.send({f"val/{name}": value for name, value in numbers.items()}, state.step)
        run.folder.status("running", val_loss=numbers.pop("loss"), **numbers)
    _measure_attention(run)
    if better and run.config.checkpoint.best:
        save_best_model(run.folder / "best", run.model, task, state.step, run.world)


def _metrics(run: ActiveRun, module: nn.Module, model: nn.Module, task: Task, sequences: int | None) -> MetricDict:
    """Return a model's metrics on a task's validation examples, with those of its written answers where it has any."""
    config, batch_size = run.config, run.config.eval.batch_size or run.state.micro_batch_size
    metrics = validate(module, task, run.world, batch_size, sequences, run.stepper.autocast)
    reshard(module)
    if config.eval.generations and not is_sharded(run.model):
        metrics |= answer_metrics(model, task, run.world, batch_size, config.eval.generations)
    return metrics


def _measure_attention(run: ActiveRun) -> None:
    """Record how the attention of every layer spreads, on the first validation examples."""
    rows = min(run.config.eval.probe, run.task.held_out_count)
    if not rows:
        return
    module = getattr(run.stepper.module, "_orig_mod", run.stepper.module)  # compiled code cannot be measured
    layers = attention_statistics(run.model, module, run.task.validation(0, rows, rows))
    reshard(module)
    if layers and run.world.main:
        recorded = [LayerAttention.model_validate(layer) for layer in layers]
        run.folder.metric(AttentionLine(step=run.state.step, layers=recorded))


def _save(run: ActiveRun) -> None:
    """Write a checkpoint, after waiting for the device and for the trackers."""
    state = run.state
    loss_sum, targets, _ = run.stepper.settle(state)
    state.window_losses, state.window_targets = run.world.gather(loss_sum), targets
    run.trackers.flush()
    left_out = seeded_tensors(run.model) if run.config.checkpoint.frozen == "seeded" else frozenset()
    metrics = run.folder.metrics_mark()
    snapshot = Snapshot(run.model, run.stepper.optimizer, state, run.timer.times, run.identity, metrics, left_out)
    save_checkpoint(run.folder.checkpoints, run.config.checkpoint.keep, snapshot, run.world)


def _finish(run: ActiveRun) -> dict[str, Any]:
    """Write the records of a run that took all its steps, result.json last: a run that has one is done."""
    state = run.state
    if run.config.method.schedule.kind == "static":
        verify(run.model)
    # The tensors of a sharded model are gathered, so every process takes part in its audit.
    report = audit(run.model) if run.world.main or is_sharded(run.model) else None
    memory = torch.cuda.max_memory_allocated() if run.world.device.type == "cuda" else None
    evaluations = _evaluate_other_splits(run)
    if not run.world.main or report is None:
        return {}
    audited = Audit.model_validate(report.to_dict())
    timing = run.timer.summary(state.tokens / max(1, state.step), state.notes)
    result = result_of(run, audited, timing, evaluations, memory)
    run.trackers.send(final_numbers(result), state.step)
    timing.write(run.folder / "timing.json")
    audited.write(run.folder / "audit.json")
    run.folder.finish(result)
    run.folder.status("finished", step=state.step)
    for warning in result.warnings:
        run.display.say(f"warning: {warning}")
    for line in _closing_lines(run, result, evaluations):
        run.display.say(line)
    return read_result(run.folder)


def _closing_lines(run: ActiveRun, result: Result, evaluations: dict[str, MetricDict]) -> list[str]:
    """Return what a run ended with: its last figures, its best ones, those of other splits, and where they are kept."""
    state, task = run.state, run.task
    # In a resumed run's state a metric that was not finite is None, since JSON has null for it.
    last = task.headline({name: math.nan if value is None else value for name, value in state.last.items()})
    lines = [f"{ending(result.val_loss)}: {last}"]
    if state.best and state.best["step"] != state.step:
        lines.append(f"best at step {state.best['step']}: {task.headline(state.best)}")
    for name, metrics in evaluations.items():
        lines.append(f"{name} at step {metrics['step']}: {task.headline(metrics)}")
    return [*lines, f"records in {run.folder.path}"]


def _evaluate_other_splits(run: ActiveRun) -> dict[str, MetricDict]:
    """Return metrics on the splits other than validation: of the best model, or of the last if no best was saved."""
    split_tasks = run.task.other_splits()
    if not split_tasks:
        return {}
    model, module, step, stale = run.model, run.stepper.module, run.state.step, ""
    has_best = run.world.main and bool(run.state.best) and (run.folder / "best").is_dir()
    if has_best:
        stale = stale_best_model(run.folder.path, run.state.best, step)
        if stale:  # best models were saved before this run was resumed, but not since
            run.state.notes.append(f"{stale}: other splits were evaluated with the last model")
    if run.world.any(has_best and not stale):
        model, step = load_best_model(run.folder / "best").to(run.world.device), run.state.best["step"]
        module = run.task.loss(model)
    evaluations = {}
    for name, split_task in split_tasks.items():
        evaluations[name] = {"step": step, **_metrics(run, module, model, split_task, None)}
        run.state.notes += [note for note in split_task.warnings() if note not in run.task.warnings()]
    return evaluations


def _record_failure(folder: RunFolder, error: BaseException) -> None:
    """Record why a run failed, where the disk allows it: the caller raises the run's own error in any case."""
    message = f"{type(error).__name__}: {error}" if isinstance(error, OelmError) else repr(error)
    with suppress(FileError):
        folder.log(f"failed: {error}")
    with suppress(FileError):
        folder.status("failed", message=message)
