"""Turn experiments into runs: multiply out the axes, name and check every run, and put the runs in order."""

from __future__ import annotations

import hashlib
import itertools
import json
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from ..base.yaml_text import parse_yaml
from ..config import WITHOUT_EFFECT, RunConfig, as_number, parse_override, set_field
from ..errors import LabError, OelmError
from .experiment import Experiment, Scale, find_experiment

LEARNING_RATE = "optimizer.learning_rate"
# Short names of fields in the names of runs, for fields whose last part alone is unclear.
_SHORT_NAMES = {LEARNING_RATE: "lr", "model.name": "model", "train.max_steps": "steps", "task.name": "task"}
# Fields that are not in the name: method and seed have folders of their own, the others change no number.
_NOT_IN_NAME = ("method", "seed", "data.path", *WITHOUT_EFFECT)
_LONGEST_NAME = 120
# The folder in a run's folder with its best model as a plain transformers model, for the runs that start from it.
PLAIN = "plain"

# Seed, combination of axis values, experiment, method: each as its position in its list.
Order = tuple[int, int, int, int]


@dataclass(frozen=True)
class Request:
    """What the command line adds to experiments: seeds, axes, fixed fields, a folder of data, an output folder."""

    scale: Scale = "full"
    seeds: tuple[int, ...] | None = None
    axes: dict[str, tuple[Any, ...]] = field(default_factory=dict)
    overrides: tuple[str, ...] = ()
    data: str | None = None
    output: str = "runs"


@dataclass(frozen=True)
class PlannedRun:
    """One run of an experiment: its config, its position in the order, and the run whose best model it starts from."""

    experiment: Experiment
    config: RunConfig
    order: Order
    starts_from: PlannedRun | None = None
    smoke: bool = False

    @cached_property
    def folder(self) -> Path:
        return self.config.folder

    @cached_property
    def name(self) -> str:
        """Return the run's folder, relative to the output folder."""
        return str(self.folder.relative_to(self.config.output))


def plan_runs(experiments: Sequence[Experiment], request: Request) -> list[PlannedRun]:
    """Return every run of the experiments.

    Seeds are the outermost loop and methods the innermost, so that a slow hour of the machine affects all methods.
    """
    _refuse_contradictions(experiments, request)
    runs: list[PlannedRun] = []
    for number, experiment in enumerate(experiments):
        planned = _multiply_axes(experiment, request, number)
        names = Counter(run.name for run in planned)
        name, count = names.most_common(1)[0]
        if count > 1:
            raise LabError(f"experiment {experiment.id}: two values of an axis give the same run, {name}")
        runs += planned
    runs.sort(key=lambda run: run.order)
    # A run that others start from is listed once, before the first of them.
    ordered: dict[Path, PlannedRun] = {}
    for run in runs:
        if run.starts_from is not None:
            ordered.setdefault(run.starts_from.folder, run.starts_from)
        other = ordered.setdefault(run.folder, run)
        if other.config.id != run.config.id:  # one of the two would be lost
            ids = " and ".join(dict.fromkeys((other.experiment.id, run.experiment.id)))
            raise LabError(f"{ids}: both have a run {run.name}, and the two differ; give one of them another id")
        ordered[run.folder] = run
    return list(ordered.values())


def run_name(experiment: str, scale: Scale, values: dict[str, Any]) -> str:
    """Return the `experiment` field of a run's config: the experiment's id, then every field that sets it apart.

    `GPT-02`, `GPT-02-smoke`, `GPT-02-lr-1e-3`, `GPT-02-lr-1e-3-fraction-0.1`.
    """
    parts = [experiment] + (["smoke"] if scale == "smoke" else [])
    for name, value in values.items():
        if not name.startswith(_NOT_IN_NAME):
            parts += [_SHORT_NAMES.get(name, name.rpartition(".")[2]), _as_word(value)]
        elif name.startswith("method."):
            parts += [name.rpartition(".")[2], _as_word(value)]
    full_name = "-".join(parts)
    if len(full_name) <= _LONGEST_NAME:
        return full_name
    return f"{full_name[: _LONGEST_NAME - 9]}-{hashlib.sha256(full_name.encode()).hexdigest()[:8]}"


def parse_values(text: str) -> tuple[Any, ...]:
    """Return the values of an axis as written on the command line: `1e-4,3e-4` or `[first:1, last:1]`."""
    try:
        return tuple(map(as_number, parse_yaml(text if text.lstrip().startswith("[") else f"[{text}]")))
    except ValueError:
        raise LabError(f"{text!r}: cannot be read; values of an axis are separated by commas: 1e-4,3e-4") from None


