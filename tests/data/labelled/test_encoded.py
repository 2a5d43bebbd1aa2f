"""Encoded examples: each once per epoch, in batches of similar length, whatever the number of ranks."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from oelm.data.labelled.encoded import LengthGrouped, encode

LENGTHS = st.lists(st.integers(1, 60), min_size=1, max_size=300).map(lambda lengths: np.array(lengths, dtype=np.int64))


@given(lengths=LENGTHS, batch=st.integers(1, 24), seed=st.integers(0, 5), epoch=st.integers(0, 3))
@settings(max_examples=60, deadline=None)
def test_an_epoch_has_every_example_once_and_empty_slots_only_at_its_end(lengths, batch, seed, epoch):
    order = LengthGrouped(lengths, batch, seed)
    assert order.slots % batch == 0
    assert 0 <= order.slots - len(lengths) < batch
    examples = order.chosen(epoch * order.slots, order.slots)
    assert sorted(examples[: len(lengths)]) == list(range(len(lengths)))
    assert (examples[len(lengths) :] == -1).all()


@given(lengths=LENGTHS, share=st.integers(1, 6), ranks=st.sampled_from([1, 2, 3, 4]), step=st.integers(0, 40))
@settings(max_examples=60, deadline=None)
def test_the_shares_of_all_ranks_make_up_the_batch(lengths, share, ranks, step):
    batch = share * ranks
    order = LengthGrouped(lengths, batch, seed=3)
    whole = order.chosen(step * batch, batch)
    shares = [LengthGrouped(lengths, batch, seed=3).chosen(step * batch + rank * share, share) for rank in range(ranks)]
    assert whole.tolist() == np.concatenate(shares).tolist()


def test_batches_have_similar_lengths_and_are_not_sorted_by_length():
    lengths = np.random.default_rng(0).integers(5, 100, 4000)
    order = LengthGrouped(lengths, 16, seed=0)
    batches = lengths[order.chosen(0, order.slots).reshape(-1, 16)]
    padded, real = batches.max(1).sum() * 16, lengths.sum()
    assert padded < 1.1 * real, "without grouping by length, the ratio is about 1.8"
    longest = batches.max(1)
    assert abs(np.corrcoef(longest, np.arange(len(longest)))[0, 1]) < 0.2


def test_other_epochs_and_seeds_give_other_orders():
    lengths = np.random.default_rng(0).integers(5, 100, 400)
    order = LengthGrouped(lengths, 16, seed=0)
    first, second = order.chosen(0, 400).tolist(), order.chosen(400, 400).tolist()
    assert first != second
    assert first != LengthGrouped(lengths, 16, seed=1).chosen(0, 400).tolist()
    assert first == LengthGrouped(lengths, 16, seed=0).chosen(0, 400).tolist()


@pytest.fixture(scope="module")
def tokenizer():
    words = {word: index for index, word in enumerate(["[PAD]", "[UNK]", *"abcdefgh"])}
    backend = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="[PAD]", unk_token="[UNK]")


def test_rows_are_padded_to_the_longest_and_truncated_texts_are_counted(tokenizer):
    encoded = encode(tokenizer, ["a b c", "d", "a b c d e f g h a b c d", "e f"], None, longest=10)
    assert encoded.lengths.tolist() == [3, 1, 10, 2]
    assert encoded.truncated == 1
    rows = encoded.pad(np.array([3, 0]), pad_id=0)
    assert rows["input_ids"].shape == (2, 8)
    assert rows["input_ids"][:, :4].tolist() == [[6, 7, 0, 0], [2, 3, 4, 0]]
    assert rows["attention_mask"].sum(1).tolist() == [2, 3]
    assert encoded.pad(np.array([2]), pad_id=0)["input_ids"].shape == (1, 16), "the width is not a multiple of 8"
