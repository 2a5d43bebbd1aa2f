"""Predict every row of a table with a fine-tuned run: the same rows, with the prediction beside them."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice, product
from pathlib import Path
from typing import Any, TextIO

import numpy as np

from ..base.files import new_file
from ..base.text import spreadsheet_safe
from ..config import TaskConfig
from ..data.corpus.batches import Order
from ..data.labelled.columns import PAIRS, TEXT_TO_TEXT, TEXTS, find_inputs
from ..data.labelled.encoded import Encoded
from ..data.labelled.tasks import TASKS, to_prompt
from ..data.tables import Row, read_rows, text_of
from ..data.text_files import Meter
from ..errors import DataError
from ..training.parallel import device_for
from ..training.tasks.classification import class_names, class_probabilities
from ..training.tasks.model_tokenizer import ModelTokenizer
from ..training.tasks.text2text import answer
from .load import load_run
from .use import config_to_predict_with, trained_with_pairs

# The columns that are added. A file that has one of them already is refused.
PREDICTION, PROBABILITY = "prediction", "probability"
_WRITTEN = (".csv", ".tsv", ".jsonl")
# So many batches are sorted by length together, so that the texts of a batch need little padding.
_BATCHES_TOGETHER = 16


@dataclass(frozen=True)
class _Inputs:
    """The rows of a file that was read once and found good: its columns, those of the texts, and how many rows."""

    path: Path
    columns: list[str]
    text: str
    pair: str | None
    count: int

    def rows(self) -> Iterator[Row]:
        """Yield every row in order."""
        return (row for _, row in read_rows(self.path, Meter(), lambda _: self.columns))


def predict_table(
    run: Path,
    file: Path,
    out: Path,
    *,
    column: str | None = None,
    pair_column: str | None = None,
    batch_size: int = 32,
    show: Callable[[str, int, int], None] = lambda description, done, total: None,
) -> int:
    """Write the rows of a table with a prediction for each, and return how many there are.

    The texts are in the columns that the run's task has, unless `column` and `pair_column` name others. The file is
    read through before the model is loaded, so that a bad row costs no time. A classifier's rows get the class and its
    probability, a text-to-text model's the answer. In CSV and TSV no cell is one that a spreadsheet would compute.
    """
    config = config_to_predict_with(run)
    if out.suffix not in _WRITTEN:
        raise DataError(f"{out}: its name must end in {', '.join(_WRITTEN)}, which says how it is written")
    if out.resolve() == file.resolve():
        raise DataError(f"{out}: is the file that is read; name another one to write")
    pairs = bool(trained_with_pairs(run))
    named = _named(column, pair_column, pairs)
    inputs = _read_through(file, named or _candidates(config.task, pairs), bool(named))
    predictor = _Predictor(load_run(run).to(device_for("auto")), ModelTokenizer.of(config), config.task)
    show(f"predicting {file.name}", 0, inputs.count)
    with new_file(out) as stream:
        write = _writer(stream, out.suffix, [*inputs.columns, *predictor.columns])
        rows, done = inputs.rows(), 0
        while chunk := list(islice(rows, batch_size * _BATCHES_TOGETHER)):
            texts = [str(row[inputs.text]) for row in chunk]
            seconds = None if inputs.pair is None else [str(row[inputs.pair]) for row in chunk]
            for row, cells in zip(chunk, predictor.predict(texts, seconds, batch_size), strict=True):
                write({**row, **cells})
            done += len(chunk)
            show(f"predicting {file.name}", done, inputs.count)
    return inputs.count


def _named(column: str | None, pair_column: str | None, pairs: bool) -> list[tuple[str, str | None]]:
    """Return the columns that the caller named, if any; raise where they are not what the run was trained on."""
    if column is None and pair_column is None:
        return []
    if column is None or pairs != (pair_column is not None):
        needed = "--column and --pair-column" if pairs else "--column alone"
        raise DataError(f"the run was trained on {'pairs of' if pairs else 'single'} texts: name {needed}")
    return [(column, pair_column)]


def _candidates(task: TaskConfig, pairs: bool) -> list[tuple[str, str | None]]:
    """Return the columns in which a run's texts may be, in the order in which they are tried."""
    if task.source is not None:
        return [(task.source, None)]
    known = TASKS.get(task.name)
    texts = [task.text] if task.text else list(known.text) if known else []
    seconds = [task.pair] if task.pair else list(known.pair) if known else []
    if pairs:
        return list(product(texts, seconds)) if texts and seconds else list(PAIRS)
    usual = [source for source, _ in TEXT_TO_TEXT] if task.kind == "text2text" else list(TEXTS)
    return [(text, None) for text in texts or usual]


