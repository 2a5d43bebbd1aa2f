"""The project's GPT: parameter counts, outputs in every mode of a transformers model, and saving."""

import pytest
import torch
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoModelForSequenceClassification, pipeline

import oelm
from oelm.errors import ConfigError
from oelm.evaluation.generate import Sampling, generate_text
from oelm.models.gpt import OelmGPTForCausalLM, OelmGPTForSequenceClassification, OelmGPTModel
from oelm.models.gpt_config import SIZES, OelmGPTConfig, gpt_config
from oelm.models.run_model import build_language_model
from tests.support.models import distance, lively
from tests.support.training import config, run_here

both_positions = pytest.mark.parametrize("positions", ["learned", "rotary"])
SMALL = {
    "vocab_size": 96,
    "hidden_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 32,
}


def small_gpt(positions: str = "learned", cls: type = OelmGPTForCausalLM, seed: int = 0, **changes: object):
    torch.manual_seed(seed)
    return lively(cls(OelmGPTConfig(**{**SMALL, "positions": positions, **changes})), seed)


def some_ids(rows: int = 2, length: int = 12) -> torch.Tensor:
    return torch.randint(3, 96, (rows, length), generator=torch.Generator().manual_seed(1))


def logits_of(model, ids: torch.Tensor, **more: object) -> torch.Tensor:
    with torch.no_grad():
        return model(ids, **more).logits


# Parameter counts and initial values


def test_the_reference_counts_of_medium_512():
    model = OelmGPTForCausalLM(gpt_config("medium-512"))
    assert (model.config.vocab_size, model.config.max_position_embeddings) == (50257, 512)
    assert sum(p.numel() for p in model.parameters()) == 44_896_768
    report = oelm.apply(model, "oelm-freeze")
    assert (report.total, report.frozen, report.trainable) == (44_896_768, 3_145_728, 41_751_040)
    assert report.buffers == 0
    assert f"{report.frozen_share:.1%}" == "7.0%"
    assert f"{report.frozen_share_of_blocks:.1%}" == "16.6%"


@pytest.mark.parametrize("size", SIZES)
def test_the_parameter_count_of_every_size_follows_from_width_and_layers(size):
    """Each block has 12 d² weights, and 9 d biases and norms: 13 d less the 4 d of attention's missing biases."""
    width, layers = SIZES[size]
    with torch.device("meta"):
        model = OelmGPTForCausalLM(gpt_config(size, vocab_size=1000, max_position_embeddings=64))
    blocks = layers * (12 * width**2 + (4 + 1 + 4) * width)
    assert sum(p.numel() for p in model.parameters()) == blocks + (1000 + 64 + 2) * width
    assert model.config.num_attention_heads * 64 == width
    assert model.config.intermediate_size == 4 * width


def test_rotary_positions_have_no_parameters():
    learned, rotary = small_gpt("learned"), small_gpt("rotary")
    assert learned.num_parameters() - rotary.num_parameters() == 32 * 48
    assert not any("rotary" in name for name in rotary.state_dict())


# Forms that together have every kind of matrix, and the columns of those that do not read the hidden state of 256.
INITIALISED = {
    "study": ({}, {"fc_out": 1024}),
    "modern": ({"activation": "swiglu", "norm": "rms", "biases": False}, {"fc_out": 704}),
    "grouped": ({"num_key_value_heads": 2, "qk_norm": "both"}, {"fc_out": 1024}),
    "latent": ({"latent": 64, "channel": 32}, {"fc_out": 1024, "attn.k_proj": 64, "attn.v_proj": 64}),
}


