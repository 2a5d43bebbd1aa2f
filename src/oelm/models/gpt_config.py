"""Sizes and settings of the project's GPT."""

from __future__ import annotations

from types import MappingProxyType
from typing import Any

from transformers.configuration_utils import PreTrainedConfig

from ..errors import OelmError, nearest

D_HEAD = 64
# name -> (width, layers); heads have 64 dimensions and the feed-forward layer is four times as wide.
SIZES: MappingProxyType[str, tuple[int, int]] = MappingProxyType(
    {"tiny": (256, 4), "small": (384, 6), "medium-512": (512, 6), "medium": (768, 12), "large": (1024, 24)}
)

_LAYER_COUNTS = ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")
_COUNTS = ("vocab_size", *_LAYER_COUNTS, "max_position_embeddings")


class OelmGPTConfig(PreTrainedConfig):  # type: ignore[misc]
    """Sizes and settings of the GPT. `positions` is "learned" or "rotary"."""

    model_type = "oelm_gpt"
    keys_to_ignore_at_inference = ["past_key_values"]  # must be a list: transformers' Trainer appends to it

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


def gpt_config(size: str, **changes: Any) -> OelmGPTConfig:
    """Return the config of a named size; `changes` override its fields (vocab_size, dropout, positions, ...)."""
    if size not in SIZES:
        raise OelmError(f"no GPT size {size!r}.{nearest(size, SIZES)} Sizes: {', '.join(SIZES)}")
    width, layers = SIZES[size]
    sizes = {"hidden_size": width, "num_hidden_layers": layers, "num_attention_heads": width // D_HEAD}
    fields = {**sizes, **changes}
    # transformers accepts any keyword, so a mistyped field would silently change nothing.
    known_fields = set(OelmGPTConfig().to_dict())
    for name in fields:
        if name not in known_fields:
            listed = ", ".join(OelmGPTConfig.__annotations__)
            raise OelmError(f"GPT config: unknown field {name!r}.{nearest(name, known_fields)} Fields: {listed}")
    return OelmGPTConfig(**fields)
