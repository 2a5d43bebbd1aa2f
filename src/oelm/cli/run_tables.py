"""What the lab's commands print: lists of experiments, tables of runs, a live view of a matrix."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import datetime
from typing import TYPE_CHECKING, Any

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from ..lab.estimate import spell
from ..lab.experiment import Experiment
from ..lab.status import RunState, look, so_many

if TYPE_CHECKING:
    from ..lab.matrix import Matrix

STYLES = {
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


def published_figure(experiment: Experiment) -> str:
    """The published figures of an experiment in a few words; empty where nothing was published."""
    from ..runs.published import load

    parts = []
    for id in experiment.published:
        if id in load():
            entry = load()[id]
            named = f"{entry.method} " if len(experiment.published) > 1 else ""
            ppl, accuracy = entry.value("perplexity"), entry.value("accuracy")
            if ppl is not None:
                parts.append(f"{named}perplexity {ppl:.2f}")
            if accuracy is not None:
                parts.append(f"{named}accuracy {accuracy:.2%}")
    return ", ".join(parts)


def experiment_lines(experiments: Sequence[Experiment]) -> list[str]:
    """The list of `oelm experiments`: by group, with what each asks and what was published."""
    width = max(len(experiment.id) for experiment in experiments)
    lines: list[str] = []
    group = None
    for experiment in experiments:
        if experiment.group != group:
            group = experiment.group
            lines += ["", group] if lines else [group]
        published = published_figure(experiment)
        lines.append(
            f"  {experiment.id:<{width}}  {experiment.asks}{f'  [published: {published}]' if published else ''}"
        )
    return lines


def progress_of(run: RunState) -> str:
    if run.step is None:
        return ""
    return f"{run.step}/{run.max_steps}" if run.max_steps else str(run.step)


def cells(run: RunState) -> list[str]:
    """One run as a row: the columns of `oelm status`."""
    figure = "" if run.perplexity is None else f"{run.perplexity:.2f}"
    if run.accuracy is not None:
        figure = f"{run.accuracy:.2%}"
    return [
        run.name,
        run.state,
        progress_of(run),
        "" if run.loss is None else f"{run.loss:.4f}",
        "" if run.val_loss is None else f"{run.val_loss:.4f}",
        figure,
        "" if run.tokens_per_second is None else f"{run.tokens_per_second:,.0f}",
        spell(run.eta_seconds) if run.eta_seconds is not None and run.live else "",
        run.host or "",
        "" if run.memory is None else f"{run.memory / 2**30:.1f} GiB",
    ]


COLUMNS = ("run", "state", "step", "train loss", "val loss", "val ppl / acc", "tokens/s", "left", "host", "GPU memory")


# What a narrow terminal does without, the first of these first; and the room for a run's name, which can be folded.
_SPARED = ("GPU memory", "host", "tokens/s", "train loss", "val loss", "left", "val ppl / acc")
_NAME = 20


def status_table(runs: Sequence[RunState], width: int | None = None) -> Group:
    """Runs as a table, of as many columns as a terminal of this width has room for; below it what went wrong."""
    rows = [cells(run) for run in runs]
    table = Table(box=None, pad_edge=False, header_style="bold")
    shown = _that_fit(rows, width)
    for at in shown:
        name = COLUMNS[at]
        table.add_column(name, justify="left" if at < 2 or name == "host" else "right", overflow="fold", no_wrap=at > 0)
    for row in rows:
        first, state, *rest = (row[at] for at in shown)
        table.add_row(first, Text(state, style=STYLES.get(state, "")), *rest)
    trouble = [Text(f"{run.name}: {run.message}", style="red") for run in runs if run.message]
    return Group(table, *trouble)


def _that_fit(rows: list[list[str]], width: int | None) -> list[int]:
    """The places of the columns that fit."""
    widest = [max(len(row[at]) for row in (COLUMNS, *rows)) for at in range(len(COLUMNS))]
    widest[0] = min(widest[0], _NAME)
    shown = list(range(len(COLUMNS)))
    for name in _SPARED:
        if width is None or sum(widest[at] + 2 for at in shown) - 2 <= width:
            break
        shown.remove(COLUMNS.index(name))
    return shown


def status_lines(runs: Sequence[RunState]) -> list[str]:
    """The same as plain lines, for what is no terminal."""
    rows = [list(COLUMNS), *(cells(run) for run in runs)]
    widths = [max(len(row[at]) for row in rows) for at in range(len(COLUMNS))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    lines += [f"{run.name}: {run.message}" for run in runs if run.message]
    return [*lines, summary_line(runs)]


def summary_line(runs: Sequence[RunState]) -> str:
    states = [run.state for run in runs]
    counted = ", ".join(f"{states.count(state)} {state}" for state in dict.fromkeys(states))
    return f"{so_many(len(runs))}: {counted}" if runs else "no runs"


def watch(read: Callable[[], list[RunState]], seconds: float = 2.0) -> None:
    """A live table until no run goes on or waits, or until Ctrl-C."""
    with Live(console=Console(), auto_refresh=False) as live, suppress(KeyboardInterrupt):
        while True:
            runs = read()
            table = status_table(runs, live.console.width)
            live.update(Group(table, Text(summary_line(runs))), refresh=True)
            if not any(run.state in ("running", "waiting") for run in runs):
                return
            time.sleep(seconds)


class MatrixView:
    """A matrix while it goes: in a terminal a live table below the lines of what happened, elsewhere lines alone."""

    def __init__(self, console: Console | None = None, pause: float = 1.0) -> None:
        self._console = console or Console(stderr=True)
        self._pause, self._shown = pause, 0.0
        self._live: Live | None = None
        self._began = time.monotonic()
        if self._console.is_terminal:
            self._live = Live(console=self._console, auto_refresh=False, transient=True)

    def __enter__(self) -> MatrixView:
        if self._live is not None:
            self._live.start()
            self._console.show_cursor(True)  # a second Ctrl-C ends us at once: nobody would show it again
        return self

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self._live.stop()

    def say(self, text: str) -> None:
        stamp = datetime.now().strftime("%H:%M:%S")
        self._console.print(f"{stamp} {text}", highlight=False, markup=False, soft_wrap=True)

    def __call__(self, matrix: Matrix) -> None:
        """Show how it stands."""
        if self._live is None or time.monotonic() - self._shown < self._pause:
            return
        self._shown = time.monotonic()
        going = [entry for entry in matrix.entries if entry.state in ("running", "elsewhere")]
        runs = [look(entry.planned.folder, entry.planned.name) for entry in going]
        counts = ", ".join(f"{count} {state}" for state, count in matrix.counts().items())
        passed = spell(time.monotonic() - self._began)
        table = status_table(runs, self._console.width)
        self._live.update(Group(table, Text(f"{counts}; {passed} so far", style="bold")), refresh=True)


def interactive() -> bool:
    return sys.stdin.isatty() and sys.stderr.isatty()


def details(experiment: Experiment) -> dict[str, Any]:
    """All of an experiment, for `oelm experiments NAME` and `--json`."""
    return {**experiment.model_dump(mode="json", exclude={"abstract"}), "figures": published_figure(experiment)}
