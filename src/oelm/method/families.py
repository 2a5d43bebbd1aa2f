"""The table of model families: where Q, K, V, O and the feed-forward matrices live in each, and how they are fused.

An entry names paths below the model's base model (`bert`, `transformer`, `model`, or the model itself). `*` in a
block's path stands for any index. A user adds a family that is not here with `register_family`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal, TypedDict, Unpack

from ..errors import FamilyError, nearest
from .layout import Config, Family, FromConfig, Fused, Stack
from .spec import Kind


def family_of(model_type: str) -> Family:
    """Return the family of a model type. Raise, with the way to register one, where there is none."""
    if model_type not in _FAMILIES:
        raise FamilyError(
            f"unknown model_type {model_type!r}.{nearest(model_type, _FAMILIES)} Known: {', '.join(known_types())}. "
            "If it is built like one of these, register it with that one's family, for instance "
            "family=family_of('t5'), with family_of from oelm.method.families. Otherwise, if it has attention, say "
            "where its projections live, for instance:\n"
            f"  oelm.register_family({model_type!r}, block='encoder.layer.*', q='attention.self.query', "
            "k='attention.self.key', v='attention.self.value', o='attention.output.dense', "
            "ffn_in='intermediate.dense', ffn_out='output.dense')"
        )
    return _FAMILIES[model_type]


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


def register_family(
    model_type: str, *, family: Family | None = None, replace_existing: bool = False, **layout: Unpack[StackLayout]
) -> Family:
    """Teach oelm a model type, by its paths or by a whole `Family`, and return the family.

    The paths are keywords that describe one stack of blocks with separate or fused projections: see `StackLayout`.
    """
    unknown = [name for name in layout if name not in StackLayout.__annotations__]
    if unknown:
        raise TypeError(f"register_family() got an unexpected keyword argument {unknown[0]!r}")
    if model_type in _FAMILIES and not replace_existing:
        raise FamilyError(f"model_type {model_type!r} has a family already; pass replace_existing=True to change it")
    _FAMILIES[model_type] = family or _family_of_one_stack(model_type, layout)
    return _FAMILIES[model_type]


def _family_of_one_stack(model_type: str, layout: StackLayout) -> Family:
    """Return the family that the keywords of `register_family` describe. Raise where a path is missing."""
    fields: dict[str, Any] = {"block": "", "kind": "encoder", **layout}
    if not fields["block"]:
        raise FamilyError(f"register_family({model_type!r}): name the block's path, such as 'encoder.layer.*'")
    rotary, qk_norm = fields.pop("rotary", False), fields.pop("qk_norm", False)
    ffn_in = fields.pop("ffn_in", ())
    paths = (ffn_in,) if isinstance(ffn_in, str) else tuple(ffn_in)
    stack = Stack(**fields, ffn_in=tuple(path for path in paths if path))
    in_fused: tuple[str, ...] = stack.fused.roles if stack.fused else ()
    unnamed = [role for role in ("q", "k", "v") if not getattr(stack, role) and role not in in_fused]
    if unnamed:
        raise FamilyError(f"register_family({model_type!r}): no path for {', '.join(unnamed)}")
    meets = "rotary positions" if rotary else "a norm" if qk_norm else None
    return Family((stack,), meets=lambda config: meets, qk_norm=qk_norm)


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
    """Return a stack with BERT's names, which many families copied."""
    named: dict[str, Any] = {
        "q": f"{attention}.query",
        "k": f"{attention}.key",
        "v": f"{attention}.value",
        "o": f"{attention.removesuffix('.self')}.output.dense",
        "ffn_in": ("intermediate.dense",),
        "ffn_out": "output.dense",
    }
    return Stack(kind, "encoder.layer.*", **{**named, **paths})


def _projections(attention: str, o: str = "o_proj") -> dict[str, Any]:
    """Return the q_proj/k_proj/v_proj paths of most decoders."""
    return {"q": f"{attention}.q_proj", "k": f"{attention}.k_proj", "v": f"{attention}.v_proj", "o": f"{attention}.{o}"}


