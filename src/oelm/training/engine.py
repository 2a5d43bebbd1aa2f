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
from safetensors import SafetensorError
from torch import nn

from ..config import RunConfig
from ..errors import ConfigError, OelmError, TrainingError
from ..evaluate import validation_loss
from ..files import new_folder, read_json, require_space, write_json
from ..models.language import build_for_run
from ..operate import apply
from ..proof import audit, verify
from ..records import RunFolder, environment, read_metrics
from ..schedule import advance, events
from ..sites import find_sites
from .optim import build_optimizer, learning_rate, set_learning_rate
from .parallel import World, joined, reshard, wrap
from .progress import Display, perplexity
from .resume import about, find_checkpoint, require_the_same, torch_for
from .signals import EXIT_REQUEUE, StopRequest, listening
from .state import TrainState, load_checkpoint, read_state, restore_record, save_checkpoint
from .step import Stepper, share_of
from .task import LanguageModelling, SummedLoss
from .timing import StepTimer
from .trackers import Trackers

# How long a signal that comes again is the same one, passed on by a launcher: in seconds.
_SAME_SIGNAL = 2.0


@dataclass
class Run:
    """Everything that a run in progress consists of."""

    config: RunConfig
    world: World
    folder: RunFolder
    task: LanguageModelling
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
            if world.main and folder.claimed:
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
        display = Display(folder if world.main else None, config.train.max_steps, quiet)
        display.say(f"{folder.path}: finished already; its records are there")
        display.close()
        return dict(read_json(folder / "result.json")) if world.main else {}
    run = _build(config, world, folder, stop, quiet)
    try:
        return _finish(run) if _train(run) else None
    finally:
        run.trackers.close()
        run.display.close()


def _train(run: Run) -> bool:
    """The loop: change what is frozen, take a step, log, validate, save, listen; until there are no steps left.

    Whether it came to its end; it did not if it was asked to stop.
    """
    config, state = run.config, run.state
    run.timer.begin()
    started, before = time.perf_counter(), state.seconds
    while state.step < config.train.max_steps:
        _follow_schedule(run)
        rate = learning_rate(config, state.step)
        set_learning_rate(run.stepper.optimizer, rate)

        run.stepper.step(state)
        state.step += 1
        state.tokens += run.stepper.tokens_per_step
        state.seconds = before + time.perf_counter() - started
        run.timer.step()

        last = state.step == config.train.max_steps
        if state.step % config.log.every == 0 or last:
            _log(run, rate)
        if state.step % config.eval.every == 0 or last:
            with run.timer.apart_from_steps("validation"):
                _validate(run)
        # All agree: a signal may reach one process a step before the others, or only one.
        stopping = run.world.any(bool(run.stop))
        if state.step % config.checkpoint.every == 0 or last or stopping:
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
    display = Display(folder if world.main else None, config.train.max_steps, quiet)
    task = LanguageModelling.open(config)
    model = build_for_run(config.model, task.data.vocab_size, config.data.sequence_length, config.seed)
    apply(model, config.method, config.seed)
    if config.train.gradient_checkpointing:
        model.gradient_checkpointing_enable()
    planned = events(model, config.method)
    if planned and config.train.parallel == "fsdp":
        raise ConfigError("a method whose schedule freezes or unfreezes needs train.parallel 'ddp'")
    if planned and planned[-1].step >= config.train.max_steps:
        raise ConfigError(f"method.schedule: {planned[-1]} is past train.max_steps {config.train.max_steps}")

    checkpoint, differs = find_checkpoint(config, folder, about(config, world, task))
    state, step_seconds = TrainState(), None
    if checkpoint is not None:
        state, _, step_seconds = read_state(checkpoint)
        restore_record(checkpoint, model)
        if differs:
            state.notes.append(f"step {state.step}: went on inexactly: {differs}")
    found = checkpoint.name if checkpoint else "none"
    require_the_same(world, config=config.id, torch=torch.__version__, data=task.data.sha256, checkpoint=found)
    model.to(world.device)
    stepper = _stepper(config, world, task, model, state)
    if checkpoint is not None:
        load_checkpoint(checkpoint, model, stepper.optimizer)
        display.say(f"resumed from step {state.step}")
    report = audit_of(model, world)
    if world.main:
        folder.start_metrics(state.step)
        write_json(folder / "environment.json", environment(task.describe(), world.device.type, world.size))
        write_json(folder / "audit.json", report)
        folder.status("running", step=state.step, max_steps=config.train.max_steps)
        if checkpoint is not None:
            for note in state.notes:
                display.say(note)
    timer = StepTimer(world.device, step_seconds)
    trackers = Trackers(config if world.main else _untracked(config), folder.path, display.say)
    return Run(config, world, folder, task, model, stepper, state, timer, display, trackers, stop)


