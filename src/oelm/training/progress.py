"""Show a run's progress: a live line in a terminal, plain lines elsewhere, and every line in train.log."""

from __future__ import annotations

import os
import sys
import time
from contextlib import suppress

from rich.progress import BarColumn, Progress, TaskID, TextColumn
from rich.table import Column

from ..base.console import Console
from ..runs.folder import RunFolder

_BAR_WIDTH = 10
# The text beside the bar is one line: what does not fit is cut, not folded.
_WHOLE = Column(no_wrap=True, overflow="ellipsis")


class _PatientConsole(Console):
    """A console whose reader may close the pipe: the run then continues silently, and train.log has every line."""

    def on_broken_pipe(self) -> None:
        self.quiet = True
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())  # buffered output has to go somewhere


class Display:
    """The progress of one run. Only the main process shows anything; plain lines come at most every `pause` seconds."""

    def __init__(self, folder: RunFolder | None, quiet: bool = False, pause: float = 5.0) -> None:
        self._folder, self._total, self._pause = folder, 0, pause
        self._shown = 0.0
        self._console = _PatientConsole(stderr=True, quiet=quiet or folder is None)
        self._bar: Progress | None = None
        self._task: TaskID | None = None

    def start(self, total: int) -> None:
        """Start the live line of a run with `total` steps."""
        self._total = total
        if self._folder is not None and not self._console.quiet and sys.stderr.isatty():
            columns = (BarColumn(bar_width=_BAR_WIDTH), TextColumn("{task.fields[metrics]}", table_column=_WHOLE))
            self._bar = Progress(*columns, console=self._console, transient=True)
            self._task = self._bar.add_task("", total=total, metrics="starting")
            self._bar.start()
            self._console.show_cursor(True)  # a second Ctrl-C ends the process at once, and would leave it hidden

    def say(self, text: str) -> None:
        """Show and log one line."""
        if self._folder is not None:
            self._folder.log(text)
            with suppress(OSError):  # a full disk behind the terminal: train.log has every line
                self._console.print(text, highlight=False, markup=False, soft_wrap=not self._console.is_terminal)

    def step(self, step: int, metrics: dict[str, float], eta: float) -> None:
        """Show and log the metrics of the last steps."""
        if self._folder is None:
            return
        named = (("ppl", "perplexity"), ("masked ppl", "masked_perplexity"))
        ppl = "".join(f"  {short} {metrics[name]:.2f}" for short, name in named if name in metrics)
        skipped = f"  {metrics['skipped']} skipped" if metrics["skipped"] else ""
        done, rate = f"{step}/{self._total}  loss {metrics['loss']:.4f}{ppl}", f"{metrics['tokens_per_second']:,.0f}"
        text = f"step {done}  lr {metrics['learning_rate']:.2e}  {rate} tokens/s  eta {duration(eta)}{skipped}"
        self._folder.log(text)
        if self._bar is not None and self._task is not None:
            # The time left comes early, so that no narrow terminal cuts it off.
            short = f"{duration(eta)} left  {done}  {rate} tok/s{skipped}"
            self._bar.update(self._task, completed=step, metrics=short)
        elif time.monotonic() - self._shown >= self._pause or step >= self._total:
            self._shown = time.monotonic()
            with suppress(OSError):
                self._console.print(text, highlight=False, markup=False, soft_wrap=True)

    def close(self) -> None:
        """Remove the live line."""
        if self._bar is not None:
            self._bar.stop()


def duration(seconds: float) -> str:
    """Format seconds as h:mm:ss."""
    minutes, remainder = divmod(int(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02d}:{remainder:02d}"
