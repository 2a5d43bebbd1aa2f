"""The transformers config of a run's model: built for a model with random weights, read for a pretrained one."""

from __future__ import annotations

import json
from collections.abc import Callable
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import CONFIG_MAPPING, AutoConfig

from ..base.files import require_reachable
from ..base.hub import hub_options
from ..base.machine import memory
from ..base.text import short_count
from ..config import GPT, RANDOM, ModelConfig
from ..errors import CheckpointError, ConfigError, OelmError, first_line
from .gpt_config import gpt_config
from .small import require_fields, small_config

# What the modules of one layer take at least, whatever their sizes: Python objects.
_LAYER_BYTES = 10_000
# Families that count positions from after the padding token's id: that many of their positions are never used.
OFFSET_POSITIONS = frozenset({"roberta", "xlm-roberta", "camembert", "mpnet"})
# Options of from_pretrained that say where a config is read from.
_LOCATION_OPTIONS = ("revision", "token", "cache_dir", "subfolder")


def is_fresh(config: ModelConfig) -> bool:
    """Return True when the model starts with random weights, False when it is pretrained."""
    return config.from_scratch or config.name.startswith((GPT, RANDOM))


def build_hf_config(config: ModelConfig, vocab_size: int | None, length: int) -> Any:
    """Return the transformers config of the model that `config` names.

    The project's GPT and the small random models get the given vocabulary and length. A named model keeps its own
    sizes; its fields can only be changed when it is trained from scratch.
    """
    fitting = {} if vocab_size is None else {"vocab_size": vocab_size}
    if config.name.startswith(GPT):
        fields = {**fitting, "max_position_embeddings": length, **config.fields}
        try:
            return gpt_config(config.name.removeprefix(GPT), **fields)
        except OelmError as error:
            raise ConfigError(f"model: {error}") from None
    if config.name.startswith(RANDOM):
        family = config.name.removeprefix(RANDOM)
        require_fields(small_config(family), config.fields)
        return small_config(family, **{**fitting, **config.fields})
    require_changeable(config)
    hf_config = read_hf_config(config.name, label="model.name ", revision=config.revision or "main")
    if getattr(hf_config, "oelm", None) is not None:
        raise ConfigError(
            f"model.name {config.name}: a method was applied to it already. Write it out as a plain model first, "
            f"`oelm export {config.name} OUT`, and train that"
        )
    require_fields(hf_config, config.fields)
    for name, value in config.fields.items():
        setattr(hf_config, name, value)
    return hf_config


def require_memory(hf_config: Any, build: Callable[[], nn.Module] | None = None, stored: int = 0) -> None:
    """Raise for a model whose weights alone, in float32, are more than the machine's memory, before they fill it.

    At first less is counted than any such model has: a square matrix and a feed-forward layer in each layer, the
    layer's modules, and the embedding. Then `build` is called without values, to count all. `stored` are the bytes of
    the files that hold the weights: what was written once in full is no mistake, and may be loaded on many devices.
    """
    room = memory()
    if room is None:
        return
    sizes = (getattr(hf_config, name, None) for name in ("hidden_size", "num_hidden_layers", "vocab_size"))
    width, layers, vocabulary = (size if isinstance(size, int) and size > 0 else 0 for size in sizes)
    inner = getattr(hf_config, "intermediate_size", None)
    weights = layers * width * (width + 2 * (inner if isinstance(inner, int) and inner > 0 else 0)) + vocabulary * width
    _require_room(weights, layers * _LAYER_BYTES, stored, room)
    if build is not None:
        with torch.device("meta"):
            weights = sum(parameter.numel() for parameter in build().parameters())
        _require_room(weights, 0, stored, room)


def _require_room(weights: int, modules: int, stored: int, room: int) -> None:
    if 4 * weights + modules > room and weights > stored:
        raise ConfigError(
            f"model: at least {short_count(weights)} weights, {short_count(4 * weights + modules)}B, and this machine "
            f"has {short_count(room)}B of memory; use a smaller model"
        )


def read_hf_config(path: str | PathLike[str], config_class: Any = AutoConfig, label: str = "", **options: Any) -> Any:
    """Read the config of a model folder or Hub name, without remote code.

    `options` are those of `from_pretrained`; the ones that say where a config is (revision, token, ...) are used.
    `label` precedes the path in error messages.
    """
    require_reachable(path)
    location = hub_options(path) | {key: options[key] for key in _LOCATION_OPTIONS if key in options}
    try:
        return config_class.from_pretrained(path, trust_remote_code=False, **location)
    # A damaged config.json can end transformers in any error.
    except Exception as error:  # noqa: BLE001
        problem = (
            "the folder holds no config that transformers can read"
            if Path(path).exists()
            else "no such folder, and no model of that name could be reached on the Hub"
        )
        raise CheckpointError(f"{label}{path}: {problem} ({first_line(error)}){_way_on(Path(path))}") from None


def _way_on(folder: Path) -> str:
    """Return what to do with a folder that transformers cannot read, where its files say so, else nothing."""
    if (folder / "adapter_config.json").is_file():
        return ". It holds an adapter that peft saved by itself: load its base model, then PeftModel.from_pretrained"
    try:
        model_type = json.loads((folder / "config.json").read_text(encoding="utf-8"))["model_type"]
    except (OSError, ValueError, KeyError, TypeError):
        return ""
    if not isinstance(model_type, str) or model_type in CONFIG_MAPPING:  # damaged, or one that transformers knows
        return ""
    return ". If a class of yours reads it, register that with AutoConfig; on the command line: oelm --plugin FILE ..."


def require_changeable(config: ModelConfig) -> None:
    """Raise when `model.fields` is set for a pretrained model, whose weights only fit the config they came with."""
    if config.fields and not config.from_scratch:
        raise ConfigError("model.fields: a pretrained model's config is fixed; set model.from_scratch to change it")


def max_text_length(hf_config: Any, limit: int) -> int:
    """Return how many tokens of a text the model can read, at most `limit`."""
    positions = getattr(hf_config, "max_position_embeddings", None) or getattr(hf_config, "n_positions", None)
    if positions is None:
        return limit
    positions -= unused_positions(hf_config)
    if positions < 1:
        raise ConfigError(
            f"model: a {hf_config.model_type} counts positions from after its padding token, whose id is "
            f"{hf_config.pad_token_id} here: use a tokenizer with a padding token at the start of its vocabulary"
        )
    return min(limit, int(positions))


def unused_positions(hf_config: Any) -> int:
    """Return how many of a model's first positions no token ever has."""
    padding = hf_config.pad_token_id if hf_config.model_type in OFFSET_POSITIONS else None
    return 0 if padding is None else int(padding) + 1
