"""Disks that fill up or turn read-only: one clear line, nothing lost and nothing left behind, and it can go on."""

import errno
import os
import random
import re
import shutil
from collections import Counter
from pathlib import Path

import pytest

from oelm.evaluation.load import load_run
from oelm.lab.status import LAB
from oelm.training.checkpoint import list_checkpoints
from tests.support.disks import BrokenDisk, ForkedRuns, NoSpaceCheck, small_disk
from tests.support.lab import plan, train_uninterrupted
from tests.support.records import study
from tests.support.training import Process, assert_same_run, config, run_here, run_to_end, start, tiny, write_yaml

ROOM = "size=1g,nr_inodes=0"
SAVING = {"method": "oelm-freeze", "checkpoint": {"every": 2, "keep": 3}, "eval": {"every": 2}, "log": {"every": 1}}
REASONS = {
    errno.ENOSPC: "No space left on device",
    errno.EROFS: "Read-only file system",
    errno.EDQUOT: "quota exceeded",
}
COMMANDS = ["export", "report", "archive"]


def assert_one_line(process: Process, reason: str) -> None:
    """Require that a process was refused in one line that says which file and why."""
    assert "Traceback" not in process.output, process.output
    (line,) = [line for line in process.output.splitlines() if line.startswith("oelm: ")]
    assert reason in line


def unfinished(folder: Path) -> list[Path]:
    """Return the temporary files and folders below a folder."""
    return [path for path in folder.rglob(".*") if path.name.endswith((".tmp", ".old"))]


