"""A matrix in the background: it outlives its terminal, has a log, and is not started twice."""

import fcntl
import json
import os
import pty
import signal
import sys
from pathlib import Path

import pytest

from oelm.base.locks import holder
from oelm.errors import LabError
from oelm.lab.launch.detached import Detached, detach, find_log, is_written
from oelm.lab.status import list_runs
from tests.support.lab import ROOT, experiment_file, lab, longer_config, refusal


def in_a_terminal(*arguments: object) -> tuple[int, int]:
    """Start `oelm` in a terminal of its own; return its process and the terminal."""
    command = [sys.executable, "-m", "oelm", *map(str, arguments)]
    pid, terminal = pty.fork()
    if pid == 0:
        os.chdir(ROOT)
        os.execv(sys.executable, command)
    return pid, terminal


@pytest.mark.full
@pytest.mark.timeout(300)
def test_a_detached_matrix_survives_the_end_of_its_terminal(tmp_path):
    out = tmp_path / "runs"
    file = experiment_file(tmp_path, axes={"seed": [0, 1]}, config=longer_config(tmp_path, 30, checkpoint=50))
    arguments = ("matrix", file, "--gpus", "", "--out", out, "--detach")
    pid, terminal = in_a_terminal(*arguments)
    assert os.waitpid(pid, 0)[1] == 0, "it returns, and its matrix goes on"
    os.close(terminal)  # the terminal is closed: its processes get SIGHUP
    started = json.loads(lab(*arguments, "--json").stdout)
    assert started["before"], "the same matrix is not started twice"
    assert started["runs"] == [f"study/baseline/seed-{seed}" for seed in (0, 1)]
    with pytest.raises(ProcessLookupError):
        os.killpg(pid, signal.SIGHUP)  # nothing is left of the terminal's session
    assert os.getsid(started["process"]) == started["process"]
    log = Path(started["log"])
    assert is_written(log)
    followed = lab("logs", "--follow", "--out", out, "--lines", 1000)
    assert followed.exit_code == 0
    assert "2 finished" in followed.stdout.splitlines()
    assert [run.state for run in list_runs(out)] == ["finished", "finished"]
    assert holder(out, log.name) is None


def test_what_a_detached_matrix_is_refused_for_is_said_at_once(tmp_path):
    with pytest.raises(LabError, match="unknown experiment 'nothing'"):
        detach(["matrix", "nothing"], tmp_path, ["a"])
    assert list(tmp_path.iterdir()) == [], "no log is left"
    assert "give both" in refusal("matrix", experiment_file(tmp_path), "--json")


def test_the_newest_log_is_shown_and_before_it_one_that_is_written(tmp_path):
    with pytest.raises(LabError, match="no matrix was started"):
        find_log(None, tmp_path)
    old, new = tmp_path / "matrix-20260101-000000-1.log", tmp_path / "matrix-20260102-000000-1.log"
    old.write_text("old\n")
    new.write_text("new\n")
    assert lab("logs", "--out", tmp_path).stdout == "new\n"
    assert lab("logs", old.name, "--out", tmp_path).stdout == "old\n"
    assert find_log("study/baseline", tmp_path) is None
    with open(old) as log:
        fcntl.flock(log, fcntl.LOCK_EX)
        assert find_log(None, tmp_path) == old


def test_the_matrix_in_the_background_gets_the_words_of_the_command(tmp_path, monkeypatch):
    given = []

    def noted(words, out, runs):
        given.append((words, out, runs))
        return Detached(1, out / "matrix.log", False)

    monkeypatch.setattr("oelm.lab.launch.detached.detach", noted)
    file = experiment_file(tmp_path).rename(tmp_path / "a b; touch x.yaml")
    options = ["--axis", "method=[baseline, oelm-freeze]", "--axis", "seed=3,4", "--gpus", "", "--jobs", "2", "-y"]
    result = lab("matrix", *options, "--detach", "--out", tmp_path / "-runs", file, "train.max_steps=6")
    assert result.exit_code == 0, result.output
    ((words, out, runs),) = given
    first = [f"--out={out}", "--jobs=2", "--gpus=", "--yes", "--axis=seed=3,4"]
    assert sorted(words[1 : words.index("--")]) == sorted([*first, "--axis=method=[baseline, oelm-freeze]"])
    assert words[words.index("--") + 1 :] == [str(file), "train.max_steps=6"]
    assert len(runs) == 4
    # The words mean the same as those that were typed.
    assert lab(words[0], "--detach", *words[1:]).exit_code == 0
    assert given[0] == given[1]
