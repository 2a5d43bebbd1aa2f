"""Token files: a prepared folder opened as memory-mapped arrays, checked against its header, or arrays in memory.

A prepared folder holds `train.bin`, perhaps `val.bin` (raw little-endian unsigned integers), `tokenizer/` (a saved
Hugging Face fast tokenizer) and `data.json`, the header, which is written last: a folder without it is not finished.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import numpy.typing as npt
from pydantic import Field

from ...base.strict import Strict
from ...errors import DataError
from ..tokenizer import vocabulary_sha256, wrap

FORMAT = "oelm-tokens"
VERSION = 1
HEADER = "data.json"
TOKENIZER = "tokenizer"
WORK = ".preparing"

Tokens = npt.NDArray[np.uint16] | npt.NDArray[np.uint32]
DTypeName = Literal["uint16", "uint32"]
# The order of bytes is part of the format, so that a folder means the same on every machine.
DTYPES: dict[str, np.dtype[Any]] = {"uint16": np.dtype("<u2"), "uint32": np.dtype("<u4")}

_Count = Annotated[int, Field(ge=0)]
_Sha256 = Annotated[str, Field(pattern=r"[0-9a-f]{64}")]


class SplitHeader(Strict, refusal=DataError):
    """One token file: its name, what it holds, and its hash. `bytes` counts the text (UTF-8), not the file."""

    file: str
    documents: _Count
    tokens: _Count
    bytes: _Count
    max_id: _Count
    sha256: _Sha256


class TokenizerHeader(Strict, refusal=DataError):
    """Which tokenizer made the ids; `trained` is the vocabulary size asked for when it was trained on this corpus."""

    name: str
    sha256: _Sha256
    trained: int | None = None


class SourceHeader(Strict, refusal=DataError):
    """One input: a file with its size and hash, or a Hub dataset, which has neither."""

    name: str
    split: Literal["train", "val"]
    bytes: int | None = None
    sha256: _Sha256 | None = None


class Header(Strict, refusal=DataError):
    """The content of `data.json`."""

    format: Literal["oelm-tokens"] = "oelm-tokens"
    version: int = VERSION
    oelm_version: str
    tokenizers_version: str
    description: str
    synthetic: bool = False
    tokenizer: TokenizerHeader
    vocab_size: Annotated[int, Field(ge=1)]
    dtype: DTypeName
    eos_id: _Count
    splits: dict[Literal["train", "val"], SplitHeader]
    sources: tuple[SourceHeader, ...]
    ignored: tuple[str, ...] = ()
    shared_documents: _Count = 0
    recipe: dict[str, Any]


@dataclass(frozen=True, eq=False)
class Split:
    """The tokens of one split, in order; documents end with the end-of-text token."""

    tokens: Tokens
    documents: int
    bytes: int
    sha256: str

    def __len__(self) -> int:
        return len(self.tokens)


@dataclass(frozen=True, eq=False)
class TokenDataset:
    """A tokenized corpus: a prepared folder, or arrays in memory.

    `shared_documents` counts the documents of a separate validation file that are in the training text too (0 when
    the validation split was cut from the corpus itself, which never shares one).
    """

    train: Split
    val: Split | None
    vocab_size: int
    eos_id: int
    tokenizer_hash: str
    synthetic: bool
    description: str
    shared_documents: int = 0
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
            vocab_size=header.vocab_size,
            eos_id=header.eos_id,
            tokenizer_hash=header.tokenizer.sha256,
            synthetic=header.synthetic,
            description=header.description,
            shared_documents=header.shared_documents,
            folder=folder,
        )

    @cached_property
    def sha256(self) -> str:
        """One hash for the whole dataset: tokenizer and token files. What a run's record should keep."""
        parts = [self.tokenizer_hash, self.train.sha256, self.val.sha256 if self.val else ""]
        return hashlib.sha256("\n".join(parts).encode()).hexdigest()

    @property
    def overlap(self) -> str:
        """What to warn of where validation documents are training text too; nothing where none is."""
        if self.val is None or not self.shared_documents:
            return ""
        counts = f"{self.shared_documents:,} of {self.val.documents:,}"
        return f"{counts} validation documents are also in the training text"

    def verify(self) -> None:
        """Read every token and compare the hashes: a second or so for every gigabyte, and never done by `open`."""
        for name, split in self._splits().items():
            found = hash_array(split.tokens)
            if found != split.sha256:
                raise DataError(
                    f"{self._where(name)}: the tokens have sha256 {found}, the header says {split.sha256}; "
                    "prepare the data again"
                )

    def load_tokenizer(self) -> Any:
        """The tokenizer as a transformers `PreTrainedTokenizerFast`, checked to be the one that made the tokens."""
        if self.folder is None:
            if self.tokenizer_json is None:
                raise DataError(f"{self.description}: these tokens were made in memory without a tokenizer")
            from tokenizers import Tokenizer

            return wrap(Tokenizer.from_str(self.tokenizer_json), {"eos_token": self.eos_token})
        from transformers import PreTrainedTokenizerFast

        place = self.folder / TOKENIZER
        if not (place / "tokenizer.json").is_file():
            raise DataError(f"{place}: no tokenizer.json; prepare the data again, or copy the folder completely")
        tokenizer = PreTrainedTokenizerFast.from_pretrained(str(place))
        found = vocabulary_sha256(tokenizer.backend_tokenizer)
        if found != self.tokenizer_hash:
            raise DataError(
                f"{place}: this tokenizer has sha256 {found}, the tokens were made with {self.tokenizer_hash}; "
                "restore the folder or prepare the data again"
            )
        return tokenizer

    def _splits(self) -> dict[str, Split]:
        return {"train": self.train} | ({"val": self.val} if self.val else {})

    def _where(self, split: str) -> str:
        return f"{self.folder / f'{split}.bin'}" if self.folder else f"{self.description} ({split})"


