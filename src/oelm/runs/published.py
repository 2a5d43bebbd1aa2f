"""The figures that the studies published, as data: what was claimed, in which setup, and why it may be doubted."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from importlib import resources
from types import MappingProxyType
from typing import Any

from ..base.files import parse_yaml
from ..errors import OelmError, nearest
from ..method.spec import Method

# The study fine-tuned its baseline at one learning rate and its frozen arms at another, so its arms differ in two
# things.
BASELINE_RATE, FROZEN_RATE = 2e-5, 1e-4
# The keys of an experiment in published.yaml.
_KEYS = {"title", "dataset", "method", "against", "setup", "changes", "source", "figures", "doubts"}


@dataclass(frozen=True)
class PublishedFigure:
    """One published number."""

    experiment: str
    metric: str
    value: float


@dataclass(frozen=True, kw_only=True)
class PublishedExperiment:
    """One published experiment: method, data, setup by the names of config fields, figures, and reasons to doubt them.

    `against` is the id of the experiment that it is compared with.
    """

    id: str
    title: str
    dataset: str
    method: str
    against: str | None
    source: str
    setup: MappingProxyType[str, Any]
    figures: tuple[PublishedFigure, ...]
    doubts: tuple[str, ...]

    def value(self, metric: str) -> float | None:
        """Return the published value of a metric, or None."""
        return next((figure.value for figure in self.figures if figure.metric == metric), None)


@dataclass(frozen=True)
class Published:
    """All published experiments, and the words by which a run's records show that it uses one of their data sets."""

    experiments: tuple[PublishedExperiment, ...]
    datasets: MappingProxyType[str, tuple[str, ...]]

    def __iter__(self) -> Iterator[PublishedExperiment]:
        return iter(self.experiments)

    def __contains__(self, id: object) -> bool:
        return any(experiment.id == id for experiment in self.experiments)

    def __getitem__(self, id: str) -> PublishedExperiment:
        for experiment in self.experiments:
            if experiment.id == id:
                return experiment
        known = [experiment.id for experiment in self.experiments]
        raise OelmError(f"no published experiment {id!r}.{nearest(id, known)} Known: {', '.join(known)}")


@cache
def load() -> Published:
    """Return the published figures of published.yaml; raise where an entry is malformed."""
    text = resources.files(__package__).joinpath("published.yaml").read_text(encoding="utf-8")
    content = parse_yaml(text)
    experiments = tuple(_experiment(id, entry, content) for id, entry in content["experiments"].items())
    known = {experiment.id for experiment in experiments}
    for experiment in experiments:
        if experiment.against is not None and experiment.against not in known:
            raise OelmError(f"published.yaml: {experiment.id}.against names {experiment.against!r}, which is not there")
    names = {name: tuple(words) for name, words in content["datasets"].items()}
    return Published(experiments, MappingProxyType(names))


def reference_rate(method: Method) -> float:
    """Return the learning rate that the study fine-tuned a method with: another one where anything is frozen."""
    frozen = method.q.frozen or method.k.frozen or method.ffn.frozen or method.rest != "trained"
    return FROZEN_RATE if frozen else BASELINE_RATE


def _experiment(id: str, entry: dict[str, Any], content: dict[str, Any]) -> PublishedExperiment:
    unknown = set(entry) - _KEYS
    if unknown:
        raise OelmError(f"published.yaml: {id} has unknown keys {sorted(unknown)}")
    return PublishedExperiment(
        id=id,
        title=entry["title"],
        dataset=entry["dataset"],
        method=entry["method"],
        against=entry.get("against"),
        source=content["sources"][entry["source"]],
        setup=MappingProxyType({**content["setups"][entry["setup"]], **entry.get("changes", {})}),
        figures=tuple(PublishedFigure(id, metric, float(value)) for metric, value in entry["figures"].items()),
        doubts=tuple(entry.get("doubts", ())),
    )