def contents(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


# Training


@pytest.fixture(scope="module")
def whole_run(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("whole")
    run_here(folder, **SAVING)
    return config(folder, **SAVING).folder


def assert_goes_on(file: Path, run: Path, whole: Path) -> None:
    """Require that a run's checkpoints are whole, and that it ends with the bits of one that had room."""
    assert [path for path in unfinished(run) if path.is_dir() and path.suffix == ".tmp"] == [], (
        "incomplete folders are gone"
    )
    if list_checkpoints(run / "checkpoints"):
        load_run(run, last=True)
    run_to_end("train", file)
    assert_same_run(run, whole)
    assert unfinished(run) == []


def test_training_on_a_disk_that_fills_up_loses_nothing(whole_run, rounds, tmp_path):
    randomness, outcomes = random.Random("training on a full disk"), Counter()
    for number in range(rounds(2)):
        place = tmp_path / f"disk-{number}"
        file = write_yaml(tmp_path / f"{number}.yaml", tiny(place, **SAVING))
        full = randomness.choice([f"size={randomness.randint(6, 400) * 4}k", f"nr_inodes={randomness.randint(5, 40)}"])
        with small_disk(place, full) as remount:
            process = start("train", file, sabotage=NoSpaceCheck())
            code = process.wait()
            outcomes["refused" if code else "fitted"] += 1
            if code:
                assert code == 2, process.output
                assert_one_line(process, REASONS[errno.ENOSPC])
            remount(ROOM)
            assert_goes_on(file, config(place, **SAVING).folder, whole_run)
    print(f"training on a small disk: {dict(outcomes)}, then each ended as one with room")


def test_training_whose_files_are_refused_loses_nothing(whole_run, rounds, tmp_path):
    randomness, outcomes = random.Random("training"), Counter()
    for number in range(rounds(3)):
        code = list(REASONS)[number % 3]
        output = tmp_path / f"round-{number}"
        file = write_yaml(tmp_path / f"{number}.yaml", tiny(output, **SAVING))
        process = start("train", file, sabotage=NoSpaceCheck(BrokenDisk(output, randomness.randint(1, 120), code)))
        ended = process.wait()
        outcomes[REASONS[code] if ended else "finished first"] += 1
        if ended:
            assert ended == 2, process.output
            assert_one_line(process, REASONS[code])
        if code == errno.EROFS:  # then nothing could be removed either; the next start does it
            run_to_end("train", file)
        assert_goes_on(file, config(output, **SAVING).folder, whole_run)
    print(f"training until its files are refused: {dict(outcomes)}, then each ended as one with room")


# Export, report and archive


@pytest.fixture(scope="module")
def sources(whole_run, tmp_path_factory) -> dict[str, list[object]]:
    """Return each command but for the folder that it writes."""
    runs = study(tmp_path_factory.mktemp("study"), seeds=2)
    return {
        "export": ["export", whole_run],
        "report": ["report", runs, "--formats", "html", "--out"],
        "archive": ["archive", runs, "--out"],
    }


def assert_whole_or_absent(command: str, disk: Path, whole: Path) -> None:
    """Require that what a refused command left is complete: files of a report, runs of an archive, or nothing."""
    assert unfinished(disk) == []
    if command == "export":
        assert not (disk / "out").exists()
    written = contents(disk / "out") if (disk / "out").exists() else set()
    assert written <= contents(whole)
    if command == "report":
        assert all((disk / "out" / name).stat().st_size for name in written)
    if command == "archive":
        for run in {Path(name).parent for name in written}:
            assert contents(disk / "out" / run) == contents(whole / run)


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_on_a_disk_that_fills_up_leaves_nothing_behind(command, sources, rounds, tmp_path):
    randomness, outcomes = random.Random(f"{command} on a full disk"), Counter()
    whole = tmp_path / "whole"
    run_to_end(*sources[command], whole)
    pages = sum(-(-path.stat().st_size // 4096) + 1 for path in whole.rglob("*")) + 4
    files = len(list(whole.rglob("*")))
    for number in range(rounds(1 if command == "report" else 3)):
        disk = tmp_path / f"disk-{number}"
        full = [f"size={randomness.randint(1, pages) * 4}k", f"nr_inodes={randomness.randint(2, files + 3)}"]
        with small_disk(disk, randomness.choice(full)) as remount:
            process = start(*sources[command], disk / "out")
            code = process.wait()
            outcomes["refused" if code else "fitted"] += 1
            if code:
                assert code == 2, process.output
                assert_one_line(process, REASONS[errno.ENOSPC])
                assert_whole_or_absent(command, disk, whole)
            remount(ROOM)
            if command != "export" or code:
                run_to_end(*sources[command], disk / "out")
            assert contents(disk / "out") == contents(whole)
            assert sorted(os.listdir(disk)) == ["out"]
    print(f"{command} on a small disk: {dict(outcomes)}, then each was complete")


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_whose_files_are_refused_can_be_started_again(command, sources, rounds, tmp_path):
    randomness, outcomes = random.Random(command), Counter()
    whole = tmp_path / "whole"
    run_to_end(*sources[command], whole)
    operations = {"export": 20, "report": 60, "archive": 200}[command]
    for number in range(rounds(1 if command == "report" else 3)):
        code, disk = list(REASONS)[number % 3], tmp_path / f"disk-{number}"
        disk.mkdir()
        broken = BrokenDisk(disk, randomness.randint(1, operations), code)
        process = start(*sources[command], disk / "out", sabotage=broken)
        ended = process.wait()
        outcomes[REASONS[code] if ended else "finished first"] += 1
        if ended:
            assert ended == 2, process.output
            assert_one_line(process, REASONS[code])
            if code != errno.EROFS:  # then nothing could be removed either; the next start does it
                assert_whole_or_absent(command, disk, whole)
            run_to_end(*sources[command], disk / "out")
        assert contents(disk / "out") == contents(whole)
        assert sorted(os.listdir(disk)) == ["out"]
    print(f"{command} until its files are refused: {dict(outcomes)}, then each was complete")


# A matrix


def test_a_matrix_on_a_disk_that_fills_up_can_be_started_again(rounds, tmp_path):
    """Each run that found no room is named with the reason; once there is room, all end as in one that had it."""
    randomness, outcomes = random.Random("matrix"), Counter()
    planned = plan(tmp_path)
    whole = train_uninterrupted(planned, tmp_path / "whole")
    for number in range(rounds(1)):
        disk = tmp_path / f"disk-{number}"
        arguments = ["matrix", tmp_path / "study.yaml", "--out", disk, "--yes"]
        full = [f"size={randomness.randint(1, 700) * 4}k", f"nr_inodes={randomness.randint(2, 80)}"]
        with small_disk(disk, randomness.choice(full)) as remount:
            process = start(*arguments, sabotage=ForkedRuns())
            code = process.wait()
            assert "Traceback" not in process.output, process.output
            if code == 2:
                assert_one_line(process, REASONS[errno.ENOSPC])
            elif code:
                assert code == 1, process.output
                failed = [line for line in process.output.splitlines() if " failed   " in line]
                assert failed, process.output
                # A run whose disk is full may be unable to say so: then the matrix does.
                said = re.compile(f"{REASONS[errno.ENOSPC]}|MB are free|no room for more files")
                assert all(said.search(line) for line in failed), process.output
            outcomes[{0: "fitted", 1: "runs failed", 2: "refused"}[code]] += 1
            assert [path for path in unfinished(disk) if path.is_dir()] == []
            remount(ROOM)
            run_to_end(*arguments, sabotage=ForkedRuns())
            for run in planned:
                assert_same_run(disk / run.name, whole[run.name])
            assert unfinished(disk) == []
            assert list((disk / LAB).iterdir()) == []
    print(f"a matrix on a small disk: {dict(outcomes)}, then each ended as one with room")


# A disk that cannot be written at all


@pytest.mark.parametrize("command", ["train", *COMMANDS])
def test_a_read_only_disk_is_refused_in_one_line(command, sources, whole_run, tmp_path):
    """Before anything was written, and where an earlier command has written."""
    disk = tmp_path / "disk"
    file = write_yaml(tmp_path / "run.yaml", tiny(disk, **SAVING))
    arguments = ["train", file] if command == "train" else [*sources[command], disk / "out"]
    with small_disk(disk, ROOM) as remount:
        for again in (False, True):
            before = contents(disk)
            remount("ro")
            process = start(*arguments)
            code = process.wait()
            if not (again and command in ("train", "archive")):  # these have nothing left to write
                assert code == 2, process.output
            if code and "is not empty" not in process.output:
                assert_one_line(process, REASONS[errno.EROFS])
            assert contents(disk) == before
            remount("rw")
            if not again:
                run_to_end(*arguments)
        if command == "train":
            assert_same_run(config(disk, **SAVING).folder, whole_run)
    shutil.rmtree(disk, ignore_errors=True)
