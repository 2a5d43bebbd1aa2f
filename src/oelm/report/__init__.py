"""Write reports about the records of runs: Markdown, HTML, PDF, figures, tables and a summary."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .sentences import summary
    from .write import Report, write_report

# Imported on first use, because matplotlib and the analysis take a while: `oelm --help` must not wait for them.
_MODULES = {"summary": "sentences", "Report": "write", "write_report": "write"}

__all__ = ["Report", "summary", "write_report"]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'oelm.report' has no attribute {name!r}")
    value = getattr(import_module(f".{_MODULES[name]}", __name__), name)
    globals()[name] = value
    return value
