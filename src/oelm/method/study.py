"""The original study's names for a method: `model_type`, `freeze_qk`, `ortho_method`, `freeze_ratio` of its configs."""

from __future__ import annotations

from typing import Any

from .spec import PRESETS, FeedForward, Method

# The preset that each `ortho_method` means for a frozen model of `model_type` "oelm".
_PRESET_OF_ORTHO_METHOD = {
    "qr": "oelm-freeze",
    "orthogonal": "oelm-freeze",
    "headwise": "oelm-freeze",
    "global": "oelm-global",
    "normal": "oelm-random",
    "random": "oelm-random",
}

# The study's `freeze_ratio` for Q and K alone: what they are of its GPT's other parameters. As a share of the blocks,
# which a method's own `freeze_ratio` is, it would be less than half of Q and K.
_QK_ALONE = 0.075


def study_method(
    model_type: Any = "oelm", freeze_qk: Any = None, ortho_method: Any = None, freeze_ratio: Any = None
) -> Method:
    """Return the method that the study's names mean; raise a ValueError for values that it does not have."""
    if model_type not in ("gpt", "oelm"):
        raise ValueError(f"model_type {model_type!r}: use 'gpt' or 'oelm' (any other model goes into model.name)")
    if not isinstance(freeze_qk, bool | None):
        raise ValueError(f"freeze_qk {freeze_qk!r}: use true or false")
    if model_type == "gpt":
        if freeze_qk or ortho_method is not None or freeze_ratio is not None:
            raise ValueError(
                "model_type 'gpt' is the plain model: not allowed with freeze_qk, ortho_method or freeze_ratio"
            )
        return PRESETS["baseline"]
    # A list, so that a value of any type can be looked for: it may not be hashable.
    if ortho_method is not None and ortho_method not in list(_PRESET_OF_ORTHO_METHOD):
        raise ValueError(f"ortho_method {ortho_method!r}: use one of {', '.join(_PRESET_OF_ORTHO_METHOD)}")
    frozen = PRESETS[_PRESET_OF_ORTHO_METHOD[ortho_method or "qr"]]
    if freeze_ratio is not None:
        return _frozen_share(frozen, freeze_qk, freeze_ratio)
    if freeze_qk is False:
        trainable = {side: getattr(frozen, side).model_copy(update={"frozen": False}) for side in ("q", "k")}
        return frozen.model_copy(update=trainable)
    return frozen


def _frozen_share(frozen: Method, freeze_qk: bool | None, freeze_ratio: Any) -> Method:
    """Return the method that freezes a share: Q and K, and then feed-forward matrices that are made in the same way."""
    if freeze_qk is False:
        raise ValueError(f"freeze_ratio {freeze_ratio!r} freezes Q and K first: not allowed with freeze_qk: false")
    if not isinstance(freeze_ratio, float) or not 0 < freeze_ratio < 1:
        raise ValueError(f"freeze_ratio {freeze_ratio!r}: use {_QK_ALONE} for Q and K alone, or a share below 1")
    if freeze_ratio == _QK_ALONE:
        return frozen
    ffn = FeedForward.model_validate({"init": frozen.q.init, "std": frozen.q.std, "frozen": True})
    return frozen.model_copy(update={"ffn": ffn, "freeze_ratio": freeze_ratio})
