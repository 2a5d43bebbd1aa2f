"""The project's GPT: bias-free attention with separate Q, K, V and O, pre-LayerNorm, a GELU FFN, a tied head.

A transformers model like any other: `generate`, `save_pretrained`, pipelines and evaluation harnesses work on it.
"""

from __future__ import annotations

import math
from types import MappingProxyType
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoModelForSequenceClassification
from transformers import initialization as hf_init
from transformers.cache_utils import Cache, DynamicCache
from transformers.configuration_utils import PreTrainedConfig
from transformers.generation import GenerationMixin
from transformers.masking_utils import create_causal_mask
from transformers.modeling_layers import GenericForSequenceClassification, GradientCheckpointingLayer
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, PreTrainedModel
from transformers.utils.generic import can_return_tuple
from transformers.utils.output_capturing import capture_outputs

from ..errors import OelmError, nearest
from ..method.apply import install
from ..method.projections import IdentityProjection
from ..method.seal import read_record
from ..method.spec import Method
from .attention.states import fuses, masked, mix, mix_fused

D_HEAD = 64
# name -> (width, layers); heads have 64 dimensions and the feed-forward layer is four times as wide.
SIZES: MappingProxyType[str, tuple[int, int]] = MappingProxyType(
    {"tiny": (256, 4), "small": (384, 6), "medium-512": (512, 6), "medium": (768, 12), "large": (1024, 24)}
)

_COUNTS = (
    "vocab_size",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "intermediate_size",
    "max_position_embeddings",
)


class OelmGPTConfig(PreTrainedConfig):  # type: ignore[misc]
    """Sizes and choices of the GPT. `positions` is "learned" or "rotary"."""

    model_type = "oelm_gpt"
    keys_to_ignore_at_inference = ["past_key_values"]  # a list: Trainer adds one to it

    vocab_size: int = 50257
    hidden_size: int = 512
    num_hidden_layers: int = 6
    num_attention_heads: int = 8
    intermediate_size: int | None = None
    max_position_embeddings: int = 512
    positions: str = "learned"
    rope_theta: float = 10000.0
    dropout: float = 0.0
    layer_norm_eps: float = 1e-5
    initializer_range: float = 0.02
    use_cache: bool = True
    tie_word_embeddings: bool = True
    pad_token_id: int | None = None
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        if self.intermediate_size is None:
            self.intermediate_size = 4 * self.hidden_size
        self._check_numbers()
        if self.hidden_size % self.num_attention_heads:
            raise OelmError(f"hidden_size {self.hidden_size} is not a multiple of {self.num_attention_heads} heads")
        if self.positions not in ("learned", "rotary"):
            raise OelmError(f"positions {self.positions!r}: use 'learned' or 'rotary'")
        if self.positions == "rotary" and self.hidden_size // self.num_attention_heads % 2:
            raise OelmError("rotary positions need an even head dimension")
        super().__post_init__(**kwargs)

    def _check_numbers(self) -> None:
        for name in _COUNTS:
            value = getattr(self, name)
            if type(value) is not int or value < 1:
                raise OelmError(f"{name} {value!r}: must be a whole number above 0")
        for name in ("rope_theta", "layer_norm_eps", "initializer_range"):
            value = getattr(self, name)
            if not isinstance(value, int | float) or not value > 0:
                raise OelmError(f"{name} {value!r}: must be a number above 0")
        if not isinstance(self.dropout, int | float) or not 0 <= self.dropout < 1:
            raise OelmError(f"dropout {self.dropout!r}: must be a number from 0 to below 1")


