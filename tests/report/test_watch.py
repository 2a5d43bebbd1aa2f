"""`oelm report --watch`: the report is written repeatedly while runs are in progress, and once more at the end."""

import os
import socket
import subprocess
import sys
import threading
import time

import pytest

from oelm.base.locks import hold, holder
from oelm.report.write import watch
from tests.support.records import (
    change,
    language_run,
    write_status,
)

APP = "import typer; from oelm.cli import report as c; a = typer.Typer(pretty_exceptions_enable=False); "
APP += "a.command('report')(c.report); a.command('compare')(c.compare); a()"


@pytest.mark.full
def test_watching_refreshes_until_no_run_is_in_progress(tmp_path):
    """From a folder without runs, to one with a run in progress, to one where all are finished."""
    runs, out = tmp_path / "runs", tmp_path / "out"
    runs.mkdir()
    prepared = tmp_path / "aside"
    language_run(prepared, "baseline", 0)
    running = language_run(prepared, "oelm-freeze", 0, 3.1)
    result = (running / "result.json").read_text()
    (running / "result.json").unlink()
    this_process = {"host": socket.gethostname(), "pid": os.getpid(), "step": 200}
    write_status(running, "running", **this_process, updated=time.time())

    command = [sys.executable, "-u", "-c", APP, "report", runs, "--out", out, "--watch", "--every", "0.3"]
    command += ["--formats", "html"]
    piped = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    with hold(running), subprocess.Popen([*map(str, command)], **piped) as watcher:

        def wait_for(message):
            for line in watcher.stdout:
                if message in line:
                    return
            raise AssertionError(f"the command ended without printing {message!r}")

        wait_for("no runs yet")
        prepared.rename(runs / "all")
        running = runs / "all" / running.relative_to(prepared)
        wait_for("1 done, 1 running")
        page = (out / "report.html").read_text(encoding="utf-8")
        assert 'http-equiv="refresh"' in page
        assert "oelm-freeze, seed 0, running" in page
        (running / "result.json").write_text(result)
        change(running, "status.json", state="finished")
        wait_for("2 done, 0 running")
        assert "against baseline, perplexity changes by" in watcher.stdout.read()  # the summary, printed at the end
    assert watcher.returncode == 0
    assert 'http-equiv="refresh"' not in (out / "report.html").read_text(encoding="utf-8")


def test_watching_ends_when_the_last_run_is_killed(tmp_path):
    """A killed run changes no file; only its released lock shows that it is gone."""
    running = language_run(tmp_path / "runs")
    (running / "result.json").unlink()
    write_status(running, "running", host=socket.gethostname(), step=200)
    script = (
        "import pathlib, sys, time, oelm.base.locks as b; lock = b.hold(pathlib.Path(sys.argv[1])); time.sleep(500)"
    )
    process = subprocess.Popen([sys.executable, "-c", script, str(running)])
    while holder(running) is None:
        assert process.poll() is None
        time.sleep(0.05)
    running_counts: list[int] = []

    def on_report(report):
        running_counts.append(len(report.analysis.running))
        process.kill()
        process.wait()

    def follow():
        watch([tmp_path / "runs"], tmp_path / "out", 0.2, on_report, formats=("md",))

    watcher = threading.Thread(target=follow, daemon=True)
    watcher.start()
    watcher.join(150)
    assert not watcher.is_alive()
    assert running_counts == [1, 0]
