"""Compares a model with what its record declares: every parameter there is, and everything that the method sets.

A hash proves that one tensor did not change. These checks prove that no other is missing, added or set free.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from ..errors import MethodError, ModelError, OelmError
from .events import frozen_after
from .plan import Operation, plan
from .projections import CoreProjection
from .record import SealedRecord
from .sites import is_pefts
from .spec import ORTHONORMAL, Method
from .trainable import frozen_names

# Parts of a parameter's name that a wrapper adds: peft's around a module, torch.compile's around a part of a model.
_WRAPPERS = frozenset({"base_layer", "original_module", "_orig_mod"})


def parameter_problems(model: nn.Module, record: SealedRecord) -> tuple[list[str], int]:
    """Return in words how the model's parameters differ from the record's, and the number of those that peft added.

    A record of format 2 does not name all parameters: then only those that it names are looked for.
    """
    matrices = [name for matrix in record.matrices.values() for name in matrix.tensors]
    names = {*(record.parameters or ()), *record.frozen, *matrices}
    declared = {plain_name(name): name for name in names}
    names_of: dict[int, list[str]] = {}
    trains: dict[int, bool] = {}
    problems, present, added = [], set(), 0
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names_of.setdefault(id(parameter), []).append(name)
        trains[id(parameter)] = parameter.requires_grad
        if parameter.device.type == "meta" and name not in record.frozen:  # of a frozen one its hash is missed
            problems.append(f"{name} is on the meta device, without values (offloaded?): load the whole model")
    for key, own in names_of.items():
        known = list(dict.fromkeys(plain for name in own if (plain := plain_name(name)) in declared))
        present |= set(known)
        if len(known) > 1:
            problems.append(f"{' and '.join(declared[name] for name in known)} were different tensors and are one")
        elif not known and hasattr(model, "peft_config") and all(_is_pefts_own(model, name) for name in own):
            added += 1
        elif not known and record.parameters is not None:
            how = ", and it trains" if trains[key] else ""
            problems.append(f"{own[0]} is not in the record{how}: it was added after oelm.apply")
    gone = [name for plain, name in declared.items() if plain not in present and name not in record.frozen]
    problems += [f"{name} is gone: was its module replaced?" for name in sorted(gone)]
    return problems + _hidden(model), added


def structure_problems(model: nn.Module, record: SealedRecord) -> list[str]:
    """Return in words which projections have lost the trained core that the record declares."""
    declared = set(record.parameters or ())
    problems = []
    for path in record.matrices:
        if f"{path}.core" in declared:
            module = _module(model, path)
            if not isinstance(module, CoreProjection):
                problems.append(f"{path} had a core and is a {type(module).__name__} now")
    return problems


def record_problems(
    model: nn.Module, record: SealedRecord, method: Method, operation: Operation | None
) -> tuple[list[str], str]:
    """Return in words how the record differs from what its method does to this model, and why that is not known.

    The hashes aside, a record follows from the method and the model, so nothing can be missing in it unnoticed. The
    reason is empty but for a model whose Q is packed, as quantised ones are, so that its rows cannot be counted.
    """
    try:
        operation = operation or _operation(model, record, method)
    except ModelError as error:
        return [], str(error)
    except OelmError as error:
        return [f"the method does not fit the model any more: {error}"], ""
    try:
        by_matrix, always = frozen_names(model, operation)
        paths = set(frozen_after(operation, record.events))
    except OelmError as error:
        return [f"the method does not fit the model any more: {error}"], ""
    problems = []
    if record.events > len(method.schedule.steps):
        problems.append(f"the record counts {record.events} events, of {len(method.schedule.steps)} in its schedule")
    if record.parameters is not None and not record.events:  # an event moves names to and from the frozen ones
        named = {*record.frozen, *record.parameters}
        unnamed = (name for matrix in record.matrices.values() for name in matrix.tensors if name not in named)
        problems += [f"the record says of {name} neither that it is frozen nor that it trains" for name in unnamed]
    expected = matrices_of(operation, by_matrix)
    recorded = record.matrices.keys()
    problems += [f"the record has no matrix {path}, which its method sets" for path in expected.keys() - recorded]
    problems += [f"the record has a matrix {path}, which its method leaves" for path in recorded - expected.keys()]
    for path in expected.keys() & recorded:
        fields, found = {**expected[path], "frozen": path in paths}, record.matrices[path].model_dump()
        if method.schedule.kind == "freeze" and path in paths:  # see seal.reseal
            fields["orthonormal_blocks"] = None
        fields["tensors"], found["tensors"] = (_plain_names(entry["tensors"]) for entry in (fields, found))
        wrong = [name for name, value in fields.items() if found[name] != value]
        problems += [f"the record says {name} {found[name]!r} of {path}, not {fields[name]!r}" for name in wrong]
    frozen = _plain_names([*always, *(name for path in paths for name in by_matrix[path])])
    sealed = _plain_names(record.frozen)
    problems += [f"the record has no hash of {name}, which its method freezes" for name in frozen - sealed]
    problems += [f"the record has a hash of {name}, which its method leaves" for name in sealed - frozen]
    return sorted(problems), ""


def matrices_of(operation: Operation, tensors: Mapping[str, list[str]]) -> dict[str, dict[str, Any]]:
    """Return what a record says of each matrix that an operation sets, as it is before anything is frozen."""
    return {
        target.path: {
            "init": target.spec.init,
            "frozen": False,
            "factor": target.factor,
            "orthonormal_blocks": target.blocks if target.spec.init in ORTHONORMAL else None,
            "tensors": tensors[target.path],
        }
        for target in operation.targets
    }


def _operation(model: nn.Module, record: SealedRecord, method: Method) -> Operation:
    """Return what the method does to the model.

    A share of the parameters is not counted again, since adapters may have been added: then the matrices are those of
    the record, out of those that the method chooses from.
    """
    if not isinstance(method.freeze_ratio, float):
        return plan(model, method)
    operation = plan(model, method.model_copy(update={"freeze_ratio": None}))
    targets = tuple(target for target in operation.targets if target.path in record.matrices)
    if not targets:
        raise MethodError("the record has no matrix")
    return replace(operation, targets=targets)


def _hidden(model: nn.Module) -> list[str]:
    """Return in words which tensors train without being parameters: buffers, and attributes of modules."""
    problems = []
    for path, module in model.named_modules():
        tensors = {name: value for name, value in vars(module).items() if isinstance(value, Tensor)}
        for name, tensor in {**tensors, **module._buffers}.items():
            if tensor is not None and tensor.requires_grad and tensor.is_leaf:
                problems.append(f"{path}.{name} trains, and it is no parameter".lstrip("."))
    return problems


def _is_pefts_own(model: nn.Module, name: str) -> bool:
    """Return True for a parameter of peft's own, inside one of its modules."""
    module, parts = model, name.split(".")
    for part in parts[:-1]:
        module = module.get_submodule(part)
        if is_pefts(module):
            return True
    return False


def plain_name(name: str) -> str:
    """Return a parameter's name without what wrappers add to it."""
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


def _plain_names(names: Iterable[str]) -> set[str]:
    return {plain_name(name) for name in names}


def _module(model: nn.Module, path: str) -> nn.Module | None:
    try:
        return model.get_submodule(path)
    except AttributeError:
        return None
