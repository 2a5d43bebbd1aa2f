"""Finds the attention sites of a model: one per distinct block and kind of attention, checked against its config."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import cast

from torch import Tensor, nn
from torch.nn.parallel import DataParallel, DistributedDataParallel
from transformers.pytorch_utils import Conv1D

from ..errors import FamilyError, ModelError
from .families import KV_HEADS_FIELDS, Config, Family, FromConfig, Fused, Stack, family_of, read
from .projections import CoreProjection, IdentityProjection, SplitProjection
from .spec import Kind

# What an attention calls the size of a head of its queries: the project's GPT, then the most common names first.
_HEAD_SIZES = ("key_dim", "head_dim", "attention_head_size", "head_size", "key_value_proj_dim", "dim_head", "d_head")


@dataclass(frozen=True)
class Site:
    """One attention: its block, its heads, and the full paths of its projections.

    A role's path is that of the projection by itself, as it is or would be once unfused: `....c_attn.q`.
    `layer` is the block's index in its stack; with `shared`, the one block serves every layer. `feed_forward` has
    (role, path) of every feed-forward matrix of the block. `latent` is the width of the latent that keys and values
    are read from, 0 where they are read from the hidden state; `channel` the width of a rotary channel.
    """

    kind: Kind
    layer: int
    shared: bool
    block: str
    heads: int
    kv_heads: int
    d_head: int
    width: int
    roles: dict[str, str]
    fused: Fused | None
    fused_path: str
    feed_forward: tuple[tuple[str, str], ...]
    latent: int = 0
    channel: int = 0

    def width_of(self, role: str) -> int:
        """Return the columns of a role's matrix: the latent's width for what reads the latent."""
        return self.latent if self.latent and role in ("k", "v") else self.width

    def heads_of(self, role: str) -> int:
        """Return the number of heads of a role: key-value heads for all but the query."""
        return self.heads if role == "q" else self.kv_heads

    @property
    def label(self) -> str:
        """Return the layer's name in a report."""
        return "shared" if self.shared else str(self.layer)


def find_sites(model: nn.Module, family: Family | None = None) -> tuple[Family, list[Site]]:
    """Return the model's family and every attention site, in order. Raise if one that the config implies is missing.

    The family is that of the model's type, unless one is given to be tried.
    """
    config = getattr(model, "config", None)
    model_type = getattr(config, "model_type", None)
    if not model_type:
        raise FamilyError(f"{type(model).__name__} has no config.model_type: oelm works on Hugging Face models")
    family = family or family_of(model_type)
    try:
        for function in (family.meets, family.normed, family.divisor):  # what these read is missed here, not later
            function(config)
        sites = [site for stack in family.stacks if stack.present(config) for site in _sites_of(model, family, stack)]
    except AttributeError as error:
        if error.obj is not config:
            raise
        raise FamilyError(
            f"the config of model_type {model_type!r} has no field {error.name!r}, which its family reads. "
            "Register the right family with oelm.register_family(..., replace_existing=True)"
        ) from None
    if not sites:
        expected = ", ".join(base_prefix(model) + stack.block for stack in family.stacks)
        raise FamilyError(
            f"{type(model).__name__}: found no attention of family {model_type!r}; looked for {expected}. "
            "If its blocks live elsewhere, name them with oelm.register_family(..., replace_existing=True)"
        )
    return family, sites


def unwrapped(model: nn.Module) -> nn.Module:
    """Return the model itself, without the wrapper of torch.compile, data parallelism or peft."""
    while True:
        if isinstance(model, (DataParallel, DistributedDataParallel)):
            model = model.module
        elif type(model).__name__ == "OptimizedModule":  # by name: importing its class takes a second
            model = model.get_submodule("_orig_mod")
        elif is_pefts(model) and hasattr(model, "get_base_model"):
            model = cast("Callable[[], nn.Module]", model.get_base_model)()
        else:
            return model


