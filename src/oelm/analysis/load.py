"""Records into runs: finds them, reads them, and sorts out with its reason whatever must not be averaged in."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any

from ..base.files import read_json
from ..config import RunConfig
from ..errors import AnalysisError, ConfigError, FileError, MethodError, NoRunsError
from ..runs.folder import FORMAT, config_fields, is_alive, read_metrics
from .arms import Place, places
from .flops import flops_per_token
from .run import DECODED, Bench, LeftOut, Run, at_chance
from .shapes import check_shapes

# A run that shows one of these is one; a folder with only a model's config.json is not.
_RECORDS = ("result.json", "metrics.jsonl", "status.json", "environment.json")
_NOT_RUNS = {"checkpoints", "best"}
# What `oelm bench` prints is a few kilobytes; a larger JSON file is something else.
_BENCH_SIZE = 1_000_000
# The square of a larger figure leaves the range of numbers, and with it the spread of whatever it is averaged with.
_LARGEST = 1e100
_DIVERGED = "its last validation loss is not a number, or its perplexity none that can be averaged"


@dataclass(frozen=True)
class Loaded:
    """Everything that was found: runs that count, runs that still go, and the rest with its reasons."""

    runs: tuple[Run, ...]
    running: tuple[Run, ...]
    left_out: tuple[LeftOut, ...]
    benches: tuple[Bench, ...]
    problems: tuple[str, ...]


def load_runs(paths: Sequence[str | PathLike[str]]) -> Loaded:
    """Every run in the given folders. Raises only when there is nothing at all to report on."""
    runs: list[Run] = []
    running: list[Run] = []
    left_out: list[LeftOut] = []
    benches: list[Bench] = []
    problems: list[str] = []
    seen: set[Path] = set()
    for given in map(Path, paths):
        if not given.exists():
            raise AnalysisError(f"{given}: no such file or folder")
        found = False
        for place in _places(given):
            if place.resolve() in seen:
                found = True
                continue
            if place.is_file():
                bench = _read_bench(place)
                if bench is None:
                    continue
                benches.append(bench)
            else:
                outcome = _read(place)
                if outcome is None:
                    continue
                target: list[Any] = left_out
                if isinstance(outcome, Run):
                    target = runs if outcome.result else running
                target.append(outcome)
            seen.add(place.resolve())
            found = True
        if not found:
            problems.append(f"{given}: {_why_not(given)}")
    if not (runs or running or left_out or benches):
        raise NoRunsError(
            "no runs found. " + "; ".join(problems) + ". A run is a folder that `oelm train` wrote, with config.json "
            "and result.json in it; give one, or a folder above several"
        )
    # A repeat that came to something stands for a run that did not, so those go before duplicates are looked for.
    kept, useless = _useful(sorted(runs, key=lambda run: str(run.path)))
    kept, duplicates = _without_duplicates(kept, [item.run for item in (*left_out, *useless) if item.run is not None])
    return Loaded(
        tuple(kept),
        tuple(running),
        tuple(sorted([*left_out, *duplicates, *useless], key=lambda item: str(item.path))),
        tuple(benches),
        tuple(problems),
    )


def load_run(path: str | PathLike[str]) -> Run:
    """One finished run; raises and says why where it is none."""
    place = Path(path)
    if not place.is_dir():
        raise AnalysisError(f"{place}: {'not a folder' if place.exists() else 'no such folder'}")
    outcome = _read(place)
    if outcome is None:
        raise AnalysisError(f"{place}: {_why_not(place)}")
    if isinstance(outcome, LeftOut):
        raise AnalysisError(f"{place}: {outcome.reason}")
    if not outcome.result:
        raise AnalysisError(f"{place}: still running: it has no result yet")
    if _diverged(outcome):
        raise AnalysisError(f"{place}: diverged: {_DIVERGED}")
    return outcome


def _places(given: Path) -> Iterator[Path]:
    """Folders that may be runs, and JSON files that may be benchmarks, at or below a path."""
    if given.is_file():
        yield given
        return
    seen = set()
    for folder, folders, files in os.walk(given, followlinks=True):
        here = Path(folder)
        if here.resolve() in seen:  # links may lead in circles
            folders.clear()
            continue
        seen.add(here.resolve())
        if "config.json" in files or any(name in files for name in _RECORDS):
            folders.clear()
            yield here
            continue
        folders[:] = sorted(name for name in folders if not name.startswith(".") and name not in _NOT_RUNS)
        yield from (here / name for name in sorted(files) if name.endswith(".json"))


def _why_not(given: Path) -> str:
    if given.is_file():
        return "a file, neither a run's folder nor what `oelm bench --json` printed"
    if (given / "config.json").is_file():
        return "not a run: its config.json is a model's, not one that `oelm train` wrote"
    return "holds no run"


def _read(path: Path) -> Run | LeftOut | None:
    """A run with its result, one that still goes, a run to leave out, or none where the folder is no run's."""
    try:
        config, old = _read_config(path)
        if config is None:
            return None
        result = _optional(path / "result.json")
        run = Run(
            path=path,
            config=config,
            environment=_optional(path / "environment.json"),
            result=result,
            timing=_optional(path / "timing.json"),
            audit=_optional(path / "audit.json"),
            metrics=tuple(read_metrics(path)),
            status=_optional(path / "status.json"),
            old_config=old,
        )
        about: dict[str, Any] = {"method": run.method, "seed": run.seed}
        if result:
            _check(run)
            return run
    except (FileError, AnalysisError) as error:
        return LeftOut(path, "damaged", str(error))
    except OSError as error:
        return LeftOut(path, "damaged", f"{error.filename or path}: cannot be read ({error.strerror})")
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        return LeftOut(path, "damaged", f"{path}: a record without its usual fields ({error!r})")
    if is_alive(path, run.status):
        return run
    state = run.status.get("state")
    if state == "failed":
        message = str(run.status.get("message") or "failed; it left no message")
        return LeftOut(path, "failed", message, **about, run=run if run.environment else None)
    step = run.status.get("step")
    if state not in ("stopped", "running") or step is None:
        return LeftOut(path, "unfinished", "it has no result.json: it never finished", **about)
    steps = (config.get("train") or {}).get("max_steps") or run.status.get("max_steps") or "?"
    how = "stopped" if state == "stopped" else "its process is gone"
    reason = f"{how} at step {step} of {steps}: the same command resumes it"
    return LeftOut(path, "cut", reason, **about, values=(("step", str(step)), ("steps", str(steps))))


