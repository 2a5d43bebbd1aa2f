"""The FLOPs of a training step: counted on a model, and as torch counts them."""

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
from oelm.models.language import build_for_run
from oelm.models.small import small_model
from oelm.training.tasks.classification import ClassifierLoss

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
FROZEN_BODY = ("bitfit", "last-layers", "head-only")
METHODS: dict[str, Any] = {name: name for name in (*TRAINED, *FROZEN_BODY)} | ADAPTERS


def methods(*names: str) -> list[Any]:
    return [pytest.param(name, marks=[needs_peft] if name in ADAPTERS else []) for name in names or METHODS]


def operated(name: str, method: str) -> Any:
    model: Any = small_model(name).train()
    model.set_attn_implementation("eager")  # torch counts plain products, and not every fused attention
    oelm.apply(model, METHODS[method])
    return model


def step_of(model: Any) -> tuple[torch.nn.Module, dict[str, torch.Tensor]]:
    """What computes a model's loss, and a batch for it: of texts with classes, or of running text."""
    ids = torch.randint(3, 90, (TEXTS, LENGTH))
    if model.get_output_embeddings() is not None:
        return model, {"input_ids": ids, "labels": ids}
    labels = torch.arange(TEXTS) % 2
    return ClassifierLoss(model, 2), {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels}


def seen_by_torch(model: Any) -> float:
    """FLOPs of a forward and a backward pass, per token."""
    loss, batch = step_of(model)
    with FlopCounterMode(display=False) as counter:
        found = loss(**batch)
        (found if isinstance(found, torch.Tensor) else found.loss).backward()
    return counter.get_total_flops() / batch["input_ids"].numel()


def counted_on(model: Any) -> float:
    return train_flops_per_token(model, LENGTH, TEXTS, find_reach(*step_of(model)))


@pytest.mark.parametrize("method", methods())
def test_an_encoders_flops_are_those_that_torch_counts(method):
    """Full attention, no embedding, the head once per text, and no gradient where nothing below trains."""
    model = operated("bert", method)
    assert counted_on(model) == pytest.approx(seen_by_torch(model), rel=1e-9)


@pytest.mark.parametrize("method", methods("oelm-freeze", "lora", "oft", "lora beside frozen q, k"))
@pytest.mark.parametrize("name", ["roberta", "electra", "distilbert", "albert", "modernbert"])
def test_so_are_those_of_other_encoders(name, method):
    """ALBERT's block is reached in all layers but the first; ModernBERT's q, k and v come out of one tensor."""
    model = operated(name, method)
    assert counted_on(model) == pytest.approx(seen_by_torch(model), rel=1e-9)


@pytest.mark.parametrize("method", methods(*(name for name in METHODS if name != "head-only")))
@pytest.mark.parametrize("name", ["oelm-gpt", "gpt2"])
def test_so_are_a_decoders_but_for_the_masked_half_of_its_scores(name, method, monkeypatch):
    model = operated(name, method)
    half = counted_on(model)
    monkeypatch.setattr(model_flops, "attention_flops", lambda width, length, _, reached: 0.0)
    without = counted_on(model)
    assert without + 2 * (half - without) == pytest.approx(seen_by_torch(model), rel=1e-9)


@needs_peft
def test_what_makes_a_rotation_is_shared_by_the_tokens_of_a_pass():
    """48 coordinates in 2 blocks of 24, in q and v of 3 layers: 3 powers, each 1 product forward and 2 backward."""
    model = operated("bert", "oft")
    one, many = (train_flops_per_token(model, LENGTH, sequences) for sequences in (1, 4))
    made = 3 * 2 * 2 * 9 * 2 * 24**3
    assert one - many == pytest.approx(made / LENGTH - made / (4 * LENGTH))


def test_the_flops_that_freezing_saves():
    """Freezing Q and K takes two weight gradients out of the step: 2.3 % of Medium-512's work at 512 tokens."""
    model = build_for_run(RunConfig.load({"model": {"name": "gpt:medium-512"}}).model, 50257, 512, 0)
    before = train_flops_per_token(model, 512, 1)
    oelm.apply(model, "oelm-freeze")
    after = train_flops_per_token(model, 512, 1)
    assert before - after == 2 * 3_145_728
    assert 1 - after / before == pytest.approx(0.023, abs=0.001)


def test_the_flops_that_freezing_saves_in_bert_base():
    with torch.device("meta"):
        model = AutoModelForSequenceClassification.from_config(AutoConfig.for_model("bert"))
    before = train_flops_per_token(model, 128, 1)
    for name, parameter in model.named_parameters():
        if name.endswith(("query.weight", "key.weight")):
            parameter.requires_grad_(False)
    after = train_flops_per_token(model, 128, 1)
    assert before - after == 2 * 2 * 12 * 768 * 768
    assert 1 - after / before == pytest.approx(0.054, abs=0.0005)


def test_looking_at_gradients_leaves_no_trace():
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
