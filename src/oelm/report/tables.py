"""Write results.csv and results.json, and every table of a report as CSV and LaTeX."""

from __future__ import annotations

import csv
import io
from dataclasses import asdict
from typing import Any

from .. import __version__
from ..analysis import Analysis, Run
from ..analysis.compare import Comparison
from ..analysis.slices import TEXTS, slice_gaps
from ..analysis.stats import Estimate
from ..base.files import to_json
from ..base.text import spreadsheet_safe
from .document import Cell, Table, spans
from .plan import plan_data

FORMAT = 1
_FIGURES = (
    *(
        "val_loss",
        "perplexity",
        "best_perplexity",
        "test_perplexity",
        "masked_perplexity",
        "best_masked_perplexity",
        "test_masked_perplexity",
        "bits_per_byte",
        "accuracy",
        "best_accuracy",
        "macro_f1",
    ),
    *("matthews", "exact_match", "token_accuracy", "chrf", "bleu"),
    *("steps", "tokens", "epochs", "total", "trainable", "frozen"),
    *("frozen_share", "step_seconds", "tokens_per_second", "seconds", "gpu_hours", "peak_memory"),
)


def results_csv(analysis: Analysis) -> str:
    """Return results.csv: a line for every run, counted or not."""
    names = ["run", "state", "reason", "task", "dataset", "experiment", "method", "learning_rate", "seed", "id"]
    rows: list[dict[str, Any]] = [_row(analysis, run) for run in analysis.runs]
    for item in analysis.left_out:
        about = {"method": item.method, "seed": item.seed, "path": str(item.path)}
        rows.append({"state": item.kind, "reason": item.reason, **about})
    for run in analysis.running:
        rows.append({"state": "running", "method": run.method, "seed": run.seed, "path": str(run.path)})
    text = io.StringIO()
    writer = csv.DictWriter(text, [*names, "device", *_FIGURES, "path"], lineterminator="\n")
    writer.writeheader()
    writer.writerows({key: spreadsheet_safe(value) for key, value in row.items()} for row in rows)
    return text.getvalue()


def results_json(analysis: Analysis) -> str:
    """Return results.json: everything that the report shows, as data."""
    content = {
        "format": FORMAT,
        "oelm": __version__,
        "runs": [
            {**_row(analysis, run), "flops_per_token": run.result.flops_per_token, **_scores(run)}
            for run in analysis.runs
        ],
        "running": [str(run.path) for run in analysis.running],
        "left_out": [
            {"path": str(item.path), "kind": item.kind, "reason": item.reason, "method": item.method, "seed": item.seed}
            for item in analysis.left_out
        ],
        "comparisons": [
            _comparison(analysis, comparison) | slices_data(comparison) for comparison in analysis.comparisons
        ],
        "on_test_text": [_comparison(analysis, comparison) for comparison in analysis.judged],
        **({} if analysis.confirmed is None else {"plan": plan_data(analysis.confirmed)}),
        "equal_rates": [_comparison(analysis, comparison) for comparison in analysis.equal],
        "step_times": [_comparison(analysis, comparison) for comparison in analysis.times],
        "hypotheses": [
            {
                "id": verdict.hypothesis.id,
                "verdict": verdict.verdict,
                "scenario": verdict.scenario,
                "rule": verdict.hypothesis.rule.model_dump(exclude_none=True),
                "found": _estimate(verdict.estimate),
                "p": verdict.p,
                "p_holm": verdict.adjusted,
                "dataset": verdict.setup.dataset if verdict.setup else None,
                "notes": [{"code": note.code, **dict(note.values)} for note in verdict.notes],
                "runs": [analysis.handle(run) for run in verdict.runs],
            }
            for verdict in analysis.verdicts
        ],
        "published": [
            {
                "id": replication.experiment.id,
                "metric": replication.metric,
                "published": replication.value,
                "measured": _estimate(replication.measured),
                "published_change": replication.published_change,
                "measured_change": _estimate(replication.measured_change),
                "verdict": replication.verdict,
                "stand_in": replication.stand_in,
                "setup": [asdict(item) for item in replication.differs],
                "runs": [analysis.handle(run) for run in replication.runs],
            }
            for replication in analysis.replications
        ],
        "bench": [
            {"path": str(bench.path), "rows": [row.model_dump(exclude_unset=True) for row in bench.rows]}
            for bench in analysis.benches
        ],
    }
    return to_json(content, indent=1, ensure_ascii=False) + "\n"


