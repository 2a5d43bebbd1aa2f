"""The base of all configs: pydantic models whose errors name the field, the value and what would be valid."""

from __future__ import annotations

import re
from typing import Annotated, Any, ClassVar, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationError, ValidationInfo, field_validator

from ..errors import OelmError, nearest, one_of

# The share of the training data that is used, and the share that is held out for validation.
Fraction = Annotated[float, Field(gt=0, le=1)]
ValidationShare = Annotated[float, Field(gt=0, le=0.5)]

# In the path of an error, pydantic also lists the members of a union that it tried. They are not fields.
_UNION_MEMBER = re.compile(r"str|int|float|bool|none|literal\[.*|constrained-.*|.*\[.*\]|function-.*", re.DOTALL)


class Strict(BaseModel):
    """A model that refuses unknown keys and is frozen after validation.

    `refusal` is the class of error that it raises, given as a class argument. `other_names` has names that other tools
    use, with the dotted path of what they mean here.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)
    refusal: ClassVar[type[OelmError]] = OelmError
    other_names: ClassVar[dict[str, str]] = {}

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
    def _refuse_bool_as_number(cls, value: Any, info: ValidationInfo) -> Any:
        """Refuse `max_steps: true`, which Python would take for 1."""
        if isinstance(value, bool) and info.field_name is not None:
            kinds = _members(cls.model_fields[info.field_name].annotation)
            if kinds & {int, float} and not kinds & {bool, Any, True, False}:
                raise ValueError(f"should be a number (got {value!r})")
        return value

    # With this mark pydantic does not call the constructor for nested models, whose errors would lose the path to them.
    __init__.__pydantic_base_init__ = True  # type: ignore[attr-defined]


def explain(error: ValidationError, model: type[BaseModel], also: tuple[str, ...] = ()) -> str:
    """Return a validation error as text: for each problem the field, what is wrong, and the value or the known keys.

    `also` are keys that are allowed beside the model's own fields.
    """
    clauses: dict[str, list[str]] = {}
    for problem in error.errors():
        path = tuple(part for part in problem["loc"] if not _UNION_MEMBER.fullmatch(str(part)))
        message = problem["msg"].removeprefix("Value error, ")
        if problem["type"] == "extra_forbidden":
            known = [*_fields_at(model, path[:-1]), *(also if len(path) == 1 else ())]
            hint = nearest(str(path[-1]), known) or one_of(fields_called(str(path[-1]), model))
            message = f"unknown key.{hint} Known keys: {', '.join(known)}"
        elif problem["type"] == "tuple_type":  # a list, in YAML and JSON
            message = f"should be a list, such as [{problem['input']!r}]"
        elif problem["type"] == "model_type":
            message = f"should be a section with settings in it (got {problem['input']!r})"
        elif problem["type"] != "value_error":
            message = f"{message} (got {problem['input']!r})"
        where = ".".join(str(part) for part in path)
        messages = clauses.setdefault(where, [])
        messages += [message] if message not in messages else []
    return "; ".join(
        f"{where}: {_join(messages)}" if where else "; ".join(messages) for where, messages in clauses.items()
    )


def fields_called(name: str, model: type[BaseModel]) -> list[str]:
    """Return the dotted paths of a model's fields that have this name at any depth, or that other tools call so."""
    meant = getattr(model, "other_names", {}).get(name)
    return [meant] if meant else [path for path in _paths(model) if path.rpartition(".")[2] == name]


def _paths(model: type[BaseModel]) -> list[str]:
    """Return the dotted paths of a model's fields; those of a section follow it."""
    paths = []
    for name, field in model.model_fields.items():
        paths.append(name)
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            paths += [f"{name}.{path}" for path in _paths(field.annotation)]
    return paths


def _join(messages: list[str]) -> str:
    """Return the messages about one field as one; if each names a type that a union would accept, as "A, B or C"."""
    prefix = "Input should be "
    got = {message.partition(" (got ")[2] for message in messages}
    if len(messages) == 1 or len(got) != 1 or not all(message.startswith(prefix) for message in messages):
        return "; ".join(messages)
    accepted = [message.removeprefix(prefix).partition(" (got ")[0] for message in messages]
    return f"{prefix}{', '.join(accepted[:-1])} or {accepted[-1]} (got {got.pop()}"


def merge(base: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """Return `base` updated with `changes`, where nested dicts are merged too."""
    merged = dict(base)
    for key, value in changes.items():
        old = merged.get(key)
        merged[key] = merge(old, value) if isinstance(old, dict) and isinstance(value, dict) else value
    return merged


def flat(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested mappings as one mapping with dotted names. An empty mapping stays a value."""
    flattened: dict[str, Any] = {}
    for key, value in values.items():
        nested = isinstance(value, dict) and value
        flattened |= flat(value, f"{prefix}{key}.") if nested else {f"{prefix}{key}": value}
    return flattened


def _members(annotation: Any) -> set[Any]:
    """Return the types and literals that a union or an annotated type consists of."""
    inner = get_args(annotation)
    return {annotation}.union(*map(_members, inner)) if inner else {annotation}


def _fields_at(model: type[BaseModel], path: tuple[Any, ...]) -> list[str]:
    """Return the field names of the model nested at `path`."""
    for part in path:
        if isinstance(part, int):  # a place in a list
            continue
        field = model.model_fields.get(str(part))
        members = set() if field is None else _members(field.annotation)
        nested = [inner for inner in members if isinstance(inner, type) and issubclass(inner, BaseModel)]
        if len(nested) != 1:
            break
        model = nested[0]
    return list(model.model_fields)
