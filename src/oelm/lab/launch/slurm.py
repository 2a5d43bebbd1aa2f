"""Start runs as Slurm jobs, through submitit: queued, signalled before their time is up, saved, requeued and resumed.

In a job, submitit ignores SIGTERM and requeues on SIGUSR2. While a run trains, oelm's own handlers are installed: the
first signal finishes the step and saves. A run that SIGUSR2 stopped then raises the signal again for submitit, which
requeues the job. So does a run that SIGTERM stopped because its job is about to be preempted and has time to save. Any
other run that SIGTERM stopped was asked to stop, or is requeued by Slurm itself.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

from ...base.plugin import load_plugin, loaded_plugin
from ...errors import LabError, LaterError, first_line
from ...runs.folder import STOP
from ..status import read_state
from .interface import CONSOLE, TAKEN_AWAY, LaunchInfo
from .slurm_queue import FORGOTTEN, TAKEN, SlurmQueue, gets_preempted, has_ended

# How often a job may be requeued because its time was up.
_MAX_TIMEOUTS = 1000
# Words with which sbatch refuses a job that it may take later: a limit on the number of jobs, or a lost controller.
_REFUSED_FOR_NOW = (
    *("SubmitJob", "Resource temporarily unavailable", "temporarily unable to accept job"),
    *("Unable to contact slurm controller", "Socket timed out", "Zero Bytes were transmitted", "in standby mode"),
)
# Seconds after which such a job is offered again, unless a job ends before.
_REFUSAL_SECONDS = 30.0


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
            received = read(config.folder / "status.json", Status).signal
            if received == signal.SIGUSR2.name or (received == signal.SIGTERM.name and _gets_preempted()):
                signal.raise_signal(signal.SIGUSR2)  # submitit's handler is installed again: it requeues the job
            return "stopped"
        return "finished"

    def checkpoint(self) -> Any:
        """Return what submitit requeues: the same run, which resumes from its last checkpoint."""
        import submitit

        return submitit.helpers.DelayedSubmission(self)


def _gets_preempted() -> bool:
    job = os.environ.get("SLURM_JOB_ID") if os.environ.get("SUBMITIT_EXECUTOR") == "slurm" else None
    return job is not None and gets_preempted(job)


@dataclass
class SlurmJob:
    """A job in the queue. What Slurm says of it counts, not submitit's files: those of a job that was requeued stay."""

    info: LaunchInfo
    queue: SlurmQueue
    _exit_code: int | None = None

    def poll(self) -> int | None:
        if self._exit_code is None:
            state = self.queue.state(str(self.info.job))
            if has_ended(state):
                self._exit_code = self._ended_in(str(state))
            elif (Path(str(self.info.run)) / "result.json").is_file():
                # A job that ended while the controller was away may be said to run for minutes. A result comes last.
                self._exit_code = 0
        return self._exit_code

    def _ended_in(self, state: str) -> int:
        """Return the exit code that stands for a job's last state; note an unusual one where the run's output goes."""
        if state == "COMPLETED":
            return 0
        if state == "CANCELLED":
            return -signal.SIGTERM
        run = Path(str(self.info.run))
        if run.is_dir() and not (run / "result.json").exists():
            ended = "is not known to Slurm any more" if state == FORGOTTEN else f"ended as {state}"
            with open(run / CONSOLE, "a", encoding="utf-8") as console:
                console.write(f"Slurm job {self.info.job} {ended}; its output is in {self.info.folder}\n")
        return TAKEN_AWAY if state in TAKEN else 1

    def stop(self) -> None:
        """Cancel a job that waits; send SIGTERM, through Slurm, to one that trains: it saves and ends.

        A job that has started but does not train yet is cancelled too: until then submitit ignores SIGTERM. Where Slurm
        does not answer, a file asks the run, which looks for it whenever it logs.
        """
        run, state = Path(str(self.info.run)), self.queue.state(str(self.info.job))
        if state is None:
            (run / STOP).touch()
            return
        options = ["--signal=TERM"] if state != "PENDING" and read_state(run).live else []
        subprocess.run(["scancel", *options, str(self.info.job)], check=False)


@dataclass
class StandInJob:
    """A job of submitit's local stand-in for Slurm: a process of this machine."""

    job: Any
    info: LaunchInfo

    def poll(self) -> int | None:
        if not self.job.done(force_check=False):
            return None
        try:
            self.job.result()
        except Exception:  # noqa: BLE001 - whatever the job raised is raised here; the run's record has the reason
            return 1
        return 0

    def stop(self) -> None:
        if self.job._process is not None:
            self.job._process.send_signal(signal.SIGTERM)


@dataclass
class SlurmLauncher:
    """Submits runs, at most `slots` at once. `cluster` is "slurm", or "local" for submitit's stand-in."""

    executor: Any
    cluster: str
    folder: Path
    slots: int
    tasks: int = 1
    queue: SlurmQueue = field(default_factory=SlurmQueue)
    _jobs: list[SlurmJob | StandInJob] = field(default_factory=list)
    _refused_until: float = 0.0  # time.monotonic()

    def ready(self, orphans: Sequence[LaunchInfo]) -> bool:
        running = [job for job in self._jobs if job.poll() is None]
        if len(running) < len(self._jobs):
            self._refused_until = 0.0  # a job has ended, so a limit on the number of jobs has room for another
        self._jobs = running
        return len(self._jobs) < self.slots and time.monotonic() >= self._refused_until

    def start(self, config: Path, folder: Path, lock: TextIO, orphans: Sequence[LaunchInfo]) -> SlurmJob | StandInJob:
        # A job may run on another machine, where it cannot inherit the lock. The job's id in the run's folder keeps
        # another matrix from starting the run again.
        import submitit

        plugin = loaded_plugin()
        try:
            job = self.executor.submit(TrainJob(str(config), self.tasks, None if plugin is None else str(plugin.path)))
        except (submitit.core.utils.FailedJobError, submitit.core.utils.FailedSubmissionError) as error:
            message = " ".join(str(error).split())
            if any(words in message for words in _REFUSED_FOR_NOW):
                raise self._later(f"Slurm takes no job now, it is offered again: {message}") from None
            raise LabError(f"sbatch refused the job: {message}") from None
        files = str(self.folder / str(job.job_id))
        info = LaunchInfo(launcher=self.cluster, job=str(job.job_id), folder=files, run=str(folder))
        self._jobs.append(SlurmJob(info, self.queue) if self.cluster == "slurm" else StandInJob(job, info))
        return self._jobs[-1]

    def lost(self, gpus: Sequence[str]) -> list[str]:
        """Return nothing: Slurm itself leaves out what it cannot use."""
        return []

    def attach(self, info: LaunchInfo) -> SlurmJob | None:
        if info.launcher != "slurm" or self.cluster != "slurm" or info.job is None:
            return None
        state = self.queue.state(info.job)
        if state is None:
            raise self._later(f"Slurm does not say how job {info.job} of this run is, it is asked again")
        if has_ended(state):
            return None
        job = SlurmJob(info, self.queue)
        self._jobs.append(job)  # it takes a slot like the jobs that this process submitted
        return job

    def _later(self, reason: str) -> LaterError:
        self._refused_until = time.monotonic() + _REFUSAL_SECONDS
        return LaterError(reason)


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
