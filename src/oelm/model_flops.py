"""The FLOPs of a training step, counted on the model itself: for a benchmark, and for a run that is only planned."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from torch import Tensor, nn

from .flops import attention_flops, weight_flops
from .rest import head_of
from .sites import find_sites, without_adapter


def train_flops_per_token(model: Any, length: int, unreached: Collection[int] = ()) -> float:
    """Multiply-adds times two that one token's training step must do, by the rules of `oelm.flops`.

    `unreached` holds the ids of weights whose input needs no gradient. A fresh head reads a sequence once.
    """
    family, sites = find_sites(model)
    head = head_of(model)
    once = {id(parameter) for parameter in head.parameters.values()} if head.fresh else set()
    # One block of ALBERT is gone through by many layers.
    passes = model.config.num_hidden_layers / model.config.num_hidden_groups if family.shared else 1
    repeated = {id(p) for site in sites for p in model.get_submodule(site.block).parameters()}

    def cost(parameter: Tensor) -> float:
        key = id(parameter)
        uses = 1 / length if key in once else passes if key in repeated else 1
        return uses * weight_flops(parameter.numel(), parameter.requires_grad, key not in unreached)

    matrices = {id(m.weight): m.weight for m in model.modules() if isinstance(getattr(m, "weight", None), nn.Parameter)}
    tokens_only = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    output = model.get_output_embeddings()
    if output is not None:
        tokens_only.discard(id(output.weight))
    flops = sum(cost(weight) for key, weight in matrices.items() if weight.ndim == 2 and key not in tokens_only)
    flops += sum(cost(parameter) for name, parameter in model.named_parameters() if name.endswith(".core"))
    for site in sites:
        after: Any = without_adapter(model.get_submodule(site.roles["o"])) if "o" in site.roles else None
        reached = after is None or id(after.weight) not in unreached
        flops += passes * attention_flops(site.heads * site.d_head, length, site.kind == "decoder", reached)
    return flops


def unreached_weights(loss: nn.Module, batch: dict[str, Tensor]) -> set[int]:
    """The ids of parameters whose module's input needs no gradient, since nothing trains below: from a forward pass."""
    reached: dict[int, bool] = {}

    def look(module: nn.Module, inputs: tuple[Any, ...]) -> None:
        needed = not inputs or bool(inputs[0].requires_grad)
        for parameter in module.parameters(recurse=False):
            reached[id(parameter)] = reached.get(id(parameter), False) or needed

    # An embedding's input are token ids; its weight may be the output layer's too, which is seen by itself.
    hooks = [m.register_forward_pre_hook(look) for m in loss.modules() if not isinstance(m, nn.Embedding)]
    try:
        loss(**batch)
    finally:
        for hook in hooks:
            hook.remove()
    return {key for key, needed in reached.items() if not needed}
