"""A report that is written again while runs go on, until none does."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from os import PathLike
from pathlib import Path
from typing import Any

from ..analysis.run import Run
from ..errors import NoRunsError
from ..runs.folder import is_alive
from .write import Report, write_report


def watch(
    paths: Sequence[str | PathLike[str]],
    out: str | PathLike[str],
    seconds: float,
    told: Callable[[Report | None], None],
    **options: Any,
) -> Report:
    """Write the report, and again whenever a record changed or a run died; ends with a last one when none is running.

    `told` hears of every report, and with none while there are no runs yet.
    """
    before: object = None
    running: tuple[Run, ...] = ()
    while True:
        now = stamps(paths)
        # A run that is killed writes nothing.
        if now != before or not all(is_alive(run.path, run.status) for run in running):
            before, running = now, ()
            try:
                report = write_report(paths, out, refresh=max(2, round(seconds)), **options)
            except NoRunsError:
                told(None)
            else:
                told(report)
                running = report.analysis.running
                if not running:
                    return write_report(paths, out, **options)  # whose page no longer loads itself again
        time.sleep(seconds)


def stamps(paths: Sequence[str | PathLike[str]]) -> tuple[tuple[str, int, int], ...]:
    """The records below some folders by name, size and time: equal as long as nothing was written."""
    names = ("config.json", "metrics.jsonl", "result.json", "status.json")
    found = []
    for path in paths:
        for name in names:
            for file in Path(path).rglob(name):
                try:
                    about = file.stat()
                except FileNotFoundError:  # replaced just now
                    continue
                found.append((str(file), about.st_size, about.st_mtime_ns))
    return tuple(sorted(found))
