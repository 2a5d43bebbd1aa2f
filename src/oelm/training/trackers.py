"""Send metrics to TensorBoard, W&B, MLflow or trackio. A tracker that fails warns once and never delays a run.

Each tracker works in a thread of its own, because it may take minutes to give up on a server that does not answer. A
resumed run continues its run in the tracker. The name of that run has a random part, kept in trackers.json, so that
runs of the same config in other folders are not confused with it.
"""

from __future__ import annotations

import importlib
import json
import os
import re
import secrets
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from ..base.files import read_record, write_json
from ..base.strict import flat
from ..config import RunConfig
from ..errors import FileError

# How many seconds the first step, a checkpoint and the end of a run wait for a tracker.
_START, _FLUSH, _CLOSE = 15.0, 2.0, 30.0
# Environment variables of the trackers, used where the user has not set them: MLflow would contact its maker's server
# at every start, and W&B would wait for a server that does not answer even after the run's end.
_SETTINGS = {"MLFLOW_DISABLE_TELEMETRY": "true", "WANDB_INIT_TIMEOUT": "12"}
# trackio has no flush. It writes twice a second, so after this many seconds everything is written.
_TRACKIO_WRITES = 0.75
# Characters that MLflow refuses in a parameter's name, and its limits on values, names and batches.
_NOT_IN_A_NAME = re.compile(r"[^\w. :/-]")
_MLFLOW_VALUE, _MLFLOW_NAME, _MLFLOW_BATCH = 6000, 250, 100


@dataclass(frozen=True)
class Tracked:
    """A run as a tracker sees it: its config and folder, its name in the tracker, and the number of steps done."""

    config: RunConfig
    folder: Path
    name: str
    done: int


@dataclass
class Tracker:
    """A started tracker as functions: send metrics, close with how the run ended, and flush.

    `known` returns the last step for which the tracker has a metric already. A resumed run repeats some steps; most
    trackers cannot replace a value and would show both.
    """

    send: Callable[[dict[str, float], int], None]
    close: Callable[[str], Any]
    flush: Callable[[], Any] = field(default=lambda: None)
    known: Callable[[str], int] = field(default=lambda key: -1)


class Trackers:
    """The trackers of a run. `warn` is called once for each tracker that cannot be used or stops working."""

    def __init__(
        self, names: Iterable[str], config: RunConfig, folder: Path, warn: Callable[[str], None], done: int = 0
    ) -> None:
        """Start the trackers with these names for a run that has `done` steps."""
        self._warn = warn
        usable = [name for name in dict.fromkeys(names) if self._import(name)]
        run = Tracked(config, folder, _name(config, folder) if usable else "", done)
        self._workers = [_Worker(name, run) for name in usable]
        self._wait([worker.started for worker in self._workers], _START)
        for worker in self._workers:
            if not worker.started.is_set():
                warn(f"tracker {worker.name} has not answered for {_START:.0f} s: training does not wait for it")

    def _import(self, name: str) -> bool:
        """Import a tracker's package, after setting its environment variables. Return False when that fails.

        It is imported before the first step, because an import in a thread slows the steps.
        """
        for variable, value in _SETTINGS.items():
            os.environ.setdefault(variable, value)
        try:
            importlib.import_module("torch.utils.tensorboard" if name == "tensorboard" else name)
        except ImportError as error:
            self._warn(f"tracker {name} is off: it cannot be imported ({error}): pip install 'oelm[trackers]'")
            return False
        return True

    def send(self, values: dict[str, float], step: int) -> None:
        """Queue the metrics of a step for every tracker."""
        for worker in self._workers:
            worker.queue.put((values, step))
        self._report_failures()

    def flush(self) -> None:
        """Wait briefly for what was sent to be stored: after the checkpoint that follows, these steps are not repeated.

        A tracker that is still busy with an earlier flush is not waited for.
        """
        self._wait([worker.flush() for worker in self._workers if worker.flushed.is_set()], _FLUSH)

    def close(self, ended: str) -> None:
        """Close all trackers that started. `ended` is finished, stopped, failed or diverged."""
        for worker in self._workers:
            worker.queue.put(ended)
        started = [worker for worker in self._workers if worker.started.is_set()]
        self._wait([worker.closed for worker in started], _CLOSE)
        for worker in started:
            if not worker.closed.is_set() and not worker.failure:
                self._warn(f"tracker {worker.name} did not answer for {_CLOSE:.0f} s: its last metrics may be missing")
        self._workers = []

    def _wait(self, events: list[threading.Event], seconds: float) -> None:
        deadline = time.monotonic() + seconds
        for event in events:
            event.wait(max(0.0, deadline - time.monotonic()))
        self._report_failures()

    def _report_failures(self) -> None:
        """Warn about trackers that failed since the last call."""
        for worker in self._workers:
            if worker.failure and not worker.reported:
                worker.reported = True
                self._warn(f"tracker {worker.name} is off: {worker.failure}")