@pytest.mark.parametrize("initializer", ["fixed", "fan-in"])
@pytest.mark.parametrize("form", INITIALISED)
def test_initial_values_have_the_documented_spread(form, initializer):
    """Matrices are smaller at the end of a residual branch; embeddings are 0.02 always; norms and biases are fixed."""
    fields, columns = INITIALISED[form]
    torch.manual_seed(0)
    sizes = {**SMALL, "hidden_size": 256, "vocab_size": 512, "max_position_embeddings": 64}
    model = OelmGPTForCausalLM(OelmGPTConfig(**{**sizes, **fields, "initializer": initializer}))
    for name, parameter in model.named_parameters():
        if parameter.ndim == 1:
            is_norm = ("ln_" in name or "norm" in name) and "weight" in name
            assert torch.equal(parameter, torch.full_like(parameter, float(is_norm))), name
            continue
        width = next((number for module, number in columns.items() if f"{module}.weight" in name), 256)
        std = width**-0.5 if initializer == "fan-in" and ".h." in name else 0.02
        std /= 6**0.5 if "o_proj" in name or "fc_out" in name else 1.0
        assert float(parameter.detach().std()) == pytest.approx(std, rel=0.05), name
        assert abs(float(parameter.detach().mean())) < 0.05 * std, name
    assert model.lm_head.weight is model.transformer.wte.weight


def test_a_convolution_starts_as_the_identity_and_an_offset_of_none_is_none():
    """A model with a fresh convolution is the one without it, to the bit; its taps train away from there."""
    ids = some_ids()
    torch.manual_seed(0)
    plain = OelmGPTForCausalLM(OelmGPTConfig(**SMALL)).eval()
    for fields in ({"convolution": 4}, {"key_offset": 0.0}):
        torch.manual_seed(0)
        model = OelmGPTForCausalLM(OelmGPTConfig(**SMALL, **fields)).eval()
        assert torch.equal(logits_of(model, ids), logits_of(plain, ids))
    assert distance(logits_of(small_gpt(convolution=4), ids), logits_of(small_gpt(), ids)) > 1e-3
    assert distance(logits_of(small_gpt(key_offset=0.5), ids), logits_of(small_gpt(), ids)) > 1e-3


def test_generating_computes_an_orthogonal_key_once():
    model, computed = OelmGPTForCausalLM(OelmGPTConfig(**SMALL, orthogonal_key=True)).eval(), []
    for block in model.transformer.h:
        parametrisation = block.attn.k_proj.parametrizations.weight
        parametrisation.register_forward_hook(lambda module, inputs, weight: computed.append(module))
    ids = model.generate(some_ids(), max_new_tokens=5, do_sample=False, pad_token_id=0)
    assert len(computed) == len(set(computed)) == len(model.transformer.h)
    assert ids[:, -1:].equal(model(ids[:, :-1]).logits[:, -1:].argmax(-1)), "the cached weight is the weight"


def test_an_orthogonal_key_starts_and_stays_orthogonal(tmp_path):
    """However far it trains; and a model that is saved and loaded has the same key."""
    model, ids = OelmGPTForCausalLM(OelmGPTConfig(**SMALL, orthogonal_key=True)), some_ids()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    for _ in range(5):
        for block in model.transformer.h:
            weight = block.attn.k_proj.weight.detach()
            assert distance(weight @ weight.T, torch.eye(48)) < 1e-5
        optimizer.zero_grad()
        model(ids, labels=ids).loss.backward()
        optimizer.step()
    model.save_pretrained(tmp_path)
    loaded, info = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(info.values()), info
    assert torch.equal(logits_of(loaded, ids), logits_of(model.eval(), ids))


def test_weights_depend_only_on_the_seed(tmp_path):
    run = config(tmp_path)
    first, same_seed = (build_language_model(run.model, 400, 32, seed) for seed in (0, 0))
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), same_seed.parameters(), strict=True))
    other_seed = build_language_model(run.model, 400, 32, 1)
    assert not torch.equal(first.transformer.wte.weight, other_seed.transformer.wte.weight)


# Outputs


@both_positions
def test_attention_is_causal(positions):
    model, ids = small_gpt(positions), some_ids()
    changed = ids.clone()
    changed[:, 7] = (changed[:, 7] + 1) % 96
    for attention in ("sdpa", "eager"):
        model.set_attn_implementation(attention)
        before, after = logits_of(model, ids), logits_of(model, changed)
        assert distance(before[:, :7], after[:, :7]) == 0
        assert (before - after)[:, 7:].abs().amax(-1).min() > 1e-3, "every later token attends to the changed one"


