"""Where the time of a step goes: the kernels that it launches, and their times, by torch's profiler."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from ..runs.schema import KernelTime

# Kinds of kernels by a part of their name, in lower case; the first that matches counts. The rest reads and writes
# tensors without products: norms, rotations, sums, copies.
_KINDS = {
    "attention": r"sdpa|fmha|flash|attention|_mix_part|join_parts|_attend_part|compute_dot_do_o|convert_dq",
    "matrix products": r"gemm|nvjet|cutlass|cublas|gemv|splitk|::(add|b|baddb)?mm\b|matmul|mm_kernel",
    "optimiser": r"adam|multi_tensor|foreach",
}
REST = "norms, sums, copies"
# The kernels that are listed one by one; the times of the others of a kind are added up.
_LISTED = 40
_LONGEST_NAME = 100


def profile_kernels(step: Callable[[], object], count: int, device: torch.device) -> list[KernelTime]:
    """Take some steps and return the time and the launches of every kernel in one of them, the longest first.

    On a CPU, torch's operations take the place of kernels. A profiled step may be slower than one that is timed.
    """
    on_gpu = device.type == "cuda"
    with profile(activities=[ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU]) as profiled:
        for _ in range(count):
            step()
        if on_gpu:
            torch.cuda.synchronize()
    events: Any = profiled.key_averages()
    kernels = [
        KernelTime(
            name=event.key[:_LONGEST_NAME],
            kind=kind_of(event.key),
            ms=(event.self_device_time_total if on_gpu else event.self_cpu_time_total) / 1000 / count,
            launches=event.count / count,
        )
        for event in events
    ]
    kernels = sorted((kernel for kernel in kernels if kernel.ms > 0), key=lambda kernel: -kernel.ms)
    return kernels[:_LISTED] + _summed(kernels[_LISTED:])


def kind_of(name: str) -> str:
    """Return the kind of a kernel by its name."""
    return next((kind for kind, pattern in _KINDS.items() if re.search(pattern, name.lower())), REST)


def _summed(kernels: list[KernelTime]) -> list[KernelTime]:
    """Return one entry for each kind of the kernels."""
    of_kind = {kind: [kernel for kernel in kernels if kernel.kind == kind] for kind in (*_KINDS, REST)}
    return [
        KernelTime(
            name=f"{len(members)} others",
            kind=kind,
            ms=sum(kernel.ms for kernel in members),
            launches=sum(kernel.launches for kernel in members),
        )
        for kind, members in of_kind.items()
        if members
    ]
