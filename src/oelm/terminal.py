"""What every command shares: clear one-line errors, and libraries that keep quiet."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

import typer

from .errors import OelmError


def quiet_libraries() -> None:
    """Keep transformers' notices out of a command's output; errors still show."""
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()


@contextmanager
def errors() -> Iterator[None]:
    """Turn oelm's own errors into one clear line and exit code 2; anything else is a bug and keeps its traceback."""
    try:
        yield
    except OelmError as error:
        typer.secho(f"oelm: {error}", fg="red", err=True)
        sys.exit(2)
