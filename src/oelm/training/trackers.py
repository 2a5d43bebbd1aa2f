"""Sends metrics to TensorBoard, W&B, MLflow or trackio. One that fails warns once and never stops or holds up a run.

Each tracker works in a thread of its own: a server that does not answer may take minutes to be given up. A run that
resumes goes on in the tracker's run of before, which a random part of its name, kept in trackers.json, tells apart
from runs of the same config in other folders.
"""

from __future__ import annotations

import importlib
import json
import os
import re
import secrets
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from ..base.files import read_record, write_json
from ..config import RunConfig
from ..errors import FileError

# What is imported for each. Before the first step: a thread that imports would take time from the steps.
_PACKAGES = {"tensorboard": "torch.utils.tensorboard", "wandb": "wandb", "mlflow": "mlflow", "trackio": "trackio"}
# In seconds: how long the first step, a checkpoint and the end of a run wait for a tracker.
_START, _FLUSH, _CLOSE = 15.0, 2.0, 30.0
# Of the trackers' own settings, where the user has none: MLflow would look for its maker's server at every start, and
# W&B would wait for one that does not answer even after the run's end.
_SETTINGS = {"MLFLOW_DISABLE_TELEMETRY": "true", "WANDB_INIT_TIMEOUT": "12"}
# In how many seconds trackio, which has no way to ask for it, has written what it was given: twice a second, and a bit.
_TRACKIO_WRITES = 0.75
# What MLflow takes in a parameter's name, and how much of its value.
_NOT_IN_A_NAME = re.compile(r"[^\w. :/-]")
_MLFLOW_VALUE, _MLFLOW_NAME, _MLFLOW_BATCH = 6000, 250, 100
_MLFLOW_STATUS = {"finished": "FINISHED", "stopped": "KILLED"}


@dataclass(frozen=True)
class Tracked:
    """What a tracker is told about a run: its config, its folder, its name there, and how many steps it has done."""

    config: RunConfig
    folder: Path
    name: str
    done: int


@dataclass
class Tracker:
    """A started tracker: how it takes figures, and how it is closed, told whether the run finished.

    `known` says up to which step it has a figure already. A run that resumes takes some steps again; most trackers
    cannot take a figure back, and would show those twice.
    """

    send: Callable[[dict[str, float], int], None]
    close: Callable[[str], Any]
    flush: Callable[[], Any] = field(default=lambda: None)
    known: Callable[[str], int] = field(default=lambda key: -1)


class Trackers:
    """The trackers of a run that has `done` steps. `warn` is told, once for each, when one cannot be used or stops."""

    def __init__(self, config: RunConfig, folder: Path, warn: Callable[[str], None], done: int = 0) -> None:
        self._warn = warn
        names = [name for name in dict.fromkeys(config.log.trackers) if self._has(name)]
        run = Tracked(config, folder, _name(config, folder) if names else "", done)
        self._workers = [_Worker(name, run) for name in names]
        self._wait([worker.started for worker in self._workers], _START)
        for worker in self._workers:
            if not worker.started.is_set():
                warn(f"tracker {worker.name} has not answered for {_START:.0f} s: training does not wait for it")

    def _has(self, name: str) -> bool:
        """Whether a tracker's package can be imported; it is, once its settings are there."""
        for variable, value in _SETTINGS.items():
            os.environ.setdefault(variable, value)
        try:
            importlib.import_module(_PACKAGES[name])
        except ImportError as error:
            self._warn(f"tracker {name} is off: it cannot be imported ({error}): pip install 'oelm[trackers]'")
            return False
        return True

    def send(self, values: dict[str, float], step: int) -> None:
        for worker in self._workers:
            worker.queue.put((values, step))
        self._tell()

    def flush(self) -> None:
        """Wait a moment until all that was sent is kept: a checkpoint comes, after which these steps are not repeated.

        One that is late already is not waited for again.
        """
        self._wait([worker.flush() for worker in self._workers if worker.flushed.is_set()], _FLUSH)

    def close(self, ended: str) -> None:
        """Close them, with how the run ended: finished, stopped, failed or diverged. One that never started is left."""
        for worker in self._workers:
            worker.queue.put(ended)
        started = [worker for worker in self._workers if worker.started.is_set()]
        self._wait([worker.closed for worker in started], _CLOSE)
        for worker in started:
            if not worker.closed.is_set() and not worker.failure:
                self._warn(f"tracker {worker.name} did not answer for {_CLOSE:.0f} s: its last figures may be missing")
        self._workers = []

    def _wait(self, events: list[threading.Event], seconds: float) -> None:
        until = time.monotonic() + seconds
        for event in events:
            event.wait(max(0.0, until - time.monotonic()))
        self._tell()

    def _tell(self) -> None:
        for worker in self._workers:
            if worker.failure and not worker.told:
                worker.told = True
                self._warn(f"tracker {worker.name} is off: {worker.failure}")


