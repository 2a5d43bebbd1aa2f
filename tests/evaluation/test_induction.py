"""Repeating random tokens: an oracle that copies, and a model with random weights, which cannot."""

from types import SimpleNamespace

import pytest
import torch

from oelm.errors import ModelError
from oelm.evaluation.induction import measure_repetition
from oelm.models.small import small_model

VOCABULARY = 1000


class Copier:
    """Predicts the token that came after the last occurrence of the present one, if there was one."""

    device = torch.device("cpu")
    config = SimpleNamespace(max_position_embeddings=70)

    def get_input_embeddings(self):
        return SimpleNamespace(weight=torch.zeros(VOCABULARY, 4))

    def __call__(self, input_ids, use_cache):
        logits = torch.zeros(*input_ids.shape, VOCABULARY)
        for row, ids in enumerate(input_ids.tolist()):
            for place in range(len(ids)):
                earlier = [before for before in range(place) if ids[before] == ids[place]]
                if earlier:
                    logits[row, place, ids[earlier[-1] + 1]] = 10.0
        return SimpleNamespace(logits=logits)


def test_a_model_that_copies_is_right_in_the_repetition_alone():
    rows = measure_repetition(Copier(), blocks=40)
    assert [row.length for row in rows] == [8, 16, 32], "two blocks of 64 do not fit 70 positions"
    shortest = rows[0]
    assert shortest.accuracy > 0.95
    assert shortest.second_loss < 0.5 * shortest.first_loss


def test_a_model_with_random_weights_is_no_better_in_the_repetition():
    model = small_model("gpt2", 0).eval()
    for row in measure_repetition(model, blocks=8):
        assert row.accuracy < 0.2
        assert row.second_loss == pytest.approx(row.first_loss, rel=0.2)


def test_a_model_with_too_few_positions_is_refused():
    with pytest.raises(ModelError, match="has 12 positions, and the shortest repetition needs 16"):
        measure_repetition(
            SimpleNamespace(
                get_input_embeddings=Copier().get_input_embeddings, config=SimpleNamespace(max_position_embeddings=12)
            )
        )
