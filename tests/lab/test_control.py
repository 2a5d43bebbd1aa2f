"""What is seen and done from records alone: status, logs, stop, clean, archive; with runs alive, dead and elsewhere."""

import json
import os
import shutil
import socket
import time
from pathlib import Path

import pytest

from oelm.base.locks import hold, holder
from oelm.config import RunConfig
from oelm.errors import FileError, LabError
from oelm.lab import control
from oelm.lab.status import find_run, list_runs, read_state
from oelm.runs.folder import SILENCE, STOP, RunFolder, read_metrics
from oelm.training.engine import train
from tests.support.lab import lab, refusal, wait_for
from tests.support.records import change, language_run, write_status
from tests.support.training import Slow, assert_same_run, die, finished, start, tiny, written

HERE = socket.gethostname()


def folder_of(place: Path, **changes) -> tuple[Path, RunConfig]:
    """A run's config file, and its config."""
    fields = tiny(place / "runs", **changes)
    return written(place / f"{changes.get('experiment', 'run')}.yaml", fields), RunConfig.load(fields)


@pytest.fixture(scope="module")
def zoo(tmp_path_factory):
    """A folder with a run in every state that a process can leave behind."""
    place = tmp_path_factory.mktemp("zoo")
    train(folder_of(place, experiment="done")[1], quiet=True)
    file, _ = folder_of(place, experiment="broken", optimizer={"learning_rate": 1e30, "warmup_steps": 0})
    assert start("train", file).wait() == 2
    file, config = folder_of(place, experiment="dead")
    process = start("train", file, sabotage=Slow())
    process.wait_for(lambda: read_state(config.folder).step is not None)
    process.signal(9)
    process.wait()
    file, config = folder_of(place, experiment="halted")
    process = start("train", file, sabotage=Slow())
    process.wait_for(lambda: read_state(config.folder).step is not None)
    process.signal(15)
    assert process.wait() == 75
    damaged = place / "runs" / "damaged" / "baseline" / "seed-0"
    damaged.mkdir(parents=True)
    (damaged / "config.json").write_text("{}")
    (damaged / "status.json").write_text('{"state": "run')
    return place / "runs"


# Status


def test_every_state_is_told_from_the_records(zoo):
    states = {run.name.split("/")[0]: run.state for run in list_runs(zoo)}
    assert states == {
        "done": "finished",
        "broken": "failed",
        "dead": "died",
        "halted": "stopped",
        "damaged": "unreadable",
    }


def test_the_table_shows_what_there_is_to_know(zoo):
    shown = lab("status", zoo).stdout
    lines = {line.split("/")[0]: line for line in shown.splitlines()}
    for word in ("finished", "12/12", HERE):
        assert word in lines["done"]
    head, run = shown.splitlines()[0], read_state(zoo / "done" / "baseline" / "seed-0")
    for column, value in (("train loss", run.loss), ("val loss", run.val_loss), ("val ppl / acc", run.perplexity)):
        assert float(lines["done"][head.index(column) :].split()[0]) == pytest.approx(value, abs=0.01), column
    assert "died" in lines["dead"]
    assert "status.json: cannot be read as JSON" in shown
    assert "5 runs: " in shown.splitlines()[-1]
    rows = json.loads(lab("status", zoo, "--json").stdout)
    done = next(row for row in rows if row["experiment"] == "done")
    assert (done["state"], done["method"], done["seed"], done["step"]) == ("finished", "baseline", 0, 12)
    assert done["perplexity"] > 1


def test_a_run_that_goes_on_is_seen_with_its_figures(tmp_path):
    file, config = folder_of(tmp_path)
    process = start("train", file, sabotage=Slow(0.05))
    process.wait_for(lambda: read_state(config.folder).tokens_per_second is not None)
    run = read_state(config.folder)
    assert (run.state, run.host, run.pid, run.max_steps) == ("running", HERE, process.pid, 12)
    assert run.eta_seconds is not None
    assert "running" in lab("status", tmp_path / "runs").stdout
    process.signal(9)
    process.wait()
    assert read_state(config.folder).state == "died"


def test_looking_does_not_get_in_the_way_of_a_run(tmp_path):
    """A look takes the lock for an instant; a claim that comes just then must not fail for it."""
    (tmp_path / "lock").touch()
    import fcntl

    with open(tmp_path / "lock") as looker:
        fcntl.flock(looker, fcntl.LOCK_SH)
        import threading

        threading.Timer(0.2, looker.close).start()
        with hold(tmp_path):
            assert holder(tmp_path) == f"process {os.getpid()} on {HERE}"
    assert holder(tmp_path) is None


