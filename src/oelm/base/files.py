"""Read JSON, and write files and folders so that a kill or a full disk loses nothing.

Everything is written under a temporary name first, which contains the id of the writing process, and then renamed.
"""

from __future__ import annotations

import errno
import json
import math
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from glob import escape
from os import PathLike
from pathlib import Path
from typing import Any, TextIO

from ..errors import CheckpointError, FileError, first_line

# Bytes that must stay free on a disk beside what is about to be written.
_HEADROOM = 64 * 1024**2
# A disk with room for fewer files than this is as good as full.
_FEW_FILES = 100
# How libraries in Rust end the text of a system error.
_RUST = re.compile(r"\(os error (\d+)\)")
# The list of what `filled_folder` moves up, in its temporary folder.
_MOVED = ".moved.json"


def to_json(content: Any, **options: Any) -> str:
    """Return content as JSON text. A number that is not finite becomes null: JSON cannot express it."""
    return json.dumps(_finite(content), allow_nan=False, **options)


def write_json(path: Path, content: Any, **options: Any) -> None:
    """Write JSON atomically, indented and with sorted keys unless `options` for `json.dumps` say otherwise."""
    write_text(path, to_json(content, **({"indent": 2, "sort_keys": True} | options)) + "\n")


def write_text(path: Path, content: str) -> None:
    """Write a text file atomically."""
    write_bytes(path, content.encode())


def write_bytes(path: Path, content: bytes) -> None:
    """Write a file atomically: to a temporary name that no other process uses, then renamed."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with writing(path):
        try:
            with open(temporary, "wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
        except OSError:
            temporary.unlink(missing_ok=True)
            raise


@contextmanager
def new_file(path: Path) -> Iterator[TextIO]:
    """Yield a text file that is renamed to `path` when the block ends, or removed when the block raises."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with writing(path):
        try:
            with open(temporary, "w", encoding="utf-8", newline="") as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn a system error in the block into a FileError that names `path` and says what to do.

    The system's own error may name no file, or only a temporary one.
    """
    try:
        yield
    except Exception as error:
        if not _is_from_system(error):
            raise
        code, reason = _code_and_reason(error)
        raise FileError(f"{path}: cannot be written ({reason}); {_advice(code)}") from error


def _is_from_system(error: Exception) -> bool:
    """Return True for a system error, in the classes that libraries in Rust have for it too.

    tokenizers raises a bare Exception, and says in its text which system error it was.
    """
    from safetensors import SafetensorError

    return isinstance(error, OSError | SafetensorError) or (type(error) is Exception and bool(_RUST.search(str(error))))


def _code_and_reason(error: Exception) -> tuple[int | None, str]:
    """Return the number and the words of a system error."""
    if isinstance(error, OSError):
        return error.errno, error.strerror or first_line(error)
    found = _RUST.search(str(error))
    return (int(found[1]), os.strerror(int(found[1]))) if found else (None, first_line(error))


def _advice(code: int | None) -> str:
    """Return what to do about a system error while writing."""
    if code in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return "the disk, quota or file size limit is exhausted: free some space and run the same command again"
    if code in (errno.EROFS, errno.EACCES, errno.EPERM):
        return "it is not writable: choose another folder or change its permissions"
    return "check the path and the disk"


def read_json(path: Path) -> Any:
    """Return the content of a JSON file; raise a FileError that names the file if it cannot be read."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise FileError(f"{path}: cannot be read as JSON ({error})") from None


def read_record(path: Path) -> dict[str, Any]:
    """Return the mapping in a JSON file; raise a FileError that names the file if it holds anything else."""
    content = read_json(path)
    if not isinstance(content, dict):
        raise FileError(f"{path}: holds a {type(content).__name__}, not a mapping of keys to values")
    return content


def looks_local(name: str) -> bool:
    """Return True for a name that can only be a path: a name on the Hub has at most one slash and no leading dot."""
    return name.startswith((".", "/", "~")) or name.count("/") > 1 or "\\" in name


def require_reachable(path: str | PathLike[str]) -> None:
    """Raise if `path` can only be a folder and does not exist, so that the Hub is not asked for it."""
    if (not isinstance(path, str) or looks_local(path)) and not Path(path).exists():
        raise CheckpointError(f"{path}: no such folder")


