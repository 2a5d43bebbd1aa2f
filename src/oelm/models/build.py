"""Any model by name: a folder, a Hub name, or `random:NAME` for a small random one of a family."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from transformers import PreTrainedModel

from ..base.files import require_reachable
from ..config import RANDOM
from ..errors import ModelError, first_line
from .checkpoint import class_of, load
from .hf_config import read_hf_config
from .small import small_model

_WEIGHTS = ("model.safetensors", "model.safetensors.index.json")


def build_model(name: str, seed: int = 0, **options: Any) -> PreTrainedModel:
    """The model that `name` names, of the class that its config names.

    A folder that `oelm` wrote comes back operated on and verified. `options` go to transformers' `from_pretrained`.
    """
    if name.startswith(RANDOM):
        return small_model(name.removeprefix(RANDOM), seed)
    require_reachable(name)
    folder = Path(name)
    if folder.exists() and not (folder / "config.json").is_file():
        raise ModelError(f"{name}: no config.json there; name a model's folder, a Hub name, or {RANDOM}bert")
    config = read_hf_config(name)
    if getattr(config, "oelm", None) is not None:
        return load(name, **options)
    cls = class_of(config, name)
    if folder.is_dir() and not any((folder / weights).is_file() for weights in _WEIGHTS):
        raise ModelError(
            f"{name}: a config and no weights ({_WEIGHTS[0]}): was it written whole? A run takes the config alone with "
            "model.from_scratch=true"
        )
    try:
        loaded = cls.from_pretrained(name, use_safetensors=True, trust_remote_code=False, **options)
    except (OSError, ValueError, SafetensorError) as error:
        raise ModelError(f"{name}: its weights cannot be loaded ({first_line(error)})") from None
    assert isinstance(loaded, PreTrainedModel)
    return loaded
