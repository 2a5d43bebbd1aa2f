"""Matrices of runs in real processes: no run twice and none lost when something is killed, fails or is stopped."""

import os
import signal
import threading
from pathlib import Path

import pytest
import yaml

from oelm.base.locks import hold, holder
from oelm.base.strict import merge
from oelm.lab import matrix as matrix_module
from oelm.lab.estimate import estimate
from oelm.lab.experiment import load_experiment
from oelm.lab.launch.interface import LAUNCH, LaunchInfo
from oelm.lab.matrix import RUNNER_LOCK, Matrix
from oelm.lab.plan import Request, plan_runs
from oelm.lab.status import list_runs, read_state
from oelm.training.engine import train
from tests.support.lab import (
    AXES,
    ForkLauncher,
    count_finishes,
    experiment_file,
    lab,
    line_appender,
    longer_config,
    plan,
    start_command,
    train_uninterrupted,
    wait_for,
)
from tests.support.training import Held, Slow, die, metrics_without_times, read, result_without_times


@pytest.mark.full
@pytest.mark.timeout(420)
def test_a_matrix_resumes_after_its_process_was_killed(tmp_path):
    """2 methods x 2 seeds, two at a time. The matrix and one of its two running runs are killed with SIGKILL; the other
    run continues alone. Started again, the matrix finishes every run once, with the same results as without a kill.
    """
    file = experiment_file(
        tmp_path,
        axes=AXES,
        config=longer_config(tmp_path, 300, checkpoint=25),
    )
    arguments = ("matrix", file, "--jobs", 2, "--gpus", "", "--out", tmp_path / "runs", "--yes")
    planned = plan_runs([load_experiment(file)], Request(output=str(tmp_path / "runs")))
    first, second = planned[0].folder, planned[1].folder

    runner = start_command(*arguments)
    wait_for(lambda: all(any((run / "checkpoints").glob("step-*")) for run in (first, second)), 180)
    runner.kill()
    runner.wait()
    victim, orphan = read(first / LAUNCH)["pid"], read(second / LAUNCH)["pid"]
    os.kill(victim, signal.SIGKILL)
    wait_for(lambda: holder(first) is None)
    assert not (first / "result.json").exists(), "it was killed before its end"
    assert read_state(first).state == "died"
    if not (second / "result.json").exists():
        assert holder(second, RUNNER_LOCK) is not None, "it is still locked, because its process is alive"

    again = start_command(*arguments)
    output, _ = again.communicate(timeout=300)
    assert again.returncode == 0, output
    assert "4 finished" in output

    with pytest.raises(ProcessLookupError):
        os.kill(orphan, 0)
    for name, folder in train_uninterrupted(planned, tmp_path / "uninterrupted").items():
        run = tmp_path / "runs" / name
        assert result_without_times(run) == result_without_times(folder)
        assert metrics_without_times(run) == metrics_without_times(folder), "all losses are bit-identical"
        assert count_finishes(run) == 1
    assert "resumed from step" in (first / "train.log").read_text()
    assert "resumed from step" not in (second / "train.log").read_text()

    third = lab(*arguments)
    assert (third.exit_code, third.stdout.splitlines()[0]) == (0, "4 finished")
    assert third.stderr.count("done before") == 4
    assert all(count_finishes(run.folder) == 1 for run in planned)


def test_methods_with_one_seed_share_their_batches_and_initial_weights(tmp_path):
    """Before training, all weights that the method does not set are bit-identical."""
    from oelm.method.apply import apply
    from oelm.training.tasks.open import open_task

    planned = plan(tmp_path)
    baseline, frozen = planned[0].config, planned[1].config
    assert (baseline.seed, frozen.seed) == (0, 0)
    tasks = [open_task(config) for config in (baseline, frozen)]
    models = [task.build_model(config) for task, config in zip(tasks, (baseline, frozen), strict=True)]
    apply(models[1], frozen.method, frozen.seed)
    baseline_weights, frozen_weights = (model.state_dict() for model in models)
    changed = {name for name in baseline_weights if not baseline_weights[name].equal(frozen_weights[name])}
    assert changed == {name for name in baseline_weights if "q_proj" in name or "k_proj" in name}
    left, right = (task.batch(0, 16) for task in tasks)
    assert all(left[key].equal(right[key]) for key in left)


