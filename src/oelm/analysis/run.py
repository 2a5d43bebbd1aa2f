"""One run as its records tell it, and what it is called: its method, task and data."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any

from ..config import GPT, RANDOM, WITHOUT_EFFECT
from ..errors import OelmError
from ..method.spec import PRESETS, Method
from ..runs.folder import UNCOMPARABLE_TIMES


@dataclass(frozen=True)
class Task:
    """What a run was trained for: language, classification or text2text, and the task's name."""

    kind: str
    name: str


@dataclass(frozen=True)
class LeftOut:
    """A run that is listed and not counted. `kind`: damaged, failed, cut, unfinished, at-chance, diverged, duplicate.

    `reason` says why in English; `values` are the figures and names in it, for a report in another language. `run` is
    there where it was left out for what it came to: a mean of the others is then one of survivors.
    """

    path: Path
    kind: str
    reason: str
    method: str = ""
    seed: int | None = None
    values: tuple[tuple[str, str], ...] = ()
    run: Run | None = None


# What only a benchmark of generation measures.
DECODED = "cache_bytes_per_token"


@dataclass(frozen=True)
class Bench:
    """Times of arms that `oelm bench --json` measured side by side, one row per arm: of steps, or of tokens written."""

    path: Path
    rows: tuple[dict[str, Any], ...]

    @property
    def decodes(self) -> bool:
        return DECODED in self.rows[0]


@dataclass(frozen=True, eq=False)
class Run:
    """One run as its records tell it. Whoever makes one has checked that the files go together."""

    path: Path
    config: dict[str, Any]
    environment: dict[str, Any]
    result: dict[str, Any]
    timing: dict[str, Any]
    audit: dict[str, Any]
    metrics: tuple[dict[str, Any], ...]
    status: dict[str, Any]
    old_config: bool = False

    @property
    def id(self) -> str:
        return str(self.config.get("id", ""))

    @property
    def seed(self) -> int:
        return int(self.config["seed"])

    @property
    def experiment(self) -> str:
        return str(self.config.get("experiment", ""))

    @cached_property
    def rate(self) -> float:
        return float(self.config["optimizer"]["learning_rate"])

    @cached_property
    def method(self) -> str:
        return method_label(json.dumps(self.config.get("method", {}), sort_keys=True))

    @cached_property
    def task(self) -> Task:
        recorded = self.result.get("task") or {}
        configured = self.config.get("task") or {}
        name = recorded.get("name") or (configured if isinstance(configured, str) else configured.get("name"))
        kind = recorded.get("kind")
        if kind is None:
            written = isinstance(configured, dict) and configured.get("form") == "text"
            kind = "language" if name in (None, "language") else "text2text" if written else "classification"
        return Task(str(kind), str(name or "language"))

    @cached_property
    def dataset(self) -> str:
        """What the data is called: its description, the task's name, or its path."""
        data = self.environment.get("data") or {}
        # How many rows were read is a setting, not a name: a tenth of a data set is still that data set.
        described = str(data.get("description") or "").split("; rows:")[0]
        path = (self.config.get("data") or {}).get("path")
        return str(described or (path if self.task.name == "language" else self.task.name) or self.task.name)

    @property
    def synthetic(self) -> bool:
        return bool((self.environment.get("data") or {}).get("synthetic"))

    @property
    def from_scratch(self) -> bool:
        """Whether the model started from nothing: no weights were loaded."""
        model = self.config.get("model") or {}
        return bool(model.get("from_scratch")) or str(model.get("name", "")).startswith((GPT, RANDOM))

    @property
    def train_tokens(self) -> float | None:
        """Tokens of the training data that the run could see, where its environment says."""
        tokens = ((self.environment.get("data") or {}).get("splits") or {}).get("train", {}).get("tokens")
        share = (self.config.get("data") or {}).get("fraction", 1.0)
        return float(tokens) * float(share) if tokens else None

    @property
    def notes(self) -> tuple[str, ...]:
        return tuple(str(note) for note in [*self.result.get("notes", []), *self.result.get("warnings", [])])

    @property
    def times_doubt(self) -> str | None:
        """Why this run's step times must not be compared, or none."""
        if self.timing.get("only_warmup"):
            return "it was too short: every step was warm-up"
        return next((note for note in self.notes if UNCOMPARABLE_TIMES in note), None)

    def figure(self, name: str) -> float | None:
        """A figure of this run by its name: of the result, of the parameters, or of the timing."""
        if name == "step_seconds":
            value = (self.timing.get("step_seconds") or self.result.get("step_seconds") or {}).get("median")
        elif name == "steps_per_hour":
            seconds = self.figure("step_seconds")
            value = 3600 / seconds if seconds else None
        elif name in ("frozen", "frozen_share", "trainable", "total"):
            value = (self.result.get("parameters") or self.audit).get(name)
        elif name in self.result:
            value = self.result[name]
        else:
            which, key = ("best", name.removeprefix("best_")) if name.startswith("best_") else ("last", name)
            value = (self.result.get(which) or {}).get(key)
        return finite(value)