class _Worker:
    """One tracker in its thread. What goes wrong there is left in `failure`, for the run to tell."""

    def __init__(self, name: str, run: Tracked) -> None:
        self.name, self.failure, self.told = name, "", False
        self.queue: SimpleQueue[tuple[dict[str, float], int] | threading.Event | str] = SimpleQueue()
        self.started, self.flushed, self.closed = threading.Event(), threading.Event(), threading.Event()
        self.flushed.set()
        threading.Thread(target=self._work, args=(run,), name=f"tracker-{name}", daemon=True).start()

    def flush(self) -> threading.Event:
        self.flushed = threading.Event()
        self.queue.put(self.flushed)
        return self.flushed

    def _work(self, run: Tracked) -> None:
        tracker: Tracker | None = self._try(lambda: _STARTERS[self.name](run))
        self.started.set()
        ended = "failed"
        known: dict[str, int] = {}
        while True:
            item = self.queue.get()
            if isinstance(item, str):
                ended = item
                break
            if isinstance(item, threading.Event):
                if tracker is not None and not self.failure:
                    self._try(tracker.flush)
                item.set()
            elif tracker is not None and not self.failure:
                self._try(lambda tracker=tracker, item=item: _send_new(tracker, known, *item))  # type: ignore[misc]
        if tracker is not None:  # one that failed may still keep what it had
            self._try(lambda tracker=tracker: tracker.close(ended))  # type: ignore[misc]
        self.closed.set()

    def _try(self, action: Callable[[], Any]) -> Any:
        try:
            return action()
        except Exception as error:  # noqa: BLE001 - whatever a tracker does, training goes on, and it is said
            self.failure = self.failure or f"{type(error).__name__}: {error}"
            return None


def _send_new(tracker: Tracker, known: dict[str, int], values: dict[str, float], step: int) -> None:
    """Send the figures of a step that the tracker does not have from before the run was resumed."""
    for key in values:
        if key not in known:
            known[key] = tracker.known(key)
    new = {key: value for key, value in values.items() if step > known[key]}
    if new:
        tracker.send(new, step)


def _name(config: RunConfig, folder: Path) -> str:
    """The name by which trackers know the run in this folder, the same whenever it is resumed."""
    path = folder / "trackers.json"
    with suppress(FileError):  # none yet, or damaged: then the run begins anew there
        known = read_record(path).get("name")
        if isinstance(known, str):
            return known
    name = f"{config.id}-{secrets.token_hex(4)}"
    write_json(path, {"name": name})
    return name


