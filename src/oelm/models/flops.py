"""The FLOPs of a training step per token, counted on the model itself.

Counted, as two FLOPs per multiplication with its addition:

- a matrix, a core, and each of LoRA's two factors: the forward product; the product for its own gradient if it is
  trainable; and the product for its input's gradient if anything below it is trainable;
- attention: the two forward products, and those of the four backward products that lead to something trainable;
- a matrix that torch keeps orthogonal: like any other, and the product of its start with the rotation that trains;
- OFT: the block-wise rotation of a matrix's input, which then always needs a gradient, and the products that build the
  blocks from their parameters, once per pass and therefore shared by its tokens.

Not counted: embeddings, norms, biases, the softmax, convolutions over tokens and other element-wise work; the matrix
exponential of an orthogonal matrix; the optimiser's update; recomputation by gradient checkpointing or in a fused
attention's backward pass, and gradients that a fused attention computes for tensors that do not need them. A causal
mask halves attention here, as in a fused attention; plain products compute the masked half too. Otherwise the count
equals the FLOPs that torch counts in plain products.

`reached` is the share of a tensor's uses that need a gradient: 0 or 1, or between them where one block serves several
layers (ALBERT).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn
from torch.nn.utils import parametrize

from ..method.adapters import rotations
from ..method.sites import Site, find_sites, weight_matrix
from ..method.spec import OFT_TERMS
from ..method.trainable import head_of


@dataclass(frozen=True)
class Reach:
    """Where gradients are needed, as a share of the uses; 1 for whatever is not listed.

    `inputs` maps the id of a parameter to its module's input, `outputs` the id of a module to the module's output.
    """

    inputs: Mapping[int, float] = field(default_factory=dict)
    outputs: Mapping[int, float] = field(default_factory=dict)


def train_flops_per_token(
    model: Any, length: int, sequences: int, reach: Reach | None = None, head_share: float = 1.0
) -> float:
    """Return the FLOPs of a training step per token, for passes of `sequences` sequences of this length.

    Without `reach`, gradients are needed everywhere. A new classification head reads each sequence once, a language
    model's head the share `head_share` of its tokens. Projections of relative positions (DeBERTa) are counted once per
    token, and cross-attention as attention of a sequence to itself.
    """
    reach = reach or Reach()
    family, sites = find_sites(model)
    head = head_of(model)
    in_head = {id(parameter) for parameter in head.parameters.values()} | {id(_output_weight(model))}
    head_uses = 1 / length if head.fresh else head_share
    # ALBERT's layers share one block.
    passes = model.config.num_hidden_layers / model.config.num_hidden_groups if family.shared else 1
    in_blocks = {id(p) for site in sites for p in model.get_submodule(site.block).parameters()}

    def uses_per_token(weight: Tensor) -> float:
        return head_uses if id(weight) in in_head else passes if id(weight) in in_blocks else 1

    flops = 0.0
    for weight in _multiplied_weights(model):
        reached = reach.inputs.get(id(weight), 1.0)
        flops += uses_per_token(weight) * weight_flops(weight.numel(), weight.requires_grad, reached)
    for weight in _expert_weights(model):
        share = model.config.num_experts_per_tok / weight.shape[0]
        flops += share * weight_flops(weight.numel(), weight.requires_grad, reach.inputs.get(id(weight), 1.0))
    for weight, width, block in rotations(model):
        reached = reach.inputs.get(id(weight), 1.0)
        flops += uses_per_token(weight) * rotation_flops(width, block, sequences * length, reached)
    for weight in _orthogonal_weights(model):
        flops += product_with_start_flops(weight.shape[0], weight.requires_grad, sequences * length)
    for site in sites:
        causal = site.kind == "decoder"
        widths = site.heads * _key_width(model, site), _value_width(model, site)
        flops += passes * attention_flops(widths, length, causal, _reached_roles(model, site, reach))
    return flops


def weight_flops(weights: float, trained: bool, reached: float) -> float:
    """Return the FLOPs of a matrix for one token. `reached` is that of its input."""
    return (2.0 + 2.0 * trained + 2.0 * reached) * weights


def attention_flops(widths: tuple[int, int], length: int, causal: bool, reached: Mapping[str, float]) -> float:
    """Return the FLOPs of one token's scores and of the mixture of values. `reached` is that of its q, k and v.

    `widths` are those of all heads' keys and of all heads' values. The gradients of q and k are one product each, and
    both need the scores' gradient, which is another, as wide as the values; v's is one.
    """
    query, key, value = (reached.get(role, 0.0) for role in ("q", "k", "v"))
    of_keys, of_values = 1.0 + query + key, 1.0 + max(query, key) + value
    return (of_keys * widths[0] + of_values * widths[1]) * (1.0 if causal else 2.0) * length


def rotation_flops(width: int, block: int, tokens: int, reached: float) -> float:
    """Return the FLOPs of an OFT rotation for one token of a pass over `tokens` tokens.

    A block is a sum of powers of a skew-symmetric matrix. The first two powers need no product; each of the others
    needs one forward, the previous power times the matrix, and two backward.
    """
    weights = width * block
    powers = 3 * (OFT_TERMS - 2) * 2.0 * weights * block
    return weight_flops(weights, True, reached) + powers / tokens


def product_with_start_flops(width: int, trained: bool, tokens: int) -> float:
    """Return the FLOPs per token of an orthogonal matrix's start times its rotation, for passes of `tokens` tokens."""
    return (2.0 + 2.0 * trained) * width**3 / tokens


