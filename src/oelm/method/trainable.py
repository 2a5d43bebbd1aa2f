"""Which parameters a method freezes, and which train beside a frozen body: head, biases, last blocks, adapters."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn

from ..errors import MethodError
from .plan import Operation, Target
from .sites import base_prefix, is_adapter, path_without_adapter

Parameters = dict[str, nn.Parameter]


@dataclass(frozen=True)
class Head:
    """The parameters between a model's body and its output, by name.

    A task's head (`fresh`) is what a classifier adds to its base model: it starts at random, so it must train. A
    language model's output layers were trained with the rest; those tied to the embedding belong to the embedding.
    """

    parameters: Parameters
    fresh: bool


def head_of(model: nn.Module) -> Head:
    """Return the model's head: all outside its base model and, for a classifier, the base model's pooler."""
    prefix = base_prefix(model)
    everything = dict(model.named_parameters())
    outside = {name: p for name, p in everything.items() if prefix and not name.startswith(prefix)}
    output = _call_if_defined(model, "get_output_embeddings")
    if output is None:
        # A checkpoint of the body alone often has no pooler: it is then as fresh as the classifier that reads it.
        pooler = f"{prefix}pooler."
        return Head({n: p for n, p in everything.items() if n in outside or (outside and n.startswith(pooler))}, True)
    if not prefix:  # an encoder-decoder that is its own base model
        output_ids = {id(p) for p in output.parameters()}
        outside = {name: p for name, p in everything.items() if id(p) in output_ids}
    embedding = _call_if_defined(model, "get_input_embeddings")
    tied = set() if embedding is None else {id(p) for p in embedding.parameters()}
    return Head({name: p for name, p in outside.items() if id(p) not in tied}, False)


def adapter_parameters(model: nn.Module) -> Parameters:
    """Return the parameters that adapters add, by name."""
    parameters: Parameters = {}
    for path, module in model.named_modules():
        if is_adapter(module):
            added = (n for n, _ in module.named_parameters() if not n.startswith("base_layer."))
            parameters |= {f"{path}.{name}": module.get_parameter(name) for name in added}
    return parameters


def frozen_names(model: nn.Module, operation: Operation) -> tuple[dict[str, list[str]], list[str]]:
    """Return the names of all parameters that the operation freezes, once its changes were made to the model.

    First, for each target's path, those that are frozen, or unfrozen by a schedule, with its matrix; then those that
    stay frozen whatever a schedule does.
    """
    idle = _idle_key_biases(model, operation)
    by_matrix = {}
    for target in operation.targets:
        with_bias = target.role in ("q", "k") and operation.method.biases == "frozen"
        leaves = ("weight", "bias") if with_bias else ("weight",)
        names = [name for leaf in leaves for name in _parameter_name(model, target, leaf)]
        by_matrix[target.path] = [name for name in names if name not in idle]
    return by_matrix, [*_frozen_by_rest(model, operation), *idle]


def frozen_by_rest(model: nn.Module, operation: Operation) -> list[str]:
    """Return the names of the parameters that the method's `rest` freezes. Raise where nothing would be left to train.

    Raise as well where a parameter that the method trains had its gradient switched off before.
    """
    method, frozen = operation.method, _frozen_by_rest(model, operation)
    if method.rest == "trained":
        return []
    set_by_method = {*frozen, *adapter_parameters(model)}
    switched_off = [n for n, p in model.named_parameters() if n not in set_by_method and not p.requires_grad]
    if switched_off:
        more = f" and {len(switched_off) - 1} more that it trains" if len(switched_off) > 1 else ""
        raise MethodError(
            f"rest {method.rest!r} trains {switched_off[0]}, but that{more} had requires_grad off before: the method "
            "says what is frozen, so call model.requires_grad_(True) first"
        )
    return frozen


def _frozen_by_rest(model: nn.Module, operation: Operation) -> list[str]:
    """Return the names of the parameters that the method's `rest` freezes."""
    if operation.method.rest == "trained":
        return []
    added = adapter_parameters(model)
    trained = _trained_beside_frozen_body(model, operation, added)
    return [name for name, p in model.named_parameters() if name not in added and id(p) not in trained]


def _trained_beside_frozen_body(model: nn.Module, operation: Operation, added: Parameters) -> set[int]:
    """Return the ids of the parameters, adapters (`added`) aside, that train where `rest` freezes the body."""
    method, head = operation.method, head_of(model)
    trained: set[int] = set()
    if method.rest == "biases":
        body = {name: p for name, p in model.named_parameters() if name not in head.parameters and name not in added}
        trained |= {id(p) for name, p in body.items() if name.rpartition(".")[2] == "bias"}
        if not trained:
            raise MethodError(
                f"rest 'biases': {type(model).__name__} has no biases outside its head, so none would train; "
                "use rest 'head' or 'last:N'"
            )
    elif method.rest != "head":
        blocks = _last_blocks(operation, int(method.rest.removeprefix("last:")))
        trained |= {id(p) for block in blocks for p in model.get_submodule(block).parameters()}
    # A language model's own output layer is part of what was pretrained: beside adapters or biases it stays frozen.
    if head.fresh or (method.adapter.kind == "none" and method.rest != "biases"):
        trained |= {id(p) for p in head.parameters.values()}
    if not trained and method.adapter.kind == "none":
        why = "has no head" if head.fresh else "has no head of its own, its output layer is its embedding"
        raise MethodError(
            f"rest 'head': nothing would train: {type(model).__name__} {why}; use rest 'last:N', or a model with a head"
        )
    return trained


def _last_blocks(operation: Operation, count: int) -> set[str]:
    """Return the paths of the last `count` blocks of every stack."""
    if operation.family.shared:
        raise MethodError(f"rest 'last:{count}': this model has one block for all its layers, so none is the last")
    blocks: set[str] = set()
    for kind in dict.fromkeys(site.kind for site in operation.sites):
        stack = list(dict.fromkeys(site.block for site in operation.sites if site.kind == kind))
        if count > len(stack):
            raise MethodError(f"rest 'last:{count}' does not fit a model of {len(stack)} {kind} layers")
        blocks |= set(stack[-count:])
    return blocks


def _idle_key_biases(model: nn.Module, operation: Operation) -> list[str]:
    """Return the key biases that have no effect and so never train: those beside a matrix core on Q alone.

    Such a bias adds the same number to all scores of a query, and the softmax cancels it.
    """
    if operation.method.core != "matrix" or operation.core_sides != ("q",):
        return []
    keys = [target for target in operation.targets if target.role == "k"]
    return [name for target in keys for name in _parameter_name(model, target, "bias")]


def _parameter_name(model: nn.Module, target: Target, leaf: str) -> list[str]:
    """Return the name of a target's own weight or bias, or nothing where it has none."""
    path = path_without_adapter(model, target.path)
    return [f"{path}.{leaf}"] if isinstance(getattr(model.get_submodule(path), leaf, None), nn.Parameter) else []


def _call_if_defined(model: nn.Module, name: str) -> Any:
    """Return what an accessor of a transformers model returns, or None where the class does not define it."""
    accessor = getattr(model, name, None)
    try:
        return None if accessor is None else accessor()
    except NotImplementedError:
        return None
