"""Runs into arms: what was trained for the same task on the same data, in the same set-up, by the same method.

group   one task on one data set                      setup   all settings but the method, the rate and the seed
arm     one method in one setup                       cell    an arm at one learning rate: its runs differ in the seed
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

from .run import Run, Task, comparable, flatten

# Arms that others are compared with, the first that is there.
REFERENCES = ("baseline", "freeze-pretrained", "oelm-nofreeze", "random-nofreeze")
# What else may change a number, by its name in environment.json. A difference in one of these spoils a comparison.
_SPOILING = ("device", "world_size", "gpu.name", "versions.oelm", "versions.torch", "versions.transformers")
# What environment.json says of the data has this before its name, beside the settings.
_DATA = "environment.data."
# Differences that a reader should know of and that seldom matter.
_WORTH_KNOWING = ("git_commit", "versions.python", "versions.numpy", "versions.tokenizers", "cpu.threads", "gpu.cuda")


@dataclass(frozen=True)
class Measure:
    """A figure that arms are compared by. On the log scale, ratios are analysed; points are hundredths."""

    name: str
    lower_is_better: bool
    log: bool = True
    points: bool = False


MEASURES = {
    measure.name: measure
    for measure in (
        Measure("perplexity", True),
        Measure("best_perplexity", True),
        Measure("val_loss", True, log=False),
        Measure("best_val_loss", True, log=False),
        Measure("bits_per_byte", True),
        Measure("accuracy", False, log=False, points=True),
        Measure("best_accuracy", False, log=False, points=True),
        Measure("macro_f1", False, log=False, points=True),
        Measure("matthews", False, log=False),
        Measure("exact_match", False, log=False, points=True),
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
# What a run has by its settings: no seed changes it, and chance has no part in it.
COUNTS = ("frozen", "frozen_share", "trainable")
PRIMARY = {"language": "perplexity", "classification": "accuracy", "text2text": "exact_match"}


@dataclass(frozen=True)
class Difference:
    """A field in which two runs differ, with both values as text."""

    field: str
    one: str
    other: str


@dataclass(frozen=True, eq=False)
class Arm:
    """One method in one setup: its runs by learning rate, in each by seed; `lost` are those that came to nothing."""

    method: str
    cells: tuple[tuple[float, tuple[Run, ...]], ...]
    lost: tuple[Run, ...] = ()

    @property
    def rates(self) -> tuple[float, ...]:
        return tuple(rate for rate, _ in self.cells)

    @property
    def runs(self) -> tuple[Run, ...]:
        return tuple(run for _, runs in self.cells for run in runs)

    def at(self, rate: float) -> tuple[Run, ...]:
        return next((runs for found, runs in self.cells if found == rate), ())

    def lost_at(self, rate: float) -> tuple[Run, ...]:
        return tuple(run for run in self.lost if run.rate == rate)

    def by_seed(self, rate: float) -> dict[int, Run]:
        return {run.seed: run for run in self.at(rate)}


@dataclass(frozen=True, eq=False)
class Setup:
    """All settings that its arms share, and the arms.

    `apart` are the settings that tell the setups of its group apart, and `others` those of the other setups.
    """

    task: Task
    dataset: str
    settings: tuple[tuple[str, Any], ...]
    arms: tuple[Arm, ...]
    apart: tuple[tuple[str, str], ...] = ()
    others: tuple[tuple[tuple[str, str], ...], ...] = ()

    @cached_property
    def measure(self) -> Measure:
        """What the arms are judged by: the task's own figure, or the loss where no run has that."""
        name = PRIMARY.get(self.task.kind, "val_loss")
        return MEASURES[name if any(run.figure(name) is not None for run in self.runs) else "val_loss"]

    @property
    def runs(self) -> tuple[Run, ...]:
        return tuple(run for arm in self.arms for run in arm.runs)

    def arm(self, method: str) -> Arm | None:
        return next((arm for arm in self.arms if arm.method == method), None)

    @cached_property
    def reference(self) -> Arm | None:
        return next((found for name in REFERENCES if (found := self.arm(name)) is not None), None)

    @property
    def stand_in(self) -> bool:
        return "stand-in" in self.dataset.lower()


@dataclass(frozen=True, eq=False)
class Group:
    """One task on one data set, in every setup that it was run in."""

    task: Task
    dataset: str
    setups: tuple[Setup, ...]


def group_runs(runs: Iterable[Run], lost: Iterable[Run] = ()) -> tuple[Group, ...]:
    """Runs into groups, setups, arms and cells, each in a fixed order; lost ones only beside others of their arm."""
    failed = {id(run): run for run in lost}
    tree: dict[tuple[str, str, str], dict[str, dict[str, dict[float, list[Run]]]]] = {}
    members = [*runs, *failed.values()]
    for run, place in zip(members, places(members), strict=True):
        arms = tree.setdefault(place.group, {}).setdefault(place.setup, {})
        arms.setdefault(place.method, {}).setdefault(place.rate, []).append(run)
    groups = []
    for (kind, name, dataset), setups in sorted(tree.items()):
        task = Task(kind, name)
        settings = {key: tuple(sorted(json.loads(key).items())) for key in setups}
        varying = _varying([dict(settings[key]) for key in setups])
        apart = {key: tuple((name, _text(dict(settings[key]).get(name))) for name in varying) for key in setups}
        built = []
        for key in sorted(setups, key=lambda key: _order(dict(settings[key]), varying)):
            found = _arms(setups[key], failed)
            if found:
                others = tuple(other for where, other in apart.items() if where != key)
                built.append(Setup(task, dataset, settings[key], found, apart[key], others))
        if built:
            groups.append(Group(task, dataset, tuple(built)))
    return tuple(groups)


