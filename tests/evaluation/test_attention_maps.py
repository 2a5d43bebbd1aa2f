"""Attention maps and the figures of heads: of every family, of every form of attention, and of maps that are known."""

import numpy as np
import pytest
import torch

import oelm
from oelm.errors import ModelError
from oelm.evaluation.attention_maps import attention_maps
from oelm.evaluation.head_figures import distance, entropy_share, induction, text_figures, visible_keys
from oelm.evaluation.head_forms import form_ranks, rank_of
from oelm.method.sites import find_sites
from oelm.models.small import SMALL, small_model
from oelm.runs.looks import LayerMap
from oelm.training.attention_stats import attention_statistics
from tests.support.models import lively, lively_model

READS_NO_TEXT = {"vit", "deit", "whisper"}
TEXT_MODELS = [name for name in SMALL if name not in READS_NO_TEXT]
# Every form of attention that the project's GPT has.
FORMS = {
    "plain": {},
    "rotary": {"positions": "rotary"},
    "grouped": {"num_key_value_heads": 2},
    "thin": {"key_dim": 4},
    "shared-kv": {"shared_kv": True},
    "orthogonal-key": {"orthogonal_key": True},
    "latent": {"latent": 16},
    "latent-channel": {"positions": "none", "latent": 16, "channel": 8},
    "channel": {"positions": "none", "channel": 8},
    "offset": {"key_offset": 0.5},
    "convolution": {"convolution": 3},
    "qk-norm": {"qk_norm": "both"},
}
IDS = torch.arange(4, 24)[None]


def maps_of(model):
    kind = find_sites(model)[1][0].kind
    return attention_maps(model, kind, IDS, IDS[:, :17] if model.config.is_encoder_decoder else None)


@pytest.mark.sample(12)
@pytest.mark.parametrize(
    "name", ["t5", "bart", "mpnet", "falcon-7b", "modernbert", "gpt_neo", "distilbert", *TEXT_MODELS]
)
def test_the_keys_that_get_weight_are_those_that_a_query_sees(name):
    """Of windows, causal masks and both halves of an encoder-decoder; and the model is as it was before."""
    model = lively_model(name)
    before = model.config._attn_implementation
    maps = maps_of(model)
    assert model.config._attn_implementation == before
    assert len(maps) == (8 if model.config.is_encoder_decoder else 3)
    for own in maps:
        heads, queries, keys = own.weights.shape
        assert heads == 4
        assert np.allclose(own.weights.sum(-1), 1, atol=1e-5)
        visible = visible_keys(model.config, own.kind, own.layer, queries, keys)
        assert ((own.weights > 0).sum(-1) == visible).all()


@pytest.mark.parametrize("name", ["bert", "gpt2", "t5", "bart", "llama"])
def test_the_entropy_is_that_of_the_probe_during_training(name):
    """The probe computes it from queries and keys, a look from the weights that the class returns."""
    model = lively_model(name)
    inputs = (
        {"input_ids": IDS, "decoder_input_ids": IDS[:, :17]} if model.config.is_encoder_decoder else {"input_ids": IDS}
    )
    probed = {layer["label"]: layer["entropy_share"] for layer in attention_statistics(model, model, inputs)}
    looked = {}
    for own in maps_of(model):
        visible = visible_keys(model.config, own.kind, own.layer, *own.weights.shape[1:])
        looked[f"{own.kind} {own.layer}"] = np.mean(entropy_share(own.weights.astype(np.float64), visible))
    assert looked == pytest.approx(probed, rel=1e-4)
    assert len(looked) == (8 if model.config.is_encoder_decoder else 3)


