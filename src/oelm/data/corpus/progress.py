"""Progress of a preparation: what a callback receives, and a bar for the terminal."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from ...base.text import short_count


@dataclass(frozen=True)
class Progress:
    """How far a preparation is, in bytes read from the input; `stage` is 'hash', 'train tokenizer' or 'encode'.

    `total` is None when the size is not known beforehand, as for a dataset on the Hub.
    """

    stage: str
    bytes: int
    total: int | None
    documents: int = 0
    tokens: int = 0


Callback = Callable[[Progress], None]


@contextmanager
def reporter(progress: bool | Callback) -> Iterator[Callback]:
    """Yield the callback to report to: the given one, a bar on standard error for True, or one that does nothing."""
    if progress is not True:
        yield progress or (lambda _: None)
        return
    from rich.progress import BarColumn, DownloadColumn, TaskID, TextColumn, TimeRemainingColumn, TransferSpeedColumn
    from rich.progress import Progress as Bars

    from ...base.console import Console

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
            note = f"{short_count(now.tokens)} tokens" if now.tokens else ""
            bars.update(tasks[now.stage], completed=now.bytes, note=note)

        yield show
