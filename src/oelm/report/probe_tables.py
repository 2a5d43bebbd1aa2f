"""Tables of what forms of attention can learn, and of what the heads of trained models look at."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from statistics import fmean, median

from ..analysis import Run
from ..analysis.analyse import mean_of
from ..analysis.contrast import LEARNED, learned_at, other_differences
from ..config import GENERATED
from ..runs.looks import HeadLook, Look
from .contrast_tables import RowNotes
from .contrasts import HeadsTable, ProbesTable, Sources
from .document import Block, Cell, Table

_NONE = "–"
# Of more seeds, the table shows the median step and not that of each.
_FEW_SEEDS = 5
_FIGURES = {
    "previous": "token before",
    "itself": "itself",
    "first": "first token",
    "prefix_matching": "after earlier copies",
    "induction": "after the copy, in random tokens",
    "entropy": "least entropy",
}


def probes_blocks(spec: ProbesTable, name: str, sources: Sources) -> list[Block]:
    """Return a table of the right answers of each arm on each task, and of when it learned the task."""
    columns = ["form"]
    for task in spec.tasks:
        columns += [task, f"{100 * LEARNED:.0f} % at step"]
    table = Table(name, [*columns, "seeds"], numeric=tuple(range(1, len(columns) + 1)))
    notes, lacking = RowNotes(), dict[tuple[str, ...], list[str]]()
    references: dict[tuple[str, int], Run] = {}  # by task and seed, from which a run's sequences follow
    for arm in spec.arms:
        by_task = {task: _runs_of(arm, task, sources) for task in spec.tasks}
        lacking.setdefault(tuple(task for task, runs in by_task.items() if not runs), []).append(arm)
        counts = sorted({len(runs) for runs in by_task.values() if runs})
        if not counts:
            continue
        references = {(task, run.seed): run for task, runs in by_task.items() for run in runs} | references
        cells = [cell for runs in by_task.values() for cell in (_share(runs), _steps(runs))]
        label = sources.arm(arm).label
        table.add(label, *cells, " / ".join(map(str, counts)))
        pairs = [(run, references[task, run.seed]) for task, runs in by_task.items() for run in runs]
        notes.add(label, counts[0], (item.field for pair in pairs for item in other_differences(*pair)))
    if table.rows:
        by_name = {task: run for (task, _), run in references.items()}
        commonest = [cell for task in spec.tasks for cell in (_commonest(by_name.get(task)), "")]
        table.add(Cell("the commonest answer", strong=True), *commonest, "")
    for tasks, arms in lacking.items():
        if tasks:
            _miss(arms, tasks, spec.command, sources)
    return notes.below(spec.title, table)


def _miss(arms: Sequence[str], tasks: Sequence[str], command: str, sources: Sources) -> None:
    """Note that arms lack runs of the same tasks, with the one command that makes them."""
    options = " ".join(f"--task {task}" for task in tasks)
    for arm in arms:
        making = command.replace("{arms}", " ".join(arms)).replace("{tasks}", options)
        sources.miss(sources.arm(arm), f"no runs of {', '.join(tasks)}", making)


def _runs_of(arm: str, task: str, sources: Sources) -> tuple[Run, ...]:
    return sources.chosen(arm, lambda run: run.task.name == f"{GENERATED}{task}").runs


def _share(runs: Sequence[Run]) -> str:
    """Return the mean share of right answers with its interval."""
    mean = mean_of(runs, "accuracy") if runs else None
    if mean is None:
        return _NONE
    low, high = (None if limit is None else f"{100 * limit:.1f}" for limit in (mean.low, mean.high))
    return f"{100 * mean.mean:.1f} %" + (f" ({low} – {high})" if low != high else "")


def _steps(runs: Sequence[Run]) -> str:
    """Return for each seed the step from which it answers well, in ascending order, and how many never do."""
    if not runs:
        return _NONE
    steps = [learned_at(run) for run in runs]
    known = sorted(step for step in steps if step is not None)
    if not known:
        return "never"
    if len(known) > _FEW_SEEDS:
        return f"{median(known):,.0f} ({len(known)} of {len(steps)})"
    return ", ".join([*(f"{step:,}" for step in known), *["never"] * (len(steps) - len(known))])


def _commonest(run: Run | None) -> str:
    """Return the share of right answers that the commonest answer gets."""
    majority = None if run is None else run.result.majority
    return _NONE if majority is None else f"{100 * majority.accuracy:.1f} %"


def heads_blocks(spec: HeadsTable, name: str, sources: Sources) -> list[Block]:
    """Return a table with the head that has most of each figure and its layer: a mean over models, and their range."""
    columns = ["form", *(_FIGURES[figure] for figure in spec.figures), "models"]
    table = Table(name, columns, numeric=(len(columns) - 1,))
    for arm in spec.arms:
        looks = sources.looks(arm)
        if looks:
            cells = [_strongest(looks, figure) for figure in spec.figures]
            table.add(sources.arm(arm).label, *cells, str(len(looks)))
    return RowNotes().below(spec.title, table)


def _strongest(looks: Sequence[Look], figure: str) -> str:
    choose = min if figure == "entropy" else max
    best: list[tuple[float, int]] = []
    for look in looks:
        known = [(value, head.layer) for head in look.models[0].heads if (value := _value(head, figure)) is not None]
        if known:
            best.append(choose(known))
    if not best:
        return _NONE
    values = [value for value, _ in best]
    layer, count = Counter(layer for _, layer in best).most_common(1)[0]
    where = f"layer {layer}" if count == len(best) else f"layer {layer} in {count} of {len(best)}"
    between = "" if len(best) == 1 else f" ({min(values):.2f} – {max(values):.2f})"
    return f"{fmean(values):.2f}{between}, {where}"


def _value(head: HeadLook, figure: str) -> float | None:
    value: float | None = getattr(head, figure)
    return value
