"""Attention statistics agree with the weights that a model reports itself, and leave the model unchanged."""

import pytest
import torch
from torch.nn import functional as F

from oelm.method.diagnose import sample_batch
from oelm.training.attention_stats import attention_statistics
from tests.support.models import lively_model


def mean_entropy(weights: torch.Tensor) -> float:
    """Return the mean entropy of attention weights over the rows that see two keys or more."""
    rows = (weights > 0).sum(-1) > 1
    return float(torch.special.entr(weights.double()).sum(-1)[rows].mean())


@pytest.mark.parametrize("name", ["bert", "gpt2", "llama", "oelm-gpt-rotary", "oelm-gpt-latent", "falcon-7b"])
def test_entropy_is_that_of_the_weights_the_model_reports(name):
    """Of an encoder, grouped key heads, rotary positions, a latent, and a family that calls torch's own function."""
    model, torch_function = lively_model(name), F.scaled_dot_product_attention
    batch = {key: rows for key, rows in sample_batch(model).items() if key in ("input_ids", "attention_mask")}
    before = model(**batch).logits
    statistics = attention_statistics(model, model, batch)
    assert F.scaled_dot_product_attention is torch_function
    assert model.config._attn_implementation == "sdpa"
    assert torch.equal(model(**batch).logits, before)

    plain = lively_model(name, attn_implementation="eager")
    with torch.no_grad():
        attentions = plain(**batch, output_attentions=True).attentions
    assert [layer["entropy"] for layer in statistics] == pytest.approx(
        [mean_entropy(layer) for layer in attentions], rel=1e-4
    )
    assert len(statistics) == 3
    for layer in statistics:
        assert layer["logit_std"] > 0
        assert 0 < layer["entropy_share"] <= 1


def test_an_encoder_decoder_is_measured_encoder_first_then_self_and_cross_attention_in_turn():
    model = lively_model("t5")
    labels = [layer["label"] for layer in attention_statistics(model, model, sample_batch(model))]
    assert labels[0].startswith("encoder")
    decoder = [label for label in labels if not label.startswith("encoder")]
    assert [label.split()[0] for label in decoder] == ["decoder", "cross"] * (len(decoder) // 2)


@pytest.mark.parametrize("name", ["deberta-v2", "mpnet", "gptj", "gpt_neo", "gemma2"])
def test_a_family_that_returns_its_weights_is_measured_by_them(name):
    model = lively_model(name)
    batch = sample_batch(model)
    before = model(**batch).logits
    statistics = attention_statistics(model, model, batch)
    assert not model.config.output_attentions
    assert torch.equal(model(**batch).logits, before)
    with torch.no_grad():
        attentions = model(**batch, output_attentions=True).attentions
    assert [layer["entropy"] for layer in statistics] == pytest.approx(
        [mean_entropy(layer) for layer in attentions], rel=1e-4
    )
    assert [layer["label"].split()[1] for layer in statistics] == ["0", "1", "2"]


@pytest.mark.parametrize("name", ["bert", "llama", "t5", "bart"])
def test_weights_and_logits_give_the_same_statistics(name):
    """Of a model that computes attention step by step, and of the same one with torch's function."""
    batch = sample_batch(lively_model(name))
    step_by_step, fused = (
        attention_statistics(model, model, batch)
        for model in (lively_model(name, attn_implementation="eager"), lively_model(name))
    )
    assert len(fused) == len(step_by_step) > 0
    for one, other in zip(step_by_step, fused, strict=True):
        assert one.pop("label") == other.pop("label")
        assert one == pytest.approx(other, rel=1e-3)


def test_a_block_that_serves_several_layers_is_measured_in_each():
    model = lively_model("albert")
    statistics = attention_statistics(model, model, sample_batch(model))
    assert [layer["label"] for layer in statistics] == ["encoder 0", "encoder 1", "encoder 2"]
    assert len({layer["entropy"] for layer in statistics}) == 3