class OelmGPTAttention(nn.Module):
    """Causal self-attention through torch's scaled-dot-product kernels.

    Where the key is the identity (`identity-key`, learned positions), keys and values are both functions of the same
    hidden state, so the cache holds that state once instead of a key and a value: half the memory.
    """

    def __init__(self, config: OelmGPTConfig, layer_idx: int) -> None:
        super().__init__()
        self.config, self.layer_idx = config, layer_idx
        self.head_dim = config.hidden_size // config.num_attention_heads
        self.scaling = self.head_dim**-0.5
        self.is_causal = True
        width = config.hidden_size
        self.q_proj = nn.Linear(width, width, bias=False)
        self.k_proj = nn.Linear(width, width, bias=False)
        self.v_proj = nn.Linear(width, width, bias=False)
        self.o_proj = _ending(nn.Linear(width, width, bias=False))

    def forward(
        self,
        hidden: Tensor,
        mask: Tensor | None,
        rotation: tuple[Tensor, Tensor] | None,
        past_key_values: Cache | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        if past_key_values is not None and rotation is None and self._key_is_state():
            return self._attend_to_states(hidden, mask, past_key_values, **kwargs)
        shape = (*hidden.shape[:-1], -1, self.head_dim)
        query, key, value = (
            projection(hidden).view(shape).transpose(1, 2) for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        if rotation is not None:
            query, key = _rotate(query, rotation), _rotate(key, rotation)
        if past_key_values is not None:
            key, value = past_key_values.update(key, value, self.layer_idx)
        out, weights = self._attend(query, key, value, mask, self.scaling, **kwargs)
        return self.o_proj(out.reshape(*hidden.shape[:-1], -1)), weights

    def _attend(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scaling: float, **kwargs: Any
    ) -> tuple[Tensor, Tensor | None]:
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, _eager_attention)
        dropout = self.config.dropout if self.training else 0.0
        out, weights = attend(self, query, key, value, mask, dropout=dropout, scaling=scaling, **kwargs)
        return out, weights

    def _key_is_state(self) -> bool:
        """Whether every head's key is its own slice of the whole hidden state, up to a factor."""
        return isinstance(self.k_proj, IdentityProjection) and self.k_proj.rows == self.config.hidden_size

    def _mixes_first(self, mask: Any) -> bool:
        """Whether values are the plain matrix times a state (an adapter is not), and the mask one for scores."""
        return type(self.v_proj) is nn.Linear and (mask is None or (isinstance(mask, Tensor) and mask.ndim == 4))

    def _attend_to_states(
        self, hidden: Tensor, mask: Tensor | None, past_key_values: Cache, **kwargs: Any
    ) -> tuple[Tensor, Tensor | None]:
        """Attention with a cache of hidden states: the key's factor goes to the scores, values are made from states."""
        shape = (*hidden.shape[:-1], -1, self.head_dim)
        scaling = self.scaling * self.k_proj.factor
        query = self.q_proj(hidden).view(shape).transpose(1, 2)
        key = hidden.view(shape).transpose(1, 2)
        key, _ = past_key_values.update(key, key[..., :0], self.layer_idx)
        if hidden.shape[1] > 1 or not self._mixes_first(mask):
            states = key.transpose(1, 2).flatten(-2)
            value = self.v_proj(states).view(*states.shape[:-1], -1, self.head_dim).transpose(1, 2)
            out, weights = self._attend(query, key, value, mask, scaling, **kwargs)
        else:
            # One new token: mix the states first and project the mixture, so that no old token's value is made again.
            if self.config._attn_implementation != "eager" and fuses(query, key):
                mixed, weights = mix_fused(query, key, mask, scaling), None
            else:
                mixed, weights = mix(query, key, mask, scaling)
            per_head = self.v_proj.weight.view(-1, self.head_dim, hidden.shape[-1])
            out = (mixed.transpose(0, 1) @ per_head.mT).transpose(0, 1)[:, None]
        return self.o_proj(out.reshape(*hidden.shape[:-1], -1)), weights


class OelmGPTFeedForward(nn.Module):
    def __init__(self, config: OelmGPTConfig) -> None:
        super().__init__()
        assert config.intermediate_size is not None
        self.fc_in = nn.Linear(config.hidden_size, config.intermediate_size)
        self.fc_out = _ending(nn.Linear(config.intermediate_size, config.hidden_size))

    def forward(self, hidden: Tensor) -> Tensor:
        out: Tensor = self.fc_out(F.gelu(self.fc_in(hidden)))
        return out


class OelmGPTBlock(GradientCheckpointingLayer):  # type: ignore[misc]
    def __init__(self, config: OelmGPTConfig, layer_idx: int) -> None:
        super().__init__()
        self.ln_1 = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.attn = OelmGPTAttention(config, layer_idx)
        self.ln_2 = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.mlp = OelmGPTFeedForward(config)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, hidden: Tensor, **kwargs: Any) -> Tensor:
        attended, _ = self.attn(self.ln_1(hidden), **kwargs)
        hidden = hidden + self.dropout(attended)
        out: Tensor = hidden + self.dropout(self.mlp(self.ln_2(hidden)))
        return out


