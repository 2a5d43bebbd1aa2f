"""Write docs/results.md, which answers questions in words, and a page of tables and figures for each of them.

The questions come from a YAML file that gives, for each, the folders of its runs, and the conclusion and what is open
in words. Every number comes from the records, so a file whose words contain a measured number is refused.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import cache, partial
from os import PathLike
from pathlib import Path
from typing import Annotated

from pydantic import Field, ValidationError, field_validator

from .. import __version__
from ..analysis import Analysis, AnalysisError, analyse
from ..analysis.arms import Setup
from ..analysis.compare import Comparison, between
from ..base.files import write_text
from ..base.strict import Strict, explain
from ..config import read_mapping
from . import numbers
from .chart_choice import setup_figures
from .charts import ChartFigure, Styles
from .compose import arms_table, comparison_table, judged_on_test, notes, settings
from .document import Block, Bullets, Cell, Document, Heading, Paragraph, Table
from .drawing import draw as draw_figures
from .explored import FoldersOf, GroupSource, explored_blocks
from .forest import change_figure, change_figures
from .markdown import block_text, to_markdown
from .sections import bench_blocks, relative, runs_of
from .sentences import setup_briefly, setup_name, short_conclusion
from .words import Words, words

_NUMBER = re.compile(r"\d+(\.\d+)?\s*(%|points|x\b)")
# The table of headlines is written between these two lines of a README.
_BEGIN, _END = "<!-- headlines: written by make results -->", "<!-- /headlines -->"
# The figures of a setup that a question shows beside the changes. The others are in a report only.
_SHOWN = "-accuracy"


class Pair(Strict, refusal=AnalysisError):
    """Two arms that are compared with each other, in addition to the comparison of each with the baseline."""

    arm: str
    against: str


class Question(Strict, refusal=AnalysisError):
    """One question, and its answer.

    `runs` are patterns of the folders with its runs and benchmarks, relative to the file. `conclusion` is the answer in
    a few sentences; `details` are what else the runs show, a bullet point each. `shown` are arms of different setups
    beside a reference; without them each setup has its own tables.
    """

    id: Annotated[str, Field(pattern=r"^[a-z0-9-]+$")]
    question: str
    runs: tuple[str, ...] = ()
    pairs: tuple[Pair, ...] = ()
    shown: tuple[GroupSource, ...] = ()
    setting: str
    conclusion: str
    details: tuple[str, ...] = ()
    open: str

    @field_validator("conclusion", "details", "open")
    @classmethod
    def _has_no_measured_number(cls, value: str | tuple[str, ...]) -> str | tuple[str, ...]:
        if isinstance(value, tuple):
            return tuple(_without_number(text) for text in value)
        return _without_number(value)


def _without_number(text: str) -> str:
    number = _NUMBER.search(text)
    if number:
        raise ValueError(f"{number.group()!r} is a measured number: leave it to the tables")
    return " ".join(text.split())


class Headline(Strict, refusal=AnalysisError):
    """One row of the README's table: an arm against its reference in these runs, as compared for the question.

    `text` says in each language of a README what the row is about.
    """

    text: dict[str, str]
    arm: str
    runs: tuple[str, ...]
    question: str


class Evidence(Strict, refusal=AnalysisError):
    """The content of a file of questions: title, introduction, its terms, the questions, and the README's headlines."""

    title: str
    about: str
    terms: tuple[str, ...] = ()
    questions: tuple[Question, ...]
    headlines: tuple[Headline, ...] = ()


def load_evidence(path: str | PathLike[str]) -> Evidence:
    """Load a YAML file of questions, or raise AnalysisError when it is not one."""
    try:
        return Evidence.model_validate(read_mapping(path))
    except ValidationError as error:
        raise AnalysisError(f"{path}: {explain(error, Evidence)}") from None


