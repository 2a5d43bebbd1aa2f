"""Guesses where the projections of a model of an unknown type are, by its modules' names and shapes, and tries that.

A guess is tried on a copy of the model without values: the method is planned with it, the first attention of each kind
gets orthogonal matrices, and their heads are compared with what the attention itself takes for a head.
"""

from __future__ import annotations

import copy
import math
import re
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, MODEL_FOR_MASKED_LM_MAPPING_NAMES
from transformers.pytorch_utils import Conv1D

from ..errors import FamilyError, OelmError
from .changes import carry_out
from .families import (
    KV_HEADS_FIELDS,
    Family,
    Fused,
    StackLayout,
    describe_unknown,
    known_families,
    one_stack_family,
    read,
)
from .matrices import orthogonality_error
from .plan import Operation, Target, plan
from .row_order import fitting_orders
from .sites import Site, around_query, base_prefix, weight_matrix
from .spec import Kind, Method

# What the last part of a projection's path is called, in lower case.
_ROLE_NAMES = {
    role: re.compile(rf"(to_?|w_?|linear_?)?({short}|{long})(_?(proj|projection|lin|linear|layer|attn))?")
    for role, short, long in (("q", "q", "query"), ("k", "k", "key"), ("v", "v", "value"))
}
_FUSED_NAME = re.compile(r"c_attn|in_proj|att_proj|query_key_value|(w_?|to_?)?qkv(_?(proj|lin|linear))?")
_OUTPUT_NAME = re.compile(r"(to_?|w_?)?(o|out|output)(_?(proj|lin|linear))?|dense|c_proj|proj")
_NORM_NAME = re.compile(r"(q|query)_?(layer_?)?norm")
# Fields of a config and attributes of an attention, the most common first.
_LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "encoder_layers", "decoder_layers")
_HEADS = ("num_attention_heads", "n_head", "n_heads", "num_heads", "encoder_attention_heads", "attention_heads")
_ROTARY_FIELDS = ("rope_parameters", "rope_theta", "rotary_dim", "rotary_pct")
_TOLERANCE = 1e-5
_TRIAL = {"preset": "oelm-freeze", "layers": "first:1"}

# The path of a query matrix, the pattern of the block that holds it, and its path below the block.
Query = tuple[str, tuple[str, str]]


@dataclass(frozen=True)
class Guess:
    """A layout that fits the model: the call that registers it, and how many attentions the model has with it.

    `tried` is True where its heads came out orthogonal, and where the order of fused rows was tried too.
    """

    call: str
    attentions: int
    tried: bool
    to_check: str

    def __str__(self) -> str:
        works = ", and their heads came out orthogonal" if self.tried else ""
        found = f"{self.attentions} attentions were found with it{works}"
        return (
            f"The names of its modules suggest this layout; {found}:\n{self.call}\n{self.to_check} "
            "On the command line, the call stands in a file of yours, after `import oelm`: oelm --plugin FILE ..."
        )


def require_known_type(model: nn.Module) -> None:
    """Raise for a Hugging Face model of a type that no family is known of, and suggest the call that registers it."""
    model_type = getattr(getattr(model, "config", None), "model_type", None)
    if model_type and model_type not in known_families():
        raise FamilyError(f"{describe_unknown(model_type)}\n{suggestion(model)}")


def suggestion(model: nn.Module) -> str:
    """Return in words how to register a model's type: the layout that was found, or why there is none."""
    try:
        return str(guess_layout(model))
    except FamilyError as error:
        return str(error)


def guess_layout(model: nn.Module) -> Guess:
    """Return a layout that fits a model. Raise, with the reason, where none was found."""
    try:
        queries = _queries(model)
        places = dict.fromkeys(place for _, place in queries)
        if len(places) > 1:
            return _guess_known_family(model, queries, [".".join(place) for place in places])
        return _guess_one_stack(model, queries)
    except OelmError as error:
        raise FamilyError(
            f"The names of its modules do not tell its layout: {error}. If it has attention, say where its projections "
            "are with oelm.register_family(...)"
        ) from None