class _Worker:
    """One tracker in its thread. An error there is kept in `failure`, for the run to report."""

    def __init__(self, name: str, run: Tracked) -> None:
        self.name, self.failure, self.reported = name, "", False
        self.queue: SimpleQueue[tuple[dict[str, float], int] | threading.Event | str] = SimpleQueue()
        self.started, self.flushed, self.closed = threading.Event(), threading.Event(), threading.Event()
        self.flushed.set()
        threading.Thread(target=self._work, args=(run,), name=f"tracker-{name}", daemon=True).start()

    def flush(self) -> threading.Event:
        self.flushed = threading.Event()
        self.queue.put(self.flushed)
        return self.flushed

    def _work(self, run: Tracked) -> None:
        tracker: Tracker | None = self._try(_STARTERS[self.name], run)
        self.started.set()
        known: dict[str, int] = {}
        while not isinstance(item := self.queue.get(), str):
            working = None if self.failure else tracker
            if isinstance(item, threading.Event):
                if working is not None:
                    self._try(working.flush)
                item.set()
            elif working is not None:
                self._try(_send_new, working, known, *item)
        if tracker is not None:  # a failed tracker may still store what it had
            self._try(tracker.close, item)
        self.closed.set()

    def _try(self, action: Callable[..., Any], *arguments: Any) -> Any:
        try:
            return action(*arguments)
        except Exception as error:  # noqa: BLE001 - whatever a tracker raises is reported, and training continues
            self.failure = self.failure or f"{type(error).__name__}: {error}"
            return None


def _send_new(tracker: Tracker, known: dict[str, int], values: dict[str, float], step: int) -> None:
    """Send the metrics of a step, except those that the tracker has from before the run was resumed."""
    known |= {key: tracker.known(key) for key in values if key not in known}
    new = {key: value for key, value in values.items() if step > known[key]}
    if new:
        tracker.send(new, step)


def _name(config: RunConfig, folder: Path) -> str:
    """Return the name of the run in this folder for trackers, the same whenever it is resumed."""
    path = folder / "trackers.json"
    with suppress(FileError):  # missing or damaged: the run gets a new name
        stored = read_record(path).get("name")
        if isinstance(stored, str):
            return stored
    name = f"{config.id}-{secrets.token_hex(4)}"
    write_json(path, {"name": name})
    return name


def _tensorboard(run: Tracked) -> Tracker:
    from torch.utils.tensorboard import SummaryWriter

    # Steps that an earlier process sent and this one repeats are hidden, or they would be shown twice.
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
    session: Any = wandb.init(
        project="oelm", group=config.experiment, name=str(config.folder), id=run.name, resume="allow",
        dir=str(run.folder), config=config.to_dict(),
    )  # fmt: skip
    next_step = session.step  # in a resumed run, the first step that the server does not have
    return Tracker(
        lambda values, step: session.log(values, step=step),
        lambda ended: session.finish(exit_code=0 if ended == "finished" else 1),
        known=lambda key: next_step - 1,
    )


def _mlflow(run: Tracked) -> Tracker:
    import mlflow
    from mlflow.entities import Metric, Param
    from mlflow.tracking.context.registry import resolve_tags

    client: Any = mlflow.MlflowClient()  # the module's functions allow one run per thread
    config, experiment = run.config, mlflow.set_experiment(run.config.experiment).experiment_id
    matching = client.search_runs([experiment], f"tags.`oelm.run` = '{run.name}'", max_results=1)
    if matching:
        run_id, stored = matching[0].info.run_id, set(matching[0].data.metrics)
        client.update_run(run_id, status="RUNNING")
    else:
        tags = resolve_tags({"oelm.run": run.name, "oelm.folder": str(run.folder.resolve())})  # with user and source
        name = f"{config.method.name}-seed-{config.seed}"
        run_id, stored = client.create_run(experiment, run_name=name, tags=tags).info.run_id, set()
        fields = flat(config.to_dict()) | {"method": config.method.name, "id": config.id}
        parameters = [Param(*_mlflow_parameter(*item)) for item in fields.items()]
        for first in range(0, len(parameters), _MLFLOW_BATCH):
            client.log_batch(run_id, params=parameters[first : first + _MLFLOW_BATCH])

    def send(values: dict[str, float], step: int) -> None:
        now = int(time.time() * 1000)
        client.log_batch(run_id, metrics=[Metric(key, float(value), now, step) for key, value in values.items()])

    def known(key: str) -> int:
        history = client.get_metric_history(run_id, key) if key in stored else ()
        return max((metric.step for metric in history), default=-1)

    status = {"finished": "FINISHED", "stopped": "KILLED"}
    return Tracker(send, lambda ended: client.set_terminated(run_id, status.get(ended, "FAILED")), known=known)


def _mlflow_parameter(key: str, value: Any) -> tuple[str, str]:
    """Return a parameter as MLflow accepts it. A value that is shortened here is complete in the run's config.json."""
    text = value if isinstance(value, str) else json.dumps(value)
    shortened = text if len(text) <= _MLFLOW_VALUE else f"{text[: _MLFLOW_VALUE - 1]}…"
    return _NOT_IN_A_NAME.sub("_", key)[:_MLFLOW_NAME], shortened


def _trackio(run: Tracked) -> Tracker:
    import trackio

    session: Any = trackio.init(
        project="oelm", name=f"{run.config.experiment}-{run.name}", config=run.config.to_dict(), resume="allow"
    )
    next_step = session._next_step  # in a resumed run, the first step that trackio does not have; it is not public
    return Tracker(
        lambda values, step: session.log(values, step=step),
        lambda ended: session.finish(),
        lambda: time.sleep(_TRACKIO_WRITES),
        known=lambda key: next_step - 1,
    )


_STARTERS = {"tensorboard": _tensorboard, "wandb": _wandb, "mlflow": _mlflow, "trackio": _trackio}
