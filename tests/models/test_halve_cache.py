"""A halved GPT-2 or OPT caches hidden states: half the memory, and the outputs of the untouched model."""

import copy
import hashlib

import pytest
import torch
from torch import nn
from transformers import CompileConfig, EncoderDecoderCache
from transformers.cache_utils import Cache, DynamicCache, DynamicSlidingWindowLayer, StaticCache

import oelm
from oelm.models.halve_cache import HalvedAttention
from oelm.models.small import SMALL
from tests.support.models import distance, lively_model, model_with_method

# name: (small model, changes of its config); together they cover every branch that affects keys and values.
VARIANTS = {
    "gpt2": ("gpt2", {"n_positions": 256}),
    "gpt2-scaled": ("gpt2", {"scale_attn_by_inverse_layer_idx": True, "reorder_and_upcast_attn": True}),
    "gpt2-unscaled": ("gpt2", {"scale_attn_weights": False}),
    "opt": ("opt", {"max_position_embeddings": 256}),
    "opt-350m": ("opt", {"do_layer_norm_before": False, "word_embed_proj_dim": 32}),
    "opt-plain": ("opt", {"enable_bias": False, "layer_norm_elementwise_affine": False}),
}
GREEDY = {"do_sample": False, "pad_token_id": 0, "eos_token_id": None}
ONE_BY_ONE = [(0, 6), *((at, at + 1) for at in range(6, 20))]
IN_CHUNKS = [(0, 6), (6, 8), (8, 9), (9, 10), (10, 20)]
CUTS = {"single": ONE_BY_ONE, "chunks": IN_CHUNKS}
WAYS = {
    "beams": {"num_beams": 3},
    "beams, static": {"num_beams": 3, "cache_implementation": "static"},
    "prompt lookup": {"prompt_lookup_num_tokens": 3},
    "assisted": {"assistant_model": True},
    "static": {"cache_implementation": "static"},
    "sampled": {"do_sample": True, "num_return_sequences": 2},
}


def pair(name: str, attention: str = "sdpa") -> tuple[nn.Module, nn.Module]:
    """Return an untouched model and a halved copy of it."""
    family, changes = VARIANTS[name]
    original = lively_model(family, **changes)
    original.set_attn_implementation(attention)
    return original, oelm.halve_cache(copy.deepcopy(original))


def text(tokens: int = 20, batch: int = 2) -> torch.Tensor:
    return torch.randint(3, 96, (batch, tokens), generator=torch.Generator().manual_seed(0))


def padded(side: str) -> torch.Tensor:
    """Return a mask with padding in the first text: before its prompt of six tokens, or after it."""
    mask = torch.ones(2, 20, dtype=torch.long)
    mask[0, slice(0, 2) if side == "left" else slice(4, 6)] = 0
    return mask


@torch.no_grad()
def decode(model: nn.Module, ids, cuts, mask=None, cache=None, **options):
    """Return the logits of a text that is fed part by part with a cache, and the cache."""
    logits = []
    for start, end in cuts:
        inputs = {} if mask is None else {"attention_mask": mask[:, :end]}
        if mask is not None:
            inputs["position_ids"] = (mask.cumsum(1) - 1).clamp(min=0)[:, start:end]
        output = model(ids[:, start:end], past_key_values=cache, use_cache=True, **inputs, **options)
        cache, logits = output.past_key_values, [*logits, output.logits]
    return torch.cat(logits, 1), cache


def cache_bytes(cache: Cache) -> int:
    return sum(t.numel() * t.element_size() for layer in cache.layers for t in (layer.keys, layer.values))