def _guess_one_stack(model: nn.Module, queries: list[Query]) -> Guess:
    """Return the layout of a model whose blocks each hold one attention, in the same place."""
    config: Any = model.config
    layout = _layout_of_stack(model, queries)
    order = _order_of_rows(model, layout) if "fused" in layout else None
    if order is not None:
        layout["fused"] = order
    operation = _try(model, one_stack_family(config.model_type, layout))
    lines = [repr(config.model_type), *(f"{name}={_source(value)}" for name, value in layout.items())]
    call = "oelm.register_family(\n" + "".join(f"    {line},\n" for line in lines) + ")"
    to_check = (
        "Check in its code what names alone say: kind, and whether rotary=True or qk_norm=True is right; and that it "
        f"divides scores by the root of a head's size.{_note_on_scaling(model, operation.sites[0])}"
    )
    tried = order is not None or "fused" not in layout
    if not tried:
        to_check += " The layout of the fused rows, 'blocks' or 'groups', could not be tried: check it, too."
    return Guess(call, len(operation.sites), tried, to_check)


def _guess_known_family(model: nn.Module, queries: list[Query], places: list[str]) -> Guess:
    """Return the known family that fits a model with attention in several places. Raise where none does."""
    config: Any = model.config
    for family in dict.fromkeys(known_families().values()):
        try:
            operation = _try(model, family)
        except (OelmError, AttributeError):  # the paths, or the fields of the config, are another family's
            continue
        if len(operation.sites) == len(queries):
            name = next(name for name, known in known_families().items() if known is family)
            call = f"oelm.register_family({config.model_type!r}, family={name!r})"
            return Guess(call, len(queries), True, f"Check in its code that its attention computes what {name!r} does.")
    raise FamilyError(
        f"it has attention in several places, {', '.join(places)}, and no known family fits; an oelm.Family of "
        "oelm.Stacks can describe it"
    )


def _queries(model: nn.Module) -> list[Query]:
    """Return every query matrix or, where there is none, every fused one."""
    prefix = base_prefix(model)
    linear = [path for path, module in model.named_modules() if isinstance(module, (nn.Linear, Conv1D))]
    for name in (_ROLE_NAMES["q"], _FUSED_NAME):
        found = []
        for path in linear:
            parts = path.removeprefix(prefix).split(".")
            number = next((i for i, part in enumerate(parts) if part.isdecimal()), None)
            if path.startswith(prefix) and number and name.fullmatch(parts[-1].lower()):
                found.append((path, (".".join([*parts[:number], "*"]), ".".join(parts[number + 1 :]))))
        if found:
            return found
    raise FamilyError("no matrix below a numbered block is called q, query or qkv")


def _layout_of_stack(model: nn.Module, queries: list[Query]) -> StackLayout:
    """Return the keywords of `register_family` for the block of the first query."""
    config: Any = model.config
    path, (block, query) = queries[0]
    block_path = path.removesuffix(f".{query}")
    linear = {
        name: module
        for name, module in model.get_submodule(block_path).named_modules()
        if isinstance(module, (nn.Linear, Conv1D))
    }
    parent, _, leaf = query.rpartition(".")
    attention = model.get_submodule(path.rpartition(".")[0])
    layout: StackLayout = {"block": block, "kind": _kind(model, attention)}
    if _FUSED_NAME.fullmatch(leaf.lower()):
        layout["fused"] = Fused(query)
        taken = {query}
    else:
        layout["q"] = query
        layout["k"], layout["v"] = (_sibling(linear, parent, role) for role in ("k", "v"))
        taken = {layout["q"], layout["k"], layout["v"]}
    rest = {name: module for name, module in linear.items() if name not in taken}
    output = _output(rest, parent)
    if output:
        layout["o"] = output
    root = parent.partition(".")[0]
    outside = {n: m for n, m in rest.items() if n != output and not (root and n.startswith(f"{root}."))}
    _add_feed_forward(layout, outside, _shape(linear[query])[1])
    if getattr(config, _LAYERS[0], None) != len(queries):
        layout["layers"] = _layers_field(config, len(queries))
    _add_heads(layout, config, linear)
    if _rotates(model, attention):
        layout["rotary"] = True
    if any(_NORM_NAME.fullmatch(name.lower()) for name, _ in attention.named_children()):
        layout["qk_norm"] = True
    return layout


