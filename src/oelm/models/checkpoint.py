"""Loads a model that was saved after `apply`, and exports one as a plain transformers checkpoint."""

from __future__ import annotations

import copy
from os import PathLike
from pathlib import Path
from typing import Any, cast

import transformers
from safetensors import SafetensorError, safe_open
from torch import nn
from transformers import AutoConfig, PreTrainedModel

from ..errors import CheckpointError, FreezeError, ModelError, OelmError
from ..method.adapters import merge_adapters
from ..method.apply import check_operable, install
from ..method.fused import fuse
from ..method.projections import CoreProjection, IdentityProjection, SplitProjection
from ..method.seal import read_record, record_of, refreeze, verify
from ..method.sites import find_sites, unwrapped
from ..method.spec import Method
from . import gpt
from .convert import to_transformers
from .hf_config import read_hf_config


def load(
    path: str | PathLike[str], model_class: type[PreTrainedModel] | None = None, **options: Any
) -> PreTrainedModel:
    """Load a folder (or Hub name) that `save_pretrained` wrote after `oelm.apply`: rebuilt, frozen again, verified.

    The config names the model's class; pass `model_class` for one that is not transformers' own. `options` go to its
    `from_pretrained` (dtype, device_map, revision, ...). Only safetensors are read, no remote code is run, and a
    missing or unexpected key is an error.
    """
    for name, only in (("trust_remote_code", False), ("use_safetensors", True), ("ignore_mismatched_sizes", False)):
        if options.pop(name, only) not in (only, None):
            raise CheckpointError(f"oelm.load always has {name}={only}")
    where = {key: options[key] for key in ("revision", "token", "cache_dir", "subfolder") if key in options}
    config = read_hf_config(path, AutoConfig if model_class is None else model_class.config_class, **where)
    method = _recorded_method(config, path)
    wanted = model_class or class_of(config, path)
    builds_itself = issubclass(wanted, gpt.OelmGPTPreTrainedModel)
    cls = wanted if builds_itself else _operated_class(wanted, method)
    # Tensors of another shape are let through here for _require_complete to name.
    how = {"use_safetensors": True, "ignore_mismatched_sizes": True, "output_loading_info": True}
    try:
        model, info = cls.from_pretrained(path, config=config, **how, **options)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{_broken_file(path, options) or path}: its weights cannot be read ({error})") from None
    model.__class__ = wanted
    _require_complete(path, info)
    refreeze(model)
    try:
        verify(model)
    except FreezeError as error:
        raise FreezeError(f"{path}: {error}") from None
    return cast(PreTrainedModel, model)


def export(model: nn.Module, path: str | PathLike[str], **options: Any) -> Path:
    """Write the model as a plain transformers checkpoint with the same outputs, loadable without oelm.

    Cores and adapters are folded into the matrices, identities written out, fused projections fused again; the
    project's own GPT becomes a GPT-2 or, with rotary positions, a GPT-NeoX. `options` go to `save_pretrained`. The
    model itself is not changed.
    """
    model = unwrapped(model)
    if hasattr(model, "peft_config"):
        raise ModelError(
            "the model carries adapters that peft added after oelm.apply: take them off with peft's unload(), or fold "
            "them in with its merge_and_unload() where none is on a frozen matrix; then export what that returns"
        )
    check_operable(model)
    if not isinstance(model, PreTrainedModel):
        raise ModelError(
            f"{type(model).__name__} is not a transformers model: it has no checkpoint format to export to"
        )
    out = Path(path)
    if out.is_file():
        raise CheckpointError(f"{out} is a file; name a folder")
    if record_of(model) is not None:
        verify(model)
    plain = copy.deepcopy(model)
    restore(plain)
    if isinstance(plain, gpt.OelmGPTPreTrainedModel):
        plain = to_transformers(plain)
    plain.save_pretrained(out, **options)
    return out


def restore(model: nn.Module) -> None:
    """Turn an operated model, in place, into a plain one with the same function, everything trainable, no record."""
    merge_adapters(model)
    _, sites = find_sites(model)
    for site in sites:
        value = model.get_submodule(site.roles["v"]) if site.fused is None else model.get_submodule(site.fused_path)
        like = next(value.parameters())
        for role in ("q", "k"):
            try:
                module = model.get_submodule(site.roles[role])
            except AttributeError:
                continue  # still fused
            if isinstance(module, CoreProjection | IdentityProjection):
                model.set_submodule(site.roles[role], module.plain(like))
        if isinstance(value, SplitProjection):
            model.set_submodule(site.fused_path, fuse(value, site.heads))
    for parameter in model.parameters():
        parameter.requires_grad_(True)
    if hasattr(model.config, "oelm"):
        del model.config.oelm


def _recorded_method(config: Any, path: str | PathLike[str]) -> Method:
    try:
        record = read_record(config)
        method = None if record is None else Method.load(record["method"])
    except OelmError as error:
        raise CheckpointError(f"{path}: {error}") from None
    if method is None:
        raise CheckpointError(
            f"{path}: its config has no record of a method. Load it with transformers' from_pretrained, "
            "then call oelm.apply"
        )
    return method


def _broken_file(path: str | PathLike[str], options: dict[str, Any]) -> Path | None:
    """The first safetensors file of a folder that cannot be opened."""
    for file in sorted(Path(path, options.get("subfolder") or "").glob("*.safetensors")):
        try:
            with safe_open(file, framework="pt"):
                pass
        except (OSError, SafetensorError):
            return file
    return None


def class_of(config: Any, path: str | PathLike[str]) -> type[PreTrainedModel]:
    """The class that a config names, transformers' or this project's."""
    names = config.architectures or []
    own = gpt if config.model_type == gpt.OelmGPTConfig.model_type else transformers
    found = getattr(own, names[0], None) if len(names) == 1 else None
    if not (isinstance(found, type) and issubclass(found, PreTrainedModel)):
        raise CheckpointError(
            f"{path}: its config names the architectures {names}, and transformers has no such model. "
            "If the class is your own, pass it: oelm.load(path, model_class=...)"
        )
    return found


def _operated_class(cls: type[PreTrainedModel], method: Method) -> type[PreTrainedModel]:
    """The class with the method's structure built in, so that transformers' own loader finds every key its place."""

    def build(self: PreTrainedModel, config: Any, *args: Any, **kwargs: Any) -> None:
        cls.__init__(self, config, *args, **kwargs)
        install(self, method)

    return type(
        cls.__name__, (cls,), {"__init__": build, "__module__": cls.__module__, "__qualname__": cls.__qualname__}
    )


def _require_complete(path: str | PathLike[str], info: dict[str, Any]) -> None:
    for problem in ("missing_keys", "unexpected_keys", "mismatched_keys", "error_msgs"):
        found = info.get(problem)
        if found:
            listed = ", ".join(sorted(str(item) for item in found)[:5])
            raise CheckpointError(
                f"{path}: {len(found)} {problem.replace('_', ' ')}: {listed}. "
                "The folder does not hold the model that its config describes"
            )
