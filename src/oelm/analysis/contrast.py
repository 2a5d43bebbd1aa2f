"""Compare runs of any setups that somebody chose: forms of attention, which are settings of the model, among them.

An analysis groups runs by their settings and compares methods within a setup. Here the runs of both sides are given.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ..errors import AnalysisError
from ..runs.schema import ValLine
from .arms import MEASURES, PRIMARY, Difference, differences, group_runs
from .compare import Comparison, Side, compare_sides
from .load import load_runs
from .run import Attempt, Run, finite

# The settings that make a form of attention: what contrasts are about, and no confound of them.
FORM = "model.fields"
# The share of right answers from which on a generated task counts as learned.
LEARNED = 0.9


@dataclass(frozen=True)
class ChosenRuns:
    """The runs of one side by seed, those that failed, and how many runs lack what was asked for."""

    name: str
    by_seed: dict[int, Run]
    lost: tuple[Attempt, ...] = ()
    unsuitable: int = 0

    @property
    def runs(self) -> tuple[Run, ...]:
        return tuple(self.by_seed[seed] for seed in sorted(self.by_seed))


def choose_runs(name: str, folders: Sequence[Path], suitable: Callable[[Run], bool]) -> ChosenRuns:
    """Return the runs below the folders that are suitable: of each seed the first one, in the order of the folders.

    Raise where they were run at several learning rates: which of them is meant is not for this function to say.
    """
    if not folders:
        return ChosenRuns(name, {})
    loaded = load_runs(folders)
    order = {folder.resolve(): number for number, folder in enumerate(folders)}
    runs = sorted((*loaded.runs, *loaded.repeats), key=lambda run: (_place(run.path, order), str(run.path)))
    by_seed: dict[int, Run] = {}
    for run in runs:
        if suitable(run):
            by_seed.setdefault(run.seed, run)
    rates = sorted({run.rate for run in by_seed.values()})
    if len(rates) > 1:
        listed = ", ".join(f"{rate:g}" for rate in rates)
        raise AnalysisError(f"{name}: its runs have several learning rates ({listed}); name the folders of one")
    failed = [item.run for item in loaded.left_out if item.run is not None and item.run.seed not in by_seed]
    lost = tuple({run.seed: run for run in failed}.values())
    return ChosenRuns(name, by_seed, lost, sum(not suitable(run) for run in runs))


def _place(path: Path, order: dict[Path, int]) -> int:
    """Return the number of the first folder that holds a run."""
    resolved = path.resolve()
    return min((number for folder, number in order.items() if resolved.is_relative_to(folder)), default=len(order))


def contrast(arm: ChosenRuns, reference: ChosenRuns) -> Comparison | None:
    """Compare two sides in pairs of one seed, by the measure that their task is judged by; None without a pair.

    The fields of the form are no confounds, all others in which the runs differ are.
    """
    if not arm.by_seed.keys() & reference.by_seed.keys():
        return None
    setup = group_runs(reference.runs)[0].setups[0]
    one, other = (Side(side.name, side.runs[0].rate, side.runs, len(side.lost)) for side in (arm, reference))
    comparison = compare_sides(setup, MEASURES[PRIMARY[setup.task.kind]], one, other, "equal")
    return replace(comparison, confounds=tuple(_beside_form(comparison.confounds)))


def other_differences(run: Run, reference: Run) -> list[Difference]:
    """Return the fields beside method and form in which two runs differ, and that may change a number."""
    return _beside_form(differences(run, reference)[0])


def _beside_form(items: Iterable[Difference]) -> list[Difference]:
    return [item for item in items if item.field != FORM and not item.field.startswith(f"{FORM}.")]


def learned_at(run: Run) -> int | None:
    """Return the step of a run's first validation with LEARNED of the answers right; None where there is none."""
    shares = ((line.step, finite(line.accuracy)) for line in run.metrics if isinstance(line, ValLine))
    return next((step for step, share in shares if share is not None and share >= LEARNED), None)