@pytest.mark.covering(2)
@pytest.mark.parametrize("cuts", CUTS)
@pytest.mark.parametrize("cache", [None, "static"])
@pytest.mark.parametrize("padding", [None, "left", "right"])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("name", VARIANTS)
def test_logits_equal_those_of_the_untouched_model(name, attention, padding, cache, cuts):
    original, halved = pair(name, attention)
    mask = None if padding is None else padded(padding)

    def empty(model):
        return StaticCache(config=model.config, max_cache_len=32) if cache == "static" else None

    expected, full = decode(original, text(), CUTS[cuts], mask, empty(original))
    logits, half = decode(halved, text(), CUTS[cuts], mask, empty(halved))
    real = slice(None) if mask is None else mask.bool()
    assert distance(logits[real], expected[real]) < 2e-5 * expected.abs().max()
    assert cache_bytes(full) == 2 * cache_bytes(half)


@pytest.mark.parametrize("name", ["gpt2", "opt"])
def test_greedy_tokens_are_equal_over_200_steps(name):
    original, halved = (model.double() for model in pair(name))
    # A random model soon repeats itself, and equal repetitions would show little.
    options = {"max_new_tokens": 200, "no_repeat_ngram_size": 2, **GREEDY}
    expected = original.generate(text(8, 1), **options)
    assert expected.shape == (1, 208)
    assert torch.equal(halved.generate(text(8, 1), **options), expected)
    cuts = [(0, 8), *((at, at + 1) for at in range(8, 208))]
    whole = original(expected, use_cache=False).logits
    assert distance(decode(halved, expected, cuts)[0], whole) < 1e-12


@pytest.mark.covering(1)
@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize("way", WAYS)
def test_every_way_to_generate_gives_the_same_text(name, way):
    original, halved = (model.double() for model in pair(name))
    options = WAYS[way]
    one_text = {"prompt_lookup_num_tokens", "assistant_model"} & set(options)  # these take one text at a time
    ids, mask = text()[: 1 if one_text else 2], padded("left")[-1:] if one_text else padded("left")

    def generate(model):
        torch.manual_seed(0)
        extra = options | ({"assistant_model": model} if "assistant_model" in options else {})
        return model.generate(ids, attention_mask=mask, max_new_tokens=12, **GREEDY | extra)

    assert torch.equal(generate(halved), generate(original))


@pytest.mark.parametrize("name", ["gpt2", "opt"])
def test_a_cropped_cache_continues_from_where_it_was_cut(name):
    original, halved = pair(name)
    _, cache = decode(halved, text(), ONE_BY_ONE)
    cache.crop(-9)
    logits, _ = decode(halved, text(), [(11, 14), (14, 15), (15, 16)], cache=cache)
    with torch.no_grad():
        assert distance(logits, original(text()).logits[:, 11:16]) < 1e-4


@pytest.mark.parametrize("cache", [DynamicCache, StaticCache])
@pytest.mark.parametrize("name", ["gpt2", "opt"])
def test_attention_weights_equal_those_of_the_untouched_model(name, cache):
    original, halved = pair(name, "eager")
    weights = []
    for model in (original, halved):
        past = StaticCache(config=model.config, max_cache_len=32) if cache is StaticCache else DynamicCache()
        decode(model, text(), ONE_BY_ONE[:-1], cache=past)
        output = model(text()[:, -1:], past_key_values=past, output_attentions=True)
        prompt = StaticCache(config=model.config, max_cache_len=32) if cache is StaticCache else DynamicCache()
        weights.append([*output.attentions, *model(text(), past_key_values=prompt, output_attentions=True).attentions])
    for halved_weights, expected in zip(*reversed(weights), strict=True):
        assert halved_weights.shape == expected.shape
        assert distance(halved_weights, expected) < 1e-5


MASKS = {
    "none": (lambda visible: None, "sdpa"),
    "boolean": (lambda visible: visible[:, None, None], "sdpa"),
    "boolean for all texts": (lambda visible: visible[1:, None, None], "sdpa"),
    "additive": (lambda visible: (~visible)[:, None, None] * torch.finfo(torch.float32).min, "eager"),
    "for each head": (lambda visible: visible[:, None, None].repeat(1, 4, 1, 1), "sdpa"),
    "flash": (lambda visible: visible, "flash_attention_2"),
}


