"""The result of a finished run: its metrics, what they cost, and what a reader must know."""

from __future__ import annotations

from typing import Any

from ..base.files import read_record
from ..base.strict import flat
from ..errors import FileError
from ..runs.folder import RunFolder, check_records, ending
from ..runs.schema import Audit, DataSummary, Parameters, Reached, Result, TaskRecord, Timing, Validation, read
from .build import ActiveRun
from .checkpoint import TrainState, list_checkpoints
from .tasks.base import MetricDict


def result_of(
    run: ActiveRun, audit: Audit, timing: Timing, evaluations: dict[str, MetricDict], peak_memory: int | None
) -> Result:
    """Return the content of result.json. `evaluations` are the metrics on other splits than the validation split."""
    config, task, state = run.config, run.task, run.state
    data, fields = task.describe(), task.result_fields(state.last, state.best)
    warnings = fields.pop("warnings", [])
    return Result(
        status="finished",
        id=config.id,
        task=TaskRecord(kind=config.task.kind, name=config.task.name),
        **fields,
        last=Validation.model_validate(state.last),
        best=Validation.model_validate(state.best) if state.best else None,
        evaluations={name: Validation.model_validate(metrics) for name, metrics in evaluations.items()},
        steps=state.step,
        tokens=state.tokens,
        epochs=run.length.epoch(state.step),
        parameters=Parameters(**{name: getattr(audit, name) for name in Parameters.model_fields}),
        flops_per_token=run.flops_per_token,
        step_seconds=timing.step_seconds,
        tokens_per_second=timing.tokens_per_second,
        peak_memory=peak_memory,
        seconds=state.seconds,
        gpu_hours=state.seconds / 3600 * run.world.size if peak_memory is not None else None,
        reached={float(target): Reached.model_validate(when) for target, when in state.reached.items()},
        skipped_steps=state.skipped,
        warnings=task.warnings() + run.length.warnings() + warnings + _step_warnings(state),
        notes=state.notes + ([config.log.note] if config.log.note else []),
        data=DataSummary(description=data["description"], synthetic=data["synthetic"]),
    )


def exit_code(result: dict[str, Any]) -> int:
    """Return the exit code of a command that trained: 1 for a diverged run. Only the first process has a result."""
    return 1 if result and ending(result["val_loss"]) == "diverged" else 0


def _step_warnings(state: TrainState) -> list[str]:
    """Return warnings about a diverged run and about skipped steps."""
    warnings = []
    if ending(state.last["loss"]) == "diverged":
        warnings.append("the last validation loss is not a number: the run diverged; lower the learning rate")
    if state.skipped:
        warnings.append(f"{state.skipped} of {state.step} steps were skipped because of a non-finite gradient")
    return warnings


def read_result(folder: RunFolder) -> dict[str, Any]:
    """Return the content of a finished run's result.json; raise an error that says what to do where it is damaged."""
    try:
        result = read(folder / "result.json", Result)
        if result.id != folder.config.id:
            raise FileError(f"{folder / 'result.json'}: is another run's, of id {result.id}")
        check_records(folder.path)
    except FileError as error:
        has_checkpoint = bool(list_checkpoints(folder.checkpoints))
        effect = "writes it again" if has_checkpoint else "trains the run again: it has no checkpoint"
        raise FileError(f"{error}. Delete the file {folder / 'result.json'}, and the same command {effect}") from None
    return read_record(folder / "result.json")


def final_numbers(result: Result) -> dict[str, float]:
    """Return a result's numbers for trackers, without `last` and `best`, whose metrics are at the top level too.

    Those of slices of the loss are left out: result.json has them.
    """
    left_out: Any = {"last": True, "best": True, "evaluations": {"__all__": {"slices"}}}
    content = flat(result.model_dump(exclude=left_out, exclude_unset=True))
    return {f"final/{name}": value for name, value in content.items() if type(value) in (int, float)}
