"""Matrices of runs in real processes: nothing twice, nothing lost, whatever is killed, fails or is asked to stop."""

import json
import os
import signal
import sys
import threading
from pathlib import Path

import pytest
import yaml

from oelm.base.locks import hold, holder
from oelm.base.machine import threads_each
from oelm.base.strict import merge
from oelm.cli.train import train_and_exit
from oelm.config import RunConfig
from oelm.lab import matrix as matrix_module
from oelm.lab.estimate import estimate
from oelm.lab.experiment import load_experiment
from oelm.lab.launch.forked import ForkedLauncher
from oelm.lab.launch.interface import LAUNCH, LaunchInfo
from oelm.lab.launch.local import LocalLauncher, Slot, command, local_launcher
from oelm.lab.launch.outcome import status_time, was_stopped
from oelm.lab.matrix import RUNNER_LOCK, Matrix
from oelm.lab.plan import Request, plan_runs
from oelm.lab.status import read_state
from oelm.training.engine import train
from tests.support.lab import experiment_file, into, lab, started, wait_for
from tests.support.records import write_status
from tests.support.training import Process, Slow, die, outcome, read, start, timeless

AXES = {"method": ["baseline", "oelm-freeze"], "seed": [0, 1]}


class ForkJob:
    """A run in a process that starts at once."""

    def __init__(self, process: Process) -> None:
        self.process = process
        self.info = LaunchInfo(launcher="test", pid=process.pid, host="here")

    def poll(self) -> int | None:
        return None if self.process.alive else self.process.wait()

    def stop(self) -> None:
        self.process.signal(signal.SIGTERM)


class ForkLauncher:
    """Runs as real processes that need not import torch first; `sabotage` by the number of the start."""

    def __init__(self, slots: int = 2, sabotage=None, replace=None) -> None:
        self.slots, self.jobs, self._sabotage, self._replace = slots, [], sabotage or {}, replace or {}

    def ready(self, orphans):
        return sum(job.poll() is None for job in self.jobs) < self.slots

    def start(self, config: Path, folder: Path, lock, orphans):
        number = len(self.jobs)
        arguments = self._replace.get(number, ["train", config, "--quiet"])
        self.jobs.append(ForkJob(start(*arguments, sabotage=self._sabotage.get(number))))
        return self.jobs[-1]

    def attach(self, info):
        return None


def plan(place: Path, name: str = "study", **fields):
    fields = {"axes": AXES, **fields}
    return plan_runs([load_experiment(experiment_file(place, name, **fields))], Request(output=str(place / "runs")))


def finishes(folder: Path) -> int:
    """How often a run was brought to its end."""
    return (folder / "train.log").read_text(encoding="utf-8").count("finished: ")


def undisturbed(planned, place: Path) -> dict[str, Path]:
    """The same runs, each trained at one go in this process, by the name that they have in their matrix."""
    folders = {}
    for run in planned:
        config = RunConfig.load({**run.config.to_dict(), "output": str(place)})
        train(config, quiet=True)
        folders[run.name] = config.folder
    return folders


@pytest.mark.timeout(420)
def test_a_matrix_survives_the_death_of_its_runner(tmp_path):
    """2 methods x 2 seeds, two at a time. In the middle the runner and one of its two runs are killed with SIGKILL; the
    other run goes on alone. Started again, the matrix finishes everything: each run once, with the very results that it
    has when nothing happens.
    """
    file = experiment_file(
        tmp_path,
        axes=AXES,
        config=_longer(tmp_path, 300, checkpoint=25),
    )
    arguments = ("matrix", file, "--jobs", 2, "--gpus", "", "--out", tmp_path / "runs", "--yes")
    planned = plan_runs([load_experiment(file)], Request(output=str(tmp_path / "runs")))
    first, second = planned[0].folder, planned[1].folder

    runner = started(*arguments)
    wait_for(lambda: all(any((run / "checkpoints").glob("step-*")) for run in (first, second)), 180)
    runner.kill()
    runner.wait()
    victim, orphan = read(first / LAUNCH)["pid"], read(second / LAUNCH)["pid"]
    os.kill(victim, signal.SIGKILL)
    wait_for(lambda: holder(first) is None)
    assert not (first / "result.json").exists(), "it was killed in the middle"
    assert read_state(first).state == "died"
    if not (second / "result.json").exists():
        assert holder(second, RUNNER_LOCK) is not None, "still locked: its process lives"

    again = started(*arguments)
    said, _ = again.communicate(timeout=300)
    assert again.returncode == 0, said
    assert "4 finished" in said

    with pytest.raises(ProcessLookupError):
        os.kill(orphan, 0)
    for name, folder in undisturbed(planned, tmp_path / "undisturbed").items():
        there = tmp_path / "runs" / name
        assert outcome(there) == outcome(folder)
        assert timeless(there) == timeless(folder), "every loss, to the bit"
        assert finishes(there) == 1
    assert "resumed from step" in (first / "train.log").read_text()
    assert "resumed from step" not in (second / "train.log").read_text()

    third = lab(*arguments)
    assert (third.exit_code, third.stdout.strip()) == (0, "4 finished")
    assert third.stderr.count("done before") == 4
    assert all(finishes(run.folder) == 1 for run in planned)


