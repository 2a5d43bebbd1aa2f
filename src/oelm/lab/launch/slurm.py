"""Start runs as Slurm jobs, through submitit: queued, signalled before their time is up, saved, requeued and resumed.

In a job, submitit ignores SIGTERM and requeues on SIGUSR2. While a run trains, oelm's own handlers are installed: the
first signal finishes the step and saves. A run that SIGUSR2 stopped then raises the signal again for submitit, which
requeues the job. A run that SIGTERM stopped was asked to stop, or is requeued by Slurm itself.
"""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

from ...base.plugin import load_plugin, loaded_plugin
from ...errors import LabError, first_line
from ..status import read_state
from .interface import LaunchInfo

# How often a job may be requeued because its time was up.
_MAX_TIMEOUTS = 1000
# Slurm's names for the states of a job that has not ended.
_UNFINISHED = ("PENDING", "RUNNING", "REQUEUED", "CONFIGURING", "COMPLETING", "SUSPENDED", "PREEMPTED", "UNKNOWN")


@dataclass(frozen=True)
class TrainJob:
    """The function that a job calls: it trains one run. submitit pickles it, so it holds only plain values.

    `plugin` is the path of the file that the user named on the command line, which a job does not go through.
    """

    config: str
    tasks: int = 1
    plugin: str | None = None

    def __call__(self) -> str:
        from ...config import RunConfig
        from ...runs.schema import Status, read
        from ...training.engine import Stopped, train

        if self.tasks > 1:
            from submitit.helpers import TorchDistributedEnvironment

            TorchDistributedEnvironment().export()
        if self.plugin is not None:
            load_plugin(self.plugin)
        config = RunConfig.load(self.config)
        try:
            train(config, quiet=True)
        except Stopped:
            if read(config.folder / "status.json", Status).signal == signal.SIGUSR2.name:
                signal.raise_signal(signal.SIGUSR2)  # submitit's handler is installed again: it requeues the job
            return "stopped"
        return "finished"

    def checkpoint(self) -> Any:
        """Return what submitit requeues: the same run, which resumes from its last checkpoint."""
        import submitit

        return submitit.helpers.DelayedSubmission(self)


@dataclass
class SlurmJob:
    """A job in the queue, or in submitit's local stand-in for one."""

    job: Any
    info: LaunchInfo

    def poll(self) -> int | None:
        if not self.job.done(force_check=False):
            return None
        if self.job.state.startswith("CANCELLED") and not self.job.paths.result_pickle.exists():
            return -signal.SIGTERM  # a cancelled job leaves no result; submitit would wait for one
        try:
            self.job.result()
        except Exception:  # noqa: BLE001 - whatever the job raised is raised here; the run's record has the reason
            return 1
        return 0

    def stop(self) -> None:
        """Cancel a job that waits; send SIGTERM, through Slurm, to one that trains: it saves and ends.

        A job that has started but does not train yet is cancelled too: until then submitit ignores SIGTERM.
        """
        if self.info.launcher == "slurm":
            run = self.info.run
            not_training = self.job.state == "PENDING" or (run is not None and not read_state(Path(run)).live)
            options = [] if not_training else ["--signal=TERM"]
            subprocess.run(["scancel", *options, str(self.job.job_id)], check=False)
        elif self.job._process is not None:
            self.job._process.send_signal(signal.SIGTERM)


@dataclass
class SlurmLauncher:
    """Submits runs, at most `slots` at once. `cluster` is "slurm", or "local" for submitit's stand-in."""

    executor: Any
    cluster: str
    folder: Path
    slots: int
    tasks: int = 1
    _jobs: list[SlurmJob] = field(default_factory=list)

    def ready(self, orphans: Sequence[LaunchInfo]) -> bool:
        self._jobs = [job for job in self._jobs if job.poll() is None]
        return len(self._jobs) < self.slots

    def start(self, config: Path, folder: Path, lock: TextIO, orphans: Sequence[LaunchInfo]) -> SlurmJob:
        # A job may run on another machine, where it cannot inherit the lock. The job's id in the run's folder keeps
        # another matrix from starting the run again.
        import submitit

        plugin = loaded_plugin()
        try:
            job = self.executor.submit(TrainJob(str(config), self.tasks, None if plugin is None else str(plugin.path)))
        except submitit.core.utils.FailedJobError as error:
            raise LabError(f"sbatch refused the job: {' '.join(str(error).split())}") from None
        info = LaunchInfo(launcher=self.cluster, job=str(job.job_id), folder=str(self.folder), run=str(folder))
        self._jobs.append(SlurmJob(job, info))
        return self._jobs[-1]

    def lost(self, gpus: Sequence[str]) -> list[str]:
        """Return nothing: Slurm itself leaves out what it cannot use."""
        return []

    def attach(self, info: LaunchInfo) -> SlurmJob | None:
        if info.launcher != "slurm" or self.cluster != "slurm":
            return None
        import submitit

        job = submitit.SlurmJob(folder=info.folder, job_id=info.job, tasks=list(range(self.tasks)))
        if job.state.split()[0] not in _UNFINISHED or job.done():
            return None
        self._jobs.append(SlurmJob(job, info))  # it takes a slot like the jobs that this process submitted
        return self._jobs[-1]


@dataclass(frozen=True, kw_only=True)
class SlurmOptions:
    """What a job asks Slurm for.

    gpus        GPUs per run, with one process on each; 0 for one process on the CPU
    minutes     time until the job is requeued
    cpus        cores per process
    warning     seconds before the end of that time at which the job gets SIGUSR2, to save
    extra       more options of sbatch, such as {"account": "lab", "constraint": "a100"}
    """

    partition: str | None = None
    gpus: int = 1
    minutes: int = 480
    cpus: int = 4
    warning: int = 300
    extra: Mapping[str, str] = field(default_factory=dict)


def slurm_launcher(folder: Path, options: SlurmOptions, jobs: int = 64, cluster: str = "slurm") -> SlurmLauncher:
    """Return a launcher that submits at most `jobs` runs at once, with submitit's files below `folder`."""
    try:
        import submitit
    except ImportError:
        raise LabError("the Slurm launcher needs submitit: pip install 'oelm[slurm]'") from None
    if cluster == "slurm" and options.minutes * 60 <= options.warning:
        raise LabError(
            f"--time {options.minutes}: a job is told to save {options.warning // 60} minutes before its time is up, "
            "which would be at its start; give it more time"
        )
    submitit_folder = folder / "submitit"
    try:
        executor = submitit.AutoExecutor(
            folder=str(submitit_folder / "%j"),
            cluster=cluster,
            slurm_max_num_timeout=_MAX_TIMEOUTS,
            local_max_num_timeout=_MAX_TIMEOUTS,
        )
    except RuntimeError as error:
        raise LabError(f"there is no Slurm here ({first_line(error)}); use --launcher local") from None
    try:
        # submitit's local stand-in leaves out what begins with "slurm".
        executor.update_parameters(
            name="oelm",
            nodes=1,
            tasks_per_node=max(1, options.gpus),
            gpus_per_node=options.gpus,
            timeout_min=options.minutes,
            slurm_partition=options.partition,
            slurm_cpus_per_task=options.cpus,
            slurm_signal_delay_s=options.warning,
            slurm_additional_parameters={"requeue": True, "open_mode": "append", **options.extra},
        )
    except (NameError, ValueError) as error:
        raise LabError(f"Slurm options: {first_line(error)}") from None
    os.environ.setdefault("OMP_NUM_THREADS", str(options.cpus))
    return SlurmLauncher(executor, cluster, submitit_folder, jobs, max(1, options.gpus))
