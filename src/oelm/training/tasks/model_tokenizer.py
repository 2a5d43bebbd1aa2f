"""The tokenizer of a fine-tuning run together with the model config that decides how texts are encoded for it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from transformers import PreTrainedConfig

from ...config import GPT, RANDOM, ModelConfig, RunConfig
from ...data.labelled.encoded import Encoded, encode
from ...data.labelled.tasks import BUILTIN, TRANSLATION
from ...data.synthetic.judgements import judgement_tokenizer
from ...data.synthetic.translation import translation_tokenizer
from ...data.tokenizer import load_model_tokenizer, vocabulary_sha256
from ...errors import ConfigError
from ...models.hf_config import build_hf_config, is_fresh, max_text_length

# Embedding tables are often padded beyond the tokenizer's last token, but not by more rows than this.
_SPARE_ROWS = 1024
# Encoding one text and a pair of texts shows every special token that is put before, between and after them.
_PROBE = ("a good film", "the story was bad")
_SPECIAL_TOKENS = ("pad_token_id", "cls_token_id", "sep_token_id", "bos_token_id", "eos_token_id")


@dataclass(frozen=True)
class ModelTokenizer:
    """A tokenizer and the transformers config of the model it feeds. Texts are cut to `max_length` tokens."""

    tokenizer: Any
    hf_config: PreTrainedConfig
    max_length: int

    @classmethod
    def of(cls, config: RunConfig) -> ModelTokenizer:
        """Return the tokenizer of a run and its model's config, checked against each other."""
        tokenizer = _load_tokenizer(config.model, config.task.name)
        hf_config = build_hf_config(config.model, len(tokenizer), config.data.sequence_length)
        _require_match(hf_config, tokenizer, config.model)
        hf_config.pad_token_id = tokenizer.pad_token_id
        if is_fresh(config.model):  # the special tokens of a pretrained model are its own
            end = tokenizer.eos_token_id if tokenizer.eos_token_id is not None else tokenizer.sep_token_id
            if end is not None:
                hf_config.eos_token_id = end
            if getattr(hf_config, "is_encoder_decoder", False):
                hf_config.decoder_start_token_id = tokenizer.pad_token_id
        return cls(tokenizer, hf_config, max_text_length(hf_config, config.data.sequence_length))

    @property
    def sha256(self) -> str:
        """Return the hash of everything that decides how a text is encoded: the vocabulary and the special tokens."""
        return hashlib.sha256(f"{self._vocabulary_sha256}\0{self._special_tokens_sha256}".encode()).hexdigest()

    def describe(self) -> dict[str, Any]:
        """Return what the run's environment records: the length and the two hashes, each comparable by itself."""
        return {"longest": self.max_length, "tokenizer": self._vocabulary_sha256, "marks": self._special_tokens_sha256}

    @cached_property
    def _vocabulary_sha256(self) -> str:
        return vocabulary_sha256(self.tokenizer.backend_tokenizer)

    @cached_property
    def _special_tokens_sha256(self) -> str:
        """Return the hash of the special tokens around a text, between two texts and in the padding.

        It is taken from two encoded texts and not from the tokenizer's post-processor, because the same post-processor
        can be written in several ways and transformers rewrites it on loading.
        """
        backend = deepcopy(self.tokenizer.backend_tokenizer)
        backend.no_truncation()
        backend.no_padding()
        encodings = [backend.encode(_PROBE[0]), backend.encode(*_PROBE)]
        ids = [self.tokenizer.pad_token_id, self.tokenizer.eos_token_id, [encoding.ids for encoding in encodings]]
        types = [encoding.type_ids for encoding in encodings] if self._uses_token_types else None
        return hashlib.sha256(json.dumps([*ids, types]).encode()).hexdigest()

    def encode(self, texts: Sequence[str], pairs: Sequence[str] | None = None) -> Encoded:
        """Encode texts, or pairs of texts, for the model. Of a pair that is too long, the longer text is cut first."""
        special_tokens = self.tokenizer.num_special_tokens_to_add(pair=pairs is not None)
        if self.max_length <= special_tokens:
            raise ConfigError(
                f"data.sequence_length {self.max_length}: the tokenizer adds {special_tokens} special tokens, which "
                "leaves no room for a text; set a larger value"
            )
        if pairs is not None and special_tokens == 0:
            # A decoder's tokenizer puts nothing between two texts; without a separator they would run together.
            if self.tokenizer.eos_token is None:
                raise ConfigError("model.tokenizer: it has no token to put between two texts; use another")
            pairs = [f"{self.tokenizer.eos_token}{pair}" for pair in pairs]
        return encode(self.tokenizer, texts, pairs, self.max_length, self._uses_token_types)

    @property
    def _uses_token_types(self) -> bool:
        """Return True when the model distinguishes the first text of a pair from the second by token type ids."""
        has_types = "token_type_ids" in self.tokenizer.model_input_names
        return has_types and getattr(self.hf_config, "type_vocab_size", 0) > 1

    def save(self, folder: Path) -> None:
        """Save the tokenizer so that it later gives a model exactly the inputs that the model was trained on."""
        if not self._uses_token_types:
            inputs = self.tokenizer.model_input_names
            self.tokenizer.model_input_names = [name for name in inputs if name != "token_type_ids"]
        self.tokenizer.save_pretrained(folder)


