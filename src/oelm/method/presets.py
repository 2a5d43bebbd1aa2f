"""The named methods, written as a user would write them in a config file, and one line about each.

`spec` validates them into `PRESETS` and looks them up by name in `Method.load`. This module is plain data, so that it
can come before `spec`. A new preset is one entry in each of the two tables.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_QR = {"init": "qr", "frozen": True}
_FRESH = {"init": "orthogonal", "frozen": True}
_SLICE = {"init": "identity", "frozen": True}
_WHOLE = {"init": "identity", "frozen": True}
_DOUBLED_SLICE = {"init": "identity", "frozen": True, "scale": 2.0}


def _both(projection: dict[str, Any], **fields: Any) -> dict[str, Any]:
    """Return the fields of a method that makes Q and K in the same way."""
    return {"q": projection, "k": projection, **fields}


PRESET_FIELDS: Mapping[str, dict[str, Any]] = {
    "baseline": {},
    "oelm-freeze": _both(_QR),
    "oelm-random-orthogonal": _both(_FRESH),
    "oelm-polar": _both({"init": "polar", "frozen": True}),
    "oelm-nofreeze": _both({"init": "qr"}),
    "oelm-random": _both({"init": "gaussian", "std": 0.02, "frozen": True}),
    "oelm-random-matched": _both({"init": "gaussian", "std": "matched", "frozen": True}),
    "random-nofreeze": _both({"init": "gaussian", "std": 0.02}),
    "oelm-global": _both({"init": "qr", "scope": "global", "frozen": True}),
    "oelm-qk-ffn": _both(_QR, ffn=_QR),
    "oelm-ffn": {"ffn": _QR},
    "freeze-pretrained": _both({"init": "pretrained", "frozen": True}),
    "freeze-early": _both(
        {"frozen": True},
        layers="except-first:2",
        schedule={"kind": "unfreeze", "shares": (0.1,), "layers_each": "all"},
    ),
    "oelm-exact": _both(_QR, core="matrix"),
    "oelm-core": _both(_FRESH, core="matrix"),
    "identity-core": _both(_SLICE, core="matrix"),
    "identity-wide": _both(_SLICE, core="matrix", reach="first:2"),
    "identity-query": {"q": _DOUBLED_SLICE},
    "identity-key": {"k": _DOUBLED_SLICE},
    "identity-channel": {"down": _WHOLE, "k": _SLICE, "channel": {"init": "orthogonal"}},
    "latent-states": {"down": _WHOLE},
    "latent-frozen": {"down": _FRESH},
    "latent-trained": {"down": {"init": "orthogonal"}},
    "latent-random": {"down": {"init": "gaussian", "std": "matched", "frozen": True}},
    "lora": {"rest": "head", "adapter": {"kind": "lora"}},
    "oft": {"rest": "head", "adapter": {"kind": "oft"}},
    "bitfit": {"rest": "biases"},
    "last-layers": {"rest": "last:2"},
    "head-only": {"rest": "head"},
}

ABOUT: Mapping[str, str] = {
    "baseline": "nothing changed",
    "oelm-freeze": "Q and K orthonormal per head (QR of the weights as they are), frozen",
    "oelm-random-orthogonal": "fresh random orthogonal Q and K, frozen, whatever was loaded",
    "oelm-polar": "Q and K replaced by the nearest matrices with orthonormal rows per head, frozen",
    "oelm-nofreeze": "as oelm-freeze, trainable",
    "oelm-random": "Gaussian Q and K with std 0.02, frozen",
    "oelm-random-matched": "Gaussian Q and K with rows as long as orthonormal ones, frozen: the fair control",
    "random-nofreeze": "Gaussian Q and K with std 0.02, trainable: wipes a pretrained model's Q and K",
    "oelm-global": "one QR over all heads, frozen",
    "oelm-qk-ffn": "Q, K and both feed-forward matrices orthonormal, frozen",
    "oelm-ffn": "both feed-forward matrices orthonormal, frozen; Q and K trained",
    "freeze-pretrained": "the loaded Q and K, frozen as they are",
    "freeze-early": "Q and K of all but the first 2 layers as they are, frozen for the first tenth of the steps",
    "oelm-exact": "pretrained: QR bases frozen, a core per head trained, the model's function unchanged at step 0",
    "oelm-core": "from scratch: random orthogonal bases frozen, a core per head trained",
    "identity-core": "each head's query and key are its slice of the hidden state; a core per head trained between",
    "identity-wide": "as identity-core, with a core over all heads in the first 2 layers",
    "identity-query": "each head's query is its slice of the hidden state, times 2; Key trained",
    "identity-key": "each head's key is its slice of the hidden state, times 2; Query trained",
    "identity-channel": "latent = hidden state, each head's key its slice; all else, with a rotary channel, trained",
    "latent-states": "latent = hidden state; every head's key and value matrix trained",
    "latent-frozen": "random orthonormal rows from the hidden state to the latent, frozen; all that reads it trained",
    "latent-trained": "as latent-frozen, trained: multi-head latent attention",
    "latent-random": "Gaussian rows as long as orthonormal ones to the latent, frozen: the control of latent-frozen",
    "lora": "LoRA of rank 8 on Q and V, and the task's head; all else frozen (needs peft)",
    "oft": "OFT: rotations in blocks of 32 before Q and V, and the task's head; all else frozen (needs peft)",
    "bitfit": "BitFit: biases and the task's head; all else frozen",
    "last-layers": "the last 2 blocks and the head; all else frozen",
    "head-only": "the head alone; all else frozen",
}
