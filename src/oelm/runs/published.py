"""The figures that the studies published, as data: what was claimed, in which setup, and why it may be doubted."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any

from ..base.files import parse_yaml
from ..base.strict import Strict
from ..errors import OelmError, nearest
from ..method.spec import Method

# The study fine-tuned its baseline at one learning rate and its frozen arms at another, so its arms differ in two
# things.
BASELINE_RATE, FROZEN_RATE = 2e-5, 1e-4


class PublishedExperiment(Strict):
    """One published experiment: method, data, setup by the names of config fields, figures by metric, and doubts.

    `against` is the id of the experiment that it is compared with.
    """

    id: str
    title: str
    dataset: str
    method: str
    against: str | None = None
    source: str
    setup: dict[str, Any]
    figures: dict[str, float]
    doubts: tuple[str, ...] = ()


@dataclass(frozen=True)
class Published:
    """Published experiments by id, and the words by which a run's records show that it uses one of their data sets."""

    experiments: dict[str, PublishedExperiment]
    datasets: dict[str, tuple[str, ...]]

    def __getitem__(self, id: str) -> PublishedExperiment:
        if id not in self.experiments:
            known = ", ".join(self.experiments)
            raise OelmError(f"no published experiment {id!r}.{nearest(id, self.experiments)} Known: {known}")
        return self.experiments[id]


@cache
def load() -> Published:
    """Return the published figures of published.yaml; raise where an entry is malformed."""
    text = resources.files(__package__).joinpath("published.yaml").read_text(encoding="utf-8")
    content = parse_yaml(text)
    experiments = {id: _experiment(content, id=id, **entry) for id, entry in content["experiments"].items()}
    for id, experiment in experiments.items():
        if experiment.against not in (None, *experiments):
            raise OelmError(f"published.yaml: {id}.against names {experiment.against!r}, which is no entry of the file")
    return Published(experiments, {name: tuple(words) for name, words in content["datasets"].items()})


def reference_rate(method: Method) -> float:
    """Return the study's learning rate for fine-tuning with a method, which depends on whether anything is frozen."""
    frozen = any(matrix.frozen for matrix in method.matrices.values()) or method.rest != "trained"
    return FROZEN_RATE if frozen else BASELINE_RATE


def _experiment(content: dict[str, Any], source: str, setup: str, **entry: Any) -> PublishedExperiment:
    """Return an entry of published.yaml, with its source and setup, which several entries share, looked up."""
    settings = {**content["setups"][setup], **entry.pop("changes", {})}
    return PublishedExperiment(source=content["sources"][source], setup=settings, **entry)
