"""Find the runs of a plan's confirmation among those that were loaded, and tell them from runs made without it."""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass, field
from os import PathLike
from pathlib import Path

from ..base.strict import flat
from ..config import RunConfig
from ..runs.confirmation import Study, run_name
from .load import Loaded
from .run import Attempt, Run, comparable

# Why a run that the plan names is not one of its runs: it carries no plan, another version of it, or other settings.
BEFORE, VERSION, SETTINGS = "before", "version", "settings"
# The folder that `oelm matrix` writes runs into unless it is told another.
_OUT = "runs"


@dataclass(frozen=True)
class ApartRun:
    """A run with the name of a planned one that is not used, and why: BEFORE, VERSION or SETTINGS."""

    name: str
    path: Path
    why: str


@dataclass(frozen=True, kw_only=True)
class ArmRuns:
    """What became of an arm's planned runs, by seed. `lost` are those that failed or diverged, with the kind."""

    arm: str
    planned: tuple[int, ...]
    runs: dict[int, Run] = field(default_factory=dict)
    lost: dict[int, str] = field(default_factory=dict)
    missing: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True)
class PlannedRuns:
    """The runs of a plan by their names: finished, lost (failed or diverged), in progress and apart.

    `others` counts the finished runs that the plan does not name, `any_version` says that the plan's mark is not asked
    for, and `command` runs what is missing.
    """

    study: Study
    finished: dict[str, Run]
    lost: dict[str, str]
    running: tuple[str, ...]
    apart: tuple[ApartRun, ...]
    others: int
    any_version: bool
    command: str

    @property
    def missing(self) -> tuple[str, ...]:
        """Return the names of the planned runs that have no end yet."""
        return tuple(name for name in self.study.configs if name not in self.finished and name not in self.lost)

    def of(self, arm: str, seeds: Sequence[int]) -> ArmRuns:
        """Return what became of the runs of an arm with these seeds."""
        names = {seed: f"{arm}/seed-{seed}" for seed in seeds}
        return ArmRuns(
            arm=arm,
            planned=tuple(seeds),
            runs={seed: self.finished[name] for seed, name in names.items() if name in self.finished},
            lost={seed: self.lost[name] for seed, name in names.items() if name in self.lost},
            missing=tuple(seed for seed, name in names.items() if name in self.missing),
        )


@dataclass(frozen=True)
class _Candidate:
    """A run with a planned name: how it ended (finished, running, or how it was lost), and why it is apart, if so."""

    name: str
    attempt: Attempt
    end: str
    why: str | None


def planned_runs(
    study: Study, loaded: Loaded, paths: Sequence[str | PathLike[str]], any_version: bool = False
) -> PlannedRuns:
    """Return the runs of a plan among those loaded from these paths; with `any_version` also those apart from it.

    Where several runs have a planned name, those with the plan's mark come first, and finished ones before others.
    """
    candidates = [_candidate(study, attempt, end) for attempt, end in _attempts(loaded) if _name(attempt, study)]
    usable = [candidate for candidate in candidates if any_version or candidate.why is None]
    order = {"finished": 0, "running": 2}
    usable.sort(key=lambda item: (item.why is not None, order.get(item.end, 1), str(item.attempt.path)))
    chosen: dict[str, _Candidate] = {}
    for candidate in usable:
        chosen.setdefault(candidate.name, candidate)
    finished = {
        name: item.attempt for name, item in chosen.items() if item.end == "finished" and isinstance(item.attempt, Run)
    }
    return PlannedRuns(
        study=study,
        finished=finished,
        lost={name: item.end for name, item in chosen.items() if item.end not in order},
        running=tuple(name for name, item in chosen.items() if item.end == "running"),
        apart=tuple(ApartRun(item.name, item.attempt.path, item.why) for item in candidates if item.why is not None),
        others=sum(not _name(run, study) for run in (*loaded.runs, *loaded.repeats)),
        any_version=any_version,
        command=_command(study, list(finished.values()), paths, {item.attempt.path for item in candidates if item.why}),
    )


def _attempts(loaded: Loaded) -> Iterator[tuple[Attempt, str]]:
    """Yield every run that was loaded, with how it ended."""
    yield from ((run, "finished") for run in (*loaded.runs, *loaded.repeats))
    yield from ((item.run, item.kind) for item in loaded.left_out if item.run is not None)
    yield from ((run, "running") for run in loaded.running)


def _name(attempt: Attempt, study: Study) -> str | None:
    """Return the name of a run if the plan has one of that name."""
    name = run_name(attempt.config)
    return name if name in study.configs else None


def _candidate(study: Study, attempt: Attempt, end: str) -> _Candidate:
    name, environment = run_name(attempt.config), attempt.environment
    mark = attempt.config.log.plan if environment is None else environment.plan  # without one it is just starting
    if mark is None:
        return _Candidate(name, attempt, end, BEFORE)
    if mark.sha256 != study.sha256:
        return _Candidate(name, attempt, end, VERSION)
    same = _settings(attempt.config, study.configs[name]) == _settings(study.configs[name], study.configs[name])
    return _Candidate(name, attempt, end, None if same else SETTINGS)


def _settings(config: RunConfig, planned: RunConfig) -> dict[str, object]:
    """Return the settings of a run that the plan fixes; the path of a model that another run made depends on --out."""
    settings = flat(comparable(config))
    if planned.model.name.startswith(f"{planned.output}/"):
        settings = {name: value for name, value in settings.items() if name not in ("model.name", "model.tokenizer")}
    return settings


def _command(study: Study, runs: Sequence[Run], paths: Sequence[str | PathLike[str]], apart: Container[Path]) -> str:
    """Return the command that runs what is missing, into the folder of these runs and with their data.

    Where runs that are apart have planned folders there, it names another one: a matrix would skip them.
    """
    roots = Counter(str(run.path.parents[2]) for run in runs) or Counter([str(paths[0])])
    out = roots.most_common(1)[0][0]
    if any(Path(out, name) in apart for name in study.configs):
        out = f"{out}-{study.sha256[:8]}"
    paths_of_data = [(run.config.data.path, study.configs[run_name(run.config)].data.path) for run in runs]
    data = {path for path, planned in paths_of_data if path != planned}
    words = ["oelm", "matrix", str(study.path), *([] if out == _OUT else ["--out", out])]
    return shlex.join([*words, *(["--data", str(data.pop())] if len(data) == 1 else [])])
