"""Runs as submitit jobs through its local executor: real processes, signals and requeuing, without a cluster."""

import os
import signal
from pathlib import Path
from types import SimpleNamespace

import pytest

from oelm.base.files import write_json
from oelm.base.locks import hold
from oelm.errors import LabError, LaterError
from oelm.lab.launch import slurm
from oelm.lab.launch.interface import TAKEN_AWAY, LaunchInfo, failure_reason, write_launch
from oelm.lab.launch.slurm import SlurmJob, SlurmLauncher, SlurmOptions, TrainJob, slurm_launcher
from oelm.lab.launch.slurm_queue import FORGOTTEN, SlurmQueue
from oelm.lab.matrix import Matrix
from oelm.lab.status import read_state
from oelm.runs.folder import STOP
from oelm.runs.schema import Status
from oelm.training.engine import Stopped
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


class FakeQueue(SlurmQueue):
    """A queue in which every job is in the state that a test says."""

    def __init__(self, state: str | None) -> None:
        super().__init__()
        self.now = state

    def state(self, job: str) -> str | None:
        return self.now


def fake_launcher(folder: Path, state: str | None, jobs: int = 1) -> SlurmLauncher:
    """Return a launcher for a cluster whose sbatch is not called and whose jobs are all in one state."""
    launcher = slurm_launcher(folder / "runs", SlurmOptions(gpus=0), jobs=jobs, cluster="local")
    launcher.cluster, launcher.queue = "slurm", FakeQueue(state)
    return launcher


def job_of(run: Path, state: str | None) -> SlurmJob:
    return SlurmJob(LaunchInfo(launcher="slurm", job="17", folder="files", run=str(run)), FakeQueue(state))


def test_a_job_of_a_dead_matrix_is_attached_to_and_takes_a_slot(tmp_path):
    launcher = fake_launcher(tmp_path, "PENDING")
    info = LaunchInfo(launcher="slurm", job="17", folder=str(tmp_path / "runs" / "submitit"))
    assert launcher.ready([])
    assert launcher.attach(info).info == info
    assert not launcher.ready([])
    launcher.queue.now = "COMPLETED"
    assert launcher.attach(info) is None
    assert launcher.attach(LaunchInfo(launcher="local", pid=3)) is None


@pytest.mark.parametrize(
    ("state", "code"),
    [
        *[("PENDING", None), ("RUNNING", None), ("COMPLETING", None), ("REQUEUE_HOLD", None), (None, None)],
        *[("COMPLETED", 0), ("CANCELLED", -signal.SIGTERM), ("FAILED", 1), ("TIMEOUT", 1), (FORGOTTEN, 1)],
        *[("PREEMPTED", TAKEN_AWAY), ("NODE_FAIL", TAKEN_AWAY)],
    ],
)
def test_slurm_says_when_a_job_has_ended_and_how(state, code, tmp_path):
    assert job_of(tmp_path, state).poll() == code


@pytest.mark.parametrize("state", ["RUNNING", "COMPLETING", None])
def test_a_run_with_a_result_has_ended_whatever_slurm_says(state, tmp_path):
    """Slurm may say for minutes that a job runs which ended while its controller was away."""
    job = job_of(tmp_path, state)
    assert job.poll() is None
    (tmp_path / "result.json").write_text("{}")
    assert job.poll() == 0


def test_a_requeued_job_goes_on_although_its_first_start_left_a_result(tmp_path):
    """A run that SIGTERM stopped returns, and submitit writes what it returned. Then Slurm starts the job again."""
    launcher = fake_launcher(tmp_path, "PENDING")
    paths = submitit.core.utils.JobPaths(tmp_path / "runs" / "submitit" / "17", "17", 0)
    paths.result_pickle.parent.mkdir(parents=True)
    submitit.core.utils.cloudpickle_dump(("success", "stopped"), paths.result_pickle)
    job = launcher.attach(LaunchInfo(launcher="slurm", job="17", folder=str(paths.folder), run=str(tmp_path)))
    assert job.poll() is None


def test_a_run_that_slurm_ended_says_so_where_nothing_else_does(tmp_path):
    assert job_of(tmp_path, "OUT_OF_MEMORY").poll() == 1
    reason, permanent = failure_reason(tmp_path, 1, None)
    assert reason == "Slurm job 17 ended as OUT_OF_MEMORY; its output is in files"
    assert not permanent