def _row(analysis: Analysis, run: Any) -> dict[str, Any]:
    about = {
        "run": analysis.handle(run),
        "state": "finished",
        "task": run.task.name,
        "dataset": run.dataset,
        "experiment": run.experiment,
        "method": run.method,
        "learning_rate": run.rate,
        "seed": run.seed,
        "id": run.id,
        "device": run.environment.hardware,
        "path": str(run.path),
    }
    return about | {name: value for name in _FIGURES if (value := run.figure(name)) is not None}


def _scores(run: Run) -> dict[str, Any]:
    """Return a run's scores on tasks of lm-eval, if it has any, without those of single questions."""
    tasks = {task.key: task for task, _ in run.scores.values()}
    single = {"metrics": {"__all__": {"items", "weights"}}}
    return {"downstream": [task.model_dump(exclude=single) for task in tasks.values()]} if tasks else {}


def _comparison(analysis: Analysis, comparison: Comparison) -> dict[str, Any]:
    return {
        **comparison_data(comparison),
        "pairs": [[analysis.handle(a), analysis.handle(b)] for a, b in comparison.pairs],
    }


def comparison_data(comparison: Comparison) -> dict[str, Any]:
    """Return a comparison as data; its runs are named by their folders."""
    return {
        "dataset": comparison.setup.dataset,
        "setup": dict(comparison.setup.apart),
        "measure": comparison.measure.name,
        "arm": comparison.arm,
        "reference": comparison.reference,
        "basis": comparison.basis,
        "learning_rate": comparison.rate,
        "reference_learning_rate": comparison.reference_rate,
        "grid": list(comparison.grid),
        "n": comparison.n,
        "ratio": _estimate(comparison.ratio),
        "difference": _estimate(comparison.difference),
        "over_texts": comparison.over_texts,
        "p_holm": comparison.adjusted,
        "p_alike_holm": comparison.alike,
        "confounds": [asdict(item) for item in comparison.confounds],
        "cautions": [asdict(item) for item in comparison.cautions],
        "notes": [{"code": note.code, **dict(note.values)} for note in comparison.notes],
        "pairs": [[str(a.path), str(b.path)] for a, b in comparison.pairs],
    }


def slices_data(comparison: Comparison) -> dict[str, Any]:
    """Return a comparison's differences in the slices of each text, as data; nothing where its runs have none."""
    texts = {text: [asdict(gap) for gap in slice_gaps(comparison, text)] for text in TEXTS}
    recorded = {text: gaps for text, gaps in texts.items() if gaps}
    return {"slices": recorded} if recorded else {}


def _estimate(estimate: Estimate | None) -> dict[str, Any] | None:
    return asdict(estimate) if estimate is not None else None


def table_csv(table: Table) -> str:
    """Return a table as CSV."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(table.columns)
    writer.writerows([[_plain(cell) for cell in row] for row in table.rows])
    return text.getvalue()


def table_latex(table: Table) -> str:
    """Return a table for a paper, with the rules of booktabs; runs are named by their handles."""
    columns = "".join("r" if index in table.numeric else "l" for index in range(len(table.columns)))
    header = " & ".join(map(latex, table.columns)) + r" \\"
    lines = [rf"\begin{{tabular}}{{{columns}}}", r"\toprule", header, r"\midrule"]
    for row in table.rows:
        cells = (rf"\texttt{{{latex(cell.text)}}}" if cell.code else latex(_plain(cell)) for cell in row)
        lines.append(" & ".join(cells) + r" \\")
    lines += [r"\bottomrule", r"\end{tabular}"]
    return f"% {table.name}; needs \\usepackage{{booktabs}}\n" + "\n".join(lines) + "\n"


def latex(text: str) -> str:
    """Return text in which the special characters of LaTeX are escaped."""
    names = {"\\": "backslash", "~": "asciitilde", "^": "asciicircum", "<": "less", ">": "greater", "|": "bar"}
    special = {char: rf"\text{name}{{}}" for char, name in names.items()}
    special |= {"−": "$-$", "–": "--", "≤": r"$\leq$", "≥": r"$\geq$", "→": r"$\rightarrow$"}
    special |= {char: f"\\{char}" for char in "&%$#_{}"}
    return "".join(special.get(char, char) for char in " ".join(text.split()))


def _plain(cell: Cell) -> str:
    return f"{spreadsheet_safe(cell.text)} {' '.join('–'.join(span) for span in spans(cell.runs))}".strip()
