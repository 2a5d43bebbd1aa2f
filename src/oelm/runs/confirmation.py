"""The plan of a study: what was explored, and what is run and judged to confirm it, written before its runs.

Runs that `oelm matrix PLAN` starts record the hash of the plan's confirmation part, so that a report can tell them from
runs that were made before it, or under another version of it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationError, field_validator, model_validator

from ..base.strict import Strict, explain
from ..config import PlanMark, RunConfig, Seed, read_mapping
from ..errors import LabError

# The parts of a plan. A file with one of these keys is one.
_PARTS = ("exploration", "confirmation")
# One family of tests: with more of them, each needs so much more evidence that the question should be narrowed instead.
MOST_HYPOTHESES = 6
# How far a number of tokens may be from the planned one, as a share: plans say 131e6 for 131,072,000.
TOKENS_TOLERANCE = 0.01

Split = Literal["val", "test"]
Text = Annotated[str, Field(min_length=1)]
# An arm as run folders name it: the experiment, then the method.
ArmName = Annotated[str, Field(pattern=r"^[^/\s]+/[^/\s]+$")]
Margin = Annotated[float, Field(gt=-1, allow_inf_nan=False)]
Alpha = Annotated[float, Field(gt=0, lt=0.5)]


class ConfirmationRuns(Strict, refusal=LabError):
    """An experiment to run: `seeds` are their number or a list, `methods` the folders of those to run (default: all).

    The experiment is one of oelm's, or the name of a file of your own beside the plan.
    """

    experiment: Text
    seeds: Annotated[int, Field(gt=0, le=1000)] | tuple[Seed, ...]
    methods: tuple[Text, ...] | None = None

    @field_validator("seeds", "methods")
    @classmethod
    def _check_list(cls, value: Any) -> Any:
        if isinstance(value, tuple) and (not value or len(set(value)) < len(value)):
            raise ValueError("should list each value once, and at least one")
        return value

    @property
    def seed_list(self) -> tuple[int, ...]:
        """Return the seeds; a number N stands for 0 to N - 1."""
        return tuple(range(self.seeds)) if isinstance(self.seeds, int) else self.seeds


class PlannedHypothesis(Strict, refusal=LabError):
    """A claim about the perplexity of an arm against another: that it is higher by less than `margin`.

    margin      0.02: a loss of up to 2 % is acceptable; 0: the arm is ahead; -0.01: it is ahead by more than 1 %
    test        paired: over seeds that both arms have; welch: over the seeds of each
    """

    id: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")]
    claim: Text
    arm: ArmName
    against: ArmName
    margin: Margin
    test: Literal["paired", "welch"]

    @model_validator(mode="after")
    def _check_arms(self) -> PlannedHypothesis:
        if self.arm == self.against:
            raise ValueError(f"arm and against are both {self.arm}")
        return self


class Confirmation(Strict, refusal=LabError):
    """What is run and how it is judged.

    data, tokens        in words; a number of tokens is checked against the runs
    chooses, judges     the split that settings were chosen on, and the split whose perplexity the hypotheses are about
    alpha               the error of the two-sided intervals; a claim's one-sided test has half of it on its side
    """

    data: Text
    tokens: Annotated[float, Field(gt=0, allow_inf_nan=False)] | Text
    chooses: Split
    judges: Split
    alpha: Alpha = 0.05
    runs: Annotated[tuple[ConfirmationRuns, ...], Field(min_length=1)]
    hypotheses: Annotated[tuple[PlannedHypothesis, ...], Field(min_length=1)]

    @field_validator("hypotheses")
    @classmethod
    def _check_family(cls, value: tuple[PlannedHypothesis, ...]) -> tuple[PlannedHypothesis, ...]:
        if len(value) > MOST_HYPOTHESES:
            raise ValueError(
                f"{len(value)} hypotheses; a plan has at most {MOST_HYPOTHESES}: all else that is run is descriptive"
            )
        ids = [hypothesis.id for hypothesis in value]
        repeated = next((name for name in ids if ids.count(name) > 1), None)
        if repeated is not None:
            raise ValueError(f"two hypotheses have the id {repeated!r}")
        return value

    @property
    def measure(self) -> str:
        """Return the figure of a run that is judged."""
        return "test_perplexity" if self.judges == "test" else "perplexity"


class ShownGroup(Strict, refusal=LabError):
    """Arms that a report shows together, against one reference: estimates without a verdict.

    reference, arms     arms as run folders name them, each with the name that tables and figures give it
    """

    title: Text
    reference: Annotated[dict[ArmName, Text], Field(min_length=1, max_length=1)]
    arms: Annotated[dict[ArmName, Text], Field(min_length=1)]

    @model_validator(mode="after")
    def _check_arms(self) -> ShownGroup:
        if self.reference_arm in self.arms:
            raise ValueError(f"{self.reference_arm} is the reference and one of the arms")
        return self

    @property
    def reference_arm(self) -> str:
        """Return the arm that the others are shown against."""
        return next(iter(self.reference))

    @property
    def names(self) -> dict[str, str]:
        """Return the names of the reference and of the arms."""
        return {**self.reference, **self.arms}


class StudyPlan(Strict, refusal=LabError):
    """A plan's file. What is said of the exploration has any form.

    What is shown decides nothing, so it is not part of what the runs record a hash of, and may change later.
    """

    exploration: Any = None
    confirmation: Confirmation | None = None
    shown: tuple[ShownGroup, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Study:
    """A plan's confirmation with the config of every run that it plans, by the run's name."""

    path: Path
    sha256: str
    confirmation: Confirmation
    configs: Mapping[str, RunConfig]
    shown: tuple[ShownGroup, ...] = ()

    @property
    def mark(self) -> PlanMark:
        """Return what its runs record of it."""
        return PlanMark(name=self.path.name, sha256=self.sha256)

    def seeds(self, arm: str) -> tuple[int, ...]:
        """Return the planned seeds of an arm, in ascending order."""
        return tuple(sorted(config.seed for config in self.configs.values() if arm_name(config) == arm))

    def arms(self) -> Iterator[str]:
        """Yield the name of every arm, once."""
        yield from dict.fromkeys(map(arm_name, self.configs.values()))


def arm_name(config: RunConfig) -> str:
    """Return the arm of a run: its experiment and its method, as its folder names them."""
    return "/".join(config.folder.parts[-3:-1])


def run_name(config: RunConfig) -> str:
    """Return the name of a run: its arm and its seed, as its folder names them."""
    return "/".join(config.folder.parts[-3:])


def is_plan(content: object) -> bool:
    """Return True for the content of a plan's file; experiments and configs have none of its keys."""
    return isinstance(content, dict) and any(part in content for part in _PARTS)


def load_plan(path: str | PathLike[str]) -> tuple[StudyPlan, Confirmation, str]:
    """Return a plan with its confirmation part and the hash of that; raise where it has none or is malformed."""
    content = read_mapping(path)
    try:
        plan = StudyPlan.model_validate(content)
    except ValidationError as error:
        raise LabError(f"{path}: {explain(error, StudyPlan)}") from None
    if plan.confirmation is None:
        raise LabError(
            f"{path}: the plan has no confirmation part yet, which says what is run and judged (docs/lab.md)"
        )
    return plan, plan.confirmation, _sha256(content["confirmation"])


def _sha256(part: Any) -> str:
    """Return the hash of a part of a plan as data: comments, the order of keys and line breaks do not change it."""
    text = json.dumps(part, sort_keys=True, separators=(",", ":"), ensure_ascii=False, default=str)
    return hashlib.sha256(text.encode()).hexdigest()
