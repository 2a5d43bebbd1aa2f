"""The commands status, logs, stop, clean and archive, on runs that are alive, dead, or on another machine."""

import json
import os
import shutil
import socket
import time
from pathlib import Path

import pytest

from oelm.base import locks
from oelm.base.locks import hold, holder
from oelm.config import RunConfig
from oelm.errors import LabError
from oelm.lab import control
from oelm.lab.status import find_run, list_runs, read_state
from oelm.runs.folder import SILENCE, STOP, RunFolder, read_metrics
from oelm.training.engine import train
from tests.support.lab import lab, refusal, wait_for
from tests.support.records import change, language_run, write_status
from tests.support.training import Held, Slow, assert_same_run, die, run_to_end, start, tiny, write_yaml

HERE = socket.gethostname()


def run_config(folder: Path, **changes) -> tuple[Path, RunConfig]:
    """Write a run's config file; return it and the config."""
    fields = tiny(folder / "runs", **changes)
    return write_yaml(folder / f"{changes.get('experiment', 'run')}.yaml", fields), RunConfig.load(fields)


@pytest.fixture(scope="module")
def all_states(tmp_path_factory):
    """Return a folder with a run in every state that a process can leave behind."""
    folder = tmp_path_factory.mktemp("states")
    train(run_config(folder, experiment="done")[1], quiet=True)
    file, _ = run_config(folder, experiment="broken", optimizer={"learning_rate": 1e30, "warmup_steps": 0})
    assert start("train", file).wait() == 2
    file, config = run_config(folder, experiment="dead")
    process = start("train", file, sabotage=Held(3))
    process.wait_for(lambda: read_state(config.folder).step is not None)
    process.signal(9)
    process.wait()
    file, config = run_config(folder, experiment="halted")
    process = start("train", file, sabotage=Held(3))
    process.wait_for(lambda: read_state(config.folder).step is not None)
    process.signal(15)
    assert process.wait() == 75
    damaged = folder / "runs" / "damaged" / "baseline" / "seed-0"
    damaged.mkdir(parents=True)
    (damaged / "config.json").write_text("{}")
    (damaged / "status.json").write_text('{"state": "run')
    return folder / "runs"


# Status


def test_every_state_is_read_from_the_records(all_states):
    states = {run.name.split("/")[0]: run.state for run in list_runs(all_states)}
    assert states == {
        "done": "finished",
        "broken": "failed",
        "dead": "died",
        "halted": "stopped",
        "damaged": "unreadable",
    }


def test_the_status_table_and_its_json_show_the_metrics(all_states):
    output = lab("status", all_states).stdout
    lines = {line.split("/")[0]: line for line in output.splitlines()}
    for word in ("finished", "12/12", HERE):
        assert word in lines["done"]
    header, run = output.splitlines()[0], read_state(all_states / "done" / "baseline" / "seed-0")
    for column, value in (("train loss", run.loss), ("val loss", run.val_loss), ("val ppl / acc", run.perplexity)):
        assert float(lines["done"][header.index(column) :].split()[0]) == pytest.approx(value, abs=0.01), column
    assert "died" in lines["dead"]
    assert "status.json: cannot be read as JSON" in output
    assert "5 runs: " in output.splitlines()[-1]
    rows = json.loads(lab("status", all_states, "--json").stdout)
    row = next(row for row in rows if row["experiment"] == "done")
    assert (row["state"], row["method"], row["seed"], row["step"]) == ("finished", "baseline", 0, 12)
    assert row["perplexity"] > 1


def test_a_run_in_progress_is_shown_with_its_speed_and_remaining_time(tmp_path):
    file, config = run_config(tmp_path)
    process = start("train", file, sabotage=Held(8))
    process.wait_for(lambda: read_state(config.folder).tokens_per_second is not None)
    run = read_state(config.folder)
    assert (run.state, run.host, run.pid, run.max_steps) == ("running", HERE, process.pid, 12)
    assert run.eta_seconds is not None
    assert "running" in lab("status", tmp_path / "runs").stdout
    process.signal(9)
    process.wait()
    assert read_state(config.folder).state == "died"


def test_a_run_on_another_machine_counts_as_running_while_its_status_is_recent(tmp_path):
    """Some file systems do not share locks between machines."""
    for age, state in ((5, "running"), (-5, "running"), (SILENCE + 1, "died"), (-SILENCE - 60, "died")):
        write_status(tmp_path, "running", host="another-machine", pid=1, updated=time.time() - age)
        assert read_state(tmp_path).state == state


