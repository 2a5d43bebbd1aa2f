"""Archive the records of runs that have ended, without models and logs: small enough to commit."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..base.files import new_folder, write_text
from ..errors import FileError, LabError
from ..runs.environment import CHANGED
from ..runs.folder import ADDED, DOWNSTREAM, RECALL, SAMPLES, check_records, line_to_json, read_metrics, seal_records
from ..runs.schema import (
    Audit,
    Downstream,
    Environment,
    MetricLine,
    Record,
    RecordedConfig,
    Result,
    Samples,
    Status,
    StoryRecall,
    Timing,
    read,
    read_optional,
)
from .status import RunState, list_runs

_ENDED = ("finished", "diverged", "failed")
# The files that are copied unchanged. Checkpoints, models and logs stay where they are.
_COPIED: dict[str, type[Record]] = {
    "config.json": RecordedConfig,
    "environment.json": Environment,
    "audit.json": Audit,
    "timing.json": Timing,
    "result.json": Result,
    DOWNSTREAM: Downstream,
    SAMPLES: Samples,
    RECALL: StoryRecall,
}
_CHECKED: dict[str, type[Record]] = {**_COPIED, "status.json": Status}
# Fields of a status that mean nothing on another machine.
_MACHINE_FIELDS = {"host", "pid"}


@dataclass(frozen=True)
class ArchivedRun:
    """A run, its folder in the archive, and the outcome: archived, there (archived before), or left out, and why."""

    run: RunState
    target: Path
    outcome: str
    reason: str = ""

    def to_dict(self) -> dict[str, Any]:
        place = {"run": str(self.run.path), "place": str(self.target)}
        return {**place, "outcome": self.outcome, "state": self.run.state, "reason": self.reason}


def archive(folders: Sequence[Path], out: Path, points: int, changed_code: bool = False) -> list[ArchivedRun]:
    """Copy the records of every run below the folders that has ended to `out`/experiment/method/seed-N.

    Raise, before anything is copied, if a record would replace another run's. Failed runs are archived too, with the
    reason; when such a run has succeeded, its record replaces the failure. `points` lines of training loss are kept of
    each run. A run of code that was changed since its commit is left out, unless `changed_code`: nobody can get that
    code back.
    """
    run_by_target: dict[Path, RunState] = {}
    for run in (run for folder in folders for run in list_runs(folder)):
        target = out.joinpath(*run.path.resolve().parts[-3:])
        other = run_by_target.setdefault(target, run)
        if other.path.resolve() != run.path.resolve():
            raise LabError(f"{target}: two runs would go there, {other.path} and {run.path}: archive one of them")
    if not run_by_target:
        raise LabError(f"{', '.join(map(str, folders))}: no runs there")
    archived = [_judged(run, target, changed_code) for target, run in run_by_target.items()]
    for entry in archived:
        if entry.outcome == "archived":
            _copy(entry.run, entry.target, points)
    return archived


def _judged(run: RunState, target: Path, changed_code: bool) -> ArchivedRun:
    """Return what to do with a run; one with a damaged record is left out, and the record is named."""
    try:
        outcome = _outcome(run, target)
        if outcome == "archived":
            for name, record in _CHECKED.items():
                read_optional(run.path / name, record)
            read_metrics(run.path)
            check_records(run.path)
            if not changed_code and _code_was_changed(run.path):
                reason = f"{run.path}: made by code that was changed since its commit; commit, and run it again"
                return ArchivedRun(run, target, "left out", f"{reason} (or archive it with --changed-code)")
    except FileError as error:
        return ArchivedRun(run, target, "left out", str(error))
    reason = f"{run.path}, which is {run.state}" if outcome == "left out" else ""
    return ArchivedRun(run, target, outcome, reason)


def _code_was_changed(run: Path) -> bool:
    environment = read_optional(run / "environment.json", Environment)
    return environment is not None and (environment.git_commit or "").endswith(CHANGED)


def _outcome(run: RunState, target: Path) -> str:
    """Return what to do with a run: archived, there or left out. Raise if the target holds another run's record."""
    if run.state not in _ENDED:
        return "left out"
    if not (target / "config.json").is_file():
        return "archived"
    new_id, old_id = (read(folder / "config.json", RecordedConfig).id for folder in (run.path, target))
    same_run = new_id == old_id
    new_result, old_result = run.path / "result.json", target / "result.json"
    if same_run and not old_result.is_file():  # the archive has a failure of this run
        return "archived" if new_result.is_file() else "there"
    if same_run and new_result.is_file() and new_result.read_bytes() == old_result.read_bytes():
        return "archived" if _has_additions(run.path, target) else "there"
    raise LabError(f"{target}: holds the record of another run than {run.path}; nothing was copied. Give another --out")


def _has_additions(run: Path, target: Path) -> bool:
    """Return True when a run has a record from after its end that its archived record has not, or not this one."""
    files = [(run / name, target / name) for name in ADDED]
    return any(new.is_file() and not (old.is_file() and old.read_bytes() == new.read_bytes()) for new, old in files)


def _copy(run: RunState, target: Path, points: int) -> None:
    with new_folder(target) as folder:
        for name in _COPIED:
            if (run.path / name).is_file():
                shutil.copyfile(run.path / name, folder / name)
        lines = "".join(f"{line_to_json(line)}\n" for line in thin_metrics(read_metrics(run.path), points))
        write_text(folder / "metrics.jsonl", lines)
        if (run.path / "result.json").is_file():
            seal_records(folder)
        if run.state == "failed":
            status = read(run.path / "status.json", Status)
            portable = status.model_dump(exclude=_MACHINE_FIELDS, exclude_unset=True)
            Status.model_validate(portable).write(folder / "status.json")


def thin_metrics(lines: list[MetricLine], points: int) -> list[MetricLine]:
    """Return all lines, but of training loss at most `points`, evenly spread from the first to the last."""
    train = [index for index, line in enumerate(lines) if line.kind == "train"]
    if len(train) <= points:
        return lines
    chosen = {train[round(number * (len(train) - 1) / (points - 1))] for number in range(points)}
    return [line for index, line in enumerate(lines) if line.kind != "train" or index in chosen]
