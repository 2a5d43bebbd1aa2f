"""Find the runs below folders and read their records; leave out, with a reason, those that must not be averaged."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from os import PathLike
from pathlib import Path
from typing import Any, TypeVar

from ..base.files import read_json
from ..errors import AnalysisError, FileError, FormatError, NoRunsError
from ..runs.folder import DOWNSTREAM, RECALL, SAMPLES, check_records, is_alive, read_metrics
from ..runs.schema import (
    Audit,
    Downstream,
    Environment,
    Record,
    RecordedConfig,
    Result,
    Samples,
    Status,
    StoryRecall,
    Timing,
    parse_bench,
    read,
    read_optional,
)
from .arms import PRIMARY, key_of
from .run import Attempt, Bench, LeftOut, Run

# A folder with one of these is a run's; a folder with nothing but a model's config.json is not.
_RECORDS = ("result.json", "metrics.jsonl", "status.json", "environment.json")
_NOT_RUNS = {"checkpoints", "best"}
# What `oelm bench` prints is a few kilobytes; a larger JSON file is something else.
_BENCH_SIZE = 1_000_000
# A mean with a larger figure in it has no spread, since the square of such a figure overflows.
_LARGEST = 1e100
_DIVERGED = "its last validation loss is not a number, or its perplexity is too large to be averaged"
_R = TypeVar("_R", bound=Record)


@dataclass(frozen=True)
class Loaded:
    """Everything below the given paths: runs that count, runs in progress, and runs left out, with the reasons.

    `repeats` are the runs that are left out as duplicates of others.
    """

    runs: tuple[Run, ...]
    running: tuple[Attempt, ...]
    left_out: tuple[LeftOut, ...]
    benches: tuple[Bench, ...]
    problems: tuple[str, ...]
    repeats: tuple[Run, ...] = ()


def load_runs(paths: Sequence[str | PathLike[str]]) -> Loaded:
    """Return every run below the given paths; raise only where there is nothing at all to report on."""
    # The keys are resolved paths, so that a folder that is given twice, or lies below another, is read once. A string
    # describes a problem.
    outcomes: dict[Path, Run | Attempt | LeftOut | Bench | str] = {}
    for root in map(Path, paths):
        if not root.exists():
            raise AnalysisError(f"{root}: no such file or folder")
        any_outcome = False
        for path in _candidates(root):
            resolved = path.resolve()
            outcome = outcomes.get(resolved) or (_read_bench(path) if path.is_file() else _read_run(path))
            if outcome is not None:
                outcomes[resolved], any_outcome = outcome, True
        if not any_outcome:
            outcomes[root] = f"{root}: {_why_no_run(root)}"
    all_outcomes = list(outcomes.values())
    problems = [outcome for outcome in all_outcomes if isinstance(outcome, str)]
    left_out = [outcome for outcome in all_outcomes if isinstance(outcome, LeftOut)]
    runs = [outcome for outcome in all_outcomes if isinstance(outcome, Run)]
    if len(problems) == len(all_outcomes):
        raise NoRunsError(
            "no runs found. " + "; ".join(problems) + ". A run is a folder that `oelm train` wrote, with "
            "config.json and result.json in it; give one, or a folder above several"
        )
    # A successful repeat replaces a run that failed, so failed runs are left out before duplicates.
    counted, failed = _useful(sorted(runs, key=lambda run: str(run.path)))
    useful = counted
    counted, duplicates = _without_duplicates(useful)
    counted_paths = {run.path for run in counted}
    return Loaded(
        tuple(counted),
        tuple(outcome for outcome in all_outcomes if isinstance(outcome, Attempt) and not isinstance(outcome, Run)),
        tuple(sorted([*left_out, *duplicates, *failed], key=lambda item: str(item.path))),
        tuple(outcome for outcome in all_outcomes if isinstance(outcome, Bench)),
        tuple(problems),
        tuple(run for run in useful if run.path not in counted_paths),
    )


def load_run(path: str | PathLike[str]) -> Run:
    """Return the finished run in a folder; raise an error with the reason where there is none."""
    folder = Path(path)
    if not folder.is_dir():
        raise AnalysisError(f"{folder}: {'not a folder' if folder.exists() else 'no such folder'}")
    outcome = _read_run(folder)
    if outcome is None:
        raise AnalysisError(f"{folder}: {_why_no_run(folder)}")
    if isinstance(outcome, LeftOut):
        raise AnalysisError(f"{folder}: {outcome.reason}")
    if not isinstance(outcome, Run):
        raise AnalysisError(f"{folder}: still running: it has no result yet")
    if _diverged(outcome):
        raise AnalysisError(f"{folder}: diverged: {_DIVERGED}")
    return outcome


def _candidates(root: Path) -> Iterator[Path]:
    """Yield the folders that may be runs, and the JSON files that may be benchmarks, at or below a path."""
    if root.is_file():
        yield root
        return
    seen = set()
    for folder, folders, files in os.walk(root, followlinks=True):
        path = Path(folder)
        if path.resolve() in seen:  # links may lead in circles
            folders.clear()
            continue
        seen.add(path.resolve())
        if "config.json" in files or any(name in files for name in _RECORDS):
            folders.clear()
            yield path
            continue
        folders[:] = sorted(name for name in folders if not name.startswith(".") and name not in _NOT_RUNS)
        yield from (path / name for name in sorted(files) if name.endswith(".json"))


def _why_no_run(path: Path) -> str:
    if path.is_file():
        return "a file, neither a run's folder nor what `oelm bench --json` printed"
    if (path / "config.json").is_file():
        return "not a run: its config.json is a model's, not one that `oelm train` wrote"
    return "holds no run"


def _read_run(path: Path) -> Run | Attempt | LeftOut | None:
    """Return a run with its result, one in progress, a run to leave out, or None where the folder is not a run's.

    A damaged record leaves out its own run alone.
    """
    try:
        config = _read_config(path)
        if config is None:
            return None
        attempt = Attempt(
            path=path,
            id=config.id,
            config=config.config,
            environment=read_optional(path / "environment.json", Environment),
            metrics=tuple(read_metrics(path)),
            status=read_optional(path / "status.json", Status),
        )
        check_records(path)
        result = read_optional(path / "result.json", Result)
        if result is not None:
            return _finished(attempt, result)
    except FormatError as error:
        return LeftOut(path, "format", str(error))
    except (FileError, AnalysisError) as error:
        return LeftOut(path, "damaged", str(error))
    except OSError as error:
        return LeftOut(path, "damaged", f"{error.filename or path}: cannot be read ({error.strerror})")
    return attempt if is_alive(path, attempt.status) else _without_result(attempt)


def _read_config(path: Path) -> RecordedConfig | None:
    """Return the config of a run; None where the folder is not a run's."""
    file = path / "config.json"
    if not file.is_file():
        if not any((path / name).exists() for name in _RECORDS):
            return None
        raise AnalysisError(f"{file}: missing; the folder has a run's other records")
    content = read_json(file)
    if isinstance(content, dict) and "experiment" not in content:  # a model's
        return None
    return read(file, RecordedConfig)


