"""The evidence of a set of studies as one document: questions, the runs that bear on them, and what follows.

The questions are data: which records each takes, what is concluded in words, what is open. Every number comes from the
records, so the words have none.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from os import PathLike
from pathlib import Path
from typing import Annotated

from pydantic import Field, ValidationError, field_validator

from .. import __version__
from ..analysis import Analysis, AnalysisError, analyse
from ..config import read_mapping
from ..files import write_text
from ..schema import Strict, explain
from . import figures
from .charts import Styles
from .compose import arms_table, comparison_table, settings
from .document import Block, Bullets, Cell, Document, Heading, Paragraph
from .markdown import to_markdown
from .pictures import pictures
from .sections import handles, relative, runs_of
from .sentences import sentence, setup_name, short_reading
from .strings import Words, words

_NUMBER = re.compile(r"\d+(\.\d+)?\s*(%|points|x\b)")
# The figures that a question shows; a report has the others.
_SHOWN = ("-change", "-accuracy")


class Question(Strict, refusal=AnalysisError):
    """One question, the folders of the runs that bear on it (patterns below the file's folder), and what follows."""

    id: Annotated[str, Field(pattern=r"^[a-z0-9-]+$")]
    question: str
    runs: tuple[str, ...] = ()
    setting: str
    conclusion: str
    open: str

    @field_validator("conclusion", "open")
    @classmethod
    def _has_no_measured_number(cls, value: str) -> str:
        found = _NUMBER.search(value)
        if found:
            raise ValueError(f"{found.group()!r} is a measured number: the records say those, in the tables")
        return " ".join(value.split())


class Evidence(Strict, refusal=AnalysisError):
    """The questions of a file, in their order, and what stands above them."""

    title: str
    about: str
    questions: tuple[Question, ...]


def load_evidence(path: str | PathLike[str]) -> Evidence:
    """The questions of a YAML file."""
    try:
        return Evidence.model_validate(read_mapping(path))
    except ValidationError as error:
        raise AnalysisError(f"{path}: {explain(error, Evidence)}") from None


def write_evidence(source: str | PathLike[str], out: str | PathLike[str], draw: bool = True) -> Path:
    """Write the document that answers the questions of `source`, with its figures in a folder beside it."""
    place = Path(out)
    document = evidence_document(source, place.parent)
    if draw:
        figures.draw(document.figures, place.parent / "figures", endings=("svg",))
    write_text(place, to_markdown(document, pictures=True))
    return place


def evidence_document(source: str | PathLike[str], out: Path) -> Document:
    """The document, for a file that will lie in the folder `out`."""
    asked, say = load_evidence(source), words("en")
    blocks: list[Block] = [Paragraph(asked.about)]
    links: dict[str, str] = {}
    for number, question in enumerate(asked.questions, start=1):
        blocks.append(Heading(f"{number}. {question.question}", 2, question.id))
        folders = _folders(Path(source).parent, question.runs)
        if folders:
            analysis = replace(analyse(folders), first=len(links) + 1)
            links |= {analysis.handle(run): relative(run.path, out) for run in analysis.runs}
            blocks += _answer(question, analysis, say)
        blocks += [Paragraph(f"Open: {question.open}")]
    footer = f"Written by oelm {__version__} from {len(links)} records; `make results` writes it again."
    return Document(asked.title, "en", blocks, footer, links)


def _answer(question: Question, analysis: Analysis, say: Words) -> list[Block]:
    blocks: list[Block] = [Paragraph(question.conclusion), Paragraph(question.setting, tone="muted")]
    methods = [arm.method for group in analysis.groups for setup in group.setups for arm in setup.arms]
    styles = Styles(list(dict.fromkeys(sorted(methods, key=lambda name: name != "baseline"))))
    for index, setup in enumerate((setup for group in analysis.groups for setup in group.setups), start=1):
        name = f"{question.id}-{index}"
        blocks += [
            Heading(setup_name(setup), 3, name),
            Paragraph(settings(setup), tone="muted"),
            arms_table(analysis, setup, index, say),
        ]
        drawn, _ = pictures(analysis, setup, index, styles, say)
        kept = [figure for figure in drawn if figure.name.endswith(_SHOWN)]
        blocks += [replace(figure, name=f"{question.id}-{figure.name}") for figure in kept]
        comparisons = analysis.of(setup)
        if comparisons:
            blocks.append(comparison_table(analysis, list(comparisons), name, say))
            told = [
                Cell(sentence(one, analysis, say), handles(analysis, runs_of(one)), badge=short_reading(one, say)[0])
                for one in comparisons
            ]
            blocks.append(Bullets(told))
    kinds = Counter(one.kind for one in analysis.left_out)
    if kinds:
        listed = ", ".join(f"{count} {kind}" for kind, count in sorted(kinds.items()))
        blocks.append(Paragraph(f"Recorded and not counted: {listed}.", tone="muted"))
    return blocks


def _folders(root: Path, patterns: Sequence[str]) -> list[Path]:
    """The folders that the patterns match, each of which must match something."""
    found: list[Path] = []
    for pattern in patterns:
        matched = sorted(path for path in root.glob(pattern) if path.is_dir())
        if not matched:
            raise AnalysisError(f"{pattern}: no record below {root} is called so")
        found += matched
    return found


if __name__ == "__main__":
    import sys

    print(f"wrote {write_evidence(sys.argv[1], sys.argv[2])}")
