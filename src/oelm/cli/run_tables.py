"""Tables of runs for the terminal: `oelm status`, and the live view of a matrix."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import datetime
from typing import Literal

from rich.cells import cell_len
from rich.console import Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from ..base.console import Console
from ..base.text import visible
from ..lab.launch.interface import LaunchInfo
from ..lab.matrix import Matrix, MatrixEvent
from ..lab.status import RunState, read_state
from .terminal import count_of, duration, fold, pad

_STYLES = {
    "running": "bold cyan",
    "finished": "green",
    "stopped": "yellow",
    "failed": "bold red",
    "diverged": "bold red",
    "died": "bold red",
    "unreadable": "bold red",
    "blocked": "red",
    "elsewhere": "cyan",
}
_COLUMNS = (
    "run",
    "state",
    "step",
    "train loss",
    "val loss",
    "val ppl / acc",
    "other acc",
    "tokens/s",
    "left",
    "host",
    "GPU memory",
)
# The columns that a narrow terminal leaves out, in this order, and the width at which the names of runs are folded.
_OPTIONAL_COLUMNS = ("GPU memory", "host", "tokens/s", "train loss", "val loss", "left", "other acc", "val ppl / acc")
_NAME_WIDTH = 20


def status_table(runs: Sequence[RunState], width: int | None = None) -> Group:
    """Return runs as a table with the columns that fit into this width, and below it the runs' error messages."""
    rows = [_cells(run) for run in runs]
    table = Table(box=None, pad_edge=False, header_style="bold")
    columns = _columns_that_fit(rows, width)
    for column in columns:
        name = _COLUMNS[column]
        justify: Literal["left", "right"] = "left" if name in ("run", "state", "host") else "right"
        table.add_column(name, justify=justify, overflow="fold", no_wrap=column > 0)
    others = sum(_widths([_COLUMNS, *rows])[column] + 2 for column in columns[1:])
    for row in rows:
        run_name, state, *cells = (row[column] for column in columns)
        if width is not None:
            run_name = _fold_name(run_name, width - others)
        table.add_row(run_name, Text(state, style=_STYLES.get(state, "")), *cells)
    problems = [Text(f"{run.name}: {run.message}", style="red") for run in runs if run.message]
    return Group(table, *problems)


def status_text(runs: Sequence[RunState], width: int | None = None) -> str:
    """Return the table as text with the columns that fit into a width; without one, in lines that are not folded."""
    if width is None:
        cells = [_cells(run) for run in runs]
        columns = _columns_that_fit(cells, None)
        rows = [[row[column] for column in columns] for row in (_COLUMNS, *cells)]
        widths = [max(cell_len(row[column]) for row in rows) for column in range(len(columns))]
        lines = ["  ".join(pad(cell, size) for cell, size in zip(row, widths, strict=True)).rstrip() for row in rows]
        lines += [f"{run.name}: {run.message}" for run in runs if run.message]
        return visible("\n".join([*lines, _summary(runs)]))
    console = Console(width=width)
    with console.capture() as capture:
        console.print(status_table(runs, width), Text(_summary(runs)))
    return capture.get().rstrip("\n")


def watch(read: Callable[[], list[RunState]], seconds: float = 2.0) -> None:
    """Show a live table until no run is running or waiting, or until Ctrl-C."""
    with Live(console=Console(), auto_refresh=False) as live, suppress(KeyboardInterrupt):
        while True:
            runs = read()
            table = status_table(runs, live.console.width)
            live.update(Group(table, Text(_summary(runs))), refresh=True)
            if not any(run.state in ("running", "waiting") for run in runs):
                return
            time.sleep(seconds)


def _cells(run: RunState) -> list[str]:
    """Return one run as a row: a cell for each of the columns."""
    step = "" if run.step is None else str(run.step)
    perplexity = run.masked_perplexity if run.perplexity is None else run.perplexity
    metric = "" if perplexity is None else f"{perplexity:.2f}"
    if run.accuracy is not None:
        metric = f"{run.accuracy:.2%}"
    return [
        run.name,
        run.state,
        f"{step}/{run.max_steps}" if step and run.max_steps else step,
        "" if run.loss is None else f"{run.loss:.4f}",
        "" if run.val_loss is None else f"{run.val_loss:.4f}",
        metric,
        ", ".join(f"{name} {accuracy:.2%}" for name, accuracy in list(run.split_accuracy.items())[:2]),
        "" if run.tokens_per_second is None else f"{run.tokens_per_second:,.0f}",
        duration(run.eta_seconds) if run.eta_seconds is not None and run.live else "",
        run.host or "",
        "" if run.memory is None else f"{run.memory / 2**30:.1f} GiB",
    ]


