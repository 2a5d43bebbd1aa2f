"""Exporting the project's GPT: the plain class of each form, the same outputs, and forms that are refused."""

import copy
import json
import os
import subprocess
import sys

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

import oelm
from oelm.errors import ModelError
from oelm.models.convert import to_transformers
from oelm.models.export import make_plain
from oelm.models.gpt import OelmGPTForSequenceClassification, OelmGPTModel
from oelm.models.small import small_config
from tests.support.models import distance, lively, lively_model, model_with_method

ROTARY = {"positions": "rotary"}
MODERN = {"positions": "rotary", "norm": "rms", "activation": "swiglu", "biases": False}
LATENT = {**MODERN, "positions": "none", "latent": 24, "channel": 8}

# name: (plain class, fields of the GPT, methods); 48 dimensions, 3 layers, 4 heads, a vocabulary of 96, 64 positions
USUAL = ("baseline", "oelm-freeze", "oelm-core", "identity-key")
FORMS = {
    "gpt2": ("GPT2LMHeadModel", {}, USUAL),
    "gpt2 without biases": ("GPT2LMHeadModel", {"biases": False, "layer_norm_eps": 1e-3}, ("baseline",)),
    "gpt2 with relu2": ("GPT2LMHeadModel", {"activation": "relu2"}, ("oelm-freeze",)),
    "gpt2, untied": ("GPT2LMHeadModel", {"tie_word_embeddings": False}, ("baseline",)),
    "gpt2, grouped": ("GPT2LMHeadModel", {"num_key_value_heads": 2}, ("oelm-core", "identity-key")),
    "gpt2, multi-query": ("GPT2LMHeadModel", {"num_key_value_heads": 1}, ("baseline",)),
    "gpt2, K = V": ("GPT2LMHeadModel", {"shared_kv": True}, ("baseline", "oelm-core", "identity-key")),
    "gpt2, orthogonal key": ("GPT2LMHeadModel", {"orthogonal_key": True}, ("baseline", "identity-query")),
    "gpt-neox": ("GPTNeoXForCausalLM", {**ROTARY, "rope_theta": 500.0}, USUAL),
    "gpt-neox without biases": ("GPTNeoXForCausalLM", {**ROTARY, "biases": False}, ("baseline",)),
    "gpt-neox, K = V, grouped": (
        "GPTNeoXForCausalLM",
        {**ROTARY, "shared_kv": True, "num_key_value_heads": 2},
        ("baseline", "identity-core"),
    ),
    "llama": ("LlamaForCausalLM", {**MODERN, "rope_theta": 500.0}, USUAL),
    "llama with biases": ("LlamaForCausalLM", {**MODERN, "biases": True}, ("baseline",)),
    "llama, untied": (
        "LlamaForCausalLM",
        {**MODERN, "tie_word_embeddings": False, "layer_norm_eps": 1e-3},
        ("oelm-core",),
    ),
    "llama, grouped": ("LlamaForCausalLM", {**MODERN, "num_key_value_heads": 2}, ("oelm-freeze", "identity-core")),
    "llama, multi-query": ("LlamaForCausalLM", {**MODERN, "num_key_value_heads": 1}, ("baseline",)),
    "llama, K = V": ("LlamaForCausalLM", {**MODERN, "shared_kv": True}, ("baseline", "oelm-core", "identity-key")),
    "llama, orthogonal key": ("LlamaForCausalLM", {**MODERN, "orthogonal_key": True}, ("baseline", "identity-query")),
    "qwen3": ("Qwen3ForCausalLM", {**MODERN, "qk_norm": "both"}, ("baseline", "oelm-core", "identity-core")),
    "qwen3, grouped": (
        "Qwen3ForCausalLM",
        {**MODERN, "qk_norm": "both", "num_key_value_heads": 2, "layer_norm_eps": 1e-3},
        ("oelm-freeze",),
    ),
    "deepseek": ("DeepseekV3ForCausalLM", LATENT, ("baseline", "latent-frozen", "latent-trained", "oelm-core")),
    "deepseek, as wide as the model": (
        "DeepseekV3ForCausalLM",
        {**LATENT, "latent": 48, "channel": 4, "rope_theta": 500.0},
        ("identity-channel", "latent-states"),
    ),
    "deepseek, thin keys, untied": (
        "DeepseekV3ForCausalLM",
        {**LATENT, "key_dim": 6, "tie_word_embeddings": False, "layer_norm_eps": 1e-3},
        ("latent-frozen",),
    ),
}
WITH_METHODS = [(name, method) for name, (_, _, methods) in FORMS.items() for method in methods]
ONE_OF_EACH = ("gpt2", "gpt-neox", "llama, grouped", "qwen3", "deepseek")