class FakeCluster:
    """Launches a single job, which waits in a queue until something happens to it."""

    slots = 1

    def __init__(self, state: str) -> None:
        self.queue, self.starts = FakeQueue(state), 0

    def ready(self, orphans) -> bool:
        return True

    def start(self, config, folder, lock, orphans) -> SlurmJob:
        self.starts += 1
        return SlurmJob(LaunchInfo(launcher="slurm", job=str(self.starts), run=str(folder)), self.queue)

    def attach(self, info) -> None:
        return None


def test_a_job_cancelled_in_the_queue_is_not_retried(tmp_path):
    cluster = FakeCluster("PENDING")
    lines: list[str] = []

    def cancel(_: Matrix) -> None:
        cluster.queue.now = "CANCELLED"

    runs = plan(tmp_path, axes={"seed": [0]})
    assert Matrix(runs, cluster, retries=5, notify=line_appender(lines)).run(cancel) == {"stopped": 1}
    assert cluster.starts == 1
    assert "its job was cancelled" in lines[-1]


def test_a_job_that_trains_on_this_machine_is_attached_to_too(tmp_path, monkeypatch):
    """Its process holds the run's lock, as one does that no matrix started; that one is waited for instead."""
    (run,) = plan(tmp_path, axes={"seed": [0]})
    run.folder.mkdir(parents=True)
    info = LaunchInfo(launcher="slurm", job="17", run=str(run.folder))
    write_launch(run.folder, info)
    cluster = FakeCluster("RUNNING")
    monkeypatch.setattr(cluster, "attach", lambda info: SlurmJob(info, cluster.queue))
    lines: list[str] = []

    def cancel(_: Matrix) -> None:
        cluster.queue.now = "CANCELLED"

    with hold(run.folder):
        assert Matrix([run], cluster, notify=line_appender(lines)).run(cancel) == {"stopped": 1}
    assert lines[0].startswith("started")
    assert cluster.starts == 0


def test_a_run_whose_node_is_taken_away_is_submitted_again_however_often(tmp_path):
    cluster = FakeCluster("NODE_FAIL")
    lines: list[str] = []

    def fail_at_the_fourth(_: Matrix) -> None:
        if cluster.starts == 4:
            cluster.queue.now = "FAILED"

    runs = plan(tmp_path, axes={"seed": [0]})
    matrix = Matrix(runs, cluster, retries=0, notify=line_appender(lines))
    assert matrix.run(fail_at_the_fourth) == {"failed": 1}
    assert cluster.starts == 4
    assert sum("took its machine away" in line for line in lines) == 3


@pytest.mark.parametrize("state", ["PENDING", "RUNNING"])
def test_a_stopped_matrix_cancels_jobs_that_do_not_train_yet(state, tmp_path, monkeypatch):
    """A job that is still importing is cancelled too: submitit ignores SIGTERM until then."""
    (run,) = plan(tmp_path, axes={"seed": [0]})
    cluster = FakeCluster(state)
    scancel_calls: list[list[str]] = []

    def scancel(command, **_) -> None:
        scancel_calls.append(command)
        cluster.queue.now = "CANCELLED"

    monkeypatch.setattr("subprocess.run", scancel)
    matrix = Matrix([run], cluster)
    assert matrix.run(lambda _: scancel_calls or os.kill(os.getpid(), signal.SIGTERM)) == {"left": 1}
    assert scancel_calls == [["scancel", "1"]]


def test_without_a_controller_a_run_is_asked_to_stop_by_a_file(tmp_path):
    job_of(tmp_path, None).stop()
    assert (tmp_path / STOP).exists()


def refuse_with(launcher: SlurmLauncher, message: str) -> None:
    def refuse(*_):
        raise submitit.core.utils.FailedJobError(message)

    launcher.executor.submit = refuse


def test_a_run_that_sbatch_refuses_fails_without_ending_the_matrix(tmp_path):
    launcher = fake_launcher(tmp_path, "PENDING")
    refuse_with(launcher, "sbatch: error: invalid partition specified: lng")
    lines: list[str] = []
    assert Matrix(plan(tmp_path), launcher, notify=line_appender(lines)).run() == {"failed": 4}
    assert "invalid partition specified: lng" in lines[0]