def write_evidence(source: str | PathLike[str], out: str | PathLike[str], draw: bool = True) -> list[Path]:
    """Write the page that answers the questions of `source` to `out`, and those with the details beside it.

    The figures of a page go into a folder beside it; pages and figures of questions that are gone are removed.
    """
    pages = evidence_pages(source, Path(out))
    written = {path: to_markdown(page) for path, page in pages.items()}
    if draw:
        for folder in {path.parent / "figures" for path in pages}:
            figures = [
                figure for path, page in pages.items() if path.parent == folder.parent for figure in page.figures
            ]
            _write_figures(folder, figures)
    for path in {*_details_folder(Path(out)).glob("*.md")} - set(pages):
        path.unlink()
    for path, text in written.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text(path, text)
    return list(pages)


def _write_figures(folder: Path, figures: Sequence[ChartFigure]) -> None:
    """Write figures into a folder that holds no others."""
    drawings = {folder / f"{name}.svg": drawing for name, drawing in draw_figures(figures).items()}
    for outdated in {*folder.glob("*.svg")} - set(drawings):
        outdated.unlink()
    for file, drawing in drawings.items():
        folder.mkdir(parents=True, exist_ok=True)
        write_text(file, drawing.svg)


def write_headlines(source: str | PathLike[str], readme: str | PathLike[str], language: str = "en") -> Path:
    """Write the table of headlines between its two lines in a README; the rest of the file stays as it is."""
    path = Path(readme)
    text = path.read_text(encoding="utf-8")
    before, mark, after_begin = text.partition(_BEGIN)
    _, end, after = after_begin.partition(_END)
    if not mark or not end:
        raise AnalysisError(f"{path}: has no place for the table: add the lines {_BEGIN} and {_END}")
    table = block_text(headlines(source, "docs/results.md", words(language)))
    write_text(path, f"{before}{_BEGIN}\n{table}\n{_END}{after}")
    return path


def headlines(source: str | PathLike[str], results: str, say: Words) -> Table:
    """Return the table of headlines, each with a link to its question in the document `results`."""
    columns = say.all("col_setting", "col_method", "col_against", "col_interval", "col_reading", "col_seeds")
    table, references = Table("headlines", columns, numeric=(2, 3, 5)), set()
    for line, comparison in headline_comparisons(source):
        if say.language not in line.text:
            raise AnalysisError(f"{source}: headline of {line.arm!r} has no text in {say.language!r}")
        references.add(comparison.reference)
        word, tone = short_conclusion(comparison, say)
        table.add(
            Cell(line.text[say.language], folder=f"{results}#{line.question}"),
            Cell(line.arm, code=True),
            f"{say(f'm_{comparison.measure.name}')} {numbers.change(comparison, say)}",
            numbers.change_range(comparison, say),
            Cell(word, tone=tone),
            str(comparison.n),
        )
    if len(references) != 1:
        compared = ", ".join(sorted(references)) or "nothing: it has no headlines"
        raise AnalysisError(f"{source}: headlines must share one reference, but these are against {compared}")
    columns[2] = f"{columns[2]} {references.pop()}"
    return table


def headline_comparisons(source: str | PathLike[str]) -> list[tuple[Headline, Comparison]]:
    """Return each headline with its comparison, or raise AnalysisError for one that has none or several."""
    evidence, root = load_evidence(source), Path(source).parent
    runs = {question.id: question.runs for question in evidence.questions}
    analysis_of = cache(lambda question: analyse(_folders(root, runs[question])))
    found = []
    for line in evidence.headlines:
        if line.question not in runs:
            raise AnalysisError(f"{source}: headline of {line.arm!r}: no question has the id {line.question!r}")
        folders = _folders(root, line.runs)
        matching = [
            comparison
            for comparison in analysis_of(line.question).comparisons
            if comparison.arm == line.arm and all(_is_within(run.path, folders) for run in runs_of(comparison))
        ]
        if len(matching) != 1:
            count = f"{len(matching)} comparisons of {line.arm!r} match"
            raise AnalysisError(f"{source}: headline of {line.arm!r}: {count}; exactly one must")
        found.append((line, matching[0]))
    return found