def _longer(place: Path, steps: int, checkpoint: int):
    from tests.support.training import tiny

    fields = tiny(place, train={"max_steps": steps}, checkpoint={"every": checkpoint}, eval={"every": 100})
    return {key: value for key, value in fields.items() if key != "output"}


def test_arms_share_the_data_order_and_all_common_weights(tmp_path):
    """Before any training, what the arms of one seed have in common is the same, to the bit."""
    from oelm.method.apply import apply
    from oelm.training.tasks.open import open_task

    planned = plan(tmp_path)
    baseline, frozen = planned[0].config, planned[1].config
    assert (baseline.seed, frozen.seed) == (0, 0)
    tasks = [open_task(config) for config in (baseline, frozen)]
    models = [task.build_model(config) for task, config in zip(tasks, (baseline, frozen), strict=True)]
    apply(models[1], frozen.method, frozen.seed)
    one, other = (model.state_dict() for model in models)
    changed = {name for name in one if not one[name].equal(other[name])}
    assert changed == {name for name in one if "q_proj" in name or "k_proj" in name}
    left, right = (task.batch(0, 16) for task in tasks)
    assert all(left[key].equal(right[key]) for key in left)


def test_what_is_done_is_skipped_and_what_is_new_is_run(tmp_path):
    planned = plan(tmp_path)
    launcher = ForkLauncher()
    assert Matrix(planned[:2], launcher).run() == {"finished": 2}
    assert len(launcher.jobs) == 2
    assert Matrix(planned, launcher).run() == {"finished": 4}
    assert len(launcher.jobs) == 4
    assert all(finishes(run.folder) == 1 for run in planned)


def test_what_failed_is_tried_again_to_a_limit(tmp_path):
    planned = plan(tmp_path, axes={"seed": [0]})
    said: list[str] = []
    launcher = ForkLauncher(1, {0: die, 1: die})
    assert Matrix(planned, launcher, retries=2, notify=into(said)).run() == {"finished": 1}
    assert len(launcher.jobs) == 3
    assert sum("killed by signal 9; it is tried again" in line for line in said) == 2

    launcher = ForkLauncher(1, {0: die, 1: die})
    other = plan(tmp_path, "other", axes={"seed": [0]})
    work = Matrix(other, launcher, retries=1, notify=into(said))
    assert work.run() == {"failed": 1}
    assert len(launcher.jobs) == 2
    assert "after 2 attempts" in said[-1]
    assert Matrix(other, ForkLauncher(1), notify=into(said)).run() == {"finished": 1}, "another time it goes on"


def test_a_refusal_is_not_tried_again_and_the_others_go_on(tmp_path):
    planned = plan(tmp_path, axes={"data.fraction": [1e-9, 1.0]})
    said: list[str] = []
    launcher = ForkLauncher(1)
    assert Matrix(planned, launcher, retries=5, notify=into(said)).run() == {"failed": 1, "finished": 1}
    assert len(launcher.jobs) == 2
    assert sum(line.startswith("failed") for line in said) == 1


