"""The project's GPT: blocks of attention and a feed-forward layer, each behind a norm, and a tied head.

By its config it is the study's (learned positions, LayerNorm, GELU) or a modern one (rotary, RMSNorm, SwiGLU).

A transformers model like any other: `generate`, `save_pretrained`, pipelines and evaluation harnesses work on it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from types import MappingProxyType
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoModelForSequenceClassification
from transformers import initialization as hf_init
from transformers.cache_utils import Cache, DynamicCache
from transformers.generation import GenerationMixin
from transformers.masking_utils import create_causal_mask
from transformers.modeling_layers import GenericForSequenceClassification, GradientCheckpointingLayer
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast
from transformers.modeling_utils import PreTrainedModel
from transformers.utils.generic import can_return_tuple
from transformers.utils.output_capturing import capture_outputs

from .attention.lookback import CausalConvolution, KeyOffset
from .attention.multi_head import OelmGPTAttention
from .attention.rotary import OelmGPTRotary, TokenPlaces
from .attention.visible import visible_to_token
from .feed_forward import make_feed_forward, make_norm
from .gpt_config import OelmGPTConfig
from .head import OelmGPTHead

# Called with every new OelmGPTModel before its weights are initialised or loaded. The package adds the hook that
# installs a recorded method: the GPT itself does not know how a method is applied.
build_hooks: list[Callable[[nn.Module], None]] = []


class OelmGPTBlock(GradientCheckpointingLayer):  # type: ignore[misc]
    """Attention and feed-forward layer, each behind a norm and added to the residual stream."""

    def __init__(self, config: OelmGPTConfig, layer_idx: int) -> None:
        super().__init__()
        self.ln_1 = make_norm(config)
        self.attn = OelmGPTAttention(config, layer_idx)
        self.ln_2 = make_norm(config)
        self.mlp = make_feed_forward(config)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, hidden: Tensor, **kwargs: Any) -> Tensor:
        attended, _ = self.attn(self.ln_1(hidden), **kwargs)
        hidden = hidden + self.dropout(attended)
        out: Tensor = hidden + self.dropout(self.mlp(self.ln_2(hidden)))
        return out


class OelmGPTPreTrainedModel(PreTrainedModel):  # type: ignore[misc]
    """Base class of the GPT's models; initialises the weights:

    | what                          | init                                                        |
    |-------------------------------|-------------------------------------------------------------|
    | Embedding                     | N(0, 0.02²)                                                 |
    | Linear                        | N(0, σ²), biases 0; σ = 0.02, or 1/√columns with `fan-in`   |
    | o_proj, fc_out                | N(0, (σ / √(2 · layers))²)                                  |
    | norms                         | weight 1, bias 0                                            |
    | taps of a convolution         | 0: what they add to the identity                            |
    | rotary frequencies, moved     | buffers computed from the config, also on loading           |
    |   dimensions of a key offset  |                                                             |
    | an orthogonal key             | as torch's parametrisation starts it: orthogonal            |
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
    _input_embed_layer = "wte"
    _can_record_outputs = MappingProxyType({"hidden_states": OelmGPTBlock, "attentions": OelmGPTAttention})

    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if isinstance(module, nn.Linear):
            self._init_linear(module)
        elif isinstance(module, OelmGPTRotary):
            hf_init.copy_(module.frequencies, module.compute())
        elif isinstance(module, KeyOffset):
            hf_init.copy_(module.moved, module.compute())
        elif isinstance(module, CausalConvolution):
            for taps in (module.query_taps, module.key_taps):
                hf_init.zeros_(taps)

    def _init_linear(self, module: nn.Linear) -> None:
        """Draw a matrix again where `fan-in` or its place at the end of a residual branch asks for another size."""
        fan_in = self.config.initializer == "fan-in"
        std = module.in_features**-0.5 if fan_in else self.config.initializer_range
        # The Linear carries the mark itself, because transformers does not call _init_weights for modules of other
        # packages that hold nothing but submodules, such as the attention and the feed-forward layer.
        ends_branch = getattr(module, "ends_branch", False)
        if ends_branch:
            std /= math.sqrt(2 * self.config.num_hidden_layers)
        if fan_in or ends_branch:
            hf_init.normal_(module.weight, std=std)


