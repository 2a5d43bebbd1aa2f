"""The built-in stories as a token dataset: a tokenizer of whole words, and a cache of the generated tokens."""

from __future__ import annotations

import hashlib
import io
import os
import re
from collections.abc import Sequence
from contextlib import suppress
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np
import numpy.typing as npt
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

from ...base.files import write_bytes
from ...errors import DataError, FileError
from ..corpus.readers import SEPARATOR
from ..corpus.tokens import TokenDataset, in_memory
from ..tokenizer import token_id, vocabulary_sha256
from . import random_choices, stories, words

UNKNOWN = "<unk>"
DOCUMENTS = 6_000
VAL_DOCUMENTS = 500
# Smaller corpora are generated in less than 0.2 s, and tests ask for many sizes: they are not worth a file each.
_CACHED_FROM = 1_000
_WORD = re.compile(r"[A-Za-z]+")
# A word with the space before it is one token, and so is a punctuation mark: decoding joins the tokens.
_TOKEN = r" ?[A-Za-z]+| ?[^\sA-Za-z]"


def builtin(
    name: str = "stories", *, seed: int = 0, documents: int = DOCUMENTS, val_documents: int = VAL_DOCUMENTS
) -> TokenDataset:
    """Return the built-in corpus in memory, tokenized by words. Train and validation share no story."""
    if name != "stories":
        raise DataError(f"no built-in data called {name!r}: there is 'stories'")
    if seed < 0 or documents < 1 or val_documents < 1:
        raise DataError(f"seed {seed}, documents {documents}, val_documents {val_documents}: must be at least 0, 1, 1")
    make = _generate if documents + val_documents < _CACHED_FROM else _load_or_generate
    train, val, (train_bytes, val_bytes) = make(seed, documents, val_documents)
    backend = story_tokenizer()
    return in_memory(
        train,
        val,
        vocab_size=backend.get_vocab_size(),
        documents=(documents, val_documents),
        text_bytes=(int(train_bytes), int(val_bytes)),
        eos_id=token_id(backend, SEPARATOR),
        tokenizer_json=backend.to_str(),
        tokenizer_hash=vocabulary_sha256(backend),
        eos_token=SEPARATOR,
        synthetic=True,
        description=f"built-in synthetic stories, seed {seed}, {documents:,} documents",
    )


def recall_examples(count: int = VAL_DOCUMENTS) -> list[tuple[list[int], list[int]]]:
    """Return stories of the validation stream as ids, each with the positions of the words that must be remembered.

    An end-of-text token comes first, as in a training sequence. A word is one token, so an answer has one position.
    """
    backend = story_tokenizer()
    examples = []
    for story in stories.annotated_stories(1, count):
        encoding = backend.encode(story.text)
        position_of_end = {end: position for position, (_, end) in enumerate(encoding.offsets, start=1)}
        ids = [token_id(backend, SEPARATOR), *encoding.ids]
        examples.append((ids, [position_of_end[recall.end] for recall in story.recalls]))
    return examples


@lru_cache(maxsize=1)
def story_tokenizer() -> Tokenizer:
    """Return a word-level tokenizer whose vocabulary is every word that a story can contain."""
    texts = [text for value in vars(words).values() if isinstance(value, tuple) for text in value]
    all_words = {word for text in texts for word in _WORD.findall(re.sub(r"\{.*?\}", " ", text))}
    marks = {mark for text in texts for mark in re.findall(r"[^\sA-Za-z]", re.sub(r"\{.*?\}", "", text))}
    entries = {f" {word}" for word in all_words} | {word for word in all_words if word[0].isupper()}
    entries |= marks | {f" {mark}" for mark in marks}
    vocabulary = {word: index for index, word in enumerate((SEPARATOR, UNKNOWN, *sorted(entries)))}
    backend = Tokenizer(models.WordLevel(vocabulary, UNKNOWN))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(_TOKEN), behavior="removed", invert=True)
    backend.decoder = decoders.Fuse()
    backend.add_special_tokens([AddedToken(SEPARATOR, special=True, normalized=False)])
    return backend


def _generate(seed: int, documents: int, val_documents: int) -> list[npt.NDArray[Any]]:
    """Return the ids of both splits, which use different random streams, and the sizes of their texts in bytes."""
    train = list(stories.stories(2 * seed, documents))
    trained_on = set(train)
    # A story can repeat one of the training split by chance, however rarely: it is then left out.
    candidates = stories.stories(2 * seed + 1, 2 * val_documents + 100)
    val = list(islice((text for text in candidates if text not in trained_on), val_documents))
    return [_encode(train), _encode(val), np.array([sum(map(len, train)), sum(map(len, val))])]


def _encode(texts: Sequence[str]) -> npt.NDArray[np.uint16]:
    """Return the ids that the tokenizer gives, looked up here in a quarter of its time, since every word is known."""
    backend = story_tokenizer()
    split, id_of, eos = re.compile(_TOKEN).findall, backend.get_vocab().__getitem__, token_id(backend, SEPARATOR)
    ids: list[int] = []
    for text in texts:
        ids += map(id_of, split(text))
        ids.append(eos)
    return np.array(ids, dtype=np.uint16)


def _load_or_generate(*size: int) -> list[npt.NDArray[Any]]:
    """Return what `_generate` returns from the user's cache folder, or generate and store it.

    The file's name has a hash of everything that determines the tokens, so one that other code wrote is never read.
    Files are renamed into place when they are complete, so several processes may store the same one at once.
    """
    key = hashlib.sha256(repr(size).encode())
    try:
        folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "oelm"
        for source in (stories.__file__, words.__file__, random_choices.__file__, __file__):
            key.update(Path(source).read_bytes())
    except (OSError, RuntimeError):  # there is no home folder, or no source code
        return _generate(*size)
    path = folder / f"stories-{key.hexdigest()[:16]}.npz"
    # A missing or damaged file (numpy's format has checksums) is not an error: the tokens are generated again.
    with suppress(OSError, ValueError, EOFError, BadZipFile), np.load(path, allow_pickle=False) as arrays:
        return list(arrays.values())
    tokens = _generate(*size)
    content = io.BytesIO()
    np.savez(content, *tokens)
    with suppress(OSError, FileError):  # a folder that cannot be written only costs time
        folder.mkdir(parents=True, exist_ok=True)
        write_bytes(path, content.getvalue())
    return tokens
