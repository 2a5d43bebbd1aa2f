"""lm-eval, the evaluation harness: load its tasks, and evaluate a model on one of them.

This is the only file that imports lm-eval. It is kept from what oelm does nowhere: code that is fetched or lies beside
data, templates that reach into Python, and half a minute of retries where there is no network.
"""

from __future__ import annotations

import logging
import math
import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import datasets
import evaluate as metrics_of_the_hub
import lm_eval
import lm_eval.api.metrics
import lm_eval.api.task
import lm_eval.utils
import numpy as np
import torch
from jinja2 import StrictUndefined
from jinja2.sandbox import SandboxedEnvironment
from lm_eval.api.registry import metric_registry
from lm_eval.evaluator import evaluate
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager

from ..base.hub import cache_without_hub
from ..errors import CheckpointError, ConfigError, DataError, OelmError, first_line, nearest
from ..runs.schema import DownstreamMetric, DownstreamTask
from .item_scores import as_numbers, jackknife_error, mean_error
from .task_files import TaskFields

# A function of (description, done, total), for a progress bar.
Show = Callable[[str, int, int], None]
# What a group's score is the sum of.
_SUMMED = ("items", "available", "cut", "seconds")
# The seeds of lm-eval's own command, so that both choose the same examples to show.
_SEED, _FEWSHOT_SEED = 0, 1234


@dataclass(frozen=True)
class Setting:
    """How tasks are evaluated: examples shown before each question, at most so many questions, texts at a time."""

    shots: int = 0
    limit: int | None = None
    batch_size: int = 16


@dataclass(frozen=True)
class LoadedTasks:
    """Tasks, and the groups whose members they are."""

    tasks: list[Any]
    groups: list[Any]


def load_named(names: Sequence[str]) -> LoadedTasks:
    """Return lm-eval's tasks of these names; a group or tag stands for its tasks. Raise for unknown names at once."""
    if not names:  # lm-eval reads thousands of files to know its own
        return LoadedTasks([], [])
    with _restrained():
        manager = TaskManager()
        for name in names:
            if name not in manager.task_index:
                hint = nearest(name, manager.all_tasks, 3)
                raise ConfigError(f"--tasks {name}: no task of lm-eval {lm_eval.__version__}, and no folder.{hint}")
            _require_own_metrics(name, manager.task_index, set())
        loaded = [_load(manager, name, name) for name in names]
        tasks = [task for one in loaded for task in one.tasks]
        return LoadedTasks(tasks, [group for one in loaded for group in one.groups])


def load_local(tasks: Sequence[TaskFields]) -> list[Any]:
    """Return the tasks that `task_files.read_tasks` read, with the data that their files hold now.

    `datasets` would keep its copy of a file for as long as the file's time stays the same. What it has opened can be
    removed: the system keeps it until it is closed.
    """
    with _restrained(), TemporaryDirectory() as copies:
        manager = TaskManager(include_defaults=False)
        loaded = []
        for fields in tasks:
            _require_known_metrics(fields["task"], fields)
            data = {**fields["dataset_kwargs"], "cache_dir": copies}
            loaded += _load(manager, {**fields, "dataset_kwargs": data}, fields["task"]).tasks
        return loaded


def _load(manager: Any, spec: str | TaskFields, name: str) -> LoadedTasks:
    try:
        loaded = manager.load([spec])
        return LoadedTasks(list(loaded["tasks"].values()), list(loaded["groups"].values()))
    except (ConnectionError, FileNotFoundError) as error:
        raise _absent_data(name, error) from None
    except ConfigError as error:
        raise ConfigError(f"task {name}: {error}") from None
    # lm-eval checks few of a task's fields before it uses them.
    except Exception as error:
        if isinstance(error, OSError) or "offline" in str(error).lower() or "hub" in str(error).lower():
            raise _absent_data(name, error) from None
        raise DataError(f"task {name}: cannot be loaded ({type(error).__name__}: {first_line(error)})") from error


def _absent_data(name: str, error: BaseException) -> DataError:
    return DataError(
        f"task {name}: its data cannot be had ({type(error).__name__}: {first_line(error)}). Check the network, or "
        "give a folder with tasks and their data: --tasks FOLDER"
    )


def _require_own_metrics(name: str, index: Any, seen: set[str]) -> None:
    """Raise where a task of lm-eval, or one of a group, has a metric that would be fetched as code from the Hub."""
    entry = index.get(name)
    if entry is None or name in seen:
        return
    seen.add(name)
    _require_known_metrics(name, entry.cfg or {}, entry.yaml_path and Path(entry.yaml_path).resolve().parent)
    members = entry.tags if entry.cfg is None else entry.cfg.get("task")  # of a tag, or of a group
    for member in members if isinstance(members, set | list) else ():
        _require_own_metrics(str(member.get("task") if isinstance(member, dict) else member), index, seen)