def test_a_folder_that_holds_another_run_is_left_alone(tmp_path):
    (run,) = plan(tmp_path, axes={"seed": [0]})
    Matrix([run], ForkLauncher()).run()
    before = (run.folder / "result.json").read_bytes()
    changed = run.config.model_copy(update={"optimizer": run.config.optimizer.model_copy(update={"clip": 0.5})})
    said: list[str] = []
    other = type(run)(run.experiment, changed, run.order)
    assert Matrix([other], ForkLauncher(), notify=into(said)).run() == {"failed": 1}
    assert "holds another run" in said[0]
    assert (run.folder / "result.json").read_bytes() == before


@pytest.mark.parametrize(
    ("name", "content", "finished"),
    [
        ("result.json", "[", True),
        ("result.json", "[1]", True),
        ("config.json", "{", True),
        ("config.json", "[]", True),
        ("launch.json", "[]", False),
    ],
)
def test_a_damaged_record_holds_up_its_own_run_alone(name, content, finished, tmp_path):
    planned = plan(tmp_path, axes={"seed": [0, 1]})
    Matrix(planned[:1], ForkLauncher()).run()
    if not finished:
        (planned[0].folder / "result.json").unlink()
    (planned[0].folder / name).write_text(content)
    size = estimate(planned, 1)
    assert (size.runs, size.done) == (2, 0)
    said: list[str] = []
    assert Matrix(planned, ForkLauncher(), notify=into(said)).run() == {"failed": 1, "finished": 1}
    assert any(line.startswith("failed") and str(planned[0].folder / name) in line for line in said)
    assert (planned[0].folder / name).read_text() == content


def test_another_runs_result_is_not_taken_for_this_ones_where_its_config_is_gone(tmp_path):
    one, other = plan(tmp_path, axes={"seed": [0, 1]})
    Matrix([one], ForkLauncher()).run()
    other.folder.mkdir(parents=True)
    (one.folder / "result.json").rename(other.folder / "result.json")
    assert estimate([other], 1).done == 0
    said: list[str] = []
    assert Matrix([other], ForkLauncher(), notify=into(said)).run() == {"failed": 1}
    assert "holds another run" in said[0]


@pytest.mark.parametrize("obstacle", ["a file", "a full disk"])
def test_a_run_that_cannot_be_started_leaves_the_others_going(obstacle, tmp_path):
    planned = plan(tmp_path, axes={"seed": [0, 1]})
    folder = planned[1].folder
    folder.parent.mkdir(parents=True)
    if obstacle == "a file":
        folder.touch()
    else:
        folder.mkdir()
        (folder / RUNNER_LOCK).symlink_to("/dev/full")
    said: list[str] = []
    assert Matrix(planned, ForkLauncher(2), notify=into(said)).run() == {"finished": 1, "failed": 1}
    assert any(f"it could not be started: {folder}" in line for line in said)


def test_an_output_folder_that_cannot_be_made_is_refused(tmp_path):
    file = experiment_file(tmp_path)
    refused = lab("matrix", file, "--out", file)
    assert refused.exit_code == 2
    assert f"oelm: {file}/.lab: cannot be written (Not a directory)" in refused.stderr


def test_a_run_that_diverged_is_not_told_as_done(tmp_path):
    wild = {"optimizer": {"learning_rate": 1e30, "warmup_steps": 0}, "train": {"skip_nonfinite": 1000}}
    file = experiment_file(tmp_path, axes={"seed": [0]})
    content = yaml.safe_load(file.read_text())
    file.write_text(yaml.safe_dump({**content, "config": merge(content["config"], wild)}))
    planned = plan_runs([load_experiment(file)], Request(output=str(tmp_path / "runs")))
    said: list[str] = []
    assert Matrix(planned, ForkLauncher(), notify=into(said)).run() == {"diverged": 1}
    assert "its last validation loss is not a number" in said[-1]
    assert read_state(planned[0].folder).state == "diverged"
    again = lab("matrix", file, "--out", tmp_path / "runs")
    assert again.exit_code == 1
    assert again.stdout == "1 diverged\n"


