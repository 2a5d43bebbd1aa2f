"""Arms of recorded runs, named by folder, beside a reference: what a question of docs/results.md shows of explorations.

Unlike the arms of a setup they may differ in their model, such as in the form of attention.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from ..analysis import Analysis, AnalysisError, Run
from ..analysis.load import load_runs
from ..analysis.run import Bench
from ..analysis.shown import Named, ShownArms, beside
from ..base.strict import Strict
from ..runs.confirmation import Split
from .charts import Styles
from .document import Block
from .sections import handles
from .shown import Costs, figures_of, tables_of
from .words import Words

# Returns the folders, and the files of benchmarks, that patterns name.
FoldersOf = Callable[[Sequence[str]], list[Path]]


class ArmSource(Strict, refusal=AnalysisError):
    """An arm: its name, the patterns of the folders with its runs, and its name in benchmarks of generation."""

    name: str
    runs: tuple[str, ...]
    form: str | None = None


class GroupSource(Strict, refusal=AnalysisError):
    """Arms beside a reference, judged on a split.

    `benches` are benchmarks of generation with the sizes of caches. A group that is not `drawn` has a table alone.
    """

    title: str
    judges: Split = "val"
    reference: ArmSource
    arms: tuple[ArmSource, ...]
    benches: tuple[str, ...] = ()
    drawn: bool = True


@dataclass(frozen=True)
class _Group:
    """A group as it is shown, with the cache sizes of its arms."""

    shown: ShownArms
    cache: dict[str, float]


def explored_blocks(
    sources: Sequence[GroupSource], name: str, analysis: Analysis, folders_of: FoldersOf, styles: Styles, say: Words
) -> list[Block]:
    """Return the figures and tables of the groups."""
    groups = [_group(source, analysis, folders_of) for source in sources]
    cache = {identity: size for group in groups for identity, size in group.cache.items()}
    drawn = [group.shown for source, group in zip(sources, groups, strict=True) if source.drawn]
    figures = figures_of(drawn, name, styles, say, costs=Costs(cache=cache))
    handles_of = partial(handles, analysis)
    tables = [
        tables_of([group.shown], f"{name}-{number}", say, handles_of, Costs(cache=group.cache))
        for number, group in enumerate(groups, start=1)
    ]
    return [*figures, *(block for blocks in tables for block in blocks)]


def _group(source: GroupSource, analysis: Analysis, folders_of: FoldersOf) -> _Group:
    named = [_named(arm, source, analysis, folders_of) for arm in (source.reference, *source.arms)]
    shown = beside(source.title, named[0], named[1:], source.judges)
    sizes = _cache_sizes(load_runs(folders_of(source.benches)).benches) if source.benches else {}
    forms = {arm.id: form.form for arm, form in zip(named, (source.reference, *source.arms), strict=True)}
    for form in forms.values():
        if form is not None and form not in sizes:
            raise AnalysisError(f"{source.title!r}: no benchmark of generation has the form {form!r}")
    return _Group(shown, {identity: sizes[form] for identity, form in forms.items() if form is not None})


def _named(arm: ArmSource, source: GroupSource, analysis: Analysis, folders_of: FoldersOf) -> Named:
    """Return an arm with its runs by seed; raise where two runs have one seed, or no run is of this arm."""
    folders = folders_of(arm.runs)
    runs: dict[int, Run] = {}
    for run in analysis.runs:
        if any(run.path.is_relative_to(folder) for folder in folders):
            other = runs.setdefault(run.seed, run)
            if other is not run:
                raise AnalysisError(
                    f"{source.title!r}: {arm.name!r} has two runs of seed {run.seed}: {other.path}, {run.path}"
                )
    if not runs:
        raise AnalysisError(f"{source.title!r}: {arm.name!r} has no finished run among those of the question")
    return Named(id=f"{source.title}/{arm.name}", name=arm.name, runs=dict(sorted(runs.items())))


def _cache_sizes(benches: Sequence[Bench]) -> dict[str, float]:
    """Return the bytes that each form caches for a token, in each layer."""
    rows = [row for bench in benches for row in bench.decoding if row.layers]
    return {row.arm: row.cache_bytes_per_token / (row.layers or 1) for row in rows}
