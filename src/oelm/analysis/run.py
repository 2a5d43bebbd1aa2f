"""A run as its records show it, and the names that a report gives to its method and its data."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any

from ..base.strict import flat
from ..config import GPT, RANDOM, WITHOUT_EFFECT, RunConfig
from ..method.spec import PRESETS, Method
from ..runs.folder import UNCOMPARABLE_TIMES
from ..runs.schema import (
    Audit,
    BenchRows,
    DecodeBench,
    Downstream,
    DownstreamMetric,
    DownstreamTask,
    Environment,
    MetricLine,
    Parameters,
    Result,
    Samples,
    Status,
    StepBench,
    StoryRecall,
    TaskRecord,
    Timing,
)

# The prefix that the data's fields in environment.json get among the settings of a run.
DATA = "environment.data."


# The seed in the description of generated sequences, and the field with their hash.
_SEED, _SEQUENCES = re.compile(r", seed \d+"), "splits.train.sha256"
# Beginning of the names of figures that were measured on the test split.
TEST = "test_"


@dataclass(frozen=True, eq=False, kw_only=True)
class Attempt:
    """A run with or without a result: one that is running, or that failed. `environment` is None before it started."""

    path: Path
    id: str
    config: RunConfig
    environment: Environment | None
    metrics: tuple[MetricLine, ...]
    status: Status | None

    @property
    def seed(self) -> int:
        return self.config.seed

    @property
    def rate(self) -> float:
        return self.config.optimizer.learning_rate

    @property
    def experiment(self) -> str:
        return self.config.experiment

    @cached_property
    def method(self) -> str:
        return method_label(self.config.method)

    @cached_property
    def task(self) -> TaskRecord:
        return TaskRecord(kind=self.config.task.kind, name=self.config.task.name)

    @cached_property
    def dataset(self) -> str:
        """Return the name of the data: its description; before the run has started its path, or the task's name."""
        if self.environment is not None and self.environment.data.description:
            # The number of rows that were read is a setting and not part of the name: a tenth of a data set is still
            # that data set. Nor is the seed of generated sequences, of which every seed has its own.
            name = self.environment.data.description.split("; rows:")[0]
            return _SEED.sub("", name, 1) if self.task.kind == "generated" else name
        on_text = self.task.kind in ("language", "masked-language")
        return (self.config.data.path if on_text else None) or self.task.name

    @property
    def from_scratch(self) -> bool:
        """Return True when the model was not loaded from trained weights."""
        return self.config.model.from_scratch or self.config.model.name.startswith((GPT, RANDOM))

    @cached_property
    def flat_config(self) -> dict[str, Any]:
        """Return the config's fields by dotted name."""
        return flat(self.config.to_dict())

    @cached_property
    def flat_environment(self) -> dict[str, Any]:
        """Return the environment's fields by dotted name."""
        return {} if self.environment is None else flat(self.environment.model_dump())

    @cached_property
    def shared_settings(self) -> dict[str, Any]:
        """Return the settings that all arms of one setup share, by dotted name, with the hashes of the data."""
        varying = ("method", "optimizer.learning_rate")
        settings = {
            name: value for name, value in flat(comparable(self.config)).items() if not name.startswith(varying)
        }
        if self.environment is None:
            return settings
        # The path of a file is left out, since the hash of its content is a setting; so is the description, which names
        # the group of runs.
        data = flat(self.environment.data.model_dump(exclude_none=True)).items()
        fields = {name: value for name, value in data if name != "description" and not name.endswith(".file")}
        if self.task.kind == "generated" and self.config.data.seed is None:
            fields.pop(_SEQUENCES, None)  # they follow from the run's seed, which pairs have in common
        return settings | {f"{DATA}{name}": value for name, value in fields.items()}


