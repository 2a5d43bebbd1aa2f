"""The sealed record of what is frozen, kept in the model's config, and the check of a model against it.

A record holds, for each frozen tensor, a SHA-256 of its bytes in its own dtype and in the others it may be cast to.
A cast is deterministic, so a model that was cast to bfloat16 on purpose can still be verified exactly, and a single
flipped bit cannot hide behind rounding.
"""

from __future__ import annotations

import hashlib
import sys
from collections import Counter
from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from .. import __version__
from ..errors import FreezeError, MethodError
from .declared import matrices_of, parameter_problems, plain_name, record_problems, structure_problems
from .matrices import orthogonality_error
from .plan import Operation
from .projections import CoreProjection, IdentityProjection
from .record import DIGITS, DTYPES, FORMAT, checked_record, narrower, record_hash, valid_record
from .sites import is_pefts, path_without_adapter, unwrapped, weight_matrix, without_adapter
from .trainable import frozen_names

# The module that `apply` and `load` add to a model: its state dicts then hold the record (see state_dict.py). The name
# stands in the files and in transformers' list of unexpected keys, where it says how to load them.
CARRIER = "load_with_oelm"
# How far from orthonormal a matrix may be after rounding to a dtype; the widest rows here are a few thousand long.
_TOLERANCE = {torch.float64: 1e-5, torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}
# Neither of these holds all values of the other.
_NARROW = ("float16", "bfloat16")
_SHOWN_PROBLEMS = 8
# Each thread holds a copy of the tensor that it casts or takes off a GPU, so there are few.
_HASHING_THREADS = 4


@dataclass(frozen=True)
class Verification:
    """The result of `verify`: how many frozen tensors are exactly as sealed, and how many are after a cast.

    `notes` say what a reader should know beside that: adapters that peft added, and what could not be compared.
    """

    tensors: int
    exact: int
    casts: dict[str, int]
    notes: tuple[str, ...] = ()

    def __str__(self) -> str:
        text = "no tensor is frozen"
        if self.tensors:
            text = f"{self.exact} of {self.tensors} frozen tensors are bit-identical to the sealed ones"
        for dtype, count in self.casts.items():
            text += f"; {count} are exactly what casting to {dtype} makes of them"
        return "; ".join((text, *self.notes))


class Measurements:
    """Content hashes and orthogonality errors of a model's tensors, each computed once.

    They hold only while nobody changes the model. So `apply` makes one for the hashes that it seals, the check that
    follows and the report; every call of `verify` or `audit` begins with an empty one and reads all tensors anew.
    """

    def __init__(self) -> None:
        self._hashes: dict[Tensor, str] = {}  # tensors hash by identity, and a key stays alive
        self._errors: dict[str, float] = {}

    def content_hash(self, tensor: Tensor) -> str:
        """Return the SHA-256 of a parameter's bytes."""
        if tensor not in self._hashes:
            self._hashes[tensor] = content_hash(tensor)
        return self._hashes[tensor]

    def hash_ahead(self, tensors: Collection[Tensor]) -> None:
        """Compute the hashes that `content_hash` will be asked for: together they take less time than one by one."""
        _on_threads(self.content_hash, tensors)

    def fingerprints(self, tensors: Collection[Tensor]) -> list[str]:
        """Return the fingerprint of each parameter."""
        return _on_threads(lambda tensor: fingerprint(tensor, self), tensors)

    def orthogonality_error(self, path: str, module: nn.Module, matrix: dict[str, Any]) -> float:
        """Return how far the projection at `path` is from orthonormal, given its entry in the record."""
        if path not in self._errors:
            weight = whole(weight_matrix(module)).double()
            if matrix["factor"] != 1.0:
                weight = weight / matrix["factor"]
            self._errors[path] = orthogonality_error(weight, matrix["orthonormal_blocks"])
        return self._errors[path]


def record_of(model: nn.Module) -> dict[str, Any] | None:
    """Return the record that `apply` sealed into the model's config, or None. Raise if it cannot be read."""
    return read_record(getattr(model, "config", None))


def read_record(config: Any) -> dict[str, Any] | None:
    """Return the record in a config, or None where there is none. Raise if this version of oelm cannot read it."""
    record = getattr(config, "oelm", None)
    return None if record is None else checked_record(record)