@contextmanager
def new_folder(path: Path) -> Iterator[Path]:
    """Yield a temporary folder that is renamed to `path` when the block ends, or removed when the block raises."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    remove_leftovers(path.parent, path.name)
    try:
        with writing(path):
            temporary.mkdir(parents=True)
            yield temporary
            put_in_place(temporary, path)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


@contextmanager
def filled_folder(path: Path) -> Iterator[Path]:
    """Yield a temporary folder in an existing empty one, whose entries are moved up when the block ends.

    For a folder that may be a mount, which cannot be renamed over. `undo_filling` removes what a killed process left.
    """
    temporary = path / f".filling.{os.getpid()}.tmp"
    try:
        with writing(path):
            temporary.mkdir()
            yield temporary
            entries = sorted(entry.name for entry in temporary.iterdir())
            write_json(temporary / _MOVED, entries)
            for name in entries:
                os.replace(temporary / name, path / name)
            sync(path)
            shutil.rmtree(temporary)
    except BaseException:
        _undo(temporary)
        raise


def undo_filling(path: Path) -> None:
    """Remove what a killed `filled_folder` left in a folder, and nothing else."""
    for temporary in path.glob(".filling.*.tmp"):
        if not _is_being_written(temporary):
            _undo(temporary)


def _undo(temporary: Path) -> None:
    """Remove the entries that were moved up from a temporary folder, and the folder, whose list of them goes last."""
    if (temporary / _MOVED).is_file():
        for name in read_json(temporary / _MOVED):
            if not (temporary / name).exists():
                _remove(temporary.parent / Path(name).name)
    shutil.rmtree(temporary, ignore_errors=True)


def put_in_place(temporary: Path, path: Path) -> None:
    """Flush a finished folder to disk and rename it to `path`.

    An existing folder is renamed first and removed last, so that one of the two is complete at any time. Where the
    disk refuses the new name, or does not confirm it, the earlier folder is back: the caller says that it failed.
    """
    for file in temporary.rglob("*"):
        if file.is_file():
            sync(file)
    old = path.with_name(f".{path.name}.old")
    if path.exists():
        shutil.rmtree(old, ignore_errors=True)
        os.replace(path, old)
    try:
        os.replace(temporary, path)
    except OSError:
        recover_folder(path)
        raise
    try:
        sync(path.parent)
    except OSError:
        shutil.rmtree(path, ignore_errors=True)
        recover_folder(path)
        raise
    shutil.rmtree(old, ignore_errors=True)


def recover_folder(path: Path) -> None:
    """Undo a `put_in_place` that was interrupted between its two renames."""
    old = path.with_name(f".{path.name}.old")
    if old.exists() and not path.exists():
        os.replace(old, path)


def sync(path: Path) -> None:
    """Flush a file or folder to disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def remove_leftovers(folder: Path, name: str | None = None) -> None:
    """Remove the temporary files and folders of processes that were killed while they wrote to a folder.

    Those of live processes stay: a launcher may be writing to a run's folder while the run claims it. With `name`, only
    what was to get that name is removed.
    """
    for path in folder.glob(".*.tmp" if name is None else f".{escape(name)}.*.tmp"):
        if not _is_being_written(path):
            _remove(path)


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def _is_being_written(temporary: Path) -> bool:
    """Return True when the process whose id is in a temporary name is alive and not this one."""
    pid = temporary.name.removesuffix(".tmp").rpartition(".")[2]
    if not pid.isdecimal() or int(pid) == os.getpid():
        return False
    try:
        os.kill(int(pid), 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:  # it is another user's process
        pass
    return True


def require_space(folder: Path, needed: int) -> None:
    """Raise if the disk of a folder has too little space for this many bytes."""
    free = shutil.disk_usage(folder).free
    if free < needed + _HEADROOM:
        raise FileError(
            f"{folder}: needs {needed / 1e6:,.1f} MB plus {_HEADROOM / 1e6:,.0f} MB headroom, but only "
            f"{free / 1e6:,.1f} MB are free; make room and start the run again"
        )


def shortage(folder: Path) -> str:
    """Return in words what the disk of a folder is short of, bytes or files, or nothing."""
    disk = os.statvfs(folder)
    free = disk.f_bavail * disk.f_frsize
    if free < _HEADROOM:
        return f"only {free / 1e6:,.1f} MB are free on its disk"
    return "its disk has no room for more files" if disk.f_files and disk.f_favail < _FEW_FILES else ""


def _finite(content: Any) -> Any:
    """Return the content with None for every number that is not finite."""
    if isinstance(content, dict):
        return {key: _finite(value) for key, value in content.items()}
    if isinstance(content, list | tuple):
        return [_finite(value) for value in content]
    return None if isinstance(content, float) and not math.isfinite(content) else content
