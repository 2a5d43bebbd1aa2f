"""Another machine by ssh: an sshd on the loopback device, with throw-away keys, found by an ssh configuration."""

import json
import os
import shlex
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from oelm.cli import host as host_commands
from oelm.errors import LabError
from oelm.lab.confirm import load_study
from oelm.lab.launch.detached import find_log, is_written
from oelm.lab.launch.host import Host, UnreachableError
from oelm.lab.status import list_runs, read_state
from tests.support.lab import experiment_file, lab, longer_config, refusal, wait_for
from tests.support.plans import hypothesis, write_plan
from tests.support.sshd import NAME, Server, server


@pytest.fixture
def sshd(tmp_path, monkeypatch):
    with server(tmp_path / "machine", monkeypatch) as running:
        yield running


@pytest.mark.parametrize(
    "address", ["", "-oProxyCommand=touch x", "me@gpu; touch x", "me@gpu -v", "$(touch x)", "a\nb"]
)
def test_an_address_that_ssh_or_a_shell_could_take_for_more_is_refused(address):
    with pytest.raises(LabError, match="USER@MACHINE"):
        Host(address)


def test_words_arrive_as_they_were_given(sshd: Server):
    words = [
        "--axis=method=[a, b]",
        "'; touch x; '",
        "$(touch x)",
        "`touch x`",
        "a\\'b",
        "*",
        '"',
        "ü",
        "--",
        "-x",
        "~",
    ]
    sshd.oelm.write_text('#!/bin/sh\nfor word in "$@"; do echo "$word"; done\n')
    assert Host(NAME, str(sshd.oelm)).output(words).splitlines() == words
    folder = sshd.home / "a 'folder' $HOME"
    folder.mkdir()
    sshd.oelm.write_text("#!/bin/sh\npwd\n")
    assert Host(NAME, str(sshd.oelm), folder.name).output([]) == f"{folder}\n"
    assert Host(NAME, str(sshd.oelm), f"~/{folder.name}").output([]) == f"{folder}\n"
    assert list(folder.iterdir()) == []
    assert [path.name for path in sshd.home.iterdir()] == [folder.name]


@pytest.mark.full
def test_what_goes_wrong_is_one_line_that_says_what_to_do(sshd: Server, tmp_path):
    command = ("--host-command", sshd.oelm)
    file = experiment_file(tmp_path)
    for arguments, said in (
        (("status", "--host", NAME, "--host-command", "~/none"), "give the path of its oelm with --host-command"),
        (("status", "--host", NAME, *command, "--host-folder", "none"), "there is no folder none there"),
        (("status", "none", "--host", NAME, *command), "none: no such folder"),
        (("logs", "--host", NAME, *command), "no matrix was started with --detach there"),
        (("matrix", file, "model.name=gpt:huge", "--host", NAME, *command), "no GPT size 'huge'"),
    ):
        message = refusal(*arguments)
        assert message.startswith(f"oelm: {NAME}: "), message
        assert said in message
        assert message.count("\n") == 1
    sshd.stop()
    message = refusal("matrix", file, "--host", NAME, *command)
    assert f"oelm: {NAME}: no connection by ssh (" in message
    assert message.count("\n") == 1


def test_a_file_is_sent_once_for_each_content(sshd: Server, tmp_path):
    file = tmp_path / "-a b'$(touch x);.yaml"
    host = Host(NAME)
    places = []
    for content in ("one", "two", "one"):
        file.write_text(content)
        places.append(host.send(file, "runs/.files"))
        assert (sshd.home / places[-1]).read_text() == content
    assert places[0] == places[2] != places[1]
    assert sorted(path.name for path in sshd.home.rglob("*") if path.is_file()) == [file.name] * 2


def test_the_files_that_a_plan_names_are_sent_into_its_folder(sshd: Server, tmp_path):
    path = write_plan(tmp_path, [hypothesis("identity", "identity-key")])
    sent = host_commands.send_files(Host(NAME), [str(path), "GPT-02"], Path("my runs"))
    there = sshd.home / sent[str(path)]
    assert load_study(there).sha256 == load_study(path).sha256
    (tmp_path / "conf.yaml").write_text((tmp_path / "conf.yaml").read_text() + "notes: [changed]\n")
    assert host_commands.send_files(Host(NAME), [str(path)], Path("my runs")) != {str(path): sent[str(path)]}


def test_output_that_ends_early_because_the_connection_does_is_told(sshd: Server):
    sshd.oelm.write_text("#!/bin/sh\necho first; sleep 60\n")
    lines = Host(NAME, str(sshd.oelm)).lines([])
    assert next(lines) == "first\n"
    sshd.stop()
    with pytest.raises(UnreachableError, match=NAME):
        next(lines)