def evidence_pages(source: str | PathLike[str], out: Path) -> dict[Path, Document]:
    """Return the page that answers the questions, as `out`, and the page of each question's details, by their paths."""
    evidence = load_evidence(source)
    details = {
        _details_folder(out) / f"{question.id}.md": _details_page(question, Path(source).parent, out)
        for question in evidence.questions
    }
    return {out: _answers_page(source, evidence, out, details), **details}


def _details_folder(out: Path) -> Path:
    return out.with_suffix("")


def _answers_page(
    source: str | PathLike[str], evidence: Evidence, out: Path, details: dict[Path, Document]
) -> Document:
    """Return the page with the answers in words; every question links to its details.

    It has the table of headlines, and the figures of arms that are shown beside a reference.
    """
    blocks: list[Block] = [Paragraph(evidence.about)]
    blocks += [headlines(source, "", words("en"))] if evidence.headlines else []
    for number, (question, path) in enumerate(zip(evidence.questions, details, strict=True), start=1):
        blocks += [Heading(f"{number}. {question.question}", 2, question.id), Paragraph(question.conclusion)]
        blocks += details[path].figures if question.shown else []
        link = Cell("Tables, figures and runs", folder=relative(path, out.parent))
        blocks += [Bullets([link, Cell(f"Open: {question.open}")])]
    if evidence.terms:
        blocks += [Heading("How to read it", 2, "reading"), Bullets([Cell(text) for text in evidence.terms])]
    records = len({folder for page in details.values() for folder in page.folders.values()})
    return Document(evidence.title, "en", blocks, _footer(records))


def _details_page(question: Question, root: Path, out: Path) -> Document:
    """Return the page with the tables and figures of a question; its links are relative to its own folder."""
    folder, say = _details_folder(out), words("en")
    answer = Cell("The other questions, and how to read the tables", folder=relative(out, folder))
    blocks: list[Block] = [Bullets([answer])]
    links: dict[str, str] = {}
    folders = _folders(root, question.runs)
    if folders:
        analysis = analyse(folders)
        links = {analysis.handle(run): relative(run.path, folder) for run in analysis.runs}
        blocks += _answer(question, analysis, partial(_folders, root), folder, say)
    blocks += [Paragraph(f"Open: {question.open}")]
    return Document(question.question, "en", blocks, _footer(len(set(links.values()))), links)


def _footer(records: int) -> str:
    return f"Written by oelm {__version__} from {records} records; regenerate it with `make results`."


def _answer(question: Question, analysis: Analysis, folders_of: FoldersOf, out: Path, say: Words) -> list[Block]:
    blocks: list[Block] = [Paragraph(question.conclusion)]
    blocks += [Bullets([Cell(text) for text in question.details])] if question.details else []
    blocks.append(Paragraph(question.setting, tone="muted"))
    if question.shown:
        blocks += explored_blocks(question.shown, question.id, analysis, folders_of, Styles([]), say)
    else:
        blocks += _setups(question, analysis, say)
    for bench in analysis.benches:
        blocks += bench_blocks(bench, out, say)
    kinds = Counter(run.kind for run in analysis.left_out)
    if kinds:
        listed = ", ".join(f"{count} {kind}" for kind, count in sorted(kinds.items()))
        blocks.append(Paragraph(f"Recorded but not counted: {listed}.", tone="muted"))
    return blocks