def seal(model: nn.Module, operation: Operation, seed: int, measurements: Measurements) -> None:
    """Freeze what the method freezes, and write the method and every frozen tensor's hashes into the model's config.

    There, save_pretrained keeps them. The operation's changes must have been made to the model before.
    """
    config: Any = model.config
    by_matrix, always = frozen_names(model, operation)
    config.oelm = {
        "format": FORMAT,
        "version": __version__,
        "method": operation.method.model_dump(mode="json"),
        "seed": seed,
        "events": 0,
        "matrices": matrices_of(operation, by_matrix),
        "frozen": {},
    }
    _set_frozen(model, operation.frozen_at_start, True, measurements)
    _freeze(model, always, measurements)
    config.oelm["parameters"] = [name for name, _ in model.named_parameters() if name not in config.oelm["frozen"]]
    config.oelm["sha256"] = record_hash(config.oelm)


def reseal(model: nn.Module, paths: Collection[str], freeze: bool) -> None:
    """Carry out one event of a schedule: freeze matrices as they are now, or let them train, and record it."""
    record = record_of(model)
    assert record is not None, "a schedule belongs to a method that was applied"
    if freeze:
        for path in paths:  # training took away their orthonormality, so only their bytes can be checked from now on
            record["matrices"][path]["orthonormal_blocks"] = None
    _set_frozen(model, paths, freeze, Measurements())
    record["events"] += 1
    if record["format"] == FORMAT:
        record["sha256"] = record_hash(record)


def refreeze(model: nn.Module) -> None:
    """Freeze again what the record says is frozen: loading weights switches gradients back on."""
    record = record_of(model)
    assert record is not None, "only a model with a record is refrozen"
    for name, parameter in model.named_parameters():
        if name in record["frozen"]:  # a recorded name that the model lacks is reported by verify
            parameter.requires_grad_(False)


def adopt(model: nn.Module, record: dict[str, Any]) -> None:
    """Give the model another record of its method, and freeze what that one says: a schedule may have moved on."""
    config: Any = model.config
    parameters = dict(model.named_parameters())
    released = config.oelm["frozen"].keys() - record["frozen"].keys()
    for name in released & parameters.keys():
        parameters[name].requires_grad_(True)
    config.oelm = record
    refreeze(model)


def operated_part(model: nn.Module) -> str:
    """Return the path of a part that a method was applied to by itself, or nothing where there is none."""
    paths = [path.rpartition(".")[0] for path, _ in model.named_modules() if path.rpartition(".")[2] == CARRIER]
    return next(filter(None, paths), "")


def verify(model: nn.Module) -> Verification:
    """Raise FreezeError unless every frozen tensor is as sealed: in place, without gradient, to the bit, orthonormal.

    The model's parameters must be those that the record names, and the record what its method makes of the model, so
    that nothing was added, removed or set free unnoticed. A model cast to another dtype on purpose passes if its
    tensors are exactly that cast's; the result says so. A model that was compiled, wrapped for data parallelism or
    given to peft after `apply` is checked inside its wrapper.
    """
    if not isinstance(model, nn.Module):
        raise FreezeError(
            f"a {type(model).__name__} is no model: pass what oelm.apply was called on or oelm.load returned"
        )
    return check_sealed(unwrapped(model), Measurements())


def check_sealed(model: nn.Module, measurements: Measurements, operation: Operation | None = None) -> Verification:
    """Do what `verify` does to a model without a wrapper, with the measurements that were taken of it already.

    `operation` is what the method does to the model, where that was found out already.
    """
    record = record_of(model)
    if record is None:
        part = operated_part(model)
        advice = f"only its part {part!r} does: apply it to the whole model" if part else "call oelm.apply or oelm.load"
        raise FreezeError(f"{type(model).__name__} carries no record of a method: {advice} first")
    valid, method = valid_record(record)
    problems: list[str] = []
    casts: Counter[str] = Counter()
    parameters = dict(model.named_parameters())
    parameters = {plain_name(name): parameter for name, parameter in parameters.items()} | parameters
    for name, sealed in record["frozen"].items():
        parameter = parameters.get(name, parameters.get(name_under_adapter(model, name)))
        if parameter is None:
            problems.append(f"{name} is gone: was its module replaced?")
            continue
        if parameter.requires_grad:
            problems.append(f"{name} was frozen and is now trainable (requires_grad is True)")
        try:
            cast_to = match(parameter, sealed, measurements)
        except FreezeError as error:
            problems.append(f"{name}: {error}")
            continue
        if cast_to is not None:
            casts[cast_to] += 1
    for path, matrix in valid.matrices.items():
        if matrix.frozen:
            problems += _matrix_problems(model, path, matrix.model_dump(), measurements)
    different, added = parameter_problems(model, valid)
    problems += different + structure_problems(model, valid)
    if valid.sha256 is not None and valid.sha256 != record_hash(record):
        problems.append("config.oelm was changed after oelm.apply wrote it: its own hash does not fit it")
    reason = ""
    if not problems:  # each of those would be found here again, in other words
        problems, reason = record_problems(model, valid, method, operation)
    if problems:
        name, way_out = type(model).__name__, _way_out(model, problems)
        raise FreezeError(f"{name} is not frozen as sealed.{_likely_reason(model)}{listed(problems)}{way_out}")
    notes = []
    if added:
        notes.append(f"peft added {added} tensors")
    if valid.parameters is None:
        notes.append("an older oelm sealed it, so what trains could not be compared")
    if reason:
        notes.append(f"the record could not be compared with its method ({reason})")
    return Verification(len(record["frozen"]), len(record["frozen"]) - casts.total(), dict(casts), tuple(notes))