@pytest.mark.parametrize("form", FORMS)
def test_every_form_of_the_gpt_has_maps_and_ranks(form):
    model = lively_model("oelm-gpt", **FORMS[form])
    for own in maps_of(model):
        assert np.allclose(own.weights.sum(-1), 1, atol=1e-5)
        assert (own.weights[:, np.triu(np.ones((20, 20), bool), 1)] == 0).all()
    for site in find_sites(model)[1]:
        for rank in form_ranks(model, site):
            assert 1 <= rank.effective <= rank.numerical == rank.full
    full = form_ranks(model, find_sites(model)[1][0])[0].full
    assert full == {"thin": 4, "latent-channel": 20, "channel": 20}.get(form, 12)


def test_a_head_made_to_look_at_the_token_before_gets_one():
    """A GPT whose hidden states are positions alone, and whose query is the position before."""
    model = small_model("oelm-gpt", num_hidden_layers=1, num_attention_heads=1).eval()
    with torch.no_grad():
        model.transformer.wte.weight.zero_()
        model.transformer.wpe.weight.zero_()
        model.transformer.wpe.weight[:48] = torch.eye(48)
        attention = model.transformer.h[0].attn
        attention.k_proj.weight.copy_(torch.eye(48))
        attention.q_proj.weight.copy_(100 * torch.diag(torch.ones(47), 1))
    (own,) = maps_of(model)
    (figures,) = text_figures(own, IDS[0].tolist(), visible_keys(model.config, "decoder", 0, 20, 20))
    assert figures["previous"] == pytest.approx(1)
    assert figures["itself"] == pytest.approx(0, abs=1e-6)
    assert figures["first"] == pytest.approx(1 / 19), "the second token's previous token is the first"
    assert figures["entropy"] == pytest.approx(0, abs=1e-6)
    assert figures["prefix_matching"] is None, "no token occurs twice"


def test_figures_of_a_map_that_is_known():
    weights = np.zeros((2, 4, 4), np.float32)
    weights[0] = np.tril(np.ones((4, 4))) / np.arange(1, 5)[:, None]
    weights[1] = [[1, 0, 0, 0], [0.25, 0.75, 0, 0], [0, 1, 0, 0], [0.5, 0, 0.5, 0]]
    own = LayerMap("decoder", 0, weights)
    even, other = text_figures(own, [5, 7, 5, 9], np.arange(1, 5))
    assert even["entropy"] == pytest.approx(1)
    assert even["previous"] == even["itself"] == even["first"] == pytest.approx((1 / 2 + 1 / 3 + 1 / 4) / 3)
    assert even["prefix_matching"] == pytest.approx(1 / 3), "the third token's copy was followed by the second"
    assert other["previous"] == pytest.approx((0.25 + 1 + 0.5) / 3)
    assert other["itself"] == pytest.approx(0.25)
    assert other["first"] == pytest.approx(0.25)
    assert other["prefix_matching"] == pytest.approx(1)


def test_cross_attention_has_no_token_before_and_none_that_is_itself():
    (figures,) = text_figures(LayerMap("cross", 0, np.full((1, 3, 5), 0.2, np.float32)), range(5), np.full(3, 5))
    assert figures["previous"] is figures["itself"] is figures["prefix_matching"] is None
    assert figures["first"] == pytest.approx(0.2)
    assert figures["entropy"] == pytest.approx(1)


def test_induction_is_attention_to_the_token_after_the_earlier_copy():
    perfect, even = np.zeros((8, 8), np.float32), np.full((8, 8), 1 / 8, np.float32)
    perfect[:4, 0] = 1
    perfect[np.arange(4, 8), np.arange(1, 5)] = 1
    copies = np.zeros((8, 8), np.float32)
    copies[:4, 0] = 1
    copies[np.arange(4, 8), np.arange(4)] = 1
    assert induction(np.stack([perfect, even, copies])[None]) == pytest.approx([1, 1 / 8, 0])


def test_the_distance_of_two_maps_is_half_of_what_moved():
    left, right = np.zeros((1, 3, 4), np.float32), np.zeros((1, 3, 4), np.float32)
    left[0, :, 0], right[0, :, 0], right[0, 1, 0], right[0, 1, 1] = 1, 1, 0.25, 0.75
    assert distance(left, left) == [0]
    assert distance(left, right) == pytest.approx([0.75 / 2]), "a mean over all queries but the first"
    assert distance(left, np.flip(left, -1)) == [1]


