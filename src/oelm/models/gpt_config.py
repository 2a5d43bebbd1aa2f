"""Sizes and settings of the project's GPT: the study's, a modern one, and forms of attention for both."""

from __future__ import annotations

from types import MappingProxyType
from typing import Any

from transformers.configuration_utils import PreTrainedConfig

from ..errors import OelmError, nearest

D_HEAD = 64
# name -> (width, layers); heads have 64 dimensions.
SIZES: MappingProxyType[str, tuple[int, int]] = MappingProxyType(
    {"tiny": (256, 4), "small": (384, 6), "medium-512": (512, 6), "medium": (768, 12), "large": (1024, 24)}
)
# `gpt:modern-SIZE` is this GPT: a Llama when it is exported, with the width and the layers of the size.
MODERN_PREFIX = "modern-"
MODERN: MappingProxyType[str, Any] = MappingProxyType(
    {"positions": "rotary", "norm": "rms", "activation": "swiglu", "biases": False, "initializer": "fan-in"}
)

# field: its possible values
_CHOICES: dict[str, tuple[Any, ...]] = {
    "positions": ("learned", "rotary", "none"),
    "norm": ("layer", "rms"),
    "activation": ("gelu", "relu2", "swiglu"),
    "initializer": ("fixed", "fan-in"),
    "qk_norm": ("none", "query", "both"),
    "scores": ("softmax", "linear"),
    "cache": ("auto", "states", "keys"),
    "biases": (True, False),
    "shared_kv": (True, False),
    "orthogonal_key": (True, False),
    "offset_across_documents": (True, False),
}
_COUNTS = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "max_position_embeddings")
# Counts that follow from others where they are None.
_DERIVED_COUNTS = ("num_key_value_heads", "intermediate_size", "key_dim")
# SwiGLU has three matrices where the others have two, so it is narrower: 8/3 of the width, rounded up to 64.
_SWIGLU_WIDTH, _SWIGLU_MULTIPLE = 8 / 3, 64


class OelmGPTConfig(PreTrainedConfig):  # type: ignore[misc]
    """Sizes and settings of the GPT. Every default is the study's.

    positions               learned, rotary (every head's query and key are rotated) or none
    norm, activation        layer or rms; gelu, relu2 (the square of a ReLU) or swiglu
    biases                  whether the feed-forward layer and the LayerNorms have biases; attention has none
    initializer             fixed: every matrix N(0, initializer_range²); fan-in: N(0, 1/columns). Embeddings are fixed
    qk_norm                 an RMSNorm on each head's query and key (both), on the query alone, or none
    num_key_value_heads     fewer than the heads: grouped-query attention; 1: multi-query attention
    key_dim                 dimensions of a head's query and key, where they differ from the value's (thin keys)
    shared_kv               the value is the key before its rotation: one matrix, and one cache, for both
    orthogonal_key          the key's square matrix is kept orthogonal while it trains
    latent                  keys and values are read from a latent of this width, which is cached: 0 for none
    channel                 dimensions of a rotary channel beside the content: one key part that all heads share
    key_offset              the share of each head's key dimensions that is taken from the token before
    offset_across_documents also take them from the token before where positions start again
    convolution             the width of a causal depthwise convolution on queries and keys: 0 for none
    scores                  softmax; linear: elu + 1 of queries and keys, without a softmax, as a control
    cache                   states: cache the hidden state, from which key and value follow; keys: cache the key alone
                            (K = V or an orthogonal key); auto: whatever the form allows without extra work
    """

    model_type = "oelm_gpt"
    keys_to_ignore_at_inference = ["past_key_values"]  # must be a list: transformers' Trainer appends to it

    vocab_size: int = 50257
    hidden_size: int = 512
    num_hidden_layers: int = 6
    num_attention_heads: int = 8
    num_key_value_heads: int | None = None
    intermediate_size: int | None = None
    max_position_embeddings: int = 512
    positions: str = "learned"
    rope_theta: float = 10000.0
    norm: str = "layer"
    activation: str = "gelu"
    biases: bool = True
    initializer: str = "fixed"
    qk_norm: str = "none"
    key_dim: int | None = None
    shared_kv: bool = False
    orthogonal_key: bool = False
    latent: int = 0
    channel: int = 0
    key_offset: float = 0.0
    offset_across_documents: bool = False
    convolution: int = 0
    scores: str = "softmax"
    cache: str = "auto"
    dropout: float = 0.0
    layer_norm_eps: float = 1e-5
    initializer_range: float = 0.02
    use_cache: bool = True
    tie_word_embeddings: bool = True
    pad_token_id: int | None = None
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        self._check_values()
        if self.hidden_size % self.num_attention_heads:
            raise OelmError(f"hidden_size {self.hidden_size} is not a multiple of {self.num_attention_heads} heads")
        if self.intermediate_size is None:
            self.intermediate_size = _default_intermediate_size(self.activation, self.hidden_size)
        if self.num_key_value_heads is None:
            self.num_key_value_heads = self.num_attention_heads
        if self.key_dim is None:
            self.key_dim = self.head_dim
        check_attention(self)
        if self.looks_back:
            # transformers then builds cache layers that also hold the last tokens' unshifted queries and keys.
            kwargs.setdefault("layer_types", ["hybrid"] * self.num_hidden_layers)
        super().__post_init__(**kwargs)

    @property
    def head_dim(self) -> int:
        """Return the dimensions of a head's value."""
        return self.hidden_size // self.num_attention_heads

    @property
    def looks_back(self) -> bool:
        """Return True when a token's query or key depends on the tokens before it."""
        return bool(self.key_offset or self.convolution)

    def _check_values(self) -> None:
        for name in (*_COUNTS, *(name for name in _DERIVED_COUNTS if getattr(self, name) is not None)):
            value = getattr(self, name)
            if type(value) is not int or value < 1:
                raise OelmError(f"{name} {value!r}: must be a whole number above 0")
        for name in ("latent", "channel", "convolution"):
            value = getattr(self, name)
            if type(value) is not int or value < 0:
                raise OelmError(f"{name} {value!r}: must be a whole number, 0 for none")
        for name in ("rope_theta", "layer_norm_eps", "initializer_range"):
            value = getattr(self, name)
            if not isinstance(value, int | float) or not value > 0:
                raise OelmError(f"{name} {value!r}: must be a number above 0")
        if not isinstance(self.dropout, int | float) or not 0 <= self.dropout < 1:
            raise OelmError(f"dropout {self.dropout!r}: must be a number from 0 to below 1")
        for name, choices in _CHOICES.items():
            if getattr(self, name) not in choices:
                raise OelmError(f"{name} {getattr(self, name)!r}: use {' or '.join(map(repr, choices))}")


