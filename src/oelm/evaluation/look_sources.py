"""Open what `oelm look` looks at: the model of a run or folder, the tokens it reads, and the models of a run's past."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..config import RunConfig
from ..data.tokenizer import load_model_tokenizer
from ..errors import ConfigError
from ..models.hf_config import max_text_length
from ..models.load import build_model
from ..runs.environment import config_of, is_run
from ..training.best import model_step
from ..training.checkpoint import list_checkpoints
from ..training.parallel import device_for
from ..training.tasks.language import LanguageModelling
from ..training.tasks.masked import MaskedLanguageModelling
from ..training.tasks.model_tokenizer import ModelTokenizer
from ..training.tasks.open import open_task
from .generate import positions_of
from .load import load_model_folder, load_run_with_label, model_folder


@dataclass(frozen=True, eq=False)
class LookedAt:
    """A model with its tokenizer. A run on a generated task has none, but `own_ids`, the first of its sequences."""

    source: str
    label: str
    model: Any
    tokenizer: Any
    own_ids: tuple[int, ...] = ()


@dataclass(frozen=True)
class Texts:
    """What to read: texts, with those of the decoder of an encoder-decoder, cut to each of these numbers of tokens."""

    texts: tuple[str, ...] = ()
    targets: tuple[str, ...] = ()
    contexts: tuple[int, ...] = ()


@dataclass(frozen=True)
class TokensRead:
    """The tokens of one text as a model reads them; those of the decoder begin with its start token."""

    text: str | None
    ids: tuple[int, ...]
    tokens: tuple[str, ...]
    target_ids: tuple[int, ...] | None = None
    target_tokens: tuple[str, ...] | None = None


def open_source(source: Path, last: bool = False) -> LookedAt:
    """Return the model of a run or of any folder of a text model, in float32 and in evaluation mode."""
    if is_run(source):
        model, label = load_run_with_label(source, last)
        tokenizer, own_ids = _tokens_of_run(source, last)
    else:
        if last:
            raise ConfigError(f"{source}: --last is for a run; this folder holds one model")
        model, label, own_ids = build_model(str(source)), "", ()
        tokenizer = load_model_tokenizer(source)
    if model.main_input_name != "input_ids":
        raise ConfigError(f"{source}: a {type(model).__name__} reads {model.main_input_name}, not text")
    return LookedAt(str(source), label, _ready(model), tokenizer, own_ids)


def require_checkpoints(run: Path) -> list[Path]:
    """Return the folders of a run's checkpoints. Raise where there are less than two."""
    if not is_run(run):
        raise ConfigError(f"{run}: --drift compares the checkpoints of a run, and this is no run's folder")
    folders = list_checkpoints(run / "checkpoints")
    if len(folders) < 2:
        count = "one checkpoint" if folders else "no checkpoint"
        raise ConfigError(
            f"{run}: has {count}, and --drift needs two: train with a larger checkpoint.keep, or name two folders"
        )
    return folders


def checkpoint_models(run: Path) -> Iterator[tuple[int, Any]]:
    """Yield the step and the model of each of a run's checkpoints, from the first to the last."""
    config = config_of(run)
    for folder in require_checkpoints(run):
        yield model_step(folder), _ready(load_model_folder(folder, config))


def read_texts(looked_at: LookedAt, given: Texts) -> list[TokensRead]:
    """Return what a model reads of each text at each length. Raise for a text that it cannot read, or not whole."""
    if looked_at.tokenizer is None:
        if given.texts:
            raise ConfigError(
                f"{looked_at.source}: its tokens are numbers without a text; leave out --text, and it reads sequences "
                "of its own task"
            )
        whole = [TokensRead(None, looked_at.own_ids, tuple(map(str, looked_at.own_ids)))]
    else:
        whole = _encode_all(looked_at, given)
    readings = []
    for number, reading in enumerate(whole, start=1):
        for context in given.contexts or (None,):
            cut = reading if context is None else _cut(reading, context, number)
            _require_readable(looked_at, cut, number)
            readings.append(cut)
    return readings


def _ready(model: Any) -> Any:
    return model.float().to(device_for("auto")).eval()


