"""Copy the records of runs from a host to this machine, without models: runs that are newer here stay as they are.

What the host has is kept in a folder of its own below the output folder; from there each run's records are copied.
"""

from __future__ import annotations

import hashlib
import os
import re
import shlex
import shutil
import tarfile
import zlib
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import IO

from ..base.files import read_json, remove_leftovers, write_bytes, write_json, writing
from ..base.locks import hold, holder
from ..errors import FileError, LabError
from ..runs.folder import ADDED
from ..runs.schema import RecordedConfig, Status, read_optional
from .launch.host import Host
from .launch.interface import CONSOLE
from .matrix import RUNNER_LOCK

# The files of a run that are copied, those that may be added after its end among them; the result last: with it a run
# counts as done.
_RECORDS = (
    "config.json",
    "environment.json",
    "audit.json",
    "metrics.jsonl",
    "timing.json",
    "train.log",
    CONSOLE,
    *ADDED,
    "status.json",
    "result.json",
)
_MATRIX_LOG = re.compile(r"matrix-[0-9]+-[0-9]+-[0-9]+\.log")
# Folders of a run that hold files of these names which are no records.
_NOT_RECORDS = ("checkpoints", "best", "plain", "submitit")
# The folder, below the output folder, with what each host has.
_HOSTS = ".hosts"
# When, by the host's clock, its records were last read. A file may get its name a while after its time.
_SINCE, _SLACK = "since.json", 60
# What tar exits with where a file grew while it was read. Its end comes the next time.
_TAR_CHANGED = 1


def sync(host: Host, out: Path) -> list[str]:
    """Copy the records of a host's runs in `out` to `out` here; return a line for each run that is left as it is."""
    place = hashlib.sha256(host.folder.encode()).hexdigest()[:8]
    mirror = out / _HOSTS / f"{re.sub(r'[^A-Za-z0-9@._-]', '_', host.address)}-{place}"
    with writing(mirror):
        mirror.mkdir(parents=True, exist_ok=True)
        with hold(mirror, patience=60):
            remove_leftovers(mirror)
            since = read_json(mirror / _SINCE) if (mirror / _SINCE).is_file() else 0
            with host.stream(_pack(out, int(since)), succeeded=(0, _TAR_CHANGED)) as packed:
                try:
                    now = int(packed.readline())
                    _unpack(packed, mirror)
                except (ValueError, EOFError, tarfile.TarError, zlib.error) as error:
                    raise LabError(f"{host.address}: what it sent is no archive of records ({error})") from None
            left = _merge(mirror, out)
            write_json(mirror / _SINCE, now - _SLACK)
    return left


def newer_here(theirs: Path, ours: Path) -> str:
    """Return why the records of a run here are not replaced by a host's, or an empty string if they may be."""
    if holder(ours) is not None or holder(ours, RUNNER_LOCK) is not None:
        return "it is in progress here"
    our_config, config = (read_optional(folder / "config.json", RecordedConfig) for folder in (ours, theirs))
    if our_config is None:
        return ""
    if config is None or config.id != our_config.id:
        return "another run is here"
    our_result, result = ours / "result.json", theirs / "result.json"
    if our_result.is_file():
        same = result.is_file() and result.read_bytes() == our_result.read_bytes()
        return "" if same else "it has a result of its own here"
    our_status, status = (read_optional(folder / "status.json", Status) for folder in (ours, theirs))
    our_time = our_status.updated if our_status is not None else None
    time = status.updated if status is not None else None
    return "the records here are newer" if our_time is not None and our_time > (time or 0) else ""


def _pack(out: Path, since: int) -> str:
    """Return the script that prints the host's time and then, packed, the records that were written since a time."""
    pruned = " -o ".join(f"-name {name}" for name in _NOT_RECORDS)
    wanted = " -o ".join(f"-name {shlex.quote(name)}" for name in (*_RECORDS, "matrix-*.log"))
    find = f"find . \\( -name '.?*' -o {pruned} \\) -prune -o -type f \\( {wanted} \\) -newermt @{since} -print0"
    folder = shlex.quote(str(out))
    return f"date +%s; if cd -- {folder}; then {find} | tar --null --no-recursion -T - -czf -; else exit 2; fi"


def _unpack(packed: IO[bytes], mirror: Path) -> None:
    """Write the records of an archive below a folder. Only files with a record's name are taken, and no other kind."""
    with tarfile.open(fileobj=packed, mode="r|gz") as archive:
        for member in archive:
            path = PurePosixPath(member.name)
            parts = path.parts
            is_record = path.name in _RECORDS or _MATRIX_LOG.fullmatch(path.name) is not None
            if not member.isreg() or not is_record or path.is_absolute() or any(part.startswith(".") for part in parts):
                raise LabError(f"the host sent {member.name!r}, which is no record of a run")
            target, content = mirror / path, archive.extractfile(member)
            assert content is not None
            target.parent.mkdir(parents=True, exist_ok=True)
            write_bytes(target, content.read())


def _merge(mirror: Path, out: Path) -> list[str]:
    """Copy the runs of a mirror, and the logs of its matrices, to `out`; return a line for each that is left out."""
    left = []
    for log in mirror.glob("matrix-*.log"):
        _copy_changed(log, out / log.name)
    for folder in _run_folders(mirror):
        name = folder.relative_to(mirror)
        try:
            reason = newer_here(folder, out / name)
        except FileError as error:
            reason = str(error)
        if reason:
            left.append(f"{name}: not copied, since {reason}")
            continue
        (out / name).mkdir(parents=True, exist_ok=True)
        remove_leftovers(out / name)
        for record in _RECORDS:
            if (folder / record).is_file():
                _copy_changed(folder / record, out / name / record)
    return left


def _run_folders(mirror: Path) -> Iterator[Path]:
    """Yield the folders in a mirror that hold records."""
    for folder, _, names in os.walk(mirror):
        if Path(folder) != mirror and any(name in _RECORDS for name in names):
            yield Path(folder)


def _copy_changed(source: Path, target: Path) -> None:
    """Copy a file and its time under a temporary name, then rename it; one of the same size and time stays."""
    if target.is_file():
        old, new = target.stat(), source.stat()
        if (old.st_size, old.st_mtime_ns) == (new.st_size, new.st_mtime_ns):
            return
    temporary = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    shutil.copy2(source, temporary)
    os.replace(temporary, target)