def _finished(attempt: Attempt, result: Result) -> Run:
    """Return a run with its result; raise where a record is missing or is another run's."""
    path = attempt.path
    if result.id != attempt.id:
        raise AnalysisError(f"{path / 'result.json'}: is of run {result.id}, the config beside it of run {attempt.id}")
    if attempt.environment is None:
        raise AnalysisError(f"{path / 'environment.json'}: missing; the folder has a run's other records")
    audit, timing = _required(path / "audit.json", Audit), _required(path / "timing.json", Timing)
    records: dict[str, Any] = {field.name: getattr(attempt, field.name) for field in fields(attempt)}
    return Run(
        **records,
        audit=audit,
        timing=timing,
        result=result,
        downstream=read_optional(path / DOWNSTREAM, Downstream),
        samples=read_optional(path / SAMPLES, Samples),
        recall=read_optional(path / RECALL, StoryRecall),
    )


def _required(path: Path, record: type[_R]) -> _R:
    if not path.is_file():
        raise AnalysisError(f"{path}: missing; the folder has a run's other records")
    return read(path, record)


def _without_result(run: Attempt) -> LeftOut:
    """Return why a run that is not in progress has no result."""
    about: dict[str, Any] = {"method": run.method, "seed": run.seed}
    status = run.status
    if status is not None and status.state == "failed":
        message = status.message or "failed; it left no message"
        return LeftOut(run.path, "failed", message, **about, run=run if run.environment is not None else None)
    if status is None or status.state not in ("stopped", "running") or status.step is None:
        return LeftOut(run.path, "unfinished", "it has no result.json: it never finished", **about)
    steps = run.config.train.max_steps or status.max_steps or "?"
    how = "stopped" if status.state == "stopped" else "its process is gone"
    reason = f"{how} at step {status.step} of {steps}: the same command resumes it"
    return LeftOut(run.path, "cut", reason, **about, values=(("step", str(status.step)), ("steps", str(steps))))


