"""The FLOPs of a training step, compared with those that torch counts."""

from importlib.util import find_spec
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoConfig, AutoModelForSequenceClassification

import oelm
from oelm.config import RunConfig
from oelm.models import flops as model_flops
from oelm.models.flops import find_reach, train_flops_per_token
from oelm.models.run_model import build_language_model
from oelm.models.small import small_model
from oelm.training.build import count_flops
from oelm.training.parallel import World
from oelm.training.tasks.classification import ClassifierLoss
from oelm.training.tasks.language import LanguageModelling
from tests.support.training import config

LENGTH, TEXTS = 16, 2
needs_peft = pytest.mark.skipif(find_spec("peft") is None, reason="peft is not installed")
EVERYWHERE = ["q", "k", "v", "o", "ffn_in", "ffn_out"]

ADAPTERS: dict[str, Any] = {}
for kind in ("lora", "oft"):
    ADAPTERS |= {
        kind: kind,
        f"{kind} on k": {"preset": kind, "adapter": {"targets": ["k"]}},
        f"{kind} on v": {"preset": kind, "adapter": {"targets": ["v"]}},
        f"{kind} everywhere": {"preset": kind, "adapter": {"rank": 4, "targets": EVERYWHERE}},
        f"{kind} with biases": {"preset": kind, "rest": "biases"},
        f"{kind} in the last layer": {"preset": kind, "layers": "last:1"},
        f"{kind} beside frozen q, k": {"preset": "oelm-freeze", "adapter": {"kind": kind, "targets": ["q", "k"]}},
    }
TRAINED = ("baseline", "oelm-freeze", "oelm-core", "oelm-qk-ffn", "identity-key", "identity-core", "identity-wide")
LATENTS = ("identity-channel", "latent-states", "latent-frozen", "latent-trained")
FROZEN_BODY = ("bitfit", "last-layers", "head-only")
METHODS: dict[str, Any] = {name: name for name in (*TRAINED, *FROZEN_BODY, *LATENTS)} | ADAPTERS
NOT_FOR_LATENTS = [name for name in METHODS if name not in LATENTS]


def methods(*names: str) -> list[Any]:
    """Return methods by name, or all but those for latents, as parameters of a test."""
    return [pytest.param(name, marks=[needs_peft] if name in ADAPTERS else []) for name in names or NOT_FOR_LATENTS]


def model_with_method(name: str, method: str, **changes: Any) -> Any:
    """Return a small model with a method applied; `changes` go into its config."""
    model: Any = small_model(name, **changes).train()
    model.set_attn_implementation("eager")  # torch counts plain products, but not every fused attention
    oelm.apply(model, METHODS[method])
    return model


def step_of(model: Any) -> tuple[torch.nn.Module, dict[str, torch.Tensor]]:
    """Return a module that computes the model's loss, and a batch for it: labelled texts, or running text."""
    ids = torch.randint(3, 90, (TEXTS, LENGTH))
    if model.get_output_embeddings() is not None:
        return model, {"input_ids": ids, "labels": ids}
    labels = torch.arange(TEXTS) % 2
    return ClassifierLoss(model, 2), {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels}


def flops_by_torch(model: Any) -> float:
    """Return the FLOPs of a forward and a backward pass per token, as torch counts them."""
    loss, batch = step_of(model)
    with FlopCounterMode(display=False) as counter:
        output = loss(**batch)
        (output if isinstance(output, torch.Tensor) else output.loss).backward()
    return counter.get_total_flops() / batch["input_ids"].numel()


def flops_by_oelm(model: Any) -> float:
    return train_flops_per_token(model, LENGTH, TEXTS, find_reach(*step_of(model)))


@pytest.mark.parametrize("method", methods())
def test_flops_of_bert_equal_torchs(method):
    """Full attention, no embedding, the head once per text, and no gradient where nothing below is trainable."""
    model = model_with_method("bert", method)
    assert flops_by_oelm(model) == pytest.approx(flops_by_torch(model), rel=1e-9)


