"""Runs as submitit jobs through its local executor: real processes, signals and requeuing, without a cluster."""

import os
import signal
from pathlib import Path

import pytest

from oelm.errors import LabError
from oelm.lab.launch.interface import LaunchInfo
from oelm.lab.launch.slurm import SlurmJob, SlurmOptions, TrainJob, slurm_launcher
from oelm.lab.matrix import Matrix
from oelm.lab.status import read_state
from tests.support.lab import count_finishes, line_appender, longer_config, plan, refusal, train_uninterrupted
from tests.support.training import metrics_without_times, result_without_times

submitit = pytest.importorskip("submitit")


@pytest.fixture(autouse=True)
def one_thread(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


@pytest.mark.full
@pytest.mark.timeout(300)
def test_a_preempted_job_is_requeued_and_resumes_exactly(tmp_path):
    """On SIGUSR2 the run saves, submitit requeues the job, and the second start resumes it."""
    (run,) = plan(tmp_path, axes={"seed": [0]}, config=longer_config(tmp_path, 400, checkpoint=1000))
    lines: list[str] = []
    signalled: list[int] = []

    def preempt(_: Matrix) -> None:
        state = read_state(run.folder)
        if not signalled and state.live and (state.step or 0) >= 6:
            signalled.append(state.pid)
            os.kill(state.pid, signal.SIGUSR2)

    launcher = slurm_launcher(tmp_path / "runs", SlurmOptions(gpus=0, minutes=5), cluster="local")
    assert Matrix([run], launcher, notify=line_appender(lines)).run(preempt) == {"finished": 1}, lines
    assert len(signalled) == 1
    log = (run.folder / "train.log").read_text()
    assert "stopped by SIGUSR2" in log
    assert "resumed from step" in log
    assert read_state(run.folder).pid != signalled[0], "another process finished it"
    assert count_finishes(run.folder) == 1
    (uninterrupted,) = train_uninterrupted([run], tmp_path / "uninterrupted").values()
    assert result_without_times(run.folder) == result_without_times(uninterrupted)
    assert metrics_without_times(run.folder) == metrics_without_times(uninterrupted)


@pytest.mark.full
@pytest.mark.timeout(300)
def test_a_job_that_is_asked_to_stop_is_not_requeued(tmp_path):
    (run,) = plan(tmp_path, axes={"seed": [0]}, config=longer_config(tmp_path, 2000, checkpoint=1000))

    def stop(_: Matrix) -> None:
        state = read_state(run.folder)
        if state.live and (state.step or 0) >= 3:
            from oelm.lab import control

            control.stop(state)

    launcher = slurm_launcher(tmp_path / "runs", SlurmOptions(gpus=0, minutes=5), cluster="local")
    assert Matrix([run], launcher).run(stop) == {"stopped": 1}
    assert read_state(run.folder).state == "stopped"


def test_a_requeued_job_trains_the_same_run():
    job = TrainJob("run.json")
    assert job.checkpoint().function == job


def test_without_slurm_the_launcher_is_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "no Slurm" in refusal(
        "matrix", "GPT-01", "--scale", "smoke", "--launcher", "slurm", "--out", tmp_path / "runs"
    )


def test_without_submitit_the_message_names_the_extra_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "submitit", None)
    with pytest.raises(LabError, match=r"pip install 'oelm\[slurm\]'"):
        slurm_launcher(tmp_path, SlurmOptions())


def test_the_sbatch_script_has_all_options(tmp_path, monkeypatch):
    """Partition, GPUs, time, the warning signal, requeuing, and the user's own options."""
    stub = tmp_path / "srun"
    stub.write_text("#!/bin/sh\n")
    stub.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    options = SlurmOptions(partition="long", gpus=2, minutes=90, cpus=3, warning=120, extra={"account": "lab"})
    launcher = slurm_launcher(tmp_path / "runs", options)
    script = launcher.executor._executor._make_submission_file_text("train", "id")
    for line in (
        "--partition=long",
        "--gpus-per-node=2",
        "--ntasks-per-node=2",
        "--cpus-per-task=3",
        "--time=90",
        "--signal=USR2@120",
        "--requeue",
        "--open-mode=append",
        "--account=lab",
    ):
        assert f"#SBATCH {line}\n" in script, line