def is_pefts(module: nn.Module) -> bool:
    """Return True for an object of peft's classes, recognised by their module's name: peft need not be installed."""
    return type(module).__module__.partition(".")[0] == "peft"


def is_adapter(module: nn.Module) -> bool:
    """Return True for one of peft's layers around a projection."""
    return is_pefts(module) and hasattr(module, "base_layer")


def without_adapter(module: nn.Module) -> nn.Module:
    """Return the projection itself where the module is an adapter's layer around it, else the module."""
    while is_adapter(module):
        module = module.get_submodule("base_layer")
    return module


def path_without_adapter(model: nn.Module, path: str) -> str:
    """Return the path of the projection itself where an adapter's layer is around it, else the path."""
    while is_adapter(model.get_submodule(path)):
        path = f"{path}.base_layer"
    return path


def weight_matrix(module: nn.Module) -> Tensor:
    """Return a view of a projection's weight as (rows out, width in), even if its module stores the transpose."""
    module = without_adapter(module)
    weight = module.weight
    assert isinstance(weight, Tensor)
    return weight.T if isinstance(module, Conv1D) else weight


def require_projection(module: nn.Module, path: str) -> None:
    """Raise unless the module is a plain matrix product, safe to set and freeze: not quantised, not an adapter's."""
    # The exact type counts: quantised and adapter layers subclass Linear. Falcon's Linear only adds its bias later.
    if type(module) not in (nn.Linear, Conv1D) and type(module).__name__ != "FalconLinear":
        raise _not_plain(module, path)


def _not_plain(module: nn.Module, path: str) -> ModelError:
    kind = f"{type(module).__module__}.{type(module).__qualname__}"  # quantised layers may be called Linear too
    return ModelError(
        f"{path} is a {kind}, not a plain Linear or Conv1D: quantised, parametrised or wrapped by an adapter? "
        "Apply the method to the plain model first"
    )


def base_prefix(model: nn.Module) -> str:
    """Return the base model's path within the model, with a dot at its end; empty for a model that is its own base."""
    name = getattr(model, "base_model_prefix", "")
    return f"{name}." if name and isinstance(getattr(model, name, None), nn.Module) else ""


def _sites_of(model: nn.Module, family: Family, stack: Stack) -> list[Site]:
    """Return the sites of one stack. Raise where the number of blocks is not the config's."""
    config, prefix = model.config, base_prefix(model)
    blocks = _expand(model, prefix, stack.block)
    if not blocks:
        return []  # a class without this half of the model, such as an encoder of an encoder-decoder
    expected = _number(config, stack.layers)
    if len(blocks) != expected:
        raise FamilyError(
            f"{type(model).__name__}: the config calls for {expected} blocks at {prefix}{stack.block}, "
            f"but there are {len(blocks)}"
        )
    return [_site(model, family, stack, index, block) for index, block in enumerate(blocks)]


def _expand(model: nn.Module, prefix: str, pattern: str) -> list[str]:
    """Return every path that a pattern with `*` for indices matches, each module once."""
    paths = [prefix.rstrip(".")]
    for part in pattern.split("."):
        matches = []
        for path in paths:
            module = model.get_submodule(path)
            names = [name for name, _ in module.named_children()] if part == "*" else [part]
            matches += [f"{path}.{name}".lstrip(".") for name in names if hasattr(module, name)]
        paths = matches
    distinct = {id(model.get_submodule(path)): path for path in reversed(paths)}
    return [path for path in paths if distinct.get(id(model.get_submodule(path))) == path]