class OelmGPTRotary(nn.Module):
    """cos and sin of every position's angles; the frequencies are derived from the config, so they are never saved."""

    frequencies: Tensor

    def __init__(self, config: OelmGPTConfig) -> None:
        super().__init__()
        self.theta = config.rope_theta
        self.head_dim = config.hidden_size // config.num_attention_heads
        self.register_buffer("frequencies", self.compute(), persistent=False)

    def compute(self) -> Tensor:
        exponents = torch.arange(0, self.head_dim, 2, dtype=torch.float32) / self.head_dim
        return torch.as_tensor(self.theta**-exponents)

    def forward(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        angles = positions[..., None].float() * self.frequencies.float()
        both = torch.cat([angles, angles], dim=-1)[:, None]
        return both.cos().to(dtype), both.sin().to(dtype)


class OelmGPTPreTrainedModel(PreTrainedModel):  # type: ignore[misc]
    """Where every weight's first value is set:

    | what                          | init                                  |
    |-------------------------------|---------------------------------------|
    | Linear, Embedding             | N(0, 0.02²), biases 0                 |
    | o_proj, fc_out                | N(0, (0.02 / √(2 · layers))²)         |
    | LayerNorm                     | weight 1, bias 0                      |
    | rotary frequencies (a buffer) | computed anew: a load leaves them out |
    """

    config_class = OelmGPTConfig
    base_model_prefix = "transformer"
    supports_gradient_checkpointing = True
    _no_split_modules = ("OelmGPTBlock",)
    _supports_sdpa = True
    _supports_flash_attn = True
    _supports_flex_attn = True
    _supports_attention_backend = True
    _can_compile_fullgraph = True
    _can_record_outputs = MappingProxyType({"hidden_states": OelmGPTBlock, "attentions": OelmGPTAttention})

    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        # By the Linear itself: transformers asks this of no module outside its own package that holds only modules.
        if getattr(module, "ends_branch", False):
            shrunk = self.config.initializer_range / math.sqrt(2 * self.config.num_hidden_layers)
            hf_init.normal_(module.weight, std=shrunk)
        elif isinstance(module, OelmGPTRotary):
            hf_init.copy_(module.frequencies, module.compute())


class OelmGPTModel(OelmGPTPreTrainedModel):
    """The blocks, from token ids to final hidden states."""

    def __init__(self, config: OelmGPTConfig) -> None:
        super().__init__(config)
        self.wte = nn.Embedding(config.vocab_size, config.hidden_size)
        rotary = config.positions == "rotary"
        self.wpe = None if rotary else nn.Embedding(config.max_position_embeddings, config.hidden_size)
        self.rotary = OelmGPTRotary(config) if rotary else None
        self.dropout = nn.Dropout(config.dropout)
        self.h = nn.ModuleList([OelmGPTBlock(config, layer) for layer in range(config.num_hidden_layers)])
        self.ln_f = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.gradient_checkpointing = False
        record = read_record(config)
        if record is not None:
            # Cores and identities are there before weights are loaded, so that pipelines and harnesses, which know
            # nothing of oelm, read a saved model whole. Frozen again and verified it is only by oelm.load.
            install(self, Method.load(record["method"]))
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        return self.wte

    def set_input_embeddings(self, value: nn.Embedding) -> None:
        self.wte = value

    @can_return_tuple  # type: ignore[untyped-decorator]
    @capture_outputs  # type: ignore[untyped-decorator]
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        **kwargs: Any,
    ) -> BaseModelOutputWithPast:
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("give either input_ids or inputs_embeds")
        hidden = self.wte(input_ids) if inputs_embeds is None else inputs_embeds
        if use_cache and past_key_values is None:
            past_key_values = DynamicCache(config=self.config)
        seen = past_key_values.get_seq_length() if past_key_values is not None else 0
        length = hidden.shape[1]
        placed = position_ids is not None  # by the caller: positions that begin again part texts packed in one row
        if position_ids is None:
            position_ids = torch.arange(length, device=hidden.device)[None] + seen
        rotation = None
        if self.wpe is not None:
            if isinstance(seen, int) and seen + length > self.config.max_position_embeddings:
                raise ValueError(
                    f"{seen + length} tokens are more than the model's {self.config.max_position_embeddings} positions"
                )
            hidden = hidden + self.wpe(position_ids)
        elif self.rotary is not None:
            rotation = self.rotary(position_ids, hidden.dtype)
        mask = None
        if attention_mask is not None or past_key_values is not None or placed:  # else: plainly causal, the fast path
            mask = create_causal_mask(
                config=self.config,
                inputs_embeds=hidden,
                attention_mask=attention_mask,
                past_key_values=past_key_values,
                position_ids=position_ids,
            )
        elif self.config._attn_implementation == "eager":
            mask = _causal_bias(length, hidden)
        hidden = self.dropout(hidden)
        for block in self.h:
            hidden = block(hidden, mask=mask, rotation=rotation, past_key_values=past_key_values, **kwargs)
        return BaseModelOutputWithPast(last_hidden_state=self.ln_f(hidden), past_key_values=past_key_values)