def test_a_job_of_a_dead_matrix_is_attached_to_and_takes_a_slot(tmp_path, monkeypatch):
    launcher = slurm_launcher(tmp_path / "runs", SlurmOptions(gpus=0), jobs=1, cluster="local")
    launcher.cluster = "slurm"
    info = LaunchInfo(launcher="slurm", job="17", folder=str(tmp_path / "runs" / "submitit"))
    states = iter(["PENDING", "COMPLETED"])
    monkeypatch.setattr(submitit.SlurmJob, "state", property(lambda _: next(states)))
    monkeypatch.setattr(submitit.SlurmJob, "done", lambda *_, **__: False)
    assert launcher.ready([])
    assert launcher.attach(info).info == info
    assert not launcher.ready([])
    assert launcher.attach(info) is None
    assert launcher.attach(LaunchInfo(launcher="local", pid=3)) is None


class FakeJob:
    """Stands in for a submitit job that leaves no result."""

    job_id = "17"

    def __init__(self, state: str, folder: Path) -> None:
        self.state, self.paths = state, submitit.core.utils.JobPaths(folder, self.job_id)

    def done(self, force_check: bool = False) -> bool:
        return self.state.startswith("CANCELLED")

    def result(self) -> None:
        raise AssertionError("waited for a result, but a cancelled job leaves none")


class FakeQueue:
    """Launches a single job, which waits in a queue until it is cancelled."""

    slots = 1

    def __init__(self, job: FakeJob) -> None:
        self.job, self.starts = job, 0

    def ready(self, orphans) -> bool:
        return self.starts == 0

    def start(self, config, folder, lock, orphans) -> SlurmJob:
        self.starts += 1
        return SlurmJob(self.job, LaunchInfo(launcher="slurm", job=self.job.job_id, run=str(folder)))

    def attach(self, info) -> None:
        return None


def test_a_job_cancelled_in_the_queue_is_not_retried(tmp_path):
    (run,) = plan(tmp_path, axes={"seed": [0]})
    queue = FakeQueue(FakeJob("PENDING", tmp_path))
    lines: list[str] = []

    def cancel(_: Matrix) -> None:
        queue.job.state = "CANCELLED by 1000"

    assert Matrix([run], queue, retries=5, notify=line_appender(lines)).run(cancel) == {"stopped": 1}
    assert queue.starts == 1
    assert "its job was cancelled" in lines[-1]


@pytest.mark.parametrize("state", ["PENDING", "RUNNING"])
def test_a_stopped_matrix_cancels_jobs_that_do_not_train_yet(state, tmp_path, monkeypatch):
    """A job that is still importing is cancelled too: submitit ignores SIGTERM until then."""
    (run,) = plan(tmp_path, axes={"seed": [0]})
    queue = FakeQueue(FakeJob(state, tmp_path))
    scancel_calls: list[list[str]] = []

    def scancel(command, **_) -> None:
        scancel_calls.append(command)
        queue.job.state = "CANCELLED"

    monkeypatch.setattr("subprocess.run", scancel)
    matrix = Matrix([run], queue)
    assert matrix.run(lambda _: scancel_calls or os.kill(os.getpid(), signal.SIGTERM)) == {"left": 1}
    assert scancel_calls == [["scancel", "17"]]


def test_a_run_that_sbatch_refuses_fails_without_ending_the_matrix(tmp_path, monkeypatch):
    launcher = slurm_launcher(tmp_path / "runs", SlurmOptions(gpus=0), cluster="local")

    def refuse(*_):
        raise submitit.core.utils.FailedJobError("sbatch: error: QOSMaxSubmitJobPerUserLimit")

    monkeypatch.setattr(launcher.executor, "submit", refuse)
    lines: list[str] = []
    assert Matrix(plan(tmp_path), launcher, notify=line_appender(lines)).run() == {"failed": 4}
    assert "sbatch: error: QOSMaxSubmitJobPerUserLimit" in lines[0]


def test_a_time_limit_shorter_than_the_warning_is_refused(tmp_path):
    with pytest.raises(LabError, match=r"--time 5: .*5 minutes"):
        slurm_launcher(tmp_path, SlurmOptions(minutes=5))