def _site(model: nn.Module, family: Family, stack: Stack, index: int, block: str) -> Site:
    """Return the site of one block. Raise where a module is missing or its rows do not fit the heads."""
    config = model.config
    heads = _number(config, stack.heads)
    kv_heads = _number(config, stack.kv_heads) if stack.kv_heads is not None else heads
    in_fused: tuple[str, ...] = stack.fused.roles if stack.fused else ()
    fused_path = f"{block}.{stack.fused.path}" if stack.fused else ""
    roles = {}
    value = stack.v(config) if callable(stack.v) else stack.v
    for role, path in (("q", stack.q), ("k", stack.k), ("v", value), ("o", stack.o), *stack.more(config).items()):
        if role in in_fused:
            roles[role] = f"{fused_path}.{role}"
        elif path:
            roles[role] = f"{block}.{path}"
    ffn_in = stack.ffn_in(config) if callable(stack.ffn_in) else stack.ffn_in
    fused = stack.fused
    if fused is not None and callable(fused.layout):
        fused = Fused(fused.path, fused.roles, fused.layout(config))
    rows, width = _query_shape(model, roles["q"], fused, fused_path, heads, kv_heads)
    if rows % heads:
        raise FamilyError(f"{roles['q']}: {rows} rows cannot be cut into {heads} heads of equal size")
    if heads % kv_heads:
        raise FamilyError(f"{block}: {heads} query heads cannot share {kv_heads} key-value heads equally")
    feed_forward = [("ffn_in", f"{block}.{path}") for path in ffn_in]
    feed_forward += [("ffn_out", f"{block}.{stack.ffn_out}")] if stack.ffn_out else []
    for role, path in [*roles.items(), *feed_forward]:
        if role not in in_fused:
            _module(model, path)
    site = Site(
        kind=stack.kind,
        layer=index,
        shared=family.shared,
        block=block,
        heads=heads,
        kv_heads=kv_heads,
        d_head=rows // heads,
        width=width,
        roles=roles,
        fused=fused,
        fused_path=fused_path,
        feed_forward=tuple(feed_forward),
        latent=_latent_width(model, roles),
        channel=stack.channel(config),
    )
    _require_key_value_heads(model, site, stack)
    own_size = next(_own_head_sizes(model, site), site.d_head)
    if own_size != site.d_head:
        raise FamilyError(
            f"{roles['q']}: its attention has heads of {own_size}, and heads={_written(stack.heads)} of its family "
            f"makes them {site.d_head}. Register it again with the right ones: "
            "oelm.register_family(..., replace_existing=True)"
        )
    return site


def _number(config: Config, source: FromConfig) -> int:
    """Return a number of layers or heads. Raise where the config has something else in its place."""
    value = read(config, source)
    if not isinstance(value, int) or value < 1:
        raise FamilyError(
            f"the config of model_type {config.model_type!r}: {_written(source)} gives {value!r}, not a number above 0"
        )
    return value


