"""What every config shares: strict models, whose errors name the field, the value and what would be right."""

from __future__ import annotations

import re
from typing import Annotated, Any, ClassVar, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationError, ValidationInfo, field_validator

from ..errors import OelmError, nearest

# The share of the training data that is used, and the share that is held out for validation.
Fraction = Annotated[float, Field(gt=0, le=1)]
ValidationShare = Annotated[float, Field(gt=0, le=0.5)]

# In an error's path pydantic also names the members of a union that it tried; those are not fields.
_UNION_MEMBER = re.compile(r"str|int|float|bool|none|literal\[.*|constrained-.*|.*\[.*\]|function-.*", re.DOTALL)


class Strict(BaseModel):
    """Unknown keys are errors, values never change after validation, and a refusal is one of oelm's own errors."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    refusal: ClassVar[type[OelmError]] = OelmError

    def __init_subclass__(cls, refusal: type[OelmError] | None = None, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if refusal is not None:
            cls.refusal = refusal

    def __init__(self, **fields: Any) -> None:
        try:
            super().__init__(**fields)
        except ValidationError as error:
            raise self.refusal(f"{type(self).__name__}: {explain(error, type(self))}") from None

    @field_validator("*", mode="before")
    @classmethod
    def _no_truth_for_a_number(cls, value: Any, info: ValidationInfo) -> Any:
        """`max_steps: true` would be one step: Python takes true and false for numbers."""
        if isinstance(value, bool) and info.field_name is not None:
            kinds = _members(cls.model_fields[info.field_name].annotation)
            if kinds & {int, float} and not kinds & {bool, Any, True, False}:
                raise ValueError(f"should be a number (got {value!r})")
        return value

    # Keeps this constructor out of the validation of nested fields, whose errors then still name the whole path.
    __init__.__pydantic_base_init__ = True  # type: ignore[attr-defined]


def explain(error: ValidationError, model: type[BaseModel], also: tuple[str, ...] = ()) -> str:
    """A validation error, one clause per problem: the field, what is wrong with it, and the known keys or the value.

    `also` are keys beside the model's own fields.
    """
    clauses: dict[str, list[str]] = {}
    for problem in error.errors():
        path = tuple(part for part in problem["loc"] if not _UNION_MEMBER.fullmatch(str(part)))
        message = problem["msg"].removeprefix("Value error, ")
        if problem["type"] == "extra_forbidden":
            known = [*_fields_at(model, path[:-1]), *(also if len(path) == 1 else ())]
            message = f"unknown key.{nearest(str(path[-1]), known)} Known keys: {', '.join(known)}"
        elif problem["type"] == "tuple_type":  # what a file calls a list
            message = f"should be a list, such as [{problem['input']!r}]"
        elif problem["type"] == "model_type":
            message = f"should be a section with settings of its own (got {problem['input']!r})"
        elif problem["type"] != "value_error":
            message = f"{message} (got {problem['input']!r})"
        where = ".".join(str(part) for part in path)
        told = clauses.setdefault(where, [])
        told += [message] if message not in told else []
    return "; ".join(f"{where}: {_alternatives(told)}" if where else "; ".join(told) for where, told in clauses.items())


def _alternatives(messages: list[str]) -> str:
    """What is wrong with one field: where each member of a union says what it would take, these as one sentence."""
    begins = "Input should be "
    got = {message.partition(" (got ")[2] for message in messages}
    if len(messages) == 1 or len(got) != 1 or not all(message.startswith(begins) for message in messages):
        return "; ".join(messages)
    takes = [message.removeprefix(begins).partition(" (got ")[0] for message in messages]
    return f"{begins}{', '.join(takes[:-1])} or {takes[-1]} (got {got.pop()}"


def merge(base: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """`base` with `changes` laid over it, nested dicts merged."""
    merged = dict(base)
    for key, value in changes.items():
        old = merged.get(key)
        merged[key] = merge(old, value) if isinstance(old, dict) and isinstance(value, dict) else value
    return merged


def _members(annotation: Any) -> set[Any]:
    """The types and literals that a union or an annotated type is made of."""
    inner = get_args(annotation)
    return {annotation}.union(*map(_members, inner)) if inner else {annotation}


def _fields_at(model: type[BaseModel], path: tuple[Any, ...]) -> list[str]:
    """The names of the fields of the model nested at `path`."""
    for part in path:
        field = model.model_fields.get(str(part))
        if field is None or not isinstance(field.annotation, type) or not issubclass(field.annotation, BaseModel):
            break
        model = field.annotation
    return list(model.model_fields)