@both_positions
def test_outputs_depend_on_token_order(positions):
    model, ids = small_gpt(positions), some_ids(1)
    swapped = ids.clone()
    swapped[0, [2, 3]] = ids[0, [3, 2]]
    assert distance(logits_of(model, ids)[:, -1], logits_of(model, swapped)[:, -1]) > 1e-3


@both_positions
def test_eager_attention_equals_the_kernels(positions):
    model, ids = small_gpt(positions), some_ids()
    mask = torch.ones_like(ids)
    mask[0, :5] = 0
    plain, padded = logits_of(model, ids), logits_of(model, ids, attention_mask=mask)
    model.set_attn_implementation("eager")
    assert distance(logits_of(model, ids), plain) < 1e-4
    assert distance(logits_of(model, ids, attention_mask=mask)[mask.bool()], padded[mask.bool()]) < 1e-4
    with torch.no_grad():
        output = model(ids, output_attentions=True, output_hidden_states=True)
    assert [tuple(layer.shape) for layer in output.attentions] == [(2, 4, 12, 12)] * 3
    assert distance(output.attentions[1].sum(-1), torch.ones(2, 4, 12)) < 1e-5
    assert float(output.attentions[1].triu(1).abs().max()) == 0
    assert len(output.hidden_states) == 4


@both_positions
def test_a_cache_does_not_change_the_logits(positions):
    model, ids = small_gpt(positions), some_ids()
    without_cache = logits_of(model, ids, use_cache=False)
    cache, with_cache = None, []
    for start, end in ((0, 5), (5, 8), (8, 9), (9, 12)):
        with torch.no_grad():
            output = model(ids[:, start:end], past_key_values=cache, use_cache=True)
        cache, with_cache = output.past_key_values, [*with_cache, output.logits]
    assert distance(torch.cat(with_cache, 1), without_cache) < 1e-4


@both_positions
def test_padding_on_the_left_does_not_change_the_logits(positions):
    """A padded row, with positions counted from its first real token, has the logits of the row without padding."""
    model, ids = small_gpt(positions), some_ids()
    mask = torch.ones_like(ids)
    mask[0, :4] = 0
    position_ids = (mask.cumsum(1) - 1).clamp(min=0)
    padded = logits_of(model, ids, attention_mask=mask, position_ids=position_ids)
    assert distance(padded[0, 4:], logits_of(model, ids[:1, 4:])[0]) < 1e-4
    assert distance(padded[1], logits_of(model, ids[1:])[0]) < 1e-4


@both_positions
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_padding_on_the_left_gives_no_nan_in_float64(positions, attention):
    """A token of padding may see nothing at all; its row of the mask must not become 0 / 0."""
    model, ids = small_gpt(positions).double().train(), some_ids()
    model.set_attn_implementation(attention)
    mask = torch.ones_like(ids)
    mask[0, :4] = 0
    logits = model(ids, attention_mask=mask).logits
    assert logits.dtype == torch.float64
    assert logits.isfinite().all()
    logits[mask.bool()].square().sum().backward()
    assert all(parameter.grad.isfinite().all() for parameter in model.parameters())


@both_positions
def test_texts_packed_in_one_row_do_not_attend_to_each_other(positions):
    model, ids = small_gpt(positions), some_ids(1)
    position_ids = torch.tensor([[*range(5), *range(7)]])
    for attention in ("sdpa", "eager"):
        model.set_attn_implementation(attention)
        packed = logits_of(model, ids, position_ids=position_ids, use_cache=False)
        assert distance(packed[:, 5:], logits_of(model, ids[:, 5:])) < 1e-4
        assert distance(packed[:, :5], logits_of(model, ids[:, :5])) < 1e-4


