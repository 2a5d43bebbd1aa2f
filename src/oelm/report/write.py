"""Write a report's files. If one cannot be written here, the others are, and the report says why.

`watch` writes a report again and again while runs are in progress.
"""

from __future__ import annotations

import json
import re
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any

from ..analysis import Analysis, AnalysisError, analyse
from ..analysis.run import Attempt
from ..base.files import remove_leftovers, write_bytes, write_json
from ..errors import NoRunsError, nearest
from ..runs.confirmation import Study
from ..runs.folder import is_alive
from . import drawing, pdf
from .compose import compose
from .document import Document, Table
from .html import to_html
from .markdown import to_markdown
from .tables import results_csv, results_json, table_csv, table_latex
from .words import Words, words

FORMATS = ("md", "html", "pdf")
# The names of the figures and tables that a report wrote. The next report in the same folder removes those that it
# does not write itself, and only names of this form.
_LIST = "tables/files.json"
_FILE = re.compile(r"(figures|tables)/[^/]+\.(svg|png|csv|tex)")


@dataclass(frozen=True)
class Report:
    """The files that were written, the problems met on the way, and the analysis that they show."""

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
    study: Study | None = None,
    any_version: bool = False,
    refresh: int | None = None,
) -> Report:
    """Write the report of the runs in `paths` into the folder `out`: text, page, PDF, figures, tables, data.

    `formats` are some of md, html and pdf; results.csv, results.json and the tables are always written. With a plan's
    `study` the report begins with its hypotheses, judged on the runs of that plan, or with `any_version` on all that it
    names. The page reloads itself after `refresh` seconds.
    """
    say = words(language)
    for name in formats:
        if name not in FORMATS:
            raise AnalysisError(f"format {name!r}.{nearest(name, FORMATS)} Formats: {', '.join(FORMATS)}")
    analysis = analyse(paths, hypotheses, study, any_version)
    folder = _make_folder(Path(out))
    document = compose(analysis, folder, language, title)
    problems = list(analysis.problems)
    contents: dict[str, str | bytes] = {}
    drawings, reason = _draw(document, formats, say)
    problems += [reason] if reason is not None else []
    if {"md", "pdf"} & set(formats):
        for name, drawn in drawings.items():
            contents |= {f"figures/{name}.png": drawn.png} if drawn.png is not None else {}
            contents[f"figures/{name}.svg"] = drawn.svg
    contents |= _data_files(analysis, document)
    if "md" in formats:
        contents["report.md"] = to_markdown(document)
    if "html" in formats:
        contents["report.html"] = to_html(document, {name: drawn.svg for name, drawn in drawings.items()}, refresh)
    written = _write_all(contents, folder)
    if "pdf" in formats:
        reason = _typeset(document, folder / "report.pdf", say)
        if reason is None:
            written.append(folder / "report.pdf")
        else:
            problems.append(reason)
    _remove_older(folder, written)
    return Report(analysis, tuple(written), tuple(problems))


def _make_folder(folder: Path) -> Path:
    if folder.exists() and not folder.is_dir():
        raise AnalysisError(f"{folder}: is a file; the report needs a folder")
    try:
        (folder / "tables").mkdir(parents=True, exist_ok=True)
        for written in (folder, folder / "tables", folder / "figures"):
            remove_leftovers(written)
    except OSError as error:
        raise AnalysisError(f"{folder}: cannot be made ({error.strerror})") from None
    return folder


def _draw(document: Document, formats: Sequence[str], say: Words) -> tuple[dict[str, drawing.Drawing], str | None]:
    """Draw the figures, and return them with the reason if their PNG files are left out.

    Without a Chinese font a PNG would show boxes. SVG holds text, which is shown in the reader's fonts.
    """
    if not {"md", "pdf"} & set(formats):
        return drawing.draw(document.figures), None
    legible = document.language != "zh" or drawing.cjk_font() is not None
    reason = say("no_png") if document.figures and not legible else None
    return drawing.draw(document.figures, png=legible), reason


