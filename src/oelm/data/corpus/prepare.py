"""Turn a corpus into a prepared folder: read, split, encode, write.

A preparation can be interrupted and continued, its memory is bounded, and its result is the same every time.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypedDict, Unpack

import tokenizers
from tokenizers import Tokenizer

from ... import __version__
from ...base.files import write_text
from ...base.machine import cores
from ...errors import DataError
from ..text_files import Meter
from ..tokenizer import TextTokenizer, check_bpe_size, load_tokenizer, readable_tokenizer, train_bpe
from .encode import Feeder, FeederState, encode_all
from .header import (
    DTYPES,
    HEADER,
    VERSION,
    Header,
    SourceHeader,
    SplitHeader,
    SplitName,
    TokenizerHeader,
    dtype_for,
    read_header,
)
from .progress import Callback, Progress, reporter
from .readers import SEPARATOR, Reading
from .sources import Source, resolve
from .tokens import TOKENIZER, TokenDataset
from .workspace import TOKENIZER_FILE, Workspace, check_free, discard, workspace

# A BPE is trained on at most this much text: more changes few merges, and every new word costs memory.
BPE_BYTES = 256 << 20
CHECKPOINT_BYTES = 32 << 20


class PrepareKeywords(TypedDict, total=False):
    """The keyword arguments of `prepare`."""

    val: str | Path | None
    test: str | Path | None
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
    test: str | Path | None = None
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


def prepare(
    source: str | Path, out: str | Path, tokenizer: str | Path | None = None, **keywords: Unpack[PrepareKeywords]
) -> TokenDataset:
    """Turn a corpus into a folder of tokens that `TokenDataset.open` reads, and open it.

    source            a file, a folder of files, or the name of a dataset on the Hub
    out               the folder to write; if it already holds this very dataset, it is only opened
    tokenizer         a folder or Hub name; or instead
    train_bpe         the size of a byte-level BPE to train on the training split
    val               a validation file or folder (for a Hub dataset also the name of a split); without it,
    val_fraction      about this share of the documents (0.01), chosen by their content and `seed`; 0 for none
    test              a test file or folder (or split): a run is measured on it once, at its end, and not chosen by it
    eos               the token after each document; by default the tokenizer's EOS token
    text_field        the column or key of the text; by default a usual name, or the only one with text
    separator         what separates documents in plain text (<|endoftext|>); "" for nothing
    limit_bytes       stop reading the training source after this much text
    dtype             uint16, uint32 or auto, the smaller one that holds the vocabulary
    workers           threads that encode; by default one per core. The result does not depend on it
    description       what records call the data; by default the source and the tokenizer
    synthetic         mark the data as generated
    progress          True for a bar on standard error, or a function that is called with a `Progress`
    checkpoint_bytes  how much text an interrupted run may have to encode again

    An interrupted call continues when it is repeated. The folder has its header only when it is complete.
    """
    out = Path(out)
    options = PrepareOptions(**keywords)
    if (tokenizer is None) == (options.train_bpe is None):
        problem, ending = ("no tokenizer", "") if tokenizer is None else ("two tokenizers", ", not both")
        raise DataError(
            f"{problem}: give either tokenizer (--tokenizer, a folder or a name) or train_bpe (--train-bpe, a "
            f"vocabulary size){ending}"
        )
    train, val, test = resolve(source, options.val, Reading(options.text_field, options.separator), options.test)
    if not (out / HEADER).is_file():
        check_free(out)
    loaded = None if tokenizer is None else load_tokenizer(tokenizer, options.eos)
    # Checks the requested type before the corpus is read; the final vocabulary may be smaller than the requested one.
    dtype_for(loaded.vocab_size if loaded else options.train_bpe or 0, options.dtype)
    with reporter(options.progress) as report:
        return _Preparation(train=train, val=val, test=test, options=options, report=report).run(out, loaded)


@dataclass(frozen=True, kw_only=True)
class _Preparation:
    """A corpus, the options for splitting and encoding it, and the callback for progress."""

    train: Source
    val: Source | None
    test: Source | None
    options: PrepareOptions
    report: Callback

    def run(self, out: Path, tokenizer: TextTokenizer | None) -> TokenDataset:
        """Write the dataset to `out`, continuing an interrupted preparation; return it opened."""
        inputs = self._identify()
        recipe = self._recipe(inputs, tokenizer)
        existing = _reuse(out, recipe)
        if existing is not None:
            return existing
        with workspace(out, recipe) as work:
            if work.finished:
                work.move()
            else:
                tokenizer = tokenizer or self._train_tokenizer(work)
                self._encode(work, tokenizer, self._header(inputs, recipe, tokenizer))
        return TokenDataset.open(out)

    @property
    def val_fraction(self) -> float:
        """Return the share of the documents to hold out; 0 when there is a validation source."""
        return 0.0 if self.val else self.options.val_fraction

    @property
    def splits(self) -> tuple[SplitName, ...]:
        """Return the names of the splits that the result will have."""
        val: tuple[SplitName, ...] = ("val",) if self.val or self.val_fraction else ()
        return ("train", *val, *(("test",) if self.test else ()))

    @property
    def sources(self) -> dict[SplitName, Source]:
        """Return the sources by the split that they are for; the training source may give validation text too."""
        return {
            "train": self.train,
            **({"val": self.val} if self.val else {}),
            **({"test": self.test} if self.test else {}),
        }

    @property
    def total_bytes(self) -> int | None:
        """Return the number of bytes that will be read, or None when it is not known beforehand."""
        sizes = [source.total_bytes for source in self.sources.values()]
        return None if None in sizes or self.options.limit_bytes is not None else sum(size or 0 for size in sizes)

    def _identify(self) -> tuple[SourceHeader, ...]:
        """Hash every input file, so that a changed corpus is never taken for the old one."""
        total = sum(source.total_bytes or 0 for source in self.sources.values())
        hashed = 0

        def count(size: int) -> None:
            nonlocal hashed
            hashed += size
            self.report(Progress("hash", hashed, total))

        return tuple(header for split, source in self.sources.items() for header in source.identify(split, count))

    def _recipe(self, inputs: tuple[SourceHeader, ...], tokenizer: TextTokenizer | None) -> dict[str, Any]:
        """Return everything that determines the result: equal recipes give equal folders."""
        options = self.options
        return {
            "format": VERSION,
            "sources": [header.model_dump(mode="json") for header in inputs],
            "tokenizer": tokenizer.sha256 if tokenizer else None,
            "train_bpe": options.train_bpe,
            "eos": tokenizer.special["eos_token"] if tokenizer else options.eos or SEPARATOR,
            "val_fraction": None if self.val else options.val_fraction,
            "seed": None if self.val else options.seed,
            "text_field": options.text_field,
            "separator": options.separator,
            "limit_bytes": options.limit_bytes,
            "dtype": options.dtype,
            "synthetic": options.synthetic,
        }

    def _header(self, inputs: tuple[SourceHeader, ...], recipe: dict[str, Any], tokenizer: TextTokenizer) -> Header:
        """Return the header without what is known only after encoding: the splits and their shared documents."""
        return Header(
            oelm_version=__version__,
            tokenizers_version=tokenizers.__version__,
            description=self.options.description or f"{self.train.description}, {tokenizer.name} tokens",
            synthetic=self.options.synthetic,
            tokenizer=TokenizerHeader(name=tokenizer.name, sha256=tokenizer.sha256, trained=tokenizer.trained),
            vocab_size=tokenizer.vocab_size,
            dtype=dtype_for(tokenizer.vocab_size, self.options.dtype),
            eos_id=tokenizer.eos_id,
            splits={},
            sources=inputs,
            ignored=tuple(name for source in self.sources.values() for name in source.ignored),
            recipe=recipe,
        )

    def _feeder(self, meter: Meter, state: FeederState | None = None) -> Feeder:
        return Feeder(
            self.train.units(meter),
            self.val.units(meter) if self.val else None,
            self.test.units(meter) if self.test else None,
            val_fraction=self.val_fraction,
            seed=self.options.seed,
            limit_bytes=self.options.limit_bytes,
            state=state,
        )

    def _train_tokenizer(self, work: Workspace) -> TextTokenizer:
        """Return the tokenizer trained on the training split: the one that an interrupted run saved, or a new one."""
        path, size, eos = work.folder / TOKENIZER_FILE, self.options.train_bpe or 0, self.options.eos
        if path.is_file():
            with readable_tokenizer(path, "Delete the file, and the same command trains it again"):
                backend = Tokenizer.from_file(str(path))
            return TextTokenizer(f"bpe-{size}", backend, {"eos_token": eos or SEPARATOR}, trained=size)
        meter = Meter()
        feeder = self._feeder(meter)

        def texts() -> Iterator[str]:
            for group in feeder.groups():
                yield from (piece.text for piece in group if piece.split == "train")
                self.report(Progress("train tokenizer", meter.bytes, self.total_bytes))
                if feeder.state.bytes["train"] >= BPE_BYTES:
                    return

        trained = train_bpe(texts(), size, eos)
        self._check_split(feeder.state, partial=True)
        write_text(path, trained.backend.to_str())
        return trained

    def _encode(self, work: Workspace, tokenizer: TextTokenizer, header: Header) -> None:
        """Encode the corpus into the work folder, starting from its last checkpoint, and publish it."""
        dtype = DTYPES[header.dtype]
        saved = work.open_parts(self.splits, dtype)
        meter = Meter()
        feeder = self._feeder(meter, FeederState(**saved) if saved else None)
        total = self.total_bytes
        saved_bytes = sum(feeder.state.bytes.values())
        workers = self.options.workers or cores()
        with closing(encode_all(feeder, tokenizer.backend, tokenizer.eos_id, dtype, workers)) as encoded:
            for arrays, state in encoded:
                for split, ids in arrays.items():
                    work.parts[split].append(ids)
                if state is None:
                    continue
                done_bytes = sum(state["bytes"].values())
                if done_bytes - saved_bytes >= self.options.checkpoint_bytes:
                    work.save(state)
                    saved_bytes = done_bytes
                tokens = sum(part.tokens for part in work.parts.values())
                self.report(Progress("encode", meter.bytes, total, sum(state["documents"].values()), tokens))
        self._check_split(feeder.state)
        tokenizer.save(work.folder / TOKENIZER)
        splits = {
            split: SplitHeader(
                file=part.path.name,
                documents=feeder.state.documents[split],
                tokens=part.tokens,
                bytes=feeder.state.bytes[split],
                max_id=part.max_id,
                sha256=part.sha256(),
            )
            for split, part in work.parts.items()
        }
        shared = {"shared_documents": feeder.state.shared, "shared_test_documents": feeder.state.shared_test}
        work.publish(header.model_copy(update={"splits": splits, **shared}))

    def _check_split(self, state: FeederState, partial: bool = False) -> None:
        """Raise DataError when a split is empty or all validation text is also training text.

        With `partial`, the corpus may not have been read to its end, so validation text may still follow.
        """
        source = self.train.description
        if not any(state.bytes.values()):
            raise DataError(f"{source}: the corpus is empty: no document with any text")
        if state.bytes["train"] == 0:
            reason = f": with val_fraction {self.val_fraction:g} (--val-fraction) every document is for validation"
            raise DataError(f"{source}: no text is left for training{'' if self.val else reason}")
        if "val" in self.splits and state.bytes["val"] == 0 and not partial:
            if self.val:
                raise DataError(f"{self.val.description}: the validation source is empty: no document with any text")
            raise DataError(
                f"{source}: val_fraction {self.val_fraction:g} (--val-fraction) left no text for validation; anything "
                f"above {state.lowest:.4f} takes some. Raise it, give a validation file, or set it to 0 for no "
                "validation"
            )
        if self.val and state.shared == state.documents["val"]:
            raise DataError(
                f"{self.val.description}: every document of the validation text is also in the training text: "
                "they must be different data"
            )
        if self.test and state.bytes["test"] == 0 and not partial:
            raise DataError(f"{self.test.description}: the test source is empty: no document with any text")
        if self.test and state.documents["test"] and state.shared_test == state.documents["test"]:
            raise DataError(
                f"{self.test.description}: every document of the test text is also in the training or validation "
                "text: they must be different data"
            )


def _reuse(out: Path, recipe: dict[str, Any]) -> TokenDataset | None:
    """Return the dataset that `out` already holds, or None; raise DataError when it has another recipe."""
    if not (out / HEADER).is_file():
        return None
    old_recipe = read_header(out).recipe
    if old_recipe == recipe:
        try:
            dataset = TokenDataset.open(out)
        except DataError as error:
            raise DataError(f"{error} (delete {out} first)") from None
        discard(out)
        return dataset
    differing = [key for key in sorted({*recipe, *old_recipe}) if recipe.get(key) != old_recipe.get(key)]
    changes = "; ".join(_change(key, _short(old_recipe.get(key)), _short(recipe.get(key))) for key in differing)
    raise DataError(
        f"{out}: holds a dataset prepared differently ({changes}); choose another folder or delete this one"
    )


def _change(key: str, old: str, new: str) -> str:
    return f"{key}: {old} there, {new} now" if old != new else f"{key}: the content of {new} has changed"


def _short(value: Any) -> str:
    """Return a recipe's value for a message: the names of up to three sources, or the beginning of anything else."""
    if isinstance(value, list):
        return ", ".join(str(item.get("name")) if isinstance(item, dict) else str(item) for item in value[:3])
    text = repr(value)
    return text if len(text) <= 24 else f"{text[:20]}..."