def _tokens_of_run(run: Path, last: bool) -> tuple[Any, tuple[int, ...]]:
    """Return a run's tokenizer, or for a generated task None and the tokens of its first validation sequence."""
    config = config_of(run)
    if config.task.kind == "generated":
        rows = open_task(config).validation(0, 1, 1)["inputs"]
        return None, tuple(rows[0].tolist())
    folder = model_folder(run, last)
    if folder.name == "best":  # it has the tokenizer beside the model: the run may have left its data behind
        return load_model_tokenizer(folder), ()
    return _tokenizer_of_config(config), ()


def _tokenizer_of_config(config: RunConfig) -> Any:
    if config.task.kind == "language":
        return LanguageModelling.open(config).data.load_tokenizer()
    if config.task.kind == "masked-language":
        return MaskedLanguageModelling.open(config).tokenizer
    return ModelTokenizer.of(config).tokenizer


def _encode_all(looked_at: LookedAt, given: Texts) -> list[TokensRead]:
    if not given.texts:
        raise ConfigError("look: give a text to look at, with --text or --text-file")
    reads_two = looked_at.model.config.is_encoder_decoder
    name = type(looked_at.model).__name__
    if reads_two and not given.targets:
        raise ConfigError(
            f"{looked_at.source}: a {name} reads two texts: --text for its encoder, and --target, which its decoder "
            "continues"
        )
    if given.targets and not reads_two:
        raise ConfigError(f"{looked_at.source}: a {name} reads one text; leave out --target")
    if reads_two and len(given.targets) not in (1, len(given.texts)):
        raise ConfigError(f"look: {len(given.targets)} times --target for {len(given.texts)} texts; give one for each")
    targets = given.targets * (len(given.texts) if len(given.targets) == 1 else 1)
    return [_encode(looked_at, text, targets[number] if reads_two else None) for number, text in enumerate(given.texts)]


def _encode(looked_at: LookedAt, text: str, target: str | None) -> TokensRead:
    ids = tuple(looked_at.tokenizer(text).input_ids)
    target_ids = None if target is None else _decoder_input(looked_at, looked_at.tokenizer(target).input_ids)
    return TokensRead(
        text,
        ids,
        _names(looked_at.tokenizer, ids),
        target_ids,
        None if target_ids is None else _names(looked_at.tokenizer, target_ids),
    )


def _decoder_input(looked_at: LookedAt, ids: Sequence[int]) -> tuple[int, ...]:
    """Return what the decoder reads to write these tokens: its start token, and all but the last."""
    start = looked_at.model.config.decoder_start_token_id
    if not isinstance(start, int):
        raise ConfigError(
            f"{looked_at.source}: its config has decoder_start_token_id {start!r}, which its decoder begins with"
        )
    return (start, *ids[:-1])


def _names(tokenizer: Any, ids: Sequence[int]) -> tuple[str, ...]:
    return tuple(str(tokenizer.decode([token])) for token in ids)


def _cut(reading: TokensRead, context: int, number: int) -> TokensRead:
    """Return a reading of the first tokens alone, in the decoder of as many at most."""
    if context > len(reading.ids):
        raise ConfigError(f"--context {context}: text {number} has {len(reading.ids)} tokens")
    ids, names = reading.target_ids, reading.target_tokens
    return TokensRead(
        reading.text,
        reading.ids[:context],
        reading.tokens[:context],
        None if ids is None else ids[:context],
        None if names is None else names[:context],
    )


def longest_text(model: Any) -> int | None:
    """Return how many tokens of a text a model can read, or None where its positions have no end."""
    return None if positions_of(model) is None else max_text_length(model.config, sys.maxsize)


def _require_readable(looked_at: LookedAt, reading: TokensRead, number: int) -> None:
    """Raise for tokens that the model has no embedding or no position for, and for less than two of them."""
    limit, rows = longest_text(looked_at.model), looked_at.model.get_input_embeddings().weight.shape[0]
    for name, ids in (("text", reading.ids), ("target", reading.target_ids)):
        if ids is None:
            continue
        if len(ids) < 2:
            raise ConfigError(
                f"{name} {number}: is {len(ids)} token{'' if len(ids) == 1 else 's'} long; how a head looks at other "
                "tokens needs two"
            )
        if limit is not None and len(ids) > limit:
            raise ConfigError(
                f"{name} {number}: {len(ids)} tokens, and the model has {limit} positions; give a shorter one, or cut "
                f"it with --context {limit}"
            )
        if max(ids) >= rows:
            raise ConfigError(
                f"{looked_at.source}: its tokenizer gives token {max(ids)}, and the model has {rows}: is it another "
                "model's tokenizer?"
            )
