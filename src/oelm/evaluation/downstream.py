"""Evaluate a run's model, or one of any folder, on tasks of lm-eval, and record what a run scored."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ..base.locks import holder
from ..errors import ConfigError
from ..runs.environment import is_run
from ..runs.folder import DOWNSTREAM, changing_record
from ..runs.schema import Downstream, DownstreamTask, read_optional
from ..training.best import model_step
from ..training.parallel import device_for
from .load import load_language_model, model_folder
from .task_files import is_local, read_tasks


def evaluate_downstream(
    source: Path,
    names: Sequence[str],
    *,
    shots: int = 0,
    limit: int | None = None,
    batch_size: int = 16,
    last: bool = False,
    show: Any = lambda description, done, total: None,
) -> list[DownstreamTask]:
    """Return how the model in a folder does on tasks: names of lm-eval's, or paths of YAML files and folders of them.

    The model is a run's best one, or with `last` that of its last checkpoint, or one in any folder. What a run's model
    scored is added to the run's records after each task, in the place of an earlier score on it.
    """
    if find_spec("lm_eval") is None:
        raise ConfigError("--tasks needs the package lm-eval, which is missing: pip install 'oelm[eval]'")
    if not names:
        raise ConfigError("--tasks: names no task")
    of_run = is_run(source)
    if of_run and (process := holder(source)) is not None:
        raise ConfigError(f"{source}: is in use by {process}; evaluate it when it has ended")
    paths = [Path(name) for name in names if is_local(name)]
    local = [fields for path in paths for fields in read_tasks(path)]
    from .harness import Setting, evaluate_task, group_scores, load_local, load_named

    named = load_named([name for name in names if not is_local(name)])
    tasks = load_local(local) + named.tasks
    _require_distinct([str(task.config.task) for task in tasks])
    place = model_folder(source, last) if of_run else None
    model, tokenizer = load_language_model(source, last)
    model = model.to(device_for("auto")).eval()
    about: dict[str, Any] = {"model": str(source)}
    if place is not None:
        about = {"model": str(place.relative_to(source)), "step": model_step(place)}
    scores = []
    for task in tasks:
        score = evaluate_task(task, model, tokenizer, Setting(shots, limit, batch_size), show)
        scores.append(score.model_copy(update=about))
        if of_run:  # at once: what comes later may take hours
            record_score(source, scores[-1])
    totals = group_scores(named.groups, scores)
    for total in totals if of_run else ():
        record_score(source, total)
    return scores + totals


def record_score(run: Path, score: DownstreamTask) -> None:
    """Add a score to a run's records, in the place of an earlier one on the same task with as many examples."""
    with changing_record(run, DOWNSTREAM) as path:
        earlier = read_optional(path, Downstream)
        others = [] if earlier is None else [one for one in earlier.tasks if one.key != score.key]
        Downstream(tasks=sorted([*others, score], key=lambda one: one.key)).write(path)


def _require_distinct(names: list[str]) -> None:
    for name in names:
        if names.count(name) > 1:
            raise ConfigError(f"--tasks: {name} is named twice; a task of a folder needs a name of its own")
