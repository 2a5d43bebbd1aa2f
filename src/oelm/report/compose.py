"""Compose the document of a report from an analysis: its sections, tables and figures, in reading order."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from .. import __version__
from ..analysis import Analysis, Run
from ..analysis.analyse import cell_to_show, mean_of
from ..analysis.arms import Setup
from ..analysis.compare import MARGINS, Comparison
from ..analysis.run import finite
from ..analysis.stats import ALPHA, estimate
from . import numbers
from .chart_choice import setup_figures
from .charts import Styles
from .document import Block, Bullets, Cell, Document, Heading, Paragraph, Table
from .downstream import downstream_blocks
from .overview import overview
from .plan import marked_descriptive, plan_section
from .sampled import sampled_texts
from .sections import (
    handles,
    hypotheses_section,
    published_section,
    reading_section,
    relative,
    runs_of,
    runs_section,
    times_section,
)
from .sentences import count_text, setting_text, setup_name, shared_notes, short_conclusion
from .slices import slice_blocks
from .words import Words, words


def compose(analysis: Analysis, out: Path, language: str = "en", title: str | None = None) -> Document:
    """Return the document of a report; its links to the folders of runs are relative to the folder `out`."""
    say = words(language)
    links = {analysis.handle(run): relative(run.path, out) for run in analysis.runs}
    methods = [arm.method for group in analysis.groups for setup in group.setups for arm in setup.arms]
    styles = Styles(methods)
    blocks = overview(analysis, styles, say)
    for number, setup in enumerate((setup for group in analysis.groups for setup in group.setups), start=1):
        blocks += _setup(analysis, setup, number, styles, say)
    blocks += hypotheses_section(analysis, say)
    blocks += published_section(analysis, say)
    blocks += times_section(analysis, out, say)
    if analysis.confirmed is not None:
        blocks = [*plan_section(analysis, styles, say), *marked_descriptive(blocks, say)]
    blocks += runs_section(analysis, out, say)
    blocks += reading_section(analysis, say)
    if title is None:
        datasets = {group.dataset for group in analysis.groups}
        title = say("title_of", dataset=datasets.pop()) if len(datasets) == 1 else say("title")
    paths = [run.path.resolve() for run in analysis.runs]
    folders = relative(Path(os.path.commonpath(paths)), out) if paths else "–"
    runs = count_text("run", len(analysis.runs), say)
    footer = say("made_by", version=__version__, runs=runs, folders=folders)
    return Document(title, language, blocks, footer, links)


def _setup(analysis: Analysis, setup: Setup, number: int, styles: Styles, say: Words) -> list[Block]:
    blocks: list[Block] = [
        Heading(say("headed", head=say("results"), text=setup_name(setup, say)), 2, f"results-{number}"),
        Paragraph(settings(setup, say), tone="muted"),
        arms_table(analysis, setup, number, say),
    ]
    figures, missing = setup_figures(analysis, setup, number, styles, say)
    comparisons = analysis.of(setup)
    if comparisons:
        blocks.append(Heading(say("comparisons"), 3, f"comparisons-{number}"))
        blocks.append(comparison_table(analysis, list(comparisons), f"{number}-comparisons", say))
        blocks += notes(comparisons, say)
        blocks += slice_blocks(analysis, comparisons, number, say)
    blocks += judged_on_test(analysis, setup, f"{number}-test", say)
    if figures:
        blocks += [Heading(say("figures"), 3, f"figures-{number}"), *figures]
    equal = [comparison for comparison in analysis.equal if comparison.setup is setup]
    if len(equal) > len(comparisons):
        blocks.append(Heading(say("equal_rates"), 3, f"equal-{number}"))
        blocks.append(comparison_table(analysis, equal, f"{number}-equal-rates", say, tested=False))
    blocks += _other_splits(analysis, setup, number, say)
    blocks += downstream_blocks(analysis, setup, number, say)
    blocks += sampled_texts(analysis, setup, number, say)
    if missing:
        text = say("headed", head=say("missing"), text=say("and_then").join(say.all(*missing)))
        blocks.append(Paragraph(text, tone="muted"))
    return blocks


def judged_on_test(analysis: Analysis, setup: Setup, name: str, say: Words) -> list[Block]:
    """Return the comparisons of a setup by the text that chose nothing, with intervals over seeds and over texts."""
    judged = [comparison for comparison in analysis.judged if comparison.setup is setup]
    if not judged:
        return []
    return [Paragraph(say("judged_intro")), comparison_table(analysis, judged, name, say)]


def notes(comparisons: Sequence[Comparison], say: Words) -> list[Block]:
    """Return what a reader must know about these comparisons, each note once, with the arms that it is about.

    A note on confounded comparisons has the same tone as they have in their table.
    """
    items = [
        Cell(text, tone="" if any(comparison.sound for comparison in about) else "open")
        for text, about in shared_notes(comparisons, say)
    ]
    return [Bullets(items)] if items else []


def _other_splits(analysis: Analysis, setup: Setup, number: int, say: Words) -> list[Block]:
    """Return the results on other splits than the validation data, such as MNLI mismatched or a test split."""
    name = setup.measure.name
    columns = ["col_method", "col_split", "col_rate", "col_seeds", f"m_{name}", "col_interval"]
    columns += ["col_step_of", "col_runs"]
    caption = say("other_splits_about")
    table = Table(f"{number}-other-splits", say.all(*columns), numeric=(2, 3, 4, 5, 6), caption=caption)
    for arm in setup.arms:
        rate, runs = cell_to_show(analysis, setup, arm)
        splits = dict.fromkeys(name for run in runs for name in run.result.evaluations)
        for split in splits:
            figures = [run.result.evaluations[split] for run in runs if split in run.result.evaluations]
            values = [value for validation in figures if (value := finite(getattr(validation, name, None))) is not None]
            if values:
                mean = estimate(values)
                table.add(
                    Cell(arm.method, code=True),
                    split,
                    numbers.rate(rate),
                    str(mean.n),
                    numbers.figure(name, mean.mean),
                    numbers.bounds(name, mean, say),
                    _span([validation.step for validation in figures]),
                    Cell("", handles(analysis, runs)),
                )
    return [Heading(say("other_splits"), 3, f"other-splits-{number}"), table] if table.rows else []


def _span(steps: list[int]) -> str:
    """Return the lowest and the highest of some steps as text; once when they are the same."""
    return " – ".join(f"{step:,}" for step in sorted({min(steps), max(steps)})) if steps else "–"


def settings(setup: Setup, say: Words) -> str:
    """Return the most important settings of a setup in one line."""
    run, shared = setup.runs[0], dict(setup.settings)
    # The name of a model does not show a changed size.
    fields = [name for name in shared if name.startswith("model.fields.")]
    names = ("model.name", *fields, "train.batch_size", "train.max_steps", "train.epochs", "data.sequence_length")
    values = [setting_text(name, shared[name], say) for name in names if shared.get(name) is not None]
    return " · ".join([*values, run.environment.hardware])


def arms_table(analysis: Analysis, setup: Setup, number: int, say: Words) -> Table:
    """Return the table of a setup's arms: metrics, trainable parameters and step time at the rate shown for each."""
    measure = setup.measure.name
    best = f"best_{measure}" if measure in ("perplexity", "masked_perplexity", "accuracy") else None
    optional = ("bits_per_byte", "macro_f1", "matthews", "token_accuracy", "chrf", "bleu")
    further = [best] if best else []
    further += [name for name in optional if any(run.figure(name) is not None for run in setup.runs)]
    columns = ["col_method", "col_rate", "col_seeds", f"m_{measure}", "col_interval"]
    columns += [*(f"m_{name}" for name in further), "col_trainable", "col_frozen", "col_step", "col_runs"]
    captions = [f"* {say('note_times_doubtful')}"] if any(run.times_doubt for run in setup.runs) else []
    means = [mean_of(cell_to_show(analysis, setup, arm)[1], setup.measure) for arm in setup.arms]
    if any(mean is not None and mean.spread and mean.low is None for mean in means):
        captions.append(say("note_below_zero"))
    if any(arm.lost_at(cell_to_show(analysis, setup, arm)[0]) for arm in setup.arms):
        captions.append(say("seeds_left_note"))
    numeric, caption = tuple(range(1, len(columns) - 1)), say("and_then").join(captions)
    table = Table(f"{number}-arms", say.all(*columns), numeric=numeric, caption=caption)
    for arm in setup.arms:
        rate, runs = cell_to_show(analysis, setup, arm)
        step = mean_of(runs, "step_seconds")
        doubt = "*" if any(run.times_doubt for run in runs) else ""
        lost = len(arm.lost_at(rate))
        table.add(
            Cell(arm.method, code=True),
            numbers.rate(rate),
            say("seeds_left", left=len(runs), all=len(runs) + lost) if lost else str(len(runs)),
            _mean_text(runs, measure),
            numbers.bounds(measure, mean_of(runs, measure), say),
            *(_mean_text(runs, name) for name in further),
            numbers.figure("trainable", runs[0].figure("trainable")),
            numbers.figure("frozen_share", runs[0].figure("frozen_share")),
            f"{1000 * step.mean:.2f}{doubt}" if step else "–",
            Cell("", handles(analysis, runs)),
        )
    return table


