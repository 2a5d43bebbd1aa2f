"""The figures that the studies published, as data: what was claimed, in which setup, and why it may be doubted."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any

from ..base.strict import Strict
from ..base.yaml_text import parse_yaml
from ..errors import OelmError, nearest
from ..method.spec import Method

# The study fine-tuned its baseline at one learning rate and its frozen arms at another, so its arms differ in two
# things.
BASELINE_RATE, FROZEN_RATE = 2e-5, 1e-4


class PublishedExperiment(Strict):
    """One published experiment: method, data, setup by the names of config fields, figures by metric, and doubts.

    experiment   the named experiment that repeats it: its own id, or one with several arms
    against      the id of the experiment that it is compared with
    setup        settings by dotted name; where the sources of one disagree, a mapping from source to value
    ratios       figures that were only published as a ratio to those of `against`
    sources      where each figure and ratio is from, by metric
    """

    id: str
    title: str
    dataset: str
    method: str
    experiment: str
    against: str | None = None
    setup: dict[str, Any]
    figures: dict[str, float]
    ratios: dict[str, float] = {}
    sources: dict[str, str]
    doubts: tuple[str, ...] = ()


@dataclass(frozen=True)
class Published:
    """Published experiments by id, and the words by which a run's records show that it uses one of their data sets.

    `chinese` has the doubts about the experiments in Chinese, by their English text.
    """

    experiments: dict[str, PublishedExperiment]
    datasets: dict[str, tuple[str, ...]]
    chinese: dict[str, str]

    def __getitem__(self, id: str) -> PublishedExperiment:
        if id not in self.experiments:
            known = ", ".join(self.experiments)
            raise OelmError(f"no published experiment {id!r}.{nearest(id, self.experiments)} Known: {known}")
        return self.experiments[id]

    def repeated_by(self, experiment: str) -> tuple[str, ...]:
        """Return the ids of what a named experiment repeats."""
        return tuple(id for id, entry in self.experiments.items() if entry.experiment == experiment)


@cache
def load() -> Published:
    """Return the published figures of published.yaml; raise where an entry is malformed."""
    text = resources.files(__package__).joinpath("published.yaml").read_text(encoding="utf-8")
    content = parse_yaml(text)
    experiments = {id: _experiment(content, id, **entry) for id, entry in content["experiments"].items()}
    for id, experiment in experiments.items():
        if experiment.against not in (None, *experiments):
            raise OelmError(f"published.yaml: {id}.against names {experiment.against!r}, which is no entry of the file")
    datasets = {name: tuple(words) for name, words in content["datasets"].items()}
    return Published(experiments, datasets, content["chinese"])


def by_source(setting: Any) -> dict[str, Any]:
    """Return the values of a setting of a published setup by source, under "" where all sources agree."""
    return setting if isinstance(setting, dict) else {"": setting}


def reference_rate(method: Method) -> float:
    """Return the study's learning rate for fine-tuning with a method, which depends on whether anything is frozen."""
    frozen = any(matrix.frozen for matrix in method.matrices.values()) or method.rest != "trained"
    return FROZEN_RATE if frozen else BASELINE_RATE


def _experiment(content: dict[str, Any], id: str, setup: str, **entry: Any) -> PublishedExperiment:
    """Return an entry of published.yaml with the setup, which several entries share, and its sources looked up."""
    settings = {**content["setups"][setup], **entry.pop("changes", {})}
    fields = {"experiment": id, **entry, "setup": settings}
    sources: dict[str, str] = {}
    for name in ("figures", "ratios"):
        by_metric: dict[str, float] = {}
        for source, values in entry.get(name, {}).items():
            by_metric |= values
            sources |= dict.fromkeys(values, content["sources"][source])
        fields[name] = by_metric
    return PublishedExperiment(id=id, sources=sources, **fields)