def _likely_reason(model: nn.Module) -> str:
    """Return a sentence on why a model may not be as sealed, where there is more to say than what changed."""
    record = record_of(model)
    assert record is not None, "only a model with a record was sealed"
    own = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    if not own & record["frozen"].keys() and any(name.partition(".")[2] in own for name in record["frozen"]):
        return (
            " It is a part of the model that oelm.apply was called on: verify, save and load the whole model, with "
            f"oelm.load. oelm.export writes a plain folder, from which {type(model).__name__}.from_pretrained takes "
            "its part."
        )
    if not hasattr(model, CARRIER):
        return " It was not loaded by oelm: load its folder with oelm.load."
    if torch.distributed.is_available() and torch.distributed.is_initialized() and torch.distributed.get_rank() > 0:
        return (
            " Data parallelism gives each process the weights of the first: call torch.manual_seed(...) before the "
            "model is built, so that each builds the same."
        )
    return ""


def _way_out(model: nn.Module, problems: list[str]) -> str:
    """Return a line on what to do where peft may have merged adapters into frozen matrices, else nothing."""
    changed = any("its content changed" in problem for problem in problems)
    if not changed or "peft" not in sys.modules or any(map(is_pefts, model.modules())):
        return ""
    return "\nIf peft merged adapters into them (merge_and_unload), export the model before that, as a PeftModel"


def listed(problems: list[str]) -> str:
    """Return problems as the lines of a message, the first of them where there are many."""
    more = [f"and {len(problems) - _SHOWN_PROBLEMS} more"] if len(problems) > _SHOWN_PROBLEMS else []
    return "".join(f"\n  {line}" for line in problems[:_SHOWN_PROBLEMS] + more)


def content_hash(tensor: Tensor) -> str:
    """Return the SHA-256 of a tensor's bytes. Raise where it holds others than those of its values."""
    values = whole(tensor)
    _require_values(values)
    data = values.to("cpu").contiguous().view(-1)  # flat, since a scalar cannot be viewed as bytes
    return hashlib.sha256(data.view(torch.uint8).numpy().data).hexdigest()


def whole(tensor: Tensor) -> Tensor:
    """Return the tensor without its gradient, gathered where it is sharded; then every process must call this."""
    gather = getattr(tensor, "full_tensor", None)
    return tensor.detach() if gather is None else cast(Tensor, gather()).detach()


def _has_values(tensor: Tensor) -> bool:
    """Return False for a tensor that computes its values from others, as quantised ones do, unless it is sharded."""
    return hasattr(tensor, "full_tensor") or type(tensor).__torch_dispatch__ is Tensor.__torch_dispatch__


def _require_values(tensor: Tensor) -> None:
    if not _has_values(tensor):
        raise FreezeError(f"a {type(tensor).__name__} computes its values from others: was it quantised?")


def fingerprint(tensor: Tensor, measurements: Measurements | None = None) -> str:
    """Return what a record keeps of a tensor: 'float32:3a7b... float16:... bfloat16:...', its own dtype first."""
    own = str(tensor.dtype).removeprefix("torch.")
    if own not in DTYPES:
        raise MethodError(f"cannot seal a tensor of dtype {own}: use one of {', '.join(DTYPES)}")
    content = whole(tensor)
    hashes = {own: (measurements or Measurements()).content_hash(tensor)}
    hashes |= {name: content_hash(content.to(DTYPES[name])) for name in narrower(own)}
    return " ".join(f"{name}:{digest[:DIGITS]}" for name, digest in hashes.items())


def name_under_adapter(model: nn.Module, name: str) -> str:
    """Return a tensor's name once peft has wrapped an adapter around its module, which is then the base layer."""
    path, _, leaf = name.rpartition(".")
    try:
        return f"{path_without_adapter(model, path)}.{leaf}"
    except AttributeError:  # the module no longer exists
        return name