def _require_key_value_heads(model: nn.Module, site: Site, stack: Stack) -> None:
    """Raise unless K has a query head's size for each key-value head, and V what O reads of each head."""
    output = _shape(model, site.roles["o"]) if "o" in site.roles else None
    for role, d_head in (("k", site.d_head), ("v", None if output is None else output[1] // site.heads)):
        path, roles = _matrix_of(model, site, role)
        shape = _shape(model, path)
        if shape is None or d_head is None:  # nothing to compare
            continue
        rows, query_rows = shape[0], site.heads * d_head if "q" in roles else 0
        each = "2 x " if {"k", "v"} <= set(roles) else ""
        row_per_head = (2 if each else 1) * d_head
        if rows == query_rows + site.kv_heads * row_per_head:
            continue
        queries = f"{site.heads} query heads and " if query_rows else ""
        sizes = f"{path}: {rows} rows are not {queries}{each}{site.kv_heads} key-value heads of {d_head}"
        count, rest = divmod(rows - query_rows, row_per_head)
        if stack.kv_heads is None and not rest and 0 < count < site.heads:
            raise FamilyError(
                f"{sizes} but {count}: its family has no kv_heads, and so counts a key for each of {site.heads} heads. "
                f"Register it again with {_kv_heads_argument(model.config, count)} and replace_existing=True"
            )
        raise FamilyError(
            f"{sizes}, as heads={_written(stack.heads)} and kv_heads={_written(stack.kv_heads)} of its family make "
            "them. Register it again with the right ones: oelm.register_family(..., replace_existing=True)"
        )


def around_query(model: nn.Module, site: Site) -> Iterator[nn.Module]:
    """Yield the modules that hold Q, from the nearest to the block."""
    path = site.fused_path if site.fused and "q" in site.fused.roles else site.roles["q"]
    while path != site.block:
        path = path.rpartition(".")[0]
        yield model.get_submodule(path)


def _own_head_sizes(model: nn.Module, site: Site) -> Iterator[int]:
    """Yield what the modules around Q, from the nearest to its block, have as the size of a head."""
    for module in around_query(model, site):
        values = (getattr(module, name, None) for name in _HEAD_SIZES)
        yield from (value for value in values if isinstance(value, int))


def _matrix_of(model: nn.Module, site: Site, role: str) -> tuple[str, tuple[str, ...]]:
    """Return the path of the matrix that holds a role, and all roles in it: several in a fused one that is whole."""
    fused = site.fused
    if fused is None or role not in fused.roles or isinstance(_module(model, site.fused_path), SplitProjection):
        return site.roles[role], (role,)
    return site.fused_path, fused.roles


def _written(source: FromConfig | None) -> str:
    """Return a value's source as it is written in a call: the name of a field, None, or that it is a function."""
    return "a function" if callable(source) else repr(source)


def _kv_heads_argument(config: Config, count: int) -> str:
    """Return the argument of `register_family` that gives this number: the config's field for it, if it has one."""
    fields = [name for name in KV_HEADS_FIELDS if getattr(config, name, None) == count]
    return f"kv_heads={fields[0]!r}" if fields else f"kv_heads=lambda config: {count}"


def _shape(model: nn.Module, path: str) -> tuple[int, int] | None:
    """Return (rows, width) of a projection, or None where its weight is packed, as quantised layers pack it."""
    module = without_adapter(model.get_submodule(path))
    if isinstance(module, CoreProjection) and module.identity is not None:
        module = module.identity
    if isinstance(module, IdentityProjection):
        return module.rows, module.width
    weight = getattr(module, "weight", None)
    if not isinstance(weight, Tensor) or weight.ndim != 2 or not weight.is_floating_point():
        return None
    rows, width = weight_matrix(module).shape
    return rows, width


def _latent_width(model: nn.Module, roles: dict[str, str]) -> int:
    """Return the rows of the matrix to the latent, or 0 where there is none."""
    if "down" not in roles:
        return 0
    module = _module(model, roles["down"])
    return module.rows if isinstance(module, IdentityProjection) else int(weight_matrix(module).shape[0])


def _query_shape(
    model: nn.Module, path: str, fused: Fused | None, fused_path: str, heads: int, kv_heads: int
) -> tuple[int, int]:
    """Return (rows, width) of Q, read off the module that is there: plain, fused, or put there by a method.

    Its class may be another, as that of a Linear that was sharded by itself: only what sets it needs a plain one.
    """
    holder = _module(model, fused_path) if fused and "q" in fused.roles else None
    if holder is not None and not isinstance(holder, SplitProjection):
        shape = _shape(model, fused_path)
        if shape is None:
            raise _not_plain(holder, fused_path)
        rows, width = shape
        per_head, rest = divmod(rows, heads + 2 * kv_heads)
        if rest:
            raise FamilyError(
                f"{fused_path}: {rows} rows cannot be cut into {heads} query and 2 x {kv_heads} key-value heads"
            )
        return per_head * heads, width
    module = _module(model, path)
    shape = _shape(model, path)
    if shape is None:
        raise _not_plain(without_adapter(module), path)
    return shape


def _module(model: nn.Module, path: str) -> nn.Module:
    """Return the module at a path that the family names. Raise, with the way to correct the family, where none is."""
    try:
        return model.get_submodule(path)
    except AttributeError:
        raise FamilyError(
            f"{type(model).__name__}: there is no module {path!r}, where its family puts one. "
            "Register the family again with oelm.register_family(..., replace_existing=True)"
        ) from None