def find_reach(loss: nn.Module, batch: dict[str, Tensor]) -> Reach:
    """Return where a model needs gradients because something below is trainable, found by a forward pass.

    The pass is in evaluation mode, so that it draws no random numbers.
    """
    inputs: dict[int, list[bool]] = {}
    outputs: dict[int, list[bool]] = {}

    def record(module: nn.Module, arguments: tuple[Any, ...], output: Any) -> None:
        input_needs_gradient = not arguments or bool(arguments[0].requires_grad)
        for parameter in _own_parameters(module):
            inputs.setdefault(id(parameter), []).append(input_needs_gradient)
        outputs.setdefault(id(module), []).append(not isinstance(output, Tensor) or output.requires_grad)

    # Embeddings are left out: they read token ids, and a weight tied to the output layer is recorded there.
    skipped = nn.Embedding | parametrize.ParametrizationList
    hooks = [module.register_forward_hook(record) for module in loss.modules() if not isinstance(module, skipped)]
    training = loss.training
    try:
        loss.eval()(**batch)
    finally:
        loss.train(training)
        for hook in hooks:
            hook.remove()
    return Reach(_shares(inputs), _shares(outputs))


def _shares(uses: dict[int, list[bool]]) -> dict[int, float]:
    return {key: sum(needed) / len(needed) for key, needed in uses.items()}


def _multiplied_weights(model: Any) -> list[Tensor]:
    """Return the matrices that are multiplied with activations, and the cores, each once."""
    modules = [module for module in model.modules() if isinstance(getattr(module, "weight", None), nn.Parameter)]
    # Embeddings are looked up, unless they are also the output layer; OFT parameters are not matmul operands.
    not_multiplied = {id(module.weight) for module in modules if isinstance(module, nn.Embedding)}
    not_multiplied.discard(id(_output_weight(model)))
    not_multiplied |= {id(rotation.weight) for rotation in rotations(model)}
    weights = [module.weight for module in modules] + _orthogonal_weights(model)
    matrices = {id(weight): weight for weight in weights if weight.ndim == 2}
    cores = [parameter for name, parameter in model.named_parameters() if name.endswith(".core")]
    return [weight for key, weight in matrices.items() if key not in not_multiplied] + cores


def _output_weight(model: Any) -> Tensor | None:
    """Return the matrix from which a language model's logits come, which may be its embedding too."""
    output = model.get_output_embeddings()
    return None if output is None else output.weight


def _expert_weights(model: nn.Module) -> list[nn.Parameter]:
    """Return the parameters that each hold one matrix for every expert; a token is multiplied with those of a few."""
    return [weight for name, weight in model.named_parameters() if weight.ndim == 3 and ".experts." in name]


def _orthogonal_weights(model: nn.Module) -> list[nn.Parameter]:
    """Return the parameters from which torch computes the matrices that it keeps orthogonal."""
    kept = [module for module in model.modules() if parametrize.is_parametrized(module, "weight")]
    return [module.get_parameter("parametrizations.weight.original") for module in kept]


def _own_parameters(module: nn.Module) -> list[nn.Parameter]:
    """Return the parameters of a module without those of its submodules, but with that of an orthogonal weight."""
    own = list(module.parameters(recurse=False))
    kept = parametrize.is_parametrized(module, "weight")
    return [*own, module.get_parameter("parametrizations.weight.original")] if kept else own


def _key_width(model: Any, site: Site) -> int:
    """Return the width of a head's products; linear attention has two of them where it rotates one."""
    rotated = getattr(model.config, "scores", "softmax") == "linear" and model.config.positions == "rotary"
    return (site.d_head + site.channel) * (2 if rotated else 1)


def _value_width(model: nn.Module, site: Site) -> int:
    """Return the width of all heads' values together: the columns of O where there is one, else that of the queries."""
    if "o" not in site.roles:
        return site.heads * site.d_head
    return int(weight_matrix(model.get_submodule(site.roles["o"])).shape[1])


def _reached_roles(model: nn.Module, site: Site, reach: Reach) -> dict[str, float]:
    """Return how far an attention's q, k and v need gradients. Those of a fused projection are one tensor."""
    fused = site.fused.roles if site.fused is not None else ()
    paths = {role: site.fused_path if role in fused else site.roles[role] for role in ("q", "k", "v")}
    return {role: reach.outputs.get(id(model.get_submodule(path)), 1.0) for role, path in paths.items()}