def _fold_name(name: str, width: int) -> str:
    """Return a run's name in lines of this width that end at its slashes; a longer part is left to the table."""
    lines = [""]
    for part in re.findall(r"[^/]*/?", name):
        if lines[-1] and cell_len(lines[-1] + part) > width:
            lines.append("")
        lines[-1] += part
    return "\n".join(lines)


def _widths(rows: Sequence[Sequence[str]]) -> list[int]:
    return [max(cell_len(row[column]) for row in rows) for column in range(len(_COLUMNS))]


def _columns_that_fit(rows: list[list[str]], width: int | None) -> list[int]:
    """Return the positions of the columns that hold anything, and of those that fit into a width if there is one."""
    widths = _widths([_COLUMNS, *rows])
    widths[0] = min(widths[0], _NAME_WIDTH)
    columns = [column for column in range(len(_COLUMNS)) if any(row[column] for row in rows) or not rows]
    for name in _OPTIONAL_COLUMNS:
        if width is None or sum(widths[column] + 2 for column in columns) - 2 <= width:
            break
        columns = [column for column in columns if _COLUMNS[column] != name]
    return columns


def _summary(runs: Sequence[RunState]) -> str:
    states = [run.state for run in runs]
    counts = ", ".join(f"{states.count(state)} {state}" for state in dict.fromkeys(states))
    return f"{count_of(len(runs))}: {counts}" if runs else "no runs"


class MatrixView:
    """Shows a matrix while it runs: a line for every event, and in a terminal a live table below them."""

    def __init__(self, console: Console | None = None, pause: float = 1.0) -> None:
        self._console = console or Console(stderr=True)
        self._pause, self._last_shown = pause, 0.0
        self._start = time.monotonic()
        self._live: Live | None = None
        if self._console.is_terminal:
            self._live = Live(console=self._console, auto_refresh=False, transient=True)

    def __enter__(self) -> MatrixView:
        if self._live is not None:
            self._live.start()
            # A second Ctrl-C ends this process at once, which would leave the cursor hidden.
            self._console.show_cursor(True)
        return self

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self._live.stop()

    def print_event(self, event: MatrixEvent) -> None:
        """Print an event with the time of day."""
        text = f"{datetime.now():%H:%M:%S} {event_line(event)}"
        if self._console.is_terminal:
            text = "\n  ".join(fold(text, max(20, self._console.width - 2)))
        self._console.print(text, highlight=False, markup=False, soft_wrap=True)

    def show(self, matrix: Matrix) -> None:
        """Redraw the live table, at most once per pause."""
        if self._live is None or time.monotonic() - self._last_shown < self._pause:
            return
        self._last_shown = time.monotonic()
        in_progress = [entry for entry in matrix.entries if entry.state in ("running", "elsewhere")]
        runs = [read_state(entry.run.folder, entry.run.name) for entry in in_progress]
        counts = ", ".join(f"{count} {state}" for state, count in matrix.counts().items())
        elapsed = duration(time.monotonic() - self._start)
        table = status_table(runs, self._console.width)
        self._live.update(Group(table, Text(f"{counts}; {elapsed} so far", style="bold")), refresh=True)


def event_line(event: MatrixEvent) -> str:
    """Return a line of text for an event of a matrix."""
    kind, message, entry = event.kind, event.message, event.entry
    if entry is None:
        runs = count_of(event.count)
        if kind == "stopping":
            return f"{message}: saving and stopping {runs}" if event.count else message
        return f"lost     {message}" if kind == "lost" else f"left     {runs}: {message}"
    if kind == "started":
        attempt = f", attempt {entry.attempts}" if entry.attempts > 1 else ""
        details = f" ({_slot(entry.job.info)}{attempt})" if entry.job is not None else ""
        return f"started  {entry.run.name}{details}{', ' if message else ''}{message}"
    if kind == "waiting":
        return f"waiting  {entry.run.name}: {message}"
    if kind == "takeover":
        return f"taking over {entry.run.name}: {message}"
    if kind == "retry":
        return f"failed   {entry.run.name}: {message}; retrying"
    elapsed = f" in {entry.seconds:.0f} s" if entry.seconds else ""
    return f"{kind:<8} {entry.run.name}{elapsed}: {message} [{_progress(event.states)}]"


def _progress(states: dict[str, int]) -> str:
    """Return how many runs are done, and how many of the others are stopped or left."""
    not_done = {state: states[state] for state in ("stopped", "left") if state in states}
    pending = sum(states.get(state, 0) for state in ("waiting", "running", "elsewhere", *not_done))
    total = sum(states.values())
    return ", ".join([f"{total - pending}/{total}", *(f"{count} {state}" for state, count in not_done.items())])


def _slot(launch: LaunchInfo) -> str:
    if launch.job:
        return f"{launch.launcher} job {launch.job}"
    if launch.gpus:
        return f"GPU {','.join(launch.gpus)}"
    return f"CPU, {count_of(launch.threads, 'thread')}" if launch.threads is not None else "CPU"
