"""Sends metrics to TensorBoard, W&B, MLflow or trackio. One that fails warns once and never stops a run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from ..config import RunConfig

Send = Callable[[dict[str, float], int], None]


class Trackers:
    """The trackers of a run that has `done` steps. `warn` is told, once for each, when one cannot be used or stops."""

    def __init__(self, config: RunConfig, folder: Path, warn: Callable[[str], None], done: int = 0) -> None:
        self._warn = warn
        self._off: set[str] = set()
        self._senders: dict[str, Send] = {}
        self._closers: dict[str, Callable[[], None]] = {}
        for name in config.log.trackers:
            self._guard(name, lambda name=name: self._start(name, config, folder, done))  # type: ignore[misc]

    def send(self, values: dict[str, float], step: int) -> None:
        for name, sender in list(self._senders.items()):
            self._guard(name, lambda sender=sender: sender(values, step))  # type: ignore[misc]

    def close(self) -> None:
        for name, closer in self._closers.items():
            self._guard(name, closer)
        self._senders.clear()
        self._closers.clear()

    def _start(self, name: str, config: RunConfig, folder: Path, done: int) -> None:
        self._senders[name], self._closers[name] = _STARTERS[name](config, folder, done)

    def _guard(self, name: str, action: Callable[[], None]) -> None:
        try:
            action()
        except Exception as error:  # noqa: BLE001 - whatever a tracker does, training goes on, and it is said
            self._senders.pop(name, None)
            if name not in self._off:  # one that cannot send often cannot close either
                self._warn(f"tracker {name} is off: {type(error).__name__}: {error}")
            self._off.add(name)


def _tensorboard(config: RunConfig, folder: Path, done: int) -> tuple[Send, Callable[[], None]]:
    from torch.utils.tensorboard import SummaryWriter

    # What a process before this one sent of steps that are taken again now is hidden: each would be there twice.
    writer: Any = SummaryWriter(str(folder / "tensorboard"), purge_step=done + 1)

    def send(values: dict[str, float], step: int) -> None:
        for key, value in values.items():
            writer.add_scalar(key, value, step)

    return send, writer.close


def _wandb(config: RunConfig, folder: Path, done: int) -> tuple[Send, Callable[[], None]]:
    import wandb

    run: Any = wandb.init(
        project="oelm", group=config.experiment, name=str(config.folder), id=config.id, resume="allow", dir=str(folder),
        config=config.to_dict(),
    )  # fmt: skip
    return lambda values, step: run.log(values, step=step), run.finish


def _mlflow(config: RunConfig, folder: Path, done: int) -> tuple[Send, Callable[[], None]]:
    import mlflow

    mlflow.set_experiment(config.experiment)
    mlflow.start_run(run_name=f"{config.method.name}-seed-{config.seed}")
    mlflow.log_params({"method": config.method.name, "seed": config.seed, "id": config.id})
    return lambda values, step: mlflow.log_metrics(values, step=step), mlflow.end_run


def _trackio(config: RunConfig, folder: Path, done: int) -> tuple[Send, Callable[[], None]]:
    import trackio

    run: Any = trackio.init(project="oelm", name=f"{config.experiment}-{config.id}", config=config.to_dict())
    return lambda values, step: run.log(values, step=step), run.finish


_STARTERS = {"tensorboard": _tensorboard, "wandb": _wandb, "mlflow": _mlflow, "trackio": _trackio}
