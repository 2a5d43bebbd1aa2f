"""Text units to token arrays: which split a unit goes to, where long text is cut, and the threads that encode."""

from __future__ import annotations

import hashlib
import os
import re
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from itertools import islice
from typing import Any

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer

from .readers import Unit
from .sources import SplitName

_PIECE = 32 << 10  # characters that are encoded in one go
_JOB = 256 << 10  # characters that one thread takes at a time
# Where text is cut: after a lone line break, or before a lone space. There the usual pre-tokenizers cut as well, so
# the ids are those of the uncut text.
_AFTER_LINE = re.compile(r"(?s:.*)(?<=\S)\n(?=\S)")
_BEFORE_SPACE = re.compile(r"(?s:.*)(?<=\S)(?= \S)")

Arrays = dict[SplitName, npt.NDArray[Any]]


@dataclass(frozen=True, slots=True)
class Piece:
    """Text to encode for one split; `ends` says that the end-of-text token follows."""

    split: SplitName
    text: str
    ends: bool


@dataclass
class FeederState:
    """How far a corpus has been read: enough, with the corpus itself, to go on from there.

    An open run is text of a document that is not finished: its split, and what has not been handed on.
    """

    units: int = 0
    read_bytes: int = 0
    documents: dict[SplitName, int] = field(default_factory=lambda: {"train": 0, "val": 0})
    bytes: dict[SplitName, int] = field(default_factory=lambda: {"train": 0, "val": 0})
    shared: int = 0
    lowest: float = 1.0
    run_split: SplitName | None = None
    run_text: str = ""


class Feeder:
    """Reads units, assigns each to a split by its content, and cuts them into pieces.

    The split depends on nothing but the unit's text and the seed: equal documents always land on the same side, in
    whatever order and number they come.
    """

    def __init__(
        self,
        train: Iterable[Unit],
        val: Iterable[Unit] | None,
        *,
        val_fraction: float,
        seed: int,
        limit_bytes: int | None,
        state: FeederState | None = None,
    ) -> None:
        self._train, self._val = train, val
        self._fraction = 0.0 if val is not None else val_fraction
        self._key = seed.to_bytes(8, "little")
        self._limit = limit_bytes
        self._held_out: Counter[bytes] = Counter()  # validation documents that the training text has not had
        self._shared = 0
        self._document: hashlib.blake2b | None = None  # of the text so far
        self.state = state or FeederState()

    def groups(self) -> Iterator[list[Piece]]:
        """The pieces of one unit after the other; between two groups, `state` is a place to resume from."""
        units = self._units()
        deque(islice(units, self.state.units), maxlen=0)  # what an earlier run has done
        for unit, forced in units:
            yield self._take(unit, forced)
        closing = self._close()
        if closing:
            yield closing

    def _units(self) -> Iterator[tuple[Unit, SplitName | None]]:
        for unit in self._val or ():
            ended = self._ended(unit)
            if ended:
                self._held_out[ended] += 1
            yield unit, "val"
        for unit in self._train:
            if self._limit is not None and self.state.read_bytes >= self._limit:
                return
            if self._held_out:
                self._shared += self._held_out.pop(self._ended(unit), 0)
            yield unit, "train" if self._fraction == 0.0 else None

    def _take(self, unit: Unit, forced: SplitName | None) -> list[Piece]:
        state = self.state
        split = forced or self._choose(unit)
        pieces = self._close() if state.run_split not in (None, split) else []
        size = self._size(unit)
        state.units += 1
        state.bytes[split] += size
        if forced != "val":
            state.read_bytes += size
        state.shared = self._shared
        state.run_split = split
        state.run_text += unit.text
        if not unit.more:
            return pieces + self._close()
        *ready, state.run_text = cut(state.run_text)
        return pieces + [Piece(split, text, ends=False) for text in ready]

    def _close(self) -> list[Piece]:
        """End the open run, if there is one: its text, and the end of the document."""
        state = self.state
        if state.run_split is None:
            return []
        *ready, last = cut(state.run_text)
        split = state.run_split
        state.documents[split] += 1
        state.run_split, state.run_text = None, ""
        return [*(Piece(split, text, ends=False) for text in ready), Piece(split, last, ends=True)]

    def _choose(self, unit: Unit) -> SplitName:
        if unit.joined and self.state.run_split is not None:
            return self.state.run_split
        place = int.from_bytes(self._digest(unit), "little") / 2**64
        self.state.lowest = min(self.state.lowest, place)
        return "val" if place < self._fraction else "train"

    def _ended(self, unit: Unit) -> bytes:
        """The digest of the document that ends with a unit, however it was cut; nothing while it goes on."""
        text = unit.text if self._document else unit.text.lstrip()
        self._document = self._document or hashlib.blake2b(digest_size=8, key=self._key)
        self._document.update((text if unit.more else text.rstrip()).encode())
        if unit.more:
            return b""
        digest, self._document = self._document.digest(), None
        return digest

    def _digest(self, unit: Unit) -> bytes:
        return hashlib.blake2b(unit.text.strip().encode(), digest_size=8, key=self._key).digest()

    @staticmethod
    def _size(unit: Unit) -> int:
        return len(unit.text) if unit.text.isascii() else len(unit.text.encode())


