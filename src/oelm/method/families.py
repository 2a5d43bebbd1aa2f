"""Where Q, K, V, O and the feed-forward matrices live in each model family, and how they are fused: data.

An entry names paths below the model's base model (`bert`, `transformer`, `model`, or the model itself). `*` in a
block's path stands for any index. A family that is not here can be added by its user: see `register_family`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

from ..errors import FamilyError, nearest
from .spec import Kind

Config = Any  # a transformers config: every family has its own class
# A value of the config: its attribute's name, or a function of the config.
FromConfig = str | Callable[[Config], Any]


@dataclass(frozen=True)
class Fused:
    """One Linear or Conv1D that holds several projections.

    `layout` is the order of its output rows: "blocks" for all of Q, all of K, all of V; "groups" for the queries of
    one key-value head, its key, its value, then the next (with as many key-value heads as heads: per head q, k, v).
    """

    path: str
    roles: tuple[Literal["q", "k", "v"], ...] = ("q", "k", "v")
    layout: Literal["blocks", "groups"] | Callable[[Config], Literal["blocks", "groups"]] = "blocks"


@dataclass(frozen=True)
class Stack:
    """A run of blocks that each hold one attention of one kind. All paths but `block` are below the block.

    Where a block holds a second attention (cross-attention), its feed-forward layer is named in one of the two stacks.
    """

    kind: Kind
    block: str
    layers: FromConfig
    q: str = ""
    k: str = ""
    v: str = ""
    o: str = ""
    fused: Fused | None = None
    ffn_in: tuple[str, ...] | Callable[[Config], tuple[str, ...]] = ()
    ffn_out: str = ""
    heads: FromConfig = "num_attention_heads"
    kv_heads: FromConfig | None = None
    present: Callable[[Config], bool] = lambda config: True


@dataclass(frozen=True)
class Family:
    """A layout shared by one or more model types.

    meets        what Q and K meet besides each other (rotary positions, a norm, relative positions), if anything:
                 a core then goes on each side instead of between them
    qk_norm      Q and K are normalised after their projections, which cancels any scale
    scales       the attention divides its scores by sqrt(d_head) itself; where it does not, Q's matrix carries that
    shared       one block serves all layers, so there are no layers to choose from
    """

    stacks: tuple[Stack, ...]
    meets: Callable[[Config], str | None] = lambda config: None
    qk_norm: bool = False
    scales: Callable[[Config], bool] = lambda config: True
    shared: bool = False


def family_of(model_type: str) -> Family:
    """The family of a model type, or an error that says how to register one."""
    if model_type not in _FAMILIES:
        raise FamilyError(
            f"unknown model_type {model_type!r}.{nearest(model_type, _FAMILIES)} Known: {', '.join(known_types())}. "
            "If it is built like one of these, register it with family=family_of('t5'), from oelm.families, or that "
            "one's name. Else, if it has attention, say where its projections live, for instance:\n"
            f"  oelm.register_family({model_type!r}, block='encoder.layer.*', q='attention.self.query', "
            "k='attention.self.key', v='attention.self.value', o='attention.output.dense', "
            "ffn_in='intermediate.dense', ffn_out='output.dense')"
        )
    return _FAMILIES[model_type]


def known_types() -> list[str]:
    """Every model type that has a family, in order."""
    return sorted(_FAMILIES)


def register_family(
    model_type: str,
    *,
    block: str = "",
    q: str = "",
    k: str = "",
    v: str = "",
    o: str = "",
    ffn_in: str | tuple[str, ...] = (),
    ffn_out: str = "",
    fused: Fused | None = None,
    kind: Kind = "encoder",
    layers: FromConfig = "num_hidden_layers",
    heads: FromConfig = "num_attention_heads",
    kv_heads: FromConfig | None = None,
    rotary: bool = False,
    qk_norm: bool = False,
    family: Family | None = None,
    replace_existing: bool = False,
) -> Family:
    """Teach oelm a model type: by its paths (one stack of separate or fused projections), or by a whole `Family`."""
    if model_type in _FAMILIES and not replace_existing:
        raise FamilyError(f"model_type {model_type!r} has a family already; pass replace_existing=True to change it")
    if family is None:
        if not block:
            raise FamilyError(f"register_family({model_type!r}): name the block's path, such as 'encoder.layer.*'")
        separate = {"q": q, "k": k, "v": v}
        in_fused: tuple[str, ...] = fused.roles if fused else ()
        unnamed = [role for role, path in separate.items() if not path and role not in in_fused]
        if unnamed:
            raise FamilyError(f"register_family({model_type!r}): no path for {', '.join(unnamed)}")
        ffn = (ffn_in,) if isinstance(ffn_in, str) else tuple(ffn_in)
        stack = Stack(
            kind, block, layers, q, k, v, o, fused, tuple(path for path in ffn if path), ffn_out, heads, kv_heads
        )
        met = "rotary positions" if rotary else "a norm" if qk_norm else None
        family = Family((stack,), meets=lambda config: met, qk_norm=qk_norm)
    _FAMILIES[model_type] = family
    return family


def read(config: Config, source: FromConfig) -> Any:
    """A value of the config, by attribute name or function; an error that names the field if it is not there."""
    if not isinstance(source, str):
        return source(config)
    value = getattr(config, source, None)
    if value is None:
        raise FamilyError(f"the config of model_type {config.model_type!r} has no field {source!r}")
    return value


def _rotary(config: Config) -> str | None:
    return "rotary positions"


def _deberta_meets(config: Config) -> str | None:
    return "relative positions" if getattr(config, "relative_attention", False) else None


def _falcon_kv_heads(config: Config) -> int:
    if config.new_decoder_architecture or not config.multi_query:
        return int(config.num_kv_heads)
    return 1


def _falcon_layout(config: Config) -> Literal["blocks", "groups"]:
    return "blocks" if config.multi_query and not config.new_decoder_architecture else "groups"


def _bert_stack(kind: Kind, attention: str, **paths: Any) -> Stack:
    """The BERT-like block: names that many families copied."""
    named: dict[str, Any] = {
        "q": f"{attention}.query",
        "k": f"{attention}.key",
        "v": f"{attention}.value",
        "o": f"{attention.removesuffix('.self')}.output.dense",
        "ffn_in": ("intermediate.dense",),
        "ffn_out": "output.dense",
    }
    return Stack(kind, "encoder.layer.*", "num_hidden_layers", **{**named, **paths})


def _projections(attention: str, o: str = "o_proj") -> dict[str, Any]:
    """The q_proj/k_proj/v_proj names of most decoders."""
    return {"q": f"{attention}.q_proj", "k": f"{attention}.k_proj", "v": f"{attention}.v_proj", "o": f"{attention}.{o}"}


_BERT = Family(
    (
        _bert_stack("encoder", "attention.self", present=lambda config: not config.is_decoder),
        _bert_stack("decoder", "attention.self", present=lambda config: config.is_decoder),
        _bert_stack(
            "cross",
            "crossattention.self",
            ffn_in=(),
            ffn_out="",
            present=lambda config: config.add_cross_attention,
        ),
    )
)
_DISTILBERT = Family(
    (
        Stack(
            "encoder",
            "transformer.layer.*",
            "n_layers",
            q="attention.q_lin",
            k="attention.k_lin",
            v="attention.v_lin",
            o="attention.out_lin",
            ffn_in=("ffn.lin1",),
            ffn_out="ffn.lin2",
        ),
    )
)
_ALBERT = Family(
    (
        Stack(
            "encoder",
            "encoder.albert_layer_groups.*.albert_layers.*",
            lambda config: config.num_hidden_groups * config.inner_group_num,
            q="attention.query",
            k="attention.key",
            v="attention.value",
            o="attention.dense",
            ffn_in=("ffn",),
            ffn_out="ffn_output",
        ),
    ),
    shared=True,
)
_DEBERTA_V2 = Family(
    (
        _bert_stack(
            "encoder",
            "attention.self",
            q="attention.self.query_proj",
            k="attention.self.key_proj",
            v="attention.self.value_proj",
        ),
    ),
    meets=_deberta_meets,
)
_MPNET = Family(
    (
        _bert_stack(
            "encoder",
            "attention.attn",
            q="attention.attn.q",
            k="attention.attn.k",
            v="attention.attn.v",
            o="attention.attn.o",
        ),
    )
)
_MODERNBERT = Family(
    (
        Stack(
            "encoder",
            "layers.*",
            "num_hidden_layers",
            fused=Fused("attn.Wqkv"),
            o="attn.Wo",
            ffn_in=("mlp.Wi",),
            ffn_out="mlp.Wo",
        ),
    ),
    meets=_rotary,
)
_VIT = Family(
    (
        Stack(
            "encoder",
            "layers.*",
            "num_hidden_layers",
            **_projections("attention"),
            ffn_in=("mlp.fc1",),
            ffn_out="mlp.fc2",
        ),
    )
)
_GPT2 = Family(
    (
        Stack(
            "decoder",
            "h.*",
            "num_hidden_layers",
            fused=Fused("attn.c_attn"),
            o="attn.c_proj",
            ffn_in=("mlp.c_fc",),
            ffn_out="mlp.c_proj",
        ),
        Stack(
            "cross",
            "h.*",
            "num_hidden_layers",
            q="crossattention.q_attn",
            fused=Fused("crossattention.c_attn", roles=("k", "v")),
            o="crossattention.c_proj",
            present=lambda config: config.add_cross_attention,
        ),
    ),
    scales=lambda config: config.scale_attn_weights,
)
_OPT = Family(
    (
        Stack(
            "decoder",
            "decoder.layers.*",
            "num_hidden_layers",
            **_projections("self_attn", o="out_proj"),
            ffn_in=("fc1",),
            ffn_out="fc2",
        ),
    )
)
_GPT_NEOX = Family(
    (
        Stack(
            "decoder",
            "layers.*",
            "num_hidden_layers",
            fused=Fused("attention.query_key_value", layout="groups"),
            o="attention.dense",
            ffn_in=("mlp.dense_h_to_4h",),
            ffn_out="mlp.dense_4h_to_h",
        ),
    ),
    meets=_rotary,
)
_GPTJ = Family(
    (
        Stack(
            "decoder",
            "h.*",
            "num_hidden_layers",
            **_projections("attn", o="out_proj"),
            ffn_in=("mlp.fc_in",),
            ffn_out="mlp.fc_out",
        ),
    ),
    meets=_rotary,
)
_LLAMA = Family(
    (
        Stack(
            "decoder",
            "layers.*",
            "num_hidden_layers",
            **_projections("self_attn"),
            ffn_in=("mlp.gate_proj", "mlp.up_proj"),
            ffn_out="mlp.down_proj",
            kv_heads="num_key_value_heads",
        ),
    ),
    meets=_rotary,
)
_PHI3 = Family(
    (
        Stack(
            "decoder",
            "layers.*",
            "num_hidden_layers",
            fused=Fused("self_attn.qkv_proj"),
            o="self_attn.o_proj",
            ffn_in=("mlp.gate_up_proj",),
            ffn_out="mlp.down_proj",
            kv_heads="num_key_value_heads",
        ),
    ),
    meets=_rotary,
)
_FALCON = Family(
    (
        Stack(
            "decoder",
            "h.*",
            "num_hidden_layers",
            fused=Fused("self_attention.query_key_value", layout=_falcon_layout),
            o="self_attention.dense",
            ffn_in=("mlp.dense_h_to_4h",),
            ffn_out="mlp.dense_4h_to_h",
            kv_heads=_falcon_kv_heads,
        ),
    ),
    meets=lambda config: None if config.alibi else "rotary positions",
)
_OELM_GPT = Family(
    (
        Stack(
            "decoder",
            "h.*",
            "num_hidden_layers",
            **_projections("attn"),
            ffn_in=("mlp.fc_in",),
            ffn_out="mlp.fc_out",
        ),
    ),
    meets=lambda config: "rotary positions" if config.positions == "rotary" else None,
)


def _t5_stack(kind: Kind, side: str, attention: str, ffn: str = "") -> Stack:
    def ffn_in(config: Config) -> tuple[str, ...]:
        if not ffn:
            return ()
        return (f"{ffn}.wi_0", f"{ffn}.wi_1") if config.is_gated_act else (f"{ffn}.wi",)

    return Stack(
        kind,
        f"{side}.block.*",
        "num_layers" if side == "encoder" else "num_decoder_layers",
        q=f"{attention}.q",
        k=f"{attention}.k",
        v=f"{attention}.v",
        o=f"{attention}.o",
        ffn_in=ffn_in,
        ffn_out=f"{ffn}.wo" if ffn else "",
        heads="num_heads",
    )


_T5 = Family(
    (
        _t5_stack("encoder", "encoder", "layer.0.SelfAttention", "layer.1.DenseReluDense"),
        _t5_stack("decoder", "decoder", "layer.0.SelfAttention", "layer.2.DenseReluDense"),
        _t5_stack("cross", "decoder", "layer.1.EncDecAttention"),
    ),
    scales=lambda config: False,
)


def _bart_stack(kind: Kind, side: str, attention: str) -> Stack:
    return Stack(
        kind,
        f"{side}.layers.*",
        f"{side}_layers",
        **_projections(attention, o="out_proj"),
        ffn_in=("fc1",) if kind == side else (),
        ffn_out="fc2" if kind == side else "",
        heads=f"{side}_attention_heads",
    )


_BART = Family(
    (
        _bart_stack("encoder", "encoder", "self_attn"),
        _bart_stack("decoder", "decoder", "self_attn"),
        _bart_stack("cross", "decoder", "encoder_attn"),
    )
)

_FAMILIES: dict[str, Family] = {
    "bert": _BERT,
    "roberta": _BERT,
    "xlm-roberta": _BERT,
    "camembert": _BERT,
    "electra": _BERT,
    "distilbert": _DISTILBERT,
    "albert": _ALBERT,
    "deberta-v2": _DEBERTA_V2,
    "mpnet": _MPNET,
    "modernbert": _MODERNBERT,
    "vit": _VIT,
    "gpt2": _GPT2,
    "opt": _OPT,
    "gpt_neox": _GPT_NEOX,
    "gptj": _GPTJ,
    "llama": _LLAMA,
    "mistral": _LLAMA,
    "qwen2": _LLAMA,
    "qwen3": replace(_LLAMA, meets=lambda config: "a norm and rotary positions", qk_norm=True),
    "gemma": _LLAMA,
    "phi3": _PHI3,
    "falcon": _FALCON,
    "t5": _T5,
    "bart": _BART,
    "oelm_gpt": _OELM_GPT,
}
