"""What trains where a method freezes the body: the task's head, biases, the last blocks, adapters."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn

from ..errors import MethodError
from .families import Family
from .sites import Site, base_prefix, is_adapter
from .spec import Method

Parameters = dict[str, nn.Parameter]


@dataclass(frozen=True)
class Head:
    """The parameters between a model's body and its answer, by name.

    A task's head (`fresh`) is what a classifier adds to its base model: it starts at random, so it must train. A
    language model's output layers came trained with the rest; those tied to the embedding are the embedding.
    """

    parameters: Parameters
    fresh: bool


def head_of(model: nn.Module) -> Head:
    """The model's head: all outside its base model and, for a classifier, the base model's pooler."""
    prefix = base_prefix(model)
    everything = dict(model.named_parameters())
    outside = {name: p for name, p in everything.items() if prefix and not name.startswith(prefix)}
    output = _call(model, "get_output_embeddings")
    if output is None:
        # A checkpoint of the body alone often has no pooler: it is then as fresh as the classifier that reads it.
        pooler = f"{prefix}pooler."
        return Head({n: p for n, p in everything.items() if n in outside or (outside and n.startswith(pooler))}, True)
    if not prefix:  # an encoder-decoder that is its own base model
        output_ids = {id(p) for p in output.parameters()}
        outside = {name: p for name, p in everything.items() if id(p) in output_ids}
    embedding = _call(model, "get_input_embeddings")
    tied = set() if embedding is None else {id(p) for p in embedding.parameters()}
    return Head({name: p for name, p in outside.items() if id(p) not in tied}, False)


def adapter_parameters(model: nn.Module) -> Parameters:
    """The parameters that adapters add, by name."""
    found: Parameters = {}
    for path, module in model.named_modules():
        if is_adapter(module):
            own = (n for n, _ in module.named_parameters() if not n.startswith("base_layer."))
            found |= {f"{path}.{name}": module.get_parameter(name) for name in own}
    return found


def frozen_by_rest(model: nn.Module, family: Family, sites: list[Site], method: Method) -> list[str]:
    """The names of the parameters that the method's `rest` freezes. Raises where nothing sensible would be left."""
    if method.rest == "trained":
        return []
    head, added = head_of(model), adapter_parameters(model)
    trained: set[int] = set()
    if method.rest == "biases":
        body = {name: p for name, p in model.named_parameters() if name not in head.parameters and name not in added}
        trained |= {id(p) for name, p in body.items() if _is_bias(name)}
        if not trained:
            raise MethodError(
                f"rest 'biases': {type(model).__name__} has no biases outside its head, so none would train; "
                "use rest 'head' or 'last:N'"
            )
    elif method.rest != "head":
        blocks = _last_blocks(family, sites, int(method.rest.removeprefix("last:")))
        trained |= {id(p) for block in blocks for p in model.get_submodule(block).parameters()}
    if head.fresh or (method.adapter.kind == "none" and method.rest != "biases"):
        trained |= {id(p) for p in head.parameters.values()}
    if not trained and method.adapter.kind == "none":
        why = "has no head" if head.fresh else "has no head of its own, its output layer is its embedding"
        raise MethodError(
            f"rest 'head': nothing would train: {type(model).__name__} {why}; use rest 'last:N', or a model with a head"
        )
    held = [name for name, p in model.named_parameters() if id(p) in trained and not p.requires_grad]
    if held:
        more = f" and {len(held) - 1} more that it trains" if len(held) > 1 else ""
        raise MethodError(
            f"rest {method.rest!r} trains {held[0]}, but that{more} had requires_grad off before: the method says what "
            "is frozen, so call model.requires_grad_(True) first"
        )
    return [name for name, p in model.named_parameters() if name not in added and id(p) not in trained]


def _last_blocks(family: Family, sites: list[Site], count: int) -> set[str]:
    """The paths of the last blocks of every stack."""
    if family.shared:
        raise MethodError(f"rest 'last:{count}': this model has one block for all its layers, so none is the last")
    blocks: set[str] = set()
    for kind in dict.fromkeys(site.kind for site in sites):
        stack = list(dict.fromkeys(site.block for site in sites if site.kind == kind))
        if count > len(stack):
            raise MethodError(f"rest 'last:{count}' does not fit a model of {len(stack)} {kind} layers")
        blocks |= set(stack[-count:])
    return blocks


def _is_bias(name: str) -> bool:
    return name.rpartition(".")[2] == "bias"


def _call(model: nn.Module, name: str) -> Any:
    """What an accessor of transformers' models gives; none where the class has no such thing."""
    method = getattr(model, name, None)
    try:
        return None if method is None else method()
    except NotImplementedError:
        return None