@both_positions
def test_greedy_generation_is_the_same_with_a_cache_with_padding_and_step_by_step(positions):
    model, ids = small_gpt(positions), some_ids()
    mask = torch.ones_like(ids)
    mask[0, :4] = 0
    options = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    generated = model.generate(ids, attention_mask=mask, **options)
    assert generated.shape == (2, 20)
    assert torch.equal(generated, model.generate(ids, attention_mask=mask, use_cache=False, **options))
    unpadded = model.generate(ids[:1, 4:], **options)
    assert torch.equal(unpadded[0], generated[0, 4:])
    step_by_step = ids[1:]
    for _ in range(8):
        step_by_step = torch.cat([step_by_step, logits_of(model, step_by_step)[:, -1:].argmax(-1)], 1)
    assert torch.equal(step_by_step[0], generated[1])


def test_more_tokens_than_positions_is_an_error():
    model = small_gpt()
    with pytest.raises(ValueError, match=r"33 tokens.*32 positions"):
        model(some_ids(1, 33))
    with torch.no_grad():
        cache = model(some_ids(1, 30), use_cache=True).past_key_values
    with pytest.raises(ValueError, match=r"33 tokens.*32 positions"):
        model(some_ids(1, 3), past_key_values=cache)
    assert logits_of(small_gpt("rotary"), some_ids(1, 33)).shape == (1, 33, 96)
    with pytest.raises(ValueError, match="either input_ids or inputs_embeds"):
        model()


@both_positions
def test_dropout_is_active_only_in_training(positions):
    model, ids = small_gpt(positions, dropout=0.5), some_ids()
    assert torch.equal(logits_of(model, ids), logits_of(model, ids))
    without_dropout = small_gpt(positions, dropout=0.0)
    assert torch.equal(logits_of(model, ids), logits_of(without_dropout, ids))
    model.train()
    assert distance(logits_of(model, ids), logits_of(model, ids)) > 0.01
    torch.manual_seed(3)
    first = logits_of(model, ids)
    torch.manual_seed(3)
    assert torch.equal(first, logits_of(model, ids))
    without_dropout.train()
    assert torch.equal(logits_of(without_dropout, ids), logits_of(without_dropout, ids))


