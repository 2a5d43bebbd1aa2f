"""Build any model by its name: a folder, a Hub name, or `random:NAME` for a small random one of a family."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from transformers import PreTrainedModel

from ..config import RANDOM
from ..errors import ModelError, first_line
from .hf_config import read_hf_config
from .load import load, model_class_of
from .small import small_model

_WEIGHTS = ("model.safetensors", "model.safetensors.index.json")


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
    model_class = model_class_of(config, name)
    if folder.is_dir() and not any((folder / weights).is_file() for weights in _WEIGHTS):
        raise ModelError(
            f"{name}: holds a config but no weights ({_WEIGHTS[0]}); was it written completely? A run that needs only "
            "the config sets model.from_scratch=true"
        )
    try:
        model = model_class.from_pretrained(name, use_safetensors=True, trust_remote_code=False, **options)
    except (OSError, ValueError, SafetensorError) as error:
        raise ModelError(f"{name}: its weights cannot be loaded ({first_line(error)})") from None
    assert isinstance(model, PreTrainedModel)
    return model
