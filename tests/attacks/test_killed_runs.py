"""Training that is killed again and again, at random steps and file operations, ends with the same bits."""

import random
import signal
from pathlib import Path

import pytest

from oelm.base.manifest import read_manifest
from oelm.evaluation.load import load_run
from oelm.runs.folder import SEALED
from oelm.training.checkpoint import list_checkpoints
from tests.support.training import Death, assert_same_run, config, run_to_end, start, tiny, write_yaml

_COMMON = {"checkpoint": {"every": 3}, "log": {"every": 2}}
_METHODS = {
    "oelm-freeze": "oelm-freeze",
    "unfreezing": {"preset": "oelm-core", "schedule": {"kind": "unfreeze", "steps": [3, 7]}},
}


@pytest.mark.parametrize("method", _METHODS)
def test_a_run_that_is_killed_ends_as_if_nothing_had_been(method, rounds, tmp_path):
    changes = {**_COMMON, "method": _METHODS[method]}

    def folder_in(output: Path) -> Path:
        return config(output, **changes).folder

    whole = tmp_path / "whole"
    run_to_end("train", write_yaml(tmp_path / "whole.yaml", tiny(whole, **changes)))
    draw, killed = random.Random(method), 0
    for number in range(rounds(2)):
        output = tmp_path / f"round-{number}"
        file = write_yaml(tmp_path / f"{number}.yaml", tiny(output, **changes))
        while (code := start("train", file, sabotage=Death(draw.randint(10, 80))).wait()) != 0:
            assert code == -signal.SIGKILL
            killed += 1
            if list_checkpoints(folder_in(output) / "checkpoints"):
                load_run(folder_in(output), last=True)  # what counts as a checkpoint is whole, and verifies
        assert_same_run(folder_in(output), folder_in(whole))
        assert set(read_manifest(folder_in(output))) == set(SEALED), "its records have hashes, whenever it was killed"
        assert list(folder_in(output).rglob(".*.tmp")) == [], "nothing half written is left behind"
    print(f"training with {method}: {killed} killed in {rounds(2)} runs, each ended with the bits of a whole one")
