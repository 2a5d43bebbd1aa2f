"""The work folder of a preparation: hidden, with checkpoints, and published by renaming when it is complete."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

import numpy as np
import numpy.typing as npt

from ...base.files import write_json, writing
from ...base.locks import hold
from ...errors import DataError, FileError
from .header import HEADER, WORK, Header, SplitName, sealed
from .sources import hash_file
from .tokens import TOKENIZER

_JOB = "job.json"
_CHECKPOINT = "checkpoint.json"
TOKENIZER_FILE = "trained.json"
# Moved to the output folder in this order: a folder that has a header has everything else.
_PUBLISHED = (TOKENIZER, "train.bin", "val.bin", "test.bin", HEADER)


class Part:
    """A token file that grows; it can be truncated to a checkpoint and continued."""

    def __init__(self, path: Path, dtype: np.dtype[Any], tokens: int = 0, max_id: int = 0) -> None:
        self.path, self.tokens, self.max_id = path, tokens, max_id
        self._file: IO[bytes] = path.open("r+b" if path.exists() else "w+b")
        self._file.truncate(tokens * dtype.itemsize)
        self._file.seek(0, os.SEEK_END)

    def append(self, ids: npt.NDArray[Any]) -> None:
        """Append token ids to the file."""
        if len(ids):
            self._file.write(ids.data)
            self.tokens += len(ids)
            self.max_id = max(self.max_id, int(ids.max()))

    def sync(self) -> None:
        """Flush everything to the disk."""
        self._file.flush()
        os.fsync(self._file.fileno())

    def sha256(self) -> str:
        """Return the hash of the file's content."""
        self.sync()
        return hash_file(self.path)

    def close(self) -> None:
        self._file.close()


class Workspace:
    """The work folder of one preparation, locked by one process at a time."""

    def __init__(self, out: Path) -> None:
        self.out = out
        self.folder = out / WORK
        self.parts: dict[SplitName, Part] = {}

    def checkpoint(self) -> dict[str, Any] | None:
        """Return the last checkpoint, or None when there is none."""
        path = self.folder / _CHECKPOINT
        return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None

    def open_parts(self, splits: tuple[SplitName, ...], dtype: np.dtype[Any]) -> dict[str, Any] | None:
        """Open the token files as the last checkpoint left them; return its state, or None for a fresh start."""
        saved = self.checkpoint()
        for split in splits:
            tokens, max_id = saved["parts"][split] if saved else (0, 0)
            self.parts[split] = Part(self.folder / f"{split}.bin", dtype, tokens, max_id)
        return saved["state"] if saved else None

    def save(self, state: dict[str, Any]) -> None:
        """Save a checkpoint of everything written so far."""
        for part in self.parts.values():
            part.sync()
        counts = {split: (part.tokens, part.max_id) for split, part in self.parts.items()}
        write_json(self.folder / _CHECKPOINT, {"state": state, "parts": counts})

    def close_parts(self) -> None:
        for part in self.parts.values():
            part.close()

    def publish(self, header: Header) -> None:
        """Write the header and move the finished files to the output folder, the header last."""
        self.close_parts()
        write_json(self.folder / HEADER, sealed(header), sort_keys=False, ensure_ascii=False)
        self.move()

    @property
    def finished(self) -> bool:
        """Return True when only moving the files is left to do."""
        return (self.folder / HEADER).is_file()

    def move(self) -> None:
        """Move the files that have not been moved yet; safe to repeat after an interruption at any point."""
        for name in _PUBLISHED:
            source, target = self.folder / name, self.out / name
            if source.exists():
                if target.is_dir():
                    shutil.rmtree(target)
                source.replace(target)
        shutil.rmtree(self.folder)

    def clear(self) -> None:
        """Remove an abandoned preparation, including files that were moved: without a header they are useless."""
        work_files = [self.folder / name for name in (*_PUBLISHED, _CHECKPOINT, TOKENIZER_FILE, _JOB)]
        for path in [*work_files, *(self.out / name for name in _PUBLISHED if name != HEADER)]:
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)


@contextmanager
def workspace(out: Path, recipe: dict[str, Any]) -> Iterator[Workspace]:
    """Create and lock the work folder of `out` for a preparation with this recipe.

    What an interrupted preparation left is kept if its recipe was the same, and removed otherwise. After a failure
    before the first checkpoint, everything that was created is removed.
    """
    work = Workspace(out)
    with writing(out):
        created = [folder for folder in (out, *out.parents) if not folder.exists()]  # innermost first
        work.folder.mkdir(parents=True, exist_ok=True)
        try:
            lock = hold(work.folder, patience=0)
        except FileError:
            raise DataError(f"{out}: another process is preparing this folder; wait for it to finish") from None
        with lock:
            try:
                job = work.folder / _JOB
                if not job.is_file() or json.loads(job.read_text(encoding="utf-8")) != recipe:
                    work.clear()
                    write_json(job, recipe)
                yield work
            finally:
                work.close_parts()
                if work.folder.exists() and not work.finished and work.checkpoint() is None:
                    shutil.rmtree(work.folder)
                    for folder in created:
                        with suppress(OSError):
                            folder.rmdir()


def check_free(out: Path) -> None:
    """Raise DataError when the output folder holds anything but an unfinished preparation."""
    if not out.exists():
        return
    if not out.is_dir():
        raise DataError(f"{out}: a file of that name exists; choose another output folder")
    names = sorted(path.name for path in out.iterdir())
    if names and WORK not in names:
        raise DataError(f"{out}: holds other files ({', '.join(names[:3])}); choose an empty or new folder")


def discard(out: Path) -> None:
    """Remove the work folder of a finished dataset, which remains when a process died after its last move."""
    if (out / WORK).exists():
        with writing(out):
            shutil.rmtree(out / WORK)