def test_a_lock_that_was_removed_while_one_waited_for_it_is_not_enough(tmp_path):
    """Its holder removed the folder, and another process has the lock of the new one."""
    import threading

    folder = tmp_path / "run"
    folder.mkdir()
    first, refused = hold(folder), []

    def wait():
        try:
            hold(folder, patience=1.0).close()
        except FileError as error:
            refused.append(str(error))

    waiting = threading.Thread(target=wait)
    waiting.start()
    time.sleep(0.2)
    shutil.rmtree(folder)
    folder.mkdir()
    with hold(folder):
        first.close()
        waiting.join()
    assert refused == [f"{folder}: in use by process {os.getpid()} on {HERE}"]
    hold(folder).close()


def test_a_silent_run_on_another_machine_is_given_time(tmp_path):
    """Where the file system does not carry locks between machines, a fresh status is trusted for a while."""
    folder = tmp_path / "x" / "baseline" / "seed-0"
    folder.mkdir(parents=True)
    elsewhere = {"host": "another-machine", "pid": 1}
    write_status(folder, "running", **elsewhere, updated=time.time() - 5)
    assert read_state(folder).state == "running"
    write_status(folder, "running", **elsewhere, updated=time.time() - SILENCE - 1)
    assert read_state(folder).state == "died"


def test_records_without_a_status_are_finished_runs(zoo, tmp_path):
    """Published results are thinned: what a run needed while it went on is not kept."""
    kept = tmp_path / "done" / "baseline" / "seed-0"
    shutil.copytree(zoo / "done" / "baseline" / "seed-0", kept)
    for name in ("status.json", "lock", "train.log"):
        (kept / name).unlink()
    (run,) = list_runs(tmp_path)
    assert (run.state, run.step, run.experiment) == ("finished", 12, "done")


def test_any_name_can_be_sorted(tmp_path):
    names = ["x²", "seed-10", "seed-9", "名字", "１"]
    for name in names:
        written_run = tmp_path / name
        written_run.mkdir()
        (written_run / "result.json").write_text("{}")
    found = [run.name for run in list_runs(tmp_path)]
    assert sorted(found) == sorted(names)
    assert found.index("seed-9") < found.index("seed-10")


def test_a_run_that_may_not_be_read_hides_no_other(tmp_path, monkeypatch):
    for name in ("open", "locked"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "result.json").write_text("{}")
    is_file = Path.is_file

    def guarded(self):
        if self.parent.name == "locked":
            raise PermissionError(13, "Permission denied", str(self))
        return is_file(self)

    monkeypatch.setattr(Path, "is_file", guarded)
    states = {run.name: run.state for run in list_runs(tmp_path)}
    assert states["locked"] == "unreadable"
    assert set(states) == {"open", "locked"}


def test_no_such_folder():
    assert "no such folder" in refusal("status", "/nowhere/at/all")


# Finding and reading a run


def test_a_run_is_found_by_a_part_of_its_name(zoo):
    assert find_run("dead", zoo).state == "died"
    assert find_run(str(zoo / "dead" / "baseline" / "seed-0"), Path("elsewhere")).state == "died"
    with pytest.raises(LabError, match=r"part of 5 runs' names: .* Give more of it"):
        find_run("seed-0", zoo)
    with pytest.raises(LabError, match="no run 'deed'"):
        find_run("deed", zoo)


def test_logs_end_with_what_happened(zoo):
    assert "finished: " in lab("logs", "done", "--out", zoo).stdout.splitlines()[-1]
    assert len(lab("logs", "done", "-n", "2", "--out", zoo).stdout.splitlines()) == 2
    assert "failed: " in lab("logs", "broken", "--out", zoo).stdout
    assert "has no log yet" in refusal("logs", "damaged", "--out", zoo)


def test_logs_can_be_followed_to_the_end_of_the_run(tmp_path):
    file, config = folder_of(tmp_path)
    process = start("train", file, sabotage=Slow(0.05))
    process.wait_for(lambda: read_state(config.folder).step is not None)
    lines = lab("logs", "-n", "1000", "-f", config.folder).stdout.splitlines()
    assert process.wait() == 0
    assert lines == (config.folder / "train.log").read_text(encoding="utf-8").splitlines(), "all of it, nothing twice"
    assert "finished: " in lines[-1]


# Stop


def test_a_run_that_is_stopped_saves_and_goes_on_exactly(tmp_path):
    file, config = folder_of(tmp_path)
    process = start("train", file, sabotage=Slow())
    process.wait_for(lambda: (read_state(config.folder).step or 0) >= 3)
    said = lab("stop", "run/baseline", "--out", tmp_path / "runs").stdout
    assert "asked to stop; it saves first" in said
    again = lab("stop", config.folder)
    assert "was asked before" in again.stdout or "is not running" in again.stderr, "asking twice loses nothing"
    assert process.wait() == 75
    assert read_state(config.folder).state == "stopped"
    finished("train", file)
    other, undisturbed = folder_of(tmp_path / "other")
    finished("train", other)
    assert_same_run(config.folder, undisturbed.folder)


