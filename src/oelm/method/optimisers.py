"""Stops an optimiser that was created before a method was applied: what the method put into the model, it cannot train.

Splitting a fused projection, a core and an adapter give a model new parameters. An optimiser that has the old ones
would leave the new ones as they are, without a word.
"""

from __future__ import annotations

import gc
import weakref
from typing import Any

from torch import nn
from torch.optim import Optimizer

from ..errors import ModelError

# A model's parameters, by references that keep none alive.
Parameters = list[weakref.ref[nn.Parameter]]


def references_to_parameters(model: nn.Module) -> Parameters:
    """Return references to a model's parameters, to find out later which of them it has lost."""
    return [weakref.ref(parameter) for parameter in model.parameters()]


def stop_old_optimisers(model: nn.Module, before: Parameters) -> None:
    """Have an optimiser's next step raise if it holds parameters that the model has lost, and new ones are to train."""
    own = {id(parameter) for parameter in model.parameters()}
    earlier = {id(parameter): parameter for reference in before if (parameter := reference()) is not None}
    lost = earlier.keys() - own
    # Nothing holds a lost parameter where the optimiser is created after the method. So the search below is rare.
    if not lost or all(id(p) in earlier or not p.requires_grad for p in model.parameters()):
        return
    optimisers = [thing for thing in gc.get_objects() if issubclass(type(thing), Optimizer)]
    for optimiser in optimisers:
        if "param_groups" not in vars(optimiser):  # accelerate's, which has another within it
            continue
        if any(id(parameter) in lost for group in optimiser.param_groups for parameter in group["params"]):
            optimiser.register_step_pre_hook(_refuse_to_step)


def _refuse_to_step(optimiser: Optimizer, *_: Any) -> None:
    raise ModelError(
        f"the {type(optimiser).__name__} was created before oelm.apply: it holds parameters that the model no longer "
        "has, and would not train the new ones. Create it after oelm.apply"
    )
