"""The table of model families: where Q, K, V, O and the feed-forward matrices live in each, and how they are fused.

An entry names paths below the model's base model (`bert`, `transformer`, `model`, or the model itself). `*` in a
block's path stands for any index. A user adds a family that is not here with `register_family`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, TypedDict, Unpack, get_args

from ..errors import FamilyError, nearest
from .spec import Kind

Config = Any  # a transformers config: every family has its own class
# A value of the config: its attribute's name, or a function of the config.
FromConfig = str | Callable[[Config], Any]
# The order of the rows of a fused projection: see `Fused`.
Order = Literal["blocks", "groups"]
# The names that configs have for the number of key-value heads, the most common first.
KV_HEADS_FIELDS = ("num_key_value_heads", "num_kv_heads", "n_kv_heads", "n_head_kv", "num_query_groups", "kv_heads")


@dataclass(frozen=True)
class Fused:
    """One Linear or Conv1D that holds several projections.

    `layout` is the order of its output rows: "blocks" for all of Q, all of K, all of V; "groups" for the queries of
    one key-value head, its key, its value, then the next (with as many key-value heads as heads: per head q, k, v).
    """

    path: str
    roles: tuple[Literal["q", "k", "v"], ...] = ("q", "k", "v")
    layout: Order | Callable[[Config], Order] = "blocks"

    def __post_init__(self) -> None:
        if not callable(self.layout) and self.layout not in get_args(Order):
            raise FamilyError(f"Fused({self.path!r}): layout is {self.layout!r}; use 'blocks' or 'groups'")


@dataclass(frozen=True)
class Stack:
    """A sequence of blocks that each hold one attention of one kind. All paths but `block` are below the block.

    Where a block holds a second attention (cross-attention), its feed-forward layer is named in one of the two stacks.
    """

    kind: Kind
    block: str
    layers: FromConfig = "num_hidden_layers"
    q: str = ""
    k: str = ""
    v: str | Callable[[Config], str] = ""
    o: str = ""
    fused: Fused | None = None
    ffn_in: tuple[str, ...] | Callable[[Config], tuple[str, ...]] = ()
    ffn_out: str = ""
    heads: FromConfig = "num_attention_heads"
    kv_heads: FromConfig | None = None
    present: Callable[[Config], bool] = lambda config: True
    # Other roles that some configs have, such as the matrix to a latent: their paths by role.
    more: Callable[[Config], dict[str, str]] = lambda config: {}
    # Dimensions of a head's query and key beside the rows of its own projection: a rotary channel.
    channel: Callable[[Config], int] = lambda config: 0


@dataclass(frozen=True)
class Family:
    """A layout shared by one or more model types.

    meets        what acts on Q and K besides each other (rotary positions, a norm, relative positions), if anything:
                 a core then goes on each side instead of between them
    normed       the roles that are normalised after their projections, which cancels any scale
    per_head     such a norm is over each head by itself, which cancels a factor of one head as well
    divisor      what the attention divides its scores by, None for sqrt(d_head); Q's matrix carries the rest
    shared       one block serves all layers, so there are no layers to choose from
    """

    stacks: tuple[Stack, ...]
    meets: Callable[[Config], str | None] = lambda config: None
    normed: Callable[[Config], tuple[str, ...]] = lambda config: ()
    per_head: bool = True
    divisor: Callable[[Config], float | None] = lambda config: None
    shared: bool = False


def read(config: Config, source: FromConfig) -> Any:
    """Return a value of the config, by attribute name or function. Raise, naming the field, where there is none."""
    if not isinstance(source, str):
        return source(config)
    value = getattr(config, source, None)
    if value is None:
        raise FamilyError(f"the config of model_type {config.model_type!r} has no field {source!r}")
    return value


def family_of(model_type: str) -> Family:
    """Return the family of a model type. Raise, with the way to register one, where there is none."""
    if model_type not in _FAMILIES:
        raise FamilyError(
            f"{describe_unknown(model_type)} Register it first, on the command line in a file that --plugin names; "
            "`oelm families --guess MODEL` suggests the call"
        )
    return _FAMILIES[model_type]


def describe_unknown(model_type: str) -> str:
    """Return the sentence that says that a model type has no family, with the types that have one."""
    return f"unknown model_type {model_type!r}.{nearest(model_type, _FAMILIES)} Known: {', '.join(known_types())}."


def known_families() -> Mapping[str, Family]:
    """Return every family by model type, those of the same layout as one object."""
    return _FAMILIES


def is_registered(model_type: Any) -> bool:
    """Return True for a model type whose family a user registered."""
    return model_type in _REGISTERED


def known_types() -> list[str]:
    """Return every model type that has a family, in alphabetical order."""
    return sorted(_FAMILIES)


class StackLayout(TypedDict, total=False):
    """The keywords of `register_family` that describe a family of one stack of blocks.

    block                   the path of the blocks below the base model, such as 'encoder.layer.*'
    q, k, v, o              paths of the projections below a block; without those that `fused` holds
    fused                   the one projection that holds several of them
    ffn_in, ffn_out         paths of the feed-forward matrices; ffn_in may name several
    kind                    'encoder' (the default), 'decoder' or 'cross'
    layers, heads, kv_heads fields of the config with those numbers, or functions of it
    rotary, qk_norm         whether positions rotate Q and K, and whether a norm follows their projections
    divisor                 what the attention divides its scores by, where that is not sqrt(d_head)
    """

    block: str
    q: str
    k: str
    v: str
    o: str
    ffn_in: str | tuple[str, ...]
    ffn_out: str
    fused: Fused | None
    kind: Kind
    layers: FromConfig
    heads: FromConfig
    kv_heads: FromConfig | None
    rotary: bool
    qk_norm: bool
    divisor: Callable[[Config], float | None]


def register_family(
    model_type: str,
    *,
    family: Family | str | None = None,
    replace_existing: bool = False,
    **layout: Unpack[StackLayout],
) -> Family:
    """Teach oelm a model type, by its paths or by a family, and return the family.

    `family` is a known model type with the same layout, or a whole `Family`. The paths are keywords that describe one
    stack of blocks with separate or fused projections: see `StackLayout`.
    """
    unknown = [name for name in layout if name not in StackLayout.__annotations__]
    if unknown:
        raise TypeError(f"register_family() got an unexpected keyword argument {unknown[0]!r}")
    if not isinstance(model_type, str) or not model_type:
        given = repr(model_type) if isinstance(model_type, str) else f"of type {type(model_type).__name__}"
        raise FamilyError(f"register_family: model_type is {given}, not what config.model_type says, such as 'olmo'")
    if model_type in _FAMILIES and not replace_existing:
        raise FamilyError(f"model_type {model_type!r} has a family already; pass replace_existing=True to change it")
    if family is not None and layout:
        raise FamilyError(
            f"register_family({model_type!r}): family has the whole layout, and {', '.join(layout)} would be ignored; "
            "give one of the two"
        )
    if family is None:
        _FAMILIES[model_type] = one_stack_family(model_type, layout)
    else:
        _FAMILIES[model_type] = _whole_family(model_type, family)
    _REGISTERED.add(model_type)
    return _FAMILIES[model_type]


def _whole_family(model_type: str, family: Family | str) -> Family:
    """Return the `family` that `register_family` was given: itself, or that of the known type that it names."""
    if isinstance(family, Family):
        return family
    if not isinstance(family, str) or family not in _FAMILIES:
        hint = nearest(family, _FAMILIES) if isinstance(family, str) else ""
        raise FamilyError(
            f"register_family({model_type!r}): family is {family!r}, neither an oelm.Family nor a known model type."
            f"{hint} Known: {', '.join(known_types())}"
        )
    return _FAMILIES[family]


def one_stack_family(model_type: str, layout: StackLayout) -> Family:
    """Return the family that the keywords of `register_family` describe. Raise where one is missing or of no use."""
    _require_usable(model_type, layout)
    fields: dict[str, Any] = {"block": "", "kind": "encoder", **layout}
    if not fields["block"]:
        raise FamilyError(f"register_family({model_type!r}): name the block's path, such as 'encoder.layer.*'")
    rotary, qk_norm = fields.pop("rotary", False), fields.pop("qk_norm", False)
    ffn_in, divisor = fields.pop("ffn_in", ()), fields.pop("divisor", lambda config: None)
    paths = (ffn_in,) if isinstance(ffn_in, str) else tuple(ffn_in)
    stack = Stack(**fields, ffn_in=tuple(path for path in paths if path))
    in_fused: tuple[str, ...] = stack.fused.roles if stack.fused else ()
    unnamed = [role for role in ("q", "k", "v") if not getattr(stack, role) and role not in in_fused]
    if unnamed:
        raise FamilyError(f"register_family({model_type!r}): no path for {', '.join(unnamed)}")
    paths_of = {role: path for role in ("q", "k", "v", "o") if isinstance(path := getattr(stack, role), str) and path}
    if len({*paths_of.values()}) < len(paths_of):
        raise FamilyError(f"register_family({model_type!r}): two of {', '.join(paths_of)} have the same path")
    if stack.fused and not stack.o:
        raise FamilyError(
            f"register_family({model_type!r}): no path for o, whose width tells the size of the heads that are fused"
        )
    meets = "rotary positions" if rotary else "a norm" if qk_norm else None
    normed = ("q", "k") if qk_norm else ()
    return Family((stack,), meets=lambda config: meets, normed=lambda config: normed, divisor=divisor)


def _require_usable(model_type: str, layout: StackLayout) -> None:
    """Raise for a keyword of `register_family` that is not of the type that it takes."""
    number = (str, Callable), "the name of a config field, or a function of the config such as lambda config: 4"
    path, truth = (str, "a path"), (bool, "True or False")
    takes: dict[str, tuple[Any, str]] = {
        **dict.fromkeys(("block", "q", "k", "v", "o", "ffn_out"), path),
        **dict.fromkeys(("rotary", "qk_norm"), truth),
        **dict.fromkeys(("layers", "heads", "kv_heads"), number),
        "ffn_in": ((str, tuple, list), "a path or several"),
        "fused": (Fused, "an oelm.Fused(path, layout=...)"),
        "divisor": (Callable, "a function of the config, such as lambda config: 1.0"),
    }
    for name, value in layout.items():
        unset = value is None and name in ("kv_heads", "fused")
        if name in takes and not unset and not isinstance(value, takes[name][0]):
            raise FamilyError(f"register_family({model_type!r}): {name} is {value!r}, not {takes[name][1]}")
    kinds = get_args(Kind)
    if layout.get("kind", kinds[0]) not in kinds:
        raise FamilyError(f"register_family({model_type!r}): kind is {layout['kind']!r}; use one of {', '.join(kinds)}")


def _stack(kind: Kind, block: str, attention: str, names: str, ffn: str = "", **fields: Any) -> Stack:
    """Return a stack, given the path of its attention and, below that, the names of Q, K, V and O.

    Two names are those of a fused projection (its rows in the order `layout`) and of O. `ffn` has the paths of the
    feed-forward matrices, ffn_out at the end.
    """
    *qkv, o = (f"{attention}.{name}" for name in names.split())
    if len(qkv) == 1:
        fields["fused"] = Fused(qkv[0], layout=fields.pop("layout", "blocks"))
    else:
        fields |= zip("qkv", qkv, strict=True)
    *ffn_in, ffn_out = ffn.split() or [""]
    return Stack(kind, block, o=o, ffn_in=tuple(ffn_in), ffn_out=ffn_out, **fields)


def _t5_stack(kind: Kind, side: str, attention: str, ffn: str = "") -> Stack:
    layers = "num_layers" if side == "encoder" else "num_decoder_layers"
    stack = _stack(kind, f"{side}.block.*", attention, "q k v o", layers=layers, heads="num_heads")
    if not ffn:
        return stack
    gated, plain = (f"{ffn}.wi_0", f"{ffn}.wi_1"), (f"{ffn}.wi",)
    return replace(stack, ffn_in=lambda config: gated if config.is_gated_act else plain, ffn_out=f"{ffn}.wo")


def _bart_stack(kind: Kind, side: str, attention: str, ffn: str = "") -> Stack:
    heads = f"{side}_attention_heads"
    return _stack(kind, f"{side}.layers.*", attention, _OUT_PROJ, ffn, layers=f"{side}_layers", heads=heads)


def _family(*stacks: Stack, **fields: Any) -> Family:
    return Family(stacks, **fields)


def _rotary(config: Config) -> str:
    return "rotary positions"


def _undivided(config: Config) -> float:
    return 1.0


def _gemma2_divisor(config: Config) -> float | None:
    scalar = config.query_pre_attn_scalar
    return None if scalar == config.head_dim else float(scalar**0.5)


def _has_cross_attention(config: Config) -> bool:
    return bool(config.add_cross_attention)


def _falcon_multi_query(config: Config) -> bool:
    return bool(config.multi_query and not config.new_decoder_architecture)


def _gpt_latent_roles(config: Config) -> dict[str, str]:
    down = {"down": "attn.down_proj"} if config.latent else {}
    channel = {"channel_q": "attn.channel.q_proj", "channel_k": "attn.channel.k_proj"} if config.channel else {}
    return down | channel


def _gpt_meets(config: Config) -> str | None:
    if config.positions == "rotary":
        return "rotary positions"
    if config.qk_norm != "none":
        return "a norm"
    return "a look at earlier tokens" if config.looks_back else None


# Names that several families share, or that are long.
_BERT_BLOCK, _BERT_FFN = "encoder.layer.*", "intermediate.dense output.dense"
_DEBERTA_NAMES = "self.query_proj self.key_proj self.value_proj output.dense"
_BERT_NAMES = "self.query self.key self.value output.dense"
_O_PROJ, _OUT_PROJ = "q_proj k_proj v_proj o_proj", "q_proj k_proj v_proj out_proj"
_NEOX_NAMES, _NEOX_FFN = "query_key_value dense", "mlp.dense_h_to_4h mlp.dense_4h_to_h"
_LLAMA_FFN, _LLAMA_KV_HEADS = "mlp.gate_proj mlp.up_proj mlp.down_proj", "num_key_value_heads"

_BERT = _family(
    _stack("encoder", _BERT_BLOCK, "attention", _BERT_NAMES, _BERT_FFN, present=lambda config: not config.is_decoder),
    _stack("decoder", _BERT_BLOCK, "attention", _BERT_NAMES, _BERT_FFN, present=lambda config: config.is_decoder),
    _stack("cross", _BERT_BLOCK, "crossattention", _BERT_NAMES, present=_has_cross_attention),
)
_LLAMA = _family(
    _stack("decoder", "layers.*", "self_attn", _O_PROJ, _LLAMA_FFN, kv_heads=_LLAMA_KV_HEADS), meets=_rotary
)
_QWEN3 = replace(_LLAMA, meets=lambda config: "a norm and rotary positions", normed=lambda config: ("q", "k"))
_VIT = _family(_stack("encoder", "layers.*", "attention", _O_PROJ, "mlp.fc1 mlp.fc2"))
_BART = _family(
    _bart_stack("encoder", "encoder", "self_attn", "fc1 fc2"),
    _bart_stack("decoder", "decoder", "self_attn", "fc1 fc2"),
    _bart_stack("cross", "decoder", "encoder_attn"),
)

# The model types that `register_family` was given in this process.
_REGISTERED: set[str] = set()

_FAMILIES: dict[str, Family] = {
    **dict.fromkeys(("bert", "roberta", "xlm-roberta", "camembert", "electra"), _BERT),
    "distilbert": _family(
        _stack(
            "encoder",
            "transformer.layer.*",
            "attention",
            "q_lin k_lin v_lin out_lin",
            "ffn.lin1 ffn.lin2",
            layers="n_layers",
        )
    ),
    "albert": _family(
        _stack(
            "encoder",
            "encoder.albert_layer_groups.*.albert_layers.*",
            "attention",
            "query key value dense",
            "ffn ffn_output",
            layers=lambda config: config.num_hidden_groups * config.inner_group_num,
        ),
        shared=True,
    ),
    "deberta-v2": _family(
        _stack("encoder", _BERT_BLOCK, "attention", _DEBERTA_NAMES, _BERT_FFN),
        meets=lambda config: "relative positions" if getattr(config, "relative_attention", False) else None,
    ),
    "mpnet": _family(_stack("encoder", _BERT_BLOCK, "attention.attn", "q k v o", _BERT_FFN)),
    "modernbert": _family(_stack("encoder", "layers.*", "attn", "Wqkv Wo", "mlp.Wi mlp.Wo"), meets=_rotary),
    **dict.fromkeys(("vit", "deit"), _VIT),
    "gpt2": _family(
        _stack("decoder", "h.*", "attn", "c_attn c_proj", "mlp.c_fc mlp.c_proj"),
        Stack(
            "cross",
            "h.*",
            q="crossattention.q_attn",
            fused=Fused("crossattention.c_attn", roles=("k", "v")),
            o="crossattention.c_proj",
            present=_has_cross_attention,
        ),
        divisor=lambda config: None if config.scale_attn_weights else 1.0,
    ),
    "opt": _family(_stack("decoder", "decoder.layers.*", "self_attn", _OUT_PROJ, "fc1 fc2")),
    "gpt_neox": _family(
        _stack("decoder", "layers.*", "attention", _NEOX_NAMES, _NEOX_FFN, layout="groups"), meets=_rotary
    ),
    "gpt_neo": _family(
        _stack("decoder", "h.*", "attn.attention", _OUT_PROJ, "mlp.c_fc mlp.c_proj"), divisor=_undivided
    ),
    "gptj": _family(_stack("decoder", "h.*", "attn", _OUT_PROJ, "mlp.fc_in mlp.fc_out"), meets=_rotary),
    **dict.fromkeys(("llama", "mistral", "qwen2", "gemma"), _LLAMA),
    "gemma2": replace(_LLAMA, divisor=_gemma2_divisor),
    # The norm sets the length of Gemma 3's queries, so its divisor is nothing that Q's matrix could carry.
    **dict.fromkeys(("qwen3", "gemma3_text"), _QWEN3),
    # One norm covers all heads together: their lengths relative to each other stay.
    "olmo2": replace(_QWEN3, per_head=False),
    "starcoder2": _family(
        _stack("decoder", "layers.*", "self_attn", _O_PROJ, "mlp.c_fc mlp.c_proj", kv_heads=_LLAMA_KV_HEADS),
        meets=_rotary,
    ),
    # The matrices of its experts are slices of two parameters, not modules, and so no method can name them.
    "mixtral": _family(_stack("decoder", "layers.*", "self_attn", _O_PROJ, kv_heads=_LLAMA_KV_HEADS), meets=_rotary),
    "phi3": _family(
        _stack(
            "decoder",
            "layers.*",
            "self_attn",
            "qkv_proj o_proj",
            "mlp.gate_up_proj mlp.down_proj",
            kv_heads=_LLAMA_KV_HEADS,
        ),
        meets=_rotary,
    ),
    "falcon": _family(
        _stack(
            "decoder",
            "h.*",
            "self_attention",
            _NEOX_NAMES,
            _NEOX_FFN,
            layout=lambda config: "blocks" if _falcon_multi_query(config) else "groups",
            kv_heads=lambda config: 1 if _falcon_multi_query(config) else int(config.num_kv_heads),
        ),
        meets=lambda config: None if config.alibi else "rotary positions",
    ),
    "t5": _family(
        _t5_stack("encoder", "encoder", "layer.0.SelfAttention", "layer.1.DenseReluDense"),
        _t5_stack("decoder", "decoder", "layer.0.SelfAttention", "layer.2.DenseReluDense"),
        _t5_stack("cross", "decoder", "layer.1.EncDecAttention"),
        divisor=_undivided,
    ),
    **dict.fromkeys(("bart", "whisper"), _BART),
    "oelm_gpt": _family(
        Stack(
            "decoder",
            "h.*",
            q="attn.q_proj",
            k="attn.k_proj",
            v=lambda config: "attn.k_proj" if config.shared_kv else "attn.v_proj",
            o="attn.o_proj",
            ffn_in=lambda config: ("mlp.gate", "mlp.fc_in") if config.activation == "swiglu" else ("mlp.fc_in",),
            ffn_out="mlp.fc_out",
            kv_heads="num_key_value_heads",
            more=_gpt_latent_roles,
            channel=lambda config: int(config.channel),
        ),
        meets=_gpt_meets,
        normed=lambda config: {"none": (), "query": ("q",), "both": ("q", "k")}[config.qk_norm],
    ),
}