def test_records_without_a_status_are_finished_runs(all_states, tmp_path):
    """Archived records have no status, lock or log."""
    archived = tmp_path / "done" / "baseline" / "seed-0"
    shutil.copytree(all_states / "done" / "baseline" / "seed-0", archived)
    for name in ("status.json", "lock", "train.log"):
        (archived / name).unlink()
    (run,) = list_runs(tmp_path)
    assert (run.state, run.step, run.experiment) == ("finished", 12, "done")


def test_runs_with_unusual_names_are_sorted(tmp_path):
    names = ["x²", "seed-10", "seed-9", "名字", "１"]
    for name in names:
        (tmp_path / name).mkdir()
        (tmp_path / name / "result.json").write_text("{}")
    listed = [run.name for run in list_runs(tmp_path)]
    assert sorted(listed) == sorted(names)
    assert listed.index("seed-9") < listed.index("seed-10")


def test_a_run_without_read_permission_does_not_hide_others(tmp_path, monkeypatch):
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


def test_status_of_a_missing_folder_is_refused():
    assert "no such folder" in refusal("status", "/nowhere/at/all")


# Finding and reading a run


def test_a_run_is_found_by_a_part_of_its_name(all_states):
    assert find_run("dead", all_states).state == "died"
    assert find_run(str(all_states / "dead" / "baseline" / "seed-0"), Path("elsewhere")).state == "died"
    with pytest.raises(LabError, match=r"'seed-0'.* 5 runs"):
        find_run("seed-0", all_states)
    with pytest.raises(LabError, match="no run 'deed'"):
        find_run("deed", all_states)


def test_logs_show_the_end_of_the_log(all_states):
    *_, finished, records = lab("logs", "done", "--out", all_states).stdout.splitlines()
    assert "finished: " in finished
    assert "records in " in records
    assert len(lab("logs", "done", "-n", "2", "--out", all_states).stdout.splitlines()) == 2
    assert "failed: " in lab("logs", "broken", "--out", all_states).stdout
    assert "has no log yet" in refusal("logs", "damaged", "--out", all_states)


def test_logs_follow_a_run_to_its_end(tmp_path):
    file, config = run_config(tmp_path)
    process = start("train", file, sabotage=Slow(0.05))
    process.wait_for(lambda: read_state(config.folder).step is not None)
    lines = lab("logs", "-n", "1000", "-f", config.folder).stdout.splitlines()
    assert process.wait() == 0
    assert lines == (config.folder / "train.log").read_text(encoding="utf-8").splitlines(), "every line once"
    assert "records in " in lines[-1]


# Stop


def test_a_stopped_run_saves_and_resumes_exactly(tmp_path):
    file, config = run_config(tmp_path)
    process = start("train", file, sabotage=Held(4))
    process.wait_for(lambda: (read_state(config.folder).step or 0) >= 3)
    assert "asked to stop" in lab("stop", "run/baseline", "--out", tmp_path / "runs").stdout
    again = lab("stop", config.folder)
    assert "was asked before" in again.stdout or "is not running" in again.stderr, "asking twice is harmless"
    assert process.wait() == 75
    assert read_state(config.folder).state == "stopped"
    run_to_end("train", file)
    other_file, uninterrupted = run_config(tmp_path / "other")
    run_to_end("train", other_file)
    assert_same_run(config.folder, uninterrupted.folder)


def test_a_run_on_another_machine_is_stopped_by_a_file(tmp_path, monkeypatch):
    file, config = run_config(tmp_path)
    process = start("train", file, sabotage=Held(3, config.folder / STOP))
    process.wait_for(lambda: read_state(config.folder).step is not None)
    monkeypatch.setattr(locks.socket, "gethostname", lambda: "another-machine")
    assert control.stop(read_state(config.folder)).how == "file"
    assert process.wait() == 75
    assert read_state(config.folder).state == "stopped"
    assert not (config.folder / STOP).exists()
    (config.folder / STOP).touch()
    run_to_end("train", file)  # a stop file from before the start is ignored


