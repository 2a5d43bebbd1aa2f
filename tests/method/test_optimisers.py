"""An optimiser that was created before a method: stopped where it would leave new parameters untrained, else not."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import oelm
from oelm.method.diagnose import sample_batch
from oelm.models.small import small_model


def step(model: nn.Module, optimiser: torch.optim.Optimizer) -> None:
    model(**sample_batch(model)).loss.backward()
    optimiser.step()


@pytest.mark.parametrize(("name", "preset"), [("gpt2", "oelm-freeze"), ("bert", "oelm-exact"), ("llama", "oelm-core")])
@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.SGD])
def test_an_optimiser_from_before_the_method_is_stopped(name, preset, kind):
    """GPT-2's V and a core would never move, and the losses would not show it."""
    model = small_model(name)
    optimiser = kind(model.parameters(), lr=1e-3)
    oelm.apply(model, preset)
    with pytest.raises(oelm.ModelError, match=rf"{kind.__name__} was created before oelm\.apply.*Create it after"):
        step(model, optimiser)
    oelm.verify(model)
    step(model, kind(model.parameters(), lr=1e-3))


def test_one_from_before_a_method_that_only_freezes_goes_on():
    model = small_model("bert")
    optimiser = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1)
    oelm.apply(model, "oelm-freeze")
    step(model, optimiser)
    oelm.verify(model)


def test_other_optimisers_go_on():
    model, other = small_model("gpt2"), small_model("bert")
    old, others = (torch.optim.AdamW(each.parameters(), lr=1e-3) for each in (model, other))
    oelm.apply(model, "oelm-freeze")
    step(other, others)
    step(model, torch.optim.AdamW(model.parameters(), lr=1e-3))
    with pytest.raises(oelm.ModelError):
        old.step()


def test_one_that_accelerate_has_wrapped_is_stopped():
    accelerate = pytest.importorskip("accelerate")
    model = small_model("gpt2")
    wrapped = accelerate.Accelerator(cpu=True).prepare(torch.optim.AdamW(model.parameters(), lr=1e-3))
    oelm.apply(model, "oelm-freeze")
    with pytest.raises(oelm.ModelError, match="Create it after"):
        step(model, wrapped)
