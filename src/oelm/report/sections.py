"""The sections after the results: hypotheses, published figures, step times, the runs, and how to read the report."""

from __future__ import annotations

import math
import os
from pathlib import Path

from ..analysis import Analysis, Run
from ..analysis.compare import Comparison
from ..analysis.hypotheses import REFUTED, SUPPORTED, uneven_times
from ..analysis.replication import Replication
from ..analysis.run import Bench, flop_ratio
from ..analysis.stats import BOOTSTRAP_PAIRS, BOOTSTRAP_RESAMPLES, CLUSTER_RESAMPLES
from ..runs import published
from ..runs.schema import DecodeBench, StepBench
from . import numbers
from .document import Block, Bullets, Cell, Heading, Paragraph, Table
from .sentences import note_text, scenario_lines, setup_label, verdict_numbers, why_left_out
from .words import Words

_ORDER = {SUPPORTED: 0, REFUTED: 1}
_TONES = {"supported": "good", "agrees": "good", "refuted": "bad", "differs": "bad"}


def hypotheses_section(analysis: Analysis, say: Words) -> list[Block]:
    """Return the verdicts on the hypotheses, the decided ones first; those without suitable runs by reason."""
    columns = ["id", *say.all("col_verdict", "col_hypothesis", "col_rule", "col_found", "col_p")]
    table, ids_by_reason = Table("hypotheses", columns, numeric=(5,)), dict[str, list[str]]()
    for verdict in sorted(analysis.verdicts, key=lambda verdict: _ORDER.get(verdict.verdict, len(_ORDER))):
        codes = ("no_runs", "other_model", "pretrained")
        reason = next((note_text(note, say) for note in verdict.notes if note.code in codes), None)
        if reason is not None:
            ids_by_reason.setdefault(reason, []).append(verdict.hypothesis.id)
            continue
        table.add(
            verdict.hypothesis.id,
            Cell(say(verdict.verdict), tone=_TONES.get(verdict.verdict, "open")),
            verdict.hypothesis.text(say.language),
            numbers.rule(verdict.hypothesis, say),
            Cell(verdict_numbers(verdict, analysis, say), handles(analysis, verdict.runs)),
            numbers.p_value(verdict.adjusted),
        )
    blocks: list[Block] = [Heading(say("hypotheses"), 2, "hypotheses")]
    blocks += [table] if table.rows else []
    not_judged = [say("headed", head=reason, text=", ".join(ids)) for reason, ids in ids_by_reason.items()]
    blocks += [Paragraph(text, tone="muted") for text in not_judged]
    scenarios = scenario_lines(analysis, say)
    if scenarios:
        blocks += [Heading(say("scenario_title"), 3, "scenario"), *(Paragraph(line) for line in scenarios)]
    return blocks


def published_section(analysis: Analysis, say: Words) -> list[Block]:
    """Return the published figures beside the measured ones; nothing when the runs replicate none."""
    if not analysis.replications:
        return []
    columns = ["col_verdict", "col_figure", "col_published", "col_measured", "col_published_change"]
    columns = ["id", *say.all(*columns, "col_measured_change", "col_setup")]
    table, doubts = Table("published", columns, numeric=(3,)), []
    for replication in analysis.replications:
        verdict = say(replication.verdict)
        synthetic = replication.setup.runs[0].synthetic
        if synthetic or replication.stand_in:
            kind = say("note_synthetic" if synthetic else "note_stand_in")
            verdict = say("in_brackets", text=verdict, more=kind)
        limits = numbers.bounds(replication.metric, replication.measured, say)
        measured = say("in_brackets", text=numbers.figure(replication.metric, replication.measured.mean), more=limits)
        change = "–"
        if replication.comparison is not None:
            interval = numbers.interval(replication.comparison, say)
            change = say("in_brackets", text=numbers.change(replication.comparison, say), more=interval)
        metric, setup_text = say(f"m_{replication.metric}"), setup_label(replication.setup, analysis, say)
        differing = "; ".join(f"{item.field} {item.one} → {item.other}" for item in replication.differs)
        table.add(
            replication.experiment.id,
            Cell(verdict, tone=_TONES.get(replication.verdict, "open")),
            say("in_brackets", text=metric, more=setup_text) if setup_text else metric,
            numbers.figure(replication.metric, replication.value),
            Cell(measured, handles(analysis, replication.runs)),
            _published_change(replication, say),
            change,
            differing or "–",
        )
        chinese = published.load().chinese if say.language == "zh" else {}
        in_words = [chinese.get(text, text) for text in replication.experiment.doubts]
        doubts += [say("headed", head=replication.experiment.id, text=text) for text in in_words]
    blocks: list[Block] = [Heading(say("published"), 2, "published"), table]
    if doubts:
        blocks.append(Bullets([Cell(say("note_doubt", text=text)) for text in dict.fromkeys(doubts)]))
    return blocks