def test_finished_runs_are_skipped(tmp_path):
    planned = plan(tmp_path)
    launcher = ForkLauncher()
    assert Matrix(planned[:2], launcher).run() == {"finished": 2}
    assert len(launcher.jobs) == 2
    assert Matrix(planned, launcher).run() == {"finished": 4}
    assert len(launcher.jobs) == 4
    assert all(count_finishes(run.folder) == 1 for run in planned)


@pytest.mark.full
def test_a_killed_run_is_retried_up_to_the_limit(tmp_path):
    planned = plan(tmp_path, axes={"seed": [0]})
    lines: list[str] = []
    launcher = ForkLauncher(1, {0: die, 1: die})
    assert Matrix(planned, launcher, retries=2, notify=line_appender(lines)).run() == {"finished": 1}
    assert len(launcher.jobs) == 3
    assert sum("killed by signal 9" in line and "retrying" in line for line in lines) == 2

    launcher = ForkLauncher(1, {0: die, 1: die})
    other = plan(tmp_path, "other", axes={"seed": [0]})
    matrix = Matrix(other, launcher, retries=1, notify=line_appender(lines))
    assert matrix.run() == {"failed": 1}
    assert len(launcher.jobs) == 2
    assert "after 2 attempts" in lines[-1]
    assert Matrix(other, ForkLauncher(1), notify=line_appender(lines)).run() == {"finished": 1}, (
        "a new matrix resumes it"
    )


def test_a_refused_run_is_not_retried_and_the_others_continue(tmp_path):
    planned = plan(tmp_path, axes={"data.fraction": [1e-9, 1.0]})
    lines: list[str] = []
    launcher = ForkLauncher(1)
    assert Matrix(planned, launcher, retries=5, notify=line_appender(lines)).run() == {"failed": 1, "finished": 1}
    assert len(launcher.jobs) == 2
    assert sum(line.startswith("failed") for line in lines) == 1


def test_a_folder_that_holds_another_run_is_left_unchanged(tmp_path):
    (run,) = plan(tmp_path, axes={"seed": [0]})
    Matrix([run], ForkLauncher()).run()
    before = (run.folder / "result.json").read_bytes()
    changed = run.config.model_copy(update={"optimizer": run.config.optimizer.model_copy(update={"clip": 0.5})})
    lines: list[str] = []
    changed_run = type(run)(run.experiment, changed, run.order)
    assert Matrix([changed_run], ForkLauncher(), notify=line_appender(lines)).run() == {"failed": 1}
    assert "holds another run" in lines[0]
    assert (run.folder / "result.json").read_bytes() == before


@pytest.mark.sample(1)
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
def test_a_damaged_record_fails_only_its_own_run(name, content, finished, tmp_path):
    planned = plan(tmp_path, axes={"seed": [0, 1]})
    Matrix(planned[:1], ForkLauncher()).run()
    if not finished:
        (planned[0].folder / "result.json").unlink()
    (planned[0].folder / name).write_text(content)
    size = estimate(planned, 1)
    assert (size.runs, size.done) == (2, 0)
    lines: list[str] = []
    assert Matrix(planned, ForkLauncher(), notify=line_appender(lines)).run() == {"failed": 1, "finished": 1}
    assert any(line.startswith("failed") and str(planned[0].folder / name) in line for line in lines)
    assert (planned[0].folder / name).read_text() == content


def test_a_result_without_a_config_does_not_count_as_this_runs_result(tmp_path):
    finished, moved_to = plan(tmp_path, axes={"seed": [0, 1]})
    Matrix([finished], ForkLauncher()).run()
    moved_to.folder.mkdir(parents=True)
    (finished.folder / "result.json").rename(moved_to.folder / "result.json")
    assert estimate([moved_to], 1).done == 0
    lines: list[str] = []
    assert Matrix([moved_to], ForkLauncher(), notify=line_appender(lines)).run() == {"failed": 1}
    assert "holds another run" in lines[0]