@pytest.mark.parametrize("form", MASKS)
@pytest.mark.parametrize("name", ["gpt2", "opt"])
def test_every_form_of_mask_is_obeyed(name, form):
    """Flash attention needs a GPU, but its form of mask also reaches the halved step of one token on a CPU."""
    original, halved = pair(name)
    make, implementation = MASKS[form]
    visible = torch.ones(2, 7, dtype=torch.bool)
    visible[0, :3] = visible[1, 4] = False
    if form == "none":
        visible[:] = True
    states = torch.randn(2, 7, 48, generator=torch.Generator().manual_seed(0)).split([6, 1], dim=1)
    outputs = []
    for model, mask in ((original, visible[:, None, None]), (halved, make(visible))):
        attention = next(module for module in model.modules() if type(module).__name__.endswith("Attention"))
        cache = DynamicCache()
        with torch.no_grad():
            attention(hidden_states=states[0].contiguous(), past_key_values=cache)
            attention.config._attn_implementation = "sdpa" if model is original else implementation
            if form == "boolean for all texts" and model is original:
                mask = visible[1:, None, None].expand(2, 1, 1, 7)
            outputs.append(
                attention(hidden_states=states[1].contiguous(), past_key_values=cache, attention_mask=mask)[0]
            )
    assert distance(*outputs) < 1e-5


def test_flash_attentions_mask_of_a_static_cache_ends_with_the_real_tokens():
    original, halved = pair("gpt2")
    cache = StaticCache(config=halved.config, max_cache_len=32)
    decode(halved, text(), [(0, 6)], cache=cache)
    halved.config._attn_implementation = "flash_attention_2"
    logits, _ = decode(halved, text(), [(6, 7)], torch.ones(2, 20, dtype=torch.long), cache)
    with torch.no_grad():
        assert distance(logits[:, 0], original(text()[:, :7]).logits[:, -1]) < 1e-4
    with pytest.raises(oelm.ModelError, match="attention_mask is None: with a static cache"):
        halved(text()[:, 7:8], past_key_values=cache)


@pytest.mark.full
def test_flex_attention_gives_the_same_logits():
    """Flex attention has no mask tensor, so keys and values are computed from the states for every token."""
    original, halved = pair("opt")
    halved.set_attn_implementation("flex_attention")
    cuts = [(0, 6), (6, 7), (7, 20)]
    assert distance(decode(halved, text(), cuts)[0], decode(original, text(), cuts)[0]) < 1e-4
    # With a static cache even the untouched model's logits are wrong, because its mask moves along with the cache.
    with pytest.raises(oelm.ModelError, match="BlockMask, as flex_attention makes it"):
        decode(halved, text(), cuts, cache=StaticCache(config=halved.config, max_cache_len=32))


def test_only_the_new_tokens_of_a_prompt_are_expanded(monkeypatch):
    _, halved = pair("gpt2")
    monkeypatch.setattr(HalvedAttention, "_by_head", lambda *arguments: pytest.fail("expanded the cache"))
    decode(halved, text(), ONE_BY_ONE, cache=StaticCache(config=halved.config, max_cache_len=32))
    decode(halved, text(), ONE_BY_ONE)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("name", ["gpt2", "opt"])
def test_training_is_the_same_with_dropout_too(name, attention):
    original, halved = pair(name, attention)
    results = []
    for model in (original, halved):
        model.train()
        torch.manual_seed(0)
        output = model(text(), labels=text())  # with a cache: the config's default
        output.loss.backward()
        torch.manual_seed(0)
        token = model(text()[:, :1], past_key_values=output.past_key_values).logits
        gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
        results.append((output.loss, gradients, token))
    (loss, gradients, token), (halved_loss, halved_gradients, halved_token) = results
    assert torch.equal(loss, halved_loss)
    assert all(map(torch.equal, gradients, halved_gradients))
    assert distance(token, halved_token) < 1e-4


