"""Commands about results: report, compare."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from . import completion
from .terminal import echo, errors

Language = Annotated[str, typer.Option("--lang", help="en or zh.", autocompletion=completion.languages)]


def report(
    runs: Annotated[
        list[Path], typer.Argument(help="Run folders, or folders above them; also saved oelm bench --json output.")
    ],
    out: Annotated[Path, typer.Option("--out", "-o", help="The folder to write the report to.")],
    lang: Language = "en",
    title: Annotated[str | None, typer.Option(help="The report's title.")] = None,
    hypotheses: Annotated[
        Path | None, typer.Option(help="A YAML file with your own hypotheses, in addition to the built-in ones.")
    ] = None,
    plan: Annotated[
        Path | None, typer.Option(help="The plan of a study: its hypotheses come first, all else is descriptive.")
    ] = None,
    plan_any: Annotated[
        bool, typer.Option("--plan-any", help="With --plan: use runs made before it or under another version, too.")
    ] = False,
    formats: Annotated[str, typer.Option(help="One or more of md,html,pdf.")] = "md,html,pdf",
    watch: Annotated[bool, typer.Option("--watch", help="Rewrite the report while runs are in progress.")] = False,
    every: Annotated[float, typer.Option(min=0.2, help="With --watch: seconds between checks.")] = 10.0,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print no summary.")] = False,
) -> None:
    """Report what runs show: summary, comparisons with intervals, hypotheses, figures; as Markdown, HTML and PDF."""
    with errors():
        from ..errors import AnalysisError
        from ..lab.confirm import load_study
        from ..report.words import words
        from ..report.write import Report, write_report
        from ..report.write import watch as follow
        from .outcome import summary_lines

        say = words(lang)
        format_names = [name.strip() for name in formats.split(",") if name.strip()]
        if plan_any and plan is None:
            raise AnalysisError("--plan-any says which runs a plan may use: name it with --plan")
        options: dict[str, Any] = {"language": lang, "title": title, "formats": format_names, "hypotheses": hypotheses}
        options |= {} if plan is None else {"study": load_study(plan), "any_version": plan_any}

        def print_refresh(latest: Report | None) -> None:
            if latest is None:
                echo(say("waiting"))
                return
            counts = {"done": len(latest.analysis.runs), "running": len(latest.analysis.running)}
            echo(say("refreshed", **counts))

        if watch:
            echo(say("watching", seconds=f"{every:g}"))
            try:
                written = follow(runs, out, every, print_refresh, **options)
            except KeyboardInterrupt:
                sys.exit(130)
        else:
            written = write_report(runs, out, **options)
    if not quiet:
        echo("\n".join([*summary_lines(written.analysis, lang), ""]))
    for problem in written.problems:
        echo(f"oelm: {problem}", fg="yellow", err=True)
    for path in written.files:
        if path.parent == out:
            echo(say("wrote", path=path))


def compare(
    run_a: Annotated[Path, typer.Argument(help="A run's folder.", autocompletion=completion.runs)],
    run_b: Annotated[
        Path, typer.Argument(help="The run to compare it with, such as the baseline.", autocompletion=completion.runs)
    ],
    lang: Language = "en",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Compare two finished runs: every figure, its change, and the settings in which they differ."""
    with errors():
        from ..analysis import load_run
        from ..report.words import words
        from .comparison import compare_text, require_same_task

        run, reference = load_run(run_a), load_run(run_b)
        if as_json:
            from ..analysis.compare import compare_runs
            from ..report.tables import comparison_data, slices_data

            require_same_task(run, reference, words(lang))
            comparison = compare_runs(run, reference)
            echo(json.dumps(comparison_data(comparison) | slices_data(comparison), indent=2, ensure_ascii=False))
        else:
            echo(compare_text(run, reference, lang))
