"""Import packages that only some kinds of data need."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from ..errors import DataError


def import_optional(module: str, purpose: str) -> Any:
    """Import and return a module; raise DataError with how to install its package when it is missing."""
    try:
        return import_module(module)
    except ImportError:
        package = module.partition(".")[0]
        raise DataError(f"{purpose} needs the package {package!r}, which is missing: pip install {package}") from None