def _load_tokenizer(config: ModelConfig, task: str) -> Any:
    """Load the tokenizer that `model.tokenizer` names, else the model's own, else the one of the built-in task."""
    without_tokenizer = config.name.startswith((GPT, RANDOM))
    if config.tokenizer is not None:
        tokenizer = load_model_tokenizer(config.tokenizer)
    elif without_tokenizer and task.startswith(BUILTIN):
        tokenizer = translation_tokenizer() if task == TRANSLATION else judgement_tokenizer()
    elif without_tokenizer:
        raise ConfigError(
            f"model.tokenizer: {config.name} brings no tokenizer; name a folder, such as the tokenizer/ that "
            "`oelm data prepare --train-bpe` wrote, or a Hub name, such as bert-base-uncased"
        )
    else:
        if (Path(config.name) / "audit.json").is_file():
            raise ConfigError(
                f"model.name {config.name}: this is a run's folder; write its model out first: oelm export RUN OUT"
            )
        tokenizer = load_model_tokenizer(config.name, config.revision)
    if tokenizer.pad_token_id is None:
        if tokenizer.eos_token_id is None:
            name = config.tokenizer or config.name
            raise ConfigError(f"model.tokenizer {name}: it has neither a padding token nor an end-of-text token")
        tokenizer.pad_token = tokenizer.eos_token
    tokenizer.padding_side = tokenizer.truncation_side = "right"
    return tokenizer


def _require_match(hf_config: Any, tokenizer: Any, config: ModelConfig) -> None:
    """Raise for another model's tokenizer: its ids exceed the vocabulary, or its special tokens have other ids."""
    rows = getattr(hf_config, "vocab_size", len(tokenizer))
    if len(tokenizer) > rows:
        raise ConfigError(
            f"model.name {config.name}: its vocabulary has {rows} entries, the tokenizer's has {len(tokenizer)}. "
            "Is it another model's tokenizer?"
        )
    if config.tokenizer is None or is_fresh(config):
        return
    field = f"model.tokenizer {config.tokenizer}"
    if rows - len(tokenizer) >= _SPARE_ROWS:
        raise ConfigError(f"{field}: has {len(tokenizer)} tokens, the model was trained with {rows}: not its tokenizer")
    for name in _SPECIAL_TOKENS:
        tokenizer_id, model_id = getattr(tokenizer, name, None), getattr(hf_config, name, None)
        if name == "pad_token_id" and tokenizer.pad_token == tokenizer.eos_token:
            continue  # a tokenizer without a padding token was given its end-of-text token as one
        if tokenizer_id is not None and isinstance(model_id, int) and tokenizer_id != model_id:
            raise ConfigError(
                f"{field}: its {name.removesuffix('_id').replace('_', ' ')} is {tokenizer_id}, the model's is "
                f"{model_id}: not its tokenizer"
            )
