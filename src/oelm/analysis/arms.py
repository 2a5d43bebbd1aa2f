"""Group runs into arms: the same task on the same data, in the same setup, trained by the same method.

group   one task on one data set                      setup   all settings but the method, the rate and the seed
arm     one method in one setup                       cell    an arm at one learning rate: its runs differ in the seed
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from typing import Any, NamedTuple

from ..runs.schema import DownstreamMetric, TaskRecord
from .run import Attempt, Run

# The methods that others are compared with: in each setup, the first of these that it has.
REFERENCES = ("baseline", "freeze-pretrained", "oelm-nofreeze", "random-nofreeze")
# Fields of environment.json that may change a number: a difference in one of these confounds a comparison.
_CONFOUNDING = ("device", "world_size", "gpu.name", "versions.oelm", "versions.torch", "versions.transformers")
# Fields of environment.json in which a difference seldom matters, but that a reader should know of.
_CAUTIONS = ("git_commit", "versions.python", "versions.numpy", "versions.tokenizers", "cpu.threads", "gpu.cuda")


@dataclass(frozen=True)
class Measure:
    """A figure that arms are compared by: with `log` by its ratio, with `points` as a share in percentage points."""

    name: str
    lower_is_better: bool
    log: bool = True
    points: bool = False


MEASURES = {
    measure.name: measure
    for measure in (
        Measure("perplexity", True),
        Measure("best_perplexity", True),
        Measure("test_perplexity", True),
        Measure("masked_perplexity", True),
        Measure("best_masked_perplexity", True),
        Measure("test_masked_perplexity", True),
        Measure("val_loss", True, log=False),
        Measure("best_val_loss", True, log=False),
        Measure("bits_per_byte", True),
        Measure("accuracy", False, log=False, points=True),
        Measure("best_accuracy", False, log=False, points=True),
        Measure("macro_f1", False, log=False, points=True),
        Measure("matthews", False, log=False),
        Measure("recall", False, log=False, points=True),
        Measure("exact_match", False, log=False, points=True),
        Measure("token_accuracy", False, log=False, points=True),
        Measure("step_seconds", True),
        Measure("steps_per_hour", False),
        Measure("seconds", True),
        Measure("peak_memory", True),
        Measure("frozen", False, log=False),
        Measure("frozen_share", False, log=False, points=True),
        Measure("trainable", True),
    )
}
TIMES = ("step_seconds", "steps_per_hour", "seconds")
# Figures that follow from the settings alone: no seed changes them, so there is nothing to test.
COUNTS = ("frozen", "frozen_share", "trainable")
# What the text that chose nothing says, by kind of task: arms are compared by it too where their runs have it.
JUDGED = {"language": "test_perplexity", "masked-language": "test_masked_perplexity"}
PRIMARY = {
    "language": "perplexity",
    "masked-language": "masked_perplexity",
    "classification": "accuracy",
    "text2text": "exact_match",
    "generated": "accuracy",
}


def downstream_measure(name: str, metric: DownstreamMetric) -> Measure:
    """Return the measure that arms are compared by on a task of lm-eval; a perplexity is compared by its ratio."""
    ratio = metric.name.endswith("perplexity")
    return Measure(name, lower_is_better=not metric.higher_is_better, log=ratio, points=metric.share)


@dataclass(frozen=True)
class Difference:
    """A field in which two runs differ, with both values as text."""

    field: str
    one: str
    other: str


@dataclass(frozen=True, eq=False)
class Arm:
    """One method in one setup: its runs by learning rate and then by seed. `lost` are the runs that failed."""

    method: str
    cells: tuple[tuple[float, tuple[Run, ...]], ...]
    lost: tuple[Attempt, ...] = ()

    @property
    def rates(self) -> tuple[float, ...]:
        """Return the learning rates of its runs, in ascending order."""
        return tuple(rate for rate, _ in self.cells)

    @property
    def runs(self) -> tuple[Run, ...]:
        return tuple(run for _, runs in self.cells for run in runs)

    def at(self, rate: float) -> tuple[Run, ...]:
        """Return the runs at a learning rate."""
        return next((runs for cell_rate, runs in self.cells if cell_rate == rate), ())

    def lost_at(self, rate: float) -> tuple[Attempt, ...]:
        """Return the runs that failed at a learning rate."""
        return tuple(run for run in self.lost if run.rate == rate)

    def by_seed(self, rate: float) -> dict[int, Run]:
        """Return the runs at a learning rate by their seeds."""
        return {run.seed: run for run in self.at(rate)}


@dataclass(frozen=True, eq=False, kw_only=True)
class Setup:
    """The settings that its arms share, and the arms.

    `apart` are the settings that tell the setups of a group apart, `others` those of the group's other setups.
    """

    task: TaskRecord
    dataset: str
    settings: tuple[tuple[str, Any], ...]
    arms: tuple[Arm, ...]
    apart: tuple[tuple[str, str], ...] = ()
    others: tuple[tuple[tuple[str, str], ...], ...] = ()

    @cached_property
    def measure(self) -> Measure:
        """Return the measure that the arms are judged by: the task's, or the loss where no run has that one."""
        name = PRIMARY[self.task.kind]
        return MEASURES[name if any(run.figure(name) is not None for run in self.runs) else "val_loss"]

    @property
    def runs(self) -> tuple[Run, ...]:
        return tuple(run for arm in self.arms for run in arm.runs)

    def arm(self, method: str) -> Arm | None:
        return next((arm for arm in self.arms if arm.method == method), None)

    @cached_property
    def reference(self) -> Arm | None:
        """Return the arm that the others are compared with, or None where the setup has none of REFERENCES."""
        return next((arm for name in REFERENCES if (arm := self.arm(name)) is not None), None)

    @property
    def stand_in(self) -> bool:
        """Return True when the data's description says that it stands in for the data of the study."""
        return "stand-in" in self.dataset.lower()


