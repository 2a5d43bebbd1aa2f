"""Commands on another machine: a matrix that runs there while its records come here, and what shows its runs."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Event, Thread
from typing import Any

from pydantic import ValidationError

from ..base.plugin import loaded_plugin
from ..errors import LabError, OelmError
from ..lab.confirm import experiment_files, holds_plan
from ..lab.launch.host import Host, UnreachableError
from ..lab.status import RunState, read_state
from ..lab.sync import sync
from ..training.signals import EXIT_REQUEUE
from .terminal import count_of, echo, repeat_command

# Seconds between two copies of the records, between two attempts to connect again, and after which that is given up.
_SYNC_EVERY, _RETRY_EVERY, _GIVE_UP = 30.0, 30.0, 3600.0
# The folder, below the output folder on the host, for the files that a command names.
_FILES = ".files"
# More lines than the log of any matrix has.
_ALL_LINES = 10_000_000


def forward(host: Host, words: Sequence[str]) -> None:
    """Run a command on a host and print what it prints."""
    with suppress(KeyboardInterrupt):
        for line in host.lines(words):
            echo(line.rstrip("\n"))


def host_runs(host: Host, out: Path) -> list[RunState]:
    """Return the state of every run in a folder of a host."""
    text = host.output(["status", "--json", "--", str(out)])
    try:
        return [RunState.model_validate_json(json.dumps(entry)) for entry in json.loads(text)]
    except (ValueError, ValidationError) as error:
        raise LabError(
            f"{host.address}: its oelm shows runs in a form that this version cannot read ({error})"
        ) from None


def send_files(host: Host, names: Sequence[str], out: Path) -> dict[str, str]:
    """Copy those of the names that are files of experiments here to the host; return the path of each there.

    The files that a plan names are copied into its folder there.
    """
    files = [name for name in names if name.endswith((".yaml", ".yml", ".json")) and Path(name).is_file()]
    beside = {name: experiment_files(Path(name)) for name in files if holds_plan(Path(name))}
    return {name: host.send(Path(name), str(out / _FILES), beside.get(name, ())) for name in files}


def with_plugin(host: Host, words: Sequence[str], out: Path) -> list[str]:
    """Return the words of a command with the plugin of this one, which is copied to the host, if there is any."""
    plugin = loaded_plugin()
    return [*([] if plugin is None else [f"--plugin={host.send(plugin.path, str(out / _FILES))}"]), *words]


def start_matrix(host: Host, words: Sequence[str]) -> dict[str, Any]:
    """Start a matrix on a host, in the background there; return its process, its log and the names of its runs."""
    text = host.output(words)
    try:
        started = json.loads(text)
        log, runs = Path(str(started["log"])).name, [str(name) for name in started["runs"]]
        started = {"process": int(started["process"]), "before": bool(started["before"]), "log": log, "runs": runs}
    except (ValueError, KeyError, TypeError) as error:
        raise LabError(f"{host.address}: its oelm did not say what it started ({error})") from None
    how = "is in progress there already" if started["before"] else "has started there"
    echo(f"{host.address}: a matrix of {count_of(len(runs))} {how} as process {started['process']}", err=True)
    return started


def follow_matrix(host: Host, out: Path, started: dict[str, Any]) -> Counter[str]:
    """Show a matrix on a host until it ends, and copy its records meanwhile; return how its runs ended.

    Ctrl-C, or a connection that is lost for long, ends only what this process does.
    """
    try:
        sync(host, out)  # before anything is waited for: what prevents a copy is told at once
        with _syncing(host, out):
            _follow_log(host, out, started["log"])
        for line in sync(host, out):
            echo(line, err=True)
    except KeyboardInterrupt:
        echo(
            f"\nthe matrix goes on at {host.address}; to see it again, and get its records: {repeat_command()}",
            err=True,
        )
        raise SystemExit(EXIT_REQUEUE) from None
    states = Counter(read_state(out / name).state for name in started["runs"])
    ended = {state: states[state] for state in ("finished", "diverged", "failed") if states[state]}
    return Counter({**ended, **({"left": rest} if (rest := states.total() - sum(ended.values())) else {})})


def _follow_log(host: Host, out: Path, log: str) -> None:
    """Print the log of a matrix until the matrix ends; connect again where the connection is lost."""
    shown, lost_at = 0, None
    words = ["logs", "--follow", f"--lines={_ALL_LINES}", f"--out={out}", "--", log]
    while True:
        try:
            for number, line in enumerate(host.lines(words)):
                lost_at = None
                if number >= shown:
                    echo(line.rstrip("\n"), err=True)
                    shown += 1
            return
        except UnreachableError as error:
            if lost_at is None:
                lost_at = time.monotonic()
                echo(f"{error}; the matrix goes on there, and this command connects again", err=True)
            if time.monotonic() - lost_at > _GIVE_UP:
                raise
            time.sleep(_RETRY_EVERY)


@contextmanager
def _syncing(host: Host, out: Path) -> Iterator[None]:
    """Copy records every now and then until the block ends. What goes wrong is shown by the copy that comes last."""
    ended = Event()

    def work() -> None:
        while not ended.wait(_SYNC_EVERY):
            with suppress(OelmError):
                sync(host, out)

    thread = Thread(target=work, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
