"""Read datasets of the Hugging Face Hub by name with the `datasets` package: stream text, load labelled tables."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import cached_property
from itertools import islice
from typing import Any

from ..base.hub import cache_without_hub
from ..errors import DataError, first_line, nearest
from .corpus.readers import Reading, Unit, find_text_field, text_units
from .packages import import_optional
from .tables import ChooseColumns, Row, text_of
from .text_files import Meter

_NAME = re.compile(r"(?P<repo>[\w.-]+/[\w.-]+)(:(?P<config>[\w.-]+))?(@(?P<revision>[\w./-]+))?")
_COMMIT = re.compile(r"[0-9a-f]{40}")
_TIMEOUT = 20.0  # seconds to wait for the commit of a revision
REVISION = "main"


@dataclass(frozen=True)
class HubDataset:
    """A dataset on the Hub. With `lines`, its rows are lines of one long text instead of documents."""

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
    """Return the dataset of a known name or of `owner/name[:config][@revision]`; None when it is neither."""
    if name in REGISTRY:
        return REGISTRY[name]
    match = _NAME.fullmatch(name)
    return HubDataset(match["repo"], match["config"], revision=match["revision"]) if match else None


def suggest(name: str) -> str:
    """Return the nearest and all known names, for the message about an unknown source."""
    return f"{nearest(name, REGISTRY)} Known names: {', '.join(REGISTRY)}; others as owner/name or owner/name:config"


def read_units(dataset: HubDataset, split: str, reading: Reading, meter: Meter) -> Iterator[Unit]:
    """Return an iterator over the text units of one split of a Hub dataset, in order."""
    texts = _texts(dataset, split, reading, meter)
    if dataset.lines:
        # Many lines at a time, since every portion is copied together with the text that is not used yet.
        portions = iter(lambda: list(islice(texts, 1000)), [])
        return text_units(map("".join, portions), "")
    return (Unit(text) for text in texts if text.strip())


def _texts(dataset: HubDataset, split: str, reading: Reading, meter: Meter) -> Iterator[str]:
    where = f"{dataset}, split {split!r}"
    load = import_optional("datasets", f"the Hub dataset {dataset}").load_dataset
    column: str | None = None
    number = 0
    with _hub_errors(where, lambda: f"after {number:,} rows; what is finished is kept" if number else "from the Hub"):
        with cache_without_hub():
            rows: Any = load(dataset.repo, dataset.config, split=split, streaming=True, revision=dataset.revision)
        for number, row in enumerate(rows, start=1):
            if column is None:
                column = find_text_field(row, reading.text_field, where)
            text = text_of(row, column, f"{where}, row {number}")
            meter.bytes += len(text)
            yield text


@dataclass(frozen=True, kw_only=True)
class HubTable:
    """One split of a dataset on the Hub, for labelled data. `commit` is None when the Hub did not answer."""

    repo: str
    config: str | None
    split: str
    revision: str
    commit: str | None

    @property
    def name(self) -> str:
        """Return the table's name in error messages."""
        return f"{HubDataset(self.repo, self.config, revision=self.revision)}, split {self.split!r}"

    def rows(self, choose: ChooseColumns) -> Iterator[tuple[str, Row]]:
        """Yield every row with its location; `choose` is called with the first one."""
        number = 0
        for batch in self._loaded.iter(batch_size=1000):  # several times faster than row by row
            for values in zip(*batch.values(), strict=True):
                row = dict(zip(batch, values, strict=True))
                if not number:
                    choose(row)
                number += 1
                yield f"{self.name}, row {number}", row

    def class_names(self, column: str) -> tuple[str, ...] | None:
        """Return the names that the dataset gives to the numbers in a label column, or None."""
        names = getattr(self._loaded.features.get(column), "names", None)
        return tuple(names) if names else None

    def source(self) -> dict[str, Any]:
        """Return where the table is from, for the run's record."""
        return asdict(self)

    @cached_property
    def _loaded(self) -> Any:
        load = import_optional("datasets", f"the Hub dataset {self.repo}").load_dataset
        with _hub_errors(self.name), cache_without_hub():
            return load(self.repo, self.config, split=self.split, revision=self.commit or self.revision)


def resolve_commit(repo: str, revision: str | None) -> str | None:
    """Return the commit that a revision of a dataset is now, or None when the Hub does not answer.

    Without an answer, the local cache may still be read; the record then says that no commit is known.
    """
    if revision is not None and _COMMIT.fullmatch(revision):
        return revision
    from huggingface_hub import HfApi
    from huggingface_hub.errors import RepositoryNotFoundError, RevisionNotFoundError

    revision = revision or REVISION
    try:
        with cache_without_hub():
            return HfApi().dataset_info(repo, revision=revision, timeout=_TIMEOUT).sha
    except (RepositoryNotFoundError, RevisionNotFoundError) as error:
        raise DataError(f"{repo}: the Hub has no revision {revision!r} of it ({first_line(error)})") from error
    # The layers of the network stack raise many kinds of errors; all of them mean that there was no answer.
    except Exception:  # noqa: BLE001
        return None


@contextmanager
def _hub_errors(where: str, progress: Callable[[], str] = lambda: "from the Hub") -> Iterator[None]:
    """Turn any error of the network stack below `datasets` into a DataError that says what to do."""
    try:
        yield
    except DataError:
        raise
    # Its layers raise many kinds of errors, and the advice is the same for all of them.
    except Exception as error:
        raise DataError(
            f"{where}: cannot be read {progress()} ({type(error).__name__}: {error}). Check the name and the network "
            "and run the same command again, or download the files and give their folder instead"
        ) from error
