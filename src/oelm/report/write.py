"""Writes a report's files. A form that cannot be made here is left out with its reason; the rest is still written."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from os import PathLike
from pathlib import Path

from ..analysis import Analysis, AnalysisError, analyse
from ..base.files import write_json, write_text
from ..errors import nearest
from . import drawing as figures
from . import pdf
from .compose import compose
from .document import Document, Table
from .html import to_html
from .markdown import to_markdown
from .tables import results_csv, results_json, table_csv, table_latex
from .words import Words, words

FORMATS = ("md", "html", "pdf")
# The names of a report's figures and tables: the next one in the same folder removes those that it has no more.
_LIST = "tables/files.json"
_FILE = re.compile(r"(figures|tables)/[^/]+\.(svg|png|csv|tex)")


@dataclass(frozen=True)
class Report:
    """What was written, what could not be, and the analysis that it shows."""

    analysis: Analysis
    files: tuple[Path, ...]
    problems: tuple[str, ...]


def write_report(
    paths: Sequence[str | PathLike[str]],
    out: str | PathLike[str],
    *,
    language: str = "en",
    title: str | None = None,
    formats: Sequence[str] = FORMATS,
    hypotheses: str | PathLike[str] | None = None,
    refresh: int | None = None,
) -> Report:
    """Write the report of the runs in `paths` into the folder `out`: text, page, PDF, figures, tables, data.

    `formats` are some of md, html and pdf; results.csv, results.json and the tables are always written.
    """
    say = words(language)
    for name in formats:
        if name not in FORMATS:
            raise AnalysisError(f"format {name!r}.{nearest(name, FORMATS)} Formats: {', '.join(FORMATS)}")
    analysis = analyse(paths, hypotheses)
    folder = Path(out)
    if folder.exists() and not folder.is_dir():
        raise AnalysisError(f"{folder}: a file; the report needs a folder")
    try:
        (folder / "tables").mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise AnalysisError(f"{folder}: cannot be made ({error.strerror})") from None
    document = compose(analysis, folder, language, title)
    texts = {"results.csv": results_csv(analysis), "results.json": results_json(analysis)}
    for name, table in _named(document.tables):
        texts[f"tables/{name}.csv"] = table_csv(table)
        texts[f"tables/{name}.tex"] = table_latex(table)
    written, problems = [], list(analysis.problems)
    drawn, missing = _draw(document, analysis, folder, say) if {"md", "pdf"} & set(formats) else ([], [])
    written += drawn
    problems += missing
    if "md" in formats:
        texts["report.md"] = to_markdown(document, pictures=bool(drawn))
    if "html" in formats:
        texts["report.html"] = to_html(document, refresh)
    for name, text in texts.items():
        write_text(folder / name, text)
        written.append(folder / name)
    if "pdf" in formats:
        why = _typeset(document, folder / "report.pdf", say)
        if why is None:
            written.append(folder / "report.pdf")
        else:
            problems.append(why)
    _remove_older(folder, written)
    return Report(analysis, tuple(written), tuple(problems))


def _named(tables: Sequence[Table]) -> Iterator[tuple[str, Table]]:
    """Tables with the names of their files: two benchmarks may be called alike, in folders of their own."""
    seen: Counter[str] = Counter()
    for table in tables:
        seen[table.name] += 1
        yield (f"{table.name}-{seen[table.name]}" if seen[table.name] > 1 else table.name), table


def _remove_older(folder: Path, written: Sequence[Path]) -> None:
    """Remove the figures and tables that an earlier report of other runs wrote here, and list those of this one."""
    names = [path.relative_to(folder) for path in written]
    ours = {str(name) for name in names if name.parts[0] in ("figures", "tables")}
    for name in _listed(folder) - ours:
        (folder / name).unlink(missing_ok=True)
    write_json(folder / _LIST, sorted(ours))


def _listed(folder: Path) -> set[str]:
    """What the last report says that it wrote, as far as it lies where reports write."""
    try:
        names = json.loads((folder / _LIST).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return set()
    listed = names if isinstance(names, list) else []
    return {name for name in listed if isinstance(name, str) and _FILE.fullmatch(name)}


def _draw(document: Document, analysis: Analysis, folder: Path, say: Words) -> tuple[list[Path], list[str]]:
    """The figures as files. Labels are English where no font has the language's letters: boxes help nobody."""
    if not document.figures:
        return [], []
    if not figures.available():
        return [], [say("no_matplotlib")]
    if document.language == "zh" and figures.cjk_font() is None:
        english = compose(analysis, folder, "en")
        return figures.draw(english.figures, folder / "figures"), [say("figures_in_english")]
    return figures.draw(document.figures, folder / "figures", document.language), []


def _typeset(document: Document, path: Path, say: Words) -> str | None:
    """Write the PDF, or say why not. One of an earlier report is removed then: it would show other runs."""
    why = None
    if not pdf.available():
        why = say("no_typst")
    elif document.language == "zh" and pdf.cjk_font() is None:
        why = say("no_cjk")
    else:
        try:
            pdf.write_pdf(document, path)
        except RuntimeError as error:  # typst's own errors derive from it
            why = say("pdf_failed", why=str(error).splitlines()[0])
    if why is not None:
        path.unlink(missing_ok=True)
    return why