def _one_stack(kind: Kind, block: str, **fields: Any) -> Family:
    """Return a family of one stack: `meets`, `scales` and `shared` are the family's fields, all others the stack's."""
    of_family = {name: fields.pop(name) for name in ("meets", "scales", "shared") if name in fields}
    return Family((Stack(kind, block, **fields),), **of_family)


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
_DISTILBERT = _one_stack(
    "encoder",
    "transformer.layer.*",
    layers="n_layers",
    q="attention.q_lin",
    k="attention.k_lin",
    v="attention.v_lin",
    o="attention.out_lin",
    ffn_in=("ffn.lin1",),
    ffn_out="ffn.lin2",
)
_ALBERT = _one_stack(
    "encoder",
    "encoder.albert_layer_groups.*.albert_layers.*",
    layers=lambda config: config.num_hidden_groups * config.inner_group_num,
    q="attention.query",
    k="attention.key",
    v="attention.value",
    o="attention.dense",
    ffn_in=("ffn",),
    ffn_out="ffn_output",
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
_MODERNBERT = _one_stack(
    "encoder",
    "layers.*",
    fused=Fused("attn.Wqkv"),
    o="attn.Wo",
    ffn_in=("mlp.Wi",),
    ffn_out="mlp.Wo",
    meets=_rotary,
)
_VIT = _one_stack("encoder", "layers.*", **_projections("attention"), ffn_in=("mlp.fc1",), ffn_out="mlp.fc2")
_GPT2 = Family(
    (
        Stack(
            "decoder",
            "h.*",
            fused=Fused("attn.c_attn"),
            o="attn.c_proj",
            ffn_in=("mlp.c_fc",),
            ffn_out="mlp.c_proj",
        ),
        Stack(
            "cross",
            "h.*",
            q="crossattention.q_attn",
            fused=Fused("crossattention.c_attn", roles=("k", "v")),
            o="crossattention.c_proj",
            present=lambda config: config.add_cross_attention,
        ),
    ),
    scales=lambda config: config.scale_attn_weights,
)
_OPT = _one_stack(
    "decoder", "decoder.layers.*", **_projections("self_attn", o="out_proj"), ffn_in=("fc1",), ffn_out="fc2"
)
_GPT_NEOX = _one_stack(
    "decoder",
    "layers.*",
    fused=Fused("attention.query_key_value", layout="groups"),
    o="attention.dense",
    ffn_in=("mlp.dense_h_to_4h",),
    ffn_out="mlp.dense_4h_to_h",
    meets=_rotary,
)
_GPTJ = _one_stack(
    "decoder",
    "h.*",
    **_projections("attn", o="out_proj"),
    ffn_in=("mlp.fc_in",),
    ffn_out="mlp.fc_out",
    meets=_rotary,
)
_LLAMA = _one_stack(
    "decoder",
    "layers.*",
    **_projections("self_attn"),
    ffn_in=("mlp.gate_proj", "mlp.up_proj"),
    ffn_out="mlp.down_proj",
    kv_heads="num_key_value_heads",
    meets=_rotary,
)
_PHI3 = _one_stack(
    "decoder",
    "layers.*",
    fused=Fused("self_attn.qkv_proj"),
    o="self_attn.o_proj",
    ffn_in=("mlp.gate_up_proj",),
    ffn_out="mlp.down_proj",
    kv_heads="num_key_value_heads",
    meets=_rotary,
)
_FALCON = _one_stack(
    "decoder",
    "h.*",
    fused=Fused("self_attention.query_key_value", layout=_falcon_layout),
    o="self_attention.dense",
    ffn_in=("mlp.dense_h_to_4h",),
    ffn_out="mlp.dense_4h_to_h",
    kv_heads=_falcon_kv_heads,
    meets=lambda config: None if config.alibi else "rotary positions",
)
_OELM_GPT = _one_stack(
    "decoder",
    "h.*",
    **_projections("attn"),
    ffn_in=("mlp.fc_in",),
    ffn_out="mlp.fc_out",
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
        layers="num_layers" if side == "encoder" else "num_decoder_layers",
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
        layers=f"{side}_layers",
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