def _useful(runs: Iterable[Run]) -> tuple[list[Run], list[LeftOut]]:
    """Split runs into those whose result is a number and better than chance, and the others."""
    useful, left_out = [], []
    for run in runs:
        about: dict[str, Any] = {"method": run.method, "seed": run.seed}
        if _diverged(run):
            left_out.append(LeftOut(run.path, "diverged", _DIVERGED, **about, run=run))
        elif run.result.at_chance:
            accuracy = f"{run.figure('accuracy') or math.nan:.1%}"
            majority = f"{run.result.majority.accuracy if run.result.majority is not None else math.nan:.1%}"
            reason = f"it learnt nothing: accuracy {accuracy}, always answering the commonest class gives {majority}"
            values = (("accuracy", accuracy), ("majority", majority))
            left_out.append(LeftOut(run.path, "at-chance", reason, **about, values=values, run=run))
        else:
            useful.append(run)
    return useful, left_out


def _diverged(run: Run) -> bool:
    """Return True if the last loss is not a number, or the perplexity of a run on text too large for any mean."""
    if run.figure("val_loss") is None:
        return True
    measure = PRIMARY[run.task.kind]
    perplexity = run.figure(measure)
    return measure.endswith("perplexity") and (perplexity is None or perplexity > _LARGEST)


def _without_duplicates(runs: Sequence[Run]) -> tuple[list[Run], list[LeftOut]]:
    """Keep the first run of each cell and seed: a copy, or the same run trained twice, is no further evidence."""
    first_runs: dict[Any, Run] = {}
    duplicates = []
    for run in runs:
        key = (key_of(run), run.seed)
        first = first_runs.setdefault(key, run)
        if first is not run:
            first_runs[key] = replace(first, also=(*first.also, run.experiment))
            reason = f"the same settings and seed as {first.path}: counted once"
            duplicates.append(
                LeftOut(run.path, "duplicate", reason, run.method, run.seed, (("other", str(first.path)),))
            )
    return list(first_runs.values()), duplicates


def _read_bench(path: Path) -> Bench | str | None:
    """Return what `oelm bench --json` printed, a problem where it cannot be read, or None for any other file."""
    if path.suffix != ".json" or path.stat().st_size > _BENCH_SIZE:
        return None
    try:
        text = path.read_text(encoding="utf-8")
        rows = json.loads(text)
    except (OSError, ValueError):
        return None
    if not isinstance(rows, list) or not rows or not all(isinstance(row, dict) and "ratio" in row for row in rows):
        return None
    try:
        return Bench(path, parse_bench(text))
    except ValueError as error:
        missing = str(error).splitlines()[0]
        return f"{path}: not the rows that this oelm's `oelm bench --json` prints ({missing}); measure again"