def test_a_run_on_another_machine_is_stopped_by_a_file(tmp_path, monkeypatch):
    file, config = folder_of(tmp_path)
    process = start("train", file, sabotage=Slow())
    process.wait_for(lambda: read_state(config.folder).step is not None)
    monkeypatch.setattr(control.socket, "gethostname", lambda: "another-machine")
    assert control.stop(read_state(config.folder)).how == "file"
    assert process.wait() == 75
    assert read_state(config.folder).state == "stopped"
    assert not (config.folder / STOP).exists()
    (config.folder / STOP).touch()
    finished("train", file)  # a request from before is not meant for this start


def test_all_runs_are_stopped_at_once(tmp_path):
    files = [folder_of(tmp_path, experiment=name) for name in ("one", "two")]
    processes = [start("train", file, sabotage=Slow(0.05)) for file, _ in files]
    wait_for(lambda: all(read_state(config.folder).step is not None for _, config in files))
    said = lab("stop", "--all", "--out", tmp_path / "runs").stdout
    assert said.count("asked to stop") == 2
    assert [process.wait() for process in processes] == [75, 75]


def test_only_what_runs_can_be_stopped(zoo, tmp_path):
    assert "is not running; its state is finished" in refusal("stop", "done", "--out", zoo)
    assert "is not running; its state is died" in refusal("stop", "dead", "--out", zoo)
    assert "no run is in progress" in refusal("stop", "--all", "--out", zoo)
    assert "name one run, or give --all" in refusal("stop", "--out", zoo)
    assert "--all done: stops everything in a folder" in refusal("stop", "done", "--all", "--out", zoo)
    assert "nowhere: no such folder; name the one that holds the runs" in refusal("stop", "--all", "nowhere")
    assert f"no run is in progress below {zoo}" in refusal("stop", "--all", zoo)


def test_another_users_or_a_reused_process_is_never_signalled(tmp_path, monkeypatch):
    """The process to signal is the one that holds the lock, whatever an old status says."""
    _, config = folder_of(tmp_path)
    folder = RunFolder(config)
    folder.claim()
    folder.status("running", step=1)
    folder.close()
    sent: list[int] = []
    monkeypatch.setattr(control.os, "kill", lambda pid, number: sent.append(pid))
    with pytest.raises(LabError, match="its state is died"):
        control.stop(read_state(config.folder))
    assert sent == []


def test_a_request_to_an_earlier_process_of_the_same_number_is_not_taken_for_one_to_this(tmp_path, monkeypatch):
    """In a container every start may have the same number."""
    _, config = folder_of(tmp_path)
    sent: list[int] = []
    monkeypatch.setattr(control.os, "kill", lambda pid, number: sent.append(pid))
    for _ in range(2):
        folder = RunFolder(config)
        folder.claim()
        folder.status("running", step=1)
        assert [control.stop(read_state(config.folder)).how for _ in range(2)] == ["signal", "before"]
        folder.close()
    assert sent == [os.getpid()] * 2


def test_a_request_that_could_not_be_sent_is_not_taken_for_one_that_was(tmp_path, monkeypatch):
    _, config = folder_of(tmp_path)
    folder = RunFolder(config)
    folder.claim()
    folder.status("running", step=1)

    def forbid(pid, number):
        raise PermissionError

    monkeypatch.setattr(control.os, "kill", forbid)
    for _ in range(2):
        with pytest.raises(LabError, match="belongs to another user"):
            control.stop(read_state(config.folder))
    folder.close()


# Clean


def test_clean_frees_checkpoints_of_finished_runs_alone(tmp_path):
    _, done = folder_of(tmp_path, experiment="done")
    train(done, quiet=True)
    file, halted = folder_of(tmp_path, experiment="halted")
    process = start("train", file, sabotage=Slow())
    process.wait_for(lambda: read_state(halted.folder).step is not None)
    process.signal(15)
    process.wait()
    before = sorted(path.name for path in done.folder.iterdir())

    runs = tmp_path / "runs"
    listed = json.loads(lab("clean", runs, "--json").stdout)
    assert [Path(entry["path"]) for entry in listed] == [done.folder / "checkpoints"]
    assert listed[0]["bytes"] > 10_000
    said = lab("clean", runs)
    assert said.exit_code == 2
    assert str(done.folder / "checkpoints") in said.stdout
    assert "give --yes" in said.stderr
    assert (done.folder / "checkpoints").is_dir(), "nothing goes without a yes"

    assert "freed" in lab("clean", runs, "--yes").stdout
    assert sorted(path.name for path in done.folder.iterdir()) == [name for name in before if name != "checkpoints"]
    assert any((halted.folder / "checkpoints").iterdir()), "what is needed to go on stays"
    assert read_state(done.folder).state == "finished"
    assert train(done, quiet=True)["steps"] == 12, "a finished run is still finished"
    lab("clean", runs, "--yes", "--best")
    assert not (done.folder / "best").exists()