def _require_known_metrics(name: str, fields: Any, folder: Path | None = None) -> None:
    """Raise where a task has a metric that lm-eval does not have itself, nor a function in the `folder` of its own.

    Where `process_results`, a function too, computes the metrics, the list only names them.
    """
    metrics = [] if fields.get("process_results") else fields.get("metric_list")
    for entry in metrics if isinstance(metrics, list) else []:
        metric = entry.get("metric") if isinstance(entry, dict) else None
        if not isinstance(metric, str) or (folder is not None and metric.startswith(f"{folder}/")):
            continue
        if metric not in metric_registry or entry.get("hf_evaluate"):
            raise _fetched(f"task {name}: its metric {metric!r}")


def _fetched(what: str) -> ConfigError:
    return ConfigError(f"{what} is code that lm-eval would fetch; oelm runs none")


def evaluate_task(task: Any, model: Any, tokenizer: Any, setting: Setting, show: Show) -> DownstreamTask:
    """Return how a model does on one task, whose `model` and `step` the caller adds."""
    started = time.monotonic()
    name = str(task.config.task)
    if setting.shots and task.get_config("num_fewshot") == 0:
        raise ConfigError(f"task {name}: its own settings allow no examples (num_fewshot: 0); leave out --shots")
    task.set_config(key="num_fewshot", value=setting.shots)
    task.set_fewshot_seed(seed=_FEWSHOT_SEED)
    random.seed(_SEED)
    np.random.seed(_FEWSHOT_SEED)
    torch.manual_seed(_FEWSHOT_SEED)
    with _restrained():
        adapter = _Model(name, model, tokenizer, setting.batch_size, show)
        try:
            results: Any = evaluate(adapter, {"tasks": {name: task}}, limit=setting.limit, bootstrap_iters=0)
        except (OelmError, MemoryError, torch.OutOfMemoryError):
            raise
        # The items of a task may not have the fields that its templates name, and much else.
        except Exception as error:
            why = f"{type(error).__name__}: {first_line(error)}"
            raise DataError(f"task {name}: cannot be evaluated ({why})") from error
    samples = results["samples"][name]
    return DownstreamTask(
        task=name,
        version=str(task.VERSION),
        shots=setting.shots,
        limit=setting.limit,
        items=results["n-samples"][name]["effective"],
        available=results["n-samples"][name]["original"],
        cut=adapter.cut,
        sha256=_hash(samples),
        metrics=_metrics(task, samples, results["results"][name]),
        model="",
        lm_eval=lm_eval.__version__,
        device=model.device.type,
        seconds=round(time.monotonic() - started, 3),
    )


def group_scores(groups: Sequence[Any], scores: Sequence[DownstreamTask]) -> list[DownstreamTask]:
    """Return what lm-eval makes of the scores of each group's tasks, for groups that have such a total."""
    results = {score.task: _as_results(score) for score in scores}
    totals = []
    for group in groups:
        names = {task.task_name for task in group.get_all_tasks()}
        members = [score for score in scores if score.task in names]
        total: Any = group.aggregate(results)
        metrics = [_total(metric, total) for metric in members[0].metrics if _key(metric) in total]
        if metrics:
            digest = sha256("".join(score.sha256 for score in members).encode()).hexdigest()
            sums = {name: sum(getattr(score, name) for score in members) for name in _SUMMED}
            about = {"task": group.name, "version": str(group.version), "sha256": digest, "metrics": metrics}
            totals.append(members[0].model_copy(update={**sums, **about}))
    return totals


def _as_results(score: DownstreamTask) -> dict[str, Any]:
    """Return a score in the form in which lm-eval's groups read it."""
    values = {_key(metric): metric.value for metric in score.metrics}
    errors = {_key(metric, "_stderr"): metric.standard_error for metric in score.metrics}
    return {**values, **errors, "sample_len": score.items}


def _key(metric: DownstreamMetric, suffix: str = "") -> str:
    name, _, answers = metric.name.partition(",")
    return f"{name}{suffix},{answers or 'none'}"


def _total(metric: DownstreamMetric, total: dict[str, Any]) -> DownstreamMetric:
    error = total.get(_key(metric, "_stderr"))
    known = float(error) if isinstance(error, float | np.number) else None
    total_value = {"value": float(total[_key(metric)]), "standard_error": known}
    return metric.model_copy(update={**total_value, "items": [], "weights": []})


