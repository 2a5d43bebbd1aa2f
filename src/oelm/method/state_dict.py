"""Keeps the record beside the weights in every state dict of a model, and checks the weights that are loaded into it.

A state dict is all that many trainers save of a model and load again. Hugging Face's Trainer, for one, resumes by
loading a checkpoint's into a model that the script has built anew. Its first weights may be others, and with them the
frozen matrices that the method made of them. The record in the state dict says what was frozen there, and the model
takes it over; without it, nobody could tell those matrices from damaged ones.
"""

from __future__ import annotations

import json
import weakref
from collections.abc import Iterator
from itertools import accumulate
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from ..errors import FreezeError
from .projections import CoreProjection, IdentityProjection, SplitProjection
from .record import valid_record
from .seal import (
    CARRIER,
    Measurements,
    adopt,
    check_sealed,
    listed,
    match,
    name_under_adapter,
    record_of,
    whole,
)
from .sites import is_adapter
from .spec import Method

_KEY = f"{CARRIER}._extra_state"
_WAY_OUT = (
    "Load weights first and apply the method afterwards, or load the folder that save_pretrained wrote with oelm.load."
)
_FROM_A_PART = "Weights that were saved after oelm.apply go into the whole model: their record is in its state dict."
# What torch.compile, peft, data parallelism and checkpointing put between a module's name and its parameters' names.
_WRAPPERS = ("_orig_mod", "base_layer", "module", "_checkpoint_wrapped_module", "_fsdp_wrapped_module")


class RecordCarrier(nn.Module):
    """Puts the record of a model's config into its state dict, as a tensor of bytes: safetensors holds nothing else.

    Where the method left no matrix under a plain model's name, the state dict gets a stand-in of another shape. So
    transformers' from_pretrained, which draws a missing matrix at random, refuses the folder.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.config: Any = model.config
        self.stand_ins = tuple(stand_ins(model))
        self.check_before_use: RemovableHandle | None = None

    def get_extra_state(self) -> Tensor:
        """Return the record as bytes of JSON."""
        return torch.frombuffer(bytearray(json.dumps(self.config.oelm).encode()), dtype=torch.uint8)

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        for name in self.stand_ins:
            destination[prefix.removesuffix(f"{CARRIER}.") + name] = torch.zeros(1, dtype=torch.uint8)

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing: the record was read before the first tensor was loaded, and a state dict may have none."""

    def extra_repr(self) -> str:
        # Tools that write into modules by name, and find nothing here to write into, show this in their error.
        return f"{Method.load(self.config.oelm['method']).name}; a folder saved after oelm.apply: oelm.load(folder)"


def carry_record(model: Any) -> None:
    """Have the model's state dicts hold its record from now on, and check each that is loaded into it."""
    model.add_module(CARRIER, RecordCarrier(model))
    model.register_load_state_dict_pre_hook(_check_loaded)
    record = record_of(model)
    assert record is not None, "only a model with a record carries it"
    tensors = {name for matrix in record["matrices"].values() for name in matrix["tensors"]} | record["frozen"].keys()
    paths = {part for name in tensors for part in accumulate(name.split(".")[:-1], lambda path, leaf: f"{path}.{leaf}")}
    for path, part in model.named_modules():
        if path in paths:  # where the model lacks one of them, verify says so
            part.register_load_state_dict_pre_hook(_PartCheck(model, path))


