"""Experiments to runs: axes multiplied out, named, checked, and ordered so that the arms of a comparison alternate."""

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

from ..base.files import parse_yaml
from ..config import WITHOUT_EFFECT, RunConfig, as_number, parse_override, set_field
from ..errors import LabError, OelmError
from .experiment import Experiment, Scale, find

LEARNING_RATE = "optimizer.learning_rate"
# How a field is called in the name of a run, where the field's own last word would say too little.
_SHORT = {LEARNING_RATE: "lr", "model.name": "model", "train.max_steps": "steps", "task.name": "task"}
# Fields that are no part of the name: a folder of their own says them, or they change no number.
_ELSEWHERE = ("method", "seed", "data.path", *WITHOUT_EFFECT)
_LONGEST_NAME = 120
# In a run's folder: its best model as a plain one, for the runs that start from it.
PLAIN = "plain"


@dataclass(frozen=True)
class Request:
    """What the command line adds to an experiment: seeds, axes, fixed fields, a folder of data, an output folder."""

    scale: Scale = "full"
    seeds: tuple[int, ...] | None = None
    axes: dict[str, tuple[Any, ...]] = field(default_factory=dict)
    overrides: tuple[str, ...] = ()
    data: str | None = None
    output: str = "runs"


@dataclass(frozen=True)
class Planned:
    """One run of an experiment: its config, its place in the order, the run that it starts from, and its scale."""

    experiment: Experiment
    config: RunConfig
    place: tuple[int, int, int, int]
    after: Planned | None = None
    small: bool = False

    @cached_property
    def folder(self) -> Path:
        return self.config.folder

    @cached_property
    def name(self) -> str:
        """The folder below the output folder."""
        return str(self.folder.relative_to(self.config.output))


def expand(experiments: Sequence[Experiment], request: Request) -> list[Planned]:
    """Every run, seeds outermost and methods innermost, so that a slow hour falls on all arms alike."""
    _refuse_contradictions(experiments, request)
    runs: list[Planned] = []
    for number, experiment in enumerate(experiments):
        own = _multiply(experiment, request, number)
        names = Counter(run.name for run in own)
        name, count = names.most_common(1)[0]
        if count > 1:
            raise LabError(f"experiment {experiment.id}: two values of an axis give the same run, {name}")
        runs += own
    runs.sort(key=lambda run: run.place)
    # What others start from comes once, before the first of them.
    ordered: dict[Path, Planned] = {}
    for run in runs:
        if run.after is not None:
            ordered.setdefault(run.after.folder, run.after)
        _refuse_another(ordered.get(run.folder), run)
        ordered[run.folder] = run
    return list(ordered.values())


def _refuse_another(there: Planned | None, run: Planned) -> None:
    """Raise if another run has the same folder: one of the two would be lost."""
    if there is not None and there.config.id != run.config.id:
        ids = " and ".join(dict.fromkeys((there.experiment.id, run.experiment.id)))
        raise LabError(f"{ids}: both have a run {run.name}, and the two differ; give one of them another id")


def run_name(experiment: str, scale: Scale, values: dict[str, Any]) -> str:
    """The `experiment` of a run's config: the experiment's id, then every field that sets it apart.

    `GPT-02`, `GPT-02-smoke`, `GPT-02-lr-1e-3`, `GPT-02-lr-1e-3-fraction-0.1`.
    """
    parts = [experiment] + (["smoke"] if scale == "smoke" else [])
    for name, value in values.items():
        if not name.startswith(_ELSEWHERE):
            parts += [_SHORT.get(name, name.rpartition(".")[2]), _as_word(value)]
        elif name.startswith("method."):
            parts += [name.rpartition(".")[2], _as_word(value)]
    whole = "-".join(parts)
    if len(whole) <= _LONGEST_NAME:
        return whole
    return f"{whole[: _LONGEST_NAME - 9]}-{hashlib.sha256(whole.encode()).hexdigest()[:8]}"


def parse_values(text: str) -> tuple[Any, ...]:
    """The values of an axis as written on the command line: `1e-4,3e-4` or `[first:1, last:1]`."""
    try:
        return tuple(map(as_number, parse_yaml(text if text.lstrip().startswith("[") else f"[{text}]")))
    except ValueError:
        raise LabError(f"{text!r}: cannot be read; values of an axis are separated by commas: 1e-4,3e-4") from None


