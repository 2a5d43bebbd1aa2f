"""How the model of a fine-tuning run reads: its tokenizer, what its config says of itself, how many tokens it takes."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from transformers import AutoConfig, PreTrainedConfig

from ...base.files import require_reachable
from ...config import GPT, RANDOM, ModelConfig, RunConfig
from ...data.labelled.examples import Encoded, encode
from ...data.labelled.tasks import BUILTIN
from ...data.synthetic.judgements import judgement_tokenizer
from ...data.tokenizer import load_model_tokenizer, vocabulary_sha256
from ...errors import ConfigError, first_line
from ...models.gpt import gpt_config
from ...models.language import require_changeable, with_fields
from ...models.small import require_fields, small_config

# Families that count positions from after the padding token's id, so that many of their positions are never used.
_OFFSET_POSITIONS = frozenset({"roberta", "xlm-roberta", "camembert", "mpnet"})
# Rows of an embedding beyond the tokenizer's last token: vocabularies are padded, but not by more than this.
_SPARE_ROWS = 1024
# Two texts, so that what stands before, between and after them can be told apart, whatever a vocabulary makes of them.
_PROBE = ("a good film", "the story was bad")
_SPECIAL = ("pad_token_id", "cls_token_id", "sep_token_id", "bos_token_id", "eos_token_id")


@dataclass(frozen=True)
class Reader:
    """A tokenizer and the config of the model that reads through it, which belong together."""

    tokenizer: Any
    own: PreTrainedConfig
    longest: int

    @classmethod
    def of(cls, config: RunConfig) -> Reader:
        """The reader of a run, from its config alone."""
        tokenizer = _tokenizer_for(config.model, config.task.name.startswith(BUILTIN))
        own = describe_model(config.model, len(tokenizer), config.data.sequence_length)
        _require_match(own, tokenizer, config.model)
        own.pad_token_id = tokenizer.pad_token_id
        if is_fresh(config.model):
            _take_marks(own, tokenizer)
        return cls(tokenizer, own, longest_text(own, config.data.sequence_length))

    @property
    def sha256(self) -> str:
        """Of all by which a text becomes what the model reads."""
        return hashlib.sha256(f"{self._vocabulary}\0{self._marks}".encode()).hexdigest()

    def describe(self) -> dict[str, Any]:
        """What the environment records of it. The vocabulary has its own hash, by which records of any age compare."""
        return {"longest": self.longest, "tokenizer": self._vocabulary, "marks": self._marks}

    @cached_property
    def _vocabulary(self) -> str:
        return vocabulary_sha256(self.tokenizer.backend_tokenizer)

    @cached_property
    def _marks(self) -> str:
        """The sha256 of what is put around a text, between two, and after a short one, as a probe shows it.

        The post-processor that puts it there can be written in several ways, and transformers rewrites it.
        """
        backend = deepcopy(self.tokenizer.backend_tokenizer)
        backend.no_truncation()
        backend.no_padding()
        read = [backend.encode(_PROBE[0]), backend.encode(*_PROBE)]
        seen = [self.tokenizer.pad_token_id, self.tokenizer.eos_token_id, [one.ids for one in read]]
        types = [one.type_ids for one in read] if self._types else None
        return hashlib.sha256(json.dumps([*seen, types]).encode()).hexdigest()

    def read(self, texts: Sequence[str], pairs: Sequence[str] | None = None) -> Encoded:
        """Texts, or pairs of them, as the model reads them; the longer of two is cut first."""
        marks = self.tokenizer.num_special_tokens_to_add(pair=pairs is not None)
        if self.longest <= marks:
            raise ConfigError(
                f"data.sequence_length {self.longest}: the tokenizer's own marks take {marks} of that; use more"
            )
        if pairs is not None and marks == 0:
            # A decoder's tokenizer puts nothing between two texts; without a mark they would run into each other.
            if self.tokenizer.eos_token is None:
                raise ConfigError("model.tokenizer: it has no token to put between two texts; use another")
            pairs = [f"{self.tokenizer.eos_token}{pair}" for pair in pairs]
        return encode(self.tokenizer, texts, pairs, self.longest, self._types)

    @property
    def _types(self) -> bool:
        """Whether the model reads which of two texts a token belongs to: only one that was made for that does."""
        return "token_type_ids" in self.tokenizer.model_input_names and getattr(self.own, "type_vocab_size", 0) > 1

    def save(self, folder: Path) -> None:
        """Write the tokenizer, which from then on gives a model just what it was trained on."""
        if not self._types:
            names = [name for name in self.tokenizer.model_input_names if name != "token_type_ids"]
            self.tokenizer.model_input_names = names
        self.tokenizer.save_pretrained(folder)


def is_fresh(config: ModelConfig) -> bool:
    """Whether a model starts with random weights."""
    return config.from_scratch or config.name.startswith((GPT, RANDOM))


def _tokenizer_for(config: ModelConfig, builtin: bool) -> Any:
    """The tokenizer that a model reads: the one that is named, else the model's own, else that of the built-in data."""
    unnamed = config.name.startswith((GPT, RANDOM))
    if config.tokenizer is not None:
        tokenizer = load_model_tokenizer(config.tokenizer)
    elif unnamed and builtin:
        tokenizer = judgement_tokenizer()
    elif unnamed:
        raise ConfigError(
            f"model.tokenizer: {config.name} brings no tokenizer; name a folder, such as the tokenizer/ in what "
            "`oelm data prepare --train-bpe` wrote, or a Hub name (bert-base-uncased, say)"
        )
    else:
        if (Path(config.name) / "audit.json").is_file():
            raise ConfigError(
                f"model.name {config.name}: a run's folder; write its model out first: oelm export RUN OUT"
            )
        tokenizer = load_model_tokenizer(config.name, config.revision)
    if tokenizer.pad_token_id is None:
        if tokenizer.eos_token_id is None:
            where = config.tokenizer or config.name
            raise ConfigError(f"model.tokenizer {where}: it has neither a padding token nor an end-of-text token")
        tokenizer.pad_token = tokenizer.eos_token
    tokenizer.padding_side = tokenizer.truncation_side = "right"
    return tokenizer