@pytest.mark.full
@pytest.mark.timeout(600)
def test_a_matrix_runs_on_a_host_and_its_records_come_here(sshd: Server, tmp_path, monkeypatch):
    """Started detached, then joined: the connection is cut meanwhile, which ends nothing on the host."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(host_commands, "_RETRY_EVERY", 0.5)
    monkeypatch.setattr(host_commands, "_SYNC_EVERY", 0.5)
    config = longer_config(tmp_path, 40, checkpoint=10)
    file = experiment_file(tmp_path, axes={"seed": [0, 1]}, config=config).rename(tmp_path / "it's; $(touch x).yaml")
    there = ("--host", NAME, "--host-command", sshd.oelm)
    words = ("matrix", file, "--gpus", "", *there)
    started = lab(*words, "--detach", "--json")
    assert started.exit_code == 0, started.output
    names = json.loads(started.stdout)["runs"]
    assert names == ["study/baseline/seed-0", "study/baseline/seed-1"]
    log = find_log(None, sshd.home / "runs")
    assert log is not None
    assert is_written(log), "it goes on although the login has ended"
    assert not Path("runs").exists(), "nothing is copied yet"
    status = lab("status", *there, "--json")
    assert {run["name"] for run in json.loads(status.stdout)} == set(names)
    first = sshd.home / "runs" / names[0]

    def cut() -> None:
        wait_for(lambda: (read_state(first).step or 0) >= 10)
        sshd.stop()
        time.sleep(1)
        sshd.start()

    cutting = threading.Thread(target=cut)
    cutting.start()
    joined = lab(*words)
    cutting.join()
    assert joined.exit_code == 0, joined.output
    assert f"{NAME}: a matrix of 2 runs is in progress there already" in joined.stderr
    assert "the matrix goes on there" in joined.stderr
    assert joined.stdout.splitlines()[0] == "2 finished"
    assert joined.stderr.count(f"finished {names[0]}") == 1, "no line of the log is shown twice"
    assert [run.state for run in list_runs(Path("runs"))] == ["finished"] * 2
    for name in names:
        for record in ("config.json", "metrics.jsonl", "status.json", "result.json", "train.log"):
            assert Path("runs", name, record).read_bytes() == (sshd.home / "runs" / name / record).read_bytes()
        assert not Path("runs", name, "checkpoints").exists()
    assert lab("logs", names[1], *there).stdout == Path("runs", names[1], "train.log").read_text()
    again = lab(*words)
    assert (again.exit_code, again.stdout.splitlines()[0]) == (0, "2 finished")
    assert not list(tmp_path.rglob("x"))


def test_what_is_printed_can_be_typed_again(sshd: Server, tmp_path, monkeypatch):
    """The host's `oelm` is a script here that notes its words."""
    monkeypatch.chdir(tmp_path)
    started = json.dumps({"process": 7, "before": False, "log": "my runs/matrix-1-1-7.log", "runs": ["a/b/seed-0"]})
    sshd.oelm.write_text(f'#!/bin/sh\nfor word in "$@"; do echo "$word"; done >> words\necho {shlex.quote(started)}\n')
    file = experiment_file(tmp_path)
    where = ["--host", NAME, f"--host-command={sshd.oelm}", "--host-folder", "."]
    result = lab(
        "matrix", file, "seed=3", "--out", "my runs", "--gpus", "0-3", "--axis", "a=$(x),'", "--detach", *where
    )
    assert result.exit_code == 0, result.output
    words = (sshd.home / "words").read_text().splitlines()
    place = words[-2]
    assert words == [
        "matrix", "--detach", "--json", "--axis=a=$(x),'", "--out=my runs", "--gpus=0-3", "--", place, "seed=3"
    ]  # fmt: skip
    assert (sshd.home / place).read_bytes() == file.read_bytes()
    assert place.startswith("my runs/.files/")
    shown = shlex.split(result.stdout.partition("oelm ")[2].partition(";")[0])
    assert shown == [
        "logs",
        "--follow",
        f"--host={NAME}",
        f"--host-command={sshd.oelm}",
        "--host-folder=.",
        "--out=my runs",
    ]


@pytest.mark.full
@pytest.mark.timeout(600)
def test_a_matrix_on_a_host_is_stopped_from_here(sshd: Server, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config = longer_config(tmp_path, 30_000, checkpoint=1000)  # far more steps than fit before the stop
    there = ("--host", NAME, "--host-command", sshd.oelm)
    words = ("matrix", experiment_file(tmp_path, config=config), "--gpus", "", *there)
    (name,) = json.loads(lab(*words, "--detach", "--json").stdout)["runs"]
    wait_for(lambda: (read_state(sshd.home / "runs" / name).step or 0) > 2)
    # Ctrl-C in a terminal reaches the command and its ssh. It ends both, and nothing on the host.
    command = [sys.executable, "-m", "oelm", *map(str, words)]
    joined_process = subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.PIPE, text=True, start_new_session=True)
    assert joined_process.stderr is not None
    wait_for(lambda: "started  study" in joined_process.stderr.readline())
    os.killpg(joined_process.pid, signal.SIGINT)
    _, said = joined_process.communicate(timeout=120)
    assert joined_process.returncode == 75, said
    assert f"the matrix goes on at {NAME}" in said
    assert "Traceback" not in said
    log = find_log(None, sshd.home / "runs")
    assert log is not None
    assert is_written(log)
    assert "asked to stop" in lab("stop", "--all", *there).stdout
    joined = lab("logs", "--follow", *there)
    assert "1 stopped" in joined.stdout.splitlines()
    assert [run["state"] for run in json.loads(lab("status", *there, "--json").stdout)] == ["stopped"]
