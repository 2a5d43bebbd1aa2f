"""What a file of questions says about arms and the tables that compare them, and the runs that it finds for them.

An arm names folders of runs or looks. One whose runs are not there, or lack what a table shows, is missing, and is
named with the command that makes them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Literal

from ..analysis import AnalysisError, Run
from ..analysis.contrast import ChosenRuns, choose_runs
from ..analysis.slices import Text
from ..base.strict import Strict
from ..runs.looks import Look
from ..runs.schema import read


class ChosenArm(Strict, refusal=AnalysisError):
    """Runs under a name, `runs` and `looks` as patterns of folders, and the command that makes them."""

    label: str
    runs: tuple[str, ...] = ()
    looks: tuple[str, ...] = ()
    command: str


class Row(Strict, refusal=AnalysisError):
    """An arm, the one that it is compared with if that is not the table's, and the measure if not the task's own."""

    arm: str
    against: str | None = None
    measure: str | None = None


class _ContrastTable(Strict, refusal=AnalysisError):
    title: str
    rows: tuple[Row, ...]
    against: str | None = None


class SlicesTable(_ContrastTable, refusal=AnalysisError):
    """The difference of the loss in slices, each named as a part and a slice: `recall hit`, `frequency hit rare`."""

    text: Text = "validation"
    slices: tuple[str, ...]


class ChangesTable(_ContrastTable, refusal=AnalysisError):
    """The change of a measure over a whole text or task."""


class ProbesTable(Strict, refusal=AnalysisError):
    """Right answers on generated tasks, and the step from which on a task is learned.

    `command` makes what is missing: {arms} and {tasks} stand for the names of arms and for options that name tasks.
    """

    title: str
    arms: tuple[str, ...]
    tasks: tuple[str, ...]
    command: str


class HeadsTable(Strict, refusal=AnalysisError):
    """What the heads of trained models look at: for each figure and layer the head with most of it."""

    title: str
    arms: tuple[str, ...]
    figures: tuple[Literal["previous", "itself", "first", "prefix_matching", "induction", "entropy"], ...]


@dataclass
class Sources:
    """The arms of a file, the folder where their patterns begin, and what was read and what was missing so far."""

    root: Path
    arms: Mapping[str, ChosenArm]
    used: set[Path] = field(default_factory=set)
    missing: dict[tuple[str, str], list[str]] = field(default_factory=dict)

    def arm(self, name: str) -> ChosenArm:
        if name not in self.arms:
            raise AnalysisError(f"no arm {name!r}; there are: {', '.join(self.arms)}")
        return self.arms[name]

    def folders(self, patterns: Sequence[str]) -> list[Path]:
        """Return the folders that match, each once, in the order of the patterns."""
        return list(dict.fromkeys(chain.from_iterable(sorted(self.root.glob(pattern)) for pattern in patterns)))

    def chosen(self, name: str, suitable: Callable[[Run], bool]) -> ChosenRuns:
        """Return an arm's runs that are suitable."""
        arm = self.arm(name)
        chosen = choose_runs(arm.label, self.folders(arm.runs), suitable)
        self.used |= {run.path for run in chosen.runs}
        return chosen

    def runs(self, name: str, what: str, suitable: Callable[[Run], bool]) -> ChosenRuns:
        """Return an arm's runs that are suitable, which `what` names, and note the arm as missing without any."""
        chosen = self.chosen(name, suitable)
        if not chosen.runs:
            self.miss(self.arm(name), f"no {what}" if chosen.unsuitable else "no runs")
        return chosen

    def looks(self, name: str) -> list[Look]:
        """Return what `oelm look` found for an arm, and note the arm as missing where there is nothing."""
        arm = self.arm(name)
        files = [folder / "look.json" for folder in self.folders(arm.looks) if (folder / "look.json").is_file()]
        self.used |= {file.parent for file in files}
        if not files:
            self.miss(arm, "no look")
        return [read(file, Look) for file in files]

    def miss(self, arm: ChosenArm, why: str, command: str | None = None) -> None:
        """Note that an arm lacks something."""
        labels = self.missing.setdefault((why, command or arm.command), [])
        if arm.label not in labels:
            labels.append(arm.label)
