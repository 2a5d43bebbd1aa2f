"""Reading JSON and YAML, and writing so that a kill or a full disk loses nothing: to a temporary name, then renamed."""

from __future__ import annotations

import errno
import json
import math
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from os import PathLike
from pathlib import Path
from typing import Any

from ..errors import CheckpointError, FileError, first_line

# Room to leave on a disk beside what is about to be written.
_HEADROOM = 64 * 1024**2
# What YAML writes where a key stands, and is none: `<<` may be there twice, and both are merged.
_YAML_SIGNS = ("tag:yaml.org,2002:merge", "tag:yaml.org,2002:value")


def to_json(content: Any, **options: Any) -> str:
    """JSON text. A number that is not finite becomes null, since JSON has no word for it."""
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
def writing(path: Path) -> Iterator[None]:
    """Turn a system error in the block into a FileError that names `path` and says what to do.

    The system's own error may name no file, or only a temporary one.
    """
    from safetensors import SafetensorError

    try:
        yield
    except (OSError, SafetensorError) as error:
        code, reason = (error.errno, error.strerror) if isinstance(error, OSError) else (None, None)
        raise FileError(f"{path}: cannot be written ({reason or first_line(error)}); {_advice(code)}") from error


def _advice(code: int | None) -> str:
    """Return what to do about a system error while writing."""
    if code in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return "the disk, quota or file size limit is exhausted: free some space and run the same command again"
    if code in (errno.EROFS, errno.EACCES, errno.EPERM):
        return "it is not writable: choose another folder or change its permissions"
    return "check the path and the disk"


def read_json(path: Path) -> Any:
    """The content of a JSON file; an error that names the file if it is damaged."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise FileError(f"{path}: cannot be read as JSON ({error})") from None


def read_record(path: Path) -> dict[str, Any]:
    """The mapping in a JSON file; an error that names the file if it holds anything else."""
    content = read_json(path)
    if not isinstance(content, dict):
        raise FileError(f"{path}: is not a record")
    return content


def parse_yaml(text: str) -> Any:
    """The content of YAML or JSON text; a ValueError of one line where it is neither, or gives a key twice."""
    import yaml

    try:
        return yaml.load(text, _yaml_loader())  # noqa: S506 - it is a SafeLoader
    except (yaml.YAMLError, ValueError) as error:  # yaml lets a date such as 2026-13-45 fail by itself
        raise ValueError(" ".join(str(error).split())) from None
    except RecursionError:
        raise ValueError("nested too deeply") from None


@cache
def _yaml_loader() -> Any:
    """yaml's safe loader, which keeps the last of two values of a key and says nothing, made to refuse the second."""
    import yaml

    class OneValuePerKey(yaml.SafeLoader):
        def __init__(self, stream: str) -> None:
            super().__init__(stream)
            self._seen: set[yaml.MappingNode] = set()

        def flatten_mapping(self, node: yaml.MappingNode) -> None:
            """Called before a mapping is made, and adds what `<<` merges: only what it has before that is its own."""
            if node not in self._seen:
                self._seen.add(node)
                self._require_distinct(node)
            super().flatten_mapping(node)

        def _require_distinct(self, node: yaml.MappingNode) -> None:
            lines: dict[Any, int] = {}
            for key_node, _ in node.value:
                if not isinstance(key_node, yaml.ScalarNode) or key_node.tag in _YAML_SIGNS:
                    continue
                key, line = self.construct_object(key_node), key_node.start_mark.line + 1
                if key in lines:
                    raise ValueError(f"line {line}: the key {key!r} is there already, on line {lines[key]}; keep one")
                lines[key] = line

    return OneValuePerKey


def looks_local(name: str) -> bool:
    """Whether a name can only be a folder's: one of the Hub has a slash at most, and does not begin like a path."""
    return name.startswith((".", "/", "~")) or name.count("/") > 1 or "\\" in name


def require_reachable(path: str | PathLike[str]) -> None:
    """Raises for what can only be a folder and is not there, before the Hub is asked for it."""
    if (not isinstance(path, str) or looks_local(path)) and not Path(path).exists():
        raise CheckpointError(f"{path}: no such folder")


@contextmanager
def new_folder(path: Path) -> Iterator[Path]:
    """A temporary folder that takes `path`'s place, whole, when the block ends well, and vanishes when it does not."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    try:
        with writing(path):
            temporary.mkdir(parents=True)
            yield temporary
            put_in_place(temporary, path)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


@contextmanager
def empty_folder(path: Path) -> Iterator[Path]:
    """An empty folder that stays where it is, such as a mount, to be filled; emptied again when the block fails."""
    try:
        with writing(path):
            yield path
    except BaseException:
        for left in path.iterdir():
            if left.is_dir():
                shutil.rmtree(left, ignore_errors=True)
            else:
                left.unlink(missing_ok=True)
        raise


def put_in_place(temporary: Path, path: Path) -> None:
    """Flush a finished folder and rename it. An older one steps aside first, so one of the two is always whole."""
    for file in temporary.rglob("*"):
        if file.is_file():
            sync(file)
    aside = path.with_name(f".{path.name}.old")
    if path.exists():
        shutil.rmtree(aside, ignore_errors=True)
        os.replace(path, aside)
    os.replace(temporary, path)
    sync(path.parent)
    shutil.rmtree(aside, ignore_errors=True)


def recover_folder(path: Path) -> None:
    """Undo a replacement that was cut between its two renames."""
    aside = path.with_name(f".{path.name}.old")
    if aside.exists() and not path.exists():
        os.replace(aside, path)


def sync(path: Path) -> None:
    """Flush a file or a folder to its disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def remove_leftovers(folder: Path) -> None:
    """Remove what processes that were killed while they wrote left in a folder.

    What a live one writes stays: a run's runner tells how it started it while the run claims its folder.
    """
    for path in folder.glob(".*.tmp"):
        if _writes_now(path):
            continue
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)


def _writes_now(temporary: Path) -> bool:
    """Whether the process whose number a temporary name holds lives, and is another one."""
    number = temporary.name.removesuffix(".tmp").rpartition(".")[2]
    if not number.isdecimal() or int(number) == os.getpid():
        return False
    try:
        os.kill(int(number), 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:  # another user's
        pass
    return True


def require_space(folder: Path, needed: int) -> None:
    """Raise before writing when the disk has too little room."""
    free = shutil.disk_usage(folder).free
    if free < needed + _HEADROOM:
        raise FileError(
            f"{folder}: {needed / 1e6:,.1f} MB are to be written, {_HEADROOM / 1e6:,.0f} MB are to stay free, and the "
            f"disk has {free / 1e6:,.1f} MB; make room and start the run again"
        )


def _finite(content: Any) -> Any:
    if isinstance(content, dict):
        return {key: _finite(value) for key, value in content.items()}
    if isinstance(content, list | tuple):
        return [_finite(value) for value in content]
    return None if isinstance(content, float) and not math.isfinite(content) else content