def _mean_text(runs: tuple[Run, ...], name: str) -> str:
    mean = mean_of(runs, name)
    return numbers.figure(name, mean.mean if mean else None)


def comparison_table(
    analysis: Analysis, comparisons: list[Comparison], name: str, say: Words, tested: bool = True
) -> Table:
    """Return the table of comparisons by one measure. With `tested` False it has no conclusions and p-values."""
    measure = comparisons[0].measure
    left_out = set() if tested else {"col_reading", "col_p", "col_alike"}
    has_bootstrap = any(numbers.bootstrap_bounds(comparison) != "–" for comparison in comparisons)
    left_out |= set() if has_bootstrap else {"col_bootstrap"}
    left_out |= set() if any(comparison.over_texts for comparison in comparisons) else {"col_texts"}
    left_out |= {"col_difference"} if measure.points else set()
    left_out |= set() if measure.name in MARGINS else {"col_alike"}
    rows = [
        {key: cell for key, cell in _comparison_cells(comparison, analysis, say).items() if key not in left_out}
        for comparison in comparisons
    ]
    keys = list(rows[0])
    margin = numbers.margin(measure.name, say) if measure.name in MARGINS else ""
    columns = [say(key, margin=margin) if key == "col_alike" else say(key) for key in keys]
    numeric = tuple(range(keys.index("col_rate"), len(keys) - 1))
    return Table(name, columns, [list(row.values()) for row in rows], numeric)


