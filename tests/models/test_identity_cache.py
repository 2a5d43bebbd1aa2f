"""With an identity key the decoder's cache holds each hidden state once: half the memory, the same text."""

import pytest
import torch
from transformers import CompileConfig
from transformers.cache_utils import StaticCache

import oelm
from tests.support.models import lively_model


def cache_bytes(cache) -> int:
    return sum(t.numel() * t.element_size() for layer in cache.layers for t in (layer.keys, layer.values))


def padded_batch() -> dict[str, torch.Tensor]:
    ids = torch.randint(3, 96, (2, 12), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    mask[0, :4] = 0
    return {"input_ids": ids, "attention_mask": mask, "position_ids": (mask.cumsum(1) - 1).clamp(min=0)}


@pytest.fixture(params=["identity-key", "identity-core"])
def model(request):
    model = lively_model("oelm-gpt")
    oelm.apply(model, request.param)
    return model


def test_the_cache_is_half_as_large(model):
    batch = padded_batch()
    with torch.no_grad():
        usual = lively_model("oelm-gpt")(**batch, use_cache=True).past_key_values
        halved = model(**batch, use_cache=True).past_key_values
    assert cache_bytes(usual) == 2 * cache_bytes(halved)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_token_by_token_gives_what_the_whole_text_gives(model, attention):
    model.set_attn_implementation(attention)
    batch = padded_batch()
    with torch.no_grad():
        whole = model(**batch, use_cache=False).logits
        cache, parts = None, []
        # A prompt, a chunk of several tokens on top of the cache, then single tokens.
        for start, end in ((0, 5), (5, 8), (8, 9), (9, 10), (10, 12)):
            here = {"input_ids": batch["input_ids"][:, start:end], "attention_mask": batch["attention_mask"][:, :end]}
            here["position_ids"] = batch["position_ids"][:, start:end]
            out = model(**here, past_key_values=cache, use_cache=True)
            cache, parts = out.past_key_values, [*parts, out.logits]
    real = batch["attention_mask"].bool()
    assert (torch.cat(parts, 1) - whole)[real].abs().max() < 1e-4


def test_generation_is_the_same_with_and_without_a_cache(model):
    batch = {key: value for key, value in padded_batch().items() if key != "position_ids"}
    how = {"max_new_tokens": 10, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    assert torch.equal(model.generate(**batch, **how), model.generate(**batch, **how, use_cache=False))


def test_a_static_cache_works_too(model):
    batch = {"input_ids": padded_batch()["input_ids"]}
    how = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    cache = StaticCache(config=model.config, max_cache_len=32)
    assert torch.equal(model.generate(**batch, **how, past_key_values=cache), model.generate(**batch, **how))


def test_generate_compiles_the_model_in_one_piece(model):
    """As it does on a GPU by itself when its cache is static: a break in the graph would cost the gain."""
    batch = {"input_ids": padded_batch()["input_ids"]}
    how = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    everywhere = CompileConfig(fullgraph=True)
    everywhere._compile_all_devices = True
    static = {"cache_implementation": "static", "return_dict_in_generate": True, "compile_config": everywhere}
    compiled = model.generate(**batch, **how, **static)
    assert torch.equal(compiled.sequences, model.generate(**batch, **how))
    assert not any(layer.values.numel() for layer in compiled.past_key_values.layers), "states are held once"


@pytest.mark.parametrize("method", ["identity-key", "identity-core"])
def test_rotary_positions_keep_the_usual_cache(method):
    """Turned keys are no states, and to turn every state again at every token takes far longer than it saves."""
    model = lively_model("oelm-gpt-rotary")
    oelm.apply(model, method)
    with torch.no_grad():
        cache = model(**padded_batch(), use_cache=True).past_key_values
    assert cache.layers[0].values.shape == cache.layers[0].keys.shape


def test_an_adapter_on_the_values_has_its_part_in_every_token(model):
    """Values then are more than a matrix times a state, so the states cannot be mixed first."""
    peft = pytest.importorskip("peft")
    adapted = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["v_proj"], init_lora_weights=False))
    ids = padded_batch()["input_ids"]
    with torch.no_grad():
        whole = adapted(input_ids=ids, use_cache=False).logits[:, -1]
        cache = adapted(input_ids=ids[:, :-1], use_cache=True).past_key_values
        last = adapted(input_ids=ids[:, -1:], past_key_values=cache, use_cache=True).logits[:, -1]
    assert (whole - last).abs().max() < 1e-4


def test_flex_attention_writes_the_same_text(model):
    """Its mask is no tensor."""
    batch = {"input_ids": padded_batch()["input_ids"]}
    how = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    usual = model.generate(**batch, **how)
    model.set_attn_implementation("flex_attention")
    assert torch.equal(model.generate(**batch, **how), usual)
