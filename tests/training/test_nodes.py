"""Two machines, as torchrun sees them, and what the processes exchange: each gradient is the whole batch's."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.support.distributed import (
    NoteGradients,
    Torchrun,
    fields,
    finish,
    folder_of,
    free_port,
    hashes,
    launch,
    wait_until,
)
from tests.support.training import LIMIT, read, result_without_times

pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(sys.platform == "win32", reason="needs POSIX signals"),
]


class TwoNodes:
    """`torchrun --nnodes 2 ... -m oelm train CONFIG` twice on this machine: two agents, each with one process."""

    def __init__(self, config: dict[str, object], sabotage: str | None = None) -> None:
        options = ["--nnodes", "2", "--nproc-per-node", "1", "--rdzv-backend", "c10d", "--rdzv-id", "test"]
        options += ["--rdzv-endpoint", f"127.0.0.1:{free_port()}"]
        # This machine's name need not resolve, nor lead back to it.
        options += ["--local-addr", "127.0.0.1"]
        self.agents = [Torchrun(config, *options, sabotage=sabotage) for _ in range(2)]

    def wait(self) -> list[tuple[int, str]]:
        return [agent.wait(LIMIT) for agent in self.agents]


def children(pid: int) -> list[int]:
    """Return the processes that a process started."""
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_two_nodes_give_the_bits_of_one_machine_and_resume_after_one_dies(parallel: str, tmp_path: Path) -> None:
    expected = finish(fields(tmp_path / "one", parallel))
    config = fields(tmp_path / "two", parallel)
    nodes = TwoNodes(config, sabotage="hold")
    wait_until(lambda: (folder_of(tmp_path / "two") / "metrics.jsonl").is_file())
    lost = nodes.agents[1]
    for pid in (lost.pid, *children(lost.pid)):  # as if its machine lost power
        os.kill(pid, signal.SIGKILL)
    # The other node's process is held, so that only the missing process can end it.
    nodes.agents[0].signal(signal.SIGTERM)
    assert all(code != 0 for code, _ in nodes.wait())
    outcomes = TwoNodes(config).wait()
    assert [code for code, _ in outcomes] == [0, 0], outcomes
    run = folder_of(tmp_path / "two")
    assert read(run / "environment.json")["world_size"] == 2
    assert hashes(run) == hashes(expected)
    assert result_without_times(run) == result_without_times(expected)


@pytest.mark.parametrize("micro", [None, 1])
@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_the_gradients_of_two_processes_are_those_of_one(parallel: str, micro: int | None, tmp_path: Path) -> None:
    """With whatever it accumulates, each process gets the gradient of the mean loss over the whole batch."""
    steps = {"max_steps": 2}
    alone = launch(fields(tmp_path / "one", train=steps), size=1, sabotage=NoteGradients(tmp_path / "alone"))
    assert alone.wait() == [0], alone.outputs
    config = fields(tmp_path / "two", parallel, train={**steps, "micro_batch_size": micro})
    finish(config, sabotage=NoteGradients(tmp_path / "both"))
    for step in range(2):
        expected = load_file(tmp_path / "alone" / f"rank-0-step-{step}.safetensors")
        assert expected
        for rank in range(2):
            gradients = load_file(tmp_path / "both" / f"rank-{rank}-step-{step}.safetensors")
            assert gradients.keys() == expected.keys()
            for name, gradient in gradients.items():
                torch.testing.assert_close(gradient, expected[name], rtol=1e-4, atol=1e-7, msg=name)