def test_a_run_whose_folder_is_removed_is_made_again(tmp_path):
    (run,) = plan(tmp_path, axes={"seed": [0]}, config=_longer(tmp_path, 400, checkpoint=1000))
    said: list[str] = []
    launcher = ForkLauncher()

    def remove(_: Matrix) -> None:
        if len(launcher.jobs) == 1 and (read_state(run.folder).step or 0) >= 3:
            run.folder.rename(tmp_path / "gone")  # at once: the run writes into it while it is emptied

    assert Matrix([run], launcher, notify=into(said)).run(remove) == {"finished": 1}, said
    assert "its folder was removed while it ran; it is tried again" in said[1]


def test_a_run_of_several_processes_that_is_stopped_before_it_begins_is_left(tmp_path):
    """torchrun ends with 1 whatever ended its processes."""

    class Torchrun:
        slots, info, code = 1, LaunchInfo(launcher="test", processes=2), None

        def ready(self, orphans):
            return True

        def start(self, *_):
            return self

        def attach(self, info):
            return None

        def poll(self):
            return self.code

        def stop(self):
            self.code = 1

    (run,) = plan(tmp_path, axes={"seed": [0]})
    launcher, said = Torchrun(), []
    work = Matrix([run], launcher, notify=into(said))
    assert work.run(lambda _: launcher.code or os.kill(os.getpid(), signal.SIGTERM)) == {"left": 1}, said


def test_a_clock_that_is_set_back_hides_no_end(tmp_path):
    """Nor does that of another machine: the status of this start is the one that is not the last start's."""
    write_status(tmp_path, "stopped", updated=1000.0)
    before = status_time(tmp_path)
    assert not was_stopped(tmp_path, 1, before)
    write_status(tmp_path, "stopped", updated=400.0)
    assert was_stopped(tmp_path, 1, before)
    (tmp_path / "status.json").write_text("[")
    assert not was_stopped(tmp_path, 1, before)


def test_a_run_that_another_process_has_is_waited_for(tmp_path):
    """Two matrices in one folder: the second leaves alone what the first has, and takes it over if it dies."""
    planned = plan(tmp_path, axes={"seed": [0, 1]})
    busy, other = planned[0].folder, planned[1].folder
    busy.mkdir(parents=True)
    lock = hold(busy, RUNNER_LOCK)
    said: list[str] = []
    launcher = ForkLauncher()

    def release(work: Matrix) -> None:
        if (other / "result.json").exists() and not lock.closed:
            assert {entry.run.folder: entry.state for entry in work.entries}[busy] == "elsewhere"
            assert len(launcher.jobs) == 1
            lock.close()

    assert Matrix(planned, launcher, notify=into(said)).run(release) == {"finished": 2}
    assert any(f"waiting  {planned[0].name}: it is run by process {os.getpid()}" in line for line in said)
    assert any(f"taking over {planned[0].name}" in line for line in said)