def describe_model(config: ModelConfig, vocab_size: int | None, length: int) -> Any:
    """The model's own config: of a fresh one fit for the vocabulary and the length, of a pretrained one as it is."""
    fitting = {} if vocab_size is None else {"vocab_size": vocab_size}
    if config.name.startswith(GPT):
        return gpt_config(
            config.name.removeprefix(GPT), **{**fitting, "max_position_embeddings": length, **config.fields}
        )
    if config.name.startswith(RANDOM):
        family = config.name.removeprefix(RANDOM)
        require_fields(small_config(family), config.fields)
        return small_config(family, **{**fitting, **config.fields})
    require_changeable(config)
    require_reachable(config.name)
    try:
        found = AutoConfig.from_pretrained(config.name, trust_remote_code=False, revision=config.revision or "main")
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"model.name {config.name}: neither a model's folder nor a Hub name that can be reached "
            f"({first_line(error)})"
        ) from None
    if getattr(found, "oelm", None) is not None:
        raise ConfigError(
            f"model.name {config.name}: a method was applied to it already. Write it out as a plain model first, "
            f"`oelm export {config.name} OUT`, and fine-tune that"
        )
    return with_fields(found, config.fields)


def longest_text(own: Any, wanted: int) -> int:
    """How many tokens the model can read, and at most `wanted`."""
    positions = getattr(own, "max_position_embeddings", None) or getattr(own, "n_positions", None)
    if positions is None:
        return wanted
    if own.model_type in _OFFSET_POSITIONS:
        positions -= own.pad_token_id + 1
        if positions < 1:
            raise ConfigError(
                f"model: a {own.model_type} counts positions from after its padding token, whose id is "
                f"{own.pad_token_id} here: use a tokenizer with a padding token at the start of its vocabulary"
            )
    return min(wanted, int(positions))


def _require_match(own: Any, tokenizer: Any, config: ModelConfig) -> None:
    """Refuse a tokenizer that can only be another model's: ids beyond the vocabulary, or special tokens elsewhere."""
    rows = getattr(own, "vocab_size", len(tokenizer))
    if len(tokenizer) > rows:
        raise ConfigError(
            f"model.name {config.name}: its vocabulary has {rows} entries, the tokenizer's has {len(tokenizer)}. "
            "Is it another model's tokenizer?"
        )
    if config.tokenizer is None or is_fresh(config):
        return
    where = f"model.tokenizer {config.tokenizer}"
    if rows - len(tokenizer) >= _SPARE_ROWS:
        raise ConfigError(f"{where}: has {len(tokenizer)} tokens, the model was trained with {rows}: not its tokenizer")
    for name in _SPECIAL:
        mine, theirs = getattr(tokenizer, name, None), getattr(own, name, None)
        shared = mine is not None and isinstance(theirs, int)
        if shared and mine != theirs and not (name == "pad_token_id" and tokenizer.pad_token == tokenizer.eos_token):
            raise ConfigError(
                f"{where}: its {name.removesuffix('_id').replace('_', ' ')} is {mine}, the model's is {theirs}: not "
                "its tokenizer"
            )


def _take_marks(own: Any, tokenizer: Any) -> None:
    """Give a fresh model the tokenizer's marks: where a text ends, and what a decoder begins with."""
    end = tokenizer.eos_token_id if tokenizer.eos_token_id is not None else tokenizer.sep_token_id
    if end is not None:
        own.eos_token_id = end
    if getattr(own, "is_encoder_decoder", False):
        own.decoder_start_token_id = tokenizer.pad_token_id
