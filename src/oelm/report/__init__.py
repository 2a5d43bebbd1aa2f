"""Records into a report: Markdown, HTML, PDF, figures, tables, and a summary in plain words."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .sentences import summary
    from .write import Report, write_report

# Loaded on first use: the command line imports this package for its commands, and its help needs no more.
_HOME = {"summary": "sentences", "Report": "write", "write_report": "write"}

__all__ = ["Report", "summary", "write_report"]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'oelm.report' has no attribute {name!r}")
    value = getattr(import_module(f".{_HOME[name]}", __name__), name)
    globals()[name] = value
    return value
