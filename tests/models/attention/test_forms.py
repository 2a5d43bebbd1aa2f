"""Every form of the GPT's attention gives the same logits however a text is cut, padded, packed or generated."""

from functools import cache as cached_call
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.cache_utils import DynamicCache, StaticCache

import oelm
from oelm.models.gpt import OelmGPTForCausalLM
from oelm.models.gpt_config import MODERN
from tests.support.models import distance, lively_model

WIDTH, HEADS, LAYERS = 48, 4, 3  # of the small GPT
ROTARY = {"positions": "rotary"}
LATENT = {"latent": 24, "channel": 8, "positions": "none"}

# name: (fields of the GPT, numbers per token and layer in the cache)
FORMS: dict[str, tuple[dict[str, Any], int]] = {
    "study": ({}, 2 * WIDTH),
    "rotary": (ROTARY, 2 * WIDTH),
    "modern": (dict(MODERN), 2 * WIDTH),
    "relu2": ({"activation": "relu2"}, 2 * WIDTH),
    "grouped": ({**ROTARY, "num_key_value_heads": 2}, WIDTH),
    "multi-query": ({**ROTARY, "num_key_value_heads": 1}, WIDTH // 2),
    "thin": ({**ROTARY, "key_dim": 6}, WIDTH // 2 + WIDTH),
    "K = V": ({"shared_kv": True}, WIDTH),
    "K = V, rotary": ({**ROTARY, "shared_kv": True}, WIDTH),
    "K = V, grouped": ({**ROTARY, "shared_kv": True, "num_key_value_heads": 2}, WIDTH // 2),
    "K = V with a channel": ({"shared_kv": True, "channel": 8, "positions": "none"}, 2 * WIDTH + HEADS * 8),
    "qk-norm": ({**ROTARY, "qk_norm": "both"}, 2 * WIDTH),
    "query norm": ({**LATENT, "qk_norm": "query"}, 24 + 8),
    "latent": (LATENT, 24 + 8),
    "latent, modern": ({**MODERN, **LATENT}, 24 + 8),
    "latent without a channel": ({"latent": 24}, 24),
    "thin latent": ({**LATENT, "key_dim": 6}, 24 + 8),
    "channel": ({"channel": 8, "positions": "none"}, 2 * WIDTH + HEADS * 8),
    "states": ({"cache": "states"}, WIDTH),
    "states with a channel": ({"cache": "states", "channel": 8, "positions": "none"}, WIDTH + 8),
    "key offset": ({"key_offset": 0.5}, 2 * WIDTH),
    "key offset, rotary": ({**ROTARY, "key_offset": 0.5}, 2 * WIDTH),
    "convolution": ({**ROTARY, "convolution": 4}, 2 * WIDTH),
    "convolution, grouped": ({"convolution": 3, "num_key_value_heads": 2}, WIDTH),
    "orthogonal key": ({**ROTARY, "orthogonal_key": True, "cache": "keys"}, WIDTH),
    "linear": ({"scores": "linear"}, 2 * WIDTH),
    "linear, rotary": ({**ROTARY, "scores": "linear"}, 3 * WIDTH),
    "linear, grouped, K = V": ({"scores": "linear", "shared_kv": True, "num_key_value_heads": 2}, WIDTH),
}
# Keys that are cached before their rotation turn by their place in the cache, not by their position: after padding
# those differ, and the float32 angles with them.
PLACED = {"K = V, rotary": 1e-5, "K = V, grouped": 1e-5, "orthogonal key": 1e-5}
CUTS = {"a prompt, then tokens": [12, *[1] * 8], "single tokens": [1] * 20, "chunks": [5, 7, 1, 1, 6]}
GREEDY = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}

forms = pytest.mark.parametrize("form", FORMS)


@cached_call
def model_of(form: str) -> OelmGPTForCausalLM:
    """Return a lively GPT of a form in float64. Tests share it and change nothing in it."""
    model = lively_model("oelm-gpt", **FORMS[form][0]).double()
    if model.config.orthogonal_key:
        for block in model.transformer.h:  # orthogonal in float32 so far
            block.attn.k_proj.weight = block.attn.k_proj.weight.detach()
    return model


def some_ids(rows: int = 2, length: int = 20, seed: int = 1) -> Tensor:
    return torch.randint(3, 96, (rows, length), generator=torch.Generator().manual_seed(seed))


def logits_of(model: Any, ids: Tensor, **more: Any) -> Tensor:
    """Return the logits of whole rows, without a cache."""
    with torch.no_grad():
        return model(ids, use_cache=False, **more).logits


def logits_in_parts(model: Any, ids: Tensor, cache: Any, cuts: list[int], **rows: Tensor) -> Tensor:
    """Return the logits of rows that are read in parts with a cache; a mask in `rows` covers all tokens so far."""
    parts, end = [], 0
    for length in cuts:
        start, end = end, end + length
        more = {name: row[:, :end] if name == "attention_mask" else row[:, start:end] for name, row in rows.items()}
        with torch.no_grad():
            parts.append(model(ids[:, start:end], past_key_values=cache, use_cache=True, **more).logits)
    return torch.cat(parts, 1)


def make_cache(model: Any, kind: str) -> Any:
    """Return an empty cache that grows, or one that is preallocated."""
    return DynamicCache(config=model.config) if kind == "growing" else StaticCache(model.config, max_cache_len=30)


def padded(ids: Tensor, pads: list[int], side: str) -> tuple[Tensor, Tensor, Tensor]:
    """Return rows of equal length with padding on one side, their mask, and positions that count real tokens."""
    longest = ids.shape[1] + max(pads)
    rows, mask = torch.zeros(len(ids), longest, dtype=torch.long), torch.zeros(len(ids), longest, dtype=torch.long)
    for row, pad in enumerate(pads):
        real = longest - pad
        columns = slice(pad, None) if side == "left" else slice(0, real)
        rows[row, columns], mask[row, columns] = ids[row].repeat(longest)[:real], 1
    return rows, mask, (mask.cumsum(1) - 1).clamp(min=0)


# Cut into parts


@pytest.mark.covering(2)
@forms
@pytest.mark.parametrize("cuts", CUTS)
@pytest.mark.parametrize("kind", ["growing", "static"])
def test_logits_do_not_depend_on_how_a_text_is_cut(form, cuts, kind):
    model, ids = model_of(form), some_ids()
    parts = logits_in_parts(model, ids, make_cache(model, kind), CUTS[cuts])
    assert distance(parts, logits_of(model, ids)) < 1e-12


@pytest.mark.covering(1)
@forms
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_both_attention_functions_read_the_cache(form, attention):
    model, ids = lively_model("oelm-gpt", **FORMS[form][0]), some_ids()
    whole = logits_of(model, ids)
    model.set_attn_implementation(attention)
    parts = logits_in_parts(model, ids, make_cache(model, "growing"), CUTS["chunks"])
    assert distance(parts, whole) < 1e-3


@forms
def test_the_cache_holds_as_many_numbers_per_token_as_the_form_promises(form):
    model, ids = model_of(form), some_ids(rows=1)
    cache = make_cache(model, "growing")
    logits_in_parts(model, ids, cache, CUTS["chunks"])
    for layer in cache.layers:
        held = [tensor for tensor in (layer.keys, layer.values) if tensor.numel()]
        assert sum(tensor.numel() for tensor in held) == FORMS[form][1] * ids.shape[1]
        # What a look at earlier tokens needs besides does not grow with the text.
        assert sum(tensor.numel() for tensor in getattr(layer, "conv_states", {}).values()) <= 3 * 2 * WIDTH


def test_an_identity_key_caches_the_state_and_the_channel():
    for fields, numbers in (({}, WIDTH), ({"channel": 8, "positions": "none"}, WIDTH + 8)):
        model, ids = lively_model("oelm-gpt", **fields).double(), some_ids()
        oelm.apply(model, "identity-key")
        cache = make_cache(model, "growing")
        assert distance(logits_in_parts(model, ids, cache, CUTS["chunks"]), logits_of(model, ids)) < 1e-12
        assert (cache.layers[0].keys.numel() + cache.layers[0].values.numel()) == numbers * ids.numel()


# Padding and packing


@forms
@pytest.mark.parametrize("kind", ["growing", "static"])
def test_padding_on_the_left_changes_no_logits(form, kind):
    model = model_of(form)
    ids, mask, positions = padded(some_ids(), [3, 5], "left")
    rows = {"attention_mask": mask, "position_ids": positions}
    expected = [logits_of(model, ids[row : row + 1, pad:])[0] for row, pad in enumerate((3, 5))]
    cuts = [10, *[1] * 12, 3]
    for found, tolerance in (
        (logits_of(model, ids, **rows), 1e-12),
        (logits_in_parts(model, ids, make_cache(model, kind), cuts, **rows), PLACED.get(form, 1e-12)),
    ):
        for row, pad in enumerate((3, 5)):
            assert distance(found[row, pad:], expected[row]) < tolerance


@forms
def test_padding_on_the_right_changes_no_logits(form):
    model = model_of(form)
    ids, mask, _ = padded(some_ids(), [3, 5], "right")
    found = logits_of(model, ids, attention_mask=mask)
    for row, pad in enumerate((3, 5)):
        assert distance(found[row, :-pad], logits_of(model, ids[row : row + 1, :-pad])[0]) < 1e-12


@forms
def test_texts_packed_into_one_row_are_as_if_alone(form):
    """Positions that start again separate the texts, also for what is taken from the token before."""
    model, ids = model_of(form), some_ids(rows=1)
    positions = torch.tensor([[*range(7), *range(9), *range(4)]])
    packed = logits_of(model, ids, position_ids=positions)
    alone = [logits_of(model, text) for text in ids.split([7, 9, 4], dim=1)]
    assert distance(packed, torch.cat(alone, 1)) < 1e-12


@pytest.mark.parametrize("fields", [{"key_offset": 0.5}, {"convolution": 3}], ids=["key offset", "convolution"])
def test_across_documents_the_token_before_is_seen_whatever_its_position(fields):
    model = lively_model("oelm-gpt", **fields, offset_across_documents=True).double()
    ids, positions = some_ids(rows=1), torch.tensor([[*range(7), *range(13)]])
    packed = logits_of(model, ids, position_ids=positions)
    changed = ids.clone()
    changed[0, 6] += 1
    assert distance(logits_of(model, changed, position_ids=positions)[:, 7:], packed[:, 7:]) > 1e-3
    parts = logits_in_parts(model, ids, make_cache(model, "growing"), [7, 5, *[1] * 8], position_ids=positions)
    whole = logits_of(model, ids)
    assert distance(parts[:, :7], whole[:, :7]) < 1e-12


# Looking back


LOOKING_BACK = {"key offset": {"key_offset": 0.5}, "convolution": {"convolution": 4}}


@pytest.mark.parametrize("fields", LOOKING_BACK.values(), ids=LOOKING_BACK)
def test_the_first_token_of_a_padded_row_does_not_see_the_padding(fields):
    """With positions given, and without: then the mask tells where the padding ends. Here only order counts."""
    model = lively_model("oelm-gpt", positions="none", **fields).double()
    ids, mask, positions = padded(some_ids(), [3, 5], "left")
    for given in ({}, {"position_ids": positions}):
        for filler in (0, 50):
            rows = torch.where(mask.bool(), ids, filler)
            whole = logits_of(model, rows, attention_mask=mask, **given)
            cache = make_cache(model, "growing")
            parts = logits_in_parts(model, rows, cache, [4, *[1] * 16, 5], attention_mask=mask, **given)
            for row, pad in enumerate((3, 5)):
                expected = logits_of(model, rows[row : row + 1, pad:])[0]
                assert distance(whole[row, pad:], expected) < 1e-12
                assert distance(parts[row, pad:], expected) < 1e-12


@pytest.mark.parametrize(("fields", "taps"), [(LOOKING_BACK["key offset"], 1), (LOOKING_BACK["convolution"], 3)])
def test_a_token_looks_back_as_far_as_the_form_says(fields, taps):
    """The keys after the look back are those of the tokens before, and zero before the first."""
    model = lively_model("oelm-gpt", positions="none", num_hidden_layers=1, **fields).double()
    attention = model.transformer.h[0].attn
    seen = {}
    attention.lookback.register_forward_hook(lambda _, arguments, output: seen.update(key=(arguments[1], output[1])))
    ids = some_ids(rows=1)
    logits_of(model, ids)
    before, after = seen["key"]
    if taps == 1:
        moved = attention.lookback.moved
        assert torch.equal(after[..., ~moved], before[..., ~moved])
        assert torch.equal(after[:, :, 1:, moved], before[:, :, :-1, moved])
        assert not after[:, :, 0, moved].any()
        assert int(moved.sum()) == WIDTH // HEADS // 2
    else:
        shifted = [torch.nn.functional.pad(before, (0, 0, back, 0))[:, :, : ids.shape[1]] for back in range(4)]
        products = [tap * states for tap, states in zip(attention.lookback.key_taps, shifted, strict=True)]
        assert distance(after, before + sum(products)) < 1e-12


# Generation


@pytest.mark.covering(1)
@forms
@pytest.mark.parametrize("search", [{}, {"num_beams": 3}], ids=["greedy", "beams"])
def test_generation_is_the_same_with_and_without_a_cache(form, search):
    model = model_of(form)
    ids, mask, _ = padded(some_ids(length=9), [0, 4], "left")
    options = {**GREEDY, **search, "attention_mask": mask}
    assert torch.equal(model.generate(ids, **options), model.generate(ids, **options, use_cache=False))


@pytest.mark.covering(1)
@forms
def test_assisted_generation_takes_back_what_it_guessed_wrong(form):
    """Guesses copied from the prompt are checked many at a time, and the cache is cropped after a wrong one."""
    model = model_of(form)
    ids = some_ids(rows=1, length=6).repeat(1, 3)
    expected = model.generate(ids, **GREEDY)
    assert torch.equal(model.generate(ids, **GREEDY, prompt_lookup_num_tokens=3), expected)


@pytest.mark.covering(1)
@forms
@pytest.mark.parametrize("prompt", [1, 6])
def test_a_static_cache_generates_the_same_text(form, prompt):
    model = model_of(form)
    ids, mask, _ = padded(some_ids(length=prompt), [0, 4], "left")
    options = {**GREEDY, "attention_mask": mask}
    found = model.generate(ids, **options, cache_implementation="static", disable_compile=True)
    assert torch.equal(found, model.generate(ids, **options))
    alone = model.generate(ids[1:, 4:], **GREEDY)
    assert torch.equal(found[1:, 4:], alone)


@pytest.mark.parametrize("fields", LOOKING_BACK.values(), ids=LOOKING_BACK)
@pytest.mark.parametrize("kind", ["dynamic", "static"])
def test_a_model_that_looks_across_documents_does_not_see_padding_either(fields, kind):
    model = lively_model("oelm-gpt", **fields, offset_across_documents=True).double()
    ids, mask, _ = padded(some_ids(length=6), [0, 4], "left")
    options = {**GREEDY, "cache_implementation": kind, "disable_compile": True}
    found = model.generate(ids, attention_mask=mask, **options)
    assert torch.equal(found[1:, 4:], model.generate(ids[1:, 4:], **GREEDY))


# What is refused


@pytest.mark.parametrize("kind", ["growing", "static"])
@pytest.mark.parametrize(
    ("first", "then", "message"),
    [
        ("study", "latent", r"holds .* \(4, 12\) and \(4, 12\) .* adds \(1, 24\) and \(1, 8\)"),
        ("latent", "study", r"holds .* \(1, 24\) and \(1, 8\) .* adds \(4, 12\) and \(4, 12\)"),
        ("latent", "latent without a channel", r"adds \(1, 24\) and \(1, 0\)"),
        ("study", "K = V", r"adds \(1, 48\) and \(1, 0\)"),
        ("study", "grouped", r"adds \(2, 12\) and \(2, 12\)"),
    ],
)
def test_a_cache_of_another_form_is_refused(first, then, message, kind):
    cache, ids = make_cache(model_of(first), kind), some_ids()
    logits_in_parts(model_of(first), ids, cache, [5])
    with pytest.raises(ValueError, match=message + ": give each model a cache of its own"):
        logits_in_parts(model_of(then), ids, cache, [3])


KEYS_ALONE = {**ROTARY, "cache": "keys"}


@pytest.mark.parametrize("cuts", [[12], [1, 1]], ids=["a prompt", "a token"])
@pytest.mark.parametrize("kind", ["growing", "static"])
@pytest.mark.parametrize(
    ("method", "message"),
    [
        ("baseline", r"in layer 0 \|W Wᵀ - I\| is .* set orthogonal_key"),
        ("oelm-freeze", r"in layer 0 \|W Wᵀ - I\| is"),
        ("identity-key", "k_proj of layer 0 is a oelm.method.projections.IdentityProjection: set cache to 'auto'"),
        ("oelm-core", "k_proj of layer 0 is a oelm.method.projections.CoreProjection"),
    ],
)
def test_values_are_recovered_only_from_keys_of_an_orthogonal_matrix(method, message, kind, cuts):
    model = lively_model("oelm-gpt", **KEYS_ALONE)
    oelm.apply(model, method)
    with pytest.raises(ValueError, match=message):
        logits_in_parts(model, some_ids(), make_cache(model, kind), cuts)


def test_values_are_not_recovered_past_an_adapter():
    pytest.importorskip("peft")
    orthogonal = {"init": "orthogonal", "scope": "global", "frozen": True}
    model = lively_model("oelm-gpt", **KEYS_ALONE)
    oelm.apply(model, {"k": orthogonal, "adapter": {"kind": "lora", "targets": ["k"]}})
    with pytest.raises(ValueError, match=r"k_proj of layer 0 is a peft\.tuners"):
        logits_in_parts(model, some_ids(), make_cache(model, "growing"), [4])


def test_values_are_recovered_from_keys_that_a_method_made_orthogonal():
    model = lively_model("oelm-gpt", **KEYS_ALONE).double()
    oelm.apply(model, {"k": {"init": "orthogonal", "scope": "global", "frozen": True}})
    ids = some_ids()
    parts = logits_in_parts(model, ids, make_cache(model, "growing"), CUTS["chunks"])
    assert distance(parts, logits_of(model, ids)) < 1e-12


# Training


@pytest.mark.full
def test_a_latent_model_compiles_in_one_piece():
    model = lively_model("oelm-gpt-latent")
    oelm.apply(model, "latent-frozen")
    ids = some_ids()
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True)
    assert float(compiled(ids, labels=ids).loss.detach()) == pytest.approx(
        float(model(ids, labels=ids).loss.detach()), rel=1e-5
    )


@forms
def test_gradient_checkpointing_gives_the_same_gradients(form):
    model, ids = lively_model("oelm-gpt", **FORMS[form][0]).train(), some_ids()
    gradients = []
    for checkpointing in (False, True):
        if checkpointing:
            model.gradient_checkpointing_enable()
        model.zero_grad()
        model(ids, labels=ids).loss.backward()
        gradients.append({name: p.grad.clone() for name, p in model.named_parameters()})
    assert all(distance(gradients[0][name], gradients[1][name]) < 1e-6 for name in gradients[0])