def flat(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested mappings as one, with dotted names."""
    found: dict[str, Any] = {}
    for key, value in values.items():
        found |= flat(value, f"{prefix}{key}.") if isinstance(value, dict) and value else {f"{prefix}{key}": value}
    return found


def _tensorboard(run: Tracked) -> Tracker:
    from torch.utils.tensorboard import SummaryWriter

    # What a process before this one sent of steps that are taken again now is hidden: each would be there twice.
    writer: Any = SummaryWriter(str(run.folder / "tensorboard"), purge_step=run.done + 1 if run.done else 0)
    if not run.done:
        writer.add_text("config", f"```\n{json.dumps(run.config.to_dict(), indent=2)}\n```", 0)

    def send(values: dict[str, float], step: int) -> None:
        for key, value in values.items():
            writer.add_scalar(key, value, step)

    return Tracker(send, lambda ended: writer.close(), writer.flush)


def _wandb(run: Tracked) -> Tracker:
    import wandb

    config = run.config
    there: Any = wandb.init(
        project="oelm", group=config.experiment, name=str(config.folder), id=run.name, resume="allow",
        dir=str(run.folder), config=config.to_dict(),
    )  # fmt: skip
    first = there.step  # of one that resumes, the first step that its server does not have
    return Tracker(
        lambda values, step: there.log(values, step=step),
        lambda ended: there.finish(exit_code=0 if ended == "finished" else 1),
        known=lambda key: first - 1,
    )


def _mlflow(run: Tracked) -> Tracker:
    import mlflow
    from mlflow.entities import Metric, Param
    from mlflow.tracking.context.registry import resolve_tags

    client: Any = mlflow.MlflowClient()  # the module's own functions know one run per thread
    config, experiment = run.config, mlflow.set_experiment(run.config.experiment).experiment_id
    found = client.search_runs([experiment], f"tags.`oelm.run` = '{run.name}'", max_results=1)
    if found:
        there, has = found[0].info.run_id, set(found[0].data.metrics)
        client.update_run(there, status="RUNNING")
    else:
        tags = resolve_tags({"oelm.run": run.name, "oelm.folder": str(run.folder.resolve())})  # with user and source
        name = f"{config.method.name}-seed-{config.seed}"
        there, has = client.create_run(experiment, run_name=name, tags=tags).info.run_id, set()
        parameters = [_mlflow_parameter(*item) for item in _mlflow_config(config).items()]
        for first in range(0, len(parameters), _MLFLOW_BATCH):
            part = parameters[first : first + _MLFLOW_BATCH]
            client.log_batch(there, params=[Param(key, value) for key, value in part])

    def send(values: dict[str, float], step: int) -> None:
        now = int(time.time() * 1000)
        client.log_batch(there, metrics=[Metric(key, float(value), now, step) for key, value in values.items()])

    def known(key: str) -> int:
        return max((metric.step for metric in client.get_metric_history(there, key)), default=-1) if key in has else -1

    def close(ended: str) -> None:
        client.set_terminated(there, _MLFLOW_STATUS.get(ended, "FAILED"))

    return Tracker(send, close, known=known)


def _mlflow_config(config: RunConfig) -> dict[str, Any]:
    """What a run is known by, and its whole config by dotted names."""
    return {**flat(config.to_dict()), "method": config.method.name, "id": config.id}


def _mlflow_parameter(key: str, value: Any) -> tuple[str, str]:
    """A parameter as MLflow takes it. The whole of a value that is cut is in the run's config.json."""
    text = value if isinstance(value, str) else json.dumps(value)
    cut = text if len(text) <= _MLFLOW_VALUE else f"{text[: _MLFLOW_VALUE - 1]}…"
    return _NOT_IN_A_NAME.sub("_", key)[:_MLFLOW_NAME], cut


def _trackio(run: Tracked) -> Tracker:
    import trackio

    there: Any = trackio.init(
        project="oelm", name=f"{run.config.experiment}-{run.name}", config=run.config.to_dict(), resume="allow"
    )
    first = there._next_step  # of one that resumes, the first step that it does not have; it says so nowhere else
    return Tracker(
        lambda values, step: there.log(values, step=step),
        lambda ended: there.finish(),
        lambda: time.sleep(_TRACKIO_WRITES),
        known=lambda key: first - 1,
    )


_STARTERS: dict[str, Callable[[Tracked], Tracker]] = {
    "tensorboard": _tensorboard,
    "wandb": _wandb,
    "mlflow": _mlflow,
    "trackio": _trackio,
}
