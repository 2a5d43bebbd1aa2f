"""Show what the arms of a setup wrote: the scores of their texts, and some texts side by side."""

from __future__ import annotations

from statistics import fmean

from ..analysis import Analysis
from ..analysis.analyse import cell_to_show
from ..analysis.arms import Setup
from ..analysis.run import Run, finite
from ..runs.schema import Samples
from .document import Block, Cell, Heading, Paragraph, Table
from .sections import handles
from .words import Words

# Prompts of which a text of every arm is shown.
_PROMPTS = 3


def sampled_texts(analysis: Analysis, setup: Setup, number: int, say: Words) -> list[Block]:
    """Return the scores of the arms' texts, and their first texts for some prompts; nothing where no run has any.

    Texts that were sampled in another way than the first run's, or from other prompts, are left out.
    """
    arms = [(arm.method, cell_to_show(analysis, setup, arm)[1]) for arm in setup.arms]
    way = next((_way(run.samples) for _, runs in arms for run in runs if run.samples is not None), None)
    if way is None:
        return []
    written = {method: [run for run in runs if run.samples and _way(run.samples) == way] for method, runs in arms}
    written = {method: runs for method, runs in written.items() if runs}
    blocks: list[Block] = [Heading(say("samples"), 3, f"samples-{number}"), _scores(analysis, written, number, say)]
    texts = {method: min(runs, key=lambda run: run.seed).samples for method, runs in written.items()}
    for place in range(min(_PROMPTS, len(way.prompts))):
        table = Table(f"{number}-samples-{place + 1}", say.all("col_method", "col_text"))
        for method, samples in texts.items():
            assert samples is not None
            table.add(Cell(method, code=True), " ".join(samples.prompts[place].texts[0].split()))
        blocks += [Paragraph(say("samples_prompt", prompt=" ".join(way.prompts[place].prompt.split()))), table]
    return blocks


def _way(samples: Samples) -> Samples:
    """Return how texts were sampled: their record without what depends on the model."""
    prompts = [prompt.model_copy(update={"texts": len(prompt.texts)}) for prompt in samples.prompts]
    return samples.model_copy(update={"model": "", "step": None, "scores": None, "prompts": prompts})


def _scores(analysis: Analysis, written: dict[str, list[Run]], number: int, say: Words) -> Table:
    """Return the table of scores, each the mean over an arm's runs."""
    columns = ["col_method", "col_seeds", *(f"col_distinct_{n}" for n in (1, 2, 3)), "col_repeated", "col_self_bleu"]
    table = Table(f"{number}-samples", say.all(*columns, "col_judge", "col_runs"), numeric=tuple(range(1, 8)))
    for method, runs in written.items():
        scores = [run.samples.scores for run in runs if run.samples is not None]
        shares = [[score.distinct[n] for score in scores] for n in range(3)] + [[score.repetition for score in scores]]
        others = [score.self_bleu for score in scores], [score.judge_perplexity for score in scores]
        table.add(
            Cell(method, code=True),
            str(len(runs)),
            *(_mean(values, 100, " %") for values in shares),
            *(_mean(list(values), 1, "") for values in others),
            Cell("", handles(analysis, tuple(runs))),
        )
    return table


def _mean(values: list[float | None], factor: float, unit: str) -> str:
    known = [value for value in map(finite, values) if value is not None]
    return f"{factor * fmean(known):.1f}{unit}" if known else "–"
