"""Records to keep: what runs that have ended recorded, without what is large or the machine's own, ready to commit."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..base.files import new_folder, read_record, to_json, write_json, write_text
from ..errors import LabError
from ..runs.folder import read_metrics
from .status import RunState, survey

_ENDED = ("finished", "diverged", "failed")
# What is copied as it was written. Checkpoints, models and logs stay where they are.
_COPIED = ("config.json", "environment.json", "audit.json", "timing.json", "result.json")
_OF_THE_MACHINE = ("host", "pid")


@dataclass(frozen=True)
class Kept:
    """One run and what became of it: archived, there (the archive has it already), or left out, with its state."""

    run: RunState
    place: Path
    outcome: str

    def to_dict(self) -> dict[str, Any]:
        return {"run": str(self.run.path), "place": str(self.place), "outcome": self.outcome, "state": self.run.state}


def archive(folders: Sequence[Path], out: Path, points: int) -> list[Kept]:
    """Copy the records of every run below the folders that has ended to `out`/experiment/method/seed-N.

    Whatever would replace another run's record is refused before anything is copied. Failed runs are kept too, with
    the reason; once they have succeeded, that record takes the failure's place. `points` lines of training loss are
    kept of each.
    """
    found: dict[Path, RunState] = {}
    for run in (run for folder in folders for run in survey(folder)):
        place = out.joinpath(*run.path.resolve().parts[-3:])
        other = found.setdefault(place, run)
        if other.path.resolve() != run.path.resolve():
            raise LabError(f"{place}: two runs would go there, {other.path} and {run.path}: archive one of them")
    if not found:
        raise LabError(f"{', '.join(map(str, folders))}: no runs there")
    kept = [Kept(run, place, _outcome(run, place)) for place, run in found.items()]
    for one in kept:
        if one.outcome == "archived":
            _copy(one.run, one.place, points)
    return kept


def _outcome(run: RunState, place: Path) -> str:
    if run.state not in _ENDED:
        return "left out"
    if not (place / "config.json").is_file():
        return "archived"
    mine, theirs = (read_record(folder / "config.json").get("id") for folder in (run.path, place))
    ends = [(folder / "result.json") for folder in (run.path, place)]
    if mine == theirs and not ends[1].is_file():
        return "archived" if ends[0].is_file() else "there"
    if mine == theirs and ends[0].is_file() and ends[0].read_bytes() == ends[1].read_bytes():
        return "there"
    raise LabError(f"{place}: holds the record of another run than {run.path}; nothing was copied. Give another --out")


def _copy(run: RunState, place: Path, points: int) -> None:
    with new_folder(place) as folder:
        for name in _COPIED:
            if (run.path / name).is_file():
                shutil.copyfile(run.path / name, folder / name)
        lines = "".join(f"{to_json(line)}\n" for line in thinned(read_metrics(run.path), points))
        write_text(folder / "metrics.jsonl", lines)
        if run.state == "failed":
            status = read_record(run.path / "status.json")
            write_json(folder / "status.json", {key: status[key] for key in status if key not in _OF_THE_MACHINE})


def thinned(lines: list[dict[str, Any]], points: int) -> list[dict[str, Any]]:
    """The metrics with `points` lines of training loss at most, the first and the last among them; all others stay."""
    train = [index for index, line in enumerate(lines) if line["kind"] == "train"]
    if len(train) <= points:
        return lines
    chosen = {train[round(number * (len(train) - 1) / (points - 1))] for number in range(points)}
    return [line for index, line in enumerate(lines) if line["kind"] != "train" or index in chosen]
