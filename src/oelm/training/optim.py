"""AdamW or Muon over the trainable parameters, in groups by decay, depth and role; and the rate of every step."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.optim import AdamW, Muon, Optimizer

from ..config import MATRIX_ROLES, OptimizerConfig
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
    """Return groups of trainable parameters with one optimiser, decay and rate multiplier, in a stable order.

    One-dimensional parameters (norms, biases, gains) do not decay.
    """
    groups: dict[tuple[bool, float, float], list[nn.Parameter]] = {}
    with_muon = config.name == "muon"
    by_name = placements(model) if with_muon or config.layer_decay != 1.0 or config.multipliers else {}
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        decay = config.weight_decay if parameter.ndim > 1 else 0.0
        muons, multiplier = False, 1.0
        if by_name:
            place = by_name[name]
            muons = with_muon and _is_matrix(name, parameter, place.role)
            multiplier = _multiplier(name, place.role, config.multipliers) * config.layer_decay**place.above
        groups.setdefault((muons, decay, multiplier), []).append(parameter)
    if not groups:
        raise ConfigError("nothing in this model is trainable: the method froze everything; use one that trains a part")
    if with_muon and not any(muons for muons, _, _ in groups):
        raise ConfigError(
            "optimizer.name 'muon': no matrix of a block is trained, so there is nothing for Muon; use 'adamw'"
        )
    return [
        {"params": parameters, "weight_decay": decay, "multiplier": multiplier, "muon": muons}
        for (muons, decay, multiplier), parameters in groups.items()
    ]


def _is_matrix(name: str, parameter: nn.Parameter, role: str) -> bool:
    """Return True for a matrix of a block that is multiplied with what passes through it, as Muon assumes.

    What a matrix is computed from, as one that stays orthogonal is, is not multiplied itself. Nor is a stack of
    matrices, such as the experts of some models, one matrix.
    """
    return parameter.ndim == 2 and set(role.split("+")) <= set(MATRIX_ROLES) and ".parametrizations." not in name


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


def muon_notes(model: nn.Module, config: OptimizerConfig, device: torch.device) -> list[str]:
    """Return notes on what Muon does otherwise than a reader may expect: to fused projections, and to step times."""
    if config.name != "muon":
        return []
    notes = []
    fused = [(name, place.role) for name, place in placements(model).items() if place.role.startswith("q+")]
    if fused:
        name, role = fused[0]
        notes.append(
            f"optimizer.name muon: {name} is {role.replace('+', ', ')} in one tensor, with one orthogonal update; a "
            "method that splits it changes that too"
        )
    if device.type == "cuda":
        notes.append("optimizer.name muon: steps are launched kernel by kernel (train.graphs), so they take longer")
    return notes


class Joined(Optimizer):
    """Optimisers of different parameters as one: their groups in one list, and their states in one mapping."""

    def __init__(self, parts: list[Optimizer]) -> None:
        super().__init__([group for part in parts for group in part.param_groups], {})
        self._parts = parts
        for part in parts:
            part.state = self.state

    def step(self, closure: None = None) -> None:  # type: ignore[override] # nothing here evaluates a loss again
        """Take a step of every part."""
        for part in self._parts:
            part.step(closure)


def build_optimizer(model: nn.Module, config: OptimizerConfig, device: torch.device) -> Optimizer:
    """Build the optimiser of the trainable parameters alone: a frozen one has no gradient, no state and no decay.

    On a GPU AdamW's learning rates are tensors there, so that a recorded step reads the rate of every step. Muon's
    updates are scaled to the size of AdamW's, 0.2 on average, so that both have the same rate.
    """
    groups = parameter_groups(model, config)
    if config.name == "adamw":
        return _build_adamw(groups, config, device)
    matrices, others = ([group for group in groups if group["muon"] is muons] for muons in (True, False))
    muon = Muon(matrices, config.learning_rate, adjust_lr_fn="match_rms_adamw")
    return Joined([muon, _build_adamw(others, config, device)] if others else [muon])


def _build_adamw(groups: list[dict[str, object]], config: OptimizerConfig, device: torch.device) -> AdamW:
    on_gpu = device.type == "cuda"
    if on_gpu:
        groups = [group | {"lr": torch.tensor(config.learning_rate, device=device)} for group in groups]
    return AdamW(groups, config.learning_rate, (config.beta1, config.beta2), config.epsilon, fused=on_gpu)


def new_state(parameter: nn.Parameter, group: dict[str, object]) -> dict[str, Tensor]:
    """Return the state that the first step of a parameter's optimiser would create, to load values into."""

    def zeros() -> Tensor:
        return torch.zeros_like(parameter, memory_format=torch.preserve_format)

    if group["muon"]:
        return {"momentum_buffer": zeros()}
    # The fused kernel keeps its step counter on the device, the loop keeps it on the CPU.
    device = parameter.device if group["fused"] else torch.device("cpu")
    return {"step": torch.zeros((), device=device), "exp_avg": zeros(), "exp_avg_sq": zeros()}


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


def set_learning_rate(optimizer: Optimizer, rate: float) -> None:
    """Set the learning rate of every group to `rate` times its multiplier."""
    for group in optimizer.param_groups:
        own = rate * group["multiplier"]
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(own)
        else:
            group["lr"] = own
