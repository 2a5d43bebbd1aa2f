"""A corpus to a prepared folder: read, split, encode, write. Restartable, bounded in memory, the same every time."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import Tokenizer

from ... import __version__
from ...base.files import write_text
from ...base.machine import cores
from ...errors import DataError
from ..text_files import Meter
from ..tokenizer import TextTokenizer, check_bpe_size, load_tokenizer
from ..tokenizer import train_bpe as train_tokenizer
from .encode import Arrays, Feeder, FeederState, encode_all
from .header import DTYPES, HEADER, VERSION, Header, SourceHeader, SplitHeader, TokenizerHeader, dtype_for, read_header
from .progress import Callback, Progress, reporter
from .readers import SEPARATOR, Reading
from .sources import Source, SplitName, resolve
from .tokens import TOKENIZER, TokenDataset
from .workspace import TOKENIZER_FILE, Workspace, check_free, discard, workspace

# Text that a BPE is trained on at most: more changes few merges and costs memory with every new word.
BPE_BYTES = 256 << 20
CHECKPOINT_BYTES = 32 << 20


def prepare(
    source: str | Path,
    out: str | Path,
    tokenizer: str | Path | None = None,
    *,
    val: str | Path | None = None,
    val_fraction: float = 0.01,
    train_bpe: int | None = None,
    eos: str | None = None,
    text_field: str | None = None,
    separator: str = SEPARATOR,
    seed: int = 0,
    limit_bytes: int | None = None,
    dtype: str = "auto",
    workers: int | None = None,
    description: str | None = None,
    synthetic: bool = False,
    progress: bool | Callback = False,
    checkpoint_bytes: int = CHECKPOINT_BYTES,
) -> TokenDataset:
    """Turn a corpus into a folder of tokens that `TokenDataset.open` reads, and open it.

    source            a file, a folder of files, or a dataset of the Hub by name
    out               the folder to write; if it already holds this very dataset, it is opened as it is
    tokenizer         a folder or Hub name; or instead
    train_bpe         the size of a byte-level BPE to train on the training split
    val               a validation file or folder (for a Hub dataset also the name of a split); without it,
    val_fraction      about this share of the documents, chosen by their content and `seed`; 0 for none
    eos               the token after each document; by default the tokenizer's own
    text_field        the column or key of the text; by default a usual name, or the only one with text
    separator         what stands between documents in plain text; "" for nothing
    limit_bytes       stop reading the training source after this much text
    dtype             uint16, uint32 or auto, the smaller one that holds the vocabulary
    workers           threads that encode; by default one per core. The result does not depend on it
    progress          True for a bar on standard error, or a function that is given a `Progress`
    checkpoint_bytes  how much text an interrupted run may have to encode again

    An interrupted call continues when it is repeated. The folder has its header only when it is complete.
    """
    out = Path(out)
    _check(val_fraction, seed, limit_bytes, workers, tokenizer, train_bpe)
    train_source, val_source = resolve(source, val, Reading(text_field, separator))
    _check_out(out)
    ready = None if tokenizer is None else load_tokenizer(tokenizer, eos)
    dtype_for(ready.vocab_size if ready else train_bpe or 0, dtype)
    with reporter(progress) as report:
        inputs = _identify(train_source, val_source, report)
        recipe = {
            "format": VERSION,
            "sources": [header.model_dump(mode="json") for header in inputs],
            "tokenizer": ready.sha256 if ready else None,
            "train_bpe": train_bpe,
            "eos": ready.special["eos_token"] if ready else eos or SEPARATOR,
            "val_fraction": None if val_source else val_fraction,
            "seed": None if val_source else seed,
            "text_field": text_field,
            "separator": separator,
            "limit_bytes": limit_bytes,
            "dtype": dtype,
            "synthetic": synthetic,
        }
        existing = _reuse(out, recipe)
        if existing is not None:
            return existing
        corpus = _Corpus(train_source, val_source, 0.0 if val_source else val_fraction, seed, limit_bytes)
        with workspace(out, recipe) as work:
            if work.finished:
                work.move()
            else:
                ready = ready or _trained(work, corpus, train_bpe or 0, eos, report)
                header = Header(
                    oelm_version=__version__,
                    tokenizers_version=tokenizers.__version__,
                    description=description or f"{train_source.description}, {ready.name} tokens",
                    synthetic=synthetic,
                    tokenizer=TokenizerHeader(name=ready.name, sha256=ready.sha256, trained=ready.trained),
                    vocab_size=ready.vocab_size,
                    dtype=dtype_for(ready.vocab_size, dtype),
                    eos_id=ready.eos_id,
                    splits={},
                    sources=inputs,
                    ignored=(*train_source.ignored, *(val_source.ignored if val_source else ())),
                    recipe=recipe,
                )
                _encode(work, corpus, ready, header, workers or cores(), checkpoint_bytes, report)
    return TokenDataset.open(out)


@dataclass(frozen=True)
class _Corpus:
    """The sources and how they are split: everything that can be read more than once."""

    train: Source
    val: Source | None
    val_fraction: float
    seed: int
    limit_bytes: int | None

    def feeder(self, meter: Meter, state: FeederState | None = None) -> Feeder:
        return Feeder(
            self.train.units(meter),
            self.val.units(meter) if self.val else None,
            val_fraction=self.val_fraction,
            seed=self.seed,
            limit_bytes=self.limit_bytes,
            state=state,
        )

    @property
    def splits(self) -> tuple[SplitName, ...]:
        return ("train", "val") if self.val or self.val_fraction else ("train",)

    @property
    def total_bytes(self) -> int | None:
        sizes = [source.total_bytes for source in (self.train, self.val) if source]
        return None if None in sizes or self.limit_bytes is not None else sum(size or 0 for size in sizes)


def _check_out(out: Path) -> None:
    """Refuse early an output folder that holds neither a dataset nor the start of one."""
    if not (out / HEADER).is_file():
        check_free(out)


def _encode(
    work: Workspace,
    corpus: _Corpus,
    tokenizer: TextTokenizer,
    header: Header,
    workers: int,
    checkpoint_bytes: int,
    report: Callback,
) -> None:
    """Encode the corpus into the work folder, from its last checkpoint on, and publish it."""
    dtype = DTYPES[header.dtype]
    saved = work.open_parts(corpus.splits, dtype)
    meter = Meter()
    feeder = corpus.feeder(meter, FeederState(**saved) if saved else None)
    total = corpus.total_bytes
    safe = sum(feeder.state.bytes.values())

    def write(arrays: Arrays, state: dict[str, Any] | None) -> None:
        nonlocal safe
        for split, ids in arrays.items():
            work.parts[split].append(ids)
        if state is None:
            return
        done = sum(state["bytes"].values())
        if done - safe >= checkpoint_bytes:
            work.save(state)
            safe = done
        documents = sum(state["documents"].values())
        report(Progress("encode", meter.bytes, total, documents, sum(part.tokens for part in work.parts.values())))

    encode_all(feeder, tokenizer.backend, tokenizer.eos_id, dtype, workers, write)
    _check_split(feeder.state, corpus)
    tokenizer.save(work.folder / TOKENIZER)
    splits: dict[str, SplitHeader] = {}
    for split, part in work.parts.items():
        splits[split] = SplitHeader(
            file=part.path.name,
            documents=feeder.state.documents[split],
            tokens=part.tokens,
            bytes=feeder.state.bytes[split],
            max_id=part.max_id,
            sha256=part.sha256(),
        )
    fields = header.model_dump() | {"splits": splits, "shared_documents": feeder.state.shared}
    work.publish(Header(**fields))


def _trained(work: Workspace, corpus: _Corpus, size: int, eos: str | None, report: Callback) -> TextTokenizer:
    """The tokenizer trained on the training split: of an interrupted run, or a new one."""
    path = work.folder / TOKENIZER_FILE
    if path.is_file():
        backend = Tokenizer.from_file(str(path))
        return TextTokenizer(f"bpe-{size}", backend, {"eos_token": eos or SEPARATOR}, trained=size)
    meter = Meter()
    feeder = corpus.feeder(meter)

    def texts() -> Any:
        for group in feeder.groups():
            yield from (piece.text for piece in group if piece.split == "train")
            report(Progress("train tokenizer", meter.bytes, corpus.total_bytes))
            if feeder.state.bytes["train"] >= BPE_BYTES:
                return

    trained = train_tokenizer(texts(), size, eos)
    _check_split(feeder.state, corpus, partial=True)
    write_text(path, trained.backend.to_str())
    return trained


def _identify(train: Source, val: Source | None, report: Callback) -> tuple[SourceHeader, ...]:
    """Hash every input file, so that a changed corpus is never taken for the old one."""
    sizes = [source.total_bytes or 0 for source in (train, val) if source]
    hashed = 0

    def seen(count: int) -> None:
        nonlocal hashed
        hashed += count
        report(Progress("hash", hashed, sum(sizes)))

    return (*train.identify("train", seen), *(val.identify("val", seen) if val else ()))


def _reuse(out: Path, recipe: dict[str, Any]) -> TokenDataset | None:
    """The dataset that `out` already holds, if it was made from this recipe."""
    if not (out / HEADER).is_file():
        return None
    found = read_header(out).recipe
    if found == recipe:
        try:
            dataset = TokenDataset.open(out)
        except DataError as error:
            raise DataError(f"{error} (delete {out} first)") from None
        discard(out)
        return dataset
    differing = [key for key in sorted({*recipe, *found}) if recipe.get(key) != found.get(key)]
    details = "; ".join(f"{key}: {_short(found.get(key))} there, {_short(recipe.get(key))} now" for key in differing)
    raise DataError(
        f"{out}: holds a dataset prepared differently ({details}); choose another folder or delete this one"
    )


def _short(value: Any) -> str:
    if isinstance(value, list):
        return ", ".join(str(item.get("name")) if isinstance(item, dict) else str(item) for item in value[:3])
    text = repr(value)
    return text if len(text) <= 24 else f"{text[:20]}..."


def _check_split(state: FeederState, corpus: _Corpus, partial: bool = False) -> None:
    where = corpus.train.description
    if not any(state.bytes.values()):
        raise DataError(f"{where}: the corpus is empty: no document with any text")
    if state.bytes["train"] == 0:
        every = f": with val_fraction {corpus.val_fraction:g} (--val-fraction) every document is for validation"
        raise DataError(f"{where}: no text is left for training{'' if corpus.val else every}")
    if "val" in corpus.splits and state.bytes["val"] == 0 and not partial:
        if corpus.val:
            raise DataError(f"{corpus.val.description}: the validation source is empty: no document with any text")
        raise DataError(
            f"{where}: val_fraction {corpus.val_fraction:g} (--val-fraction) left no text for validation; anything "
            f"above {state.lowest:.4f} takes some. Raise it, give a validation file, or set it to 0 for no validation"
        )
    if corpus.val and state.shared == state.documents["val"]:
        raise DataError(
            f"{corpus.val.description}: every document of the validation text is also in the training text: "
            "they must be different data"
        )


def _check(
    val_fraction: float,
    seed: int,
    limit_bytes: int | None,
    workers: int | None,
    tokenizer: str | Path | None,
    train_bpe: int | None,
) -> None:
    if not 0.0 <= val_fraction < 1.0:
        raise DataError(f"val_fraction {val_fraction} (--val-fraction): must be at least 0 and below 1")
    if not 0 <= seed < 2**64:
        raise DataError(f"seed {seed}: must be at least 0 and below 2**64")
    for name, value in (("limit_bytes", limit_bytes), ("workers", workers)):
        if value is not None and value < 1:
            raise DataError(f"{name} {value}: must be at least 1")
    if (tokenizer is None) == (train_bpe is None):
        given = "no tokenizer" if tokenizer is None else "two tokenizers"
        raise DataError(
            f"{given}: give either tokenizer (--tokenizer, a folder or a name) or train_bpe (--train-bpe, a vocabulary "
            f"size){'' if tokenizer is None else ', not both'}"
        )
    if train_bpe is not None:
        check_bpe_size(train_bpe)
