"""The config of a run that has no config file: chosen from its data and its model, and printed."""

from __future__ import annotations

import math
import re
import textwrap
from pathlib import Path
from typing import Any

from ..base.text import WIDTH
from ..config import RunConfig
from ..errors import ConfigError

_MODEL, _DATA = "gpt:tiny", "builtin:stories"
# What a first run on a small machine can afford: some passes over a small corpus, and an hour or less on a large one.
_EPOCHS, _FEWEST_STEPS, _MOST_STEPS = 3, 100, 1000
_BATCH, _LONGEST, _SHORTEST = 16, 256, 16
# How often a run is validated and saved.
_VALIDATIONS = 10
# A validation on fewer windows than this says little; a small corpus is cut into shorter ones.
_VALIDATION_WINDOWS = 8
# The rates of the guides: for random weights, and for pretrained ones.
_FRESH_RATE, _PRETRAINED_RATE = 1e-3, 5e-5
# Settings that `describe` prints, since a user may want others.
_SHOWN = ("data.sequence_length", "train.batch_size", "train.max_steps", "train.epochs", "optimizer.learning_rate")


def quick_config(data: str | None, model: str | None, fields: dict[str, Any], overrides: list[str]) -> RunConfig:
    """Return the config of a language-modelling run on `data`; `fields` and `overrides` come before what is chosen.

    Everything is a function of the data and the model, so that the same command resumes the run.
    """
    from ..models.hf_config import is_fresh
    from ..training.tasks.text import open_dataset

    data, model = data or _DATA, model or _MODEL
    tokens = open_dataset(data)
    held_out = tokens.val.tokens if tokens.val is not None else tokens.train.tokens
    length = _LONGEST
    while length > _SHORTEST and min(len(held_out), len(tokens.train.tokens)) <= _VALIDATION_WINDOWS * length:
        length //= 2
    chosen: dict[str, Any] = {
        "experiment": experiment_name(f"{folder_name(data)}-{Path(model).name}"),
        "model": {"name": model},
        "data": {"path": data, "sequence_length": length},
        "train": {"batch_size": _BATCH},
        **fields,
    }
    set_by_user = {override.partition("=")[0] for override in overrides}
    for name, option in (("data.path", "--data"), ("model.name", "--model")):
        if name in set_by_user:
            raise ConfigError(f"{name}: without a config file, give {option}, from which other settings follow")
    rate = _FRESH_RATE if is_fresh(RunConfig.load(chosen, overrides).model) else _PRETRAINED_RATE
    chosen.setdefault("optimizer", {"learning_rate": rate})
    # The user's settings first: how many steps an epoch has follows from them.
    draft = RunConfig.load(chosen, overrides)
    tokens_per_step = draft.data.sequence_length * draft.train.batch_size
    steps_per_epoch = draft.data.fraction * len(tokens.train.tokens) / tokens_per_step
    if "train.max_steps" in set_by_user or draft.train.epochs is not None:
        steps = draft.train.max_steps or math.ceil((draft.train.epochs or 0) * steps_per_epoch)
    else:
        steps = min(_MOST_STEPS, max(_FEWEST_STEPS, math.ceil(_EPOCHS * steps_per_epoch)))
        chosen["train"]["max_steps"] = steps
    every = max(1, steps // _VALIDATIONS)
    return RunConfig.load({**chosen, "eval": {"every": every}, "checkpoint": {"every": every}}, overrides)


def describe(config: RunConfig) -> str:
    """Return what was chosen for a run as overrides, which a user may repeat with other values, and its folder."""
    fields = config.to_dict()
    values = {name: fields[name.partition(".")[0]][name.partition(".")[2]] for name in _SHOWN}
    settings = " ".join(f"{name}={value:g}" for name, value in values.items() if value is not None)
    folded = textwrap.wrap(settings, WIDTH - 2, break_on_hyphens=False)
    return "\n  ".join([f"{config.folder} with", *folded, "and defaults; add KEY=VALUE to change any"])


def folder_name(data: str) -> str:
    """Return the last part of the path of a data folder, or the name of built-in data."""
    return Path(data.removeprefix("builtin:")).resolve().name


def experiment_name(text: str) -> str:
    """Return a run's experiment for these words, as part of a folder's name."""
    return re.sub(r"[^A-Za-z0-9.]+", "-", text).strip("-.") or "run"