def cut(text: str) -> list[str]:
    """Text as pieces of at most `_PIECE` characters; joined, they are the text."""
    pieces = []
    start = 0
    while len(text) - start > _PIECE:
        middle, limit = start + _PIECE // 2, start + _PIECE
        place = _AFTER_LINE.match(text, middle, limit) or _BEFORE_SPACE.match(text, middle, limit)
        end = place.end() if place else limit
        pieces.append(text[start:end])
        start = end
    pieces.append(text[start:])
    return pieces


def encode_all(
    feeder: Feeder,
    backend: Tokenizer,
    eos_id: int,
    dtype: np.dtype[Any],
    workers: int,
    write: Callable[[Arrays, dict[str, Any] | None], None],
) -> None:
    """Encode everything the feeder has, `workers` jobs at a time, and write the results in order.

    With each result comes the feeder's state after it, where the result ends between two units, and else None.
    """
    with ThreadPoolExecutor(workers, thread_name_prefix="encode") as pool, _one_thread_per_call():
        pending: deque[tuple[Future[Arrays], dict[str, Any] | None]] = deque()

        def write_oldest() -> None:
            future, state = pending.popleft()
            write(future.result(), state)

        try:
            for pieces, state in _jobs(feeder):
                pending.append((pool.submit(_encode, backend, pieces, eos_id, dtype), state))
                while len(pending) > 2 * workers or (pending and pending[0][0].done()):
                    write_oldest()
            while pending:
                write_oldest()
        finally:
            for future, _ in pending:
                future.cancel()


def _jobs(feeder: Feeder) -> Iterator[tuple[list[Piece], dict[str, Any] | None]]:
    held: list[Piece] = []
    size = 0
    for group in feeder.groups():
        divided = False
        for piece in group:
            if size >= _JOB:
                yield held, None
                held, size, divided = [], 0, True
            held.append(piece)
            size += len(piece.text)
        # A long document always ends its last job, or a corpus of long documents would have no place to resume from.
        if divided or size >= _JOB:
            yield held, asdict(feeder.state)
            held, size = [], 0
    if held:
        yield held, asdict(feeder.state)


def _encode(backend: Tokenizer, pieces: list[Piece], eos_id: int, dtype: np.dtype[Any]) -> Arrays:
    encodings = backend.encode_batch_fast([piece.text for piece in pieces], add_special_tokens=False)
    ids: dict[SplitName, list[int]] = {}
    for piece, encoding in zip(pieces, encodings, strict=True):
        target = ids.setdefault(piece.split, [])
        target.extend(encoding.ids)
        if piece.ends:
            target.append(eos_id)
    return {split: np.array(values, dtype=dtype) for split, values in ids.items()}


@contextmanager
def _one_thread_per_call() -> Iterator[None]:
    """Each call of the tokenizer on one thread of its own: calls run side by side, so more threads would only wait."""
    name = "TOKENIZERS_PARALLELISM"
    before = os.environ.get(name)
    os.environ[name] = "false"
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before