class OelmGPTModel(OelmGPTPreTrainedModel):
    """The blocks, from token ids to final hidden states."""

    def __init__(self, config: OelmGPTConfig) -> None:
        super().__init__(config)
        self.wte = nn.Embedding(config.vocab_size, config.hidden_size)
        learned = config.positions == "learned"
        self.wpe = nn.Embedding(config.max_position_embeddings, config.hidden_size) if learned else None
        rotated = config.channel or (config.key_dim if config.positions == "rotary" else 0)
        self.rotary = OelmGPTRotary(rotated, config.rope_theta) if rotated else None
        self.dropout = nn.Dropout(config.dropout)
        self.h = nn.ModuleList([OelmGPTBlock(config, layer) for layer in range(config.num_hidden_layers)])
        self.ln_f = make_norm(config)
        self.gradient_checkpointing = False
        for hook in build_hooks:
            hook(self)
        self.post_init()

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
        cached = past_key_values.get_seq_length() if past_key_values is not None else 0
        length = hidden.shape[1]
        # Positions that the caller gives may start again within a row, which separates texts packed into one row.
        maybe_packed = position_ids is not None
        if position_ids is None:
            position_ids = torch.arange(length, device=hidden.device)[None] + cached
        if self.wpe is not None:
            limit = self.config.max_position_embeddings
            if isinstance(cached, int) and cached + length > limit:
                raise ValueError(f"{cached + length} tokens are more than the model's {limit} positions")
            hidden = hidden + self.wpe(position_ids)
        # Without padding, cache or packing, attention is plainly causal: with no mask the fast kernels are used.
        mask, eager = None, self.config._attn_implementation == "eager"
        if attention_mask is not None or past_key_values is not None or maybe_packed or eager:
            mask = create_causal_mask(
                config=self.config,
                inputs_embeds=hidden,
                attention_mask=attention_mask,
                past_key_values=past_key_values,
                position_ids=position_ids,
            )
        is_padded = attention_mask is not None or maybe_packed
        places = TokenPlaces(
            rotation=None if self.rotary is None else self.rotary(position_ids, hidden.dtype),
            rotary=self.rotary,
            predecessors=self._predecessors(position_ids, attention_mask, cached, maybe_packed),
            visible=visible_to_token(mask, cached, is_padded) if length == 1 and self._caches_one_tensor() else None,
        )
        hidden = self.dropout(hidden)
        for block in self.h:
            hidden = block(hidden, mask=mask, places=places, past_key_values=past_key_values, **kwargs)
        return BaseModelOutputWithPast(last_hidden_state=self.ln_f(hidden), past_key_values=past_key_values)

    def _caches_one_tensor(self) -> bool:
        """Return True when some attention caches one tensor for keys and values, which a kernel may read."""
        attentions = [cast(OelmGPTBlock, block).attn for block in self.h]
        return any(attention.caches_latents() or attention.caches_keys() for attention in attentions)

    def _predecessors(
        self, positions: Tensor, attention_mask: Tensor | None, cached: int | Tensor, given: bool
    ) -> Tensor | None:
        """Return how many tokens before each one belong to its document, or None where no attention looks back.

        That is a token's position, where the caller gives positions. Otherwise padding on the left is told from the
        mask, and with `offset_across_documents` positions that start again do not end a document. A mask that was
        prepared for generation does not tell; there is one document in a row then.
        """
        if not self.config.looks_back:
            return None
        prepared = attention_mask is not None and attention_mask.ndim != 2
        if given and (prepared or not self.config.offset_across_documents):
            return positions
        length = positions.shape[1]
        if attention_mask is not None and not prepared:
            return attention_mask.long().cumsum(-1)[:, -length:] - 1
        return torch.arange(length, device=positions.device)[None] + cached


class OelmGPTForCausalLM(OelmGPTPreTrainedModel, GenerationMixin):  # type: ignore[misc]
    """The GPT with its language-model head, tied to the token embedding."""

    _tied_weights_keys = MappingProxyType({"lm_head.weight": "transformer.wte.weight"})

    def __init__(self, config: OelmGPTConfig) -> None:
        super().__init__(config)
        self.transformer = OelmGPTModel(config)
        self.lm_head = OelmGPTHead(config.hidden_size, config.vocab_size)
        self.post_init()

    @staticmethod
    def create_masks_for_generate(
        config: OelmGPTConfig, inputs_embeds: Tensor, attention_mask: Tensor | None, **kwargs: Any
    ) -> Tensor | None:
        """Return one mask for all layers; transformers would add one for the states of a look at earlier tokens."""
        mask: Tensor | None = create_causal_mask(
            config=config,
            inputs_embeds=inputs_embeds,
            attention_mask=attention_mask,
            past_key_values=kwargs["past_key_values"],
            position_ids=kwargs["position_ids"],
        )
        return mask

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """Generate tokens as every model of transformers does."""
        with parametrize.cached():  # a key that torch keeps orthogonal is computed once, not for every token
            return super().generate(*args, **kwargs)

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
        targets: Tensor | None = None,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast:
        """Return logits as every model of transformers does, and with `labels` the mean loss.

        With `targets`, the token to be predicted at every position or -100, return their summed loss and no logits:
        on a GPU a training step is faster so, and takes less memory.
        """
        if use_cache is None:
            use_cache = self.config.use_cache and not self.training and labels is None and targets is None
        out = self.transformer(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_values=past_key_values,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            **kwargs,
        )
        if targets is not None:
            return CausalLMOutputWithPast(loss=self.lm_head(out.last_hidden_state, targets))
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


AutoConfig.register(OelmGPTConfig.model_type, OelmGPTConfig, exist_ok=True)
AutoModel.register(OelmGPTConfig, OelmGPTModel, exist_ok=True)
AutoModelForCausalLM.register(OelmGPTConfig, OelmGPTForCausalLM, exist_ok=True)
AutoModelForSequenceClassification.register(OelmGPTConfig, OelmGPTForSequenceClassification, exist_ok=True)
