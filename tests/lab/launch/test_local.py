"""Runs as processes on this machine: which GPUs and threads they get, and how they are started."""

import json
import socket
import sys
from pathlib import Path

import pytest

from oelm.lab.launch.interface import LAUNCH, LaunchInfo
from oelm.lab.launch.local import LocalLauncher, Slot, command, local_launcher
from oelm.lab.matrix import Matrix
from tests.support.lab import line_appender, plan
from tests.support.training import read


def test_threads_are_divided_among_slots_and_free_gpus_are_chosen(monkeypatch):
    monkeypatch.setattr("oelm.base.machine.cores", lambda: 8)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr("oelm.lab.launch.local._visible_gpus", list)
    assert local_launcher(jobs=4).all_slots == [Slot((), 2)] * 4
    assert local_launcher(jobs=2, processes=2).all_slots == [Slot((), 2)] * 2
    monkeypatch.setattr("oelm.lab.launch.local._visible_gpus", lambda: ["0", "1", "2", "3"])
    monkeypatch.setattr("oelm.lab.launch.local._busy_gpus", lambda: {"2"})
    assert [slot.gpus for slot in local_launcher().all_slots] == [("0",), ("1",), ("3",)]
    assert [slot.gpus for slot in local_launcher("2,3", processes=2).all_slots] == [("2", "3")]
    assert local_launcher("0", jobs=3).slots == 3
    assert local_launcher("", jobs=2).all_slots == [Slot((), 4)] * 2, "'' means the CPU"


def test_spaces_in_cuda_visible_devices_are_ignored(monkeypatch):
    monkeypatch.setattr("oelm.lab.launch.local._DRIVERS", ("/dev/null",))
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3, 5")
    monkeypatch.setattr("oelm.lab.launch.local._busy_gpus", lambda: {"5"})
    assert [slot.gpus for slot in local_launcher().all_slots] == [("3",)]
    assert [slot.gpus for slot in local_launcher("5").all_slots] == [("5",)]


@pytest.mark.parametrize(
    ("limit", "threads"), [("1", 1), ("3", 3), ("16", 4), ("2,1", 2), ("", 4), ("0", 4), ("many", 4)]
)
def test_omp_num_threads_limits_the_threads_of_a_run(limit, threads, monkeypatch):
    monkeypatch.setattr("oelm.base.machine.cores", lambda: 8)
    monkeypatch.setattr("oelm.lab.launch.local._visible_gpus", list)
    monkeypatch.setenv("OMP_NUM_THREADS", limit)
    assert local_launcher(jobs=2).all_slots == [Slot((), threads)] * 2
    monkeypatch.setattr("oelm.lab.launch.local._visible_gpus", lambda: ["0", "1"])
    assert local_launcher("0,1").all_slots == [Slot(("0",), threads), Slot(("1",), threads)]


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"gpus": "7"}, "--gpus 7: .*0, 1"),
        ({"gpus": "0,0"}, "names a GPU twice"),
        ({"gpus": "0", "processes": 2}, "2 GPUs.* 1 .*0"),
        ({"jobs": 0}, "at least 1"),
    ],
)
def test_impossible_gpus_are_refused(arguments, text, monkeypatch):
    monkeypatch.setattr("oelm.lab.launch.local._visible_gpus", lambda: ["0", "1"])
    with pytest.raises(Exception, match=text):
        local_launcher(**arguments)


def test_a_machine_without_a_free_gpu_is_refused(monkeypatch):
    monkeypatch.setattr("oelm.lab.launch.local._visible_gpus", lambda: ["0"])
    monkeypatch.setattr("oelm.lab.launch.local._busy_gpus", lambda: {"0"})
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


@pytest.mark.full
@pytest.mark.timeout(300)
def test_a_run_can_have_two_processes(tmp_path):
    (run,) = plan(tmp_path, axes={"seed": [0]})
    lines: list[str] = []
    assert Matrix([run], local_launcher("", 1, 2), notify=line_appender(lines)).run() == {"finished": 1}, lines
    assert read(run.folder / "environment.json")["world_size"] == 2
