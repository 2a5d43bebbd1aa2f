"""Runs that probe what attention can learn: every task with every form of attention."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ..base.strict import merge
from ..config import GENERATED, RunConfig
from ..data.synthetic.sequences import ABILITIES
from ..errors import LabError, nearest
from .experiment import Experiment, shipped_experiments
from .plan import PlannedRun, Request, plan_runs

# Beginning of the ids of these experiments; the form of attention follows.
_PREFIX = "probe-"
GROUP = "What each form of attention can learn"
# The built-in stories as a task: language models in the setting of the experiments `recall-*`, which takes a GPU.
STORIES = "stories-recall"
TASKS: Mapping[str, str] = {
    **{name: ability.about for name, ability in ABILITIES.items()},
    STORIES: "the words of a story that an earlier sentence determines",
}

# Returns the fields of a run that an arm sets, given its name and the config that all arms have in common.
FieldsOfArm = Callable[[str, RunConfig], dict[str, Any]]


def plan_probes(
    arms: Sequence[str], fields_of: FieldsOfArm, tasks: Sequence[str], request: Request
) -> dict[str, dict[str, list[PlannedRun]]]:
    """Return the runs of every arm on every task, one for each seed."""
    for task in tasks:
        if task not in TASKS:
            raise LabError(f"no task {task!r}.{nearest(task, TASKS)} There are: {', '.join(TASKS)}")
    generated = tuple(f"{GENERATED}{task}" for task in tasks if task != STORIES)
    experiments = []
    for arm in arms:
        if generated:
            title = f"Generated tasks with {arm}"
            common = _generated_config(generated[0], request)
            fields = merge(common, fields_of(arm, RunConfig.load(common, list(request.overrides))))
            axes = {"task.name": generated}
            experiments.append(Experiment(id=f"{_PREFIX}{arm}", title=title, group=GROUP, config=fields, axes=axes))
        if STORIES in tasks:
            title = f"Recall of the built-in stories with {arm}"
            common = shipped_experiments()["recall"].config
            fields = merge(common, fields_of(arm, RunConfig.load(common, list(request.overrides))))
            experiments.append(Experiment(id=f"{_PREFIX}{arm}-{STORIES}", title=title, group=GROUP, config=fields))
    planned = plan_runs(experiments, request)
    return {arm: {task: [run for run in planned if _is_of(run, arm, task)] for task in tasks} for arm in arms}


def _generated_config(task: str, request: Request) -> dict[str, Any]:
    """Return the config that all arms on generated tasks have in common.

    The tasks' default model is written out, since a config with fields of a model must name it.
    """
    common = {"task": {"name": task}}
    return common | {"model": RunConfig.load(common, list(request.overrides)).model.model_dump()}


def _is_of(run: PlannedRun, arm: str, task: str) -> bool:
    if task == STORIES:
        return run.experiment.id == f"{_PREFIX}{arm}-{STORIES}"
    return run.experiment.id == f"{_PREFIX}{arm}" and run.config.task.name == f"{GENERATED}{task}"
