"""A matrix on a real Slurm, started by cluster.sh: whatever happens to its jobs, each run is done once, exactly."""

import os
import signal
import socket
import struct
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from oelm.base.locks import holder
from oelm.lab.experiment import load_experiment
from oelm.lab.launch.interface import read_launch
from oelm.lab.plan import Request, plan_runs
from oelm.lab.status import read_state
from tests.support.lab import ROOT, count_finishes, experiment_file, longer_config, train_uninterrupted, wait_for
from tests.support.training import assert_same_run, write_yaml

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(1200)]
SCRIPT = Path(__file__).with_name("cluster.sh")
# The ports in slurm.conf.
PORTS = range(27800, 27900)
LISTENING = "0A"
AXES = {"method": ["baseline", "oelm-freeze"], "seed": [0, 1, 2]}
SECONDS = 240


class Cluster:
    """Two pretend nodes with one core each, and the commands of Slurm."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def script(self, command: str) -> None:
        subprocess.run([SCRIPT, command, self.folder], check=True)

    def command(self, *words: object) -> str:
        return subprocess.run(list(map(str, words)), check=True, capture_output=True, text=True).stdout.strip()

    def run_out_of_time(self, job: str) -> None:
        """Leave a job less time than it is warned before, and once it was warned as much time as it had."""
        self.command("scontrol", "update", f"jobid={job}", "timelimit=5")
        wait_for(lambda: self.field(job, "%T") != "RUNNING", SECONDS)
        self.command("scontrol", "update", f"jobid={job}", "timelimit=10")

    def field(self, job: str, format: str) -> str:
        return self.command("squeue", "--noheader", "--states=all", "--jobs", job, "--format", format)


@pytest.fixture
def cluster(monkeypatch):
    # The socket of munge must have a short path, and its folders must be open to others.
    with tempfile.TemporaryDirectory(prefix="oelm-slurm-") as name:
        Path(name).chmod(0o755)
        cluster = Cluster(Path(name))
        monkeypatch.setenv("SLURM_CONF", str(cluster.folder / "slurm.conf"))
        monkeypatch.setenv("OMP_NUM_THREADS", "1")
        cluster.script("start")
        try:
            yield cluster
        finally:
            cluster.script("stop")
        assert not list(listening_addresses()), "nothing listens after the test"


def listening_addresses():
    """Yield the address of every socket that listens on one of the cluster's ports."""
    for table in ("tcp", "tcp6"):
        for line in Path("/proc/net", table).read_text().splitlines()[1:]:
            _, local, _, state, *_ = line.split()
            address, port = local.split(":")
            if state == LISTENING and int(port, 16) in PORTS:
                yield socket.inet_ntoa(struct.pack("=I", int(address, 16))) if table == "tcp" else address