@both_positions
def test_the_loss_is_the_cross_entropy_of_the_next_token(positions):
    model, ids = small_gpt(positions), some_ids()
    labels = ids.clone()
    labels[0, :6] = -100
    with torch.no_grad():
        loss = model(ids, labels=labels).loss
    scores, targets = logits_of(model, ids)[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
    torch.testing.assert_close(loss, torch.nn.functional.cross_entropy(scores, targets, ignore_index=-100))
    last_three = logits_of(model, ids, logits_to_keep=3)
    assert distance(last_three, logits_of(model, ids)[:, -3:]) < 1e-5
    assert distance(logits_of(model, None, inputs_embeds=model.transformer.wte(ids)), logits_of(model, ids)) == 0


@both_positions
def test_gradient_checkpointing_gives_the_same_gradients(positions):
    ids = some_ids()
    gradients = []
    for checkpointing in (False, True):
        model = small_gpt(positions, dropout=0.1).train()
        if checkpointing:
            model.gradient_checkpointing_enable()
        torch.manual_seed(0)
        model(ids, labels=ids).loss.backward()
        gradients.append({name: p.grad for name, p in model.named_parameters()})
    assert all(distance(gradients[0][name], gradients[1][name]) < 1e-6 for name in gradients[0])


@both_positions
def test_outputs_in_bfloat16_are_close_to_those_in_float32(positions):
    model, ids = small_gpt(positions), some_ids()
    full = logits_of(model, ids)
    half = logits_of(model.to(torch.bfloat16), ids)
    assert half.dtype == torch.bfloat16
    assert distance(half, full) < 0.3 * float(full.abs().max())


# Saving and loading


@both_positions
def test_the_gpt_is_saved_and_loaded_by_transformers_classes(positions, tmp_path):
    """The rotary frequencies are not saved and must be computed again."""
    model, ids = small_gpt(positions, tie_word_embeddings=True), some_ids()
    model.save_pretrained(tmp_path)
    loaded, info = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert type(loaded) is OelmGPTForCausalLM
    assert not any(info.values()), info
    assert torch.equal(logits_of(loaded, ids), logits_of(model, ids))
    assert loaded.lm_head.weight is loaded.transformer.wte.weight
    if positions == "rotary":
        assert torch.equal(loaded.transformer.rotary.frequencies, model.transformer.rotary.frequencies)
        in_bfloat16 = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
        assert distance(in_bfloat16.transformer.rotary.frequencies, model.transformer.rotary.frequencies) < 1e-2
    body = AutoModel.from_pretrained(tmp_path)
    assert type(body) is OelmGPTModel
    assert AutoConfig.from_pretrained(tmp_path).positions == positions


@both_positions
@pytest.mark.parametrize("method", ["oelm-freeze", "oelm-core", "identity-key", "identity-query"])
def test_a_gpt_with_a_method_loads_with_transformers_and_with_oelm(method, positions, tmp_path):
    """Pipelines and harnesses load by transformers' classes, which must build cores and identities too."""
    model, ids = small_gpt(positions), some_ids()
    oelm.apply(model, method)
    model.save_pretrained(tmp_path)
    loaded, info = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(info.values()), info
    assert torch.equal(logits_of(loaded.eval(), ids), logits_of(model, ids))
    verified = oelm.load(tmp_path)
    assert type(verified) is OelmGPTForCausalLM
    assert torch.equal(logits_of(verified.eval(), ids), logits_of(model, ids))
    assert oelm.verify(verified).exact == oelm.verify(model).tensors


@both_positions
def test_a_classifier_ignores_padding_and_is_saved_and_loaded(positions, tmp_path):
    """The class is read at the last real token, so padding after it does not matter."""
    model = small_gpt(positions, OelmGPTForSequenceClassification, num_labels=3, pad_token_id=0)
    ids = some_ids()
    ids[0, 8:] = 0
    scores = logits_of(model, ids, attention_mask=(ids != 0).long())
    assert scores.shape == (2, 3)
    assert distance(scores[0], logits_of(model, ids[:1, :8])[0]) < 1e-4
    with torch.no_grad():
        assert model(ids, labels=torch.tensor([0, 2])).loss > 0
    oelm.apply(model, "oelm-core")
    model.save_pretrained(tmp_path)
    loaded = AutoModelForSequenceClassification.from_pretrained(tmp_path).eval()
    assert type(loaded) is OelmGPTForSequenceClassification
    assert torch.equal(logits_of(loaded, ids), logits_of(model, ids))
    assert torch.equal(logits_of(oelm.load(tmp_path).eval(), ids), logits_of(model, ids))


def test_a_pipeline_generates_the_same_text_from_a_runs_best_folder(tmp_path):
    for method in ("baseline", "identity-key"):
        run_here(tmp_path, method=method)
        run = config(tmp_path, method=method).folder
        generate = pipeline("text-generation", model=str(run / "best"))
        (output,) = generate("Once upon a time", max_new_tokens=12, do_sample=False)
        assert output["generated_text"] == generate_text(run, "Once upon a time", Sampling(12, 0.0, 0)).text


# Other models


def test_a_run_can_train_another_causal_model(tmp_path):
    """From scratch, with changed fields, or with its pretrained weights."""
    from oelm.models.small import small_model

    small_model("llama", vocab_size=400).save_pretrained(tmp_path / "model")
    fields = {"name": str(tmp_path / "model"), "fields": {"num_hidden_layers": 1}, "from_scratch": True}
    run = config(tmp_path)
    scratch = run.model_copy(update={"model": type(run.model)(**fields)})
    built = build_language_model(scratch.model, 400, 32, 0)
    assert built.config.num_hidden_layers == 1
    with pytest.raises(ConfigError, match=r"llama.*'n_layer'"):
        build_language_model(type(run.model)(**{**fields, "fields": {"n_layer": 1}}), 400, 32, 0)
    from oelm.training.engine import train

    pretrained = type(run.model)(name=str(tmp_path / "model"))
    result = train(run.model_copy(update={"model": pretrained, "method": oelm.Method.load("oelm-exact")}), quiet=True)
    assert result["parameters"]["frozen"] > 0
