"""Progress of a preparation: what a callback is told, and a bar for a terminal."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass(frozen=True)
class Progress:
    """Where a preparation stands, in bytes read from the input; `stage` is 'hash', 'train tokenizer' or 'encode'.

    `total` is None where the size is not known beforehand, as for a dataset of the Hub.
    """

    stage: str
    bytes: int
    total: int | None
    documents: int = 0
    tokens: int = 0


Callback = Callable[[Progress], None]


@contextmanager
def reporter(progress: bool | Callback) -> Iterator[Callback]:
    """The callback to report to: the one given, a bar on standard error for True, nothing for False."""
    if callable(progress):
        yield progress
        return
    if not progress:
        yield _nothing
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, TaskID, TextColumn, TimeRemainingColumn, TransferSpeedColumn
    from rich.progress import Progress as Bars

    columns = (
        TextColumn("{task.description}"),
        BarColumn(bar_width=16),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[note]}"),
    )
    with Bars(*columns, console=Console(stderr=True)) as bars:
        tasks: dict[str, TaskID] = {}

        def show(now: Progress) -> None:
            if now.stage not in tasks:
                tasks[now.stage] = bars.add_task(now.stage, total=now.total, note="")
            note = f"{now.tokens / 1e6:,.1f} M tokens" if now.tokens else ""
            bars.update(tasks[now.stage], completed=now.bytes, note=note)

        yield show


def _nothing(_: Progress) -> None:
    pass
