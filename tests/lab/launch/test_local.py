"""Runs as processes on this machine: which GPUs and threads they get, and how they are started."""

import json
import shlex
import socket
import sys
from pathlib import Path

import pytest

from oelm.lab.launch.interface import LAUNCH, GpuGoneError, LaunchInfo
from oelm.lab.launch.local import LocalLauncher, Slot, command, local_launcher
from oelm.lab.matrix import Matrix
from tests.support.lab import line_appender, plan
from tests.support.training import read


def test_threads_are_divided_among_slots_and_free_gpus_are_chosen(monkeypatch):
    monkeypatch.setattr("oelm.base.machine.cores", lambda: 8)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr("oelm.lab.launch.gpus._visible_gpus", list)
    assert local_launcher(jobs=4).all_slots == [Slot((), 2)] * 4
    assert local_launcher(jobs=2, processes=2).all_slots == [Slot((), 2)] * 2
    monkeypatch.setattr("oelm.lab.launch.gpus._visible_gpus", lambda: ["0", "1", "2", "3"])
    monkeypatch.setattr("oelm.lab.launch.gpus._busy_gpus", lambda: {"2"})
    assert [slot.gpus for slot in local_launcher().all_slots] == [("0",), ("1",), ("3",)]
    assert [slot.gpus for slot in local_launcher("2,3", processes=2).all_slots] == [("2", "3")]
    assert [slot.gpus for slot in local_launcher("0-2,3").all_slots] == [("0",), ("1",), ("2",), ("3",)]
    assert local_launcher("0", jobs=3).slots == 3
    assert local_launcher("", jobs=2).all_slots == [Slot((), 4)] * 2, "'' means the CPU"


def test_spaces_in_cuda_visible_devices_are_ignored(monkeypatch):
    monkeypatch.setattr("oelm.lab.launch.gpus._DRIVERS", ("/dev/null",))
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3, 5")
    monkeypatch.setattr("oelm.lab.launch.gpus._busy_gpus", lambda: {"5"})
    assert [slot.gpus for slot in local_launcher().all_slots] == [("3",)]
    assert [slot.gpus for slot in local_launcher("5").all_slots] == [("5",)]


@pytest.mark.parametrize(
    ("limit", "threads"), [("1", 1), ("3", 3), ("16", 4), ("2,1", 2), ("", 4), ("0", 4), ("many", 4)]
)
def test_omp_num_threads_limits_the_threads_of_a_run(limit, threads, monkeypatch):
    monkeypatch.setattr("oelm.base.machine.cores", lambda: 8)
    monkeypatch.setattr("oelm.lab.launch.gpus._visible_gpus", list)
    monkeypatch.setenv("OMP_NUM_THREADS", limit)
    assert local_launcher(jobs=2).all_slots == [Slot((), threads)] * 2
    monkeypatch.setattr("oelm.lab.launch.gpus._visible_gpus", lambda: ["0", "1"])
    assert local_launcher("0,1").all_slots == [Slot(("0",), threads), Slot(("1",), threads)]


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"gpus": "7"}, "--gpus 7: .*0, 1"),
        ({"gpus": "0,0"}, "names a GPU twice"),
        ({"gpus": "0-1,1"}, "names a GPU twice"),
        ({"gpus": "0-3"}, "no GPU 2, 3 here"),
        ({"gpus": "1-0"}, "no GPU 1-0 here"),
        ({"gpus": "0", "processes": 2}, "2 GPUs.* 1 .*0"),
        ({"jobs": 0}, "at least 1"),
    ],
)
def test_impossible_gpus_are_refused(arguments, text, monkeypatch):
    monkeypatch.setattr("oelm.lab.launch.gpus._visible_gpus", lambda: ["0", "1"])
    with pytest.raises(Exception, match=text):
        local_launcher(**arguments)


def test_a_machine_without_a_free_gpu_is_refused(monkeypatch):
    monkeypatch.setattr("oelm.lab.launch.gpus._visible_gpus", lambda: ["0"])
    monkeypatch.setattr("oelm.lab.launch.gpus._busy_gpus", lambda: {"0"})
    with pytest.raises(Exception, match=r"in use.*--gpus"):
        local_launcher()


def test_the_gpu_of_an_orphan_is_not_given_to_another_run(tmp_path, monkeypatch):
    monkeypatch.setattr("oelm.lab.launch.local.command", lambda *_: [sys.executable, "-c", "pass"])
    orphan = LaunchInfo(launcher="local", host=socket.gethostname(), pid=1, gpus=("0",))
    with open(tmp_path / "lock", "w") as lock:
        launcher = LocalLauncher([Slot(("0",), 1), Slot(("1",), 1)])
        assert launcher.start(tmp_path, tmp_path, lock, [orphan]).info.gpus == ("1",)
        assert not LocalLauncher([Slot(("0", "1"), 1)]).ready([orphan])
        orphan_elsewhere = orphan.model_copy(update={"host": "other"})
        assert LocalLauncher([Slot(("0",), 1)]).start(tmp_path, tmp_path, lock, [orphan_elsewhere]).info.gpus == ("0",)


def test_a_resumed_run_keeps_its_number_of_threads(tmp_path, monkeypatch):
    monkeypatch.setattr("oelm.lab.launch.local.command", lambda *_: [sys.executable, "-c", "pass"])
    (tmp_path / "checkpoints" / "step-00000005").mkdir(parents=True)
    (tmp_path / LAUNCH).write_text(json.dumps({"launcher": "local", "threads": 3}))
    with open(tmp_path / "lock", "w") as lock:
        job = LocalLauncher([Slot((), 1)]).start(tmp_path, tmp_path, lock, [])
    assert job.info.threads == 3