def _sibling(linear: dict[str, nn.Module], parent: str, role: str) -> str:
    """Return the path of K or V beside the query."""
    for name in linear:
        owner, _, leaf = name.rpartition(".")
        if owner == parent and _ROLE_NAMES[role].fullmatch(leaf.lower()):
            return name
    raise FamilyError(f"beside the query in {parent or 'the block'} no matrix is called {role}")


def _output(linear: dict[str, nn.Module], parent: str) -> str:
    """Return the path of the attention's output matrix, or nothing where the names do not tell."""
    root = parent.partition(".")[0]
    inside = [name for name in linear if (name.startswith(f"{root}.") if root else "." not in name)]
    named = [name for name in inside if _OUTPUT_NAME.fullmatch(name.rpartition(".")[2].lower())]
    return named[0] if len(named) == 1 else inside[0] if root and len(inside) == 1 else ""


def _add_feed_forward(layout: StackLayout, linear: dict[str, nn.Module], width: int) -> None:
    """Name the feed-forward matrices, if exactly one matrix leads back to the hidden state and others lead to it."""
    back = [name for name, module in linear.items() if _shape(module)[0] == width != _shape(module)[1]]
    if len(back) != 1:
        return
    inner = _shape(linear[back[0]])[1]
    into = [n for n, module in linear.items() if _shape(module)[1] == width and _shape(module)[0] in (inner, 2 * inner)]
    if into:
        layout["ffn_in"] = into[0] if len(into) == 1 else tuple(into)
        layout["ffn_out"] = back[0]


def _add_heads(layout: StackLayout, config: Any, linear: dict[str, nn.Module]) -> None:
    """Name the config's fields with the numbers of heads. Raise where Q and K differ in rows and no field says why."""
    heads = next((field for field in _HEADS if isinstance(getattr(config, field, None), int)), "")
    if not heads:
        raise FamilyError(f"its config has no field such as {', '.join(_HEADS[:3])}")
    if heads != _HEADS[0]:
        layout["heads"] = heads
    kv_heads = next((field for field in KV_HEADS_FIELDS if isinstance(getattr(config, field, None), int)), "")
    if kv_heads:
        layout["kv_heads"] = kv_heads
    elif "q" in layout:
        rows, key_rows = (_shape(linear[name])[0] for name in (layout["q"], layout["k"]))
        if rows != key_rows:
            raise FamilyError(f"its keys have {key_rows} rows, its queries {rows}, and no field of its config says why")


def _layers_field(config: Any, count: int) -> str:
    for name in _LAYERS:
        if getattr(config, name, None) == count:
            return name
    raise FamilyError(f"attention is in {count} of its blocks, and its config has no such number")


def _kind(model: nn.Module, attention: nn.Module) -> Kind:
    """Return 'decoder' for causal attention or, where that does not show, for a type that only continues text."""
    config: Any = model.config
    continues = config.model_type in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    only_continues = continues and config.model_type not in MODEL_FOR_MASKED_LM_MAPPING_NAMES
    can_generate = getattr(model, "can_generate", lambda: False)
    return "decoder" if getattr(attention, "is_causal", only_continues or can_generate()) else "encoder"


