"""The FLOPs of a training step, counted on the model itself: for a benchmark, and for a run that is only planned."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from ..method.adapters import rotations
from ..method.flop_rules import attention_flops, rotation_flops, weight_flops
from ..method.sites import Site, find_sites
from ..method.trainable import head_of


@dataclass(frozen=True)
class Reach:
    """Where gradients come, as a share of the uses: everywhere that is not named.

    `inputs` is by the ids of parameters, for what their module reads; `outputs` by the ids of modules.
    """

    inputs: Mapping[int, float] = field(default_factory=dict)
    outputs: Mapping[int, float] = field(default_factory=dict)


def train_flops_per_token(model: Any, length: int, sequences: int, reach: Reach | None = None) -> float:
    """Multiply-adds times two that one token's training step must do, by the rules of `oelm.flops`.

    `sequences` of this length pass through the model at once. Without `reach`, gradients come everywhere. A fresh head
    reads a sequence once. Projections of relative positions (DeBERTa) are counted as if every token had its own, and a
    cross-attention as one of the sequence to itself.
    """
    reach = reach or Reach()
    inputs = reach.inputs
    family, sites = find_sites(model)
    head = head_of(model)
    once = {id(parameter) for parameter in head.parameters.values()} if head.fresh else set()
    # One block of ALBERT is gone through by many layers.
    passes = model.config.num_hidden_layers / model.config.num_hidden_groups if family.shared else 1
    repeated = {id(p) for site in sites for p in model.get_submodule(site.block).parameters()}

    def uses(weight: Tensor) -> float:
        return 1 / length if id(weight) in once else passes if id(weight) in repeated else 1

    def cost(weight: Tensor) -> float:
        return uses(weight) * weight_flops(weight.numel(), weight.requires_grad, inputs.get(id(weight), 1.0))

    turns = list(rotations(model))
    matrices = {id(m.weight): m.weight for m in model.modules() if isinstance(getattr(m, "weight", None), nn.Parameter)}
    tokens_only = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    output = model.get_output_embeddings()
    if output is not None:
        tokens_only.discard(id(output.weight))
    # What a rotation is made of is multiplied with nothing.
    apart = tokens_only | {id(turn.weight) for turn in turns}
    flops = sum(cost(weight) for key, weight in matrices.items() if weight.ndim == 2 and key not in apart)
    flops += sum(cost(parameter) for name, parameter in model.named_parameters() if name.endswith(".core"))
    for weight, width, block in turns:
        turned = rotation_flops(width, block, sequences * length, inputs.get(id(weight), 1.0))
        flops += uses(weight) * turned
    for site in sites:
        reached = _reached_roles(model, site, reach)
        flops += passes * attention_flops(site.heads * site.d_head, length, site.kind == "decoder", reached)
    return flops


def find_reach(loss: nn.Module, batch: dict[str, Tensor]) -> Reach:
    """Where gradients come in a model, since something below trains: from a forward pass.

    The pass is in evaluation mode, so that no random number is drawn and dropout takes no part.
    """
    inputs: dict[int, list[bool]] = {}
    outputs: dict[int, list[bool]] = {}

    def look(module: nn.Module, read: tuple[Any, ...], written: Any) -> None:
        needed = not read or bool(read[0].requires_grad)
        for parameter in module.parameters(recurse=False):
            inputs.setdefault(id(parameter), []).append(needed)
        outputs.setdefault(id(module), []).append(not isinstance(written, Tensor) or written.requires_grad)

    # An embedding's input are token ids; its weight may be the output layer's too, which is seen by itself.
    hooks = [m.register_forward_hook(look) for m in loss.modules() if not isinstance(m, nn.Embedding)]
    training = loss.training
    try:
        loss.eval()(**batch)
    finally:
        loss.train(training)
        for hook in hooks:
            hook.remove()
    return Reach(_shares(inputs), _shares(outputs))


def _shares(seen: dict[int, list[bool]]) -> dict[int, float]:
    return {key: sum(needed) / len(needed) for key, needed in seen.items()}


def _reached_roles(model: nn.Module, site: Site, reach: Reach) -> dict[str, float]:
    """How far an attention's q, k and v need gradients; those of a fused projection are one tensor and do as one."""
    fused = site.fused.roles if site.fused is not None else ()
    paths = {role: site.fused_path if role in fused else site.roles[role] for role in ("q", "k", "v")}
    return {role: reach.outputs.get(id(model.get_submodule(path)), 1.0) for role, path in paths.items()}