def test_all_runs_are_stopped_at_once(tmp_path):
    files = [run_config(tmp_path, experiment=name) for name in ("one", "two")]
    processes = [start("train", file, sabotage=Held(3)) for file, _ in files]
    wait_for(lambda: all(read_state(config.folder).step is not None for _, config in files))
    assert lab("stop", "--all", "--out", tmp_path / "runs").stdout.count("asked to stop") == 2
    assert [process.wait() for process in processes] == [75, 75]


def test_stopping_what_does_not_run_is_refused(all_states, tmp_path):
    assert "state is finished" in refusal("stop", "done", "--out", all_states)
    assert "state is died" in refusal("stop", "dead", "--out", all_states)
    assert "no run is in progress" in refusal("stop", "--all", "--out", all_states)
    assert "--all" in refusal("stop", "--out", all_states)
    assert "--all done: " in refusal("stop", "done", "--all", "--out", all_states)
    assert "nowhere: no such folder" in refusal("stop", "--all", "nowhere")
    assert f"no run is in progress below {all_states}" in refusal("stop", "--all", all_states)


def test_only_the_process_that_holds_the_lock_is_signalled(tmp_path, monkeypatch):
    """The process number in an old status may belong to another process by now."""
    _, config = run_config(tmp_path)
    folder = RunFolder(config)
    folder.claim()
    folder.status("running", step=1)
    folder.close()
    sent: list[int] = []
    monkeypatch.setattr(control.os, "kill", lambda pid, number: sent.append(pid))
    with pytest.raises(LabError, match="state is died"):
        control.stop(read_state(config.folder))
    assert sent == []


def test_a_new_process_with_an_old_process_number_is_asked_again(tmp_path, monkeypatch):
    """In a container every start may have the same process number."""
    _, config = run_config(tmp_path)
    sent: list[int] = []
    monkeypatch.setattr(control.os, "kill", lambda pid, number: sent.append(pid))
    for _ in range(2):
        folder = RunFolder(config)
        folder.claim()
        folder.status("running", step=1)
        assert [control.stop(read_state(config.folder)).how for _ in range(2)] == ["signal", "before"]
        folder.close()
    assert sent == [os.getpid()] * 2


def test_a_signal_that_was_not_permitted_does_not_count_as_sent(tmp_path, monkeypatch):
    _, config = run_config(tmp_path)
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


def test_clean_removes_only_checkpoints_of_finished_runs(tmp_path):
    _, finished = run_config(tmp_path, experiment="done")
    train(finished, quiet=True)
    file, halted = run_config(tmp_path, experiment="halted")
    process = start("train", file, sabotage=Held(3))
    process.wait_for(lambda: read_state(halted.folder).step is not None)
    process.signal(15)
    process.wait()
    before = sorted(path.name for path in finished.folder.iterdir())

    runs = tmp_path / "runs"
    listed = json.loads(lab("clean", runs, "--json").stdout)
    assert [Path(entry["path"]) for entry in listed] == [finished.folder / "checkpoints"]
    assert listed[0]["bytes"] > 10_000
    unconfirmed = lab("clean", runs)
    assert unconfirmed.exit_code == 2
    assert str(finished.folder / "checkpoints") in unconfirmed.stdout
    assert "give --yes" in unconfirmed.stderr
    assert (finished.folder / "checkpoints").is_dir(), "nothing is removed without --yes"

    assert "freed" in lab("clean", runs, "--yes").stdout
    assert sorted(path.name for path in finished.folder.iterdir()) == [name for name in before if name != "checkpoints"]
    assert any((halted.folder / "checkpoints").iterdir()), "checkpoints of an unfinished run stay"
    assert read_state(finished.folder).state == "finished"
    assert train(finished, quiet=True)["steps"] == 12, "a finished run is still finished"
    lab("clean", runs, "--yes", "--best")
    assert not (finished.folder / "best").exists()


def test_clean_leaves_a_run_that_was_started_again(tmp_path):
    _, config = run_config(tmp_path)
    train(config, quiet=True)
    folders = control.freeable(list_runs(tmp_path / "runs"))
    with hold(config.folder):
        assert control.free(folders) == 0
    assert (config.folder / "checkpoints").is_dir()


def test_a_killed_run_releases_its_lock(tmp_path):
    file, config = run_config(tmp_path)
    process = start("train", file, sabotage=die)
    process.wait()
    assert holder(config.folder) is None
    run_to_end("train", file)


# Archive