def _rotates(model: nn.Module, attention: nn.Module) -> bool:
    """Return True where a module, a method of the attention or a field of the config is named for rotary positions."""
    names = [type(module).__name__ for module in model.modules()] + dir(type(attention))
    by_name = any(re.search(r"rotary|rope_", name.lower()) for name in names)
    return by_name or any(getattr(model.config, field, None) for field in _ROTARY_FIELDS)


def _shape(module: nn.Module) -> tuple[int, int]:
    rows, width = weight_matrix(module).shape
    return rows, width


def _source(value: Any) -> str:
    return f"oelm.Fused({value.path!r}, layout={value.layout!r})" if isinstance(value, Fused) else repr(value)


def _try(model: nn.Module, family: Family) -> Operation:
    """Plan a method with a family and carry it out on the first attentions of a copy. Raise where heads are wrong."""
    operation = plan(model, Method.load(_TRIAL), family)
    trial = _without_values(model)
    paths = {path for path, _ in trial.named_modules()}
    for path in {t.path if t.path in paths else t.site.fused_path for t in operation.targets}:
        _give_values(trial, path)
    carry_out(trial, operation, seed=0)
    for target in operation.targets:
        _require_orthogonal_heads(trial, target)
    return operation


def _without_values(model: nn.Module) -> nn.Module:
    """Return a copy of a model on the meta device, which takes no memory, whatever the model's size."""
    memo: dict[int, Any] = {}
    for parameter in model.parameters():
        empty = torch.empty_like(parameter, device="meta")
        memo[id(parameter)] = nn.Parameter(empty, parameter.requires_grad)
    for buffer in model.buffers():
        memo[id(buffer)] = torch.empty_like(buffer, device="meta")
    return copy.deepcopy(model, memo)


def _order_of_rows(model: nn.Module, layout: StackLayout) -> Fused | None:
    """Return the fused projection with the order of its rows, or None where it cannot be tried. Raise if none fits."""
    path = layout["fused"].path if layout["fused"] else ""
    config: Any = model.config
    fitting = fitting_orders(model, one_stack_family(config.model_type, layout))
    if fitting is None:
        return None
    if not fitting:
        raise FamilyError(f"the rows of {path} are in an order that is neither 'blocks' nor 'groups'")
    same_rows = read(config, layout.get("kv_heads") or layout.get("heads", _HEADS[0])) == 1
    return Fused(path, layout=fitting[0]) if len(fitting) == 1 or same_rows else None


def _give_values(model: nn.Module, path: str) -> None:
    """Give a matrix of the copy random values, and its bias zeros."""
    module = model.get_submodule(path)
    rng = torch.Generator().manual_seed(0)
    for name, parameter in module.named_parameters(recurse=False):
        values = torch.randn(parameter.shape, generator=rng) if parameter.ndim > 1 else torch.zeros(parameter.shape)
        setattr(module, name, nn.Parameter(values))


def _require_orthogonal_heads(model: nn.Module, target: Target) -> None:
    """Raise unless a matrix is orthonormal in heads of the size that the attention itself gives them."""
    weight = weight_matrix(model.get_submodule(target.path)).detach().double() / target.factor
    size = target.site.d_head
    error = orthogonality_error(weight, len(weight) // size)
    if not error < _TOLERANCE:
        raise FamilyError(f"{target.path}: heads of {size} rows did not come out orthogonal ({error:.1e})")


def _note_on_scaling(model: nn.Module, site: Site) -> str:
    """Return a sentence where the attention has a factor of its scores that is not the usual one, or nothing."""
    factors = [value for m in around_query(model, site) if isinstance(value := getattr(m, "scaling", None), float)]
    if not factors or math.isclose(factors[0], site.d_head**-0.5, rel_tol=1e-6):
        return ""
    return (
        f" It seems to divide them by {1 / factors[0]:.4g} and not by {site.d_head**0.5:.4g}: if so, give that as "
        "divisor, a function of the config."
    )