def test_a_run_that_came_to_life_keeps_what_it_has(tmp_path):
    _, config = folder_of(tmp_path)
    train(config, quiet=True)
    things = control.freeable(list_runs(tmp_path / "runs"))
    with hold(config.folder):
        assert control.free(things) == 0
    assert (config.folder / "checkpoints").is_dir()


def test_a_run_that_dies_leaves_its_folder_free(tmp_path):
    file, config = folder_of(tmp_path)
    process = start("train", file, sabotage=die)
    process.wait()
    assert holder(config.folder) is None
    finished("train", file)


# Archive


def test_an_archive_has_what_a_report_needs_and_nothing_large(zoo, tmp_path):
    out = tmp_path / "kept"
    said = lab("archive", zoo, "--out", out, "--points", 3).stdout
    assert said.splitlines()[-1] == f"archived 2 runs in {out}"
    for name, state in (("dead", "died"), ("halted", "stopped"), ("damaged", "unreadable")):
        assert f"left out: {zoo / name / 'baseline' / 'seed-0'}, which is {state}\n" in said
    mine, kept = (root / "done" / "baseline" / "seed-0" for root in (zoo, out))
    records = {"config.json", "environment.json", "audit.json", "timing.json", "result.json"}
    assert {path.name for path in kept.iterdir()} == {*records, "metrics.jsonl"}
    assert all((mine / name).read_bytes() == (kept / name).read_bytes() for name in records)
    before, after = read_metrics(mine), read_metrics(kept)
    assert [line for line in after if line.kind != "train"] == [line for line in before if line.kind != "train"]
    train = [line.step for line in before if line.kind == "train"]
    assert [line.step for line in after if line.kind == "train"] == [train[0], train[len(train) // 2], train[-1]]
    failed = json.loads((out / "broken" / "baseline" / "seed-0" / "status.json").read_text())
    assert failed["state"] == "failed"
    assert failed["message"]
    assert not {"host", "pid"} & set(failed)
    assert [run.state for run in list_runs(out)] == ["failed", "finished"]
    again = json.loads(lab("archive", zoo, "--out", out, "--json").stdout)
    assert sorted(one["outcome"] for one in again) == ["left out"] * 3 + ["there"] * 2
    assert train_lines(kept) == 3, "what is there stays as it is"


def train_lines(folder: Path) -> int:
    return sum(line.kind == "train" for line in read_metrics(folder))


def test_an_archive_replaces_a_failure_by_its_success_and_nothing_else(tmp_path):
    def ended(root: Path, id: str, finished: bool = False):
        run = language_run(root, changes={"experiment": "study"}, attention=False)
        for name in ("environment.json", "audit.json", "timing.json"):
            (run / name).unlink()
        for name in ("config.json", "result.json"):
            change(run, name, id=id)
        write_status(run, "failed", message="no memory", host=HERE)
        if not finished:
            (run / "result.json").unlink()
        return run

    out, kept = tmp_path / "kept", tmp_path / "kept" / "study" / "baseline" / "seed-0"
    ended(tmp_path / "a", "one")
    assert "archived 1 run " in lab("archive", tmp_path / "a", "-o", out).stdout
    assert "1 run there already" in lab("archive", tmp_path / "a", "-o", out).stdout
    run = ended(tmp_path / "a", "one", finished=True)
    assert "archived 1 run " in lab("archive", run, "-o", out).stdout, "a run's own folder will do"
    assert sorted(path.name for path in kept.iterdir()) == ["config.json", "metrics.jsonl", "result.json"]
    ended(tmp_path / "b", "two", finished=True)
    assert "holds the record of another run" in refusal("archive", tmp_path / "b", "-o", out)
    assert "two runs would go there" in refusal("archive", tmp_path / "a", tmp_path / "b", "-o", tmp_path / "new")
    assert not (tmp_path / "new").exists()
    assert json.loads((kept / "result.json").read_text())["id"] == "one"
    assert "no such folder" in refusal("archive", tmp_path / "c", "-o", out)
    (tmp_path / "c").mkdir()
    assert "no runs there" in refusal("archive", tmp_path / "c", "-o", out)
