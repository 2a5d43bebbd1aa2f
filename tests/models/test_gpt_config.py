"""The GPT's config: sizes by name, what each form adds to the parameters, and fields that are refused."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import oelm
from oelm.errors import CheckpointError, OelmError
from oelm.models.gpt import OelmGPTForCausalLM
from oelm.models.gpt_config import MODERN, SIZES, OelmGPTConfig, gpt_config
from tests.support.models import lively_model

SMALL = {"vocab_size": 96, "hidden_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4}
LATENT = {"latent": 24, "channel": 8, "positions": "none"}


def parameters_of(config: OelmGPTConfig) -> int:
    with torch.device("meta"):
        return OelmGPTForCausalLM(config).num_parameters()


# Names and counts


def test_the_modern_gpt_of_medium_512_has_its_count():
    """Computed by hand: 4 d² of attention, 3 d of 8/3 d rounded up to 1,408, two norms; a tied embedding, a norm."""
    block = 4 * 512**2 + 3 * 512 * 1408 + 2 * 512
    assert 50257 * 512 + 6 * block + 512 == 45_005_824
    assert parameters_of(gpt_config("modern-medium-512")) == 45_005_824
    assert parameters_of(gpt_config("medium-512")) == 44_896_768


@pytest.mark.parametrize("size", SIZES)
def test_a_modern_size_has_the_width_and_layers_of_the_size(size):
    study, modern = gpt_config(size), gpt_config(f"modern-{size}")
    for field in ("hidden_size", "num_hidden_layers", "num_attention_heads"):
        assert getattr(modern, field) == getattr(study, field)
    assert {field: getattr(modern, field) for field in MODERN} == dict(MODERN)
    inner = modern.intermediate_size
    assert inner % 64 == 0
    assert 0 <= inner - 8 / 3 * modern.hidden_size < 64


def test_a_modern_gpt_with_a_channel_does_not_rotate_its_content():
    assert gpt_config("modern-tiny", channel=8).positions == "none"
    assert gpt_config("modern-tiny", latent=64, channel=8).positions == "none"
    assert gpt_config("modern-tiny", channel=8, positions="learned").positions == "learned"
    with pytest.raises(OelmError, match="positions 'rotary' rotates the content"):
        gpt_config("modern-tiny", channel=8, positions="rotary")
    with pytest.raises(OelmError, match="give it a channel"):
        gpt_config("modern-tiny", latent=64)  # without a channel it would not know where a token stands
    assert gpt_config("modern-tiny", latent=64, positions="none").positions == "none"


# What a form changes in the parameters of one block of the small GPT: 48 dimensions in 4 heads of 12.
@pytest.mark.parametrize(
    ("fields", "difference"),
    [
        ({"num_key_value_heads": 2}, -2 * 24 * 48),
        ({"num_key_value_heads": 1}, -2 * 36 * 48),
        ({"key_dim": 6}, -2 * 24 * 48),
        ({"shared_kv": True}, -48 * 48),
        ({"qk_norm": "both"}, 2 * 12),
        ({"qk_norm": "query"}, 12),
        ({"latent": 24}, 24 * 48 + 24 - 2 * 48 * 24),
        ({"channel": 8, "positions": "learned"}, (4 + 1) * 8 * 48),
        ({"key_offset": 0.5}, 0),
        ({"convolution": 4}, 2 * 4 * 48),
        ({"orthogonal_key": True}, 0),
        ({"cache": "states"}, 0),
        ({"biases": False}, -(4 * 48 + 48) - 2 * 48),
        ({"norm": "rms"}, -2 * 48),
        ({"activation": "swiglu", "intermediate_size": 192}, 48 * 192 + 192),
    ],
)
def test_every_form_adds_what_it_says(fields, difference):
    per_layers = [parameters_of(OelmGPTConfig(**{**SMALL, **fields, "num_hidden_layers": layers})) for layers in (2, 1)]
    plain = [parameters_of(OelmGPTConfig(**{**SMALL, "num_hidden_layers": layers})) for layers in (2, 1)]
    assert (per_layers[0] - per_layers[1]) - (plain[0] - plain[1]) == difference


def test_a_config_keeps_every_field_when_it_is_saved(tmp_path):
    for fields in ({**LATENT, "key_dim": 6}, {"key_offset": 0.5}, {"shared_kv": True, "num_key_value_heads": 2}):
        config = OelmGPTConfig(**SMALL, **fields)
        config.save_pretrained(tmp_path)
        loaded = OelmGPTConfig.from_pretrained(tmp_path)
        assert {name: getattr(loaded, name) for name in OelmGPTConfig.__annotations__} == {
            name: getattr(config, name) for name in OelmGPTConfig.__annotations__
        }


def test_every_field_of_the_gpt_is_in_the_guide():
    guide = (Path(__file__).parents[2] / "docs/training.md").read_text(encoding="utf-8")
    assert [name for name in OelmGPTConfig.__annotations__ if f"`{name}`" not in guide] == []


# What is refused


# fields of the config: part of the message
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"hidden_size": 50}, "hidden_size 50 .* 4 heads"),
    ({"num_hidden_layers": 0}, "num_hidden_layers 0: .*above 0"),
    ({"num_attention_heads": 0}, "num_attention_heads 0: .*above 0"),
    ({"hidden_size": "wide"}, "hidden_size 'wide': .*whole number"),
    ({"num_key_value_heads": 0}, "num_key_value_heads 0: .*above 0"),
    ({"vocab_size": 9.5}, "vocab_size 9.5: .*whole number"),
    ({"latent": -1}, "latent -1: must be a whole number, 0 for none"),
    ({"channel": 2.5}, "channel 2.5: must be a whole number, 0 for none"),
    ({"layer_norm_eps": 0.0}, "layer_norm_eps 0.0: .*above 0"),
    ({"dropout": 1.0}, "dropout 1.0: .*0 to below 1"),
    ({"positions": "alibi"}, "positions 'alibi': .*'learned'.*'rotary'.*'none'"),
    ({"norm": "batch"}, "norm 'batch': use 'layer' or 'rms'"),
    ({"activation": "relu"}, "activation 'relu': use 'gelu' or 'relu2' or 'swiglu'"),
    ({"initializer": "xavier"}, "initializer 'xavier': use 'fixed' or 'fan-in'"),
    ({"qk_norm": "key"}, "qk_norm 'key': use 'none' or 'query' or 'both'"),
    ({"cache": "values"}, "cache 'values': use 'auto' or 'states' or 'keys'"),
    ({"shared_kv": "yes"}, "shared_kv 'yes': use True or False"),
    # rotary positions and a channel
    ({"hidden_size": 12, "positions": "rotary"}, "rotary .*even head dimension, not 3"),
    ({"key_dim": 5, "positions": "rotary"}, "rotary .*even head dimension, not 5"),
    ({"channel": 7, "positions": "none"}, "channel 7: .*must be even"),
    ({"channel": 8, "positions": "rotary"}, "set positions to 'none'"),
    # grouped, thin and shared keys
    ({"num_key_value_heads": 3}, "num_key_value_heads 3 does not divide the 4 heads"),
    ({"shared_kv": True, "key_dim": 6}, "shared_kv needs keys as wide as values, not key_dim 6 and 12"),
    ({"shared_kv": True, "qk_norm": "both"}, "shared_kv with qk_norm 'both'"),
    ({"orthogonal_key": True, "num_key_value_heads": 2}, "orthogonal_key needs a square key matrix"),
    ({"orthogonal_key": True, "key_dim": 6}, "orthogonal_key needs a square key matrix"),
    ({"orthogonal_key": True, "shared_kv": True}, "orthogonal_key needs .* a value of its own"),
    # looking back
    ({"key_offset": 1.0}, "key_offset 1.0: must be a share from 0 to below 1"),
    ({"key_offset": "half"}, "key_offset 'half': must be a share"),
    ({"key_offset": 0.25}, "key_offset 0.25 of 12 dimensions is not a whole number of pairs"),
    ({"convolution": 1}, "convolution 1 sees no other token"),
    ({"convolution": 2, "key_offset": 0.5}, "set one of key_offset and convolution"),
    ({"offset_across_documents": True}, "offset_across_documents needs key_offset or convolution"),
    # a latent
    ({"latent": 49}, "latent 49 is wider than the model's hidden_size 48"),
    ({"latent": 24, "positions": "rotary"}, "latent with positions 'rotary': .* give it a channel"),
    ({**LATENT, "qk_norm": "both"}, "latent with qk_norm 'both': .* use 'query'"),
    ({**LATENT, "num_key_value_heads": 2}, "latent with num_key_value_heads 2: all heads share the latent"),
    ({**LATENT, "shared_kv": True}, "latent with shared_kv True"),
    ({**LATENT, "orthogonal_key": True}, "latent with orthogonal_key True"),
    ({**LATENT, "key_offset": 0.5}, "latent with key_offset 0.5"),
    ({**LATENT, "convolution": 4}, "latent with convolution 4"),
    # linear attention
    ({"scores": "cosine"}, "scores 'cosine': use 'softmax' or 'linear'"),
    ({**LATENT, "scores": "linear"}, "scores 'linear' with latent 24: .* use 0"),
    ({"channel": 8, "positions": "none", "scores": "linear"}, "scores 'linear' with channel 8: .* use 0"),
    ({"cache": "states", "scores": "linear"}, "scores 'linear' with cache 'states': .* use 'auto'"),
    # a cache of one tensor
    ({"cache": "keys", "num_key_value_heads": 2}, "cache 'keys' needs K = V"),
    ({"cache": "keys", "key_dim": 6}, "cache 'keys' needs K = V"),
    ({"cache": "keys", "channel": 8, "positions": "none"}, "cache 'keys' has no room for a channel"),
    ({"cache": "keys", "latent": 24}, "cache 'keys' has no room for a latent"),
    ({"cache": "keys", "qk_norm": "both"}, "cache 'keys': with qk_norm 'both' the key is not a matrix"),
    ({"cache": "states", "key_offset": 0.5}, "cache 'states': with a key offset or convolution"),
    ({"cache": "states", "convolution": 4}, "cache 'states': with a key offset or convolution"),
    ({"cache": "states", "positions": "rotary"}, "cache 'states': a rotated key .* use a channel instead"),
    ({"cache": "states", "num_key_value_heads": 2}, "have less to store already"),
    ({"cache": "states", "shared_kv": True}, "have less to store already"),
    ({"cache": "states", "latent": 24}, "have less to store already"),
]


@pytest.mark.parametrize(("fields", "message"), REFUSED, ids=[str(fields) for fields, _ in REFUSED])
def test_fields_that_do_not_fit_are_refused_by_name(fields, message):
    with pytest.raises(OelmError, match=message):
        OelmGPTConfig(**{**SMALL, **fields})


def test_unknown_sizes_and_fields_are_refused_with_a_suggestion():
    with pytest.raises(OelmError, match=r"'medium512'.*'medium-512'"):
        gpt_config("medium512")
    with pytest.raises(OelmError, match=r"'modern-tinny'.*'tiny'.*Sizes: tiny, .*, large, each also as modern-SIZE"):
        gpt_config("modern-tinny")
    with pytest.raises(OelmError, match="unknown field 'n_layer'"):
        gpt_config("tiny", n_layer=3)
    with pytest.raises(OelmError, match=r"'width'.*vocab_size, hidden_size, .*, eos_token_id$"):
        gpt_config("tiny", width=64)
    with pytest.raises(OelmError, match=r"'droput'.*'dropout'"):
        gpt_config("tiny", droput=0.1)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"latent": 16}, "mismatched keys: .*k_proj.weight"),
        ({"latent": 0, "channel": 0}, "unexpected keys: .*channel"),
        ({"channel": 0}, "unexpected keys: .*attn.channel.k_proj.weight"),
        ({"key_dim": 6}, "mismatched keys: .*k_proj.weight"),
        ({"norm": "layer"}, "missing keys|unexpected keys"),
        ({"activation": "gelu"}, "unexpected keys: .*mlp.gate.weight"),
        ({"qk_norm": "query"}, "missing keys: .*q_norm.weight"),
    ],
    ids=str,
)
def test_weights_of_another_form_are_not_loaded(fields, message, tmp_path):
    model = lively_model("oelm-gpt-latent", latent=24, biases=True)
    oelm.apply(model, "oelm-freeze")
    model.save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **fields}))
    with pytest.raises(CheckpointError, match=message):
        oelm.load(tmp_path)