def _stepper(config: RunConfig, world: World, task: LanguageModelling, model: nn.Module, state: TrainState) -> Stepper:
    _, sites = find_sites(model)
    blocks = [model.get_submodule(path) for path in dict.fromkeys(site.block for site in sites)]
    module = wrap(SummedLoss(model), blocks, world, config.train.parallel)
    optimizer = build_optimizer(model, config.optimizer, world.device)
    stepper = Stepper(config, world, task, model, module, optimizer)
    stepper.fit_micro_batch(state)
    return stepper


def _follow_schedule(run: Run) -> None:
    """Freeze or unfreeze what is due; then the optimiser, the wrapper and the compiled code are made anew."""
    happened = advance(run.model, run.state.step)
    if not happened:
        return
    with run.timer.apart_from_steps("schedule"):
        old = run.stepper.optimizer
        run.stepper.settle(run.state)
        window = run.stepper.window
        old.zero_grad(set_to_none=True)  # what was frozen just now would keep its last gradient
        # Without a new wrapper the ranks would go on exchanging the old set of gradients, and silently part ways.
        run.stepper = _stepper(run.config, run.world, run.task, run.model, run.state)
        run.stepper.window = window
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


def _log(run: Run, rate: float) -> None:
    state, config = run.state, run.config
    seconds = run.timer.collect()
    loss_sum, steps, norm = run.stepper.settle(state)
    total = run.world.total(loss_sum)
    loss = total / (steps * run.stepper.tokens_per_step) if steps else math.nan  # all of them were skipped
    state.window_losses, state.window_steps = [], 0
    run.stepper.reset_window()
    per_step = sum(seconds) / len(seconds) if seconds else 0.0
    speed = run.stepper.tokens_per_step / per_step if per_step else 0.0
    figures = {"loss": loss, "learning_rate": rate, "gradient_norm": norm}
    shown = {**figures, "tokens_per_second": speed}
    eta = per_step * (config.train.max_steps - state.step)
    run.display.step(state.step, shown, eta)
    if run.world.main:
        memory = torch.cuda.max_memory_allocated() if run.world.device.type == "cuda" else None
        clock = {"seconds": state.seconds, "step_seconds": per_step}
        run.folder.metric("train", state.step, tokens=state.tokens, **figures, time=clock)
        live = {"loss": loss, "tokens_per_second": speed, "eta_seconds": eta, "memory": memory}
        run.folder.status("running", step=state.step, **live)
        run.trackers.send({f"train/{key}": value for key, value in shown.items()}, state.step)


def _validate(run: Run) -> None:
    state, config = run.state, run.config
    batch_size = config.eval.batch_size or state.micro_batch_size
    loss = validation_loss(
        run.stepper.module, run.task, run.world, batch_size, config.eval.sequences, run.stepper.autocast
    )
    reshard(run.stepper.module)
    ppl = perplexity(loss)
    for target in config.eval.targets:
        if ppl <= target and str(target) not in state.reached:
            state.reached[str(target)] = {"step": state.step, "tokens": state.tokens, "seconds": state.seconds}
    better = math.isfinite(loss) and (state.best_loss is None or loss < state.best_loss)
    if better:
        state.best_loss, state.best_step = loss, state.step
    run.display.say(f"step {state.step}: validation loss {loss:.4f}, perplexity {ppl:.3f}{' (best)' if better else ''}")
    if run.world.main:
        run.folder.metric(
            "val", state.step, loss=loss, perplexity=ppl, tokens=state.tokens, time={"seconds": state.seconds}
        )
        run.trackers.send({"val/loss": loss, "val/perplexity": ppl}, state.step)
        run.folder.status("running", val_loss=loss, perplexity=ppl)
    if better and config.checkpoint.best:
        _save_model(run, run.folder / "best")