@dataclass(frozen=True, eq=False, kw_only=True)
class Run(Attempt):
    """A run with its result and all its other records. The loader has checked that they belong together.

    `also` has the experiments of runs that equal this one, which is counted for them.
    """

    environment: Environment
    audit: Audit
    timing: Timing
    result: Result
    downstream: Downstream | None = None
    samples: Samples | None = None
    recall: StoryRecall | None = None
    also: tuple[str, ...] = ()

    @property
    def synthetic(self) -> bool:
        return self.environment.data.synthetic

    @property
    def train_tokens(self) -> float | None:
        """Return how many tokens of training data the run could see, if its environment records that."""
        split = self.environment.data.splits.get("train")
        return split.tokens * self.config.data.fraction if split is not None and split.tokens else None

    @property
    def notes(self) -> tuple[str, ...]:
        return (*self.result.notes, *self.result.warnings)

    @property
    def times_doubt(self) -> str | None:
        """Return why this run's step times must not be compared, or None."""
        if self.timing.only_warmup:
            return "it was too short: every step was warm-up"
        return next((note for note in self.notes if UNCOMPARABLE_TIMES in note), None)

    @cached_property
    def scores(self) -> dict[str, tuple[DownstreamTask, DownstreamMetric]]:
        """Return what the run scored on tasks of lm-eval by the name of its figure, such as "hellaswag.acc".

        A score of a model that is neither the last nor the best one of the result is left out: training went on.
        """
        tasks = [] if self.downstream is None else [task for task in self.downstream.tasks if task.step in self._steps]
        return {f"{task.key}.{metric.name}": (task, metric) for task in tasks for metric in task.metrics}

    @property
    def _steps(self) -> set[int]:
        """Return the steps of the result's last and best model: what was measured on others is left out."""
        return {validation.step for validation in (self.result.last, self.result.best) if validation is not None}

    def figure(self, name: str) -> float | None:
        """Return a figure of the result, the parameters or the step times by its name; None where there is none.

        `test_...` is a metric of the test text, of the best model or, where none was saved, of the last. Names with a
        dot are those of `scores`.
        """
        if name in self.scores:
            return finite(self.scores[name][1].value)
        if name == "step_seconds":
            return None if self.timing.step_seconds is None else finite(self.timing.step_seconds.median)
        if name == "recall":
            return finite(self.recall.recall) if self.recall is not None and self.recall.step in self._steps else None
        if name == "steps_per_hour":
            seconds = self.figure("step_seconds")
            return 3600 / seconds if seconds else None
        if name in Parameters.model_fields:
            return finite(getattr(self.result.parameters, name))
        if name in Result.model_fields:
            return finite(getattr(self.result, name))
        if name.startswith(TEST):
            return finite(getattr(self.result.evaluations.get("test"), name.removeprefix(TEST), None))
        if name.startswith("best_"):
            return finite(getattr(self.result.best, name.removeprefix("best_"), None))
        return finite(getattr(self.result.last, name, None))


@dataclass(frozen=True)
class LeftOut:
    """A run that is listed but not counted.

    `kind`: damaged, format (its records have another format), failed, cut, unfinished, at-chance, diverged, duplicate.
    `reason` says why in English; `values` are the figures and names in it, for a report in another language. `run` is
    set where training itself failed: a mean over the other seeds then has survivorship bias.
    """

    path: Path
    kind: str
    reason: str
    method: str = ""
    seed: int | None = None
    values: tuple[tuple[str, str], ...] = ()
    run: Attempt | None = None


@dataclass(frozen=True)
class Bench:
    """What `oelm bench --json` measured, one row for each arm: training steps, or tokens generated."""

    path: Path
    rows: BenchRows

    @property
    def steps(self) -> list[StepBench]:
        return [row for row in self.rows if isinstance(row, StepBench)]

    @property
    def decoding(self) -> list[DecodeBench]:
        return [row for row in self.rows if isinstance(row, DecodeBench)]


def flop_ratio(run: Run, reference: Run) -> float | None:
    """Return the FLOPs of a run's training step over those of another's: the bound on any time saved."""
    own, other = run.result.flops_per_token, reference.result.flops_per_token
    return own / other if own and other else None


def method_label(method: Method) -> str:
    """Return a method's name: the preset, or the nearest preset with the fields that differ from it."""
    return method.name if method.name != "custom" else _nearest_preset(method.to_json())


@cache
def _nearest_preset(method: str) -> str:
    settings = flat(Method.model_validate_json(method).model_dump(mode="json"))
    best: tuple[str, list[str]] | None = None
    for preset, fields in _flat_presets().items():
        differing = [f"{key}={_short(settings[key])}" for key in sorted(settings) if settings[key] != fields.get(key)]
        if best is None or len(differing) < len(best[1]):
            best = preset, differing
    assert best is not None
    return f"{best[0]} ({', '.join(best[1])})" if best[1] else best[0]


@cache
def _flat_presets() -> dict[str, dict[str, Any]]:
    return {name: flat(preset.model_dump(mode="json")) for name, preset in PRESETS.items()}


def comparable(config: RunConfig) -> dict[str, Any]:
    """Return a config without what cannot change a number: names, logging, where the run is saved."""
    sections = {key: value for key, value in config.to_dict().items() if key not in ("experiment", "seed")}
    sections = {key: value for key, value in sections.items() if key not in WITHOUT_EFFECT}
    optimizer, train = sections["optimizer"], sections["train"]
    # A warm-up that is given as a share of the steps is the same setting as that number of steps.
    if optimizer["warmup_steps"] is None and train["max_steps"]:
        optimizer["warmup_steps"] = round(train["max_steps"] * optimizer["warmup_share"])
    if optimizer["warmup_steps"] is not None:
        del optimizer["warmup_share"]
    del train["device"]  # the environment records which one it was
    for name in ("targets", "batch_size"):
        del sections["eval"][name]
    # The path of the data is not a setting: its hashes, in the environment, identify it.
    data = {key: value for key, value in sections["data"].items() if key not in ("path", "seed")}
    data["order"] = "the run's seed" if config.data_seed == config.seed else f"seed {config.data.seed}"
    return {**sections, "data": data}


def finite(value: Any) -> float | None:
    """Return a recorded number as a float; None where it is not a number or not finite."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return float(value)


def _short(value: Any) -> str:
    return ",".join(map(str, value)) if isinstance(value, list) else str(value)
