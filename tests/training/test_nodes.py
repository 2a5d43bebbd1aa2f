"""Two machines, as torchrun sees them, and what the processes exchange: each gradient is the whole batch's."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from oelm.base.strict import merge
from oelm.config import RunConfig
from oelm.data.synthetic.judgements import judgement_tokenizer
from oelm.training.tasks.open import open_task
from tests.support import finetuning
from tests.support.distributed import (
    NoteGradients,
    Torchrun,
    assert_close,
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
    """`torchrun --nnodes 2 ... -m oelm train CONFIG` twice on this machine: two agents, each with its processes."""

    def __init__(self, config: dict[str, Any], sabotage: str | None = None, processes: int = 1) -> None:
        options = ["--nnodes", "2", "--nproc-per-node", str(processes), "--rdzv-backend", "c10d", "--rdzv-id", "test"]
        options += ["--rdzv-endpoint", f"127.0.0.1:{free_port()}"]
        # This machine's name need not resolve, nor lead back to it.
        options += ["--local-addr", "127.0.0.1"]
        self.agents = [Torchrun(config, *options, sabotage=sabotage) for _ in range(2)]

    def wait(self) -> list[tuple[int, str]]:
        return [agent.wait(LIMIT) for agent in self.agents]

    def kill(self) -> None:
        """Kill the agents and their processes, as if both machines lost power."""
        for agent in self.agents:
            kill_with_children(agent)
        assert [code for code, _ in self.wait()] == [-signal.SIGKILL] * 2


def children(pid: int) -> list[int]:
    """Return the processes that a process started."""
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def kill_with_children(agent: Torchrun) -> None:
    for pid in (agent.pid, *children(agent.pid)):
        os.kill(pid, signal.SIGKILL)


@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_two_nodes_give_the_bits_of_one_machine_and_resume_after_one_dies(parallel: str, tmp_path: Path) -> None:
    expected = finish(fields(tmp_path / "one", parallel))
    config = fields(tmp_path / "two", parallel)
    nodes = TwoNodes(config, sabotage="hold")
    wait_until(lambda: (folder_of(tmp_path / "two") / "metrics.jsonl").is_file())
    kill_with_children(nodes.agents[1])  # as if its machine lost power
    # The other node's process is held, so that only the missing process can end it.
    nodes.agents[0].signal(signal.SIGTERM)
    assert all(code != 0 for code, _ in nodes.wait())
    outcomes = TwoNodes(config).wait()
    assert [code for code, _ in outcomes] == [0, 0], outcomes
    run = folder_of(tmp_path / "two")
    assert read(run / "environment.json")["world_size"] == 2
    assert hashes(run) == hashes(expected)
    assert result_without_times(run) == result_without_times(expected)


@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_two_nodes_that_were_killed_resume_with_twice_as_many_processes(parallel: str, tmp_path: Path) -> None:
    often = {"every": 2}
    config = fields(tmp_path / "two", parallel, checkpoint=often)
    run = folder_of(tmp_path / "two")
    nodes = TwoNodes(config, sabotage="hold")
    wait_until(lambda: any((run / "checkpoints").glob("step-*")))
    nodes.kill()
    refused = TwoNodes(config, processes=2).wait()
    assert all(code != 0 and "world_size" in output for code, output in refused), refused
    outcomes = TwoNodes(merge(config, {"checkpoint": {"resume": "inexact"}}), processes=2).wait()
    assert [code for code, _ in outcomes] == [0, 0], outcomes
    assert read(run / "environment.json")["world_size"] == 4
    assert any("world_size 2 then, 4 now" in note for note in read(run / "result.json")["notes"])
    assert_close(run, finish(fields(tmp_path / "one", checkpoint=often), size=1))


# What the processes exchange


def assert_same_gradients(folder: Path, alone: dict[str, Any], together: dict[str, Any], size: int, steps: int) -> None:
    """Train on one process and on several; require that every optimiser gets the same gradients in every step."""
    one = launch(alone, size=1, sabotage=NoteGradients(folder / "alone"))
    assert one.wait() == [0], one.outputs
    finish(together, size=size, sabotage=NoteGradients(folder / "together"))
    for step in range(steps):
        expected = load_file(folder / "alone" / f"rank-0-step-{step}.safetensors")
        assert expected
        for rank in range(size):
            gradients = load_file(folder / "together" / f"rank-{rank}-step-{step}.safetensors")
            assert gradients.keys() == expected.keys()
            for name, gradient in gradients.items():
                torch.testing.assert_close(gradient, expected[name], rtol=1e-4, atol=1e-7, msg=name)


@pytest.mark.parametrize(("size", "micro"), [(2, None), (2, 1), (4, None), (4, 1)])
@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_the_gradients_of_several_processes_are_those_of_one(
    parallel: str, size: int, micro: int | None, tmp_path: Path
) -> None:
    """With whatever it accumulates, each process gets the gradient of the mean loss over the whole batch."""
    steps = {"max_steps": 2}
    together = fields(tmp_path / "two", parallel, train={**steps, "micro_batch_size": micro})
    assert_same_gradients(tmp_path, fields(tmp_path / "one", train=steps), together, size, 2)


@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_the_gradients_of_unequal_shares_are_those_of_one_process(parallel: str, tmp_path: Path) -> None:
    """Answers of one to seven words, so that the processes' losses count different numbers of tokens."""
    words = [" ".join(["good", "film"] * 4).split()[: 1 + number % 7] for number in range(60)]
    for split in ("train", "validation"):
        rows = "".join(
            f"the {split} film {number} was good,{' '.join(answer)}\n" for number, answer in enumerate(words)
        )
        (tmp_path / f"{split}.csv").write_text(f"source,target\n{rows}")
    judgement_tokenizer().save_pretrained(tmp_path / "reader")
    model = {"name": "random:bart", "fields": {"dropout": 0.0}, "tokenizer": str(tmp_path / "reader")}

    def config(place: str, **train: Any) -> dict[str, Any]:
        return finetuning.fields(
            tmp_path / place,
            experiment="run",
            method="oelm-freeze",
            task={"name": "folder", "form": "text"},
            data={"path": str(tmp_path)},
            train={"max_steps": 2, "batch_size": 6, **train},
            eval={"every": 2, "sequences": 8, "generations": 0},
        ) | {"model": model}

    task = open_task(RunConfig.load(config("counted")))
    assert task.target_count(0, 3) != task.target_count(3, 3), "the two processes' shares of the first batch"
    assert_same_gradients(tmp_path, config("one"), config("two", parallel=parallel, micro_batch_size=1), 2, 2)
