"""What a report reads of a run's files, by type: a damaged record then fails when it is read, by itself and by name.

Fields that are not here are not read, or may hold anything: a figure that is no number counts as none.
"""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from ..base.strict import explain
from ..errors import AnalysisError
from .run import Run

# JSON's keys are text.
_Key = Annotated[float, Field(strict=False)]


class _Shape(BaseModel):
    model_config = ConfigDict(extra="allow", strict=True)


class _Spread(_Shape):
    median: float | None = None
    p10: float | None = None
    p90: float | None = None


class _Reached(_Shape):
    step: float
    seconds: float


class _Evaluation(_Shape):
    step: int = 0


class _Result(_Shape):
    task: dict[str, Any] | None = None
    notes: list[str] = []
    warnings: list[str] = []
    parameters: dict[str, Any] | None = None
    last: dict[str, Any] | None = None
    best: dict[str, Any] | None = None
    majority: dict[str, Any] | None = None
    labels: list[Any] | None = None
    reached: dict[_Key, _Reached] | None = None
    evaluations: dict[str, _Evaluation] | None = None
    step_seconds: _Spread | None = None


class _Timing(_Shape):
    step_seconds: _Spread | None = None
    step_seconds_sample: list[float] | None = None


class _Row(_Shape):
    kind: str
    layer: str | int
    role: str
    shape: list[int] | None = None
    frozen: int | None = None
    trainable: int | None = None


class _Audit(_Shape):
    rows: list[_Row] | None = None


class _Environment(_Shape):
    gpu: dict[str, Any] | None = None
    data: dict[str, Any] | None = None


class _Layer(_Shape):
    label: str


class _Line(_Shape):
    kind: str
    step: int
    time: dict[str, Any] | None = None
    layers: list[_Layer] = []


_FILES: dict[str, type[_Shape]] = {
    "result": _Result,
    "timing": _Timing,
    "audit": _Audit,
    "environment": _Environment,
}
_LINES = TypeAdapter(list[_Line])


def check_shapes(run: Run) -> None:
    """Raise where a file of a run holds something else than what is read of it."""
    for name, shape in _FILES.items():
        try:
            shape.model_validate(getattr(run, name))
        except ValidationError as error:
            raise AnalysisError(f"{run.path / name}.json: {explain(error, shape)}") from None
    try:
        _LINES.validate_python(list(run.metrics))
    except ValidationError as error:
        number = int(error.errors()[0]["loc"][0]) + 1
        raise AnalysisError(f"{run.path / 'metrics.jsonl'}: line {number} is damaged") from None
