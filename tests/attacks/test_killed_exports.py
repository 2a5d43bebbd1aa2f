"""Exports and reports that are killed at any file operation: started again, they end as if nothing had been."""

import os
import random
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from oelm.base import files
from tests.support.records import study
from tests.support.training import config, die, run_here, run_to_end, start


class DeathAtAFile:
    """Kills its process at the count-th file that it opens for writing, flushes, renames or removes."""

    def __init__(self, count: int) -> None:
        self.remaining = count

    def __call__(self) -> None:
        for owner, name in ((os, "replace"), (os, "fsync"), (os, "mkdir"), (shutil, "rmtree"), (Path, "unlink")):
            setattr(owner, name, self._counting(getattr(owner, name)))
        files.write_bytes = self._counting(files.write_bytes)

    def _counting(self, function: Any) -> Any:
        def counted(*arguments: Any, **options: Any) -> Any:
            self.remaining -= 1
            if self.remaining == 0:
                die()
            return function(*arguments, **options)

        return counted


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    run_here(folder, method="oelm-freeze")
    return config(folder, method="oelm-freeze").folder


def contents(folder: Path) -> dict[str, int]:
    """Return the names and sizes of all files below a folder, hidden ones too."""
    return {str(path.relative_to(folder)): path.stat().st_size for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("target", ["a new folder", "an empty folder"])
@pytest.mark.parametrize("command", ["export", "report"])
def test_a_killed_command_can_be_started_again(command, target, run, rounds, tmp_path):
    if command == "report":
        source = study(tmp_path / "runs", seeds=2)
        arguments = ["report", source, "--formats", "md,html", "--out"]
    else:
        arguments = ["export", run]
    operations = 60 if command == "report" else 12
    whole = tmp_path / "whole" / "out"
    whole.parent.mkdir()
    run_to_end(*arguments, whole)
    randomness, outcomes = random.Random(f"{command} {target}"), Counter()
    for number in range(rounds(3)):
        parent = tmp_path / f"round-{number}"
        parent.mkdir()
        out = parent / "out"
        if target == "an empty folder":
            out.mkdir()
        code = start(*arguments, out, sabotage=DeathAtAFile(randomness.randint(1, operations))).wait()
        outcomes["killed" if code == -9 else "finished first"] += 1
        if code == -9:
            run_to_end(*arguments, out)
        assert contents(out).keys() == contents(whole).keys(), "nothing is missing, and nothing was left behind"
        assert sorted(path.name for path in parent.iterdir()) == ["out"]
    print(f"{command} into {target}: {dict(outcomes)}")