@pytest.mark.parametrize("obstacle", ["a file", "a full disk"])
def test_a_run_that_cannot_be_started_does_not_stop_the_others(obstacle, tmp_path):
    planned = plan(tmp_path, axes={"seed": [0, 1]})
    folder = planned[1].folder
    folder.parent.mkdir(parents=True)
    if obstacle == "a file":
        folder.touch()
    else:
        folder.mkdir()
        (folder / RUNNER_LOCK).symlink_to("/dev/full")
    lines: list[str] = []
    assert Matrix(planned, ForkLauncher(2), notify=line_appender(lines)).run() == {"finished": 1, "failed": 1}
    assert any(line.startswith("failed") and str(folder) in line for line in lines)


def test_an_output_folder_that_cannot_be_made_is_refused(tmp_path):
    file = experiment_file(tmp_path)
    result = lab("matrix", file, "--out", file)
    assert result.exit_code == 2
    assert f"oelm: {file}/.lab: " in result.stderr
    assert "Not a directory" in result.stderr


def test_a_diverged_run_is_not_reported_as_finished(tmp_path):
    diverging = {"optimizer": {"learning_rate": 1e30, "warmup_steps": 0}, "train": {"skip_nonfinite": 1000}}
    file = experiment_file(tmp_path, axes={"seed": [0]})
    content = yaml.safe_load(file.read_text())
    file.write_text(yaml.safe_dump({**content, "config": merge(content["config"], diverging)}))
    planned = plan_runs([load_experiment(file)], Request(output=str(tmp_path / "runs")))
    lines: list[str] = []
    assert Matrix(planned, ForkLauncher(), notify=line_appender(lines)).run() == {"diverged": 1}
    assert "not a number" in lines[-1]
    assert read_state(planned[0].folder).state == "diverged"
    again = lab("matrix", file, "--out", tmp_path / "runs")
    assert again.exit_code == 1
    assert again.stdout.startswith("1 diverged\n")
    assert "1 run left out" in again.stdout


@pytest.mark.full
def test_a_run_whose_folder_is_removed_is_retried(tmp_path):
    (run,) = plan(tmp_path, axes={"seed": [0]}, config=longer_config(tmp_path, 400, checkpoint=1000))
    lines: list[str] = []
    launcher = ForkLauncher()

    def remove(_: Matrix) -> None:
        if len(launcher.jobs) == 1 and (read_state(run.folder).step or 0) >= 3:
            run.folder.rename(tmp_path / "removed")  # renamed, because the run still writes into it

    assert Matrix([run], launcher, notify=line_appender(lines)).run(remove) == {"finished": 1}, lines
    assert "folder was removed" in lines[1]


@pytest.mark.full
def test_a_torchrun_run_stopped_before_its_first_step_is_not_a_failure(tmp_path):
    """torchrun exits with 1 for any end of its processes, so the exit code does not tell a stop from a failure."""

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
    launcher, lines = Torchrun(), []
    matrix = Matrix([run], launcher, notify=line_appender(lines))
    assert matrix.run(lambda _: launcher.code or os.kill(os.getpid(), signal.SIGTERM)) == {"left": 1}, lines


@pytest.mark.full
def test_a_run_locked_by_another_process_is_waited_for_and_taken_over_when_that_process_ends(tmp_path):
    planned = plan(tmp_path, axes={"seed": [0, 1]})
    locked, other = planned[0].folder, planned[1].folder
    locked.mkdir(parents=True)
    lock = hold(locked, RUNNER_LOCK)
    lines: list[str] = []
    launcher = ForkLauncher()

    def release(matrix: Matrix) -> None:
        if (other / "result.json").exists() and not lock.closed:
            assert {entry.run.folder: entry.state for entry in matrix.entries}[locked] == "elsewhere"
            assert len(launcher.jobs) == 1
            lock.close()

    assert Matrix(planned, launcher, notify=line_appender(lines)).run(release) == {"finished": 2}
    assert any(f"waiting  {planned[0].name}: " in line and f"process {os.getpid()}" in line for line in lines)
    assert any(f"taking over {planned[0].name}" in line for line in lines)


