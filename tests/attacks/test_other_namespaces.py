"""`oelm stop` and a run in different namespaces of process ids, as in containers: the run is stopped, and nobody else.

In each namespace another process has the number that the run has in its own.
"""

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from oelm.base.locks import holder, holding_pid
from oelm.lab.status import read_state
from oelm.runs.folder import STOP
from tests.support.distributed import wait_until
from tests.support.lab import lab
from tests.support.training import LIMIT, Held, assert_same_run, config, run_to_end, start, tiny, write_yaml

CHANGES = {"method": "oelm-freeze", "log": {"every": 1}}
# Sets the number of the next process, starts a stranger where one is asked for, and runs a command beside it.
SCRIPT = """
echo $(($1 - 1)) > /proc/sys/kernel/ns_last_pid
stranger=
if [ "$2" = stranger ]; then sleep 600 & stranger=$!; test $stranger = $1 || exit 98; fi
shift 2
"$@" & wait $!; code=$?
if [ "$stranger" ]; then grep -q 'State:.*sleeping' /proc/$stranger/status || exit 99; fi
exit $code
"""


@pytest.fixture
def namespace() -> list[str]:
    """Return the command that runs another one in a namespace of its own, which ends with it."""
    command = ["unshare", "--pid", "--fork", "--mount-proc", "--kill-child"]
    if shutil.which("unshare") is None:
        pytest.skip("no namespace can be made here: there is no unshare")
    done = subprocess.run([*command, "sh", "-c", SCRIPT, "sh", "50", "-", "true"], capture_output=True, text=True)
    if done.returncode or done.stderr:
        pytest.skip(f"no namespace can be made here: {done.stderr.strip()}")
    return command


def start_there(
    namespace: list[str], number: int, beside: str, *arguments: object, first: str = ""
) -> subprocess.Popen:
    """Start `oelm ARGUMENTS` in a namespace: with that number, or `beside` a stranger of that number."""
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "NO_COLOR": "1", "TERM": "dumb", "OMP_NUM_THREADS": "1"}
    code = f"{first}\nfrom oelm.cli.app import main\nmain()"
    command = [*namespace, "sh", "-c", SCRIPT, "sh", str(number), beside, sys.executable, "-c", code]
    output = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    return subprocess.Popen([*command, *map(str, arguments)], env=environment, cwd=Path(__file__).parents[2], **output)


def ended(process: subprocess.Popen) -> tuple[int, str]:
    """Wait for a process and return its exit code and what it printed."""
    try:
        output, _ = process.communicate(timeout=LIMIT)
    finally:
        process.kill()
    return process.returncode, output


@pytest.fixture(scope="module")
def whole_run(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("whole")
    run_to_end("train", write_yaml(folder / "run.yaml", tiny(folder, **CHANGES)))
    return config(folder, **CHANGES).folder


def assert_stopped_and_goes_on(run: Path, file: Path, whole: Path) -> None:
    assert read_state(run).state == "stopped"
    assert not (run / STOP).exists()
    run_to_end("train", file)
    assert_same_run(run, whole)


def test_a_run_in_another_namespace_is_stopped_and_no_process_of_its_number_here(
    namespace, whole_run, rounds, tmp_path
):
    for number in range((rounds(1) + 1) // 2):
        output = tmp_path / f"round-{number}"
        file, run = write_yaml(output / "run.yaml", tiny(output, **CHANGES)), config(output, **CHANGES).folder
        held = (
            f"from pathlib import Path\nfrom tests.support.training import Held\nHeld(3, Path({str(run / STOP)!r}))()"
        )
        stranger = subprocess.Popen(["sleep", "600"])
        try:
            there = start_there(namespace, stranger.pid, "nobody", "train", file, first=held)
            wait_until(lambda run=run, there=there: (read_state(run).step or 0) >= 3 or there.poll() is not None)
            assert holder(run) is not None, ended(there)
            assert holder(run).startswith(f"process {stranger.pid} on "), "the stranger has the run's number"
            assert holding_pid(run) is None
            stopped = lab("stop", run)
            assert "asked to stop" in stopped.stdout, stopped.output
            code, output_there = ended(there)
            assert code == 75, output_there
            assert stranger.poll() is None, "the stranger was signalled"
        finally:
            stranger.kill()
            stranger.wait()
        assert_stopped_and_goes_on(run, file, whole_run)
    print(f"runs stopped from outside their namespace: {(rounds(1) + 1) // 2}, no stranger signalled")


def test_a_run_here_is_stopped_from_another_namespace_and_no_process_of_its_number_there(
    namespace, whole_run, rounds, tmp_path
):
    for number in range((rounds(1) + 1) // 2):
        output = tmp_path / f"round-{number}"
        file, run = write_yaml(output / "run.yaml", tiny(output, **CHANGES)), config(output, **CHANGES).folder
        process = start("train", file, sabotage=Held(3, run / STOP))
        try:
            process.wait_for(lambda run=run: (read_state(run).step or 0) >= 3)
            code, said = ended(start_there(namespace, process.pid, "stranger", "stop", run))
            assert code == 0, said
            assert "asked to stop" in said
            assert process.wait() == 75, process.output
        finally:
            if process.alive:
                process.signal(signal.SIGKILL)
        assert_stopped_and_goes_on(run, file, whole_run)
    print(f"runs stopped from another namespace: {(rounds(1) + 1) // 2}, no stranger signalled")