def test_several_processes_are_started_through_torchrun_on_a_free_port():
    arguments = command(Path("c.json"), 2)
    assert arguments[1:3] == ["-m", "torch.distributed.run"]
    assert "--standalone" in arguments
    assert arguments[-3:] == ["oelm", "train", "c.json"]


# A GPU that disappears


@pytest.fixture
def nvidia_smi(tmp_path, monkeypatch):
    """Put an nvidia-smi on the PATH that lists the GPUs of a file, which is returned, and fails on any other."""
    listed, folder = tmp_path / "gpus", tmp_path / "bin"
    folder.mkdir()
    listed.write_text("0, GPU-a\n1, GPU-b\n")
    script = folder / "nvidia-smi"
    script.write_text(
        f"""#!/bin/sh
[ "$1" = -i ] || exec cat {listed}
grep -q ", $2$" {listed} || {{ echo "No devices were found"; exit 6; }}
echo "$2"
"""
    )
    script.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")
    monkeypatch.setattr("oelm.lab.launch.gpus._visible_gpus", lambda: ["0", "1"])
    return listed


def test_a_run_gets_its_gpu_by_uuid_since_numbers_change_when_one_disappears(nvidia_smi, tmp_path, monkeypatch):
    printed = [sys.executable, "-c", "import os; print(os.environ['CUDA_VISIBLE_DEVICES'])"]
    monkeypatch.setattr("oelm.lab.launch.local.command", lambda *_: printed)
    with open(tmp_path / "lock", "w") as lock:
        job = local_launcher("1").start(tmp_path, tmp_path, lock, [])
    assert job.info.gpus == ("1",)
    assert job.process.wait() == 0
    assert (tmp_path / "console.log").read_text() == "GPU-b\n"


def test_nothing_is_started_on_a_gpu_that_is_gone(nvidia_smi, tmp_path):
    launcher = local_launcher("0-1")
    assert launcher.lost(["0", "1"]) == []
    nvidia_smi.write_text("0, GPU-b\n")  # the number of the lost one is given to the other
    with open(tmp_path / "lock", "w") as lock, pytest.raises(GpuGoneError, match=r"GPU 0 is left out: .*No devices"):
        launcher.start(tmp_path, tmp_path, lock, [])
    assert [slot.gpus for slot in launcher.all_slots] == [("1",)]
    nvidia_smi.write_text("")
    assert len(launcher.lost(["1"])) == 1
    assert (launcher.slots, launcher.ready([])) == (0, False)


def test_a_gpu_that_nvidia_smi_did_not_know_is_never_left_out(nvidia_smi, monkeypatch):
    nvidia_smi.write_text("0, GPU-a\n")
    launcher = local_launcher("0-1")
    nvidia_smi.write_text("")
    assert launcher.lost(["1"]) == []
    monkeypatch.setenv("PATH", "")  # nvidia-smi is removed, as by an upgrade of the driver
    assert launcher.lost(["0"]) == []
    assert launcher.slots == 2


def test_a_gpu_on_which_nvidia_smi_hangs_is_left_out(nvidia_smi, tmp_path, monkeypatch):
    launcher = local_launcher("0-1")
    (tmp_path / "bin" / "nvidia-smi").write_text("#!/bin/sh\nexec sleep 60\n")
    monkeypatch.setattr("oelm.lab.launch.gpus._PATIENCE", 0.2)
    assert launcher.lost(["1"]) == ["GPU 1 is left out: nvidia-smi gives no answer about it"]


@pytest.mark.full
def test_the_run_of_a_gpu_that_disappears_goes_on_on_another(nvidia_smi, tmp_path, monkeypatch):
    """The first run on GPU 1 ends when the GPU goes. It costs none of the run's attempts, and is told in one line."""
    planned = plan(tmp_path, axes={"seed": [0, 1, 2]})
    lose = f"grep -v GPU-b {nvidia_smi} > {tmp_path}/rest; mv {tmp_path}/rest {nvidia_smi}; exit 1"

    def unplugged(config, processes):
        train = shlex.join(command(config, processes))
        return ["/bin/sh", "-c", f'[ "$CUDA_VISIBLE_DEVICES" = GPU-b ] || exec {train} train.device=cpu; {lose}']

    monkeypatch.setattr("oelm.lab.launch.local.command", unplugged)
    lines: list[str] = []
    launcher = local_launcher("0,1")
    assert Matrix(planned, launcher, retries=0, notify=line_appender(lines)).run() == {"finished": 3}, lines
    assert [line for line in lines if line.startswith("lost")] == [
        "lost     GPU 1 is left out: nvidia-smi fails on it (No devices were found)"
    ]
    assert launcher.slots == 1
    started = [line.split()[1] for line in lines if line.startswith("started")]
    assert sorted(started) == sorted([*(run.name for run in planned), planned[1].name])


def test_a_matrix_without_any_gpu_left_ends_and_leaves_its_runs(nvidia_smi, tmp_path):
    planned = plan(tmp_path, axes={"seed": [0, 1]})
    launcher = local_launcher("0-1")
    nvidia_smi.write_text("")
    lines: list[str] = []
    assert Matrix(planned, launcher, notify=line_appender(lines)).run() == {"left": 2}
    assert [line.split()[0] for line in lines] == ["lost", "lost", "left"]
    assert "no GPU is left" in lines[-1]


@pytest.mark.full
@pytest.mark.timeout(300)
def test_a_run_can_have_two_processes(tmp_path):
    (run,) = plan(tmp_path, axes={"seed": [0]})
    lines: list[str] = []
    assert Matrix([run], local_launcher("", 1, 2), notify=line_appender(lines)).run() == {"finished": 1}, lines
    assert read(run.folder / "environment.json")["world_size"] == 2
