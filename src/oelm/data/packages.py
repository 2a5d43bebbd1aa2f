"""What goes wrong with data: one error type, and the translation of system errors and missing packages into it."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

from ..errors import DataError


def optional(module: str, purpose: str) -> Any:
    """Import a package that only some sources need, or say how to install it."""
    try:
        return import_module(module)
    except ImportError:
        package = module.partition(".")[0]
        raise DataError(f"{purpose} needs the package {package!r}, which is missing: pip install {package}") from None


@contextmanager
def writing(folder: Path) -> Iterator[None]:
    """Turn a system error while writing below `folder` into a DataError that says what to do."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            advice = "the disk, quota or file size limit is exhausted: free some space and run the same command again"
        elif error.errno in (errno.EROFS, errno.EACCES, errno.EPERM):
            advice = "it is not writable: choose another output folder or change its permissions"
        else:
            advice = "check the path and the disk"
        raise DataError(f"{folder}: cannot write ({error.strerror or error}); {advice}") from error