def finite(value: Any) -> float | None:
    """A number of a record; none where it is no number or not finite."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return float(value)


def at_chance(run: Run) -> bool:
    """Whether a classifier is no better than its commonest class: as recorded, or as the figures say."""
    recorded = run.result.get("at_chance")
    if isinstance(recorded, bool):
        return recorded
    accuracy, majority = run.figure("accuracy"), (run.result.get("majority") or {}).get("accuracy")
    return accuracy is not None and majority is not None and accuracy <= majority


def comparable(run: Run) -> dict[str, Any]:
    """The config without what cannot change a number: names, logging, where it is kept."""
    apart = {"id", "format", "experiment", "seed", *WITHOUT_EFFECT}
    config = {key: value for key, value in run.config.items() if key not in apart}
    optimizer, train = dict(config.get("optimizer") or {}), dict(config.get("train") or {})
    if optimizer.get("warmup_steps") is None and train.get("max_steps"):
        optimizer["warmup_steps"] = round(train["max_steps"] * optimizer.get("warmup_share", 0.0))
    if optimizer.get("warmup_steps") is not None:
        optimizer.pop("warmup_share", None)
    train.pop("device", None)  # the environment says what it was
    evaluation = {
        key: value for key, value in (config.get("eval") or {}).items() if key not in ("targets", "batch_size")
    }
    # Where the data lies is no setting: its hashes, in the environment, say what it is.
    data = {key: value for key, value in (config.get("data") or {}).items() if key not in ("path", "seed")}
    own = (run.config.get("data") or {}).get("seed")
    data["order"] = "the run's seed" if own in (None, run.seed) else f"seed {own}"
    return {**config, "optimizer": optimizer, "train": train, "eval": evaluation, "data": data}


@cache
def method_label(method: str) -> str:
    """A method's name: the preset, or the nearest one with what differs from it."""
    fields = json.loads(method)
    try:
        name = Method.load(fields).name
    except OelmError:
        name = "custom"
    if name != "custom":
        return name
    best: tuple[int, str, list[str]] | None = None
    for preset, theirs in _flat_presets().items():
        mine = {**_flat_presets()["baseline"], **dict(flatten(fields))}
        differs = [key for key in sorted(mine) if mine[key] != theirs.get(key)]
        if best is None or len(differs) < best[0]:
            best = (len(differs), preset, [f"{key}={_short(mine[key])}" for key in differs])
    assert best is not None
    return f"{best[1]} ({', '.join(best[2])})" if best[2] else best[1]


@cache
def _flat_presets() -> dict[str, dict[str, Any]]:
    return {name: dict(flatten(preset.model_dump(mode="json"))) for name, preset in PRESETS.items()}


def flatten(content: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """The leaves of nested mappings with their dotted names."""
    for key, value in content.items():
        if isinstance(value, dict) and value:
            yield from flatten(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _short(value: Any) -> str:
    return ",".join(map(str, value)) if isinstance(value, list) else str(value)