def test_two_matrices_share_the_work(tmp_path):
    planned = plan(tmp_path, axes={"seed": [0, 1, 2]})
    launchers = [ForkLauncher(1, {number: Slow(0.01) for number in range(3)}) for _ in range(2)]
    outcomes: list[dict[str, int]] = []

    def work(launcher: ForkLauncher) -> None:
        outcomes.append(Matrix(planned, launcher).run())

    threads = [threading.Thread(target=work, args=(launcher,)) for launcher in launchers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert outcomes == [{"finished": 3}] * 2, "both see every run finished"
    assert sum(len(launcher.jobs) for launcher in launchers) == 3, "each run was started once"
    assert all(count_finishes(run.folder) == 1 for run in planned)


def test_a_stopped_matrix_saves_its_runs_and_resumes_later(tmp_path):
    planned = plan(tmp_path, axes={"seed": [0, 1, 2]})
    launcher = ForkLauncher(2, {number: Held(3) for number in range(3)})
    lines: list[str] = []
    matrix = Matrix(planned, launcher, notify=line_appender(lines))

    def interrupt(_: Matrix) -> None:
        if all(read_state(run.folder).step for run in planned[:2]) and not matrix.stopped:
            os.kill(os.getpid(), signal.SIGTERM)

    assert matrix.run(interrupt) == {"stopped": 2, "left": 1}
    assert any("SIGTERM" in line and "2 runs" in line for line in lines)
    assert any(line.startswith("left") and "1 run" in line for line in lines)
    progress = [line.rpartition(" [")[2] for line in lines[-2:]]
    assert progress == ["0/3, 1 stopped, 1 left]", "0/3, 2 stopped, 1 left]"], "stopped and left runs are not done"
    assert [read_state(run.folder).state for run in planned] == ["stopped", "stopped", "new"]
    assert Matrix(planned, ForkLauncher(), notify=line_appender(lines)).run() == {"finished": 3}
    assert "resumed from step" in (planned[0].folder / "train.log").read_text()


@pytest.mark.parametrize("host", ["here", "another-machine"])
def test_stop_all_stops_the_matrix_before_its_runs(tmp_path, monkeypatch, host):
    planned = plan(tmp_path, axes={"seed": [0, 1, 2]})
    outputs: list[str] = []

    def stop_all(matrix: Matrix) -> None:
        if read_state(planned[0].folder).step and len(outputs) < 2:
            if host != "here":
                monkeypatch.setattr("socket.gethostname", lambda: host)
            outputs.append(lab("stop", "--all", "--out", tmp_path).stdout)

    launcher = ForkLauncher(1, {number: Held(3) for number in range(3)})
    assert Matrix(planned, launcher).run(stop_all) == {"stopped": 1, "left": 2}
    first = outputs[0]
    assert f"the matrix of process {os.getpid()} on " in first
    assert "starts no more runs" in first
    assert f"{Path('runs') / planned[0].name}: stops with its matrix" in first
    assert all("was asked to stop before" in text for text in outputs[1:]), "not signalled twice"
    assert [read_state(run.folder).state for run in planned] == ["stopped", "new", "new"]
    assert len(launcher.jobs) == 1


def test_a_matrix_continues_when_one_of_its_runs_is_stopped(tmp_path):
    planned = plan(tmp_path, axes={"seed": [0, 1]})
    outputs: list[str] = []

    def stop_one(work: Matrix) -> None:
        if read_state(planned[0].folder).step and not outputs:
            outputs.append(lab("stop", planned[0].folder).stdout)

    work = Matrix(planned, ForkLauncher(1, {0: Held(3)}))
    assert work.run(stop_one) == {"stopped": 1, "finished": 1}
    assert "asked to stop" in outputs[0]


def test_a_matrix_starts_nothing_after_its_deadline(tmp_path):
    planned = plan(tmp_path, axes={"seed": [0, 1]})
    matrix = Matrix(planned, ForkLauncher(1), deadline=0.0)
    assert matrix.run() == {"left": 2}


def test_a_run_waits_for_the_one_that_it_starts_from(tmp_path, monkeypatch):
    upstream, downstream = plan(tmp_path, axes={"seed": [0, 1]})
    dependent = type(downstream)(downstream.experiment, downstream.config, downstream.order, upstream)
    events: list[str] = []
    monkeypatch.setattr(matrix_module, "export_plain", lambda run: events.append(f"export {run.name}") or "")
    matrix = Matrix([dependent, upstream], ForkLauncher(), notify=line_appender(events))
    assert matrix.run() == {"finished": 2}
    kinds = [line.split()[0] for line in events]
    assert kinds == ["started", "finished", "export", "started", "finished"]

    broken = plan(tmp_path, "broken", axes={"seed": [0, 1]})
    dependent = type(broken[1])(broken[1].experiment, broken[1].config, broken[1].order, broken[0])
    matrix = Matrix([broken[0], dependent], ForkLauncher(1, {0: die}), retries=0, notify=line_appender(events))
    assert matrix.run() == {"failed": 1, "blocked": 1}


@pytest.mark.full
def test_an_interrupted_export_is_repeated_and_a_complete_one_is_not(tmp_path):
    (planned,) = plan(tmp_path, axes={})
    train(planned.config, quiet=True)
    plain = planned.folder / "plain"
    plain.mkdir()
    (plain / "config.json").write_text("{}")
    assert matrix_module.export_plain(planned.folder) == ""
    export_time = (plain / "model.safetensors").stat().st_mtime_ns
    assert matrix_module.export_plain(planned.folder) == ""
    assert (plain / "model.safetensors").stat().st_mtime_ns == export_time


def test_an_export_has_its_own_session(tmp_path, monkeypatch):
    """Ctrl-C in a terminal must reach only the matrix: an export that it ended would count as a failure."""
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\ncut -d' ' -f6 /proc/$$/stat >&2\nexit 1\n")  # prints the session of the process
    python.chmod(0o755)
    monkeypatch.setattr(matrix_module.sys, "executable", str(python))
    assert int(matrix_module.export_plain(tmp_path)) != os.getsid(0)


def test_a_running_matrix_is_visible_and_removes_its_folder_at_the_end(tmp_path):
    planned = plan(tmp_path, axes={"seed": [0, 1]})
    states: set[str] = set()

    def note_states(_: Matrix) -> None:
        states.update(state.state for state in list_runs(tmp_path / "runs"))

    Matrix(planned, ForkLauncher(1)).run(note_states)
    assert {"waiting", "finished"} <= states
    assert list((tmp_path / "runs" / ".lab").iterdir()) == []


def test_a_matrix_that_ends_while_it_is_being_read_is_ignored(tmp_path, monkeypatch):
    """Its folder is listed, but no longer there when it is read."""
    planned = plan(tmp_path, axes={"seed": [0]})
    removed = tmp_path / "runs" / ".lab" / "gone"
    monkeypatch.setattr("oelm.lab.status.live_matrices", lambda root: [removed])
    (tmp_path / "runs").mkdir()
    assert list_runs(tmp_path / "runs") == []
    original_iterdir = Path.iterdir
    monkeypatch.setattr(
        Path, "iterdir", lambda path: [*original_iterdir(path), *([removed] if path == removed.parent else [])]
    )
    assert Matrix(planned, ForkLauncher(1)).run() == {"finished": 1}


# Large matrices


def test_a_large_matrix_shows_its_size_and_needs_confirmation(tmp_path):
    file = experiment_file(tmp_path, axes={"seed": list(range(1000)), "data.fraction": [0.5, 1.0]})
    result = lab("matrix", file, "--out", tmp_path / "runs", "--gpus", "")
    assert result.exit_code == 2
    count, question = result.stderr.splitlines()
    assert count.startswith("2000 runs; about ")
    assert count.endswith("1 at once")
    assert "--yes" in question
    assert not (tmp_path / "runs").exists()
