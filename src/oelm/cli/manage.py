"""Commands that manage runs: status, logs, stop, clean, archive."""

from __future__ import annotations

import json
import sys
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from . import completion
from .given import given_words
from .options import (
    HOST_PARAMETERS,
    RUNS,
    HostCommandOption,
    HostFolderOption,
    HostOption,
    JsonOption,
    OutOption,
    RunsArgument,
    YesOption,
)
from .terminal import confirm, count_of, echo, errors, screen_width

if TYPE_CHECKING:
    from ..lab.control import StopOutcome


def status(
    out: RunsArgument = RUNS,
    once: Annotated[bool, typer.Option("--once", help="Show it once, even in a terminal.")] = False,
    host: HostOption = None,
    host_command: HostCommandOption = "oelm",
    host_folder: HostFolderOption = "",
    as_json: JsonOption = False,
) -> None:
    """Show every run: its state, step, loss, speed, time left, host and memory. Updates live in a terminal."""
    with errors():
        from ..lab.status import list_runs
        from .run_tables import status_text, watch

        if host is None:
            _require_folder(out)
            read, pause = partial(list_runs, out), 2.0
        else:
            from ..lab.launch.host import Host
            from .host import host_runs

            read, pause = partial(host_runs, Host(host, host_command, host_folder), out), 15.0
        runs = read()
        if as_json:
            echo(json.dumps([state.to_dict() for state in runs], indent=2))
        elif sys.stdout.isatty() and not once:
            watch(read, pause)
        else:
            typer.echo(status_text(runs, screen_width()))


def logs(
    context: typer.Context,
    name: Annotated[
        str | None,
        typer.Argument(
            help="A run's folder, or a part of its name; none for the matrix that --detach started last.",
            autocompletion=completion.runs,
        ),
    ] = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Keep printing until the run ends.")] = False,
    lines: Annotated[int, typer.Option("--lines", "-n", min=0, help="How many lines to print.")] = 40,
    out: OutOption = RUNS,
    host: HostOption = None,
    host_command: HostCommandOption = "oelm",
    host_folder: HostFolderOption = "",
) -> None:
    """Print the end of a run's log, or of that of a detached matrix."""
    with errors():
        if host is not None:
            _forward(context, host, host_command, host_folder)
            return
        from ..lab.control import end_of, log_lines
        from ..lab.launch.detached import find_log, is_written
        from ..lab.status import find_run

        log = find_log(name, out)
        with suppress(KeyboardInterrupt):
            found = end_of(log, lines, follow, lambda: is_written(log)) if log else None
            for line in found or log_lines(find_run(str(name), out), lines, follow):
                echo(line.rstrip("\n"))


def stop(
    context: typer.Context,
    name: Annotated[
        str | None,
        typer.Argument(
            help="A run's folder, or a part of its name; with --all, the folder of the runs.",
            autocompletion=completion.runs,
        ),
    ] = None,
    everything: Annotated[bool, typer.Option("--all", help="Every run and matrix in progress in the folder.")] = False,
    out: OutOption = RUNS,
    host: HostOption = None,
    host_command: HostCommandOption = "oelm",
    host_folder: HostFolderOption = "",
) -> None:
    """Ask a run to save a checkpoint and stop. The command that started it can resume it later."""
    with errors():
        if host is not None:
            _forward(context, host, host_command, host_folder)
            return
        from ..errors import LabError
        from ..lab import control
        from ..lab.status import find_run

        if not everything:
            if name is None:
                raise LabError("name one run, or give --all")
            echo(_stop_line(control.stop(find_run(name, out))))
            return
        if name is not None and out != RUNS:
            raise LabError(f"--all {name}: stops everything in a folder: name only the folder, or give it with --out")
        folder = out if name is None else Path(name)
        _require_folder(folder)
        matrices, runs = control.stop_all(folder)
        if not matrices and not runs:
            raise LabError(f"no run is in progress below {folder}")
        for outcome in matrices:
            asked = "was asked to stop before" if outcome.how == "before" else "asked to stop"
            echo(f"the matrix of {outcome.name}: {asked}; it starts no more runs, and running ones save first")
        for outcome in runs:
            echo(_stop_line(outcome))


def clean(
    out: RunsArgument = RUNS,
    best: Annotated[bool, typer.Option("--best", help="Remove the best models too.")] = False,
    yes: YesOption = False,
    as_json: JsonOption = False,
) -> None:
    """Remove the checkpoints of finished runs. Shows what this frees, and asks first. Records are never removed."""
    with errors():
        from ..lab.control import free, freeable
        from ..lab.status import list_runs

        _require_folder(out)
        folders = freeable(list_runs(out), best)
        if as_json:
            echo(json.dumps([{"path": str(path), "bytes": size} for path, size in folders.items()], indent=2))
        else:
            for path, size in folders.items():
                echo(f"{size / 1e6:>10,.1f} MB  {path}")
            total = sum(folders.values())
            echo(f"{total / 1e6:>10,.1f} MB  in {count_of(len(folders), 'folder')} of finished runs")
        if not folders or (as_json and not yes):
            return
        confirm("Remove them?", yes)
        echo(f"freed {free(folders) / 1e6:,.1f} MB", err=as_json)


def archive(
    runs: Annotated[list[Path], typer.Argument(help="Folders of runs, or above them.")],
    out: Annotated[Path, typer.Option("--out", "-o", help="The folder to keep the records in.")],
    points: Annotated[int, typer.Option(min=2, help="Lines of training loss to keep for each run.")] = 50,
    changed_code: Annotated[
        bool, typer.Option("--changed-code", help="Also keep runs of code that was changed since its commit.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Copy the records of runs that have ended, without models and logs: small enough to commit."""
    with errors():
        from ..lab.archive import archive as archive_runs

        for folder in runs:
            _require_folder(folder)
        archived = archive_runs(runs, out, points, changed_code)
        if as_json:
            echo(json.dumps([entry.to_dict() for entry in archived], indent=2))
            return
        for entry in archived:
            if entry.outcome == "left out":
                echo(f"left out: {entry.reason}")
        new, old = (sum(entry.outcome == outcome for entry in archived) for outcome in ("archived", "there"))
        echo(f"archived {count_of(new)} in {out}" + (f"; {count_of(old)} there already" if old else ""))


def _forward(context: typer.Context, address: str, command: str, folder: str) -> None:
    """Run this command on another machine and print what it prints."""
    from ..lab.launch.host import Host
    from .host import forward

    forward(Host(address, command, folder), given_words(context, without=HOST_PARAMETERS))


def _stop_line(outcome: StopOutcome) -> str:
    texts = {
        "signal": "asked to stop; it saves first",
        "file": f"it runs on {outcome.where}: asked to stop by a file in its folder, which it checks when it next logs",
        "before": "was asked before; it is saving, or finishing its step",
        "cancelled": f"Slurm job {outcome.where} was cancelled",
        "with matrix": "stops with its matrix",
    }
    return f"{outcome.name}: {texts[outcome.how]}"


def _require_folder(folder: Path) -> None:
    from ..errors import LabError

    if not folder.is_dir():
        raise LabError(f"{folder}: no such folder; name the one that holds the runs")
