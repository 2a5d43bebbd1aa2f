"""One optimiser step: accumulate over micro-batches, normalise by all its targets, clip, check, update."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, cast

import torch
from torch import Tensor, nn

from ..config import RunConfig
from ..errors import ConfigError, TrainingError
from ..runs.folder import UNCOMPARABLE_TIMES
from .checkpoint import TrainState, list_checkpoints
from .parallel import World, without_sync
from .tasks.base import Batch, Task

_TOO_LARGE = (
    "one sequence at a time does not fit into the device's memory; use a smaller model or sequence length, or "
    "train.gradient_checkpointing"
)


def uses_bfloat16(config: RunConfig, device: torch.device) -> bool:
    """Whether products are made in bfloat16: as configured, or on a GPU that can."""
    wanted = config.train.precision
    return wanted == "bfloat16" or (wanted == "auto" and device.type == "cuda" and torch.cuda.is_bf16_supported())


class Stepper:
    """Takes optimiser steps. The window holds the summed loss and number of targets since the last line of metrics.

    On a GPU nothing waits for the device: a step with a non-finite gradient leaves the weights alone by a flag that the
    optimiser's kernel reads, and the host learns of it while the next step's forward pass is already queued, before
    that step's backward pass would overwrite the gradients that tell which tensor it was.
    """

    def __init__(
        self,
        config: RunConfig,
        world: World,
        task: Task,
        model: nn.Module,
        module: nn.Module,
        optimizer: torch.optim.AdamW,
        reset_compiler: bool = True,
    ) -> None:
        self.config, self.world, self.task, self.model = config, world, task, model
        self.module, self.optimizer = module, optimizer
        self._cuda = world.device.type == "cuda"
        self.share = share_of(config, world)
        bf16 = uses_bfloat16(config, world.device)
        self.autocast = torch.autocast(world.device.type, torch.bfloat16) if bf16 else nullcontext()
        wants_compile = config.train.compile
        self._compiled = self._cuda and task.fixed_shapes if wants_compile == "auto" else wants_compile
        if self._compiled:
            if reset_compiler:  # a process that trains several variants would otherwise fall back to eager code
                torch._dynamo.reset()
            self.module = cast(nn.Module, torch.compile(module, dynamic=False if task.fixed_shapes else None))
        self.window: tuple[Tensor, int] = (torch.zeros((), dtype=torch.float64, device=world.device), 0)
        self._norm = torch.zeros((), device=world.device)
        self._unread: tuple[int, Tensor, Any] | None = None

    def fit_micro_batch(self, state: TrainState) -> None:
        """Settle the micro-batch size: as configured, or as an earlier part of this run had to make it.

        The window goes on from where that part left it.
        """
        if state.micro_batch_size == 0 or self.share % state.micro_batch_size:
            wanted = self.config.train.micro_batch_size or self.share
            state.micro_batch_size = min(wanted, self.share)
        if self.share % state.micro_batch_size:
            raise ConfigError(
                f"train.micro_batch_size {state.micro_batch_size} does not divide a process's {self.share} sequences"
            )
        if self.world.size > 1 and self.config.train.parallel == "ddp":
            if self._cuda:
                self._probe_memory(state)
            self._rehearse(state)
        losses = state.window_losses
        if len(losses) == self.world.size:
            loss = losses[self.world.rank]
        else:  # another number of processes saved it
            loss = sum(losses) if self.world.main else 0.0
        self.window = (self.window[0] + loss, state.window_targets)

    def step(self, state: TrainState) -> None:
        """Take the step with index `state.step`; halve the micro-batch and take it again if memory runs out."""
        while True:
            try:
                self._step(state)
                return
            except torch.OutOfMemoryError as error:
                if state.micro_batch_size == 1:
                    raise TrainingError(f"step {state.step}: {_TOO_LARGE}") from error
                if self.world.size > 1:  # the other processes wait in an exchange that will never come
                    raise TrainingError(
                        f"step {state.step}: out of memory on process {self.world.rank} with micro-batches of "
                        f"{state.micro_batch_size}; start a new run with a smaller train.micro_batch_size"
                    ) from error
                self._halve(state)

    def settle(self, state: TrainState) -> tuple[float, int, float]:
        """Wait for the device. (summed loss, targets, last gradient norm) of the window, with every step checked."""
        self._read_flag(state)
        loss, targets = self.window
        return float(loss), targets, float(self._norm)

    def reset_window(self) -> None:
        self.window = (torch.zeros_like(self.window[0]), 0)

    def _step(self, state: TrainState) -> None:
        step, micro = state.step, state.micro_batch_size
        first = step * self.config.train.batch_size + self.world.rank * self.share
        torch.manual_seed(stream(self.config.seed, step, self.world.rank))
        targets = self._targets(step)
        summed = torch.zeros((), dtype=torch.float64, device=self.world.device)
        for start in range(0, self.share, micro):
            batch = self._batch(first + start, micro)
            with without_sync(self.module, last=start + micro == self.share):
                with self.autocast:
                    loss = self.module(**batch)
                if start == 0:
                    self._read_flag(state)
                    self.optimizer.zero_grad(set_to_none=True)
                # The exchange between processes averages; this makes it the mean over all targets of the global batch.
                torch.autograd.backward(loss * (self.world.size / targets))
            summed += loss.detach()
        self._norm = self._gradient_norm()
        self._update(state, summed)

    def _update(self, state: TrainState, summed: Tensor) -> None:
        clip = self.config.optimizer.clip
        bad = ~torch.isfinite(self._norm)
        if self._cuda:
            optimizer: Any = self.optimizer
            optimizer.grad_scale = torch.clamp(self._norm / clip, min=1.0).nan_to_num(1.0) if clip else None
            optimizer.found_inf = bad.float()
            self.optimizer.step()
            flag = torch.empty((), dtype=torch.bool, pin_memory=True)
            flag.copy_(bad, non_blocking=True)
            done = torch.cuda.Event()  # type: ignore[no-untyped-call]
            done.record()
            self._unread = (state.step, flag, done)
        elif bool(bad):
            self._refuse(state, state.step)
        else:
            if clip:
                scale = torch.clamp(clip / (self._norm + 1e-6), max=1.0)
                torch._foreach_mul_(self._gradients(), scale)
            self.optimizer.step()
        self.window = (self.window[0] + torch.where(bad, 0.0, summed), self.window[1] + self._targets(state.step))

    def _read_flag(self, state: TrainState) -> None:
        """Learn whether the step before was refused by the device."""
        if self._unread is None:
            return
        step, flag, done = self._unread
        self._unread = None
        done.synchronize()
        if bool(flag):
            self._refuse(state, step)

    def _refuse(self, state: TrainState, step: int) -> None:
        """A non-finite gradient: the weights were not touched. Count it if that is allowed, else stop and name it."""
        state.skipped += 1
        self.window = (self.window[0], self.window[1] - self._targets(step))  # its loss is in no mean
        names = [
            name
            for name, parameter in self.model.named_parameters()
            if parameter.grad is not None and not bool(torch.isfinite(_local(parameter.grad)).all())
        ]
        first = step * self.config.train.batch_size
        where = f"step {step} (samples {first} to {first + self.config.train.batch_size - 1} of the run)"
        what = f"non-finite gradient in {', '.join(names[:3]) or 'the loss'}{' and more' if len(names) > 3 else ''}"
        if state.skipped > self.config.train.skip_nonfinite:
            saved = list_checkpoints(self.config.folder / "checkpoints")
            kept = f"the last checkpoint is {saved[-1].name}" if saved else "there is no checkpoint"
            raise TrainingError(
                f"{where}: {what}. This step did not touch the weights, and {kept}; lower the learning rate, or allow "
                "some with train.skip_nonfinite"
            )
        state.notes.append(f"{where}: {what}; the step was skipped")

    def _gradients(self) -> list[Tensor]:
        return [p.grad for group in self.optimizer.param_groups for p in group["params"] if p.grad is not None]

    def _gradient_norm(self) -> Tensor:
        norm = torch.nn.utils.get_total_norm(self._gradients())
        gather = getattr(norm, "full_tensor", None)
        return cast(Tensor, gather()) if gather is not None else norm

    def _targets(self, step: int) -> int:
        """How many predictions the global batch of a step asks for: every process knows without asking the others."""
        batch = self.config.train.batch_size
        return self.task.targets(step * batch, batch)

    def _batch(self, first: int, count: int) -> Batch:
        return self._to_device(self.task.batch(first, count))

    def _to_device(self, batch: Batch) -> Batch:
        """A batch on the device; a copy to a GPU overlaps with what it is doing."""
        if not self._cuda:
            return batch
        return {name: rows.pin_memory().to(self.world.device, non_blocking=True) for name, rows in batch.items()}

    def _halve(self, state: TrainState) -> None:
        self.optimizer.zero_grad(set_to_none=True)
        if self._cuda:
            torch.cuda.empty_cache()
        old, state.micro_batch_size = state.micro_batch_size, state.micro_batch_size // 2
        while self.share % state.micro_batch_size:
            state.micro_batch_size -= 1
        state.notes.append(
            f"step {state.step}: out of memory with micro-batches of {old}; now {state.micro_batch_size}, the global "
            f"batch is the same; {UNCOMPARABLE_TIMES}"
        )

    def _probe_memory(self, state: TrainState) -> None:
        """Try one backward pass before training, and halve the micro-batch on all processes until it fits on all.

        Not for a sharded model: its passes exchange weights, so one process without memory leaves the others waiting.
        """
        while True:
            failed = False
            try:
                with self._scratch():
                    batch = self._to_device(self.task.largest(state.micro_batch_size))
                    with without_sync(self.module, last=False), self.autocast:
                        torch.autograd.backward(self.module(**batch))
            except torch.OutOfMemoryError:
                failed = True
            if not self.world.any(failed):
                return
            if state.micro_batch_size == 1:
                raise TrainingError(_TOO_LARGE)
            self._halve(state)

    def _rehearse(self, state: TrainState) -> None:
        """One pass whose gradients are exchanged and thrown away.

        DDP lays out its buckets anew after its first pass, and over three or more processes the order in which a sum is
        taken depends on that. From here on a run that was cut and one that was not have the same layout.
        """
        with self._scratch(), self.autocast:
            torch.autograd.backward(self.module(**self._batch(0, state.micro_batch_size)))

    @contextmanager
    def _scratch(self) -> Iterator[None]:
        try:
            yield
        finally:
            self.optimizer.zero_grad(set_to_none=True)


def share_of(config: RunConfig, world: World) -> int:
    """How many sequences of each global batch are this process's."""
    batch = config.train.batch_size
    if batch % world.size:
        raise ConfigError(
            f"train.batch_size {batch} cannot be shared equally by {world.size} processes: use a multiple of that"
        )
    return batch // world.size


def stream(seed: int, step: int, rank: int) -> int:
    """The seed of everything random in one step of one process, so that no random state needs saving."""
    digest = hashlib.sha256(f"{seed}\0{step}\0{rank}".encode()).digest()
    return int.from_bytes(digest[:7], "big")


def _local(tensor: Tensor) -> Tensor:
    return cast(Tensor, getattr(tensor, "_local_tensor", tensor))