def _published_change(replication: Replication, say: Words) -> str:
    """Return the change that the study published, in the unit in which the measured change is given."""
    change, value = replication.published_change, replication.value
    if change is None:
        return "–"
    if value is None or replication.metric not in ("accuracy", "val_loss"):
        return numbers.percent(change)
    difference = value - value / (1 + change)
    if replication.metric == "accuracy":
        return say("points", value=numbers.signed(100 * difference, 2))
    return numbers.signed(difference, 4)


def times_section(analysis: Analysis, out: Path, say: Words) -> list[Block]:
    """Return the step times of benchmarks and of the runs themselves; nothing when there are none."""
    blocks: list[Block] = []
    for bench in analysis.benches:
        blocks += bench_blocks(bench, out, say)
    sound = [comparison for comparison in analysis.times if comparison.sound and comparison.n > 1]
    if sound:
        columns = ["col_method", "col_against", "col_seeds", "col_change", "col_interval", "col_flops", "col_runs"]
        table = Table("step-times", say.all(*columns), numeric=(2, 3, 4, 5))
        for comparison in sound:
            bound = flop_ratio(*comparison.pairs[0])
            table.add(
                Cell(comparison.arm, code=True),
                Cell(comparison.reference, code=True),
                str(comparison.n),
                numbers.change(comparison, say),
                numbers.change_range(comparison, say),
                numbers.percent(bound - 1) if bound is not None else "–",
                Cell("", handles(analysis, runs_of(comparison))),
            )
        blocks += [Paragraph(say("time_runs")), table]
        uneven = dict.fromkeys(note_text(note, say) for comparison in sound for note in uneven_times(comparison))
        blocks += [Bullets([Cell(text) for text in uneven])] if uneven else []
    unsound = [comparison for comparison in analysis.times if not comparison.sound]
    if unsound:
        fields = sorted({item.field for comparison in unsound for item in comparison.confounds})
        confounded = say("note_confounded", fields=", ".join(fields))
        reason = say("note_times_doubtful") if fields == ["timing"] else confounded
        blocks.append(Paragraph(say("time_excluded", count=len(unsound), why=reason), tone="muted"))
    if not blocks:
        return []
    return [Heading(say("step_time"), 2, "step-time"), Paragraph(say("time_intro")), *blocks]


def bench_blocks(bench: Bench, out: Path, say: Words) -> list[Block]:
    """Return what one benchmark measured, with a warning when its arms had batches of different size."""
    if bench.decoding:
        return _decoding_blocks(bench, out, say)
    columns = say.all("col_method", "col_step", "col_ratio", "col_interval", "col_flops", "col_rounds")
    table = Table(f"bench-{bench.path.stem}", columns, numeric=(1, 2, 3, 4, 5))
    blocks: list[Block] = [Paragraph(say("time_bench", file=relative(bench.path, out))), table]
    for row in bench.steps:
        times = f"{row.step_ms:.2f}", f"{row.ratio:.3f}", _bench_interval(row), f"{row.flop_bound:.3f}"
        table.add(Cell(row.arm, code=True), *times, str(row.rounds))
        if row.warning is not None:
            values = {"batch": row.batch_size, "ratio": f"{row.ratio_per_example:.3f}"}
            blocks.append(Paragraph(say("time_bench_unequal", arm=row.arm, **values)))
    return blocks


