"""Encode text units as token arrays: choose each unit's split, cut long text into pieces, encode them in threads."""

from __future__ import annotations

import hashlib
import os
import re
from collections import Counter, deque
from collections.abc import Generator, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from itertools import islice
from typing import Any, get_args

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer

from .header import SplitName
from .readers import Unit

_PIECE = 32 << 10  # characters that are encoded as one text
_JOB = 256 << 10  # characters that a thread encodes at a time
# Text is cut after a single line break or before a single space. The usual pre-tokenizers split there too, so the ids
# are those of the uncut text.
_AFTER_LINE = re.compile(r"(?s:.*)(?<=\S)\n(?=\S)")
_BEFORE_SPACE = re.compile(r"(?s:.*)(?<=\S)(?= \S)")

Arrays = dict[SplitName, npt.NDArray[Any]]


@dataclass(frozen=True, slots=True)
class Piece:
    """Text to encode for one split; with `ends`, the end-of-text token follows."""

    split: SplitName
    text: str
    ends: bool


@dataclass
class FeederState:
    """How far a corpus has been read: with the corpus itself, enough to continue from there.

    `bytes` and `documents` count per split, `read_bytes` the training source alone. `shared` counts validation
    documents that are also in the training text, `shared_test` test documents that are in either. `lowest` is the
    smallest validation fraction that would hold out a document. `run_split` and `run_text` belong to a document that
    has not ended: its split (None when there is no such document), and its text that has not become a piece yet.
    """

    units: int = 0
    read_bytes: int = 0
    documents: dict[SplitName, int] = field(default_factory=lambda: dict.fromkeys(get_args(SplitName), 0))
    bytes: dict[SplitName, int] = field(default_factory=lambda: dict.fromkeys(get_args(SplitName), 0))
    shared: int = 0
    shared_test: int = 0
    lowest: float = 1.0
    run_split: SplitName | None = None
    run_text: str = ""


class Feeder:
    """Reads units, assigns each to a split by its content, and cuts them into pieces.

    The split depends only on the unit's text and the seed, so equal documents are always in the same split, whatever
    their order and number.
    """

    def __init__(
        self,
        train: Iterable[Unit],
        val: Iterable[Unit] | None,
        test: Iterable[Unit] | None = None,
        *,
        val_fraction: float,
        seed: int,
        limit_bytes: int | None,
        state: FeederState | None = None,
    ) -> None:
        self._train, self._val, self._test = train, val, test
        self._fraction = val_fraction
        self._key = seed.to_bytes(8, "little")
        self._limit = limit_bytes
        # Digests of the validation and test documents that have not been seen in the training text.
        self._held_out: Counter[bytes] = Counter()
        self._tested: Counter[bytes] = Counter()
        self._shared = self._shared_test = 0
        self._document: hashlib.blake2b | None = None  # hash of the current document's text so far
        self.state = state or FeederState()

    def groups(self) -> Iterator[list[Piece]]:
        """Yield the pieces of each unit; between two groups, `state` is a point to resume from."""
        units = self._units()
        # Skips the units that an interrupted preparation has encoded. They are read again, to hash the documents.
        deque(islice(units, self.state.units), maxlen=0)
        for unit, required_split in units:
            yield self._take(unit, required_split)
        if last_pieces := self._close():
            yield last_pieces

    def _units(self) -> Iterator[tuple[Unit, SplitName | None]]:
        """Yield every unit with its split, or with None when its content decides; held-out units come first."""
        for unit in self._val or ():
            document = self._document_digest(unit)
            if document:
                self._held_out[document] += 1
            yield unit, "val"
        for unit in self._test or ():
            document = self._document_digest(unit)
            if document in self._held_out:
                self._shared_test += 1
            elif document:
                self._tested[document] += 1
            yield unit, "test"
        for unit in self._train:
            if self._limit is not None and self.state.read_bytes >= self._limit:
                return
            if self._held_out or self._tested:
                document = self._document_digest(unit)
                self._shared += self._held_out.pop(document, 0)
                self._shared_test += self._tested.pop(document, 0)
            yield unit, "train" if self._fraction == 0.0 else None

    def _take(self, unit: Unit, required_split: SplitName | None) -> list[Piece]:
        """Count a unit, and return the pieces that are complete with it."""
        state = self.state
        split = required_split or self._choose(unit)
        pieces = self._close() if state.run_split not in (None, split) else []
        size = len(unit.text) if unit.text.isascii() else len(unit.text.encode())
        state.units += 1
        state.bytes[split] += size
        if required_split not in ("val", "test"):
            state.read_bytes += size
        state.shared, state.shared_test = self._shared, self._shared_test
        state.run_split = split
        state.run_text += unit.text
        if not unit.more:
            return pieces + self._close()
        *ready, state.run_text = cut(state.run_text)
        return pieces + [Piece(split, text, ends=False) for text in ready]

    def _close(self) -> list[Piece]:
        """End the open document, if there is one; return the rest of its text with the end-of-text token."""
        state = self.state
        if state.run_split is None:
            return []
        *ready, last = cut(state.run_text)
        split = state.run_split
        state.documents[split] += 1
        state.run_split, state.run_text = None, ""
        return [*(Piece(split, text, ends=False) for text in ready), Piece(split, last, ends=True)]

    def _choose(self, unit: Unit) -> SplitName:
        """Choose a unit's split: its hash as a number from 0 to 1 is compared with the validation fraction."""
        if unit.joined and self.state.run_split is not None:
            return self.state.run_split
        digest = hashlib.blake2b(unit.text.strip().encode(), digest_size=8, key=self._key).digest()
        position = int.from_bytes(digest, "little") / 2**64
        self.state.lowest = min(self.state.lowest, position)
        return "val" if position < self._fraction else "train"

    def _document_digest(self, unit: Unit) -> bytes:
        """Return the digest of the document that ends with a unit, however it was cut; b"" while it continues."""
        text = unit.text if self._document else unit.text.lstrip()
        self._document = self._document or hashlib.blake2b(digest_size=8, key=self._key)
        self._document.update((text if unit.more else text.rstrip()).encode())
        if unit.more:
            return b""
        digest, self._document = self._document.digest(), None
        return digest


