"""Applies a method to a model: plan, compute every new weight, and only then change, freeze and seal the model."""

from __future__ import annotations

import copy
from operator import index
from typing import Any

from torch import nn

from ..errors import FreezeError, MethodError, ModelError
from .audit import report_on
from .changes import carry_out, require_sealable
from .events import events_of
from .freeze_report import FreezeReport
from .guess import require_known_type
from .optimisers import references_to_parameters, stop_old_optimisers
from .plan import plan
from .row_order import require_right_order
from .seal import Measurements, check_sealed, operated_part, record_of, seal
from .sites import find_sites
from .spec import Method
from .state_dict import carry_record
from .trainable import frozen_by_rest, frozen_names


def apply(model: nn.Module, method: Method | str | dict[str, Any] = "oelm-freeze", seed: int = 0) -> FreezeReport:
    """Set and freeze a Hugging Face model's attention in place, and return a report of what is frozen now.

    `method` is a preset's name, an `oelm.Method`, or a dict such as `{"preset": "oelm-freeze", "layers": "last:4"}`.
    Random matrices are a function of `seed` and each tensor's name. On any error the model is left as it was.
    """
    method = Method.load(method)
    method.require_steps()
    seed = _whole_number(seed)
    check_operable(model)
    if hasattr(model, "peft_config"):
        raise ModelError(
            "the model carries peft adapters: apply the method first, then add adapters; or let oelm add them, "
            "with the preset 'lora' or 'oft'"
        )
    record = record_of(model)
    if record is not None:
        return _verify_applied(model, record, method, seed)
    _require_whole(model)
    require_known_type(model)
    require_right_order(model)
    operation = plan(model, method)
    events_of(operation)  # raises where the schedule does not fit the model
    for name in frozen_by_rest(model, operation):
        require_sealable(model.get_parameter(name), name)
    before = references_to_parameters(model)
    carry_out(model, operation, seed)
    stop_old_optimisers(model, before)
    _give_own_config(model)
    # Nothing changes the model from here on, so what is measured for the seal also serves the check and the report.
    measurements = Measurements()
    seal(model, operation, seed, measurements)
    carry_record(model)
    check_sealed(model, measurements, operation)
    return report_on(model, operation.sites, measurements)


def install(model: nn.Module, method: Method) -> None:
    """Give a freshly built model a method's structure, with values still to be loaded: the first half of `load`."""
    carry_out(model, plan(model, method), seed=None)


def outline(model: nn.Module, method: Method) -> nn.Module:
    """Return a copy of a model as a method would leave it: its modules, and which parameters train.

    The values of the copy mean nothing.
    """
    copied = copy.deepcopy(model)
    operation = plan(copied, method)
    frozen_by_rest(copied, operation)
    carry_out(copied, operation, seed=None)
    by_matrix, always = frozen_names(copied, operation)
    for name in [*always, *(name for path in operation.frozen_at_start for name in by_matrix[path])]:
        copied.get_parameter(name).requires_grad_(False)
    return copied


def _how_to_load(model: object) -> str:
    return f": load it first, such as AutoModel.from_pretrained({model!r})" if isinstance(model, str) else ""


def check_operable(model: nn.Module) -> None:
    """Raise for a model that must be unwrapped, dequantised or loaded first."""
    from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
    from torch.nn.parallel import DataParallel, DistributedDataParallel

    if not isinstance(model, nn.Module):
        raise ModelError(f"a model is a torch module, not {type(model).__name__}{_how_to_load(model)}")
    for name, module in model.named_modules():  # FSDP may wrap single blocks and not the model
        if isinstance(module, (DataParallel, DistributedDataParallel, FullyShardedDataParallel, FSDPModule)):
            raise ModelError(
                f"{name or 'the model'} is wrapped in {type(module).__name__}: "
                "apply the method to the bare model first, then wrap it"
            )
    if type(model).__name__ == "OptimizedModule":
        raise ModelError("the model is compiled: apply the method first, then torch.compile it")
    if getattr(model, "hf_quantizer", None) is not None:
        raise ModelError(
            "the model is quantised: load it without a quantization_config, apply the method, then quantise"
        )
    on_meta = [name for name, parameter in model.named_parameters() if parameter.device.type == "meta"]
    if on_meta:
        raise ModelError(f"{on_meta[0]} is on the meta device, without values: load the model's weights first")


def _whole_number(seed: Any) -> int:
    """Return a seed as an int, numpy's whole numbers too. Raise for anything else."""
    if isinstance(seed, bool) or not hasattr(seed, "__index__") or index(seed) < 0:
        raise MethodError(f"seed must be a whole number from 0, not {seed!r}")
    return index(seed)


def _require_whole(model: nn.Module) -> None:
    """Raise where a method was applied to a part of the model, whose record the model's own config does not have."""
    part = operated_part(model)
    if part:
        raise ModelError(
            f"a method was applied to a part of this {type(model).__name__}, {part}: apply it to a fresh model as a "
            "whole, which is then saved with its record"
        )


def _verify_applied(model: nn.Module, record: dict[str, Any], method: Method, seed: int) -> FreezeReport:
    """Return the report of a model that has this method already. Raise if it has another one, or was damaged since."""
    applied = Method.load(record["method"])
    if applied != method or record["seed"] != seed:
        raise ModelError(
            f"the model was operated on already, with {applied.name!r} (seed {record['seed']}); "
            f"{method.name!r} (seed {seed}) needs a fresh model"
        )
    measurements = Measurements()
    try:
        check_sealed(model, measurements)
    except FreezeError as error:
        raise ModelError(
            "the model's config says that a method was applied, but the model does not agree. For a new model of this "
            f"config, delete its field oelm before. {error}"
        ) from None
    return report_on(model, find_sites(model)[1], measurements)


def _give_own_config(model: nn.Module) -> None:
    """Give the model a copy of its config: models built from one config share it, and the record is about one model."""
    shared = model.config
    own = copy.deepcopy(shared)
    for module in model.modules():
        if getattr(module, "config", None) is shared:
            module.config = own