def test_two_matrices_share_the_work(tmp_path):
    planned = plan(tmp_path, axes={"seed": [0, 1, 2]})
    launchers = [ForkLauncher(1, {number: Slow(0.01) for number in range(3)}) for _ in range(2)]
    ends: list[dict[str, int]] = []

    def work(launcher: ForkLauncher) -> None:
        ends.append(Matrix(planned, launcher).run())

    threads = [threading.Thread(target=work, args=(launcher,)) for launcher in launchers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert ends == [{"finished": 3}] * 2, "both see everything done"
    assert sum(len(launcher.jobs) for launcher in launchers) == 3, "and each run was started once"
    assert all(finishes(run.folder) == 1 for run in planned)


def test_asked_to_stop_a_matrix_saves_its_runs_and_goes_on_later(tmp_path):
    planned = plan(tmp_path, axes={"seed": [0, 1, 2]})
    launcher = ForkLauncher(2, {number: Slow(0.1) for number in range(3)})
    said: list[str] = []
    work = Matrix(planned, launcher, notify=into(said))

    def interrupt(_: Matrix) -> None:
        if all(read_state(run.folder).step for run in planned[:2]) and not work.stopped:
            os.kill(os.getpid(), signal.SIGTERM)

    assert work.run(interrupt) == {"stopped": 2, "left": 1}
    assert "asked to stop by SIGTERM: saving and stopping 2 runs" in said
    assert "left     1 run: the same command resumes from here" in said
    told = [line.rpartition(" [")[2] for line in said[-2:]]
    assert told == ["0/3, 1 stopped, 1 left]", "0/3, 2 stopped, 1 left]"], "what is stopped or left is not done"
    assert [read_state(run.folder).state for run in planned] == ["stopped", "stopped", "new"]
    assert Matrix(planned, ForkLauncher(), notify=into(said)).run() == {"finished": 3}
    assert "resumed from step" in (planned[0].folder / "train.log").read_text()


@pytest.mark.parametrize("host", ["here", "another-machine"])
def test_all_that_goes_on_is_stopped_with_the_matrix_that_would_start_the_next_run(tmp_path, monkeypatch, host):
    planned = plan(tmp_path, axes={"seed": [0, 1, 2]})
    said: list[str] = []

    def stop_all(work: Matrix) -> None:
        if read_state(planned[0].folder).step and len(said) < 2:
            if host != "here":
                monkeypatch.setattr("socket.gethostname", lambda: host)
            said.append(lab("stop", "--all", "--out", tmp_path).stdout)

    launcher = ForkLauncher(1, {number: Slow(0.2) for number in range(3)})
    assert Matrix(planned, launcher).run(stop_all) == {"stopped": 1, "left": 2}
    asked = said[0]
    assert f"the matrix of process {os.getpid()} on " in asked
    assert "starts no more runs" in asked
    assert f"{Path('runs') / planned[0].name}: stops with its matrix" in asked
    assert all("was asked to stop before" in text for text in said[1:]), "a second signal would end it unsaved"
    assert [read_state(run.folder).state for run in planned] == ["stopped", "new", "new"]
    assert len(launcher.jobs) == 1


def test_a_run_that_is_stopped_alone_lets_its_matrix_go_on(tmp_path):
    planned = plan(tmp_path, axes={"seed": [0, 1]})
    said: list[str] = []

    def stop_one(work: Matrix) -> None:
        if read_state(planned[0].folder).step and not said:
            said.append(lab("stop", planned[0].folder).stdout)

    work = Matrix(planned, ForkLauncher(1, {0: Slow(0.2)}))
    assert work.run(stop_one) == {"stopped": 1, "finished": 1}
    assert "asked to stop; it saves first" in said[0]


def test_out_of_time_a_matrix_stops_by_itself(tmp_path):
    planned = plan(tmp_path, axes={"seed": [0, 1]})
    work = Matrix(planned, ForkLauncher(1), deadline=0.0)
    assert work.run() == {"left": 2}


def test_a_run_waits_for_the_one_that_it_starts_from(tmp_path, monkeypatch):
    upstream, downstream = plan(tmp_path, axes={"seed": [0, 1]})
    linked = type(downstream)(downstream.experiment, downstream.config, downstream.order, upstream)
    order: list[str] = []
    monkeypatch.setattr(matrix_module, "export_plain", lambda run: order.append(f"export {run.name}") or "")
    work = Matrix([linked, upstream], ForkLauncher(), notify=into(order))
    assert work.run() == {"finished": 2}
    happened = [line.split()[0] for line in order]
    assert happened == ["started", "finished", "export", "started", "finished"]

    broken = plan(tmp_path, "broken", axes={"seed": [0, 1]})
    linked = type(broken[1])(broken[1].experiment, broken[1].config, broken[1].order, broken[0])
    work = Matrix([broken[0], linked], ForkLauncher(1, {0: die}), retries=0, notify=into(order))
    assert work.run() == {"failed": 1, "blocked": 1}


def test_an_export_that_was_cut_is_made_again_and_a_whole_one_is_not(tmp_path):
    (planned,) = plan(tmp_path, axes={})
    train(planned.config, quiet=True)
    plain = planned.folder / "plain"
    plain.mkdir()
    (plain / "config.json").write_text("{}")
    assert matrix_module.export_plain(planned.folder) == ""
    written = (plain / "model.safetensors").stat().st_mtime_ns
    assert matrix_module.export_plain(planned.folder) == ""
    assert (plain / "model.safetensors").stat().st_mtime_ns == written


def test_an_export_is_out_of_the_terminals_reach(tmp_path, monkeypatch):
    """Ctrl-C is for the runner alone: an export that it ended was told as a failure."""
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\ncut -d' ' -f6 /proc/$$/stat >&2\nexit 1\n")  # the session that it is in
    python.chmod(0o755)
    monkeypatch.setattr(matrix_module.sys, "executable", str(python))
    assert int(matrix_module.export_plain(tmp_path)) != os.getsid(0)


def test_a_matrix_is_seen_while_it_runs_and_leaves_nothing_of_itself(tmp_path):
    from oelm.lab.status import list_runs

    planned = plan(tmp_path, axes={"seed": [0, 1]})
    seen: set[str] = set()

    def look_around(_: Matrix) -> None:
        seen.update(state.state for state in list_runs(tmp_path / "runs"))

    Matrix(planned, ForkLauncher(1)).run(look_around)
    assert {"waiting", "finished"} <= seen
    assert list((tmp_path / "runs" / ".lab").iterdir()) == []


def test_a_matrix_that_ends_while_another_looks_is_no_trouble(tmp_path, monkeypatch):
    """What it said is listed, and gone when it is read."""
    from oelm.lab.status import list_runs

    planned = plan(tmp_path, axes={"seed": [0]})
    gone = tmp_path / "runs" / ".lab" / "gone"
    monkeypatch.setattr("oelm.lab.status.live_matrices", lambda root: [gone])
    (tmp_path / "runs").mkdir()
    assert list_runs(tmp_path / "runs") == []
    real = Path.iterdir
    monkeypatch.setattr(Path, "iterdir", lambda path: [*real(path), *([gone] if path == gone.parent else [])])
    assert Matrix(planned, ForkLauncher(1)).run() == {"finished": 1}


# Many runs


def test_a_large_matrix_shows_its_size_and_asks(tmp_path):
    file = experiment_file(tmp_path, axes={"seed": list(range(1000)), "data.fraction": [0.5, 1.0]})
    result = lab("matrix", file, "--out", tmp_path / "runs", "--gpus", "")
    assert result.exit_code == 2
    count, question = result.stderr.splitlines()
    assert count.startswith("2000 runs; about ")
    assert count.endswith("1 at once")
    assert question == "oelm: Start them? There is no terminal to ask in: give --yes to continue"
    assert not (tmp_path / "runs").exists()


# Launchers


def test_threads_are_divided_and_gpus_are_named(monkeypatch):
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
    assert local_launcher("", jobs=2).all_slots == [Slot((), 4)] * 2, "'' is the CPU"


def test_visible_gpus_are_named_without_the_spaces_between_them(monkeypatch):
    monkeypatch.setattr("oelm.lab.launch.local._DRIVERS", ("/dev/null",))
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3, 5")
    monkeypatch.setattr("oelm.lab.launch.local._busy_gpus", lambda: {"5"})
    assert [slot.gpus for slot in local_launcher().all_slots] == [("3",)]
    assert [slot.gpus for slot in local_launcher("5").all_slots] == [("5",)]


@pytest.mark.parametrize(
    ("asked", "threads"), [("1", 1), ("3", 3), ("16", 4), ("2,1", 2), ("", 4), ("0", 4), ("many", 4)]
)
def test_a_run_has_no_more_threads_than_the_user_asks_for(asked, threads, monkeypatch):
    monkeypatch.setattr("oelm.base.machine.cores", lambda: 8)
    monkeypatch.setattr("oelm.lab.launch.local._visible_gpus", list)
    monkeypatch.setenv("OMP_NUM_THREADS", asked)
    assert local_launcher(jobs=2).all_slots == [Slot((), threads)] * 2
    monkeypatch.setattr("oelm.lab.launch.local._visible_gpus", lambda: ["0", "1"])
    assert local_launcher("0,1").all_slots == [Slot(("0",), threads), Slot(("1",), threads)]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"gpus": "7"}, "--gpus 7: there is no GPU 7 here; there are 0, 1"),
        ({"gpus": "0,0"}, "names a GPU twice"),
        ({"gpus": "0", "processes": 2}, "a run takes 2 GPUs, but only 1 can be used: 0"),
        ({"jobs": 0}, "at least 1"),
    ],
)
def test_gpus_that_do_not_exist_are_refused(arguments, says, monkeypatch):
    monkeypatch.setattr("oelm.lab.launch.local._visible_gpus", lambda: ["0", "1"])
    with pytest.raises(Exception, match=says):
        local_launcher(**arguments)


