"""The layout that is suggested for a model of an unknown type: right for every family that oelm knows, or not shown."""

from typing import Any

import pytest
import torch
from transformers import (
    AutoConfig,
    AutoModel,
    CodeGenConfig,
    CodeGenForCausalLM,
    GPTBigCodeConfig,
    GPTBigCodeForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MambaConfig,
    MambaForCausalLM,
)

import oelm
from oelm import FamilyError
from oelm.method import row_order
from oelm.method.families import _FAMILIES
from oelm.method.guess import guess_layout
from oelm.method.sites import find_sites
from oelm.models.small import SMALL, small_model
from tests.support.models import hashes

# Small models whose layout cannot be read off their names, and part of the reason that is given.
UNTOLD = {
    "albert": "attention is in 1 of its blocks",
    "gpt2-cross": "beside the query in crossattention no matrix is called k",
    "oelm-gpt-latent": "attention in several places, h.*.attn.q_proj, h.*.attn.channel.q_proj",
    "falcon-7b": "72 rows are not 4 query heads and 2 x 4 key-value heads of 12",
}
# What acts on Q and K in these has no name that shows it: relative positions, and a look at earlier tokens.
NOT_SHOWN = ("deberta-v2", "deberta-v2-shared", "oelm-gpt", "falcon-rw")


@pytest.fixture
def unknown():
    """Return a function that makes a model one of an unknown type."""

    def forget(model: Any) -> Any:
        model.config.model_type = "own-type"
        return model

    yield forget
    _FAMILIES.pop("own-type", None)


@pytest.mark.parametrize("name", [name for name in SMALL if name not in UNTOLD])
def test_the_suggested_call_finds_what_the_table_of_families_finds(name, unknown):
    model = small_model(name)
    family, sites = find_sites(model)
    found = guess_layout(unknown(model))
    assert found.tried
    assert found.attentions == len(sites)
    eval(found.call, {"oelm": oelm})
    guessed_family, guessed_sites = find_sites(model)
    assert guessed_sites == sites
    assert guessed_family.normed(model.config) == family.normed(model.config)
    if name not in NOT_SHOWN:
        assert (guessed_family.meets(model.config) is None) is (family.meets(model.config) is None)


@pytest.mark.parametrize("name", UNTOLD)
def test_without_a_layout_that_fits_the_reason_is_given(name, unknown):
    with pytest.raises(FamilyError) as caught:
        guess_layout(unknown(small_model(name)))
    assert UNTOLD[name] in str(caught.value)
    assert "oelm.register_family(...)" in str(caught.value)


def test_the_error_for_an_unknown_type_shows_a_call_that_works(unknown):
    model = unknown(small_model("qwen3"))
    before = hashes(model, frozen=False)
    with pytest.raises(FamilyError) as caught:
        oelm.apply(model)
    message = str(caught.value)
    assert message.startswith("unknown model_type 'own-type'. Known: albert, ")
    assert "3 attentions were found with it, and their heads came out orthogonal:\noelm.register_family(\n" in message
    assert hashes(model, frozen=False) == before, "trying a layout must not change the model"
    with pytest.raises(FamilyError, match="unknown model_type"):
        oelm.audit(model)
    call = message[message.index("oelm.register_family(") : message.rindex("\n")]
    eval(call, {"oelm": oelm})
    assert oelm.apply(model).frozen == oelm.apply(small_model("qwen3")).frozen


def test_fused_rows_in_another_order_are_not_suggested(unknown):
    """CodeGen's are those of four devices, and on each the queries, the values, the keys."""
    model = unknown(CodeGenForCausalLM(CodeGenConfig(n_embd=64, n_layer=2, n_head=4, rotary_dim=8, vocab_size=99)))
    with pytest.raises(
        FamilyError, match=r"rows of attn\.qkv_proj are in an order that is neither 'blocks' nor 'groups'"
    ):
        guess_layout(model)


@pytest.mark.parametrize("hindrance", ["size", "code"])
def test_fused_rows_that_cannot_be_tried_are_not_said_to_work(hindrance, unknown, monkeypatch):
    model = unknown(small_model("gpt_neox"))
    if hindrance == "size":
        monkeypatch.setattr(row_order, "_LARGEST_TRIAL", 1000)
    else:
        monkeypatch.setattr(type(model), "forward", lambda self, input_ids: self.nothing)
    text = str(guess_layout(model))
    assert "orthogonal" not in text
    assert "'blocks' or 'groups', could not be tried" in text


def test_the_order_of_the_rows_of_a_single_key_is_either(unknown):
    sizes = {"n_embd": 64, "n_layer": 2, "n_head": 4, "vocab_size": 99}
    model = unknown(GPTBigCodeForCausalLM(GPTBigCodeConfig(**sizes)))
    assert guess_layout(model).tried


def test_a_guess_draws_nothing_from_torchs_generator(unknown):
    model = unknown(small_model("gpt_neox"))
    state = torch.get_rng_state()
    guess_layout(model)
    assert torch.equal(torch.get_rng_state(), state)


def test_scores_that_are_divided_by_another_number_are_noted(unknown):
    model = small_model("gemma2")
    family, before = find_sites(model)[0], oelm.apply(small_model("gemma2"))
    found = guess_layout(unknown(model))
    assert "divide them by 6 and not by 4: if so, give that as divisor" in found.to_check
    assert "seems" not in guess_layout(unknown(small_model("llama"))).to_check
    with_divisor = found.call.replace("\n)", "\n    divisor=lambda config: config.query_pre_attn_scalar**0.5,\n)")
    registered = eval(with_divisor, {"oelm": oelm})
    assert registered.divisor(model.config) == family.divisor(model.config) == 6.0
    assert oelm.apply(model) == before


def test_heads_that_the_attention_does_not_have_are_not_suggested(unknown):
    model = unknown(small_model("gptj"))
    model.config.n_head = 8
    with pytest.raises(FamilyError, match=r"q_proj: its attention has heads of 12, and .* makes them 6"):
        guess_layout(model)


@pytest.mark.parametrize(("model_type", "kind"), [("bloom", "decoder"), ("bert-generation", "encoder")])
def test_a_body_without_its_head_has_the_kind_of_its_type(model_type, kind):
    """As where `oelm families --guess` is given a config that names no class."""
    sizes = {"hidden_size": 64, "num_attention_heads": 4, "n_head": 4, "n_layer": 1, "num_hidden_layers": 1}
    found = guess_layout(AutoModel.from_config(AutoConfig.for_model(model_type, **sizes)))
    assert f"kind='{kind}'" in found.call


def test_a_large_model_is_tried_without_its_weights(unknown):
    with torch.device("meta"):
        model = unknown(LlamaForCausalLM(LlamaConfig(num_hidden_layers=80, hidden_size=512)))
    found = guess_layout(model)
    assert found.attentions == 80
    assert found.tried


def test_a_model_without_attention_is_not_given_a_layout():
    model = MambaForCausalLM(MambaConfig(hidden_size=16, num_hidden_layers=2, vocab_size=99))
    with pytest.raises(FamilyError) as caught:
        oelm.apply(model)
    assert "unknown model_type 'mamba'. Known: " in str(caught.value)
    assert "If it has attention" in str(caught.value)
    assert "Did you mean" not in str(caught.value), "'llama' is no typo of it"
