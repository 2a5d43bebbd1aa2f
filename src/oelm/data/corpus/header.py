"""The header of a prepared folder, `data.json`: what it holds, how it was made, and how it is read."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import Field

from ...base.strict import Strict
from ...errors import DataError

FORMAT = "oelm-tokens"
VERSION = 1
HEADER = "data.json"
# The folder of a preparation that has not finished.
WORK = ".preparing"

DTypeName = Literal["uint16", "uint32"]
SplitName = Literal["train", "val", "test"]
# The byte order is part of the format, so that a folder means the same on every machine.
DTYPES: dict[str, np.dtype[Any]] = {"uint16": np.dtype("<u2"), "uint32": np.dtype("<u4")}

_Count = Annotated[int, Field(ge=0)]
_Sha256 = Annotated[str, Field(pattern=r"[0-9a-f]{64}")]


class SplitHeader(Strict, refusal=DataError):
    """One token file. `bytes` is the size of its text in UTF-8, not of the file."""

    file: str
    documents: _Count
    tokens: _Count
    bytes: _Count
    max_id: _Count
    sha256: _Sha256


class TokenizerHeader(Strict, refusal=DataError):
    """The tokenizer that made the ids; `trained` is the requested size when it was trained on this corpus."""

    name: str
    sha256: _Sha256
    trained: int | None = None


class SourceHeader(Strict, refusal=DataError):
    """One input: a file with its size and hash, or a Hub dataset, which has neither."""

    name: str
    split: SplitName
    bytes: int | None = None
    sha256: _Sha256 | None = None


class Header(Strict, refusal=DataError):
    """The content of `data.json`. `sha256` is the hash of all the rest; headers of earlier versions have none."""

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
    splits: dict[SplitName, SplitHeader]
    sources: tuple[SourceHeader, ...]
    ignored: tuple[str, ...] = ()
    shared_documents: _Count = 0
    shared_test_documents: _Count = 0
    recipe: dict[str, Any]
    sha256: _Sha256 | None = None


def sealed(header: Header) -> dict[str, Any]:
    """Return a header's content as it is written, with its hash."""
    content = header.model_dump(mode="json", exclude={"sha256"})
    return {**content, "sha256": _sha256_of(content)}


def _sha256_of(content: dict[str, Any]) -> str:
    rest = {key: value for key, value in content.items() if key != "sha256"}
    return hashlib.sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()


def dtype_for(vocab_size: int, requested: str = "auto") -> DTypeName:
    """Return the smallest integer type that holds every id, or the requested one when it is large enough."""
    if requested not in ("auto", *DTYPES):
        raise DataError(f"dtype {requested!r}: use 'auto', 'uint16' or 'uint32'")
    if vocab_size > 2**32:
        raise DataError(f"a vocabulary of {vocab_size:,} entries does not fit 'uint32', the largest type there is")
    if requested == "uint16" and vocab_size > 2**16:
        raise DataError(f"dtype 'uint16' holds 65,536 ids, but the vocabulary has {vocab_size:,}: use 'uint32'")
    if requested == "uint32" or vocab_size > 2**16:
        return "uint32"
    return "uint16"


def read_header(folder: Path) -> Header:
    """Return the header of a prepared folder; raise DataError when it is missing, unfinished or of another format."""
    path = folder / HEADER
    if not path.is_file():
        prepare = "prepare the text first: oelm data prepare TEXT --train-bpe 8192 --out FOLDER"
        if not folder.is_dir():
            raise DataError(f"{folder}: {'a file, not a folder' if folder.exists() else 'no such folder'}; {prepare}")
        if (folder / WORK).exists():
            raise DataError(f"{folder}: its preparation did not finish; run the same command again to continue it")
        below = sorted(path.parent for path in folder.glob(f"*/{HEADER}"))
        advice = f"name the one in it: {' or '.join(map(str, below))}" if below else prepare
        raise DataError(f"{folder}: not a prepared data folder ({HEADER} is missing); {advice}")
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
    if content.get("sha256") not in (None, _sha256_of(content)):
        raise DataError(f"{path}: has changed since it was written; prepare the data again")
    try:
        return Header(**content)
    except DataError as error:
        raise DataError(f"{path}: {error}; prepare the data again") from None