def _on_threads(measure: Callable[[Tensor], str], tensors: Collection[Tensor]) -> list[str]:
    """Return the measure of each tensor, computed on several threads: hashlib releases Python's global lock."""
    if any(hasattr(tensor, "full_tensor") for tensor in tensors):  # every process must gather them in the same order
        return [measure(tensor) for tensor in tensors]
    with ThreadPoolExecutor(_HASHING_THREADS) as pool:
        return list(pool.map(measure, tensors))


def _set_frozen(model: nn.Module, paths: Collection[str], freeze: bool, measurements: Measurements) -> None:
    """Freeze or unfreeze the tensors of matrices, and record the fingerprints of those that are frozen."""
    record = record_of(model)
    assert record is not None
    for path in paths:
        record["matrices"][path]["frozen"] = freeze
    names = [name for path in paths for name in record["matrices"][path]["tensors"]]
    if freeze:
        _freeze(model, names, measurements)
        return
    for name in names:
        model.get_parameter(name).requires_grad_(True)
        del record["frozen"][name]


def _freeze(model: nn.Module, names: Collection[str], measurements: Measurements) -> None:
    """Switch off the gradients of parameters, and record their fingerprints."""
    record = record_of(model)
    assert record is not None
    parameters = [model.get_parameter(name).requires_grad_(False) for name in names]
    record["frozen"].update(zip(names, measurements.fingerprints(parameters), strict=True))


def match(parameter: Tensor, sealed: str, measurements: Measurements) -> str | None:
    """Return None if the tensor is as sealed, or in words the cast that it is exactly what comes of; else raise."""
    hashes = dict(part.split(":", 1) for part in sealed.split())
    sealed_as, own = next(iter(hashes)), str(parameter.dtype).removeprefix("torch.")
    if parameter.device.type == "meta":
        raise FreezeError("it is on the meta device, without values (offloaded?): load the whole model into memory")
    _require_values(parameter)
    if own not in DTYPES:
        raise FreezeError(f"it was sealed as {sealed_as} and is {own} now: was it quantised?")
    if own == sealed_as and measurements.content_hash(parameter).startswith(hashes[own]):
        return None
    tensor = whole(parameter)
    for name, digest in hashes.items():
        if (own == sealed_as == name) or not _holds(DTYPES[name], tensor):
            continue  # some values are not values of that dtype, so no cast to it made this tensor
        if content_hash(tensor.to(DTYPES[name])).startswith(digest):
            if own == sealed_as:
                return name
            return own if name in (own, sealed_as) else f"{name} and then {own}"
    twice = ""
    if sealed_as not in _NARROW and all(_holds(DTYPES[name], tensor) for name in _NARROW):
        twice = f", or it was cast to {' and '.join(_NARROW)}: a second narrow cast is not sealed, so make one of them"
    raise FreezeError(f"its content changed{twice} (sealed as {sealed_as}, {hashes[sealed_as][:12]}...)")


def _holds(dtype: torch.dtype, tensor: Tensor) -> bool:
    """Return True when every value of a tensor is a value of that dtype."""
    return torch.equal(tensor.to(dtype).to(tensor.dtype), tensor)


def _matrix_problems(model: nn.Module, path: str, matrix: dict[str, Any], measurements: Measurements) -> list[str]:
    """Return in words what is wrong with the form of a frozen matrix: gone, no identity or not orthonormal any more."""
    try:
        module = without_adapter(model.get_submodule(path))
    except AttributeError:
        return [f"{path} is gone: was its module replaced?"]
    basis = module.identity if isinstance(module, CoreProjection) else module
    if matrix["init"] == "identity":
        if not isinstance(basis, IdentityProjection) or basis.factor != matrix["factor"]:
            return [f"{path} was the identity times {matrix['factor']} and is not any more"]
        return []
    own_weight = getattr(module, "weight", None)
    if matrix["orthonormal_blocks"] is None or not isinstance(own_weight, Tensor) or own_weight.device.type == "meta":
        return []
    if not _has_values(own_weight):  # its hash is missed
        return []
    try:
        error = measurements.orthogonality_error(path, module, matrix)
    except MethodError as problem:  # the record was changed
        return [f"{path}: {problem}"]
    weight = own_weight.detach()
    allowed = tolerance = _TOLERANCE.get(weight.dtype, 1e-2)
    # A model that was sealed, cast down and cast up again is as orthonormal as the narrow dtype left it. That it is
    # exactly such a cast was checked by its bytes.
    narrow = (torch.bfloat16, torch.float16)
    if error > tolerance and any(torch.equal(weight.to(dtype).to(weight.dtype), weight) for dtype in narrow):
        allowed = _TOLERANCE[torch.bfloat16]
    if not error <= allowed:  # written so that an error that is not a number fails too
        return [f"{path} lost its orthogonality: |W Wᵀ - I| is {error:.1e}, more than {tolerance:.0e}"]
    return []
