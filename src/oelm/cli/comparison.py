"""The text of `oelm compare`: two runs side by side."""

from __future__ import annotations

from collections.abc import Sequence

from rich.cells import cell_len

from ..analysis import AnalysisError, Run
from ..analysis.arms import MEASURES, Difference, downstream_measure
from ..analysis.compare import Comparison, compare_runs, of_pairs
from ..analysis.run import flop_ratio
from ..analysis.slices import TEXTS, slice_gaps
from ..report import numbers
from ..report.downstream import paired_error, same_questions
from ..report.slices import slice_name, slice_numbers
from ..report.words import Words, words
from ..runs.schema import DownstreamMetric
from .terminal import pad

# The metrics that are shown by kind of task, if both runs have them.
_METRICS = {
    "language": ("perplexity", "best_perplexity", "test_perplexity", "val_loss", "bits_per_byte"),
    "masked-language": (
        *("masked_perplexity", "best_masked_perplexity", "test_masked_perplexity"),
        *("token_accuracy", "val_loss"),
    ),
    "classification": ("accuracy", "best_accuracy", "macro_f1", "matthews", "val_loss"),
    "text2text": ("exact_match", "token_accuracy", "val_loss"),
    "generated": ("accuracy", "best_accuracy", "val_loss"),
}
# Shown for every kind of task, if both runs have them.
_COMMON = ("step_seconds", "peak_memory", "trainable", "frozen_share")


def compare_text(run: Run, reference: Run, language: str = "en") -> str:
    """Return the text of `oelm compare`: every figure of both runs, the change, and the settings that differ."""
    say = words(language)
    require_same_task(run, reference, say)
    comparison = compare_runs(run, reference)
    lines = [say("cli_two", one=_name(run), other=_name(reference)), f"  {run.path}", f"  {reference.path}", ""]
    lines += _figures(comparison, run, reference, say)
    lines += _slices(comparison, say)
    lines += ["", say("cli_one_pair"), ""]
    lines += _differences(comparison, run, reference, say)
    return "\n".join(lines)


def require_same_task(run: Run, reference: Run, say: Words) -> None:
    """Raise if two runs were trained for different tasks."""
    if run.task != reference.task:
        values = {"one": run.path, "task": run.task.name, "other": reference.path, "other_task": reference.task.name}
        raise AnalysisError(say("cli_tasks", **values))


def _figures(comparison: Comparison, run: Run, reference: Run, say: Words) -> list[str]:
    """Return the lines of the table of figures."""
    rows = []
    for name in (*_METRICS.get(run.task.kind, ("val_loss",)), *_COMMON):
        a, b = run.figure(name), reference.figure(name)
        if a is None or b is None:
            continue
        doubt = " *" if name == "step_seconds" and (run.times_doubt or reference.times_doubt) else ""
        change = numbers.change(of_pairs(comparison, MEASURES[name]), say) if name in MEASURES else ""
        rows.append((say(f"m_{name}"), numbers.figure(name, a), numbers.figure(name, b), change + doubt))
    rows += _scores(comparison, run, reference, say)
    bound = flop_ratio(run, reference)
    if bound is not None:
        rows.append((say("flop_bound"), "", "", numbers.percent(bound - 1)))
    rows.insert(0, ("", _short(run), _short(reference), say("col_change")))
    lines = _aligned(rows)
    doubtful = run.times_doubt or reference.times_doubt
    return [*lines, f"  * {say('note_times_doubtful')}"] if doubtful else lines


def _slices(comparison: Comparison, say: Words) -> list[str]:
    """Return the lines of where the difference of the loss lies, for each text that both runs have slices of."""
    lines = []
    for text in TEXTS:
        gaps = slice_gaps(comparison, text)
        if gaps:
            header = ("", *say.all("col_share", "col_reference_loss", "col_difference", "col_gap_share"))
            rows = [(slice_name(gap, say), *slice_numbers(gap)) for gap in gaps]
            lines += ["", say("heading_of", head=say(f"slices_{text}")), *_aligned([header, *rows])]
    return lines


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return rows as lines with aligned columns, all but the first to the right."""
    widths = [max(cell_len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = []
    for row in rows:
        cells = zip(row, widths, strict=True)
        padded = [pad(text, width, right=index > 0) for index, (text, width) in enumerate(cells)]
        lines.append(f"  {'  '.join(padded)}")
    return lines


def _scores(comparison: Comparison, run: Run, reference: Run, say: Words) -> list[tuple[str, str, str, str]]:
    """Return a row for each score on a task that both runs have, with its standard error over the questions.

    That of a change of shares is over pairs of answers to the same question. Scores on different questions, such as
    with another --limit, are shown without a change.
    """
    rows = []
    for name in run.scores:
        if name not in reference.scores:
            continue
        (task, metric), (_, other) = run.scores[name], reference.scores[name]
        change = say("cli_other_questions")
        if same_questions(comparison, name):
            change = numbers.change(of_pairs(comparison, downstream_measure(name, metric)), say)
            error = paired_error(metric, other)
            change += "" if error is None else f" ± {100 * error:.2f}"
        rows.append((f"{task.key} {metric.name}", _with_error(metric), _with_error(other), change))
    return rows


def _with_error(metric: DownstreamMetric) -> str:
    error = metric.standard_error
    text = numbers.score(metric, metric.value)
    return text if error is None else f"{text} ± {numbers.score(metric, error)}"


def _differences(comparison: Comparison, run: Run, reference: Run, say: Words) -> list[str]:
    """Return the lines that list the settings in which the runs differ."""
    lines = []
    if run.method != reference.method:
        lines.append(f"{say('cli_method')}: {run.method} / {reference.method}")
    if comparison.confounds:
        lines += [say("heading_of", head=say("cli_confounded")), *_fields(comparison.confounds)]
    else:
        lines.append(say("cli_same") if run.method != reference.method else say("cli_identical"))
    if comparison.cautions:
        lines += [say("heading_of", head=say("cli_cautions")), *_fields(comparison.cautions)]
    return lines


def _fields(items: tuple[Difference, ...]) -> list[str]:
    longest = max(len(item.field) for item in items)
    return [f"  {item.field:<{longest}}  {item.one}  /  {item.other}" for item in items]


def _name(run: Run) -> str:
    return f"{run.method} (seed {run.seed}, {numbers.rate(run.rate)})"


def _short(run: Run) -> str:
    return run.method if len(run.method) <= 28 else f"{run.method[:27]}…"