@pytest.mark.covering(1)
@pytest.mark.parametrize("method", methods("oelm-freeze", "lora", "oft", "lora beside frozen q, k"))
@pytest.mark.parametrize("name", ["roberta", "electra", "distilbert", "albert", "modernbert"])
def test_flops_of_other_encoders_equal_torchs(name, method):
    """ALBERT's one block needs gradients in all layers but the first; ModernBERT's q, k and v are one tensor."""
    model = model_with_method(name, method)
    assert flops_by_oelm(model) == pytest.approx(flops_by_torch(model), rel=1e-9)


@pytest.mark.covering(1)
@pytest.mark.parametrize("method", methods(*(name for name in NOT_FOR_LATENTS if name != "head-only")))
@pytest.mark.parametrize("name", ["oelm-gpt", "gpt2"])
def test_flops_of_decoders_equal_torchs_without_the_masked_half(name, method, monkeypatch):
    """torch counts the attention products in full, with the half that a causal mask hides."""
    model = model_with_method(name, method)
    assert flops_with_masked_half(model, monkeypatch) == pytest.approx(flops_by_torch(model), rel=1e-9)


@pytest.mark.parametrize("method", ["baseline", "oelm-freeze", "last-layers"])
def test_flops_of_experts_are_those_of_the_few_that_a_token_is_sent_to(method, monkeypatch):
    model = model_with_method("mixtral", method)
    assert flops_with_masked_half(model, monkeypatch) == pytest.approx(flops_by_torch(model), rel=1e-9)


def flops_with_masked_half(model: Any, monkeypatch: pytest.MonkeyPatch) -> float:
    """Return the FLOPs by oelm with the half of the attention products that a causal mask hides, as torch counts."""
    flops = flops_by_oelm(model)
    monkeypatch.setattr(model_flops, "attention_flops", lambda widths, length, _, reached: 0.0)
    without_attention = flops_by_oelm(model)
    return without_attention + 2 * (flops - without_attention)


LATENT = {"positions": "none", "latent": 24, "channel": 8}
FORMS: dict[str, dict[str, Any]] = {
    "modern": {"positions": "rotary", "norm": "rms", "activation": "swiglu", "biases": False},
    "grouped": {"num_key_value_heads": 2},
    "multi-query": {"num_key_value_heads": 1},
    "thin": {"key_dim": 6},
    "K = V": {"shared_kv": True},
    "grouped K = V": {"shared_kv": True, "num_key_value_heads": 2},
    "latent": LATENT,
    "latent without a channel": {"latent": 24},
    "thin latent": {**LATENT, "key_dim": 6},
    "channel": {"positions": "none", "channel": 8},
    "key offset": {"key_offset": 0.5},
    "linear": {"scores": "linear"},
    "linear, rotary": {"scores": "linear", "positions": "rotary"},
    "orthogonal key": {"orthogonal_key": True},
}


@pytest.mark.covering(2)
@pytest.mark.parametrize("method", methods("baseline", "last-layers", "lora", "oft on v"))
@pytest.mark.parametrize("form", FORMS)
def test_flops_of_every_form_of_the_gpt_equal_torchs(form, method, monkeypatch):
    model = model_with_method("oelm-gpt", method, **FORMS[form])
    assert flops_with_masked_half(model, monkeypatch) == pytest.approx(flops_by_torch(model), rel=1e-9)


@pytest.mark.parametrize("method", ["oelm-freeze", "oelm-core"])
@pytest.mark.parametrize("form", [form for form in FORMS if form != "orthogonal key"])
def test_flops_of_forms_with_frozen_queries_and_keys_equal_torchs(form, method, monkeypatch):
    """Of an orthogonal key there is no matrix that a method could set."""
    model = model_with_method("oelm-gpt", method, **FORMS[form])
    assert flops_with_masked_half(model, monkeypatch) == pytest.approx(flops_by_torch(model), rel=1e-9)