class OelmGPTForCausalLM(OelmGPTPreTrainedModel, GenerationMixin):  # type: ignore[misc]
    """The GPT with its language-model head, tied to the token embedding."""

    _tied_weights_keys = MappingProxyType({"lm_head.weight": "transformer.wte.weight"})

    def __init__(self, config: OelmGPTConfig) -> None:
        super().__init__(config)
        self.transformer = OelmGPTModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    @can_return_tuple  # type: ignore[untyped-decorator]
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast:
        if use_cache is None:
            use_cache = self.config.use_cache and not self.training and labels is None
        out = self.transformer(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_values=past_key_values,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            **kwargs,
        )
        keep = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits = self.lm_head(out.last_hidden_state[:, keep, :])
        loss = None
        if labels is not None:
            loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.config.vocab_size, **kwargs)
        return CausalLMOutputWithPast(
            loss=loss,
            logits=logits,
            past_key_values=out.past_key_values,
            hidden_states=out.hidden_states,
            attentions=out.attentions,
        )


class OelmGPTForSequenceClassification(GenericForSequenceClassification, OelmGPTPreTrainedModel):  # type: ignore[misc]
    """The GPT with a classification head on the last real token."""

    base_model_prefix = "transformer"


def gpt_config(size: str, **changes: Any) -> OelmGPTConfig:
    """The config of a named size; `changes` override its fields (vocab_size, dropout, positions, ...)."""
    if size not in SIZES:
        raise OelmError(f"no GPT size {size!r}.{nearest(size, SIZES)} Sizes: {', '.join(SIZES)}")
    width, layers = SIZES[size]
    named = {"hidden_size": width, "num_hidden_layers": layers, "num_attention_heads": width // D_HEAD}
    fields = {**named, **changes}
    known = set(OelmGPTConfig().to_dict())
    for name in fields:
        if name not in known:
            listed = ", ".join(OelmGPTConfig.__annotations__)
            raise OelmError(f"GPT config: unknown field {name!r}.{nearest(name, known)} Fields: {listed}")
    return OelmGPTConfig(**fields)


def _ending(linear: Any) -> nn.Linear:
    """The Linear, marked as the last of its residual branch, for its first value."""
    linear.ends_branch = True
    return cast(nn.Linear, linear)


def _rotate(states: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
    cos, sin = rotation
    first, second = states.chunk(2, dim=-1)
    return states * cos + torch.cat([-second, first], dim=-1) * sin


def _causal_bias(length: int, like: Tensor) -> Tensor:
    bias = torch.full((length, length), torch.finfo(like.dtype).min, dtype=like.dtype, device=like.device)
    return bias.triu(1)[None, None]


def _eager_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float = 1.0,
    **kwargs: Any,
) -> tuple[Tensor, Tensor]:
    """Attention written out, for when its weights are wanted."""
    scores = query @ key.mT * scaling
    scores = masked(scores, mask)
    weights = F.softmax(scores, dim=-1, dtype=torch.float32).to(query.dtype)
    weights = F.dropout(weights, p=dropout, training=module.training)
    return (weights @ value).transpose(1, 2), weights


AutoConfig.register(OelmGPTConfig.model_type, OelmGPTConfig, exist_ok=True)
AutoModel.register(OelmGPTConfig, OelmGPTModel, exist_ok=True)
AutoModelForCausalLM.register(OelmGPTConfig, OelmGPTForCausalLM, exist_ok=True)
AutoModelForSequenceClassification.register(OelmGPTConfig, OelmGPTForSequenceClassification, exist_ok=True)