def test_an_archive_has_the_records_and_nothing_large(all_states, tmp_path):
    out = tmp_path / "archive"
    output = lab("archive", all_states, "--out", out, "--points", 3, "--changed-code").stdout
    assert "2 runs" in output.splitlines()[-1]
    assert str(out) in output.splitlines()[-1]
    for name, state in (("dead", "died"), ("halted", "stopped"), ("damaged", "unreadable")):
        (line,) = [line for line in output.splitlines() if str(all_states / name / "baseline" / "seed-0") in line]
        assert state in line
    original, archived = (root / "done" / "baseline" / "seed-0" for root in (all_states, out))
    records = {"config.json", "environment.json", "audit.json", "timing.json", "result.json"}
    assert {path.name for path in archived.iterdir()} == {*records, "metrics.jsonl", "manifest.json"}
    assert all((original / name).read_bytes() == (archived / name).read_bytes() for name in records)
    before, after = read_metrics(original), read_metrics(archived)
    assert [line for line in after if line.kind != "train"] == [line for line in before if line.kind != "train"]
    train_steps = [line.step for line in before if line.kind == "train"]
    assert [line.step for line in after if line.kind == "train"] == [
        train_steps[0],
        train_steps[len(train_steps) // 2],
        train_steps[-1],
    ]
    failed = json.loads((out / "broken" / "baseline" / "seed-0" / "status.json").read_text())
    assert failed["state"] == "failed"
    assert failed["message"]
    assert not {"host", "pid"} & set(failed)
    assert [run.state for run in list_runs(out)] == ["failed", "finished"]
    again = json.loads(lab("archive", all_states, "--out", out, "--json", "--changed-code").stdout)
    assert sorted(entry["outcome"] for entry in again) == ["left out"] * 3 + ["there"] * 2
    assert count_train_lines(archived) == 3, "an archived run is not changed"


def count_train_lines(folder: Path) -> int:
    return sum(line.kind == "train" for line in read_metrics(folder))


def test_an_archive_leaves_out_runs_of_changed_code(tmp_path):
    runs, out = tmp_path / "runs", tmp_path / "archive"
    clean, changed = language_run(runs), language_run(runs, "oelm-freeze")
    environment = json.loads((changed / "environment.json").read_text())
    change(changed, "environment.json", git_commit=f"{environment['git_commit']}-dirty")
    output = lab("archive", runs, "--out", out).stdout
    assert f"left out: {changed}: made by code that was changed" in output
    assert "archived 1 run " in output
    assert (out.joinpath(*clean.parts[-3:]) / "result.json").is_file()
    assert "archived 1 run " in lab("archive", runs, "--out", out, "--changed-code").stdout
    assert (out.joinpath(*changed.parts[-3:]) / "result.json").is_file()


def test_an_archive_replaces_a_failed_run_by_its_success_and_nothing_else(tmp_path):
    def failed_run(root: Path) -> Path:
        run = language_run(root)
        (run / "result.json").unlink()
        write_status(run, "failed", message="no memory", host=HERE)
        return run

    out = tmp_path / "archive"
    archived_run = out.joinpath(*failed_run(tmp_path / "a").parts[-3:])
    assert "archived 1 run " in lab("archive", tmp_path / "a", "-o", out, "--changed-code").stdout
    assert (archived_run / "status.json").is_file()
    assert "1 run there already" in lab("archive", tmp_path / "a", "-o", out, "--changed-code").stdout
    run = language_run(tmp_path / "a")
    assert "archived 1 run " in lab("archive", run, "-o", out).stdout, "a run's own folder can be given"
    assert not (archived_run / "status.json").exists()
    archived_result = (archived_run / "result.json").read_bytes()
    assert archived_result == (run / "result.json").read_bytes()
    language_run(tmp_path / "b", changes={"optimizer": {"clip": 0.5}})
    assert "holds the record of another run" in refusal("archive", tmp_path / "b", "-o", out)
    assert "two runs would go there" in refusal("archive", tmp_path / "a", tmp_path / "b", "-o", tmp_path / "new")
    assert not (tmp_path / "new").exists()
    assert (archived_run / "result.json").read_bytes() == archived_result
    assert "no such folder" in refusal("archive", tmp_path / "c", "-o", out)
    (tmp_path / "c").mkdir()
    assert "no runs there" in refusal("archive", tmp_path / "c", "-o", out)