@pytest.mark.parametrize("name", ["gpt2", "opt"])
def test_the_cache_is_half_as_large_under_autocast_too(name):
    original, halved = pair(name)
    with torch.autocast("cpu", torch.bfloat16):
        expected, full = decode(original, text(), ONE_BY_ONE)
        logits, half = decode(halved, text(), ONE_BY_ONE)
    assert cache_bytes(full) == 2 * cache_bytes(half)
    assert distance(logits, expected) < 0.05 * expected.abs().max()


@pytest.mark.parametrize("name", ["gpt2", "opt"])
def test_a_halved_model_is_saved_like_the_untouched_one(name, tmp_path):
    hashes = []
    for model, folder in zip(pair(name), (tmp_path / "original", tmp_path / "halved"), strict=True):
        model.save_pretrained(folder)
        hashes.append({file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in folder.iterdir()})
    assert hashes[0] == hashes[1]
    assert {"config.json", "model.safetensors"} <= set(hashes[0])


def test_a_halved_model_can_be_halved_again_and_restored():
    original, halved = pair("opt")
    assert oelm.halve_cache(halved) is halved
    assert oelm.restore_cache(halved) is halved
    assert [type(module) for module in halved.modules()] == [type(module) for module in original.modules()]
    expected, _ = decode(original, text(), ONE_BY_ONE)
    assert torch.equal(decode(halved, text(), ONE_BY_ONE)[0], expected)


def test_the_model_below_a_head_is_halved_as_well():
    original, _ = pair("gpt2")
    base = oelm.halve_cache(copy.deepcopy(original.transformer))
    with torch.no_grad():
        cache = base(text()[:, :-1]).past_key_values
        last = base(text()[:, -1:], past_key_values=cache).last_hidden_state
        assert distance(last, original.transformer(text()).last_hidden_state[:, -1:]) < 1e-5
    assert cache.layers[0].values.numel() == 0


@pytest.mark.parametrize("name", ["gpt2", "opt"])
@pytest.mark.parametrize("method", ["freeze-pretrained", "oelm-exact", "identity-query"])
def test_a_method_that_keeps_plain_matrices_can_be_halved(name, method):
    model = model_with_method(name, method)
    expected, _ = decode(model, text(), IN_CHUNKS)
    assert distance(decode(oelm.halve_cache(model), text(), IN_CHUNKS)[0], expected) < 1e-4
    oelm.verify(model)


@pytest.mark.full
@pytest.mark.parametrize("name", ["gpt2", "opt"])
def test_generate_compiles_a_halved_model_without_a_graph_break(name):
    original, halved = pair(name)
    compile_config = CompileConfig(fullgraph=True)
    compile_config._compile_all_devices = True
    static = {"cache_implementation": "static", "compile_config": compile_config}
    expected = original.generate(text(), max_new_tokens=6, **GREEDY)
    assert torch.equal(halved.generate(text(), max_new_tokens=6, **GREEDY, **static), expected)


@pytest.mark.full
def test_a_model_that_was_compiled_before_is_compiled_again():
    model, _ = pair("gpt2")
    expected, _ = decode(model, text(), IN_CHUNKS)
    model.compile(backend="eager")
    decode(model, text(), IN_CHUNKS)
    logits, cache = decode(oelm.halve_cache(model), text(), IN_CHUNKS)
    assert distance(logits, expected) < 1e-4
    assert cache.layers[0].values.numel() == 0


def with_lora(model: nn.Module, target: str) -> nn.Module:
    """Return the model with an adapter in its last layer only, so that all other layers could be halved."""
    peft = pytest.importorskip("peft")
    model.add_adapter(peft.LoraConfig(r=2, target_modules=[target], layers_to_transform=[2]))
    return model


def with_quantised_values(model: nn.Module) -> nn.Module:
    class Linear4bit(nn.Linear):
        pass

    model.model.decoder.layers[2].self_attn.v_proj = Linear4bit(48, 48)
    return model


def with_int8_keys(model: nn.Module) -> nn.Module:
    weight = torch.zeros(48, 48, dtype=torch.int8)
    model.model.decoder.layers[2].self_attn.k_proj.weight = nn.Parameter(weight, requires_grad=False)
    return model