def gpt(form, seed=0, **changes):
    return lively_model("oelm-gpt", seed, **{**FORMS[form][1], **changes})


def padded_batch():
    """Return two rows of 20 tokens, the first with four of padding on its left."""
    ids = torch.randint(3, 96, (2, 20), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[0, :4] = 0
    return {"input_ids": ids, "attention_mask": mask}


def logits_of(model, ids, **more):
    with torch.no_grad():
        return model.eval()(ids, use_cache=False, **more).logits


# The same outputs


@pytest.mark.covering(1)
@pytest.mark.parametrize(("form", "method"), WITH_METHODS)
def test_an_export_is_a_plain_model_with_the_same_logits_and_text(form, method, tmp_path):
    model = model_with_method("oelm-gpt", method, steps=1, **FORMS[form][1])
    batch = padded_batch()
    ids, mask = batch["input_ids"], batch["attention_mask"]
    before = logits_of(model, ids)
    plain, info = AutoModelForCausalLM.from_pretrained(oelm.export(model, tmp_path), output_loading_info=True)
    assert type(plain).__name__ == FORMS[form][0]
    assert not any(info.values()), info
    limit = 1e-5 * max(1.0, float(before.abs().max()))
    assert distance(logits_of(plain, ids), before) < limit
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    padded = [logits_of(m, ids, attention_mask=mask, position_ids=positions)[mask.bool()] for m in (plain, model)]
    assert distance(*padded) < limit
    options = {"max_new_tokens": 16, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    assert torch.equal(plain.generate(**batch, **options), model.generate(**batch, **options))
    assert torch.equal(logits_of(model, ids), before), "exporting must not change the model"
    assert plain.num_parameters() == expected_parameters(plain.config)
    assert "oelm" not in json.loads((tmp_path / "config.json").read_text())


def expected_parameters(config):
    """Return the parameters of a plain model by its config. A method, K = V or a repeated head changes none of them."""
    width, heads, layers, vocabulary = 48, 4, 3, 96
    embeddings = vocabulary * width * (1 if config.tie_word_embeddings else 2)
    if config.model_type == "gpt2":
        return embeddings + 64 * width + 2 * width + layers * (12 * width**2 + 13 * width)
    if config.model_type == "gpt_neox":
        return embeddings + 2 * width + layers * (12 * width**2 + 9 * width)
    inner = 128  # 8/3 of the width
    block = 3 * width * inner + width**2 + 2 * width
    if config.model_type == "deepseek_v3":
        rank, content, channel = config.kv_lora_rank, config.qk_nope_head_dim, config.qk_rope_head_dim
        block += heads * (content + channel) * width + (rank + channel) * width + rank
        block += heads * (content + width // heads) * rank
    else:
        block += width**2 + 2 * (config.num_key_value_heads * width // heads) * width
        block += 2 * width // heads if config.model_type == "qwen3" else (2 * inner + width) * config.mlp_bias
    return embeddings + width + layers * block


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("form", FORMS)
def test_outputs_in_double_precision_agree_to_ten_digits(form, seed):
    """transformers' RMSNorms compute in float32 whatever they are given, so torch's take their place here."""
    model = gpt(form, seed).double()
    if seed == 2:  # with a method as well: the last one of the form
        oelm.apply(model, FORMS[form][2][-1])
    plain_gpt = copy.deepcopy(model)
    make_plain(plain_gpt)
    plain = to_transformers(plain_gpt)
    assert plain.dtype == torch.float64
    for name, module in list(plain.named_modules()):
        if type(module).__name__.endswith("RMSNorm"):
            norm = nn.RMSNorm(module.weight.shape, eps=module.variance_epsilon, dtype=torch.float64)
            norm.weight = module.weight
            plain.set_submodule(name, norm)
    batch = padded_batch()
    ids, mask = batch["input_ids"], batch["attention_mask"]
    before = logits_of(model, ids)
    assert float(before.std()) > 0.5, "a model without a signal would hide a mistake"
    assert distance(logits_of(plain, ids), before) < 1e-10
    padded = [logits_of(m, ids, attention_mask=mask)[mask.bool()] for m in (plain, model)]
    assert distance(*padded) < 1e-10


@pytest.mark.parametrize("theta", [500.0, 10000.0, 1e6])
@pytest.mark.parametrize("dim", [4, 32, 64])
def test_rotary_frequencies_are_those_of_transformers_to_the_bit(dim, theta):
    """At position 10,000, a difference in the last bit of a frequency would rotate a key by 1e-3."""
    model = lively_model("oelm-gpt", hidden_size=4 * dim, num_hidden_layers=1, rope_theta=theta, **MODERN)
    assert torch.equal(to_transformers(model).model.rotary_emb.inv_freq, model.transformer.rotary.frequencies)


@pytest.mark.parametrize("form", ONE_OF_EACH)
def test_a_classifier_keeps_its_head_and_its_labels(form, tmp_path):
    labels = {0: "no", 1: "perhaps", 2: "yes"}
    names = {"id2label": labels, "label2id": {name: label for label, name in labels.items()}}
    config = small_config("oelm-gpt", **FORMS[form][1], pad_token_id=0, **names)
    model = lively(OelmGPTForSequenceClassification(config))
    oelm.apply(model, "oelm-core")
    batch = padded_batch()
    with torch.no_grad():
        before = model(**batch).logits
        oelm.export(model, tmp_path)
        plain, info = AutoModelForSequenceClassification.from_pretrained(tmp_path, output_loading_info=True)
        assert type(plain).__module__.startswith("transformers.")
        assert not any(info.values()), info
        assert distance(plain.eval()(**batch).logits, before) < 1e-5 * max(1.0, float(before.abs().max()))
    assert plain.config.id2label == labels


@pytest.mark.parametrize("form", ONE_OF_EACH)
@pytest.mark.parametrize("tokens", [{"bos_token_id": None, "eos_token_id": None}, {"eos_token_id": [5, 7]}])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_special_tokens_dtype_and_generation_config_are_exported(form, tokens, dtype, tmp_path):
    model = gpt(form, dropout=0.1, pad_token_id=3, **tokens).to(dtype)
    model.generation_config.max_new_tokens = 7
    plain = AutoModelForCausalLM.from_pretrained(oelm.export(model, tmp_path))
    assert plain.dtype == dtype
    for name in ("bos_token_id", "eos_token_id", "pad_token_id", "max_position_embeddings"):
        assert getattr(plain.config, name) == getattr(model.config, name), name
    assert plain.generation_config.max_new_tokens == 7
    assert plain.generation_config.eos_token_id == model.generation_config.eos_token_id
    assert float(getattr(plain.config, "attn_pdrop" if form == "gpt2" else "attention_dropout")) == 0.1
    assert torch.equal(plain.get_input_embeddings().weight, model.get_input_embeddings().weight)


def test_a_latent_gpt_is_a_deepseek_without_experts_or_extra_layers(tmp_path):
    config = json.loads((oelm.export(gpt("deepseek"), tmp_path) / "config.json").read_text())
    assert config["first_k_dense_replace"] == 3
    assert config["num_nextn_predict_layers"] == 0
    assert config["q_lora_rank"] is None
    assert config["rope_interleave"] is True
    assert (config["kv_lora_rank"], config["qk_nope_head_dim"], config["qk_rope_head_dim"]) == (24, 12, 8)
    assert config["rope_parameters"] == {"rope_type": "default", "rope_theta": 10000.0}


LOAD_WITHOUT_OELM = """
import sys, torch
sys.modules["oelm"] = None
from transformers import AutoModelForCausalLM
for folder in sys.argv[1:]:
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    torch.save(model(torch.load(folder + "/ids.pt")).logits, folder + "/logits.pt")
"""


@pytest.mark.full
def test_exports_load_where_oelm_is_not_installed(tmp_path):
    models, ids = [gpt(form) for form in ONE_OF_EACH], padded_batch()["input_ids"]
    folders = [tmp_path / str(number) for number in range(len(models))]
    for model, folder in zip(models, folders, strict=True):
        oelm.apply(model, "oelm-core")
        oelm.export(model, folder)
        torch.save(ids, folder / "ids.pt")
    subprocess.run(
        [sys.executable, "-I", "-c", LOAD_WITHOUT_OELM, *map(str, folders)],
        check=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        timeout=240,
    )
    for model, folder in zip(models, folders, strict=True):
        assert distance(torch.load(folder / "logits.pt"), logits_of(model, ids)) < 1e-4


# What is refused

REFUSED = [
    ({"key_dim": 6}, ["GPT-2 cannot hold key_dim 6 (it has keys as wide as values)"]),
    ({**MODERN, "key_dim": 6}, ["Llama cannot hold key_dim 6 (it has keys as wide as values)"]),
    (
        {**MODERN, "activation": "relu2"},
        ["GPT-NeoX cannot hold norm 'rms' (it has 'layer')", "Llama cannot hold activation 'relu2' (it has 'swiglu')"],
    ),
    ({"norm": "rms"}, ["GPT-2 cannot hold norm 'rms' (it has 'layer')"]),
    ({"activation": "swiglu"}, ["GPT-2 cannot hold activation 'swiglu' (it has 'gelu' or 'relu2')"]),
    ({**MODERN, "positions": "learned"}, ["Llama cannot hold positions 'learned' (it has 'rotary')"]),
    (
        {"positions": "none"},
        ["GPT-2 cannot hold positions 'none' (it has 'learned')", "GPT-NeoX cannot hold positions 'none' (it has 'rot"],
    ),
    (
        {**MODERN, "qk_norm": "query"},
        ["Llama cannot hold qk_norm 'query' (it has 'none')", "Qwen3 cannot hold qk_norm 'query' (it has 'both')"],
    ),
    (
        {**MODERN, "qk_norm": "both", "biases": True},
        ["Llama cannot hold qk_norm 'both' (it has 'none')", "Qwen3 cannot hold biases True (it has False)"],
    ),
    ({"qk_norm": "both"}, ["GPT-2 cannot hold qk_norm 'both' (it has 'none')"]),
    ({**MODERN, "key_offset": 0.5}, ["Llama cannot hold key_offset 0.5 (it has 0)"]),
    ({"convolution": 3}, ["GPT-2 cannot hold convolution 3 (it has 0)"]),
    (
        {**MODERN, "key_offset": 0.5, "key_dim": 8},
        ["Llama cannot hold key_offset 0.5 (it has 0), key_dim 8 (it has keys as wide as values)"],
    ),
    ({**LATENT, "latent": 0}, ["DeepSeek-V3 cannot hold latent 0 (it has a width above 0)"]),
    ({**LATENT, "channel": 0}, ["DeepSeek-V3 cannot hold channel 0 (it has a width above 0)"]),
    ({**LATENT, "positions": "learned"}, ["DeepSeek-V3 cannot hold positions 'learned' (it has 'none')"]),
    ({**LATENT, "qk_norm": "query"}, ["DeepSeek-V3 cannot hold qk_norm 'query' (it has 'none')"]),
    ({**LATENT, "biases": True}, ["DeepSeek-V3 cannot hold biases True (it has False)"]),
    ({"scores": "linear"}, ["GPT-2 cannot hold scores 'linear' (it has 'softmax')"]),
    ({**MODERN, "scores": "linear"}, ["Llama cannot hold scores 'linear' (it has 'softmax')"]),
    ({"latent": 24}, ["GPT-2 cannot hold latent 24 (it has 0)"]),
    ({"channel": 8}, ["GPT-2 cannot hold channel 8 (it has 0)"]),
]


@pytest.mark.parametrize(("fields", "reasons"), REFUSED)
def test_a_form_that_no_class_holds_is_refused_by_name_and_nothing_is_written(fields, reasons, tmp_path):
    model = lively_model("oelm-gpt", **fields)
    with pytest.raises(ModelError) as error:
        oelm.export(model, tmp_path / "plain")
    assert "; ".join(reasons) in str(error.value)
    assert "save_pretrained" in str(error.value)
    assert list(tmp_path.iterdir()) == []


def test_a_refused_model_can_be_saved_and_loaded_as_the_message_says(tmp_path):
    ids = padded_batch()["input_ids"]
    model = lively_model("oelm-gpt", **MODERN, key_offset=0.5)
    model.save_pretrained(tmp_path / "untouched")
    assert torch.equal(
        logits_of(AutoModelForCausalLM.from_pretrained(tmp_path / "untouched"), ids), logits_of(model, ids)
    )
    oelm.apply(model, "oelm-freeze")
    model.save_pretrained(tmp_path / "operated")
    assert torch.equal(logits_of(oelm.load(tmp_path / "operated"), ids), logits_of(model, ids))


def test_only_a_model_with_a_head_can_be_exported(tmp_path):
    headless = OelmGPTModel(small_config("oelm-gpt"))
    with pytest.raises(ModelError, match="only the GPT with a head"):
        oelm.export(headless, tmp_path / "plain")
    assert list(tmp_path.iterdir()) == []