def check_attention(config: OelmGPTConfig) -> None:
    """Raise where the fields of an attention do not fit together; the message names the fields and their values."""
    assert config.num_key_value_heads is not None
    assert config.key_dim is not None
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    if heads % kv_heads:
        raise OelmError(f"num_key_value_heads {kv_heads} does not divide the {heads} heads")
    if config.positions == "rotary" and config.key_dim % 2:
        raise OelmError(f"rotary positions need an even head dimension, not {config.key_dim}")
    if config.channel % 2:
        raise OelmError(f"channel {config.channel}: a rotation turns pairs of dimensions, so it must be even")
    if config.channel and config.positions == "rotary":
        raise OelmError(
            "positions 'rotary' rotates the content, and a channel carries the positions beside content that is not "
            "rotated: set positions to 'none' (or 'learned') with a channel"
        )
    _check_lookback(config)
    _check_key_forms(config)
    if config.scores == "linear":
        _check_linear(config)
    if config.latent:
        _check_latent(config)


def _check_lookback(config: OelmGPTConfig) -> None:
    offset = config.key_offset
    if not isinstance(offset, int | float) or not 0 <= offset < 1:
        raise OelmError(f"key_offset {offset!r}: must be a share from 0 to below 1")
    assert config.key_dim is not None
    if offset and (config.key_dim % 2 or not (offset * config.key_dim / 2).is_integer()):
        raise OelmError(
            f"key_offset {offset:g} of {config.key_dim} dimensions is not a whole number of pairs: a head's dimensions "
            "move in pairs, as they are rotated"
        )
    if config.convolution == 1:
        raise OelmError("convolution 1 sees no other token: use a width from 2, or 0 for none")
    if offset and config.convolution:
        raise OelmError("a convolution can learn the key offset itself: set one of key_offset and convolution")
    if config.offset_across_documents and not config.looks_back:
        raise OelmError("offset_across_documents needs key_offset or convolution: without them no token looks back")