def with_own_forward(model: nn.Module) -> nn.Module:
    from accelerate.hooks import ModelHook, add_hook_to_module

    add_hook_to_module(model.transformer.h[2].attn.c_attn, ModelHook())
    return model


REFUSED = {
    "llama": (lambda: lively_model("llama"), "model_type 'llama'.*GPT-2 and OPT"),
    "another library": (lambda: nn.Linear(3, 3), "Linear is no transformers model.*GPT-2 and OPT"),
    "wrapped": (lambda: nn.DataParallel(lively_model("gpt2")), "DataParallel is no transformers model"),
    "cross-attention": (lambda: lively_model("gpt2-cross"), "add_cross_attention is True"),
    "bidirectional": (lambda: lively_model("gpt2", is_causal=False), "is_causal is False"),
    "lora": (lambda: with_lora(lively_model("gpt2"), "c_attn"), "layer 2: c_attn is a peft"),
    "quantised": (lambda: with_quantised_values(lively_model("opt")), "layer 2: v_proj is a .*Linear4bit"),
    "int8": (lambda: with_int8_keys(lively_model("opt")), r"layers\.2\.self_attn: the weight of k is .*int8"),
    "identity": (
        lambda: model_with_method("gpt2", "identity-key"),
        r"layer 0: c_attn.k is a .*IdentityProjection.*oelm.export",
    ),
    "lora of a method": (lambda: model_with_method("gpt2", "lora"), r"layer 0: c_attn.v is a peft"),
    "offloaded": (lambda: with_own_forward(lively_model("gpt2")), r"h\.2\.attn\.c_attn has its forward replaced"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_model_that_cannot_be_halved_is_refused_and_unchanged(case):
    make, message = REFUSED[case]
    model = make()
    before = [(name, type(module)) for name, module in model.named_modules()]
    with pytest.raises(oelm.ModelError, match=message):
        oelm.halve_cache(model)
    assert [(name, type(module)) for name, module in model.named_modules()] == before


@pytest.mark.full
@pytest.mark.parametrize("name", sorted(set(SMALL) - {"gpt2", "opt"}))
def test_every_other_family_is_refused(name):
    with pytest.raises(oelm.ModelError, match=r"GPT-2 and OPT|cross"):
        oelm.halve_cache(lively_model(name))


def test_an_adapter_that_is_added_after_halving_is_refused():
    _, halved = pair("gpt2")
    with_lora(halved, "c_attn")
    with pytest.raises(oelm.ModelError, match="layer 2: c_attn is a peft"):
        decode(halved, text(), ONE_BY_ONE)


def test_logits_are_the_same_with_adapters_outside_attention():
    original, halved = (with_lora(model, "fc1") for model in pair("opt"))
    halved.load_state_dict(original.state_dict())
    assert distance(decode(halved, text(), IN_CHUNKS)[0], decode(original, text(), IN_CHUNKS)[0]) < 1e-4


def early_static(config) -> StaticCache:
    cache = StaticCache(config=config, max_cache_len=32)
    cache.early_initialization(2, 4, 12, torch.float32, torch.device("cpu"))
    return cache


CACHES = {
    "filled before": (lambda model: decode(model, text(), [(0, 4)])[1], "4 heads with keys of 12 and values of 12"),
    "prepared": (lambda model: early_static(model.config), "prefill_chunk_size"),
    "sliding": (lambda model: Cache(layers=[DynamicSlidingWindowLayer(8) for _ in range(3)]), "neither sliding"),
    "two caches": (lambda model: EncoderDecoderCache(DynamicCache(), DynamicCache()), "is a EncoderDecoderCache"),
}


@pytest.mark.parametrize("case", CACHES)
def test_a_cache_of_another_form_is_refused_by_name(case):
    original, halved = pair("gpt2")
    make, message = CACHES[case]
    with pytest.raises(oelm.ModelError, match=message):
        halved(text()[:, 4:5], past_key_values=make(original))