def _setups(question: Question, analysis: Analysis, say: Words) -> list[Block]:
    """Return the setups of a question's runs: all comparisons in a table where there are several, then one by one."""
    blocks: list[Block] = []
    setups = [setup for group in analysis.groups for setup in group.setups]
    _require_pairs(question, setups)
    methods = [arm.method for setup in setups for arm in setup.arms]
    styles = Styles(methods)
    several = len(setups) > 1
    if several:
        blocks.append(_at_a_glance(question, analysis, setups, say))
        changes = _changes(question, analysis, styles, say)
        blocks += [changes] if changes is not None else []
    for index, setup in enumerate(setups, start=1):
        name = f"{question.id}-{index}"
        blocks += [
            Heading(setup_name(setup, say), 2, name),
            Paragraph(settings(setup, say), tone="muted"),
            arms_table(analysis, setup, index, say),
        ]
        drawn, _ = setup_figures(analysis, setup, index, styles, say)
        selected = [] if several else change_figures(analysis, styles, say)
        selected += [figure for figure in drawn if figure.name.endswith(_SHOWN)]
        blocks += [replace(figure, name=f"{question.id}-{figure.name}") for figure in selected]
        comparisons = analysis.of(setup)
        if comparisons:
            blocks.append(comparison_table(analysis, list(comparisons), name, say))
            blocks += notes(comparisons, say)
        blocks += judged_on_test(analysis, setup, f"{name}-test", say)
        direct = between(setup, [(pair.arm, pair.against) for pair in question.pairs])
        if direct:
            blocks.append(Paragraph("Arms against each other, corrected over these pairs:"))
            blocks.append(comparison_table(analysis, direct, f"{name}-pairs", say))
    return blocks


def _require_pairs(question: Question, setups: Sequence[Setup]) -> None:
    """Raise AnalysisError for a pair that no setup has: it was renamed or not run."""
    for pair in question.pairs:
        if not any(setup.arm(pair.arm) and setup.arm(pair.against) for setup in setups):
            raise AnalysisError(f"question {question.id!r}: no setup has both {pair.arm!r} and {pair.against!r}")


def _at_a_glance(question: Question, analysis: Analysis, setups: Sequence[Setup], say: Words) -> Table:
    """Return all comparisons of a question in one table; the first row of each setup links to its section."""
    columns = say.all("col_method", "col_change", "col_interval", "col_seeds", "col_reading")
    table = Table(f"{question.id}-glance", ["data", *columns], numeric=(2, 3, 4))
    for index, setup in enumerate(setups, start=1):
        link = Cell(setup_name(setup, say), folder=f"#{question.id}-{index}")
        for comparison in analysis.of(setup):
            word, tone = short_conclusion(comparison, say)
            values = [numbers.change(comparison, say), numbers.change_range(comparison, say), str(comparison.n)]
            table.add(link, Cell(comparison.arm, code=True), *values, Cell(word, tone=tone))
            link = Cell("")
    return table


def _changes(question: Question, analysis: Analysis, styles: Styles, say: Words) -> ChartFigure | None:
    """Return a figure with all changes of a question, sorted by method, to show what a change depends on."""
    if len({comparison.measure.name for comparison in analysis.comparisons}) != 1:
        return None
    labelled = [
        (f"{comparison.arm}: {setup_briefly(comparison.setup, analysis, say)}", comparison)
        for comparison in sorted(analysis.comparisons, key=lambda comparison: comparison.arm)
    ]
    return change_figure(f"{question.id}-all", [("", labelled)], styles, say)


def _is_within(path: Path, folders: Sequence[Path]) -> bool:
    return any(path.is_relative_to(folder) for folder in folders)


def _folders(root: Path, patterns: Sequence[str]) -> list[Path]:
    """Return the folders, and the files of benchmarks, that match the patterns; raise where a pattern matches none."""
    folders: list[Path] = []
    for pattern in patterns:
        matched = sorted(path for path in root.glob(pattern) if path.is_dir() or path.suffix == ".json")
        if not matched:
            raise AnalysisError(f"{pattern}: no folder below {root} matches this pattern")
        folders += matched
    return folders


if __name__ == "__main__":
    import sys

    print(f"wrote {', '.join(map(str, write_evidence(sys.argv[1], sys.argv[2])))}")
    print(f"wrote {write_headlines(sys.argv[1], sys.argv[3])}")
    print(f"wrote {write_headlines(sys.argv[1], sys.argv[4], 'zh')}")
