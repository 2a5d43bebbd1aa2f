"""Every error class of oelm, and hints for messages. A message names the field or path, the value, and the remedy."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

# How similar two names must be, from 0 to 1, for one to count as a typo of the other: mamba and llama have 0.6.
_CLOSE = 0.65


class OelmError(Exception):
    """The base class of all errors that oelm raises on purpose."""


class MethodError(OelmError):
    """A method that is malformed, or that makes no sense for the model it is given."""


class FamilyError(OelmError):
    """A model whose attention oelm cannot locate."""


class ModelError(OelmError):
    """A model that a method cannot be applied to: wrapped, quantised, on the meta device, or with a method already."""


class FreezeError(OelmError):
    """A model whose frozen tensors differ from its record: one changed, became trainable or is not orthonormal."""


class ConfigError(OelmError):
    """A run's config that is malformed, or that does not fit its data, its model or its folder."""


class TrainingError(OelmError):
    """A run that had to stop: a non-finite loss, a full disk, a folder in use. Checkpoints stay as they were."""


class DataError(OelmError):
    """A corpus, token file or tokenizer that cannot be used as it is."""


class LabError(OelmError):
    """An experiment, a matrix or a launcher that is malformed or does not fit this machine or folder."""


class LaterError(LabError):
    """A launcher that cannot start a run now, but may later: the run keeps waiting."""


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
    """Return the first line of another library's error; the rest is often advice that does not apply here."""
    return (str(error).splitlines() or [type(error).__name__])[0]


def nearest(word: str, known: Iterable[str], count: int = 1) -> str:
    """Return a hint for a mistyped name, " Did you mean 'a' or 'b'?" with up to `count` names, or an empty string."""
    names = {name.lower(): name for name in known}
    close = difflib.get_close_matches(word.lower(), names, n=count, cutoff=_CLOSE)
    close += [name for name in names if count > 1 and word.lower() in name and name not in close]
    return one_of([names[name] for name in close[:count]])


def one_of(names: Iterable[str]) -> str:
    """Return a hint that one of these names was meant, " Did you mean 'a' or 'b'?", or an empty string for none."""
    quoted = " or ".join(map(repr, names))
    return f" Did you mean {quoted}?" if quoted else ""