def test_gpus_that_are_all_in_use_are_refused(monkeypatch):
    monkeypatch.setattr("oelm.lab.launch.local._visible_gpus", lambda: ["0"])
    monkeypatch.setattr("oelm.lab.launch.local._busy_gpus", lambda: {"0"})
    with pytest.raises(Exception, match="are in use; name some with --gpus to share them"):
        local_launcher()


def test_a_slot_is_taken_once(tmp_path, monkeypatch):
    """A GPU that an orphan computes on is not given to another run; nor one of a set of them."""
    monkeypatch.setattr("oelm.lab.launch.local.command", lambda *_: [sys.executable, "-c", "pass"])
    import socket

    orphan = LaunchInfo(launcher="local", host=socket.gethostname(), pid=1, gpus=("0",))
    with open(tmp_path / "lock", "w") as lock:
        both = LocalLauncher([Slot(("0",), 1), Slot(("1",), 1)])
        assert both.start(tmp_path, tmp_path, lock, [orphan]).slot.gpus == ("1",)
        assert not LocalLauncher([Slot(("0", "1"), 1)]).ready([orphan])
        elsewhere = orphan.model_copy(update={"host": "other"})
        assert LocalLauncher([Slot(("0",), 1)]).start(tmp_path, tmp_path, lock, [elsewhere]).slot.gpus == ("0",)


