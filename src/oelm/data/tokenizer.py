"""Load tokenizers by name or folder, build them from vocabulary files, or train them on a corpus."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from ..base.files import looks_local
from ..base.hub import hub_options
from ..errors import DataError, OelmError, first_line
from .corpus.readers import SEPARATOR
from .text_files import read_errors_explained

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

_MIN_BPE = 257  # every byte, and the end-of-text token
_BERT_TOKENS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
_SPECIAL_TOKENS = ("eos_token", "bos_token", "unk_token", "pad_token", "mask_token")
_MASK = "[MASK]"


@dataclass(frozen=True, eq=False)
class TextTokenizer:
    """A tokenizer for a corpus: its name for the record, the Rust object, and its special tokens.

    `special` maps names such as "eos_token", which ends a document, to tokens. `trained` is the requested vocabulary
    size when it was trained on the corpus.
    """

    name: str
    backend: Tokenizer
    special: dict[str, str]
    trained: int | None = None

    @cached_property
    def eos_id(self) -> int:
        """Return the id of the token that ends a document."""
        return token_id(self.backend, self.special["eos_token"])

    @cached_property
    def vocab_size(self) -> int:
        """Return one more than the highest id: the number of rows that a model's embedding needs."""
        return max(self.backend.get_vocab(with_added_tokens=True).values()) + 1

    @cached_property
    def sha256(self) -> str:
        """Return the hash of the parts that determine how text becomes ids."""
        return vocabulary_sha256(self.backend)

    def save(self, folder: Path) -> None:
        """Write a folder that `PreTrainedTokenizerFast.from_pretrained` reads."""
        wrap(self.backend, dict(self.special)).save_pretrained(str(folder))


def token_id(backend: Tokenizer, token: str) -> int:
    """Return the id of a token; raise DataError when it is not in the vocabulary."""
    index = backend.token_to_id(token)
    if index is None:
        raise DataError(f"the tokenizer has no token {token!r}; name one that is in its vocabulary")
    return index


def vocabulary_sha256(backend: Tokenizer) -> str:
    """Return the sha256 of those parts of a tokenizer's JSON that determine how text becomes ids, and back.

    Truncation, padding and the post-processor, which adds special tokens, are left out: a corpus is encoded without
    them, and transformers rewrites them when it loads a tokenizer. `ModelTokenizer` hashes those that a model needs.
    """
    content: dict[str, Any] = json.loads(backend.to_str())
    for unused in ("truncation", "padding", "post_processor"):
        content.pop(unused, None)
    # transformers writes an absent affix as "", tokenizers as null.
    for affix in ("continuing_subword_prefix", "end_of_word_suffix"):
        if content.get("model", {}).get(affix) == "":
            content["model"][affix] = None
    canonical = json.dumps(content, sort_keys=True, ensure_ascii=False, separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).hexdigest()


@contextmanager
def readable_tokenizer(name: str | Path, remedy: str) -> Iterator[None]:
    """Turn any error of reading a tokenizer's files into one line: damaged ones end its libraries in any error.

    Panics of the Rust library, for one, are no Exception.
    """
    try:
        yield
    except (KeyboardInterrupt, SystemExit, GeneratorExit, OelmError):
        raise
    except BaseException as error:
        raise DataError(f"tokenizer {str(name)!r}: cannot be loaded ({first_line(error)}). {remedy}") from error


def wrap(backend: Tokenizer, special: dict[str, Any]) -> Any:
    """Return a transformers tokenizer that wraps a copy of a Rust tokenizer."""
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast(tokenizer_object=backend, **special)


def add_mask_token(tokenizer: Any, vocab_size: int) -> None:
    """Give a transformers tokenizer of `vocab_size` ids a mask token, unless it has one: its [MASK], or one more id.

    The token takes in the space before it, as the words do that it stands for in GPT-2's tokenizer.
    """
    if tokenizer.mask_token_id is None:
        token = AddedToken(_MASK, lstrip=True, special=True, normalized=False)
        tokenizer.add_special_tokens({"mask_token": token})
    if tokenizer.mask_token_id > vocab_size:
        raise DataError(
            f"the tokenizer gives its mask token {tokenizer.mask_token!r} the id {tokenizer.mask_token_id}, and the "
            f"first id after its own is {vocab_size}; use a tokenizer that has a mask token"
        )


def special_ids(tokenizer: Any) -> set[int]:
    """Return the ids of a transformers tokenizer's special tokens, those without a role included."""
    added = (index for index, token in tokenizer.added_tokens_decoder.items() if token.special)
    return {*tokenizer.all_special_ids, *added}


def load_tokenizer(name: str | Path, eos: str | None = None) -> TextTokenizer:
    """Load the tokenizer of a corpus by its folder or Hub name; `eos` is the token that ends a document."""
    folder = _folder_of(name)
    label = str(name) if folder is None else folder.resolve().name
    if folder is None or (folder / "tokenizer.json").is_file():
        loaded = _load_fast(str(name))
        special = {key: str(getattr(loaded, key)) for key in _SPECIAL_TOKENS if getattr(loaded, key, None)}
        backend = Tokenizer.from_str(loaded.backend_tokenizer.to_str())
    elif _holds_gpt2(folder):
        backend, special = _byte_level(folder), {}
    else:
        raise DataError(f"{folder}: no tokenizer here; it needs tokenizer.json, or vocab.json and merges.txt")
    # Some published tokenizers truncate every text to the length of their model, which would lose text here.
    backend.no_truncation()
    backend.no_padding()
    return TextTokenizer(label, backend, special | {"eos_token": _end_of_text(backend, special, eos, label)})