@pytest.mark.parametrize("method", LATENTS)
def test_flops_of_the_presets_for_latents_equal_torchs(method, monkeypatch):
    model = model_with_method("oelm-gpt-latent", method)
    assert flops_with_masked_half(model, monkeypatch) == pytest.approx(flops_by_torch(model), rel=1e-9)


@needs_peft
def test_building_a_rotation_is_shared_by_the_tokens_of_a_pass():
    """Width 48 in 2 blocks of 24, in q and v of 3 layers: 3 powers, each 1 product forward and 2 backward."""
    model = model_with_method("bert", "oft")
    one_sequence, four_sequences = (train_flops_per_token(model, LENGTH, sequences) for sequences in (1, 4))
    flops_of_building = 3 * 2 * 2 * 9 * 2 * 24**3
    assert one_sequence - four_sequences == pytest.approx(flops_of_building / LENGTH - flops_of_building / (4 * LENGTH))


@needs_peft
def test_the_flops_of_a_run_depend_on_the_sequences_of_one_pass_in_one_process(tmp_path):
    for train, world_size, sequences in (
        ({"batch_size": 8}, 1, 8),
        ({"batch_size": 8}, 4, 2),
        ({"batch_size": 8, "micro_batch_size": 4}, 1, 4),
        ({"batch_size": 8, "micro_batch_size": 8}, 4, 2),
    ):
        run = config(tmp_path, method="oft", train=train)
        task = LanguageModelling.open(run)
        model = task.build_model(run)
        oelm.apply(model, run.method)
        expected = train_flops_per_token(model, run.data.sequence_length, sequences, find_reach(*step_of(model)))
        world = World(0, world_size, torch.device("cpu"))
        assert count_flops(run, world, task, model) == pytest.approx(expected, rel=1e-9)


def test_freezing_saves_two_percent_of_medium_512():
    """Freezing Q and K removes two weight gradients from the step: 2.3 % of its FLOPs at 512 tokens."""
    model = build_language_model(RunConfig.load({"model": {"name": "gpt:medium-512"}}).model, 50257, 512, 0)
    before = train_flops_per_token(model, 512, 1)
    oelm.apply(model, "oelm-freeze")
    after = train_flops_per_token(model, 512, 1)
    assert before - after == 2 * 3_145_728
    assert 1 - after / before == pytest.approx(0.023, abs=0.001)


def test_an_identity_key_saves_three_percent_of_medium_512():
    """Each layer loses a whole projection: its forward product and both gradients."""
    model = build_language_model(RunConfig.load({"model": {"name": "gpt:medium-512"}}).model, 50257, 512, 0)
    before = train_flops_per_token(model, 512, 1)
    oelm.apply(model, "identity-key")
    after = train_flops_per_token(model, 512, 1)
    assert before - after == 6 * 6 * 512 * 512
    assert after / before == pytest.approx(0.965939707, rel=1e-6)


def test_freezing_saves_five_percent_of_bert_base():
    with torch.device("meta"):
        model = AutoModelForSequenceClassification.from_config(AutoConfig.for_model("bert"))
    before = train_flops_per_token(model, 128, 1)
    for name, parameter in model.named_parameters():
        if name.endswith(("query.weight", "key.weight")):
            parameter.requires_grad_(False)
    after = train_flops_per_token(model, 128, 1)
    assert before - after == 2 * 2 * 12 * 768 * 768
    assert 1 - after / before == pytest.approx(0.054, abs=0.0005)


def test_find_reach_leaves_the_model_and_the_random_state_unchanged():
    model = small_model("bert").train()
    oelm.apply(model, "head-only")
    before = torch.get_rng_state()
    loss, batch = step_of(model)
    torch.set_rng_state(before)
    reach = find_reach(loss, batch)
    assert model.training
    assert torch.equal(torch.get_rng_state(), before), "no random number is drawn"
    assert 0.0 in reach.inputs.values()
    assert all(parameter.grad is None for parameter in model.parameters())
    assert not any(module._forward_hooks for module in model.modules())
