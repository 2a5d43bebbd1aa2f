"""Convert the project's GPT to a plain model of transformers, of the class that holds its form exactly."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification
from transformers.configuration_utils import PreTrainedConfig
from transformers.modeling_utils import PreTrainedModel

from ...errors import ModelError
from ..gpt import OelmGPTForCausalLM, OelmGPTForSequenceClassification, OelmGPTPreTrainedModel
from .deepseek import deepseek_v3_config, deepseek_v3_state
from .gpt2 import gpt2_config, gpt2_state
from .gpt_neox import gpt_neox_config, gpt_neox_state
from .llama import llama_config, llama_state, qwen3_config


@dataclass(frozen=True)
class Need:
    """What a class needs of one field of the GPT's config: a test of (config, value), and in words what passes it."""

    holds: Callable[[Any, Any], bool]
    words: str


@dataclass(frozen=True, eq=False)
class PlainForm:
    """A class of transformers that holds some forms of the GPT, by the fields that decide whether it does."""

    name: str
    needs: dict[str, Need]
    config: Callable[[Any], PreTrainedConfig]
    state: Callable[[Any], dict[str, Tensor]]

    def unmet(self, config: Any) -> list[str]:
        """Return every field whose value the class cannot hold, with the value and what the class has instead."""
        values = {field: getattr(config, field) for field in self.needs}
        unheld = [field for field, need in self.needs.items() if not need.holds(config, values[field])]
        return [f"{field} {values[field]!r} (it has {self.needs[field].words})" for field in unheld]


def _exactly(**fields: Any) -> dict[str, Need]:
    return {name: _one_of(value) for name, value in fields.items()}


def _one_of(*values: Any) -> Need:
    return Need(lambda config, value: value in values, " or ".join(map(repr, values)))


_ABOVE_ZERO = Need(lambda config, value: value > 0, "a width above 0")
_AS_VALUES = Need(lambda config, value: value == config.head_dim, "keys as wide as values")
_NO_FURTHER_FORM = _exactly(key_offset=0, convolution=0, scores="softmax")
_HEADS_ALONE = {**_exactly(latent=0, channel=0), **_NO_FURTHER_FORM, "key_dim": _AS_VALUES}
# GPT-2 and GPT-NeoX have every bias, and hold a GPT without biases by zeros.
_LAYER_NORM = {**_exactly(norm="layer"), "activation": _one_of("gelu", "relu2"), **_HEADS_ALONE}
_RMS_NORM = _exactly(norm="rms", activation="swiglu")
_LATENT = {"latent": _ABOVE_ZERO, "channel": _ABOVE_ZERO, **_NO_FURTHER_FORM}

# Which class holds which form, by the values of the GPT's fields. A GPT that fits no line is not exported. Every class
# holds K = V and an orthogonal key, as matrices, and grouped heads, GPT-2 and GPT-NeoX by repeated rows. `dropout` acts
# in training alone, where Llama and those after it have it on attention only; `cache` changes no output.
FORMS = (
    PlainForm("GPT-2", _exactly(positions="learned", qk_norm="none") | _LAYER_NORM, gpt2_config, gpt2_state),
    PlainForm("GPT-NeoX", _exactly(positions="rotary", qk_norm="none") | _LAYER_NORM, gpt_neox_config, gpt_neox_state),
    PlainForm(
        "Llama", _exactly(positions="rotary", qk_norm="none") | _RMS_NORM | _HEADS_ALONE, llama_config, llama_state
    ),
    PlainForm(
        "Qwen3",
        _exactly(positions="rotary", qk_norm="both", biases=False) | _RMS_NORM | _HEADS_ALONE,
        qwen3_config,
        llama_state,
    ),
    PlainForm(
        "DeepSeek-V3",
        _exactly(positions="none", qk_norm="none", biases=False) | _RMS_NORM | _LATENT,
        deepseek_v3_config,
        deepseek_v3_state,
    ),
)


def to_transformers(model: OelmGPTPreTrainedModel) -> PreTrainedModel:
    """Return a plain model with the same outputs. The GPT must be plain: cores folded, identities written out.

    Raise where no class of the table holds the GPT's form.
    """
    if not isinstance(model, OelmGPTForCausalLM | OelmGPTForSequenceClassification):
        raise ModelError(f"{type(model).__name__}: only the GPT with a head can be exported")
    form = plain_form(model.config)
    is_classifier = isinstance(model, OelmGPTForSequenceClassification)
    auto_class = AutoModelForSequenceClassification if is_classifier else AutoModelForCausalLM
    plain = auto_class.from_config(form.config(model.config), dtype=model.dtype)
    plain.load_state_dict({name: tensor.detach() for name, tensor in form.state(model).items()}, strict=True)
    if not is_classifier:
        plain.generation_config = model.generation_config
    return plain.train(model.training)


def plain_form(config: Any) -> PlainForm:
    """Return the form of the table that holds this config. Raise, naming what the nearest ones lack, if none does."""
    unmet = {form: form.unmet(config) for form in FORMS}
    fewest = min(map(len, unmet.values()))
    nearest = [form for form in FORMS if len(unmet[form]) == fewest]
    if fewest:
        lacks = "; ".join(f"{form.name} cannot hold {', '.join(unmet[form])}" for form in nearest)
        raise ModelError(
            f"no plain class that oelm writes ({', '.join(form.name for form in FORMS)}) holds this GPT exactly. Of "
            f"the nearest, {lacks}. save_pretrained keeps the model in its own class: load that folder with oelm.load, "
            "or, where no method was applied, with transformers' Auto classes after `import oelm.models`"
        )
    return nearest[0]
