"""Write docs/why.md: what each form of attention loses and where, from records of runs, probes and looks.

Like docs/results.md it answers questions from a YAML file, whose words hold no measured number. Its tables compare runs
across setups; what an arm lacks is listed with the command that makes it.
"""

from __future__ import annotations

import re
from itertools import count
from os import PathLike
from pathlib import Path
from typing import Annotated

from pydantic import Field, ValidationError, field_validator

from .. import __version__
from ..analysis import AnalysisError
from ..base.files import write_text
from ..base.strict import Strict, explain
from ..config import read_mapping
from .contrast_tables import changes_blocks, slices_blocks
from .contrasts import ChangesTable, ChosenArm, HeadsTable, ProbesTable, SlicesTable, Sources
from .document import Block, Bullets, Cell, Document, Heading, Paragraph, Table
from .markdown import to_markdown
from .probe_tables import heads_blocks, probes_blocks
from .words import Words, words

_NUMBER = re.compile(r"\d[\d.,]*\s*(%|points|x\b|nats|steps?\b|times\b|seeds?\b)")


class WhyQuestion(Strict, refusal=AnalysisError):
    """One question, its answer in words, its tables by kind, and what is open."""

    id: Annotated[str, Field(pattern=r"^[a-z0-9-]+$")]
    question: str
    answer: str
    changes: tuple[ChangesTable, ...] = ()
    slices: tuple[SlicesTable, ...] = ()
    probes: tuple[ProbesTable, ...] = ()
    heads: tuple[HeadsTable, ...] = ()
    open: str

    @field_validator("answer", "open")
    @classmethod
    def _has_no_measured_number(cls, value: str) -> str:
        number = _NUMBER.search(value)
        if number:
            raise ValueError(f"{number.group()!r} is a measured number: leave it to the tables")
        return " ".join(value.split())


class Why(Strict, refusal=AnalysisError):
    """The content of the file: title, introduction, terms, the arms by name, and the questions."""

    title: str
    about: str
    terms: tuple[str, ...] = ()
    arms: dict[str, ChosenArm]
    questions: tuple[WhyQuestion, ...]


def load_why(path: str | PathLike[str]) -> Why:
    """Load the YAML file, or raise AnalysisError when it is not one."""
    try:
        return Why.model_validate(read_mapping(path))
    except ValidationError as error:
        raise AnalysisError(f"{path}: {explain(error, Why)}") from None


def write_why(source: str | PathLike[str], out: str | PathLike[str]) -> Path:
    """Write the page."""
    path = Path(out)
    write_text(path, to_markdown(why_document(source)))
    return path


def why_document(source: str | PathLike[str]) -> Document:
    """Return the page; the patterns of its runs begin in the folder of the file."""
    why, say = load_why(source), words("en")
    sources = Sources(Path(source).parent, why.arms)
    blocks: list[Block] = [Paragraph(why.about), *([Bullets([Cell(term) for term in why.terms])] if why.terms else [])]
    for number, question in enumerate(why.questions, start=1):
        blocks += [Heading(f"{number}. {question.question}", 2, question.id), Paragraph(question.answer)]
        blocks += [*_tables(question, sources, say), Paragraph(f"Open: {question.open}")]
    blocks += _missing(sources)
    sets = sorted({path.relative_to(sources.root).parts[0] for path in sources.used})
    made_of = f"from {len(sources.used)} records ({', '.join(sets) or 'none'})"
    return Document(
        why.title, "en", blocks, f"Written by oelm {__version__} {made_of}; regenerate it with `make results`."
    )


def _tables(question: WhyQuestion, sources: Sources, say: Words) -> list[Block]:
    """Return the tables of a question with their titles."""
    blocks: list[Block] = []
    names = (f"{question.id}-{number}" for number in count(1))
    for changes in question.changes:
        blocks += changes_blocks(changes, next(names), sources, say)
    for slices in question.slices:
        blocks += slices_blocks(slices, next(names), sources, say)
    for probes in question.probes:
        blocks += probes_blocks(probes, next(names), sources)
    for heads in question.heads:
        blocks += heads_blocks(heads, next(names), sources)
    return blocks


def _missing(sources: Sources) -> list[Block]:
    """Return what the arms lack, with the commands that make it; nothing where the tables are complete."""
    if not sources.missing:
        return []
    table = Table("missing", ["arm", "what it lacks", "command"])
    for (why, command), labels in sources.missing.items():
        table.add("; ".join(labels), why, Cell(command, code=True))
    return [Heading("What is missing", 2, "missing"), table]


if __name__ == "__main__":
    import sys

    print(f"wrote {write_why(sys.argv[1], sys.argv[2])}")