def test_a_run_that_goes_on_keeps_its_threads(tmp_path, monkeypatch):
    monkeypatch.setattr("oelm.lab.launch.local.command", lambda *_: [sys.executable, "-c", "pass"])
    (tmp_path / "checkpoints" / "step-00000005").mkdir(parents=True)
    (tmp_path / LAUNCH).write_text(json.dumps({"launcher": "local", "threads": 3}))
    with open(tmp_path / "lock", "w") as lock:
        job = LocalLauncher([Slot((), 1)]).start(tmp_path, tmp_path, lock, [])
    assert job.slot.threads == job.info.threads == 3


def test_several_processes_go_through_torchrun_on_a_free_port():
    words = command(Path("c.json"), 2)
    assert words[1:3] == ["-m", "torch.distributed.run"]
    assert "--standalone" in words
    assert words[-3:] == ["oelm", "train", "c.json"]


@pytest.mark.timeout(300)
def test_runs_that_start_at_once(tmp_path):
    """The demo's launcher: the same results as any other, a session of its own, and a graceful stop."""
    planned = plan(tmp_path, axes={"seed": [0, 1]})
    assert Matrix(planned, ForkedLauncher(2, train_and_exit)).run() == {"finished": 2}
    for name, folder in undisturbed(planned, tmp_path / "undisturbed").items():
        threads = read(tmp_path / "runs" / name / "environment.json")["cpu"]["threads"]
        assert threads == threads_each(2)
        assert outcome(tmp_path / "runs" / name).keys() == outcome(folder).keys()
    (slow,) = plan(tmp_path, "slow", axes={"seed": [0]}, config=_longer(tmp_path, 5000, 10_000))
    work = Matrix([slow], ForkedLauncher(1, train_and_exit))

    def stop(_: Matrix) -> None:
        pid = read_state(slow.folder).pid
        if pid is not None and not work.stopped:
            assert os.getsid(pid) == pid != os.getsid(0), "Ctrl-C in a terminal does not reach it"
            os.kill(os.getpid(), signal.SIGINT)

    assert work.run(stop) == {"stopped": 1}


@pytest.mark.timeout(300)
def test_a_run_of_two_processes(tmp_path):
    (run,) = plan(tmp_path, axes={"seed": [0]})
    said: list[str] = []
    assert Matrix([run], local_launcher("", 1, 2), notify=into(said)).run() == {"finished": 1}, said
    assert read(run.folder / "environment.json")["world_size"] == 2
