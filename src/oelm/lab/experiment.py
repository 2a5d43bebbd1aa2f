"""The named experiments: what each asks, its config, its axes, and how small it can be made. Data, read from YAML."""

from __future__ import annotations

from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationError, field_validator, model_validator

from ..base.strict import Strict, explain, merge
from ..config import read_mapping
from ..errors import LabError, near

Scale = Literal["full", "smoke"]
# What an experiment says of itself alone; everything else comes from the one it extends, unless it says otherwise.
_OWN = ("id", "title", "asks", "abstract", "published")


class Small(Strict, refusal=LabError):
    """What the smoke scale changes: fields of the config, and the values of axes (null takes an axis away)."""

    config: dict[str, Any] = {}
    axes: dict[str, tuple[Any, ...] | None] = {}


class After(Strict, refusal=LabError):
    """An experiment that comes first, and the method that each value of the method's axis was trained with there."""

    experiment: str
    methods: tuple[Any, ...]


class Experiment(Strict, refusal=LabError):
    """One experiment.

    config      fields of a run's config, as in `oelm train`
    axes        dotted fields of the config, or `method` and `seed`, each with the values it takes
    data        the name of what it needs in `data.yaml`; none for the built-in data
    after       an experiment whose best models, of the same seed, this one starts from
    stand_in    the model type that a dry run builds where `model.name` is a pretrained model
    published   the figures to show beside it: their ids in `oelm.published`
    smoke       how to make it run in seconds on built-in data
    notes       what is known to be doubtful about the set-up, and what its runs compare with
    """

    id: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")]
    title: str = ""
    asks: str = ""
    group: str = "your own"
    abstract: bool = False
    published: tuple[str, ...] = ()
    data: str | None = None
    after: After | None = None
    stand_in: str | None = None
    config: dict[str, Any] = {}
    axes: dict[str, tuple[Any, ...]] = {}
    smoke: Small = Small()
    notes: tuple[str, ...] = ()

    @model_validator(mode="after")
    def _methods_pair_up(self) -> Experiment:
        if self.after is not None and len(self.after.methods) != len(self.axes.get("method", ())):
            raise ValueError("after.methods: as many as there are values on the axis 'method', in the same order")
        return self

    @field_validator("config")
    @classmethod
    def _names_come_from_the_lab(cls, value: dict[str, Any]) -> dict[str, Any]:
        for key in ("experiment", "output", "seed"):
            if key in value:
                raise ValueError(f"{key} is not part of an experiment's config: its id names it, seeds are an axis")
        return value

    def at(self, scale: Scale) -> tuple[dict[str, Any], dict[str, tuple[Any, ...]]]:
        """(config, axes) at a scale."""
        if scale == "full":
            return dict(self.config), dict(self.axes)
        axes = {**self.axes, **self.smoke.axes}
        return merge(self.config, self.smoke.config), {name: values for name, values in axes.items() if values}


@cache
def shipped() -> dict[str, Experiment]:
    """Every experiment that comes with oelm, by id, in the order of the list."""
    return {name: _build(name, _shipped_entries(), f"experiment {name}") for name in _shipped_entries()}


def listed() -> list[Experiment]:
    """The shipped experiments that can be run: not those that others only extend."""
    return [experiment for experiment in shipped().values() if not experiment.abstract]


def find(name: str) -> Experiment:
    """A shipped experiment by its id, whatever its case, or one from a YAML file."""
    if name.endswith((".yaml", ".yml", ".json")):
        return from_file(Path(name))
    known = {experiment.id.lower(): experiment for experiment in listed()}
    if name.lower() not in known:
        raise LabError(
            f"unknown experiment {name!r}.{near(name, [e.id for e in listed()])} `oelm experiments` lists all; "
            "a file of your own ends in .yaml"
        )
    return known[name.lower()]


def from_file(path: Path) -> Experiment:
    """An experiment of the user's own. It may extend a shipped one; without an id it is called like its file."""
    content = read_mapping(path)
    content.setdefault("id", path.stem)
    name = str(content["id"])
    if name in shipped():
        raise LabError(f"{path}: {name!r} is a shipped experiment's id; choose another")
    _refuse_contradictions(content, path)
    return _build(name, {**_shipped_entries(), name: content}, str(path))


@cache
def _shipped_entries() -> dict[str, dict[str, Any]]:
    """The shipped experiments as they are written, by id. A file has one key, `experiments`, and a list below it."""
    folder = files("oelm.lab").joinpath("experiments")
    written = [read_mapping(file) for file in sorted(map(str, folder.iterdir())) if file.endswith(".yaml")]
    return {entry["id"]: entry for content in written for entry in content["experiments"]}


def _build(name: str, raw: dict[str, dict[str, Any]], where: str) -> Experiment:
    try:
        return Experiment.model_validate(_inherited(name, raw, ()))
    except ValidationError as error:
        raise LabError(f"{where}: {explain(error, Experiment)}") from None


def _inherited(name: str, raw: dict[str, dict[str, Any]], heirs: tuple[str, ...]) -> dict[str, Any]:
    """An experiment's fields, with those of what it extends below them."""
    if name in heirs:
        raise LabError(f"experiments extend each other in a circle: {' -> '.join((*heirs, name))}")
    if name not in raw:
        raise LabError(f"{heirs[-1]}: extends {name!r}, which does not exist.{near(name, raw)}")
    fields = dict(raw[name])
    parent = fields.pop("extends", None)
    if parent is None:
        return fields
    base = {key: value for key, value in _inherited(parent, raw, (*heirs, name)).items() if key not in _OWN}
    notes = [*base.get("notes", ()), *fields.get("notes", ())]
    merged = merge(base, fields)
    merged["axes"] = {axis: values for axis, values in merged.get("axes", {}).items() if values is not None}
    return {**merged, "notes": notes} if notes else merged


def _refuse_contradictions(content: dict[str, Any], path: Path) -> None:
    """One file that both sets a field and lists values for it."""
    for axis in content.get("axes") or {}:
        value: Any = content.get("config") or {}
        for part in str(axis).split("."):
            value = value.get(part) if isinstance(value, dict) else None
        if value is not None:
            raise LabError(
                f"{path}: config sets {axis} to {value!r}, and axes lists values for it: keep one of the two"
            )
