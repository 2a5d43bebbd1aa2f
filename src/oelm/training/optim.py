"""AdamW over the trainable parameters, in groups by decay, depth and role; and the learning rate of every step."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import nn

from ..config import OptimizerConfig
from ..errors import ConfigError
from ..method.sites import find_sites
from ..method.trainable import adapter_parameters
from .length import RunLength


@dataclass(frozen=True)
class Placement:
    """What decides a parameter's learning rate: its role and the number of blocks above it.

    A matrix with several roles has all of them: q+k+v where it is fused, k+v where K = V.
    """

    role: str
    above: int


def placements(model: nn.Module) -> dict[str, Placement]:
    """Return the role and depth of every parameter, by name.

    Embeddings, with their norms and projections, are below the first block; the head is above the last.
    """
    _, sites = find_sites(model)
    blocks = list(dict.fromkeys(site.block for site in sites))
    by_module: dict[str, str] = {}
    for site in sites:
        for role, path in (*site.roles.items(), *site.feed_forward):  # K = V is one matrix with two roles
            by_module[path] = f"{by_module[path]}+{role}" if path in by_module else role
    by_module |= {site.fused_path: "+".join(site.fused.roles) for site in sites if site.fused is not None}
    adapters = adapter_parameters(model)
    embeddings = {id(p) for m in model.modules() if isinstance(m, nn.Embedding) for p in m.parameters()}
    by_name = {}
    for name, parameter in model.named_parameters():
        module, _, leaf = name.rpartition(".")
        # A matrix with an adapter keeps its role, and so does one that is kept orthogonal.
        module = module.removesuffix(".base_layer").removesuffix(".parametrizations.weight")
        block = next((b for b in blocks if name.startswith(f"{b}.")), None)
        below = block is None and ("embed" in name or "project_in" in name)  # OPT's name for its embedding projection
        above = len(blocks) if below else 0
        if block is not None:
            above = len(blocks) - 1 - blocks.index(block)
        if leaf == "core":
            role = "core"
        elif name in adapters:
            role = "adapter"
        elif module in by_module:
            role = by_module[module]
        elif leaf.endswith("_taps"):
            role = "convolution"
        elif id(parameter) in embeddings:
            role, above = "embedding", len(blocks)
        elif block is not None or "norm" in module.lower() or "ln_" in module:
            role = "norm"
        else:
            role = "embedding" if below else "head"
        by_name[name] = Placement(role, above)
    return by_name


def parameter_groups(model: nn.Module, config: OptimizerConfig) -> list[dict[str, object]]:
    """Return groups of trainable parameters with one decay and one learning-rate multiplier, in a stable order.

    One-dimensional parameters (norms, biases, gains) do not decay.
    """
    groups: dict[tuple[float, float], list[nn.Parameter]] = {}
    by_name = placements(model) if config.layer_decay != 1.0 or config.multipliers else {}
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        decay = config.weight_decay if parameter.ndim > 1 else 0.0
        multiplier = 1.0
        if by_name:
            place = by_name[name]
            multiplier = _multiplier(name, place.role, config.multipliers) * config.layer_decay**place.above
        groups.setdefault((decay, multiplier), []).append(parameter)
    if not groups:
        raise ConfigError("nothing in this model is trainable: the method froze everything; use one that trains a part")
    return [
        {"params": parameters, "weight_decay": decay, "multiplier": multiplier}
        for (decay, multiplier), parameters in groups.items()
    ]


def _multiplier(name: str, role: str, multipliers: dict[str, float]) -> float:
    """Return the multiplier of a role. A fused projection is one parameter, so all its roles must have the same one."""
    values = {multipliers.get(part, 1.0) for part in role.split("+")}
    if len(values) > 1:
        raise ConfigError(
            f"optimizer.multipliers: {name} is the model's {role.replace('+', ', ')} in one tensor; give those the "
            "same multiplier, or use a method that splits that tensor"
        )
    return values.pop()


def unused_multipliers(model: nn.Module, config: OptimizerConfig) -> list[str]:
    """Return a note on multipliers without effect, because no parameter of the model has their role."""
    if not config.multipliers:
        return []
    roles = {part for place in placements(model).values() for part in place.role.split("+")}
    unused = ", ".join(role for role in config.multipliers if role not in roles)
    return [f"optimizer.multipliers: nothing in this model has the role {unused}"] if unused else []


def build_optimizer(model: nn.Module, config: OptimizerConfig, device: torch.device) -> torch.optim.AdamW:
    """Build AdamW over the trainable parameters alone: a frozen one has no gradient, no state and no decay.

    On a GPU the learning rates are tensors there, so that a recorded step reads the rate of every step.
    """
    groups, betas, on_gpu = parameter_groups(model, config), (config.beta1, config.beta2), device.type == "cuda"
    if on_gpu:
        groups = [group | {"lr": torch.tensor(config.learning_rate, device=device)} for group in groups]
    return torch.optim.AdamW(groups, config.learning_rate, betas, config.epsilon, fused=on_gpu)


def learning_rate(config: OptimizerConfig, length: RunLength, step: int) -> float:
    """Return the learning rate of the optimiser step with this index, counted from 0."""
    peak, floor = config.learning_rate, config.floor
    if step < length.warmup:
        return peak * (step + 1) / length.warmup
    if config.schedule == "constant":
        return peak
    progress = min(1.0, (step - length.warmup) / max(1, length.steps - 1 - length.warmup))
    shape = 0.5 * (1 + math.cos(math.pi * progress)) if config.schedule == "cosine" else 1 - progress
    return peak * (floor + (1 - floor) * shape)


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Set the learning rate of every group to `rate` times its multiplier."""
    for group in optimizer.param_groups:
        own = rate * group["multiplier"]
        if isinstance(group["lr"], torch.Tensor):
            group["lr"].fill_(own)
        else:
            group["lr"] = own