def _comparison_cells(comparison: Comparison, analysis: Analysis, say: Words) -> dict[str, Cell]:
    """Return the cells of a comparison by the key of their column."""
    rates = dict.fromkeys((comparison.rate, comparison.reference_rate))  # equal rates are shown once
    word, tone = short_conclusion(comparison, say)
    return {
        "col_method": Cell(comparison.arm, code=True),
        "col_against": Cell(comparison.reference, code=True),
        "col_reading": Cell(word, tone=tone),
        "col_basis": Cell(say(f"basis_{comparison.basis if comparison.sound else 'confounded'}_short")),
        "col_rate": Cell(" / ".join(map(numbers.rate, rates))),
        "col_seeds": Cell(str(comparison.n)),
        "col_change": Cell(numbers.change(comparison, say)),
        "col_interval": Cell(numbers.change_range(comparison, say)),
        "col_bootstrap": Cell(numbers.bootstrap_bounds(comparison)),
        "col_texts": Cell(numbers.bounds_over_texts(comparison)),
        "col_difference": Cell(numbers.signed(comparison.difference.mean, 3) if comparison.difference else "–"),
        "col_p": Cell(numbers.p_value(comparison.adjusted)),
        "col_alike": Cell(_alike(comparison, say)),
        "col_runs": Cell("", handles(analysis, runs_of(comparison))),
    }


def _alike(comparison: Comparison, say: Words) -> str:
    if comparison.alike is None:
        return "–"
    return f"{say('yes' if comparison.alike < ALPHA else 'no')} (p {numbers.p_value(comparison.alike)})"
