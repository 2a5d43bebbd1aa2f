"""The arms of a benchmark: one run config per method, all with the same model, batch size and sequence length."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from ..base.strict import merge
from ..config import GPT, RANDOM, RunConfig
from ..errors import ConfigError, nearest
from ..method.families import family_of
from ..method.presets import PRESET_FIELDS
from ..models.hf_config import build_hf_config
from .forms import FORMS, GptShape, form_fields

Kind = Literal["language", "classification"]

_GPT_VOCABULARY = 8192
# Positions beyond a sequence's length: texts are padded to a multiple of 8, and some families leave the first unused.
_SPARE_POSITIONS = 8
# The sections of a run's config that an override may set: the others have no influence on a step.
_SECTIONS = ("model", "optimizer", "train")


@dataclass(frozen=True, kw_only=True)
class BenchSetting:
    """What all arms of a benchmark have in common.

    `kind` None lets the model decide: a decoder is timed at language modelling, an encoder at classification.
    `compile_model` None compiles as training does. `overrides` are settings such as `train.precision=bfloat16`.
    `decode` says that generation is timed, which some forms of attention are only for.
    """

    model: str
    batch_size: int = 8
    length: int = 128
    vocab_size: int | None = None
    kind: Kind | None = None
    compile_model: bool | None = None
    overrides: Sequence[str] = ()
    decode: bool = False


def plan_arms(names: Sequence[str], setting: BenchSetting) -> dict[str, RunConfig]:
    """Return the run config of every arm by its name: a preset or a form, or `NAME@N` for one with batches of N.

    On the project's GPT, a name that is both a preset's and a form's is the form's.
    """
    for override in setting.overrides:
        section = override.partition("=")[0].partition(".")[0]
        if section not in _SECTIONS:
            raise ConfigError(f"{override}: a benchmark takes settings of {', '.join(_SECTIONS)}")
        if setting.decode and override.partition("=")[0] == "train.batch_size":
            raise ConfigError(f"{override}: with --decode the size of batches is given with --batch-size")
    compile_model = "auto" if setting.compile_model is None else setting.compile_model
    fields: dict[str, Any] = {
        "model": {"name": setting.model, "fields": _fitting_fields(setting)},
        "data": {"sequence_length": setting.length},
        "train": {"batch_size": setting.batch_size, "compile": compile_model},
    }
    common = RunConfig.load(fields, [*setting.overrides])
    if common.model.name != setting.model:  # the fields above were chosen to fit another model
        raise ConfigError(f"model.name={common.model.name}: a benchmark's model is named with --model")
    default_kind = _default_kind(common)
    if (setting.kind or default_kind) == "classification":
        fields["task"] = {"name": "random"}
    arms = {}
    for name in names:
        if name in arms:
            raise ConfigError(f"arm {name!r} is named twice")
        kind, separator, size = name.partition("@")
        if separator and not (size.isascii() and size.isdigit() and int(size) > 0):
            raise ConfigError(f"arm {name!r}: @ must be followed by its batch size, 1 or more, as in oelm-freeze@8")
        own_size = [f"train.batch_size={int(size)}"] if separator else []
        arm = arm_fields(kind, common, setting.decode)
        arms[name] = RunConfig.load(merge(fields, arm), [*setting.overrides, *own_size])
    return arms


def arm_fields(name: str, common: RunConfig, decode: bool = False) -> dict[str, Any]:
    """Return what an arm sets in its run's config: the method and, for a form of attention, the model's fields.

    `common` is the config that all arms share, and `decode` says that the arm's generation is timed.
    """
    is_gpt = common.model.name.startswith(GPT)
    if is_gpt and name not in FORMS and name not in PRESET_FIELDS:
        hint = nearest(name, [*FORMS, *PRESET_FIELDS])
        lists = "neither a form (see `oelm bench --forms`) nor a preset (see `oelm methods`)"
        raise ConfigError(f"arm {name!r}: {lists}.{hint}")
    if name not in FORMS or (not is_gpt and name in PRESET_FIELDS):
        return {"method": name}
    if not is_gpt:
        raise ConfigError(f"arm {name!r} is a form of the project's GPT: give it with --model gpt:SIZE")
    gpt = build_hf_config(common.model, None, common.data.sequence_length)
    shape = GptShape(gpt.hidden_size, gpt.num_attention_heads, gpt.positions)
    return {"method": FORMS[name].method, "model": {"fields": form_fields(name, shape, decode)}}


def _fitting_fields(setting: BenchSetting) -> dict[str, Any]:
    """Return the fields that give a model with random weights the vocabulary and enough positions."""
    fields = {} if setting.vocab_size is None else {"vocab_size": setting.vocab_size}
    if setting.model.startswith(GPT):
        return {"vocab_size": _GPT_VOCABULARY, **fields}
    if setting.model.startswith(RANDOM):
        model = RunConfig.load({"model": {"name": setting.model}}).model
        positions = getattr(build_hf_config(model, None, setting.length), "max_position_embeddings", None)
        if positions is not None:
            fields["max_position_embeddings"] = max(positions, setting.length + _SPARE_POSITIONS)
    return fields


def _default_kind(config: RunConfig) -> Kind:
    """Return what to time the model at: a decoder at language modelling, an encoder at classification."""
    hf_config = build_hf_config(config.model, None, config.data.sequence_length)
    stacks = {stack.kind for stack in family_of(hf_config.model_type).stacks if stack.present(hf_config)}
    if not hasattr(hf_config, "vocab_size") or {"encoder", "decoder"} <= stacks:
        raise ConfigError(
            f"model.name {config.model.name}: steps of language models and of text encoders can be timed, not those of "
            f"a {hf_config.model_type}"
        )
    return "classification" if stacks == {"encoder"} else "language"
