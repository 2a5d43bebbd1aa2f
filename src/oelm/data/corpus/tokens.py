"""Token datasets: a prepared folder opened as memory-mapped arrays and checked against its header, or arrays in memory.

A prepared folder holds `train.bin`, perhaps `val.bin` (raw little-endian unsigned integers), `tokenizer/` (a saved
Hugging Face fast tokenizer) and the header `data.json`, which is written last: a folder without it is not finished.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, TypedDict, Unpack

import numpy as np
import numpy.typing as npt

from ...errors import DataError
from ..tokenizer import readable_tokenizer, vocabulary_sha256, wrap
from .header import DTYPES, HEADER, Header, SplitHeader, dtype_for, read_header

TOKENIZER = "tokenizer"
_HASH_TOKENS = 1 << 22

Tokens = npt.NDArray[np.uint16] | npt.NDArray[np.uint32]


@dataclass(frozen=True, eq=False)
class Split:
    """The tokens of one split, in order; every document ends with the end-of-text token."""

    tokens: Tokens
    documents: int
    bytes: int
    sha256: str

    def __len__(self) -> int:
        return len(self.tokens)


@dataclass(frozen=True, eq=False, kw_only=True)
class TokenDataset:
    """A tokenized corpus: a prepared folder, or arrays in memory.

    `shared_documents` counts the documents of a separate validation file that are also in the training text (0 when the
    validation split was cut from the corpus itself, which never shares one), `shared_test_documents` those of the test
    file that are in either.
    """

    train: Split
    val: Split | None
    test: Split | None = None
    vocab_size: int
    eos_id: int = 0
    tokenizer_hash: str = ""
    synthetic: bool = True
    description: str = "tokens in memory"
    shared_documents: int = 0
    shared_test_documents: int = 0
    folder: Path | None = None
    tokenizer_json: str | None = field(default=None, repr=False)
    eos_token: str | None = None

    @classmethod
    def open(cls, folder: str | Path) -> TokenDataset:
        """Open a prepared folder after checking every file against the header."""
        folder = Path(folder)
        header = read_header(folder)
        if "train" not in header.splits:
            raise DataError(f"{folder / HEADER}: no 'train' split; prepare the data again")
        opened = {name: _open_split(folder, header, split) for name, split in header.splits.items()}
        return cls(
            train=opened["train"],
            val=opened.get("val"),
            test=opened.get("test"),
            vocab_size=header.vocab_size,
            eos_id=header.eos_id,
            tokenizer_hash=header.tokenizer.sha256,
            synthetic=header.synthetic,
            description=header.description,
            shared_documents=header.shared_documents,
            shared_test_documents=header.shared_test_documents,
            folder=folder,
        )

    @cached_property
    def sha256(self) -> str:
        """Return the hash of the whole dataset, tokenizer and token files, for a run's record."""
        parts = [self.tokenizer_hash, self.train.sha256, self.val.sha256 if self.val else ""]
        parts += [self.test.sha256] if self.test else []
        return hashlib.sha256("\n".join(parts).encode()).hexdigest()

    @property
    def overlap(self) -> str:
        """Return a warning about held-out documents that are also in other text; "" when there are none."""
        warnings = []
        if self.val is not None and self.shared_documents:
            counts = f"{self.shared_documents:,} of {self.val.documents:,}"
            warnings.append(f"{counts} validation documents are also in the training text")
        if self.test is not None and self.shared_test_documents:
            counts = f"{self.shared_test_documents:,} of {self.test.documents:,}"
            warnings.append(f"{counts} test documents are also in the training or validation text")
        return "; ".join(warnings)

    def verify(self) -> None:
        """Read every token file and compare its hash with the header; about a second per gigabyte.

        `open` does not do this. Arrays in memory are read-only and were hashed when they were made.
        """
        if self.folder is None:
            return
        for name, split in (("train", self.train), ("val", self.val), ("test", self.test)):
            if split is None:
                continue
            sha256 = hash_array(split.tokens)
            if sha256 != split.sha256:
                raise DataError(
                    f"{self.folder / f'{name}.bin'}: the tokens have sha256 {sha256}, the header says {split.sha256}; "
                    "prepare the data again"
                )

    def load_tokenizer(self) -> Any:
        """Return the tokenizer as a transformers `PreTrainedTokenizerFast`, checked to be the one that made the ids."""
        if self.folder is None:
            if self.tokenizer_json is None:
                raise DataError(f"{self.description}: these tokens were made in memory without a tokenizer")
            from tokenizers import Tokenizer

            return wrap(Tokenizer.from_str(self.tokenizer_json), {"eos_token": self.eos_token})
        from transformers import PreTrainedTokenizerFast

        folder = self.folder / TOKENIZER
        if not (folder / "tokenizer.json").is_file():
            raise DataError(f"{folder}: no tokenizer.json; prepare the data again, or copy the folder completely")
        with readable_tokenizer(folder, "Restore the folder or prepare the data again"):
            tokenizer = PreTrainedTokenizerFast.from_pretrained(str(folder))
            tokenizer.decode(tokenizer("a").input_ids)  # some damage shows only in use
        sha256 = vocabulary_sha256(tokenizer.backend_tokenizer)
        if sha256 != self.tokenizer_hash:
            raise DataError(
                f"{folder}: this tokenizer has sha256 {sha256}, the tokens were made with {self.tokenizer_hash}; "
                "restore the folder or prepare the data again"
            )
        return tokenizer