def in_memory(
    train: npt.ArrayLike,
    val: npt.ArrayLike | None = None,
    *,
    vocab_size: int,
    eos_id: int = 0,
    documents: tuple[int, int] = (1, 1),
    text_bytes: tuple[int, int] | None = None,
    tokenizer_json: str | None = None,
    tokenizer_hash: str = "",
    eos_token: str | None = None,
    synthetic: bool = True,
    description: str = "tokens in memory",
) -> TokenDataset:
    """A dataset from arrays of ids. Pairs are (train, val); without `text_bytes` one token counts as one byte."""
    splits: list[Split] = []
    for index, ids in enumerate((train, val)):
        if ids is None:
            continue
        tokens = _as_tokens(np.asarray(ids), vocab_size, f"{description} ({('train', 'val')[index]})")
        size = text_bytes[index] if text_bytes else len(tokens)
        splits.append(Split(tokens, documents[index], size, hash_array(tokens)))
    return TokenDataset(
        train=splits[0],
        val=splits[1] if val is not None else None,
        vocab_size=vocab_size,
        eos_id=eos_id,
        tokenizer_hash=tokenizer_hash,
        synthetic=synthetic,
        description=description,
        tokenizer_json=tokenizer_json,
        eos_token=eos_token,
    )


def dtype_for(vocab_size: int, wanted: str = "auto") -> DTypeName:
    """The smallest type that holds every id, or the one asked for if it does."""
    if wanted not in ("auto", *DTYPES):
        raise DataError(f"dtype {wanted!r}: use 'auto', 'uint16' or 'uint32'")
    if vocab_size > 2**32:
        raise DataError(f"a vocabulary of {vocab_size:,} entries does not fit 'uint32', the largest type there is")
    if wanted == "uint16" and vocab_size > 2**16:
        raise DataError(f"dtype 'uint16' holds 65,536 ids, but the vocabulary has {vocab_size:,}: use 'uint32'")
    if wanted == "uint32" or vocab_size > 2**16:
        return "uint32"
    return "uint16"


def read_header(folder: Path) -> Header:
    """The header of a prepared folder."""
    path = folder / HEADER
    if not path.is_file():
        if not folder.is_dir():
            raise DataError(f"{folder}: no such folder; prepare the data first")
        if (folder / WORK).exists():
            raise DataError(f"{folder}: its preparation did not finish; run the same command again to continue it")
        raise DataError(f"{folder}: not a prepared data folder ({HEADER} is missing)")
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise DataError(f"{path}: cannot be read ({error}); prepare the data again") from None
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise DataError(f"{path}: not a header of this format (its 'format' must be {FORMAT!r})")
    if content.get("version") != VERSION:
        raise DataError(
            f"{path}: format version {content.get('version')!r}, this oelm reads version {VERSION}; "
            "prepare the data again or use the oelm that wrote it"
        )
    try:
        return Header(**content)
    except DataError as error:
        raise DataError(f"{path}: {error}; prepare the data again") from None


def hash_array(tokens: npt.NDArray[Any]) -> str:
    """The sha256 of a token file with this content, read in pieces so that a memory-mapped file stays on disk."""
    digest = hashlib.sha256()
    for start in range(0, len(tokens), 1 << 22):
        digest.update(np.ascontiguousarray(tokens[start : start + (1 << 22)]).data)
    return digest.hexdigest()


def _open_split(folder: Path, header: Header, split: SplitHeader) -> Split:
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
    if ids.ndim != 1 or ids.size == 0 or not np.issubdtype(ids.dtype, np.integer):
        raise DataError(f"{where}: a non-empty flat array of integer ids is needed, not {ids.dtype} of {ids.shape}")
    if int(ids.min()) < 0 or int(ids.max()) >= vocab_size:
        raise DataError(f"{where}: ids from {ids.min()} to {ids.max()} do not fit a vocabulary of {vocab_size:,}")
    return ids.astype(DTYPES[dtype_for(vocab_size)])


def _check_sample(tokens: Tokens, vocab_size: int, where: str) -> None:
    """Look at some thousand tokens spread over the file: cheap at any size, and enough to notice foreign content."""
    starts = np.linspace(0, max(0, len(tokens) - 256), num=64, dtype=np.int64)
    highest = max(int(tokens[start : start + 256].max()) for start in starts)
    if highest >= vocab_size:
        raise DataError(
            f"{where}: token id {highest} is outside the vocabulary of {vocab_size:,}: the file is not the one that "
            f"{HEADER} describes; prepare the data again"
        )