class Place(NamedTuple):
    """Where a run belongs, and all that identifies it: a second one of the same place and seed is no further evidence.

    `group` is the task's kind and name and the data set, `setup` the settings as JSON.
    """

    group: tuple[str, str, str]
    setup: str
    method: str
    rate: float


def places(runs: Sequence[Run]) -> list[Place]:
    """The place of each run. It depends on the others: what an older record lacks is taken from those of its group."""
    of_group: dict[tuple[str, str, str], list[int]] = {}
    for index, run in enumerate(runs):
        of_group.setdefault((run.task.kind, run.task.name, run.dataset), []).append(index)
    found: dict[int, Place] = {}
    for group, members in of_group.items():
        for index, shared in zip(members, _filled([shared_settings(runs[index]) for index in members]), strict=True):
            found[index] = Place(group, json.dumps(shared, sort_keys=True), runs[index].method, runs[index].rate)
    return [found[index] for index in range(len(runs))]


def shared_settings(run: Run) -> dict[str, Any]:
    """The settings that arms of one setup have in common, by dotted name, the data's hashes among them."""
    flat = dict(flatten(comparable(run)))
    own = {name: value for name, value in flat.items() if not name.startswith("method")}
    own.pop("optimizer.learning_rate", None)
    data = run.environment.get("data") or {}
    # A file's place is no setting where its content's hash stands beside it; the description names the group.
    told = {name: value for name, value in flatten(data) if name != "description" and not name.endswith(".file")}
    return own | {f"{_DATA}{name}": value for name, value in told.items()}


def _filled(settings: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The settings, with what an older version did not yet record of the data taken from the others, if they agree."""
    names = {name for one in settings for name in one if name.startswith(_DATA)}
    found = {name: {_text(one[name]): one[name] for one in settings if name in one} for name in names}
    agreed = {name: next(iter(values.values())) for name, values in found.items() if len(values) == 1}
    return [agreed | one for one in settings]


def differences(one: Run, other: Run, rate: bool = True) -> tuple[list[Difference], list[Difference]]:
    """Fields in which two runs differ beside the method and the seed: those that spoil a comparison, and others.

    Without `rate` the learning rates may differ: where each arm has its own best one from the same grid.
    """
    spoiling = _differing(*_filled([shared_settings(one), shared_settings(other)]))
    if rate and one.rate != other.rate:
        spoiling.append(Difference("optimizer.learning_rate", f"{one.rate:g}", f"{other.rate:g}"))
    flat_one, flat_other = dict(flatten(one.environment)), dict(flatten(other.environment))
    known: list[Difference] = []
    for names, found in ((_SPOILING, spoiling), (_WORTH_KNOWING, known)):
        for name in names:
            # "gpu" itself is null where there is none, and then has no name.
            a, b = flat_one.get(name), flat_other.get(name)
            if a != b:
                found.append(Difference(f"environment.{name}", _text(a), _text(b)))
    return sorted(spoiling, key=lambda item: item.field), sorted(known, key=lambda item: item.field)


def _differing(one: dict[str, Any], other: dict[str, Any]) -> list[Difference]:
    return [
        Difference(name, _text(one.get(name)), _text(other.get(name)))
        for name in sorted(set(one) | set(other))
        if one.get(name) != other.get(name)
    ]


def _arms(methods: dict[str, dict[float, list[Run]]], failed: dict[int, Run]) -> tuple[Arm, ...]:
    order = {name: index for index, name in enumerate(REFERENCES)}
    arms = []
    for method in sorted(methods, key=lambda name: (order.get(name, len(order)), name)):
        cells = methods[method]
        by_seed = {rate: sorted(cells[rate], key=lambda run: run.seed) for rate in sorted(cells)}
        kept = {rate: tuple(run for run in runs if id(run) not in failed) for rate, runs in by_seed.items()}
        seeds = {(rate, run.seed) for rate, runs in kept.items() for run in runs}
        # A seed is lost once, however often it was tried, and not at all where one of the tries came to something.
        lost = {(rate, run.seed): run for rate, runs in by_seed.items() for run in runs if id(run) in failed}
        alone = tuple(run for place, run in lost.items() if place not in seeds)
        if any(kept.values()):
            arms.append(Arm(method, tuple((rate, runs) for rate, runs in kept.items() if runs), alone))
    return tuple(arms)


def _varying(settings: list[dict[str, Any]]) -> list[str]:
    """The fields that tell a group's setups apart."""
    names = sorted({name for one in settings for name in one})
    return [name for name in names if len({_text(one.get(name)) for one in settings}) > 1]


def _order(settings: dict[str, Any], varying: list[str]) -> tuple[tuple[bool, float, str], ...]:
    values = [settings.get(name) for name in varying]
    return tuple(
        (not isinstance(value, int | float), float(value) if isinstance(value, int | float) else 0.0, _text(value))
        for value in values
    )


def _text(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value, sort_keys=True)
    return text if len(text) <= 60 else f"{text[:28]}…{text[-8:]}"
