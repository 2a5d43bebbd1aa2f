"""The lab's own error, and hints for names that were mistyped."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

from ..errors import OelmError


class LabError(OelmError):
    """An experiment, a matrix or a launcher that is malformed or does not fit this machine or folder."""


def near(word: str, known: Iterable[str], count: int = 3) -> str:
    """The nearest known names, whatever their case: ' Nearest: a, b, c.' or nothing."""
    names = {name.lower(): name for name in known}
    close = difflib.get_close_matches(word.lower(), names, n=count, cutoff=0.5)
    close += [low for low in names if word.lower() in low and low not in close]
    return f" Nearest: {', '.join(names[low] for low in close[:count])}." if close else ""
