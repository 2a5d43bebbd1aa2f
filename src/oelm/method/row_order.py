"""Tries in which order the rows of a fused projection are: all of Q, K and V one after the other, or in groups.

Nothing in a model says so, and no shape shows it.
"""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any, get_args

import torch
from torch import nn

from ..errors import FamilyError
from .changes import carry_out
from .families import Family, FromConfig, Order, family_of, is_registered
from .plan import plan
from .spec import Method

# What one token gives may differ by this share after new Q and K, by rounding.
_TOLERANCE = 1e-5
# A model of one block with more parameters than this would take too long to fill with random values.
_LARGEST_TRIAL = 300_000_000


def require_right_order(model: nn.Module) -> None:
    """Raise where the rows of a fused projection are in another order than the family that a user registered says.

    What it takes for a query would hold rows of values, and come out orthonormal all the same.
    """
    config: Any = getattr(model, "config", None)
    if not is_registered(getattr(config, "model_type", None)):
        return
    family = family_of(config.model_type)
    fused = family.stacks[0].fused
    if len(family.stacks) > 1 or fused is None or fused.roles != ("q", "k", "v"):
        return
    declared = fused.layout(config) if callable(fused.layout) else fused.layout
    fitting = fitting_orders(model, family)
    if fitting and declared not in fitting:
        raise FamilyError(
            f"{type(model).__name__}: the rows of {fused.path} are not in the order {declared!r} that the family of "
            f"{config.model_type!r} names. Register it again with fused=oelm.Fused({fused.path!r}, "
            f"layout={fitting[0]!r}) and replace_existing=True"
        )


def fitting_orders(model: nn.Module, family: Family) -> list[Order] | None:
    """Return the orders of rows that a family's one fused projection may have, or None where they cannot be tried.

    A token that attends to itself alone gets its value, whatever Q and K are. So new Q and K leave what a model with
    one block computes of one token as it is, but not if they take the place of rows that belong to V.
    """
    # The code that runs here is transformers' or the user's, on a config of one block, which it may not be made for.
    try:
        with torch.random.fork_rng(devices=[]):
            small = _one_block(model, family.stacks[0].layers)
            if small is None:
                return None
            before = _of_one_token(small)
            return [order for order in get_args(Order) if _keeps(small, _with_order(family, order), before)]
    except Exception:  # noqa: BLE001
        return None


def _one_block(model: nn.Module, layers: FromConfig) -> nn.Module | None:
    """Return a model of one block with random values, few tokens and the width of this one; None for a large one."""
    config: Any = copy.deepcopy(model.config)
    sizes = {"num_hidden_layers": 1, str(layers): 1, "vocab_size": 8}
    tokens = {f"{name}_token_id": 0 for name in ("pad", "bos", "eos", "sep", "cls", "mask")}
    for name, value in (sizes | tokens).items():
        if hasattr(config, name):
            setattr(config, name, value)
    with torch.device("meta"):
        total = sum(parameter.numel() for parameter in type(model)(config).parameters())
    return None if total > _LARGEST_TRIAL else type(model)(config).eval()


def _of_one_token(model: nn.Module) -> torch.Tensor:
    with torch.no_grad():
        result: torch.Tensor = model(input_ids=torch.tensor([[5]]))[0]
    return result


def _with_order(family: Family, order: Order) -> Family:
    """Return a family of one stack with its fused projection in another order of rows."""
    (stack,) = family.stacks
    return replace(family, stacks=(replace(stack, fused=stack.fused and replace(stack.fused, layout=order)),))


def _keeps(model: nn.Module, family: Family, before: torch.Tensor) -> bool:
    """Return True if what a model of one block computes of one token stays as it is with another Q and K."""
    changed = copy.deepcopy(model)
    carry_out(changed, plan(changed, Method.load("oelm-freeze"), family), seed=0)
    return bool((_of_one_token(changed) - before).abs().max() <= _TOLERANCE * before.abs().max())