def _check_key_forms(config: OelmGPTConfig) -> None:
    """Raise where K = V, an orthogonal key or a cache of one tensor does not go with another field."""
    one_matrix = config.shared_kv or config.orthogonal_key
    if config.shared_kv and config.key_dim != config.head_dim:
        raise OelmError(f"shared_kv needs keys as wide as values, not key_dim {config.key_dim} and {config.head_dim}")
    if config.shared_kv and config.qk_norm == "both":
        raise OelmError("shared_kv with qk_norm 'both': the value would be the key without its norm; use 'query'")
    square = config.num_key_value_heads == config.num_attention_heads and config.key_dim == config.head_dim
    if config.orthogonal_key and (not square or config.shared_kv):
        raise OelmError("orthogonal_key needs a square key matrix beside a value of its own: no grouped or thin keys")
    if config.cache == "auto":
        return
    if config.cache == "keys" and not square and not config.shared_kv:
        raise OelmError("cache 'keys' needs K = V, or a key as wide as the model that has an orthogonal matrix")
    if config.cache == "keys" and (config.channel or config.latent):
        field = "channel" if config.channel else "latent"
        raise OelmError(f"cache 'keys' has no room for a {field}, which is cached by itself: use cache 'auto'")
    if config.qk_norm == "both" or config.looks_back:
        field = "qk_norm 'both'" if config.qk_norm == "both" else "a key offset or convolution"
        raise OelmError(f"cache {config.cache!r}: with {field} the key is not a matrix times one token's state")
    if config.cache == "states" and config.positions == "rotary":
        raise OelmError("cache 'states': a rotated key does not follow from a state alone; use a channel instead")
    if config.cache == "states" and (not square or one_matrix or config.latent):
        raise OelmError(
            "cache 'states' halves the cache of an ordinary key: grouped, thin, shared and latent keys have less to "
            "store already"
        )


def _check_linear(config: OelmGPTConfig) -> None:
    for name, plain in (("latent", 0), ("channel", 0), ("cache", "auto")):
        value = getattr(config, name)
        if value != plain:
            raise OelmError(
                f"scores 'linear' with {name} {value!r}: it reads keys and values as they are; use {plain!r}"
            )


def _check_latent(config: OelmGPTConfig) -> None:
    if config.latent > config.hidden_size:
        raise OelmError(f"latent {config.latent} is wider than the model's hidden_size {config.hidden_size}")
    if config.positions == "rotary":
        raise OelmError(
            "latent with positions 'rotary': a rotated key does not follow from the latent; give it a channel, "
            "such as 32, which carries the positions, or set positions to 'learned' or 'none'"
        )
    if config.qk_norm == "both":
        raise OelmError("latent with qk_norm 'both': keys with a norm do not follow linearly from it; use 'query'")
    if config.num_key_value_heads != config.num_attention_heads:
        raise OelmError(f"latent with num_key_value_heads {config.num_key_value_heads}: all heads share the latent")
    for name in ("shared_kv", "orthogonal_key", "key_offset", "convolution"):
        if getattr(config, name):
            raise OelmError(f"latent with {name} {getattr(config, name)!r}: only multi-head attention has it")


def gpt_config(size: str, **changes: Any) -> OelmGPTConfig:
    """Return the config of a named size; `changes` override its fields (vocab_size, dropout, positions, ...).

    A size is that of the study's GPT (`medium-512`) or of the modern one (`modern-medium-512`).
    """
    modern, plain_size = size.startswith(MODERN_PREFIX), size.removeprefix(MODERN_PREFIX)
    if plain_size not in SIZES:
        listed = f"{', '.join(SIZES)}, each also as {MODERN_PREFIX}SIZE"
        raise OelmError(f"no GPT size {size!r}.{nearest(plain_size, SIZES)} Sizes: {listed}")
    width, layers = SIZES[plain_size]
    sizes = {"hidden_size": width, "num_hidden_layers": layers, "num_attention_heads": width // D_HEAD}
    fields = {**sizes, **(MODERN if modern else {}), **changes}
    if modern and "positions" not in changes and fields.get("channel"):
        fields["positions"] = "none"  # the channel carries the positions
    # transformers accepts any keyword, so a mistyped field would silently change nothing.
    known_fields = set(OelmGPTConfig().to_dict())
    for name in fields:
        if name not in known_fields:
            listed = ", ".join(OelmGPTConfig.__annotations__)
            raise OelmError(f"GPT config: unknown field {name!r}.{nearest(name, known_fields)} Fields: {listed}")
    return OelmGPTConfig(**fields)


def _default_intermediate_size(activation: str, width: int) -> int:
    if activation != "swiglu":
        return 4 * width
    return -int(-(_SWIGLU_WIDTH * width) // _SWIGLU_MULTIPLE) * _SWIGLU_MULTIPLE
