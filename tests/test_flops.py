"""The FLOPs of a training step: counted on a model, counted from a record, and as torch sees them."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoConfig, AutoModelForSequenceClassification

import oelm
from oelm.analysis.flops import flops_per_token
from oelm.analysis.run import Run
from oelm.config import RunConfig
from oelm.model_flops import train_flops_per_token, unreached_weights
from oelm.models.language import build_for_run
from oelm.models.small import small_model
from oelm.training.classification import ClassifierLoss

LENGTH = 16


def counted(model, batch) -> float:
    """FLOPs that torch sees in a forward and a backward pass, per token."""
    with FlopCounterMode(display=False) as counter:
        ClassifierLoss(model, 2)(**batch).backward()
    return counter.get_total_flops() / batch["input_ids"].numel()


def one_text() -> dict[str, torch.Tensor]:
    ids = torch.randint(3, 90, (1, LENGTH))
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": torch.tensor([1])}


@pytest.mark.parametrize(
    ("name", "method"),
    [
        *(("bert", method) for method in ("baseline", "oelm-freeze", "oelm-core", "identity-key", "oelm-qk-ffn")),
        *(("bert", method) for method in ("bitfit", "last-layers", "head-only")),
        *((name, "oelm-freeze") for name in ("roberta", "electra", "distilbert", "albert")),
    ],
)
def test_an_encoders_flops_are_those_that_torch_counts(name, method):
    """Full attention, no embedding, the head once per text, and no gradient where nothing below trains."""
    model = small_model(name).train()
    model.set_attn_implementation("eager")  # torch counts plain products, and not every fused attention
    oelm.apply(model, method)
    batch = one_text()
    found = train_flops_per_token(model, LENGTH, unreached_weights(ClassifierLoss(model, 2), batch))
    assert found == pytest.approx(counted(model, batch), rel=1e-9)


@pytest.mark.parametrize("name", ["bert", "modernbert", "llama", "qwen2"])
@pytest.mark.parametrize(
    "method", ["baseline", "oelm-freeze", "oelm-core", "identity-key", "identity-core", "bitfit", "lora", "head-only"]
)
def test_a_record_gives_the_flops_that_its_model_gives(name, method):
    """Two counts of one thing: from the model for a benchmark, and from a run's audit for a report."""
    model: Any = small_model(name).train()
    oelm.apply(model, method)
    batch = one_text()
    reads = name in ("bert", "modernbert")
    loss = ClassifierLoss(model, 2) if reads else model
    unreached = unreached_weights(loss, batch if reads else {"input_ids": batch["input_ids"]})
    config = {"data": {"sequence_length": LENGTH}, "task": {"name": "sst2" if reads else "language"}}
    about = {"data": {"vocab_size": model.config.vocab_size}}
    record = Run(Path("run"), config, about, {}, {}, oelm.audit(model).to_dict(), (), {})
    counted_once = train_flops_per_token(model, LENGTH, unreached)
    # A classifier's head, which reads a text once, is not in a record's count.
    assert flops_per_token(record) == pytest.approx(counted_once, rel=0.006 if reads else 1e-9)


def test_the_flops_that_freezing_saves():
    """Freezing Q and K takes two weight gradients out of the step: 2.3 % of Medium-512's work at 512 tokens."""
    model = build_for_run(RunConfig.load({"model": {"name": "gpt:medium-512"}}).model, 50257, 512, 0)
    before = train_flops_per_token(model, 512)
    oelm.apply(model, "oelm-freeze")
    after = train_flops_per_token(model, 512)
    assert before - after == 2 * 3_145_728
    assert 1 - after / before == pytest.approx(0.023, abs=0.001)


def test_the_flops_that_freezing_saves_in_bert_base():
    with torch.device("meta"):
        model = AutoModelForSequenceClassification.from_config(AutoConfig.for_model("bert"))
    before = train_flops_per_token(model, 128)
    for name, parameter in model.named_parameters():
        if name.endswith(("query.weight", "key.weight")):
            parameter.requires_grad_(False)
    after = train_flops_per_token(model, 128)
    assert before - after == 2 * 2 * 12 * 768 * 768
    assert 1 - after / before == pytest.approx(0.054, abs=0.0005)


def test_looking_at_gradients_leaves_no_trace():
    model = small_model("bert")
    oelm.apply(model, "head-only")
    assert unreached_weights(ClassifierLoss(model, 2), one_text())
    assert all(parameter.grad is None for parameter in model.parameters())
    assert not any(module._forward_pre_hooks for module in model.modules())