def _decoding_blocks(bench: Bench, out: Path, say: Words) -> list[Block]:
    """Return what a benchmark of generation measured: a table for each batch size and context."""
    blocks: list[Block] = []
    for batch, context in dict.fromkeys((row.batch_size, row.context) for row in bench.decoding):
        rows = [row for row in bench.decoding if (row.batch_size, row.context) == (batch, context)]
        how = say("time_compiled") if rows[0].compiled else ""
        values = {"context": f"{context:,}", "batch": batch, "how": how}
        blocks.append(Paragraph(say("time_decoding", file=relative(bench.path, out), **values)))
        setting = "" if len(rows) == len(bench.decoding) else f"-{batch}-{context}"
        blocks.append(_decoding_table(f"bench-{bench.path.stem}{setting}", rows, say))
    return blocks


def _decoding_table(name: str, rows: list[DecodeBench], say: Words) -> Table:
    columns = ["col_method", "col_token", "col_ratio", "col_interval", "col_cache", "col_cache_ratio", "col_rounds"]
    table = Table(name, say.all(*columns), numeric=tuple(range(1, len(columns))))
    for row in rows:
        # An arm that did not fit in memory has no time.
        token = "–" if row.token_ms is None else f"{row.token_ms:.2f}"
        ratio = "–" if row.ratio is None else f"{row.ratio:.3f}"
        cache = f"{row.cache_bytes_per_token:,.0f}", f"{row.cache_ratio:.3f}"
        table.add(Cell(row.arm, code=True), token, ratio, _bench_interval(row), *cache, str(row.rounds))
    return table


def _bench_interval(row: StepBench | DecodeBench) -> str:
    """Return the interval of a ratio; the reference arm has none, nor has a benchmark of one round."""
    ratio, half = row.ratio, row.ratio_95
    if ratio is None or not half or not math.isfinite(half):
        return "–"
    return f"{ratio - half:.3f} – {ratio + half:.3f}"


def runs_section(analysis: Analysis, out: Path, say: Words) -> list[Block]:
    """Return the runs in progress, those that are not counted, and those that are, each if there are any."""
    blocks = [*_running_blocks(analysis, out, say), *_left_out_blocks(analysis, out, say)]
    if not analysis.runs:
        return blocks
    blocks += [Heading(say("runs"), 2, "runs"), _runs_table(analysis, out, say)]
    runs_by_note: dict[str, list[Run]] = {}
    for run in analysis.runs:
        for note in run.notes:
            runs_by_note.setdefault(note, []).append(run)
    if runs_by_note:
        items = [Cell(note, handles(analysis, tuple(runs))) for note, runs in runs_by_note.items()]
        blocks += [Heading(say("run_notes"), 3, "run-notes"), Bullets(items)]
    return blocks


def _running_blocks(analysis: Analysis, out: Path, say: Words) -> list[Block]:
    if not analysis.running:
        return []
    columns = say.all("col_method", "col_seed", "col_step_now", "col_latest", "col_folder")
    table = Table("running", columns, numeric=(1, 2, 3))
    for run in analysis.running:
        last = next((line for line in reversed(run.metrics) if line.kind == "val"), None)
        shown = [] if last is None else [last.perplexity, last.masked_perplexity, last.accuracy, last.loss]
        latest = next((value for value in shown if value is not None), None)
        step, max_steps = (0, None) if run.status is None else (run.status.step or 0, run.status.max_steps)
        steps = run.config.train.max_steps or max_steps or "?"
        folder, shown_latest = relative(run.path, out), f"{latest:.4g}" if latest is not None else "–"
        progress = str(run.seed), f"{step} / {steps}", shown_latest
        table.add(Cell(run.method, code=True), *progress, Cell(folder, folder=folder))
    return [Heading(say("running"), 2, "running"), table]