def _save(run: Run) -> None:
    loss_sum, steps, _ = run.stepper.settle(run.state)
    run.state.window_losses, run.state.window_steps = run.world.gather(loss_sum), steps
    save_checkpoint(
        run.folder.checkpoints,
        run.config.checkpoint.keep,
        run.model,
        run.stepper.optimizer,
        run.state,
        about(run.config, run.world, run.task),
        run.timer.steps,
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
        try:
            with new_folder(path) as folder:
                model.save_pretrained(folder, state_dict=state_dict)
                run.task.data.load_tokenizer().save_pretrained(folder)
        except SafetensorError as error:
            raise TrainingError(f"{path}: cannot be written ({error}); the last checkpoint is intact") from None
    run.world.barrier()


def _finish(run: Run) -> dict[str, Any]:
    """The figures of a finished run, written last: a run with a result.json is done."""
    state, config = run.state, run.config
    if config.method.schedule.kind == "static":
        verify(run.model)
    timing = run.timer.summary(run.stepper.tokens_per_step)
    report = audit_of(run.model, run.world)
    if not run.world.main:
        return {}
    loss = _last_validation(run)
    best = math.nan if state.best_loss is None else state.best_loss
    hours = state.seconds / 3600 * run.world.size
    cuda = run.world.device.type == "cuda"
    result = {
        "status": "finished",
        "id": config.id,
        "val_loss": loss,
        "perplexity": perplexity(loss),
        "bits_per_byte": loss / math.log(2) / run.task.bytes_per_token,
        "best_val_loss": best,
        "best_perplexity": perplexity(best),
        "best_step": state.best_step,
        "steps": state.step,
        "tokens": state.tokens,
        "epochs": run.task.windows.epoch_of(state.step * config.train.batch_size - 1) + 1,
        "parameters": {key: report[key] for key in ("total", "trainable", "frozen", "frozen_share", "buffers")},
        "step_seconds": timing.get("step_seconds"),
        "tokens_per_second": timing.get("tokens_per_second"),
        "peak_memory": torch.cuda.max_memory_allocated() if cuda else None,
        "seconds": state.seconds,
        "gpu_hours": hours if cuda else None,
        "reached": state.reached,
        "skipped_steps": state.skipped,
        "notes": state.notes + ([config.log.note] if config.log.note else []),
        "data": {"description": run.task.data.description, "synthetic": run.task.data.synthetic},
    }
    write_json(run.folder / "timing.json", {**timing, "notes": state.notes})
    write_json(run.folder / "audit.json", report)
    write_json(run.folder / "result.json", result)
    run.folder.status("finished", step=state.step)
    run.display.say(
        f"finished: validation loss {loss:.4f}, perplexity {perplexity(loss):.3f} "
        f"(best {perplexity(best):.3f} at step {state.best_step}); records in {run.folder.path}"
    )
    return dict(read_json(run.folder / "result.json"))


def _last_validation(run: Run) -> float:
    """The last validation loss; not a number where the record says null."""
    loss = next(line["loss"] for line in reversed(read_metrics(run.folder.path)) if line["kind"] == "val")
    return math.nan if loss is None else float(loss)


def audit_of(model: nn.Module, world: World) -> dict[str, Any]:
    """The audit as data. A sharded model's tensors are gathered, so every process must ask."""
    return audit(model).to_dict() if world.main or _is_sharded(model) else {}


def _is_sharded(model: nn.Module) -> bool:
    return any(hasattr(parameter, "full_tensor") for parameter in model.parameters())


def _untracked(config: RunConfig) -> RunConfig:
    return config.model_copy(update={"log": config.log.model_copy(update={"trackers": ()})})


def _try_to_say(folder: RunFolder, error: BaseException) -> None:
    """Record why a run failed; on a full or read-only disk that may not be possible, and the error itself says why."""
    message = f"{type(error).__name__}: {error}" if isinstance(error, OelmError) else repr(error)
    with suppress(TrainingError):
        folder.log(f"failed: {error}")
    with suppress(TrainingError):
        folder.status("failed", message=message)
