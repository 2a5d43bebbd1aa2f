"""What a result depends on: its settings, versions, hardware, plugin, and the commit of the code."""

from __future__ import annotations

import os
import platform
import shlex
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from .. import __version__
from ..base.files import read_json
from ..base.plugin import VARIABLE, loaded_plugin
from ..config import RunConfig
from ..errors import ConfigError
from .schema import (
    BenchOrigin,
    Cpu,
    DataRecord,
    Environment,
    Gpu,
    PlanRecord,
    PluginRecord,
    RecordedConfig,
    Versions,
    read,
    read_optional,
)

# End of a recorded commit if the code was changed since then.
CHANGED = "-dirty"


def environment(data: DataRecord, device: str, world_size: int, plan: PlanRecord | None = None) -> Environment:
    """Return the versions, hardware, code and data of this process: all that results depend on beside the config.

    `plan` is the plan that the run was started for.
    """
    import torch

    gpu = None
    if device == "cuda":
        properties = torch.cuda.get_device_properties(0)
        gpu = Gpu(name=properties.name, memory=properties.total_memory, cuda=torch.version.cuda)
    plugin = loaded_plugin()
    return Environment(
        versions=_versions(),
        git_commit=git_commit(),
        system=platform.platform(),
        cpu=Cpu(count=os.cpu_count(), machine=platform.machine(), threads=torch.get_num_threads()),
        gpu=gpu,
        device=device,
        world_size=world_size,
        data=data,
        plugin=None if plugin is None else PluginRecord(name=plugin.path.name, sha256=plugin.sha256),
        plan=plan,
    )


def plan_of(config: RunConfig, resumed: bool) -> PlanRecord | None:
    """Return the plan that a run was started for. A resumed run keeps that of its start, which it may have had without.

    So a run that was begun before a plan does not become a run of that plan.
    """
    if resumed:
        recorded = read_optional(config.folder / "environment.json", Environment)
        return None if recorded is None else recorded.plan
    mark = config.log.plan
    return None if mark is None else PlanRecord(name=mark.name, sha256=mark.sha256)


def require_plugin(run: Path) -> None:
    """Raise where a run was made with a plugin and this process has none: its model may not even be known without it.

    It is not run from here: what a run's folder says must not decide which code runs.
    """
    recorded = read_optional(run / "environment.json", Environment)
    if recorded is not None and recorded.plugin is not None and loaded_plugin() is None:
        raise ConfigError(
            f"{run}: was made with the plugin {recorded.plugin.name}, and none is loaded; name the file, as in "
            f"oelm --plugin {recorded.plugin.name} ..., or in {VARIABLE}"
        )


def is_run(folder: Path) -> bool:
    """Return True for a run's folder. A model's folder has a config.json too, but not one of a run."""
    config = folder / "config.json"
    content = read_json(config) if config.is_file() else None
    return isinstance(content, dict) and "experiment" in content


def config_of(run: Path) -> RunConfig:
    """Return the config that a run's folder records. Raise where the run needs a plugin that is not loaded."""
    if not is_run(run):
        raise ConfigError(f"{run}: not a run's folder; it has no config.json that `oelm train` wrote")
    require_plugin(run)
    return read(run / "config.json", RecordedConfig).config


def bench_origin(arguments: Sequence[str]) -> BenchOrigin:
    """Return where a benchmark with these arguments of `oelm` is made: on the GPU where there is one."""
    import torch

    device = torch.cuda.get_device_name(0) if torch.cuda.is_available() else platform.processor() or platform.machine()
    command, clock = shlex.join(["oelm", *arguments]), _gpu_clock() if torch.cuda.is_available() else None
    return BenchOrigin(command=command, git_commit=git_commit(), device=device, clock_mhz=clock, versions=_versions())


def _gpu_clock() -> int | None:
    """Return the clock rate of the GPU's cores now, in MHz, as its driver's tool tells it; None without the tool."""
    query = ["nvidia-smi", "--query-gpu=clocks.sm", "--format=csv,noheader,nounits", "--id=0"]
    with suppress(OSError, subprocess.SubprocessError, ValueError):
        return int(subprocess.run(query, capture_output=True, text=True, check=True, timeout=10).stdout.strip())
    return None


def _versions() -> Versions:
    import numpy
    import tokenizers
    import torch
    import transformers

    return Versions(
        oelm=__version__,
        python=platform.python_version(),
        torch=str(torch.__version__),
        transformers=transformers.__version__,
        tokenizers=tokenizers.__version__,
        numpy=numpy.__version__,
    )


def git_commit() -> str | None:
    """Return the commit of the running code, marked if it was changed since; None outside a checkout.

    Where this package is installed below another project's checkout, git does not track this file, and that project's
    commit is not recorded.
    """
    this_file = Path(__file__)
    tracked = _git("ls-files", "--error-unmatch", this_file.name, cwd=this_file.parent)
    return tracked and _git("describe", "--always", f"--dirty={CHANGED}", "--abbrev=40", cwd=this_file.parent)


def _git(*arguments: str, cwd: Path) -> str | None:
    """Return the output of a git command, or None if it fails or prints nothing."""
    try:
        command = subprocess.run(["git", *arguments], cwd=cwd, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return command.stdout.strip() or None if command.returncode == 0 else None
