"""Distributed training that is killed again and again, one process or all, ends as if nothing had been."""

import random
import signal
from collections import Counter
from itertools import cycle

import pytest

from oelm.base.manifest import read_manifest
from oelm.evaluation.load import load_run
from oelm.lab.status import read_state
from oelm.runs.folder import SEALED
from oelm.training.checkpoint import list_checkpoints
from tests.support.distributed import assert_close, fields, finish, folder_of, hashes, launch
from tests.support.training import Death, metrics_without_times, result_without_times

# The first process counts its steps, its lines of metrics and all files but shards; the others their steps and shards.
OPERATIONS = {0: (15, 80), 1: (6, 40)}
OFTEN = {"checkpoint": {"every": 3}, "log": {"every": 2}}


def killed(config, size, randomness, *arguments) -> list[int]:
    """Start a run on `size` processes, kill one of them or all at random operations, and return their exit codes."""
    ranks = range(size) if randomness.random() < 0.3 else [randomness.randrange(size)]
    group = launch(
        config, *arguments, size=size, sabotage={rank: Death(randomness.randint(*OPERATIONS[rank])) for rank in ranks}
    )
    codes = group.wait()
    for code, output in zip(codes, group.outputs, strict=True):
        assert code in (0, 2, -signal.SIGKILL), output
        assert code != 2 or "lost contact with another process" in output, output
        assert "Traceback" not in output, output
    return codes


@pytest.mark.parametrize("sizes", [(2,), (1, 2)], ids=["two processes", "one and two in turn"])
@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_a_group_that_is_killed_ends_as_if_nothing_had_been(parallel, sizes, rounds, tmp_path):
    """Bit for bit with the same number of processes; with another one up to the order in which floats are added."""
    whole = finish(fields(tmp_path / "whole", parallel, **OFTEN))
    randomness, outcomes = random.Random(f"{parallel} {sizes}"), Counter()
    arguments = [] if len(sizes) == 1 else ["checkpoint.resume=inexact"]
    for number in range((rounds(1) + 1) // 2):
        config, run = fields(tmp_path / f"round-{number}", parallel, **OFTEN), folder_of(tmp_path / f"round-{number}")
        for size in cycle(sizes):
            outcomes["resumed"] += bool(list_checkpoints(run / "checkpoints"))
            codes = killed(config, size, randomness, *arguments)
            outcomes["killed"] += codes.count(-signal.SIGKILL)
            if not any(codes):
                break
            if list_checkpoints(run / "checkpoints"):
                load_run(run, last=True)  # what counts as a checkpoint is whole, and verifies
        outcomes["runs"] += 1
        if len(sizes) == 1:
            assert hashes(run) == hashes(whole)
            assert metrics_without_times(run) == metrics_without_times(whole)
            assert result_without_times(run) == result_without_times(whole)
        else:
            assert_close(run, whole)
        assert read_state(run).state == "finished"
        assert set(read_manifest(run)) == set(SEALED), "its records have hashes, whenever it was killed"
        assert [path for path in run.rglob(".*") if path.name.endswith((".tmp", ".old"))] == []
    print(f"training by {parallel} on {' and '.join(map(str, sizes))} processes: {dict(outcomes)}")
