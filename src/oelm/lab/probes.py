"""Runs that probe what attention can learn: every generated task with every form of attention."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ..base.strict import merge
from ..config import GENERATED, RunConfig
from ..data.synthetic.sequences import ability
from .experiment import Experiment
from .plan import PlannedRun, Request, plan_runs

# Beginning of the ids of these experiments; the form of attention follows.
_PREFIX = "probe-"
GROUP = "What each form of attention can learn"


def probe_model(overrides: Sequence[str] = ()) -> RunConfig:
    """Return the config that all probes of a request have in common, but for their task."""
    return RunConfig.load({"task": f"{GENERATED}recall"}, list(overrides))


def plan_probes(
    arms: Mapping[str, dict[str, Any]], tasks: Sequence[str], request: Request
) -> dict[str, dict[str, list[PlannedRun]]]:
    """Return the runs of every arm on every task, one for each seed. `arms` are the fields of a run that each sets."""
    for task in tasks:
        ability(task)
    names = tuple(f"{GENERATED}{task}" for task in tasks)
    common = {"task": {"name": names[0]}, "model": probe_model(request.overrides).model.model_dump()}
    experiments = [
        Experiment(
            id=f"{_PREFIX}{arm}",
            title=f"Generated tasks with {arm}",
            group=GROUP,
            config=merge(common, fields),
            axes={"task.name": names},
        )
        for arm, fields in arms.items()
    ]
    planned = plan_runs(experiments, request)
    return {
        arm: {
            task: [
                run
                for run in planned
                if run.experiment.id == f"{_PREFIX}{arm}" and run.config.task.name == f"{GENERATED}{task}"
            ]
            for task in tasks
        }
        for arm in arms
    }
