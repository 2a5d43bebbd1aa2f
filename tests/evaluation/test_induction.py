"""Repeating random tokens: an oracle that copies, and a model with random weights, which cannot."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn
from transformers.modeling_outputs import CausalLMOutput

from oelm.errors import ModelError
from oelm.evaluation.induction import measure_repetition
from oelm.models.small import small_model
from tests.support.models import lively_model

VOCABULARY = 1000


class Copier(nn.Module):
    """Predicts the token that came after the last occurrence of the present one, if there was one.

    Of two layers of three heads, one attends to that token.
    """

    device = torch.device("cpu")
    config = SimpleNamespace(max_position_embeddings=70, is_encoder_decoder=False)
    gives_weights = True

    def can_generate(self):
        return True

    def get_input_embeddings(self):
        return SimpleNamespace(weight=torch.zeros(VOCABULARY, 4))

    @property
    def base_model(self):
        return self

    def forward(self, input_ids, attention_mask=None, use_cache=False):
        count, length = input_ids.shape
        logits = torch.zeros(count, length, VOCABULARY)
        weights = torch.ones(2, count, 3, length, length).tril()
        weights /= weights.sum(-1, keepdim=True)
        for row, ids in enumerate(input_ids.tolist()):
            for place in range(len(ids)):
                earlier = [before for before in range(place) if ids[before] == ids[place]]
                if earlier:
                    logits[row, place, ids[earlier[-1] + 1]] = 10.0
                    weights[1, row, 2, place] = 0
                    weights[1, row, 2, place, earlier[-1] + 1] = 1
        return CausalLMOutput(logits=logits, attentions=tuple(weights) if self.gives_weights else None)


def test_a_model_that_copies_is_right_in_the_repetition_alone():
    rows = measure_repetition(Copier(), blocks=40)
    assert [row.length for row in rows] == [8, 16, 32], "two blocks of 64 do not fit 70 positions"
    shortest = rows[0]
    assert shortest.accuracy > 0.95
    assert shortest.second_loss < 0.5 * shortest.first_loss


def test_the_head_that_finds_the_earlier_copy_is_named():
    for row in measure_repetition(Copier(), blocks=40):
        matching = row.prefix_matching
        assert (matching.layer, matching.head) == (1, 2)
        assert matching.best == matching.heads[1][2] > 0.9, "a token that a block has twice may have another successor"
        evenly = sum(1 / (place + 1) for place in range(row.length, 2 * row.length)) / row.length
        assert matching.heads[0] == pytest.approx([evenly] * 3)
        assert matching.mean == pytest.approx((matching.best + 5 * evenly) / 6)
        assert row.not_measured is None


def test_long_rows_in_parts_give_the_same_as_at_once(monkeypatch):
    model = small_model("oelm-gpt", 0).eval()
    at_once = measure_repetition(model, blocks=6)
    monkeypatch.setattr("oelm.evaluation.induction._MOST_WEIGHTS", 4 * 32**2)
    in_parts = measure_repetition(model, blocks=6)
    assert in_parts[2].prefix_matching.heads[1] == pytest.approx(at_once[2].prefix_matching.heads[1], rel=1e-4)


@pytest.mark.sample(4)
@pytest.mark.parametrize("name", ["gpt2", "oelm-gpt-modern", "oelm-gpt-latent", "falcon-7b", "llama", "gpt_neo"])
def test_the_heads_of_real_models_are_measured_and_the_model_stays_as_it_was(name):
    model = small_model(name, 0).eval()
    before = model.config._attn_implementation
    ids = torch.arange(8).repeat(1, 2)
    logits = model(input_ids=ids).logits
    matching = measure_repetition(model, blocks=4)[0].prefix_matching
    assert len(matching.heads) == 3
    assert all(len(heads) == 4 for heads in matching.heads)
    assert all(0 < score < 1 for heads in matching.heads for score in heads)
    assert model.config._attn_implementation == before
    assert torch.equal(model(input_ids=ids).logits, logits)


def test_a_model_without_weights_says_so():
    model = Copier()
    model.gives_weights = False
    row = measure_repetition(model, blocks=4)[0]
    assert row.prefix_matching is None
    assert row.not_measured.startswith("Copier returns no attention weights")


def test_a_model_with_random_weights_is_no_better_in_the_repetition():
    model = small_model("gpt2", 0).eval()
    for row in measure_repetition(model, blocks=8):
        assert row.accuracy < 0.2
        assert row.second_loss == pytest.approx(row.first_loss, rel=0.2)


def test_a_model_with_too_few_positions_is_refused():
    with pytest.raises(ModelError, match="has 12 positions, and the shortest repetition needs 16"):
        measure_repetition(
            SimpleNamespace(
                get_input_embeddings=Copier().get_input_embeddings,
                can_generate=Copier().can_generate,
                config=SimpleNamespace(max_position_embeddings=12),
            )
        )


@pytest.mark.parametrize("name", ["t5", "bart"])
def test_the_decoder_of_an_encoder_decoder_is_asked_to_repeat(name):
    """Its losses are those of the model itself, which reads an end-of-text token and has the tokens as its answer."""
    model = lively_model(name)
    (row,) = [row for row in measure_repetition(model, blocks=4, seed=3) if row.length == 16]
    block = torch.randint(96, (4, 16), generator=torch.Generator().manual_seed(3))
    ids = torch.cat([block, block], dim=1)
    with torch.no_grad():
        logits = model(input_ids=torch.full((4, 1), model.config.eos_token_id), labels=ids).logits
    losses = torch.nn.functional.cross_entropy(logits.mT, ids, reduction="none")
    assert row.first_loss == pytest.approx(float(losses[:, 1:16].mean()), rel=1e-5)
    assert row.second_loss == pytest.approx(float(losses[:, 17:].mean()), rel=1e-5)
    assert len(row.prefix_matching.heads) == model.config.decoder_layers if name == "bart" else row.prefix_matching


def test_a_model_that_writes_nothing_is_refused():
    with pytest.raises(ModelError, match=r"a BertForSequenceClassification writes no text.*`oelm look`"):
        measure_repetition(lively_model("bert"))