def load_model_tokenizer(name: str | Path, revision: str | None = None) -> PreTrainedTokenizerFast:
    """Load the tokenizer of a model by its folder or Hub name, with the special tokens that it adds to a text.

    A folder holds tokenizer.json, or BERT's vocab.txt, or GPT-2's vocab.json and merges.txt.
    """
    folder = _folder_of(name)
    if folder is None or (folder / "tokenizer.json").is_file():
        return _load_fast(str(name), revision)
    if (folder / "vocab.txt").is_file():
        return _word_piece(folder / "vocab.txt")
    if _holds_gpt2(folder):
        backend = _byte_level(folder)
        return wrap(backend, {"eos_token": _end_of_text(backend, {}, None, folder.name)})
    raise DataError(f"{folder}: no tokenizer here; it needs tokenizer.json, vocab.txt, or vocab.json and merges.txt")


def _word_piece(vocabulary: Path) -> PreTrainedTokenizerFast:
    """Return BERT's tokenizer, built from its word list alone."""
    from transformers import BertTokenizerFast

    with read_errors_explained(vocabulary):
        words = vocabulary.read_text(encoding="utf-8").splitlines()
    absent = [token for token in _BERT_TOKENS if token not in words]
    if absent:
        raise DataError(f"{vocabulary}: not a BERT vocabulary; it has no {', '.join(absent)}")
    return BertTokenizerFast(vocab=str(vocabulary), do_lower_case=_lower_case(vocabulary.parent, words))


def _lower_case(folder: Path, words: list[str]) -> bool:
    """Return True when a BERT vocabulary is uncased, by its tokenizer_config.json, or else by its words."""
    config = folder / "tokenizer_config.json"
    if config.is_file():
        try:
            lower_case = json.loads(config.read_text(encoding="utf-8")).get("do_lower_case")
        except (OSError, ValueError, AttributeError) as error:
            raise DataError(f"{config}: not a JSON object ({error})") from None
        if lower_case is not None:
            return bool(lower_case)
    return not any(word.isalpha() and word != word.lower() for word in words)


def _folder_of(name: str | Path) -> Path | None:
    """Return the folder that a tokenizer's name means, or None for a Hub name."""
    folder = Path(name)
    if folder.is_dir():
        return folder
    if folder.exists():
        raise DataError(f"{folder}: a file; name the folder that holds the tokenizer")
    if isinstance(name, Path) or looks_local(name):
        raise DataError(f"{name}: no such folder")
    return None


def train_bpe(texts: Iterator[str], size: int, eos: str | None = None) -> TextTokenizer:
    """Train a byte-level BPE of at most `size` entries; the same texts give the same tokenizer."""
    check_bpe_size(size)
    eos = eos or SEPARATOR
    backend = Tokenizer(models.BPE())
    _make_byte_level(backend)
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=[AddedToken(eos, special=True, normalized=False)],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(texts, trainer)
    return TextTokenizer(f"bpe-{size}", backend, {"eos_token": eos}, trained=size)


def check_bpe_size(size: int) -> None:
    """Raise DataError for a vocabulary that cannot hold every byte and the end-of-text token."""
    if size < _MIN_BPE:
        raise DataError(f"train_bpe {size}: at least {_MIN_BPE} entries are needed, for every byte and end-of-text")


def _load_fast(name: str, revision: str | None = None) -> PreTrainedTokenizerFast:
    """Load a folder with tokenizer.json or a Hub name with transformers; raise DataError unless it is fast."""
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    file, *configs = (Path(name) / file for file in ("tokenizer.json", "tokenizer_config.json", "config.json"))
    remedy = "Check the name and the network, or give a folder with tokenizer.json, or with vocab.json and merges.txt"
    if Path(name).exists():
        remedy = "Restore the folder's files"
    with readable_tokenizer(name, remedy):
        if file.is_file() and not any(config.is_file() for config in configs):
            loaded = PreTrainedTokenizerFast(tokenizer_file=str(file))
        else:
            options = {"revision": revision or "main", **hub_options(name)}
            loaded = AutoTokenizer.from_pretrained(name, trust_remote_code=False, **options)
    if not isinstance(getattr(loaded, "backend_tokenizer", None), Tokenizer):
        raise DataError(f"tokenizer {name!r}: not a fast tokenizer; give one that has a tokenizer.json")
    with readable_tokenizer(name, remedy):  # some damage shows only in use
        Tokenizer.from_str(loaded.backend_tokenizer.to_str())
        loaded.decode(loaded("a").input_ids)
    return loaded


def _holds_gpt2(folder: Path) -> bool:
    return (folder / "vocab.json").is_file() and (folder / "merges.txt").is_file()


def _byte_level(folder: Path) -> Tokenizer:
    with readable_tokenizer(folder, "Its vocab.json and merges.txt are not a BPE"):
        backend = Tokenizer(models.BPE.from_file(str(folder / "vocab.json"), str(folder / "merges.txt")))
    _make_byte_level(backend)
    if backend.token_to_id(SEPARATOR) is not None:
        backend.add_special_tokens([AddedToken(SEPARATOR, special=True, normalized=False)])
    return backend


def _make_byte_level(backend: Tokenizer) -> None:
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()


def _end_of_text(backend: Tokenizer, special: dict[str, str], requested: str | None, name: str) -> str:
    """Return the token that ends a document: the requested one, the tokenizer's EOS token, or the usual separator."""
    if requested is not None:
        token_id(backend, requested)
        return requested
    if "eos_token" in special:
        return special["eos_token"]
    if backend.token_to_id(SEPARATOR) is not None:
        return SEPARATOR
    known = ", ".join(repr(token.content) for token in backend.get_added_tokens_decoder().values() if token.special)
    raise DataError(
        f"tokenizer {name!r}: has no end-of-text token; name one as eos"
        + (f" (its special tokens are {known})" if known else "")
    )