class _PartCheck:
    """Checks weights that a part of a model, such as its encoder, loads by itself: the model's own check sees none."""

    def __init__(self, model: nn.Module | None, path: str) -> None:
        self.model = None if model is None else weakref.ref(model)
        self.path = path

    def __call__(self, part: nn.Module, state_dict: dict[str, Any], prefix: str, *_: object) -> None:
        """Refuse weights of frozen tensors that are not as sealed, before the part loads the first."""
        model = None if self.model is None else self.model()
        own = None if model is None else record_of(model)
        if model is None or own is None or self._is_loaded_within(prefix):
            return
        problems = _problems(model, own, state_dict, prefix, self.path)
        if problems:
            raise FreezeError(
                f"the weights that were to be loaded into {self.path} of {type(model).__name__} are not those that "
                f"were frozen; none was loaded. {_WAY_OUT} {_FROM_A_PART}{listed(problems)}"
            )

    def _is_loaded_within(self, prefix: str) -> bool:
        """Return True when the part is loaded as one of the module around it, which has checked the weights."""
        names = prefix.split(".")[:-1]
        while names and names[-1] in _WRAPPERS:
            names.pop()
        return bool(names) and names[-1] == self.path.rpartition(".")[2]

    def __deepcopy__(self, memo: dict[int, Any]) -> _PartCheck:
        """Return the check for a copy of the model; where the part alone is copied, for no model."""
        return _PartCheck(memo.get(id(None if self.model is None else self.model())), self.path)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the check for no model: a reference that keeps none alive cannot be pickled."""
        return _PartCheck, (None, self.path)


def stand_ins(model: nn.Module) -> Iterator[str]:
    """Yield the name of every weight that a plain model has, and that a method has put elsewhere or left out."""
    found: list[str] = []
    for path, module in model.named_modules():
        without_basis = isinstance(module, CoreProjection) and module.identity is not None
        replaces = without_basis or isinstance(module, IdentityProjection | SplitProjection) or is_adapter(module)
        if replaces and not any(path.startswith(f"{outer}.") for outer in found):
            found.append(path)
            yield f"{path}.weight"


def _check_loaded(model: nn.Module, state_dict: dict[str, Any], prefix: str, *_: object) -> None:
    """Refuse weights that are not as sealed, before the first is loaded, and take over the record that is with them."""
    own = record_of(model)
    if own is None:  # the model was made plain
        return
    carrier: Any = getattr(model, CARRIER)
    for name in carrier.stand_ins:
        state_dict.pop(prefix + name, None)
    saved = _record_in(state_dict.get(prefix + _KEY))
    if saved is not None:
        _require_same_method(own, saved)
    problems = _problems(model, saved or own, state_dict, prefix)
    if problems and (saved is not None or _is_whole(model, state_dict, prefix)):
        raise FreezeError(
            f"the weights that were to be loaded into {type(model).__name__} are not those that were frozen; none was "
            f"loaded. {_WAY_OUT}{listed(problems)}"
        )
    # A sharded checkpoint is loaded file by file, and the record is in one of the files: so a part is loaded, and
    # what came of it is checked when the model is used.
    if problems and carrier.check_before_use is None:
        eager: Any = torch.compiler.disable
        carrier.check_before_use = model.register_forward_pre_hook(eager(_require_sealed))
    if saved is not None and saved != own:
        adopt(model, saved)


def _require_sealed(model: nn.Module, _: object) -> None:
    """Refuse to use a model that got weights which were not frozen, and came without a record."""
    if getattr(model, "_is_replica", False):  # one of nn.DataParallel's, which has no parameters
        return
    try:
        check_sealed(model, Measurements())
    except FreezeError as error:
        raise FreezeError(f"weights were loaded that are not those that were frozen. {_WAY_OUT} {error}") from None
    carrier: Any = getattr(model, CARRIER)
    carrier.check_before_use.remove()
    carrier.check_before_use = None


def _record_in(state: object) -> dict[str, Any] | None:
    """Return the record in a state dict's bytes, or None where there are none, or none that mean anything.

    The average of several state dicts, for example, has an average of their bytes.
    """
    if not isinstance(state, Tensor) or state.dtype != torch.uint8:
        return None
    try:
        record = json.loads(whole(state).cpu().numpy().tobytes())
    except (ValueError, RecursionError):
        return None
    valid_record(record)
    return cast(dict[str, Any], record)


def _require_same_method(own: dict[str, Any], saved: dict[str, Any]) -> None:
    """Raise where weights were saved with another method or seed than the model has."""
    (method, seed), (saved_method, saved_seed) = ((Method.load(r["method"]), r["seed"]) for r in (own, saved))
    if (method, seed) != (saved_method, saved_seed):
        raise FreezeError(
            f"the weights that were to be loaded were saved with {saved_method.name!r} (seed {saved_seed}), and the "
            f"model has {method.name!r} (seed {seed}): apply the same method with the same seed, or save elsewhere"
        )


def _problems(
    model: nn.Module, record: dict[str, Any], state_dict: dict[str, Any], prefix: str, part: str = ""
) -> list[str]:
    """Return in words which frozen tensors in a state dict, the model's or a part's, are not as a record says."""
    outside = f"{part}." if part else ""
    names = {name: prefix + name.removeprefix(outside) for name in record["frozen"] if name.startswith(outside)}
    names |= {
        name: prefix + name_under_adapter(model, name).removeprefix(outside)
        for name, key in names.items()
        if key not in state_dict
    }
    loaded = {name: state_dict[key] for name, key in names.items() if key in state_dict}
    measurements = Measurements()
    measurements.hash_ahead(loaded.values())
    problems = []
    for name, tensor in loaded.items():
        try:
            match(tensor, record["frozen"][name], measurements)
        except FreezeError as error:
            problems.append(f"{name}: {error}")
    return problems


def _is_whole(model: nn.Module, state_dict: dict[str, Any], prefix: str) -> bool:
    """Return True when a state dict has every parameter of the model, under one of its names where it is tied."""
    named = model.named_parameters(remove_duplicate=False)
    loaded = {id(parameter) for name, parameter in named if prefix + name in state_dict}
    return all(id(parameter) in loaded for parameter in model.parameters())
