"""A tokenizer whose tokens are whole words, for generated data with a small vocabulary."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers, processors

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

_SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")


def word_level_tokenizer(backend: Tokenizer) -> PreTrainedTokenizerFast:
    """Return the transformers tokenizer around a `word_level_backend`.

    It adds special tokens as BERT does, `[CLS] text [SEP] pair [SEP]` with token types. `[CLS]` and `[SEP]` are also
    the BOS and EOS tokens of text-to-text models.
    """
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token="[PAD]",
        unk_token="[UNK]",
        cls_token="[CLS]",
        sep_token="[SEP]",
        mask_token="[MASK]",
        bos_token="[CLS]",
        eos_token="[SEP]",
        model_input_names=["input_ids", "token_type_ids", "attention_mask"],
    )


def word_level_backend(words: Iterable[str]) -> Tokenizer:
    """Return a tokenizer of the `tokenizers` package that knows the special tokens and these words, sorted."""
    vocabulary = {word: index for index, word in enumerate((*_SPECIAL, *sorted(set(words))))}
    backend = Tokenizer(models.WordLevel(vocabulary, "[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in _SPECIAL])
    backend.post_processor = processors.TemplateProcessing(
        single="[CLS]:0 $A:0 [SEP]:0",
        pair="[CLS]:0 $A:0 [SEP]:0 $B:1 [SEP]:1",
        special_tokens=[(token, vocabulary[token]) for token in ("[CLS]", "[SEP]")],
    )
    return backend
