"""What every command shares: clear one-line errors, and libraries that keep quiet."""

from __future__ import annotations

import errno
import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NoReturn

import typer

from ..errors import OelmError, first_line

# What the machine refuses, whatever the code does: a path that may not be read or written, a disk that is full.
_REFUSED = {errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOSPC, errno.EDQUOT, errno.ENAMETOOLONG, errno.EIO}
# How torch says that memory is too small: by a class of its own for a GPU's, and in the words of an error for the main
# one. By name, so that help need not import torch.
_GPU_MEMORY, _CPU_MEMORY = "OutOfMemoryError", "DefaultCPUAllocator"


def quiet_libraries() -> None:
    """Keep the notices of transformers and of the Hub's client out of a command's output; errors still show."""
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)  # it tells of every try to reach the Hub


@contextmanager
def errors() -> Iterator[None]:
    """Turn oelm's own errors, and what the machine refuses, into one clear line and exit code 2.

    Anything else is a bug and keeps its traceback.
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
        told = type(error).__name__ == _GPU_MEMORY or _CPU_MEMORY in str(error)
        if not (isinstance(error, MemoryError) or told):
            raise
        _refuse(f"not enough memory: use a smaller model, batch or sequence length ({first_line(error)})")


@contextmanager
def progress_bar() -> Iterator[Callable[[str, int, int], None]]:
    """A callback that shows what is under way, how much is done and of how much: a line in a terminal, else nothing.

    It is drawn when told to and never in between: a thread that redraws would run beside what is being timed.
    """
    if not sys.stderr.isatty():
        yield lambda what, done, total: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    columns = (TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, console=Console(stderr=True), auto_refresh=False, transient=True) as bar:
        task = bar.add_task("", visible=False)

        def show(what: str, done: int, total: int) -> None:
            bar.update(task, description=what, completed=done, total=total, visible=True, refresh=True)

        yield show


def _refuse(why: str) -> NoReturn:
    typer.secho(f"oelm: {why}", fg="red", err=True)
    sys.exit(2)
