"""The options of `prepare`, their defaults, and which values are allowed."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TypedDict

from ...errors import DataError
from ..tokenizer import check_bpe_size
from .progress import Callback
from .readers import SEPARATOR

CHECKPOINT_BYTES = 32 << 20


class PrepareKeywords(TypedDict, total=False):
    """The keyword arguments of `prepare`."""

    val: str | Path | None
    val_fraction: float
    train_bpe: int | None
    eos: str | None
    text_field: str | None
    separator: str
    seed: int
    limit_bytes: int | None
    dtype: str
    workers: int | None
    description: str | None
    synthetic: bool
    progress: bool | Callback
    checkpoint_bytes: int


@dataclass(frozen=True, kw_only=True)
class PrepareOptions:
    """The keyword arguments of `prepare` with their defaults, validated."""

    val: str | Path | None = None
    val_fraction: float = 0.01
    train_bpe: int | None = None
    eos: str | None = None
    text_field: str | None = None
    separator: str = SEPARATOR
    seed: int = 0
    limit_bytes: int | None = None
    dtype: str = "auto"
    workers: int | None = None
    description: str | None = None
    synthetic: bool = False
    progress: bool | Callback = False
    checkpoint_bytes: int = CHECKPOINT_BYTES

    def __post_init__(self) -> None:
        if not 0.0 <= self.val_fraction < 1.0:
            raise DataError(f"val_fraction {self.val_fraction} (--val-fraction): must be at least 0 and below 1")
        if not 0 <= self.seed < 2**64:
            raise DataError(f"seed {self.seed}: must be at least 0 and below 2**64")
        for name, value in (("limit_bytes", self.limit_bytes), ("workers", self.workers)):
            if value is not None and value < 1:
                raise DataError(f"{name} {value}: must be at least 1")
        if self.train_bpe is not None:
            check_bpe_size(self.train_bpe)

    def require_one_tokenizer(self, tokenizer: str | Path | None) -> None:
        """Raise DataError unless there is either a tokenizer to load or a size of one to train."""
        if (tokenizer is None) == (self.train_bpe is None):
            given = "no tokenizer" if tokenizer is None else "two tokenizers"
            raise DataError(
                f"{given}: give either tokenizer (--tokenizer, a folder or a name) or train_bpe (--train-bpe, a "
                f"vocabulary size){'' if tokenizer is None else ', not both'}"
            )