@dataclass(frozen=True, eq=False)
class Group:
    """One task on one data set, in every setup that it was run in."""

    task: TaskRecord
    dataset: str
    setups: tuple[Setup, ...]


class RunKey(NamedTuple):
    """All that identifies a run except its seed: a second run of the same key and seed is a duplicate.

    `group` is the task's kind and name and the data set, `setup` the shared settings as JSON.
    """

    group: tuple[str, str, str]
    setup: str
    method: str
    rate: float


def key_of(run: Attempt) -> RunKey:
    """Return the cell that a run belongs to."""
    group = (run.task.kind, run.task.name, run.dataset)
    return RunKey(group, json.dumps(run.shared_settings, sort_keys=True), run.method, run.rate)


# The runs of each method of a setup, and those that failed.
_Methods = dict[str, tuple[list[Run], list[Attempt]]]


def group_runs(runs: Iterable[Run], lost: Iterable[Attempt] = ()) -> tuple[Group, ...]:
    """Return runs as groups, setups, arms and cells in a fixed order; failed runs only in arms with successful ones."""
    tree: dict[tuple[str, str, str], dict[str, _Methods]] = {}
    tasks: dict[tuple[str, str, str], TaskRecord] = {}

    def members(run: Attempt) -> tuple[list[Run], list[Attempt]]:
        cell = key_of(run)
        tasks[cell.group] = run.task
        return tree.setdefault(cell.group, {}).setdefault(cell.setup, {}).setdefault(cell.method, ([], []))

    for run in runs:
        members(run)[0].append(run)
    for failed in lost:
        members(failed)[1].append(failed)
    groups = [Group(tasks[key], key[2], _setups(tasks[key], key[2], setups)) for key, setups in sorted(tree.items())]
    return tuple(group for group in groups if group.setups)