class MemoryKeywords(TypedDict, total=False):
    """Keyword arguments of `in_memory` that describe the arrays; the defaults are those of TokenDataset."""

    eos_id: int
    tokenizer_json: str | None
    tokenizer_hash: str
    eos_token: str | None
    synthetic: bool
    description: str


def in_memory(
    train: npt.ArrayLike,
    val: npt.ArrayLike | None = None,
    *,
    vocab_size: int,
    documents: tuple[int, int] = (1, 1),
    text_bytes: tuple[int, int] | None = None,
    **keywords: Unpack[MemoryKeywords],
) -> TokenDataset:
    """Return a dataset of arrays of ids.

    `documents` and `text_bytes` are pairs for (train, val); without `text_bytes`, a token counts as one byte of text.
    """
    description = keywords.get("description", TokenDataset.description)

    def split(index: int, name: str, ids: npt.ArrayLike) -> Split:
        tokens = _as_tokens(np.asarray(ids), vocab_size, f"{description} ({name})")
        size = text_bytes[index] if text_bytes else len(tokens)
        return Split(tokens, documents[index], size, hash_array(tokens))

    val_split = None if val is None else split(1, "val", val)
    return TokenDataset(train=split(0, "train", train), val=val_split, vocab_size=vocab_size, **keywords)


def hash_array(tokens: npt.NDArray[Any]) -> str:
    """Return the sha256 of the tokens, read in pieces so that a memory-mapped file is never fully in memory."""
    digest = hashlib.sha256()
    for start in range(0, len(tokens), _HASH_TOKENS):
        digest.update(np.ascontiguousarray(tokens[start : start + _HASH_TOKENS]).data)
    return digest.hexdigest()


def _open_split(folder: Path, header: Header, split: SplitHeader) -> Split:
    """Return a split as a memory-mapped array; raise DataError where its file does not fit the header."""
    path = folder / split.file
    dtype = DTYPES[header.dtype]
    if not path.is_file():
        raise DataError(f"{path}: missing, though {HEADER} lists it; copy the folder completely or prepare it again")
    size, expected = path.stat().st_size, split.tokens * dtype.itemsize
    if size != expected:
        state = "truncated" if size < expected else "too long"
        raise DataError(f"{path}: {state}: {size:,} bytes, the header says {expected:,}; prepare the data again")
    if split.tokens == 0:
        raise DataError(f"{path}: holds no tokens")
    if split.max_id >= header.vocab_size:
        raise DataError(f"{path}: token id {split.max_id} is outside the vocabulary of {header.vocab_size:,}")
    tokens: Tokens = np.memmap(path, dtype=dtype, mode="r", shape=(split.tokens,))
    _check_sample(tokens, header.vocab_size, str(path))
    return Split(tokens, split.documents, split.bytes, split.sha256)


def _as_tokens(ids: npt.NDArray[Any], vocab_size: int, where: str) -> Tokens:
    """Return a read-only copy of the ids in the type of token files."""
    if ids.ndim != 1 or ids.size == 0 or not np.issubdtype(ids.dtype, np.integer):
        raise DataError(f"{where}: a non-empty flat array of integer ids is needed, not {ids.dtype} of {ids.shape}")
    if int(ids.min()) < 0 or int(ids.max()) >= vocab_size:
        raise DataError(f"{where}: ids from {ids.min()} to {ids.max()} do not fit a vocabulary of {vocab_size:,}")
    tokens: Tokens = ids.astype(DTYPES[dtype_for(vocab_size)])
    tokens.setflags(write=False)
    return tokens


def _check_sample(tokens: Tokens, vocab_size: int, where: str) -> None:
    """Raise DataError where any of 16,384 ids, spread over the file, is outside the vocabulary: cheap at any size."""
    starts = np.linspace(0, max(0, len(tokens) - 256), num=64, dtype=np.int64)
    highest = max(int(tokens[start : start + 256].max()) for start in starts)
    if highest >= vocab_size:
        raise DataError(
            f"{where}: token id {highest} is outside the vocabulary of {vocab_size:,}: the file is not the one that "
            f"{HEADER} describes; prepare the data again"
        )
