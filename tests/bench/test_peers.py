"""Peers of the training benchmark: transformers' Trainer and a clone of nanoGPT take steps beside the arms."""

import json
import threading

import pytest
import torch
from typer.testing import CliRunner

from oelm.bench.arms import BenchSetting, plan_arms
from oelm.bench.peers import HfTrainer, Peer
from oelm.bench.steps import benchmark
from oelm.cli.app import app
from oelm.errors import ConfigError, OelmError
from oelm.training.parallel import World

# The parts of nanoGPT's model.py that the benchmark uses.
CLONE = """
from dataclasses import dataclass
import torch
from torch import nn
from torch.nn import functional as F

@dataclass
class GPTConfig:
    block_size: int = 1024
    vocab_size: int = 50304
    n_layer: int = 12
    n_head: int = 12
    n_embd: int = 768
    dropout: float = 0.0
    bias: bool = True

class GPT(nn.Module):
    def __init__(self, config):
        super().__init__()
        print("a clone")
        self.config = config
        self.wte = nn.Embedding(config.vocab_size, config.n_embd)

    def configure_optimizers(self, weight_decay, learning_rate, betas, device_type):
        return torch.optim.AdamW(self.parameters(), learning_rate, betas)

    def forward(self, idx, targets):
        assert idx.shape == targets.shape and idx.shape[1] == self.config.block_size
        assert (idx[:, 1:] == targets[:, :-1]).all()
        logits = self.wte(idx) @ self.wte.weight.T
        return logits, F.cross_entropy(logits.flatten(0, 1), targets.flatten())
"""
SMALL = [
    "model.fields.hidden_size=16",
    "model.fields.num_hidden_layers=2",
    "model.fields.num_attention_heads=2",
]


@pytest.fixture
def clone(tmp_path):
    (tmp_path / "model.py").write_text(CLONE)
    return tmp_path


def planned(*names: str, **setting: object):
    chosen = {"model": "gpt:tiny", "batch_size": 2, "length": 8, "vocab_size": 60, "overrides": SMALL, **setting}
    return plan_arms(names, BenchSetting(**chosen))


def test_peers_are_timed_beside_the_arms(clone):
    peers, threads = [Peer.parse("hf-trainer"), Peer.parse(f"nanogpt={clone}")], threading.active_count()
    rows = benchmark(planned("baseline", "oelm-freeze"), rounds=2, steps=2, warmup=1, peers=peers)
    assert [row.arm for row in rows] == ["baseline", "oelm-freeze", "hf-trainer", "nanogpt"]
    assert all(row.step_ms > 0 and row.rounds == 2 for row in rows)
    assert rows[2].trainable - rows[0].trainable == 2 * 4 * 16, "a GPT-2, which has biases at q, k, v and o"
    assert rows[2].flop_bound == rows[3].flop_bound == 1.0
    assert rows[3].trainable == 60 * 16
    assert threading.active_count() == threads, "the Trainer's thread has ended"


def test_the_trainer_is_timed_at_classification_and_with_micro_batches():
    arms = planned("baseline", model="random:bert", overrides=["train.micro_batch_size=1"], vocab_size=None)
    assert [row.arm for row in benchmark(arms, rounds=1, steps=1, warmup=1, peers=[Peer("hf-trainer")])][1:] == [
        "hf-trainer"
    ]


def test_the_trainer_takes_a_step_only_in_its_turn(monkeypatch):
    steps = []
    step = torch.optim.AdamW.step
    monkeypatch.setattr(torch.optim.AdamW, "step", lambda *arguments: steps.append(1) or step(*arguments))
    (config,) = planned("baseline").values()
    trainer = HfTrainer(config, World(0, 1, torch.device("cpu")), seed=0)
    for done in range(3):
        assert len(steps) == done
        trainer.step()
    trainer.close()
    assert len(steps) == 3
    assert not trainer._thread.is_alive()


def test_an_error_of_the_trainer_is_raised_where_its_step_is_taken(monkeypatch):
    def broken(*_: object) -> None:
        raise RuntimeError("no such row\nand more")

    (config,) = planned("baseline").values()
    trainer = HfTrainer(config, World(0, 1, torch.device("cpu")), seed=0)
    monkeypatch.setattr("oelm.bench.peers._Rows.__getitem__", broken)
    with pytest.raises(OelmError, match=r"hf-trainer: RuntimeError: .*no such row"):
        trainer.step()
    trainer.close()


def test_gpt2s_vocabulary_is_the_clones_own(clone):
    (row, peer) = benchmark(
        planned("baseline", vocab_size=50257), rounds=1, steps=1, warmup=0, peers=[Peer("nanogpt", clone)]
    )
    assert peer.trainable == 50304 * 16
    assert row.trainable > 50257 * 16


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("nanogpt", "nanogpt=FOLDER"),
        ("hf-trainer=x", "hf-trainer, or"),
        ("other", "hf-trainer, or"),
        ("nanogpt=nowhere", "no model.py"),
    ],
)
def test_a_peer_that_is_none_is_refused(text, problem):
    with pytest.raises(ConfigError, match=problem):
        Peer.parse(text)


def test_peers_are_refused_where_they_do_not_fit(clone):
    bert = planned("baseline", model="random:bert", overrides=[], vocab_size=None)
    with pytest.raises(ConfigError, match="gpt:SIZE"):
        benchmark(bert, rounds=1, steps=1, warmup=0, peers=[Peer("nanogpt", clone)])
    (clone / "model.py").write_text("import nothing_of_this_name")
    with pytest.raises(ConfigError, match="cannot be run"):
        benchmark(planned("baseline"), rounds=1, steps=1, warmup=0, peers=[Peer("nanogpt", clone)])


def test_the_command_prints_json_alone(clone):
    arguments = ["bench", "baseline", *SMALL, "--peer", "hf-trainer", "--peer", f"nanogpt={clone}", "--json"]
    sizes = ["--batch-size", "2", "--sequence-length", "8", "--rounds", "1", "--steps", "1", "--vocab-size", "60"]
    result = CliRunner().invoke(app, arguments + sizes)
    assert result.exit_code == 0, result.output
    assert [row["arm"] for row in json.loads(result.stdout)] == ["baseline", "hf-trainer", "nanogpt"]
    refused = CliRunner().invoke(app, [*arguments, "--decode"])
    assert (refused.exit_code, "leave out --decode" in refused.stderr) == (2, True)
