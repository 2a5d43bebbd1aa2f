"""Load a model: one that was saved after `oelm.apply`, rebuilt, frozen again and verified, or any other by name."""

from __future__ import annotations

import copy
import re
from os import PathLike
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors import SafetensorError, safe_open
from torch import nn
from transformers import AutoConfig, AutoModel, PreTrainedModel
from transformers.models.auto import modeling_auto

from ..base.hub import hub_options
from ..config import RANDOM
from ..errors import CheckpointError, FreezeError, ModelError, OelmError, first_line
from ..method.apply import install
from ..method.record import valid_record
from ..method.seal import CARRIER, read_record, refreeze, verify
from ..method.spec import Method
from ..method.state_dict import carry_record, stand_ins
from . import gpt
from .folder import require_own_weights, stored_bytes
from .gpt_config import OelmGPTConfig
from .hf_config import read_hf_config, require_memory
from .small import small_model

# Options of from_pretrained that load() always sets itself, with the only values that they may have.
_FIXED_OPTIONS = {
    "trust_remote_code": False,
    "use_safetensors": True,
    "ignore_mismatched_sizes": False,
    "gguf_file": None,
}
_WEIGHTS = ("model.safetensors", "model.safetensors.index.json")


def load(
    path: str | PathLike[str], model_class: type[PreTrainedModel] | None = None, **options: Any
) -> PreTrainedModel:
    """Load a folder (or Hub name) that `save_pretrained` wrote after `oelm.apply`: rebuilt, frozen again, verified.

    The config names the model's class; pass `model_class` for a class that transformers does not have, or register it
    with transformers' Auto classes. `options` go to its `from_pretrained` (dtype, device_map, revision, ...). Only
    safetensors are read, no remote code is run, and a missing or unexpected key is an error.
    """
    if not isinstance(path, str | PathLike):
        raise CheckpointError(f"oelm.load takes a folder or a Hub name, not {type(path).__name__}")
    if model_class is not None and not (isinstance(model_class, type) and issubclass(model_class, PreTrainedModel)):
        raise CheckpointError(f"model_class {model_class!r} is no class of a transformers model: pass the class itself")
    for name, value in _FIXED_OPTIONS.items():
        if options.pop(name, value) not in (value, None):
            raise CheckpointError(f"oelm.load always has {name}={value}")
    config = read_hf_config(path, AutoConfig if model_class is None else model_class.config_class, **options)
    if model_class is not None and config.model_type != model_class.config_class.model_type:
        raise CheckpointError(f"{path} holds a model of type {config.model_type!r}, not a {model_class.__name__}")
    method = _recorded_method(config, path)
    require_own_weights(path, config, options.get("subfolder"))
    target_class = model_class or _class_of(config, path)
    # The project's GPT installs its recorded structure by itself.
    installs_itself = issubclass(target_class, gpt.OelmGPTPreTrainedModel)
    loading_class = target_class if installs_itself else _class_with_method(target_class, method)
    try:
        require_memory(config, lambda: loading_class(copy.deepcopy(config)), stored_bytes(path))
        model, info = loading_class.from_pretrained(
            path,
            config=config,
            use_safetensors=True,
            ignore_mismatched_sizes=True,  # _require_complete reports them, with their names
            output_loading_info=True,
            **hub_options(path) | options,
        )
    except (OSError, SafetensorError) as error:
        file = _unreadable_file(path, options) or path
        raise CheckpointError(f"{file}: its weights cannot be read ({error})") from None
    except OelmError as error:
        raise type(error)(f"{path}: {error}") from None
    except Exception as error:  # transformers computes with a config's values unchecked
        reason = f"no model can be made of its config and files ({type(error).__name__}: {first_line(error)})"
        if isinstance(error, TypeError) and "unexpected keyword" in str(error):
            reason = f"{error}. Options are those of from_pretrained; the config is the folder's, change it afterwards"
        raise CheckpointError(f"{path}: {reason}") from error
    model.__class__ = target_class
    _require_complete(path, info, other_class=model_class is not None)
    refreeze(model)
    carry_record(model)
    try:
        verify(model)
    except FreezeError as error:
        raise FreezeError(f"{path}: {error}") from None
    return model


def build_model(name: str, seed: int = 0, **options: Any) -> PreTrainedModel:
    """Return the model that `name` names, of the class that its config names.

    A folder that was saved after `oelm.apply` is loaded with its method and verified. The seed is for `random:NAME`;
    `options` go to transformers' `from_pretrained`.
    """
    if name.startswith(RANDOM):
        return small_model(name.removeprefix(RANDOM), seed)
    folder = Path(name)
    if folder.exists() and not (folder / "config.json").is_file():
        raise ModelError(f"{name}: no config.json there; name a model's folder, a Hub name, or {RANDOM}bert")
    config = read_hf_config(name, **options)
    if getattr(config, "oelm", None) is not None:
        return load(name, **options)
    require_own_weights(name, config, options.get("subfolder"))
    model_class = _class_of(config, name)
    if folder.is_dir() and not any((folder / weights).is_file() for weights in _WEIGHTS):
        raise ModelError(
            f"{name}: holds a config but no weights ({_WEIGHTS[0]}); was it written completely? A run that needs only "
            "the config sets model.from_scratch=true"
        )
    options = {**hub_options(name), **options, "use_safetensors": True, "trust_remote_code": False}
    try:
        require_memory(config, lambda: model_class(copy.deepcopy(config)), stored_bytes(name))
        return model_class.from_pretrained(name, **options)
    except (OSError, ValueError, SafetensorError) as error:
        raise ModelError(f"{name}: its weights cannot be loaded ({first_line(error)})") from None


