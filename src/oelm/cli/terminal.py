"""Helpers that commands share: one-line errors, quiet libraries, progress bars, questions, and formatted amounts."""

from __future__ import annotations

import errno
import logging
import os
import re
import shlex
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NoReturn, TextIO, cast

import typer

from ..base.text import visible
from ..errors import LabError, OelmError, first_line

# System errors that are the machine's refusal, not a bug: a path without permission, a full disk.
_REFUSED = {errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOSPC, errno.EDQUOT, errno.ENAMETOOLONG, errno.EIO}
# Those of a file that output is redirected to.
_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO}
# How torch reports too little memory: with its own class for a GPU, and by these words for the CPU. They are compared
# by name, so that `oelm --help` need not import torch.
_GPU_MEMORY_ERROR, _CPU_MEMORY_WORDS = "OutOfMemoryError", "DefaultCPUAllocator"

# What stays in one line: a command in backticks, which a reader copies, a word, or one Chinese character, with the
# punctuation beside it and the space after it.
_PIECE = re.compile(r"[（(]*(?:`[^`]+`[^ `\u2e80-\uffff]*|[^ \u2e80-\uffff]+|[\u2e80-\uffff])[，。；：、）]* *")
_NO_BREAK = "\u00a0"


def quiet_libraries() -> None:
    """Keep the notices of transformers and huggingface_hub out of a command's output; errors are still shown."""
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)  # it logs every attempt to reach the Hub


def echo(text: str = "", fg: str | None = None, err: bool = False) -> None:
    """Print a text in which nothing commands the terminal: names and messages may come from others' files."""
    typer.secho(visible(text), fg=fg, err=err)


@contextmanager
def errors() -> Iterator[None]:
    """Turn oelm's own errors, and system errors such as a full disk, into one line on stderr and exit code 2.

    Any other error is a bug and keeps its traceback.
    """
    try:
        yield
    except OelmError as error:
        _refuse(str(error))
    except OSError as error:
        if error.errno not in _REFUSED or error.filename is None:
            raise
        _refuse(f"{error.filename}: {error.strerror}")
    except (MemoryError, RuntimeError) as error:
        from_torch = type(error).__name__ == _GPU_MEMORY_ERROR or _CPU_MEMORY_WORDS in str(error)
        if not (isinstance(error, MemoryError) or from_torch):
            raise
        _refuse(f"not enough memory: use a smaller model, batch or sequence length ({first_line(error)})")


@contextmanager
def unwritable_output() -> Iterator[None]:
    """Go on where standard error cannot be written, and end with one line where standard output cannot.

    What goes to standard error is progress, which a run does not need. A closed pipe is left to the library.
    """
    sys.stderr = cast(TextIO, _Progress(sys.stderr)) if sys.stderr is not None else sys.stderr
    try:
        yield
    except OSError as error:
        if error.errno not in _FULL or error.filename is not None:
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # what is buffered has to go somewhere
        _refuse(f"the output cannot be written ({error.strerror})")


class _Progress:
    """A text stream that drops what it cannot write."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        with suppress(OSError):
            return self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        with suppress(OSError):
            self._stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def _refuse(reason: str) -> NoReturn:
    text = f"oelm: {reason}"
    if sys.stderr.isatty():
        text = fold_lines(text, shutil.get_terminal_size().columns)
    echo(text, fg="red", err=True)
    sys.exit(2)


@contextmanager
def progress_bar() -> Iterator[Callable[[str, int, int], None]]:
    """Yield a function of (description, done, total) that draws a bar in a terminal, and does nothing elsewhere.

    The bar is drawn only when the function is called: a thread that redraws it would disturb what is being timed.
    """
    if not sys.stderr.isatty():
        yield lambda description, done, total: None
        return
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    from ..base.console import Console

    columns = (TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, console=Console(stderr=True), auto_refresh=False, transient=True) as bar:
        task = bar.add_task("", visible=False)

        def show(description: str, done: int, total: int) -> None:
            bar.update(task, description=description, completed=done, total=total, visible=True, refresh=True)

        yield show


def confirm(question: str, yes: bool) -> None:
    """Ask the user, unless `yes` is set, and exit with 1 if they decline; raise if there is no terminal to ask in."""
    if yes:
        return
    if not (sys.stdin.isatty() and sys.stderr.isatty()):
        raise LabError(f"{question} There is no terminal to ask in: give --yes to continue")
    if not typer.confirm(visible(question)):
        raise typer.Exit(1)


def screen_width() -> int | None:
    """Return the width of the terminal that the output goes to, or None where it goes to a file or another program."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() or "COLUMNS" in os.environ else None


def folded(text: str, indent: int = 0) -> list[str]:
    """Return a text in the lines that a terminal has room for beside an indent; elsewhere in one line."""
    width = screen_width()
    # In a terminal that is too narrow the words are left to it.
    return [text] if width is None or width < indent + 20 else fold(text, width - indent)


def fold(text: str, width: int) -> list[str]:
    """Return a text in lines of this display width. Chinese breaks anywhere, a number stays beside its per cent sign.

    A word that is longer than a line has one of its own.
    """
    from rich.cells import cell_len

    lines = [""]
    for piece in _PIECE.findall(text.replace(" %", f"{_NO_BREAK}%")):
        if lines[-1] and cell_len(lines[-1] + piece.rstrip(" ")) > width:
            lines.append("")
        lines[-1] += piece
    return [line.rstrip(" ").replace(_NO_BREAK, " ") for line in lines]


def fold_lines(text: str, width: int) -> str:
    """Return a text with its long lines folded; one that is indented is code that a reader copies, and stays whole."""
    lines = text.splitlines()
    return "\n".join(part for line in lines for part in ([line] if line.startswith(" ") else fold(line, width)))


def listing(entries: Iterable[tuple[str, str]], indent: int = 0) -> list[str]:
    """Return names with their descriptions beside them as lines; in a terminal long descriptions are folded."""
    pairs = list(entries)
    column = indent + max(len(name) for name, _ in pairs) + 2
    lines = []
    for name, text in pairs:
        first, *more = folded(text, column)
        lines += [f"{' ' * indent}{name}".ljust(column) + first, *(" " * column + line for line in more)]
    return lines


def repeat_command() -> str:
    """Return the command line that this process was started with, to be typed again."""
    program = "python -m oelm" if Path(sys.argv[0]).name == "__main__.py" else "oelm"
    return f"{program} {shlex.join(sys.argv[1:])}"


def count_of(count: int, noun: str = "run") -> str:
    """Return a number of things in words: 1 run, 2 runs."""
    return f"{count} {noun}{'' if count == 1 else 's'}"


def duration(seconds: float) -> str:
    """Return a duration in a suitable unit: 80 s, 20 min, 3.5 h, 2.1 days."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    if seconds < 90 * 60:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h" if seconds < 48 * 3600 else f"{seconds / 86400:.1f} days"


def pad(text: str, width: int, right: bool = False) -> str:
    """Return a text padded with spaces to a display width; a Chinese character takes two columns."""
    from rich.cells import cell_len

    spaces = " " * (width - cell_len(text))
    return spaces + text if right else text + spaces