def _read_config(path: Path) -> tuple[dict[str, Any] | None, bool]:
    """A run's config in today's terms, and whether it had to be taken as it was written."""
    if not (path / "config.json").is_file():
        if not any((path / name).exists() for name in _RECORDS):
            return None, False
        raise AnalysisError(f"{path / 'config.json'}: missing; the folder has a run's other records")
    recorded = read_json(path / "config.json")
    if not isinstance(recorded, dict):
        raise AnalysisError(f"{path / 'config.json'}: not a mapping")
    if "experiment" not in recorded:
        return None, False
    written = recorded.get("format", FORMAT)
    if not isinstance(written, int) or written > FORMAT:
        raise AnalysisError(
            f"{path / 'config.json'}: format {written!r}, written by a newer oelm; this one reads up to {FORMAT}"
        )
    try:
        # Fields that came after the record was written get the value that stands for how it was before them.
        return {**RunConfig.load(config_fields(recorded)).to_dict(), "id": recorded.get("id"), "format": written}, False
    except (ConfigError, MethodError):
        return recorded, True


def _optional(path: Path) -> dict[str, Any]:
    if not path.exists():
        return {}
    content = read_json(path)
    if not isinstance(content, dict):
        raise AnalysisError(f"{path}: not a mapping")
    return content


def _check(run: Run) -> None:
    """Raise where the files of one folder do not belong together or the result lacks its figures."""
    if run.result.get("id") not in (None, run.id):
        raise AnalysisError(
            f"{run.path / 'result.json'}: is of run {run.result['id']}, the config beside it of run {run.id}"
        )
    if "val_loss" not in run.result:
        raise AnalysisError(f"{run.path / 'result.json'}: has no val_loss: an older format, or incompletely written")
    # What is read later, for the whole report: a damaged record must fail here, alone.
    check_shapes(run)
    flops_per_token(run)


def _useful(runs: Iterable[Run]) -> tuple[list[Run], list[LeftOut]]:
    """Runs whose result is a number and better than guessing, and the others."""
    kept, others = [], []
    for run in runs:
        about: dict[str, Any] = {"method": run.method, "seed": run.seed}
        if _diverged(run):
            others.append(LeftOut(run.path, "diverged", _DIVERGED, **about, run=run))
        elif at_chance(run):
            accuracy = f"{run.figure('accuracy') or math.nan:.1%}"
            majority = f"{(run.result.get('majority') or {}).get('accuracy') or math.nan:.1%}"
            reason = f"it learnt nothing: accuracy {accuracy}, always answering the commonest class gives {majority}"
            values = (("accuracy", accuracy), ("majority", majority))
            others.append(LeftOut(run.path, "at-chance", reason, **about, values=values, run=run))
        else:
            kept.append(run)
    return kept, others


def _diverged(run: Run) -> bool:
    """Whether the last loss is no number, or one whose perplexity is too large for any mean, or recorded as none."""
    if run.figure("val_loss") is None:
        return True
    perplexity = run.figure("perplexity")
    return "perplexity" in run.result and (perplexity is None or perplexity > _LARGEST)


def _without_duplicates(runs: Sequence[Run], lost: Sequence[Run]) -> tuple[list[Run], list[LeftOut]]:
    """One run for each place and seed, the first: a copy, or the same run made twice, is no further evidence.

    `lost` are those that came to nothing: they are no duplicates, but will be grouped with the others.
    """
    first: dict[tuple[Place, int], Run] = {}
    others = []
    for run, place in zip(runs, places([*runs, *lost]), strict=False):
        known = first.setdefault((place, run.seed), run)
        if known is not run:
            reason = f"the same settings and seed as {known.path}: counted once"
            others.append(LeftOut(run.path, "duplicate", reason, run.method, run.seed, (("other", str(known.path)),)))
    return list(first.values()), others


def _read_bench(path: Path) -> Bench | None:
    """What `oelm bench --json` printed, or none."""
    if path.suffix != ".json" or path.stat().st_size > _BENCH_SIZE:
        return None
    try:
        rows = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    if not isinstance(rows, list) or not rows or not all(isinstance(row, dict) for row in rows):
        return None
    of_tokens = {DECODED, "token_ms", "cache_ratio", "context", "batch_size"}
    needed = {"arm", "ratio", "ratio_95", "rounds"} | (of_tokens if DECODED in rows[0] else {"flop_bound"})
    if not all(needed <= set(row) for row in rows):
        return None
    if all(_is_bench_row(row, needed) for row in rows):
        return Bench(path, tuple(rows))
    return None


def _is_bench_row(row: dict[str, Any], needed: set[str]) -> bool:
    numbers = needed - {"arm", "ratio_95"}
    if row.get("warning"):
        numbers |= {"batch_size", "ratio_per_example"}
    told = [row[key] for key in ("ratio_95", "step_ms") if row.get(key) is not None]  # one round has no interval
    return all(isinstance(value, int | float) for value in [*told, *(row.get(key) for key in numbers)])
