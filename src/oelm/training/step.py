"""One optimiser step: accumulate over micro-batches, divide by the batch's targets, clip, check, update."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

from ..config import RunConfig
from ..errors import ConfigError, TrainingError
from ..method.seal import whole
from ..models.masks import one_text_per_row
from ..runs.folder import UNCOMPARABLE_TIMES
from .checkpoint import TrainState, list_checkpoints
from .parallel import World, without_sync
from .recording import Recordings, Shapes, shapes_of
from .tasks.base import Batch, Task

_TOO_LARGE = (
    "one sequence at a time does not fit into the device's memory; use a smaller model or sequence length, or "
    "train.gradient_checkpointing"
)


def uses_bfloat16(config: RunConfig, device: torch.device) -> bool:
    """Return whether matrix products run in bfloat16: as configured, by default on a GPU that supports it."""
    setting = config.train.precision
    return setting == "bfloat16" or (setting == "auto" and device.type == "cuda" and torch.cuda.is_bf16_supported())


def uses_compile(config: RunConfig, device: torch.device, task: Task) -> bool:
    """Return whether the model is compiled: as configured, by default on a GPU when all batches have one shape."""
    setting = config.train.compile
    return device.type == "cuda" and task.fixed_shapes if setting == "auto" else setting


def uses_graphs(config: RunConfig, world: World, task: Task) -> bool:
    """Return whether steps are recorded as CUDA graphs: as configured, by default where compiled code can be.

    Raise where they are wanted and cannot be.
    """
    problem = ""
    if config.train.gradient_checkpointing:
        problem = "does not go with train.gradient_checkpointing"
    elif world.size > 1:
        problem = "records the steps of one process, and this run has several"
    elif world.device.type != "cuda":
        problem = "needs a GPU"
    elif config.optimizer.name == "muon":
        problem = "does not go with optimizer.name 'muon', which reads its rate on the host"
    if config.train.graphs == "auto":
        return not problem and task.fixed_shapes and uses_compile(config, world.device, task)
    if config.train.graphs and problem:
        raise ConfigError(f"train.graphs {problem}: leave it out")
    return config.train.graphs


@dataclass(frozen=True)
class Outcome:
    """What a step leaves on the device: its summed loss, 0 where it was skipped, and the norms of its gradients.

    `norms` are those of every gradient, in the optimiser's order; `norm` is the norm of them all.
    """

    loss: Tensor
    norms: Tensor
    norm: Tensor
    non_finite: Tensor


class Stepper:
    """Takes optimiser steps and sums the loss and the targets since the last line of metrics (the window).

    On a GPU the host never waits for the device. Whether a gradient was finite is a flag on the device, which the
    optimiser's kernel reads: with a non-finite gradient it leaves the weights alone. The host reads the flag while the
    next step is already queued. What changes from step to step (the batch, the rate, the number of targets) is in
    tensors, so that the kernels of a step can be recorded and launched together (`train.graphs`). Muon has no such
    kernel: with it the host waits for each step's norm.

    `model` is the bare model, `module` the model with its loss, wrapped for the process group. `warming_up` says that
    the last step was among the first ones of its shape, in which code is compiled or recorded.
    """

    def __init__(
        self, config: RunConfig, world: World, task: Task, model: nn.Module, module: nn.Module, optimizer: Optimizer
    ) -> None:
        self.config, self.world, self.task, self.model = config, world, task, model
        self.module, self.optimizer = module, optimizer
        self._cuda = world.device.type == "cuda"
        self.share = batch_share(config, world)
        bf16 = uses_bfloat16(config, world.device)
        self.autocast = torch.autocast(world.device.type, torch.bfloat16) if bf16 else nullcontext()
        compiled = uses_compile(config, world.device, task)
        if compiled:
            self.module = cast(nn.Module, torch.compile(module, dynamic=False))  # batches have one width or a few
        self.window: tuple[Tensor, int] = (torch.zeros((), dtype=torch.float64, device=world.device), 0)
        self._norm = torch.zeros((), device=world.device)
        self._loss_scale = torch.zeros((), device=world.device)
        self._unread: tuple[int, Tensor, Tensor, Any] | None = None
        self._recordings = Recordings(self._work, optimizer) if uses_graphs(config, world, task) else None
        self.warming_up = False
        # Compiled code is made in the first step of a shape, a recording in the second.
        self._warm_up_steps = 2 if self._recordings is not None else int(compiled)
        self._steps_of: Counter[Shapes] = Counter()

    def prepare(self, state: TrainState) -> None:
        """Choose the micro-batch size, and continue the window where a checkpoint left it.

        The size is the configured one, or the smaller one that an earlier part of this run had to use.
        """
        if state.micro_batch_size == 0 or self.share % state.micro_batch_size:
            state.micro_batch_size = min(self.config.train.micro_batch_size or self.share, self.share)
        if self.share % state.micro_batch_size:
            raise ConfigError(
                f"train.micro_batch_size {state.micro_batch_size} does not divide the {self.share} sequences that each "
                "process takes of a batch; use a divisor"
            )
        if self.world.size > 1 and self.config.train.parallel == "ddp":
            if self._cuda:
                self._fit_memory(state)
            self._rehearse(state)
        losses = state.window_losses
        if len(losses) != self.world.size:  # another number of processes saved it
            losses = [sum(losses)] + [0.0] * (self.world.size - 1)
        loss = losses[self.world.rank]
        self.window = (self.window[0] + loss, state.window_targets)

    def step(self, state: TrainState) -> None:
        """Take the step with index `state.step`; when memory runs out, halve the micro-batch and take it again."""
        while True:
            try:
                return self._step(state)
            except torch.OutOfMemoryError as error:
                if state.micro_batch_size == 1:
                    raise TrainingError(f"step {state.step}: {_TOO_LARGE}") from error
                if self.world.size > 1:  # the other processes wait in an exchange that this one will not join
                    raise TrainingError(
                        f"step {state.step}: out of memory on process {self.world.rank} with micro-batches of "
                        f"{state.micro_batch_size}; start a new run with a smaller train.micro_batch_size"
                    ) from error
                self._halve(state)

    def settle(self, state: TrainState) -> tuple[float, int, float]:
        """Wait for the device and return the window's summed loss and targets, and the last gradient norm."""
        self._read_flag(state)
        loss, targets = self.window
        return float(loss), targets, float(self._norm)

    def reset_window(self) -> None:
        """Start a new window: forget the summed loss and targets."""
        self.window = (torch.zeros_like(self.window[0]), 0)

    def _step(self, state: TrainState) -> None:
        step, micro = state.step, state.micro_batch_size
        # This process's share of the global batch.
        first = step * self.config.train.batch_size + self.world.rank * self.share
        torch.manual_seed(step_seed(self.config.seed, step, self.world.rank))
        batches = [self._batch(first + start, micro) for start in range(0, self.share, micro)]
        shapes = shapes_of(batches)
        self._steps_of[shapes] += 1
        self.warming_up = self._steps_of[shapes] <= self._warm_up_steps
        # The exchange between processes averages gradients. This factor turns that into the mean over all targets of
        # the global batch, however they are spread over processes and micro-batches.
        self._loss_scale.fill_(self.world.size / self._target_count(step))
        recording = self._recordings.find(batches, state.notes, step) if self._recordings else None
        if recording is None:
            outcome = self._work([self._to_device(batch) for batch in batches], partial(self._read_flag, state))
        else:
            outcome = recording.launch(batches)
            self._read_flag(state)
        self._keep(outcome, state)

    def _work(self, batches: list[Batch], before_backward: Callable[[], None] = lambda: None) -> Outcome:
        """Do a step's work on the device: the passes over its micro-batches, and the update of the weights."""
        loss_sum = torch.zeros((), dtype=torch.float64, device=self.world.device)
        for number, batch in enumerate(batches, start=1):
            with without_sync(self.module, last=number == len(batches)):
                with self.autocast, one_text_per_row():
                    loss = self.module(**batch)
                if number == 1:
                    before_backward()  # while the gradients of the previous step are still there
                    self.optimizer.zero_grad(set_to_none=True)
                torch.autograd.backward(loss * self._loss_scale)
            loss_sum += loss.detach()
        norms = torch.stack(torch._foreach_norm([parameter.grad for parameter in self._with_gradient()]))
        norm = whole(torch.linalg.vector_norm(norms))
        non_finite = ~torch.isfinite(norm)
        self._update(norm, non_finite)
        return Outcome(torch.where(non_finite, 0.0, loss_sum), norms, norm, non_finite)

    def _update(self, norm: Tensor, non_finite: Tensor) -> None:
        """Clip the gradients and move the weights, unless a gradient is not finite."""
        clip = self.config.optimizer.clip
        if self._cuda and isinstance(self.optimizer, AdamW):
            # The fused kernel divides the gradients by grad_scale, and does nothing where found_inf is set.
            optimizer: Any = self.optimizer
            optimizer.grad_scale = torch.clamp(norm / clip, min=1.0).nan_to_num(1.0) if clip else None
            optimizer.found_inf = non_finite.float()
            self.optimizer.step()
        elif not bool(non_finite):
            if clip:
                scale = torch.clamp(clip / (norm + 1e-6), max=1.0)
                torch._foreach_mul_([parameter.grad for parameter in self._with_gradient()], scale)
            self.optimizer.step()

    def _keep(self, outcome: Outcome, state: TrainState) -> None:
        """Add a step to the window; on a GPU have its flag copied to the host, to be read during the next step."""
        self.window = (self.window[0] + outcome.loss, self.window[1] + self._target_count(state.step))
        self._norm = outcome.norm
        if not self._cuda:
            if bool(outcome.non_finite):
                self._skip(state, state.step, outcome.norms)
            return
        flag = torch.empty((), dtype=torch.bool, pin_memory=True)
        flag.copy_(outcome.non_finite, non_blocking=True)
        copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
        copied.record()
        # Those of a recorded step are overwritten by the next one, which is queued when the flag is read.
        self._unread = (state.step, flag, outcome.norms.clone(), copied)

    def _read_flag(self, state: TrainState) -> None:
        """Count the previous step as skipped if the device's flag, where it was not read yet, says so."""
        if self._unread is None:
            return
        step, flag, norms, copied = self._unread
        self._unread = None
        copied.synchronize()
        if bool(flag):
            self._skip(state, step, norms)

    def _skip(self, state: TrainState, step: int, norms: Tensor) -> None:
        """Count a step whose gradient was not finite and that left the weights alone; raise when there are too many."""
        state.skipped += 1
        self.window = (self.window[0], self.window[1] - self._target_count(step))  # a skipped step is in no mean
        finite = torch.isfinite(whole(norms)).tolist()
        bad = {id(p) for p, is_finite in zip(self._with_gradient(), finite, strict=True) if not is_finite}
        names = [name for name, parameter in self.model.named_parameters() if id(parameter) in bad]
        first = step * self.config.train.batch_size
        where = f"step {step} (samples {first} to {first + self.config.train.batch_size - 1} of the run)"
        what = f"non-finite gradient in {', '.join(names[:3]) or 'the loss'}{' and more' if len(names) > 3 else ''}"
        if state.skipped > self.config.train.skip_nonfinite:
            checkpoints = list_checkpoints(self.config.folder / "checkpoints")
            resume_point = f"the last checkpoint is {checkpoints[-1].name}" if checkpoints else "there is no checkpoint"
            raise TrainingError(
                f"{where}: {what}. The step did not change the weights, and {resume_point}; lower the learning rate, "
                "or allow some such steps with train.skip_nonfinite"
            )
        state.notes.append(f"{where}: {what}; the step was skipped")

    def _with_gradient(self) -> list[Any]:
        """Return the parameters that have a gradient, in the optimiser's order."""
        return [p for group in self.optimizer.param_groups for p in group["params"] if p.grad is not None]

    def _target_count(self, step: int) -> int:
        """Return the number of targets in a step's global batch, which every process computes by itself."""
        batch = self.config.train.batch_size
        return self.task.target_count(step * batch, batch)

    def _batch(self, first: int, count: int) -> Batch:
        return self.task.batch(first, count)

    def _to_device(self, batch: Batch) -> Batch:
        """Move a batch to the device; from pinned memory the copy overlaps with the device's work."""
        if not self._cuda:
            return batch
        return {name: rows.pin_memory().to(self.world.device, non_blocking=True) for name, rows in batch.items()}

    def _halve(self, state: TrainState) -> None:
        """Reduce the micro-batch to the largest divisor of the share that is at most half of it."""
        self.optimizer.zero_grad(set_to_none=True)
        if self._cuda:
            torch.cuda.empty_cache()
        old, state.micro_batch_size = state.micro_batch_size, state.micro_batch_size // 2
        while self.share % state.micro_batch_size:
            state.micro_batch_size -= 1
        state.notes.append(
            f"step {state.step}: out of memory with micro-batches of {old}; now {state.micro_batch_size}, with the "
            f"same global batch; {UNCOMPARABLE_TIMES}"
        )

    def _fit_memory(self, state: TrainState) -> None:
        """Try a backward pass before training, and halve the micro-batch in all processes until it fits in all.

        Not for a sharded model: its passes exchange weights, so one process without memory leaves the others waiting.
        """
        while True:
            failed = False
            try:
                batch = self._to_device(self.task.largest(state.micro_batch_size))
                with without_sync(self.module, last=False), self.autocast:
                    torch.autograd.backward(self.module(**batch))
            except torch.OutOfMemoryError:
                failed = True
            self.optimizer.zero_grad(set_to_none=True)
            if not self.world.any(failed):
                return
            if state.micro_batch_size == 1:
                raise TrainingError(_TOO_LARGE)
            self._halve(state)

    def _rehearse(self, state: TrainState) -> None:
        """Make one pass whose gradients are exchanged and discarded.

        DDP rebuilds its buckets after its first pass, and with three processes or more the order of a sum depends on
        them. After this pass a resumed run and an uninterrupted one have the same buckets.
        """
        with self.autocast:
            torch.autograd.backward(self.module(**self._to_device(self._batch(0, state.micro_batch_size))))
        self.optimizer.zero_grad(set_to_none=True)


def batch_share(config: RunConfig, world: World) -> int:
    """Return how many sequences of each global batch one process takes."""
    batch = config.train.batch_size
    if batch % world.size:
        raise ConfigError(
            f"train.batch_size {batch} cannot be shared equally by {world.size} processes: use a multiple of "
            f"{world.size}"
        )
    return batch // world.size


def step_seed(seed: int, step: int, rank: int) -> int:
    """Return the seed of everything random in one step of one process, so that no random state needs saving."""
    digest = hashlib.sha256(f"{seed}\0{step}\0{rank}".encode()).digest()
    return int.from_bytes(digest[:7], "big")