@pytest.mark.parametrize(
    "message",
    [
        "sbatch: error: QOSMaxSubmitJobPerUserLimit",
        "sbatch: error: AssocGrpSubmitJobsLimit",
        "sbatch: error: Batch job submission failed: Resource temporarily unavailable",
        "sbatch: error: Batch job submission failed: Unable to contact slurm controller (connect failure)",
        "sbatch: error: Batch job submission failed: Socket timed out on send/recv operation",
    ],
)
def test_a_job_that_slurm_refuses_for_now_is_offered_again(message, tmp_path, monkeypatch):
    """A limit on the number of jobs or a lost controller: the run waits, and is said to wait once."""
    monkeypatch.setattr(slurm, "_REFUSAL_SECONDS", 0.0)
    monkeypatch.setattr("subprocess.run", lambda command, **_: None)  # the matrix ends with scancel, which is not here
    launcher = fake_launcher(tmp_path, "COMPLETED")
    offers: list[int] = []

    def submit(job: TrainJob):
        offers.append(len(offers))
        if len(offers) < 3:
            raise submitit.core.utils.FailedJobError(message)
        os.kill(os.getpid(), signal.SIGTERM)  # ends the matrix
        return SimpleNamespace(job_id=17)

    launcher.executor.submit = submit
    lines: list[str] = []
    (run,) = plan(tmp_path, axes={"seed": [0]})
    Matrix([run], launcher, notify=line_appender(lines)).run()
    assert len(offers) == 3
    assert [message in line for line in lines if line.startswith("waiting")] == [True]


def test_after_a_refusal_no_job_is_offered_for_a_while_unless_one_ends(tmp_path):
    launcher = fake_launcher(tmp_path, "RUNNING", jobs=2)
    info = LaunchInfo(launcher="slurm", job="17", folder="files", run=str(tmp_path))
    launcher.attach(info)
    assert launcher.ready([])
    refuse_with(launcher, "sbatch: error: QOSMaxSubmitJobPerUserLimit")
    with pytest.raises(LaterError):
        launcher.start(tmp_path / "run.json", tmp_path, None, [])
    assert not launcher.ready([])
    launcher.queue.now = "COMPLETED"
    assert launcher.ready([])


def test_while_slurm_does_not_answer_no_run_of_a_known_job_is_submitted_again(tmp_path):
    with pytest.raises(LaterError, match="job 17"):
        fake_launcher(tmp_path, None).attach(LaunchInfo(launcher="slurm", job="17", folder="files"))


@pytest.mark.parametrize(("received", "preempted", "requeued"), [
    ("SIGUSR2", False, True), ("SIGTERM", True, True), ("SIGTERM", False, False),
])  # fmt: skip
def test_a_job_that_is_told_to_save_before_it_is_preempted_requeues_itself(
    received, preempted, requeued, tmp_path, monkeypatch
):
    """Slurm counts a job that ends in the time that it was given to save as completed."""
    (run,) = plan(tmp_path, axes={"seed": [0]})
    run.folder.mkdir(parents=True)

    def stop_training(config, quiet):
        status = {"id": "1", "state": "stopped", "step": 3, "max_steps": 9, "signal": received}
        Status.model_validate(status).write(config.folder / "status.json")
        raise Stopped

    monkeypatch.setattr("oelm.training.engine.train", stop_training)
    monkeypatch.setattr(slurm, "gets_preempted", lambda job: preempted and job == "17")
    monkeypatch.setenv("SUBMITIT_EXECUTOR", "slurm")
    monkeypatch.setenv("SLURM_JOB_ID", "17")
    signals: list[int] = []
    previous = signal.signal(signal.SIGUSR2, lambda number, _: signals.append(number))
    try:
        write_json(tmp_path / "run.json", run.config.to_dict())
        assert TrainJob(str(tmp_path / "run.json"))() == "stopped"
    finally:
        signal.signal(signal.SIGUSR2, previous)
    assert signals == ([signal.SIGUSR2] if requeued else [])


def test_a_time_limit_shorter_than_the_warning_is_refused(tmp_path):
    with pytest.raises(LabError, match=r"--time 5: .*5 minutes"):
        slurm_launcher(tmp_path, SlurmOptions(minutes=5))
