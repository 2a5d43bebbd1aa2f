"""The named experiments: the question, config and axes of each, and its small version. They are read from YAML."""

from __future__ import annotations

from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationError, field_validator, model_validator

from ..base.strict import Strict, explain, merge
from ..config import RunConfig, read_mapping
from ..errors import LabError, nearest
from ..runs import published
from ..runs.confirmation import is_plan

Scale = Literal["full", "smoke"]
# Fields that an experiment does not inherit from the one that it extends.
_NOT_INHERITED = ("id", "title", "asks", "abstract")


class SmokeScale(Strict, refusal=LabError):
    """What the smoke scale changes: fields of the config, and the values of axes (null removes an axis)."""

    config: dict[str, Any] = {}
    axes: dict[str, tuple[Any, ...] | None] = {}


class Predecessor(Strict, refusal=LabError):
    """An experiment that must be run first.

    `methods` are the methods of its runs that this experiment starts from, one for each value of the method axis here.
    """

    experiment: str
    methods: tuple[Any, ...]


class Experiment(Strict, refusal=LabError):
    """One experiment.

    config      fields of a run's config, as in `oelm train`
    axes        dotted fields of the config, or `method` and `seed`, each with the values it takes
    data        the name of its dataset in `data.yaml`; none for the built-in data
    after       an experiment whose best models, of the same seed, this one starts from
    stand_in    the model type that a dry run builds where `model.name` is a pretrained model
    smoke       changes that make it run in seconds on built-in data
    notes       known doubts about the set-up, and what its runs can be compared with
    """

    id: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")]
    title: str = ""
    asks: str = ""
    group: str = "your own"
    abstract: bool = False
    data: str | None = None
    after: Predecessor | None = None
    stand_in: str | None = None
    config: dict[str, Any] = {}
    axes: dict[str, tuple[Any, ...]] = {}
    smoke: SmokeScale = SmokeScale()
    notes: tuple[str, ...] = ()

    @property
    def published(self) -> tuple[str, ...]:
        """Return the published figures that it repeats: their ids in `runs/published.yaml`."""
        return published.load().repeated_by(self.id)

    @model_validator(mode="after")
    def _check_predecessor_methods(self) -> Experiment:
        if self.after is not None and len(self.after.methods) != len(self.axes.get("method", ())):
            raise ValueError("after.methods: needs one method for each value of the axis 'method', in the same order")
        return self

    @field_validator("config")
    @classmethod
    def _refuse_fields_that_the_lab_sets(cls, value: dict[str, Any]) -> dict[str, Any]:
        for key in ("experiment", "output", "seed"):
            if key in value:
                raise ValueError(f"{key} is not part of an experiment's config: its id names it, seeds are an axis")
        return value

    def at(self, scale: Scale) -> tuple[dict[str, Any], dict[str, tuple[Any, ...]]]:
        """Return (config, axes) at a scale."""
        if scale == "full":
            return dict(self.config), dict(self.axes)
        axes = {**self.axes, **self.smoke.axes}
        return merge(self.config, self.smoke.config), {name: values for name, values in axes.items() if values}


@cache
def shipped_experiments() -> dict[str, Experiment]:
    """Return every experiment that comes with oelm, by id, in the order of the list."""
    return {name: _build(name, _shipped_entries(), f"experiment {name}") for name in _shipped_entries()}


def runnable_experiments() -> list[Experiment]:
    """Return the shipped experiments that can be run: all but those that only serve others as a base."""
    return [experiment for experiment in shipped_experiments().values() if not experiment.abstract]


def find_experiment(name: str) -> Experiment:
    """Return a shipped experiment by its id, in any case, or load one from a YAML file."""
    if name.endswith((".yaml", ".yml", ".json")):
        return load_experiment(Path(name))
    by_id = {experiment.id.lower(): experiment for experiment in runnable_experiments()}
    if name.lower() not in by_id:
        known = [experiment.id for experiment in by_id.values()]
        raise LabError(
            f"unknown experiment {name!r}.{nearest(name, known, count=3)} `oelm experiments` lists all; "
            "a file of your own ends in .yaml"
        )
    return by_id[name.lower()]


def load_experiment(path: Path) -> Experiment:
    """Load a user's experiment. It may extend a shipped one; without an id it is named after its file."""
    content = read_mapping(path)
    if is_plan(content):
        raise LabError(f"{path}: the plan of a study, not an experiment; it is run by `oelm matrix {path}`")
    _refuse_run_config(content, path)
    content.setdefault("id", path.stem)
    name = str(content["id"])
    if name in shipped_experiments():
        raise LabError(f"{path}: {name!r} is a shipped experiment's id; choose another")
    _refuse_contradictions(content, path)
    return _build(name, {**_shipped_entries(), name: content}, str(path))


@cache
def _shipped_entries() -> dict[str, dict[str, Any]]:
    """Return the shipped experiments as written, by id. Each file has one key, `experiments`, with a list below it."""
    folder = files("oelm.lab").joinpath("experiments")
    contents = [read_mapping(file) for file in sorted(map(str, folder.iterdir())) if file.endswith(".yaml")]
    return {entry["id"]: entry for content in contents for entry in content["experiments"]}


def _build(name: str, entries: dict[str, dict[str, Any]], source: str) -> Experiment:
    try:
        return Experiment.model_validate(_inherit(name, entries, ()))
    except ValidationError as error:
        raise LabError(f"{source}: {explain(error, Experiment)}") from None


def _inherit(name: str, entries: dict[str, dict[str, Any]], chain: tuple[str, ...]) -> dict[str, Any]:
    """Return an experiment's fields merged over those that it extends; `chain` are the experiments that extend it."""
    if name in chain:
        raise LabError(f"experiments extend each other in a circle: {' -> '.join((*chain, name))}")
    if name not in entries:
        raise LabError(f"{chain[-1]}: extends {name!r}, which does not exist.{nearest(name, entries, count=3)}")
    fields = dict(entries[name])
    parent = fields.pop("extends", None)
    if parent is None:
        return fields
    inherited = _inherit(parent, entries, (*chain, name))
    base = {key: value for key, value in inherited.items() if key not in _NOT_INHERITED}
    notes = [*base.get("notes", ()), *fields.get("notes", ())]
    merged = merge(base, fields)
    merged["axes"] = {axis: values for axis, values in merged.get("axes", {}).items() if values is not None}
    return {**merged, "notes": notes} if notes else merged


def _refuse_run_config(content: dict[str, Any], path: Path) -> None:
    """Raise if a file is the config of one run, as `oelm train` takes it."""
    run_fields = [name for name in RunConfig.model_fields if name in content and name not in Experiment.model_fields]
    if run_fields and not content.keys() & {"config", "axes", "extends"}:
        raise LabError(
            f"{path}: the config of one run (it sets {', '.join(run_fields)}): train it with `oelm train {path}`. For "
            "an experiment, move these fields below `config:` and list what varies below `axes:`, such as "
            "method: [baseline, oelm-freeze]"
        )


def _refuse_contradictions(content: dict[str, Any], path: Path) -> None:
    """Raise if one file both sets a field and lists values for it."""
    for axis in content.get("axes") or {}:
        value: Any = content.get("config") or {}
        for part in str(axis).split("."):
            value = value.get(part) if isinstance(value, dict) else None
        if value is not None:
            raise LabError(
                f"{path}: config sets {axis} to {value!r}, and axes lists values for it: keep one of the two"
            )