def _multiply_axes(experiment: Experiment, request: Request, number: int) -> list[PlannedRun]:
    """Return the runs of one experiment; `number` is its position in the matrix."""
    fields, own_axes = experiment.at(request.scale)
    fixed = dict(map(parse_override, request.overrides))
    seeds = {} if request.seeds is None else {"seed": request.seeds}
    all_axes: dict[str, tuple[Any, ...]] = {**own_axes, **request.axes, **seeds}
    axes = {name: values for name, values in all_axes.items() if name not in fixed}
    for name, values in axes.items():
        _check_axis(experiment, name, values)
    if request.data is not None:
        fields = set_field(fields, "data.path", request.data)
    other_axes = [name for name in axes if name not in ("seed", "method")]
    combinations = list(itertools.product(*(axes[name] for name in other_axes)))
    runs = []
    for s, seed in enumerate(axes.get("seed", (0,))):
        for c, combination in enumerate(combinations):
            for m, method in enumerate(axes.get("method", (None,))):
                axis_values = dict(zip(other_axes, combination, strict=True))
                run_fields = fields if method is None else {**fields, "method": method}
                run_fields = {**run_fields, "seed": seed, "output": request.output}
                for name, value in axis_values.items():
                    run_fields = set_field(run_fields, name, value)
                run_fields["experiment"] = run_name(experiment.id, request.scale, {**axis_values, **fixed})
                runs.append(_plan_run(experiment, run_fields, request, (s, c, number, m)))
    return runs


def _plan_run(experiment: Experiment, fields: dict[str, Any], request: Request, order: Order) -> PlannedRun:
    try:
        predecessor = _run_to_start_from(experiment, fields, request, order)
        if predecessor is not None:
            model = {"name": str(predecessor.folder / PLAIN), "tokenizer": str(predecessor.folder / "best")}
            fields = {**fields, "model": model}
        config = RunConfig.load(fields, list(request.overrides))
        return PlannedRun(experiment, config, order, predecessor, request.scale == "smoke")
    except OelmError as error:
        raise LabError(f"experiment {experiment.id}: {error}") from None


def _run_to_start_from(
    experiment: Experiment, fields: dict[str, Any], request: Request, order: Order
) -> PlannedRun | None:
    """Return the run whose best model this one starts from, or None."""
    if experiment.after is None:
        return None
    if any(override.startswith(("method", "model.")) for override in request.overrides) or "method" in request.axes:
        raise LabError(f"its model and methods follow from {experiment.after.experiment}; they cannot be set here")
    predecessor = find_experiment(experiment.after.experiment)
    config, _ = predecessor.at(request.scale)
    method = experiment.after.methods[order[3]]
    shared = {"seed": fields["seed"], "output": fields["output"]}
    name = run_name(predecessor.id, request.scale, {})
    run_config = RunConfig.load({**config, **shared, "method": method, "experiment": name})
    return PlannedRun(predecessor, run_config, order, smoke=request.scale == "smoke")


def _check_axis(experiment: Experiment, name: str, values: tuple[Any, ...]) -> None:
    if not values:
        raise LabError(f"experiment {experiment.id}: axis {name} has no values")
    texts = [json.dumps(value, sort_keys=True, default=str) for value in values]
    repeated = [text for text in dict.fromkeys(texts) if texts.count(text) > 1]
    if repeated:
        raise LabError(f"experiment {experiment.id}: axis {name} lists {', '.join(repeated)} more than once")


def _refuse_contradictions(experiments: Sequence[Experiment], request: Request) -> None:
    """Raise if two parts of a request set the same thing."""
    fixed = dict(map(parse_override, request.overrides))
    for name in fixed:
        if name in request.axes or (name == "seed" and request.seeds is not None):
            raise LabError(f"{name} is set to {fixed[name]} and is an axis of this matrix too: give one of the two")
    for name in (*fixed, *request.axes):
        if name in ("experiment", "output"):
            value = fixed[name] if name in fixed else ",".join(map(str, request.axes[name]))
            raise LabError(f"{name}={value}: the lab names the runs; choose the folder with --out")
    if "seed" in request.axes and request.seeds is not None:
        raise LabError("--seeds and --axis seed=... both choose the seeds: give one of the two")
    if request.data is not None and request.scale == "smoke":
        raise LabError(f"--data {request.data}: smoke runs use built-in data; leave --data out, or run at full scale")
    names = [experiment.id for experiment in experiments]
    repeated = [name for name in dict.fromkeys(names) if names.count(name) > 1]
    if repeated:
        raise LabError(f"{', '.join(repeated)}: named twice")


def _as_word(value: Any) -> str:
    """Return a value as part of a folder's name: 0.0003 becomes 3e-4."""
    if isinstance(value, float) and 0 < abs(value) < 0.01:
        mantissa, _, exponent = f"{value:.6e}".partition("e")
        return f"{float(mantissa):g}e{int(exponent)}"
    if isinstance(value, float):
        return f"{value:g}".replace("+", "")  # 1e+20 becomes 1e20: a plus sign is not allowed in a name
    if isinstance(value, dict):
        return "-".join(_as_word(part) for item in value.items() for part in item) or "none"
    if isinstance(value, list | tuple):
        return "-".join(_as_word(item) for item in value)
    return re.sub(r"[^A-Za-z0-9.]+", "-", str(value)).strip("-.") or "empty"
