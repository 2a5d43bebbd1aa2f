"""Datasets of the Hugging Face Hub by name, streamed through the `datasets` package."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from ..errors import nearest
from .errors import DataError, optional
from .readers import Meter, Reading, Unit, find_text_field, text_of, text_units

_NAME = re.compile(r"(?P<repo>[\w.-]+/[\w.-]+)(:(?P<config>[\w.-]+))?(@(?P<revision>[\w./-]+))?")


@dataclass(frozen=True)
class HubDataset:
    """A dataset of the Hub. `lines` says that its rows are lines of one long text rather than documents."""

    repo: str
    config: str | None = None
    validation: str | None = None
    lines: bool = False
    revision: str | None = None

    def __str__(self) -> str:
        return self.repo + (f":{self.config}" if self.config else "") + (f"@{self.revision}" if self.revision else "")


REGISTRY = {
    "tinystories": HubDataset("roneneldan/TinyStories", validation="validation"),
    "openwebtext": HubDataset("Skylion007/openwebtext"),
    "wikitext-103-raw": HubDataset("Salesforce/wikitext", "wikitext-103-raw-v1", validation="validation", lines=True),
}


def parse(name: str) -> HubDataset | None:
    """A name of the registry, or `owner/name[:config][@revision]`; None where it can be neither."""
    if name in REGISTRY:
        return REGISTRY[name]
    match = _NAME.fullmatch(name)
    return HubDataset(match["repo"], match["config"], revision=match["revision"]) if match else None


def suggest(name: str) -> str:
    """The known names, for the message about a source that is neither a path nor one of them."""
    return f"{nearest(name, REGISTRY)} Known names: {', '.join(REGISTRY)}; others as owner/name or owner/name:config"


def read_units(dataset: HubDataset, split: str, reading: Reading, meter: Meter) -> Iterator[Unit]:
    """The text units of one split of a Hub dataset, in order."""
    where = f"{dataset}, split {split!r}"
    texts = _texts(dataset, split, reading, meter, where)
    if dataset.lines:
        yield from text_units(_Lines(texts).read, "")
    else:
        yield from (Unit(text) for text in texts if text.strip())


def _texts(dataset: HubDataset, split: str, reading: Reading, meter: Meter, where: str) -> Iterator[str]:
    datasets = optional("datasets", f"the Hub dataset {dataset}")
    column: str | None = None
    number = 0
    try:
        rows: Any = datasets.load_dataset(
            dataset.repo, dataset.config, split=split, streaming=True, revision=dataset.revision
        )
        for number, row in enumerate(rows, start=1):
            if column is None:
                column = find_text_field(row, reading.text_field, where)
            text = text_of(row, column, f"{where}, row {number}")
            meter.bytes += len(text)
            yield text
    except DataError:
        raise
    # The network stack below `datasets` raises whatever its layers raise; all of it means the same here.
    except Exception as error:
        progress = f"after {number:,} rows; what is finished is kept" if number else "from the Hub"
        raise DataError(
            f"{where}: cannot be read {progress} ({type(error).__name__}: {error}). Check the name and the network "
            "and run the same command again, or download the files and give their folder instead"
        ) from error


class _Lines:
    """Rows of text as something to `read` from."""

    def __init__(self, rows: Iterator[str]) -> None:
        self._rows = rows
        self._rest: list[str] = []

    def read(self, size: int) -> str:
        held = sum(map(len, self._rest))
        while held < size:
            row = next(self._rows, None)
            if row is None:
                break
            self._rest.append(row)
            held += len(row)
        text = "".join(self._rest)
        self._rest = [text[size:]] if len(text) > size else []
        return text[:size]
