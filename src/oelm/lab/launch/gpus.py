"""Which GPUs runs may use: those that are free, or that the user names, as long as nvidia-smi still lists them."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Sequence
from pathlib import Path

from ...errors import LabError

# A GPU with a larger share of its memory in use than this is not free.
_MEMORY_IN_USE = 0.1
# One of these files exists where a GPU has a driver: CUDA's, that of Windows under WSL, and ROCm's.
_DRIVERS = ("/dev/nvidiactl", "/dev/dxg", "/dev/kfd")
_RANGE = re.compile(r"(\d+)-(\d+)")
# Seconds after which nvidia-smi, which may hang on a GPU that is gone, counts as failed.
_PATIENCE = 60


def choose_gpus(text: str | None) -> list[str]:
    """Return the names of the GPUs to use, none for the CPU.

    `text` lists them, as in "0,1" or "0-3"; None stands for all that are free, "" for the CPU. A machine without a GPU
    uses the CPU.
    """
    visible = _visible_gpus()
    if not visible or text == "":
        if text:
            raise LabError(f"--gpus {text}: torch sees no GPU on this machine; leave the option out to use the CPU")
        return []
    return _free_gpus(visible) if text is None else _named_gpus(text, visible)


def uuids(names: Sequence[str]) -> dict[str, str]:
    """Return the UUID of each of these GPUs that nvidia-smi lists; none if it cannot be run.

    The number of a GPU may become another's when one disappears; its UUID does not.
    """
    try:
        rows = _query("index,uuid")
    except (OSError, subprocess.SubprocessError):
        return {}
    known = {name: row[-1] for row in rows if len(row) == 2 for name in row}
    return {name: known[name] for name in names if name in known}


def why_gone(uuid: str) -> str:
    """Return how it shows that a GPU that was there has disappeared, or an empty string if it has not."""
    try:
        if [uuid] in _query("uuid", "-i", uuid):
            return ""
    except subprocess.TimeoutExpired:
        return "nvidia-smi gives no answer about it"
    except subprocess.CalledProcessError as error:
        reason = (error.stdout + error.stderr).strip().splitlines()
        return f"nvidia-smi fails on it ({reason[-1]})" if reason else "nvidia-smi fails on it"
    except OSError:  # nvidia-smi itself is gone, which says nothing about the GPU
        return ""
    return "nvidia-smi no longer lists it"


def _visible_gpus() -> list[str]:
    """Return the GPUs of this machine, by the names that CUDA_VISIBLE_DEVICES gives them."""
    if not any(Path(device).exists() for device in _DRIVERS):
        return []  # without importing torch, which takes seconds
    import torch

    count = torch.cuda.device_count()
    listed = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = [str(number) for number in range(count)] if listed is None else _split(listed)
    return names[:count]


def _named_gpus(text: str, visible: list[str]) -> list[str]:
    names = [name for part in _split(text) for name in _numbers(part)]
    absent = [name for name in names if name not in visible]
    if absent or not names:
        raise LabError(
            f"--gpus {text}: there is no GPU {', '.join(absent) or text} here; there are {', '.join(visible)}"
        )
    if len(set(names)) < len(names):
        raise LabError(f"--gpus {text}: names a GPU twice; for several runs on one GPU use --jobs")
    return names


def _numbers(part: str) -> list[str]:
    """Return the names that a part of a list stands for: "0-3" for four of them, any other name for itself."""
    match = _RANGE.fullmatch(part)
    return [part] if match is None else [str(number) for number in range(int(match[1]), int(match[2]) + 1)]


def _split(text: str) -> list[str]:
    return [name.strip() for name in text.split(",")]


def _free_gpus(visible: list[str]) -> list[str]:
    """Return the GPUs that are not in use, as far as nvidia-smi can tell."""
    busy = _busy_gpus()
    free = [name for name in visible if name not in busy]
    if not free:
        raise LabError(f"all GPUs here ({', '.join(visible)}) are in use; name some with --gpus to share them")
    return free


def _busy_gpus() -> set[str]:
    """Return the indices and UUIDs of GPUs whose memory is in use; none if nvidia-smi cannot be run."""
    # Asking torch would create a context on every GPU, which takes memory for as long as this process lives.
    try:
        rows = _query("index,uuid,memory.used,memory.total")
        return {name for *names, used, total in rows for name in names if float(used) > _MEMORY_IN_USE * float(total)}
    except (OSError, subprocess.SubprocessError, ValueError):
        return set()


def _query(fields: str, *options: str) -> list[list[str]]:
    """Return a row of cells for each GPU, as nvidia-smi prints them."""
    command = ["nvidia-smi", *options, f"--query-gpu={fields}", "--format=csv,noheader,nounits"]
    output = subprocess.run(command, capture_output=True, text=True, timeout=_PATIENCE, check=True).stdout
    return [[cell.strip() for cell in line.split(",")] for line in output.splitlines()]