def _multiply(experiment: Experiment, request: Request, number: int) -> list[Planned]:
    """The runs of one experiment."""
    fields, listed = experiment.at(request.scale)
    fixed = dict(map(parse_override, request.overrides))
    seeds = {} if request.seeds is None else {"seed": request.seeds}
    wanted: dict[str, tuple[Any, ...]] = {**listed, **request.axes, **seeds}
    axes = {name: values for name, values in wanted.items() if name not in fixed}
    for name, values in axes.items():
        _check_axis(experiment, name, values)
    if request.data is not None:
        fields = set_field(fields, "data.path", request.data)
    others = [name for name in axes if name not in ("seed", "method")]
    combinations = list(itertools.product(*(axes[name] for name in others)))
    runs = []
    for s, seed in enumerate(axes.get("seed", (0,))):
        for c, combination in enumerate(combinations):
            for m, method in enumerate(axes.get("method", (None,))):
                given = dict(zip(others, combination, strict=True))
                own = fields if method is None else {**fields, "method": method}
                own = {**own, "seed": seed, "output": request.output}
                for name, value in given.items():
                    own = set_field(own, name, value)
                own["experiment"] = run_name(experiment.id, request.scale, {**given, **fixed})
                runs.append(_planned(experiment, own, request, (s, c, number, m)))
    return runs


def _planned(
    experiment: Experiment, fields: dict[str, Any], request: Request, place: tuple[int, int, int, int]
) -> Planned:
    try:
        after = _upstream(experiment, fields, request, place)
        if after is not None:
            model = {"name": str(after.folder / PLAIN), "tokenizer": str(after.folder / "best")}
            fields = {**fields, "model": model}
        return Planned(
            experiment, RunConfig.load(fields, list(request.overrides)), place, after, request.scale == "smoke"
        )
    except OelmError as error:
        raise LabError(f"experiment {experiment.id}: {error}") from None


def _upstream(
    experiment: Experiment, fields: dict[str, Any], request: Request, place: tuple[int, int, int, int]
) -> Planned | None:
    """The run whose best model this one starts from."""
    if experiment.after is None:
        return None
    if any(override.startswith(("method", "model.")) for override in request.overrides) or "method" in request.axes:
        raise LabError(f"its model and methods follow from {experiment.after.experiment}; they cannot be set here")
    base = find(experiment.after.experiment)
    config, _ = base.at(request.scale)
    own = {"method": experiment.after.methods[place[3]], "experiment": run_name(base.id, request.scale, {})}
    same = {key: fields[key] for key in ("seed", "output")}
    return Planned(base, RunConfig.load({**config, **same, **own}), place, small=request.scale == "smoke")


def _check_axis(experiment: Experiment, name: str, values: tuple[Any, ...]) -> None:
    if not values:
        raise LabError(f"experiment {experiment.id}: axis {name} has no values")
    texts = [json.dumps(value, sort_keys=True, default=str) for value in values]
    twice = [text for text in dict.fromkeys(texts) if texts.count(text) > 1]
    if twice:
        raise LabError(f"experiment {experiment.id}: axis {name} lists {', '.join(twice)} more than once")


def _refuse_contradictions(experiments: Sequence[Experiment], request: Request) -> None:
    """Two ways of saying one thing that say it differently."""
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
    twice = [name for name in dict.fromkeys(names) if names.count(name) > 1]
    if twice:
        raise LabError(f"{', '.join(twice)}: named twice")


def _as_word(value: Any) -> str:
    """A value as part of a folder's name: 0.0003 is 3e-4."""
    if isinstance(value, float) and 0 < abs(value) < 0.01:
        mantissa, _, exponent = f"{value:.6e}".partition("e")
        return f"{float(mantissa):g}e{int(exponent)}"
    if isinstance(value, float):
        return f"{value:g}".replace("+", "")  # 1e+20: a name has no such sign
    if isinstance(value, dict):
        return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:6]
    if isinstance(value, list | tuple):
        return "-".join(_as_word(item) for item in value)
    return re.sub(r"[^A-Za-z0-9.]+", "-", str(value)).strip("-.") or "empty"
