"""Write a report again and again while runs are in progress."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from os import PathLike
from pathlib import Path
from typing import Any

from ..analysis.run import Attempt
from ..errors import NoRunsError
from ..runs.folder import is_alive
from .write import Report, write_report


def watch(
    paths: Sequence[str | PathLike[str]],
    out: str | PathLike[str],
    seconds: float,
    on_report: Callable[[Report | None], None],
    **options: Any,
) -> Report:
    """Write the report whenever a record changed or a run died, and return the last one when no run is in progress.

    `on_report` is called with each report, and with None while there are no runs yet. `options` go to `write_report`.
    """
    before: object = None
    running: tuple[Attempt, ...] = ()
    while True:
        now = stamps(paths)
        # A killed run changes no file, so its process is checked as well.
        if now != before or not all(is_alive(run.path, run.status) for run in running):
            before, running = now, ()
            try:
                report = write_report(paths, out, refresh=max(2, round(seconds)), **options)
            except NoRunsError:
                on_report(None)
            else:
                on_report(report)
                running = report.analysis.running
                if not running:
                    return write_report(paths, out, **options)  # This page does not reload itself.
        time.sleep(seconds)


def stamps(paths: Sequence[str | PathLike[str]]) -> tuple[tuple[str, int, int], ...]:
    """Return name, size and time of the records below some folders: equal as long as nothing was written."""
    names = ("config.json", "metrics.jsonl", "result.json", "status.json")
    files = []
    for path in paths:
        for name in names:
            for file in Path(path).rglob(name):
                try:
                    status = file.stat()
                except FileNotFoundError:  # It is being replaced right now.
                    continue
                files.append((str(file), status.st_size, status.st_mtime_ns))
    return tuple(sorted(files))
