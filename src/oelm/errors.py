"""The errors of oelm: each says what was wrong, where, and what to do."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

# How alike two names are, from 0 to 1, for one to be meant by the other: mamba and llama, at 0.6, are two models.
_CLOSE = 0.65


class OelmError(Exception):
    """Base of every error that oelm raises on purpose."""


class MethodError(OelmError):
    """A method that is malformed, or that makes no sense for the model it is given."""


class FamilyError(OelmError):
    """A model whose attention oelm cannot locate."""


class ModelError(OelmError):
    """A model in a state that cannot be operated on: wrapped, quantised, on the meta device, already operated on."""


class FreezeError(OelmError):
    """A model that is not frozen as its record says."""


class ConfigError(OelmError):
    """A run's config that is malformed, or that does not fit its data, its model or its folder."""


class TrainingError(OelmError):
    """A run that had to stop: a non-finite loss, a full disk, a folder in use. Checkpoints stay as they were."""


class DataError(OelmError):
    """A corpus, token file or tokenizer that cannot be used as it is."""


class LabError(OelmError):
    """An experiment, a matrix or a launcher that is malformed or does not fit this machine or folder."""


class AnalysisError(OelmError):
    """Input that an analysis cannot use: no runs, a record of another format, a hypothesis that makes no sense."""


class NoRunsError(AnalysisError):
    """Folders that hold no run, or none yet."""


class FileError(OelmError):
    """A file or folder that cannot be read, written or locked, or that holds something else than it should."""


class FormatError(FileError):
    """A run's record that was written in another format than this version reads."""


class CheckpointError(OelmError):
    """A folder of a model or a run that is missing, does not hold what it should, or cannot be written."""


def first_line(error: BaseException) -> str:
    """What another library's error says, without its advice."""
    return (str(error).splitlines() or [type(error).__name__])[0]


def nearest(word: str, known: Iterable[str], count: int = 1) -> str:
    """Return a hint for a mistyped name, " Did you mean 'a' or 'b'?" with up to `count` names, or an empty text."""
    names = {name.lower(): name for name in known}
    close = difflib.get_close_matches(word.lower(), names, n=count, cutoff=_CLOSE)
    close += [name for name in names if count > 1 and word.lower() in name and name not in close]
    return f" Did you mean {' or '.join(repr(names[name]) for name in close[:count])}?" if close else ""
