"""Runs as Slurm jobs through submitit: queued, signalled before their time is up, saved, requeued, gone on with.

submitit ignores SIGTERM in a job and requeues on SIGUSR2. While a run trains, oelm's own handlers are in place: the
first signal finishes the step and saves. A run that SIGUSR2 stopped then hands the signal on to submitit, which puts
the job back into the queue; one that SIGTERM stopped was asked to stop, or is put back by Slurm itself.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

from ...errors import LabError, first_line
from ..status import look

# How often a job may be put back into the queue because its time was up.
_TIMEOUTS = 1000
_GOING_ON = ("PENDING", "RUNNING", "REQUEUED", "CONFIGURING", "COMPLETING", "SUSPENDED", "PREEMPTED", "UNKNOWN")


@dataclass(frozen=True)
class TrainJob:
    """What a job does: trains one run in its own process. submitit pickles it by its name and two fields."""

    config: str
    tasks: int = 1

    def __call__(self) -> str:
        from ...base.files import read_json
        from ...config import RunConfig
        from ...training.engine import Stopped, train

        if self.tasks > 1:
            from submitit.helpers import TorchDistributedEnvironment

            TorchDistributedEnvironment().export()
        config = RunConfig.load(self.config)
        try:
            train(config, quiet=True)
        except Stopped:
            if read_json(config.folder / "status.json").get("signal") == signal.SIGUSR2.name:
                signal.raise_signal(signal.SIGUSR2)  # submitit's handler is back in place: it requeues the job
            return "stopped"
        return "finished"

    def checkpoint(self) -> Any:
        """What submitit puts back into the queue: the same run, which goes on from its last checkpoint."""
        import submitit

        return submitit.helpers.DelayedSubmission(self)


@dataclass
class SlurmJob:
    """A job in the queue, or in submitit's stand-in for one on this machine."""

    job: Any
    about: dict[str, Any]

    def poll(self) -> int | None:
        if not self.job.done(force_check=False):
            return None
        if self.job.state.startswith("CANCELLED") and not self.job.paths.result_pickle.exists():
            return -signal.SIGTERM  # it left no result, for which submitit would wait
        try:
            self.job.result()
        except Exception:  # noqa: BLE001 - whatever a job raised comes back here; its run's record says what it was
            return 1
        return 0

    def stop(self) -> None:
        """A job that waits is cancelled; one that trains gets SIGTERM through its scheduler, saves and ends.

        One that has not begun to train is cancelled too: submitit, which has the signals until then, ignores SIGTERM.
        """
        if self.about["launcher"] == "slurm":
            import subprocess

            run = self.about.get("run")
            unbegun = self.job.state == "PENDING" or (run is not None and not look(Path(run)).live)
            how = [] if unbegun else ["--signal=TERM"]
            subprocess.run(["scancel", *how, str(self.job.job_id)], check=False)
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

    def ready(self, busy: Sequence[dict[str, Any]]) -> bool:
        self._jobs = [job for job in self._jobs if job.poll() is None]
        return len(self._jobs) < self.slots

    def start(self, config: Path, folder: Path, lock: TextIO, busy: Sequence[dict[str, Any]]) -> SlurmJob:
        # A job may run on another machine: that no other runner takes this run is up to the job's id in its folder.
        import submitit

        try:
            job = self.executor.submit(TrainJob(str(config), self.tasks))
        except submitit.core.utils.FailedJobError as error:
            raise LabError(f"sbatch refused it: {' '.join(str(error).split())}") from None
        about = {"launcher": self.cluster, "job": str(job.job_id), "folder": str(self.folder), "run": str(folder)}
        self._jobs.append(SlurmJob(job, about))
        return self._jobs[-1]

    def attach(self, about: dict[str, Any]) -> SlurmJob | None:
        if about.get("launcher") != "slurm" or self.cluster != "slurm":
            return None
        import submitit

        job = submitit.SlurmJob(folder=about["folder"], job_id=about["job"], tasks=list(range(self.tasks)))
        if job.state.split()[0] not in _GOING_ON or job.done():
            return None
        self._jobs.append(SlurmJob(job, about))  # one of the `slots`, like those that this process started
        return self._jobs[-1]


def slurm_launcher(
    folder: Path,
    *,
    cluster: str = "slurm",
    partition: str | None = None,
    gpus: int = 1,
    minutes: int = 480,
    cpus: int = 4,
    warning: int = 300,
    jobs: int = 64,
    extra: dict[str, Any] | None = None,
) -> SlurmLauncher:
    """A launcher for a cluster. Each run gets one process per GPU, and SIGUSR2 `warning` seconds before its end.

    `extra` are more of sbatch's options, such as {"account": "lab", "constraint": "a100"}.
    """
    try:
        import submitit
    except ImportError:
        raise LabError("the Slurm launcher needs submitit: pip install 'oelm[slurm]'") from None
    if cluster == "slurm" and minutes * 60 <= warning:
        raise LabError(
            f"--time {minutes}: a job is told to save {warning // 60} minutes before its time is up, and this one "
            "would be at its start; give it more time"
        )
    place = folder / "submitit"
    try:
        executor = submitit.AutoExecutor(
            folder=str(place / "%j"), cluster=cluster, slurm_max_num_timeout=_TIMEOUTS, local_max_num_timeout=_TIMEOUTS
        )
    except RuntimeError as error:
        raise LabError(f"there is no Slurm here ({first_line(error)}); use --launcher local") from None
    tasks = max(1, gpus)
    common: dict[str, Any] = {
        "timeout_min": minutes,
        "tasks_per_node": tasks,
        "gpus_per_node": gpus,
        "nodes": 1,
        "name": "oelm",
    }
    if cluster == "slurm":
        more: dict[str, Any] = {"slurm_partition": partition, "slurm_signal_delay_s": warning, "cpus_per_task": cpus}
        more |= {"slurm_additional_parameters": {"requeue": True, "open_mode": "append", **(extra or {})}}
        common |= {key: value for key, value in more.items() if value is not None}
    try:
        executor.update_parameters(**common)
    except (NameError, ValueError) as error:
        raise LabError(f"Slurm options: {first_line(error)}") from None
    os.environ.setdefault("OMP_NUM_THREADS", str(cpus))
    return SlurmLauncher(executor, cluster, place, jobs, tasks)
