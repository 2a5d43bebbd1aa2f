"""With an identity key, the decoder's cache holds each hidden state once: half the memory, the same text."""

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
        keys_and_values = lively_model("oelm-gpt")(**batch, use_cache=True).past_key_values
        states = model(**batch, use_cache=True).past_key_values
    assert cache_bytes(keys_and_values) == 2 * cache_bytes(states)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_logits_with_a_cache_equal_those_without(model, attention):
    model.set_attn_implementation(attention)
    batch = padded_batch()
    with torch.no_grad():
        without_cache = model(**batch, use_cache=False).logits
        cache, with_cache = None, []
        # A prompt, a chunk of several tokens after the cached ones, then single tokens.
        for start, end in ((0, 5), (5, 8), (8, 9), (9, 10), (10, 12)):
            chunk = {"input_ids": batch["input_ids"][:, start:end], "attention_mask": batch["attention_mask"][:, :end]}
            chunk["position_ids"] = batch["position_ids"][:, start:end]
            output = model(**chunk, past_key_values=cache, use_cache=True)
            cache, with_cache = output.past_key_values, [*with_cache, output.logits]
    not_padding = batch["attention_mask"].bool()
    assert (torch.cat(with_cache, 1) - without_cache)[not_padding].abs().max() < 1e-4


def test_generation_is_the_same_with_and_without_a_cache(model):
    batch = {key: value for key, value in padded_batch().items() if key != "position_ids"}
    greedy = {"max_new_tokens": 10, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    assert torch.equal(model.generate(**batch, **greedy), model.generate(**batch, **greedy, use_cache=False))


def test_a_static_cache_works_too(model):
    batch = {"input_ids": padded_batch()["input_ids"]}
    greedy = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    cache = StaticCache(config=model.config, max_cache_len=32)
    assert torch.equal(model.generate(**batch, **greedy, past_key_values=cache), model.generate(**batch, **greedy))


@pytest.mark.full
def test_generate_compiles_the_model_without_a_graph_break(model):
    """On a GPU, generate compiles by itself when the cache is static; a graph break would lose the speed."""
    batch = {"input_ids": padded_batch()["input_ids"]}
    greedy = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    compile_config = CompileConfig(fullgraph=True)
    compile_config._compile_all_devices = True
    static = {"cache_implementation": "static", "return_dict_in_generate": True, "compile_config": compile_config}
    compiled = model.generate(**batch, **greedy, **static)
    assert torch.equal(compiled.sequences, model.generate(**batch, **greedy))
    assert not any(layer.values.numel() for layer in compiled.past_key_values.layers), "states are held once"


@pytest.mark.parametrize("method", ["identity-key", "identity-core"])
def test_rotary_positions_keep_the_usual_cache(method):
    """A rotated key is not a hidden state, and rotating all states again for every token would take far too long."""
    model = lively_model("oelm-gpt-rotary")
    oelm.apply(model, method)
    with torch.no_grad():
        cache = model(**padded_batch(), use_cache=True).past_key_values
    assert cache.layers[0].values.shape == cache.layers[0].keys.shape


def test_an_adapter_on_the_values_is_applied_with_a_cache_too(model):
    """A value is then more than a matrix times a state, so the states cannot be mixed before the projection."""
    peft = pytest.importorskip("peft")
    adapted = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["v_proj"], init_lora_weights=False))
    ids = padded_batch()["input_ids"]
    with torch.no_grad():
        without_cache = adapted(input_ids=ids, use_cache=False).logits[:, -1]
        cache = adapted(input_ids=ids[:, :-1], use_cache=True).past_key_values
        with_cache = adapted(input_ids=ids[:, -1:], past_key_values=cache, use_cache=True).logits[:, -1]
    assert (without_cache - with_cache).abs().max() < 1e-4


@pytest.mark.full
def test_flex_attention_generates_the_same_text(model):
    """Flex attention has no mask tensor, so the states cannot be mixed before the projection."""
    batch = {"input_ids": padded_batch()["input_ids"]}
    greedy = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    expected = model.generate(**batch, **greedy)
    model.set_attn_implementation("flex_attention")
    assert torch.equal(model.generate(**batch, **greedy), expected)