class _Model(HFLM):  # type: ignore[misc]
    """lm-eval's view of a model that is loaded already: it shows progress, and counts texts that lose their start."""

    def __init__(self, task: str, model: Any, tokenizer: Any, batch_size: int, show: Show) -> None:
        super().__init__(pretrained=model, tokenizer=tokenizer, batch_size=batch_size, backend="causal")
        self.task, self.cut, self._show, self._done, self._total = task, 0, show, 0, 0

    def loglikelihood(self, requests: list[Any], disable_tqdm: bool = True) -> Any:
        """Return the log-likelihood of each answer after its question."""
        self._total += len(requests)
        return super().loglikelihood(requests, disable_tqdm=True)

    def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = True) -> Any:
        """Return the log-likelihood of each text."""
        self._total += len(requests)
        return super().loglikelihood_rolling(requests, disable_tqdm=True)

    def generate_until(self, requests: list[Any], disable_tqdm: bool = True) -> Any:
        """Return the text that the model generates after each question."""
        self._total += len(requests)
        return super().generate_until(requests, disable_tqdm=True)

    def _loglikelihood_tokens(self, requests: list[Any], disable_tqdm: bool = True, override_bs: Any = None) -> Any:
        for _, context, answer in requests:
            if len(answer) > self.max_length:
                raise ConfigError(
                    f"task {self.task}: has an answer of {len(answer)} tokens, and the model reads {self.max_length}"
                )
            self.cut += len(context) + len(answer) > self.max_length + 1
        results = super()._loglikelihood_tokens(requests, disable_tqdm=True, override_bs=override_bs)
        if any(math.isnan(value) for value, _ in results):  # of several, lm-eval would take the first for the best
            raise CheckpointError(f"task {self.task}: the model's outputs are not numbers; did its training diverge?")
        return results

    def tok_batch_encode(self, strings: list[str], *args: Any, **options: Any) -> Any:
        """Return texts as padded ids, from which the model generates."""
        kept = options.get("left_truncate_len")
        self.cut += sum(len(self.tok_encode(text)) > kept for text in strings) if kept else 0
        return super().tok_batch_encode(strings, *args, **options)

    def _model_call(self, inps: Any, *args: Any, **options: Any) -> Any:
        self._progress(len(inps))
        return super()._model_call(inps, *args, **options)

    def _model_generate(self, context: Any, *args: Any, **options: Any) -> Any:
        self._progress(len(context))
        return super()._model_generate(context, *args, **options)

    def _progress(self, texts: int) -> None:
        # A long text is read in several windows, and answers of one token after the same question are read once.
        self._done += texts
        self._show(self.task, self._done, max(self._total, self._done))


def _metrics(task: Any, samples: list[Any], results: dict[str, Any]) -> list[DownstreamMetric]:
    """Return every metric of a task, for each filter of the answers, with the values of its items."""
    metrics = []
    for answers in dict.fromkeys(sample["filter"] for sample in samples):
        chosen = [sample for sample in samples if sample["filter"] == answers]
        for name in dict.fromkeys(name for sample in chosen for name in sample["metrics"]):
            value = results.get(f"{name},{answers}")
            if isinstance(value, float | int | np.number):
                label = name if answers == "none" else f"{name},{answers}"
                items = [sample[name] for sample in chosen if name in sample]
                metrics.append(_metric(task, name, label, float(value), items))
    return metrics


def _metric(task: Any, name: str, label: str, value: float, items: list[Any]) -> DownstreamMetric:
    if not math.isfinite(value):
        raise DataError(f"task {task.config.task}: its {label} is {value}, which cannot be recorded")
    combine = task.aggregation().get(name, lm_eval.api.metrics.mean)
    values, weights = as_numbers(items)
    is_mean = combine is lm_eval.api.metrics.mean and bool(values) and not weights
    return DownstreamMetric(
        name=label,
        value=value,
        standard_error=mean_error(values) if is_mean else jackknife_error(items, combine),
        higher_is_better=bool(task.higher_is_better().get(name, True)),
        share=is_mean and all(0 <= number <= 1 for number in values),
        items=values,
        weights=weights,
    )


def _hash(samples: list[Any]) -> str:
    """Return the hash of what a task asked: its documents, prompts and answers, in order."""
    keys = ("doc_hash", "prompt_hash", "target_hash")
    return sha256("".join(sample[key] for sample in samples for key in keys).encode()).hexdigest()


@contextmanager
def _restrained() -> Iterator[None]:
    """Let lm-eval print nothing, run no code from templates and, where the Hub does not answer, not ask for it."""
    with ExitStack() as stack:
        for name in ("lm_eval", "datasets", "evaluate", "huggingface_hub", "httpx"):
            logger = logging.getLogger(name)
            stack.callback(logger.setLevel, logger.level)
            logger.setLevel(logging.CRITICAL)
        datasets.disable_progress_bars()
        stack.enter_context(_replaced(lm_eval.api.task, "tqdm", lambda items, **options: items))
        stack.enter_context(_replaced(lm_eval.utils, "env", _sandbox()))
        stack.enter_context(_replaced(metrics_of_the_hub, "load", _refuse_metric))
        stack.enter_context(cache_without_hub())
        yield


def _refuse_metric(path: str, *args: Any, **options: Any) -> Any:
    """Raise for a metric that a task of lm-eval's own loads: it would be fetched from the Hub, and run."""
    raise _fetched(f"its metric {path!r}")


def _sandbox() -> SandboxedEnvironment:
    """Return lm-eval's environment for templates, in which they cannot reach Python's own objects."""
    own = lm_eval.utils.env
    sandbox = SandboxedEnvironment(undefined=StrictUndefined, keep_trailing_newline=True)
    sandbox.filters.update(own.filters)
    return sandbox


@contextmanager
def _replaced(module: Any, name: str, value: Any) -> Iterator[None]:
    before = getattr(module, name)
    setattr(module, name, value)
    try:
        yield
    finally:
        setattr(module, name, before)