def build_outline(name: str) -> PreTrainedModel:
    """Return a model without values, on the meta device, for the names and shapes of its modules.

    `name` is a folder, a Hub name, a config.json or `random:NAME`; only the config is read.
    """
    if name.startswith(RANDOM):
        return small_model(name.removeprefix(RANDOM))
    config = read_hf_config(name)
    model_class = _class_of(config, name) if config.architectures else None
    with torch.device("meta"):
        try:
            return AutoModel.from_config(config) if model_class is None else model_class(config)
        # transformers checks few values of a config before it computes with them.
        except Exception as error:  # noqa: BLE001
            why = f"{type(error).__name__}: {first_line(error)}"
            raise ModelError(f"{name}: transformers builds no model from its config ({why})") from None


def _class_of(config: Any, path: str | PathLike[str]) -> type[PreTrainedModel]:
    """Return the class that a config's `architectures` names: of transformers, this project's GPT, or registered."""
    names = config.architectures if isinstance(config.architectures, list) else []
    module = gpt if config.model_type == OelmGPTConfig.model_type else transformers
    model_class = None
    if len(names) == 1 and isinstance(names[0], str):
        model_class = getattr(module, names[0], None) or _registered_class(config, names[0])
    if isinstance(model_class, type) and issubclass(model_class, PreTrainedModel):
        return model_class
    raise CheckpointError(
        f"{path}: its config names the architectures {names}, and transformers has no such model. If the class is your "
        "own, pass it, oelm.load(path, model_class=...), or register it with AutoModelForCausalLM or another of "
        "transformers' Auto classes; on the command line, in a file: oelm --plugin FILE ..."
    )


def _registered_class(config: Any, name: str) -> Any:
    """Return the class of that name that transformers' Auto classes have for this type of config, or None."""
    mappings = (mapping for key, mapping in vars(modeling_auto).items() if key.endswith("_MAPPING"))
    classes = (mapping.get(type(config), None) for mapping in mappings)
    return next((one for one in classes if getattr(one, "__name__", None) == name), None)


def _recorded_method(config: Any, path: str | PathLike[str]) -> Method:
    """Return the method that a config records. Raise when it records none or one that cannot be read."""
    try:
        record = read_record(config)
        if record is not None:
            return valid_record(record)[1]
    except FreezeError as error:
        raise FreezeError(f"{path}: {error}") from None
    raise CheckpointError(
        f"{path}: no record of a method in its config. Load it with transformers' from_pretrained, then call oelm.apply"
    )


def install_recorded_method(model: nn.Module) -> None:
    """Give a new GPT the structure of the method that its config records, if any, before its weights are loaded.

    So pipelines and evaluation harnesses, which do not know oelm, load a saved model completely. Only `load` also
    freezes and verifies it.
    """
    record = read_record(model.config)
    if record is not None:
        _install(model, valid_record(record)[1])


def _install(model: Any, method: Method) -> None:
    """Give a new model the method's structure, and tell transformers which keys of its folder are no parameters."""
    install(model, method)
    no_parameters = {rf"^{CARRIER}\."} | {rf"(^|\.){re.escape(name)}$" for name in stand_ins(model)}
    model._keys_to_ignore_on_load_unexpected = no_parameters | set(model._keys_to_ignore_on_load_unexpected or ())


def _class_with_method(cls: type[PreTrainedModel], method: Method) -> type[PreTrainedModel]:
    """Return a subclass that builds the method's structure, so that transformers' loader has a tensor for each key."""

    def build(self: PreTrainedModel, config: Any, *args: Any, **kwargs: Any) -> None:
        cls.__init__(self, config, *args, **kwargs)
        _install(self, method)

    body = {"__init__": build, "__module__": cls.__module__, "__qualname__": cls.__qualname__}
    return type(cls.__name__, (cls,), body)


def _unreadable_file(path: str | PathLike[str], options: dict[str, Any]) -> Path | None:
    """Return the first safetensors file of a folder that cannot be opened, for the error message."""
    for file in sorted(Path(path, options.get("subfolder") or "").glob("*.safetensors")):
        try:
            with safe_open(file, framework="pt"):
                pass
        except (OSError, SafetensorError):
            return file
    return None


def _require_complete(path: str | PathLike[str], info: dict[str, Any], other_class: bool) -> None:
    """Raise when keys are missing, unexpected or of another shape, which transformers only warns about."""
    for problem in ("missing_keys", "unexpected_keys", "mismatched_keys", "error_msgs"):
        keys = info.get(problem)
        if keys:
            listed = ", ".join(sorted(str(key) for key in keys)[:5])
            raise CheckpointError(
                f"{path}: {len(keys)} {problem.replace('_', ' ')}: {listed}. "
                "The folder does not hold the model that its config describes"
                + (", in this class: oelm.export writes a plain folder, for its from_pretrained" if other_class else "")
            )