def cut(text: str) -> list[str]:
    """Cut text into pieces of at most `_PIECE` characters; joined, they are the text."""
    pieces = []
    start = 0
    while len(text) - start > _PIECE:
        middle, limit = start + _PIECE // 2, start + _PIECE
        boundary = _AFTER_LINE.match(text, middle, limit) or _BEFORE_SPACE.match(text, middle, limit)
        end = boundary.end() if boundary else limit
        pieces.append(text[start:end])
        start = end
    pieces.append(text[start:])
    return pieces


def encode_all(
    feeder: Feeder, backend: Tokenizer, eos_id: int, dtype: np.dtype[Any], workers: int
) -> Generator[tuple[Arrays, dict[str, Any] | None]]:
    """Encode everything that the feeder yields, `workers` jobs at a time, and yield the results in order.

    A result that ends between two units comes with the feeder's state after it, any other with None.
    """
    with ThreadPoolExecutor(workers, thread_name_prefix="encode") as pool, _one_thread_per_call():
        pending: deque[tuple[Future[Arrays], dict[str, Any] | None]] = deque()
        try:
            for pieces, state in _jobs(feeder):
                pending.append((pool.submit(_encode, backend, pieces, eos_id, dtype), state))
                while len(pending) > 2 * workers or (pending and pending[0][0].done()):
                    future, state_after = pending.popleft()
                    yield future.result(), state_after
            for future, state_after in pending:
                yield future.result(), state_after
        finally:
            for future, _ in pending:
                future.cancel()


def _jobs(feeder: Feeder) -> Iterator[tuple[list[Piece], dict[str, Any] | None]]:
    """Yield pieces for one thread at a time, with the state to resume from after them where there is one."""
    pending: list[Piece] = []
    size = 0
    for group in feeder.groups():
        divided = False
        for piece in group:
            if size >= _JOB:
                yield pending, None
                pending, size, divided = [], 0, True
            pending.append(piece)
            size += len(piece.text)
        # A long document always ends its last job, or a corpus of long documents would have no point to resume from.
        if divided or size >= _JOB:
            yield pending, asdict(feeder.state)
            pending, size = [], 0
    if pending:
        yield pending, asdict(feeder.state)


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
    """Let each call of the tokenizer use one thread: calls run in parallel, so more threads would only wait."""
    name = "TOKENIZERS_PARALLELISM"
    previous = os.environ.get(name)
    os.environ[name] = "false"
    try:
        yield
    finally:
        if previous is None:
            del os.environ[name]
        else:
            os.environ[name] = previous
