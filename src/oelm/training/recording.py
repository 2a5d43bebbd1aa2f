"""Record the kernels of a training step as a CUDA graph, once for each shape of batch, and launch them together.

A small step takes the GPU less time than its host needs to launch a thousand kernels. A graph is launched as one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from ..errors import first_line
from .tasks.base import Batch

# The names and shapes of the micro-batches of a step.
Shapes = tuple[tuple[tuple[str, torch.Size], ...], ...]


def shapes_of(batches: list[Batch]) -> Shapes:
    """Return the names and shapes of a step's micro-batches."""
    return tuple(tuple((name, rows.shape) for name, rows in batch.items()) for batch in batches)


class Recordings:
    """The recorded steps of a stepper. `work` does a step's work on the device, and returns tensors with its outcome.

    A shape's first step is launched kernel by kernel: libraries choose their kernels then, and code is compiled. The
    second one is recorded, which runs nothing, and launched from its recording, as are all later ones. Nothing is
    recorded any more after a step that could not be.
    """

    def __init__(self, work: Callable[[list[Batch]], Any], optimizer: Optimizer) -> None:
        self._work, self._optimizer = work, optimizer
        self._memory = torch.cuda.graph_pool_handle()  # one recording runs at a time, so they all share it
        self._seen: set[Shapes] = set()
        self._recordings: dict[Shapes, Recording] = {}
        self._failed = False

    def find(self, batches: list[Batch], notes: list[str], step: int) -> Recording | None:
        """Return the recording for batches of these shapes, or None where the step has none; note a failure."""
        shapes = shapes_of(batches)
        if shapes not in self._seen or self._failed:
            self._seen.add(shapes)
            return None
        if shapes not in self._recordings:
            try:
                self._recordings[shapes] = self._record(batches)
            except RuntimeError as error:
                self._failed = True
                self._optimizer.zero_grad(set_to_none=True)
                notes.append(f"step {step}: its kernels are launched one by one; recording failed: {first_line(error)}")
                return None
        return self._recordings[shapes]

    def _record(self, batches: list[Batch]) -> Recording:
        device = self._optimizer.param_groups[0]["params"][0].device
        inputs = [{name: rows.to(device) for name, rows in batch.items()} for batch in batches]
        self._optimizer.zero_grad(set_to_none=True)  # the recording's gradients are in memory of its own
        graph = torch.cuda.CUDAGraph()
        generator = torch.cuda.default_generators[device.index]
        random_state = generator.clone_state()
        self._allow_recording(True)
        try:
            # The outer context goes back to this stream even where a recording fails. Other threads, such as a
            # tracker's, may use the device meanwhile.
            with (
                torch.cuda.stream(torch.cuda.current_stream(device)),
                torch.cuda.graph(graph, pool=self._memory, capture_error_mode="thread_local"),
            ):
                outcome = self._work(inputs)
        except RuntimeError:
            generator.graphsafe_set_state(random_state)  # this one still waits for the recording to end
            raise
        finally:
            self._allow_recording(False)
        return Recording(graph, inputs, outcome)

    def _allow_recording(self, allowed: bool) -> None:
        """Set torch's permission to record the optimiser; it would warn about each step outside a recording."""
        for group in self._optimizer.param_groups:
            group["capturable"] = allowed


class Recording:
    """A recorded step: the tensors that it reads its micro-batches from, and those that hold its outcome."""

    def __init__(self, graph: torch.cuda.CUDAGraph, inputs: list[dict[str, Tensor]], outcome: Any) -> None:
        self._graph, self._inputs, self._outcome = graph, inputs, outcome

    def launch(self, batches: list[Batch]) -> Any:
        """Take the step with these micro-batches and return its outcome, which the next launch overwrites."""
        for inputs, batch in zip(self._inputs, batches, strict=True):
            for name, rows in batch.items():
                inputs[name].copy_(rows.pin_memory(), non_blocking=True)
        self._graph.replay()
        return self._outcome