def test_orthonormal_frozen_projections_have_a_flat_spectrum():
    model = lively_model("llama", num_key_value_heads=4)
    oelm.apply(model, "oelm-freeze")
    for site in find_sites(model)[1]:
        for rank in form_ranks(model, site):
            assert rank.numerical == rank.full == 12
    twice = torch.linalg.qr(torch.randn(48, 12, generator=torch.Generator().manual_seed(0))).Q.T
    same = rank_of(twice, twice, 12)
    assert same.effective == pytest.approx(12)
    assert rank_of(torch.zeros(12, 48), twice, 12) == rank_of(twice, torch.zeros(12, 48), 12)
    assert rank_of(torch.zeros(12, 48), twice, 12).numerical == 0


def test_the_rank_is_that_of_the_product_written_out():
    generator = torch.Generator().manual_seed(1)
    query, key = torch.randn(6, 20, generator=generator), torch.randn(6, 20, generator=generator)
    key[3:] = 0
    values = torch.linalg.svdvals(query.double().T @ key.double())
    shares = values / values.sum()
    rank = rank_of(query, key, 6)
    assert rank.effective == pytest.approx(float(torch.special.entr(shares).sum().exp()))
    assert rank.numerical == 3


@pytest.mark.parametrize("name", ["gpt2", "bert", "gpt_neox", "falcon-40b", "phi3"])
def test_a_part_of_a_fused_matrix_has_the_ranks_that_it_has_by_itself(name):
    model = lively_model(name)
    before = [form_ranks(model, site) for site in find_sites(model)[1]]
    oelm.apply(model, "freeze-pretrained")
    assert [form_ranks(model, site) for site in find_sites(model)[1]] == before


@pytest.mark.parametrize(
    ("name", "preset"),
    [
        ("gpt2", "identity-key"),
        ("bert", "identity-key"),
        ("gpt2", "oelm-core"),
        ("gpt_neox", "oelm-core"),
        ("bert", {"preset": "oelm-freeze", "adapter": {"kind": "lora", "rank": 2, "targets": ["q", "k"]}}),
    ],
)
def test_what_a_method_puts_in_place_of_a_projection_has_the_rank_of_what_it_exports(name, preset, tmp_path):
    model = lively_model(name)
    oelm.apply(model, preset)
    oelm.export(lively_cores(model), tmp_path / "plain")
    plain = type(model).from_pretrained(tmp_path / "plain")
    for site, same in zip(find_sites(model)[1], find_sites(plain)[1], strict=True):
        for own, exported in zip(form_ranks(model, site), form_ranks(plain, same), strict=True):
            assert own.effective == pytest.approx(exported.effective, rel=1e-4)


def lively_cores(model):
    """Return the model with random cores and adapters: they begin as identities and zeros, which change no rank."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(".core") or "lora_B" in name:
                parameter.normal_()
    return model


def test_a_latent_bounds_the_rank():
    model = lively(small_model("oelm-gpt", latent=5))
    for rank in form_ranks(model, find_sites(model)[1][0]):
        assert rank.numerical == rank.full == 5


def test_a_class_without_weights_is_named():
    model = small_model("gpt2")
    model.base_model.forward = lambda **inputs: {"last_hidden_state": torch.zeros(1)}
    with pytest.raises(ModelError, match="GPT2LMHeadModel returns no attention weights"):
        attention_maps(model, "decoder", IDS)


def test_weights_that_are_no_numbers_are_refused_with_their_layer():
    model = lively_model("gpt2")
    with torch.no_grad():
        model.transformer.h[1].attn.c_attn.weight[0, 0] = float("nan")
    with pytest.raises(ModelError, match=r"GPT2LMHeadModel: the weights of layer 1 \(decoder\) are not finite"):
        maps_of(model)
