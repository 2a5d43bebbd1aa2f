"""The figures that the studies published, as data: what was claimed, in which set-up, and why it may be doubted."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from importlib import resources
from types import MappingProxyType
from typing import Any

from ..base.files import parse_yaml
from ..errors import OelmError, nearest


@dataclass(frozen=True)
class Figure:
    """One published number."""

    experiment: str
    metric: str
    value: float


@dataclass(frozen=True)
class Experiment:
    """One published experiment: what was run on what, its figures, its set-up by the config's names, the doubts."""

    id: str
    title: str
    dataset: str
    method: str
    against: str | None
    source: str
    setup: MappingProxyType[str, Any]
    figures: tuple[Figure, ...]
    doubts: tuple[str, ...]

    def value(self, metric: str) -> float | None:
        """The published value of a metric, or none."""
        return next((figure.value for figure in self.figures if figure.metric == metric), None)


@dataclass(frozen=True)
class Published:
    """All of them, and the words by which their data sets are recognised in a run's records."""

    experiments: tuple[Experiment, ...]
    datasets: MappingProxyType[str, tuple[str, ...]]

    def __iter__(self) -> Iterator[Experiment]:
        return iter(self.experiments)

    def __contains__(self, id: object) -> bool:
        return any(experiment.id == id for experiment in self.experiments)

    def __getitem__(self, id: str) -> Experiment:
        for experiment in self.experiments:
            if experiment.id == id:
                return experiment
        known = [experiment.id for experiment in self.experiments]
        raise OelmError(f"no published experiment {id!r}.{nearest(id, known)} Known: {', '.join(known)}")


@cache
def load() -> Published:
    """The published figures of published.yaml, each checked to be whole."""
    text = resources.files(__package__).joinpath("published.yaml").read_text(encoding="utf-8")
    content = parse_yaml(text)
    experiments = tuple(_experiment(id, entry, content) for id, entry in content["experiments"].items())
    known = {experiment.id for experiment in experiments}
    for experiment in experiments:
        if experiment.against is not None and experiment.against not in known:
            raise OelmError(f"published.yaml: {experiment.id}.against names {experiment.against!r}, which is not there")
    names = {name: tuple(words) for name, words in content["datasets"].items()}
    return Published(experiments, MappingProxyType(names))


def _experiment(id: str, entry: dict[str, Any], content: dict[str, Any]) -> Experiment:
    unknown = set(entry) - {"title", "dataset", "method", "against", "setup", "changes", "source", "figures", "doubts"}
    if unknown:
        raise OelmError(f"published.yaml: {id} has unknown keys {sorted(unknown)}")
    return Experiment(
        id=id,
        title=entry["title"],
        dataset=entry["dataset"],
        method=entry["method"],
        against=entry.get("against"),
        source=content["sources"][entry["source"]],
        setup=MappingProxyType({**content["setups"][entry["setup"]], **entry.get("changes", {})}),
        figures=tuple(Figure(id, metric, float(value)) for metric, value in entry["figures"].items()),
        doubts=tuple(entry.get("doubts", ())),
    )
