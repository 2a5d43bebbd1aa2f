"""Slices of the loss: what counts as a repeat, how frequent a pair is, and that they add up to the loss."""

import math
from itertools import pairwise
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from oelm.data.corpus.batches import Windows
from oelm.data.corpus.tokens import in_memory
from oelm.evaluation.use import evaluate_run
from oelm.training.parallel import World
from oelm.training.tasks import slices
from oelm.training.tasks.base import summed_loss
from oelm.training.tasks.language import LanguageModelling, SummedLoss
from oelm.training.tasks.slices import FREQUENCIES, REPEATS, PairFrequencies, repeats
from oelm.training.validation import validate
from tests.support.training import config, run_here

CPU = World(0, 1, torch.device("cpu"))
VOCABULARY = 30


def text(tokens: int, vocabulary: int = VOCABULARY, seed: int = 0) -> np.ndarray:
    """Return random tokens, with pieces that come again at once."""
    generator = np.random.default_rng(seed)
    ids = generator.integers(0, vocabulary, tokens)
    for start in generator.integers(0, tokens - 20, tokens // 40):
        ids[start + 9 : start + 18] = ids[start : start + 9]
    return ids.astype(np.uint16)


def task(length: int = 20, windows: int = 12) -> LanguageModelling:
    """Return a task on random text; the validation text has pairs that its training text does not have."""
    data = in_memory(text(3000, seed=1), text(windows * length + 1, VOCABULARY + 2), vocab_size=VOCABULARY + 2)
    training, held_out = Windows(data.train.tokens, length), Windows(data.val.tokens, length)
    return LanguageModelling(data, training, held_out, length, PairFrequencies(training.tokens, data.vocab_size))


def longest_repeat(window: list[int], end: int) -> int:
    """Return how many tokens up to a place were together earlier in the window, by trying every place."""
    longest = 0
    for other in range(end):
        size = 0
        while size <= other and window[other - size] == window[end - size]:
            size += 1
        longest = max(longest, size)
    return longest


def pairs_of(tokens: list[int]) -> list[tuple[int, int]]:
    return list(pairwise(tokens))


def frequency(pair: tuple[int, int], training: list[tuple[int, int]], rare: float, common: float) -> str:
    per_million = 1e6 * training.count(pair) / len(training)
    if not per_million:
        return "never"
    return "rare" if per_million < rare else "common" if per_million < common else "frequent"


class Copying(nn.Module):
    """Predict the token that followed this one the last time, and any token alike where it is new."""

    def forward(self, input_ids: torch.Tensor, use_cache: bool) -> SimpleNamespace:
        logits = torch.zeros(*input_ids.shape, VOCABULARY + 2)
        for row, ids in enumerate(input_ids.tolist()):
            followed_by: dict[int, int] = {}
            for place, token in enumerate(ids):
                if place:
                    followed_by[ids[place - 1]] = token
                if token in followed_by:
                    logits[row, place, followed_by[token]] = 5.0
        return SimpleNamespace(logits=logits)


class Fixed(nn.Module):
    """Return logits that depend on the token alone."""

    def forward(self, input_ids: torch.Tensor, use_cache: bool) -> SimpleNamespace:
        table = torch.randn(VOCABULARY + 2, VOCABULARY + 2, generator=torch.Generator().manual_seed(0))
        return SimpleNamespace(logits=table[input_ids])


@pytest.mark.parametrize(("length", "vocabulary"), [(1, 5), (3, 3), (8, 40), (64, 12), (64, 50_000)])
def test_repeats_are_those_that_trying_every_place_finds(length, vocabulary):
    windows = Windows(text(40 * length + 60, vocabulary), length).sequential(0, 12)
    found = repeats(windows)
    assert found.shape == (len(windows), length)
    for row, window in zip(found.tolist(), windows.tolist(), strict=True):
        longest = [longest_repeat(window, end) for end in range(1, length + 1)]
        assert row == [int(np.searchsorted([1, 2, 4, 8], size, side="right")) for size in longest]


def test_frequencies_are_counts_in_the_training_text(monkeypatch):
    monkeypatch.setattr(slices, "_RARE", 1000)
    monkeypatch.setattr(slices, "_COMMON", 2000)
    training, windows = text(3000, seed=1), Windows(text(600, 33, seed=2), 25).sequential(0, 20)
    found = PairFrequencies(training, 33).of(windows)
    counted = pairs_of(training.tolist())
    expected = [[frequency(pair, counted, 1000, 2000) for pair in pairs_of(window)] for window in windows.tolist()]
    assert [[FREQUENCIES[number] for number in row] for row in found.tolist()] == expected
    assert {name for row in expected for name in row} == set(FREQUENCIES)


def test_a_long_training_text_is_counted_in_pieces_from_its_start_to_its_end(monkeypatch):
    monkeypatch.setattr(slices, "_MOST_COUNTED", 400)
    monkeypatch.setattr(slices, "_PIECE", 100)
    training = np.repeat(np.arange(10, dtype=np.uint16), 100)  # every hundred tokens are of one kind
    found = PairFrequencies(training, 10).of(np.arange(10)[:, None].repeat(2, axis=1))
    assert [kind for kind in range(10) if found[kind, 0] == FREQUENCIES.index("frequent")] == [0, 3, 6, 9]


def by_hand(of: LanguageModelling) -> dict[str, dict[str, list[float]]]:
    """Return the losses of the targets of every slice, found window by window in plain code."""
    found: dict[str, dict[str, list[float]]] = {}
    counted = pairs_of(of.windows.tokens.tolist())
    for window in of.held_out.sequential(0, len(of.held_out)).tolist():
        logits = Fixed()(torch.tensor([window[:-1]]), False).logits[0]
        losses = F.cross_entropy(logits, torch.tensor(window[1:]), reduction="none").tolist()
        for place, (pair, loss) in enumerate(zip(pairs_of(window), losses, strict=True), start=1):
            size = longest_repeat(window, place)
            recall = "hit" if pair in pairs_of(window[:place]) else "rest"
            names = {
                "recall": recall,
                "frequency": f"{recall} {frequency(pair, counted, 10, 100)}",
                "repeat": REPEATS[int(np.searchsorted([1, 2, 4, 8], size, side="right"))],
                "position": "1-16" if place <= 16 else f"17-{of.length}",
            }
            for part, name in names.items():
                found.setdefault(part, {}).setdefault(name, []).append(loss)
    return found


def test_every_slice_has_the_losses_of_its_targets_and_each_part_the_whole_loss():
    of = task()
    metrics = validate(SummedLoss(Fixed()), of, CPU, batch_size=5)
    losses = by_hand(of)
    assert set(losses["recall"]) == {"hit", "rest"}
    assert metrics["slices"].keys() == losses.keys()
    for part, named in losses.items():
        found = metrics["slices"][part]
        assert {name: row["tokens"] for name, row in found.items()} == {name: len(own) for name, own in named.items()}
        for name, own in named.items():
            assert found[name]["loss"] == pytest.approx(np.mean(own), rel=1e-6)
        tokens = sum(row["tokens"] for row in found.values())
        assert tokens == len(of.held_out) * of.length
        assert sum(row["loss"] * row["tokens"] for row in found.values()) / tokens == pytest.approx(metrics["loss"])


def test_the_loss_itself_is_the_same_to_the_last_bit_as_without_slices():
    of = task()
    batch = of.validation(0, 5, fill_to=7)
    module = SummedLoss(Fixed()).eval()
    with_slices = module(**batch)
    assert torch.equal(with_slices[:2], module(batch["inputs"], batch["targets"]))
    assert torch.equal(with_slices[:2], summed_loss(Fixed()(batch["inputs"], False).logits, batch["targets"], False))


def test_two_processes_add_up_to_the_slices_of_one(monkeypatch):
    of, module = task(windows=13), SummedLoss(Fixed())
    sums: list[list[float]] = []
    monkeypatch.setattr(World, "totals", lambda world, own: sums.append(own) or own)
    whole = validate(module, of, CPU, batch_size=13)
    for rank in range(2):
        validate(module, of, World(rank, 2, torch.device("cpu")), batch_size=4)
    added = of.metrics([one + other for one, other in zip(*sums[1:], strict=True)])
    for part, named in whole["slices"].items():
        for name, row in named.items():
            assert added["slices"][part][name] == {"loss": pytest.approx(row["loss"]), "tokens": row["tokens"]}


def test_a_model_that_copies_shows_it_in_the_hits():
    recall = validate(SummedLoss(Copying()), task(length=40, windows=40), CPU, batch_size=8)["slices"]["recall"]
    chance = math.log(VOCABULARY + 2)
    assert recall["hit"]["loss"] < 0.5 * chance
    assert recall["rest"]["loss"] > chance, "it copies where nothing is to be copied, too"


def test_a_run_records_the_slices_of_its_last_and_its_best_model(tmp_path):
    result = run_here(tmp_path, eval={"every": 4, "sequences": None})
    for of_model in ("last", "best"):
        bands = result[of_model]["slices"]["position"]
        assert bands["1-16"]["tokens"] == bands["17-32"]["tokens"]
        assert (bands["1-16"]["loss"] + bands["17-32"]["loss"]) / 2 == pytest.approx(result[of_model]["loss"])
    again = evaluate_run(config(tmp_path).folder, batch_size=3)["slices"]
    assert again["recall"]["hit"]["tokens"] == result["best"]["slices"]["recall"]["hit"]["tokens"]
    assert again["recall"]["hit"]["loss"] == pytest.approx(result["best"]["slices"]["recall"]["hit"]["loss"], rel=1e-5)