def _read_through(file: Path, candidates: Sequence[tuple[str, str | None]], named: bool) -> _Inputs:
    """Read a whole file, check every row, and return what it holds."""
    if not file.is_file():
        raise DataError(f"{file}: no such file")
    columns: dict[str, None] = {}
    found: list[tuple[str, str | None]] = []

    def choose(row: Row) -> list[str]:
        try:
            found.append(find_inputs(candidates, row, str(file)))
        except DataError as error:
            advice = "" if named else "; name the right one: --column NAME, and --pair-column NAME for a second text"
            raise DataError(f"{error}{advice}") from None
        return list(row)

    count = 0
    for location, row in read_rows(file, Meter(), choose):
        count += 1
        columns |= dict.fromkeys(row)
        for name in found[0]:
            if name is not None and not text_of(row, name, location).strip():
                raise DataError(f"{location}: {name!r} is empty: fill it in or remove the row")
    if not count:
        raise DataError(f"{file}: holds no row")
    taken = [name for name in (PREDICTION, PROBABILITY) if name in columns]
    if taken:
        raise DataError(f"{file}: has a column {taken[0]!r} already, which the prediction would replace; rename it")
    return _Inputs(file, list(columns), *found[0], count)


@dataclass(frozen=True)
class _Predictor:
    """A run's model on its device, with its tokenizer."""

    model: Any
    model_tokenizer: ModelTokenizer
    task: TaskConfig

    @property
    def columns(self) -> list[str]:
        """Return the columns that a prediction has."""
        return [PREDICTION, PROBABILITY] if self.task.kind == "classification" else [PREDICTION]

    def predict(self, texts: list[str], pairs: list[str] | None, batch_size: int) -> list[dict[str, Any]]:
        """Return the cells of each text's prediction, in the order of the texts."""
        if self.task.kind == "text2text":
            seconds = pairs or [""] * len(texts)
            texts = [to_prompt(self.task.name, text, pair) for text, pair in zip(texts, seconds, strict=True)]
            pairs = None
        encoded = self.model_tokenizer.encode(texts, pairs)
        by_length = np.argsort(-encoded.lengths, kind="stable").astype(np.int64)
        predictions: list[dict[str, Any]] = [{} for _ in texts]
        for start in range(0, len(by_length), batch_size):
            chosen = by_length[start : start + batch_size]
            for row, cells in zip(chosen.tolist(), self._predict_batch(encoded, chosen), strict=True):
                predictions[row] = cells
        return predictions

    def _predict_batch(self, encoded: Encoded, chosen: Order) -> list[dict[str, Any]]:
        if self.task.kind == "text2text":
            answers = answer(self.model, self.model_tokenizer, encoded, chosen, self.model_tokenizer.max_length)
            return [{PREDICTION: text} for text in answers]
        probabilities = class_probabilities(self.model, self.model_tokenizer, encoded, chosen)
        names = class_names(self.model, probabilities.shape[1])
        best = zip(*(values.tolist() for values in probabilities.max(-1)), strict=True)
        return [{PREDICTION: names[index], PROBABILITY: round(share, 6)} for share, index in best]


def _writer(stream: TextIO, suffix: str, columns: list[str]) -> Callable[[dict[str, Any]], object]:
    """Return a function that writes one row in the format of a file name's suffix."""
    if suffix == ".jsonl":
        return lambda row: stream.write(json.dumps(row, ensure_ascii=False) + "\n")
    writer = csv.DictWriter(stream, columns, delimiter="\t" if suffix == ".tsv" else ",", lineterminator="\n")
    writer.writerow({name: spreadsheet_safe(name) for name in columns})
    return lambda row: writer.writerow({name: spreadsheet_safe(value) for name, value in row.items()})