def _data_files(analysis: Analysis, document: Document) -> dict[str, str]:
    """Return the contents of results.csv, results.json and the files of the tables, by name."""
    contents = {"results.csv": results_csv(analysis), "results.json": results_json(analysis)}
    for name, table in _named(document.tables):
        contents[f"tables/{name}.csv"] = table_csv(table)
        contents[f"tables/{name}.tex"] = table_latex(table)
    return contents


def _named(tables: Sequence[Table]) -> Iterator[tuple[str, Table]]:
    """Yield the tables with the names of their files; benchmarks in different folders may have the same name."""
    seen: Counter[str] = Counter()
    for table in tables:
        seen[table.name] += 1
        yield (f"{table.name}-{seen[table.name]}" if seen[table.name] > 1 else table.name), table


def _write_all(contents: dict[str, str | bytes], folder: Path) -> list[Path]:
    for name, content in contents.items():
        (folder / name).parent.mkdir(exist_ok=True)
        write_bytes(folder / name, content.encode() if isinstance(content, str) else content)
    return [folder / name for name in contents]


def _remove_older(folder: Path, written: Sequence[Path]) -> None:
    """Remove the figures and tables that only an earlier report wrote here, and list those of this one."""
    names = [path.relative_to(folder) for path in written]
    current = {str(name) for name in names if name.parts[0] in ("figures", "tables")}
    for name in _listed(folder) - current:
        (folder / name).unlink(missing_ok=True)
    write_json(folder / _LIST, sorted(current))


def _listed(folder: Path) -> set[str]:
    """Return the names that the last report listed, without any that is not a figure or table of a report."""
    try:
        names = json.loads((folder / _LIST).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return set()
    listed = names if isinstance(names, list) else []
    return {name for name in listed if isinstance(name, str) and _FILE.fullmatch(name)}


def _typeset(document: Document, path: Path, say: Words) -> str | None:
    """Write the PDF and return None, or remove that of an earlier report and return the reason."""
    reason = None
    if not pdf.available():
        reason = say("no_typst")
    elif document.language == "zh" and pdf.cjk_font() is None:
        reason = say("no_cjk")
    else:
        try:
            pdf.write_pdf(document, path)
        except RuntimeError as error:  # The base class of typst's errors.
            reason = say("pdf_failed", why=str(error).splitlines()[0])
    if reason is not None:
        path.unlink(missing_ok=True)
    return reason


def watch(
    paths: Sequence[str | PathLike[str]],
    out: str | PathLike[str],
    seconds: float,
    on_report: Callable[[Report | None], None],
    **options: Any,
) -> Report:
    """Write the report whenever a record changed or a run died, and return the last one when no run is in progress.

    `on_report` is called with each report, and with None while there are no runs yet. `options` go to `write_report`.
    """
    last_stamps: object = None
    running: tuple[Attempt, ...] = ()
    while True:
        new_stamps = stamps(paths)
        # A killed run changes no file, so its process is checked as well.
        if new_stamps != last_stamps or not all(is_alive(run.path, run.status) for run in running):
            last_stamps, running = new_stamps, ()
            try:
                report = write_report(paths, out, refresh=max(2, round(seconds)), **options)
            except NoRunsError:
                on_report(None)
            else:
                on_report(report)
                running = report.analysis.running
                if not running:
                    return write_report(paths, out, **options)  # This page does not reload itself.
        time.sleep(seconds)


def stamps(paths: Sequence[str | PathLike[str]]) -> tuple[tuple[str, int, int], ...]:
    """Return name, size and time of the records below some folders: equal as long as nothing was written."""
    names = ("config.json", "metrics.jsonl", "result.json", "status.json")
    files = []
    for path in paths:
        for name in names:
            for file in Path(path).rglob(name):
                try:
                    status = file.stat()
                except FileNotFoundError:  # It is being replaced right now.
                    continue
                files.append((str(file), status.st_size, status.st_mtime_ns))
    return tuple(sorted(files))
