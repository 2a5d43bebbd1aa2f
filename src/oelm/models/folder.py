"""Checks of a model's folder before transformers reads it: nothing in it may lead to other files or code."""

from __future__ import annotations

import json
from os import PathLike
from pathlib import Path
from typing import Any

from ..errors import CheckpointError

_ADAPTER = "adapter_config.json"


def require_own_weights(path: str | PathLike[str], config: Any, subfolder: str | None = None) -> None:
    """Raise where a folder's weights would come from elsewhere than safetensors files in the folder itself.

    transformers adds the adapter of an adapter_config.json, follows the paths in an index, and takes the files and
    the attention code that a config names. A Hub name is left to the Hub's library, which keeps to its own folder.
    """
    implementation = getattr(config, "_attn_implementation", None)
    if isinstance(implementation, str) and "/" in implementation:
        raise CheckpointError(
            f"{path}: its config names attention code to be fetched ({implementation!r}): remove that"
        )
    if getattr(config, "transformers_weights", None) is not None:
        raise CheckpointError(
            f"{path}: its config names the file of its weights (transformers_weights); remove that, and name the file "
            "model.safetensors"
        )
    folder = Path(path)
    if not folder.is_dir():
        return
    for place in dict.fromkeys((folder, folder / (subfolder or ""))):
        if (place / _ADAPTER).exists():
            raise CheckpointError(
                f"{place}: holds an {_ADAPTER} beside a whole model, whose adapter transformers would add. Remove that "
                "file; to use the adapter, load the model first and then PeftModel.from_pretrained"
            )
        for index in sorted(place.glob("*.safetensors.index*.json")):
            _require_index(index)


def stored_bytes(path: str | PathLike[str]) -> int:
    """Return the size of all safetensors files in a folder, 0 for a Hub name."""
    return sum(file.stat().st_size for file in Path(path).rglob("*.safetensors"))


def _require_index(index: Path) -> None:
    """Raise unless an index names nothing but safetensors files beside it."""
    try:
        content = json.loads(index.read_text(encoding="utf-8"))
        names = content["weight_map"].values()
        well_formed = isinstance(content["metadata"], dict) and all(isinstance(name, str) for name in names)
    except (OSError, ValueError, RecursionError, KeyError, TypeError, AttributeError):
        well_formed, names = False, ()
    if not well_formed:
        raise CheckpointError(f"{index}: is damaged; it should map each tensor to its file")
    for name in names:
        if not name.endswith(".safetensors") or name in (".", "..") or Path(name).name != name or "\0" in name:
            raise CheckpointError(f"{index}: names {name!r}, which is no safetensors file in this folder")
