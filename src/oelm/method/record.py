"""The sealed record's form: what stands in `config.oelm`, and the check that it is whole and well-formed.

A record comes from a file that anything may have happened to. What is malformed is refused here, in one place, so that
a check against the record can neither crash nor pass because something is missing.
"""

from __future__ import annotations

import hashlib
import json
import re
from typing import Annotated, Any, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from ..base.strict import explain
from ..errors import FreezeError, OelmError
from .spec import Init, Method

FORMAT = 3
_READ = (2, FORMAT)
# 128 bits of each hash are kept: it guards against mistakes, and hundreds of tensors go into one config.json.
DIGITS = 32
# The dtypes that a frozen tensor may have.
DTYPES = {"float64": torch.float64, "float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
_HASH = rf"({'|'.join(DTYPES)}):[0-9a-f]{{{DIGITS}}}"
_FINGERPRINT = re.compile(rf"{_HASH}( {_HASH})*")
# The value of a malformed field is shown up to this length.
_SHOWN = 300


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class MatrixRecord(_Part):
    """What a record says of one matrix that the method sets or freezes."""

    init: Init
    frozen: bool
    factor: Annotated[float, Field(allow_inf_nan=False)]
    orthonormal_blocks: Annotated[int, Field(gt=0)] | None
    tensors: list[str]


class SealedRecord(_Part):
    """The whole record. `parameters` names every parameter that was not frozen when the record was written.

    `sha256` is the hash of all else in it. Format 2 has neither.
    """

    format: Literal[2, 3]
    version: str
    method: dict[str, Any]
    seed: Annotated[int, Field(ge=0)]
    events: Annotated[int, Field(ge=0)]
    matrices: dict[str, MatrixRecord]
    frozen: dict[str, str]
    parameters: list[str] | None = None
    sha256: str | None = None

    @field_validator("frozen")
    @classmethod
    def _check_hashes(cls, value: dict[str, str]) -> dict[str, str]:
        for name, hashes in value.items():
            own, *casts = (part.partition(":")[0] for part in hashes.split(" "))
            if not _FINGERPRINT.fullmatch(hashes) or casts != narrower(own):
                raise ValueError(f"{name} has no hash of {DIGITS} digits for its dtype and its casts (got {hashes!r})")
        return value


def checked_record(record: Any) -> dict[str, Any]:
    """Return a record as it is. Raise if this version of oelm cannot read it; cheap enough to call at every step."""
    record_format = record.get("format") if isinstance(record, dict) else record
    if not isinstance(record, dict) or type(record_format) is not int or record_format not in _READ:
        raise FreezeError(
            f"config.oelm has format {shortened(record_format)}, and this oelm reads format {FORMAT}: another version "
            "of oelm wrote it, or it was changed. Apply the method to the original model again"
        )
    missing = [key for key in ("method", "seed", "events", "matrices", "frozen") if key not in record]
    if missing:
        raise FreezeError(f"config.oelm has no {', '.join(missing)}: it was changed after oelm.apply wrote it")
    return record


def valid_record(record: Any) -> tuple[SealedRecord, Method]:
    """Return a record as its type, and its method. Raise where any of it is malformed."""
    checked_record(record)
    try:
        sealed = SealedRecord.model_validate(record)
        absent = [name for name in ("parameters", "sha256") if getattr(sealed, name) is None]
        if sealed.format == FORMAT and absent:
            raise FreezeError(f"config.oelm has no {', '.join(absent)}: it was changed after oelm.apply wrote it")
        method = Method.load(sealed.method)
        method.require_steps()
    except ValidationError as error:
        problem = explain(error, SealedRecord)
    except FreezeError:
        raise
    except OelmError as error:
        problem = str(error)
    else:
        return sealed, method
    raise FreezeError(
        f"config.oelm is malformed: it was changed after oelm.apply wrote it ({shortened(problem, quote=False)})"
    )


def narrower(own: str) -> list[str]:
    """Return the dtypes to which a cast from this one may change values; float16 and bfloat16 do not hold each other's.

    A wider dtype holds every value as it is, so a cast to it needs no hash.
    """
    return [name for name, dtype in DTYPES.items() if dtype.itemsize <= DTYPES[own].itemsize and name != own]


def record_hash(record: dict[str, Any]) -> str:
    """Return the hash of a record, without the one that it holds itself."""
    content = {key: value for key, value in record.items() if key != "sha256"}
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:DIGITS]


def shortened(value: object, quote: bool = True) -> str:
    """Return a value for a message, cut where it is long."""
    text = repr(value) if quote else str(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."