def _left_out_blocks(analysis: Analysis, out: Path, say: Words) -> list[Block]:
    if not analysis.left_out:
        return []
    columns = say.all("col_kind", "col_method", "col_seed", "col_why", "col_folder")
    table = Table("left-out", columns, numeric=(2,))
    for item in analysis.left_out:
        folder = relative(item.path, out)
        table.add(
            Cell(say(f"kind_{item.kind}"), tone="bad"),
            Cell(item.method or "–", code=bool(item.method)),
            "–" if item.seed is None else str(item.seed),
            why_left_out(item, say),
            Cell(folder, folder=folder),
        )
    return [Heading(say("left_out"), 2, "left-out"), table]


def _runs_table(analysis: Analysis, out: Path, say: Words) -> Table:
    columns = ["col_run", "col_method", "col_rate", "col_seed", "col_figure", "col_steps", "col_device"]
    table = Table("runs", say.all(*columns, "col_id", "col_folder"), numeric=(2, 3, 4, 5))
    measures = {run: setup.measure.name for group in analysis.groups for setup in group.setups for run in setup.runs}
    folder_of_all = root(analysis)
    for run in analysis.runs:
        handle, measure = analysis.handle(run), measures[run]
        table.add(
            Cell(handle, anchor=f"run-{handle}"),
            Cell(run.method, code=True),
            numbers.rate(run.rate),
            str(run.seed),
            numbers.figure(measure, run.figure(measure)),
            numbers.figure("steps", run.figure("steps")),
            run.environment.hardware,
            Cell(run.id, code=True),
            Cell(relative(run.path, folder_of_all), folder=relative(run.path, out)),
        )
    return table


def reading_section(analysis: Analysis, say: Words) -> list[Block]:
    """Return how to read the report: what the terms mean and how the tests were done."""
    over_texts = ("read_texts",) if any(comparison.over_texts for comparison in analysis.judged) else ()
    keys = ("read_pairs", "read_ratio", *over_texts, "read_holm", "read_tost", "read_rates", "read_confounded")
    values: dict[str, dict[str, object]] = {
        "read_ratio": {"pairs": BOOTSTRAP_PAIRS, "resamples": f"{BOOTSTRAP_RESAMPLES:,}"},
        "read_texts": {"resamples": f"{CLUSTER_RESAMPLES:,}"},
    }
    items = [Cell(say(key, **values.get(key, {}))) for key in keys]
    return [Heading(say("reading"), 2, "reading"), Bullets(items)]


def runs_of(comparison: Comparison) -> tuple[Run, ...]:
    """Return the runs of a comparison, each once."""
    return tuple(dict.fromkeys(run for pair in comparison.pairs for run in pair))


def handles(analysis: Analysis, runs: tuple[Run, ...]) -> tuple[str, ...]:
    """Return the handles (R1, R2, ...) of some runs, each once."""
    return tuple(analysis.handle(run) for run in dict.fromkeys(runs))


def root(analysis: Analysis) -> Path:
    """Return the deepest folder that contains all runs, or all benchmarks when there are no runs."""
    paths = [run.path for run in (*analysis.runs, *analysis.running)] + [item.path for item in analysis.left_out]
    names = [str(path.resolve()) for path in paths or [bench.path for bench in analysis.benches]]
    return Path(os.path.commonpath(names)) if len(names) > 1 else Path(names[0])


def relative(path: Path, out: Path) -> str:
    """Return a path relative to the folder `out`."""
    return os.path.relpath(path.resolve(), out.resolve())