class Gates:
    """The folder through which runs say that they are held; see gates.py."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.used = folder, set()

    def held(self, step: int = 20) -> dict[str, str]:
        """Return the node of each job that is held at a step and that nothing has been done to yet."""
        files = [file for file in self.folder.glob(f"held-*-{step}") if file.stat().st_size]
        return {job: file.read_text() for file in files if (job := file.name.split("-")[1]) not in self.used}

    def wait(self, step: int = 20) -> tuple[str, str]:
        """Wait for a job that is held; return it and its node."""
        wait_for(lambda: bool(self.held(step)), SECONDS)
        job, node = min(self.held(step).items(), key=lambda item: int(item[0]))
        self.used.add(job)
        return job, node


class MatrixCommand:
    """`oelm matrix` on the cluster, in its own process."""

    def __init__(self, file: Path, folder: Path) -> None:
        options = ["--launcher", "slurm", "--gpus-per-run", 0, "--cpus", 1, "--time", 10, "--jobs", 4, "--yes"]
        plugin = Path(__file__).with_name("gates.py")
        words = ["--plugin", plugin, "matrix", file, "--out", folder / "runs", *options]
        environment = {**os.environ, "NO_COLOR": "1", "HF_HUB_OFFLINE": "1", "OELM_GATES": str(folder / "gates")}
        self.log = folder / "matrix.log"
        with open(self.log, "a", encoding="utf-8") as log:
            command = [sys.executable, "-m", "oelm", *map(str, words)]
            self._process = subprocess.Popen(command, stdout=log, stderr=log, env=environment, cwd=ROOT)

    def __enter__(self) -> "MatrixCommand":
        return self

    def __exit__(self, *error: object) -> None:
        self._process.kill()

    def wait(self) -> int:
        return self._process.wait(SECONDS)

    def signal(self, number: int) -> None:
        self._process.send_signal(number)

    def printed(self) -> str:
        return self.log.read_text(encoding="utf-8")


def jobs_of(folder: Path) -> set[str]:
    """Return the ids of all jobs that were submitted for the runs of a test."""
    return {path.name for path in (folder / "runs" / "submitit").iterdir() if path.name.isdigit()}


def test_every_run_is_done_once_whatever_happens_to_its_job(cluster, tmp_path):
    """Six runs, four jobs at a time on two nodes. Each run is interrupted in its own way: its job is preempted at once,
    preempted with time to save, requeued, told that its time is up, loses its node, or is cancelled. Meanwhile the
    cluster takes no more jobs for a while, and then loses its controller twice.
    """
    file = experiment_file(tmp_path, axes=AXES, config=longer_config(tmp_path, 80, checkpoint=10))
    planned = plan_runs([load_experiment(file)], Request(output=str(tmp_path / "runs")))
    gates = Gates(tmp_path / "gates")
    gates.folder.mkdir()
    happened = {}  # by job

    # Jobs that wait for ever leave room for three of the matrix's: its fourth is refused until they are gone.
    waiting = [
        cluster.command("sbatch", "--parsable", "--hold", "--output=/dev/null", "--wrap", "true") for _ in range(4)
    ]
    with MatrixCommand(file, tmp_path) as matrix:
        preempted, node = gates.wait()
        happened[preempted] = "preempted"
        assert set(listening_addresses()) == {"127.0.0.1"}
        submitted = jobs_of(tmp_path)
        assert len(submitted) == 3, "the fourth was refused"
        (graceful,) = (job for job in submitted if cluster.field(job, "%T") == "PENDING")
        cluster.command("scontrol", "update", f"jobid={graceful}", "partition=graceful")
        cluster.command("scancel", *waiting)
        cluster.command("sbatch", "--partition=urgent", f"--nodelist={node}", "--output=/dev/null", "--wrap", "sleep 1")

        requeued, _ = gates.wait()
        happened[requeued] = "requeued"
        cluster.command("scontrol", "requeue", requeued)

        while len(happened) < 6:
            job, node = gates.wait()
            if job == graceful:
                happened[job] = "preempted with time to save"
                cluster.command(
                    "sbatch", "--partition=urgent", f"--nodelist={node}", "--output=/dev/null", "--wrap", "sleep 1"
                )
            elif "lost its node" not in happened.values():
                happened[job] = "lost its node"
                cluster.command("scontrol", "update", f"nodename={node}", "state=down", "reason=test")
                wait_for(lambda job=job: cluster.field(job, "%T") != "RUNNING", SECONDS)
                (gates.folder / f"pass-{job}").touch()  # if it could not save, it comes to step 20 again
                cluster.command("scontrol", "update", f"nodename={node}", "state=resume")
            elif "out of time" not in happened.values():
                happened[job] = "out of time"
                cluster.run_out_of_time(job)
            else:
                happened[job] = "cancelled"
                cluster.command("scancel", job)
        assert matrix.wait() == 75, matrix.printed()
    runs = {happened[read_launch(run.folder).job]: run.folder for run in planned}
    assert len(runs) == 6
    assert {cause for cause, run in runs.items() if not (run / "result.json").exists()} == {"cancelled"}
    cancelled = runs["cancelled"]
    assert read_state(cancelled).state == "stopped"

    # The cancelled run, once more. The controller is lost at the start, and again while the run ends.
    cluster.script("lose")
    with MatrixCommand(file, tmp_path) as matrix:
        wait_for(lambda: "Slurm does not say" in matrix.printed(), SECONDS)
        (gates.folder / "hold-60").touch()
        cluster.script("restore")
        job, _ = gates.wait(60)
        cluster.script("lose")
        (gates.folder / f"pass-{job}").touch()
        wait_for(lambda: (cancelled / "result.json").exists() and holder(cancelled) is None, SECONDS)
        cluster.script("restore")
        assert matrix.wait() == 0, matrix.printed()

    assert jobs_of(tmp_path) == {*happened, job}, "every run but the cancelled one had a single job"
    alone = train_uninterrupted(planned, tmp_path / "alone")
    for run in planned:
        assert count_finishes(run.folder) == 1
        assert_same_run(run.folder, alone[run.name])
    for cause, run in runs.items():
        log, name = (run / "train.log").read_text(), "SIGUSR2" if cause == "out of time" else "SIGTERM"
        assert log.count("resumed from ") == 1, (cause, log)
        if cause != "lost its node":  # Slurm may kill the job's processes before they have saved
            assert log.count("stopped by ") == log.count(f"stopped by {name} at step 21: saved") == 1, (cause, log)


def test_a_killed_matrix_finds_its_jobs_again_and_stops_them(cluster, tmp_path):
    """Three runs, of which two train and one waits for a node. Nobody looks after them until the same command does."""
    axes = {"method": ["oelm-freeze"], "seed": [0, 1, 2]}
    file = experiment_file(tmp_path, axes=axes, config=longer_config(tmp_path, 80, checkpoint=10))
    planned = plan_runs([load_experiment(file)], Request(output=str(tmp_path / "runs")))
    gates = Gates(tmp_path / "gates")
    gates.folder.mkdir()
    with MatrixCommand(file, tmp_path) as matrix:
        wait_for(lambda: len(gates.held()) == 2, SECONDS)
        matrix.signal(signal.SIGKILL)
        matrix.wait()
    jobs = jobs_of(tmp_path)
    assert len(jobs) == 3

    with MatrixCommand(file, tmp_path) as matrix:
        wait_for(lambda: matrix.printed().count("started  ") == 6, SECONDS)
        matrix.signal(signal.SIGTERM)
        assert matrix.wait() == 75, matrix.printed()
    assert jobs_of(tmp_path) == jobs, "no run was submitted again"
    assert "2 stopped, 1 left" in matrix.printed()
    logs = [(run.folder / "train.log").read_text() for run in planned if (run.folder / "train.log").exists()]
    assert ["stopped by SIGTERM at step 21: saved" in log for log in logs] == [True, True]

    (gates.folder / "pass-all").touch()
    with MatrixCommand(file, tmp_path) as matrix:
        assert matrix.wait() == 0, matrix.printed()
    alone = train_uninterrupted(planned, tmp_path / "alone")
    for run in planned:
        assert count_finishes(run.folder) == 1
        assert_same_run(run.folder, alone[run.name])


def test_the_script_in_the_documentation_saves_and_requeues_itself(cluster, tmp_path, monkeypatch):
    """Two nodes with a process each. The job is preempted with time to save, and later told that its time is up."""
    gates = Gates(tmp_path / "gates")
    gates.folder.mkdir()
    (gates.folder / "hold-60").touch()
    monkeypatch.setenv("OELM_GATES", str(gates.folder))
    monkeypatch.setenv("OELM_PLUGIN", str(Path(__file__).with_name("gates.py")))
    config = longer_config(tmp_path, 80, checkpoint=10)
    run_file = write_yaml(tmp_path / "run.yaml", {**config, "output": str(tmp_path / "runs")})
    script = (ROOT / "docs" / "distributed.md").read_text(encoding="utf-8").split("```bash\n")[1].split("```")[0]
    for old, new in {
        "--ntasks-per-node=8": "--ntasks-per-node=1",
        "#SBATCH --gpus-per-node=8\n": f"#SBATCH --partition=graceful\n#SBATCH --output={tmp_path}/script.log\n",
        "--cpus-per-task=8": "--cpus-per-task=1",
        "08:00:00": "00:10:00",
        '$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)': "127.0.0.1",  # these nodes have no names
        "python -m oelm train run.yaml": f"{sys.executable} -m oelm train {run_file}",
    }.items():
        assert old in script, old
        script = script.replace(old, new)
    (tmp_path / "script.sh").write_text(script)

    job = cluster.command("sbatch", "--parsable", tmp_path / "script.sh")
    wait_for(lambda: bool(gates.held(20)), SECONDS)
    cluster.command("sbatch", "--partition=urgent", "--nodelist=node1", "--output=/dev/null", "--wrap", "sleep 1")
    wait_for(lambda: bool(gates.held(60)), SECONDS)
    cluster.run_out_of_time(job)
    wait_for(lambda: bool(list(tmp_path.glob("runs/*/*/*/result.json"))), SECONDS)
    wait_for(lambda: cluster.field(job, "%T") == "COMPLETED", SECONDS)
    (run,) = (file.parent for file in tmp_path.glob("runs/*/*/*/result.json"))
    log = (run / "train.log").read_text()
    assert [line.split(" stopped by ")[1] for line in log.splitlines() if " stopped by " in line] == [
        "SIGTERM at step 21: saved",
        "SIGUSR2 at step 61: saved",
    ]
    assert count_finishes(run) == 1
