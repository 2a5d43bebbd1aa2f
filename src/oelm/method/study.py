"""The original study's names for a method: `model_type`, `freeze_qk` and `ortho_method`, as its configs have them."""

from __future__ import annotations

from typing import Any

from .spec import PRESETS, Method

# The preset that each `ortho_method` means for a frozen model of `model_type` "oelm".
_PRESET_OF_ORTHO_METHOD = {
    "qr": "oelm-freeze",
    "orthogonal": "oelm-freeze",
    "headwise": "oelm-freeze",
    "global": "oelm-global",
    "normal": "oelm-random",
    "random": "oelm-random",
}


def study_method(model_type: Any = "oelm", freeze_qk: Any = None, ortho_method: Any = None) -> Method:
    """Return the method that the study's names mean; raise a ValueError for values that it does not have."""
    if model_type not in ("gpt", "oelm"):
        raise ValueError(f"model_type {model_type!r}: use 'gpt' or 'oelm' (any other model goes into model.name)")
    if not isinstance(freeze_qk, bool | None):
        raise ValueError(f"freeze_qk {freeze_qk!r}: use true or false")
    if model_type == "gpt":
        if freeze_qk or ortho_method is not None:
            raise ValueError("model_type 'gpt' is the plain model: not allowed with freeze_qk or ortho_method")
        return PRESETS["baseline"]
    # A list, so that a value of any type can be looked for: it may not be hashable.
    if ortho_method is not None and ortho_method not in list(_PRESET_OF_ORTHO_METHOD):
        raise ValueError(f"ortho_method {ortho_method!r}: use one of {', '.join(_PRESET_OF_ORTHO_METHOD)}")
    frozen = PRESETS[_PRESET_OF_ORTHO_METHOD[ortho_method or "qr"]]
    if freeze_qk is False:
        trainable = {side: getattr(frozen, side).model_copy(update={"frozen": False}) for side in ("q", "k")}
        return frozen.model_copy(update=trainable)
    return frozen