def _setups(task: TaskRecord, dataset: str, setups: dict[str, _Methods]) -> tuple[Setup, ...]:
    """Return a group's setups that have at least one arm, in the order of the settings that tell them apart."""
    settings = {key: dict(sorted(json.loads(key).items())) for key in setups}
    varying = _varying(list(settings.values()))
    apart = {key: tuple((name, _text(settings[key].get(name))) for name in varying) for key in setups}
    ordered = []
    for key in sorted(setups, key=lambda key: _order(settings[key], varying)):
        arms = _arms(setups[key])
        if arms:
            shared = tuple(settings[key].items())
            others = tuple(apart[other_key] for other_key in setups if other_key != key)
            setup = Setup(task=task, dataset=dataset, settings=shared, arms=arms, apart=apart[key], others=others)
            ordered.append(setup)
    return tuple(ordered)


def differences(one: Attempt, other: Attempt, rate: bool = True) -> tuple[list[Difference], list[Difference]]:
    """Return the fields in which two runs differ beside method and seed: those that confound a comparison, and others.

    Without `rate` the learning rates may differ: for arms that are each at the best rate of a common grid.
    """
    confounds = _differing(one.shared_settings, other.shared_settings)
    if rate and one.rate != other.rate:
        confounds.append(Difference("optimizer.learning_rate", f"{one.rate:g}", f"{other.rate:g}"))
    cautions: list[Difference] = []
    for names, differing in ((_CONFOUNDING, confounds), (_CAUTIONS, cautions)):
        for name in names:
            # On a CPU "gpu" itself is None, and "gpu.name" is missing.
            a, b = one.flat_environment.get(name), other.flat_environment.get(name)
            if a != b:
                differing.append(Difference(f"environment.{name}", _text(a), _text(b)))
    return sorted(confounds, key=lambda item: item.field), sorted(cautions, key=lambda item: item.field)


def _differing(one: dict[str, Any], other: dict[str, Any]) -> list[Difference]:
    return [
        Difference(name, _text(one.get(name)), _text(other.get(name)))
        for name in sorted(set(one) | set(other))
        if one.get(name) != other.get(name)
    ]


def _arms(methods: _Methods) -> tuple[Arm, ...]:
    order = {name: index for index, name in enumerate(REFERENCES)}
    arms = []
    for method in sorted(methods, key=lambda name: (order.get(name, len(order)), name)):
        successful, failed = methods[method]
        runs = sorted(successful, key=_rate_and_seed)
        # A seed is lost once, however often it was tried, and not at all where one of the attempts succeeded.
        succeeded = set(map(_rate_and_seed, runs))
        lost = {key: run for run in sorted(failed, key=_rate_and_seed) if (key := _rate_and_seed(run)) not in succeeded}
        if runs:
            cells = tuple((rate, tuple(cell)) for rate, cell in groupby(runs, key=lambda run: run.rate))
            arms.append(Arm(method, cells, tuple(lost.values())))
    return tuple(arms)


def _rate_and_seed(run: Attempt) -> tuple[float, int]:
    return run.rate, run.seed


def _varying(settings: Sequence[dict[str, Any]]) -> list[str]:
    """Return the fields that tell a group's setups apart."""
    names = sorted({name for fields in settings for name in fields})
    return [name for name in names if len({_text(fields.get(name)) for fields in settings}) > 1]


def _order(settings: dict[str, Any], varying: list[str]) -> tuple[tuple[bool, float, str], ...]:
    """Return a key that sorts setups by the fields that vary, numbers before other values."""
    values = [settings.get(name) for name in varying]
    numbers = [float(value) if isinstance(value, int | float) else None for value in values]
    return tuple((number is None, number or 0.0, _text(value)) for number, value in zip(numbers, values, strict=True))


def _text(value: Any) -> str:
    """Return a value as text; a long one, such as a hash, as its beginning and its end."""
    text = value if isinstance(value, str) else json.dumps(value, sort_keys=True)
    return text if len(text) <= 60 else f"{text[:28]}…{text[-8:]}"
